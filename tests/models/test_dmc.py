"""`DMCHMM` as people meet it: learning, its two extremes, conversions, errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_hmm import DMCHMM, BaumWelch, Sequences, StandardHMM, fit, inference
from lightning_hmm.inference import selection
from lightning_hmm.inference.cpu import routes
from lightning_hmm.inference.selection import PairSums
from lightning_hmm.models import dmc as models_dmc
from tests.helpers import assert_same_parameters, random_symbols, random_vectors

GAUSSIAN = {"emission": "gaussian", "num_features": 2}
CRITERIA = ("window", "largest")


@pytest.fixture(autouse=True)
def sparse(monkeypatch):
    """Disables the dense kernels, which models of this size would use otherwise."""
    for module in (routes, models_dmc):
        monkeypatch.setattr(module, "prefers_dense", lambda *sizes, **options: False)


def em_steps(model: DMCHMM, sequences: Sequences, steps: int) -> list[float]:
    """EM without a Trainer, choosing at every step; the objective before each."""
    optimizer, objectives = BaumWelch(model.distributions), []
    for _ in range(steps):
        objectives.append(float(model.score(sequences).sum() + optimizer.log_prior()))
        sums = PairSums(model.chain(0)[1])
        model._pair_sums = [sums]
        with torch.no_grad():
            flat = iter(model._expected_counts(sequences, 0)[1])
        counts = {name: [next(flat)[None] for _ in part.parameters()] for name, part in model.distributions.items()}
        choice = selection.choose(sums, model.criterion, model.transition.prior["pseudocount"])
        model.transition.take(0, choice, counts["transition"])
        optimizer.step(counts=counts)
    return objectives


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_likelihood_never_falls(seed, criterion, kind):
    """Five models of different sizes for each case, with and without priors, 200 in all."""
    rng = np.random.default_rng(seed)
    sequences = random_symbols(rng, 5) if kind == "categorical" else random_vectors(rng, 5)
    for run in range(5):
        num_states = int(rng.integers(3, 12))
        emission = {"num_symbols": 5, "emission_pseudocount": 0.1}
        if kind == "gaussian":
            emission = {**GAUSSIAN, "initialization": "random", "variance_prior": 0.3}
        options = {
            "seed": 10 * seed + run,
            "criterion": criterion,
            "transition_pseudocount": 0.2 * (run % 2),
            **emission,
        }
        model = DMCHMM(num_states, int(rng.integers(1, num_states - 1)), **options)
        model.initialize(sequences)
        objectives = em_steps(model, sequences, 10)
        assert np.diff(objectives).min() > -1e-9 * sequences.num_steps
        torch.testing.assert_close(model.transition_probs.sum(1), torch.ones(num_states).double(), rtol=1e-10, atol=0)


def test_choosing_matters():
    """The chain 0 -> 1 -> ... -> 9 -> 0, seen through noise: EM finds the one entry of each row to keep."""
    rng = np.random.default_rng(0)
    states = np.arange(2000) % 10
    symbols = np.where(rng.random(2000) < 0.9, states, rng.integers(0, 10, 2000))
    sequences = Sequences.from_list([symbols])
    for criterion in CRITERIA:
        model = DMCHMM(10, 1, 10, criterion=criterion)
        model.set_parameters(emission=0.8 * np.eye(10) + 0.02)
        fit(model, sequences, 20, 0)
        assert model.indices.flatten().tolist() == [*range(1, 10), 0]
        assert (model.values > 0.95).all()


class Logged(Callback):
    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_end(self, trainer, module):
        self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def test_what_is_logged(rng):
    seen = Logged()
    model = DMCHMM(8, 2, 5, criterion="largest")
    model.set_parameters(indices=[[0, 1]] * 8, values=np.full((8, 2), 1 / 8))  # nothing speaks for these two
    fit(model, random_symbols(rng), 1, callbacks=[seen])
    assert seen.rows[0]["train/kept_mass"] == pytest.approx(float(model.values.sum(1).mean()), rel=1e-6)
    assert seen.rows[0]["train/support_changes"] == float(model.choices[0].changes.sum()) > 0


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_batches_do_not_matter(rng, criterion, kind):
    sequences = random_symbols(rng) if kind == "categorical" else random_vectors(rng)
    options = {"num_symbols": 5} if kind == "categorical" else GAUSSIAN
    options = {"criterion": criterion, "transition_pseudocount": 0.1, "restarts": 2, **options}
    whole, parts = (
        fit(DMCHMM(9, 3, **options), sequences, 6, 0, batch_size=size, shuffle=size is not None) for size in (None, 4)
    )
    assert torch.equal(whole.transition.indices, parts.transition.indices)
    assert_same_parameters(whole, parts)
    start = DMCHMM(9, 3, **options)
    assert not torch.equal(whole.indices, start.indices)  # it chose


def test_between_choices_the_set_stays(rng):
    sequences, sets = random_symbols(rng), []

    class Watch(Callback):
        def on_train_epoch_end(self, trainer, module):
            sets.append((module.indices.clone(), len(module.choices)))

    model = DMCHMM(8, 2, 5, reselect_every=3).set_parameters(indices=[[0, 1]] * 8, values=np.full((8, 2), 1 / 8))
    before = model.indices.clone()
    fit(model, sequences, 5, 0, callbacks=[Watch()])
    assert [chosen for _, chosen in sets] == [1, 0, 0, 1, 0]
    assert not torch.equal(before, sets[0][0])
    assert torch.equal(sets[0][0], sets[2][0])
    assert torch.equal(sets[3][0], sets[4][0])


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_all_but_one_kept_is_the_full_hmm(rng, kind):
    """The same start by the same seed, the same model after the same epochs."""
    sequences = random_symbols(rng) if kind == "categorical" else random_vectors(rng)
    options = {"seed": 3, "transition_pseudocount": 0.2, **({"num_symbols": 5} if kind == "categorical" else GAUSSIAN)}
    full, kept = StandardHMM(5, **options), DMCHMM(5, 4, **options)
    torch.testing.assert_close(kept.transition_probs, full.transition_probs, rtol=1e-12, atol=0)
    fit(full, sequences, 8, 0)
    fit(kept, sequences, 8, 0)
    torch.testing.assert_close(kept.transition_probs, full.transition_probs, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(kept.score(sequences), full.score(sequences), rtol=1e-10, atol=1e-10)
    assert kept.num_free_parameters == full.num_free_parameters
    assert kept.decode(sequences).tolist() == full.decode(sequences).tolist()


def test_nothing_kept_is_a_mixture(rng):
    sequences = Sequences.from_list([rng.normal(size=(50, 2)) + 4.0 * rng.integers(0, 2, (50, 1))])
    model = fit(DMCHMM(3, 0, **GAUSSIAN), sequences, 15, 0)
    torch.testing.assert_close(
        model.transition_probs, torch.full((3, 3), 1 / 3, dtype=torch.float64), rtol=1e-14, atol=0
    )
    values = sequences.values[:, None]
    densities = (
        torch.distributions.Normal(model.emission.mean, model.emission.variance.sqrt()).log_prob(values).sum(-1)
    )  # (T, N)
    first = torch.logsumexp(densities[0] + model.initial_probs.log(), 0)
    torch.testing.assert_close(
        model.score(sequences)[0], first + (torch.logsumexp(densities[1:], 1) - np.log(3)).sum(), rtol=1e-10, atol=1e-9
    )
    assert model.num_free_parameters == 2 + 0 + 12
    assert model.sample(2, 5).lengths.tolist() == [5, 5]


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_conversions(rng, kind):
    sequences = random_symbols(rng) if kind == "categorical" else random_vectors(rng)
    options = {"num_symbols": 5, "symbol_names": list("abcde")} if kind == "categorical" else GAUSSIAN
    full = fit(StandardHMM(6, restarts=2, **options), sequences, 5)
    kept = DMCHMM.from_standard(full, 2, criterion="largest")
    for row, mine in zip(full.transition_probs, kept.transition_probs, strict=True):
        largest = row.topk(2).indices
        torch.testing.assert_close(mine[largest], row[largest], rtol=1e-12, atol=0)
        others = torch.ones(6, dtype=torch.bool)
        others[largest] = False
        torch.testing.assert_close(mine[others], row[others].mean().expand(4), rtol=1e-10, atol=1e-14)
    back = kept.to_standard()
    assert type(back) is StandardHMM
    torch.testing.assert_close(back.score(sequences), kept.score(sequences), rtol=1e-10, atol=1e-10)
    same = DMCHMM.from_standard(full, 5)
    torch.testing.assert_close(same.score(sequences), full.score(sequences), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        same.posterior(sequences).smoothed.values, full.posterior(sequences).smoothed.values, rtol=1e-8, atol=1e-12
    )
    fit(back, sequences, 1)  # and it can be trained on


def test_kept_entries_can_be_given():
    model = DMCHMM(4, 2, 3).set_parameters(
        indices=[[3, 0], [1, 2], [0, 1], [2, 3]], values=[[0.5, 0.1], [0.4, 0.2], [0.0, 1.0], [0.25, 0.25]]
    )
    expected = [[0.1, 0.2, 0.2, 0.5], [0.2, 0.4, 0.2, 0.2], [0.0, 1.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25]]
    torch.testing.assert_close(model.transition_probs, torch.tensor(expected).double())
    assert model.indices.tolist() == [[0, 3], [1, 2], [0, 1], [2, 3]]
    torch.testing.assert_close(model.constants, torch.tensor([0.2, 0.2, 0.0, 0.25]).double())


def test_what_is_mostly_constant_stays_what_it_is():
    model = DMCHMM(9, 3, 4)
    torch.testing.assert_close(
        DMCHMM(9, 3, 4, seed=1).set_parameters(transition=model.transition_probs).transition_probs,
        model.transition_probs,
    )


def test_predictions_are_those_of_the_full_matrix(rng):
    model = DMCHMM(7, 2, 5)
    sequences, full = random_symbols(rng), model.to_standard()
    torch.testing.assert_close(
        model.predict_next(sequences, 2), full.predict_next(sequences, 2), rtol=1e-10, atol=1e-13
    )
    assert model.decode(sequences).tolist() == full.decode(sequences).tolist()
    assert model.sample_posterior(sequences).lengths.tolist() == sequences.lengths.tolist()
    torch.testing.assert_close(
        model.posterior(sequences).log_likelihood,
        inference.log_likelihood(*full.problem(sequences)).detach(),
        rtol=1e-10,
        atol=1e-12,
    )


def test_a_frozen_chain_is_left_alone(rng):
    model = DMCHMM(6, 2, 5, frozen=["transition"])
    before = model.transition_probs
    fit(model, random_symbols(rng), 3, 0)
    assert torch.equal(model.transition_probs, before)


def test_rows_without_counts_keep_their_values(rng):
    """A state that is never visited, with a warning."""
    model = DMCHMM(5, 2, 5).set_parameters(
        initial=[0.5, 0.5, 0, 0, 0],
        transition=np.block([[np.full((2, 2), 0.5), np.zeros((2, 3))], [np.full((3, 5), 0.2)]]),
    )
    before = model.transition_probs
    with (
        pytest.warns(UserWarning, match="3 rows of `transition` got no counts"),
        pytest.warns(UserWarning, match="3 rows of `emission`"),
    ):
        fit(model, random_symbols(rng), 2, 0)
    assert torch.equal(model.transition_probs[2:], before[2:])
    assert not torch.equal(model.transition_probs[:2], before[:2])


def test_odd_columns(rng):
    """A constant column does no harm; one that is missing throughout is named."""
    values = np.concatenate([rng.normal(size=(200, 1)), np.full((200, 1), 3.0)], axis=1)
    model = fit(DMCHMM(5, 1, **GAUSSIAN), [values], 10)
    assert torch.isfinite(model.score([values])).all()
    values[:, 1] = np.nan
    with pytest.raises(ValueError, match="Every column must be observed somewhere, but 'feature_1' is missing"):
        fit(DMCHMM(5, 1, **GAUSSIAN), [values], 10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_states": 4, "num_kept": 4},
            "`num_kept` must be a whole number from 0 to 3, the number of states minus 1, but is 4",
        ),
        (
            {"num_states": 4, "num_kept": -1},
            "`num_kept` must be a whole number from 0 to 3, the number of states minus 1, but is -1",
        ),
        ({"num_states": 1, "num_kept": 0}, "`num_states` must be a whole number of at least 2, but is 1"),
        ({"num_states": 4, "num_kept": 1, "criterion": "best"}, "`criterion` must be window or largest, but is 'best'"),
        (
            {"num_states": 4, "num_kept": 1, "reselect_every": 0},
            "`reselect_every` must be a whole number of at least 1, but is 0",
        ),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        DMCHMM(num_symbols=3, **options)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"indices": [[0, 0], [1, 2], [0, 1]], "values": np.full((3, 2), 0.2)},
            "`indices` must be different in a row, but row 0 holds 0 twice",
        ),
        (
            {"indices": [[0, 3], [1, 2], [0, 1]], "values": np.full((3, 2), 0.2)},
            "`indices` must be from 0 to 2, but row 0 holds 3",
        ),
        (
            {"indices": [[0, 1], [1, 2], [0, 1]], "values": np.full((3, 2), 0.7)},
            "`values` of a row must not sum to more than 1, but row 0 sums to 1.4",
        ),
        (
            {"indices": [[0, 1], [1, 2], [0, 1]], "values": [[0.1, -0.2], [0, 0], [0, 0]]},
            "`values` must hold probabilities, but that of row 0, column 1 is -0.2",
        ),
        (
            {"indices": [[0], [1], [0]], "values": np.full((3, 1), 0.7)},
            r"`indices` must have shape \(3, 2\), states by kept entries, but has \(3, 1\)",
        ),
        ({"indices": [[0.5, 1], [1, 2], [0, 1]], "values": np.full((3, 2), 0.2)}, "`indices` must be whole numbers"),
        ({"indices": [[0, 1]] * 3}, "`indices` and `values` must be given together"),
        ({"transition": [[0.5, 0.4, 0.0]] * 3}, "`transition` rows must sum to 1, but row 0 sums to 0.9"),
        (
            {"transition": [[1.5, -0.5, 0.0]] * 3},
            r"`transition` must hold probabilities, but the entry at \(0, 1\) is -0.5",
        ),
        ({"transition": [[0.5, 0.5]] * 2}, r"`transition` must have shape \(3, 3\), but has \(2, 2\)"),
    ],
)
def test_bad_parameters_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        DMCHMM(3, 2, 4).set_parameters(**values)
