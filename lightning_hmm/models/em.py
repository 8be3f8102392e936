"""Training by Baum-Welch, batch or online, under the Lightning Trainer.

A family made of distributions names them (`distributions`); the gradient of the log-likelihood in their natural
parameters is the E-step, and the optimizer's step the M-step.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_hmm.distributions import Distribution
from lightning_hmm.models.base import HMM
from lightning_hmm.optim import BaumWelch
from lightning_hmm.sequences import Sequences


class BaumWelchHMM(HMM):
    """An HMM made of distributions that bring their maximiser.

    Args:
        discount: lambda of online EM; ``None`` for batch EM, which updates once an epoch from all batches.
        sequences_per_update: online EM only: updates after each so many sequences inside a training batch, so that small
            batches do not pay for a Lightning step each. ``None``: one update a batch.
        priors: options of the distributions' priors by their names.
        frozen: names of distributions that keep their parameters.
        kwargs: the words of `HMM`.
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
        self.automatic_optimization = sequences_per_update is None

    @property
    @abstractmethod
    def distributions(self) -> dict[str, Distribution]:
        """The model's parts by name, in the order of the arguments of the inference functions."""

    @property
    def num_free_parameters(self) -> int:
        """Degrees of freedom."""
        return sum(distribution.num_free_parameters for distribution in self.distributions.values())

    def _refuse_unsuited_trainer(self) -> None:
        super()._refuse_unsuited_trainer()
        trainer = self.trainer
        if trainer.gradient_clip_val is not None:
            raise MisconfigurationException(
                f"`trainer.gradient_clip_val` must not be set for EM, but is {trainer.gradient_clip_val} instead: "
                "gradients are expected counts, and clipping them pulls rows together."
            )

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
        self._users_accumulation = self.trainer.accumulate_grad_batches

    def on_train_epoch_start(self) -> None:
        if self.discount is None:
            # One M-step an epoch, from the gradients of all batches: Lightning steps at the last batch in any case. The number
            # is a power of two, so that dividing the loss by it and multiplying again changes no bit.
            self.trainer.accumulate_grad_batches = 2**31

    def on_fit_end(self) -> None:
        self.trainer.accumulate_grad_batches = self._users_accumulation

    def training_step(self, batch: Sequences, batch_idx: int) -> Tensor | None:
        if not self.automatic_optimization:
            self._many_updates(batch)
            return None
        loss = -self.total_log_likelihood(batch).sum()
        # Lightning divides the loss by the number of batches it accumulates, and DDP takes the mean over ranks. Counts must
        # be sums: the maximum likelihood does not notice the scale, a prior does.
        return loss * (self.trainer.accumulate_grad_batches * self.trainer.world_size)

    def _many_updates(self, batch: Sequences) -> None:
        """Online EM inside one training batch; in one compiled pass where that is possible."""
        assert self.sequences_per_update is not None
        optimizer: Any = self.optimizers()
        if self.trainer.world_size == 1 and self.device.type == "cpu" and self.fused_kernel is not None:
            scores = optimizer.optimizer.fused_pass(batch, self.sequences_per_update, self.fused_kernel)
            weights = torch.ones_like(scores[0]) if batch.weights is None else batch.weights
            counted = torch.where(weights == 0, torch.zeros_like(scores), scores * weights)  # zero times -inf would be NaN
            self.train_likelihood.update(counted.sum(1), batch.num_observed())
            optimizer.zero_grad()
            optimizer.step()  # moves nothing; it counts, and without a count no checkpoint would be written
            return
        # A global batch is dealt to the ranks one by one, so of its first n sequences a rank has every world_size-th.
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        total = int(self.trainer.strategy.reduce(torch.tensor(len(batch), device=self.device), reduce_op="sum"))
        cuts = [-(-(n - rank) // world_size) for n in range(0, total, self.sequences_per_update)] + [len(batch)]
        for first, last in pairwise(cuts):
            optimizer.zero_grad()
            self.manual_backward(-self.total_log_likelihood(batch[max(first, 0) : last]).sum() * world_size)
            optimizer.step()

    @property
    def fused_kernel(self) -> Any:
        """The compiled pass of many online updates, or ``None`` where the family has none."""
        return None

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        optimizer = self.optimizers()
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if isinstance(optimizer, BaumWelch):
            self._say_kept_rows(optimizer)

    def _say_kept_rows(self, optimizer: BaumWelch) -> None:
        for name, kept in optimizer.kept_rows.items():
            if name not in self._said and int(kept):
                self._said.add(name)
                warnings.warn(
                    f"{int(kept)} rows of `{name}` got no counts and keep their values: fewer states, or a pseudocount, may suit the data better.", stacklevel=2
                )
