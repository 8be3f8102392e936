"""The E-step on a CPU: plans the work, prepares arrays, and hands both to the compiled driver.

Sequences are sorted by length and cut into tiles of at most 32. Sequences that leave the range of float32 run again in
float64, and those that leave the range of float64 in log space, so that neither a point a thousand standard deviations
away nor a state that fits better but cannot be reached gives a wrong number.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_hmm.inference import reference
from lightning_hmm.inference.cpu.cache import inner, strict_kernel
from lightning_hmm.inference.cpu.driver import Limits, Result, chunk_steps, run_lane
from lightning_hmm.inference.cpu.exact import exact_sequence
from lightning_hmm.inference.cpu.fill import BLOCK, QUADRATIC, ROWS, TABLE, Seen, feature_rows
from lightning_hmm.inference.cpu.prepared import is_prepared, prepare
from lightning_hmm.inference.evidence import Evidence, Quadratic, Rows, Table
from lightning_hmm.inference.kernels.simd import padded_size
from lightning_hmm.inference.kernels.threads import aligned_zeros, num_shares, run_shares, workspace
from lightning_hmm.inference.operators import Operator
from lightning_hmm.inference.results import EStep, refuse_nan


class Range(NamedTuple):
    """What a precision can hold.

    flush: entries of messages below this are zero. Every quotient of the backward pass then stays inside the range,
        with room for weights.
    tiny: the smallest normal number, rounded up. It replaces an emission probability that is smaller but not zero.
    collapse: a step that keeps less than this leaves the range.
    product: a transition this probable, times `flush`, is a normal number.
    negligible: the largest error of a log-likelihood.
    """

    flush: float
    tiny: float
    collapse: float
    product: float
    negligible: float


_SINGLE, DOUBLE = np.dtype(np.float32), np.dtype(np.float64)
RANGES = {_SINGLE: Range(1e-30, 1.2e-38, 1e-20, 1e-7, 1e-5), DOUBLE: Range(1e-290, 2.3e-308, 1e-200, 1e-17, 1e-9)}

_LARGEST_LOG = 300.0  # of a parameter, for messages in float64

TILE = 32
TILE_BYTES = 1 << 29  # a sequence whose tile would need more than this is worked on alone
_CACHE_BYTES = 1 << 20  # tiles of more than eight sequences whose messages need more than this are made smaller
_SMALL_WORK = 1_000_000  # multiply-adds below which handing work to threads costs more than it saves
_SYMBOL_TYPES = (torch.uint8, torch.int16, torch.int32, torch.int64)


def supports(operator: Operator, evidence: Evidence) -> str | None:
    """Why the compiled driver cannot run an operator with some evidence, in one sentence; ``None`` if it can."""
    if not is_prepared(operator):
        return f"The compiled CPU backend has no kernels for the operator {type(operator).__name__}."
    if isinstance(evidence, Table) and evidence.symbols.dtype not in _SYMBOL_TYPES:
        kinds = "uint8, int16, int32 or int64"
        return f"The compiled CPU backend takes symbols of {kinds}, but they are {evidence.symbols.dtype}."
    tensors = [*operator._values(), *(value for value in evidence if value is not None)]
    if any(value.device.type != "cpu" for value in tensors):
        return "The compiled CPU backend takes tensors on the CPU."
    return None


# Arrays


@strict_kernel
def fill_table(log_probs, table, shifts, tiny):
    """Returns the emission probabilities of the symbols, divided by their maximum over the states.

    The logarithms of the maxima are written to `shifts`. The last row is that of a missing symbol.
    """
    num_states, num_symbols = log_probs.shape
    for v in range(num_symbols):
        largest = -np.inf
        for k in range(num_states):
            largest = max(largest, log_probs[k, v])
        shifts[v] = largest
        for k in range(num_states):
            # The table may hold the values of an earlier update, so zeros are written, too.
            table[v, k] = max(np.exp(log_probs[k, v] - largest), tiny) if log_probs[k, v] > -np.inf else 0.0
    for k in range(num_states):
        table[num_symbols, k] = 1.0


def _floating(tensor: Tensor) -> np.ndarray:
    """A contiguous array of float32 or float64 numbers, without a copy if it is one."""
    tensor = tensor.detach()
    if tensor.dtype not in (torch.float32, torch.float64):
        tensor = tensor.double()
    return tensor.contiguous().numpy()


def wide(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().contiguous().numpy()


_NO_LABELS, _NO_PAIRS, _NO_TABLE, NO_CENTER = (
    np.zeros(0, np.int64),
    np.zeros((0, 2), np.int64),
    np.zeros((0, 0)),
    np.zeros(0),
)


def seen_by(evidence: Evidence, dtype: np.dtype, num_states: int, padded: int) -> tuple[Seen, np.ndarray]:
    """The evidence for the driver, and the array that `Seen.data` points into, which must be kept."""
    labels = _NO_LABELS if evidence.labels is None else evidence.labels.long().contiguous().numpy()
    table, shifts, center = np.zeros((1, padded), dtype), np.zeros(1), NO_CENTER
    linear = False
    one_hot = np.zeros((num_states + 1, padded if labels.shape[0] else 0), dtype)
    if labels.shape[0]:
        one_hot[np.arange(num_states), np.arange(num_states)] = 1
    pairs, weights = _NO_PAIRS, _NO_TABLE
    if isinstance(evidence, Table):
        form, width = TABLE, 1
        data = evidence.symbols.contiguous().numpy()
        num_symbols = evidence.log_probs.shape[1]
        table, shifts = aligned_zeros(dtype, num_symbols + 1, padded), np.zeros(num_symbols + 1)
    elif isinstance(evidence, Quadratic):
        form, width = QUADRATIC, evidence.columns.shape[1]
        data, pairs = _floating(evidence.columns), evidence.pairs.long().contiguous().numpy()
        weights = aligned_zeros(np.float64, len(pairs), padded)
        center = aligned_zeros(np.float64, padded_size(width, 8))
        if evidence.center is not None:
            center[:width] = wide(evidence.center)
        linear = len(pairs) >= width and bool(
            (pairs[:width, 0] == np.arange(width)).all() and (pairs[:width, 1] == width).all()
        )
    else:
        form, width, data = ROWS, num_states, _floating(evidence.log_likelihoods)
    where = data.ctypes.data
    seen = Seen(
        form,
        where,
        where + data.nbytes,
        data.itemsize,
        width,
        table,
        shifts,
        one_hot,
        _NO_TABLE,
        labels,
        pairs,
        weights,
        center,
        linear,
    )
    return with_parameters(seen, evidence, dtype), data


def with_parameters(seen: Seen, evidence: Evidence, dtype: np.dtype) -> Seen:
    """Writes the parameters of `evidence` into the arrays of `seen`, and returns it."""
    if isinstance(evidence, Table):
        log_probs = wide(evidence.log_probs)
        fill_table(log_probs, seen.table, seen.shifts, dtype.type(RANGES[dtype].tiny))
        return seen._replace(log_probs=log_probs)
    if isinstance(evidence, Quadratic):
        num_states = evidence.weights.shape[0]
        seen.weights[:, :num_states] = wide(evidence.weights).T
        seen.weights[:, num_states:] = seen.weights[:, :1]
    return seen


@inner
def limits_of(bounds, facts, first, num_states, longest):
    """Computes the limits of a pass in float64, from the range of its precision and facts of the chain.

    `first` is the largest initial probability.
    """
    largest = max(1.0, facts.largest, first)
    # A step loses entries below `flush`, and those whose emission is below `tiny`. If every state gets at least
    # `facts.least` from what is kept at the
    # step before, the ratio of what is lost to what is kept is the same at all later steps.
    lost = num_states * max(bounds.flush, bounds.tiny / bounds.collapse) * largest**2
    fed = longest * lost <= bounds.negligible * facts.least
    leak = min(num_states * bounds.flush * largest, bounds.collapse)
    doubtful = facts.least_nonzero < bounds.product
    growth = np.log(max(facts.growth, 1.0))
    unit = num_states * bounds.flush * largest
    return Limits(bounds.flush, bounds.tiny, bounds.collapse, leak, unit, growth, bounds.negligible, fed, doubtful)


def _working_dtype(dtype: torch.dtype | None, *logs: np.ndarray) -> np.dtype:
    """float32 if asked for and able to hold the parameters; a probability of 1e-39 needs float64."""
    if dtype == torch.float32:
        smallest = np.log(RANGES[_SINGLE].flush)
        if not any(np.any((log < smallest) & (log > -np.inf)) or log.max(initial=0.0) > -smallest for log in logs):
            return _SINGLE
    return DOUBLE


def _power_of_two(weights: np.ndarray) -> float:
    """What to divide weights by so that the largest is near one; 1 if they are already moderate."""
    largest = np.abs(weights).max(initial=0.0)
    return 1.0 if largest == 0 or 1e-6 < largest < 1e6 else float(np.ldexp(1.0, np.frexp(largest)[1] - 1))


def refuse_problem(problem: np.ndarray, evidence: Evidence, num_states: int) -> None:
    """Raises for a step of which the data or the label cannot be used."""
    if problem[0] >= 0:
        step = int(problem[0])
        if isinstance(evidence, Table):
            largest = evidence.log_probs.shape[1]
            raise ValueError(
                f"`symbols` must be from 0 to {largest} ({largest} for a missing one), "
                f"but that of step {step} is {int(evidence.symbols[step])}."
            )
        raise ValueError(f"`log_likelihoods` must be numbers below infinity, but those of step {step} are not.")
    if problem[1] >= 0:
        step = int(problem[1])
        assert evidence.labels is not None
        raise ValueError(
            f"`labels` must be from -1 to {num_states - 1}, but that of step {step} is {int(evidence.labels[step])}."
        )


def most_steps(row_bytes: int) -> int:
    """Steps of the longest sequence that shares a tile with others."""
    return TILE_BYTES // (TILE * row_bytes)


def plan(
    offsets: np.ndarray, which: np.ndarray | None, num_states: int, row_bytes: int, at_least: int = 1
) -> list[tuple[np.ndarray, int]]:
    """Returns the non-empty sequences, longest first, with the size of the tiles that they are divided into.

    If there are many sequences, the size is at least `at_least`. It depends on shapes and not on the number of threads.
    """
    lengths = offsets[1:] - offsets[:-1]
    if which is None:
        order = (
            np.argsort(-lengths, kind="stable") if (lengths[1:] != lengths[:-1]).any() else np.arange(lengths.shape[0])
        )
    else:
        order = which[np.argsort(-lengths[which], kind="stable")]
    order = order[: np.count_nonzero(lengths[order])]
    if not order.shape[0]:
        return []
    num_long = int(np.searchsorted(-lengths[order], -most_steps(row_bytes)))
    long, short = order[:num_long], order[num_long:]
    if int(offsets[-1]) * num_states * num_states < _SMALL_WORK:
        tile = min(TILE, 4 * -(-short.shape[0] // 4))
    else:
        tile = 1 if short.shape[0] < 8 else min(TILE, -(-short.shape[0] // 32) * 4)
    if short.shape[0]:
        while tile > 8 and tile * int(lengths[short[0]]) * row_bytes > _CACHE_BYTES:
            tile -= 4
        if tile > 1:
            tile = max(tile, min(at_least, TILE, 4 * -(-short.shape[0] // 4)))
    return [(group, size) for group, size in ((long, 1), (short, tile)) if group.shape[0]]


class _Totals:
    """The results of all passes, in float64."""

    def __init__(
        self,
        operator: Operator,
        evidence: Evidence,
        num_sequences: int,
        num_steps: int,
        num_states: int,
        smooth: bool,
        per_step: bool,
    ) -> None:
        self.log_likelihood, self.impossible_step = np.zeros(num_sequences), np.full(num_sequences, -1)
        self.initial = np.zeros(num_states)
        self.counts = tuple(np.zeros(value.shape) for value in operator.natural)
        is_rows = isinstance(evidence, Rows)
        self.smoothed = np.zeros((num_steps if smooth and (per_step or is_rows) else 0, num_states))
        self.filtered = np.zeros((num_steps if smooth and per_step else 0, num_states))
        self.last = np.zeros((0 if smooth else num_sequences, num_states))
        self.evidence = self.smoothed if is_rows else np.zeros(evidence.live.shape if smooth else (0, num_states))

    def result(self, per_step: bool) -> EStep:
        smoothed = self.smoothed if per_step else self.smoothed[:0]
        return EStep(
            torch.from_numpy(self.log_likelihood),
            torch.from_numpy(self.impossible_step),
            torch.from_numpy(self.initial),
            tuple(map(torch.from_numpy, self.counts)),
            torch.from_numpy(self.evidence),
            torch.from_numpy(smoothed),
            torch.from_numpy(self.filtered),
            torch.from_numpy(self.last),
        )


class _Pass:
    """Forward-backward, or without `smooth` the forward pass, over the sequences `which` of a batch, or all.

    Whatever depends on the data alone is prepared once. The parameters may change from one run to the next.
    """

    def __init__(
        self, which: np.ndarray | None, dtype: np.dtype, operator: Operator, evidence: Evidence, offsets: np.ndarray,
        weights: np.ndarray,
        smooth: bool, rows_returned: bool,
    ) -> None:  # fmt: skip
        self.which, self.dtype, self.offsets, self.smooth = which, dtype, offsets, smooth
        self.num_states = evidence.num_states
        self.padded = padded_size(self.num_states, dtype.itemsize)
        self.operator, self.seen, self.data = (
            prepare(operator, dtype),
            *seen_by(evidence, dtype, self.num_states, self.padded),
        )
        self.computed = self.seen.form != TABLE
        by_rows = smooth and (self.computed or rows_returned)
        groups = plan(
            offsets,
            which,
            self.num_states,
            self.padded * dtype.itemsize * (2 if smooth and self.computed else 1),
            1 if smooth else self.operator.rows_scored,
        )
        self.longest = max((int(offsets[order[0] + 1] - offsets[order[0]]) for order, _ in groups), default=0)
        self.num_statistics = 0
        if smooth:
            self.num_statistics = (
                feature_rows.py_func(self.seen.weights.shape[0]) if self.computed else self.seen.table.shape[0]
            )
        lane_bytes = self.operator.lane_bytes + 8 * self.padded * self.num_statistics if smooth else 0
        self.lanes = max((num_shares(-(-order.shape[0] // tile), lane_bytes) for order, tile in groups), default=1)
        # Messages are multiplied by the weights in the working precision.
        self.scale = _power_of_two(weights) if smooth else 1.0
        self.weights = weights if self.scale == 1 else weights / self.scale
        # Sequences, size of a tile, steps whose counts are added at once, and rows of a step that are kept.
        self.groups = []
        for order, tile in groups:
            window = max(1, self.operator.rows_counted // tile, BLOCK // tile if by_rows else 1)
            self.groups.append((order, tile, window, 2 * window if by_rows else window))

    def change(self, operator: Operator, evidence: Evidence) -> None:
        """Sets other parameters; `evidence` must have the same data."""
        self.operator = prepare(operator, self.dtype)
        if self.seen.form == ROWS:
            self.seen, self.data = seen_by(evidence, self.dtype, self.num_states, self.padded)
        else:
            self.seen = with_parameters(self.seen, evidence, self.dtype)

    def run(self, totals: _Totals, log_initial: np.ndarray) -> None:
        """Adds the results to `totals`. The log-likelihood of a sequence that leaves the range is NaN."""
        initial = np.zeros(self.padded, self.dtype)
        initial[: self.num_states] = np.exp(log_initial)
        limits = limits_of.py_func(
            RANGES[self.dtype], self.operator.facts, float(initial.max()), self.num_states, self.longest
        )
        if self.dtype == _SINGLE:
            limits = limits._replace(
                **{name: np.float32(getattr(limits, name)) for name in ("flush", "tiny", "collapse", "leak")}
            )
        sums, problem = self.operator.sums(self.lanes), np.full((self.lanes, 2), -1)
        starts = np.zeros((self.lanes, self.padded))
        gradients = aligned_zeros(np.float64, self.lanes, self.num_statistics, self.padded)
        for order, tile, window, kept in self.groups:

            def work(lane: int, order: Any = order, tile: int = tile, window: int = window, kept: int = kept) -> None:
                if lane * tile >= order.shape[0]:
                    return
                out = Result(
                    totals.log_likelihood,
                    totals.last,
                    totals.smoothed,
                    totals.filtered,
                    starts[lane],
                    gradients[lane],
                    problem[lane],
                )
                steps, memory = self._memory(order[lane * tile], tile, kept)
                run_lane(
                    lane,
                    self.lanes,
                    tile,
                    order,
                    self.offsets,
                    self.weights,
                    self.smooth,
                    self.seen,
                    self.operator.arrays,
                    sums[lane],
                    limits,
                    initial,
                    self.num_states,
                    steps,
                    window,
                    memory,
                    out,
                )

            run_shares(self.lanes, work)
        self.problem = problem.max(0)
        if self.smooth and (self.problem < 0).all():
            self._add(totals, starts, self.operator.counts(sums), gradients)

    def _memory(self, first: int, tile: int, kept: int) -> tuple[int, np.ndarray]:
        """The number of steps to keep, and memory, for a lane whose longest sequence is `first`."""
        steps = int(self.offsets[first + 1] - self.offsets[first])
        if not self.smooth:
            steps = min(steps, chunk_steps.py_func(tile * self.padded * self.dtype.itemsize))
        rows = steps + 2 + (steps if self.computed else 0) + kept  # the message before the first step, and beta
        return steps, workspace(self.dtype, (rows * tile + 1) * self.padded)

    def _add(self, totals: _Totals, starts: np.ndarray, counts: tuple[np.ndarray, ...], gradients: np.ndarray) -> None:
        """Adds the sums of the lanes."""
        totals.initial += self.scale * starts.sum(0)[: self.num_states]
        for mine, found in zip(totals.counts, counts, strict=True):
            mine += self.scale * found
        if self.scale != 1 and totals.smoothed.shape[0]:
            _scale_rows(totals.smoothed, self.offsets, self.which, self.scale)
        if self.seen.form != ROWS:
            rows = totals.evidence.shape[1]
            totals.evidence += self.scale * gradients.sum(0)[:rows, : self.num_states].T


def _scale_rows(rows: np.ndarray, offsets: np.ndarray, which: np.ndarray | None, scale: float) -> None:
    if which is None:
        rows *= scale
    else:
        for n in which:
            rows[offsets[n] : offsets[n + 1]] *= scale


def _exact(
    totals: _Totals,
    lost: np.ndarray,
    log_initial: np.ndarray,
    operator: Operator,
    evidence: Evidence,
    offsets: np.ndarray,
    weights: np.ndarray,
    smooth: bool,
) -> None:
    """Log space, for the sequences `lost`."""
    matrix = operator.to_dense(torch.zeros(1, dtype=torch.int64)).contiguous()
    pairs = np.zeros(matrix.shape)
    for n in lost:
        at = torch.arange(int(offsets[n]), int(offsets[n + 1]))
        theirs = evidence.at(at)
        smoothed, filtered = (np.zeros((len(at), log_initial.shape[0])) for _ in range(2))
        found = exact_sequence(
            log_initial,
            matrix.numpy(),
            theirs.rows().double().contiguous().numpy(),
            weights[n],
            smooth,
            smoothed,
            filtered,
            pairs,
        )
        totals.log_likelihood[n], totals.impossible_step[n] = found
        here = slice(int(offsets[n]), int(offsets[n + 1]))
        if not smooth:
            totals.last[n] = filtered[-1]
            continue
        totals.initial += smoothed[0]
        if totals.smoothed.shape[0]:
            totals.smoothed[here] = smoothed
        if totals.filtered.shape[0]:
            totals.filtered[here] = filtered
        if not isinstance(evidence, Rows):
            totals.evidence += theirs.pull(torch.from_numpy(smoothed)).numpy()
    if smooth:
        for mine, found in zip(
            totals.counts,
            operator.counts_of_pairs(torch.from_numpy(pairs)[None], torch.zeros(1, dtype=torch.int64)),
            strict=True,
        ):
            mine += found.numpy()


def detached(operator: Operator, evidence: Evidence) -> tuple[Operator, Evidence]:
    if any(
        value.dtype != torch.float64 or value.requires_grad or not value.is_contiguous() for value in operator.natural
    ):
        operator = operator.with_natural(tuple(value.detach().double().contiguous() for value in operator.natural))
    return operator, evidence.with_live(evidence.live.detach())


class RepeatedEStep:
    """The E-step of one batch for several parameters, such as those of the iterations of EM.

    Args:
        offsets: (N + 1,) where the sequences begin.
        weights: (N,) of the sequences.
        dtype: of the messages, float64 if not given. Sums are float64 in any case. Sequences, and parameters, that
        leave the range of float32
            are worked on in float64.
        smooth: whether to run the backward pass too.
        per_step: whether to return smoothed and filtered rows of all steps.
    """

    def __init__(
        self,
        offsets: Tensor,
        weights: Tensor,
        *,
        dtype: torch.dtype | None = None,
        smooth: bool = True,
        per_step: bool = True,
    ) -> None:
        self._boundaries, self._weights = offsets.long().contiguous().numpy(), wide(weights)
        self._dtype, self._smooth, self._per_step = dtype, smooth, per_step
        self._passes: dict[np.dtype, _Pass] = {}

    def __call__(self, initial: Tensor, operator: Operator, evidence: Evidence) -> EStep:
        """Arguments and result as those of `reference.e_step`. They must not require gradients, natural
        parameters must be contiguous and float64, and the data of `evidence` must be the same in each call."""
        log_initial = wide(initial)
        natural = [value.numpy() for value in operator.natural]
        largest = max(refuse_nan("initial", log_initial), *(refuse_nan("transition", value) for value in natural))
        tables: list[np.ndarray] = []
        if not isinstance(evidence, Rows):
            tables = [wide(evidence.live)]
            refuse_nan("emission", tables[0])
        working = _working_dtype(self._dtype, log_initial, *natural, *(tables if isinstance(evidence, Table) else []))
        totals = _Totals(
            operator,
            evidence,
            self._boundaries.shape[0] - 1,
            int(self._boundaries[-1]),
            log_initial.shape[0],
            self._smooth,
            self._per_step,
        )
        if largest > _LARGEST_LOG:
            lost = np.flatnonzero(np.diff(self._boundaries))
            totals.log_likelihood[lost] = np.nan
        else:
            lost = self._run(totals, None, working, log_initial, operator, evidence)
            if (
                lost.shape[0] and working == _SINGLE
            ):  # seldom out of float64's range, which is far cheaper than log space
                lost = self._run(totals, lost, DOUBLE, log_initial, operator, evidence)
        if not lost.shape[0]:
            return totals.result(self._per_step)
        if isinstance(evidence, Quadratic):
            refuse_nan("columns", _floating(evidence.columns))
        if operator.to_dense(torch.zeros(1, dtype=torch.int64)).dim() == 3:  # a matrix for each step
            return reference.with_lost_sequences(
                totals.result(self._per_step),
                initial.double(),
                operator,
                evidence,
                torch.from_numpy(self._boundaries),
                torch.from_numpy(self._weights),
                self._smooth,
            )
        _exact(totals, lost, log_initial, operator, evidence, self._boundaries, self._weights, self._smooth)
        return totals.result(self._per_step)

    def _run(
        self,
        totals: _Totals,
        which: np.ndarray | None,
        dtype: np.dtype,
        log_initial: np.ndarray,
        operator: Operator,
        evidence: Evidence,
    ) -> np.ndarray:
        """Runs the driver over the sequences `which`, or all. Returns those that leave the range of `dtype`."""
        found = None if which is not None else self._passes.get(dtype)
        if found is not None:
            found.change(operator, evidence)
        else:
            found = _Pass(
                which,
                dtype,
                operator,
                evidence,
                self._boundaries,
                self._weights,
                self._smooth,
                totals.smoothed.shape[0] > 0,
            )
            if which is None:
                self._passes[dtype] = found
        found.run(totals, log_initial)
        refuse_problem(found.problem, evidence, log_initial.shape[0])
        if which is None:
            return np.flatnonzero(np.isnan(totals.log_likelihood))
        return which[np.isnan(totals.log_likelihood[which])]


@torch.no_grad()
def e_step(
    initial: Tensor, operator: Operator, evidence: Evidence, offsets: Tensor, weights: Tensor, *,
    dtype: torch.dtype | None = None, smooth: bool = True, per_step: bool = True,
) -> EStep:  # fmt: skip
    """Forward-backward; arguments and result as those of `reference.e_step` and `RepeatedEStep`."""
    run = RepeatedEStep(offsets, weights, dtype=dtype, smooth=smooth, per_step=per_step)
    return run(initial, *detached(operator, evidence))
