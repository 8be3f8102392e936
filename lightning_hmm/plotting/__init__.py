"""Figures of models: arrays or tensors in, a matplotlib `Figure` out.

In the shapes, K is the number of states, V of symbols, D of features, R of restarts and E of epochs.
"""

from lightning_hmm.plotting.curves import convergence
from lightning_hmm.plotting.embeddings import composition
from lightning_hmm.plotting.emissions import ColumnDensities, coefficient_matrix, column_emissions, gaussian_emissions
from lightning_hmm.plotting.latent_states import effective_size, latents, predictions
from lightning_hmm.plotting.matrices import (
    clone_matrix,
    cooccurrences,
    emission_matrix,
    parameter_matrix,
    transition_matrix,
)
from lightning_hmm.plotting.state_graphs import state_graph
from lightning_hmm.plotting.style import COLORS
from lightning_hmm.plotting.usage import expected_dwell, state_usage, stationary_distribution

__all__ = [
    "COLORS",
    "ColumnDensities",
    "clone_matrix",
    "coefficient_matrix",
    "column_emissions",
    "composition",
    "convergence",
    "cooccurrences",
    "effective_size",
    "emission_matrix",
    "expected_dwell",
    "gaussian_emissions",
    "latents",
    "parameter_matrix",
    "predictions",
    "state_graph",
    "state_usage",
    "stationary_distribution",
    "transition_matrix",
]
