"""Pictures of a model: arrays or tensors in, a matplotlib `Figure` out.

Figures are made without pyplot, so they need no display, touch nobody's current figure, and go away with their last
reference; in a notebook the last line of a cell shows one. K states, V symbols, D features, R restarts, E epochs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize, PowerNorm
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Ellipse
from matplotlib.ticker import LogLocator, MaxNLocator, StrMethodFormatter
from scipy import stats
from torch import Tensor

Array = Tensor | np.ndarray | Sequence[Any]

# Okabe and Ito's colours, which the colour-blind can tell apart, without their yellow, which nobody sees on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#4D4D4D")
_BLUE, _VERMILION = COLOURS[:2]
_INK, _GREY, _FAINT = "#333333", "#8C8C8C", "#B8B8B8"
_PROBABILITY = LinearSegmentedColormap.from_list("probability", ["#FFFFFF", "#BBD9EC", "#4A9CCB", _BLUE, "#00263C"])
_SIGNED = LinearSegmentedColormap.from_list("signed", ["#00395A", _BLUE, "#F7F7F7", _VERMILION, "#6B2F00"])
_STATES = LinearSegmentedColormap.from_list("states", ["#00263C", _BLUE, "#009E73", "#E69F00"])

_WRITTEN = 12  # rows and columns up to which cells carry their numbers
_MAX_ROWS = 400  # more rows or columns than this have no pixel of their own, and are drawn as means of blocks
_MAX_BARS = 100  # more bars than this run together into an outline


def transition_matrix(probs: Array, max_labels: int = 40) -> Figure:
    """Heat map of (K, K) transition probabilities, the numbers written into the cells of a small matrix."""
    matrix = _numpy(probs)
    figure, (axes,) = _figure()
    _draw_probabilities(figure, axes, matrix, "Transition probabilities")
    axes.set_aspect("equal")
    _label_ticks(axes.xaxis, matrix.shape[1], max_labels=max_labels)
    _label_ticks(axes.yaxis, matrix.shape[0], max_labels=max_labels)
    axes.set(xlabel="to state", ylabel="from state")
    return figure


def clone_matrix(probs: Array, clones: Array, names: Sequence[str] | None = None) -> Figure:
    """Heat map of (H, H) transition probabilities of a cloned HMM, the clones of each symbol between lines.

    Args:
        probs: a row for each state; states are numbered symbol after symbol.
        clones: (V,) how many each symbol has.
        names: of the symbols; their numbers if not given.
    """
    matrix, ends = _numpy(probs), np.cumsum(_numpy(clones).astype(int))
    figure, (axes,) = _figure()
    _draw_probabilities(figure, axes, matrix, "Transition probabilities")
    axes.set_aspect("equal")
    axes.grid(visible=False)
    labels = [str(number) for number in range(len(ends))] if names is None else [_shown(name) for name in names]
    middles = ends - _numpy(clones) / 2 - 0.5
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(list(middles), labels, parse_math=False, fontsize=9 if len(labels) <= 30 else 7)
        axis.set_tick_params(length=0)
    for end in ends[:-1]:
        axes.axhline(end - 0.5, color=_FAINT, linewidth=0.5)
        axes.axvline(end - 0.5, color=_FAINT, linewidth=0.5)
    axes.set(xlabel="to a clone of", ylabel="from a clone of")
    return figure


def state_graph(
    graph: Any, groups: Sequence[Any], titles: Sequence[str] | None = None, columns: int = 3, seed: int = 0
) -> Figure:
    """Groups of states of a graph, a panel for each: the states by the names of their symbols, transitions as arrows, wider where more probable.

    Args:
        graph: as `ClonedHMM.state_graph` makes it.
        groups: of states, such as `graphs.communities` finds.
        titles: of the panels.
        columns: panels in a row.
        seed: of the places.
    """
    import networkx as nx

    rows = -(-len(groups) // columns)
    figure = Figure(figsize=(3.4 * columns, 3.1 * rows), dpi=110, layout="constrained", facecolor="white")
    for panel, axes in enumerate(figure.subplots(rows, columns, squeeze=False).reshape(-1)):
        axes.set_axis_off()
        if panel >= len(groups):
            continue
        part = graph.subgraph(groups[panel])
        places = (
            nx.kamada_kawai_layout(part.to_undirected(as_view=True), weight=None)
            if len(part) > 1
            else dict.fromkeys(part, (0.0, 0.0))
        )
        weights = np.array([weight for _, _, weight in part.edges(data="weight")])
        widths = 0.4 + 2 * weights / max(weights.max(), 1e-12) if len(weights) else []
        nx.draw_networkx_edges(
            part,
            places,
            ax=axes,
            width=widths,
            edge_color=_GREY,
            arrowsize=8,
            node_size=230,
            connectionstyle="arc3,rad=0.08",
        )
        nx.draw_networkx_nodes(
            part, places, ax=axes, node_size=230, node_color="#DCEBF5", edgecolors=_BLUE, linewidths=0.8
        )
        nx.draw_networkx_labels(
            part,
            places,
            {state: _shown(str(part.nodes[state]["name"])) for state in part},
            ax=axes,
            font_size=9,
            font_color=_INK,
        )
        if titles is not None:
            axes.set_title(titles[panel], fontsize=9, color=_INK, parse_math=False)
        axes.margins(0.12)
    return figure


def emission_matrix(probs: Array, names: Sequence[str] | None = None, max_labels: int = 40) -> Figure:
    """Heat map of (K, V) emission probabilities.

    Args:
        probs: a row for each state.
        names: of the symbols; their numbers if not given.
        max_labels: how many symbols are labelled at most; of more, every second, fifth, tenth...
    """
    matrix = _numpy(probs)
    figure, (axes,) = _figure()
    _draw_probabilities(figure, axes, matrix, "Emission probabilities")
    _label_ticks(axes.xaxis, matrix.shape[1], names, max_labels)
    _label_ticks(axes.yaxis, matrix.shape[0], max_labels=max_labels)
    axes.set(xlabel="symbol", ylabel="state")
    return figure


def gaussian_emissions(
    means: Array,
    variances: Array,
    share: Array | None = None,
    centre: Array | None = None,
    variance: Array | None = None,
    points: Array | None = None,
    max_labels: int = 40,
    names: Sequence[str] | None = None,
) -> Figure:
    """Gaussian emissions: densities for one feature, ellipses for two, a heat map of the means for more.

    Args:
        means: (K, D) of the states.
        variances: (K, D) of the states, or (K, D, D) covariances, with which ellipses are rotated.
        share: (K,) share of time spent in each state. It weights the densities and appears next to each state's name. If it is not given, the
            densities have equal weights and no share is printed.
        centre, variance: (D,) mean and variance of the data, the units of the heat map; 0 and 1 if not given.
        points: (steps, D) some of the data, drawn behind one or two features.
        max_labels: of states and features.
        names: of the features; their numbers if not given.
    """
    centres, moments = _numpy(means), _numpy(variances)
    covariances = moments if moments.ndim == 3 else moments[:, :, None] * np.eye(moments.shape[1])
    num_states, num_features = centres.shape
    weights = np.full(num_states, 1 / num_states) if share is None else _numpy(share)
    states = [
        f"state {state}" if share is None else f"state {state} ({weight:.0%})" for state, weight in enumerate(weights)
    ]
    data = np.empty((0, num_features)) if points is None else _numpy(points)
    data = data[np.isfinite(data).all(1)]
    if num_features == 1:
        figure = _densities(centres[:, 0], np.sqrt(covariances[:, 0, 0]), weights, states, data[:, 0])
        figure.axes[0].set_ylabel(
            "density, equal weight for each state" if share is None else "density times share of time"
        )
        if names is not None:
            figure.axes[0].set_xlabel(_shown(names[0]), parse_math=False)
        return figure
    if num_features == 2:
        figure = _ellipses(centres, covariances, weights, states, data, max_labels)
        if names is not None:
            figure.axes[0].set_xlabel(_shown(names[0]), parse_math=False)
            figure.axes[0].set_ylabel(_shown(names[1]), parse_math=False)
        return figure
    offset = np.zeros(num_features) if centre is None else _numpy(centre)
    unit = np.ones(num_features) if variance is None else np.sqrt(_numpy(variance))
    return _means((centres - offset) / unit, max_labels, known_units=variance is not None, names=names)


def count_emissions(
    rates: Array, share: Array | None = None, points: Array | None = None, name: str | None = None
) -> Figure:
    """Poisson emissions of one column: the probability of each count, times the share of time in each state.

    Args:
        rates: (K,) of the states.
        share: (K,) share of time spent in each state; equal weights if not given.
        points: (steps,) some of the data, drawn behind.
        name: of the column.
    """
    means = _numpy(rates)
    weights = np.full(len(means), 1 / len(means)) if share is None else _numpy(share)
    data = np.empty(0) if points is None else _numpy(points)
    data = data[np.isfinite(data)]
    visited = weights >= min(1e-3, weights.max())
    highest = int(np.ceil((means + 4 * np.sqrt(means))[visited].max()))
    highest = max(highest, int(np.quantile(data, 0.995))) if len(data) else highest
    counts = np.unique(np.linspace(0, highest, min(highest + 1, 400)).round().astype(int))
    figure, (axes,) = _figure()
    if len(data):
        width = -(-(highest + 1) // 100)  # of a bar, in counts
        axes.hist(
            data,
            bins=np.arange(-0.5, highest + width, width).tolist(),
            density=True,
            color="#E4E4E4",
            rwidth=0.9,
            label="data",
        )
    colours, few = _state_colours(len(means))
    mark = "o" if len(counts) <= 60 else None
    for state, (rate, weight) in enumerate(zip(means, weights, strict=True)):
        label = f"state {state}" if share is None else f"state {state} ({weight:.0%})"
        values = weight * stats.poisson.pmf(counts, rate)
        axes.plot(
            counts,
            values,
            color=colours(state),
            linewidth=1.8 if few else 1,
            marker=mark,
            markersize=3,
            label=label if few else None,
        )
    if len(means) > 1:
        total = (weights * stats.poisson.pmf(counts[:, None], means)).sum(1)
        axes.plot(counts, total, color=_INK, linewidth=1, linestyle=(0, (4, 2)), zorder=1.5, label="all states")
    weighted = "probability, equal weight for each state" if share is None else "probability times share of time"
    axes.set(xlim=(-0.6, highest + 0.6), ylim=(0, None), ylabel=weighted)
    axes.set_xlabel("count" if name is None else _shown(name), parse_math=False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _title(axes, "Emission probabilities")
    _name_states(figure, axes, len(means), few)
    return figure


def state_usage(share: Array | None, dwell: Array | None = None, source: str = "") -> Figure:
    """Two panels: the share of time in each state as bars, and how long a visit lasts.

    Args:
        share: (K,) expected share of time; a panel is left out if its numbers are not given.
        dwell: (K,) expected steps of a visit, as `expected_dwell` gives them; infinite ones are drawn as such.
        source: what `share` is of, for the title.
    """
    panels = [panel for panel in (share, dwell) if panel is not None]
    figure, rows = _figure(len(panels))
    if share is not None:
        axes, values = rows.pop(0), _numpy(share)
        if len(values) <= _MAX_BARS:
            axes.bar(np.arange(len(values)), values, width=0.8, color=_BLUE)
        else:
            axes.stairs(
                values, np.arange(len(values) + 1) - 0.5, fill=True, facecolor=_BLUE, edgecolor=_BLUE, linewidth=0.5
            )
        axes.set(ylabel="share of time", ylim=(0, None))
        _title(axes, f"Expected share of time{f' ({source})' if source else ''}")
        _state_axis(axes, len(values), last=dwell is None)
    if dwell is not None:
        _draw_dwell(rows.pop(0), _numpy(dwell))
    return figure


def convergence(epochs: Array, train: Array, val: Array | None = None, chosen: int = 0) -> Figure:
    """Log-likelihood per symbol against epoch, and below it what each epoch gained, on a logarithmic scale.

    A training value is of the parameters its batches met, a validation value of those at the end of the epoch: in batch EM
    the training curve is one update behind.

    Args:
        epochs: (E,) their numbers.
        train: (E,) or (E, R) training log-likelihood, NaN where it is not known; the chosen restart is drawn thick, the others thin.
        val: (E,) validation log-likelihood, NaN where there was none.
        chosen: which restart.
    """
    numbers, curves = _numpy(epochs), _numpy(train)
    curves = np.where(np.isfinite(curves), curves, np.nan).reshape(len(numbers), -1)
    figure, (above, below) = _figure(2, heights=(3, 2), share_x=True)
    others = np.delete(curves, chosen, axis=1)
    if others.shape[1]:
        above.plot(
            numbers,
            others,
            color=_BLUE,
            linewidth=0.8,
            alpha=0.45,
            label=["other restarts"] + ["_"] * (others.shape[1] - 1),
        )
    lines = {"training": (curves[:, chosen], _BLUE)}
    if val is not None and np.isfinite(_numpy(val)).any():
        lines["validation"] = (_numpy(val), _VERMILION)
    sizes = []
    for name, (values, colour) in lines.items():
        known = np.isfinite(values)
        at, values = numbers[known], values[known]
        few = len(at) <= 30
        above.plot(
            at, values, color=colour, linewidth=2, marker="o", markersize=5 if few else 2, markeredgewidth=0, label=name
        )
        gains, at = np.diff(values) / np.diff(at), at[1:]
        below.plot(
            at,
            np.where(gains > 0, gains, np.nan),
            color=colour,
            linewidth=1.4,
            marker="o",
            markersize=5 if few else 1.4,
            markeredgewidth=0,
        )
        falls = gains < 0
        if falls.any():
            below.plot(
                at[falls],
                -gains[falls],
                color=colour,
                linestyle="",
                marker="v",
                markersize=5,
                markerfacecolor="white",
                label=f"{name} fell by",
            )
        sizes.append(np.abs(gains[gains != 0]))
    _decades(below, np.concatenate(sizes))
    above.set(ylabel="log-likelihood per symbol")
    below.set(xlabel="epoch", ylabel="gain per epoch")
    margin = max(0.5, 0.02 * (numbers.max() - numbers.min()))
    below.set_xlim(numbers.min() - margin, numbers.max() + margin)
    below.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    _title(above, "Convergence")
    _legend(above)
    _legend(below)
    return figure


def composition(
    before: Mapping[str, Array], after: Mapping[str, Array], names: Sequence[str] | None = None, max_labels: int = 40
) -> Figure:
    """The vectors of a DenseHMM and the matrices made of them, before training and after: states leave and enter, states emit symbols.

    Args:
        before: "U" and "Z" with one embedding per row, the matrix "transition", for embedded emissions also "V" and "W", and for
            embedded symbols the matrix "emission".
        after: the same.
        names: of the symbols; their numbers if not given.
        max_labels: how many points or symbols are labelled.
    """
    pairs = [(("Z", "U"), "transition")] + ([(("W", "V"), "emission")] if "W" in after else [])
    num_matrices = sum(matrix in after for _, matrix in pairs)
    width = 5.2 * num_matrices + 3.4 * (len(pairs) - num_matrices) + 2
    figure = Figure(figsize=(width, 6.4), dpi=110, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
    panels = figure.subplots(2, len(pairs) + num_matrices, squeeze=False)
    for row, (when, values) in zip(panels, {"before": before, "after": after}.items(), strict=True):
        places = iter(row)
        for pair, matrix in pairs:
            axes = next(places)
            _draw_vectors(axes, {name: _numpy(values[name]) for name in pair}, names, max_labels)
            _title(axes, f"{pair[0]} and {pair[1]}, {when}")
            if matrix in values:
                axes, probs = next(places), _numpy(values[matrix])
                _, blocks = _heat_map(axes, probs, _PROBABILITY, PowerNorm(0.5, 0, 1))
                _title(axes, ("A" if matrix == "transition" else "B") + f", {when}{blocks}")
                axes.tick_params(labelsize=8, labelcolor=_INK, color=_GREY, length=3)
                _label_ticks(axes.yaxis, probs.shape[0], max_labels=max_labels)
                _label_ticks(axes.xaxis, probs.shape[1], names if matrix == "emission" else None, max_labels)
    return figure


def cooccurrences(target: Array, model: Array, names: Sequence[str] | None = None, max_labels: int = 40) -> Figure:
    """Frequencies of symbol pairs in the data, under the model, and their difference. The colours are those of square roots: most pairs are rare."""
    wanted, made = _numpy(target), _numpy(model)
    figure = Figure(figsize=(13, 4.6), dpi=110, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.08))
    largest, gap = max(wanted.max(), made.max()), max(np.abs(made - wanted).max(), 1e-12)
    scale = PowerNorm(0.5, 0, largest)
    panels = (
        ("Data", wanted, _PROBABILITY, scale),
        ("Model", made, _PROBABILITY, scale),
        ("Model less data", made - wanted, _SIGNED, Normalize(-gap, gap)),
    )
    for axes, (title, matrix, colours, norm) in zip(figure.subplots(1, 3), panels, strict=True):
        image, blocks = _heat_map(axes, matrix, colours, norm, written=False)
        _title(axes, title + blocks)
        axes.set_aspect("equal")
        axes.tick_params(labelsize=8, labelcolor=_INK, color=_GREY, length=3)
        _label_ticks(axes.yaxis, len(matrix), names, max_labels)
        _label_ticks(axes.xaxis, len(matrix), names, max_labels)
        axes.set(xlabel="next symbol", ylabel="symbol")
        _colour_bar(figure, axes, image, "difference" if colours is _SIGNED else "frequency")
    return figure


def expected_dwell(probs: Array) -> np.ndarray:
    """(K,) expected steps of a visit, 1 / (1 - A_kk); infinite for a state that is never left."""
    stay = np.minimum(np.diagonal(_numpy(probs)), 1.0)
    with np.errstate(divide="ignore"):
        dwell: np.ndarray = 1 / (1 - stay)
    return dwell


def stationary_distribution(probs: Array) -> np.ndarray:
    """(K,) the shares of time in the long run; where the chain falls into parts, a mixture of theirs. O(K^3).

    Short sequences never see the long run: for them expected visits are the better answer.
    """
    matrix = _numpy(probs)
    # pi A = pi and sum(pi) = 1; least squares also copes with several solutions.
    equations = np.vstack([matrix.T - np.eye(len(matrix)), np.ones(len(matrix))])
    solution: np.ndarray = np.linalg.lstsq(equations, np.append(np.zeros(len(matrix)), 1.0), rcond=None)[0].clip(min=0)
    solution /= solution.sum()
    return solution


# Gaussian emissions, by the number of features


def _densities(means: np.ndarray, spreads: np.ndarray, share: np.ndarray, names: list[str], data: np.ndarray) -> Figure:
    figure, (axes,) = _figure()
    # States that are hardly visited may lie anywhere, and so may a few of the data; they do not set the range.
    visited = share >= min(1e-3, share.max())
    low, high = (means - 3.5 * spreads)[visited].min(), (means + 3.5 * spreads)[visited].max()
    if len(data):
        low, high = min(low, np.quantile(data, 0.005)), max(high, np.quantile(data, 0.995))
        axes.hist(data, bins=60, range=(low, high), density=True, color="#E4E4E4", label="data")
    colours, few = _state_colours(len(means))
    for state, (mean, spread, weight) in enumerate(zip(means, spreads, share, strict=True)):
        grid = mean + spread * np.linspace(-4.5, 4.5, 121)
        label = names[state] if few else None
        axes.plot(
            grid, weight * _density(grid, mean, spread), color=colours(state), linewidth=1.8 if few else 1, label=label
        )
    if len(means) > 1:
        # Finer around each mean, for states that are narrow on the scale of the whole.
        grid = np.sort(
            np.concatenate([np.linspace(low, high, 400), (means + spreads * np.linspace(-4, 4, 17)[:, None]).ravel()])
        )
        total = (share * _density(grid[:, None], means, spreads)).sum(1)
        axes.plot(grid, total, color=_INK, linewidth=1, linestyle=(0, (4, 2)), zorder=1.5, label="all states")
    axes.set(xlabel="value", xlim=(low, high), ylim=(0, None))
    _title(axes, "Emission densities")
    _name_states(figure, axes, len(means), few)
    return figure


def _density(grid: np.ndarray, mean: Any, spread: Any) -> np.ndarray:
    density: np.ndarray = np.exp(-0.5 * ((grid - mean) / spread) ** 2) / (spread * np.sqrt(2 * np.pi))
    return density


def _ellipses(
    means: np.ndarray, covariances: np.ndarray, share: np.ndarray, names: list[str], data: np.ndarray, max_labels: int
) -> Figure:
    figure, (axes,) = _figure()
    if len(data):
        shown = data[:: -(-len(data) // 2000)]
        axes.plot(
            shown[:, 0],
            shown[:, 1],
            linestyle="",
            marker=".",
            markersize=2.5,
            color=_FAINT,
            markeredgewidth=0,
            zorder=0.5,
            label="data",
        )
    colours, few = _state_colours(len(means))
    labelled = len(means) <= max_labels
    for state, (mean, covariance, weight) in enumerate(zip(means, covariances, share, strict=True)):
        colour = colours(state)[:3]
        # The first axis is that of the first feature where the features are not correlated.
        widths, axes_of_ellipse = np.linalg.eigh(covariance)
        first = int(np.abs(axes_of_ellipse[0]).argmax())
        spread = np.sqrt(widths.clip(min=0))[[first, 1 - first]]
        angle = float(np.degrees(np.arctan2(axes_of_ellipse[1, first], axes_of_ellipse[0, first])))
        # Of many states, those that are seldom visited step back.
        strength = 1.0 if few else 0.2 + 0.8 * (weight / share.max())  # the quotient is at most 1, and so is the sum
        for radius, shade in ((2, 0.1), (1, 0.2)):
            width, height = 2 * radius * spread
            fill = (colour, shade * strength) if labelled else "none"
            axes.add_patch(
                Ellipse(
                    tuple(mean),
                    width,
                    height,
                    angle=angle,
                    facecolor=fill,
                    edgecolor=(colour, strength),
                    linewidth=1.2 if few else 0.7,
                )
            )
        label = names[state] if few else None
        axes.plot(*mean, linestyle="", marker="o", markersize=4 if few else 2.5, color=(colour, strength), label=label)
        if not few and labelled:
            axes.annotate(str(state), mean, xytext=(3, 3), textcoords="offset points", fontsize=7, color=_INK)
    axes.set(xlabel="feature 0", ylabel="feature 1")
    _title(axes, "Emissions: means, one and two standard deviations")
    _name_states(figure, axes, len(means), few)
    return figure


def _means(means: np.ndarray, max_labels: int, known_units: bool, names: Sequence[str] | None) -> Figure:
    figure, (axes,) = _figure()
    limit = max(float(np.abs(means).max()), 1e-12)
    image, blocks = _heat_map(axes, means, _SIGNED, Normalize(-limit, limit))
    _label_ticks(axes.xaxis, means.shape[1], names, max_labels=max_labels)
    _label_ticks(axes.yaxis, means.shape[0], max_labels=max_labels)
    axes.set(xlabel="feature", ylabel="state")
    _title(axes, f"Emission means{blocks}")
    _colour_bar(figure, axes, image, "standard deviations of the data from its mean" if known_units else "mean")
    return figure


def _draw_dwell(axes: Axes, dwell: np.ndarray) -> None:
    """Points on stalks: a bar's length means nothing on a logarithmic scale."""
    states, finite = np.arange(len(dwell)), np.isfinite(dwell)
    size = 6 if len(dwell) <= 30 else 3.5 if len(dwell) <= _MAX_BARS else 2
    if len(dwell) <= _MAX_BARS:
        axes.vlines(states[finite], 1, dwell[finite], color=_FAINT, linewidth=1)
    axes.plot(states[finite], dwell[finite], linestyle="", marker="o", markersize=size, color=_BLUE)
    top = max(float(dwell[finite].max(initial=1.0)), 2.0) * 1.5
    if not finite.all():
        # Above all others, in place of the height they have not.
        axes.plot(
            states[~finite],
            np.full((~finite).sum(), top),
            linestyle="",
            marker="^",
            markersize=7,
            color=_VERMILION,
            label="never left",
        )
        top *= 1.5
    axes.set_yscale("log")
    axes.set(ylabel="steps", ylim=(0.9, top))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if top < 200 else (1,)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.minorticks_off()
    _title(axes, "Expected length of a visit")
    _state_axis(axes, len(dwell), last=True)
    _legend(axes)


# Parts of figures


def _draw_vectors(axes: Axes, vectors: Mapping[str, np.ndarray], names: Sequence[str] | None, max_labels: int) -> None:
    """Points in the plane: vectors of length one on its diagonal, longer ones along their two directions of largest spread."""
    together = np.concatenate(list(vectors.values()))
    if together.shape[1] == 1:
        together = np.repeat(together, 2, axis=1)
    elif together.shape[1] > 2:
        centred = together - together.mean(0)
        together = centred @ np.linalg.svd(centred, full_matrices=False)[2][:2].T
    first = 0
    for number, (name, rows) in enumerate(vectors.items()):
        points = together[first : first + len(rows)]
        first += len(rows)
        axes.scatter(points[:, 0], points[:, 1], s=14, color=COLOURS[number], label=name, marker="os"[number])
        if len(rows) <= max_labels:
            for index, point in enumerate(points):
                text = _shown(names[index]) if name == "V" and names is not None else str(index)
                axes.annotate(
                    text, point, (3, 3), textcoords="offset points", fontsize=7, color=COLOURS[number], parse_math=False
                )
    axes.margins(0.12)
    axes.grid(color="#E6E6E6", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_GREY)
    axes.tick_params(labelsize=8, labelcolor=_INK, color=_GREY, length=3)
    _legend(axes)


def _numpy(array: Array) -> np.ndarray:
    return array.detach().double().cpu().numpy() if isinstance(array, Tensor) else np.asarray(array, dtype=np.float64)


def _figure(rows: int = 1, heights: Sequence[float] | None = None, share_x: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure and its panels, from top to bottom, in the common style."""
    figure = Figure(figsize=(7, 5), dpi=110, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1), facecolor="white")
    panels = figure.subplots(
        rows, squeeze=False, sharex=share_x, gridspec_kw=None if heights is None else {"height_ratios": heights}
    )[:, 0]
    for axes in panels:
        axes.set_axisbelow(True)
        axes.grid(color="#E6E6E6", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_GREY)
        axes.tick_params(labelsize=9, labelcolor=_INK, color=_GREY, length=3)
        for label in (axes.xaxis.label, axes.yaxis.label):
            label.set(size=10, color=_INK)
    return figure, list(panels)


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, fontsize=11, color=_INK, loc="left")


def _draw_probabilities(figure: Figure, axes: Axes, matrix: np.ndarray, title: str) -> None:
    """Colours run from 0 to 1 always, so that steps can be compared; among many columns, small probabilities get more of them."""
    many = matrix.shape[1] > _WRITTEN
    image, blocks = _heat_map(axes, matrix, _PROBABILITY, PowerNorm(0.5, 0, 1) if many else Normalize(0, 1))
    _title(axes, title + blocks)
    bar = _colour_bar(figure, axes, image, "probability")
    if blocks:
        # A mean over a block never comes near 1.
        image.set_clim(0, np.max(np.asarray(image.get_array())))
    elif many:
        bar.set_ticks(
            [0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1],
            labels=["0", "0.01", "0.05", "0.1", "0.2", "0.4", "0.6", "0.8", "1"],
        )


def _block_means(matrix: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Means of blocks of `rows` by `columns`; those at the far edges may be smaller."""
    row_starts, column_starts = np.arange(0, matrix.shape[0], rows), np.arange(0, matrix.shape[1], columns)
    means: np.ndarray = np.add.reduceat(np.add.reduceat(matrix, row_starts, axis=0), column_starts, axis=1)
    means /= np.outer(np.diff(row_starts, append=matrix.shape[0]), np.diff(column_starts, append=matrix.shape[1]))
    return means


def _heat_map(
    axes: Axes, matrix: np.ndarray, colours: Colormap, norm: Normalize, written: bool = True
) -> tuple[AxesImage, str]:
    """Draws a matrix and returns what the title must say about blocks; axes count rows and columns, whatever the blocks.

    The cells of a small matrix carry their numbers, if `written`.
    """
    rows, columns = (-(-size // _MAX_ROWS) for size in matrix.shape)
    drawn, blocks = matrix, ""
    if rows > 1 or columns > 1:
        drawn, blocks = _block_means(matrix, rows, columns), f" (means of blocks of {rows} x {columns})"
    edges = (-0.5, drawn.shape[1] * columns - 0.5, drawn.shape[0] * rows - 0.5, -0.5)
    image = axes.imshow(drawn, cmap=colours, norm=norm, aspect="auto", extent=edges, interpolation="nearest")
    axes.set(xlim=(-0.5, matrix.shape[1] - 0.5), ylim=(matrix.shape[0] - 0.5, -0.5))
    axes.grid(False)
    axes.spines[:].set_visible(True)
    axes.spines[:].set_color(_FAINT)
    if written and max(matrix.shape) <= _WRITTEN:
        for (row, column), value in np.ndenumerate(matrix):
            red, green, blue, _ = colours(norm(value))
            dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.6
            colour = "white" if dark else _FAINT if abs(value) < 0.005 else _INK
            axes.text(
                column,
                row,
                f"{value:.2f}",
                ha="center",
                va="center",
                fontsize=9 if max(matrix.shape) <= 8 else 8,
                color=colour,
            )
    return image, blocks


def _label_ticks(axis: Axis, count: int, names: Sequence[str] | None = None, max_labels: int = 40) -> None:
    """Labels every entry, or every second, fifth, tenth... where that would be too many; numbers need fewer labels than names."""
    limit = max_labels if names is not None or count <= 20 else min(max_labels, 13 if count <= 1000 else 7)
    stride = next(step * 10**power for power in range(20) for step in (1, 2, 5) if count <= limit * step * 10**power)
    ticks = range(0, count, stride)
    labels = [str(tick) for tick in ticks] if names is None else [_shown(names[tick]) for tick in ticks]
    # Names are no mathematics, even with dollar signs in them.
    axis.set_ticks(list(ticks), labels, parse_math=False, fontsize=9 if len(labels) <= 30 else 7)
    if axis is axis.axes.xaxis and max(map(len, labels)) * len(labels) > 75:
        axis.set_tick_params(rotation=90)


def _shown(name: str) -> str:
    """A name that can be seen, and is not too long."""
    visible = "␣" if name == " " else name if name.isprintable() and name.strip() else repr(name)[1:-1]
    return visible if len(visible) <= 12 else visible[:11] + "…"


def _colour_bar(figure: Figure, axes: Axes, image: AxesImage | ScalarMappable, label: str) -> Any:
    bar = figure.colorbar(image, ax=axes, shrink=0.9, aspect=30, pad=0.02)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=9, labelcolor=_INK, color=_GREY, length=3)
    bar.set_label(label, size=10, color=_INK)
    return bar


def _legend(axes: Axes, beside: bool = False) -> None:
    """Outside the axes, where it hides nothing: at the right end of the title's line, or `beside` the axes."""
    handles, _ = axes.get_legend_handles_labels()
    if handles:
        place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1, 1)}
        if not beside:
            place = {"loc": "lower right", "bbox_to_anchor": (1, 0.99), "ncols": len(handles)}
        legend = axes.legend(**place, frameon=False, fontsize=9, labelcolor=_INK, borderpad=0.1, columnspacing=1.2)
        for handle in legend.legend_handles:
            if isinstance(handle, Line2D):
                handle.set_markersize(5)


def _decades(axes: Axes, values: np.ndarray) -> None:
    """A logarithmic axis over whole powers of ten, so that there are some to label."""
    axes.set_yscale("log")
    axes.minorticks_off()
    if len(values):
        low, high = np.floor(np.log10(values.min())), np.ceil(np.log10(values.max()))
        axes.set_ylim(10**low, 10 ** max(high, low + 1))
    else:
        axes.yaxis.set_visible(False)
        axes.text(
            0.5,
            0.5,
            "from the second epoch on",
            transform=axes.transAxes,
            ha="center",
            va="center",
            fontsize=9,
            color=_GREY,
        )


def _name_states(figure: Figure, axes: Axes, num_states: int, few: bool) -> None:
    """A few states have their names in the legend, many a colour bar."""
    if not few:
        bar = _colour_bar(figure, axes, ScalarMappable(Normalize(0, num_states - 1), _STATES), "state")
        bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(axes, beside=few)


def _state_colours(num_states: int) -> tuple[Any, bool]:
    """The colour of each state as a function, and whether there are few enough states for colours of their own."""
    few = num_states <= len(COLOURS)
    colours = LinearSegmentedColormap.from_list("few", COLOURS, len(COLOURS)) if few else _STATES.resampled(num_states)
    return colours, few


def _state_axis(axes: Axes, num_states: int, last: bool) -> None:
    """An axis of state numbers; only the lowest panel says so."""
    axes.grid(False, axis="x")
    axes.set_xlim(-0.6, num_states - 0.4)
    _label_ticks(axes.xaxis, num_states)
    if last:
        axes.set_xlabel("state")
