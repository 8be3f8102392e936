"""Starting values for a state that changes slowly.

From random networks, EM finds a state that helps to predict the next step. It seldom finds a state that changes slowly,
because such a state must be of some use before training can make it more useful. A mixture model is started from
k-means for the same reason. Here the first states are averages of the data over many steps, and the networks are fitted
to them.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_hmm.models.neural.state_space import BoundModel, LatentStateModel, PathDensity
from lightning_hmm.models.neural.units import Observations
from lightning_hmm.optim import set_gradients
from lightning_hmm.sequences import Sequences

NUM_UPDATES = 150  # steps of Adam
MAX_STEPS = 30_000  # of the training data: whole sequences, from the first on
INSIDE = 0.95  # largest absolute value of a starting state, as a fraction of the latent bound


class SlowStartModel(LatentStateModel, Protocol):
    """A model whose networks `start_slow` can fit. `NeuralHMM` implements it."""

    latent_dim: int
    learning_rate: float
    gradient_clip: float

    def bind(self, sequences: Sequences) -> BoundModel: ...


def slow_states(
    observations: Observations, residual: bool, latent_dim: int, window: int, generator: torch.Generator
) -> Tensor:
    """(T, B, d) the principal directions, scaled to variance 1, of averages over `window` steps around each step.

    The averages are of the observations. Where emissions are residual, they are of the logarithm of the length of a
    change, because changes themselves average out within a window. Where there are more dimensions than features, the
    others are averages of noise.
    """
    inside = observations.inside
    seen = (observations.observed & inside.unsqueeze(2)).to(observations.targets.dtype)
    values = observations.targets
    if residual:
        seen = seen.prod(2, keepdim=True)
        values = values.norm(dim=2, keepdim=True)
        median = values[seen > 0].median() if bool(seen.any()) else values.new_ones(())
        values = (values / median.clamp(min=1e-9)).log1p()
    spare = latent_dim - values.shape[2]
    if spare > 0:
        noise = torch.randn(*values.shape[:2], spare, generator=generator, dtype=values.dtype).to(values.device)
        values = torch.cat([values, noise], 2)
        seen = torch.cat([seen, inside.unsqueeze(2).to(seen).expand(-1, -1, spare)], 2)
    counts = moving_sum(seen, window)
    mean = (values * seen)[inside].sum(0) / seen[inside].sum(0).clamp(min=1)
    averages = torch.where(counts > 0, moving_sum((values - mean) * seen, window) / counts.clamp(min=1), 0.0)
    rows = averages[inside].double()
    rows = rows / rows.std(0).clamp(min=1e-9)
    _, sizes, directions = torch.linalg.svd(rows - rows.mean(0), full_matrices=False)
    projected = (rows - rows.mean(0)) @ directions[:latent_dim].T
    states = averages.new_zeros(*inside.shape, latent_dim)
    states[inside] = (projected * math.sqrt(len(rows)) / sizes[:latent_dim].clamp(min=1e-9)).to(averages.dtype)
    return states


def moving_sum(values: Tensor, window: int) -> Tensor:
    """(T, B, D) sums over `window` steps around each step; an even window has one more step before it than after it."""
    padded = F.pad(values.double(), (0, 0, 0, 0, window // 2 + 1, (window - 1) // 2)).cumsum(0)
    return (padded[window:] - padded[: len(padded) - window]).to(values.dtype)


def start_slow(model: SlowStartModel, sequences: Sequences, window: int, generator: torch.Generator) -> None:
    """Fits the networks of a neural HMM to slow states of the sequences, as an M-step fits them to paths."""
    sequences = sequences.counted()
    sequences = sequences[: max(int((sequences.lengths.cumsum(0) <= MAX_STEPS).sum()), 1)]
    bound = model.bind(sequences)
    states = slow_states(bound.observations, model.residual, model.latent_dim, window, generator)
    bound_of_means = model.transition.head.bound
    if bound_of_means is not None:
        states = states.clamp(-INSIDE * bound_of_means, INSIDE * bound_of_means)
    weights = torch.ones(len(sequences), dtype=torch.float64, device=states.device)
    if sequences.weights is not None:
        weights = sequences.weights.to(states.device)
    density = PathDensity(bound, states.unsqueeze(2), weights)
    num_steps = float(bound.observations.inside.to(weights).sum(0) @ weights)
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=model.learning_rate)
    with torch.enable_grad():
        for update in range(NUM_UPDATES):
            for group in optimizer.param_groups:
                group["lr"] = model.learning_rate * 0.5 * (1 + math.cos(math.pi * update / NUM_UPDATES))
            set_gradients(parameters, [gradient / -num_steps for gradient in density.gradient()[1]])
            torch.nn.utils.clip_grad_norm_(parameters, model.gradient_clip)
            optimizer.step()
    optimizer.zero_grad()
