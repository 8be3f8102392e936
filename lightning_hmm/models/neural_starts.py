"""Where the training of a neural HMM may start from: states that are slow in the data, and networks that know them.

From random networks EM finds a state that helps to predict the next step, and that is seldom the one that lasts: it must first be of some use before
it can become of more. As a mixture is started from k-means, so can a slow state be started from averages over many steps.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_hmm.models.neural_state_space import Observations, PathDensity
from lightning_hmm.optim import set_gradients
from lightning_hmm.sequences import Sequences

STEPS = 150  # of Adam
MOST_STEPS = 30_000  # of the training data, whole sequences from the first on
INSIDE = 0.95  # of the latent bound


def slow_states(observations: Observations, residual: bool, latent_dim: int, window: int, generator: torch.Generator) -> Tensor:
    """(T, B, d) the main directions, of variance 1, of averages over `window` steps around each step.

    Averages are of what is observed; where emissions are residual, of the logarithm of how large a change is, for the changes themselves come and go
    within a window. Where there are more dimensions than features, the rest are averages of noise.
    """
    inside = observations.inside
    seen = (observations.observed & inside.unsqueeze(2)).to(observations.targets.dtype)
    entries = observations.targets
    if residual:
        seen = seen.prod(2, keepdim=True)
        entries = entries.norm(dim=2, keepdim=True)
        usual = entries[seen > 0].median() if bool(seen.any()) else entries.new_ones(())
        entries = (entries / usual.clamp(min=1e-9)).log1p()
    spare = latent_dim - entries.shape[2]
    if spare > 0:
        noise = torch.randn(*entries.shape[:2], spare, generator=generator, dtype=entries.dtype).to(entries.device)
        entries, seen = torch.cat([entries, noise], 2), torch.cat([seen, inside.unsqueeze(2).to(seen).expand(-1, -1, spare)], 2)
    weights = moving_sum(seen, window)
    mean = (entries * seen)[inside].sum(0) / seen[inside].sum(0).clamp(min=1)
    averages = torch.where(weights > 0, moving_sum((entries - mean) * seen, window) / weights.clamp(min=1), 0.0)
    rows = averages[inside].double()
    rows = rows / rows.std(0).clamp(min=1e-9)
    _, sizes, directions = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
    found = (rows - rows.mean(0)) @ directions[:latent_dim].T * math.sqrt(len(rows)) / sizes[:latent_dim].clamp(min=1e-9)
    states = averages.new_zeros(*inside.shape, latent_dim)
    states[inside] = found.to(averages.dtype)
    return states


def moving_sum(values: Tensor, window: int) -> Tensor:
    """(T, B, D) over `window` steps around each, one more before it than after where their number is even."""
    padded = F.pad(values.double(), (0, 0, 0, 0, window // 2 + 1, (window - 1) // 2)).cumsum(0)
    return (padded[window:] - padded[: len(padded) - window]).to(values.dtype)


def start_slow(model: Any, sequences: Sequences, window: int, generator: torch.Generator) -> None:
    """Fits the networks of a neural HMM to slow states of the sequences, as an M-step does to paths."""
    sequences = sequences.counted()
    sequences = sequences[: max(int((sequences.lengths.cumsum(0) <= MOST_STEPS).sum()), 1)]
    bound = model.bind(sequences)
    states = slow_states(bound.observations, model.residual, model.latent_dim, window, generator)
    limit = model.transition.head.bound
    if limit is not None:
        states = states.clamp(-INSIDE * limit, INSIDE * limit)
    weights = torch.ones(len(sequences), dtype=torch.float64, device=states.device) if sequences.weights is None else sequences.weights.to(states.device)
    density = PathDensity(bound, states.unsqueeze(2), weights)
    num_steps, parameters = float(bound.observations.inside.to(weights).sum(0) @ weights), list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=model.learning_rate)
    with torch.enable_grad():
        for step in range(STEPS):
            for group in optimizer.param_groups:
                group["lr"] = model.learning_rate * 0.5 * (1 + math.cos(math.pi * step / STEPS))
            set_gradients(parameters, [gradient / -num_steps for gradient in density.gradient()[1]])
            torch.nn.utils.clip_grad_norm_(parameters, model.gradient_clip)
            optimizer.step()
    optimizer.zero_grad()
