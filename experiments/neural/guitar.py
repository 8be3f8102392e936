"""Table 2 and Figures 4, 5 and 6: prediction of pitch-class profiles, and chords recovered from latent states.

``python -m experiments.neural.guitar`` (plucked strings) or ``--path folder`` (a folder of WAV files for each chord)

A sequence consists of 5 random recordings of random durations. The error is the mean distance of the predicted profile
from the next one. Chords are recovered as in the paper: k-means on the latent states of one sequence, with as many
centers as it has different chords, is compared with the chords that were played. The state of a step is read one step
later, when the transition, which reads the last profiles, has read that of the step; "at once" is the step itself. The
neural HMM has two settings, one for prediction and one for recovery, both with both results. They are compared with the
recovery from raw profiles, from profiles averaged over as many steps as the transition reads, and from the time alone,
which a latent state that merely drifts would equal. Figures and sounds are of one test sequence with the setting for
recovery: profiles with the recovered chords, latent states, the profile of each cluster, and a WAV file for each
cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from sklearn.cluster import KMeans
from torch import Tensor

from datamodules import GuitarDataModule
from experiments.measures import mean_and_spread
from experiments.neural.guitar_sequence import (
    cluster_sounds,
    figure_clusters,
    figure_latents,
    figure_profiles,
    write_wav,
)
from experiments.neural.training import CELLS, agreement, averages, prediction_error, timed_fit, train
from experiments.records import markdown_table
from experiments.run import Case, Experiment, Option, Run, run
from lightning_hmm.models import LinearGaussianHMM, NeuralHMM, RecurrentNet
from lightning_hmm.models.baselines import persistence
from lightning_hmm.sequences import Sequences

LATENT = (2, 5, 10, 20)
SHOWN = 5  # d_h of the figures, as in the paper
SIZES: dict[str, Any] = {
    "num_sequences": 300,
    "val_fraction": 0.1,
    "test_fraction": 0.2,
    "min_duration": 0.4,  # seconds of a chord
    "batch_size": 32,
    "shuffle": True,
}
LINEAR_EPOCHS = 40
COMMON: dict[str, Any] = {
    "transition_order": 15,
    "window": "lstm",
    "num_layers": 2,
    "num_particles": 32,
    "num_paths": 2,
    "m_steps": 4,
    "learning_rate": 1e-2,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "prediction": {"emission_order": 1, "emission": "student", **COMMON},
    "recovery": {
        "emission_order": 0,
        "emission_mean": "absolute",
        "latent_bound": 3.0,
        "transition": "mixture",
        **COMMON,
    },
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
PAPER = {  # Table 2; the scale of its profiles is unknown
    "prediction": [".30 ± .02", ".28 ± .03", ".31 ± .03", ".33 ± .04"],
    "linear": ["1.04 ± .05", ".65 ± .03", ".46 ± .03", ".56 ± .04"],
    "rnn": [".64 ± .07", ".41 ± .06", ".31 ± .07", ".29 ± .05"],
    "lstm": [".62 ± .06", ".42 ± .07", ".30 ± .07", ".29 ± .07"],
    "gru": [".60 ± .05", ".40 ± .07", ".31 ± .08", ".30 ± .08"],
}


@lru_cache(maxsize=1)
def make_data(run: Run, seed: int) -> GuitarDataModule:
    data = GuitarDataModule(run.path, seed=seed, compression=run.compression, **run.sizes)
    data.setup()
    return data


def chords_of(data: GuitarDataModule) -> Sequences:
    chords = data.true_states("test")
    assert chords is not None
    return chords


def clusters_of(features: Tensor, chords: Tensor, seed: int) -> np.ndarray:
    """Clusters (steps, F) features of one sequence by k-means with as many centers as chords; -1 where missing."""
    known = ~features.isnan().any(1)
    clusters = np.full(len(features), -1)
    means = KMeans(len(chords[known].unique()), n_init=10, random_state=seed)
    clusters[known.numpy()] = means.fit_predict(features[known].numpy())
    return clusters


def recovery(features: Sequences, chords: Sequences, seed: int) -> dict[str, float]:
    """Returns the mean agreement over sequences."""
    pairs = zip(features, chords, strict=True)
    found = [agreement(clusters_of(own, played, seed), played) for own, played in pairs]
    return {name: float(np.mean([one[name] for one in found])) for name in found[0]}


def heard(test: Sequences, features: Sequences) -> Sequences:
    """Returns the features, missing where the profile is missing."""
    unheard = test.values.isnan().any(1, keepdim=True)
    return features.with_values(features.values.double().masked_fill(unheard, torch.nan))


def control(name: str, data: GuitarDataModule) -> dict[str, float]:
    """Returns the recovery from features that are not latent states."""
    test = data.test_sequences
    if name == "raw profiles":
        features = test
    elif name == "averaged profiles":
        features = averages(test, COMMON["transition_order"])
    else:
        times = [torch.arange(length, dtype=torch.float64) for length in test.lengths.tolist()]
        features = heard(test, test.with_values(torch.cat(times).unsqueeze(1)))
    return recovery(features, chords_of(data), data.seed)


def recurrent(run: Run, cell: Any, latent: int, data: GuitarDataModule) -> dict[str, Any]:
    options: dict[str, Any] = {"num_features": data.num_features, "residual": True, "learning_rate": 5e-3}
    model = RecurrentNet(latent, cell=cell, seed=data.seed, **options)
    found = train(model, data, run.recurrent_epochs, patience=8)
    return {"error": prediction_error(model.predict_each(data.test_sequences), data.test_sequences), **found}


def linear(latent: int, data: GuitarDataModule) -> dict[str, Any]:
    test = data.test_sequences
    model = LinearGaussianHMM(latent, num_features=data.num_features, seed=data.seed)
    seconds = timed_fit(model, data, LINEAR_EPOCHS, None)
    recovered = recovery(heard(test, model.latents(test)), chords_of(data), data.seed)
    return {"error": prediction_error(model.predict_each(test), test), **recovered, "seconds": seconds}


def neural(run: Run, name: str, latent: int, data: GuitarDataModule) -> dict[str, Any]:
    """Trains a neural HMM; the figures and sounds are those of the first run of the setting for recovery."""
    test, chords = data.test_sequences, chords_of(data)
    model = NeuralHMM(latent, num_features=data.num_features, seed=data.seed, **OPTIONS[name])
    seconds = timed_fit(model, data, run.epochs, data.batch_size)
    at_once = recovery(heard(test, model.latents(test)), chords, data.seed)["ari"]
    latents = heard(test, model.latents(test, lead=1))
    if name == "recovery" and data.seed == run.runs[0] and latent == SHOWN:
        show(run, data, latents)
    recovered = {**recovery(latents, chords, data.seed), "ari_at_once": at_once}
    return {"error": prediction_error(model.predict_each(test), test), **recovered, "seconds": seconds}


def show(run: Run, data: GuitarDataModule, latents: Sequences) -> None:
    """Writes figures and sounds of the first test sequence that contains a chord twice, as the paper's does."""
    chords = chords_of(data)
    twice = (n for n, played in enumerate(chords) if len(played.unique()) == data.chords_per_sequence - 1)
    number = next(twice, 0)
    profiles, played = data.test_sequences[number], chords[number]
    clusters, names = clusters_of(latents[number], played, data.seed), data.state_names
    assert names is not None
    figures = {
        "sequence": figure_profiles(profiles, played, clusters, names, data.frame_rate),
        "latents": figure_latents(latents[number], played, clusters, names),
        "profiles": figure_clusters(profiles, played, clusters, names),
    }
    run.save(figures)
    sound, analysis = data.sound("test", number), data.analysis
    write_wav(run.out / "sequence.wav", torch.cat(sound), analysis.sample_rate)
    for cluster, signal in cluster_sounds(sound, clusters, analysis.window, analysis.hop).items():
        write_wav(run.out / f"cluster_{cluster}.wav", signal, analysis.sample_rate)


def cases(run: Run) -> Iterator[Case]:
    for seed in run.runs:
        yield from ({"model": name, "run": seed} for name in ("persistence", *CONTROLS))
        for latent in run.latent:
            yield from ({"model": name, "run": seed, "latent": latent} for name in run.models)


def compute(run: Run, case: Case) -> dict[str, Any]:
    name, data = case["model"], make_data(run, case["run"])
    if name == "persistence":
        return {"error": prediction_error(persistence(data.test_sequences), data.test_sequences)}
    if name in CONTROLS:
        return control(name, data)
    if name in CELLS:
        return recurrent(run, name, case["latent"], data)
    return linear(case["latent"], data) if name == "linear" else neural(run, name, case["latent"], data)


def table(run: Run) -> dict[str, str]:
    """Errors and the paper's, and the recovery of chords; mean and standard deviation over runs."""

    def found(what: str, name: str, **settings: Any) -> str:
        return mean_and_spread(run.records.values(what, model=name, **settings))

    errors, recovered = [], []
    for name in run.models:
        errors.append([NAMES[name], *(found("error", name, latent=latent) for latent in run.latent)])
        if name in PAPER:
            printed = dict(zip(LATENT, PAPER[name], strict=True))
            label = "neural HMM" if name == "prediction" else NAMES[name]
            errors.append([f"{label}, paper", *(printed.get(latent, "-") for latent in run.latent)])
        if run.records.values("ari", model=name):
            for latent in run.latent:
                measures = ("error", "accuracy", "purity", "ari", "ari_at_once")
                row = [found(what, name, latent=latent) for what in measures]
                recovered.append([f"{NAMES[name]}, d_h = {latent}", *row])
    errors.append(["the last profile again", *[found("error", "persistence")] * len(run.latent)])
    for name, words in CONTROLS.items():
        recovered.append([words, "-", *(found(what, name) for what in ("accuracy", "purity", "ari")), "-"])
    return {
        "errors": markdown_table(["", *(f"d_h = {latent}" for latent in run.latent)], errors),
        "recovery": markdown_table(["", "error", "accuracy", "purity", "ARI", "ARI at once"], recovered),
    }


def folder(run: Run) -> str:
    kind = "plucked" if run.path is None else "recorded"
    return f"neural/guitar/{kind}" + ("" if run.compression is None else f"_{run.compression:g}")


WAV_HELP = "folder of WAV files for each chord, also looked up in $LIGHTNING_HMM_DATA (plucked strings if not given)"
RUNS_HELP = "seeds of splits and sequences; settings were chosen on 100 and above"
EXPERIMENT = Experiment(
    folder=folder,
    description=__doc__,
    cases=cases,
    compute=compute,
    table=table,
    figure=None,
    options=[
        Option("--path", help=WAV_HELP),
        Option("--latent", type=int, nargs="+", default=list(LATENT), help="dimensions d_h of the latent space"),
        Option("--models", nargs="+", choices=list(NAMES), default=list(NAMES), help="models (all if not given)"),
        Option("--runs", type=int, nargs="+", default=list(range(3)), help=RUNS_HELP),
        Option("--compression", type=float, help="c of profiles log(1 + c p) instead of p"),
    ],
    settings={"sizes": SIZES, "epochs": 8, "recurrent_epochs": 60},
    quick={
        "latent": [5],
        "runs": [0],
        "models": ["prediction", "recovery", "lstm"],
        "sizes": {**SIZES, "num_sequences": 20, "recordings": 10},
        "epochs": 2,
        "recurrent_epochs": 1,
    },
    quick_help="one run, few sequences, few steps of training",
)

if __name__ == "__main__":
    run(EXPERIMENT)
