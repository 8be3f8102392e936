"""The algorithm of Siddiqi & Moore (2005, section 4.4.1) for the selection of the entries of a mostly constant matrix.

`choose_lazily` selects the same entries as `selection.choose` with the criterion ``largest``. It computes upper bounds
from the largest terms, and exact sums only where the bounds require it. The text of the paper ranks by the sum over
alpha_t(i) kappa_t(j), without the factor a_ij of its equation 11. The likelihood can then decrease, so the factor is
included here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from experiments.dmc import lazy_loops as loops
from experiments.dmc.lazy_loops import Large, Messages, Old
from lightning_hmm import DMCHMM, Sequences
from lightning_hmm.inference.kernels.threads import num_shares, run_shares
from lightning_hmm.inference.operators import MostlyConstant
from lightning_hmm.inference.selection import Choice, Pairs, PairSums, choose, over_rows

_ROWS = 32  # rows of one call of the kernel


class FactoredPairSums(PairSums):
    """Pair sums that keep the messages of all batches."""

    def add(self, pairs: Pairs) -> None:
        self.factors.append(pairs)

    def messages(self) -> tuple[Tensor, Tensor]:
        """Returns the concatenated rows of `alpha` and of `kappa` of all batches."""
        size, none = self.num_states, [self.operator.log_constants.new_zeros(0, self.num_states)]
        alpha = torch.cat(none + [pairs.alpha[:, :size] for pairs in self.factors])
        kappa = torch.cat(none + [pairs.kappa[:, :size] for pairs in self.factors])
        return alpha, kappa


class LazyDMCHMM(DMCHMM):
    """A `DMCHMM` whose entries are selected lazily. The criterion must be ``largest``.

    In epochs with selection, `train/dot_products` is the mean number of exact sums over all steps per row.

    Attributes:
        bound_terms: Number of largest terms in a bound. By default a twentieth of the steps, as in the paper. It is not
            saved in checkpoints.
        dot_products: Number of exact sums of each row in the last selection, by restart.
    """

    bound_terms: int | None = None
    dot_products: Sequence[Tensor] = ()

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.criterion != "largest":
            raise ValueError(f"`criterion` must be largest for lazy selection, but is {self.criterion} instead.")

    def _new_pair_sums(self) -> list[PairSums]:
        self.dot_products = ()
        return super()._new_pair_sums()

    def _pair_sums_of(self, restart: int) -> PairSums:
        return FactoredPairSums(super()._pair_sums_of(restart).operator)

    def _uses_full_matrix(self, operator: MostlyConstant, batch: Sequences) -> bool:
        return False  # The bounds are computed from the messages.

    def _choose(self, restart: int, sums: PairSums) -> Choice:
        assert isinstance(sums, FactoredPairSums)
        alpha, kappa = (self.gather_rows(part) for part in sums.messages())
        pseudocount = self.transition.prior["pseudocount"]
        if len(alpha) < 2:
            return choose(sums, self.criterion, pseudocount, self._sum_over_ranks)
        kept, rest = (counts[restart] for counts in self._counts["transition"])
        choice, exact = choose_lazily(alpha, kappa, sums.operator, kept, rest, self.bound_terms, pseudocount)
        self.dot_products = [*self.dot_products, exact]
        return choice

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        if self.dot_products:
            self.log("train/dot_products", self.dot_products[int(self.best_restart)].double().mean())


def default_bound_terms(num_steps: int) -> int:
    """Returns R, the number of terms in the bounds: a twentieth of the steps, as in the paper."""
    return max(1, num_steps // 20)


def choose_lazily(
    alpha: Tensor,
    kappa: Tensor,
    operator: MostlyConstant,
    kept: Tensor,
    rest: Tensor,
    bound_terms: int | None = None,
    pseudocount: float = 0.0,
) -> tuple[Choice, Tensor]:
    """Selects the K largest entries of each row, using upper bounds to avoid most of the exact sums.

    Args:
        alpha: (T, N) messages of all data, as in `Pairs`.
        kappa: (T, N) messages of all data, as in `Pairs`.
        operator: Transitions of the epoch.
        kept: (N, K) exact counts of the entries that are kept at present.
        rest: (N,) exact sums of the counts of all other entries.
        bound_terms: R, the number of largest terms of each alpha(i) and kappa(j) from which the bounds are computed.
        pseudocount: Number that is added to the expected count of each possible transition for the comparison.

    Returns:
        The selected entries, and the (N,) number of exact sums that were computed for each row.
    """
    size, num_steps = len(operator.indices), len(alpha) - 1
    if num_steps < 1:
        raise ValueError("`alpha` and `kappa` must hold at least two steps, but there is no transition in them.")
    num_terms = default_bound_terms(num_steps) if bound_terms is None else bound_terms
    if not 1 <= num_terms <= num_steps:
        raise ValueError(
            f"`bound_terms` must be from 1 to {num_steps}, the transitions in the data, but is {num_terms} instead."
        )
    rows, following = (np.ascontiguousarray(part.cpu().numpy()[:, :size]) for part in (alpha[:-1], kappa[1:]))
    messages = Messages(rows, following, np.ascontiguousarray(rows.T), np.ascontiguousarray(following.T))
    given = operator.indices, operator.log_values, operator.log_constants, kept.double(), rest.double()
    old = Old(*(tensor.detach().cpu().contiguous().numpy() for tensor in given), float(pseudocount))
    choice = Choice(
        *(torch.from_numpy(np.empty_like(like)) for like in (old.indices, old.log_values, old.log_values)),
        torch.empty(size, dtype=torch.float64),
        torch.empty(size, dtype=torch.int64),
    )
    exact = torch.empty(size, dtype=torch.int64)
    large = _large_entries(messages.alpha_columns, num_terms), _large_entries(messages.kappa_columns, num_terms)
    outputs = [tensor.numpy() for tensor in (*choice, exact)]
    blocks = range(0, size, _ROWS)
    shares = num_shares(len(blocks), 0)

    def work(share: int) -> None:
        for first in blocks[share::shares]:
            loops.lazy_rows(first, min(first + _ROWS, size), messages, *large, old, *outputs)

    run_shares(shares, work)
    return Choice(*(part.to(alpha.device) for part in choice)), exact.to(alpha.device)


def _large_entries(columns: np.ndarray, num_terms: int) -> Large:
    """Returns the entries of all rows of `columns` (states by steps) that are above the `num_terms`-th largest."""
    size = len(columns)
    places, counts = np.empty((size, num_terms), np.int64), np.empty(size, np.int64)
    large = Large(places, counts, np.empty(size, columns.dtype), np.empty(size))
    over_rows(size, loops.large_entries, columns, num_terms, *large)
    return large
