"""Small data and models for many tests."""

from __future__ import annotations

import numpy as np
import torch

from lightning_hmm import Sequences, StandardHMM


def random_symbols(
    rng: np.random.Generator, num_sequences: int = 17, num_symbols: int = 5, longest: int = 30, missing: float = 0.1
) -> Sequences:
    """Ragged sequences, of lengths 1 and 0 too, with some symbols missing."""
    lengths = [1, 0, 2, *rng.integers(3, longest, num_sequences - 3)]
    return Sequences.from_list(
        [np.where(rng.random(n) < missing, -1, rng.integers(0, num_symbols, n)).astype(np.int64) for n in lengths]
    )


def random_vectors(
    rng: np.random.Generator, num_sequences: int = 17, num_features: int = 2, longest: int = 30, missing: float = 0.1
) -> Sequences:
    """Ragged sequences around two centres, with single entries missing."""
    parts = []
    for n in [1, 2, 3, *rng.integers(3, longest, num_sequences - 3)]:
        values = rng.normal(size=(n, num_features)) + 4.0 * rng.integers(0, 2, (n, 1))
        parts.append(np.where(rng.random(values.shape) < missing, np.nan, values))
    return Sequences.from_list(parts)


def parameters(model: StandardHMM) -> dict[str, torch.Tensor]:
    """All parameters of a model, as copies."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same_parameters(first: StandardHMM, second: StandardHMM, rtol: float = 1e-10, atol: float = 1e-12) -> None:
    for name, value in parameters(first).items():
        torch.testing.assert_close(
            value, parameters(second)[name], rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_identical_parameters(first: StandardHMM, second: StandardHMM) -> None:
    """Bit for bit."""
    for name, value in parameters(first).items():
        assert torch.equal(value, parameters(second)[name]), name
