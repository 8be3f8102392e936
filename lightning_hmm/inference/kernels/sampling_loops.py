"""Kernels that draw random states, with one uniform number for each step."""

from __future__ import annotations

import numpy as np

from lightning_hmm.inference.cpu.cache import strict_kernel


@strict_kernel
def draw(weights, uniform):
    """Draws an index with probability proportional to `weights`, from `uniform` in [0, 1).

    Returns -1 if all are zero.
    """
    total = 0.0
    for k in range(weights.shape[0]):
        total += weights[k]
    if not total > 0:
        return -1
    threshold, running, chosen = uniform * total, 0.0, -1
    for k in range(weights.shape[0]):
        if weights[k] > 0:
            running += weights[k]
            chosen = k
            if running > threshold:
                break
    return chosen


@strict_kernel
def dense_chains(initial, transition, offsets, uniforms):
    """Draws one state path of a Markov chain for each sequence."""
    states = np.empty(uniforms.shape[0], np.int64)
    for n in range(offsets.shape[0] - 1):
        for row in range(offsets[n], offsets[n + 1]):
            states[row] = draw(initial if row == offsets[n] else transition[states[row - 1]], uniforms[row])
    return states


@strict_kernel
def dense_paths(filtered, offsets, transition, uniforms, states):
    """Backward sampling: z_T ~ p(z_T | y), then z_t ~ alpha_t(i) A[i, z_t+1].

    If all weights of a step are zero, all states of the sequence are -1.
    """
    for n in range(offsets.shape[0] - 1):
        for row in range(offsets[n + 1] - 1, offsets[n] - 1, -1):
            weights = filtered[row] if row == offsets[n + 1] - 1 else filtered[row] * transition[:, states[row + 1]]
            states[row] = draw(weights, uniforms[row])
            if states[row] < 0:
                states[offsets[n] : offsets[n + 1]] = -1
                break


@strict_kernel
def mostly_constant_chains(initial, indices, values, constants, offsets, uniforms):
    """Draws one state path for each sequence, in O(K) per step.

    The kept entries of a row are in the order of columns.
    """
    num_states, num_kept = indices.shape
    states = np.empty(uniforms.shape[0], np.int64)
    for n in range(offsets.shape[0] - 1):
        for row in range(offsets[n], offsets[n + 1]):
            if row == offsets[n]:
                states[row] = draw(initial, uniforms[row])
                continue
            i = states[row - 1]
            mass = values[i].sum()
            others = (num_states - num_kept) * constants[i]
            if uniforms[row] * (mass + others) < mass or others == 0:
                states[row] = indices[i, draw(values[i], min(uniforms[row] * (mass + others) / mass, 1.0))]
                continue
            # The rank among the columns that are not kept, then the column of that rank.
            j = min(int((uniforms[row] * (mass + others) - mass) / constants[i]), num_states - num_kept - 1)
            for k in range(num_kept):
                if indices[i, k] <= j:
                    j += 1
            states[row] = j
    return states


@strict_kernel
def mostly_constant_paths(filtered, offsets, starts, sources, values, constants, uniforms, states):
    """Backward sampling: z_T ~ p(z_T | y), then z_t ~ alpha_t(i) A[i, z_t+1].

    If all weights of a step are zero, all states of the sequence are -1.
    """
    weights = np.empty(constants.shape[0])
    for n in range(offsets.shape[0] - 1):
        for row in range(offsets[n + 1] - 1, offsets[n] - 1, -1):
            if row == offsets[n + 1] - 1:
                weights[:] = filtered[row]
            else:
                weights[:] = filtered[row] * constants
                for p in range(starts[states[row + 1]], starts[states[row + 1] + 1]):
                    weights[sources[p]] = filtered[row, sources[p]] * values[p]
            states[row] = draw(weights, uniforms[row])
            if states[row] < 0:
                states[offsets[n] : offsets[n + 1]] = -1
                break


@strict_kernel
def draw_rows(rows, chosen, uniforms):
    """One draw from ``rows[chosen[t]]`` for each t."""
    draws = np.empty(chosen.shape[0], np.int64)
    for t in range(chosen.shape[0]):
        draws[t] = draw(rows[chosen[t]], uniforms[t])
    return draws
