"""Speed and accuracy of the particle filter and of backward simulation, compared with the package particles.

    python benchmarks/particle.py [--out docs/benchmarks]      # about 4 minutes, on an idle machine
    python benchmarks/particle.py --memory 128                # only the memory of the filter with 128 particles

One thread each. Both sides run the same number of rounds, and the best round of each part counts. Our code processes
all sequences in one batch; the package particles processes one sequence at a time. The state has 5 entries and an
observation 3; means and scales of transition and emission are networks of three layers of 32 units with random weights,
from which the data are drawn. All sequences are filtered, then paths of each are drawn from the smoothing distribution.
An EM iteration of a `NeuralHMM` is compared with its filter alone. The likelihoods and smoothed means of both sides
must agree within their own randomness.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from baum_welch import environment, peak_bytes, resident_bytes
from torch import Tensor

from lightning_hmm import NeuralHMM, Sequences
from lightning_hmm.distributions.densities import DiagonalGaussian
from lightning_hmm.inference import kalman, particle
from lightning_hmm.models.neural.state_space import PathDensity
from lightning_hmm.random import generator

HERE = Path(__file__).resolve().parent
STATE, FEATURES, WIDTH = 5, 3, 32
SEQUENCES, STEPS, PARTICLES, PATHS = 100, 100, 128, 16
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), "1")


class Neural:
    """The state-space model for particles, bound to values (B, T, features)."""

    def __init__(self, weights: dict[str, Tensor], values: Tensor) -> None:
        self.weights, self.values = weights, values

    def network(self, name: str, x: Tensor) -> tuple[Tensor, Tensor]:
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        for layer in range(3):
            x = torch.addmm(self.weights[f"{name}_bias{layer}"], x, self.weights[f"{name}_weight{layer}"])
            x = x.relu_() if layer < 2 else x
        mean, log_scale = x.reshape(*shape[:-1], -1).chunk(2, dim=-1)
        return mean, log_scale.exp()

    def initial(self, num_particles: int) -> DiagonalGaussian:
        return DiagonalGaussian(
            self.values.new_zeros(len(self.values), num_particles, STATE), self.values.new_ones(STATE)
        )

    def transition(self, t: int, states: Tensor) -> DiagonalGaussian:
        change, scale = self.network("transition", states)
        return DiagonalGaussian(0.8 * states + change, scale)

    def log_obs(self, t: int, states: Tensor) -> Tensor:
        mean, scale = self.network("emission", states)
        return DiagonalGaussian(mean, scale).log_prob(self.values[:, t].unsqueeze(1))


def random_weights(rng: np.random.Generator) -> dict[str, np.ndarray]:
    weights = {}
    for name, size in (("transition", STATE), ("emission", FEATURES)):
        sizes = [STATE, WIDTH, WIDTH, 2 * size]
        for layer in range(3):
            weights[f"{name}_weight{layer}"] = rng.normal(size=sizes[layer : layer + 2]) / math.sqrt(sizes[layer])
            weights[f"{name}_bias{layer}"] = np.zeros(sizes[layer + 1])
        weights[f"{name}_weight2"][:, size:] *= 0.2
        if name == "transition":
            weights["transition_weight2"] *= 0.3  # the state stays where it is
        weights[f"{name}_bias2"][size:] = math.log(0.5)
    return weights


def draw(weights: dict[str, np.ndarray], num_sequences: int, num_steps: int) -> np.ndarray:
    """(B, T, features) from the model."""
    model = Neural(
        {name: torch.from_numpy(array) for name, array in weights.items()},
        torch.zeros(num_sequences, 1, FEATURES, dtype=torch.float64),
    )
    random, rows = generator(0, "draw"), []
    states = model.initial(1).sample(random)
    for t in range(num_steps):
        rows.append(DiagonalGaussian(*model.network("emission", states)).sample(random).squeeze(1))
        states = model.transition(t, states).sample(random)
    return torch.stack(rows, 1).numpy()


def ours(
    weights: dict[str, np.ndarray],
    values: np.ndarray,
    dtype: torch.dtype,
    num_particles: int,
    num_paths: int,
    rounds: int,
) -> dict[str, Any]:
    """The best time of each part in several rounds, and the results."""
    data = torch.from_numpy(values).to(dtype)
    model = Neural({name: torch.from_numpy(array).to(dtype) for name, array in weights.items()}, data)
    lengths = torch.full((len(data),), data.shape[1])
    random = generator(0, "benchmark")
    seconds = {"filter": math.inf, "exact": math.inf}
    log_likelihoods, means = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        found = particle.filter(model, lengths, num_particles, random)
        middle = time.perf_counter()
        paths = particle.backward_simulation(found, num_paths, random)
        end = time.perf_counter()
        seconds = {"filter": min(seconds["filter"], middle - start), "exact": min(seconds["exact"], end - middle)}
        log_likelihoods.append(found.log_likelihood.double())
        means.append(paths.mean.double())
    return {
        "seconds": seconds,
        "log_likelihood": torch.stack(log_likelihoods).numpy(),
        "means": torch.stack(means).transpose(1, 2).numpy(),
    }


def peer(
    weights: dict[str, np.ndarray], values: np.ndarray, num_particles: int, num_paths: int, rounds: int
) -> dict[str, Any] | None:
    python = environment("particles")
    if python is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        problem, results = Path(folder) / "problem.npz", Path(folder) / "results.npz"
        np.savez(problem, values=values, **weights)
        command = [
            str(python),
            str(HERE / "peer_particles.py"),
            str(problem),
            str(results),
            str(num_particles),
            str(num_paths),
            str(rounds),
        ]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **ONE_THREAD})
        if done.returncode:
            raise RuntimeError(f"particles ended with code {done.returncode}:\n{done.stderr}")
        with np.load(results) as arrays:
            return {**json.loads(done.stdout.splitlines()[-1]), **{name: arrays[name] for name in arrays.files}}


def check_agreement(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Raises an error if the results differ; returns the difference in standard errors."""
    rounds, num_sequences = mine["log_likelihood"].shape
    spread = math.sqrt(mine["log_likelihood"].var(0, ddof=1).mean() * (1 + 1 / rounds) / num_sequences)
    likelihood = float((theirs["log_likelihood"] - mine["log_likelihood"].mean(0)).mean()) / spread
    noise = np.sqrt(mine["means"].var(0, ddof=1).mean() * 2)
    means = float(np.sqrt(np.square(theirs["means"] - mine["means"][0]).mean()) / noise)
    if abs(likelihood) > 5 or not 0.8 < means < 1.25:
        raise RuntimeError(
            f"Both sides must agree, but likelihoods are {likelihood:.1f} standard errors and smoothed means "
            f"{means:.2f} times their noise apart."
        )
    return (
        f"likelihoods are {likelihood:+.1f} standard errors apart, and smoothed means {means:.2f} times as far as in "
        "two runs of ours"
    )


def linear_gaussian(dtype: torch.dtype = torch.float64) -> kalman.LinearGaussian:
    turn = torch.tensor([[0.9, 0.2], [-0.2, 0.9]], dtype=dtype)
    zero, unit = torch.zeros(2, dtype=dtype), torch.eye(2, dtype=dtype)
    return kalman.LinearGaussian(
        zero, unit, turn, zero, 0.4 * unit, torch.tensor([[1.0, 0.3], [0.0, 1.0]], dtype=dtype), zero, unit
    )


def em_iteration(values: np.ndarray, rounds: int) -> dict[str, float]:
    """Returns the seconds of the parts of an EM iteration of a `NeuralHMM` in float32, each as the best of `rounds`.

    The networks have the same sizes as those of the comparison.
    """
    data = Sequences.from_lengths(torch.from_numpy(values).flatten(0, 1), [values.shape[1]] * len(values))
    model = NeuralHMM(
        STATE,
        FEATURES,
        emission_order=0,
        emission_mean="absolute",
        width=WIDTH,
        num_particles=PARTICLES,
        num_paths=PATHS,
    )
    model.initialize(data)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    seconds = dict.fromkeys(("bare filter", "filter", "paths", "two gradient steps"), math.inf)
    places, weights = range(len(data)), torch.ones(len(data))

    def timed(name: str, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        answer = work()
        seconds[name] = min(seconds[name], time.perf_counter() - start)
        return answer

    def gradient_steps(density: PathDensity) -> None:
        for _ in range(2):
            for parameter, gradient in zip(model.parameters(), density.gradient()[1], strict=True):
                parameter.grad = -gradient / data.num_steps
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()

    for number in range(rounds):
        with torch.no_grad():
            bound = model.bind(data)
            timed(
                "bare filter",
                lambda bound=bound: particle.filter(bound, bound.observations.lengths, PARTICLES, generator(0)),
            )
            found = timed(
                "filter",
                lambda number=number: model.filter_particles(model.bind(data), model.streams(places, "filter", number)),
            )
            paths = timed(
                "paths",
                lambda found=found, number=number: model.draw_paths(
                    found, model.streams(places, "paths", number), PATHS
                ),
            )
        timed("two gradient steps", lambda bound=bound, paths=paths: gradient_steps(PathDensity(bound, paths, weights)))
    return seconds


class Linear:
    """The same for particles; its covariances are multiples of the identity."""

    def __init__(self, model: kalman.LinearGaussian, values: Tensor) -> None:
        self.model, self.values = model, values

    def initial(self, num_particles: int) -> DiagonalGaussian:
        return DiagonalGaussian(
            self.values.new_zeros(len(self.values), num_particles, 2), self.model.initial_cov[0, 0].sqrt()
        )

    def transition(self, t: int, states: Tensor) -> DiagonalGaussian:
        return DiagonalGaussian(states @ self.model.transition.T, self.model.transition_cov[0, 0].sqrt())

    def log_obs(self, t: int, states: Tensor) -> Tensor:
        return DiagonalGaussian(states @ self.model.emission.T, self.model.emission_cov[0, 0].sqrt()).log_prob(
            self.values[:, t].unsqueeze(1)
        )


def errors(num_particles: int, num_sequences: int) -> Tensor:
    """Relative errors of log-likelihood estimates of sequences of 100 steps, compared with the Kalman filter."""
    model, random = linear_gaussian(), generator(0, "errors")
    blank = torch.zeros(num_sequences, 1, 2, dtype=torch.float64)
    states, rows = Linear(model, blank).initial(1).sample(random), []
    for t in range(100):
        rows.append(
            DiagonalGaussian(states @ model.emission.T, model.emission_cov[0, 0].sqrt()).sample(random).squeeze(1)
        )
        states = Linear(model, blank).transition(t, states).sample(random)
    values = torch.stack(rows, 1)
    exact = kalman.log_likelihood(model, Sequences.from_lengths(values.reshape(-1, 2), [100] * num_sequences))
    found = particle.filter(Linear(model, values), torch.full((num_sequences,), 100), num_particles, random)
    return (found.log_likelihood - exact) / exact.abs()


def memory(num_particles: int) -> None:
    """Prints the size of the filter's result and the largest growth of this process, in MiB."""
    weights = random_weights(np.random.default_rng(0))
    values = draw(weights, SEQUENCES, STEPS)
    ours(weights, values[:, :3], torch.float64, num_particles, PATHS, 1)
    before = resident_bytes()
    model = Neural({name: torch.from_numpy(array) for name, array in weights.items()}, torch.from_numpy(values))
    found = particle.filter(model, torch.full((SEQUENCES,), STEPS), num_particles, generator(0))
    particle.backward_simulation(found, PATHS, generator(1))
    grown = (peak_bytes() - before) / 2**20
    held = [
        found.states,
        found.log_weights,
        found.ancestors,
        *(part for density in found.transitions for part in (density.mean, density.scale)),
    ]
    print(
        sum(part.untyped_storage().nbytes() for part in {part.data_ptr(): part for part in held}.values()) / 2**20,
        grown,
    )


def table(
    found: dict[str, Any], theirs: dict[str, Any] | None, load: float, rounds: int, num_sequences: int, num_steps: int
) -> list[str]:
    """Seconds of both sides as lines of markdown.

    Ratios are to ours in float64, which is the precision of the package particles.
    """
    lines = [
        "# Speed and accuracy of the particle filter",
        "",
        f"This page is written by `benchmarks/particle.py`. The data are {num_sequences} sequences of {num_steps} "
        f"steps. The filter has {PARTICLES} particles. "
        f"The model has states of {STATE} and observations of {FEATURES} entries, and networks of three layers of "
        f"{WIDTH} units. "
        f"Both sides use one thread ({platform.machine()}); the load average before the start was "
        f"{load:.2f}. Ours is `inference.particle.filter` and `backward_simulation`, with all {num_sequences} "
        f"sequences in one batch, best of {rounds} rounds.",
    ]
    if theirs is not None:
        lines[-1] += (
            " The package particles is `SMC.run` and the named method of its history, in float64, one sequence at a "
            f"time, best of {theirs['rounds']} rounds."
        )
    lines += [
        "",
        "| seconds (in parentheses: relative to ours in float64) | filter | paths | together |",
        "| --- | ---: | ---: | ---: |",
    ]
    reference = found["float64"]["seconds"]

    def add(what: str, filtering: float, paths: float) -> None:
        pairs = zip((filtering, paths, filtering + paths), (*reference.values(), sum(reference.values())), strict=True)
        lines.append(f"| {what} | {' | '.join(f'{spent:.3f} ({spent / base:.2f}x)' for spent, base in pairs)} |")

    for name, answer in found.items():
        add(
            f"ours, {name}, {PATHS} paths by backward simulation",
            answer["seconds"]["filter"],
            answer["seconds"]["exact"],
        )
    if theirs is not None:
        versions = ", ".join(f"{name} {number}" for name, number in theirs["versions"].items())
        add(
            f"{versions}, float64: `backward_sampling_ON2`, the same algorithm",
            theirs["seconds"]["filter"],
            theirs["seconds"]["exact"],
        )
        add(
            "particles: `backward_sampling_mcmc`, its cheapest approximation",
            theirs["seconds"]["filter"],
            theirs["seconds"]["metropolis"],
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="only checks that everything works")
    parser.add_argument("--ours-only", action="store_true", help="no peer, nothing written")
    parser.add_argument(
        "--memory",
        type=int,
        metavar="PARTICLES",
        help="only print the size of the filter's result and the growth of this process, in MiB",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.memory:
        memory(args.memory)
        return
    num_sequences, num_steps, rounds = (10, 20, 2) if args.quick else (SEQUENCES, STEPS, args.rounds)
    load = os.getloadavg()[0]
    weights = random_weights(np.random.default_rng(0))
    values = draw(weights, num_sequences, num_steps)
    found = {
        name: ours(weights, values, dtype, PARTICLES, PATHS, rounds)
        for name, dtype in (("float64", torch.float64), ("float32", torch.float32))
    }
    for name, answer in found.items():
        print(name, {part: round(spent, 3) for part, spent in answer["seconds"].items()}, flush=True)
    iteration = em_iteration(values, rounds)
    whole = sum(spent for part, spent in iteration.items() if part != "bare filter")
    print(
        {part: round(spent, 3) for part, spent in iteration.items()},
        f"{whole / iteration['bare filter']:.2f} bare filters",
        flush=True,
    )
    if args.ours_only:
        return
    theirs = peer(weights, values, PARTICLES, PATHS, rounds)
    lines = table(found, theirs, load, rounds, num_sequences, num_steps)
    if theirs is not None:
        lines.append(f"\nBoth sides use the same model: {check_agreement(found['float64'], theirs)}.")
    parts = ", ".join(f"{part} {spent:.3f}" for part, spent in iteration.items())
    lines.append(
        f"\nAn EM iteration of a `NeuralHMM` in float32 ({PATHS} paths, two gradient steps) takes {whole:.3f} s, "
        f"{whole / iteration['bare filter']:.2f} times "
        f"as long as its filter alone. The parts take, in seconds: {parts}."
    )
    if not args.quick:
        lines += [
            "\nErrors of the log-likelihood, relative to the Kalman filter, for 200 linear-Gaussian sequences (100 "
            "steps, states of 2 entries):\n"
        ]
        lines += [
            "| particles | mean error | root mean square | largest | rms x sqrt(N) |",
            "| ---: | ---: | ---: | ---: | ---: |",
        ]
        for num_particles in (100, 300, 1000, 3000):
            error = errors(num_particles, 200)
            rms = float(error.square().mean().sqrt())
            numbers = [float(error.mean()), rms, float(error.abs().max())]
            lines.append(
                f"| {num_particles:,} | {' | '.join(f'{number:.3%}' for number in numbers)} | "
                f"{rms * math.sqrt(num_particles):.3f} |"
            )
        lines += [
            "\nMemory in float64, in MiB:\n",
            "| particles | size of the result | largest growth of the process |",
            "| ---: | ---: | ---: |",
        ]
        for num_particles in (PARTICLES, 4 * PARTICLES):
            answer = subprocess.run(
                [sys.executable, __file__, "--memory", str(num_particles)], capture_output=True, text=True, check=True
            ).stdout.split()
            lines.append(f"| {num_particles} | {float(answer[0]):.0f} | {float(answer[1]):.0f} |")
    print("\n".join(lines))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "particle.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
