"""EM with particles and gradients, under the Lightning Trainer: of a model that can be bound to sequences for a particle filter."""

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
from lightning_hmm.models.neural_state_space import Bound, PathDensity
from lightning_hmm.models.prediction_errors import PredictionErrors
from lightning_hmm.models.sequence_model import check_counts
from lightning_hmm.random import generator
from lightning_hmm.sequences import Sequences

Smoothing = Literal["backward", "genealogy"]
Schedule = Literal["cosine", "constant"]


class ParticleEM(PredictionErrors):
    """Each batch is an E-step, which draws paths of the state given its sequences, and some gradient steps on their log-density.

    Random numbers depend on seed, epoch, batch and the place of a sequence in the batch of all ranks together, and on nothing else. In float64 the number
    of ranks changes the result by rounding alone. In float32 it changes the random run, since resampling amplifies differences in rounding.

    Args:
        num_particles, num_paths, smoothing, resampling, threshold, m_steps, learning_rate, schedule, gradient_clip, e_step_fraction,
            fine_tuning_epochs, seed: as `NeuralHMM` has them.
        kwargs: the words of `SequenceModel`.
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
        for name, number in {"learning_rate": learning_rate, "gradient_clip": gradient_clip}.items():
            if not 0 < number < math.inf:
                raise ValueError(f"`{name}` must be positive, but is {number} instead.")
        if not 0 <= threshold <= 1:
            raise ValueError(f"`threshold` must be from 0 to 1, but is {threshold} instead.")
        if not 0 < e_step_fraction <= 1:
            raise ValueError(f"`e_step_fraction` must be above 0 and at most 1, but is {e_step_fraction} instead.")
        self.automatic_optimization = False  # several steps for each batch
        self.num_particles, self.num_paths, self.smoothing, self.resampling, self.threshold = num_particles, num_paths, smoothing, resampling, threshold
        self.m_steps, self.learning_rate, self.schedule, self.gradient_clip = m_steps, learning_rate, schedule, gradient_clip
        self.e_step_fraction, self.fine_tuning_epochs, self.seed = e_step_fraction, fine_tuning_epochs, seed
        self._effective_size, self._batch = MeanMetric(), 0

    @abstractmethod
    def bind(self, sequences: Sequences) -> Bound:
        """The model as `inference.particle` asks it about some sequences."""

    @abstractmethod
    def expected(self, bound: Bound, particles: Particles, streams: Streams) -> Tensor:
        """(T, B, D) E[y_t | y_1:t-1] in float64."""

    def filter_particles(self, bound: Bound, streams: Streams, num_particles: int | None = None) -> Particles:
        num_particles = num_particles or self.num_particles
        return particle.filter(bound, bound.observations.lengths, num_particles, streams, resampling=self.resampling, threshold=self.threshold)

    def draw_paths(self, particles: Particles, streams: Streams, num_paths: int) -> Tensor:
        if self.smoothing == "backward":
            return particle.backward_simulation(particles, num_paths, streams).states
        return particle.genealogy(particles, num_paths, streams).states

    def streams(self, positions: Sequence[int], *words: int | str) -> Streams:
        """One for each sequence, by its place among all: never by the rank, or by what else is beside it."""
        return Streams([generator(self.seed, *words, position) for position in positions])

    # Training

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate, fused=self.device.type in ("cpu", "cuda"))

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._effective_size.reset()
        if next(self.parameters()).dtype != getattr(torch, self.arithmetic):
            raise ValueError(f"`precision` must be that of the networks' parameters, but is {self.arithmetic} instead. Give the model that `arithmetic`.")

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
        batch, places = _counted(*self._chosen(batch, batch_idx))
        words = (self.current_epoch, batch_idx)
        weights = torch.ones(len(batch), dtype=torch.float64, device=self.device) if batch.weights is None else batch.weights
        with torch.no_grad():
            bound = self.bind(batch)
            particles = self.filter_particles(bound, self.streams(places, "filter", *words))
            paths = self.draw_paths(particles, self.streams(places, "paths", *words), self.num_paths)
        inside = bound.observations.inside
        self.train_likelihood.update(particles.log_likelihood.double() @ weights, batch.num_observed())
        self._effective_size.update(particles.effective_size[inside] / self.num_particles, weights.expand(inside.shape)[inside])
        self._m_step(PathDensity(bound, paths, weights), float(self._sum_over_ranks(torch.as_tensor(batch.num_observed(), device=self.device))))

    def _m_step(self, density: PathDensity, num_steps: float) -> None:
        optimizer: Any = self.optimizers()
        for group in optimizer.param_groups:
            group["lr"] = self.learning_rate * self._rate
        for step in range(self.m_steps):
            _, gradients = density.gradient()
            self._set_gradients(gradients, -max(num_steps, 1.0))
            nn.utils.clip_grad_norm_(self.parameters(), self.gradient_clip)
            # Lightning counts the last of them.
            (optimizer if step == self.m_steps - 1 else optimizer.optimizer).step()

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
        batch, places = _counted(batch, list(range(rank, rank + world_size * len(batch), world_size)))
        with torch.no_grad():
            bound = self.bind(batch)
            particles = self.filter_particles(bound, self.streams(places, "evaluate", batch_idx))
            scores = particles.log_likelihood.double()
            likelihood.update(scores.sum() if batch.weights is None else scores @ batch.weights, batch.num_observed())
            if error is not None:
                expected = self.expected(bound, particles, self.streams(places, "evaluate", "ahead", batch_idx))
                error.update(batch.packed(expected.transpose(0, 1)), batch)

    def validation_step(self, batch: Sequences, batch_idx: int) -> None:
        self._evaluate(batch, batch_idx, self.val_likelihood, self.val_error)

    def test_step(self, batch: Sequences, batch_idx: int) -> None:
        self._evaluate(batch, batch_idx, self.test_likelihood, self.test_error)


def _counted(batch: Sequences, places: list[int]) -> tuple[Sequences, list[int]]:
    """The sequences whose weight is not 0, and their places."""
    return batch.counted(), places if batch.weights is None else [place for place, weight in zip(places, batch.weights.tolist(), strict=True) if weight > 0]
