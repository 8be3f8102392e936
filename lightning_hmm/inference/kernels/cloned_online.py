"""Many updates of online EM in one go, compiled by numba. The names are those of `cloned_loops`."""

from __future__ import annotations

import numpy as np

from lightning_hmm.inference.kernels.cloned_loops import _kernel, normalise_rows
from lightning_hmm.inference.kernels.cloned_plan import find_pair


@_kernel
def online_em(
    batch,
    batch_first,
    offsets,
    symbols,
    weights,
    layout,
    row_first,
    discount,
    step,
    sizes,
    total_size,
    pseudocounts,
    frozen,
    log_initial,
    probs,
    initial_buffer,
    buffer,
    log_likelihood,
):
    """Online EM for small models: one update a batch, parameters and count buffers changed in place, from batch number `batch` on.

    An update is E-step, ``buffer = discount * buffer + (1 - discount) * counts``, M-step; `step` have gone before. Returns the
    number of the first batch that it did not do: where a step keeps too little mass for this plain arithmetic, `e_step` has to.
    """
    starts, pair_first, _, pair_target, bound_base, bounds, columns = layout
    num_states, widest, longest = log_initial.shape[0], 0, 0
    for v in range(starts.shape[0] - 1):
        widest = max(widest, starts[v + 1] - starts[v])
    for n in range(offsets.shape[0] - 1):
        longest = max(longest, offsets[n + 1] - offsets[n])
    alpha, totals, back, kappa, blocks = np.empty((longest, widest)), np.empty(longest), np.empty(widest), np.empty(widest), np.empty(longest, np.int64)
    initial_counts, counts = np.empty(num_states), np.empty(probs.shape[0])
    while batch < batch_first.shape[0] - 1:
        initial_counts[:], counts[:] = 0, 0
        for n in range(batch_first[batch], batch_first[batch + 1]):
            first, length, score, product = offsets[n], offsets[n + 1] - offsets[n], 0.0, 1.0
            for t in range(length):
                v = symbols[first + t]
                num_clones = starts[v + 1] - starts[v]
                total = 0.0
                if t == 0:
                    for c in range(num_clones):
                        alpha[0, c] = np.exp(log_initial[starts[v] + c])
                        total += alpha[0, c]
                else:
                    u = symbols[first + t - 1]
                    p = find_pair(u, v, pair_first, pair_target)
                    if p < 0:
                        return batch
                    stride = pair_first[u + 1] - pair_first[u] + 1
                    blocks[t] = bound_base[u] + p - pair_first[u]
                    for c in range(num_clones):
                        alpha[t, c] = 0.0
                    for i in range(starts[u + 1] - starts[u]):
                        x, e = alpha[t - 1, i], bounds[blocks[t] + i * stride]
                        if x == 0:
                            continue
                        if columns.shape[0] > 0:
                            for k in range(e, bounds[blocks[t] + i * stride + 1]):
                                alpha[t, columns[k]] += x * probs[k]
                        else:
                            for c in range(num_clones):
                                alpha[t, c] += x * probs[e + c]
                    for c in range(num_clones):
                        total += alpha[t, c]
                if not total > 1e-200:
                    return batch
                totals[t] = total
                for c in range(num_clones):
                    alpha[t, c] = alpha[t, c] / total if alpha[t, c] >= 1e-290 * total else 0.0
                product *= total
                if product < 1e-100:
                    score += np.log(product)
                    product = 1.0
            log_likelihood[n] = score + np.log(product)
            for c in range(widest):
                back[c] = 1.0
            for t in range(length - 1, -1, -1):
                v = symbols[first + t]
                num_clones = starts[v + 1] - starts[v]
                total = 0.0
                for c in range(num_clones):
                    total += alpha[t, c] * back[c]
                if t == 0:
                    for c in range(num_clones):
                        initial_counts[starts[v] + c] += weights[n] * alpha[0, c] * back[c] / total
                    break
                for c in range(num_clones):
                    kappa[c] = back[c] / (total * totals[t]) if alpha[t, c] > 0 else 0.0
                u = symbols[first + t - 1]
                stride = pair_first[u + 1] - pair_first[u] + 1
                for i in range(starts[u + 1] - starts[u]):
                    x, e = alpha[t - 1, i] * weights[n], bounds[blocks[t] + i * stride]
                    back[i] = 0.0
                    if alpha[t - 1, i] == 0:
                        continue
                    if columns.shape[0] > 0:
                        for k in range(e, bounds[blocks[t] + i * stride + 1]):
                            back[i] += probs[k] * kappa[columns[k]]
                            counts[k] += x * probs[k] * kappa[columns[k]]
                    else:
                        for c in range(num_clones):
                            back[i] += probs[e + c] * kappa[c]
                            counts[e + c] += x * probs[e + c] * kappa[c]
        batch += 1
        step += 1
        correction = 1.0 - discount**step
        sizes[0] = discount * sizes[0] + (1 - discount) * initial_counts.sum()
        share = sizes[0] / correction / total_size
        for k in range(probs.shape[0]):
            buffer[k] = discount * buffer[k] + (1 - discount) * counts[k]
        total = 0.0
        for i in range(num_states):
            initial_buffer[i] = discount * initial_buffer[i] + (1 - discount) * initial_counts[i]
            if log_initial[i] > -np.inf:
                total += initial_buffer[i] / correction + pseudocounts[0] * share
        if not frozen[0] and total > 0:
            for i in range(num_states):
                if log_initial[i] > -np.inf:
                    log_initial[i] = np.log((initial_buffer[i] / correction + pseudocounts[0] * share) / total)
        if not frozen[1]:
            normalise_rows(0, num_states, row_first, probs, buffer, 1.0 / correction, pseudocounts[1] * share, 0.0)
    return batch
