"""Forward-backward in log space, one sequence at a time: slow, and right wherever the result is a float64."""

from __future__ import annotations

import numpy as np

from lightning_hmm.inference.cpu.cache import strict_kernel


@strict_kernel
def _log_sum_exp(values):
    largest = values.max()
    if largest == -np.inf:
        return largest
    return largest + np.log(np.exp(values - largest).sum())


@strict_kernel
def exact_sequence(log_initial, log_transition, rows, weight, smooth, smoothed, filtered, pairs):
    """Fills p(z_t | y_1:T) times weight and p(z_t | y_1:t), both (T, S), and adds expected transitions to `pairs`.

    Returns the log-likelihood and the first step of probability zero, or -1. If there is such a step, nothing is added,
    and the rows are zero.
    """
    steps, num_states = rows.shape
    log_alpha, log_likelihood = np.empty((steps, num_states)), 0.0
    for t in range(steps):
        if t == 0:
            log_alpha[t] = log_initial + rows[t]
        else:
            for j in range(num_states):
                log_alpha[t, j] = _log_sum_exp(log_alpha[t - 1] + log_transition[:, j]) + rows[t, j]
        total = _log_sum_exp(log_alpha[t])
        if total == -np.inf:
            filtered[:], smoothed[:] = 0, 0
            return -np.inf, t
        log_alpha[t] -= total
        log_likelihood += total
        filtered[t] = np.exp(log_alpha[t])
    if not smooth:
        return log_likelihood, -1
    log_beta, pair = np.zeros(num_states), np.empty((num_states, num_states))
    for t in range(steps - 1, -1, -1):
        log_gamma = log_alpha[t] + log_beta
        smoothed[t] = weight * np.exp(log_gamma - _log_sum_exp(log_gamma))
        if t > 0:
            for i in range(num_states):
                for j in range(num_states):
                    pair[i, j] = log_alpha[t - 1, i] + log_transition[i, j] + rows[t, j] + log_beta[j]
            total = _log_sum_exp(pair.reshape(-1))
            pairs += weight * np.exp(pair - total)
            for i in range(num_states):
                # Where alpha is zero the message back is of no use and may be infinite.
                reachable = log_alpha[t - 1, i] > -np.inf
                log_beta[i] = _log_sum_exp(pair[i]) - log_alpha[t - 1, i] - total if reachable else -np.inf
    return log_likelihood, -1
