"""Kernels for most probable and random paths in cloned hidden Markov models.

The names are those of `forward_backward`.
"""

from __future__ import annotations

import numpy as np

from lightning_hmm.inference.cpu.cache import strict_kernel
from lightning_hmm.inference.cpu.clones.plan import find_pair
from lightning_hmm.inference.kernels.sampling_loops import draw


@strict_kernel
def viterbi(share, shares, offsets, plan, layout, probs, log_initial, delta, shifts, path, log_probability):
    """Computes the most probable path of every `shares`-th sequence in log space.

    Ties are broken from the last step backward, in favor of the state with the lower number. Only the scores are
    stored. The best source states are computed again along the path. States of score -inf are skipped.
    """
    first_entry, entry_symbol, entry_weight, entry_at, first_task, source, target, pair, _ = plan
    starts, pair_first, _, pair_target, bound_base, bounds, columns = layout
    for n in range(share, offsets.shape[0] - 1, shares):
        for s in range(offsets[n], offsets[n + 1]):
            for e in range(first_entry[s], first_entry[s + 1]):
                v, at = entry_symbol[e], entry_at[e]
                for c in range(starts[v + 1] - starts[v]):
                    delta[at + c] = log_initial[starts[v] + c] if s == offsets[n] else 0.0
            if s > offsets[n]:
                # Scores are converted to probabilities relative to the best state of the step before, so that one
                # logarithm is computed for each state, and not for each transition.
                for task in range(first_task[s], first_task[s + 1]):
                    u, v, p = entry_symbol[source[task]], entry_symbol[target[task]], pair[task]
                    stride, base = pair_first[u + 1] - pair_first[u] + 1, bound_base[u] + p - pair_first[u]
                    from_at, to_at = entry_at[source[task]], entry_at[target[task]]
                    for c in range(starts[u + 1] - starts[u]):
                        score = delta[from_at + c]
                        if score > -np.inf:
                            first, last = bounds[base + c * stride], bounds[base + c * stride + 1]
                            weight = np.exp(score - shifts[s - 1])
                            if columns.shape[0] > 0:
                                for k in range(first, last):
                                    delta[to_at + columns[k]] = max(delta[to_at + columns[k]], weight * probs[k])
                            else:
                                row, best_so_far = probs[first:last], delta[to_at : to_at + last - first]
                                for j in range(row.shape[0]):
                                    best_so_far[j] = max(best_so_far[j], weight * row[j])
                for e in range(first_entry[s], first_entry[s + 1]):
                    v, at = entry_symbol[e], entry_at[e]
                    for c in range(starts[v + 1] - starts[v]):
                        delta[at + c] = np.log(delta[at + c]) + shifts[s - 1] if delta[at + c] > 0 else -np.inf
            best = -np.inf
            for e in range(first_entry[s], first_entry[s + 1]):
                at, gain = entry_at[e], np.log(entry_weight[e])
                for c in range(starts[entry_symbol[e] + 1] - starts[entry_symbol[e]]):
                    delta[at + c] += gain
                    best = max(best, delta[at + c])
            shifts[s] = best
            if best == -np.inf:
                break
        end = offsets[n + 1] - 1
        if end < offsets[n]:
            continue
        if shifts[end] == -np.inf or best == -np.inf:
            log_probability[n] = -np.inf
            continue
        log_probability[n] = shifts[end]
        state_symbol, state_clone = -1, -1
        for e in range(first_entry[end], first_entry[end + 1]):
            for c in range(starts[entry_symbol[e] + 1] - starts[entry_symbol[e]]):
                if state_clone < 0 and delta[entry_at[e] + c] == shifts[end]:
                    state_symbol, state_clone = entry_symbol[e], c
        path[end] = starts[state_symbol] + state_clone
        for s in range(end - 1, offsets[n] - 1, -1):
            best, best_symbol, best_clone = -np.inf, -1, -1
            for e in range(first_entry[s], first_entry[s + 1]):
                u = entry_symbol[e]
                p = find_pair(u, state_symbol, pair_first, pair_target)
                if p < 0:
                    continue
                stride, base = pair_first[u + 1] - pair_first[u] + 1, bound_base[u] + p - pair_first[u]
                for c in range(starts[u + 1] - starts[u]):
                    score = delta[entry_at[e] + c]
                    if score > -np.inf:
                        score += np.log(
                            entry_towards(
                                bounds[base + c * stride], bounds[base + c * stride + 1], state_clone, columns, probs
                            )
                        )
                        if score > best:
                            best, best_symbol, best_clone = score, u, c
            state_symbol, state_clone = best_symbol, best_clone
            path[s] = starts[state_symbol] + state_clone


@strict_kernel
def entry_towards(first, last, clone, columns, probs):
    """Returns the probability of the transition to a clone among the stored entries from `first` to `last`, or zero."""
    if columns.shape[0] == 0:
        return np.float64(probs[first + clone])
    end = last
    while first < last:
        middle = (first + last) // 2
        if columns[middle] < clone:
            first = middle + 1
        else:
            last = middle
    return np.float64(probs[first]) if first < end and columns[first] == clone else 0.0


@strict_kernel
def sample_chains(initial, layout, symbol_of, probs, offsets, uniforms):
    """Draws state paths from the Markov chain, with one uniform number per step. -1 follows a state without
    transitions.
    """
    starts, pair_first, _, pair_target, bound_base, bounds, columns = layout
    states = np.full(uniforms.shape[0], -1)
    for n in range(offsets.shape[0] - 1):
        for s in range(offsets[n], offsets[n + 1]):
            if s == offsets[n]:
                states[s] = draw(initial, uniforms[s])
                continue
            u = symbol_of[states[s - 1]]
            m = pair_first[u + 1] - pair_first[u]
            place = bound_base[u] + (states[s - 1] - starts[u]) * (m + 1)
            if bounds[place] == bounds[place + m]:
                break
            drawn = bounds[place] + draw(probs[bounds[place] : bounds[place + m]], uniforms[s])
            k = 0
            while drawn >= bounds[place + k + 1]:
                k += 1
            clone = columns[drawn] if columns.shape[0] > 0 else drawn - bounds[place + k]
            states[s] = starts[pair_target[pair_first[u] + k]] + clone
    return states


@strict_kernel
def sample_paths(filtered, offsets, layout, symbol_of, probs, uniforms, states):
    """Backward sampling: z_T ~ p(z_T | y), then z_t ~ alpha_t(i) A[i, z_t+1]. Impossible sequences keep -1."""
    starts, pair_first, _, pair_target, bound_base, bounds, columns = layout
    weights = np.zeros(filtered.shape[1])
    for n in range(offsets.shape[0] - 1):
        for s in range(offsets[n + 1] - 1, offsets[n] - 1, -1):
            for i in range(weights.shape[0]):
                weights[i] = filtered[s, i]
                if weights[i] > 0 and s < offsets[n + 1] - 1:
                    u, v = symbol_of[i], symbol_of[states[s + 1]]
                    p = find_pair(u, v, pair_first, pair_target)
                    if p < 0:
                        weights[i] = 0.0
                    else:
                        place = (
                            bound_base[u]
                            + (i - starts[u]) * (pair_first[u + 1] - pair_first[u] + 1)
                            + p
                            - pair_first[u]
                        )
                        weights[i] *= entry_towards(
                            bounds[place], bounds[place + 1], states[s + 1] - starts[v], columns, probs
                        )
            states[s] = draw(weights, uniforms[s])
            if states[s] < 0:
                break
