"""dynamax's `CategoricalHMM`, one jitted E-step and M-step in float32. Started by `baum_welch.py`; see `peer.py`.

The iteration is the body of dynamax's own `fit_em`: `e_step` mapped over the sequences, then `m_step`. Its log-prior,
which `fit_em` adds to the reported likelihood, is omitted.
"""

from __future__ import annotations

from functools import partial
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dynamax.hidden_markov_model import CategoricalHMM
from peer import serve

CONCENTRATION = 1.0  # of the Dirichlet priors: maximum likelihood, as the others do


class Dynamax:
    def __init__(self) -> None:
        self.versions = {name: version(name) for name in ("dynamax", "jax")}

    def load(self, initial: np.ndarray, transition: np.ndarray, emission: np.ndarray, symbols: np.ndarray) -> None:
        (num_states,), num_symbols = initial.shape, emission.shape[1]
        model = CategoricalHMM(
            num_states,
            1,
            num_symbols,
            initial_probs_concentration=CONCENTRATION,
            transition_matrix_concentration=CONCENTRATION,
            emission_prior_concentration=CONCENTRATION,
        )
        start = [jnp.asarray(array, jnp.float32) for array in (initial, transition, emission[:, None])]
        self.start, properties = model.initialize(
            initial_probs=start[0], transition_matrix=start[1], emission_probs=start[2]
        )
        self.now = self.start
        self.symbols = jnp.asarray(symbols[:, :, None], jnp.int32)

        def iteration(parameters: Any, symbols: Any) -> Any:
            statistics, log_likelihoods = jax.vmap(partial(model.e_step, parameters))(symbols)
            state = model.initialize_m_step_state(parameters, properties)
            parameters, _ = model.m_step(parameters, properties, statistics, state)
            return parameters, log_likelihoods.sum()

        self.iteration = jax.jit(iteration).lower(self.start, self.symbols).compile()

    def reset(self) -> None:
        self.now = self.start

    def step(self) -> None:
        self.now, _ = jax.block_until_ready(self.iteration(self.now, self.symbols))

    def transition(self) -> np.ndarray:
        return np.asarray(self.now.transitions.transition_matrix)


if __name__ == "__main__":
    serve(Dynamax())
