"""Figures and sounds of one chord sequence."""

from __future__ import annotations

import wave
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.decomposition import PCA
from torch import Tensor

from datamodules.guitar import PITCHES
from experiments.panels import legend, panels
from lightning_hmm.plotting import COLORS


def write_wav(path: Path, signal: Tensor, rate: int) -> None:
    samples = (signal / signal.abs().max().clamp(min=1e-9) * 0.9 * (2**15 - 1)).round().short()
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.numpy().tobytes())


def cluster_sounds(sound: list[Tensor], clusters: np.ndarray, window: int, hop: int) -> dict[int, Tensor]:
    """Returns the (samples,) sound of each cluster, silent during other clusters. Edges fade over one hop."""
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
        share = (inside[hop:] - inside[:-hop]) / hop  # of the hop around a sample that belongs to the cluster
        found[cluster] = signal * share.to(signal)
    return found


def figure_profiles(
    profiles: Tensor, chords: Tensor, clusters: np.ndarray, names: list[str], frame_rate: float
) -> Figure:
    """Figures 4 and 5b: the profiles of a sequence, and its clusters below the chords that were played."""
    plot, ((top,), (bottom,)) = panels(9, 5, 2, 1, sharex=True, height_ratios=[2, 1])
    extent = (0, len(profiles) / frame_rate, -0.5, 11.5)
    top.imshow(profiles.T.numpy(), aspect="auto", origin="lower", extent=extent, cmap="Greys", interpolation="nearest")
    top.spines[["top", "right"]].set_visible(True)
    top.set_yticks(range(12), PITCHES)
    top.set(title="Pitch-class profiles")
    times = np.arange(len(clusters)) / frame_rate
    bottom.step(times, clusters, where="post", color="#333333", linewidth=1.2)
    bottom.set_yticks(range(int(clusters.max()) + 1))
    bottom.set(title="Clusters of latent states", xlabel="seconds", ylabel="cluster")
    edges = [0, *(np.flatnonzero(np.diff(chords.numpy())) + 1), len(chords)]
    for axes in (top, bottom):
        for edge in edges[1:-1]:
            axes.axvline(edge / frame_rate, color=COLORS[1], linestyle="--", linewidth=1)
    for first, last in pairwise(edges):
        place, name = (first + last) / 2 / frame_rate, names[int(chords[first])]
        bottom.text(place, clusters.max() + 0.35, name, ha="center", color=COLORS[1])
    bottom.set_ylim(-0.4, clusters.max() + 0.8)
    return plot


def figure_latents(latents: Tensor, chords: Tensor, clusters: np.ndarray, names: list[str]) -> Figure:
    """Figure 5a: the first two principal components of the latent states, by cluster and by chord."""
    plot, (all_axes,) = panels(9, 4, 1, 2)
    shown = PCA(2).fit_transform(latents.numpy()) if latents.shape[1] > 2 else latents.numpy()
    labels = [f"cluster {number}" for number in range(int(clusters.max()) + 1)]
    kinds = [(clusters, labels, "Clusters"), (chords.numpy(), names, "Chords played")]
    for axes, (numbers, words, title) in zip(all_axes, kinds, strict=True):
        for place, number in enumerate(np.unique(numbers[numbers >= 0])):
            rows, color = numbers == number, COLORS[place % len(COLORS)]
            axes.plot(shown[rows, 0], shown[rows, 1], "o", markersize=3, color=color, label=words[number])
        axes.set(title=title, xlabel="first principal direction", ylabel="second")
        legend(axes)
    return plot


def figure_clusters(profiles: Tensor, chords: Tensor, clusters: np.ndarray, names: list[str]) -> Figure:
    """Figure 6: the mean profile of each cluster and that of its most frequent chord."""
    count = int(clusters.max()) + 1
    plot, (all_axes,) = panels(2.6 * count, 2.8, 1, count, sharey=True)
    for cluster, axes in enumerate(all_axes):
        rows = torch.from_numpy(clusters == cluster)
        chord = int(chords[rows].mode().values)
        played = (chords == chord) & ~profiles.isnan().any(1)
        axes.bar(range(12), profiles[rows].mean(0), color=COLORS[0], width=0.75, label="cluster")
        axes.plot(range(12), profiles[played].mean(0), "o", markersize=4, color=COLORS[1], label="chord as played")
        axes.set_xticks(range(12), PITCHES, fontsize=6)
        axes.set_title(f"cluster {cluster}: {names[chord]}", fontsize="medium")
    legend(all_axes[-1], fontsize="x-small")
    return plot
