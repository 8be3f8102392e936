"""EM with particles and gradients, as a training loop under the Lightning Trainer."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from lightning_hmm.inference import particle
from lightning_hmm.inference.particle import Particles, Resampling, Streams
from lightning_hmm.metrics import LogLikelihoodPerSymbol, PredictionError
from lightning_hmm.models.neural.state_space import BoundModel, PathDensity
from lightning_hmm.models.prediction_errors import PredictionErrors
from lightning_hmm.models.sequence_model import check_choices, check_counts, check_positive
from lightning_hmm.random import generator
from lightning_hmm.sequences import Sequences

Smoothing = Literal["backward", "genealogy"]
Schedule = Literal["cosine", "constant"]


class ParticleEM(PredictionErrors):
    """Base class of models that are trained by EM with particles.

    Each batch is one EM iteration. The E-step draws paths of the state given the sequences of the batch, and the M-step
    takes some gradient steps on the log-density of paths and observations.

    The random numbers depend only on the seed, the epoch, the batch and the position of a sequence in the global batch
    of all ranks. In float64 the number of ranks changes the result by rounding only. In float32 it changes the random
    run, because resampling amplifies differences in rounding.

    Args:
        num_particles: Number of particles for each sequence.
        num_paths: Number of paths that are drawn for the M-step, for each sequence.
        smoothing: How paths are drawn: "backward" simulation, or the "genealogy" of the particles.
        resampling: How particles are resampled: "systematic", "stratified" or "multinomial".
        threshold: Particles are resampled where their effective number is below this fraction of `num_particles`.
        m_steps: Number of gradient steps of an M-step.
        learning_rate: Learning rate of Adam at the start of training.
        schedule: Schedule of the learning rate: "cosine" lets it fall to 0 at the end of training, "constant" keeps it.
        gradient_clip: Largest norm of a gradient.
        e_step_fraction: Fraction of the sequences of a batch, drawn at random, that an E-step uses.
        fine_tuning_epochs: Number of epochs at the end of training in which an E-step uses all sequences.
        seed: Seed for the initial parameters and the particles.
        kwargs: Forwarded to `SequenceModel`.
    """

    def __init__(
        self,
        *,
        num_particles: int,
        num_paths: int,
        smoothing: Smoothing,
        resampling: Resampling,
        threshold: float,
        m_steps: int,
        learning_rate: float,
        schedule: Schedule,
        gradient_clip: float,
        e_step_fraction: float,
        fine_tuning_epochs: int,
        seed: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_counts(num_particles=num_particles, num_paths=num_paths, m_steps=m_steps)
        check_counts(0, fine_tuning_epochs=fine_tuning_epochs)
        check_positive(learning_rate=learning_rate, gradient_clip=gradient_clip)
        check_choices(Smoothing, smoothing=smoothing)
        check_choices(Resampling, resampling=resampling)
        check_choices(Schedule, schedule=schedule)
        if not 0 <= threshold <= 1:
            raise ValueError(f"`threshold` must be from 0 to 1, but is {threshold} instead.")
        if not 0 < e_step_fraction <= 1:
            raise ValueError(f"`e_step_fraction` must be above 0 and at most 1, but is {e_step_fraction} instead.")
        self.automatic_optimization = False  # several optimizer steps for each batch
        self.num_particles = num_particles
        self.num_paths = num_paths
        self.smoothing = smoothing
        self.resampling: Resampling = resampling
        self.threshold = threshold
        self.m_steps = m_steps
        self.learning_rate = learning_rate
        self.schedule = schedule
        self.gradient_clip = gradient_clip
        self.e_step_fraction = e_step_fraction
        self.fine_tuning_epochs = fine_tuning_epochs
        self.seed = seed
        self._effective_size = MeanMetric()
        self._batch_idx = 0

    @abstractmethod
    def bind(self, sequences: Sequences) -> BoundModel:
        """The model, bound to sequences for the particle filter."""

    @abstractmethod
    def expected(self, bound: BoundModel, particles: Particles, streams: Streams) -> Tensor:
        """(T, B, D) E[y_t | y_1:t-1] in float64."""

    # The parts of an E-step

    def filter_particles(self, bound: BoundModel, streams: Streams, num_particles: int | None = None) -> Particles:
        """Runs the particle filter; with `num_particles` particles instead of the model's own number if given."""
        return particle.filter(
            bound,
            bound.observations.lengths,
            num_particles or self.num_particles,
            streams,
            resampling=self.resampling,
            threshold=self.threshold,
        )

    def draw_paths(self, particles: Particles, streams: Streams, num_paths: int) -> Tensor:
        """(T, B, M, d) paths of the state given the sequences."""
        if self.smoothing == "backward":
            return particle.backward_simulation(particles, num_paths, streams).states
        return particle.genealogy(particles, num_paths, streams).states

    def streams(self, positions: Sequence[int], *key: int | str) -> Streams:
        """One stream of random numbers for each sequence, which depends on the seed, the key and its position only."""
        return Streams([generator(self.seed, *key, position) for position in positions])

    # Training

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate, fused=self.device.type in ("cpu", "cuda"))

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._effective_size.reset()
        if next(self.parameters()).dtype != getattr(torch, self.arithmetic):
            raise ValueError(
                f"`precision` must be that of the networks' parameters, but is {self.arithmetic} instead. "
                "Give the model that `arithmetic`."
            )

    @property
    def _rate(self) -> float:
        """The factor of the learning rate, which depends on the progress of training."""
        trainer = self.trainer
        if self.schedule == "constant" or trainer.max_epochs is None or trainer.max_epochs < 1:
            return 1.0
        batches = float(trainer.num_training_batches)
        done = (self.current_epoch + self._batch_idx / batches) / trainer.max_epochs
        return 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))

    @property
    def _is_fine_tuning(self) -> bool:
        last = self.trainer.max_epochs
        return last is not None and last > 0 and self.current_epoch >= last - self.fine_tuning_epochs

    def _subsample(self, batch: Sequences, batch_idx: int) -> tuple[Sequences, list[int]]:
        """The sequences that this E-step uses, and their positions in the global batch of all ranks."""
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        positions = torch.arange(len(batch)) * world_size + rank
        if self.e_step_fraction == 1 or self._is_fine_tuning:
            return batch, positions.tolist()
        total = int(self._sum_over_ranks(torch.tensor(len(batch), device=self.device)))
        order = torch.randperm(total, generator=generator(self.seed, "fraction", self.current_epoch, batch_idx))
        is_drawn = torch.zeros(total, dtype=torch.bool)
        is_drawn[order[: max(1, round(self.e_step_fraction * total))]] = True
        return batch[is_drawn[positions]], positions[is_drawn[positions]].tolist()

    def training_step(self, batch: Sequences, batch_idx: int) -> None:
        self._require_sequences(batch)
        batch.check(None, self.num_features)
        self._batch_idx = batch_idx
        batch, positions = _counted(*self._subsample(batch, batch_idx))
        key = (self.current_epoch, batch_idx)
        weights = torch.ones(len(batch), dtype=torch.float64, device=self.device)
        if batch.weights is not None:
            weights = batch.weights
        with torch.no_grad():
            bound = self.bind(batch)
            particles = self.filter_particles(bound, self.streams(positions, "filter", *key))
            paths = self.draw_paths(particles, self.streams(positions, "paths", *key), self.num_paths)
        inside = bound.observations.inside
        self.train_likelihood.update(particles.log_likelihood.double() @ weights, batch.num_observed())
        fractions = particles.effective_size[inside] / self.num_particles
        self._effective_size.update(fractions, weights.expand(inside.shape)[inside])
        num_observed = self._sum_over_ranks(torch.as_tensor(batch.num_observed(), device=self.device))
        self._m_step(PathDensity(bound, paths, weights), float(num_observed))

    def _m_step(self, density: PathDensity, num_steps: float) -> None:
        optimizer: Any = self.optimizers()
        for group in optimizer.param_groups:
            group["lr"] = self.learning_rate * self._rate
        for step in range(self.m_steps):
            _, gradients = density.gradient()
            self._set_gradients(gradients, -max(num_steps, 1.0))
            nn.utils.clip_grad_norm_(self.parameters(), self.gradient_clip)
            # Lightning counts the last step only, so that `global_step` advances once per batch.
            (optimizer if step == self.m_steps - 1 else optimizer.optimizer).step()

    def on_train_epoch_end(self) -> None:
        if self._effective_size.update_called:
            self.log("train/effective_size", self._effective_size.compute())
        self._effective_size.reset()
        super().on_train_epoch_end()

    # Validation and test

    def _update_likelihood(self, metric: LogLikelihoodPerSymbol, batch: Sequences) -> None:
        self._evaluate(batch, 0, metric)

    def _evaluate(
        self,
        batch: Sequences,
        batch_idx: int,
        likelihood: LogLikelihoodPerSymbol,
        error: PredictionError | None = None,
    ) -> None:
        """Updates metrics, with the same random numbers in every epoch, so that epochs differ by the model only."""
        self._require_sequences(batch)
        batch.check(None, self.num_features)
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        batch, positions = _counted(batch, list(range(rank, rank + world_size * len(batch), world_size)))
        with torch.no_grad():
            bound = self.bind(batch)
            particles = self.filter_particles(bound, self.streams(positions, "evaluate", batch_idx))
            scores = particles.log_likelihood.double()
            total = scores.sum() if batch.weights is None else scores @ batch.weights
            likelihood.update(total, batch.num_observed())
            if error is not None:
                expected = self.expected(bound, particles, self.streams(positions, "evaluate", "ahead", batch_idx))
                error.update(batch.packed(expected.transpose(0, 1)), batch)

    def validation_step(self, batch: Sequences, batch_idx: int) -> None:
        self._evaluate(batch, batch_idx, self.val_likelihood, self.val_error)

    def test_step(self, batch: Sequences, batch_idx: int) -> None:
        self._evaluate(batch, batch_idx, self.test_likelihood, self.test_error)


def _counted(batch: Sequences, positions: list[int]) -> tuple[Sequences, list[int]]:
    """The sequences whose weight is not 0, and their positions."""
    if batch.weights is None:
        return batch.counted(), positions
    pairs = zip(positions, batch.weights.tolist(), strict=True)
    return batch.counted(), [position for position, weight in pairs if weight > 0]
