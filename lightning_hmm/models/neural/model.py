"""The neural HMM of Jarboui and Perchet (2021): a continuous latent state with neural densities."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_hmm.data import sequence_numbers
from lightning_hmm.distributions.densities import DiagonalGaussian, Family
from lightning_hmm.inference.particle import Particles, Resampling, Streams
from lightning_hmm.models.last_seen import up_to_last_seen
from lightning_hmm.models.neural.networks import (
    Activation,
    ConcatInputs,
    ConditionalDensity,
    DensityOptions,
    Mean,
    NetworkOptions,
    WindowKind,
    WindowNetwork,
    require_features,
    seeded_modules,
)
from lightning_hmm.models.neural.particle_em import ParticleEM, Schedule, Smoothing
from lightning_hmm.models.neural.rollout import Rollout
from lightning_hmm.models.neural.starts import start_slow
from lightning_hmm.models.neural.state_space import BoundModel
from lightning_hmm.models.neural.units import StandardizedObservations
from lightning_hmm.models.sequence_model import check_counts, check_positive
from lightning_hmm.random import generator
from lightning_hmm.sequences import Sequences

# Largest number of particles, of all steps and sequences together, that inference keeps in memory at a time.
_MAX_PARTICLES = 4_000_000


class Score(NamedTuple):
    """Estimated log-likelihoods.

    log_likelihood: (N,).
    standard_error: (N,).
    """

    log_likelihood: Tensor
    standard_error: Tensor


class Decoded(NamedTuple):
    """Smoothed states, packed like the values of the sequences.

    mean: (steps, d) of p(x_t | y_1:T).
    variance: (steps, d) of p(x_t | y_1:T).
    paths: (steps, M, d) drawn from p(x_1:T | y_1:T).
    """

    mean: Sequences
    variance: Sequences
    paths: Tensor


class OneStepPredictions(NamedTuple):
    """Predictions of each step from the steps before it.

    effective_size: (steps, 1) effective number of particles as a fraction of all.
    mean: (steps, D) of p(y_t | y_1:t-1).
    variance: (steps, D) of p(y_t | y_1:t-1).
    """

    effective_size: Sequences
    mean: Sequences
    variance: Sequences


class Prediction(NamedTuple):
    """Moments of a predicted observation, and bounds between which each of its entries is expected. Each is (N, D)."""

    mean: Tensor
    variance: Tensor
    lower: Tensor
    upper: Tensor


class NeuralHMM(StandardizedObservations, ParticleEM):
    r"""A hidden Markov model whose state is a vector and whose densities are neural networks.

    .. math:: x_0 \sim \mu, \quad x_t \sim q(\cdot \mid f(x_{t-1}, y_{t-\tau_t}, \dots, y_{t-1})), \quad
        y_t \sim p(\cdot \mid g(x_t, y_{t-\tau_e}, \dots, y_{t-1}))

    Use it for sequences of real vectors with nonlinear dynamics, when a small latent state should be interpretable. Use
    `LinearGaussianHMM` where linear dynamics suffice, because its inference is exact.

    The networks f and g read the state and the last :math:`\tau` observations; with order 0 they read the state only.
    (This is eq. 17 of the paper. As printed there, the window of f has one more observation and cannot be empty.) The
    model is trained by EM. An E-step draws paths of the state given each sequence of a batch with a particle filter,
    and the M-step is `m_steps` steps of Adam on the log-density of paths and observations. Every batch is an E-step:
    use small, shuffled batches for many updates, or one batch of all data with `e_step_fraction` for section 2.1 of the
    paper. An E-step takes time O(steps x particles x size of the networks) and memory O(longest x batch x particles x
    latent_dim).

    Observations are standardized with the mean and variance of the training data. Missing entries (NaN) are left out.

    Logged metrics: ``train/log_likelihood`` per step, the estimate of the particle filter, whose expectation is a lower
    bound of the log-likelihood; ``train/effective_size``, the effective number of particles as a fraction of all; and
    ``val/prediction_error``.

    Args:
        latent_dim: d, the number of entries of the state.
        num_features: D, the number of entries of an observation.
        emission_order: :math:`\tau_e`, the number of past observations that the emission reads.
        transition_order: :math:`\tau_t`, the number of past observations that the transition reads.
        emission_mean: "residual" adds g to the observation last seen, "absolute" does not.
        transition_mean: "residual" adds f to the state, which may then drift; "absolute" does not.
        latent_bound: Largest absolute value of the mean of an entry of the state, enforced by tanh. Unbounded if not
            given.
        emission: Family of emission densities: "gaussian", "student" (for jumps) or "mixture" of Gaussians.
        transition: Family of transition densities: "gaussian", "student" or "mixture".
        num_components: Number of components of a mixture.
        window: How the networks read a window: "mlp" concatenates its observations, "lstm" reads one after the other.
        num_layers: Number of layers of each network. With 1, means are linear and variances constant.
        width: Units of the hidden layers and of an LSTM.
        activation: Activation of the hidden layers, "relu" or "tanh".
        emission_log_variance: Initial log-variance of emissions, in units of the variance of the data, or of its
            changes where emissions are residual. A small value makes the state explain the observations. With a large
            value the state may remain unused.
        transition_log_variance: Initial log-variance of transitions. The log-variance stays within 4 of this value, so
            that a value of -8 or less keeps the state slow.
        start_window: Number of steps over which the data are averaged for the initial states, see `neural.starts`. Use
            it for a state that should change slowly. Networks start from random parameters if not given.
        num_particles: Number of particles for each sequence.
        num_paths: Number of paths that are drawn for the M-step, for each sequence.
        smoothing: How paths are drawn: "backward" simulation, or the "genealogy" of the particles, which is cheaper but
            has little diversity in the distant past.
        resampling: How particles are resampled: "systematic", "stratified" or "multinomial".
        threshold: Particles are resampled where their effective number is below this fraction of `num_particles`.
        m_steps: Number of gradient steps of an M-step.
        learning_rate: Learning rate of Adam at the start of training.
        schedule: Schedule of the learning rate: "cosine" lets it fall to 0 at the end of training, "constant" keeps it.
        gradient_clip: Largest norm of a gradient.
        e_step_fraction: Fraction of the sequences of a batch, drawn at random, that an E-step uses.
        fine_tuning_epochs: Number of epochs at the end of training in which an E-step uses all sequences.
        seed: Seed for the initial parameters and the particles.
        arithmetic: Data type of the networks and particles, "float32" or "float64".

    References:
        Jarboui, Perchet: Unsupervised neural hidden Markov models with a continuous latent state space, 2021.

    Example:
        >>> from lightning_hmm import NeuralHMM, fit
        >>> values = [[0.1 * t] for t in range(20)]
        >>> model = fit(NeuralHMM(latent_dim=1, num_features=1), [values], max_epochs=2)
        >>> model.latents([values]).values.shape
        torch.Size([20, 1])
    """

    transition: ConditionalDensity
    _numbers: Iterator[int] | None = None  # of the sequences that `Trainer.predict` has not reached yet

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
        sizes = (require_features(num_features), window, num_layers, width, activation, num_components)
        transitions = DensityOptions(
            "transition", transition, transition_order, transition_mean, transition_log_variance, latent_bound
        )
        emissions = DensityOptions("emission", emission, emission_order, emission_mean, emission_log_variance)
        self._make_densities(NetworkOptions(*sizes, getattr(torch, arithmetic)), transitions, emissions)

    def _make_densities(self, networks: NetworkOptions, transitions: DensityOptions, emissions: DensityOptions) -> None:
        check_counts(latent_dim=self.latent_dim, start_window=self.start_window)
        check_positive(latent_bound=transitions.bound)
        dtype = networks.dtype
        with seeded_modules(self.seed):
            self.transition = self._make_density(
                networks, transitions, self.latent_dim, residual=transitions.mean == "residual"
            )
            # Residual emissions add the value last seen, see `Observations.base`, and never the state.
            self.emission = self._make_density(networks, emissions, networks.num_features, residual=False)
        self.initial_mean = nn.Parameter(torch.zeros(self.latent_dim, dtype=dtype))
        self.initial_log_variance = nn.Parameter(torch.zeros(self.latent_dim, dtype=dtype))
        self._make_units(emissions.mean == "residual", dtype)

    def _make_density(
        self, networks: NetworkOptions, options: DensityOptions, size: int, residual: bool
    ) -> ConditionalDensity:
        """A density of `size` entries given the state and a window."""
        head = options.make_head(size, networks.num_components, networks.dtype)
        window = networks.make_window(options.order)
        own = self.make_network(options.name, self.latent_dim + window.num_outputs, head.num_outputs)
        network: WindowNetwork
        if own is None:
            network = networks.make_mlp(self.latent_dim, window.num_outputs, head.num_outputs, head.is_log_variance)
        else:
            network = ConcatInputs(own.to(networks.dtype))
        return ConditionalDensity(window, network, head, residual)

    def make_network(self, name: str, num_inputs: int, num_outputs: int) -> nn.Module | None:
        """The network of the "transition" or the "emission", for subclasses to override.

        It may be any module from (..., num_inputs), the state and the outputs of the window, to (..., num_outputs). If
        it is ``None``, a multilayer perceptron is used.
        """
        return None

    def initialize(self, sequences: Sequences) -> None:
        """Sets the units of observations and, with `start_window`, fits the networks to slow states of the data."""
        super().initialize(sequences)
        if self.start_window is not None:
            start_slow(self, sequences, self.start_window, generator(self.seed, "slow"))

    def initial_density(self, num_sequences: int, num_particles: int) -> DiagonalGaussian:
        """p(x_0), as `num_sequences` x `num_particles` densities."""
        mean = self.initial_mean.expand(num_sequences, num_particles, -1)
        return DiagonalGaussian(mean, (0.5 * self.initial_log_variance).exp())

    def bind(self, sequences: Sequences) -> BoundModel:
        return BoundModel(self, self.observations(sequences))

    def _chunks(
        self,
        sequences: Any,
        num_particles: int | None = None,
        num_paths: int = 1,
        numbers: Sequence[int] | None = None,
    ) -> Iterator[tuple[Sequences, Sequence[int]]]:
        """Sequences and their numbers, a few at a time, so that their particles and paths fit into memory."""
        sequences = self.as_sequences(sequences)
        numbers = range(len(sequences)) if numbers is None else numbers
        if len(numbers) != len(sequences):
            raise ValueError(
                f"`numbers` must be one for each of {len(sequences)} sequences, but are {len(numbers)} instead."
            )
        longest = int(sequences.lengths.max()) if len(sequences) else 0
        size = max(1, _MAX_PARTICLES // (max(longest, num_paths) * (num_particles or self.num_particles)))
        for first in range(0, len(sequences), size):
            yield sequences[first : first + size], numbers[first : first + size]

    # Likelihood and states

    @torch.no_grad()
    def score(
        self,
        sequences: Any,
        runs: int = 4,
        num_particles: int | None = None,
        return_error: bool = False,
        numbers: Sequence[int] | None = None,
    ) -> Any:
        """(N,) the natural log-likelihood of each sequence, estimated by the particle filter.

        The estimate is the logarithm of the mean of `runs` unbiased estimates. With `return_error` the result is a
        `Score`, which also has standard errors (jackknife over the runs, of which there must be at least 2).

        The random numbers that are drawn for a sequence depend on the seed of the model and on the number of the
        sequence: its position in `sequences`, or its entry of `numbers`. Give `numbers` to get the same estimate for a
        sequence when you pass only some of the data. `decode`, `latents`, `one_step_predictions` and `predict_each`
        have the same argument.
        """
        check_counts(runs=runs, num_particles=num_particles)
        if return_error and runs < 2:
            raise ValueError(f"`runs` must be at least 2 for a standard error, but is {runs} instead.")
        found = []
        for chunk, places in self._chunks(sequences, num_particles, numbers=numbers):
            bound = self.bind(chunk)
            particles = (
                self.filter_particles(bound, self.streams(places, "score", run), num_particles) for run in range(runs)
            )
            found.append(torch.stack([estimate.log_increments.double().sum(0) for estimate in particles]))
        estimates = torch.cat(found, 1) if found else torch.zeros(runs, 0, dtype=torch.float64)
        mean = estimates.logsumexp(0) - math.log(runs)
        if not return_error:
            return mean
        without = [torch.cat([estimates[:run], estimates[run + 1 :]]) for run in range(runs)]
        others = torch.stack([estimate.logsumexp(0) - math.log(runs - 1) for estimate in without])
        return Score(mean, ((runs - 1) / runs * (others - others.mean(0)).square().sum(0)).sqrt())

    @torch.no_grad()
    def decode(
        self,
        sequences: Any,
        num_paths: int = 64,
        num_particles: int | None = None,
        numbers: Sequence[int] | None = None,
    ) -> Decoded:
        """Smoothed states: their moments, estimated with `num_paths` paths, and the paths."""
        check_counts(num_paths=num_paths, num_particles=num_particles)
        sequences = self.as_sequences(sequences)
        paths = []
        for chunk, places in self._chunks(sequences, num_particles, num_paths, numbers):
            found = self.filter_particles(self.bind(chunk), self.streams(places, "decode"), num_particles)
            drawn = self.draw_paths(found, self.streams(places, "decode", "paths"), num_paths)
            paths.append(chunk.packed(drawn.transpose(0, 1)))
        packed = torch.cat(paths) if paths else torch.zeros(0, num_paths, self.latent_dim)
        mean = packed.mean(1)
        variance = (packed - mean.unsqueeze(1)).square().mean(1)
        return Decoded(sequences.with_values(mean), sequences.with_values(variance), packed)

    def latents(
        self,
        sequences: Any,
        num_particles: int | None = None,
        lead: int = 0,
        num_paths: int = 64,
        numbers: Sequence[int] | None = None,
    ) -> Sequences:
        """(steps, d) smoothed means of the state, estimated with `num_paths` paths.

        The row of step t is the mean of the state at step t + `lead`. Use a lead of 1 for a transition that reads
        observations: the state at a step is then mostly determined by earlier observations, and the next state is the
        first one that has read the observation of the step itself.
        """
        check_counts(0, lead=lead)
        sequences = self.as_sequences(sequences)
        if lead == 0 or len(sequences) == 0:
            return self.decode(sequences, num_paths, num_particles, numbers).mean
        nothing = sequences.values.new_full((lead, self.num_features), torch.nan)
        longer = Sequences.from_list([torch.cat([sequence, nothing]) for sequence in sequences])
        means = self.decode(longer, num_paths, num_particles, numbers).mean
        return sequences.with_values(torch.cat([mean[lead:] for mean in means]))

    def cluster_latents(
        self,
        sequences: Any,
        num_clusters: int,
        num_particles: int | None = None,
        lead: int = 0,
        num_paths: int = 64,
    ) -> Sequences:
        """The cluster of each step, by k-means of the `latents` of all steps."""
        from sklearn.cluster import KMeans  # takes a second to import

        latents = self.latents(sequences, num_particles, lead, num_paths)
        if not 1 <= num_clusters <= latents.num_steps:
            raise ValueError(
                f"`num_clusters` must be from 1 to the number of steps, {latents.num_steps}, "
                f"but is {num_clusters} instead."
            )
        rows = latents.values.double().cpu()
        weights = torch.ones(len(rows))
        if latents.weights is not None:
            weights = latents.repeat_interleave(latents.weights).cpu()
        means = KMeans(num_clusters, n_init=10, random_state=self.seed)
        means.fit(rows[weights > 0].numpy(), sample_weight=weights[weights > 0].numpy())
        return latents.with_values(torch.as_tensor(means.predict(rows.numpy()), dtype=torch.int64))

    # Predictions

    def expected(self, bound: BoundModel, particles: Particles, streams: Streams) -> Tensor:
        return self._moments(bound, particles, streams)[0]

    def _moments(self, bound: BoundModel, particles: Particles, streams: Streams) -> tuple[Tensor, Tensor]:
        """(T, B, D) mean and variance of p(y_t | y_1:t-1) in float64, from emissions of states drawn one step ahead."""
        observations, num_particles = bound.observations, particles.states.shape[2]
        means: list[Tensor] = []
        variances: list[Tensor] = []
        for t in range(len(particles.states)):
            if t:
                density, weights = particles.transitions[t - 1], particles.log_weights[t - 1].exp()
            else:
                density = bound.initial(num_particles)
                weights = torch.full_like(particles.log_weights[0], 1 / num_particles)
            emission = bound.emission(t, density.sample(streams))
            mean = (weights.unsqueeze(2) * emission.mean).sum(1)
            deviation = emission.mean - mean.unsqueeze(1)
            means.append(mean)
            variances.append((weights.unsqueeze(2) * (emission.variance + deviation.square())).sum(1))
        mean, variance = (torch.stack(part).double() if part else observations.base[:0] for part in (means, variances))
        unseen = observations.unseen[:-1]
        variance = variance * self.units.emission_std.square()
        if self.residual:
            variance = torch.where(unseen, self.first_variance, variance)
        return self.in_data_units(mean, observations.base[:-1], unseen), variance

    @torch.no_grad()
    def one_step_predictions(
        self, sequences: Any, num_particles: int | None = None, numbers: Sequence[int] | None = None
    ) -> OneStepPredictions:
        """The mean and variance of each observation given those before it, and the effective number of particles."""
        sequences = self.as_sequences(sequences)
        found = []
        for chunk, places in self._chunks(sequences, num_particles, numbers=numbers):
            bound = self.bind(chunk)
            particles = self.filter_particles(bound, self.streams(places, "each"), num_particles)
            fraction = particles.effective_size.unsqueeze(2) / particles.states.shape[2]
            moments = self._moments(bound, particles, self.streams(places, "each", "ahead"))
            found.append([chunk.packed(part.transpose(0, 1)) for part in (fraction, *moments)])
        none = self.center.new_zeros(0, len(self.center))
        columns = zip(*found, strict=True) if found else ([none[:, :1]], [none], [none])
        return OneStepPredictions(*(sequences.with_values(torch.cat(list(parts))) for parts in columns))

    def predict_each(
        self, sequences: Any, num_particles: int | None = None, numbers: Sequence[int] | None = None
    ) -> Sequences:
        """(steps, D) the mean of each observation given those before it."""
        return self.one_step_predictions(sequences, num_particles, numbers).mean

    @torch.no_grad()
    def predict_next(
        self, sequences: Any, steps: int = 1, level: float = 0.9, num_particles: int | None = None
    ) -> Prediction:
        """The observation `steps` after the end of each sequence: moments, and bounds with a probability of `level`
        between them.

        The observations in between are drawn. So are those of steps at the end at which nothing is observed: three
        missing steps at the end and one step ahead give the same prediction as four steps ahead.
        """
        check_counts(steps=steps)
        if not 0 < level < 1:
            raise ValueError(f"`level` must be between 0 and 1, but is {level} instead.")
        seen, ahead = up_to_last_seen(self.as_sequences(sequences), steps)
        found = torch.zeros(4, len(seen), len(self.center), dtype=torch.float64, device=self.device)
        for chunk, numbers in self._chunks(seen, num_particles):
            bound = self.bind(chunk)
            particles = self.filter_particles(bound, self.streams(numbers, "next"), num_particles)
            streams = self.streams(numbers, "next", "ahead")
            run, wanted = Rollout.after(bound, particles, streams), ahead[list(numbers)]
            for step in range(1, int(wanted.max()) + 1):
                emitted = run.step(streams)
                rows = torch.nonzero(wanted == step).flatten()
                if len(rows):
                    found[:, rows + numbers[0]] = torch.stack(emitted.summary(level))[:, rows]
        return Prediction(*found)

    @torch.no_grad()
    def sample(
        self, num_sequences: int = 1, length: int | Sequence[int] = 100, seed: int = 0, return_states: bool = False
    ) -> Any:
        """Draws sequences of one length or of the given lengths. With `return_states` it also returns their states."""
        lengths = torch.as_tensor(length).expand(num_sequences)
        if num_sequences < 0 or bool((lengths < 0).any()):
            raise ValueError(
                f"`num_sequences` and `length` must not be negative, but are {num_sequences} and {length} instead."
            )
        nothing = Sequences.from_lengths(self.center.new_zeros(0, len(self.center)), [0] * num_sequences)
        run = Rollout(self.bind(nothing), num_particles=1)
        streams = Streams([generator(seed, "sample", number) for number in range(num_sequences)])
        longest = int(lengths.max()) if num_sequences else 0
        steps = [(run.step(streams).drawn, run.states) for _ in range(longest)]
        shape = Sequences.from_lengths(self.center.new_zeros(int(lengths.sum()), len(self.center)), lengths)
        if steps:
            values, states = (torch.cat(parts, 1) for parts in zip(*steps, strict=True))
        else:
            values = states = torch.zeros(num_sequences, 0, 1)
        drawn = shape.with_values(shape.packed(values))
        return (drawn, shape.with_values(shape.packed(states))) if return_states else drawn

    # Trainer.predict

    def on_predict_epoch_start(self) -> None:
        loaders: Any = self.trainer.predict_dataloaders
        self._numbers = sequence_numbers(loaders[0] if isinstance(loaders, list | tuple) else loaders)

    def on_predict_epoch_end(self) -> None:
        self._numbers = None

    def predict_step(self, batch: Sequences, batch_idx: int) -> dict[str, Any]:
        """Smoothed states, one-step predictions and the log-likelihood of each sequence.

        They depend on the number of a sequence in the data, but not on the batch size or the number of ranks.
        """
        numbers = None if self._numbers is None else list(islice(self._numbers, len(batch)))
        return {
            "latents": self.latents(batch, numbers=numbers),
            "predictions": self.predict_each(batch, numbers=numbers),
            "log_likelihood": self.score(batch, numbers=numbers),
        }
