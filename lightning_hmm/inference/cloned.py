r"""Inference in cloned hidden Markov models, in which every state emits exactly one symbol.

.. math:: p(y) = \sum_{z_t \in \text{clones}(y_t)} \pi_{z_1} \prod_{t>1} A_{z_{t-1} z_t}

A step is a product with the block of A between the clones of two symbols. It takes O(M^2) operations for M clones per
symbol, independent of the number of symbols. A `Layout` determines for which pairs of symbols the blocks are stored.
They are stored as a flat tensor of probabilities, one row of A after the other. A pruned layout stores single entries.

`Blocks` is the operator of these transitions and `ClonedSymbols` is the evidence. Pass them to the functions of
`lightning_hmm.inference` like any other operator and evidence.

If the symbols are uncertain, log p(y) is the logarithm of the sum, over all sequences of symbols, of p(symbols) times
the product of the weights of the symbols.

On a CPU, compiled kernels run in the data type of the stored probabilities. On other devices, `cloned_portable` is
used. A filtered probability below 1e-290 (1e-30 in float32) is set to zero, unless no other state remains. Impossible
evidence has a log-likelihood of -inf.

Example:
    >>> import torch
    >>> from lightning_hmm import inference
    >>> from lightning_hmm.inference.cloned import Blocks, ClonedSymbols, Layout
    >>> from lightning_hmm.sequences import Sequences
    >>> layout = Layout(clones=[2, 1])  # two clones of symbol 0, one of symbol 1
    >>> operator = Blocks(torch.full((layout.num_entries,), 1 / 3, dtype=torch.float64), layout)
    >>> initial = torch.full((3,), 1 / 3, dtype=torch.float64).log()
    >>> sequences = Sequences.from_lengths(torch.tensor([0, 1, 1]), [3])
    >>> evidence = ClonedSymbols.of(sequences, layout)
    >>> log_likelihood = inference.log_likelihood(initial, operator, evidence, sequences.offsets)
    >>> round(float(log_likelihood.exp() * 27), 6)  # 2 of 27 paths
    2.0
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
    """Assignment of states to symbols, and positions of the stored transitions.

    Args:
        clones: (V,) number of clones of each symbol. The states are numbered symbol after symbol.
        pairs: (P, 2) pairs of symbols whose blocks are stored. The default is all V x V pairs.
        bounds: Positions at which the rows of blocks begin among the stored entries, see `cpu.clones.forward_backward`.
            The default is that of whole blocks.
        columns: For pruned layouts, the target clone of each stored entry, numbered within its symbol.

    Example:
        >>> Layout(clones=[2, 1], pairs=[[0, 1], [1, 0]])
        Layout(3 clones of 2 symbols, 4 transitions in blocks of 2 pairs)
    """

    def __init__(
        self, clones: Any, pairs: Any = None, bounds: Tensor | None = None, columns: Tensor | None = None
    ) -> None:
        self.clones = torch.as_tensor(clones, dtype=torch.int64).cpu()
        if self.clones.dim() != 1 or not len(self.clones) or int(self.clones.min()) < 1:
            without = torch.nonzero(self.clones.reshape(-1) < 1).flatten().tolist()
            raise ValueError(
                "`clones` must give each symbol at least one clone, "
                f"but symbol {without[0] if without else 0} has none."
            )
        num_symbols = len(self.clones)
        if pairs is None:
            pairs = torch.cartesian_prod(torch.arange(num_symbols), torch.arange(num_symbols)).reshape(-1, 2)
        self.pairs = torch.unique(torch.as_tensor(pairs, dtype=torch.int64).cpu().reshape(-1, 2), dim=0)
        if len(self.pairs) and (int(self.pairs.min()) < 0 or int(self.pairs.max()) >= num_symbols):
            raise ValueError(
                f"`pairs` must be of symbols 0 to {num_symbols - 1}, "
                f"but reach from {int(self.pairs.min())} to {int(self.pairs.max())} instead."
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
        """The arguments of the constructor as tensors, for checkpoints: clones, pairs, bounds and columns."""
        return [self.clones, self.pairs, self.bounds, self.columns]

    @property
    def arrays(self) -> Arrays:
        """The layout as arrays for the compiled kernels."""
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
        """Number of stored transitions."""
        return int(self.bounds[-1])

    @property
    def is_sparse(self) -> bool:
        """Whether single entries are stored, as in pruned layouts."""
        return len(self.columns) > 0

    @property
    def density(self) -> float:
        """Fraction of all pairs of states whose transition is stored."""
        return self.num_entries / self.num_states**2

    @property
    def symbols(self) -> Tensor:
        """(H,) symbol of each of H states."""
        return torch.arange(self.num_symbols).repeat_interleave(self.clones)

    @property
    def row_first(self) -> np.ndarray:
        """(H + 1,) positions at which the transitions from each state begin. Those of a state are contiguous."""
        if self._row_first is None:
            self._row_first = self.arrays.row_first
        return self._row_first

    @property
    def row_lengths(self) -> Tensor:
        """(H,) number of stored transitions from each state."""
        return torch.from_numpy(np.diff(self.row_first))

    def states_of(self, entries: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the source and target states of the given stored transitions, or of all of them."""
        rows, columns = map(torch.from_numpy, cloned_portable.states_of(self.arrays))
        return (rows, columns) if entries is None else (rows[entries], columns[entries])

    def expand(self, values: Tensor) -> Tensor:
        """Returns the (H, H) matrix of stored `values` (entries,), with zeros elsewhere."""
        rows, columns = self.states_of()
        matrix = values.new_zeros(self.num_states, self.num_states)
        matrix[rows.to(values.device), columns.to(values.device)] = values
        return matrix

    def collect(self, matrix: Tensor) -> Tensor:
        """Returns the stored entries of an (H, H) matrix. It is the inverse of `expand`."""
        rows, columns = self.states_of()
        return matrix[rows.to(matrix.device), columns.to(matrix.device)]

    def pruned(self, keep: Tensor) -> Layout:
        """Returns the layout of the stored transitions that are marked in `keep`, (entries,) booleans."""
        if keep.shape != (self.num_entries,) or keep.dtype != torch.bool:
            raise ValueError(
                f"`keep` must be a mask of the {self.num_entries} stored transitions, a tensor of booleans, "
                f"but has shape {tuple(keep.shape)} and holds {keep.dtype} instead."
            )
        kept = keep.cpu().numpy()
        if not kept.any():
            raise ValueError(f"`keep` must keep some of the {self.num_entries} stored transitions, but keeps none.")
        bounds, columns = run.pruned(self.arrays, kept)
        return Layout(self.clones, self.pairs, torch.from_numpy(bounds), torch.from_numpy(columns))

    @classmethod
    def of_entries(cls, clones: Any, rows: Tensor, columns: Tensor) -> tuple[Layout, Tensor]:
        """Creates a layout that stores single transitions.

        Args:
            clones: (V,) number of clones of each symbol.
            rows: (n,) source state of each transition.
            columns: (n,) target state of each transition.

        Returns:
            The layout, and the order in which it stores the given transitions.
        """
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
        storage = "single entries" if self.is_sparse else f"blocks of {len(self.pairs)} pairs"
        states = f"{self.num_states} clones of {self.num_symbols} symbols"
        return f"Layout({states}, {self.num_entries} transitions in {storage})"


@dataclass(frozen=True)
class Blocks(Operator):
    """Transitions between clones.

    Probabilities are stored instead of logarithms, so that models with a billion transitions need no second copy. As
    for other operators, an E-step returns expected counts. The gradient of the log-likelihood with respect to `probs`
    is the count divided by the probability. `gradients` computes it, and `log_likelihood` returns it to autograd. A
    stored probability of zero is structural, and its gradient is zero.

    probs: (entries,) transition probabilities in the order of the layout.
    layout: Positions of the stored transitions.
    """

    probs: Tensor
    layout: Layout

    def __post_init__(self) -> None:
        if self.probs.shape != (self.layout.num_entries,):
            shape, wanted = tuple(self.probs.shape), (self.layout.num_entries,)
            raise ValueError(
                f"`probs` must have shape {wanted}, one for each stored transition of the layout, "
                f"but has {shape} instead."
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
        impossible = self.probs.new_full((self.num_states, self.num_states), -torch.inf)
        return impossible.index_put((rows, columns), self.probs.log())


class ClonedSymbols(NamedTuple):
    """Evidence of states that emit exactly one symbol each. It has no parameters.

    symbols: (steps,) symbols in the smallest sufficient data type of uint8, int16 and int32. The number V represents a
        missing symbol. They are ignored if `weights` are given.
    weights: (steps, V) distribution over the symbols for each step, or a row of NaN where nothing is known. ``None`` if
        the symbols are known.
    layout: Assignment of states to symbols.
    """

    symbols: Tensor
    weights: Tensor | None
    layout: Layout

    @classmethod
    def of(cls, sequences: Sequences, layout: Layout) -> ClonedSymbols:
        """Creates the evidence of sequences of symbols, or of real vectors that are distributions over the symbols."""
        if sequences.is_discrete:
            return cls(sequences.symbols(layout.num_symbols), None, layout)
        check_evidence(sequences.values, layout.num_symbols, sequences)
        ignored = torch.zeros(sequences.num_steps, dtype=torch.uint8, device=sequences.device)
        return cls(ignored, sequences.values, layout)

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
        """Returns (steps, H) log-likelihoods: logarithms of 0 and 1, or of the weights."""
        return cloned_portable.step_rows(
            self.layout.arrays, self.symbols, self.weights, wide_dtype(self.symbols.device)
        )

    def pull(self, gamma: Tensor) -> Tensor:
        return gamma.new_zeros(0)

    def at(self, steps: Tensor) -> ClonedSymbols:
        """Returns the evidence of the given steps."""
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
    """Extends each sequence by missing symbols and filters it, so no matrix of all states is needed."""
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
    """Raises a `ValueError` if a row of `evidence` is not a distribution over the symbols."""
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
            "Normalize the row, or use a row of NaN where nothing is known."
        )


@torch.no_grad()
def rearranged_viterbi(
    initial: Tensor, operator: Blocks, symbols: Tensor, lengths: Sequence[int], most: int = 20_000
) -> tuple[Tensor, float]:
    """Computes the most probable path through symbols that may be reordered within groups.

    It runs on the CPU. The result is exact unless a step has more than `most` nodes, in which case only the most
    probable ones are kept. A node is a clone together with the symbols of its group that have been used.

    Args:
        initial: (H,) log-probabilities of the first state.
        operator: Transitions between clones.
        symbols: (steps,) symbols without missing ones.
        lengths: Lengths of the successive groups of steps, whose sum is the number of steps.
        most: Largest number of nodes of a step that are kept.

    Returns:
        (steps,) states, which are all -1 if every order is impossible, and the log-probability of the path.
    """
    found = symbols.cpu()
    layout = operator.layout
    Sequences.from_lengths(found, [len(found)]).check(layout.num_symbols, None)
    if sum(lengths) != len(found) or min(lengths, default=1) < 1:
        raise ValueError(
            f"`lengths` must be positive and sum to the number of symbols, {len(found)}, "
            f"but sum to {sum(lengths)} instead."
        )
    if bool((found < 0).any()):
        raise ValueError(
            "`symbols` must not contain missing symbols, "
            f"but the one at position {int((found < 0).nonzero()[0])} is missing."
        )
    group_first, path = np.append(0, np.cumsum(np.asarray(lengths, np.int64))), np.full(len(found), -1)
    chain = layout.arrays, layout.symbols.numpy(), _numpy(operator.probs), _numpy(initial.double())
    return torch.from_numpy(path), float(rearranged_path(_numpy(found), group_first, *chain, most, path))


def _numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().contiguous().numpy()


@sampling.chains.register
def _(operator: Blocks, initial: Tensor, offsets: Tensor, uniforms: Tensor) -> Tensor:
    """Raises a `ValueError` if a path reaches a state without transitions before its end."""
    layout = operator.layout
    states = run.sample(
        layout.arrays, _numpy(initial.double().exp()), _numpy(operator.probs), offsets.numpy(), uniforms.numpy()
    )
    ended = np.flatnonzero(states < 0)
    if len(ended):
        last = int(states[ended[0] - 1])
        raise ValueError(
            f"The chain must be able to go on from every state that it reaches, but state {last}, a clone of symbol "
            f"{int(layout.symbols[last])}, has no transitions, because nothing follows that symbol in the training "
            "data. "
            'Draw shorter sequences, or train with `pairs` "all" and a `transition_pseudocount`.'
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
