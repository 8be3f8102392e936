r"""Inference in cloned hidden Markov models, where every state emits one symbol for certain.

.. math:: p(y) = \sum_{z_t \in \text{clones}(y_t)} \pi_{z_1} \prod_{t>1} A_{z_{t-1} z_t}

A step is a product with the one block of A between the clones of two symbols: O(M^2) for M clones a symbol, whatever the
number of symbols. Blocks are stored for the pairs of symbols of a `Layout` only, as a flat tensor of probabilities, a row of
A after the other; a pruned layout stores single entries.

`Blocks` is the operator of these transitions and `ClonedSymbols` the evidence; the functions of `lightning_hmm.inference` take them like others.

With uncertain evidence, log p(y) is that of the mixture over symbols: the logarithm of the sum over symbol strings of
p(string) times the product of their weights in the rows.

On a CPU compiled kernels run in the precision of the stored probabilities, elsewhere those of `cloned_portable`. A
state whose filtered probability falls below 1e-290 (in float32 1e-30) counts as ruled out, unless
nothing else is left. Impossible evidence gives -inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_hmm.inference import backends, cloned_portable, sampling
from lightning_hmm.inference.cpu.clones import run
from lightning_hmm.inference.cpu.clones.plan import Arrays, layout_arrays
from lightning_hmm.inference.cpu.clones.rearranged import rearranged_path
from lightning_hmm.inference.log_space import wide_dtype
from lightning_hmm.inference.operators import Operator
from lightning_hmm.inference.results import EStep
from lightning_hmm.sequences import Sequences


class Layout:
    """Which states are clones of which symbol, and which transitions are stored.

    Args:
        clones: (V,) the number of clones of each symbol; their states are numbered symbol after symbol.
        pairs: (P, 2) the pairs of symbols whose blocks are stored; all V x V if not given.
        bounds: where rows of blocks begin among the stored entries; see `cpu.clones.forward_backward`. Of whole blocks if not given.
        columns: of pruned layouts: the target clone of each stored entry, within its symbol.
    """

    def __init__(
        self, clones: Any, pairs: Any = None, bounds: Tensor | None = None, columns: Tensor | None = None
    ) -> None:
        self.clones = torch.as_tensor(clones, dtype=torch.int64).cpu()
        if self.clones.dim() != 1 or not len(self.clones) or int(self.clones.min()) < 1:
            without = torch.nonzero(self.clones.reshape(-1) < 1).flatten().tolist()
            raise ValueError(
                f"`clones` must give each symbol at least one clone, but symbol {without[0] if without else 0} has none."
            )
        num_symbols = len(self.clones)
        if pairs is None:
            pairs = torch.cartesian_prod(torch.arange(num_symbols), torch.arange(num_symbols)).reshape(-1, 2)
        self.pairs = torch.unique(torch.as_tensor(pairs, dtype=torch.int64).cpu().reshape(-1, 2), dim=0)
        if len(self.pairs) and (int(self.pairs.min()) < 0 or int(self.pairs.max()) >= num_symbols):
            raise ValueError(
                f"`pairs` must be of symbols 0 to {num_symbols - 1}, but reach from {int(self.pairs.min())} to {int(self.pairs.max())} instead."
            )
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
            raise ValueError(
                f"`keep` must be a mask of the {self.num_entries} stored transitions, a tensor of booleans, but {what} instead."
            )
        kept = keep.cpu().numpy()
        if not kept.any():
            raise ValueError(f"`keep` must keep some of the {self.num_entries} stored transitions, but keeps none.")
        bounds, columns = run.pruned(self.arrays, kept)
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
        return isinstance(other, Layout) and all(
            torch.equal(mine, theirs) for mine, theirs in zip(self.tensors, other.tensors, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        kind = "single entries" if self.is_sparse else f"blocks of {len(self.pairs)} pairs"
        return (
            f"Layout({self.num_states} clones of {self.num_symbols} symbols, {self.num_entries} transitions in {kind})"
        )


@dataclass(frozen=True)
class Blocks(Operator):
    """The transitions between clones: the stored probabilities, (entries,) in the order of the layout.

    They are probabilities and not logarithms, because a billion of them are stored once only. An E-step returns expected counts, as for other operators. The
    gradient of the log-likelihood in `probs` is the count divided by the probability, which `gradients` computes and `log_likelihood` passes to autograd.
    A stored probability of zero is structural, and its gradient is given as zero.
    """

    probs: Tensor
    layout: Layout

    def __post_init__(self) -> None:
        if self.probs.shape != (self.layout.num_entries,):
            shape, wanted = tuple(self.probs.shape), (self.layout.num_entries,)
            raise ValueError(
                f"`probs` must have shape {wanted}, one for each stored transition of the layout, but has {shape} instead."
            )

    @property
    def num_states(self) -> int:
        return self.layout.num_states

    @property
    def natural(self) -> tuple[Tensor, ...]:
        return (self.probs,)

    def with_natural(self, natural: tuple[Tensor, ...]) -> Blocks:
        return Blocks(natural[0], self.layout)

    def on(self, device: torch.device | str) -> Blocks:
        return Blocks(self.probs.detach().to(device), self.layout)

    def gradients(self, counts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (torch.where(self.probs > 0, counts[0] / self.probs, 0),)

    def predict(self, alpha: Tensor, at: Tensor) -> Tensor:
        rows, columns = (states.to(alpha.device) for states in self.layout.states_of())
        return torch.zeros_like(alpha).index_add(1, columns, alpha[:, rows] * self.probs)

    def counts(self, alpha: Tensor, kappa: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        rows, columns = (states.to(alpha.device) for states in self.layout.states_of())
        return ((alpha[:, rows] * kappa[:, columns]).sum(0) * self.probs.detach().to(alpha.dtype),)

    def counts_of_pairs(self, pairs: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        return (self.layout.collect(pairs.sum(0)),)

    def to_dense(self, at: Tensor) -> Tensor:
        rows, columns = (states.to(self.probs.device) for states in self.layout.states_of())
        return self.probs.new_full((self.num_states, self.num_states), -torch.inf).index_put(
            (rows, columns), self.probs.log()
        )


class ClonedSymbols(NamedTuple):
    """The evidence of states that emit one symbol each for certain. It has no parameters.

    symbols: (steps,) in the narrowest of uint8, int16 and int32; V stands for a missing one. They have no meaning where there are `weights`.
    weights: (steps, V) a distribution over the symbols for each step, a row of NaN where nothing is known; ``None`` where symbols are known.
    layout: which states are clones of which symbol.
    """

    symbols: Tensor
    weights: Tensor | None
    layout: Layout

    @classmethod
    def of(cls, sequences: Sequences, layout: Layout) -> ClonedSymbols:
        """The evidence of symbols, or of real vectors that are distributions over the symbols."""
        if sequences.is_discrete:
            return cls(sequences.symbols(layout.num_symbols), None, layout)
        check_evidence(sequences.values, layout.num_symbols, sequences)
        return cls(
            torch.zeros(sequences.num_steps, dtype=torch.uint8, device=sequences.device), sequences.values, layout
        )

    @property
    def live(self) -> Tensor:
        return torch.zeros(0, device=self.symbols.device)

    @property
    def num_states(self) -> int:
        return self.layout.num_states

    @property
    def num_steps(self) -> int:
        return len(self.symbols)

    def with_live(self, live: Tensor) -> ClonedSymbols:
        return self

    def rows(self) -> Tensor:
        """(steps, H) logarithms of 0 and 1, or of the weights."""
        return cloned_portable.step_rows(
            self.layout.arrays, self.symbols, self.weights, wide_dtype(self.symbols.device)
        )

    def pull(self, gamma: Tensor) -> Tensor:
        return gamma.new_zeros(0)

    def at(self, steps: Tensor) -> ClonedSymbols:
        """The evidence of some of the steps."""
        return ClonedSymbols(self.symbols[steps], None if self.weights is None else self.weights[steps], self.layout)


def _obstacle(operator: Operator, evidence: Any, device: torch.device) -> str | None:
    if isinstance(operator, Blocks) and isinstance(evidence, ClonedSymbols):
        return None
    return "It runs transitions between clones of symbols only."


def _e_step(
    initial: Tensor,
    operator: Blocks,
    evidence: ClonedSymbols,
    offsets: Tensor,
    weights: Tensor,
    *,
    dtype: torch.dtype | None = None,
    smooth: bool = True,
    per_step: bool = True,
) -> EStep:
    single, arrays, probs = dtype == torch.float32, operator.layout.arrays, operator.probs
    if initial.is_cpu:
        known = None if evidence.weights is None else _numpy(evidence.weights.double())
        working = _numpy(probs).astype(np.float32) if single and probs.dtype == torch.float64 else _numpy(probs)
        data = _numpy(evidence.symbols), known, offsets.numpy(), weights.numpy()
        results = run.e_step(
            arrays, _numpy(initial.double()), working, *data, smooth=smooth, per_step=per_step, last=not smooth
        )
        log_likelihood, impossible, starts, counts, smoothed, filtered, last = map(torch.from_numpy, results)
    else:
        problem = arrays, initial, probs, evidence.symbols, evidence.weights, offsets, weights
        log_likelihood, impossible, starts, counts, smoothed, filtered, last = cloned_portable.e_step(
            *problem, single=single, smooth=smooth
        )
    if not per_step:
        smoothed, filtered = smoothed[:0], filtered[:0]
    return EStep(
        log_likelihood, impossible, starts, (counts.to(probs.dtype),), starts.new_zeros(0), smoothed, filtered, last
    )


def _viterbi(initial: Tensor, operator: Blocks, evidence: ClonedSymbols, offsets: Tensor) -> tuple[Tensor, Tensor]:
    arrays = operator.layout.arrays
    if not initial.is_cpu:
        return cloned_portable.viterbi(arrays, initial, operator.probs, evidence.symbols, evidence.weights, offsets)
    rows = None if evidence.weights is None else _numpy(evidence.weights.double())
    path, log_probability = run.viterbi(
        arrays, _numpy(initial.double()), _numpy(operator.probs), _numpy(evidence.symbols), rows, offsets.numpy()
    )
    return torch.from_numpy(path), torch.from_numpy(log_probability)


def _predict(initial: Tensor, operator: Blocks, evidence: ClonedSymbols, offsets: Tensor, *, steps: int) -> Tensor:
    """The filter over steps of which nothing is known, which needs no more memory than the layout."""
    lengths = offsets.diff()
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), (lengths + steps).cumsum(0)])
    rows = (torch.arange(int(offsets[-1])) + (ends[:-1] - offsets[:-1]).repeat_interleave(lengths)).to(initial.device)
    symbols = evidence.symbols.new_full((int(ends[-1]),), operator.layout.num_symbols).index_copy(
        0, rows, evidence.symbols
    )
    weights = evidence.weights
    if weights is not None:
        weights = weights.new_full((int(ends[-1]), weights.shape[1]), torch.nan).index_copy(0, rows, weights)
    ones = torch.ones(len(lengths), dtype=wide_dtype(initial.device), device=initial.device)
    found = _e_step(
        initial, operator, ClonedSymbols(symbols, weights, operator.layout), ends, ones, smooth=False, per_step=False
    )
    return torch.where((found.impossible_step >= 0)[:, None], torch.nan, found.last)


backends.register(backends.Backend("clones", _obstacle, _e_step, _viterbi, _predict))


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
        what = (
            f"sums to {float(sums[row]):.6g}"
            if bool((evidence[row] >= 0).all())
            else "has an entry that is no probability"
        )
        raise ValueError(
            f"`evidence` rows must be distributions over the symbols, but position {t} of sequence {n} {what} instead. "
            "Normalise it; a row of NaN says that nothing is known."
        )


@torch.no_grad()
def rearranged_viterbi(
    initial: Tensor, operator: Blocks, symbols: Tensor, lengths: Sequence[int], most: int = 20_000
) -> tuple[Tensor, float]:
    """The most probable path through symbols that may stand in any order within groups of the given lengths; and its log-probability.

    (steps,) states; all -1 where every order is impossible. Exact unless a step has more than `most` pairs of a clone and the part of its group
    that is used, of which only the best are kept. On the CPU, whatever the device.
    """
    found = symbols.cpu()
    layout = operator.layout
    Sequences.from_lengths(found, [len(found)]).check(layout.num_symbols, None)
    if sum(lengths) != len(found) or min(lengths, default=1) < 1:
        raise ValueError(
            f"`lengths` must be positive and sum to the number of symbols, {len(found)}, but sum to {sum(lengths)} instead."
        )
    if bool((found < 0).any()):
        raise ValueError(
            f"`symbols` must have none missing, for nothing can be put in its place, but position {int((found < 0).nonzero()[0])} is missing."
        )
    group_first, path = np.append(0, np.cumsum(np.asarray(lengths, np.int64))), np.full(len(found), -1)
    chain = layout.arrays, layout.symbols.numpy(), _numpy(operator.probs), _numpy(initial.double())
    return torch.from_numpy(path), float(rearranged_path(_numpy(found), group_first, *chain, most, path))


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().numpy()


@sampling.chains.register
def _(operator: Blocks, initial: Tensor, offsets: Tensor, uniforms: Tensor) -> Tensor:
    """Raises a `ValueError` where a path reaches a state without transitions before its end."""
    layout = operator.layout
    states = run.sample(
        layout.arrays, _numpy(initial.double().exp()), _numpy(operator.probs), offsets.numpy(), uniforms.numpy()
    )
    ended = np.flatnonzero(states < 0)
    if len(ended):
        last = int(states[ended[0] - 1])
        raise ValueError(
            f"The chain must be able to go on from every state that it reaches, but state {last}, a clone of symbol {int(layout.symbols[last])}, has no "
            'transitions, because nothing follows that symbol in the training data. Draw shorter sequences, or train with `pairs` "all" and a '
            "`transition_pseudocount`."
        )
    return torch.from_numpy(states)


@sampling.paths.register
def _(
    operator: Blocks, initial: Tensor, evidence: ClonedSymbols, offsets: Tensor, uniforms: Tensor, filtered: Any
) -> Tensor:
    rows = None if evidence.weights is None else _numpy(evidence.weights.double())
    data = _numpy(evidence.symbols), rows, offsets.numpy()
    return torch.from_numpy(
        run.sample_posterior(
            operator.layout.arrays, _numpy(initial.double()), _numpy(operator.probs), *data, uniforms.numpy()
        )
    )
