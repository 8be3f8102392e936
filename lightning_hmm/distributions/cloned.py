"""Transitions between clones: rows of probabilities that run across the stored blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_hmm.distributions.base import Distribution, check_not_negative
from lightning_hmm.inference.cloned import Layout
from lightning_hmm.inference.kernels import cloned_cpu


class CloneTransitions(Distribution):
    r"""The stored transitions of a cloned HMM, as probabilities.

    .. math:: A_{ij} \partial L / \partial A_{ij} = E[n_{ij}], \qquad
        \hat A_{ij} = w_{ij} / \sum_j w_{ij}, \quad w_{ij} = \max(n_{ij} + \kappa - \delta, 0)

    with :math:`\kappa` the pseudocount of a Dirichlet prior and :math:`\delta` the `sparsity` of one whose concentration is
    below one, which takes weight from every entry and ends those that have none left. A probability of zero stays zero.

    Made without a layout, it has no entries until `allocate` gives it one; a checkpoint brings its own.
    """

    has_natural_parameters = False

    def __init__(self, restarts: int, dtype: torch.dtype = torch.float64, pseudocount: float = 0.0, sparsity: float = 0.0) -> None:
        super().__init__()
        check_not_negative(transition_pseudocount=pseudocount, transition_sparsity=sparsity)
        self.prior = {"pseudocount": pseudocount, "sparsity": sparsity}
        self.layout: Layout | None = None
        self.probs = nn.Parameter(torch.zeros(restarts, 0, dtype=dtype))
        for name in _TENSORS:
            self.register_buffer(name, torch.zeros(0, dtype=torch.int64))
        # Of each restart, the number of stored entries that are structurally zero. An estimate of zero is still a free parameter.
        self.num_zeros: Tensor
        self.register_buffer("num_zeros", torch.zeros(restarts, dtype=torch.int64))

    def _count_zeros(self) -> None:
        """Takes the present zeros as structural. Restart by restart: counting along one axis would allocate a mask of all entries."""
        for count, row in zip(self.num_zeros, self.probs.detach(), strict=True):
            count.fill_(len(row) - torch.count_nonzero(row))

    @torch.no_grad()
    def allocate(self, layout: Layout, probs: Tensor | None = None) -> None:
        """Takes a layout, and the probabilities for it, whose zeros become structural. Without them, probabilities are zero until `randomize`."""
        self.layout = layout
        for name, tensor in zip(_TENSORS, layout.tensors, strict=True):
            setattr(self, name, tensor.to(self.probs.device))
        if probs is None:
            shape = self.probs.shape[0], layout.num_entries
            # numpy asks the system for large pages, which torch does not; walking through blocks is a tenth faster in them.
            probs = torch.from_numpy(np.empty(shape, np.float32 if self.probs.dtype == torch.float32 else np.float64)).zero_()
        self.probs.data, self.probs.grad = probs.to(self.probs), None  # the same object: an optimizer keeps it
        self._count_zeros()

    @torch.no_grad()
    def randomize(self, generator: torch.Generator, concentration: float | None = None) -> None:
        """Draws weights evenly from (0, 1], or from a Gamma distribution of that shape, and normalizes the rows: Dirichlet draws."""
        if concentration is None:
            for row in self.probs.detach():
                drawn = row if row.is_cpu else torch.empty(row.shape, dtype=row.dtype)  # in place where possible: there may be a billion
                row.copy_(torch.rand(row.shape, generator=generator, out=drawn).neg_().add_(1))
        else:
            # torch draws no Gamma numbers from a generator of ours: numpy's does, seeded from it.
            random = np.random.default_rng(int(torch.randint(2**62, (), generator=generator)))
            for row in self.probs:
                for piece in row.split(_PIECE):
                    piece.copy_(torch.from_numpy(np.maximum(random.gamma(concentration, size=len(piece)), 1e-12)))  # zero would stay zero
        self._set_from_counts(self.probs.detach(), 0.0, 0.0)
        self._count_zeros()

    @torch.no_grad()
    def set(self, matrix: Tensor) -> None:
        """Takes an (H, H) matrix whose rows sum to one; stored entries only, and what is not stored must be zero. Zeros become structural."""
        assert self.layout is not None
        matrix = torch.as_tensor(matrix, dtype=torch.float64, device=self.probs.device)
        size = self.layout.num_states
        if matrix.shape != (size, size):
            raise ValueError(f"`transition` must have shape {(size, size)}, but has {tuple(matrix.shape)} instead.")
        if not bool((matrix >= 0).all()):
            where = tuple(torch.nonzero(~(matrix >= 0))[0].tolist())
            raise ValueError(f"`transition` must hold probabilities, but the entry at {where} is {float(matrix[where])} instead.")
        sums = matrix.sum(1)
        if not bool(((sums - 1).abs() < 1e-6).all()):
            row = int(torch.nonzero((sums - 1).abs() >= 1e-6)[0, 0])
            raise ValueError(f"`transition` rows must sum to 1, but row {row} sums to {float(sums[row]):.6g} instead. Normalize it.")
        values = self.layout.collect(matrix)
        lost = sums - torch.segment_reduce(values, "sum", lengths=self.layout.row_lengths.to(values.device))
        if bool((lost > 1e-12).any()):
            row = int(lost.argmax())
            raise ValueError(f"`transition` must be zero where nothing is stored, but row {row} has {float(lost[row]):.6g} there. Give the model those pairs.")
        self.probs.copy_(values.expand_as(self.probs))
        self._count_zeros()

    @torch.no_grad()
    def maximize(self, statistics: Sequence[Tensor], weight: Tensor | float = 1.0) -> Tensor:
        (counts,) = statistics
        return self._set_from_counts(counts, self.prior["pseudocount"] * weight, self.prior["sparsity"] * weight)

    def _set_from_counts(self, counts: Tensor, added: Tensor | float, taken: Tensor | float) -> Tensor:
        """Normalizes the rows of counts, to each of which something is added and taken; returns how many rows have none."""
        assert self.layout is not None
        if self.probs.is_cpu:
            row_first = self.layout.row_first
            pairs = zip(self.probs.detach().numpy(), counts.to(self.probs.dtype).contiguous().numpy(), strict=True)
            return torch.tensor(sum(cloned_cpu.maximise(row_first, row, counted, 1.0, float(added), float(taken)) for row, counted in pairs))
        lengths = self.layout.row_lengths.to(self.probs.device)
        kept = torch.zeros((), dtype=torch.int64, device=self.probs.device)
        for row, counted in zip(self.probs, counts, strict=True):
            weights = torch.where(row > 0, (counted + (added - taken)).clamp(min=0), torch.zeros_like(row))
            total = torch.segment_reduce(weights, "sum", lengths=lengths)
            kept += (total == 0).sum()
            spread = total.repeat_interleave(lengths, output_size=len(row))
            row.copy_(torch.where(spread > 0, weights / torch.where(spread > 0, spread, torch.ones_like(spread)), row))
        return kept

    def log_prior(self) -> Tensor:
        pseudocount, sparsity = self.prior["pseudocount"], self.prior["sparsity"]
        probs = self.probs.detach()
        if pseudocount == sparsity:
            return probs.new_zeros(len(probs), dtype=torch.float64)
        return (pseudocount - sparsity) * torch.where(probs > 0, probs, torch.ones_like(probs)).log().sum(1, dtype=torch.float64)

    def num_free_parameters(self, restart: int) -> int:
        if self.layout is None:
            return 0
        return self.layout.num_entries - int(self.num_zeros[restart]) - int((self.layout.row_lengths > 0).sum())

    def adopt(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Takes the layout that a checkpoint holds, so that its parameters fit."""
        tensors = [state_dict[prefix + name] for name in _TENSORS if prefix + name in state_dict]
        if len(tensors) == len(_TENSORS) and len(tensors[0]):
            clones, pairs, bounds, columns = tensors
            layout = Layout(clones, pairs, bounds, columns)
            if layout != self.layout:
                self.allocate(layout)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.adopt(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


_TENSORS = ("clones", "pairs", "bounds", "columns")
_PIECE = 1 << 22  # numbers drawn at once in float64, for a billion of them do not fit
