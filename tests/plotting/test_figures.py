"""What is drawn is what was given; and it can be drawn, at every size, without a warning."""

from __future__ import annotations

import gc
import weakref

import networkx as nx
import numpy as np
import pytest
import torch
from matplotlib import pyplot
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse
from scipy import stats

from lightning_hmm import plotting


def rows(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.dirichlet(np.full(shape[-1], 0.3), size=shape[:-1])


def render(figure: Figure) -> np.ndarray:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def written(figure: Figure) -> dict[tuple[int, int], float]:
    """The numbers in the cells of a heat map, by row and column."""
    return {
        (round(text.get_position()[1]), round(text.get_position()[0])): float(text.get_text())
        for text in figure.axes[0].texts
    }


def integral(x: np.ndarray, y: np.ndarray) -> float:
    return float((np.diff(x) * (y[1:] + y[:-1]) / 2).sum())


def labels(axis) -> list[str]:
    return [text.get_text() for text in axis.get_ticklabels()]


def test_ellipses_follow_the_correlation():
    """The ends of the axes of an ellipse are at two standard deviations along the eigenvectors."""
    covariances = np.array([[[4.0, 1.9], [1.9, 1.0]], [[1.0, -0.5], [-0.5, 9.0]], [[4.0, 0.0], [0.0, 1.0]]])
    axes = plotting.gaussian_emissions(np.zeros((3, 2)), covariances, names=["width", "height"]).axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("width", "height")
    outer = [patch for patch in axes.patches if isinstance(patch, Ellipse)][::2]
    for ellipse, covariance in zip(outer, covariances, strict=True):
        for end in ellipse.get_co_vertices() + ellipse.get_vertices():
            np.testing.assert_allclose(np.array(end) @ np.linalg.solve(covariance, end), 4.0, rtol=1e-9)
    assert outer[2].angle % 180 == pytest.approx(0)
    assert outer[2].width == pytest.approx(8)


def counts(rates: list[float], points: np.ndarray, highest: int) -> plotting.ColumnDensities:
    values = np.arange(highest + 1.0)
    return plotting.ColumnDensities(values, stats.poisson.pmf(values[:, None], rates), points, "visits", True)


def test_counts_are_drawn_with_their_probabilities(rng):
    axes = plotting.column_emissions([counts([1.0, 6.0], rng.poisson(4, 500), 20)], [0.25, 0.75]).axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    assert set(lines) == {"state 0 (25%)", "state 1 (75%)", "all states"}
    values, heights = lines["state 0 (25%)"].get_data()
    assert heights[list(values).index(0)] == pytest.approx(0.25 * np.exp(-1))
    assert lines["all states"].get_ydata().sum() == pytest.approx(1, abs=1e-3)
    assert sum(bar.get_height() for bar in axes.patches) == pytest.approx(1)
    assert axes.get_xlabel() == "visits"


@pytest.mark.parametrize("rates", [[1e-3], [5.0, 4000.0], list(np.linspace(1, 50, 30))])
def test_counts_of_all_sizes_can_be_drawn(rng, rates):
    render(plotting.column_emissions([counts(rates, rng.poisson(rates[-1], 100), int(rates[-1]) + 5)]))
    render(plotting.column_emissions([counts(rates, np.empty(0), 3)]))


def test_columns_have_one_panel_each_and_densities_that_are_infinite_at_a_border_are_cut(rng):
    values = np.linspace(0, 5, 100)
    spiked = plotting.ColumnDensities(
        values, stats.gamma.pdf(values[:, None], [0.1, 3.0]), rng.gamma(3, 1, 50), "x", False
    )
    figure = plotting.column_emissions([spiked, counts([1.0, 6.0], rng.poisson(4, 50), 9)])
    render(figure)
    assert [axes.get_xlabel() for axes in figure.axes] == ["x", "visits"]
    assert figure.axes[0].get_ylim()[1] < 10


# Heat maps


@pytest.mark.parametrize("num_states", [1, 3, 12])
def test_small_transition_matrix_has_its_numbers_in_the_cells(rng, num_states):
    probs = rows(rng, num_states, num_states)
    figure = plotting.transition_matrix(torch.from_numpy(probs))
    assert written(figure) == {cell: float(f"{value:.2f}") for cell, value in np.ndenumerate(probs)}
    axes = figure.axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("to state", "from state")
    assert labels(axes.xaxis) == labels(axes.yaxis) == [str(state) for state in range(num_states)]


def test_rows_of_the_picture_are_rows_of_the_matrix(rng):
    probs = rows(rng, 20, 20)
    figure = plotting.transition_matrix(probs)
    image = figure.axes[0].images[0]
    np.testing.assert_array_equal(image.get_array(), probs)
    assert image.get_extent() == [-0.5, 19.5, 19.5, -0.5]
    assert not figure.axes[0].texts
    assert (image.norm.vmin, image.norm.vmax) == (0, 1)


def test_clones_of_a_symbol_are_between_lines(rng):
    probs = rows(rng, 15, 15)
    figure = plotting.clone_matrix(probs, [2, 10, 3], ["a", " ", "c"])
    axes = figure.axes[0]
    np.testing.assert_array_equal(axes.images[0].get_array(), probs)
    assert labels(axes.xaxis) == labels(axes.yaxis) == ["a", "␣", "c"]
    np.testing.assert_allclose(axes.get_xticks(), [0.5, 6.5, 13])
    assert sorted(
        {float(line.get_xdata()[0]) for line in axes.lines if line.get_xdata()[0] == line.get_xdata()[1]}
    ) == [1.5, 11.5]
    render(figure)


def test_groups_of_a_graph_have_a_panel_each():
    graph = nx.DiGraph()
    for state, name in enumerate("bat $"):
        graph.add_node(state, name=name)
    graph.add_weighted_edges_from([(0, 1, 1.0), (1, 2, 0.5), (2, 1, 0.1), (3, 3, 1.0)])
    figure = plotting.state_graph(graph, [{0, 1, 2}, {3}, {4}], ["bat", "space", "$"], columns=2)
    assert len(figure.axes) == 4
    assert [sorted(text.get_text() for text in axes.texts) for axes in figure.axes] == [
        ["a", "b", "t"],
        ["␣"],
        ["$"],
        [],
    ]
    render(figure)


def test_large_matrix_is_drawn_as_means_of_blocks_and_says_so(rng):
    probs = rows(rng, 1003, 30)
    figure = plotting.emission_matrix(probs)
    axes, drawn = figure.axes[0], np.asarray(figure.axes[0].images[0].get_array())
    np.testing.assert_allclose(drawn[:334], probs[:1002].reshape(334, 3, 30).mean(1), rtol=1e-12)
    np.testing.assert_allclose(drawn[334], probs[1002], rtol=1e-12)
    assert axes.get_title(loc="left") == "Emission probabilities (means of blocks of 3 x 1)"
    assert axes.get_ylim() == (1002.5, -0.5)
    assert axes.images[0].norm.vmin == 0


def test_symbols_have_their_names_up_to_a_number(rng):
    names = [" ", "\n", "$a$", "", "a very long name", *(f"w{i}" for i in range(35))]
    shown = ["␣", "\\n", "$a$", "", "a very long…", *names[5:]]
    axes = plotting.emission_matrix(rows(rng, 3, 40), names, max_labels=40).axes[0]
    assert labels(axes.xaxis) == shown
    assert not any(text.get_parse_math() for text in axes.get_xticklabels())
    axes = plotting.emission_matrix(rows(rng, 3, 40), names, max_labels=10).axes[0]
    assert labels(axes.xaxis) == shown[::5]
    assert list(axes.get_xticks()) == list(range(0, 40, 5))


# Gaussian emissions


def test_densities_are_weighted_by_the_share_of_time(rng):
    means, variances, share = (
        np.array([[-2.0], [0.0], [5.0]]),
        np.array([[0.5], [2.0], [1e-4]]),
        np.array([0.2, 0.5, 0.3]),
    )
    axes = plotting.gaussian_emissions(means, variances, share, points=rng.normal(size=(50, 1))).axes[0]
    *states, total = axes.lines
    for state, line in enumerate(states):
        x, y = line.get_data()
        assert integral(x, y) == pytest.approx(share[state], rel=1e-3)
        assert x[y.argmax()] == pytest.approx(means[state, 0], abs=1e-9)
        assert line.get_label() == f"state {state} ({share[state]:.0%})"
    assert integral(*total.get_data()) == pytest.approx(1, rel=1e-2)


@pytest.mark.parametrize("num_features", [1, 2])
def test_no_share_is_printed_where_none_was_given(rng, num_features):
    means, variances = rng.normal(size=(3, num_features)), np.ones((3, num_features))
    named = plotting.gaussian_emissions(means, variances).axes[0]
    found = [line.get_label() for line in named.lines]
    assert found[:3] == ["state 0", "state 1", "state 2"]
    assert "share" not in named.get_ylabel()
    share = np.array([0.2, 0.5, 0.3])
    found = [line.get_label() for line in plotting.gaussian_emissions(means, variances, share).axes[0].lines]
    assert found[:3] == ["state 0 (20%)", "state 1 (50%)", "state 2 (30%)"]


def test_ellipses_have_one_and_two_standard_deviations():
    means, variances = np.array([[0.0, 1.0], [5.0, -3.0]]), np.array([[4.0, 9.0], [0.25, 1.0]])
    axes = plotting.gaussian_emissions(means, variances, points=np.array([[np.nan, 0.0], [1.0, 2.0]])).axes[0]
    ellipses = [patch for patch in axes.patches if isinstance(patch, Ellipse)]
    found = [(*ellipse.center, ellipse.width, ellipse.height) for ellipse in ellipses]
    assert found == [(0, 1, 8, 12), (0, 1, 4, 6), (5, -3, 2, 4), (5, -3, 1, 2)]
    assert axes.lines[0].get_xydata().tolist() == [[1.0, 2.0]]


def test_the_most_visited_of_many_states_is_opaque():
    """``0.8 * share / share`` may be above 0.8 by rounding."""
    largest = 0.1
    assert 0.8 * largest / largest > 0.8
    share = np.full(20, (1 - largest) / 19)
    share[7] = largest
    axes = plotting.gaussian_emissions(np.zeros((20, 2)), np.ones((20, 2)), share).axes[0]
    edges = [patch.get_edgecolor()[3] for patch in axes.patches if isinstance(patch, Ellipse)]
    assert max(edges) == edges[14] == edges[15] == 1


def test_means_of_many_features_are_in_units_of_the_data(rng):
    means, center, variance = rng.normal(size=(4, 5)), rng.normal(size=5), rng.gamma(2, size=5)
    figure = plotting.gaussian_emissions(means, np.ones((4, 5)), center=center, variance=variance)
    image = figure.axes[0].images[0]
    np.testing.assert_allclose(image.get_array(), (means - center) / np.sqrt(variance), rtol=1e-12)
    assert image.norm.vmin == -image.norm.vmax
    assert "standard deviations" in figure.axes[1].get_ylabel()
    np.testing.assert_allclose(
        plotting.gaussian_emissions(means, np.ones((4, 5))).axes[0].images[0].get_array(), means, rtol=1e-12
    )


# Usage of states


def test_bars_are_the_share_and_points_the_dwell_time():
    share, probs = np.array([0.5, 0.3, 0.2]), np.array([[0.9, 0.1, 0.0], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0]])
    figure = plotting.state_usage(share, plotting.expected_dwell(probs), "data")
    above, below = figure.axes
    assert [bar.get_height() for bar in above.patches] == share.tolist()
    assert [bar.get_x() + bar.get_width() / 2 for bar in above.patches] == pytest.approx([0, 1, 2])
    finite, infinite = below.lines
    assert finite.get_xdata().tolist() == [0, 2]
    assert finite.get_ydata() == pytest.approx([10, 1])
    assert infinite.get_xdata().tolist() == [1]
    assert infinite.get_label() == "never left"


def test_many_bars_become_an_outline(rng):
    share = rng.dirichlet(np.ones(150))
    (axes,) = plotting.state_usage(share).axes
    (outline,) = axes.patches
    np.testing.assert_array_equal(outline.get_data().values, share)


def test_dwell_alone():
    (axes,) = plotting.state_usage(None, [1.0, 2.0]).axes
    assert axes.lines[0].get_ydata().tolist() == [1, 2]


def test_stationary_distribution():
    np.testing.assert_allclose(plotting.stationary_distribution([[0.9, 0.1], [0.3, 0.7]]), [0.75, 0.25], rtol=1e-10)
    apart = plotting.stationary_distribution([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    assert apart.sum() == pytest.approx(1)
    assert apart[0] == pytest.approx(apart[1])
    absorbed = plotting.stationary_distribution([[0.5, 0.5], [0.0, 1.0]])
    np.testing.assert_allclose(absorbed, [0, 1], atol=1e-12)


# Convergence


def test_curves_and_gains():
    figure = plotting.convergence(
        [1, 2, 3, 5], [[-4.0, -3.0], [-2.0, -2.5], [-1.0, np.nan], [-1.5, -2.0]], [-3.0, np.nan, -2.0, -2.5], chosen=0
    )
    above, below = figure.axes
    curves = {line.get_label(): line for line in above.lines}
    assert curves["training"].get_xydata().tolist() == [[1, -4], [2, -2], [3, -1], [5, -1.5]]
    assert curves["validation"].get_xydata().tolist() == [[1, -3], [3, -2], [5, -2.5]]
    np.testing.assert_array_equal(curves["other restarts"].get_ydata(), [-3, -2.5, np.nan, -2])
    assert curves["training"].get_linewidth() > 2 * curves["other restarts"].get_linewidth()
    train_gain, train_fall, val_gain, val_fall = below.lines
    np.testing.assert_array_equal(train_gain.get_xydata(), [[2, 2], [3, 1], [5, np.nan]])
    np.testing.assert_array_equal(val_gain.get_xydata(), [[3, 0.5], [5, np.nan]])
    # Per epoch, although two have passed.
    assert train_fall.get_xydata().tolist() == [[5, 0.25]]
    assert val_fall.get_label() == "validation fell by"
    assert below.get_yscale() == "log"


@pytest.mark.parametrize("chosen", [0, 3])
def test_the_chosen_restart_is_the_thick_one(rng, chosen):
    train = rng.normal(size=(6, 4)).cumsum(0)
    *thin, thick = plotting.convergence(range(1, 7), train, chosen=chosen).axes[0].lines
    np.testing.assert_array_equal(thick.get_ydata(), train[:, chosen])
    np.testing.assert_array_equal([line.get_ydata() for line in thin], np.delete(train, chosen, axis=1).T)
    assert sum(not line.get_label().startswith("_") for line in thin) == 1


# All of them


def every_figure(rng: np.random.Generator, size: int) -> list[Figure]:
    share, epochs = rng.dirichlet(np.ones(size)), np.arange(1, size + 1)
    gaussian = [
        plotting.gaussian_emissions(
            rng.normal(size=(size, d)), rng.gamma(2, size=(size, d)), share, points=rng.normal(size=(99, d))
        )
        for d in (1, 2, 5)
    ]
    return [
        plotting.transition_matrix(rows(rng, size, size)),
        plotting.emission_matrix(rows(rng, size, 27)),
        *gaussian,
        plotting.state_usage(share, plotting.expected_dwell(rows(rng, size, size))),
        plotting.convergence(epochs, rng.normal(size=(size, 4))),
        plotting.convergence(epochs, np.full(size, -np.inf)),
    ]


@pytest.mark.parametrize("size", [1, 8, 50])
def test_every_figure_can_be_drawn(rng, size):
    for figure in every_figure(rng, size):
        image = render(figure)
        assert image.shape == (550, 770, 4)
        assert image.std() > 0


def test_figures_leave_nothing_behind(rng):
    before = pyplot.get_fignums()
    figures = [weakref.ref(figure) for figure in every_figure(rng, 3)]
    gc.collect()
    assert not any(figure() for figure in figures)
    assert pyplot.get_fignums() == before


# Dense vectors and pairs of symbols


@pytest.mark.parametrize("length", [1, 2, 5])
def test_vectors_are_drawn_with_their_matrices(rng, length):
    def vectors() -> dict[str, np.ndarray]:
        return {name: rng.normal(size=(6 if name == "V" else 4, length)) for name in "UZVW"}

    matrices = {"transition": rows(rng, 4, 4), "emission": rows(rng, 4, 6)}
    before, after = vectors() | matrices, vectors() | matrices
    figure = plotting.composition(before, after, names=["a", "$b", " ", "d", "e", "f"])
    render(figure)
    assert len(figure.axes) == 8
    assert [axes.get_title("left") for axes in figure.axes[4:]] == [
        "Z and U, after",
        "A, after",
        "W and V, after",
        "B, after",
    ]
    np.testing.assert_array_equal(figure.axes[7].images[0].get_array(), matrices["emission"])
    if length == 2:
        np.testing.assert_allclose(figure.axes[4].collections[1].get_offsets(), after["U"])
    del before["emission"], after["emission"]
    assert len(plotting.composition(before, after).axes) == 6


def test_pairs_of_data_and_model_and_their_difference(rng):
    target, model = (rng.dirichlet(np.ones(25)).reshape(5, 5) for _ in range(2))
    figure = plotting.cooccurrences(target, model, names=list("abcde"))
    render(figure)
    drawn = [axes.images[0].get_array() for axes in figure.axes[:3]]
    for found, expected in zip(drawn, (target, model, model - target), strict=True):
        np.testing.assert_allclose(found, expected)
