"""The neural HMM of Jarboui and Perchet (2021): a continuous latent state, neural densities, and EM with particles and gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_hmm.distributions.densities import DensityHead, Family, Gaussian
from lightning_hmm.distributions.gaussian import data_location
from lightning_hmm.inference import particle
from lightning_hmm.inference.particle import Particles, Resampling, Streams
from lightning_hmm.loading import generator
from lightning_hmm.metrics import LogLikelihoodPerSymbol, PredictionError
from lightning_hmm.models.neural_networks import Activation, Whole, Window, WindowedMLP, WindowKind
from lightning_hmm.models.neural_rollout import Rollout
from lightning_hmm.models.neural_state_space import Bound, Conditional, Observations, PathDensity, Units, first_log_prob
from lightning_hmm.models.sequence_model import SequenceModel, check_counts
from lightning_hmm.sequences import Sequences

Mean = Literal["absolute", "residual"]
Smoothing = Literal["backward", "genealogy"]
Schedule = Literal["cosine", "constant"]
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


class Prediction(NamedTuple):
    """(N, D) moments of the predicted observation, and the bounds between which each of its entries is to be expected."""

    mean: Tensor
    variance: Tensor
    lower: Tensor
    upper: Tensor


class NeuralHMM(SequenceModel):
    r"""A hidden Markov model whose state is a vector and whose densities are networks.

    .. math:: x_0 \sim \mu, \qquad x_t \sim q(\cdot \mid f(x_{t-1}, y_{t-\tau_t}, \dots, y_{t-1})), \qquad y_t \sim p(\cdot \mid g(x_t, y_{t-\tau_e}, \dots, y_{t-1}))

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
        num_layers: of each network; with 1 it is linear.
        width: units of their hidden layers and of an LSTM.
        activation: "relu" or "tanh".
        emission_log_variance: at the start, in units of the data's spread, or of its changes where the emission is residual. A small one makes the state
            explain what is seen; with a large one it may never be needed.
        transition_log_variance: at the start.
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

    centre: Tensor
    scale: Tensor
    change: Tensor
    located: Tensor

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
        check_counts(latent_dim=latent_dim, num_components=num_components, num_layers=num_layers, width=width, num_particles=num_particles)
        check_counts(num_paths=num_paths, m_steps=m_steps)
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
        for name, number in {"latent_bound": latent_bound, "learning_rate": learning_rate, "gradient_clip": gradient_clip}.items():
            if number is not None and not 0 < number < math.inf:
                raise ValueError(f"`{name}` must be positive, but is {number} instead.")
        for name, share in {"threshold": threshold, "e_step_fraction": e_step_fraction}.items():
            if not 0 <= share <= 1 or (name == "e_step_fraction" and share == 0):
                raise ValueError(f"`{name}` must be {'above 0 and at most 1' if name == 'e_step_fraction' else 'from 0 to 1'}, but is {share} instead.")
        super().__init__(num_symbols=None, num_features=num_features, arithmetic=arithmetic)
        self.save_hyperparameters()
        self.automatic_optimization = False  # several steps for each batch
        self.latent_dim, self.residual = latent_dim, emission_mean == "residual"
        self.num_particles, self.num_paths, self.smoothing, self.resampling, self.threshold = num_particles, num_paths, smoothing, resampling, threshold
        self.m_steps, self.learning_rate, self.schedule, self.gradient_clip = m_steps, learning_rate, schedule, gradient_clip
        self.e_step_fraction, self.fine_tuning_epochs, self.seed = e_step_fraction, fine_tuning_epochs, seed
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
                    network: nn.Module = WindowedMLP(latent_dim, past.num_outputs, head.num_outputs, num_layers, width, activation, dtype)
                else:
                    network = Whole(own.to(dtype))
                parts[name] = Conditional(past, network, head, residual=name == "transition" and transition_mean == "residual")
        self.transition, self.emission = parts["transition"], parts["emission"]
        self.initial_mean, self.initial_log_variance = (nn.Parameter(torch.zeros(latent_dim, dtype=dtype)) for _ in range(2))
        if self.residual:  # the first value of a feature is no change
            self.first_mean, self.first_log_variance = (nn.Parameter(torch.zeros(num_features, dtype=dtype)) for _ in range(2))
        for name, start in {"centre": 0.0, "scale": 1.0, "change": 1.0}.items():
            self.register_buffer(name, torch.full((num_features,), start, dtype=torch.float64))
        self.register_buffer("located", torch.tensor(False))
        self.val_error, self.test_error, self._effective_size, self._batch = PredictionError(), PredictionError(), MeanMetric(), 0

    def make_network(self, name: str, num_inputs: int, num_outputs: int) -> nn.Module | None:
        """The network of "transition" or "emission", from (..., num_inputs), the state and what a window comes to, to (..., num_outputs).

        A subclass may give any module; None stands for a perceptron of the given size.
        """
        return None

    # Densities

    def initial_density(self, num_sequences: int, num_particles: int) -> Gaussian:
        mean = self.initial_mean.expand(num_sequences, num_particles, -1)
        return Gaussian(mean, (0.5 * self.initial_log_variance).exp())

    def first_log_prob(self, observations: Observations) -> Tensor:
        """(T, B)."""
        if not self.residual:
            return observations.targets.new_zeros(observations.targets.shape[:2])
        return first_log_prob(observations, self.first_mean, self.first_log_variance)

    @property
    def units(self) -> Units:
        return Units(self.centre, self.scale.sqrt(), self.change.sqrt(), self.residual)

    def bind(self, sequences: Sequences) -> Bound:
        """The model as `inference.particle` asks it about some sequences."""
        return Bound(self, Observations(sequences, self.units, self.initial_mean.dtype))

    def _filter(self, bound: Bound, streams: Streams, num_particles: int | None = None) -> Particles:
        num_particles = num_particles or self.num_particles
        return particle.filter(bound, bound.observations.lengths, num_particles, streams, resampling=self.resampling, threshold=self.threshold)

    def _paths(self, particles: Particles, streams: Streams, num_paths: int) -> Tensor:
        if self.smoothing == "backward":
            return particle.backward_simulation(particles, num_paths, streams).states
        return particle.genealogy(particles, num_paths, streams).states

    def _streams(self, positions: Sequence[int], *words: int | str) -> Streams:
        """One for each sequence, by its place among all: never by the rank, or by what else is beside it."""
        return Streams([generator(self.seed, *words, position) for position in positions])

    # Questions to ask

    def _pieces(self, sequences: Any, num_particles: int | None = None) -> Iterator[tuple[Sequences, range]]:
        """The sequences, fit for the model, so many at a time that their particles fit into memory, and their numbers."""
        sequences = self.as_sequences(sequences)
        sequences.check(None, self.num_features)
        if not bool(self.located):
            raise ValueError(
                "The model must have been trained, or `initialise(sequences)` called, before it can be asked: its units are those of training data."
            )
        longest = int(sequences.lengths.max()) if len(sequences) else 0
        size = max(1, _AT_ONCE // (max(longest, 1) * (num_particles or self.num_particles)))
        for first in range(0, len(sequences), size):
            yield sequences[first : first + size], range(first, min(first + size, len(sequences)))

    @torch.no_grad()
    def score(self, sequences: Any, runs: int = 4, num_particles: int | None = None, return_error: bool = False) -> Any:
        """(N,) the natural log-likelihood of each sequence: log of the mean of the unbiased estimates of some runs.

        With `return_error` a `Score` that has their standard errors too (jackknife over the runs, of which there must be 2 at least).
        """
        check_counts(runs=runs, num_particles=num_particles)
        if return_error and runs < 2:
            raise ValueError(f"`runs` must be at least 2 for a standard error, but is {runs} instead.")
        found = []
        for piece, numbers in self._pieces(sequences, num_particles):
            bound = self.bind(piece)
            estimates = [self._filter(bound, self._streams(numbers, "score", run), num_particles).log_evidence.double().sum(0) for run in range(runs)]
            found.append(torch.stack(estimates))
        estimates = torch.cat(found, 1) if found else torch.zeros(runs, 0, dtype=torch.float64)
        mean = estimates.logsumexp(0) - math.log(runs)
        if not return_error:
            return mean
        others = torch.stack([torch.cat([estimates[:run], estimates[run + 1 :]]).logsumexp(0) - math.log(runs - 1) for run in range(runs)])
        return Score(mean, ((runs - 1) / runs * (others - others.mean(0)).square().sum(0)).sqrt())

    @torch.no_grad()
    def decode(self, sequences: Any, num_paths: int | None = None, num_particles: int | None = None) -> Decoded:
        """Smoothed states: moments and paths, both from `num_paths` draws, 4 times those of training if not given."""
        num_paths = num_paths or 4 * self.num_paths
        sequences, paths = self.as_sequences(sequences), []
        for piece, numbers in self._pieces(sequences, num_particles):
            found = self._filter(self.bind(piece), self._streams(numbers, "decode"), num_particles)
            drawn = self._paths(found, self._streams(numbers, "decode", "paths"), num_paths)
            paths.append(piece.packed(drawn.transpose(0, 1)))
        packed = torch.cat(paths) if paths else torch.zeros(0, num_paths, self.latent_dim)
        return Decoded(sequences.with_values(packed.mean(1)), sequences.with_values(packed.var(1, correction=0)), packed)

    def latents(self, sequences: Any, num_particles: int | None = None) -> Sequences:
        """(steps, d) smoothed means of the state."""
        return self.decode(sequences, num_particles=num_particles).mean

    def cluster_latents(self, sequences: Any, num_clusters: int, num_particles: int | None = None) -> Sequences:
        """The cluster of each step, by k-means of the smoothed means of all of them."""
        from sklearn.cluster import KMeans  # takes a second to import

        latents = self.latents(sequences, num_particles)
        if not 1 <= num_clusters <= latents.num_steps:
            raise ValueError(f"`num_clusters` must be from 1 to the number of steps, {latents.num_steps}, but is {num_clusters} instead.")
        found = KMeans(num_clusters, n_init=10, random_state=self.seed).fit_predict(latents.values.double().cpu().numpy())
        return latents.with_values(torch.as_tensor(found, dtype=torch.int64))

    @torch.no_grad()
    def predict_each(self, sequences: Any, num_particles: int | None = None) -> Sequences:
        """(steps, D) what is expected at each step from those before it."""
        sequences, found = self.as_sequences(sequences), []
        for piece, numbers in self._pieces(sequences, num_particles):
            bound = self.bind(piece)
            particles = self._filter(bound, self._streams(numbers, "each"), num_particles)
            found.append(piece.packed(self._expected(bound, particles, self._streams(numbers, "each", "ahead")).transpose(0, 1)))
        return sequences.with_values(torch.cat(found) if found else torch.zeros(0, len(self.centre), dtype=torch.float64))

    def _expected(self, bound: Bound, particles: Particles, streams: Streams) -> Tensor:
        """(T, B, D) E[y_t | y_1:t-1] in float64."""
        observations, means = bound.observations, []
        for t in range(len(particles.states)):
            density = particles.transitions[t - 1] if t else bound.initial(particles.states.shape[2])
            weights = particles.log_weights[t - 1].exp() if t else torch.full_like(particles.log_weights[0], 1 / particles.states.shape[2])
            means.append((weights.unsqueeze(2) * bound.emission(t, density.sample(streams)).mean).sum(1))
        mean = torch.stack(means).double() if means else observations.base[:0]
        return self.in_data_units(mean, observations.base[:-1], observations.unseen[:-1])

    def in_data_units(self, mean: Tensor, base: Tensor, unseen: Tensor) -> Tensor:
        """Means of observations, from those of what the emission describes; the first ones' where nothing was seen before."""
        mean = base + self.units.emitted * mean
        return torch.where(unseen, self.centre + self.units.scale * self.first_mean.double(), mean) if self.residual else mean

    @torch.no_grad()
    def predict_next(self, sequences: Any, steps: int = 1, level: float = 0.9, num_particles: int | None = None) -> Prediction:
        """The observation `steps` after the end of each sequence: mean and variance, and bounds that hold `level` of the probability."""
        check_counts(steps=steps)
        if not 0 < level < 1:
            raise ValueError(f"`level` must be between 0 and 1, but is {level} instead.")
        found = []
        for piece, numbers in self._pieces(sequences, num_particles):
            bound = self.bind(piece)
            particles = self._filter(bound, self._streams(numbers, "next"), num_particles)
            streams = self._streams(numbers, "next", "ahead")
            run = Rollout.after(self, bound, particles, streams)
            for _ in range(steps):
                emitted = run.step(streams)
            found.append(Prediction(*run.summary(emitted, level)))
        if not found:
            return Prediction(*(torch.zeros(0, len(self.centre), dtype=torch.float64) for _ in range(4)))
        return Prediction(*(torch.cat(parts) for parts in zip(*found, strict=True)))

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
        values, states = (
            shape.with_values(shape.packed(torch.cat(parts, 1)) if steps else shape.values[:, :0])
            for parts in (zip(*steps, strict=True) if steps else ((), ()))
        )
        return (values, states) if return_states else values

    # Training

    @property
    def starts_from_data(self) -> bool:
        return not bool(self.located)

    def initialise(self, sequences: Sequences) -> None:
        """Takes the units of observations and of their changes from the data."""
        sequences.check(None, self.num_features)
        if not bool((sequences.lengths > 1).any()):
            raise ValueError("Sequences must have at least two steps somewhere for a transition to be learned, but each has one step or none.")
        centre, scale = data_location(sequences)
        self.centre.copy_(centre)
        self.scale.copy_(scale)
        self.change.copy_(_mean_square_change(sequences, scale))
        self.located.fill_(True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate, fused=self.device.type in ("cpu", "cuda"))

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._effective_size.reset()
        if self.initial_mean.dtype != getattr(torch, self.arithmetic):
            raise ValueError(f"`precision` must be that of the networks' parameters, but is {self.arithmetic} instead. Give the model that `arithmetic`.")

    def on_train_start(self) -> None:
        if not bool(self.located):
            raise ValueError(
                "Observations are in units of the training data, which a plain DataLoader does not show as a whole. "
                "Call `model.initialise(sequences)` before training, or train with a datamodule or `lightning_hmm.fit`."
            )

    @property
    def _rate(self) -> float:
        """The factor of the learning rate, by how much of the training is done."""
        trainer = self.trainer
        if self.schedule == "constant" or trainer.max_epochs is None or trainer.max_epochs < 1:
            return 1.0
        batches = float(trainer.num_training_batches)
        done = (self.current_epoch + self._batch / batches) / trainer.max_epochs
        return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))

    @property
    def _fine_tuning(self) -> bool:
        last = self.trainer.max_epochs
        return last is not None and last > 0 and self.current_epoch >= last - self.fine_tuning_epochs

    def _chosen(self, batch: Sequences, batch_idx: int) -> tuple[Sequences, list[int]]:
        """The sequences of this E-step, and their places in the batch of all ranks together."""
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        places = torch.arange(len(batch)) * world_size + rank
        if self.e_step_fraction == 1 or self._fine_tuning:
            return batch, places.tolist()
        total = int(self._sum_over_ranks(torch.tensor(len(batch), device=self.device)))
        order = torch.randperm(total, generator=generator(self.seed, "fraction", self.current_epoch, batch_idx))
        drawn = torch.zeros(total, dtype=torch.bool)
        drawn[order[: max(1, round(self.e_step_fraction * total))]] = True
        return batch[drawn[places]], places[drawn[places]].tolist()

    def training_step(self, batch: Sequences, batch_idx: int) -> None:
        self._require_sequences(batch)
        batch.check(None, self.num_features)
        self._batch = batch_idx
        batch, places = self._chosen(batch, batch_idx)
        words = (self.current_epoch, batch_idx)
        weights = torch.ones(len(batch), dtype=torch.float64, device=self.device) if batch.weights is None else batch.weights
        with torch.no_grad():
            bound = self.bind(batch)
            particles = self._filter(bound, self._streams(places, "filter", *words))
            paths = self._paths(particles, self._streams(places, "paths", *words), self.num_paths)
        inside = bound.observations.inside
        self.train_likelihood.update(particles.log_likelihood.double() @ weights, batch.num_observed())
        self._effective_size.update(particles.effective_size[inside] / self.num_particles)
        self._m_step(PathDensity(bound, paths, weights), float(self._sum_over_ranks(torch.as_tensor(batch.num_observed(), device=self.device))))

    def _m_step(self, density: PathDensity, num_steps: float) -> None:
        optimizer: Any = self.optimizers()
        for group in optimizer.param_groups:
            group["lr"] = self.learning_rate * self._rate
        for step in range(self.m_steps):
            _, gradients = density.gradient()
            together = self._sum_over_ranks(torch.cat([gradient.flatten() for gradient in gradients])) / -max(num_steps, 1.0)
            sizes = [gradient.numel() for gradient in gradients]
            for parameter, gradient in zip(self.parameters(), together.split(sizes), strict=True):
                parameter.grad = gradient.view_as(parameter).clone()
            nn.utils.clip_grad_norm_(self.parameters(), self.gradient_clip)
            # Lightning counts the last of them.
            (optimizer if step == self.m_steps - 1 else optimizer.optimizer).step()

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        total: Tensor = self.trainer.strategy.reduce(value, reduce_op="sum")
        return total

    def on_train_epoch_end(self) -> None:
        if self._effective_size.update_called:
            self.log("train/effective_size", self._effective_size.compute())
        self._effective_size.reset()
        super().on_train_epoch_end()

    # Validation, test, prediction

    def _update(self, metric: LogLikelihoodPerSymbol, batch: Sequences) -> None:
        self._evaluate(batch, 0, metric)

    def _evaluate(self, batch: Sequences, batch_idx: int, likelihood: LogLikelihoodPerSymbol, error: PredictionError | None = None) -> None:
        """The same random numbers each time, so that epochs differ by the model alone."""
        self._require_sequences(batch)
        batch.check(None, self.num_features)
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        places = range(rank, rank + world_size * len(batch), world_size)
        with torch.no_grad():
            bound = self.bind(batch)
            particles = self._filter(bound, self._streams(places, "evaluate", batch_idx))
            scores = particles.log_likelihood.double()
            likelihood.update(scores.sum() if batch.weights is None else scores @ batch.weights, batch.num_observed())
            if error is not None:
                expected = self._expected(bound, particles, self._streams(places, "evaluate", "ahead", batch_idx))
                error.update(batch.packed(expected.transpose(0, 1)), batch)

    def validation_step(self, batch: Sequences, batch_idx: int) -> None:
        self._evaluate(batch, batch_idx, self.val_likelihood, self.val_error)

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self._log_error("val", self.val_error)

    def test_step(self, batch: Sequences, batch_idx: int) -> None:
        self._evaluate(batch, batch_idx, self.test_likelihood, self.test_error)

    def on_test_epoch_end(self) -> None:
        super().on_test_epoch_end()
        self._log_error("test", self.test_error)

    def _log_error(self, part: str, metric: PredictionError) -> None:
        self.log(f"{part}/prediction_error", metric.compute(), prog_bar=part == "val")
        metric.reset()

    def predict_step(self, batch: Sequences, batch_idx: int) -> dict[str, Any]:
        """The smoothed state and what was expected at each step, and the log-likelihood of each sequence."""
        return {"latents": self.latents(batch), "predictions": self.predict_each(batch), "log_likelihood": self.score(batch)}


def _mean_square_change(sequences: Sequences, scale: Tensor) -> Tensor:
    """(D,) of a feature from one step to the next; the variance of the feature where it is never seen to change."""
    padded = sequences.padded().double().cpu()
    changes = (padded[:, 1:] - padded[:, :-1]).flatten(0, 1)
    there = ~changes.isnan()
    square = torch.where(there, changes, 0.0).square().sum(0) / there.sum(0).clamp(min=1)
    return torch.where(square > 0, square, scale)
