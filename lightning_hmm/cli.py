"""The command line: ``python -m lightning_hmm {fit,validate,test,predict} --config configs/<model>/<data>.yaml``.

`LightningCLI` with the defaults that EM needs, the sizes of the data handed to the model, loggers under
``logs/<model>/<data>/version_N``, and a summary at the end.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from jsonargparse import ArgumentError
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_hmm.callbacks import Convergence, Figures, PredictionWriter
from lightning_hmm.models import HMM
from lightning_hmm.training import quiet_lightning


class BestCheckpoint(ModelCheckpoint):
    """Keeps the best epoch on validation data, or the last one where there are none, and always ``last.ckpt`` beside it."""

    def __init__(self, monitor: str = "val/bits_per_symbol", mode: str = "min", save_top_k: int = 1, every_n_epochs: int = 1) -> None:
        super().__init__(monitor=monitor, mode=mode, save_top_k=save_top_k, every_n_epochs=every_n_epochs, save_last=True, save_on_train_epoch_end=True)

        self._earlier: dict[str, Any] | None = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict.get("dirpath") == self.dirpath:
            super().load_state_dict(state_dict)
        else:
            self._earlier = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.enable_validation:
            self.monitor = None
        if self._earlier is not None and self._earlier["monitor"] == self.monitor and Path(self._earlier["best_model_path"]).is_file():
            self._take_over(trainer, Path(self._earlier["best_model_path"]), self._earlier["best_model_score"])
        super().on_train_start(trainer, pl_module)

    def _take_over(self, trainer: Trainer, best: Path, score: Any) -> None:
        """A resumed run logs to a folder of its own. The best epoch so far comes along, as a copy: the old folder stays as it is."""
        assert self.dirpath is not None
        copy = str(Path(self.dirpath) / best.name)
        if trainer.is_global_zero:
            Path(self.dirpath).mkdir(parents=True, exist_ok=True)
            shutil.copy2(best, copy)
        trainer.strategy.barrier()
        self.best_model_path = self.kth_best_model_path = copy
        self.best_model_score, self.kth_value = score, score
        self.best_k_models = {copy: score}


class ResumeHint(Callback):
    """After Ctrl-C: where the last finished epoch is, and the command that goes on from it."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not isinstance(exception, KeyboardInterrupt) or trainer.state.fn != "fit":
            return
        last = getattr(trainer.checkpoint_callback, "last_model_path", "")
        if last:
            _say(f"Stopped. The last finished epoch is in {last}", "Go on with:", f"  {_command('fit', trainer.log_dir)} --ckpt_path {last}")
        else:
            _say("Stopped before the first epoch was finished; nothing was saved.")


class Parser(LightningArgumentParser):
    """Says what is wrong in one line, not under a page of usage."""

    def error(self, message: str, ex: Exception | None = None) -> Any:
        if self.exit_on_error and not os.environ.get("JSONARGPARSE_DEBUG"):
            sys.stderr.write(f"error: {message}\n(`python -m lightning_hmm fit --help` lists the options; `--model.help StandardHMM` those of a model.)\n")
            self.exit(2)
        return super().error(message, ex)


class CommandLine(LightningCLI):
    """See the module's docstring."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for name in ("num_symbols", "num_features", "symbol_names", "unknown_symbol"):
            parser.link_arguments(f"data.{name}", f"model.init_args.{name}", apply_on="instantiate")
        parser.add_lightning_class_args(BestCheckpoint, "checkpoint")
        parser.add_lightning_class_args(Convergence, "convergence")
        parser.add_lightning_class_args(Figures, "figures")
        parser.add_lightning_class_args(PredictionWriter, "predictions")

    def _parse_ckpt_path(self) -> None:
        try:
            super()._parse_ckpt_path()
        except (OSError, RuntimeError, EOFError, ValueError, KeyError, UnpicklingError) as error:
            path = self.config[self.config.subcommand].get("ckpt_path")
            raise ValueError(f"`--ckpt_path` must be a checkpoint, but {path} cannot be read as one: {error}") from error

    def before_instantiate_classes(self) -> None:
        path = self._get(self.config, "ckpt_path")
        if path and path not in ("best", "last", "hpc", "registry") and not Path(path).is_file():
            raise FileNotFoundError(f"`--ckpt_path` must be a checkpoint, but there is no file {path}.")

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        config = self._get(self.config_init, "trainer")
        if config.get("logger") is None and not config.get("fast_dev_run"):
            kwargs["logger"] = self._loggers(config.get("default_root_dir") or "logs")
        return super().instantiate_trainer(**kwargs)

    def _loggers(self, folder: str) -> list[Any]:
        model = type(self.model).__name__.removesuffix("HMM").lower()
        data = type(self.datamodule).__module__.rpartition(".")[2]
        board = TensorBoardLogger(folder, name=f"{model}/{data}", default_hp_metric=False)
        return [board, CSVLogger(folder, name=f"{model}/{data}", version=board.version)]

    def after_fit(self) -> None:
        """Tests the best model, and says where everything is."""
        best = getattr(self.trainer.checkpoint_callback, "best_model_path", "")
        logs = self.trainer.log_dir
        metrics = self.trainer.test(self.model, datamodule=self.datamodule, ckpt_path=best or None, verbose=False)[0] if _has_test_data(self.datamodule) else {}
        epochs = self.trainer.current_epoch
        _say(
            "",
            f"Trained {type(self.model).__name__} for {epochs} epoch{'s' if epochs != 1 else ''}.",
            *[f"  {name:<28} {value:.6f}" for name, value in sorted(metrics.items())],
            *([f"Best checkpoint:  {best}"] if best else []),
            *([f"Logs:             {logs}", f"Look at them:     tensorboard --logdir {logs}"] if logs else []),
            *([f"Decode with it:   {_command('predict', logs)} --ckpt_path {best}"] if best else []),
        )


def _has_test_data(datamodule: LightningDataModule) -> bool:
    return len(getattr(datamodule, "test_sequences", ())) > 0


def _command(subcommand: str, logs: str | None) -> str:
    return f"python -m lightning_hmm {subcommand} --config {Path(logs or '.') / 'config.yaml'}"


@rank_zero_only
def _say(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)


def main(args: ArgsType = None) -> CommandLine:
    """Runs a command line given as a list, or that of the process; returns what was built."""
    with quiet_lightning():
        return CommandLine(
            HMM,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,
            seed_everything_default=0,
            save_config_kwargs={"overwrite": True},
            parser_class=Parser,
            trainer_defaults={
                "max_epochs": 100,
                # MPS has no float64, which the parameters are in.
                "accelerator": "cpu" if torch.backends.mps.is_available() else "auto",
                # Lightning's sampler repeats sequences to even out ranks; the datamodules' own visits each exactly once.
                "use_distributed_sampler": False,
                "log_every_n_steps": 1,
                "num_sanity_val_steps": 0,
                "callbacks": [ResumeHint()],
            },
            args=args,
        )


def run() -> None:
    """`main` for a person at a terminal: what they can mend is said in a line, without a traceback."""
    try:
        main()
    except (ArgumentError, FileNotFoundError, MisconfigurationException, ValueError) as error:
        if os.environ.get("LIGHTNING_HMM_DEBUG"):
            raise
        sys.stderr.write(f"error: {error}\n(LIGHTNING_HMM_DEBUG=1 shows where.)\n")
        sys.exit(1)
