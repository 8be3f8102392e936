"""The training loop of Baum-Welch, batch or online, for every model that is made of distributions.

The loop does not depend on the kind of states. A model provides its distributions and its E-step. The loop adds the expected statistics of batches,
sums them over ranks once, and passes them to the optimizer, whose step is the M-step.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_hmm.data import data_of
from lightning_hmm.distributions import Distribution
from lightning_hmm.models.sequence_model import SequenceModel, check_counts
from lightning_hmm.optim import BaumWelch
from lightning_hmm.sequences import Sequences


class BaumWelchTraining(SequenceModel):
    """A model that is trained by `BaumWelch`.

    Args:
        discount: lambda of online EM; ``None`` for batch EM, which updates once an epoch from all batches.
        sequences_per_update: online EM only: the number of sequences of an update. Several updates run inside one training batch, so that the
            cost of a Lightning step is paid once. ``None`` makes one update for each batch.
        iterations_per_epoch: batch EM only: EM iterations in each epoch of the Trainer, for data so small that the epoch of the Trainer takes
            longer than an iteration. An epoch must be one batch. Validation and callbacks see the last iteration of an epoch; a callback with a method
            ``on_iteration_end(trainer, pl_module, likelihoods)`` sees each, and can stop the training by ``trainer.should_stop``.
        frozen: names of distributions that keep their parameters.
        kwargs: the arguments of `SequenceModel`, or of the class that follows this one in the order of inheritance.
    """

    def __init__(
        self,
        *,
        discount: float | None = None,
        sequences_per_update: int | None = None,
        iterations_per_epoch: int = 1,
        frozen: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if sequences_per_update is not None and (not isinstance(sequences_per_update, int) or sequences_per_update < 1):
            raise ValueError(
                f"`sequences_per_update` must be a whole number of at least 1, but is {sequences_per_update} instead."
            )
        if discount is not None and (not isinstance(discount, (int, float)) or not 0 <= discount < 1):
            raise ValueError(f"`discount` must be at least 0 and below 1, but is {discount!r} instead.")
        if sequences_per_update is not None and discount is None:
            raise ValueError("`sequences_per_update` is for online EM: give `discount` too.")
        check_counts(iterations_per_epoch=iterations_per_epoch)
        if iterations_per_epoch > 1 and discount is not None:
            raise ValueError("`iterations_per_epoch` is for batch EM: leave it out, or leave out `discount`.")
        self.discount, self.sequences_per_update, self.iterations_per_epoch = (
            discount,
            sequences_per_update,
            iterations_per_epoch,
        )
        # (restarts,) per symbol, of each EM iteration of the present epoch, under the parameters before it; empty where an epoch is one iteration.
        self.iteration_likelihoods: list[Tensor] = []
        self.frozen = tuple(frozen)
        # Batch EM steps once per epoch, from the counts of all batches and ranks, which Lightning's automatic loop cannot do.
        self.automatic_optimization = False
        self._reported: set[str] = set()  # distributions whose rows without counts were reported
        self._clear_counts()

    def _clear_counts(self) -> None:
        self._counts: dict[str, list[Tensor]] = {}  # gathered on this rank since the last M-step
        self._num_sequences: Tensor | None = None  # the weighted number of sequences they come from

    @property
    @abstractmethod
    def distributions(self) -> dict[str, Distribution]:
        """The parts of the model by name."""

    @property
    def num_free_parameters(self) -> int:
        """The number of degrees of freedom of the chosen restart, without those of frozen parts."""
        chosen = int(self.chosen)
        return sum(
            part.num_free_parameters(chosen) for name, part in self.distributions.items() if name not in self.frozen
        )

    def configure_optimizers(self) -> BaumWelch:
        data_size = None
        if self.discount is not None:
            data = data_of(self.trainer)
            data_size = None if data is None else data.train_size
            if data_size is None and any(
                value for part in self.distributions.values() for value in part.prior.values()
            ):
                raise MisconfigurationException(
                    "Online EM with a prior depends on the number of training sequences. Train with `lightning_hmm.fit` or a `SequenceDataModule`."
                )
        return BaumWelch(self.distributions, self.discount, self.frozen, data_size)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._clear_counts()  # an interrupted run may have left some

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        for name, kept in self.rows_without_counts.items():
            if name not in self._reported and int(kept):
                self._reported.add(name)
                warnings.warn(
                    f"{int(kept)} rows of `{name}` got no counts and keep their values: fewer states, or a pseudocount, may suit the data better.",
                    stacklevel=2,
                )

    @property
    def never_decreases(self) -> bool:
        """Whether no update decreases the training likelihood, as in exact batch EM without priors."""
        has_prior = any(value for part in self.distributions.values() for value in part.prior.values())
        return self.discount is None and not has_prior and self.arithmetic == "float64"

    @property
    def is_online(self) -> bool:
        """Whether the current epoch updates the parameters after every batch."""
        return self.discount is not None

    def training_step(self, batch: Sequences, batch_idx: int) -> None:
        if self.is_online and self.sequences_per_update is not None:
            self._many_updates(batch)
            return
        if self.iterations_per_epoch > 1 and not self.is_online:
            self._iterate(batch)
            return
        self._gather(batch)
        if self.is_online or self.trainer.is_last_batch:
            self._m_step()

    def _iterate(self, batch: Sequences) -> None:
        """Several iterations of batch EM from the one batch of an epoch. Lightning counts the last one."""
        if self.trainer.num_training_batches != 1:
            raise MisconfigurationException(
                f"`iterations_per_epoch` is {self.iterations_per_epoch}, but an epoch has {self.trainer.num_training_batches} batches: several iterations need "
                "all data in one batch. Leave `batch_size` out, or leave out `iterations_per_epoch`."
            )
        self.iteration_likelihoods = []
        compiled = (
            self.trainer.world_size == 1
            and self.device.type == "cpu"
            and self.arithmetic == "float64"
            and self.compiled_kernel is not None
        )
        iteration, end = 0, self.iterations_per_epoch
        while iteration < end:
            last = iteration == end - 1
            if compiled and not last:  # the compiled pass does not report rows without counts; the last iteration does
                optimizer: Any = self.optimizers()
                scores = optimizer.optimizer.compiled_iteration(batch, self.compiled_kernel)
                self._likelihood = batch.weighted(scores).sum(1), batch.num_observed()
            else:
                self._gather(batch)
                self._m_step(counted=last)
            total, observed = self._likelihood
            if self.trainer.world_size > 1:
                total, observed = self._sum_over_ranks(total.clone()), self._sum_over_ranks(observed.clone())
            self.iteration_likelihoods.append(total / observed)
            for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
                if hasattr(callback, "on_iteration_end"):
                    callback.on_iteration_end(self.trainer, self, self.iteration_likelihoods[-1])
            iteration += 1
            if self.trainer.should_stop and not last:
                end = iteration + 1  # the iteration that Lightning counts
        self.train_likelihood.update(*self._likelihood)

    def _record_likelihood(self, total: Tensor, observed: Tensor) -> None:
        """Adds the (restarts,) weighted log-likelihoods of a batch, and its number of observed steps, to the metric of the epoch."""
        self._likelihood = total, observed
        if self.iterations_per_epoch == 1 or self.is_online:
            self.train_likelihood.update(total, observed)

    def _gather(self, batch: Sequences) -> None:
        """Adds the expected statistics of a batch to those gathered since the last M-step."""
        for name, counts in self._e_step(batch).items():
            if name in self._counts:
                for total, part in zip(self._counts[name], counts, strict=True):
                    total += part
            else:
                self._counts[name] = counts
        # A sequence without steps contributes nothing to a statistic.
        filled = (batch.lengths > 0).to(self.device, torch.float64)
        number = filled.sum() if batch.weights is None else filled @ batch.weights.to(filled)
        self._num_sequences = number if self._num_sequences is None else self._num_sequences + number

    @abstractmethod
    def _e_step(self, batch: Sequences) -> dict[str, list[Tensor]]:
        """The expected statistics of a batch on this rank, by distribution: one tensor for each of its parameters. Updates `train_likelihood`."""

    def _m_step(self, counted: bool = True) -> None:
        """Sums the gathered counts over the ranks, once, and updates the parameters. Only a `counted` update advances Lightning's `global_step`."""
        assert self._num_sequences is not None
        tensors = [self._num_sequences, *(tensor for counts in self._counts.values() for tensor in counts)]
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors) if self.trainer.world_size > 1 else ():
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            total = self._sum_over_ranks(torch.cat([tensor.flatten() for tensor in alike]))
            for tensor, part in zip(alike, total.split([tensor.numel() for tensor in alike]), strict=True):
                tensor.copy_(part.view_as(tensor))
        self._maximize(counted)
        self._clear_counts()

    def _maximize(self, counted: bool) -> None:
        """Updates the parameters from the gathered counts of all ranks."""
        optimizer: Any = self.optimizers()
        step = optimizer.step if counted else optimizer.optimizer.step
        step(counts=self._counts, num_sequences=self._num_sequences, discounted=self.is_online)

    @property
    def rows_without_counts(self) -> dict[str, Tensor]:
        """By distribution, the number of rows that got no counts in the last M-step and kept their values."""
        optimizer: Any = self.optimizers()
        kept: dict[str, Tensor] = optimizer.optimizer.rows_without_counts
        return kept

    def _many_updates(self, batch: Sequences) -> None:
        """Online EM with several updates per training batch, in one compiled pass where that is possible."""
        assert self.sequences_per_update is not None
        if self.trainer.world_size == 1 and self.device.type == "cpu" and self.compiled_kernel is not None:
            optimizer: Any = self.optimizers()
            scores = optimizer.optimizer.compiled_pass(batch, self.sequences_per_update, self.compiled_kernel)
            self.train_likelihood.update(batch.weighted(scores).sum(1), batch.num_observed())
            # Without counts the parameters stay as they are. The call advances Lightning's step counter; `ModelCheckpoint` saves
            # nothing while it stays at zero.
            optimizer.step()
            return
        # Sampler rule: rank r of W holds every W-th sequence of a global batch, from the r-th on.
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        total = int(self._sum_over_ranks(torch.tensor(len(batch), device=self.device)))
        cuts = [-(-(n - rank) // world_size) for n in range(0, total, self.sequences_per_update)] + [len(batch)]
        for number, (first, last) in enumerate(pairwise(cuts), 1):
            self._gather(batch[max(first, 0) : last])
            self._m_step(counted=number == len(cuts) - 1)  # once in a batch, as in the compiled pass

    @property
    def compiled_kernel(self) -> Any:
        """The compiled pass of many online updates, or ``None`` where the family has none."""
        return None
