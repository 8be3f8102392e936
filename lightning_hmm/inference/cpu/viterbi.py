"""The most probable paths, from the functions `best` and `best_source` of an operator.

Only scores are stored; the argmax is computed again along the path.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_hmm.inference.cpu.cache import kernel
from lightning_hmm.inference.cpu.driver import best, best_source
from lightning_hmm.inference.cpu.estep import detached, plan, refuse_problem, seen_by, wide
from lightning_hmm.inference.cpu.fill import BLOCK, TABLE, log_block, make_buffers, whole_blocks
from lightning_hmm.inference.cpu.prepared import prepare_scores
from lightning_hmm.inference.evidence import Evidence, Rows, Table
from lightning_hmm.inference.kernels.simd import padded_size
from lightning_hmm.inference.kernels.threads import aligned_zeros, num_shares, run_shares, workspace
from lightning_hmm.inference.operators import Operator
from lightning_hmm.inference.results import refuse_nan


@kernel
def viterbi_lane(
    lane, lanes, tile, order, offsets, seen, op, initial, num_states, longest, work, log_probability, path, problem
):
    padded = initial.shape[0]
    delta = work[: (longest + 1) * tile * padded].reshape(longest + 1, tile, padded)
    buffers = make_buffers(seen, padded)
    lengths, starts = np.zeros(tile, np.int64), np.zeros(tile, np.int64)
    for start in range(lane * tile, order.shape[0], lanes * tile):
        ids = order[start : start + tile]
        members = ids.shape[0]
        for b in range(members):
            starts[b] = offsets[ids[b]]
            lengths[b] = offsets[ids[b] + 1] - starts[b]
        active, first = members, 0
        while first < lengths[0]:
            while lengths[active - 1] <= first:
                active -= 1
            width = whole_blocks(active, tile)
            steps = min(max(1, BLOCK // width), lengths[0] - first)
            log_block(seen, first, steps, width, active, lengths, starts, padded, buffers, problem)
            for s in range(steps):
                t = first + s
                while lengths[active - 1] <= t:
                    active -= 1
                if t == 0:
                    for b in range(width):
                        for k in range(padded):
                            delta[1, b, k] = initial[k]
                else:
                    best(op, starts, t, active, whole_blocks(active, tile), delta, t)
                for b in range(active):
                    for k in range(num_states):
                        delta[t + 1, b, k] += buffers.scratch[s * width + b, k]
            first += steps
        for b in range(members):
            last, state = lengths[b], 0
            for k in range(1, num_states):
                if delta[last, b, k] > delta[last, b, state]:
                    state = k
            log_probability[ids[b]] = delta[last, b, state]
            possible = log_probability[ids[b]] > -np.inf
            path[starts[b] + last - 1] = state if possible else -1
            for t in range(last - 1, 0, -1):
                if possible:
                    state = best_source(op, starts[b] + t, delta, t, b, state)
                path[starts[b] + t - 1] = state if possible else -1


@torch.no_grad()
def viterbi(initial: Tensor, operator: Operator, evidence: Evidence, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the (steps,) most probable states, -1 in impossible sequences, and the (N,) log-probabilities.

    The arguments are those of `e_step`.
    """
    operator, evidence = detached(operator, evidence)
    boundaries, num_states = offsets.long().contiguous().numpy(), initial.shape[0]
    refuse_nan("initial", wide(initial))
    for value in operator.natural:
        refuse_nan("transition", value.numpy())
    if not isinstance(evidence, Rows):
        refuse_nan("emission", wide(evidence.live))
    padded = padded_size(num_states, 8)
    log_initial = np.full(padded, -np.inf)
    log_initial[:num_states] = wide(initial)
    seen, data = seen_by(evidence, np.dtype(np.float64), num_states, padded)
    if isinstance(evidence, Table):
        log_table = aligned_zeros(np.float64, *seen.table.shape)
        log_table[:-1, :num_states] = seen.log_probs.T
        seen = seen._replace(form=TABLE, table=log_table)
    arrays = prepare_scores(operator)
    groups = plan(boundaries, None, num_states, padded * 8)
    lanes = max((num_shares(-(-order.shape[0] // tile), 0) for order, tile in groups), default=1)
    log_probability, path, problem = (
        np.zeros(boundaries.shape[0] - 1),
        np.zeros(int(boundaries[-1]), np.int64),
        np.full((lanes, 2), -1),
    )

    for order, tile in groups:

        def work(lane: int, order: np.ndarray = order, tile: int = tile) -> None:
            if lane * tile >= order.shape[0]:
                return
            first = order[lane * tile]
            longest = int(boundaries[first + 1] - boundaries[first])
            memory = workspace(np.dtype(np.float64), (longest + 1) * tile * padded)
            viterbi_lane(
                lane,
                lanes,
                tile,
                order,
                boundaries,
                seen,
                arrays,
                log_initial,
                num_states,
                longest,
                memory,
                log_probability,
                path,
                problem[lane],
            )

        run_shares(lanes, work)
    del data
    refuse_problem(problem.max(0), evidence, num_states)
    return torch.from_numpy(path), torch.from_numpy(log_probability)
