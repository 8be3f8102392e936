r"""Inference in state-space models by weighted particles (sequential Monte Carlo).

.. math:: x_0 \sim \mu, \qquad x_t \sim f(\cdot \mid x_{t-1}), \qquad y_t \sim g(\cdot \mid x_t)

A model is anything with the three methods of `StateSpaceModel`, bound to the B sequences it is asked about: what f and g may depend on beside
the state, such as earlier observations, is its own business. `filter` draws N particles for each sequence, all B x N at once, and keeps for each
step states, weights, ancestors and transition densities: O(T B N d) memory, no path is ever copied. What is wanted of the past is
read off that: `genealogy`, `fixed_lag`, `backward_simulation`. Sequences may differ in length: past its end nothing is observed and
nothing resampled.

The letters: T steps, B sequences, N particles, M paths, d entries of a state. Results have time first. All random numbers are from the
generator passed in, drawn on its device; with `Streams`, one for each sequence, what is found of a sequence does not depend on those beside it.
Nothing here needs gradients.

References: Gordon, Salmond and Smith (1993), the bootstrap filter; Pitt and Shephard (1999), the auxiliary filter; Godsill, Doucet and West (2004),
backward simulation; Kitagawa (1996), fixed lags. Weights are g(y_t | x_t) after a resampling, and the old weights times it where there was none;
Algorithm 1 of Jarboui and Perchet (2021) multiplies with weights that resampling has already spent.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

Resampling = Literal["systematic", "stratified", "multinomial"]
_AHEAD = 4096  # numbers that a stream draws at once


class Streams:
    """Random numbers for B sequences, each from a generator of its own. They are drawn for some requests ahead, as one for each sequence would take time."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.generators = list(generators)
        self._ahead: dict[tuple[Any, ...], Iterator[Tensor]] = {}

    def fill(self, numbers: Tensor, draw: Callable[[Tensor, torch.Generator], object]) -> Tensor:
        """`draw` called in place with the rows of (B, ...) numbers and their generators."""
        if len(numbers) != len(self.generators):
            raise ValueError(f"`generators` must be one for each of {len(numbers)} sequences, but are {len(self.generators)} instead.")
        for row, generator in zip(numbers, self.generators, strict=True):
            draw(row, generator)
        return numbers

    def draw(self, kind: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Of `size`, by the method of a tensor called `kind`: "normal_" or "uniform_"."""
        key = (kind, size, dtype)
        numbers = next(self._ahead.get(key, iter(())), None)
        if numbers is None:
            block = torch.empty(size[0], max(1, _AHEAD // max(math.prod(size[1:]), 1)), *size[1:], dtype=dtype)
            self._ahead[key] = iter(self.fill(block, lambda row, own: getattr(row, kind)(generator=own)).unbind(1))
            numbers = next(self._ahead[key])
        return numbers


Randomness = torch.Generator | Streams


def normal(size: tuple[int, ...], like: Tensor, generator: Randomness) -> Tensor:
    """(B, ...) standard normal numbers, of the type of `like`."""
    if isinstance(generator, Streams):
        return generator.draw("normal_", size, like.dtype).to(like.device)
    return torch.randn(size, dtype=like.dtype, generator=generator, device=generator.device).to(like.device)


def uniform(size: tuple[int, ...], like: Tensor, generator: Randomness) -> Tensor:
    """(B, ...) numbers from [0, 1), of the type of `like`."""
    if isinstance(generator, Streams):
        return generator.draw("uniform_", size, like.dtype).to(like.device)
    return torch.rand(size, dtype=like.dtype, generator=generator, device=generator.device).to(like.device)


class Density(ABC):
    """A density over states for each particle: B x N of them."""

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """(B, N, d)."""

    @abstractmethod
    def sample(self, generator: Randomness) -> Tensor:
        """(B, N, d): one state of each."""

    @abstractmethod
    def log_prob(self, states: Tensor) -> Tensor:
        """(B, N, d) -> (B, N): each state under its own density."""

    @abstractmethod
    def log_prob_of_each(self, states: Tensor) -> Tensor:
        """(B, M, d) -> (B, M, N): each state under the density of each particle of its sequence."""

    @abstractmethod
    def pick(self, particles: Tensor) -> Density:
        """(B, N) -> the densities of these particles."""


class DiagonalGaussian(Density):
    """Independent Gaussian entries.

    Args:
        mean: (B, N, d).
        scale: standard deviations, of any shape that broadcasts to that of `mean`; only as much is kept.
    """

    def __init__(self, mean: Tensor, scale: Tensor) -> None:
        self._mean, self.scale = mean, scale

    @property
    def mean(self) -> Tensor:
        return self._mean

    def sample(self, generator: Randomness) -> Tensor:
        return torch.addcmul(self.mean, self.scale.expand_as(self.mean), normal(tuple(self.mean.shape), self.mean, generator))

    def log_prob(self, states: Tensor) -> Tensor:
        normal = ((states - self.mean) / self.scale).square().sum(-1)
        return -0.5 * normal - self._log_norm()

    def log_prob_of_each(self, states: Tensor) -> Tensor:
        """As one product of matrices: (x - m)^2 / s^2 = x^2 / s^2 - 2 x m / s^2 + m^2 / s^2, about the middle of the means to lose no digits."""
        centre = self.mean.mean(1, keepdim=True)
        precision = self.scale.expand_as(self.mean).reciprocal().square()
        mean, states = self.mean - centre, states - centre
        features = torch.cat([states.square(), states], dim=2)  # (B, M, 2 d)
        weights = torch.cat([-0.5 * precision, precision * mean], dim=2)  # (B, N, 2 d)
        constant = -0.5 * (precision * mean.square()).sum(2) - self._log_norm()
        return torch.baddbmm(constant.expand(len(mean), -1).unsqueeze(1), features, weights.mT)

    def pick(self, particles: Tensor) -> DiagonalGaussian:
        scale = self.scale
        return DiagonalGaussian(_pick(self.mean, particles), _pick(scale, particles) if scale.dim() == 3 and scale.shape[1] > 1 else scale)

    def _log_norm(self) -> Tensor:
        return self.scale.expand_as(self.mean).log().sum(-1) + self.mean.shape[-1] / 2 * math.log(2 * math.pi)


class StateSpaceModel(Protocol):
    """What particles need to know of a model, about B sequences at once."""

    def initial(self, num_particles: int) -> Density:
        """p(x_0), as a B x `num_particles` density."""

    def transition(self, t: int, states: Tensor) -> Density:
        """p(x_t | x_{t-1}) for (B, N, d) states x_{t-1}."""

    def log_evidence(self, t: int, states: Tensor) -> Tensor:
        """(B, N) log p(y_t | x_t) for (B, N, d) states x_t; zeros where y_t is missing. Past the end of a sequence anything."""


# A better guess than the transition of where y_t is: from the step, the (B, N, d) states before (none at the first step) and the transitions from
# them to the density to draw from; a torch module may be one.
Proposal = Callable[[int, Tensor | None, Density], Density]
# (B, N) an approximate log p(y_t | x_{t-1}), from the same; particles are resampled by it before they move.
LookAhead = Callable[[int, Tensor, Density], Tensor]


class Cloud(NamedTuple):
    """Weighted states. states: (..., B, N, d); log_weights: (B, N) or (..., B, N), each cloud's weights summing to 1."""

    states: Tensor
    log_weights: Tensor

    @property
    def mean(self) -> Tensor:
        """(..., B, d)."""
        return (self.log_weights.exp().unsqueeze(-1) * self.states).sum(-2)

    @property
    def variance(self) -> Tensor:
        """(..., B, d)."""
        return (self.log_weights.exp().unsqueeze(-1) * (self.states - self.mean.unsqueeze(-2)).square()).sum(-2)


class Particles(NamedTuple):
    """All that a filter has seen.

    states: (T, B, N, d).
    log_weights: (T, B, N) of p(x_t | y_0:t), before any resampling, each row's weights summing to 1.
    ancestors: (T, B, N) the particle of the step before that each comes from; itself where nothing was resampled.
    transitions: p(x_{t+1} | x_t) of the particles of step t, for each step but the last.
    log_evidence: (T, B) log of the estimate of p(y_t | y_0:t-1); 0 past the end.
    effective_size: (T, B) 1 / sum of squared weights.
    lengths: (B,).
    """

    states: Tensor
    log_weights: Tensor
    ancestors: Tensor
    transitions: list[Density]
    log_evidence: Tensor
    effective_size: Tensor
    lengths: Tensor

    @property
    def log_likelihood(self) -> Tensor:
        """(B,) log of an unbiased estimate of p(y)."""
        return self.log_evidence.sum(0)

    @property
    def last_log_weights(self) -> Tensor:
        """(B, N) at the last step of each sequence; those of the last step of all, as nothing changes past the end of a sequence."""
        _, num_sequences, num_particles = self.log_weights.shape
        even = self.log_weights.new_full((num_sequences, num_particles), -math.log(num_particles))
        return self.log_weights[-1] if len(self.log_weights) else even

    @property
    def filtered(self) -> Cloud:
        """p(x_t | y_0:t)."""
        return Cloud(self.states, self.log_weights)


@torch.no_grad()
def filter(
    model: StateSpaceModel,
    lengths: Tensor,
    num_particles: int,
    generator: Randomness,
    *,
    resampling: Resampling = "systematic",
    threshold: float = 0.5,
    proposal: Proposal | None = None,
    look_ahead: LookAhead | None = None,
) -> Particles:
    """Runs the particles along the sequences, in O(T B N d) beside what the model costs.

    Args:
        model: bound to B sequences.
        lengths: (B,) their lengths.
        num_particles: N.
        generator: of all random numbers.
        resampling: how ancestors are drawn: "systematic" (least noise), "stratified" or "multinomial".
        threshold: resample where the effective number of particles is below this share of N: 0 for never, 1 for always.
        proposal: draw states from this instead of the transition; the weights make up for it.
        look_ahead: resample by the weights times this, for example `auxiliary(model)`; the weights make up for it.
    """
    if num_particles < 1:
        raise ValueError(f"`num_particles` must be positive, but is {num_particles} instead.")
    if resampling not in get_args(Resampling):
        raise ValueError(f"`resampling` must be one of {', '.join(get_args(Resampling))}, but is {resampling!r} instead.")
    if not 0 <= threshold <= 1:
        raise ValueError(f"`threshold` must be from 0 to 1, but is {threshold} instead.")
    num_steps = int(lengths.max()) if len(lengths) else 0
    density = model.initial(num_particles)
    states = density.mean  # for its type; the first step draws
    shape = (num_steps, *states.shape[:2])
    if shape[1:] != (len(lengths), num_particles):
        raise ValueError(f"`initial` must give {(len(lengths), num_particles)} densities, sequences by particles, but gives {tuple(shape[1:])} instead.")
    device = states.device
    lengths = lengths.to(device)
    every_state = states.new_empty(*shape, states.shape[2])
    every_weight, log_evidence, effective_size = states.new_empty(shape), states.new_empty(shape[:2]), states.new_empty(shape[:2])
    itself = torch.arange(num_particles, device=device).expand(shape[1:])
    every_ancestor = itself.repeat(num_steps, 1, 1)
    transitions: list[Density] = []
    log_weights = states.new_full(shape[1:], -math.log(num_particles))
    even = log_weights
    failed = torch.full_like(lengths, num_steps)  # the first step at which all weights vanished
    undefined = torch.zeros_like(lengths, dtype=torch.bool)
    for t in range(num_steps):
        active = (t < lengths).unsqueeze(1)
        parents = None
        if t > 0:
            density = model.transition(t, states)
            transitions.append(density)
            ahead = torch.zeros_like(log_weights) if look_ahead is None else torch.where(active, look_ahead(t, states, density), 0.0)
            # If no particle looks promising at all, looking ahead says nothing.
            ahead = torch.where((log_weights + ahead).logsumexp(1, keepdim=True).isfinite(), ahead, 0.0)
            first_stage = log_weights + ahead
            total = first_stage.logsumexp(1, keepdim=True)
            first_stage = first_stage - total
            fresh = active & (_effective_size(first_stage).unsqueeze(1) < threshold * num_particles)
            ancestors = torch.where(fresh, resample(first_stage, num_particles, generator, resampling), itself)
            every_ancestor[t] = ancestors
            log_weights = torch.where(fresh, even + total - ahead.gather(1, ancestors), log_weights)
            density, parents = density.pick(ancestors), _pick(states, ancestors) if proposal is not None else None
        if proposal is None:
            states = density.sample(generator)
            gained = model.log_evidence(t, states)
        else:
            proposed = proposal(t, parents, density)
            states = proposed.sample(generator)
            gained = model.log_evidence(t, states) + density.log_prob(states) - proposed.log_prob(states)
        log_weights = log_weights + torch.where(active, gained, 0.0)
        evidence = log_weights.logsumexp(1, keepdim=True)
        lost = ~evidence.isfinite()
        failed = torch.where(lost.squeeze(1), failed.clamp(max=t), failed)
        undefined |= evidence.squeeze(1).isnan() | (evidence.squeeze(1) == torch.inf)
        log_weights = torch.where(lost, even, log_weights - evidence)
        every_state[t], every_weight[t] = states, log_weights
        log_evidence[t] = torch.where(active, evidence, 0.0).squeeze(1)
        effective_size[t] = _effective_size(log_weights)
    _refuse_vanished(failed, undefined, num_steps, num_particles)
    return Particles(every_state, every_weight, every_ancestor, transitions, log_evidence, effective_size, lengths)


def auxiliary(model: StateSpaceModel) -> LookAhead:
    """The auxiliary filter's look ahead: the evidence of y_t at the mean of the transition (Pitt and Shephard, 1999)."""
    return lambda t, states, transition: model.log_evidence(t, transition.mean)


def resample(log_weights: Tensor, num_draws: int, generator: Randomness, method: Resampling = "systematic") -> Tensor:
    """(B, N) normalised -> (B, num_draws): particles, each drawn so often on average as its weight says; never one of weight zero."""
    size = (len(log_weights), 1 if method == "systematic" else num_draws)
    levels = uniform(size, log_weights, generator)
    if method != "multinomial":
        levels = (torch.arange(num_draws, device=log_weights.device) + levels) / num_draws
    return _invert(log_weights.exp(), levels)


def genealogy(particles: Particles, num_paths: int | None = None, generator: Randomness | None = None) -> Cloud:
    """Whole paths of p(x_0:T | y_0:T), (T, B, M, d), traced back along the ancestors; past the end of a sequence they mean nothing.

    All N with the last weights, or `num_paths` drawn by them, which then weigh the same. Far back all paths are one: O(T M).
    """
    last = particles.last_log_weights
    if num_paths is None:
        index, log_weights = torch.arange(last.shape[1], device=last.device).expand_as(last), last
    else:
        if generator is None:
            raise ValueError("`generator` must be given to draw `num_paths` paths.")
        index, log_weights = resample(last, num_paths, generator), last.new_full((len(last), num_paths), -math.log(num_paths))
    paths = particles.states.new_empty(len(particles.states), *index.shape, particles.states.shape[3])
    for t in range(len(paths) - 1, -1, -1):
        paths[t] = _pick(particles.states[t], index)
        index = particles.ancestors[t].gather(1, index)
    return Cloud(paths, log_weights)


def fixed_lag(particles: Particles, lag: int) -> Cloud:
    """p(x_t | y_0:t+lag) for each step, (T, B, N, d): the ancestors, `lag` steps back, of the particles there. O(lag T B N)."""
    if lag < 0:
        raise ValueError(f"`lag` must not be negative, but is {lag} instead.")
    num_steps = len(particles.states)
    lag = min(lag, num_steps - 1)
    steps = torch.arange(num_steps, device=particles.states.device)
    itself = torch.arange(particles.states.shape[2], device=particles.states.device)
    index = itself.expand_as(particles.ancestors)
    for distance in range(lag, 0, -1):
        later = torch.cat([particles.ancestors[distance:], itself.expand(distance, *particles.ancestors.shape[1:])])
        index = later.gather(2, index)
    states = particles.states.gather(2, index.unsqueeze(3).expand_as(particles.states))
    return Cloud(states, particles.log_weights[(steps + lag).clamp(max=num_steps - 1)])


@torch.no_grad()
def backward_simulation(particles: Particles, num_paths: int, generator: Randomness) -> Cloud:
    """Paths drawn from p(x_0:T | y_0:T), (T, B, M, d), all of the same weight: particles of each step are chosen anew, backwards in time, by
    their weight times the density of the step to the one chosen after (FFBSi). Past the end of a sequence they mean nothing. O(T B M N d)."""
    num_steps, num_sequences, _, size = particles.states.shape
    if num_paths < 1:
        raise ValueError(f"`num_paths` must be positive, but is {num_paths} instead.")
    paths = particles.states.new_empty(num_steps, num_sequences, num_paths, size)
    order = torch.arange(num_paths, device=paths.device)
    every_level = uniform((num_sequences, num_steps, num_paths), paths, generator)  # from the first step on, so that its place in time alone matters
    for t in range(num_steps - 1, -1, -1):
        logits = particles.log_weights[t].unsqueeze(1)  # (B, 1, N)
        levels = every_level[:, t]
        levels = torch.where(particles.lengths.eq(t + 1).unsqueeze(1), (order + levels) / num_paths, levels)  # stratified at the end
        if t < num_steps - 1:
            following = particles.transitions[t].log_prob_of_each(paths[t + 1])
            logits = logits + torch.where((t + 1 < particles.lengths).view(-1, 1, 1), following, 0.0)
        index = _invert(logits.softmax(2).expand(-1, num_paths, -1), levels.unsqueeze(2)).squeeze(2)
        paths[t] = _pick(particles.states[t], index)
    return Cloud(paths, paths.new_full((num_sequences, num_paths), -math.log(num_paths)))


@torch.no_grad()
def predict(model: StateSpaceModel, particles: Particles, steps: int, generator: Randomness, *, after: int | None = None) -> Cloud:
    """p(x_{t+steps} | y_0:t) for each step t, (T, B, N, d), or for t = `after` alone, (B, N, d). The row of the last step of a sequence is its future.

    The model is asked for transitions up to step T - 1 + `steps`, or `after` + `steps`.
    """
    if steps < 1:
        raise ValueError(f"`steps` must be positive, but is {steps} instead.")

    def ahead(t: int) -> Tensor:
        states = particles.states[t]
        for k in range(1, steps + 1):
            density = particles.transitions[t] if k == 1 and t < len(particles.transitions) else model.transition(t + k, states)
            states = density.sample(generator)
        return states

    if after is not None:
        return Cloud(ahead(after), particles.log_weights[after])
    return Cloud(torch.stack([ahead(t) for t in range(len(particles.states))]), particles.log_weights)


def _pick(values: Tensor, particles: Tensor) -> Tensor:
    """(B, N, d), (B, M) -> (B, M, d)."""
    return values.gather(1, particles.unsqueeze(2).expand(-1, -1, values.shape[2]))


def _effective_size(log_weights: Tensor) -> Tensor:
    return (-(2 * log_weights).logsumexp(-1)).exp()


def _invert(weights: Tensor, levels: Tensor) -> Tensor:
    """(..., N) weights, (..., M) from [0, 1) -> (..., M): where the cumulative weights first exceed it."""
    cumulative = weights.cumsum(-1)
    cumulative = cumulative / cumulative[..., -1:]
    below_one = 1 - torch.finfo(weights.dtype).eps / 2  # (N - 1 + u) / N may round to 1
    return torch.searchsorted(cumulative, levels.clamp(max=below_one).contiguous(), right=True)


def _refuse_vanished(failed: Tensor, undefined: Tensor, num_steps: int, num_particles: int) -> None:
    if not bool((failed < num_steps).any()):
        return
    sequence = int(failed.argmin())
    t = int(failed[sequence])
    if bool(undefined[sequence]):
        raise ValueError(f"`log_evidence` must be numbers below infinity, but is not at step {t} of sequence {sequence}. Are there NaN in parameters or data?")
    raise ValueError(
        f"Particles must be able to explain what is observed, but the weights of all {num_particles} vanish at step {t} of sequence {sequence}. "
        "Use more particles, or a wider emission."
    )
