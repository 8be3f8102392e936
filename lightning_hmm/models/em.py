"""Training by Baum-Welch, batch or online, under the Lightning Trainer.

A family made of distributions names them (`distributions`); the gradient of the log-likelihood in their natural
parameters is the E-step, and the optimizer's step the M-step.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from lightning_hmm.models.base import HMM
from lightning_hmm.models.training_loop import BaumWelchTraining
from lightning_hmm.optim import BaumWelch
from lightning_hmm.sequences import Sequences


class BaumWelchHMM(BaumWelchTraining, HMM):
    """An HMM made of distributions that bring their maximiser. `distributions` are in the order of the arguments of the inference functions.

    Args:
        kwargs: the arguments of `BaumWelchTraining` and of `HMM`.
    """

    @property
    def num_free_parameters(self) -> int:
        """The number of degrees of freedom of the chosen restart, without those of frozen parts."""
        chosen = int(self.chosen)
        return sum(distribution.num_free_parameters(chosen) for name, distribution in self.distributions.items() if name not in self.frozen)

    def _e_step(self, batch: Sequences) -> dict[str, list[Tensor]]:
        """The expected counts of a batch on this rank, by distribution: one tensor for each of its parameters."""
        names = [name for name, distribution in self.distributions.items() for _ in distribution.parameters()]
        parameters = [parameter for distribution in self.distributions.values() for parameter in distribution.parameters()]
        # Not `backward`: the hooks of DDP would reduce over the ranks after every batch.
        gradients = torch.autograd.grad(self.total_log_likelihood(batch).sum(), parameters, materialize_grads=True)
        counts: dict[str, list[Tensor]] = {name: [] for name in names}
        for name, gradient in zip(names, gradients, strict=True):
            counts[name].append(gradient)
        return counts

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
