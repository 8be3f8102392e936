"""Options that a command with ``--ckpt_path`` takes from the checkpoint."""

from __future__ import annotations

import copy
import pkgutil
from collections.abc import Collection, Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from jsonargparse import Namespace

_REMEDY = "Remove the option from the command and the configuration file, or give another checkpoint."


class TrainedModel(NamedTuple):
    """The model in a checkpoint.

    Attributes:
        checkpoint: Path of the checkpoint.
        family: Name of the class of the model.
        hyperparameters: Options of the model, and entries of Lightning whose names begin with an underscore.
    """

    checkpoint: Path
    family: str
    hyperparameters: dict[str, Any]

    @property
    def class_path(self) -> str | None:
        """Import path of the class of the model, if the checkpoint contains it."""
        return self.hyperparameters.get("_class_path")

    @property
    def model_options(self) -> dict[str, Any]:
        """A copy of the arguments of the model's constructor. The parser modifies what it is given."""
        options = copy.deepcopy(self.hyperparameters)
        return {name: value for name, value in options.items() if not name.startswith("_")}

    @property
    def columns(self) -> list[dict[str, Any]]:
        """Columns of the training data as dictionaries; empty if the model has none."""
        return self.hyperparameters.get("columns") or []


def read_trained_model(checkpoint: Path) -> TrainedModel:
    """Reads the options of a model from a checkpoint."""
    try:
        content = torch.load(checkpoint, weights_only=True, map_location="cpu")
        return TrainedModel(checkpoint, content["lightning_hmm"]["model"], content["hyper_parameters"])
    except (OSError, RuntimeError, EOFError, KeyError, TypeError, UnpicklingError) as error:
        raise ValueError(
            f"`--ckpt_path` must be a checkpoint, but {checkpoint} cannot be read as one ({type(error).__name__})."
        ) from error


def data_options(trained: TrainedModel, options: Namespace) -> dict[str, Any]:
    """Returns options of the data module for which symbols and categories have the same numbers as in training.

    Args:
        trained: Model in the checkpoint.
        options: Options of the data module. Only options that it has, and that were not given, are returned.
    """
    hyperparameters, found = trained.hyperparameters, {}
    sources = (
        {"vocabulary": "symbol_names", "unknown": "unknown_symbol"}
        if hyperparameters.get("symbol_names")
        else {"num_symbols": "num_symbols"}
    )
    for option, name in sources.items():
        if option in options and options[option] is None and hyperparameters.get(name) is not None:
            found[option] = hyperparameters[name]
    listed = options.get("categorical_columns")
    if isinstance(listed, list) and trained.columns:
        # Columns that were selected for new data correspond to those of training by order, otherwise by name.
        names = options.get("columns") or [column["name"] for column in trained.columns]
        categories = {name: column["categories"] for name, column in zip(names, trained.columns, strict=False)}
        if all(categories.get(name) is not None for name in listed):
            found["categorical_columns"] = {name: categories[name] for name in listed}
    return found


def check_family(trained: TrainedModel, class_path: str) -> None:
    """Raises a `ValueError` if the class of the model that was given is not that of the checkpoint."""
    if pkgutil.resolve_name(class_path).__name__ != trained.family:
        raise ValueError(f"`model` is {class_path}, but {trained.checkpoint} contains a {trained.family}. {_REMEDY}")


def check_model_options(trained: TrainedModel, given: Namespace, taken: Namespace, from_data: Collection[str]) -> None:
    """Raises a `ValueError` if options that were given differ from those of the checkpoint. Defaults may differ.

    Args:
        trained: Model in the checkpoint.
        given: Options of the model in the command and its configuration files, without defaults.
        taken: Options of the model, taken from the checkpoint.
        from_data: Names of the options that follow from the data if they are None.
    """
    differences: list[tuple[str, Any, Any]] = []
    for name, value in vars(given).items():
        # A size that is None follows from the data, and a part that is None is the default part.
        follows = value is None and (name in from_data or isinstance(taken.get(name), Namespace))
        if name in taken and not follows:
            differences += _differences(f"model.init_args.{name}", value, taken[name])
    if differences:
        listing = "; ".join(
            f"`{path}` is {value!r}, but {other!r} in the checkpoint" for path, value, other in differences
        )
        raise ValueError(
            f"The options of the model must be those of the checkpoint {trained.checkpoint}: {listing}. {_REMEDY}"
        )


def _differences(path: str, given: Any, taken: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields the path and both values of each option that was given and differs from the checkpoint.

    Options of a part that were not given may differ.
    """
    given, taken = (vars(value) if isinstance(value, Namespace) else value for value in (given, taken))
    if isinstance(given, dict) and isinstance(taken, dict):
        for name, value in given.items():
            yield from _differences(f"{path}.{name}", value, taken.get(name))
    elif isinstance(given, list) and isinstance(taken, list) and len(given) == len(taken):
        for number, (value, other) in enumerate(zip(given, taken, strict=True)):
            yield from _differences(f"{path}.{number}", value, other)
    elif given != taken:
        yield path, given, taken
