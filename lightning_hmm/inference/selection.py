r"""Which entries of its rows a mostly constant transition matrix keeps: the M-step's choice.

With the expected transitions :math:`S_{ij}` and :math:`G_i = \sum_j S_{ij}`, the M-step for a given set is
:math:`a_{ij} = S_{ij} / G_i` for what is kept and :math:`c_i = (G_i - \sum_{kept} S_{ij}) / ((N - K) G_i)`. There are two criteria:

- ``largest``: the K largest :math:`S_{ij}`, unless the old ones give the row a higher Q. (By Q alone the K largest may be worse than what
  was there, and the likelihood would fall.)
- ``window``: the set with the highest Q. What is left to the constant should be alike, so it is an interval of the sorted row: the a
  largest and the K - a smallest are kept, for the best of the K + 1 possible a.

and two ways to get there, which agree:

- `choose_gemm` multiplies blocks of rows of :math:`\alpha^T \kappa` out and looks at every entry; any criterion.
- `choose_lazily` (Siddiqi & Moore, 2005, section 4.4.1) computes upper bounds from the largest terms and then as few exact sums as these
  allow; ``largest`` only. The paper's text ranks by the sum over :math:`\alpha_t(i) \kappa_t(j)` and drops the factor :math:`a_{ij}` of its
  equation 11, under which the likelihood falls; here it is in its place.

Ties go to the column with the lower number, and a row changes only for a gain beyond rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_hmm.inference.kernels import selection_loops as loops
from lightning_hmm.inference.kernels.lanes import aligned_zeros, num_lanes, run_lanes
from lightning_hmm.inference.kernels.simd import padded_size
from lightning_hmm.inference.operators import MostlyConstant
from lightning_hmm.inference.results import EStep

CRITERIA = ("largest", "window")
_BLOCK_ENTRIES = 1 << 20  # of a block of rows
_TILE_ROWS = 128  # that one compiled product makes
_GAIN = loops._GAIN
_LAZY_ROWS = 32


class Pairs(NamedTuple):
    """The expected transitions of all pairs of states, not yet multiplied out.

    E[i -> j] = A_ij sum_t alpha_t-1(i) kappa_t(j) + counts_ij, the sum over successive rows of `alpha` and `kappa`; kappa is zero at
    the first step of each sequence. Any of the three may be empty. On a CPU, the rows of `alpha` and `kappa` are padded with zeros to a
    multiple of the vector width, as the compiled product needs them.
    """

    alpha: Tensor
    kappa: Tensor
    counts: Tensor


def factored_pairs(operator: MostlyConstant, found: EStep, offsets: Tensor) -> Pairs:
    """The pairs of an E-step that has the filtered and smoothed rows of all steps.

    The message kappa_t(j) is the smoothed probability of a state divided by the predicted one, alpha_t-1 A.
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
    """What to keep, and the counts for the M-step.

    indices: (N, K) the columns, rising.
    log_values: (N, K) the entries of the old matrix there.
    kept: (N, K) expected transitions along them.
    rest: (N,) expected transitions along all others.
    changes: (N,) how many columns of each row are new.
    dot_products: (N,) how many exact sums over all steps each row took.
    """

    indices: Tensor
    log_values: Tensor
    kept: Tensor
    rest: Tensor
    changes: Tensor
    dot_products: Tensor


class PairSums:
    """The expected transitions of all pairs of states over the batches of an epoch, in as little memory as they need.

    They stay factored, 2 T N numbers, until N^2 is less; one batch alone stays factored in any case, as it was made so.

    Args:
        operator: the transitions of the epoch.
        factored: never multiply out; for `choose_lazily`.
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
        """alpha and kappa of all batches, one after the other."""
        size, none = self.num_states, [self.operator.log_constants.new_zeros(0, self.num_states)]
        return torch.cat(none + [pairs.alpha[:, :size] for pairs in self.factors]), torch.cat(
            none + [pairs.kappa[:, :size] for pairs in self.factors]
        )

    def blocks(self) -> list[tuple[int, int]]:
        size = max(1, _BLOCK_ENTRIES // self.num_states)
        return [(first, min(first + size, self.num_states)) for first in range(0, self.num_states, size)]

    def rows(self, first: int, last: int) -> Tensor:
        """(rows, N) expected transitions from the states first to last."""
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
    lanes = num_lanes(len(starts), 0)

    def work(lane: int) -> None:
        partial = aligned_zeros(alpha.dtype, min(_TILE_ROWS, last - first), alpha.shape[1])
        for start in starts[lane::lanes]:
            stop = min(start + _TILE_ROWS, last)
            loops.multiply_rows(start, stop, alpha, kappa, partial[: stop - start], out[start - first : stop - first])

    run_lanes(lanes, work)


def choose_gemm(
    sums: PairSums, criterion: str, pseudocount: float = 0.0, total: Callable[[Tensor], Tensor] | None = None
) -> Choice:
    """Looks at all entries, one block of rows after the other; `total` adds a tensor up over ranks."""
    _check_criterion(criterion)
    blocks = []
    for first, last in sums.blocks():
        pairs = sums.rows(first, last)
        pairs = pairs if total is None else total(pairs)
        part = slice(first, last)
        blocks.append(
            (_choose_compiled if pairs.is_cpu else _choose_portable)(
                pairs, sums.operator, part, criterion == "window", pseudocount
            )
        )
    indices, log_values, kept, rest, changes = (torch.cat(parts) for parts in zip(*blocks, strict=True))
    return Choice(indices, log_values, kept, rest, changes, torch.full_like(changes, sums.num_states))


def _check_criterion(criterion: str) -> None:
    if criterion not in CRITERIA:
        raise ValueError(f"`criterion` must be largest or window, but is {criterion!r} instead.")


def _choose_compiled(
    pairs: Tensor, operator: MostlyConstant, part: slice, window: bool, pseudocount: float
) -> tuple[Tensor, ...]:
    """What to keep of some of the rows, whose expected transitions are `pairs`."""
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
    """As `_choose_compiled`, in plain torch."""
    indices = operator.indices[part]
    size, num_kept = pairs.shape[1], indices.shape[1]
    logs = operator.log_rows(part)
    row = pairs + pseudocount * (logs > -torch.inf).to(pairs.dtype)
    total = row.sum(1, keepdim=True)
    shares = row / torch.where(total > 0, total, 1.0)
    ordered, order = shares.sort(dim=1, descending=True, stable=True)

    def value(kept: Tensor, rest: Tensor) -> Tensor:
        return _entropy_term(kept).sum(1) + _entropy_term(rest) - rest * np.log(size - num_kept)

    best, best_value = order[:, :num_kept], value(ordered[:, :num_kept], ordered[:, num_kept:].sum(1))
    for a in range(num_kept - 1, -1 if window else num_kept - 1, -1):
        first, last = slice(0, a), slice(a + size - num_kept, size)
        here = value(torch.cat([ordered[:, first], ordered[:, last]], 1), ordered[:, a : a + size - num_kept].sum(1))
        better = here > best_value + _GAIN
        best = torch.where(better[:, None], torch.cat([order[:, first], order[:, last]], 1), best)
        best_value = torch.where(better, here, best_value)
    old_value = value(shares.gather(1, indices), shares.scatter(1, indices, 0.0).sum(1))
    changed = (best_value > old_value + _GAIN) & (total.squeeze(1) > 0)
    chosen = torch.where(changed[:, None], best.sort(dim=1).values, indices)
    fresh = torch.ones_like(row).scatter(1, indices, 0.0).gather(1, chosen).sum(1).long()
    return chosen, logs.gather(1, chosen), pairs.gather(1, chosen), pairs.scatter(1, chosen, 0.0).sum(1), fresh


def default_bound_terms(num_steps: int) -> int:
    """R, the terms that bounds are made from: a twentieth of the steps, as in the paper."""
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
    """The K largest of each row by upper bounds from the `bound_terms` (R) largest terms of each alpha(i) and kappa(j).

    `alpha` and `kappa` are those of `Pairs`, of all data; `kept` and `rest` the exact counts of the entries kept so far.
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
    lists: list[Any] = []
    for columns in (alpha_columns, kappa_columns):
        arrays: Any = (
            np.empty((size, num_terms), np.int64),
            np.empty(size, np.int64),
            np.empty(size, columns.dtype),
            np.empty(size),
        )
        _over_rows(size, loops.large_entries, columns, num_terms, *arrays)
        lists += arrays
    outputs: Any = (
        np.empty_like(indices), np.empty_like(log_values), np.empty_like(log_values), np.empty(size), np.empty(size, np.int64), np.empty(size, np.int64)
    )  # fmt: skip
    counts = [tensor.detach().double().cpu().contiguous().numpy() for tensor in (kept, rest)]
    blocks = range(0, size, _LAZY_ROWS)
    lanes = num_lanes(len(blocks), 0)

    def work(lane: int) -> None:
        for first in blocks[lane::lanes]:
            data: Any = (
                rows,
                following,
                alpha_columns,
                kappa_columns,
                *lists,
                indices,
                log_values,
                log_constants,
                float(pseudocount),
            )
            loops.lazy_rows(first, min(first + _LAZY_ROWS, size), *data, *counts, *outputs)

    run_lanes(lanes, work)
    return Choice(*(torch.from_numpy(output).to(alpha.device) for output in outputs))


def _over_rows(size: int, kernel: Any, *arguments: Any) -> None:
    """Runs a kernel on shares of the rows; arguments that are arrays have `size` rows, of which each call gets its share."""
    lanes = num_lanes(size, 0)

    def work(lane: int) -> None:
        part = slice(size * lane // lanes, size * (lane + 1) // lanes)
        kernel(*(argument[part] if isinstance(argument, np.ndarray) else argument for argument in arguments))

    run_lanes(lanes, work)
