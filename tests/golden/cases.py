"""Models and data whose results are recorded in `values.npz`, to check changes that must not change results.

Each case starts from recorded parameters and not from a seed, because initialization may change.

``python -m tests.golden.cases`` records anew. Do that only when a result was wrong, and name the reason in the commit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lightning_hmm import DMCHMM, ClonedHMM, DenseHMM, Sequences, StandardHMM, fit

VALUES = Path(__file__).with_name("values.npz")
# Entries of a state dict that had another name when the values were recorded.
RENAMED = {"chosen": "best_restart", "emission.is_located": "emission.has_data_stats"}
PRIORS = {"initial_pseudocount": 0.3, "transition_pseudocount": 0.2}
GAUSSIAN = {"emission": "gaussian", "num_features": 3, "variance_prior": 0.1}
ONLINE = {"discount": 0.8, "transition_pseudocount": 0.2}


def _data(kind: str) -> Sequences:
    """Returns 40 ragged sequences with weights, and with missing values if the family accepts them.

    The numbers come from a formula and not from a random generator, so that they never change.
    """
    lengths = [0, 1, 2, *(5 + 7 * n % 60 for n in range(37))]
    weights = torch.tensor([0.5 + n % 4 for n in range(40)], dtype=torch.float64)
    place = np.arange(sum(lengths))
    wave = np.sin(0.7 * place) + np.cos(0.11 * place * place % 17) + 0.5 * np.sin(1.3 * place % 29)
    if kind == "symbols":
        values = np.digitize(wave, [-1.2, -0.4, 0.2, 0.8, 1.4])
        return Sequences.from_lengths(torch.from_numpy(np.where(place % 13 == 5, -1, values)), lengths, weights)
    if kind == "whole symbols":
        return Sequences.from_lengths(
            torch.from_numpy(np.digitize(wave, [-1.2, -0.4, 0.2, 0.8, 1.4])), lengths, weights
        )
    vectors = np.stack([wave, np.roll(wave, 3) + 100.0, np.cos(0.3 * place)], 1)
    vectors[place % 11 == 4, 1] = np.nan
    vectors[place % 17 == 9] = np.nan
    return Sequences.from_lengths(torch.from_numpy(vectors), lengths, weights)


# Name: (how to make the model, kind of data, options of `fit`)
CASES: dict[str, tuple[Callable[..., Any], str, dict[str, Any]]] = {
    "standard": (lambda **o: StandardHMM(12, 6, **PRIORS, **o), "symbols", {}),
    "standard, few states": (lambda **o: StandardHMM(3, 6, **o), "symbols", {}),
    "standard, restarts": (lambda **o: StandardHMM(5, 6, restarts=2, **o), "symbols", {}),
    "standard, online": (
        lambda **o: StandardHMM(5, 6, emission_pseudocount=0.1, **ONLINE, **o),
        "symbols",
        {"batch_size": 8},
    ),
    "standard, many updates": (
        lambda **o: StandardHMM(5, 6, emission_pseudocount=0.1, sequences_per_update=4, **ONLINE, **o),
        "symbols",
        {"batch_size": 20},
    ),
    "Gaussian": (lambda **o: StandardHMM(6, **GAUSSIAN, **PRIORS, **o), "vectors", {}),
    "Gaussian, online": (lambda **o: StandardHMM(4, **GAUSSIAN, **ONLINE, **o), "vectors", {"batch_size": 8}),
    "DMC": (lambda **o: DMCHMM(40, 2, num_symbols=6, **o), "symbols", {}),
    "DMC, Gaussian": (lambda **o: DMCHMM(8, 2, **GAUSSIAN, **o), "vectors", {}),
    "dense": (lambda **o: DenseHMM(6, 6, 3, objective="em", m_steps=5, **o), "symbols", {}),
    "dense, Gaussian": (
        lambda **o: DenseHMM(4, embedding_dim=3, objective="em", m_steps=5, emission="gaussian", num_features=3, **o),
        "vectors",
        {},
    ),
    "cloned": (lambda **o: ClonedHMM(30, 6, pairs="all", transition_pseudocount=1e-3, **o), "whole symbols", {}),
    "cloned, missing symbols": (
        lambda **o: ClonedHMM(30, 6, pairs="all", transition_pseudocount=1e-3, **o),
        "symbols",
        {},
    ),
    "cloned, online": (lambda **o: ClonedHMM(30, 6, pairs="all", **ONLINE, **o), "whole symbols", {"batch_size": 8}),
    "cloned, many updates": (
        lambda **o: ClonedHMM(30, 6, pairs="all", sequences_per_update=4, **ONLINE, **o),
        "whole symbols",
        {"batch_size": 20},
    ),
}


def left_right(arithmetic: str) -> Any:
    """Structural zeros, which take a route of their own."""
    model = StandardHMM(5, 6, arithmetic=arithmetic)
    steps = torch.tensor(
        [[0.8 if j == i else 0.2 if j == i + 1 else 0.0 for j in range(5)] for i in range(5)], dtype=torch.float64
    )
    steps[4, 4] = 1.0
    return model.set_parameters(initial=[1.0, 0.0, 0.0, 0.0, 0.0], transition=steps)


CASES["standard, left-right"] = (lambda arithmetic: left_right(arithmetic), "symbols", {})


def results(
    name: str, arithmetic: str, start: dict[str, np.ndarray] | None = None
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The starting parameters, and what inference and five EM steps make of them."""
    make, kind, options = CASES[name]
    model, data = make(arithmetic=arithmetic), _data(kind)
    if start is None:
        if model.starts_from_data:
            model.initialize(data)
        start = {key: value.numpy().copy() for key, value in model.state_dict().items()}
    # Buffers that were added later are those of a new model.
    recorded = {RENAMED.get(key, key): torch.from_numpy(value) for key, value in start.items()}
    model.load_state_dict({**model.state_dict(), **recorded})
    posterior = model.posterior(data)
    found = {
        "log_likelihood": model.score(data),
        "path": model.decode(data).values,
        "smoothed": posterior.smoothed[:6].values,
        "filtered": posterior.filtered[:6].values,
        "predicted": torch.cat([torch.as_tensor(part) for part in _parts(model.predict_next(data, steps=2))], 1),
    }
    counts = posterior.transition_counts
    found |= (
        {"counts transition_counts": counts}
        if isinstance(counts, torch.Tensor)
        else {f"counts transition_counts {n}": part for n, part in enumerate(counts)}
    )
    fit(model, data, 5, 0, **options)
    found |= {f"after five steps: {name}": value for name, value in _parameters(model).items()}
    found["after five steps: log_likelihood"] = model.score(data)
    return start, {key: value.detach().numpy().copy() for key, value in found.items()}


def _parameters(model: Any) -> dict[str, torch.Tensor]:
    found = {
        name: getattr(model, name)
        for name in ("initial_probs", "transition_probs", "emission_probs")
        if hasattr(model, name)
    }
    emission = getattr(model, "emission", None)
    return found | {name: getattr(emission, name) for name in ("mean", "variance") if hasattr(emission, name)}


def _parts(prediction: Any) -> Any:
    return [prediction] if isinstance(prediction, torch.Tensor) else prediction


if __name__ == "__main__":
    recorded = {}
    for case in CASES:
        begin, found = results(case, "float64")
        recorded |= {f"{case}/start/{key}": value for key, value in begin.items()}
        recorded |= {f"{case}/float64/{key}": value for key, value in found.items()}
    np.savez_compressed(VALUES, **recorded)
