"""The Baum-Welch training loop, for batch and online EM.

A model provides its distributions and its E-step. The loop adds up the expected statistics of the batches, sums them
over the ranks once per update, and passes them to the optimizer, whose step is the M-step.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

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
        discount: Discount factor (lambda) of online EM. If ``None``, batch EM updates the parameters once per epoch
            from all batches.
        sequences_per_update: Number of sequences per update of online EM. Several updates then run inside one training
            batch, which reduces the overhead of Lightning's steps. If ``None``, each batch is one update.
        iterations_per_epoch: Number of batch-EM iterations in each epoch of the Trainer. Values above 1 are for small
            data, for which the overhead of an epoch exceeds the time of an iteration. The training data must then be
            one batch. Validation and callbacks run after the last iteration of an epoch. A callback with the method
            ``on_iteration_end(trainer, pl_module, likelihoods)`` is called after each iteration and can stop training
            by setting ``trainer.should_stop``.
        frozen: Names of the distributions whose parameters are not updated.
        **kwargs: Forwarded to the next class in the order of inheritance, in the end to `SequenceModel`.
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
            raise ValueError("`sequences_per_update` requires online EM. Set `discount` as well.")
        check_counts(iterations_per_epoch=iterations_per_epoch)
        if iterations_per_epoch > 1 and discount is not None:
            raise ValueError("`iterations_per_epoch` requires batch EM. Leave out either it or `discount`.")
        self.discount, self.sequences_per_update = discount, sequences_per_update
        self.iterations_per_epoch = iterations_per_epoch
        # For each EM iteration of the present epoch, the (restarts,) log-likelihoods per symbol before its update. The
        # list is empty if an epoch is one iteration.
        self.iteration_likelihoods: list[Tensor] = []
        self.frozen = tuple(frozen)
        # Batch EM updates once per epoch from the counts of all batches and ranks. Lightning's automatic optimization
        # cannot do this.
        self.automatic_optimization = False
        self._reported: set[str] = set()  # distributions with a warning about rows without counts
        self._clear_counts()

    def _clear_counts(self) -> None:
        self._counts: dict[str, list[Tensor]] = {}  # accumulated on this rank since the last M-step
        self._num_sequences: Tensor | None = None  # the weighted number of sequences in them

    @property
    @abstractmethod
    def distributions(self) -> dict[str, Distribution]:
        """The distributions of the model by name."""

    @property
    def num_free_parameters(self) -> int:
        """The number of degrees of freedom of the best restart, without those of frozen distributions."""
        restart = int(self.best_restart)
        free = (part for name, part in self.distributions.items() if name not in self.frozen)
        return sum(part.num_free_parameters(restart) for part in free)

    def configure_optimizers(self) -> BaumWelch:
        data_size = None
        if self.discount is not None:
            data = data_of(self.trainer)
            data_size = None if data is None else data.train_size
            if data_size is None and self._has_prior:
                raise MisconfigurationException(
                    "Online EM with a prior requires the number of training sequences, which a plain `DataLoader` does "
                    "not expose. Train with `lightning_hmm.fit` or a `SequenceDataModule`."
                )
        return BaumWelch(self.distributions, self.discount, self.frozen, data_size)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._clear_counts()  # An interrupted run leaves counts behind.

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        for name, kept in self.rows_without_counts.items():
            if name not in self._reported and int(kept):
                self._reported.add(name)
                warnings.warn(
                    f"{int(kept)} rows of `{name}` got no counts and keep their values. "
                    "Consider fewer states or a pseudocount.",
                    stacklevel=2,
                )

    @property
    def never_decreases(self) -> bool:
        """Whether no update decreases the training likelihood, as in exact batch EM without priors."""
        return self.discount is None and not self._has_prior and self.arithmetic == "float64"

    @property
    def _has_prior(self) -> bool:
        return any(value for part in self.distributions.values() for value in part.prior.values())

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
        """Runs several iterations of batch EM on the one batch of an epoch. Lightning counts only the last."""
        if self.trainer.num_training_batches != 1:
            raise MisconfigurationException(
                f"`iterations_per_epoch` is {self.iterations_per_epoch}, which requires all data in one batch, but an "
                f"epoch has {self.trainer.num_training_batches} batches. Leave out `batch_size` or "
                "`iterations_per_epoch`."
            )
        self._require_sequences(batch)
        self.iteration_likelihoods = []
        step = self._prepared_iteration(batch)
        iteration, end = 0, self.iterations_per_epoch
        while iteration < end:
            last = iteration == end - 1
            scores = None if step is None or last else step()  # Lightning counts the step of the other branch.
            if scores is not None:
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
                end = iteration + 1  # One more iteration, which Lightning counts as its step.
        self.train_likelihood.update(*self._likelihood)

    def _prepared_iteration(self, batch: Sequences) -> Callable[[], Tensor | None] | None:
        """Returns a function that runs one iteration of batch EM faster than `_gather` and `_m_step`, or ``None``.

        It returns the (restarts, N) log-likelihoods, or ``None`` if it cannot run the iteration.
        """
        kernel, optimizer = self.compiled_kernel, cast(Any, self.optimizers()).optimizer
        if kernel is None or self.arithmetic != "float64" or not self._is_plain(batch):
            return None
        return lambda: optimizer.compiled_iteration(batch, kernel)

    def _record_likelihood(self, total: Tensor, observed: Tensor) -> None:
        """Updates the metric of the epoch with the (restarts,) log-likelihoods and the observed steps of a batch."""
        self._likelihood = total, observed
        if self.iterations_per_epoch == 1 or self.is_online:
            self.train_likelihood.update(total, observed)

    def _gather(self, batch: Sequences) -> None:
        """Adds the expected statistics of a batch to those accumulated since the last M-step."""
        for name, counts in self._e_step(batch).items():
            if name in self._counts:
                for total, part in zip(self._counts[name], counts, strict=True):
                    total += part
            else:
                self._counts[name] = counts
        # A sequence without steps contributes to no statistic.
        filled = (batch.lengths > 0).to(self.device, torch.float64)
        number = filled.sum() if batch.weights is None else filled @ batch.weights.to(filled)
        self._num_sequences = number if self._num_sequences is None else self._num_sequences + number

    @abstractmethod
    def _e_step(self, batch: Sequences) -> dict[str, list[Tensor]]:
        """Returns the expected statistics of a batch on this rank and updates `train_likelihood`.

        The result has, for each distribution, one tensor for each of its natural parameters.
        """

    def _m_step(self, counted: bool = True) -> None:
        """Sums the accumulated counts over the ranks and updates the parameters.

        Args:
            counted: Whether the update advances Lightning's `global_step`.
        """
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
        """Updates the parameters from the accumulated counts of all ranks."""
        optimizer: Any = self.optimizers()
        step = optimizer.step if counted else optimizer.optimizer.step
        step(counts=self._counts, num_sequences=self._num_sequences, discounted=self.is_online)

    @property
    def rows_without_counts(self) -> dict[str, Tensor]:
        """For each distribution, the number of rows that kept their values in the last M-step for lack of counts."""
        optimizer: Any = self.optimizers()
        kept: dict[str, Tensor] = optimizer.optimizer.rows_without_counts
        return kept

    def _many_updates(self, batch: Sequences) -> None:
        """Runs several updates of online EM on a training batch, in one compiled pass if there is one."""
        assert self.sequences_per_update is not None
        if self._is_plain(batch) and self.compiled_kernel is not None:
            optimizer: Any = self.optimizers()
            scores = optimizer.optimizer.compiled_pass(batch, self.sequences_per_update, self.compiled_kernel)
            self.train_likelihood.update(batch.weighted(scores).sum(1), batch.num_observed())
            # Without counts the parameters do not change. The call advances Lightning's step counter; `ModelCheckpoint`
            # saves nothing while it stays at zero.
            optimizer.step()
            return
        # The sampler gives rank r of W every W-th sequence of a global batch, from the r-th on.
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        total = int(self._sum_over_ranks(torch.tensor(len(batch), device=self.device)))
        cuts = [-(-(n - rank) // world_size) for n in range(0, total, self.sequences_per_update)] + [len(batch)]
        for number, (first, last) in enumerate(pairwise(cuts), 1):
            self._gather(batch[max(first, 0) : last])
            self._m_step(counted=number == len(cuts) - 1)  # One step per batch, as in the compiled pass.

    def _is_plain(self, batch: Sequences) -> bool:
        """Whether a batch is on the CPU of the only rank and has no known states, as compiled passes require."""
        return self.trainer.world_size == 1 and self.device.type == "cpu" and not batch.has_known_states

    @property
    def compiled_kernel(self) -> Any:
        """The compiled pass for online updates, or ``None`` if there is none for the distributions of the model."""
        return None
