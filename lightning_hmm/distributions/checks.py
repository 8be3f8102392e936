"""Checks of the columns, the parameters and the values of emissions, with the same error messages for all families."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_hmm.columns import Column
from lightning_hmm.distributions.base import Emission, as_numbers
from lightning_hmm.sequences import Sequences


def name_of(emission: Emission) -> str:
    """Returns the name of a family with its article."""
    name = type(emission).__name__
    return f"{'An' if name[0] in 'AEIOU' else 'A'} {name}"


def require_real(emission: Emission, columns: Sequence[Column]) -> None:
    """Raises a `ValueError` that names the first column of symbols."""
    categorical = next((column.name for column in columns if column.is_categorical), None)
    if categorical is not None:
        raise ValueError(
            f"{name_of(emission)} emission must have real columns, but column {categorical!r} is categorical."
        )


# Parameters


def checked_parameters(
    emission: Emission,
    given: Mapping[str, Any],
    present: Mapping[str, Tensor],
    check: Callable[[str, Tensor], None],
) -> dict[str, Tensor]:
    """Checks the arguments of `Emission.set`.

    Args:
        emission: An emission whose parameters must all be given if none has a value yet.
        given: Values of parameters by name.
        present: The present values in all restarts.
        check: Raises a `ValueError` if the value (R, K, ...) of the parameter with a name is out of its range.

    Returns:
        The given values as tensors with the shapes of the present ones.
    """
    refuse_unknown(emission, given)
    lacking = next((name for name in emission.names if name not in given), None)
    if lacking is not None and not bool(emission.is_set):
        raise ValueError(f"`{lacking}` must be given, too, as long as the emission has no values from data.")
    found = {name: expanded(name, value, present[name].shape, present[name].device) for name, value in given.items()}
    for name, value in found.items():
        check(name, value)
        require_tied(emission, name, value)
    return found


def refuse_unknown(emission: Emission, given: Mapping[str, Any]) -> None:
    """Raises a `ValueError` that names the first argument of `Emission.set` that is not a parameter."""
    strange = next((name for name in given if name not in emission.names), None)
    if strange is not None:
        names = ", ".join(emission.names)
        raise ValueError(f"{name_of(emission)} emission has the parameters {names}, but {strange!r} was given.")


def expanded(name: str, given: Any, shape: Sequence[int], device: torch.device) -> Tensor:
    """Returns a given value as a tensor with a shape that begins with the number of restarts."""
    value, shape = as_numbers(name, given, device), tuple(shape)
    if value.shape not in (shape, shape[1:]):
        raise ValueError(f"`{name}` must have shape {shape[1:]}, but has {tuple(value.shape)} instead.")
    return value.expand(shape)


def require_tied(emission: Emission, name: str, value: Tensor) -> None:
    """Raises a `ValueError` if a parameter (R, K, ...) is tied, but differs between states."""
    if name in emission.tied and bool((value != value[:, :1]).any()):
        raise ValueError(f"`{name}` must be the same for all states because it is tied, but the states differ.")


def refuse_where(wrong: Tensor, name: str, rule: str, value: Tensor, axis: str = "column") -> None:
    """Raises a `ValueError` that reports the first state and column at which a parameter (R, K, D, ...) is wrong."""
    if bool(wrong.any()):
        where = tuple(torch.nonzero(wrong)[0].tolist())
        raise ValueError(
            f"`{name}` must {rule}, but that of state {where[1]}, {axis} {where[2]} is {float(value[where]):g}."
        )


def require_positive_definite(name: str, matrices: Tensor) -> None:
    """Raises a `ValueError` that names the first state whose matrix (R, K, D, D) is not positive definite."""
    if not bool(matrices.isfinite().all()):
        raise ValueError(f"`{name}` must be finite, but an entry is not.")
    gap = (matrices - matrices.mT).abs().amax((-2, -1)) > 1e-8 * matrices.abs().amax((-2, -1))
    wrong = gap | (torch.linalg.cholesky_ex(matrices).info != 0)
    if bool(wrong.any()):
        state = int(torch.nonzero(wrong)[0, -1])
        raise ValueError(f"`{name}` must be symmetric and positive definite, but that of state {state} is not.")


def count_free(emission: Emission, num_states: int, sizes: Mapping[str, int]) -> int:
    """Returns the number of free parameters, given the number of each parameter in a state."""
    names = [name for name in emission.names if name not in emission.frozen]
    return sum(sizes[name] * (1 if name in emission.tied else num_states) for name in names)


# Data


def refuse_value(emission: Emission, sequences: Sequences, wrong: Tensor, rule: str, remedy: str) -> None:
    """Raises a `ValueError` that reports the first value at which the mask `wrong` (steps, D) is true."""
    step, column = torch.nonzero(wrong)[0].tolist()
    n, t = sequences.locate(step)
    raise ValueError(
        f"{name_of(emission)} emission must have {rule}, "
        f"but column {column} at position {t} of sequence {n} is {float(sequences.values[step, column]):g}. {remedy}"
    )


def require_observed(weights: Tensor, names: Sequence[str]) -> None:
    """Raises a `ValueError` that names the first column without an observed value.

    Args:
        weights: (D,) total weight of the observed values of each column.
        names: Names of the columns.
    """
    missing = torch.nonzero(weights == 0).flatten()
    if len(missing):
        raise ValueError(
            f"Every column must be observed somewhere, but {names[int(missing[0])]!r} is missing at every step. "
            "Leave the column out."
        )
