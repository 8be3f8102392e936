"""The command line: ``python -m lightning_hmm {fit,validate,test,predict} --config configs/<model>/<data>.yaml``.

It is Lightning's command line with defaults for EM. The sizes of the data are passed on to the model, loggers write to
``logs/<model>/<data>/version_N``, and `fit` prints a summary at the end.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from jsonargparse import ArgumentError
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import ArgsType
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_hmm.cli.command_line import CommandLine
from lightning_hmm.cli.parser import Parser, relevant_lines
from lightning_hmm.cli.run_files import RunConfig
from lightning_hmm.models import SequenceModel
from lightning_hmm.training import quiet_lightning

__all__ = ["CommandLine", "main", "run"]


def main(args: ArgsType = None) -> CommandLine:
    """Runs a command and returns the command line with its model, data module and Trainer.

    Args:
        args: The arguments as a list, or as a dictionary of options. The default is the arguments of the process.
    """
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
            parser_kwargs={"prog": "lightning-hmm", "description": "Train and use hidden Markov models."},
            trainer_defaults={
                "max_epochs": 100,
                # MPS does not support float64, the type of the parameters.
                "accelerator": "cpu" if torch.backends.mps.is_available() else "auto",
                # Lightning's sampler repeats sequences, so that all ranks have the same number. The sampler of the
                # data modules visits each sequence exactly once.
                "use_distributed_sampler": False,
                "log_every_n_steps": 1,
                "num_sanity_val_steps": 0,
            },
            args=args,
        )


def run() -> None:
    """Runs the command of the process. Errors of the user are reported in one line, without a traceback."""
    # A background job of a shell ignores SIGINT, and must continue to do so.
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, _interrupt_once())
    try:
        main()
    except KeyboardInterrupt:  # During training, Lightning handles the interrupt and saves a checkpoint.
        sys.exit(130)
    except (ArgumentError, MisconfigurationException, OSError, RuntimeError, TypeError, ValueError) as error:
        if os.environ.get("LIGHTNING_HMM_DEBUG"):
            raise
        sys.stderr.write(f"error: {relevant_lines(str(error))}\n(Set LIGHTNING_HMM_DEBUG=1 to see the traceback.)\n")
        sys.exit(1)
    finally:
        if interruptible:  # Everything is saved by now, so Ctrl-C may end the process at once, without a traceback.
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def _interrupt_once() -> Callable[[int, Any], None]:
    """Returns a handler of Ctrl-C that interrupts the run once. Later signals are ignored, while the run shuts down."""
    interrupted = False

    def handle(signum: int, frame: Any) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise KeyboardInterrupt

    return handle
