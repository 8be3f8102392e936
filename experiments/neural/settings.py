"""Figures 1a, 1c, 1d and 2: what depth, particles and the share of the data in an E-step do to a neural HMM on moving targets.

``python -m experiments.neural.settings`` (``--only depth``, ``particles`` or ``share`` for one of them)

Depth (1a): networks of 1 to 4 layers; with a continuous state on positions alone, as the paper prints eq. 1, and with the last
observations at hand, and with 5 discrete states. Depth 0 is the linear-Gaussian model on positions and on increments, and the Gaussian
HMM, each by exact EM. Particles (1c): 8 to 512. Share (1d): 100 E-steps on a random part of the
trajectories, with and without 5 more on all of them. Errors of prediction and log-likelihoods a step on test data, over environments that
Table 1 has too. Figure 2 shows some of the data.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from datamodules import MovingTargetDataModule
from experiments.neural.moving import SIZES, make_data
from experiments.neural.training import mean_and_spread, prediction_error, timed_fit
from experiments.records import Records, markdown_table
from lightning_hmm.models import LinearGaussianHMM, NeuralDiscreteHMM, NeuralHMM, StandardHMM
from lightning_hmm.plots import COLOURS
from lightning_hmm.sequences import Sequences

ENVIRONMENTS = 3
LATENT, STATES = 5, 5
EPOCHS = {"depth": 40, "particles": 40, "share": 100, "exact EM": 40}
# As in Table 1, but with more particles.
NEURAL: dict[str, Any] = {"transition_order": 2, "num_particles": 32, "num_paths": 2, "m_steps": 8, "learning_rate": 1e-2}
FINE_TUNING = 5
PLAIN = {"emission_order": 0, "transition_order": 0, "emission_mean": "absolute"}  # eq. 1 to the letter
FEATURES = {"depth": 2, "particles": 2, "share": 3}
VALUES: dict[str, tuple[float, ...]] = {"depth": (0, 1, 2, 3, 4), "particles": (8, 32, 128, 512), "share": (0.05, 0.2, 0.5, 1.0)}
VARIANTS = {"depth": ("order 0", "order (1, 2)", "discrete"), "particles": ("order (1, 2)",), "share": ("alone", "fine-tuned")}
MEASURES = {"error": "error", "log_likelihood": "log-likelihood", "seconds": "seconds"}
TITLES = {"depth": "layers of the networks", "particles": "particles", "share": "share of the trajectories in an E-step"}


def make_model(kind: str, variant: str, value: float, data: MovingTargetDataModule) -> tuple[Any, int, int | None]:
    """A model with one setting changed, the epochs to train it for, and trajectories in a batch."""
    num_features, seed = data.num_features, data.seed
    if kind == "depth" and value == 0:
        if variant == "discrete":
            return StandardHMM(STATES, emission="gaussian", num_features=num_features, seed=seed), EPOCHS["exact EM"], None
        return LinearGaussianHMM(LATENT, num_features, target="positions" if variant == "order 0" else "increments", seed=seed), EPOCHS["exact EM"], None
    if variant == "discrete":
        return NeuralDiscreteHMM(STATES, num_features, num_layers=int(value), m_steps=8, learning_rate=1e-2, seed=seed), EPOCHS[kind], 50
    options, more = dict(NEURAL), FINE_TUNING if variant == "fine-tuned" else 0
    if kind == "depth":
        options |= {"num_layers": int(value), **(PLAIN if variant == "order 0" else {})}
    elif kind == "particles":
        options["num_particles"] = int(value)
    else:
        options |= {"e_step_fraction": value, "fine_tuning_epochs": more, "m_steps": 4}
    return NeuralHMM(LATENT, num_features, seed=seed, **options), EPOCHS[kind] + more, None if kind == "share" else 50


def measure(kind: str, variant: str, value: float, data: MovingTargetDataModule) -> dict[str, float]:
    """Trains a model and gives its error and its log-likelihood per step on test data."""
    model, epochs, batch_size = make_model(kind, variant, value, data)
    seconds = timed_fit(model, data, epochs, batch_size)
    test = data.test_sequences
    predictions = of_prefixes(model, test) if isinstance(model, StandardHMM) else model.predict_each(test)
    return {"error": prediction_error(predictions, test), "log_likelihood": float(model.score(test).sum()) / test.num_steps, "seconds": seconds}


def of_prefixes(model: StandardHMM, sequences: Sequences) -> Tensor:
    """(steps, D) what is expected at each step from those before it; the first of a sequence, which does not count, from itself."""
    prefixes = Sequences.from_list([sequence[: max(1, length)] for sequence in sequences for length in range(len(sequence))])
    mean: Tensor = model.predict_next(prefixes).mean
    return mean


def settings(kinds: list[str]) -> Iterator[tuple[str, str, float]]:
    return ((kind, variant, value) for kind in kinds for value in VALUES[kind] for variant in VARIANTS[kind])


def figure(records: Records, kinds: list[str]) -> Figure:
    """Figures 1a, 1c and 1d: errors above, log-likelihoods below."""
    plot = Figure(figsize=(4.2 * len(kinds), 6), layout="constrained")
    for column, kind in zip(plot.subplots(2, len(kinds), squeeze=False).T, kinds, strict=True):
        for axes, (what, label) in zip(column, [("error", "prediction error"), ("log_likelihood", "log-likelihood a step")], strict=True):
            for number, variant in enumerate(VARIANTS[kind]):
                found = [[record[what] for record in records.where(kind=kind, variant=variant, value=value)] for value in VALUES[kind]]
                places = [place for place, runs in enumerate(found) if runs]
                means, spreads = [np.mean(found[place]) for place in places], [np.std(found[place]) for place in places]
                axes.errorbar(places, means, spreads, marker="o", markersize=4, capsize=2, color=COLOURS[number], label=variant)
            axes.set_xticks(range(len(VALUES[kind])), [f"{value:g}" for value in VALUES[kind]])
            axes.set(xlabel=TITLES[kind], ylabel=label)
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(axis="y", color="#E5E5E5", linewidth=0.6)
        column[0].legend(frameon=False, fontsize="small")
    return plot


def figure_data(data: MovingTargetDataModule, count: int = 3) -> Figure:
    """Figure 2: some trajectories among the targets, and when each headed for which."""
    plot = Figure(figsize=(10, 4), layout="constrained")
    left, right = plot.subplots(1, 2, width_ratios=[1, 1.3])
    states = data.true_states("test")
    assert states is not None
    for number, trajectory in zip(range(count), data.test_sequences, strict=False):
        left.plot(*trajectory.T, "-o", markersize=2, linewidth=0.7, alpha=0.8, color=COLOURS[number])
        right.step(range(len(states[number])), states[number] + 1 + 0.12 * number, where="post", linewidth=1, color=COLOURS[number])
    left.plot(*data.targets.T, "*", markersize=13, color="#333333")
    for number, (x, y) in enumerate(data.targets.tolist()):
        left.annotate(str(number + 1), (x, y), xytext=(6, 6), textcoords="offset points")
    left.set(title="Trajectories and targets", aspect="equal")
    right.set(title="Target of each step", xlabel="step", ylabel="target", yticks=range(1, len(data.targets) + 1))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return plot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(VALUES), default=list(VALUES))
    parser.add_argument("--environments", type=int, nargs="+", default=list(range(ENVIRONMENTS)), help="seeds; settings were chosen on 100 and above")
    parser.add_argument("--out", type=Path, default=Path("logs/experiments/neural/settings"))
    parser.add_argument("--quick", action="store_true", help="one small environment, few settings and steps of training")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.quick:
        args.environments = [0]
        SIZES.update(num_sequences=20, length=15)
        EPOCHS.update(dict.fromkeys(EPOCHS, 1))
        VALUES.update(depth=(0, 2), particles=(8,), share=(0.5,))
    records = Records(args.out / "records.jsonl")
    for environment in args.environments:
        for kind, variant, value in settings(args.only):
            if not records.has(kind=kind, variant=variant, value=value, environment=environment):
                data = make_data(FEATURES[kind], environment)
                records.add(kind=kind, variant=variant, value=value, environment=environment, **measure(kind, variant, value, data))
        print(f"environment {environment}: done", flush=True)
    for kind in args.only:
        rows = []
        for value in VALUES[kind]:
            runs = [records.where(kind=kind, variant=variant, value=value) for variant in VARIANTS[kind]]
            rows.append(
                [f"{value:g}", *(mean_and_spread([record[what] for record in found]) for found in runs for what in ("error", "log_likelihood", "seconds"))]
            )
        header = [TITLES[kind], *(f"{variant}: {what}" for variant in VARIANTS[kind] for what in MEASURES.values())]
        table = markdown_table(header, rows)
        (args.out / f"{kind}.md").write_text(table)
        print(table)
    figure(records, args.only).savefig(args.out / "figure.png", dpi=150)
    figure_data(make_data(2, args.environments[0])).savefig(args.out / "data.png", dpi=150)
    print(f"Written to {args.out}: a table for each setting, figure.png, data.png, records.jsonl.")


if __name__ == "__main__":
    main()
