"""Training from Python: `fit` trains a model, and `load` loads a trained model from a checkpoint."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer

from lightning_hmm.callbacks import Convergence
from lightning_hmm.data import InMemoryData
from lightning_hmm.models.hmm import HMM
from lightning_hmm.models.sequence_model import SequenceModel, check_seed
from lightning_hmm.runs import require_local_file
from lightning_hmm.sequences import Sequences

Model = TypeVar("Model", bound=SequenceModel)

# Hints of Lightning that do not apply to data in memory and one EM step per epoch.
_IRRELEVANT_HINTS = (
    "does not have many workers",
    "have no `val_dataloader`",
    "smaller than the logging interval",
    "Starting from v1.9",
    "exists and is not empty",
    "across ranks is zero",  # A part of the data may be empty.
    "sync_dist=True",  # Logged values are already sums over ranks.
    "your dataloader is not resumable",  # Models refuse checkpoints from inside an epoch.
    "ModelCheckpoint with manual optimization",  # Checkpoints contain the parameters after an M-step.
)


@contextmanager
def quiet_lightning(announcements: bool = True) -> Iterator[None]:
    """Suppresses hints of Lightning that do not apply, and without `announcements` also its list of devices."""
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")

    def matters(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING or (announcements and "Tip" not in record.getMessage())

    log.addFilter(matters)
    try:
        with _without_hints():
            yield
    finally:
        log.removeFilter(matters)


@contextmanager
def _without_hints() -> Iterator[None]:
    with warnings.catch_warnings():
        for message in _IRRELEVANT_HINTS:
            warnings.filterwarnings("ignore", message=f".*{message}.*")
        # Lightning uses a pytree class that torch has renamed.
        warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
        yield


def _arithmetic(precision: str | int | None, default: str) -> str:
    """Returns "float64" or "float32" for a precision of the Trainer; `default` if it is None."""
    if precision is None:
        return default
    for arithmetic, spellings in {
        "float64": ("64", "64-true", "float64"),
        "float32": ("32", "32-true", "float32"),
    }.items():
        if str(precision) in spellings:
            return arithmetic
    raise ValueError(
        f"`precision` must be 64-true or 32-true, but is {precision!r} instead. Counts need more than 16 bits."
    )


def fit(
    model: Model,
    sequences: Any,
    max_epochs: int = 100,
    tolerance: float = 1e-6,
    precision: str | int | None = None,
    *,
    lengths: Any = None,
    val_sequences: Any = None,
    batch_size: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    ckpt_path: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
    logger: Any = False,
    enable_checkpointing: bool = False,
    enable_progress_bar: bool = False,
    **trainer_options: Any,
) -> Model:
    """Trains `model` on `sequences` and returns it.

    Args:
        model: Model, which is trained in place.
        sequences: `Sequences`, data in a format of `Sequences.from_list`, or one array of all steps with `lengths`.
        max_epochs: Number of passes over the data; in batch EM the number of EM iterations. -1 means no limit.
        tolerance: Training stops when the relative gain of the training likelihood in an epoch is below this value; 0
            disables early stopping.
        precision: "64-true" or "32-true" for the arithmetic of the message passing. The default is that of the model.
        lengths: (N,) number of steps of each sequence, if `sequences` is one array; see `Sequences.from_lengths`.
        val_sequences: Validation data for the choice among restarts and for the metric ``val/bits_per_symbol``.
        batch_size: Number of sequences per batch. The default is all. In batch EM the result does not depend on it.
        shuffle: Whether to draw a new order of the sequences in every epoch.
        seed: Seed for the order.
        ckpt_path: Path of a local checkpoint from which training continues.
        callbacks, logger, enable_checkpointing, enable_progress_bar, trainer_options: Forwarded to `lightning.Trainer`.

    Example:
        >>> from lightning_hmm import StandardHMM
        >>> model = fit(StandardHMM(2, num_symbols=2), [[0, 0, 0, 1, 1, 1] * 5] * 3, max_epochs=5)
        >>> model.transition_probs.shape
        torch.Size([2, 2])
    """
    _check_fit_arguments(model, max_epochs, tolerance, batch_size)
    check_seed(seed)
    arithmetic = _arithmetic(precision, model.arithmetic)
    checkpoint = None if ckpt_path is None else require_local_file(ckpt_path)
    train, validation = _prepared(model, sequences, lengths, val_sequences)
    data = InMemoryData(train, validation, batch_size, shuffle, seed)
    watched = (
        bool(callbacks)
        or bool(logger)
        or enable_checkpointing
        or enable_progress_bar
        or bool(trainer_options)
        or ckpt_path is not None
    )
    iterations = (
        _iterations_per_epoch(model, int(max_epochs))
        if not watched and val_sequences is None and batch_size is None
        else 1
    )
    model.train()  # `fit` returns models in evaluation mode.
    with quiet_lightning(announcements=False):
        trainer = Trainer(
            max_epochs=int(max_epochs) // iterations,
            callbacks=[*callbacks]
            if any(isinstance(callback, Convergence) for callback in callbacks)
            else [Convergence(tolerance), *callbacks],
            logger=logger,
            enable_checkpointing=enable_checkpointing,
            enable_progress_bar=enable_progress_bar,
            use_distributed_sampler=False,
            **{
                "enable_model_summary": False,
                "accelerator": "auto" if torch.cuda.is_available() else "cpu",
                "num_sanity_val_steps": 0,
                **({} if validation is not None else {"limit_val_batches": 0}),
                **trainer_options,
            },
        )
        own = {"arithmetic": model.arithmetic}
        model.arithmetic = arithmetic
        if iterations > 1:
            own["iterations_per_epoch"], model.iterations_per_epoch = 1, iterations  # type: ignore[assignment]
        try:
            trainer.fit(model, datamodule=data, ckpt_path=checkpoint)
        finally:
            for name, value in own.items():
                setattr(model, name, value)
    return model.eval()


def _check_fit_arguments(model: Any, max_epochs: Any, tolerance: Any, batch_size: Any) -> None:
    """Raises a `ValueError` for an argument of `fit` that has a wrong type or value."""
    if not isinstance(model, SequenceModel):
        raise ValueError(f"`model` must be a model, such as `HMM(3)`, but is {_short(model)} instead.")
    if hasattr(max_epochs, "__len__") and not isinstance(max_epochs, str):
        raise ValueError(
            f"`max_epochs` must be a number, but is {_short(max_epochs)} instead. "
            "Give lengths by name: `fit(model, X, lengths=...)`."
        )
    if not _is_number(max_epochs) or max_epochs % 1 or max_epochs < -1:
        raise ValueError(f"`max_epochs` must be a whole number, or -1 for no limit, but is {max_epochs!r} instead.")
    if not _is_number(tolerance):
        raise ValueError(f"`tolerance` must be a finite number, but is {tolerance!r} instead.")
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int)):
        raise ValueError(
            f"`batch_size` must be a whole number, or None for everything in one batch, but is {batch_size!r} instead."
        )


def _prepared(
    model: SequenceModel, sequences: Any, lengths: Any, val_sequences: Any
) -> tuple[Sequences, Sequences | None]:
    """Converts training and validation data, sets the sizes of the model, and checks the data."""
    train = model.as_sequences(sequences, lengths)
    require_observations(train)
    if train.columns is not None:
        model.take_sizes([train])  # Validation data have the columns and categories of the training data.
    validation = None if val_sequences is None else model.as_sequences(val_sequences)
    given = [part for part in (train, validation) if part is not None]
    model.take_sizes(given)
    for part in given:
        model.check(part)
    return train, validation


def _iterations_per_epoch(model: SequenceModel, max_epochs: int) -> int:
    """Returns the number of EM iterations per epoch of the Trainer if no callback observes the epochs.

    It is at most 50, and 1 except for batch EM. Each epoch of the Trainer costs a few milliseconds.
    """
    if not isinstance(model, HMM) or not model.may_iterate or model.iterations_per_epoch > 1 or max_epochs < 1:
        return 1
    return next(number for number in range(min(50, max_epochs), 0, -1) if max_epochs % number == 0)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool) and math.isfinite(value)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def require_observations(sequences: Sequences) -> None:
    """Raises a `ValueError` if no step of a sequence with positive weight is observed."""
    if not len(sequences) or not sequences.num_steps:
        raise ValueError(
            f"`sequences` must hold at least one step, but holds {len(sequences)} sequences and {sequences.num_steps} "
            "steps instead."
        )
    if not bool(sequences.observed.any()):
        raise ValueError(f"`sequences` must have something observed, but all {sequences.num_steps} steps are missing.")
    if not float(sequences.num_observed()) > 0:
        raise ValueError(
            "`sequences` must have an observed step in a sequence of positive weight, but every sequence with an "
            "observed step has weight 0."
        )


def _families(family: type) -> Iterator[type[SequenceModel]]:
    subclasses: Any = family.__subclasses__()
    for subclass in subclasses:
        yield subclass
        yield from _families(subclass)


def load(path: str | Path, map_location: Any = "cpu") -> Any:
    """Loads a model of any class from a checkpoint, in evaluation mode. Only tensors and plain values are read.

    Args:
        path: Path of a local checkpoint.
        map_location: Device of the model, as in `torch.load`.

    Example:
        >>> import tempfile
        >>> from lightning_hmm import StandardHMM
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model = fit(StandardHMM(2, num_symbols=2), [[0, 1, 1, 0]], 2, enable_checkpointing=True,
        ...                 default_root_dir=folder)
        ...     path = model.trainer.checkpoint_callback.best_model_path
        ...     type(load(path)).__name__
        'StandardHMM'
    """
    path = require_local_file(path, "path")
    try:
        checkpoint = torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:
        raise ValueError(f"{path} is not a checkpoint that can be read: {error}") from error
    made_by = checkpoint.get("lightning_hmm", {}).get("model") if isinstance(checkpoint, dict) else None
    if made_by is None:
        raise ValueError(f"{path} contains no model of lightning_hmm.")
    family = next((family for family in _families(SequenceModel) if family.__name__ == made_by), None)
    if family is None:
        raise ValueError(
            f"{path} contains a {made_by}, which is not imported. Import the module that defines it first."
        )
    hyperparameters = {
        name: value for name, value in checkpoint["hyper_parameters"].items() if not name.startswith("_")
    }
    model = family(**hyperparameters)
    model.load_state_dict(checkpoint["state_dict"])
    return model.to(map_location).eval()
