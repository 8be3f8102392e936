r"""Inference in cloned hidden Markov models, where every state emits one symbol for certain.

.. math:: p(y) = \sum_{z_t \in \text{clones}(y_t)} \pi_{z_1} \prod_{t>1} A_{z_{t-1} z_t}

A step is a product with the one block of A between the clones of two symbols: O(M^2) for M clones a symbol, whatever the
number of symbols. Blocks are stored for the pairs of symbols of a `Layout` only, as a flat tensor of probabilities, a row of
A after the other; a pruned layout stores single entries.

The arguments: `initial` (H,) log-probabilities of the H states; `transition` the stored *probabilities*, in the layout's
order; the `layout`; `evidence`, (steps, V) a distribution over symbols for each step (NaN: nothing known), or ``None``
where `sequences` holds symbols (-1: missing); and the `sequences`.

The gradient in `transition` treats every stored entry as a free parameter. It is the expected count divided by the probability,

.. math:: \partial L / \partial A_{ij} = E[\text{number of transitions } i \to j \mid y] / A_{ij},

and 0 for entries that are zero, which are structural. EM needs the counts themselves: `e_step` returns them without that
division, which would overflow for tiny probabilities.

With uncertain evidence, log p(y) is that of the mixture over symbols: the logarithm of the sum over symbol strings of
p(string) times the product of their weights in the rows.

On a CPU compiled kernels run in the precision of `transition`, elsewhere those of `kernels.cloned_portable`; torch's
dispatcher picks. A state whose filtered probability falls below 1e-290 (in float32 1e-30) counts as ruled out, unless
nothing else is left. Impossible evidence gives -inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_hmm.inference.dense import EStep, Path, Posterior, impossible_message
from lightning_hmm.inference.kernels import cloned_cpu, cloned_portable
from lightning_hmm.inference.kernels.cloned_plan import Arrays, layout_arrays
from lightning_hmm.inference.kernels.cloned_rearranged import rearranged_path
from lightning_hmm.inference.log_space import wide_dtype
from lightning_hmm.sequences import Sequences


class Layout:
    """Which states are clones of which symbol, and which transitions are stored.

    Args:
        clones: (V,) the number of clones of each symbol; their states are numbered symbol after symbol.
        pairs: (P, 2) the pairs of symbols whose blocks are stored; all V x V if not given.
        bounds: where rows of blocks begin among the stored entries; see `kernels.cloned_loops`. Of whole blocks if not given.
        columns: of pruned layouts: the target clone of each stored entry, within its symbol.
    """

    def __init__(self, clones: Any, pairs: Any = None, bounds: Tensor | None = None, columns: Tensor | None = None) -> None:
        self.clones = torch.as_tensor(clones, dtype=torch.int64).cpu()
        if self.clones.dim() != 1 or not len(self.clones) or int(self.clones.min()) < 1:
            without = torch.nonzero(self.clones.reshape(-1) < 1).flatten().tolist()
            raise ValueError(f"`clones` must give each symbol at least one clone, but symbol {without[0] if without else 0} has none.")
        num_symbols = len(self.clones)
        if pairs is None:
            pairs = torch.cartesian_prod(torch.arange(num_symbols), torch.arange(num_symbols)).reshape(-1, 2)
        self.pairs = torch.unique(torch.as_tensor(pairs, dtype=torch.int64).cpu().reshape(-1, 2), dim=0)
        if len(self.pairs) and (int(self.pairs.min()) < 0 or int(self.pairs.max()) >= num_symbols):
            raise ValueError(f"`pairs` must be of symbols 0 to {num_symbols - 1}, but reach from {int(self.pairs.min())} to {int(self.pairs.max())} instead.")
        self.columns = torch.zeros(0, dtype=torch.int32) if columns is None else columns.to("cpu", torch.int32)
        self.bounds = self._whole_blocks() if bounds is None else bounds.to("cpu", torch.int64)
        self._arrays: Arrays | None = None
        self._row_first: np.ndarray | None = None

    def _whole_blocks(self) -> Tensor:
        parts, first = [], 0
        for u, clones in enumerate(self.clones.tolist()):
            widths = np.append(0, np.cumsum(self.clones[self.pairs[self.pairs[:, 0] == u, 1]].numpy()))
            parts.append((first + np.arange(clones)[:, None] * widths[-1] + widths).reshape(-1))
            first += clones * int(widths[-1])
        return torch.from_numpy(np.concatenate(parts))

    @property
    def tensors(self) -> list[Tensor]:
        """What a checkpoint needs to make it again: clones, pairs, bounds, columns."""
        return [self.clones, self.pairs, self.bounds, self.columns]

    @property
    def arrays(self) -> Arrays:
        if self._arrays is None:
            self._arrays = layout_arrays(*(tensor.numpy() for tensor in self.tensors))
        return self._arrays

    @property
    def num_symbols(self) -> int:
        return len(self.clones)

    @property
    def num_states(self) -> int:
        return int(self.clones.sum())

    @property
    def num_entries(self) -> int:
        """Stored transitions."""
        return int(self.bounds[-1])

    @property
    def is_sparse(self) -> bool:
        return len(self.columns) > 0

    @property
    def density(self) -> float:
        """Stored transitions among all pairs of states."""
        return self.num_entries / self.num_states**2

    @property
    def symbols(self) -> Tensor:
        """(H,) the symbol of each state."""
        return torch.arange(self.num_symbols).repeat_interleave(self.clones)

    @property
    def row_first(self) -> np.ndarray:
        """(H + 1,) where the transitions from each state begin, which lie in one piece."""
        if self._row_first is None:
            self._row_first = self.arrays.row_first
        return self._row_first

    @property
    def row_lengths(self) -> Tensor:
        """(H,) the stored transitions from each state."""
        return torch.from_numpy(np.diff(self.row_first))

    def states_of(self, entries: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The states that stored transitions lead from and to."""
        rows, columns = map(torch.from_numpy, cloned_portable.states_of(self.arrays))
        return (rows, columns) if entries is None else (rows[entries], columns[entries])

    def expand(self, values: Tensor) -> Tensor:
        """(H, H): stored entries in their places, zeros elsewhere. For small models."""
        rows, columns = self.states_of()
        matrix = values.new_zeros(self.num_states, self.num_states)
        matrix[rows.to(values.device), columns.to(values.device)] = values
        return matrix

    def collect(self, matrix: Tensor) -> Tensor:
        """The stored entries of an (H, H) matrix, the way back from `expand`."""
        rows, columns = self.states_of()
        return matrix[rows.to(matrix.device), columns.to(matrix.device)]

    def pruned(self, keep: Tensor) -> Layout:
        """The layout of the entries that `keep`, a mask of the stored ones, says."""
        if keep.shape != (self.num_entries,) or keep.dtype != torch.bool:
            what = f"has shape {tuple(keep.shape)} and holds {keep.dtype}"
            raise ValueError(f"`keep` must be a mask of the {self.num_entries} stored transitions, a tensor of booleans, but {what} instead.")
        kept = keep.cpu().numpy()
        if not kept.any():
            raise ValueError(f"`keep` must keep some of the {self.num_entries} stored transitions, but keeps none.")
        bounds, columns = cloned_cpu.pruned(self.arrays, kept)
        return Layout(self.clones, self.pairs, torch.from_numpy(bounds), torch.from_numpy(columns))

    @classmethod
    def of_entries(cls, clones: Any, rows: Tensor, columns: Tensor) -> tuple[Layout, Tensor]:
        """The layout of single transitions, given by the states they lead from and to; and the order that it stores them in."""
        clones = torch.as_tensor(clones, dtype=torch.int64)
        num_states = int(clones.sum())
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), clones.cumsum(0)])
        symbols = torch.arange(len(clones)).repeat_interleave(clones)
        keys, order = torch.sort(rows * num_states + columns)
        pairs = torch.unique(symbols[rows] * len(clones) + symbols[columns])
        pairs = torch.stack([pairs // len(clones), pairs % len(clones)], 1)
        parts = []
        for u in range(len(clones)):
            firsts = torch.cat([starts[pairs[pairs[:, 0] == u, 1]], torch.tensor([num_states])])
            states = torch.arange(int(starts[u]), int(starts[u + 1]))
            parts.append(torch.searchsorted(keys, (states[:, None] * num_states + firsts).reshape(-1)))
        target = (columns - starts[symbols[columns]])[order]
        return cls(clones, pairs, torch.cat(parts), target), order

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and all(torch.equal(mine, theirs) for mine, theirs in zip(self.tensors, other.tensors, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        kind = "single entries" if self.is_sparse else f"blocks of {len(self.pairs)} pairs"
        return f"Layout({self.num_states} clones of {self.num_symbols} symbols, {self.num_entries} transitions in {kind})"


# The operators, as in `dense`: the bodies given here are the portable ones, `register_kernel("cpu")` puts the compiled ones beside
# them. `evidence` has no rows where there are symbols. Outputs: log-likelihoods times weight, log-likelihoods, impossible steps,
# initial and transition counts, smoothed rows times weight, filtered rows, filtered rows of the last steps.

_Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _weighted(log_likelihood: Tensor, weights: Tensor) -> Tensor:
    # A weight of zero times -inf would be NaN; such a sequence does not count.
    return torch.where(weights == 0, torch.zeros_like(log_likelihood), log_likelihood * weights)


def _or_none(evidence: Tensor, values: Tensor) -> Tensor | None:
    return evidence if evidence.shape[0] == values.shape[0] and values.shape[0] else None


@torch.library.custom_op("lightning_hmm::cloned_e_step", mutates_args=())
def _e_step_op(
    initial: Tensor,
    transition: Tensor,
    layout: Sequence[Tensor],
    values: Tensor,
    evidence: Tensor,
    offsets: Tensor,
    weights: Tensor,
    single: bool,
    smooth: bool,
    per_step: bool,
    last_step: bool,
) -> _Results:
    arrays = layout_arrays(*(tensor.numpy() for tensor in layout))
    results = cloned_portable.e_step(arrays, initial, transition, values, _or_none(evidence, values), offsets, weights, single=single, smooth=smooth)
    log_likelihood, impossible, initial_counts, counts, smoothed, filtered, last = results
    rows = (smoothed, filtered) if per_step else (smoothed[:0].clone(), filtered[:0].clone())
    counts = counts.to(transition.dtype)
    return _weighted(log_likelihood, weights), log_likelihood, impossible, initial_counts, counts, *rows, last if last_step else last[:0].clone()


def _working(transition: Tensor, single: bool) -> np.ndarray:
    array = transition.detach().contiguous().numpy()
    return array.astype(np.float32) if single and array.dtype == np.float64 else array


@_e_step_op.register_kernel("cpu")
def _(initial, transition, layout, values, evidence, offsets, weights, single, smooth, per_step, last_step):
    arrays = layout_arrays(*(tensor.numpy() for tensor in layout))
    log_initial, probs = initial.detach().double().contiguous().numpy(), _working(transition, single)
    rows = _or_none(evidence, values)
    data = values.contiguous().numpy(), None if rows is None else rows.double().contiguous().numpy(), offsets.numpy(), weights.numpy()
    results = cloned_cpu.e_step(arrays, log_initial, probs, *data, smooth=smooth, per_step=per_step, last=last_step)
    log_likelihood, impossible, initial_counts, counts, *rest = map(torch.from_numpy, results)
    return _weighted(log_likelihood, weights), log_likelihood, impossible, initial_counts, counts.to(transition.dtype), *rest


@_e_step_op.register_fake
def _(initial, transition, layout, values, evidence, offsets, weights, single, smooth, per_step, last_step):
    num_sequences, num_states = weights.shape[0], initial.shape[0]
    wide = lambda *shape: weights.new_empty(shape)  # noqa: E731
    steps = values.shape[0] if per_step else 0
    impossible = torch.empty(num_sequences, dtype=torch.int64, device=weights.device)
    counts = transition.new_empty(transition.shape if smooth else 0)
    rows = wide(steps if smooth else 0, num_states), wide(steps, num_states), wide(num_sequences if last_step else 0, num_states)
    return wide(num_sequences), wide(num_sequences), impossible, wide(num_states), counts, *rows


def _save(ctx, inputs, output):
    initial, transition, layout, values, evidence, offsets, weights, single, *_ = inputs
    ctx.single, ctx.num_tensors = single, len(layout)
    ctx.save_for_backward(initial, transition, values, evidence, offsets, weights, *layout, output[3], output[4])
    ctx.mark_non_differentiable(*output[1:])  # a gradient through these would be a silent zero


@once_differentiable
def _backward(ctx, grad_weighted, *unused):
    """The gradient in a log-probability is its expected count; in a probability p it is the count divided by p, and 0 where p is 0."""
    initial, transition, values, evidence, offsets, weights, *rest = ctx.saved_tensors
    layout, (initial_counts, counts) = rest[: ctx.num_tensors], rest[ctx.num_tensors :]
    if grad_weighted.numel() == 1 or grad_weighted.stride() == (0,):
        # From a sum: one number for all sequences. Its stride says so without reading it.
        scale = grad_weighted[:1]
    else:
        again = _e_step_op(initial, transition, layout, values, evidence, offsets, weights * grad_weighted, ctx.single, True, False, False)
        (initial_counts, counts), scale = again[3:5], grad_weighted.new_ones(1)
    if grad_weighted.numel() == 0:
        scale = grad_weighted.new_ones(1)
    gradient = torch.where(transition > 0, counts / transition, 0) * scale.to(counts.dtype)
    return (initial_counts * scale).to(initial.dtype), gradient, [None] * ctx.num_tensors, *[None] * 8


_e_step_op.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("lightning_hmm::cloned_viterbi", mutates_args=())
def _viterbi_op(initial: Tensor, transition: Tensor, layout: Sequence[Tensor], values: Tensor, evidence: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    arrays = layout_arrays(*(tensor.numpy() for tensor in layout))
    return cloned_portable.viterbi(arrays, initial, transition, values, _or_none(evidence, values), offsets)


@_viterbi_op.register_kernel("cpu")
def _(initial, transition, layout, values, evidence, offsets):
    arrays = layout_arrays(*(tensor.numpy() for tensor in layout))
    rows = _or_none(evidence, values)
    data = values.contiguous().numpy(), None if rows is None else rows.double().contiguous().numpy(), offsets.numpy()
    path, log_probability = cloned_cpu.viterbi(arrays, initial.detach().double().contiguous().numpy(), transition.detach().contiguous().numpy(), *data)
    return torch.from_numpy(path), torch.from_numpy(log_probability)


@_viterbi_op.register_fake
def _(initial, transition, layout, values, evidence, offsets):
    return values.new_empty(values.shape[0], dtype=torch.int64), initial.new_empty(offsets.shape[0] - 1, dtype=wide_dtype(initial.device))


def _check(initial: Tensor, transition: Tensor, layout: Layout, evidence: Tensor | None, sequences: Sequences) -> None:
    if initial.shape != (layout.num_states,):
        raise ValueError(f"`initial` must be ({layout.num_states},), one for each clone, but is {tuple(initial.shape)} instead.")
    if transition.shape != (layout.num_entries,):
        raise ValueError(f"`transition` must be ({layout.num_entries},), one for each stored transition, but is {tuple(transition.shape)} instead.")
    if evidence is None:
        sequences.check(layout.num_symbols, None)
    else:
        check_evidence(evidence, layout.num_symbols, sequences)


def check_evidence(evidence: Tensor, num_symbols: int, sequences: Sequences) -> None:
    """Raises where the rows are not distributions over the symbols."""
    if evidence.shape != (sequences.num_steps, num_symbols):
        wanted, shape = (sequences.num_steps, num_symbols), tuple(evidence.shape)
        raise ValueError(f"`evidence` must be {wanted}, steps by symbols, but is {shape} instead.")
    if evidence.device.type != "cpu":
        return
    unknown = evidence.isnan().all(1)
    sums = evidence.double().sum(1)
    wrong = ~unknown & ~((evidence >= 0).all(1) & ((sums - 1).abs() < 1e-6))
    if bool(wrong.any()):
        row = int(torch.nonzero(wrong)[0, 0])
        n, t = sequences.locate(row)
        what = f"sums to {float(sums[row]):.6g}" if bool((evidence[row] >= 0).all()) else "has an entry that is no probability"
        raise ValueError(
            f"`evidence` rows must be distributions over the symbols, but position {t} of sequence {n} {what} instead. "
            "Normalise it; a row of NaN says that nothing is known."
        )


def _call(
    initial: Tensor,
    transition: Tensor,
    layout: Layout,
    evidence: Tensor | None,
    sequences: Sequences,
    weights: Tensor | None,
    single: bool,
    smooth: bool,
    per_step: bool,
    last_step: bool = False,
) -> _Results:
    _check(initial, transition, layout, evidence, sequences)
    if weights is None:
        weights = torch.ones(len(sequences), dtype=wide_dtype(initial.device), device=initial.device)
    return _e_step_op(initial, transition, layout.tensors, *_data(evidence, sequences), sequences.offsets, weights, single, smooth, per_step, last_step)


def _data(evidence: Tensor | None, sequences: Sequences) -> tuple[Tensor, Tensor]:
    """Symbols, of no meaning where there is evidence; and the evidence, without rows where there is none."""
    if evidence is None:
        return sequences.values.long(), sequences.values.new_zeros(0, 0, dtype=torch.float64)
    return torch.full((sequences.num_steps,), -1, device=evidence.device), evidence


def log_likelihood(initial: Tensor, transition: Tensor, layout: Layout, evidence: Tensor | None, sequences: Sequences, *, single: bool = False) -> Tensor:
    """(N,) log p(y) of each sequence, differentiable in `initial` and `transition`."""
    differentiable = torch.is_grad_enabled() and (initial.requires_grad or transition.requires_grad)
    return _call(initial, transition, layout, evidence, sequences, None, single, differentiable, False)[0]


def weighted_log_likelihood(
    initial: Tensor, transition: Tensor, layout: Layout, evidence: Tensor | None, sequences: Sequences, *, single: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """What training needs: (N,) weight x log p(y), differentiable; (N,) log p(y); and (N,) the impossible steps (-1: none)."""
    differentiable = torch.is_grad_enabled() and (initial.requires_grad or transition.requires_grad)
    weighted, plain, impossible, *_ = _call(initial, transition, layout, evidence, sequences, sequences.weights, single, differentiable, False)
    return weighted, plain, impossible


@torch.no_grad()
def e_step(initial: Tensor, transition: Tensor, layout: Layout, evidence: Tensor | None, sequences: Sequences, *, single: bool = False) -> EStep:
    """Expected counts, each sequence counted with its weight; those of transitions in the layout's order."""
    results = _call(initial, transition, layout, evidence, sequences, sequences.weights, single, True, False)
    return EStep(*results[1:5], ())


@torch.no_grad()
def posterior(initial: Tensor, transition: Tensor, layout: Layout, evidence: Tensor | None, sequences: Sequences) -> Posterior:
    """Filtered and smoothed state probabilities: (steps, H) rows, so of sequences that fit; `transition_counts` in the layout's order."""
    results = _call(initial, transition, layout, evidence, sequences, None, False, True, True)
    _, log_likelihood, _, _, counts, smoothed, filtered, _ = results
    if sequences.weights is not None:  # with weights, the rows of the steps would be multiplied too
        counts = e_step(initial, transition, layout, evidence, sequences).transition
    return Posterior(log_likelihood, sequences.with_values(filtered), sequences.with_values(smoothed), counts)


@torch.no_grad()
def viterbi(initial: Tensor, transition: Tensor, layout: Layout, evidence: Tensor | None, sequences: Sequences) -> Path:
    """The most probable path of each sequence; of equally probable ones that with the lowest numbers from the end."""
    _check(initial, transition, layout, evidence, sequences)
    path, log_probability = _viterbi_op(initial, transition, layout.tensors, *_data(evidence, sequences), sequences.offsets)
    return Path(sequences.with_values(path), log_probability)


@torch.no_grad()
def rearranged_viterbi(
    initial: Tensor, transition: Tensor, layout: Layout, symbols: Tensor, lengths: Sequence[int], most: int = 20_000
) -> tuple[Tensor, float]:
    """The most probable path through symbols that may stand in any order within groups of the given lengths; and its log-probability.

    (steps,) states; all -1 where every order is impossible. Exact unless a step has more than `most` pairs of a clone and the part of its group
    that is used, of which only the best are kept. On the CPU, whatever the device.
    """
    found = symbols.cpu()
    _check(initial, transition, layout, None, Sequences.from_lengths(found, [len(found)]))
    if sum(lengths) != len(found) or min(lengths, default=1) < 1:
        raise ValueError(f"`lengths` must be positive and sum to the number of symbols, {len(found)}, but sum to {sum(lengths)} instead.")
    if bool((found < 0).any()):
        raise ValueError(f"`symbols` must have none missing, for nothing can be put in its place, but position {int((found < 0).nonzero()[0])} is missing.")
    group_first, path = np.append(0, np.cumsum(np.asarray(lengths, np.int64))), np.full(len(found), -1)
    chain = layout.arrays, layout.symbols.numpy(), _numpy(transition), _numpy(initial.double())
    return torch.from_numpy(path), float(rearranged_path(_numpy(found), group_first, *chain, most, path))


@torch.no_grad()
def predict_next(initial: Tensor, transition: Tensor, layout: Layout, evidence: Tensor | None, sequences: Sequences, *, steps: int = 1) -> Tensor:
    """(N, H) p(z_{T+steps} | y_1:T); of an empty sequence, that of the chain itself. Impossible sequences give NaN.

    It is the filter over steps of which nothing is known.
    """
    if steps < 1:
        raise ValueError(f"`steps` must be at least 1, but is {steps} instead.")
    _check(initial, transition, layout, evidence, sequences)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), (sequences.lengths + steps).cumsum(0)])
    rows = torch.arange(sequences.num_steps) + sequences.repeat_interleave(ends[:-1] - sequences.offsets[:-1])
    if evidence is None:
        longer = sequences.values.new_full((int(ends[-1]),), -1).index_copy(0, rows.to(sequences.device), sequences.values)
        extended, seen = Sequences(longer, ends), None
    else:
        seen = evidence.new_full((int(ends[-1]), layout.num_symbols), torch.nan).index_copy(0, rows.to(evidence.device), evidence)
        extended = Sequences(seen, ends)
    results = _call(initial, transition, layout, seen, extended, None, False, False, False, True)
    return torch.where((results[2] >= 0)[:, None], torch.nan, results[7])


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().numpy()


@torch.no_grad()
def sample(initial: Tensor, transition: Tensor, layout: Layout, lengths: Tensor, generator: torch.Generator) -> Sequences:
    """State paths drawn from the Markov chain, of the given lengths. Drawn on the CPU: the same on every device.

    Raises a `ValueError` where a path reaches a state without transitions before its end.
    """
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cpu().cumsum(0)])
    uniforms = torch.rand(int(offsets[-1]), generator=generator, dtype=torch.float64).numpy()
    states = cloned_cpu.sample(layout.arrays, _numpy(initial.double().exp()), _numpy(transition), offsets.numpy(), uniforms)
    ended = np.flatnonzero(states < 0)
    if len(ended):
        last = int(states[ended[0] - 1])
        raise ValueError(
            f"The chain must be able to go on from every state that it reaches, but state {last}, a clone of symbol {int(layout.symbols[last])}, has no "
            'transitions, because nothing follows that symbol in the training data. Draw shorter sequences, or train with `pairs` "all" and a '
            "`transition_pseudocount`."
        )
    return Sequences(torch.from_numpy(states).to(initial.device), offsets)


@torch.no_grad()
def sample_posterior(
    initial: Tensor, transition: Tensor, layout: Layout, evidence: Tensor | None, sequences: Sequences, generator: torch.Generator
) -> Sequences:
    """One state path for each sequence, drawn from p(z | y); -1 in impossible sequences. Drawn on the CPU."""
    _check(initial, transition, layout, evidence, sequences)
    uniforms = torch.rand(sequences.num_steps, generator=generator, dtype=torch.float64).numpy()
    values, rows = _data(evidence, sequences)
    data = _numpy(values), None if evidence is None else _numpy(rows.double()), sequences.offsets.numpy()
    states = cloned_cpu.sample_posterior(layout.arrays, _numpy(initial.double()), _numpy(transition), *data, uniforms)
    return sequences.with_values(torch.from_numpy(states).to(initial.device))


@torch.no_grad()
def em_step(initial: Tensor, transition: Tensor, layout: Layout, sequences: Sequences) -> Tensor:
    """One bare iteration of batch EM on the transitions, in place; returns (N,) log p(y) under those before it.

    Where one that counts is -inf, they stay as they are.
    """
    _check(initial, transition, layout, None, sequences)
    weights = torch.ones(len(sequences), dtype=torch.float64) if sequences.weights is None else sequences.weights
    data = sequences.values.long().contiguous().numpy(), sequences.offsets.numpy(), weights.numpy()
    found = cloned_cpu.em_step(layout.arrays, initial.double().contiguous().numpy(), _in_place(transition), *data)
    if found is not None:
        return torch.from_numpy(found)
    statistics = e_step(initial, transition, layout, None, sequences)
    if not bool(((statistics.impossible_step >= 0) & (weights != 0)).any()):
        cloned_cpu.maximise(layout.row_first, _in_place(transition), statistics.transition.numpy(), 1.0, 0.0, 0.0)
    return statistics.log_likelihood


_FUSED_ENTRIES = 1 << 16  # stored transitions up to which a pass of many updates is one compiled call


@torch.no_grad()
def online_em(
    initial: Tensor,
    transition: Tensor,
    sequences: Sequences,
    batch_size: int,
    *,
    layout: Layout,
    discount: float,
    updates: int,
    size: Tensor,
    data_size: float,
    pseudocounts: Sequence[float],
    frozen: Sequence[bool],
    buffers: Sequence[Tensor],
) -> Tensor:
    """Online EM over consecutive batches of `batch_size` sequences; parameters and buffers change in place. See `dense.online_em`."""
    _check(initial, transition, layout, None, sequences)
    if sequences.weights is None:
        sequences = sequences.replaced(weights=torch.ones(len(sequences), dtype=torch.float64))
    assert sequences.weights is not None
    weights = sequences.weights
    initial_buffer, buffer = buffers
    num_batches = -(-len(sequences) // batch_size)
    batch_first = np.minimum(np.arange(num_batches + 1) * batch_size, len(sequences))
    scores, batch = np.zeros(len(sequences)), 0
    plain = transition.dtype == torch.float64 and layout.num_entries <= _FUSED_ENTRIES and not bool((sequences.values < 0).any())
    row_first, symbols = layout.row_first, sequences.values.long().contiguous().numpy() if plain else None
    while batch < num_batches:
        if plain:
            data = batch, batch_first, sequences.offsets.numpy(), symbols, weights.numpy(), layout.arrays, row_first
            options = float(discount), updates + batch, size.reshape(1).numpy(), float(data_size), np.asarray(pseudocounts, float), np.asarray(frozen, bool)
            in_place = (tensor.detach().numpy() for tensor in (initial, transition, initial_buffer, buffer))
            batch = cloned_cpu.online_em(*data, *options, *in_place, scores)
            if batch == num_batches:
                break
        first, last = int(batch_first[batch]), int(batch_first[batch + 1])
        statistics = e_step(initial, transition, layout, None, sequences[first:last])
        impossible = torch.nonzero((statistics.impossible_step >= 0) & (weights[first:last] != 0)).flatten()
        if len(impossible):
            n = int(impossible[0])
            raise ValueError(impossible_message(sequences[first:last], n, int(statistics.impossible_step[n])))
        scores[first:last] = statistics.log_likelihood
        batch += 1
        correction = 1.0 - discount ** (updates + batch)
        size.mul_(discount).add_(statistics.initial.sum(), alpha=1 - discount)
        share = float(size) / correction / data_size
        for counts, counted in ((initial_buffer, statistics.initial), (buffer, statistics.transition)):
            counts.mul_(discount).add_(counted, alpha=1 - discount)
        if not frozen[0]:
            allowed = initial > -torch.inf
            counted = torch.where(allowed, initial_buffer / correction + pseudocounts[0] * share, 0.0)
            if float(counted.sum()) > 0:
                initial.copy_((counted / counted.sum()).log())
        if not frozen[1]:
            cloned_cpu.maximise(row_first, _in_place(transition), _in_place(buffer), 1.0 / correction, pseudocounts[1] * share, 0.0)
    return torch.from_numpy(scores)


def _in_place(tensor: Tensor) -> np.ndarray:
    return tensor.detach().numpy()
