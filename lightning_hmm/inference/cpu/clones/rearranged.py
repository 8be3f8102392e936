"""Kernel for the most probable path of a cloned hidden Markov model through symbols whose order is partly unknown.

Successive steps form groups. The symbols of a group are known, but their order is not. A node is a clone together with
a code for the symbols of the group that have been used: a number whose digits count each of these symbols. The Viterbi
algorithm over nodes is exact. For a group of n symbols, it takes at most 2^n times as long as over clones. Only a given
number of the most probable nodes of each step are kept. The other names are those of `forward_backward`.
"""

from __future__ import annotations

import numpy as np

from lightning_hmm.inference.cpu.cache import strict_kernel
from lightning_hmm.inference.cpu.clones.plan import find_pair


@strict_kernel
def _digits(symbols):
    """Returns the distinct symbols of a group, their counts, the value of one of each in a code, and the number of
    codes.
    """
    letters = np.unique(symbols)
    counts, units, total = np.zeros(letters.shape[0], np.int64), np.ones(letters.shape[0], np.int64), 1
    for k in range(letters.shape[0]):
        counts[k] = np.sum(symbols == letters[k])
        units[k] = total
        total *= counts[k] + 1
    return letters, counts, units, total


@strict_kernel
def _grown(array, size):
    longer = np.empty(max(size, 2 * array.shape[0]), array.dtype)
    longer[: array.shape[0]] = array
    return longer


@strict_kernel
def rearranged_path(symbols, group_first, layout, symbol_of, probs, log_initial, most, path):
    """Fills `path` with the states of the most probable path. Returns its log-probability, -inf if every path is
    impossible.

    Group g consists of the symbols from ``group_first[g]`` to ``group_first[g + 1]``, exclusive.
    """
    starts, pair_first, _, pair_target, bound_base, bounds, columns = layout
    num_steps = symbols.shape[0]
    widest = np.max(starts[1:] - starts[:-1])
    best, came, stamp, touched = (
        np.empty(widest),
        np.empty(widest, np.int64),
        np.full(widest, -1),
        np.empty(widest, np.int64),
    )
    states, backs = np.empty(4 * most, np.int32), np.empty(4 * most, np.int32)  # for the nodes of all steps
    first_node, mark = np.zeros(num_steps + 1, np.int64), 0
    scores, codes = np.empty(0), np.empty(0, np.int64)  # for the nodes of the last step
    shift = 0.0
    for g in range(group_first.shape[0] - 1):
        letters, counts, units, num_codes = _digits(symbols[group_first[g] : group_first[g + 1]])
        code_first = np.zeros(num_codes + 1, np.int64)  # first node of the step before for each code
        code_first[1:] = scores.shape[0]
        for s in range(group_first[g], group_first[g + 1]):
            here, used = first_node[s], s - group_first[g] + 1
            new_scores, new_codes, count = np.empty(4 * widest), np.empty(4 * widest, np.int64), 0
            for code in range(num_codes):
                digits = 0
                for k in range(letters.shape[0]):
                    digits += code // units[k] % (counts[k] + 1)
                if digits != used:
                    continue
                for k in range(letters.shape[0]):
                    if code // units[k] % (counts[k] + 1) == 0:
                        continue
                    v, before, num_touched = letters[k], code - units[k], 0
                    mark += 1
                    if s == 0:
                        for c in range(starts[v + 1] - starts[v]):
                            if log_initial[starts[v] + c] > -np.inf:
                                best[c], came[c], touched[num_touched] = np.exp(log_initial[starts[v] + c]), -1, c
                                num_touched += 1
                    else:
                        for node in range(code_first[before], code_first[before + 1]):
                            u = symbol_of[states[first_node[s - 1] + node]]
                            p = find_pair(u, v, pair_first, pair_target)
                            if p < 0:
                                continue
                            weight = np.exp(scores[node] - shift)
                            row = (
                                bound_base[u]
                                + (states[first_node[s - 1] + node] - starts[u])
                                * (pair_first[u + 1] - pair_first[u] + 1)
                                + p
                                - pair_first[u]
                            )
                            for e in range(bounds[row], bounds[row + 1]):
                                c = columns[e] if columns.shape[0] > 0 else e - bounds[row]
                                score = weight * probs[e]
                                if stamp[c] != mark:
                                    stamp[c], best[c] = mark, 0.0
                                    touched[num_touched] = c
                                    num_touched += 1
                                if score > best[c]:
                                    best[c], came[c] = score, node
                    for n in range(num_touched):
                        c = touched[n]
                        if best[c] > 0:
                            if count == new_scores.shape[0]:
                                new_scores, new_codes = _grown(new_scores, count + 1), _grown(new_codes, count + 1)
                            if here + count >= states.shape[0]:
                                states, backs = _grown(states, here + count + 1), _grown(backs, here + count + 1)
                            new_scores[count], new_codes[count] = np.log(best[c]) + shift, code
                            states[here + count], backs[here + count] = starts[v] + c, came[c]
                            count += 1
            if count == 0:
                return -np.inf
            if count > most:
                least, kept = np.partition(new_scores[:count], count - most)[count - most], 0
                for n in range(count):
                    if new_scores[n] >= least:
                        new_scores[kept], new_codes[kept] = new_scores[n], new_codes[n]
                        states[here + kept], backs[here + kept] = states[here + n], backs[here + n]
                        kept += 1
                count = kept
            scores, codes = new_scores[:count].copy(), new_codes[:count].copy()
            shift = np.max(scores)
            code_first = np.searchsorted(codes, np.arange(num_codes + 1))
            first_node[s + 1] = here + count
    node = np.argmax(scores) if num_steps > 0 else -1
    for s in range(num_steps - 1, -1, -1):
        path[s] = states[first_node[s] + node]
        node = backs[first_node[s] + node]
    return shift
