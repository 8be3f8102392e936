"""The training loop of Baum-Welch, batch or online, for every model that is made of distributions.

The loop does not depend on the kind of states. A model provides its distributions and its E-step. The loop adds the expected statistics of batches,
sums them over ranks once, and passes them to the optimizer, whose step is the M-step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_hmm.distributions import Distribution
from lightning_hmm.models.sequence_model import SequenceModel
from lightning_hmm.optim import BaumWelch
from lightning_hmm.sequences import Sequences


class BaumWelchTraining(SequenceModel):
    """A model that is trained by `BaumWelch`.

    Args:
        discount: lambda of online EM; ``None`` for batch EM, which updates once an epoch from all batches.
        sequences_per_update: online EM only: updates after each so many sequences inside a training batch, so that small
            batches do not pay for a Lightning step each. ``None``: one update a batch.
        priors: options of the distributions' priors by their names.
        frozen: names of distributions that keep their parameters.
        kwargs: the arguments of `SequenceModel`, or of the class that follows this one in the order of inheritance.
    """

    def __init__(
        self,
        *,
        discount: float | None = None,
        sequences_per_update: int | None = None,
        priors: Mapping[str, Mapping[str, float]] | None = None,
        frozen: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if sequences_per_update is not None and (not isinstance(sequences_per_update, int) or sequences_per_update < 1):
            raise ValueError(f"`sequences_per_update` must be a whole number of at least 1, but is {sequences_per_update} instead.")
        if discount is not None and not 0 <= discount < 1:
            raise ValueError(f"`discount` must be at least 0 and below 1, but is {discount} instead.")
        for part, options in (priors or {}).items():
            for name, number in options.items():
                if not number >= 0:
                    raise ValueError(f"`{part}_{name}` must not be negative, but is {number} instead.")
        if sequences_per_update is not None and discount is None:
            raise ValueError("`sequences_per_update` is for online EM: give `discount` too.")
        self.discount, self.sequences_per_update = discount, sequences_per_update
        self.priors, self.frozen = {name: dict(options) for name, options in (priors or {}).items()}, tuple(frozen)
        # Batch EM steps once per epoch, from the counts of all batches and ranks, which Lightning's automatic loop cannot do.
        self.automatic_optimization = False
        self._clear_counts()

    def _clear_counts(self) -> None:
        self._counts: dict[str, list[Tensor]] = {}  # gathered on this rank since the last M-step
        self._num_sequences: Tensor | None = None  # the weighted number of sequences they come from

    @property
    @abstractmethod
    def distributions(self) -> dict[str, Distribution]:
        """The parts of the model by name."""

    def configure_optimizers(self) -> BaumWelch:
        data_size = None
        if self.discount is not None:
            data_size = getattr(getattr(self.trainer, "datamodule", None), "train_size", None)
            if data_size is None and any(value for options in self.priors.values() for value in options.values()):
                raise MisconfigurationException(
                    "Online EM with a prior needs to know how many sequences there are: train with a datamodule that has `train_size`."
                )
        return BaumWelch(self.distributions, self.discount, self.priors, self.frozen, data_size)

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._clear_counts()  # an interrupted run may have left some

    @property
    def is_online(self) -> bool:
        """Whether the current epoch updates the parameters after every batch."""
        return self.discount is not None

    def training_step(self, batch: Sequences, batch_idx: int) -> None:
        if self.is_online and self.sequences_per_update is not None:
            self._many_updates(batch)
            return
        self._gather(batch)
        if self.is_online or self.trainer.is_last_batch:
            self._m_step()

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

    def _m_step(self) -> None:
        """Sums the gathered counts over the ranks, once, and updates the parameters."""
        assert self._num_sequences is not None
        tensors = [self._num_sequences, *(tensor for counts in self._counts.values() for tensor in counts)]
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors) if self.trainer.world_size > 1 else ():
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            total = self._sum_over_ranks(torch.cat([tensor.flatten() for tensor in alike]))
            for tensor, part in zip(alike, total.split([tensor.numel() for tensor in alike]), strict=True):
                tensor.copy_(part.view_as(tensor))
        optimizer: Any = self.optimizers()
        optimizer.step(counts=self._counts, num_sequences=self._num_sequences, discounted=self.is_online)
        self._clear_counts()

    def _many_updates(self, batch: Sequences) -> None:
        """Online EM with several updates per training batch, in one compiled pass where that is possible."""
        assert self.sequences_per_update is not None
        if self.trainer.world_size == 1 and self.device.type == "cpu" and self.fused_kernel is not None:
            optimizer: Any = self.optimizers()
            scores = optimizer.optimizer.fused_pass(batch, self.sequences_per_update, self.fused_kernel)
            self.train_likelihood.update(batch.weighted(scores).sum(1), batch.num_observed())
            # Without counts the parameters stay as they are. The call advances Lightning's step counter; `ModelCheckpoint` saves
            # nothing while it stays at zero.
            optimizer.step()
            return
        # Sampler rule: rank r of W holds every W-th sequence of a global batch, from the r-th on.
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        total = int(self._sum_over_ranks(torch.tensor(len(batch), device=self.device)))
        cuts = [-(-(n - rank) // world_size) for n in range(0, total, self.sequences_per_update)] + [len(batch)]
        for first, last in pairwise(cuts):
            self._gather(batch[max(first, 0) : last])
            self._m_step()

    @property
    def fused_kernel(self) -> Any:
        """The compiled pass of many online updates, or ``None`` where the family has none."""
        return None
