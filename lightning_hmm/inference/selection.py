r"""Selection of the entries that a mostly constant transition matrix keeps. It is part of the M-step.

Let :math:`S_{ij}` be the expected transitions and :math:`G_i = \sum_j S_{ij}`. The M-step for a given set of K entries
is :math:`a_{ij} = S_{ij} / G_i` for the kept entries and :math:`c_i = (G_i - \sum_{kept} S_{ij}) / ((N - K) G_i)` for
all others. Q is the expected log-likelihood after the M-step. There are two criteria:

- ``largest`` keeps the K largest :math:`S_{ij}`, unless the old set gives the row a higher Q. (The K largest entries
  can have a lower Q than the old set, and the likelihood would then decrease.)
- ``window`` keeps the set with the highest Q. The entries that share the constant should be similar, so they are an
  interval of the sorted row: the a largest and the K - a smallest entries are kept, for the best of the K + 1 values of
  a.

All entries of :math:`S` are computed as matrix products in blocks of rows. The algorithm of Siddiqi & Moore (2005),
which avoids most of these sums, was not faster in our measurements; it is in ``experiments/dmc/lazy.py``.

Ties are broken in favor of the column with the lower number. A row changes only if the gain exceeds rounding errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_hmm.inference.kernels import selection_loops as loops
from lightning_hmm.inference.kernels.simd import padded_size
from lightning_hmm.inference.kernels.threads import aligned_zeros, num_shares, run_shares
from lightning_hmm.inference.operators import MostlyConstant
from lightning_hmm.inference.results import EStep

CRITERIA = ("largest", "window")
_BLOCK_ENTRIES = 1 << 20  # entries of a block of rows
_TILE_ROWS = 128  # rows of one compiled product


class Pairs(NamedTuple):
    """Expected transitions of all pairs of states in factored form.

    E[i -> j] = A_ij sum_t alpha_t-1(i) kappa_t(j) + counts_ij, where the sum is over successive rows of `alpha` and
    `kappa`. The message kappa is zero at the first step of each sequence. Any of the three tensors may be empty. On a
    CPU, the rows of `alpha` and `kappa` are padded with zeros to a multiple of the vector width, for the compiled
    product.
    """

    alpha: Tensor
    kappa: Tensor
    counts: Tensor


def factored_pairs(operator: MostlyConstant, found: EStep, offsets: Tensor) -> Pairs:
    """Computes the pairs from an E-step with the filtered and smoothed rows of all steps.

    The message kappa_t(j) is the smoothed probability of a state divided by its predicted probability, alpha_t-1 A.
    """
    size, device = operator.num_states, found.filtered.device
    width = padded_size(size, found.filtered.element_size()) if device.type == "cpu" else size
    alpha = torch.nn.functional.pad(found.filtered, (0, width - size))
    kappa = torch.zeros_like(alpha)
    later = torch.ones(len(alpha), dtype=torch.bool)
    later[offsets[:-1][offsets.diff() > 0]] = False
    rows = torch.nonzero(later).flatten().to(device)
    constants = operator.log_constants.detach().exp()
    above = (operator.log_values.detach().exp() - constants[:, None]).flatten()
    sources = torch.arange(size, device=device).repeat_interleave(operator.indices.shape[1])
    places = torch.stack([operator.indices.flatten(), sources])  # transposed
    matrix = torch.sparse_coo_tensor(places, above, (size, size), check_invariants=False).coalesce()
    for part in rows.split(max(1, _BLOCK_ENTRIES // size)):
        before = found.filtered[part - 1]
        predicted = (matrix @ before.T).T + (before @ constants)[:, None]
        smoothed = found.smoothed[part]
        kappa[part, :size] = torch.where((predicted > 0) & (smoothed != 0), smoothed / predicted, 0.0)
    return Pairs(alpha, kappa, alpha.new_zeros(0, 0))


class Choice(NamedTuple):
    """Selected entries, and their counts for the M-step.

    indices: (N, K) columns of the selected entries, in ascending order.
    log_values: (N, K) log-probabilities of these entries in the old matrix.
    kept: (N, K) expected transitions of the selected entries.
    rest: (N,) sum of the expected transitions of all other entries of a row.
    changes: (N,) number of columns of each row that were not in the old set.
    """

    indices: Tensor
    log_values: Tensor
    kept: Tensor
    rest: Tensor
    changes: Tensor


class PairSums:
    """Sum of the expected transitions of all pairs of states over the batches of an epoch.

    Several batches are stored in factored form, 2 T N numbers, until the N x N matrix needs less memory. A single batch
    is always stored in factored form.

    Args:
        operator: Transitions of the epoch.
    """

    def __init__(self, operator: MostlyConstant) -> None:
        self.operator = MostlyConstant(operator.indices, operator.log_values.detach(), operator.log_constants.detach())
        self.factors: list[Pairs] = []
        self.counts: Tensor | None = None

    @property
    def num_states(self) -> int:
        return len(self.operator.log_constants)

    def add(self, pairs: Pairs) -> None:
        """Adds the expected transitions of a batch."""
        if pairs.counts.numel():
            self.counts = pairs.counts.clone() if self.counts is None else self.counts.add_(pairs.counts)
        if len(pairs.alpha):
            self.factors.append(pairs)
        several = len(self.factors) + (self.counts is not None) > 1
        if several and 2 * sum(len(factor.alpha) for factor in self.factors) >= self.num_states:
            counts = torch.empty(
                self.num_states, self.num_states, dtype=torch.float64, device=self.operator.log_constants.device
            )
            for first, last in self.blocks():
                counts[first:last] = self.rows(first, last)
            self.counts, self.factors = counts, []

    def blocks(self) -> list[tuple[int, int]]:
        """Returns the first and last row (exclusive) of each block of rows."""
        size = max(1, _BLOCK_ENTRIES // self.num_states)
        return [(first, min(first + size, self.num_states)) for first in range(0, self.num_states, size)]

    def rows(self, first: int, last: int) -> Tensor:
        """Returns (rows, N) expected transitions from the states `first` to `last`, exclusive."""
        size = self.num_states
        total = self.operator.log_constants.new_zeros(last - first, size)
        for alpha, kappa, _ in self.factors:
            if alpha.is_cpu:
                _multiply_compiled(first, last, alpha.numpy(), kappa.numpy(), total.numpy())
            else:
                total += alpha[:-1, first:last].T @ kappa[1:, :size]
        if self.factors:
            total *= self.operator.log_rows(slice(first, last)).exp()
        return total if self.counts is None else total.add_(self.counts[first:last])


def _multiply_compiled(first: int, last: int, alpha: np.ndarray, kappa: np.ndarray, out: np.ndarray) -> None:
    starts = range(first, last, _TILE_ROWS)
    shares = num_shares(len(starts), 0)

    def work(share: int) -> None:
        partial = aligned_zeros(alpha.dtype, min(_TILE_ROWS, last - first), alpha.shape[1])
        for start in starts[share::shares]:
            stop = min(start + _TILE_ROWS, last)
            loops.multiply_rows(start, stop, alpha, kappa, partial[: stop - start], out[start - first : stop - first])

    run_shares(shares, work)


def choose(
    sums: PairSums, criterion: str, pseudocount: float = 0.0, total: Callable[[Tensor], Tensor] | None = None
) -> Choice:
    """Selects the entries to keep from all entries, one block of rows at a time.

    Args:
        sums: Expected transitions.
        criterion: "largest" or "window".
        pseudocount: Number that is added to the expected count of each possible transition for the comparison.
        total: Function that sums a tensor over all ranks, for distributed training.
    """
    _check_criterion(criterion)
    blocks = []
    for first, last in sums.blocks():
        pairs = sums.rows(first, last)
        pairs = pairs if total is None else total(pairs)
        choose_rows = _choose_compiled if pairs.is_cpu else _choose_portable
        blocks.append(choose_rows(pairs, sums.operator, slice(first, last), criterion == "window", pseudocount))
    return Choice(*(torch.cat(parts) for parts in zip(*blocks, strict=True)))


def _check_criterion(criterion: str) -> None:
    if criterion not in CRITERIA:
        raise ValueError(f"`criterion` must be largest or window, but is {criterion!r} instead.")


def _choose_compiled(
    pairs: Tensor, operator: MostlyConstant, part: slice, window: bool, pseudocount: float
) -> tuple[Tensor, ...]:
    """Selects the entries to keep of the rows `part`, whose expected transitions are `pairs` (rows, N)."""
    kept = operator.indices[part], operator.log_values[part], operator.log_constants[part]
    rows, indices, log_values, log_constants = (tensor.contiguous().numpy() for tensor in (pairs, *kept))
    outputs: Any = (
        np.empty_like(indices),
        np.empty_like(log_values),
        np.empty_like(log_values),
        np.empty(len(rows)),
        np.empty(len(rows), np.int64),
    )
    over_rows(
        len(rows), loops.choose_rows, rows, indices, log_values, log_constants, float(pseudocount), window, *outputs
    )
    return tuple(map(torch.from_numpy, outputs))


def _entropy_term(p: Tensor) -> Tensor:
    return torch.special.xlogy(p, p)


def _choose_portable(
    pairs: Tensor, operator: MostlyConstant, part: slice, window: bool, pseudocount: float
) -> tuple[Tensor, ...]:
    """Computes the same as `_choose_compiled`, in plain torch."""
    indices = operator.indices[part]
    size, num_kept = pairs.shape[1], indices.shape[1]
    logs = operator.log_rows(part)
    row = pairs + pseudocount * (logs > -torch.inf).to(pairs.dtype)
    total = row.sum(1, keepdim=True)
    probs = row / torch.where(total > 0, total, 1.0)
    ordered, order = probs.sort(dim=1, descending=True, stable=True)

    def value(kept: Tensor, rest: Tensor) -> Tensor:
        return _entropy_term(kept).sum(1) + _entropy_term(rest) - rest * np.log(size - num_kept)

    best, best_value = order[:, :num_kept], value(ordered[:, :num_kept], ordered[:, num_kept:].sum(1))
    for a in range(num_kept - 1, -1 if window else num_kept - 1, -1):
        first, last = slice(0, a), slice(a + size - num_kept, size)
        here = value(torch.cat([ordered[:, first], ordered[:, last]], 1), ordered[:, a : a + size - num_kept].sum(1))
        better = here > best_value + loops.GAIN
        best = torch.where(better[:, None], torch.cat([order[:, first], order[:, last]], 1), best)
        best_value = torch.where(better, here, best_value)
    old_value = value(probs.gather(1, indices), probs.scatter(1, indices, 0.0).sum(1))
    changed = (best_value > old_value + loops.GAIN) & (total.squeeze(1) > 0)
    chosen = torch.where(changed[:, None], best.sort(dim=1).values, indices)
    fresh = torch.ones_like(row).scatter(1, indices, 0.0).gather(1, chosen).sum(1).long()
    return chosen, logs.gather(1, chosen), pairs.gather(1, chosen), pairs.scatter(1, chosen, 0.0).sum(1), fresh


def over_rows(size: int, kernel: Any, *arguments: Any) -> None:
    """Runs a kernel on shares of the rows.

    All array arguments have `size` rows, and each call gets its share of them.
    """
    shares = num_shares(size, 0)

    def work(share: int) -> None:
        part = slice(size * share // shares, size * (share + 1) // shares)
        kernel(*(argument[part] if isinstance(argument, np.ndarray) else argument for argument in arguments))

    run_shares(shares, work)
