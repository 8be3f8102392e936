"""Table 2 and Figures 4, 5 and 6: the next pitch-class profile of chord sequences, and chords recovered from latent states.

``python -m experiments.neural.guitar`` (plucked strings) or ``--path folder`` (a folder of WAV files for each chord)

Sequences of 5 random recordings that play for random times. The error is the mean distance of the predicted profile from the next one. Chords
are recovered as in the paper: k-means on the latent states of one sequence, with as many centres as it has different chords, against the
chords that were played. The state of a step is read one step later, when the transition, which reads the last profiles, has read the step's own;
"at once" is the step itself. Two settings of the neural HMM, one for prediction and one for recovery, each with both numbers; beside them
the same recovery from raw profiles, from profiles averaged over as many steps as the transition reads, and from the time alone, which a latent that
merely drifts would equal. Figures and sounds are of
one test sequence with the setting for recovery: profiles with the recovered chords, latent states, the profile of each cluster, and for
each cluster a WAV file of the moments that belong to it.
"""

from __future__ import annotations

import argparse
import wave
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from torch import Tensor

from datamodules import GuitarDataModule
from datamodules.guitar import PITCHES
from experiments.neural.training import CELLS, agreement, averages, mean_and_spread, prediction_error, timed_fit, train
from experiments.records import Records, markdown_table
from lightning_hmm.models import LinearGaussianHMM, NeuralHMM, RecurrentNet
from lightning_hmm.models.baselines import persistence
from lightning_hmm.plots import COLOURS
from lightning_hmm.sequences import Sequences

RUNS = 3
LATENT = (2, 5, 10, 20)
SHOWN = 5  # d_h of the figures, as in the paper
SHORTEST = 0.4  # s that a chord plays at least
SIZES: dict[str, Any] = {"num_sequences": 300, "val_fraction": 0.1, "test_fraction": 0.2, "min_duration": SHORTEST, "batch_size": 32, "shuffle": True}
RECURRENT: dict[str, Any] = {"epochs": 60, "patience": 8}  # at the rate 5e-3
LINEAR_EPOCHS = 40
COMMON: dict[str, Any] = {"transition_order": 15, "window": "lstm", "num_layers": 2, "num_particles": 32, "num_paths": 2, "m_steps": 4, "learning_rate": 1e-2}
OPTIONS: dict[str, dict[str, Any]] = {
    "prediction": {"emission_order": 1, "emission": "student", "epochs": 8, **COMMON},
    "recovery": {"emission_order": 0, "emission_mean": "absolute", "latent_bound": 3.0, "transition": "mixture", "epochs": 8, **COMMON},
}
NAMES = {
    "prediction": "neural HMM, for prediction",
    "recovery": "neural HMM, for recovery",
    "linear": "linear-Gaussian",
    "rnn": "RNN",
    "lstm": "LSTM",
    "gru": "GRU",
}
CONTROLS = {
    "raw profiles": "k-means on raw profiles",
    "averaged profiles": f"k-means on profiles averaged over {COMMON['transition_order']} steps",
    "time alone": "k-means on time alone",
}
PAPER = {  # Table 2; the scale of its profiles is not known
    "prediction": [".30 ± .02", ".28 ± .03", ".31 ± .03", ".33 ± .04"],
    "linear": ["1.04 ± .05", ".65 ± .03", ".46 ± .03", ".56 ± .04"],
    "rnn": [".64 ± .07", ".41 ± .06", ".31 ± .07", ".29 ± .05"],
    "lstm": [".62 ± .06", ".42 ± .07", ".30 ± .07", ".29 ± .07"],
    "gru": [".60 ± .05", ".40 ± .07", ".31 ± .08", ".30 ± .08"],
}


def make_data(path: str | None, run: int, compression: float | None) -> GuitarDataModule:
    data = GuitarDataModule(path, seed=run, compression=compression, **SIZES)
    data.setup()
    return data


def chords_of(data: GuitarDataModule) -> Sequences:
    chords = data.true_states("test")
    assert chords is not None
    return chords


def clusters_of(features: Tensor, chords: Tensor, seed: int) -> np.ndarray:
    """(steps, F) of one sequence -> (steps,) k-means with as many centres as there are different chords; -1 where something is missing."""
    known = ~features.isnan().any(1)
    clusters = np.full(len(features), -1)
    clusters[known.numpy()] = KMeans(len(chords[known].unique()), n_init=10, random_state=seed).fit_predict(features[known].numpy())
    return clusters


def recovery(features: Sequences, chords: Sequences, seed: int) -> dict[str, float]:
    """Mean agreement over sequences."""
    found = [agreement(clusters_of(own, played, seed), played) for own, played in zip(features, chords, strict=True)]
    return {name: float(np.mean([one[name] for one in found])) for name in found[0]}


def controls(data: GuitarDataModule) -> dict[str, dict[str, float]]:
    """Recovery from what is not a latent state."""
    test, chords = data.test_sequences, chords_of(data)
    times = torch.cat([torch.arange(length, dtype=torch.float64) for length in test.lengths.tolist()]).unsqueeze(1)
    unheard = test.values.isnan().any(1, keepdim=True)
    return {
        "raw profiles": recovery(test, chords, data.seed),
        "averaged profiles": recovery(averages(test, COMMON["transition_order"]), chords, data.seed),
        "time alone": recovery(test.with_values(times.masked_fill(unheard, torch.nan)), chords, data.seed),
    }


def measure(name: str, latent: int, data: GuitarDataModule, out: Path | None) -> dict[str, float]:
    """Trains a model and gives its errors, and the recovery of chords from its latent states if it has some; figures go to `out`."""
    test = data.test_sequences
    if name in CELLS:
        model: Any = RecurrentNet(latent, num_features=data.num_features, cell=name, residual=True, learning_rate=5e-3, seed=data.seed)  # type: ignore[arg-type]
        found = train(model, data, **RECURRENT)
        return {"error": prediction_error(model.predict_each(test), test), **found}
    unheard = test.values.isnan().any(1, keepdim=True)

    def heard(latents: Sequences) -> Sequences:
        return latents.with_values(latents.values.double().masked_fill(unheard, torch.nan))

    at_once = {}
    if name == "linear":
        model = LinearGaussianHMM(latent, num_features=data.num_features, seed=data.seed)
        seconds = timed_fit(model, data, LINEAR_EPOCHS, None)
        latents = heard(model.latents(test))
    else:
        options = dict(OPTIONS[name])
        epochs = options.pop("epochs")
        model = NeuralHMM(latent, num_features=data.num_features, seed=data.seed, **options)
        seconds = timed_fit(model, data, epochs, data.batch_size)
        latents = heard(model.latents(test, lead=1))
        at_once = {"ari_at_once": recovery(heard(model.latents(test)), chords_of(data), data.seed)["ari"]}
    if out is not None and name == "recovery":
        show(data, latents, out)
    error = prediction_error(model.predict_each(test), test)
    return {"error": error, **recovery(latents, chords_of(data), data.seed), **at_once, "seconds": seconds}


# Sounds and figures of one sequence


def write_wav(path: Path, signal: Tensor, rate: int) -> None:
    samples = (signal / signal.abs().max().clamp(min=1e-9) * 0.9 * (2**15 - 1)).round().short()
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.numpy().tobytes())


def cluster_sounds(sound: list[Tensor], clusters: np.ndarray, window: int, hop: int) -> dict[int, Tensor]:
    """For each cluster (samples,): the sound while the frames around are of it, and silence else; edges fade in and out over a hop."""
    owner, first = [], 0
    for piece in sound:
        count = max(0, len(piece) - window) // hop + 1
        nearest = ((torch.arange(len(piece)) - window / 2) / hop).round().long().clamp(0, count - 1)
        owner.append(torch.from_numpy(clusters[first : first + count])[nearest])
        first += count
    owners, signal = torch.cat(owner), torch.cat(sound)
    found = {}
    for cluster in range(int(clusters.max()) + 1):
        inside = torch.nn.functional.pad((owners == cluster).double(), (hop // 2, hop - hop // 2)).cumsum(0)
        found[cluster] = signal * ((inside[hop:] - inside[:-hop]) / hop).to(signal)  # the share of the hop around a sample that is of the cluster
    return found


def boundaries(chords: Tensor) -> np.ndarray:
    return np.flatnonzero(np.diff(chords.numpy())) + 1


def figure_profiles(profiles: Tensor, chords: Tensor, clusters: np.ndarray, names: list[str], frame_rate: float) -> Figure:
    """Figures 4 and 5b: the profiles of a sequence, and its clusters under the chords that were played."""
    plot = Figure(figsize=(9, 5), layout="constrained")
    top, bottom = plot.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    seconds = len(profiles) / frame_rate
    top.imshow(profiles.T.numpy(), aspect="auto", origin="lower", extent=(0, seconds, -0.5, 11.5), cmap="Greys", interpolation="nearest")
    top.set_yticks(range(12), PITCHES)
    top.set(title="Pitch-class profiles")
    times = np.arange(len(clusters)) / frame_rate
    bottom.step(times, clusters, where="post", color="#333333", linewidth=1.2)
    bottom.set_yticks(range(int(clusters.max()) + 1))
    bottom.set(title="Clusters of latent states", xlabel="seconds", ylabel="cluster")
    edges = [0, *boundaries(chords), len(chords)]
    for axes in (top, bottom):
        for edge in edges[1:-1]:
            axes.axvline(edge / frame_rate, color=COLOURS[1], linestyle="--", linewidth=1)
    for first, last in pairwise(edges):
        bottom.text((first + last) / 2 / frame_rate, clusters.max() + 0.35, names[int(chords[first])], ha="center", color=COLOURS[1])
    bottom.set_ylim(-0.4, clusters.max() + 0.8)
    bottom.spines[["top", "right"]].set_visible(False)
    return plot


def figure_latents(latents: Tensor, chords: Tensor, clusters: np.ndarray, names: list[str]) -> Figure:
    """Figure 5a: the two main directions of the latent states, by cluster and by chord."""
    plot = Figure(figsize=(9, 4), layout="constrained")
    shown = PCA(2).fit_transform(latents.numpy()) if latents.shape[1] > 2 else latents.numpy()
    kinds = [(clusters, [f"cluster {number}" for number in range(int(clusters.max()) + 1)], "Clusters"), (chords.numpy(), names, "Chords played")]
    for axes, (numbers, words, title) in zip(plot.subplots(1, 2), kinds, strict=True):
        for place, number in enumerate(np.unique(numbers[numbers >= 0])):
            rows = numbers == number
            axes.plot(shown[rows, 0], shown[rows, 1], "o", markersize=3, color=COLOURS[place % len(COLOURS)], label=words[number])
        axes.set(title=title, xlabel="first principal direction", ylabel="second")
        axes.legend(frameon=False, fontsize="small")
        axes.spines[["top", "right"]].set_visible(False)
    return plot


def figure_clusters(profiles: Tensor, chords: Tensor, clusters: np.ndarray, names: list[str]) -> Figure:
    """Figure 6: the mean profile of each cluster beside that of the chord that it mostly is."""
    count = int(clusters.max()) + 1
    plot = Figure(figsize=(2.6 * count, 2.8), layout="constrained")
    for cluster, axes in enumerate(plot.subplots(1, count, sharey=True, squeeze=False)[0]):
        rows = torch.from_numpy(clusters == cluster)
        chord = int(chords[rows].mode().values)
        played = (chords == chord) & ~profiles.isnan().any(1)
        axes.bar(range(12), profiles[rows].mean(0), color=COLOURS[0], width=0.75, label="cluster")
        axes.plot(range(12), profiles[played].mean(0), "o", markersize=4, color=COLOURS[1], label="chord as played")
        axes.set_xticks(range(12), PITCHES, fontsize=6)
        axes.set_title(f"cluster {cluster}: {names[chord]}", fontsize="medium")
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="x-small")
    return plot


def show(data: GuitarDataModule, latents: Sequences, out: Path) -> None:
    """Figures and sounds of the first test sequence that has a chord twice, as the paper's has."""
    chords = chords_of(data)
    number = next((n for n, played in enumerate(chords) if len(played.unique()) == data.chords_per_sequence - 1), 0)
    profiles, played = data.test_sequences[number], chords[number]
    clusters, names = clusters_of(latents[number], played, data.seed), data.state_names
    assert names is not None
    figure_profiles(profiles, played, clusters, names, data.frame_rate).savefig(out / "sequence.png", dpi=150)
    figure_latents(latents[number], played, clusters, names).savefig(out / "latents.png", dpi=150)
    figure_clusters(profiles, played, clusters, names).savefig(out / "profiles.png", dpi=150)
    sound = data.sound("test", number)
    write_wav(out / "sequence.wav", torch.cat(sound), data.analysis.sample_rate)
    for cluster, signal in cluster_sounds(sound, clusters, data.analysis.window, data.analysis.hop).items():
        write_wav(out / f"cluster_{cluster}.wav", signal, data.analysis.sample_rate)


def tables(records: Records, latents: list[int], models: list[str]) -> dict[str, str]:
    """Errors beside the paper's, and the recovery of chords; mean and standard deviation over runs."""

    def found(what: str, name: str, **settings: Any) -> str:
        return mean_and_spread([record[what] for record in records.where(model=name, **settings) if what in record])

    errors, recovered = [], []
    for name in models:
        errors.append([NAMES[name], *(found("error", name, latent=latent) for latent in latents)])
        if name in PAPER:
            printed = dict(zip(LATENT, PAPER[name], strict=True))
            errors.append([f"{'neural HMM' if name == 'prediction' else NAMES[name]}, paper", *(printed.get(latent, "-") for latent in latents)])
        if any("ari" in record for record in records.where(model=name)):
            for latent in latents:
                row = [found(what, name, latent=latent) for what in ("error", "accuracy", "purity", "ari", "ari_at_once")]
                recovered.append([f"{NAMES[name]}, d_h = {latent}", *row])
    errors.append(["the last profile again", *[found("error", "persistence")] * len(latents)])
    for name, words in CONTROLS.items():
        recovered.append([words, "-", *(found(what, name) for what in ("accuracy", "purity", "ari")), "-"])
    return {
        "errors": markdown_table(["", *(f"d_h = {latent}" for latent in latents)], errors),
        "recovery": markdown_table(["", "error", "accuracy", "purity", "ARI", "ARI at once"], recovered),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", help="a folder of WAV files for each chord, looked up under $LIGHTNING_HMM_DATA too; plucked strings if not given")
    parser.add_argument("--latent", type=int, nargs="+", default=list(LATENT), help="d_h")
    parser.add_argument("--models", nargs="+", choices=list(NAMES), default=list(NAMES))
    parser.add_argument("--runs", type=int, nargs="+", default=list(range(RUNS)), help="seeds of splits and sequences; settings were chosen on 100 and above")
    parser.add_argument("--compression", type=float, help="c of profiles log(1 + c p) instead of p")
    parser.add_argument("--out", type=Path, help="logs/experiments/neural/guitar/<recorded or plucked>[_<compression>] if not given")
    parser.add_argument("--quick", action="store_true", help="one run, few sequences, few steps of training")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kind = ("plucked" if args.path is None else "recorded") + ("" if args.compression is None else f"_{args.compression:g}")
    out = args.out or Path("logs/experiments/neural/guitar") / kind
    if args.quick:
        args.latent, args.runs, args.models = [5], [0], ["prediction", "recovery", "lstm"]
        SIZES.update(num_sequences=20, recordings=10)
        RECURRENT["epochs"] = 1
        for options in OPTIONS.values():
            options["epochs"] = 2
    records = Records(out / "records.jsonl")
    for run in args.runs:
        data = make_data(args.path, run, args.compression)
        if not records.has(model="persistence", run=run):
            test = data.test_sequences
            records.add(model="persistence", run=run, error=prediction_error(persistence(test), test))
        if not all(records.has(model=name, run=run) for name in CONTROLS):
            for name, found in controls(data).items():
                if not records.has(model=name, run=run):
                    records.add(model=name, run=run, **found)
        for latent in args.latent:
            for name in args.models:
                if not records.has(model=name, run=run, latent=latent):
                    records.add(model=name, run=run, latent=latent, **measure(name, latent, data, out if run == args.runs[0] and latent == SHOWN else None))
                    print(f"run {run}, d_h = {latent}, {NAMES[name]}: {records.where(model=name, run=run, latent=latent)[0]}", flush=True)
    for name, table in tables(records, args.latent, args.models).items():
        (out / f"{name}.md").write_text(table)
        print(name, table, sep="\n\n")
    print(f"Written to {out}: tables, figures and sounds of a sequence, records.jsonl.")


if __name__ == "__main__":
    main()
