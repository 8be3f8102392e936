"""Table 1 and Figure 3: how well a matrix of probabilities is made of vectors of length l, by a softmax or by absolute values.

``python -m experiments.dense.factorisation``

Random stochastic matrices (rows from Dirichlet(0.1)), each fitted from several starts; the error is that of the Frobenius norm,
relative to the matrix's own. All matrices and starts of a row of the table are one batch.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from experiments.records import Records, markdown_table
from lightning_hmm.distributions.embedded import Similarity, similarity_log_probs
from lightning_hmm.plots import COLOURS

# (n, l): median and quartiles of the paper's Table 1, for normAbsLin and softmax
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
KERNELS: tuple[Similarity, ...] = ("abs_linear", "exp")
NAMES = {"abs_linear": "normAbsLin", "exp": "softmax"}


def fit_matrices(kernel: Similarity, matrices: Tensor, length: int, starts: int, steps: int, warm_share: float, learning_rate: float, seed: int) -> Tensor:
    """(matrices, starts) relative errors after Adam with a rate that falls to zero as a cosine; both kernels begin at the same vectors.

    The first steps of a softmax, a share of `warm_share`, are on the cross entropy. The squared error of a softmax has hardly any
    slope where a large entry is given a small probability; the cross entropy has. With absolute values it is the other way
    round: there the cross entropy keeps products from changing their sign.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (len(matrices), starts, matrices.shape[-1], length)
    left, right = (torch.randn(shape, generator=generator, dtype=matrices.dtype).requires_grad_() for _ in range(2))
    optimizer = torch.optim.Adam([left, right], lr=learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    norms = matrices.square().sum((-2, -1))[:, None]

    def squared_errors(log_probs: Tensor) -> Tensor:
        return (log_probs.exp() - matrices[:, None]).square().sum((-2, -1)) / norms

    for step in range(steps):
        optimizer.zero_grad()
        log_probs = similarity_log_probs(kernel, left, right)
        loss = -(matrices[:, None] * log_probs) if kernel == "exp" and step < warm_share * steps else squared_errors(log_probs)
        loss.sum().backward()
        optimizer.step()
        schedule.step()
    return squared_errors(similarity_log_probs(kernel, left, right)).detach().sqrt()


def random_matrices(count: int, size: int, seed: int) -> Tensor:
    draws = np.random.default_rng([seed, size]).dirichlet(np.full(size, 0.1), (count, size))
    return torch.from_numpy(draws).float()


def figure(records: Records) -> Figure:
    plot = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = plot.subplots()
    sizes = sorted({size for size, _ in PAPER})
    for kernel, colour in zip(KERNELS, COLOURS, strict=False):
        for size, marker in zip(sizes, "os^", strict=True):
            found = sorted((r for r in records.where(kernel=kernel, n=size)), key=lambda r: r["l"])
            if not found:
                continue
            median, low, high = (np.array([r[name] for r in found]) for name in ("median", "low", "high"))
            label = f"{NAMES[kernel]}, n = {size}"
            axes.errorbar([r["l"] / size for r in found], median, [median - low, high - median], color=colour, marker=marker, capsize=3, label=label)
    axes.axvline(1, color="#8C8C8C", linewidth=0.8)
    axes.set(xlabel="length of the vectors / size of the matrix", ylabel="relative error (median, quartiles)", yscale="log")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")
    return plot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("logs/experiments/dense/factorisation"))
    parser.add_argument("--matrices", type=int, default=100)
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--warm-share", type=float, default=0.3, help="share of a softmax's steps on the cross entropy; 0 as in the paper")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="2 matrices, 2 starts, 50 steps, n = 3 only")
    args = parser.parse_args()
    pairs = list(PAPER)
    if args.quick:
        args.matrices, args.starts, args.steps, pairs = 2, 2, 50, pairs[:4]
    settings = {name: getattr(args, name) for name in ("matrices", "starts", "steps", "warm_share", "learning_rate", "seed")}
    records = Records(args.out / "records.jsonl")
    for size, length in pairs:
        for kernel in KERNELS:
            if records.has(n=size, l=length, kernel=kernel, **settings):
                continue
            begin = time.process_time()
            matrices = random_matrices(args.matrices, size, args.seed)
            errors = fit_matrices(kernel, matrices, length, args.starts, args.steps, args.warm_share, args.learning_rate, args.seed)
            low, median, high = torch.quantile(errors.flatten(), torch.tensor([0.25, 0.5, 0.75])).tolist()
            seconds = time.process_time() - begin
            records.add(n=size, l=length, kernel=kernel, median=median, low=low, high=high, seconds=round(seconds, 1), **settings)
            print(f"n={size} l={length} {NAMES[kernel]}: {median:.4f} ({low:.4f}/{high:.4f}), {seconds:.0f} s of processor time", flush=True)
    rows = []
    for size, length in pairs:
        row = [f"{size}, {length}"]
        for kernel, paper in zip(KERNELS, PAPER[size, length], strict=True):
            found = records.where(n=size, l=length, kernel=kernel, **settings)[-1]
            row += [f"{found['median']:.4f} ({found['low']:.4f}/{found['high']:.4f})", "{:.3f} ({:.3f}/{:.3f})".format(*paper)]
        rows.append(row)
    table = markdown_table(["n, l", "normAbsLin, ours", "normAbsLin, paper", "softmax, ours", "softmax, paper"], rows)
    (args.out / "table.md").write_text(table)
    figure(records).savefig(args.out / "figure.png", dpi=150)
    print(table, f"Written to {args.out}: table.md, figure.png, records.jsonl.", sep="\n")


if __name__ == "__main__":
    main()
