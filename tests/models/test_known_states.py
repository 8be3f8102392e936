"""Labels and state weights in training, decoding and posteriors, compared with the enumeration of all paths."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from numpy.testing import assert_allclose
from torch import Tensor

from datamodules import SyntheticDataModule
from lightning_hmm import (
    DMCHMM,
    HMM,
    Categorical,
    ClonedHMM,
    DenseHMM,
    Gaussian,
    NeuralHMM,
    Sequences,
    StandardHMM,
    fit,
)
from lightning_hmm.data import InMemoryData
from lightning_hmm.distributions import Full
from lightning_hmm.inference.backends import VARIABLE
from lightning_hmm.inference.operators import Dense
from lightning_hmm.models import LinearGaussianHMM
from lightning_hmm.models.baselines import RecurrentNet
from lightning_hmm.models.training_loop import BaumWelchTraining
from tests.inference.oracle import enumerate_next, enumerate_paths, gathered

K, V, D = 3, 4, 2
LENGTHS = [5, 1, 0, 4, 6]
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


class Halves(Dense):
    """A full matrix of 2 K states, of which two are one class."""

    @property
    def classes(self) -> Tensor:
        return torch.arange(self.num_states) // 2

    @property
    def num_classes(self) -> int:
        return self.num_states // 2


class Expanded(Full):
    """A full matrix of the states of the operator: two for each state of the model, which share its emission."""

    no_matrix = "are between pairs of states"

    def allocate(self, restarts: int, num_states: int) -> None:
        self._allocate_rows(restarts, 2 * num_states, 2 * num_states)

    @property
    def classes(self) -> Tensor:
        return torch.arange(self.log_probs.shape[-1]) // 2

    def first_states(self, log_initial: Tensor, natural: Sequence[Tensor]) -> Tensor:
        return log_initial.repeat_interleave(2) - np.log(2)

    def operator(self, natural: Sequence[Tensor], batch: Any) -> Dense:
        return Halves(natural[0])

    def matrix(self, restart: int) -> None:
        return None


MODELS = {
    "symbols": lambda: StandardHMM(K, V, restarts=2),
    "vectors": lambda: HMM(K, Gaussian("full", 0.1), num_features=D),
    "DMC": lambda: DMCHMM(K, 1, V),
    "dense": lambda: DenseHMM(K, V, 2),
    "float32": lambda: StandardHMM(K, V, arithmetic="float32"),
    "expanded": lambda: HMM(K, Categorical(), Expanded(), num_symbols=V),
}


def observed(name: str, known: str, seed: int = 0) -> Sequences:
    """Sequences with missing values, labels at some steps, or state weights, or both."""
    rng = np.random.default_rng(seed)
    steps = sum(LENGTHS)
    values: Any = rng.normal(size=(steps, D)) if name == "vectors" else rng.integers(-1, V, steps)
    labels = np.where(rng.random(steps) < 0.4, rng.integers(0, K, steps), -1)
    weights = rng.random((steps, K)) * (rng.random((steps, K)) < 0.8) + 1e-3
    weights[labels >= 0] += 0.1  # no label is excluded
    given = {"labels": torch.from_numpy(labels), "state_weights": torch.from_numpy(weights)}
    return Sequences.from_lengths(
        values, LENGTHS, **{name: column for name, column in given.items() if known in (name, "both")}
    )


def started(name: str, sequences: Sequences) -> HMM:
    model = MODELS[name]()
    model.initialize(sequences)
    return model.eval()


def answers(model: HMM, sequences: Sequences, restart: int = 0) -> list[Any]:
    """Of all paths, those that agree with the labels, each multiplied by the weights of its states."""
    initial, operator = model.chain(restart)
    classes = np.arange(operator.num_states) // (operator.num_states // K)
    rows = model.evidence(restart, sequences).rows().detach().numpy()[:, classes].copy()
    for step in range(len(rows)):
        for state, k in enumerate(classes):
            if sequences.labels is not None and int(sequences.labels[step]) not in (-1, k):
                rows[step, state] = -np.inf
            if sequences.state_weights is not None:
                rows[step, state] += np.log(float(sequences.state_weights[step, k]))
    matrix = operator.to_dense(torch.zeros(0, dtype=torch.int64)).detach().numpy()
    return [
        enumerate_paths(initial.detach().numpy(), matrix, rows[first:last])
        for first, last in pairwise(sequences.offsets.tolist())
    ]


@pytest.fixture(params=["cpu", "reference"])
def backend(request, monkeypatch):
    if request.param == "reference":
        monkeypatch.setenv(VARIABLE, "reference")
    return request.param


# Inference


@pytest.mark.parametrize("known", ["labels", "state_weights", "both"])
@pytest.mark.parametrize("name", ["symbols", "vectors", "DMC", "dense"])
def test_inference_agrees_with_the_enumeration_of_paths(backend, name, known):
    sequences = observed(name, known)
    model = started(name, sequences)
    wanted = answers(model, sequences)
    assert_allclose(model.score_labeled(sequences), [answer.log_likelihood for answer in wanted], **TOLERANCE)
    unlabeled = answers(model, sequences.without_labels())
    assert_allclose(model.score(sequences), [answer.log_likelihood for answer in unlabeled], **TOLERANCE)
    assert model.decode(sequences).values.tolist() == gathered(wanted, "path").tolist()
    found = model.posterior(sequences)
    assert_allclose(found.log_likelihood, [answer.log_likelihood for answer in wanted], **TOLERANCE)
    assert_allclose(found.smoothed.values, np.concatenate([answer.smoothed for answer in wanted]), **TOLERANCE)
    assert_allclose(found.filtered.values, np.concatenate([answer.filtered for answer in wanted]), **TOLERANCE)
    drawn = model.sample_posterior(sequences, seed=1).values
    assert bool((found.smoothed.values[torch.arange(len(drawn)), drawn] > 0).all())


@pytest.mark.parametrize("known", ["labels", "state_weights", "both"])
def test_several_states_of_the_operator_have_the_label_of_a_state(backend, known):
    sequences = observed("symbols", known)
    model = started("expanded", sequences)
    wanted = answers(model, sequences)
    assert_allclose(model.score_labeled(sequences), [answer.log_likelihood for answer in wanted], **TOLERANCE)
    smoothed = model.posterior(sequences).smoothed.values
    rows = np.concatenate([answer.smoothed for answer in wanted])
    assert_allclose(smoothed, rows @ np.eye(K)[np.arange(2 * K) // 2] if smoothed.shape[1] == K else rows, **TOLERANCE)


def test_predictions_begin_at_the_known_states():
    sequences = observed("symbols", "labels")
    model = started("symbols", sequences)
    initial, operator = (part.detach().numpy() for part in (model.initial.natural(0)[0], model.chain(0)[1].log_probs))
    rows = model.problem(sequences)[2].rows().detach().numpy()
    states = [
        enumerate_next(initial, operator, rows[first:last], 2)
        for first, last in pairwise(sequences.offsets.tolist())
        if last > first
    ]
    found = model.predict_next(sequences, steps=2)[sequences.lengths > 0]
    assert_allclose(found, np.stack(states) @ model.emission_probs.numpy(), **TOLERANCE)


# Training


@pytest.mark.parametrize("known", ["labels", "state_weights", "both"])
@pytest.mark.parametrize("name", ["symbols", "vectors", "float32", "expanded"])
def test_expected_counts_agree_with_the_enumeration_of_paths(backend, name, known):
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if name == "float32" else TOLERANCE
    weights = [1.0, 2.0, 1.0, 0.5, 3.0]
    sequences = observed(name, known).replaced(weights=torch.tensor(weights))
    model = started(name, sequences)
    wanted = answers(model, sequences)
    smoothed = np.concatenate([answer.smoothed * weight for answer, weight in zip(wanted, weights, strict=True)])
    pairs = sum(answer.pairs * weight for answer, weight in zip(wanted, weights, strict=True))
    first = sum(
        answer.smoothed[0] * weight for answer, weight in zip(wanted, weights, strict=True) if len(answer.smoothed)
    )
    members = np.eye(K)[np.arange(smoothed.shape[1]) // (smoothed.shape[1] // K)]
    found, counts = model._expected_counts(sequences, 0)
    assert_allclose(found.log_likelihood, [answer.log_likelihood for answer in wanted], **tolerance)
    assert_allclose(counts[0].detach(), first @ members, **tolerance)
    assert_allclose(counts[1].detach(), pairs, **tolerance)
    visits = smoothed @ members
    if sequences.is_discrete:
        symbols = sequences.values.numpy()
        assert_allclose(counts[2], visits[symbols >= 0].T @ np.eye(V)[symbols[symbols >= 0]], **tolerance)
    else:
        model.emission.maximize([part[None] for part in counts[2:]])
        y = sequences.values.numpy()
        assert_allclose(model.emission.mean, visits.T @ y / visits.sum(0)[:, None], **tolerance)


def counted(values: list[Any], labels: list[Any], weights: list[float], pseudocount: float = 0.0) -> tuple[Any, ...]:
    """The estimates for states that are all known: relative frequencies."""
    first, pairs, visits = np.full(K, pseudocount), np.full((K, K), pseudocount), np.full((K, V), pseudocount)
    for y, z, weight in zip(values, labels, weights, strict=True):
        first[z[0]] += weight
        np.add.at(pairs, (z[:-1], z[1:]), weight)
        np.add.at(visits, (z, y), weight)
    return tuple(part / part.sum(-1, keepdims=True) for part in (first, pairs, visits))


@pytest.mark.parametrize("pseudocount", [0.0, 0.3])
def test_one_m_step_with_all_states_known_counts(rng, pseudocount):
    lengths, weights = [40, 30, 50], [1.0, 2.0, 0.5]
    values, labels = ([rng.integers(0, n, length) for length in lengths] for n in (V, K))
    sequences = Sequences.from_list(values, weights, labels=labels)
    priors = {f"{part}_pseudocount": pseudocount for part in ("initial", "transition", "emission")}
    model = fit(StandardHMM(K, V, restarts=3, seed=5, **priors), sequences, max_epochs=1)
    wanted = counted(values, labels, weights, pseudocount)
    for found, estimate in zip(
        (model.initial_probs, model.transition_probs, model.emission_probs), wanted, strict=True
    ):
        assert_allclose(found, estimate, rtol=1e-12)
    assert_allclose(model.emission.log_probs.detach()[1:], model.emission.log_probs.detach()[:-1])  # of all restarts
    assert model.decode(sequences).values.tolist() == np.concatenate(labels).tolist()


def test_one_m_step_with_all_states_known_is_the_moments_of_each_state(rng):
    labels = rng.integers(0, K, 60)
    values = rng.normal(size=(60, D)) + labels[:, None]
    model = fit(HMM(K, Gaussian("full", 0.0)), Sequences.from_list([values], labels=[labels]), max_epochs=1)
    for k in range(K):
        assert_allclose(model.emission.mean[k], values[labels == k].mean(0), rtol=1e-10)
        assert_allclose(model.emission.covariance[k], np.cov(values[labels == k].T, bias=True), rtol=1e-9)


@pytest.mark.parametrize("options", [{}, {"discount": 0.9, "sequences_per_update": 2}])
def test_compiled_passes_do_not_ignore_labels(monkeypatch, options):
    """`fit` runs iterations of batch EM and many updates of online EM in compiled passes, if it can."""
    sequences = observed("symbols", "labels")
    model = fit(StandardHMM(K, V, **options), sequences, max_epochs=10, tolerance=0)
    monkeypatch.setattr(BaumWelchTraining, "_is_plain", lambda self, batch: False)
    wanted = fit(StandardHMM(K, V, **options), sequences, max_epochs=10, tolerance=0)
    assert torch.equal(model.transition_probs, wanted.transition_probs)
    assert (
        model.decode(sequences).values[sequences.labels >= 0].tolist()
        == sequences.labels[sequences.labels >= 0].tolist()
    )


def drawn(missing: float, num_sequences: int = 20) -> tuple[Sequences, Sequences]:
    """Sequences of three states that are easy to tell apart, of which a share has no label; and all of the states."""
    model = HMM(K, Gaussian(), num_features=1).set_parameters(
        transition=np.full((K, K), 0.05) + 0.85 * np.eye(K),
        emission={"mean": [[0.0], [6.0], [3.0]], "variance": np.ones((K, 1))},
    )
    sequences, states = model.sample(num_sequences, 50, seed=3, return_states=True)
    unknown = torch.rand(states.num_steps, generator=torch.Generator().manual_seed(1)) < missing
    return sequences.replaced(labels=states.values.masked_fill(unknown, -1)), states


@pytest.mark.parametrize("initialization", ["kmeans", "random"])
def test_states_are_numbered_as_the_labels_in_all_restarts(initialization):
    sequences, _ = drawn(missing=0.95)
    model = HMM(K, Gaussian(), initialization=initialization, restarts=4)
    model.initialize(sequences)
    fit(model, sequences, max_epochs=10)
    for restart in range(4):
        model.best_restart.fill_(restart)
        assert_allclose(model.emission.mean.flatten(), [0.0, 6.0, 3.0], atol=0.5)


def test_unequal_weights_number_the_states_as_well():
    sequences, states = drawn(missing=0.0)
    weights = 0.2 + 0.4 * torch.nn.functional.one_hot(states.values, K)
    weights[::2] = 1.0  # nothing is known at these steps
    model = fit(HMM(K, Gaussian(), restarts=2), sequences.replaced(labels=None, state_weights=weights), max_epochs=5)
    assert_allclose(model.emission.mean.flatten(), [0.0, 6.0, 3.0], atol=0.3)


def test_labels_of_some_states_leave_the_others_to_clusters():
    sequences, _ = drawn(missing=0.8)
    model = fit(HMM(K, Gaussian()), sequences.replaced(labels=sequences.labels.masked_fill(sequences.labels != 1, -1)))
    assert_allclose(model.emission.mean[1], [6.0], atol=0.3)
    assert_allclose(np.sort(model.emission.mean.flatten()), [0.0, 3.0, 6.0], atol=0.3)


def symbols_of(sequences: Sequences) -> Sequences:
    return Sequences.from_lengths(sequences.values[:, 0].round().clamp(-2, 8).long() + 2, sequences.lengths).replaced(
        labels=sequences.labels
    )


def test_tables_begin_with_the_labels_and_keep_what_was_set():
    sequences, states = drawn(missing=0.95)
    symbols = symbols_of(sequences)
    for seed in range(3):
        model = fit(StandardHMM(K, 11, seed=seed, restarts=2), symbols, max_epochs=10)
        accuracy = (model.decode(symbols.without_labels()).values == states.values).double().mean()
        assert accuracy > 0.9
    given = np.random.default_rng(0).dirichlet(np.ones(11), K)
    model = StandardHMM(K, 11).set_parameters(emission=given)
    model.initialize(symbols)
    assert_allclose(model.emission_probs, given, rtol=1e-12)
    model = StandardHMM(K, 11)
    before = model.emission_probs.clone()
    model.initialize(symbols.without_labels())
    assert torch.equal(model.emission_probs, before)


# Evaluation


def test_validation_and_test_do_not_use_labels():
    sequences, _ = drawn(missing=0.9)
    validation, _ = drawn(missing=0.0, num_sequences=5)
    model = HMM(K, Gaussian(), restarts=2)
    fit(model, sequences, max_epochs=3, val_sequences=validation)
    fit(model, sequences, max_epochs=0, val_sequences=validation)
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    data = InMemoryData(sequences, validation, None, False, 0)
    metrics = Trainer(**options).validate(model, datamodule=data, verbose=False)[0]
    scores = model.score(validation.without_labels()).sum() / validation.num_steps
    assert metrics["val/log_likelihood"] == pytest.approx(float(scores), rel=1e-9)
    data = WithTest(sequences, validation, None, False, 0)
    metrics = Trainer(**options).test(model, datamodule=data, verbose=False)[0]
    accuracy = float((model.decode(validation.without_labels()).values == validation.labels).double().mean())
    assert accuracy < 1
    assert metrics["test/log_likelihood"] == pytest.approx(float(scores), rel=1e-9)
    assert metrics["test/label_accuracy"] == pytest.approx(accuracy, rel=1e-12)
    assert metrics["test/state_accuracy"] == pytest.approx(accuracy, rel=1e-12)


class WithTest(InMemoryData):
    """The validation part is the test part."""

    @property
    def test_sequences(self) -> Sequences | None:
        return self.val_sequences

    def test_dataloader(self) -> Any:
        return self.val_dataloader()


def test_true_states_are_not_labels():
    data = SyntheticDataModule(num_sequences=10, length=20)
    data.setup()
    assert data.train_sequences.labels is None
    assert not data.knows_states
    assert data.true_states("test").lengths.tolist() == data.test_sequences.lengths.tolist()


# Bad input


@pytest.mark.parametrize(
    "make",
    [
        lambda: ClonedHMM(8, V),
        lambda: ClonedHMM(8, V, discount=0.9, sequences_per_update=2),
        lambda: DenseHMM(K, V, 2, objective="cooccurrence"),
        lambda: RecurrentNet(4, V),
    ],
)
def test_models_without_labels_refuse_them(make):
    model = make()
    for known, what in (("labels", "labels"), ("state_weights", "state weights")):
        with pytest.raises(
            ValueError, match=f"{type(model).__name__} cannot use known states, but the sequences have {what}"
        ):
            fit(model, observed("symbols", known), max_epochs=1)
    fit(make(), observed("symbols", "labels").without_labels()[:2], max_epochs=1)


@pytest.mark.parametrize(
    "make", [lambda: LinearGaussianHMM(2, D), lambda: NeuralHMM(2, D, num_particles=8, num_paths=2, width=4)]
)
def test_models_of_continuous_states_refuse_labels(make):
    with pytest.raises(ValueError, match="cannot use known states, but the sequences have labels"):
        fit(make(), observed("vectors", "labels"), max_epochs=1)


def test_cloned_models_refuse_labels_in_inference():
    model = ClonedHMM(8, V, pairs="all")
    model.initialize(observed("symbols", "labels").without_labels())
    for method in (model.decode, model.posterior, model.sample_posterior, model.predict_next, model.score_labeled):
        with pytest.raises(ValueError, match="A ClonedHMM cannot use known states"):
            method(observed("symbols", "labels"))
    model.score(observed("symbols", "labels"))


@pytest.mark.parametrize("start", [lambda: StandardHMM(K, V), lambda: HMM(K, Gaussian())])
def test_labels_beyond_the_states_are_refused(start):
    model = start()
    name = "symbols" if isinstance(model, StandardHMM) else "vectors"
    labels = torch.full((sum(LENGTHS),), -1)
    labels[LENGTHS[0] + LENGTHS[1] + 2] = 7
    sequences = observed(name, "neither").replaced(labels=labels)
    message = "`labels` must be 0 to 2 for a model with 3 states.* position 2 of sequence 3 is 7 instead. Increase"
    with pytest.raises(ValueError, match=message):
        fit(model, sequences)
    trained = fit(start(), sequences.without_labels(), max_epochs=1, val_sequences=sequences)  # truth has more states
    with pytest.raises(ValueError, match=message):
        trained.decode(sequences)


def test_weights_of_other_states_are_refused():
    sequences = observed("symbols", "state_weights")
    with pytest.raises(ValueError, match="must have 2 columns, one for each state of the model, but have 3 instead"):
        fit(StandardHMM(2, V), sequences)


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_an_impossible_label_is_located(order):
    sequences = Sequences.from_list([[0, 1, 2], [3, 0, 2, 1]], labels=[[-1, -1, -1], [0, 1, 0, -1]])[order]
    model = StandardHMM(2, V).set_parameters(transition=[[0.5, 0.5], [0.0, 1.0]])
    message = (
        rf"Sequence {order.index(1)} has probability zero under the model: step 2 \(2\) with the label 0 cannot follow"
    )
    with pytest.warns(UserWarning, match=message):
        assert model.score_labeled(sequences)[order.index(1)] == -torch.inf
    with pytest.warns(UserWarning, match=message):
        assert model.decode(sequences)[order.index(1)].tolist() == [-1] * 4
    with pytest.raises(ValueError, match=f"{message}.*Correct the labels or state weights up to that step"):
        fit(model, sequences)
