"""Table 1 and Figure 3: errors of matrices of probabilities that are represented by vectors of length l.

``python -m experiments.dense.factorization``

Random stochastic matrices (rows from Dirichlet(0.1)) are fitted from several initializations each. The error is the
Frobenius norm of the difference, relative to that of the matrix. All matrices and initializations of a row of the table
are one batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments.measures import Stopwatch, quartiles
from experiments.panels import GREY, error_bars, legend, panel
from experiments.records import markdown_table
from experiments.run import Case, Experiment, Option, Run, run
from lightning_hmm.distributions.embedded import Similarity, similarity_log_probs
from lightning_hmm.plotting import COLORS

# Median and quartiles in the paper's Table 1 by (n, l), for normAbsLin and softmax.
PAPER = {
    (3, 1): ((0.678, 0.652, 0.696), (0.048, 0.004, 0.110)),
    (3, 2): ((0.162, 0.002, 0.270), (0.001, 0.000, 0.001)),
    (3, 3): ((0.001, 0.001, 0.001), (0.001, 0.000, 0.001)),
    (3, 5): ((0.001, 0.001, 0.001), (0.001, 0.001, 0.001)),
    (5, 1): ((0.769, 0.745, 0.827), (0.453, 0.321, 0.505)),
    (5, 3): ((0.346, 0.093, 0.396), (0.001, 0.001, 0.003)),
    (5, 5): ((0.001, 0.001, 0.002), (0.001, 0.001, 0.001)),
    (5, 10): ((0.001, 0.001, 0.002), (0.002, 0.001, 0.003)),
    (10, 1): ((0.862, 0.851, 0.868), (0.616, 0.581, 0.645)),
    (10, 5): ((0.310, 0.235, 0.345), (0.012, 0.005, 0.028)),
    (10, 10): ((0.002, 0.002, 0.002), (0.003, 0.002, 0.005)),
    (10, 15): ((0.002, 0.002, 0.002), (0.003, 0.003, 0.043)),
}
SIMILARITIES: tuple[Similarity, ...] = ("abs_linear", "exp")  # in records: `kernel`
NAMES = {"abs_linear": "normAbsLin", "exp": "softmax"}
SETTINGS = ("matrices", "starts", "steps", "warm_share", "learning_rate", "seed")


def fit_matrices(run: Run, similarity: Similarity, matrices: Tensor, length: int) -> Tensor:
    """Returns the (matrices, starts) relative errors after Adam with a learning rate that falls to zero as a cosine.

    Both similarities begin with the same vectors. With a softmax, the first steps, a fraction of `warm_share`, minimize
    the cross entropy: the squared error of a softmax is almost flat where a large entry has a small probability, while
    the cross entropy is not. With absolute values it is the other way round: there the cross entropy prevents products
    from changing their sign.
    """
    generator = torch.Generator().manual_seed(run.seed)
    shape = (len(matrices), run.starts, matrices.shape[-1], length)
    left, right = (torch.randn(shape, generator=generator, dtype=matrices.dtype).requires_grad_() for _ in range(2))
    optimizer = torch.optim.Adam([left, right], lr=run.learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, run.steps)
    norms = matrices.square().sum((-2, -1))[:, None]

    def squared_errors(log_probs: Tensor) -> Tensor:
        return (log_probs.exp() - matrices[:, None]).square().sum((-2, -1)) / norms

    for step in range(run.steps):
        optimizer.zero_grad()
        log_probs = similarity_log_probs(similarity, left, right)
        warm = similarity == "exp" and step < run.warm_share * run.steps
        loss = -(matrices[:, None] * log_probs) if warm else squared_errors(log_probs)
        loss.sum().backward()
        optimizer.step()
        schedule.step()
    return squared_errors(similarity_log_probs(similarity, left, right)).detach().sqrt()


def random_matrices(count: int, size: int, seed: int) -> Tensor:
    draws = np.random.default_rng([seed, size]).dirichlet(np.full(size, 0.1), (count, size))
    return torch.from_numpy(draws).float()


def settings_of(run: Run) -> dict[str, Any]:
    return {name: getattr(run, name) for name in SETTINGS}


def cases(run: Run) -> Iterator[Case]:
    for size, length in run.pairs:
        for similarity in SIMILARITIES:
            yield {"n": size, "l": length, "kernel": similarity, **settings_of(run)}


def compute(run: Run, case: Case) -> dict[str, Any]:
    with Stopwatch() as watch:
        matrices = random_matrices(run.matrices, case["n"], run.seed)
        errors = fit_matrices(run, case["kernel"], matrices, case["l"])
    median, low, high = quartiles(errors.flatten().tolist())
    return {"median": median, "low": low, "high": high, "seconds": round(watch.seconds, 1)}


def table(run: Run) -> str:
    rows = []
    for size, length in run.pairs:
        row = [f"{size}, {length}"]
        for similarity, paper in zip(SIMILARITIES, PAPER[size, length], strict=True):
            found = run.records.where(n=size, l=length, kernel=similarity, **settings_of(run))[-1]
            ours = "{median:.4f} ({low:.4f}/{high:.4f})".format(**found)
            row += [ours, "{:.3f} ({:.3f}/{:.3f})".format(*paper)]
        rows.append(row)
    return markdown_table(["n, l", *(f"{name}, {who}" for name in NAMES.values() for who in ("ours", "paper"))], rows)


def figure(run: Run) -> Figure:
    plot, axes = panel(6.4, 4.2)
    for similarity, color in zip(SIMILARITIES, COLORS, strict=False):
        for size, marker in zip(sorted({size for size, _ in run.pairs}), "os^", strict=False):
            found = run.records.where(kernel=similarity, n=size, **settings_of(run))
            found = sorted(found, key=lambda record: record["l"])
            median, low, high = ([record[name] for record in found] for name in ("median", "low", "high"))
            style: dict[str, Any] = {"color": color, "marker": marker, "markersize": 6, "capsize": 3}
            places = [record["l"] / size for record in found]
            error_bars(axes, places, median, low, high, label=f"{NAMES[similarity]}, n = {size}", **style)
    axes.axvline(1, color=GREY, linewidth=0.8)
    axes.set(
        xlabel="length of the vectors / size of the matrix", ylabel="relative error (median, quartiles)", yscale="log"
    )
    legend(axes)
    return plot


EXPERIMENT = Experiment(
    folder="dense/factorization",
    description=__doc__,
    cases=cases,
    compute=compute,
    table=table,
    figure=figure,
    options=[
        Option("--matrices", type=int, default=100, help="number of matrices of each size"),
        Option("--starts", type=int, default=20, help="initializations for each matrix"),
        Option("--steps", type=int, default=4000, help="gradient steps"),
        Option(
            "--warm-share",
            type=float,
            default=0.3,
            help="fraction of the steps on the cross entropy; 0 as in the paper",
        ),
        Option("--learning-rate", type=float, default=0.1, help="learning rate of the first step"),
        Option("--seed", type=int, default=0, help="seed for matrices and initial vectors"),
    ],
    settings={"pairs": list(PAPER)},
    quick={"matrices": 2, "starts": 2, "steps": 50, "pairs": list(PAPER)[:4]},
    quick_help="2 matrices, 2 starts, 50 steps, n = 3 only",
)

if __name__ == "__main__":
    run(EXPERIMENT)
