"""The common frame of all experiments: command line, records, tables and figures.

An experiment declares its options and settings, a list of cases, a function that computes the record of one case, a
table and a figure. `run` does the rest. Each record is written as soon as it is computed, so an experiment can be
stopped at any time and continues where it stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from experiments.records import Records

RESULTS = Path("logs/experiments")
# Options of a `Trainer` that runs on one CPU and writes and prints nothing.
QUIET_TRAINER: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "use_distributed_sampler": False,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
Case = dict[str, Any]


class Option:
    """An option of the command line. Takes the arguments of `argparse.ArgumentParser.add_argument`."""

    def __init__(self, *names: str, **arguments: Any) -> None:
        self.names, self.arguments = names, arguments


class Run(argparse.Namespace):
    """One run of an experiment: its options and settings as attributes, its folder and its records.

    Attributes:
        out: Folder for records, tables and figures.
        quick: Whether this is a short run that only shows that the experiment works.
        records: The records so far.
    """

    out: Path
    quick: bool
    records: Records

    # Runs are compared by identity, so that functions of a run can be cached.
    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]

    def save(self, figures: Figure | Mapping[str, Figure], name: str = "figure") -> list[str]:
        """Writes a figure, or several by their names, as PNG files and returns the file names."""
        named = {name: figures} if isinstance(figures, Figure) else figures
        for stem, figure in named.items():
            figure.savefig(self.out / f"{stem}.png", dpi=150)
        return [f"{stem}.png" for stem in named]


@dataclass(frozen=True)
class Experiment:
    """An experiment for `run`.

    Attributes:
        folder: Folder below logs/experiments for the results, or a function of the run that returns it.
        description: Docstring of the experiment. The first line is shown by ``--help``.
        cases: Returns the settings that identify each record, in the order in which the records are computed. The cases
            may depend on records that were computed before.
        compute: Returns the results for one case. They are stored in a record together with the case.
        table: Returns a Markdown table, or several by the names of their files.
        figure: Returns a figure, or several by the names of their files; ``None`` if the cases save their own figures.
        options: Options of the command line in addition to ``--out`` and ``--quick``.
        settings: Attributes of the run that are not options.
        quick: Values of options and settings that ``--quick`` replaces.
        quick_help: Describes ``--quick`` for ``--help``.
    """

    folder: str | Callable[[Run], str]
    description: str
    cases: Callable[[Run], Iterable[Case]]
    compute: Callable[[Run, Case], Mapping[str, Any]]
    table: Callable[[Run], str | Mapping[str, str]]
    figure: Callable[[Run], Figure | Mapping[str, Figure]] | None
    options: Sequence[Option] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    quick: Mapping[str, Any] = field(default_factory=dict)
    quick_help: str = "few cases, little data and short training, to see that the experiment works"


def run(experiment: Experiment, arguments: Sequence[str] | None = None) -> None:
    """Computes the records that are missing, then writes and prints the tables and writes the figures.

    Args:
        experiment: The experiment.
        arguments: Arguments of the command line. Those of the current process are used if ``None``.
    """
    settings = parse(experiment, arguments)
    torch.set_num_threads(1)
    for case in experiment.cases(settings):
        if not settings.records.has(**case):
            found = experiment.compute(settings, case)
            settings.records.add(**case, **found)
            print(f"{_line(case)}: {_line(found)}", flush=True)
    tables = experiment.table(settings)
    named = {"table": tables} if isinstance(tables, str) else tables
    for stem, table in named.items():
        (settings.out / f"{stem}.md").write_text(table)
        print(*([stem] if len(named) > 1 else []), table, sep="\n\n")
    files = [f"{stem}.md" for stem in named]
    if experiment.figure is not None:
        files += settings.save(experiment.figure(settings))
    print(f"Written to {settings.out}: {', '.join([*files, settings.records.path.name])}.")


def parse(experiment: Experiment, arguments: Sequence[str] | None) -> Run:
    """Reads the command line and the records."""
    parser = argparse.ArgumentParser(description=experiment.description.splitlines()[0])
    for option in experiment.options:
        parser.add_argument(*option.names, **option.arguments)
    default = experiment.folder if isinstance(experiment.folder, str) else "<model>/<variant>"
    where = f"folder for the results ({RESULTS / default} if not given, {RESULTS / 'quick'} instead with --quick)"
    parser.add_argument("--out", type=Path, help=where)
    parser.add_argument("--quick", action="store_true", help=experiment.quick_help)
    settings = parser.parse_args(arguments, Run(**experiment.settings))
    if settings.quick:
        vars(settings).update(experiment.quick)
    if settings.out is None:
        folder = experiment.folder if isinstance(experiment.folder, str) else experiment.folder(settings)
        settings.out = RESULTS / "quick" / folder if settings.quick else RESULTS / folder
    settings.records = Records(settings.out / "records.jsonl")
    return settings


def _line(values: Mapping[str, Any]) -> str:
    """Names and values on one line, without those that are missing or too long for it."""
    plain = {name: f"{value:.5g}" if isinstance(value, float) else str(value) for name, value in values.items()}
    return ", ".join(f"{name} {text}" for name, text in plain.items() if values[name] is not None and len(text) <= 40)
