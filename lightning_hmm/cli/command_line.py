"""The command line class: links between data and model, options from checkpoints, loggers, and the summary of a run."""

from __future__ import annotations

import os
import shlex
import signal
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_hmm.callbacks import BestCheckpoint, Convergence, Figures, LastCheckpoint, PredictionWriter, Retraining
from lightning_hmm.cli.checkpoint_options import (
    TrainedModel,
    check_family,
    check_model_options,
    data_options,
    read_trained_model,
)
from lightning_hmm.cli.run_files import SharedVersion, default_loggers
from lightning_hmm.columns import Column
from lightning_hmm.runs import claim_version, find_checkpoint, require_local_file, run_folder

# Properties of the data module that are passed to the model.
_LINKED = ("num_symbols", "num_features", "symbol_names", "unknown_symbol", "columns")


class CommandLine(LightningCLI):
    """`LightningCLI` with the callbacks, loggers and checkpoint handling of this package.

    With ``--ckpt_path``, the options of the model are read from the checkpoint.
    """

    _trained_columns: tuple[str, ...] = ()  # Names of the columns of the checkpoint, in order.

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for name in _LINKED:
            compute = self._in_order_of_training if name == "columns" else None
            parser.link_arguments(f"data.{name}", f"model.init_args.{name}", compute_fn=compute, apply_on="instantiate")
        parser.add_lightning_class_args(BestCheckpoint, "checkpoint")
        parser.add_lightning_class_args(LastCheckpoint, "last_checkpoint")
        parser.add_lightning_class_args(Convergence, "convergence")
        parser.add_lightning_class_args(Figures, "figures")
        parser.add_lightning_class_args(PredictionWriter, "predictions")

    def _in_order_of_training(self, columns: list[Column]) -> list[Column]:
        """Returns the columns of the data in the order of the checkpoint, if their names are the same.

        This is the order in which a data module returns columns after loading the checkpoint.
        """
        by_name = {column.name: column for column in columns}
        same = sorted(by_name) == sorted(self._trained_columns)
        return [by_name[name] for name in self._trained_columns] if same else columns

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        super().parse_arguments(parser, args)
        subcommand = self.config.subcommand
        for group in ("trainer", *self._parser(subcommand).callback_keys):
            if not isinstance(given := self.config[subcommand].get(group), Namespace):
                parser.error(
                    f"`{group}` must be a group of options, such as `trainer: {{max_epochs: 50}}`, but is {given!r}."
                )
        if self.config[subcommand].get("ckpt_path") is not None:
            # The options of the command and its configuration files, without the defaults.
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
                    f"`--ckpt_path` is required for `{self.config.subcommand}`: "
                    "without it the model would be untrained."
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
        trained = read_trained_model(checkpoint)
        self._trained_columns = tuple(column["name"] for column in trained.columns)
        self._use_model_options(trained)
        options = self.config[self.config.subcommand].data.init_args
        for name, value in data_options(trained, options).items():
            options[name] = value

    def _use_model_options(self, trained: TrainedModel) -> None:
        """Sets the options of the model to those of the checkpoint, and checks the options that were given."""
        check_family(trained, self._given.class_path)
        class_path = trained.class_path or self._given.class_path
        model = {"class_path": class_path, "dict_kwargs": trained.model_options}
        config = self.parser.parse_object({self.config.subcommand: {"model": model}}, self.config)
        given, taken = self._given.get("init_args") or Namespace(), config[self.config.subcommand].model.init_args
        check_model_options(trained, given, taken, _LINKED)
        self.config = config

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
                    f"`{name}` is set by the data module ({known}); remove `--model.init_args.{name}={value}`, "
                    "or change the options of the data."
                )

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self._get(self.config_init, "trainer")
        if config.get("enable_checkpointing") is False:
            # Lightning raises an error for checkpoint callbacks if checkpointing is disabled.
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
        requeued_before = _num_requeued(self.trainer)
        try:
            super()._run_subcommand(subcommand)
            if self.trainer.received_sigterm:  # The signal arrived after the last check of Lightning's loops.
                raise SIGTERMException
        except SystemExit as stopped:  # Lightning raises it after SIGTERM and after Ctrl-C.
            if self.trainer.interrupted and self.trainer.state.fn == "fit":
                self._print_how_to_resume()
            if isinstance(stopped, SIGTERMException):
                # SLURM restarts a job that Lightning has requeued. Otherwise a process ended by SIGTERM has failed.
                stopped.code = 0 if _num_requeued(self.trainer) > requeued_before else 128 + signal.SIGTERM
            raise

    def _print_how_to_resume(self) -> None:
        last = _saved_by(LastCheckpoint, self.trainer)
        if last:
            _print_lines(
                f"Stopped. The checkpoint of the last completed epoch is {last}",
                "Resume with:",
                f"  {_command('fit', self.trainer, last)}",
            )
        else:
            _print_lines("Stopped before the first epoch was completed; no checkpoint was saved.")

    def after_fit(self) -> None:
        """Tests the best model and prints a summary."""
        retrained = any(isinstance(callback, Retraining) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]
        best = "" if retrained else _saved_by(BestCheckpoint, self.trainer)
        last = _saved_by(LastCheckpoint, self.trainer)
        logs, epochs = run_folder(self.trainer), self.trainer.current_epoch
        if self.trainer.received_sigterm:  # The signal arrived after the last check of Lightning's loops.
            raise SIGTERMException
        metrics: dict[str, float] = {}
        if _has_test_data(self.datamodule):
            tested = self.trainer.test(self.model, datamodule=self.datamodule, ckpt_path=best or None, verbose=False)
            metrics = dict(tested[0]) if tested else {}
        width = max(map(len, metrics), default=0)
        lines = ["", f"Trained {type(self.model).__name__} for {epochs} epoch{'s' if epochs != 1 else ''}."]
        lines += [f"  {name:<{width}}  {value:.6f}" for name, value in sorted(metrics.items())]
        if best:
            lines.append(f"Best checkpoint:  {best}")
        elif last:
            reason = "retrained on training and validation data" if retrained else "no validation data to select by"
            lines.append(f"Last checkpoint:  {last} ({reason})")
        if self.trainer.loggers:
            lines.append(f"Logs:             {logs}")
        if any(isinstance(logger, TensorBoardLogger) for logger in self.trainer.loggers):
            lines.append(f"View the logs:    {shlex.join(['tensorboard', '--logdir', str(logs)])}")
        if best or last:
            lines.append(f"Predict:          {_command('predict', self.trainer, best or last)}")
        _print_lines(*lines)


def _saved_by(kind: type[ModelCheckpoint], trainer: Trainer) -> str:
    """Returns the path of the checkpoint saved by the callback of this type, or an empty string."""
    paths = [callback.best_model_path for callback in trainer.checkpoint_callbacks if isinstance(callback, kind)]
    return paths[0] if paths else ""


def _has_test_data(datamodule: LightningDataModule) -> bool:
    return len(getattr(datamodule, "test_sequences", ())) > 0


def _command(subcommand: str, trainer: Trainer, checkpoint: str) -> str:
    config = str(run_folder(trainer) / "config.yaml")
    return shlex.join(["python", "-m", "lightning_hmm", subcommand, "--config", config, "--ckpt_path", checkpoint])


def _num_requeued(trainer: Trainer) -> int:
    """Returns the number of checkpoints that Lightning has saved before requeueing a job with SLURM."""
    return len(list(Path(trainer.default_root_dir).glob("hpc_ckpt_*.ckpt")))


@rank_zero_only
def _print_lines(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)
