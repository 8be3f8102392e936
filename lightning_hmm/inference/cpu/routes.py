"""Choice between the kernels for mostly constant transitions and those for a full matrix, which are faster for few
states.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_hmm.inference.cpu import estep
from lightning_hmm.inference.cpu.viterbi import viterbi as best_paths
from lightning_hmm.inference.evidence import Evidence
from lightning_hmm.inference.operators import Dense, MostlyConstant, Operator
from lightning_hmm.inference.results import EStep

# Nanoseconds per step and sequence, as measured by `benchmarks/dmc.py costs`: for an entry of the full matrix, for a
# kept entry and for a state, in float32 and in float64. The key is the pass, and whether many sequences are computed
# together.
_COSTS = {
    ("forward", False): ((0.035, 0.32, 1.4), (0.073, 0.31, 1.9)),
    ("forward", True): ((0.013, 0.029, 0.9), (0.027, 0.058, 1.2)),
    ("e_step", False): ((0.086, 0.66, 2.7), (0.185, 0.70, 3.7)),
    ("e_step", True): ((0.042, 0.66, 3.0), (0.086, 0.69, 3.8)),
}
_MANY = 8  # smallest number of sequences that are computed together
_PAIR_COST = (0.026, 0.052)  # for an entry of alpha^T kappa, which the E-step of the full matrix always computes


def prefers_dense(
    operator: MostlyConstant, num_sequences: int, dtype: torch.dtype | None, *, smooth: bool, pairs: bool = False
) -> bool:
    """Returns whether the full matrix is expected to be faster, according to the measured costs.

    Args:
        operator: Transition operator.
        num_sequences: Number of sequences.
        dtype: Data type of the messages.
        smooth: Whether the backward pass runs as well.
        pairs: Whether the expected transitions of all pairs of states are needed.
    """
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
    """Runs `estep.e_step`, with the full matrix if that is faster."""
    if isinstance(operator, MostlyConstant) and prefers_dense(operator, len(offsets) - 1, dtype, smooth=smooth):
        found = estep.e_step(
            initial, _full_matrix(operator), evidence, offsets, weights, dtype=dtype, smooth=smooth, **options
        )
        return found._replace(counts=operator.counts_of_pairs(found.counts[0].unsqueeze(0), offsets[:0]))
    return estep.e_step(initial, operator, evidence, offsets, weights, dtype=dtype, smooth=smooth, **options)


def viterbi(initial: Tensor, operator: Operator, evidence: Evidence, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Runs `viterbi.viterbi`, with the full matrix if that is faster."""
    if isinstance(operator, MostlyConstant) and prefers_dense(operator, len(offsets) - 1, None, smooth=False):
        operator = _full_matrix(operator)
    return best_paths(initial, operator, evidence, offsets)
