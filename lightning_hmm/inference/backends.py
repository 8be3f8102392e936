"""The implementations of inference, and the choice among them.

A backend runs the E-step and Viterbi for some operators, forms of evidence and devices. The first registered backend that can run a
problem does. `explain` says which one that is and why. The environment variable ``LIGHTNING_HMM_BACKEND`` forces one by name.
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

    name: by which the environment variable chooses it.
    obstacle: returns the reason why it cannot run an operator with a form of evidence on a device, or ``None`` if it can.
    e_step: has the signature of `reference.e_step`.
    viterbi: has the signature of `log_space.viterbi`.
    predict: has the signature of `inference.predict`; ``None`` if `Operator.predict` continues from the E-step.
    """

    name: str
    obstacle: Callable[[Operator, Evidence, torch.device], str | None]
    e_step: Callable[..., EStep]
    viterbi: Callable[..., tuple[Tensor, Tensor]]
    predict: Callable[..., Tensor] | None = None


def _cpu_obstacle(operator: Operator, evidence: Evidence, device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"It runs on the CPU, but the parameters are on {device}."
    return cpu.supports(operator, evidence)


# In order of preference; the last one runs everything.
_BACKENDS = [
    Backend("cpu", _cpu_obstacle, cpu.e_step, cpu.viterbi),
    Backend("reference", lambda operator, evidence, device: None, reference.e_step, log_space.viterbi),
]


def register(backend: Backend) -> None:
    """Adds a backend, which is preferred to those before it. A backend of the same name is replaced."""
    _BACKENDS[:] = [backend, *(known for known in _BACKENDS if known.name != backend.name)]


def choose(operator: Operator, evidence: Evidence, device: torch.device) -> Backend:
    """The backend that runs this problem."""
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
            f"`{VARIABLE}` is {forced!r}, but that backend cannot run {_problem(operator, evidence, device)}. {obstacle}"
        )
    return backend


def explain(operator: Operator, evidence: Evidence, device: torch.device | str = "cpu") -> str:
    """Which backend runs this problem, and why not one that is preferred to it. One line for each backend that was considered."""
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
