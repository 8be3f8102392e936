"""Our numbers next to those that other packages publish, or compute on the same data.

``python -m experiments.families.agreement``

The earthquakes and the toy examples are part of this file. The other series are read from the folder `published` of
`LIGHTNING_HMM_DATA` (fedfunds.csv, rgnp.csv, dax.csv, biofam.csv). If the variable is not set, only the rows that do
not need them are computed. hmmlearn, scikit-learn and scipy are run here. The numbers of the other packages are
constants: published ones, or those that the named version computed for the parameters in this file.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.figure import Figure

from experiments.families import peers
from experiments.families.peers import likelihood, trained
from experiments.records import markdown_table
from experiments.run import Case, Experiment, Run, run
from lightning_hmm import HMM, Autoregressive, Categorical, Column, Gaussian, Poisson, Product, Sequences, inference
from lightning_hmm.plotting.style import new_figure, set_title

# Numbers of earthquakes of magnitude 7 and above in the world, 1900 to 2006.
EARTHQUAKES = [
    13, 14, 8, 10, 16, 26, 32, 27, 18, 32, 36, 24, 22, 23, 22, 18, 25, 21, 21, 14, 8, 11, 14, 23, 18, 17, 19,
    20, 22, 19, 13, 26, 13, 14, 22, 24, 21, 22, 26, 21, 23, 24, 27, 41, 31, 27, 35, 26, 28, 36, 39, 21, 17, 22,
    17, 19, 15, 34, 10, 15, 22, 18, 15, 20, 15, 22, 19, 16, 30, 27, 29, 23, 20, 16, 21, 21, 25, 16, 18, 15, 18,
    14, 10, 15, 8, 15, 6, 11, 8, 7, 18, 16, 13, 12, 13, 20, 15, 16, 12, 18, 15, 16, 13, 15, 16, 11, 11,
]  # fmt: skip
# Decoded states of the earthquakes with rates 10, 20 and 25.
PATHS = {
    "viterbi": (
        "11111333333333333331111222222222222222333333333333322222222222222222333322222222211111111111111222222222211"
    ),
    "posterior": (
        "11111333333333322221111222222222222223333333333333332222231222222222333322222222211111111122111222222222111"
    ),
}
BIOFAM: dict[str, Any] = {
    "initial": [0.9859987123130433, 0.014001287686956724, 0, 0, 0],
    "transition": [
        [0.885978179176277, 0.05452918544864064, 0.03344544610543017, 0.012250240038178222, 0.013796949231473976],
        [0, 0.8898396295854953, 0.08360079914075502, 0.026559571273749673, 0],
        [0, 0, 0.8071107744625067, 0.1928892255374934, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1],
    ],
    "marriage": [
        [1, 0, 0],
        [1, 0, 0],
        [0, 0.9493250032300232, 0.05067499676997677],
        [0.032783051959769646, 0.9497454879472802, 0.017471460092950176],
        [1.9750917612791342e-06, 0.9610636463448166, 0.03893437856342219],
    ],
    "parenthood": [[0.9988182995961993, 0.0011817004038007718], [1, 0], [1, 0], [0, 1], [1, 0]],
    "residence": [
        [1, 0],
        [0, 1],
        [0.010539589163157852, 0.9894604108368421],
        [0, 1],
        [0.9986537020219073, 0.0013462979780926676],
    ],
}

FOLDER = Path(os.environ["LIGHTNING_HMM_DATA"]) / "published" if "LIGHTNING_HMM_DATA" in os.environ else None
Numbers = Callable[[], Any]


@dataclass(frozen=True)
class Comparison:
    """One row of the table.

    Attributes:
        package: Who published or computes the number.
        model: The data and the model.
        quantity: What is compared.
        theirs: Their number, or a function that computes it.
        ours: Function that computes our number.
        file: Name of the file that is read, if the data are not part of this module.
    """

    package: str
    model: str
    quantity: str
    theirs: float | Numbers
    ours: Numbers
    file: str | None = None


def counts() -> Sequences:
    return Sequences.from_list([torch.tensor(EARTHQUAKES, dtype=torch.float64)[:, None]])


def column(file: str, *names: str) -> Any:
    assert FOLDER is not None
    with (FOLDER / file).open() as lines:
        rows = list(csv.DictReader(lines))
    return np.array([[float(row[name]) for name in names] for row in rows])


@cache
def fitted(num_states: int, initial: str = "Initial") -> HMM:
    """Returns the model of the earthquakes after EM from the best of several starts."""
    restarts = 50 if initial == "Initial" else 10
    emission = Poisson(prior_steps=1e-12)
    model = HMM(num_states, emission, initial=initial, restarts=restarts, iterations_per_epoch=50)
    return trained(model, counts(), 40)


def loss(num_states: int, initial: str = "Initial") -> float:
    return -likelihood(fitted(num_states, initial), counts())


def criterion(name: str, num_states: int, initial: str = "Initial") -> float:
    """Returns the AIC or the BIC of the fitted model."""
    return float(getattr(fitted(num_states, initial), name)(counts()))


def decoded(kind: str) -> int:
    """Returns in how many of the 107 years the decoded state differs from the published one."""
    model = poisson_with_known_parameters()
    if kind == "viterbi":
        found = model.decode(counts()).values
    else:
        found = model.posterior(counts()).smoothed.values.argmax(1)
    return int((found + 1 != torch.tensor([int(state) for state in PATHS[kind]])).sum())


def poisson_with_known_parameters() -> HMM:
    matrix = np.full((3, 3), 0.1) + 0.7 * np.eye(3)
    return HMM(3, Poisson(), num_features=1).set_parameters(
        [1 / 3, 1 / 3, 1 / 3], matrix, {"rate": [[10.0], [20.0], [25.0]]}
    )


def ahead(years: int) -> float:
    """Returns the probability of the first state some years after the end of the series."""
    model = poisson_with_known_parameters()
    last = model.posterior(counts()).filtered.values[-1]
    return float((last @ torch.linalg.matrix_power(model.transition_probs, years))[0])


def fedfunds() -> float:
    """Two regimes with a common variance at the parameters of the published fit."""
    p00, p10, sigma = 0.9820939, 0.0503587, 2.107562
    model = HMM(2, Gaussian(tied=["variance"]), initial="Stationary", num_features=1)
    model.set_parameters(
        transition=[[p00, 1 - p00], [p10, 1 - p10]],
        emission={"mean": [[3.70877], [9.556793]], "variance": [[sigma**2], [sigma**2]]},
    )
    return likelihood(model, [column("fedfunds.csv", "rate")])


def growth() -> float:
    """Hamilton's model of the growth of the national product, at the parameters of the published fit."""
    model = HMM(2, Autoregressive(4, around_mean=True), initial="Stationary", num_features=1)
    lags = [[[value]] for value in (0.013486, -0.057521, -0.246983, -0.212923)]
    model.set_parameters(
        transition=[[0.754673, 1 - 0.754673], [0.095915, 1 - 0.095915]],
        emission={
            "mean": [[-0.358811], [1.163516]],
            "coefficients": [lags] * 2,
            "variance": [[np.exp(-0.262658) ** 2]] * 2,
        },
    )
    return likelihood(model, [column("rgnp.csv", "growth")])


def lagged_columns() -> float:
    """fedfunds with a regression on the two rates before, for which statsmodels is given two lagged columns."""
    model = HMM(2, Autoregressive(2), initial="Stationary", num_features=1)
    emission = {
        "intercept": [[0.2], [0.5]],
        "coefficients": [[[[1.2]], [[-0.25]]], [[[0.9]], [[0.05]]]],
        "variance": [[0.2], [3.0]],
    }
    model.set_parameters(transition=[[0.97, 0.03], [0.1, 0.9]], emission=emission)
    return likelihood(model, [column("fedfunds.csv", "rate")])


def waves(before: Literal["missing", "zeros"]) -> float:
    """Two columns with two lags and full covariances; dynamax sets the lags before the first step to zero."""
    t = np.arange(60.0)
    values = np.column_stack([np.sin(t / 3) + 0.1 * np.cos(7 * t), np.cos(t / 5) + 0.2 * np.sin(3 * t)])
    first = [[[0.7, 0.1], [0.0, 0.5]], [[-0.2, 0.0], [0.1, -0.1]]]
    second = [[[-0.3, 0.2], [0.2, 0.9]], [[0.1, 0.1], [0.0, -0.3]]]
    emission = {
        "coefficients": [first, second],
        "intercept": [[0.1, -0.2], [0.3, 0.0]],
        "covariance": [[[0.5, 0.1], [0.1, 0.4]], [[0.3, -0.05], [-0.05, 0.6]]],
    }
    model = HMM(2, Autoregressive(2, "full", before=before), num_features=2)
    initial = [0.6, 0.4] if before == "zeros" else [2 / 3, 1 / 3]  # the stationary one, which is that of the third step
    return likelihood(model.set_parameters(initial, [[0.9, 0.1], [0.2, 0.8]], emission), [values])


def dax() -> float:
    """Two normal distributions at the parameters of the published fit."""
    stay = [[0.96904599, 0.03095401], [0.0121246, 0.9878754]]
    means, deviations = [[-1.48923023e-3], [7.45917059e-4]], np.array([[0.02307617], [0.00938592]])
    model = HMM(2, Gaussian(), initial="Stationary", num_features=1)
    model.set_parameters(transition=stay, emission={"mean": means, "variance": deviations**2})
    return likelihood(model, [column("dax.csv", "logreturn")])


def biofam() -> HMM:
    """The left-right model of three channels with five states at the published parameters."""
    sizes = {"marriage": 3, "parenthood": 2, "residence": 2}
    columns = [Column(name, "categorical", size) for name, size in sizes.items()]
    model = HMM(5, Product([Categorical() for _ in sizes]), columns=columns)
    return model.set_parameters(BIOFAM["initial"], BIOFAM["transition"], [{"probs": BIOFAM[name]} for name in sizes])


def biofam_sequences() -> Sequences:
    table = column("biofam.csv", "sequence", "marriage", "parenthood", "residence")
    lengths = np.unique(table[:, 0], return_counts=True)[1]
    return Sequences.from_lengths(table[:, 1:], lengths)


def biofam_bic() -> float:
    """BIC with the published number of 34 parameters, which leaves out the zeros of the starting values."""
    steps = 2000 * 16
    return 34 * float(np.log(steps)) - 2 * likelihood(biofam(), biofam_sequences())


def umbrella() -> HMM:
    model = HMM(2, num_symbols=2)
    return model.set_parameters([0.5, 0.5], [[0.7, 0.3], [0.3, 0.7]], [[0.9, 0.1], [0.2, 0.8]])


UMBRELLA = [[0, 0, 1, 0, 0]]


def weather() -> float:
    """Returns the probability of the best path for the observations walk, shop, clean."""
    model = HMM(2, num_symbols=3)
    model.set_parameters([0.6, 0.4], [[0.7, 0.3], [0.4, 0.6]], [[0.1, 0.4, 0.5], [0.6, 0.3, 0.1]])
    return float(inference.viterbi(*model.problem(model.as_sequences([[0, 1, 2]]))).log_probability.exp())


BOOK = "Zucchini and MacDonald (R)"
QUAKES = "earthquakes, Poisson"
HAMILTON = "growth of the GNP, AR(4) around a switching mean"
WAVES = "two columns of waves, two lags, full covariances"
FEDFUNDS = "fedfunds, two normals, common variance, stationary start"
# States, start, name of the start in the table, AIC and BIC.
CRITERIA = [
    (2, "Stationary", "stationary", (692.6365, 703.3278)),
    (2, "Initial", "free", (693.7574, 707.1216)),
    (3, "Stationary", "stationary", (676.9206, 700.976)),
    (3, "Initial", "free", (679.055, 708.4561)),
    (4, "Stationary", "stationary", (687.6632, 730.4284)),
]
COMPARISONS = [
    Comparison(BOOK, f"{QUAKES}, 1 state", "fitted -log L", 391.9189, partial(loss, 1)),
    *(
        Comparison(BOOK, f"{QUAKES}, {states} states, free start", "fitted -log L", value, partial(loss, states))
        for states, value in ((2, 341.8787), (3, 328.5275), (4, 326.6749))
    ),
    *(
        Comparison(
            BOOK,
            f"{QUAKES}, {states} states, stationary start",
            "fitted -log L",
            value,
            partial(loss, states, "Stationary"),
        )
        for states, value in ((2, 342.3183), (3, 329.4603), (4, 327.8316))
    ),
    *(
        Comparison(
            BOOK,
            f"{QUAKES}, {states} states, {start} start",
            name.upper(),
            value,
            partial(criterion, name, states, initial),
        )
        for states, initial, start, values in CRITERIA
        for name, value in zip(("aic", "bic"), values, strict=True)
    ),
    *(
        Comparison(BOOK, f"{QUAKES}, 3 states, known", f"years decoded otherwise ({kind})", 0.0, partial(decoded, kind))
        for kind in PATHS
    ),
    *(
        Comparison(
            BOOK, f"{QUAKES}, 3 states, known", f"P(state 1), years ahead: {years}", value, partial(ahead, years)
        )
        for years, value in ((1, 0.7733048), (5, 0.4389705))
    ),
    Comparison("Stata", FEDFUNDS, "log L", -508.63592, fedfunds, "fedfunds.csv"),
    Comparison("statsmodels 0.15.0", FEDFUNDS, "log L", -508.63591763762855, fedfunds, "fedfunds.csv"),
    Comparison("Stata", HAMILTON, "log L", -181.26339, growth, "rgnp.csv"),
    Comparison("statsmodels 0.15.0", HAMILTON, "log L", -181.26339426301064, growth, "rgnp.csv"),
    Comparison(
        "statsmodels 0.15.0",
        "fedfunds, regressions on two lagged columns",
        "log L",
        -209.17636659834443,
        lagged_columns,
        "fedfunds.csv",
    ),
    Comparison("dynamax 1.0.3", WAVES, "log L, zeros before", -93.6688195923053, partial(waves, "zeros")),
    Comparison("dynamax 1.0.3", WAVES, "log L given two steps", -90.23337899586906, partial(waves, "missing")),
    Comparison(
        "pomegranate 1.1.2",
        f"{QUAKES}, 3 states, known",
        "log L",
        -347.0352944754959,
        lambda: likelihood(poisson_with_known_parameters(), counts()),
    ),
    Comparison("fHMM (R)", "DAX, two normals, stationary start", "log L", 17403.605268, dax, "dax.csv"),
    Comparison(
        "seqHMM (R)",
        "biofam, three channels, left-right",
        "log L",
        -14245.002336,
        lambda: likelihood(biofam(), biofam_sequences()),
        "biofam.csv",
    ),
    Comparison("seqHMM (R)", "biofam, three channels, left-right", "BIC", 28842.7, biofam_bic, "biofam.csv"),
    Comparison("Russell and Norvig", "umbrella", "log L", -3.3725, lambda: likelihood(umbrella(), UMBRELLA)),
    Comparison(
        "Russell and Norvig",
        "umbrella",
        "P(rain), day 3",
        0.3075,
        lambda: float(umbrella().posterior(UMBRELLA).smoothed.values[2, 0]),
    ),
    Comparison("Wikipedia (Viterbi)", "weather", "probability of the best path", 0.01344, weather),
    *(Comparison(*row) for row in peers.COMPARISONS),
]


def cases(run: Run) -> Iterator[Case]:
    for comparison in COMPARISONS[:: 9 if run.quick else 1]:
        case = {"package": comparison.package, "model": comparison.model, "quantity": comparison.quantity}
        if comparison.file is None or FOLDER is not None or run.records.has(**case):
            yield case


def compute(run: Run, case: Case) -> dict[str, Any]:
    (found,) = [one for one in COMPARISONS if all(getattr(one, name) == value for name, value in case.items())]
    theirs = found.theirs() if callable(found.theirs) else found.theirs
    return {"theirs": float(theirs), "ours": float(found.ours())}


def table(run: Run) -> str:
    rows = []
    for case in cases(run):
        (found,) = run.records.where(**case)
        theirs, ours = found["theirs"], found["ours"]
        text = f"{theirs:.12g}"
        decimals = len(text.partition(".")[2])
        rows.append([*case.values(), text, f"{ours:.{decimals}f}", f"{ours - theirs:.1e}"])
    return markdown_table(["package", "data and model", "quantity", "theirs", "ours", "difference"], rows)


def figure(run: Run) -> Figure:
    """Draws the absolute differences, by package. Differences below 1e-13 are drawn at this value."""
    image, (axes,) = new_figure()
    records = [run.records.where(**case)[0] for case in cases(run)]
    packages = list(dict.fromkeys(record["package"] for record in records))[::-1]
    differences = [max(abs(record["ours"] - record["theirs"]), 1e-13) for record in records]
    axes.plot(differences, [packages.index(record["package"]) for record in records], "o", alpha=0.6)
    axes.set_yticks(range(len(packages)), packages)
    axes.set(xscale="log", xlabel="absolute difference")
    set_title(axes, "Differences from the numbers of other packages")
    return image


EXPERIMENT = Experiment(
    folder="families/agreement",
    description=__doc__,
    cases=cases,
    compute=compute,
    table=table,
    figure=figure,
)

if __name__ == "__main__":
    run(EXPERIMENT)
