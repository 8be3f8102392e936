"""Implementations of inference, and the choice among them.

A backend implements the E-step and the Viterbi algorithm for some operators, forms of evidence and devices. A problem
runs on the first backend that supports it; a backend that was registered later comes before the others. `explain`
describes the choice. Set the environment variable ``LIGHTNING_HMM_BACKEND`` to the name of a backend to force it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_hmm.inference import cpu, log_space, reference
from lightning_hmm.inference.evidence import Evidence
from lightning_hmm.inference.operators import Operator
from lightning_hmm.inference.results import EStep

VARIABLE = "LIGHTNING_HMM_BACKEND"


class Backend(NamedTuple):
    """An implementation of inference.

    name: Name of the backend, which is used in the environment variable.
    obstacle: Function of an operator, evidence and a device. It returns the reason why the backend cannot run this
        problem, or ``None`` if it can.
    e_step: Function with the signature of `reference.e_step`.
    viterbi: Function with the signature of `log_space.viterbi`.
    predict: Function with the signature of `inference.predict`, or ``None`` if predictions are computed from the last
        filtered probabilities with `Operator.predict`.
    takes_classes: Whether the E-step takes evidence for the classes of the operator instead of its states.
    """

    name: str
    obstacle: Callable[[Operator, Evidence, torch.device], str | None]
    e_step: Callable[..., EStep]
    viterbi: Callable[..., tuple[Tensor, Tensor]]
    predict: Callable[..., Tensor] | None = None
    takes_classes: bool = False


def _cpu_obstacle(operator: Operator, evidence: Evidence, device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"It runs on the CPU, but the parameters are on {device}."
    return cpu.supports(operator, evidence)


# In order of preference. The last backend supports every problem.
_BACKENDS = [
    Backend("cpu", _cpu_obstacle, cpu.e_step, cpu.viterbi),
    Backend("reference", lambda operator, evidence, device: None, reference.e_step, log_space.viterbi),
]


def register(backend: Backend) -> None:
    """Registers a backend. It takes precedence over the backends that were registered before it.

    Args:
        backend: The backend. It replaces a backend of the same name.

    Example:
        >>> from lightning_hmm.inference import backends, log_space, reference
        >>> def obstacle(operator, evidence, device):
        ...     return None if device.type == "cuda" else "It runs on CUDA devices only."
        >>> backend = backends.Backend("mine", obstacle, reference.e_step, log_space.viterbi)
        >>> backends.register(backend)  # doctest: +SKIP
    """
    _BACKENDS[:] = [backend, *(known for known in _BACKENDS if known.name != backend.name)]


def choose(operator: Operator, evidence: Evidence, device: torch.device) -> Backend:
    """Returns the backend that is used for this problem."""
    forced = os.environ.get(VARIABLE)
    if not forced:
        return next(backend for backend in _BACKENDS if backend.obstacle(operator, evidence, device) is None)
    backend = next((backend for backend in _BACKENDS if backend.name == forced), None)
    if backend is None:
        raise ValueError(
            f"`{VARIABLE}` must be one of {', '.join(known.name for known in _BACKENDS)}, but is {forced!r} instead."
        )
    obstacle = backend.obstacle(operator, evidence, device)
    if obstacle is not None:
        raise ValueError(
            f"`{VARIABLE}` is {forced!r}, "
            f"but that backend cannot run {_problem(operator, evidence, device)}. {obstacle}"
        )
    return backend


def explain(operator: Operator, evidence: Evidence, device: torch.device | str = "cpu") -> str:
    """Describes which backend is used for a problem, and why the backends before it are not.

    Args:
        operator: Transition operator.
        evidence: Evidence of the observations.
        device: Device of the parameters.

    Returns:
        One line for the backend that is used, and one for each backend before it.

    Example:
        >>> import torch
        >>> from lightning_hmm import inference
        >>> from lightning_hmm.inference import Rows
        >>> from lightning_hmm.inference.operators import Dense
        >>> print(inference.explain(Dense(torch.zeros(1, 1)), Rows(torch.zeros(3, 1))))
        Dense with Rows on cpu runs on the backend 'cpu'.
        'durations': It runs explicit durations only.
        'clones': It runs transitions between clones of symbols only.
    """
    device = torch.device(device)
    chosen = choose(operator, evidence, device)
    lines = [f"{_problem(operator, evidence, device)} runs on the backend {chosen.name!r}."]
    if os.environ.get(VARIABLE):
        return f"{lines[0]} The environment variable {VARIABLE} forces it."
    for backend in _BACKENDS:
        if backend is chosen:
            break
        lines.append(f"{backend.name!r}: {backend.obstacle(operator, evidence, device)}")
    return "\n".join(lines)


def _problem(operator: Operator, evidence: Evidence, device: torch.device) -> str:
    return f"{type(operator).__name__} with {type(evidence).__name__} on {device.type}"
