"""The command line: ``python -m lightning_hmm {fit,validate,test,predict} --config configs/<model>/<data>.yaml``.

`LightningCLI` with the defaults that EM needs, the sizes of the data handed to the model, loggers under
``logs/<model>/<data>/version_N``, and a summary at the end.
"""

from __future__ import annotations

import copy
import os
import pkgutil
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from jsonargparse import ArgumentError, Namespace
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_hmm.callbacks import BestCheckpoint, Convergence, Figures, LastCheckpoint, PredictionWriter, Retraining
from lightning_hmm.columns import Column
from lightning_hmm.models import SequenceModel
from lightning_hmm.runs import claim_version, find_checkpoint, require_local_file, run_folder
from lightning_hmm.training import quiet_lightning


class RunConfig(SaveConfigCallback):
    """Saves ``config.yaml`` in the folder of the run, beside its checkpoints, whatever logger is used."""

    def __init__(self, parser: LightningArgumentParser, config: Namespace) -> None:
        super().__init__(parser, config, save_to_log_dir=False)

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        path = run_folder(trainer) / "config.yaml"
        given = {Path(config).resolve() for config in self.config.get("config") or []}
        if path.exists() and (stage != "fit" or path.resolve() in given):
            return  # the file describes the training, or was written by the user
        path.parent.mkdir(parents=True, exist_ok=True)
        self.parser.save(self.config, path, skip_none=False, overwrite=True)


class SharedVersion(Callback):
    """Gives the loggers of every rank the version that rank 0 has claimed.

    Args:
        loggers: Returns the loggers for a version.
    """

    def __init__(self, loggers: Callable[[Any], list[Logger]]) -> None:
        self.loggers = loggers

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        version = trainer.strategy.broadcast(trainer.loggers[0].version)
        if not trainer.is_global_zero:
            trainer.loggers = self.loggers(version)


def default_loggers(folder: str | Path, name: str, version: int | None) -> list[Logger]:
    """Returns the loggers of a run for which no others were chosen: TensorBoard and a CSV file."""
    # Flushed often, for who is watching; and an interrupt that hits the writer's lock costs seconds, not minutes.
    return [
        TensorBoardLogger(folder, name, version, default_hp_metric=False, flush_secs=5),
        CSVLogger(folder, name, version),
    ]


class Parser(LightningArgumentParser):
    """Says what is wrong in a few lines, not under a page of usage."""

    def error(self, message: str, ex: Exception | None = None) -> Any:
        if self.exit_on_error and not os.environ.get("JSONARGPARSE_DEBUG"):
            sys.stderr.write(
                f"error: {_what_is_wrong(message)}\n(`python -m lightning_hmm fit --help` lists the options; `--model.help StandardHMM` those of a model.)\n"
            )
            self.exit(2)
        return super().error(message, ex)


def _what_is_wrong(message: str) -> str:
    """The sentence for a person inside one of jsonargparse, which tries every type an option may have and reports on each."""
    if "Errors:" not in message:
        return message
    inner = message.split("Errors:", 1)[1].split("Given value type:")[0]
    lines = [line.strip().removeprefix("- ") for line in inner.splitlines()]
    return "\n".join(
        line
        for line in lines
        if line and "NoneType" not in line and not line.startswith("Problem with given class_path")
    )


# What the data tell the model.
_LINKED = ("num_symbols", "num_features", "symbol_names", "unknown_symbol", "columns")


class CommandLine(LightningCLI):
    """See the module's docstring."""

    _trained_columns: tuple[str, ...] = ()  # the names of the checkpoint's columns, in their order

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for name in _LINKED:
            how = self._in_order if name == "columns" else None
            parser.link_arguments(f"data.{name}", f"model.init_args.{name}", compute_fn=how, apply_on="instantiate")
        parser.add_lightning_class_args(BestCheckpoint, "checkpoint")
        parser.add_lightning_class_args(LastCheckpoint, "last_checkpoint")
        parser.add_lightning_class_args(Convergence, "convergence")
        parser.add_lightning_class_args(Figures, "figures")
        parser.add_lightning_class_args(PredictionWriter, "predictions")

    def _in_order(self, columns: list[Column]) -> list[Column]:
        """The columns of the data in the order of the checkpoint's, in which a data module returns them once it has loaded the checkpoint."""
        own = {column.name: column for column in columns}
        same = sorted(own) == sorted(self._trained_columns)
        return [own[name] for name in self._trained_columns] if same else columns

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        super().parse_arguments(parser, args)
        subcommand = self.config.subcommand
        for group in ("trainer", *self._parser(subcommand).callback_keys):
            if not isinstance(given := self.config[subcommand].get(group), Namespace):
                parser.error(
                    f"`{group}` must be a group of options, such as `trainer: {{max_epochs: 50}}`, but is {given!r} instead."
                )
        if self.config[subcommand].get("ckpt_path") is not None:
            # What was typed or is in a given configuration file, without the defaults.
            given = (
                parser.parse_object(args, defaults=False)
                if isinstance(args, dict | Namespace)
                else parser.parse_args(args, defaults=False)
            )
            self._given = given[subcommand].model

    def _parse_ckpt_path(self) -> None:
        config = self.config[self.config.subcommand]
        path = config.get("ckpt_path")
        if path is None:
            if self.config.subcommand != "fit":
                raise ValueError(
                    f"`--ckpt_path` must say which model to {self.config.subcommand}: without it, that would be one that was never trained."
                )
            return
        if path == "hpc":
            return
        checkpoint = (
            find_checkpoint(path, config.get("config") or [])
            if path in ("best", "last")
            else require_local_file(path, "--ckpt_path")
        )
        config.ckpt_path = str(checkpoint)
        try:
            content = torch.load(checkpoint, weights_only=True, map_location="cpu")
            family, trained = content["lightning_hmm"]["model"], content["hyper_parameters"]
        except (OSError, RuntimeError, EOFError, KeyError, TypeError, UnpicklingError) as error:
            raise ValueError(
                f"`--ckpt_path` must be a checkpoint, but {checkpoint} cannot be read as one ({type(error).__name__})."
            ) from error
        columns = copy.deepcopy(trained.get("columns"))  # the parser changes what it is given
        self._trained_columns = tuple(column["name"] for column in columns or ())
        self._take_options(trained, family, checkpoint)
        # Other data than in training must still mean the same by a symbol.
        options = self.config[self.config.subcommand].data.init_args
        handed_on = (
            {"vocabulary": "symbol_names", "unknown": "unknown_symbol"}
            if trained.get("symbol_names")
            else {"num_symbols": "num_symbols"}
        )
        for option, name in handed_on.items():
            if option in options and options[option] is None and trained.get(name) is not None:
                options[option] = trained[name]
        listed = options.get("categorical_columns")
        if isinstance(listed, list) and columns:
            # Columns that were chosen for new data replace those of training in their order; otherwise names say which is which.
            names = options.get("columns") or [column["name"] for column in columns]
            categories = {name: column["categories"] for name, column in zip(names, columns, strict=False)}
            if all(categories.get(name) is not None for name in listed):
                options["categorical_columns"] = {name: categories[name] for name in listed}

    def _take_options(self, trained: dict[str, Any], family: str, checkpoint: Path) -> None:
        """Takes the options of the model from a checkpoint. Options that were given must agree with them; defaults need not."""
        given = self._given.get("init_args") or Namespace()
        remedy = "Leave the option out of the command and the configuration file, or give another checkpoint."
        if pkgutil.resolve_name(self._given.class_path).__name__ != family:
            raise ValueError(f"`model` is {self._given.class_path}, but {checkpoint} holds a {family}. {remedy}")
        class_path = trained.get("_class_path", self._given.class_path)
        options = {name: value for name, value in trained.items() if not name.startswith("_")}
        self.config = self.parser.parse_object(
            {self.config.subcommand: {"model": {"class_path": class_path, "dict_kwargs": options}}}, self.config
        )
        taken = self.config[self.config.subcommand].model.init_args
        # Sizes and parts that are None follow from the data or are the default ones.
        follows = [
            name
            for name, value in vars(given).items()
            if value is None and (name in _LINKED or isinstance(taken.get(name), Namespace))
        ]
        pairs = [(name, value) for name, value in vars(given).items() if name in taken and name not in follows]
        others = [
            found for name, value in pairs for found in _differences(f"model.init_args.{name}", value, taken[name])
        ]
        if others:
            listing = "; ".join(
                f"`{path}` is {value!r}, but {other!r} in the checkpoint" for path, value, other in others
            )
            raise ValueError(
                f"The options of the model must be those of the checkpoint {checkpoint}: {listing}. {remedy}"
            )

    def before_instantiate_classes(self) -> None:
        model = self._get(self.config, "model")
        self._typed = {
            name: model.init_args.get(name) for name in _LINKED if self._get(self.config, "ckpt_path") is None
        }

    def after_instantiate_classes(self) -> None:
        for name, value in self._typed.items():
            known = getattr(self.datamodule, name)
            if value is not None and value != known:
                raise ValueError(
                    f"`--model.init_args.{name}` is what the data say, {known}, but {value} was given. Leave it out, or change the data's options."
                )

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self._get(self.config_init, "trainer")
        if config.get("enable_checkpointing") is False:
            # Lightning refuses callbacks that save where nothing is to be saved.
            keys = self._parser(self.subcommand).callback_keys
            keys[:] = [key for key in keys if key not in ("checkpoint", "last_checkpoint")]
        if config.get("logger") is not None or config.get("fast_dev_run"):
            return super().instantiate_trainer(**kwargs)
        model = type(self.model).__name__.removesuffix("HMM").lower() or "hmm"
        data = type(self.datamodule).__module__.rpartition(".")[2]
        folder, name = os.path.expanduser(config.get("default_root_dir") or "logs"), f"{model}/{data}"
        loggers = partial(default_loggers, folder, name)
        trainer = super().instantiate_trainer(logger=loggers(None), **kwargs)
        if trainer.is_global_zero:
            trainer.loggers = loggers(claim_version(Path(folder, name)))
        trainer.callbacks.insert(0, SharedVersion(loggers))  # type: ignore[attr-defined]
        return trainer

    def _run_subcommand(self, subcommand: str) -> None:
        requeued_before = _requeued(self.trainer)
        try:
            super()._run_subcommand(subcommand)
            if self.trainer.received_sigterm:  # after the last check of Lightning's loops
                raise SIGTERMException
        except SystemExit as stopped:  # Lightning raises it after SIGTERM and after Ctrl-C
            if self.trainer.interrupted and self.trainer.state.fn == "fit":
                self._print_how_to_resume()
            if isinstance(stopped, SIGTERMException):
                # SLURM starts a requeued job again. Every other process that SIGTERM ends has failed.
                stopped.code = 0 if _requeued(self.trainer) > requeued_before else 128 + signal.SIGTERM
            raise

    def _print_how_to_resume(self) -> None:
        last = next(
            (
                callback.best_model_path
                for callback in self.trainer.checkpoint_callbacks
                if isinstance(callback, LastCheckpoint)
            ),
            "",
        )
        if last:
            _say(
                f"Stopped. The last finished epoch is in {last}",
                "Go on with:",
                f"  {_command('fit', self.trainer, last)}",
            )
        else:
            _say("Stopped before the first epoch was finished; nothing was saved.")

    def after_fit(self) -> None:
        """Tests the best model, and says where everything is."""
        saved = {
            type(callback): callback.best_model_path
            for callback in self.trainer.checkpoint_callbacks
            if isinstance(callback, ModelCheckpoint)
        }
        best, last = saved.get(BestCheckpoint, ""), saved.get(LastCheckpoint, "")
        retrained = any(isinstance(callback, Retraining) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]
        why = "retrained on training and validation data" if retrained else "no validation data to choose by"
        best = "" if retrained else best
        logs, epochs = run_folder(self.trainer), self.trainer.current_epoch
        if self.trainer.received_sigterm:  # after the last check of Lightning's loops
            raise SIGTERMException
        tested = (
            self.trainer.test(self.model, datamodule=self.datamodule, ckpt_path=best or None, verbose=False)
            if _has_test_data(self.datamodule)
            else []
        )
        metrics = tested[0] if tested else {}
        width = max(map(len, metrics), default=0)
        _say(
            "",
            f"Trained {type(self.model).__name__} for {epochs} epoch{'s' if epochs != 1 else ''}.",
            *[f"  {name:<{width}}  {value:.6f}" for name, value in sorted(metrics.items())],
            *([f"Best checkpoint:  {best}"] if best else [f"Last checkpoint:  {last} ({why})"] if last else []),
            *([f"Logs:             {logs}"] if self.trainer.loggers else []),
            *(
                [f"Look at them:     {shlex.join(['tensorboard', '--logdir', str(logs)])}"]
                if _on_tensorboard(self.trainer)
                else []
            ),
            *([f"Decode with it:   {_command('predict', self.trainer, best or last)}"] if best or last else []),
        )


def _has_test_data(datamodule: LightningDataModule) -> bool:
    return len(getattr(datamodule, "test_sequences", ())) > 0


def _on_tensorboard(trainer: Trainer) -> bool:
    return any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers)


def _command(subcommand: str, trainer: Trainer, checkpoint: str) -> str:
    config = str(run_folder(trainer) / "config.yaml")
    return shlex.join(["python", "-m", "lightning_hmm", subcommand, "--config", config, "--ckpt_path", checkpoint])


def _requeued(trainer: Trainer) -> int:
    """The number of checkpoints that Lightning has saved before it requeued a job with SLURM."""
    return len(list(Path(trainer.default_root_dir).glob("hpc_ckpt_*.ckpt")))


@rank_zero_only
def _say(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)


def _differences(path: str, given: Any, taken: Any) -> Iterator[tuple[str, Any, Any]]:
    """The options that were given and are not those of a checkpoint, each with both values. Options of a part that were not given may differ."""
    given, taken = (vars(value) if isinstance(value, Namespace) else value for value in (given, taken))
    if isinstance(given, dict) and isinstance(taken, dict):
        for name, value in given.items():
            yield from _differences(f"{path}.{name}", value, taken.get(name))
    elif isinstance(given, list) and isinstance(taken, list) and len(given) == len(taken):
        for number, (value, other) in enumerate(zip(given, taken, strict=True)):
            yield from _differences(f"{path}.{number}", value, other)
    elif given != taken:
        yield path, given, taken


def main(args: ArgsType = None) -> CommandLine:
    """Runs a command line given as a list, or that of the process; returns what was built."""
    with quiet_lightning():
        return CommandLine(
            SequenceModel,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            seed_everything_default=0,
            save_config_callback=RunConfig,
            parser_class=Parser,
            parser_kwargs={"prog": "lightning-hmm", "description": "Trains and uses hidden Markov models."},
            trainer_defaults={
                "max_epochs": 100,
                # MPS has no float64, which the parameters are in.
                "accelerator": "cpu" if torch.backends.mps.is_available() else "auto",
                # Lightning's sampler repeats sequences to even out ranks; the datamodules' own visits each exactly once.
                "use_distributed_sampler": False,
                "log_every_n_steps": 1,
                "num_sanity_val_steps": 0,
            },
            args=args,
        )


def run() -> None:
    """`main` for a person at a terminal: what they can mend is said in a line, without a traceback."""
    interruptible = (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )  # a job in the background of a shell is not
    if interruptible:
        signal.signal(signal.SIGINT, _interrupt_once())
    try:
        main()
    except KeyboardInterrupt:  # outside of training, where Lightning handles it and saves
        sys.exit(130)
    except (ArgumentError, MisconfigurationException, OSError, RuntimeError, TypeError, ValueError) as error:
        if os.environ.get("LIGHTNING_HMM_DEBUG"):
            raise
        sys.stderr.write(f"error: {_what_is_wrong(str(error))}\n(LIGHTNING_HMM_DEBUG=1 shows where.)\n")
        sys.exit(1)
    finally:
        if interruptible:  # everything is saved by now: Ctrl-C may end the process at once, without a traceback
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _interrupt_once() -> Callable[[int, Any], None]:
    """A handler of Ctrl-C that interrupts the run the first time. Later signals must not disturb the shutdown and are ignored."""
    interrupted = False

    def handle(signum: int, frame: Any) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    return handle
