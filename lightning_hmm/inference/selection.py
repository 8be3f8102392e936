r"""Selection of the entries that a mostly constant transition matrix keeps. It is part of the M-step.

Let :math:`S_{ij}` be the expected transitions and :math:`G_i = \sum_j S_{ij}`. The M-step for a given set of K entries
is :math:`a_{ij} = S_{ij} / G_i` for the kept entries and :math:`c_i = (G_i - \sum_{kept} S_{ij}) / ((N - K) G_i)` for
all others. Q is the expected log-likelihood after the M-step. There are two criteria:

- ``largest`` keeps the K largest :math:`S_{ij}`, unless the old set gives the row a higher Q. (The K largest entries
  can have a lower Q than the old set, and the likelihood would then decrease.)
- ``window`` keeps the set with the highest Q. The entries that share the constant should be similar, so they are an
  interval of the sorted row: the a largest and the K - a smallest entries are kept, for the best of the K + 1 values of
  a.

There are two algorithms, which select the same entries:

- `choose_gemm` computes all entries of :math:`\alpha^T \kappa` in blocks of rows. It supports both criteria.
- `choose_lazily` (Siddiqi & Moore, 2005, section 4.4.1) computes upper bounds from the largest terms, and exact sums
  only where the bounds require it. It supports ``largest``. The text of the paper ranks by the sum over
  :math:`\alpha_t(i) \kappa_t(j)`, without the factor :math:`a_{ij}` of its equation 11. The likelihood can then
  decrease, so the factor is included here.

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
_LAZY_ROWS = 32  # rows of one call of the lazy kernel


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
    dot_products: (N,) number of exact sums over all steps that were computed for each row.
    """

    indices: Tensor
    log_values: Tensor
    kept: Tensor
    rest: Tensor
    changes: Tensor
    dot_products: Tensor


class PairSums:
    """Sum of the expected transitions of all pairs of states over the batches of an epoch.

    Several batches are stored in factored form, 2 T N numbers, until the N x N matrix needs less memory. A single batch
    is always stored in factored form.

    Args:
        operator: Transitions of the epoch.
        factored: Whether to store all batches in factored form, as `choose_lazily` requires.
    """

    def __init__(self, operator: MostlyConstant, factored: bool = False) -> None:
        self.factored = factored
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
        several = len(self.factors) + (self.counts is not None) > 1 and not self.factored
        if several and 2 * sum(len(factor.alpha) for factor in self.factors) >= self.num_states:
            counts = torch.empty(
                self.num_states, self.num_states, dtype=torch.float64, device=self.operator.log_constants.device
            )
            for first, last in self.blocks():
                counts[first:last] = self.rows(first, last)
            self.counts, self.factors = counts, []

    def messages(self) -> tuple[Tensor, Tensor]:
        """Returns the concatenated rows of `alpha` and of `kappa` of all batches."""
        size, none = self.num_states, [self.operator.log_constants.new_zeros(0, self.num_states)]
        alpha = torch.cat(none + [pairs.alpha[:, :size] for pairs in self.factors])
        kappa = torch.cat(none + [pairs.kappa[:, :size] for pairs in self.factors])
        return alpha, kappa

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


def choose_gemm(
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
        choose = _choose_compiled if pairs.is_cpu else _choose_portable
        blocks.append(choose(pairs, sums.operator, slice(first, last), criterion == "window", pseudocount))
    indices, log_values, kept, rest, changes = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    return Choice(indices, log_values, kept, rest, changes, torch.full_like(changes, sums.num_states))


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
    _over_rows(
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
) -> Choice:
    """Selects the K largest entries of each row, using upper bounds to avoid most of the exact sums.

    Args:
        alpha: (T, N) messages of all data, as in `Pairs`.
        kappa: (T, N) messages of all data, as in `Pairs`.
        operator: Transitions of the epoch.
        kept: (N, K) exact counts of the entries that are kept at present.
        rest: (N,) exact sums of the counts of all other entries.
        bound_terms: R, the number of largest terms of each alpha(i) and kappa(j) from which the bounds are computed.
        pseudocount: Number that is added to the expected count of each possible transition for the comparison.
    """
    given = operator.indices, operator.log_values, operator.log_constants
    indices, log_values, log_constants = (tensor.detach().cpu().contiguous().numpy() for tensor in given)
    size = len(indices)
    rows, following = (tensor.cpu().numpy()[:, :size] for tensor in (alpha[:-1], kappa[1:]))
    num_steps = len(rows)
    if num_steps < 1:
        raise ValueError("`alpha` and `kappa` must hold at least two steps, but there is no transition in them.")
    num_terms = default_bound_terms(num_steps) if bound_terms is None else bound_terms
    if not 1 <= num_terms <= num_steps:
        raise ValueError(
            f"`bound_terms` must be from 1 to {num_steps}, the transitions in the data, but is {num_terms} instead."
        )
    rows, following = np.ascontiguousarray(rows), np.ascontiguousarray(following)
    alpha_columns, kappa_columns = np.ascontiguousarray(rows.T), np.ascontiguousarray(following.T)
    large = [*_large_entries(alpha_columns, num_terms), *_large_entries(kappa_columns, num_terms)]
    outputs: Any = (
        np.empty_like(indices),
        np.empty_like(log_values),
        np.empty_like(log_values),
        np.empty(size),
        np.empty(size, np.int64),
        np.empty(size, np.int64),
    )
    counts = [tensor.detach().double().cpu().contiguous().numpy() for tensor in (kept, rest)]
    blocks = range(0, size, _LAZY_ROWS)
    shares = num_shares(len(blocks), 0)
    messages = rows, following, alpha_columns, kappa_columns
    data: Any = (*messages, *large, indices, log_values, log_constants, float(pseudocount), *counts)

    def work(share: int) -> None:
        for first in blocks[share::shares]:
            loops.lazy_rows(first, min(first + _LAZY_ROWS, size), *data, *outputs)

    run_shares(shares, work)
    return Choice(*(torch.from_numpy(output).to(alpha.device) for output in outputs))


def _large_entries(columns: np.ndarray, num_terms: int) -> Any:
    """Returns the results of `selection_loops.large_entries` for all rows of `columns` (states by steps)."""
    size = len(columns)
    arrays: Any = (
        np.empty((size, num_terms), np.int64),
        np.empty(size, np.int64),
        np.empty(size, columns.dtype),
        np.empty(size),
    )
    _over_rows(size, loops.large_entries, columns, num_terms, *arrays)
    return arrays


def _over_rows(size: int, kernel: Any, *arguments: Any) -> None:
    """Runs a kernel on shares of the rows.

    All array arguments have `size` rows, and each call gets its share of them.
    """
    shares = num_shares(size, 0)

    def work(share: int) -> None:
        part = slice(size * share // shares, size * (share + 1) // shares)
        kernel(*(argument[part] if isinstance(argument, np.ndarray) else argument for argument in arguments))

    run_shares(shares, work)
