"""Figures 1a, 1c, 1d and 2: effects of depth, particles and the share of the data in an E-step on a neural HMM.

``python -m experiments.neural.settings`` (``--only depth``, ``particles`` or ``share`` for one of them)

Depth (1a): networks of 1 to 4 layers, with a continuous state on positions alone, as in eq. 1 of the paper, with a
continuous state and the last observations as inputs, and with 5 discrete states. Depth 0 is the linear-Gaussian model
of positions and of increments, and the Gaussian HMM, each by exact EM. Particles (1c): 8 to 512. Share (1d): 100
E-steps on a random part of the trajectories, with and without 5 more on all of them. The results are prediction errors
and log-likelihoods per step on test data of environments that are also in Table 1. Figure 2 shows some of the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from datamodules import MovingTargetDataModule
from experiments.measures import mean_and_spread
from experiments.neural.moving import SEEDS_HELP, SIZES, make_data
from experiments.neural.training import prediction_error, timed_fit
from experiments.panels import legend, panels
from experiments.records import markdown_table
from experiments.run import Case, Experiment, Option, Run, run
from lightning_hmm.models import LinearGaussianHMM, NeuralDiscreteHMM, NeuralHMM, StandardHMM
from lightning_hmm.plotting import COLORS
from lightning_hmm.sequences import Sequences

LATENT, STATES = 5, 5
# As in Table 1, but with more particles.
NEURAL: dict[str, Any] = {
    "transition_order": 2,
    "num_particles": 32,
    "num_paths": 2,
    "m_steps": 8,
    "learning_rate": 1e-2,
}
FINE_TUNING = 5
PLAIN = {"emission_order": 0, "transition_order": 0, "emission_mean": "absolute"}  # eq. 1 as it is printed
FEATURES = {"depth": 2, "particles": 2, "share": 3}
VARIANTS = {
    "depth": ("order 0", "order (1, 2)", "discrete"),
    "particles": ("order (1, 2)",),
    "share": ("alone", "fine-tuned"),
}
MEASURES = {"error": "error", "log_likelihood": "log-likelihood", "seconds": "seconds"}
TITLES = {
    "depth": "layers of the networks",
    "particles": "particles",
    "share": "share of the trajectories in an E-step",
}


def exact_model(variant: str, num_features: int | None, seed: int) -> Any:
    """Returns the model of depth 0."""
    if variant == "discrete":
        return StandardHMM(STATES, emission="gaussian", num_features=num_features, seed=seed)
    target: Any = "positions" if variant == "order 0" else "increments"
    return LinearGaussianHMM(LATENT, num_features, target=target, seed=seed)


def make_model(
    run: Run, kind: str, variant: str, value: float, data: MovingTargetDataModule
) -> tuple[Any, int, int | None]:
    """Returns a model with one setting changed, its number of epochs, and the trajectories in a batch."""
    num_features, seed = data.num_features, data.seed
    if kind == "depth" and value == 0:
        return exact_model(variant, num_features, seed), run.epochs["exact EM"], None
    if variant == "discrete":
        options: dict[str, Any] = {"num_layers": int(value), "m_steps": 8, "learning_rate": 1e-2}
        return NeuralDiscreteHMM(STATES, num_features, seed=seed, **options), run.epochs[kind], 50
    options, more = dict(NEURAL), FINE_TUNING if variant == "fine-tuned" else 0
    if kind == "depth":
        options |= {"num_layers": int(value), **(PLAIN if variant == "order 0" else {})}
    elif kind == "particles":
        options["num_particles"] = int(value)
    else:
        options |= {"e_step_fraction": value, "fine_tuning_epochs": more, "m_steps": 4}
    model = NeuralHMM(LATENT, num_features, seed=seed, **options)
    return model, run.epochs[kind] + more, None if kind == "share" else 50


def of_prefixes(model: StandardHMM, sequences: Sequences) -> Tensor:
    """Returns (steps, D) one-step predictions. That of the first step of a sequence does not count."""
    prefixes = [sequence[: max(1, length)] for sequence in sequences for length in range(len(sequence))]
    mean: Tensor = model.predict_next(Sequences.from_list(prefixes)).mean
    return mean


def cases(run: Run) -> Iterator[Case]:
    for environment in run.environments:
        for kind in run.only:
            for value in run.values[kind]:
                for variant in VARIANTS[kind]:
                    yield {"kind": kind, "variant": variant, "value": value, "environment": environment}


def compute(run: Run, case: Case) -> dict[str, float]:
    """Trains a model; returns its error and its log-likelihood per step on test data."""
    data = make_data(run, FEATURES[case["kind"]], case["environment"])
    model, epochs, batch_size = make_model(run, case["kind"], case["variant"], case["value"], data)
    seconds = timed_fit(model, data, epochs, batch_size)
    test = data.test_sequences
    predictions = of_prefixes(model, test) if isinstance(model, StandardHMM) else model.predict_each(test)
    log_likelihood = float(model.score(test).sum()) / test.num_steps
    return {"error": prediction_error(predictions, test), "log_likelihood": log_likelihood, "seconds": seconds}


def cell(what: str, numbers: list[float]) -> str:
    return f"{np.mean(numbers):.0f}" if what == "seconds" else mean_and_spread(numbers)


def table(run: Run) -> dict[str, str]:
    made = {}
    for kind in run.only:
        measures = [what for what in MEASURES if what != "seconds" or kind != "depth"]
        columns = [(variant, what) for variant in VARIANTS[kind] for what in measures]
        rows = []
        for value in run.values[kind]:
            settings = {"kind": kind, "value": value}
            cells = [cell(what, run.records.values(what, variant=variant, **settings)) for variant, what in columns]
            rows.append([f"{value:g}", *cells])
        header = [TITLES[kind], *(f"{variant}: {MEASURES[what]}" for variant, what in columns)]
        made[kind] = markdown_table(header, rows)
    return made


def figure_results(run: Run) -> Figure:
    """Figures 1a, 1c and 1d: errors above, log-likelihoods below."""
    plot, all_axes = panels(4.2 * len(run.only), 6, 2, len(run.only), grid="y")
    labels = {"error": "prediction error", "log_likelihood": "log-likelihood per step"}
    for column, kind in zip(all_axes.T, run.only, strict=True):
        values = run.values[kind]
        for axes, (what, label) in zip(column, labels.items(), strict=True):
            for number, variant in enumerate(VARIANTS[kind]):
                found = [run.records.values(what, kind=kind, variant=variant, value=value) for value in values]
                places = [place for place, runs in enumerate(found) if runs]
                means, spreads = ([function(found[place]) for place in places] for function in (np.mean, np.std))
                style: dict[str, Any] = {"marker": "o", "markersize": 4, "capsize": 2, "color": COLORS[number]}
                axes.errorbar(places, means, spreads, label=variant, **style)
            axes.set_xticks(range(len(values)), [f"{value:g}" for value in values])
            axes.set(xlabel=TITLES[kind], ylabel=label)
        legend(column[0])
    return plot


def figure_data(data: MovingTargetDataModule, count: int = 3) -> Figure:
    """Figure 2: some trajectories and the targets, and the target of each step."""
    plot, ((left, right),) = panels(10, 4, 1, 2, width_ratios=[1, 1.3])
    states = data.true_states("test")
    assert states is not None
    for number, trajectory in zip(range(count), data.test_sequences, strict=False):
        left.plot(*trajectory.T, "-o", markersize=2, linewidth=0.7, alpha=0.8, color=COLORS[number])
        heights = states[number] + 1 + 0.12 * number
        right.step(range(len(heights)), heights, where="post", linewidth=1, color=COLORS[number])
    left.plot(*data.targets.T, "*", markersize=13, color="#333333")
    for number, (x, y) in enumerate(data.targets.tolist()):
        left.annotate(str(number + 1), (x, y), xytext=(6, 6), textcoords="offset points")
    left.set(title="Trajectories and targets", aspect="equal")
    right.set(title="Target of each step", xlabel="step", ylabel="target", yticks=range(1, len(data.targets) + 1))
    return plot


def figure(run: Run) -> dict[str, Figure]:
    return {"figure": figure_results(run), "data": figure_data(make_data(run, 2, run.environments[0]))}


VALUES = {"depth": (0, 1, 2, 3, 4), "particles": (8, 32, 128, 512), "share": (0.05, 0.2, 0.5, 1.0)}
EPOCHS = {"depth": 40, "particles": 40, "share": 100, "exact EM": 40}
EXPERIMENT = Experiment(
    folder="neural/settings",
    description=__doc__,
    cases=cases,
    compute=compute,
    table=table,
    figure=figure,
    options=[
        Option(
            "--only", nargs="+", choices=list(VALUES), default=list(VALUES), help="settings to vary (all if not given)"
        ),
        Option("--environments", type=int, nargs="+", default=list(range(3)), help=SEEDS_HELP),
    ],
    settings={"sizes": SIZES, "epochs": EPOCHS, "values": VALUES},
    quick={
        "environments": [0],
        "sizes": {**SIZES, "num_sequences": 20, "length": 15},
        "epochs": dict.fromkeys(EPOCHS, 1),
        "values": {"depth": (0, 2), "particles": (8,), "share": (0.5,)},
    },
    quick_help="one small environment, few settings and steps of training",
)

if __name__ == "__main__":
    run(EXPERIMENT)
