"""The choice between the kernels of mostly constant transitions and those of the full matrix, which are faster for few states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_hmm.inference.cpu import estep
from lightning_hmm.inference.cpu.viterbi import viterbi as best_paths
from lightning_hmm.inference.evidence import Evidence
from lightning_hmm.inference.operators import Dense, MostlyConstant, Operator
from lightning_hmm.inference.results import EStep

# Nanoseconds for each step and sequence, measured by `benchmarks/dmc.py costs`: for an entry of the full matrix, for a kept entry and for a state.
# For one sequence at a time, and for many at once; float32, then float64.
_COSTS = {
    ("forward", False): ((0.035, 0.32, 1.4), (0.073, 0.31, 1.9)),
    ("forward", True): ((0.013, 0.029, 0.9), (0.027, 0.058, 1.2)),
    ("e_step", False): ((0.086, 0.66, 2.7), (0.185, 0.70, 3.7)),
    ("e_step", True): ((0.042, 0.66, 3.0), (0.086, 0.69, 3.8)),
}
_MANY = 8  # sequences from which on they are worked on together
_PAIR_COST = (0.026, 0.052)  # of an entry of alpha^T kappa, which the E-step of the full matrix computes in any case


def prefers_dense(
    operator: MostlyConstant, num_sequences: int, dtype: torch.dtype | None, *, smooth: bool, pairs: bool = False
) -> bool:
    """Whether the full matrix is expected to be faster, by measured costs; with `pairs`, all expected transitions are wanted too."""
    precision = 0 if dtype == torch.float32 else 1
    num_states, num_kept = operator.log_values.shape
    full, entry, state = _COSTS["e_step" if smooth else "forward", num_sequences >= _MANY][precision]
    return full * num_states < entry * num_kept + state + (_PAIR_COST[precision] * num_states if pairs else 0.0)


def _full_matrix(operator: MostlyConstant) -> Dense:
    return Dense(operator.to_dense(torch.zeros(0, dtype=torch.int64)).detach())


def e_step(
    initial: Tensor,
    operator: Operator,
    evidence: Evidence,
    offsets: Tensor,
    weights: Tensor,
    *,
    dtype: torch.dtype | None = None,
    smooth: bool = True,
    **options: Any,
) -> EStep:
    """As `estep.e_step`, by the full matrix where that is faster."""
    if isinstance(operator, MostlyConstant) and prefers_dense(operator, len(offsets) - 1, dtype, smooth=smooth):
        found = estep.e_step(
            initial, _full_matrix(operator), evidence, offsets, weights, dtype=dtype, smooth=smooth, **options
        )
        return found._replace(counts=operator.counts_of_pairs(found.counts[0].unsqueeze(0), offsets[:0]))
    return estep.e_step(initial, operator, evidence, offsets, weights, dtype=dtype, smooth=smooth, **options)


def viterbi(initial: Tensor, operator: Operator, evidence: Evidence, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """As `viterbi.viterbi`, by the full matrix where that is faster."""
    if isinstance(operator, MostlyConstant) and prefers_dense(operator, len(offsets) - 1, None, smooth=False):
        operator = _full_matrix(operator)
    return best_paths(initial, operator, evidence, offsets)
