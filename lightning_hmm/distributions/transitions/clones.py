"""Transitions between clones of symbols, of which only the blocks of some pairs of symbols are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from lightning_hmm.distributions.base import Distribution, Transition, check_not_negative
from lightning_hmm.inference.cloned import Blocks, Layout
from lightning_hmm.inference.cpu.clones import run
from lightning_hmm.inference.cpu.updates import normalize_rows, over_rows
from lightning_hmm.inference.operators import Operator
from lightning_hmm.inference.results import EStep
from lightning_hmm.sequences import Sequences

Allocation = Literal["uniform", "frequency", "ngram"]

MOST_SHOWN = 4096  # maximum number of states for which `matrix` returns the transitions
_TENSORS = ("clones", "pairs", "bounds", "columns")  # buffers in which the layout is saved
_PIECE = 1 << 22  # numbers that are drawn at a time in float64, because a billion of them do not fit into memory


class Clones(Transition):
    r"""Transitions between the clones of symbols. A clone is a state that always emits the same symbol.

    Use it together with `OneSymbol`, for symbol sequences with long-range dependencies; `ClonedHMM` combines the two.
    Transitions are stored for the pairs of symbols that may follow each other. The M-step is

    .. math:: \hat A_{ij} = w_{ij} / \sum_j w_{ij}, \quad w_{ij} = \max(n_{ij} + \kappa - \delta, 0)

    where :math:`n` are the expected counts and :math:`\kappa` is the pseudocount of a Dirichlet prior. The `sparsity`
    :math:`\delta` corresponds to a Dirichlet prior with a concentration below one. It reduces the weight of every entry
    and sets entries to zero whose weight would become negative. A probability of zero remains zero.

    The parameter `probs`, (restarts, entries) in the order of `layout`, contains probabilities instead of their
    logarithms, so that up to a billion of them are stored only once. Its gradient is the derivative of the
    log-likelihood with respect to the probabilities, which differs from the expected counts. EM uses the counts of the
    E-step.

    The layout is determined from the training data, by `set_layout`, or from a checkpoint. If it does not depend on
    data, it is created together with the model.

    Args:
        pseudocount: Pseudocount of a Dirichlet prior on each row, in counts of the whole data set.
        sparsity: Count that is subtracted from each transition, in counts of the whole data set.
        allocation: Allocation of clones to symbols: the same number for each symbol ("uniform"), in proportion to the
            frequency of the symbol in the training data ("frequency"), or in proportion to the number of distinct
            n-grams that end in the symbol ("ngram"). Each symbol has at least one clone.
        ngram_order: Length n of the n-grams.
        clones: Number of clones of each symbol, instead of an allocation.
        pairs: Pairs of symbols that may follow each other: those "seen" in the training data (all pairs if the training
            data have missing symbols), or "all".
        start_concentration: Concentration of the Dirichlet distribution from which the initial rows are drawn. If it is
            not given, the weights of a row are drawn uniformly from (0, 1] and normalized.

    Example:
        >>> from lightning_hmm import HMM, Clones, OneSymbol
        >>> model = HMM(5, OneSymbol(), Clones(clones=[3, 2], pairs="all"), num_symbols=2)
        >>> model.transition.layout.symbols
        tensor([0, 0, 0, 1, 1])
        >>> model.transition.layout.num_entries
        25
    """

    has_natural_parameters = False
    partner = "OneSymbol"
    no_matrix = (
        f"are one only for up to {MOST_SHOWN} states and once there are clones; "
        "`transition.probs` holds what is stored, in the order of `layout`"
    )

    def __init__(
        self,
        pseudocount: float = 0.0,
        sparsity: float = 0.0,
        allocation: Allocation = "uniform",
        ngram_order: int = 5,
        clones: list[int] | None = None,
        pairs: Literal["seen", "all"] = "seen",
        start_concentration: float | None = None,
    ) -> None:
        super().__init__()
        check_not_negative(pseudocount=pseudocount, sparsity=sparsity)
        if allocation not in get_args(Allocation):
            raise ValueError(
                f"`allocation` must be one of {', '.join(get_args(Allocation))}, but is {allocation!r} instead."
            )
        if pairs not in ("seen", "all"):
            raise ValueError(f"`pairs` must be seen or all, but is {pairs!r} instead.")
        if ngram_order < 1:
            raise ValueError(f"`ngram_order` must be at least 1, but is {ngram_order} instead.")
        if start_concentration is not None and not start_concentration > 0:
            raise ValueError(f"`start_concentration` must be positive, but is {start_concentration} instead.")
        self.prior = {"pseudocount": pseudocount, "sparsity": sparsity}
        self.allocation = allocation
        self.ngram_order = ngram_order
        self.given_clones = clones
        self.which_pairs = pairs
        self.start_concentration = start_concentration
        self._layout: Layout | None = None

    # Layout

    def allocate(self, restarts: int, num_states: int) -> None:
        num_symbols = self.num_symbols
        if self.given_clones is not None and len(self.given_clones) != num_symbols:
            raise ValueError(
                f"`clones` must have a number for each of the {num_symbols} symbols, "
                f"but has {len(self.given_clones)} instead."
            )
        if self.given_clones is not None and sum(self.given_clones) != num_states:
            raise ValueError(
                f"`num_states` must be the sum of `clones`, {sum(self.given_clones)}, but is {num_states} instead."
            )
        if num_states < num_symbols:
            raise ValueError(
                f"`num_states` must be at least {num_symbols}, a clone for each symbol, but is {num_states} instead."
            )
        self._begin_allocation()
        self.num_states = num_states
        dtype = torch.float32 if self._owner[0].arithmetic == "float32" else torch.float64
        self.probs = nn.Parameter(torch.zeros(restarts, 0, dtype=dtype))
        for name in _TENSORS:
            self.register_buffer(name, torch.zeros(0, dtype=torch.int64))
        # Number of structural zeros among the stored entries, for each restart. An entry whose estimate is zero is
        # still a free parameter.
        self.num_zeros: Tensor
        self.register_buffer("num_zeros", torch.zeros(restarts, dtype=torch.int64))

    @property
    def num_symbols(self) -> int:
        """Number of symbols V of the model."""
        return int(self._owner[0].num_symbols)

    @property
    def layout(self) -> Layout:
        """Assignment of states to symbols, and the transitions that are stored."""
        if self._layout is None:
            raise RuntimeError(
                "The model has no clones yet: they are allocated from the training data, "
                "by `fit` or `initialize(sequences)`."
            )
        return self._layout

    @property
    def is_started(self) -> bool:
        return self._layout is not None

    @torch.no_grad()
    def set_layout(self, layout: Layout, probs: Tensor | None = None) -> None:
        """Sets the layout and the transition probabilities.

        Args:
            layout: The layout.
            probs: (restarts, entries) probabilities, whose zeros become structural zeros. If they are not given, all
                probabilities are zero until `randomize` is called.
        """
        if (layout.num_states, layout.num_symbols) != (self.num_states, self.num_symbols):
            mine, theirs = (self.num_states, self.num_symbols), (layout.num_states, layout.num_symbols)
            raise ValueError(
                f"`layout` must have {mine[0]} clones of {mine[1]} symbols, but has {theirs[0]} of {theirs[1]} instead."
            )
        self._layout = layout
        for name, tensor in zip(_TENSORS, layout.tensors, strict=True):
            setattr(self, name, tensor.to(self.probs.device))
        if probs is None:
            shape = self.probs.shape[0], layout.num_entries
            # Unlike torch, numpy requests large memory pages, in which passes over blocks are 10 % faster.
            probs = torch.from_numpy(
                np.empty(shape, np.float32 if self.probs.dtype == torch.float32 else np.float64)
            ).zero_()
        self.probs.data, self.probs.grad = probs.to(self.probs), None  # the same object, which an optimizer refers to
        self._count_zeros()

    def _count_zeros(self) -> None:
        """Makes the current zeros structural zeros.

        The restarts are processed one by one, because counting along one axis would allocate a mask of all entries.
        """
        for count, row in zip(self.num_zeros, self.probs.detach(), strict=True):
            count.fill_(len(row) - torch.count_nonzero(row))

    def start(self, sequences: Sequences, generator: torch.Generator) -> None:
        """Allocates clones to symbols and blocks to pairs of symbols, and draws the initial probabilities."""
        if not sequences.is_discrete:
            raise ValueError(
                "Clones must be allocated from sequences of symbols, but the sequences hold real vectors instead."
            )
        self._start(generator, sequences)

    def start_over(self, sequences: Sequences, generator: torch.Generator) -> None:
        """Discards the current layout and calls `start`."""
        self._layout = None
        self.start(sequences, generator)

    def _start(self, generator: torch.Generator, sequences: Sequences | None) -> None:
        if self.given_clones is not None:
            clones = np.asarray(self.given_clones)
        elif self.allocation == "uniform":
            clones = uniform_clones(self.num_states, self.num_symbols)
        else:
            assert sequences is not None
            order = 1 if self.allocation == "frequency" else self.ngram_order
            clones = allocate_clones(
                self.num_states, ngram_counts(sequences, self.num_symbols, order, unique=self.allocation == "ngram")
            )
        self.set_layout(
            Layout(clones, None if self.which_pairs == "all" or sequences is None else seen_pairs(sequences))
        )
        self.randomize(generator)

    def copy_from(self, other: Distribution, restart: int) -> None:
        assert isinstance(other, Clones)
        self.set_layout(other.layout, other.probs.detach()[restart].repeat(len(self.probs), 1))

    # Values

    @torch.no_grad()
    def randomize(self, generator: torch.Generator) -> None:
        """Draws the probabilities at random: uniform or Gamma weights, which are normalized in each row.

        If there is no layout, it is created if it does not depend on data. Otherwise nothing is drawn.
        """
        if self._layout is None:
            if self.which_pairs == "all" and (self.given_clones is not None or self.allocation == "uniform"):
                self._start(generator, None)
            return
        concentration = self.start_concentration
        if concentration is None:
            for row in self.probs.detach():
                # In place if possible, because there may be a billion entries.
                drawn = row if row.is_cpu else torch.empty(row.shape, dtype=row.dtype)
                row.copy_(torch.rand(row.shape, generator=generator, out=drawn).neg_().add_(1))
        else:
            # torch.distributions takes no generator, so numpy draws the Gamma variates, with a seed from it.
            random = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
            for row in self.probs:
                for piece in row.split(_PIECE):
                    # The lower bound prevents zeros, which would be structural.
                    variates = np.maximum(random.gamma(concentration, size=len(piece)), 1e-12)
                    piece.copy_(torch.from_numpy(variates))
        self._set_from_counts(self.probs.detach(), 0.0, 0.0)
        self._count_zeros()
        self.is_set.fill_(True)

    @torch.no_grad()
    def set(self, probs: Any) -> None:
        """Sets the transition probabilities, to the same values in all restarts.

        Args:
            probs: (K, K) matrix whose rows sum to one. It must be zero at entries that are not stored. Zeros at stored
                entries become structural zeros.
        """
        matrix = torch.as_tensor(probs, dtype=torch.float64, device=self.probs.device)
        size = self.layout.num_states
        if matrix.shape != (size, size):
            raise ValueError(f"`transition` must have shape {(size, size)}, but has {tuple(matrix.shape)} instead.")
        if not bool((matrix >= 0).all()):
            where = tuple(torch.nonzero(~(matrix >= 0))[0].tolist())
            raise ValueError(
                f"`transition` must hold probabilities, but the entry at {where} is {float(matrix[where])} instead."
            )
        sums = matrix.sum(1)
        if not bool(((sums - 1).abs() < 1e-6).all()):
            row = int(torch.nonzero((sums - 1).abs() >= 1e-6)[0, 0])
            raise ValueError(
                f"`transition` rows must sum to 1, but row {row} sums to {float(sums[row]):.6g} instead. Normalize it."
            )
        values = self.layout.collect(matrix)
        lost = sums - torch.segment_reduce(values, "sum", lengths=self.layout.row_lengths.to(values.device))
        if bool((lost > 1e-12).any()):
            row = int(lost.argmax())
            raise ValueError(
                f"`transition` must be zero where nothing is stored, but row {row} has {float(lost[row]):.6g} there. "
                "Give the model those pairs."
            )
        self.probs.copy_(values.expand_as(self.probs))
        self._count_zeros()
        self.is_set.fill_(True)

    def natural(self, restart: int) -> tuple[Tensor, ...]:
        """Returns the stored probabilities of one restart, as a view, because there may be a billion of them."""
        return (self.probs.view(-1) if len(self.probs) == 1 else self.probs[restart],)

    def operator(self, natural: Sequence[Tensor], batch: Sequences | None) -> Blocks:
        return Blocks(natural[0], self.layout)

    def matrix(self, restart: int) -> Tensor | None:
        if self.num_states > MOST_SHOWN or self._layout is None:
            return None
        return self._layout.expand(self.probs.detach()[restart])

    # EM

    def statistics(self, first: Tensor, operator: Operator, found: EStep, natural: Sequence[Tensor]) -> list[Tensor]:
        return [found.initial, *found.counts][
            -len(natural) :
        ]  # the expected counts, not the gradient with respect to the probabilities

    @torch.no_grad()
    def maximize(self, statistics: Sequence[Tensor], weight: Tensor | float = 1.0) -> Tensor:
        (counts,) = statistics
        return self._set_from_counts(counts, self.prior["pseudocount"] * weight, self.prior["sparsity"] * weight)

    def _set_from_counts(self, counts: Tensor, added: Tensor | float, taken: Tensor | float) -> Tensor:
        """Normalizes the rows of counts to probabilities.

        Args:
            counts: (restarts, entries) expected counts.
            added: Number that is added to each count.
            taken: Number that is subtracted from each count.

        Returns:
            Number of rows without counts, which keep their values.
        """
        if self.probs.is_cpu:
            row_first = self.layout.row_first
            pairs = zip(self.probs.detach().numpy(), counts.to(self.probs.dtype).contiguous().numpy(), strict=True)
            return torch.tensor(
                sum(
                    sum(over_rows(row_first, normalize_rows, row, counted, 1.0, float(added - taken), False))
                    for row, counted in pairs
                )
            )
        lengths = self.layout.row_lengths.to(self.probs.device)
        rows_without_counts = torch.zeros((), dtype=torch.int64, device=self.probs.device)
        for row, counted in zip(self.probs, counts, strict=True):
            weights = torch.where(row > 0, (counted + (added - taken)).clamp(min=0), torch.zeros_like(row))
            total = torch.segment_reduce(weights, "sum", lengths=lengths)
            rows_without_counts += (total == 0).sum()
            spread = total.repeat_interleave(lengths, output_size=len(row))
            row.copy_(torch.where(spread > 0, weights / torch.where(spread > 0, spread, torch.ones_like(spread)), row))
        return rows_without_counts

    def log_prior(self) -> Tensor:
        pseudocount, sparsity = self.prior["pseudocount"], self.prior["sparsity"]
        probs = self.probs.detach()
        if pseudocount == sparsity:
            return probs.new_zeros(len(probs), dtype=torch.float64)
        log_probs = torch.where(probs > 0, probs, torch.ones_like(probs)).log()
        return (pseudocount - sparsity) * log_probs.sum(1, dtype=torch.float64)

    def num_free_parameters(self, restart: int) -> int:
        if self._layout is None:
            return 0
        return self.layout.num_entries - int(self.num_zeros[restart]) - int((self.layout.row_lengths > 0).sum())

    # Pruning

    @torch.no_grad()
    def above(self, threshold: float) -> Tensor:
        """Returns a mask of the stored transitions whose probability is at least `threshold` in any restart.

        The most probable transition of each row is always included.
        """
        lengths = self.layout.row_lengths.to(self.probs.device)
        keep = torch.zeros(self.layout.num_entries, dtype=torch.bool, device=self.probs.device)
        for row in self.probs.detach():
            if row.is_cpu:
                run.mark_above(self.layout.row_first, row.numpy(), threshold, keep.numpy())
                continue
            largest = torch.segment_reduce(row, "max", lengths=lengths, initial=0.0)
            keep |= (row >= threshold) | ((row == largest.repeat_interleave(lengths, output_size=len(row))) & (row > 0))
        return keep

    def pruned(self, keep: Tensor) -> tuple[Layout, Tensor]:
        """Returns the layout and the normalized probabilities after pruning, without changing this object."""
        layout, probs = self.layout.pruned(keep), self.probs.detach()[:, keep]
        lengths = layout.row_lengths.to(probs.device)
        sums = torch.stack([torch.segment_reduce(row, "sum", lengths=lengths) for row in probs])
        lost = (sums == 0) & (self.layout.row_lengths.to(probs.device) > 0)
        if bool(lost.any()):
            state = int(lost.nonzero()[0, 1])
            raise ValueError(
                f"`keep` must leave every state a transition of positive probability, but leaves state {state} none. "
                "`keep | model.above(1)` also keeps the most probable transition of each state."
            )
        return layout, probs / sums.repeat_interleave(lengths, dim=1, output_size=layout.num_entries)

    # Checkpoints

    def adopt(self, state_dict: Mapping[str, Tensor], prefix: str) -> None:
        tensors = [state_dict[prefix + name] for name in _TENSORS if prefix + name in state_dict]
        if len(tensors) == len(_TENSORS) and len(tensors[0]):
            clones, pairs, bounds, columns = tensors
            layout = Layout(clones, pairs, bounds, columns)
            if layout != self._layout:
                self.set_layout(layout)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.adopt(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def uniform_clones(num_states: int, num_symbols: int) -> np.ndarray:
    """Allocates the same number of clones to each symbol. The remainder is allocated to the first symbols."""
    return num_states // num_symbols + (np.arange(num_symbols) < num_states % num_symbols)


def allocate_clones(num_states: int, frequencies: np.ndarray) -> np.ndarray:
    """Allocates clones in proportion to frequencies, by the largest-remainder method.

    Args:
        num_states: Total number of clones.
        frequencies: (V,) frequency of each symbol, in any unit.

    Returns:
        (V,) number of clones of each symbol, which is at least one.
    """
    frequencies = np.asarray(frequencies, np.float64)
    clones = np.ones(frequencies.shape[0], np.int64)
    free = np.ones(frequencies.shape[0], bool)  # symbols that are entitled to more than one clone
    while True:
        left = num_states - int((~free).sum())
        ideal = frequencies * (left / max(frequencies[free].sum(), np.finfo(float).tiny))
        small = free & (ideal < 1)
        if not small.any():
            break
        free &= ~small
    clones[free] = np.floor(ideal[free]).astype(np.int64)
    rest = num_states - int(clones.sum())
    remainder = np.where(free, ideal - np.floor(ideal), -1.0)
    if not free.any():
        remainder = frequencies
    clones[np.argsort(-remainder, kind="stable")[:rest]] += 1
    return clones


def ngram_counts(sequences: Sequences, num_symbols: int, order: int, *, unique: bool) -> np.ndarray:
    """Counts the n-grams that end in each symbol.

    N-grams at the start of a sequence are shorter. N-grams that end in a missing symbol, and sequences of weight zero,
    are ignored.

    Args:
        sequences: Sequences of symbols.
        num_symbols: Number of symbols V.
        order: Length n of the n-grams.
        unique: Whether distinct n-grams are counted. Otherwise all are, with the weights of their sequences.

    Returns:
        (V,) counts.
    """
    sequences = sequences.counted()
    symbols = sequences.values.long().cpu().numpy()
    offsets = sequences.offsets.numpy()
    position = np.arange(symbols.shape[0]) - np.repeat(offsets[:-1], np.diff(offsets))
    if not unique:
        weights = (
            None
            if sequences.weights is None
            else sequences.repeat_interleave(sequences.weights).cpu().numpy()[symbols >= 0]
        )
        return np.bincount(symbols[symbols >= 0], weights, minlength=num_symbols)
    # An n-gram is identified by the pair (number of its first n - 1 symbols, last symbol), and the pairs are renumbered
    # for each n. The number 0 represents the start of the sequence, and 1 a missing symbol.
    numbers = symbols + 2
    for _ in range(order - 1):
        before = np.where(position > 0, np.append(0, numbers[:-1]), 0)
        _, numbers = np.unique(before * (num_symbols + 1) + symbols + 1, return_inverse=True)
        numbers += 1
    _, first = np.unique(numbers, return_index=True)
    ends = symbols[first]
    return np.bincount(ends[ends >= 0], minlength=num_symbols)


def seen_pairs(sequences: Sequences) -> Tensor | None:
    """Returns (P, 2) the pairs of symbols that follow each other in sequences of positive weight.

    If these sequences have missing symbols, ``None`` is returned, which stands for all pairs.
    """
    sequences = sequences.counted()
    values = sequences.values.long().cpu()
    if bool((values < 0).any()):
        return None
    inside = torch.ones(max(len(values) - 1, 0), dtype=torch.bool)
    borders = sequences.offsets[1:-1]
    inside[borders[(borders > 0) & (borders < len(values))] - 1] = False
    return torch.stack([values[:-1], values[1:]], 1)[inside].unique(dim=0)
