"""The neural HMM of Jarboui and Perchet (2021): a continuous latent state, neural densities, and EM with particles and gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from lightning_hmm.data import sequence_numbers
from lightning_hmm.distributions.densities import DensityHead, Family, Gaussian
from lightning_hmm.inference.particle import Particles, Resampling, Streams
from lightning_hmm.models.neural_networks import Activation, Whole, Window, WindowedMLP, WindowKind
from lightning_hmm.models.neural_rollout import Rollout
from lightning_hmm.models.neural_starts import start_slow
from lightning_hmm.models.neural_state_space import Bound, Conditional
from lightning_hmm.models.neural_units import InUnits, up_to_last_seen
from lightning_hmm.models.particle_em import ParticleEM, Schedule, Smoothing
from lightning_hmm.models.sequence_model import check_counts
from lightning_hmm.random import generator
from lightning_hmm.sequences import Sequences

Mean = Literal["absolute", "residual"]
_AT_ONCE = 4_000_000  # particles of all steps and sequences together that a question keeps at a time


class Score(NamedTuple):
    """(N,) estimated log-likelihoods, and their standard errors."""

    log_likelihood: Tensor
    standard_error: Tensor


class Decoded(NamedTuple):
    """mean, variance: (steps, d) of p(x_t | y_1:T). paths: (steps, M, d) drawn from p(x | y_1:T), packed like the values of the sequences."""

    mean: Sequences
    variance: Sequences
    paths: Tensor


class Track(NamedTuple):
    """Of each step: effective_size, (steps, 1), the share of particles that count; mean and variance, (steps, D), of p(y_t | y_1:t-1)."""

    effective_size: Sequences
    mean: Sequences
    variance: Sequences


class Prediction(NamedTuple):
    """(N, D) moments of the predicted observation, and the bounds between which each of its entries is to be expected."""

    mean: Tensor
    variance: Tensor
    lower: Tensor
    upper: Tensor


class NeuralHMM(InUnits, ParticleEM):
    r"""A hidden Markov model whose state is a vector and whose densities are networks.

    .. math:: x_0 \sim \mu, \quad x_t \sim q(\cdot \mid f(x_{t-1}, y_{t-\tau_t}, \dots, y_{t-1})), \quad
        y_t \sim p(\cdot \mid g(x_t, y_{t-\tau_e}, \dots, y_{t-1}))

    Order 0 reads no observations. (Eq. 17 of the paper, with windows of :math:`\tau` observations; as printed, that of f would hold one more
    and could not be empty.) An E-step draws paths of the state given each sequence of a batch with a particle filter; `m_steps` steps of
    Adam on their log-density, together with that of the data, are the M-step. A batch is an E-step: give small ones, shuffled, for many steps, or
    all of the data at once with `e_step_fraction` for the paper's section 2.1. An E-step costs O(steps x particles x networks), and
    memory O(longest x batch x particles x latent_dim).

    What is observed is taken in units of the training data. Entries that are missing (NaN) are left out.

    Logged: ``train/log_likelihood``, per step, is the filter's estimate, whose expectation is a lower bound of the log-likelihood;
    ``train/effective_size``, the share of particles that count; ``val/prediction_error``.

    Args:
        latent_dim: d, entries of the state.
        num_features: D, entries of an observation.
        emission_order, transition_order: :math:`\tau_e`, :math:`\tau_t`, observations that the networks read beside the state.
        emission_mean: "residual" adds g to the observation last seen, "absolute" does not.
        transition_mean: "residual" adds f to the state, which may then drift; "absolute" does not.
        latent_bound: means of the state are kept inside by tanh; free if not given.
        emission, transition: families of densities: "gaussian", "student" (jumps) or "mixture" of `num_components` Gaussians.
        num_components: of a mixture.
        window: how more than the state is read: "mlp", side by side, or "lstm", one after the other.
        num_layers: of each network; with 1 means are linear and variances constant.
        width: units of their hidden layers and of an LSTM.
        activation: "relu" or "tanh".
        emission_log_variance: at the start, in units of the data's spread, or of its changes where the emission is residual. A small one makes the state
            explain what is seen; with a large one it may never be needed.
        transition_log_variance: at the start; it stays within 4 of that, so that one of -8 or less keeps the state slow.
        start_window: steps over which the data are averaged for the states that training starts from (see `neural_starts`): for a state that is to
            hold what lasts. From random networks if not given.
        num_particles: of each sequence.
        num_paths: drawn of them for the M-step.
        smoothing: "backward" simulation, or the "genealogy" of the particles, cheaper, of which little is left far back.
        resampling: "systematic", "stratified" or "multinomial".
        threshold: share of the particles that must count, or they are resampled.
        m_steps: gradient steps of an M-step.
        learning_rate: at the start.
        schedule: of the learning rate: "cosine" lets it fall to 0 at the end of training; "constant".
        gradient_clip: largest norm of a gradient.
        e_step_fraction: share of the sequences of each batch, drawn at random, that an E-step is for.
        fine_tuning_epochs: at the end, in which all sequences count.
        seed: of starting values and particles.
        arithmetic: "float32" or "float64".

    References:
        Jarboui, Perchet: Unsupervised neural hidden Markov models with a continuous latent state space, 2021.
    """

    def __init__(
        self,
        latent_dim: int,
        num_features: int | None = None,
        emission_order: int = 1,
        transition_order: int = 0,
        emission_mean: Mean = "residual",
        transition_mean: Mean = "absolute",
        latent_bound: float | None = None,
        emission: Family = "gaussian",
        transition: Family = "gaussian",
        num_components: int = 2,
        window: WindowKind = "mlp",
        num_layers: int = 3,
        width: int = 32,
        activation: Activation = "relu",
        emission_log_variance: float = -3.0,
        transition_log_variance: float = -1.0,
        start_window: int | None = None,
        num_particles: int = 128,
        num_paths: int = 16,
        smoothing: Smoothing = "backward",
        resampling: Resampling = "systematic",
        threshold: float = 0.5,
        m_steps: int = 2,
        learning_rate: float = 5e-3,
        schedule: Schedule = "cosine",
        gradient_clip: float = 5.0,
        e_step_fraction: float = 1.0,
        fine_tuning_epochs: int = 0,
        seed: int = 0,
        arithmetic: Literal["float32", "float64"] = "float32",
    ) -> None:
        if num_features is None:
            raise ValueError("`num_features` must be given: a neural HMM is for real vectors. For symbols use another model.")
        check_counts(latent_dim=latent_dim, num_components=num_components, num_layers=num_layers, width=width, start_window=start_window)
        options: dict[str, tuple[str, Any]] = {
            "emission_mean": (emission_mean, Mean),
            "transition_mean": (transition_mean, Mean),
            "emission": (emission, Family),
            "transition": (transition, Family),
            "window": (window, WindowKind),
            "activation": (activation, Activation),
            "smoothing": (smoothing, Smoothing),
            "resampling": (resampling, Resampling),
            "schedule": (schedule, Schedule),
        }
        for name, (value, kind) in options.items():
            if value not in get_args(kind):
                raise ValueError(f"`{name}` must be one of {', '.join(get_args(kind))}, but is {value!r} instead.")
        for name, order in {"emission_order": emission_order, "transition_order": transition_order, "fine_tuning_epochs": fine_tuning_epochs}.items():
            if not isinstance(order, int) or order < 0:
                raise ValueError(f"`{name}` must be a whole number of at least 0, but is {order} instead.")
        if latent_bound is not None and not 0 < latent_bound < math.inf:
            raise ValueError(f"`latent_bound` must be positive, but is {latent_bound} instead.")
        super().__init__(
            num_particles=num_particles,
            num_paths=num_paths,
            smoothing=smoothing,
            resampling=resampling,
            threshold=threshold,
            m_steps=m_steps,
            learning_rate=learning_rate,
            schedule=schedule,
            gradient_clip=gradient_clip,
            e_step_fraction=e_step_fraction,
            fine_tuning_epochs=fine_tuning_epochs,
            seed=seed,
            num_symbols=None,
            num_features=num_features,
            arithmetic=arithmetic,
        )
        self.save_hyperparameters()
        self.latent_dim, self.start_window = latent_dim, start_window
        self._numbers: Iterator[int] | None = None  # of the sequences that `Trainer.predict` has not reached yet
        dtype = getattr(torch, arithmetic)
        with torch.random.fork_rng(devices=[]):  # torch's modules draw from the global state
            torch.manual_seed(generator(seed, "start").initial_seed())
            heads = {
                "transition": DensityHead(transition, latent_dim, transition_log_variance, num_components, latent_bound, dtype),
                "emission": DensityHead(emission, num_features, emission_log_variance, num_components, None, dtype),
            }
            orders = {"transition": transition_order, "emission": emission_order}
            parts = {}
            for name, head in heads.items():
                past = Window(orders[name], num_features, window, width, dtype)
                own = self.make_network(name, latent_dim + past.num_outputs, head.num_outputs)
                if own is None:
                    size = latent_dim, past.num_outputs, head.num_outputs
                    network: nn.Module = WindowedMLP(*size, num_layers, width, activation, dtype, head.is_log_variance)
                else:
                    network = Whole(own.to(dtype))
                parts[name] = Conditional(past, network, head, residual=name == "transition" and transition_mean == "residual")
        self.transition, self.emission = parts["transition"], parts["emission"]
        self.initial_mean, self.initial_log_variance = (nn.Parameter(torch.zeros(latent_dim, dtype=dtype)) for _ in range(2))
        self._make_units(emission_mean == "residual", dtype)

    def make_network(self, name: str, num_inputs: int, num_outputs: int) -> nn.Module | None:
        """The network of "transition" or "emission", from (..., num_inputs), the state and what a window comes to, to (..., num_outputs).

        A subclass may give any module; None stands for a perceptron of the given size.
        """
        return None

    def initialize(self, sequences: Sequences) -> None:
        """Takes the units of observations from the data and, with `start_window`, the first networks."""
        super().initialize(sequences)
        if self.start_window is not None:
            start_slow(self, sequences, self.start_window, generator(self.seed, "slow"))

    # Densities

    def initial_density(self, num_sequences: int, num_particles: int) -> Gaussian:
        mean = self.initial_mean.expand(num_sequences, num_particles, -1)
        return Gaussian(mean, (0.5 * self.initial_log_variance).exp())

    def bind(self, sequences: Sequences) -> Bound:
        return Bound(self, self.observations(sequences))

    # Questions to ask

    def _pieces(
        self, sequences: Any, num_particles: int | None = None, num_paths: int = 1, numbers: Sequence[int] | None = None
    ) -> Iterator[tuple[Sequences, Sequence[int]]]:
        """The sequences, so many at a time that their particles, and those of a step beside its paths, fit into memory; and their numbers."""
        sequences = self.as_sequences(sequences)
        numbers = range(len(sequences)) if numbers is None else numbers
        if len(numbers) != len(sequences):
            raise ValueError(f"`numbers` must be one for each of {len(sequences)} sequences, but are {len(numbers)} instead.")
        longest = int(sequences.lengths.max()) if len(sequences) else 0
        size = max(1, _AT_ONCE // (max(longest, num_paths) * (num_particles or self.num_particles)))
        for first in range(0, len(sequences), size):
            yield sequences[first : first + size], numbers[first : first + size]

    @torch.no_grad()
    def score(
        self,
        sequences: Any,
        runs: int = 4,
        num_particles: int | None = None,
        return_error: bool = False,
        numbers: Sequence[int] | None = None,
    ) -> Any:
        """(N,) the natural log-likelihood of each sequence: log of the mean of the unbiased estimates of some runs.

        With `return_error` a `Score` that has their standard errors too (jackknife over the runs, of which there must be 2 at least).

        The random numbers that are drawn for a sequence depend on the seed of the model and on the number of the sequence: its position in `sequences`,
        or its entry of `numbers`. Give `numbers` to get the same estimate for a sequence when you pass only some of the data. `decode`, `latents`, `track`
        and `predict_each` have the same argument.
        """
        check_counts(runs=runs, num_particles=num_particles)
        if return_error and runs < 2:
            raise ValueError(f"`runs` must be at least 2 for a standard error, but is {runs} instead.")
        found = []
        for piece, places in self._pieces(sequences, num_particles, numbers=numbers):
            bound = self.bind(piece)
            particles = (self.filter_particles(bound, self.streams(places, "score", run), num_particles) for run in range(runs))
            found.append(torch.stack([estimate.log_evidence.double().sum(0) for estimate in particles]))
        estimates = torch.cat(found, 1) if found else torch.zeros(runs, 0, dtype=torch.float64)
        mean = estimates.logsumexp(0) - math.log(runs)
        if not return_error:
            return mean
        others = torch.stack([torch.cat([estimates[:run], estimates[run + 1 :]]).logsumexp(0) - math.log(runs - 1) for run in range(runs)])
        return Score(mean, ((runs - 1) / runs * (others - others.mean(0)).square().sum(0)).sqrt())

    @torch.no_grad()
    def decode(self, sequences: Any, num_paths: int = 64, num_particles: int | None = None, numbers: Sequence[int] | None = None) -> Decoded:
        """Smoothed states: moments and paths, both from `num_paths` draws."""
        check_counts(num_paths=num_paths, num_particles=num_particles)
        sequences, paths = self.as_sequences(sequences), []
        for piece, places in self._pieces(sequences, num_particles, num_paths, numbers):
            found = self.filter_particles(self.bind(piece), self.streams(places, "decode"), num_particles)
            drawn = self.draw_paths(found, self.streams(places, "decode", "paths"), num_paths)
            paths.append(piece.packed(drawn.transpose(0, 1)))
        packed = torch.cat(paths) if paths else torch.zeros(0, num_paths, self.latent_dim)
        mean = packed.mean(1)
        return Decoded(sequences.with_values(mean), sequences.with_values((packed - mean.unsqueeze(1)).square().mean(1)), packed)

    def latents(self, sequences: Any, num_particles: int | None = None, lead: int = 0, num_paths: int = 64, numbers: Sequence[int] | None = None) -> Sequences:
        """(steps, d) smoothed means of the state, `lead` steps later: those of `num_paths` paths.

        1 is for a transition that reads observations: the state of a step then is mostly what was seen before it, and the next one the first to have read
        the step itself.
        """
        if not isinstance(lead, int) or lead < 0:
            raise ValueError(f"`lead` must be a whole number of at least 0, but is {lead} instead.")
        sequences = self.as_sequences(sequences)
        if lead == 0 or len(sequences) == 0:
            return self.decode(sequences, num_paths, num_particles, numbers).mean
        nothing = sequences.values.new_full((lead, self.num_features), torch.nan)
        longer = Sequences.from_list([torch.cat([sequence, nothing]) for sequence in sequences])
        return sequences.with_values(torch.cat([mean[lead:] for mean in self.decode(longer, num_paths, num_particles, numbers).mean]))

    def cluster_latents(self, sequences: Any, num_clusters: int, num_particles: int | None = None, lead: int = 0, num_paths: int = 64) -> Sequences:
        """The cluster of each step, by k-means of what `latents` gives for all of them."""
        from sklearn.cluster import KMeans  # takes a second to import

        latents = self.latents(sequences, num_particles, lead, num_paths)
        if not 1 <= num_clusters <= latents.num_steps:
            raise ValueError(f"`num_clusters` must be from 1 to the number of steps, {latents.num_steps}, but is {num_clusters} instead.")
        rows = latents.values.double().cpu()
        weights = torch.ones(len(rows)) if latents.weights is None else latents.repeat_interleave(latents.weights).cpu()
        fitted = KMeans(num_clusters, n_init=10, random_state=self.seed).fit(rows[weights > 0].numpy(), sample_weight=weights[weights > 0].numpy())
        return latents.with_values(torch.as_tensor(fitted.predict(rows.numpy()), dtype=torch.int64))

    def expected(self, bound: Bound, particles: Particles, streams: Streams) -> Tensor:
        return self._moments(bound, particles, streams)[0]

    def _moments(self, bound: Bound, particles: Particles, streams: Streams) -> tuple[Tensor, Tensor]:
        """(T, B, D) mean and variance of p(y_t | y_1:t-1), in float64: those of the emissions of states drawn one step ahead."""
        observations, means, variances = bound.observations, [], []
        for t in range(len(particles.states)):
            density = particles.transitions[t - 1] if t else bound.initial(particles.states.shape[2])
            weights = particles.log_weights[t - 1].exp() if t else torch.full_like(particles.log_weights[0], 1 / particles.states.shape[2])
            emission = bound.emission(t, density.sample(streams))
            mean = (weights.unsqueeze(2) * emission.mean).sum(1)
            means.append(mean)
            variances.append((weights.unsqueeze(2) * (emission.variance + (emission.mean - mean.unsqueeze(1)).square())).sum(1))
        mean, variance = (torch.stack(part).double() if part else observations.base[:0] for part in (means, variances))
        unseen, variance = observations.unseen[:-1], variance * self.units.emitted.square()
        if self.residual:
            variance = torch.where(unseen, self.units.scale.square() * self.first_log_variance.double().exp(), variance)
        return self.in_data_units(mean, observations.base[:-1], unseen), variance

    @torch.no_grad()
    def track(self, sequences: Any, num_particles: int | None = None, numbers: Sequence[int] | None = None) -> Track:
        """What the filter found of each step: the share of particles that count, and the moments of the observation before it was seen."""
        sequences, found = self.as_sequences(sequences), []
        for piece, places in self._pieces(sequences, num_particles, numbers=numbers):
            bound = self.bind(piece)
            particles = self.filter_particles(bound, self.streams(places, "each"), num_particles)
            parts = (
                particles.effective_size.unsqueeze(2) / particles.states.shape[2],
                *self._moments(bound, particles, self.streams(places, "each", "ahead")),
            )
            found.append([piece.packed(part.transpose(0, 1)) for part in parts])
        none = self.centre.new_zeros(0, len(self.centre))
        return Track(*(sequences.with_values(torch.cat(parts)) for parts in (zip(*found, strict=True) if found else ([none[:, :1]], [none], [none]))))

    def predict_each(self, sequences: Any, num_particles: int | None = None, numbers: Sequence[int] | None = None) -> Sequences:
        """(steps, D) what is expected at each step from those before it."""
        return self.track(sequences, num_particles, numbers).mean

    @torch.no_grad()
    def predict_next(self, sequences: Any, steps: int = 1, level: float = 0.9, num_particles: int | None = None) -> Prediction:
        """The observation `steps` after the end of each sequence: mean and variance, and bounds that hold `level` of the probability.

        Observations in between are drawn. So are those of steps at the end at which nothing is observed: three missing steps at the end and one step ahead
        give the same prediction as four steps ahead.
        """
        check_counts(steps=steps)
        if not 0 < level < 1:
            raise ValueError(f"`level` must be between 0 and 1, but is {level} instead.")
        seen, ahead = up_to_last_seen(self.as_sequences(sequences), steps)
        found = torch.zeros(4, len(seen), len(self.centre), dtype=torch.float64, device=self.device)
        for piece, numbers in self._pieces(seen, num_particles):
            bound = self.bind(piece)
            particles = self.filter_particles(bound, self.streams(numbers, "next"), num_particles)
            streams = self.streams(numbers, "next", "ahead")
            run, wanted = Rollout.after(self, bound, particles, streams), ahead[list(numbers)]
            for step in range(1, int(wanted.max()) + 1):
                emitted = run.step(streams)
                if bool((wanted == step).any()):
                    rows = torch.nonzero(wanted == step).flatten()
                    found[:, rows + numbers[0]] = torch.stack(run.summary(emitted, level))[:, rows]
        return Prediction(*found)

    @torch.no_grad()
    def sample(self, num_sequences: int = 1, length: int | Sequence[int] = 100, seed: int = 0, return_states: bool = False) -> Any:
        """Draws sequences of one length or of the given lengths; with `return_states`, also the hidden paths."""
        lengths = torch.as_tensor(length).expand(num_sequences)
        if num_sequences < 0 or bool((lengths < 0).any()):
            raise ValueError(f"`num_sequences` and `length` must not be negative, but are {num_sequences} and {length} instead.")
        nothing = Sequences.from_lengths(self.centre.new_zeros(0, len(self.centre)), [0] * num_sequences)
        run = Rollout.from_scratch(self, self.bind(nothing), 1)
        streams = Streams([generator(seed, "sample", number) for number in range(num_sequences)])
        steps = [(run.step(streams).drawn, run.states) for _ in range(int(lengths.max()) if num_sequences else 0)]
        shape = Sequences.from_lengths(self.centre.new_zeros(int(lengths.sum()), len(self.centre)), lengths)
        values, states = (torch.cat(parts, 1) for parts in zip(*steps, strict=True)) if steps else (torch.zeros(num_sequences, 0, 1) for _ in range(2))
        drawn = shape.with_values(shape.packed(values))
        return (drawn, shape.with_values(shape.packed(states))) if return_states else drawn

    def on_predict_epoch_start(self) -> None:
        loaders: Any = self.trainer.predict_dataloaders
        self._numbers = sequence_numbers(loaders[0] if isinstance(loaders, list | tuple) else loaders)

    def on_predict_epoch_end(self) -> None:
        self._numbers = None

    def predict_step(self, batch: Sequences, batch_idx: int) -> dict[str, Any]:
        """The smoothed state and what was expected at each step, and the log-likelihood of each sequence.

        They depend on the number of a sequence in the data, and not on the size of batches or the number of ranks.
        """
        numbers = None if self._numbers is None else list(islice(self._numbers, len(batch)))
        return {
            "latents": self.latents(batch, numbers=numbers),
            "predictions": self.predict_each(batch, numbers=numbers),
            "log_likelihood": self.score(batch, numbers=numbers),
        }
