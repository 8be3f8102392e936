r"""Inference in state-space models with weighted particles (sequential Monte Carlo).

.. math:: x_0 \sim \mu, \qquad x_t \sim f(\cdot \mid x_{t-1}), \qquad y_t \sim g(\cdot \mid x_t)

A model is any object with the three methods of `StateSpaceModel`. It is bound to B sequences, so f and g may depend on
more than the state, for example on earlier observations. The functions of this module are:

- `filter` runs N particles along each sequence, all B x N of them at once, and estimates the likelihood without bias.
  By default it is the bootstrap filter. With a `Proposal` it is a guided filter, and with `look_ahead=auxiliary(model)`
  the auxiliary filter.
- `backward_simulation` draws whole paths given the whole sequence. `genealogy` is cheaper, but its paths coincide far
  back.
- `fixed_lag` smooths each state with the observations up to `lag` steps after it.
- `predict` draws states some steps ahead.

`filter` keeps the states, weights, ancestors and transition densities of every step and never copies a path, so its
memory is O(T B N d). Sequences may differ in length: past the end of a sequence nothing is observed and nothing is
resampled.

T is the number of steps, B of sequences, N of particles, M of paths and d of entries of a state. Time is the first
dimension of all results. All random numbers come from the generator that is passed in and are drawn on its device. With
`Streams`, which holds one generator for each sequence, the result for a sequence does not depend on the other sequences
of the batch. No function computes gradients.

The weights are g(y_t | x_t) after a resampling step, and the previous weights times g(y_t | x_t) otherwise. Algorithm 1
of Jarboui and Perchet (2021) multiplies by weights that resampling has already used.

Example:
    >>> import torch
    >>> from lightning_hmm.distributions.densities import DiagonalGaussian
    >>> from lightning_hmm.inference import particle
    >>> class RandomWalk:  # observed at 1, 2 and 3, with noise
    ...     def initial(self, num_particles):
    ...         return self.transition(0, torch.zeros(1, num_particles, 1))
    ...     def transition(self, t, states):
    ...         return DiagonalGaussian(states, torch.ones(1))
    ...     def log_obs(self, t, states):
    ...         return -(states - (t + 1.0)).square().sum(-1) / 2
    >>> generator = torch.Generator().manual_seed(0)
    >>> found = particle.filter(RandomWalk(), lengths=torch.tensor([3]), num_particles=100, generator=generator)
    >>> found.states.shape  # steps, sequences, particles, entries of a state
    torch.Size([3, 1, 100, 1])
    >>> paths = particle.backward_simulation(found, num_paths=10, generator=generator)
    >>> paths.mean.shape
    torch.Size([3, 1, 1])

References:
    Gordon, Salmond, Smith: Novel approach to nonlinear/non-Gaussian Bayesian state estimation, 1993: the bootstrap
        filter.
    Pitt, Shephard: Filtering via simulation: auxiliary particle filters, 1999.
    Godsill, Doucet, West: Monte Carlo smoothing for nonlinear time series, 2004: backward simulation.
    Kitagawa: Monte Carlo filter and smoother for non-Gaussian nonlinear state space models, 1996: fixed lags.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

Resampling = Literal["systematic", "stratified", "multinomial"]
_BLOCK = 4096  # random numbers that a stream draws at once


class Streams:
    """Random numbers for B sequences, each from a generator of its own.

    Numbers are drawn in blocks of several requests, because a call of each generator for each request would take too
    long.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self.generators = list(generators)
        self._blocks: dict[tuple[Any, ...], Iterator[Tensor]] = {}

    def fill(self, numbers: Tensor, draw: Callable[[Tensor, torch.Generator], object]) -> Tensor:
        """Calls `draw`, which works in place, with each row of (B, ...) numbers and the generator of that row."""
        if len(numbers) != len(self.generators):
            raise ValueError(
                f"`generators` must be one for each of {len(numbers)} sequences, "
                f"but are {len(self.generators)} instead."
            )
        for row, generator in zip(numbers, self.generators, strict=True):
            draw(row, generator)
        return numbers

    def draw(self, method: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Random numbers of shape `size`, drawn with the tensor method "normal_" or "uniform_"."""
        key = (method, size, dtype)
        numbers = next(self._blocks.get(key, iter(())), None)
        if numbers is None:
            block = torch.empty(size[0], max(1, _BLOCK // max(math.prod(size[1:]), 1)), *size[1:], dtype=dtype)
            filled = self.fill(block, lambda row, own: getattr(row, method)(generator=own))
            self._blocks[key] = iter(filled.unbind(1))
            numbers = next(self._blocks[key])
        return numbers


Randomness = torch.Generator | Streams


def normal(size: tuple[int, ...], like: Tensor, generator: Randomness) -> Tensor:
    """(B, ...) standard normal numbers with the dtype and device of `like`."""
    if isinstance(generator, Streams):
        return generator.draw("normal_", size, like.dtype).to(like.device)
    return torch.randn(size, dtype=like.dtype, generator=generator, device=generator.device).to(like.device)


def uniform(size: tuple[int, ...], like: Tensor, generator: Randomness) -> Tensor:
    """(B, ...) numbers from [0, 1) with the dtype and device of `like`."""
    if isinstance(generator, Streams):
        return generator.draw("uniform_", size, like.dtype).to(like.device)
    return torch.rand(size, dtype=like.dtype, generator=generator, device=generator.device).to(like.device)


class Density(ABC):
    """B x N densities over states, one for each particle. The families are in `distributions.densities`."""

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """(B, N, d) the mean of each density."""

    @abstractmethod
    def sample(self, generator: Randomness) -> Tensor:
        """(B, N, d) one state from each density."""

    @abstractmethod
    def log_prob(self, states: Tensor) -> Tensor:
        """(B, N, d) -> (B, N): the log-density of each state under its own density."""

    @abstractmethod
    def log_prob_of_each(self, states: Tensor) -> Tensor:
        """(B, M, d) -> (B, M, N): the log-density of each state under the density of each particle of its sequence."""

    @abstractmethod
    def pick(self, particles: Tensor) -> Density:
        """(B, M) numbers of particles -> the B x M densities of these particles."""


class StateSpaceModel(Protocol):
    """A model that is bound to B sequences, as `filter` and `predict` use it."""

    def initial(self, num_particles: int) -> Density:
        """p(x_0) as B x `num_particles` densities."""

    def transition(self, t: int, states: Tensor) -> Density:
        """p(x_t | x_{t-1}) for (B, N, d) states x_{t-1}."""

    def log_obs(self, t: int, states: Tensor) -> Tensor:
        """(B, N) log p(y_t | x_t) for (B, N, d) states x_t.

        It must be zero where y_t is missing. Past the end of a sequence its values are ignored.
        """


# Returns the density that states are drawn from instead of the transition, for example an approximation of p(x_t |
# x_{t-1}, y_t). Arguments: the step, the (B, N, d) states before it (None at the first step) and the transition
# densities from these states.
Proposal = Callable[[int, Tensor | None, Density], Density]
# Returns (B, N) an approximation of log p(y_t | x_{t-1}), by which particles are resampled before they move. Arguments:
# as above.
LookAhead = Callable[[int, Tensor, Density], Tensor]


class WeightedParticles(NamedTuple):
    """States with normalized weights, which approximate a distribution.

    states: (..., B, N, d).
    log_weights: (B, N) or (..., B, N). The weights of the N particles of a sequence sum to 1.
    """

    states: Tensor
    log_weights: Tensor

    @property
    def mean(self) -> Tensor:
        """(..., B, d)."""
        return (self.log_weights.exp().unsqueeze(-1) * self.states).sum(-2)

    @property
    def variance(self) -> Tensor:
        """(..., B, d)."""
        deviations = self.states - self.mean.unsqueeze(-2)
        return (self.log_weights.exp().unsqueeze(-1) * deviations.square()).sum(-2)


class Particles(NamedTuple):
    """The result of `filter`.

    states: (T, B, N, d).
    log_weights: (T, B, N) weights of p(x_t | y_0:t) before resampling. The weights of the N particles sum to 1.
    ancestors: (T, B, N) for each particle, the number of the particle of the step before that it comes from. Where
        nothing was resampled, it is the particle's own number.
    transitions: p(x_{t+1} | x_t) of the particles of step t, for each step but the last.
    log_increments: (T, B) logarithms of the estimates of p(y_t | y_0:t-1), and 0 past the end of a sequence.
    effective_size: (T, B) 1 / sum of squared weights.
    lengths: (B,).
    """

    states: Tensor
    log_weights: Tensor
    ancestors: Tensor
    transitions: list[Density]
    log_increments: Tensor
    effective_size: Tensor
    lengths: Tensor

    @property
    def log_likelihood(self) -> Tensor:
        """(B,) logarithm of an unbiased estimate of p(y)."""
        return self.log_increments.sum(0)

    @property
    def last_log_weights(self) -> Tensor:
        """(B, N) the weights at the last step of each sequence.

        They are those of step T - 1, because the weights do not change past the end of a sequence.
        """
        _, num_sequences, num_particles = self.log_weights.shape
        even = self.log_weights.new_full((num_sequences, num_particles), -math.log(num_particles))
        return self.log_weights[-1] if len(self.log_weights) else even

    @property
    def filtered(self) -> WeightedParticles:
        """p(x_t | y_0:t)."""
        return WeightedParticles(self.states, self.log_weights)


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
    """Runs particles along the sequences. The cost is O(T B N d) in addition to that of the model.

    Args:
        model: Model that is bound to B sequences.
        lengths: (B,) lengths of the sequences.
        num_particles: N, the number of particles for each sequence.
        generator: Source of all random numbers.
        resampling: How ancestors are drawn: "systematic" (least noise), "stratified" or "multinomial".
        threshold: Particles are resampled where their effective number is below this fraction of N: 0 for never, 1 for
            always.
        proposal: Density to draw states from instead of the transition. The weights correct for the difference.
        look_ahead: Factor of the weights by which particles are resampled, for example `auxiliary(model)`. The weights
            correct for it.

    Returns:
        The states (T, B, N, d) and log-weights (T, B, N) of all particles, and estimates of the log-likelihood.
    """
    _check_options(num_particles, resampling, threshold)
    density = model.initial(num_particles)
    states = density.mean  # for its shape and dtype; the first step draws
    found = _allocate(states, lengths, num_particles)
    lengths, failures = found.lengths, _Failures(len(states), states.device)
    even = log_weights = torch.full_like(states[..., 0], -math.log(num_particles))
    for t in range(len(found.states)):
        active = (t < lengths).unsqueeze(1)
        parents = None
        if t > 0:
            density = model.transition(t, states)
            found.transitions.append(density)
            ahead = torch.zeros_like(even)
            if look_ahead is not None:
                ahead = torch.where(active, look_ahead(t, states, density), 0.0)
            ancestors, log_weights = _resample_some(log_weights, ahead, active, threshold, generator, resampling)
            found.ancestors[t] = ancestors
            density, parents = density.pick(ancestors), pick(states, ancestors) if proposal is not None else None
        if proposal is None:
            states = density.sample(generator)
            log_factors = model.log_obs(t, states)
        else:
            proposed = proposal(t, parents, density)
            states = proposed.sample(generator)
            log_factors = model.log_obs(t, states) + density.log_prob(states) - proposed.log_prob(states)
        log_weights = log_weights + torch.where(active, log_factors, 0.0)
        increment = log_weights.logsumexp(1, keepdim=True)
        failures.note(t, increment.squeeze(1))
        log_weights = torch.where(increment.isfinite(), log_weights - increment, even)
        found.states[t], found.log_weights[t] = states, log_weights
        found.log_increments[t] = torch.where(active, increment, 0.0).squeeze(1)
        found.effective_size[t] = _effective_size(log_weights)
    failures.raise_first(num_particles)
    return found


def _check_options(num_particles: int, resampling: Resampling, threshold: float) -> None:
    if num_particles < 1:
        raise ValueError(f"`num_particles` must be positive, but is {num_particles} instead.")
    if resampling not in get_args(Resampling):
        choices = ", ".join(get_args(Resampling))
        raise ValueError(f"`resampling` must be one of {choices}, but is {resampling!r} instead.")
    if not 0 <= threshold <= 1:
        raise ValueError(f"`threshold` must be from 0 to 1, but is {threshold} instead.")


def _allocate(states: Tensor, lengths: Tensor, num_particles: int) -> Particles:
    """Allocates the result of `filter` for (B, N, d) first states.

    Every particle is initialized as its own ancestor.
    """
    num_steps = int(lengths.max()) if len(lengths) else 0
    if states.shape[:2] != (len(lengths), num_particles):
        raise ValueError(
            f"`initial` must give {(len(lengths), num_particles)} densities, sequences by particles, "
            f"but gives {tuple(states.shape[:2])} instead."
        )
    shape = (num_steps, *states.shape[:2])
    return Particles(
        states=states.new_empty(*shape, states.shape[2]),
        log_weights=states.new_empty(shape),
        ancestors=torch.arange(num_particles, device=states.device).repeat(num_steps, len(states), 1),
        transitions=[],
        log_increments=states.new_empty(shape[:2]),
        effective_size=states.new_empty(shape[:2]),
        lengths=lengths.to(states.device),
    )


def _resample_some(
    log_weights: Tensor, ahead: Tensor, active: Tensor, threshold: float, generator: Randomness, method: Resampling
) -> tuple[Tensor, Tensor]:
    """Resamples the active sequences whose effective number of particles is below the threshold.

    Returns (B, N) ancestors, which are the particles themselves where nothing is resampled, and (B, N) log-weights.
    `ahead` is the logarithm of a factor of the weights by which ancestors are drawn; it is ignored where it rules out
    all particles.
    """
    num_particles = log_weights.shape[1]
    ahead = torch.where((log_weights + ahead).logsumexp(1, keepdim=True).isfinite(), ahead, 0.0)
    first_stage = log_weights + ahead
    total = first_stage.logsumexp(1, keepdim=True)
    first_stage = first_stage - total
    fresh = active & (_effective_size(first_stage).unsqueeze(1) < threshold * num_particles)
    itself = torch.arange(num_particles, device=log_weights.device).expand_as(log_weights)
    ancestors = torch.where(fresh, resample(first_stage, num_particles, generator, method), itself)
    even = torch.full_like(log_weights, -math.log(num_particles))
    return ancestors, torch.where(fresh, even + total - ahead.gather(1, ancestors), log_weights)


class _Failures:
    """The first step of each sequence at which the weights of all particles vanished or were undefined."""

    def __init__(self, num_sequences: int, device: torch.device) -> None:
        self.never = torch.iinfo(torch.int64).max
        self.first_step = torch.full((num_sequences,), self.never, device=device)
        self.undefined = torch.zeros(num_sequences, dtype=torch.bool, device=device)

    def note(self, t: int, increment: Tensor) -> None:
        """Records the sequences whose (B,) logarithm of the sum of the weights is not finite."""
        self.first_step = torch.where(increment.isfinite(), self.first_step, self.first_step.clamp(max=t))
        self.undefined |= increment.isnan() | (increment == torch.inf)

    def raise_first(self, num_particles: int) -> None:
        """Raises an error for the sequence that failed first, if any did.

        Reads from the device once, after all steps.
        """
        if not bool((self.first_step < self.never).any()):
            return
        sequence = int(self.first_step.argmin())
        t = int(self.first_step[sequence])
        if bool(self.undefined[sequence]):
            raise ValueError(
                f"`log_obs` must be numbers below infinity, but is not at step {t} of sequence {sequence}. "
                "Are there NaN in parameters or data?"
            )
        raise ValueError(
            f"Particles must be able to explain what is observed, but the weights of all {num_particles} vanish "
            f"at step {t} of sequence {sequence}. Use more particles, or a wider emission."
        )


def auxiliary(model: StateSpaceModel) -> LookAhead:
    """Returns the factor of the auxiliary filter (Pitt and Shephard, 1999): log p(y_t | x_t) at the mean of x_t."""
    return lambda t, states, transition: model.log_obs(t, transition.mean)


def resample(log_weights: Tensor, num_draws: int, generator: Randomness, method: Resampling = "systematic") -> Tensor:
    """Draws particles with probabilities proportional to their weights.

    A particle of weight zero is never drawn.

    Args:
        log_weights: (B, N) normalized log-weights.
        num_draws: Number of draws for each sequence.
        generator: Source of the random numbers.
        method: "systematic" (least noise), "stratified" or "multinomial".

    Returns:
        (B, num_draws) numbers of particles.
    """
    size = (len(log_weights), 1 if method == "systematic" else num_draws)
    levels = uniform(size, log_weights, generator)
    if method != "multinomial":
        levels = (torch.arange(num_draws, device=log_weights.device) + levels) / num_draws
    return _invert(log_weights.exp(), levels)


def genealogy(
    particles: Particles, num_paths: int | None = None, generator: Randomness | None = None
) -> WeightedParticles:
    """Traces whole paths of p(x_0:T | y_0:T), (T, B, M, d), back along the ancestors in O(T B M d).

    The result has all N paths with the weights of the last step, or `num_paths` paths drawn with these weights, which
    then have equal weights. Far back all paths coincide. Past the end of a sequence the states of a path have no
    meaning.
    """
    last = particles.last_log_weights
    if num_paths is None:
        index, log_weights = torch.arange(last.shape[1], device=last.device).expand_as(last), last
    else:
        if generator is None:
            raise ValueError("`generator` must be given to draw `num_paths` paths.")
        index = resample(last, num_paths, generator)
        log_weights = last.new_full((len(last), num_paths), -math.log(num_paths))
    paths = particles.states.new_empty(len(particles.states), *index.shape, particles.states.shape[3])
    for t in range(len(paths) - 1, -1, -1):
        paths[t] = pick(particles.states[t], index)
        index = particles.ancestors[t].gather(1, index)
    return WeightedParticles(paths, log_weights)


def fixed_lag(particles: Particles, lag: int) -> WeightedParticles:
    """Approximates p(x_t | y_0:t+lag) for each step, (T, B, N, d), in O(lag T B N).

    The states of step t are the ancestors, `lag` steps back, of the particles of step t + lag.
    """
    if lag < 0:
        raise ValueError(f"`lag` must not be negative, but is {lag} instead.")
    num_steps = len(particles.states)
    lag = min(lag, num_steps - 1)
    steps = torch.arange(num_steps, device=particles.states.device)
    itself = torch.arange(particles.states.shape[2], device=particles.states.device)
    index = itself.expand_as(particles.ancestors)
    for distance in range(lag, 0, -1):
        past_end = itself.expand(distance, *particles.ancestors.shape[1:])
        index = torch.cat([particles.ancestors[distance:], past_end]).gather(2, index)
    states = particles.states.gather(2, index.unsqueeze(3).expand_as(particles.states))
    return WeightedParticles(states, particles.log_weights[(steps + lag).clamp(max=num_steps - 1)])


@torch.no_grad()
def backward_simulation(particles: Particles, num_paths: int, generator: Randomness) -> WeightedParticles:
    """Draws paths from p(x_0:T | y_0:T), (T, B, M, d), with equal weights, in O(T B M N d) (FFBSi).

    Backwards in time, a particle of each step is drawn with its weight times the density of the transition to the
    particle that was drawn for the next step. Past the end of a sequence the states of a path have no meaning.
    """
    num_steps, num_sequences, _, size = particles.states.shape
    if num_paths < 1:
        raise ValueError(f"`num_paths` must be positive, but is {num_paths} instead.")
    paths = particles.states.new_empty(num_steps, num_sequences, num_paths, size)
    order = torch.arange(num_paths, device=paths.device)
    # The numbers of all steps are drawn from the first step on, so those of a step do not depend on the longest
    # sequence of the batch.
    every_level = uniform((num_sequences, num_steps, num_paths), paths, generator)
    for t in range(num_steps - 1, -1, -1):
        logits = particles.log_weights[t].unsqueeze(1)  # (B, 1, N)
        levels = every_level[:, t]
        is_last = particles.lengths.eq(t + 1).unsqueeze(1)
        levels = torch.where(is_last, (order + levels) / num_paths, levels)  # stratified at the last step
        if t < num_steps - 1:
            following = particles.transitions[t].log_prob_of_each(paths[t + 1])
            logits = logits + torch.where((t + 1 < particles.lengths).view(-1, 1, 1), following, 0.0)
        index = _invert(logits.softmax(2).expand(-1, num_paths, -1), levels.unsqueeze(2)).squeeze(2)
        paths[t] = pick(particles.states[t], index)
    return WeightedParticles(paths, paths.new_full((num_sequences, num_paths), -math.log(num_paths)))


@torch.no_grad()
def predict(
    model: StateSpaceModel, particles: Particles, steps: int, generator: Randomness, *, after: int | None = None
) -> WeightedParticles:
    """Draws states from p(x_{t+steps} | y_0:t) for each step t, (T, B, N, d), or for t = `after` only, (B, N, d).

    The row of the last step of a sequence is a prediction of its future. The model must have transitions up to step
    T - 1 + `steps`, or `after` + `steps`.
    """
    if steps < 1:
        raise ValueError(f"`steps` must be positive, but is {steps} instead.")

    def states_after(t: int) -> Tensor:
        states = particles.states[t]
        for k in range(1, steps + 1):
            is_known = k == 1 and t < len(particles.transitions)
            density = particles.transitions[t] if is_known else model.transition(t + k, states)
            states = density.sample(generator)
        return states

    if after is not None:
        return WeightedParticles(states_after(after), particles.log_weights[after])
    every_state = torch.stack([states_after(t) for t in range(len(particles.states))])
    return WeightedParticles(every_state, particles.log_weights)


def pick(values: Tensor, particles: Tensor) -> Tensor:
    """Selects (B, M, d) of the values of particles (B, N, d), by (B, M) numbers of particles."""
    return values.gather(1, particles.unsqueeze(2).expand(-1, -1, values.shape[2]))


def _effective_size(log_weights: Tensor) -> Tensor:
    return (-(2 * log_weights).logsumexp(-1)).exp()


def _invert(weights: Tensor, levels: Tensor) -> Tensor:
    """Returns (..., M): the first of N particles whose cumulative weight exceeds each of M levels (..., M)."""
    cumulative = weights.cumsum(-1)
    cumulative = cumulative / cumulative[..., -1:]
    below_one = 1 - torch.finfo(weights.dtype).eps / 2  # (N - 1 + u) / N may round to 1
    return torch.searchsorted(cumulative, levels.clamp(max=below_one).contiguous(), right=True)
