"""`StandardHMM` as people meet it: its questions, its errors."""

from __future__ import annotations

import math

import hmmlearn.hmm
import numpy as np
import pytest
import torch

from lightning_hmm import Sequences, StandardHMM, fit, inference
from lightning_hmm.distributions import Moments
from tests.helpers import random_symbols, random_vectors

# The example of Wikipedia's article on the Viterbi algorithm: states healthy and fever; symbols normal, cold, dizzy.
CLINIC = {"initial": [0.6, 0.4], "transition": [[0.7, 0.3], [0.4, 0.6]], "emission": [[0.5, 0.4, 0.1], [0.1, 0.3, 0.6]]}


@pytest.fixture
def clinic() -> StandardHMM:
    return StandardHMM(num_states=2, num_symbols=3).set_parameters(**CLINIC)


@pytest.fixture
def gaussian(rng) -> StandardHMM:
    model = StandardHMM(num_states=3, emission="gaussian", num_features=2)
    return model.set_parameters(emission={"mean": rng.normal(size=(3, 2)), "variance": rng.uniform(0.5, 2, (3, 2))})


def test_published_answers(clinic):
    """https://en.wikipedia.org/wiki/Viterbi_algorithm: path healthy, healthy, fever with probability 0.01512."""
    assert clinic.decode([[0, 1, 2]]).tolist() == [[0, 0, 1]]
    path = inference.viterbi(*clinic.problem(Sequences.from_list([[0, 1, 2]])))
    assert math.exp(float(path.log_probability)) == pytest.approx(0.01512, rel=1e-10)


def test_score_of_lists_arrays_and_sequences_agree(clinic):
    data = [[0, 1, 2, 2], [1], []]
    expected = clinic.score(Sequences.from_list(data))
    assert torch.equal(clinic.score(data), expected)
    assert torch.equal(clinic.score([np.array(x, dtype=np.int64) for x in data]), expected)
    assert expected[2] == 0
    assert float(expected[1]) == pytest.approx(math.log(0.6 * 0.4 + 0.4 * 0.3), rel=1e-12)


def test_score_ignores_weights_and_reads_names():
    model = StandardHMM(num_states=2, num_symbols=3, symbol_names=["normal", "cold", "dizzy"]).set_parameters(**CLINIC)
    weighted = Sequences.from_list([[0, 1, 2]], weights=[7.0])
    assert torch.equal(model.score(weighted), model.score([["normal", "cold", "dizzy"]]))


def test_posterior_fields(clinic, rng):
    sequences = random_symbols(rng, num_symbols=3)
    posterior = clinic.posterior(sequences)
    peer = hmmlearn.hmm.CategoricalHMM(2, n_features=3)
    peer.startprob_, peer.transmat_, peer.emissionprob_ = (np.array(value) for value in CLINIC.values())
    complete = Sequences.from_list([[0, 1, 2, 0]])
    np.testing.assert_allclose(
        clinic.posterior(complete).smoothed[0], peer.predict_proba([[0], [1], [2], [0]]), rtol=1e-10
    )
    assert float(posterior.transition_counts.sum()) == pytest.approx(
        int((sequences.lengths - 1).clamp(min=0).sum()), rel=1e-10
    )
    torch.testing.assert_close(posterior.log_likelihood, clinic.score(sequences), rtol=1e-12, atol=1e-12)
    for n in torch.nonzero(sequences.lengths).flatten().tolist():
        torch.testing.assert_close(posterior.filtered[n][-1], posterior.smoothed[n][-1], rtol=1e-10, atol=1e-14)


def test_predict_next_is_the_ratio_of_likelihoods(clinic):
    """p(next = v | y) = p(y, v) / p(y), and one step of nothing in between for two steps ahead."""
    context = [0, 2, 1]
    for steps, gap in ((1, []), (2, [-1]), (3, [-1, -1])):
        joint = clinic.score([[*context, *gap, symbol] for symbol in range(3)])
        torch.testing.assert_close(
            clinic.predict_next([context], steps)[0], (joint - clinic.score([context])).exp(), rtol=1e-10, atol=0
        )
    torch.testing.assert_close(clinic.predict_next([[]])[0], clinic.score([[0], [1], [2]]).exp(), rtol=1e-10, atol=0)


def test_gaussian_prediction_is_the_mixtures_moments(gaussian):
    sequences = Sequences.from_list([[[0.3, -1.0], [0.5, float("nan")]]])
    prediction = gaussian.predict_next(sequences, steps=2)
    assert isinstance(prediction, Moments)
    states = gaussian.posterior(sequences).smoothed[0][-1] @ gaussian.transition_probs @ gaussian.transition_probs
    mean = states @ gaussian.emission.mean
    torch.testing.assert_close(prediction.mean[0], mean, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        prediction.variance[0],
        states @ (gaussian.emission.variance + (gaussian.emission.mean - mean) ** 2),
        rtol=1e-10,
        atol=0,
    )


def test_samples_have_the_models_statistics(clinic, gaussian):
    observations, states = clinic.sample(400, 50, seed=3, return_states=True)
    counts = torch.zeros(2, 2, dtype=torch.float64)
    for path in states:
        counts.index_put_((path[:-1], path[1:]), torch.ones(49, dtype=torch.float64), accumulate=True)
    frequencies = counts / counts.sum(1, keepdim=True)
    assert (frequencies - clinic.transition_probs).abs().max() < 5 * 0.5 / math.sqrt(
        counts.sum(1).min()
    )  # five standard errors
    for state in range(2):
        symbols = observations.values[states.values == state]
        shares = torch.bincount(symbols, minlength=3) / len(symbols)
        assert (shares - clinic.emission_probs[state]).abs().max() < 5 * 0.5 / math.sqrt(len(symbols))
    vectors, states = gaussian.sample(200, 50, seed=4, return_states=True)
    for state in range(3):
        values = vectors.values[states.values == state]
        torch.testing.assert_close(
            values.mean(0),
            gaussian.emission.mean[state],
            rtol=0,
            atol=5 * float(gaussian.emission.variance.max()) ** 0.5 / math.sqrt(len(values)),
        )


def test_sampling_is_seeded_and_takes_lengths(clinic):
    assert clinic.sample(3, 5, seed=1).tolist() == clinic.sample(3, 5, seed=1).tolist()
    assert clinic.sample(3, 5, seed=1).tolist() != clinic.sample(3, 5, seed=2).tolist()
    assert clinic.sample(3, [4, 0, 2]).lengths.tolist() == [4, 0, 2]


def test_sample_posterior_visits_states_as_often_as_smoothed(clinic):
    sequences = Sequences.from_list([[0, 2, -1, 1]] * 4000)
    drawn = torch.stack(list(clinic.sample_posterior(sequences, seed=5))).double().mean(0)
    expected = clinic.posterior(sequences[:1]).smoothed[0][:, 1]
    assert (drawn - expected).abs().max() < 5 * 0.5 / math.sqrt(4000)


def test_criteria_count_degrees_of_freedom(clinic, gaussian, rng):
    sequences = random_symbols(rng, num_symbols=3)
    score, observed = float(clinic.score(sequences).sum()), int((sequences.values >= 0).sum())
    assert clinic.num_free_parameters == 1 + 2 + 4
    assert clinic.aic(sequences) == pytest.approx(2 * 7 - 2 * score)
    assert clinic.bic(sequences) == pytest.approx(7 * math.log(observed) - 2 * score)
    assert gaussian.num_free_parameters == 2 + 6 + 12
    assert clinic.aic(Sequences.from_list([[0, 1]], weights=[3.0])) == pytest.approx(clinic.aic([[0, 1]] * 3))
    assert clinic.bic(Sequences.from_list([[0, 1]], weights=[3.0])) == pytest.approx(clinic.bic([[0, 1]] * 3))
    trained = fit(StandardHMM(num_states=2, num_symbols=3), [[0, 1, 0, 1, 0]], 30)  # symbol 2 gets probability zero
    assert trained.num_free_parameters == 7  # an estimate of zero was free all the same
    left_right = StandardHMM(num_states=2, num_symbols=3).set_parameters(transition=[[0.5, 0.5], [0.0, 1.0]])
    assert left_right.num_free_parameters == 1 + 1 + 4
    assert StandardHMM(num_states=3, num_symbols=4, frozen=("emission",)).num_free_parameters == 2 + 6
    two = StandardHMM(num_states=2, num_symbols=2, restarts=2).set_parameters(
        transition=[[[0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5], [0.0, 1.0]]]
    )
    assert two.num_free_parameters == 1 + 2 + 2
    two.best_restart.fill_(1)
    assert two.num_free_parameters == 1 + 1 + 2


def means_of_restarts(model: StandardHMM) -> torch.Tensor:
    """(restarts, K, D). The emission gives those of the chosen restart."""
    means = []
    for restart in range(model.restarts):
        model.best_restart.fill_(restart)
        means.append(model.emission.mean)
    model.best_restart.fill_(0)
    return torch.stack(means)


@pytest.mark.parametrize("initialization", ["kmeans", "random"])
def test_gaussian_starts_lie_in_the_data_and_differ_between_restarts(rng, initialization):
    sequences = random_vectors(rng)
    model = StandardHMM(
        num_states=3, emission="gaussian", num_features=2, restarts=3, initialization=initialization, seed=2
    )
    model.initialize(sequences)
    complete = sequences.values[~sequences.values.isnan().any(1)]
    means = means_of_restarts(model)
    assert (means >= complete.min(0).values - 1e-9).all()
    assert (means <= complete.max(0).values + 1e-9).all()
    assert not torch.equal(means[0], means[1])
    again = StandardHMM(
        num_states=3, emission="gaussian", num_features=2, restarts=3, initialization=initialization, seed=2
    )
    again.initialize(sequences)
    assert torch.equal(means, means_of_restarts(again))
    model.initialize(sequences)  # only ever once
    assert torch.equal(means_of_restarts(model), means)


def test_a_constant_feature_does_no_harm(rng):
    values = np.concatenate([rng.normal(size=(200, 1)), np.full((200, 1), 3.0)], axis=1)
    model = fit(StandardHMM(num_states=2, emission="gaussian", num_features=2), [values], 20)
    assert torch.isfinite(model.emission.variance).all()
    assert torch.isfinite(model.score([values])).all()


def test_a_constant_that_is_not_a_binary_fraction_has_no_scale():
    model = StandardHMM(num_states=1, emission="gaussian", num_features=1)
    model.initialize(Sequences.from_list([[[0.1]] * 1000]))
    assert float(model.emission.data_variance) == 1.0


def test_predicted_variance_keeps_its_digits():
    model = StandardHMM(num_states=2, emission="gaussian", num_features=1)
    model.set_parameters(
        initial=[1.0, 0.0],
        transition=[[1.0, 0.0], [0.0, 1.0]],
        emission={"mean": [[0.0], [3e8]], "variance": [[1.0], [1.0]]},
    )
    assert float(model.predict_next([[[0.0]]]).variance) == pytest.approx(1.0)


def test_impossible_evidence_is_minus_infinity_and_named():
    model = StandardHMM(num_states=2, num_symbols=3).set_parameters(emission=[[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]])
    with pytest.warns(
        UserWarning, match=r"Sequence 1 has probability zero under the model: step 2 \(2\).*2 sequences in all"
    ):
        scores = model.score([[0, 1], [0, 1, 2, 0], [2]])
    assert scores.tolist()[1:] == [-math.inf, -math.inf]
    assert math.isfinite(float(scores[0]))
    with pytest.warns(UserWarning, match="Sequence 1 has probability zero"):
        assert model.decode([[0, 1], [0, 1, 2, 0]]).tolist()[1] == [-1, -1, -1, -1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_states": 0, "num_symbols": 3}, "`num_states` must be a whole number of at least 1, but is 0"),
        ({"num_states": 2}, "`num_symbols` must be given for categorical emissions"),
        ({"num_states": 2, "emission": "gaussian"}, "`num_features` must be given for Gaussian emissions"),
        (
            {"num_states": 2, "num_symbols": 3, "emission": "poisson"},
            "`emission` must be categorical, gaussian or an Emission, but is 'poisson'",
        ),
        ({"num_states": 2, "num_symbols": 3, "restarts": 0}, "`restarts` must be a whole number"),
        (
            {"num_states": 2, "num_symbols": 3, "frozen": ["emissions"]},
            "`frozen` must name initial, transition or emission",
        ),
        (
            {"num_states": 2, "num_symbols": 3, "sequences_per_update": 4},
            "`sequences_per_update` requires online EM. Set `discount`",
        ),
        ({"num_states": 2, "num_symbols": 3, "symbol_names": ["a"]}, "`symbol_names` must name 3 symbols, but names 1"),
        ({"num_states": 2, "num_symbols": 3, "arithmetic": "float16"}, "`arithmetic` must be float64 or float32"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        StandardHMM(**options)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"transition": [[0.5, 0.47], [0.5, 0.5]]}, r"`transition` rows must sum to 1, but row 0 sums to 0.97"),
        (
            {"transition": [[1.5, -0.5], [0.5, 0.5]]},
            r"`transition` must hold probabilities, but the entry at \(0, 1\) is -0.5",
        ),
        ({"initial": [0.5, float("nan")]}, "`initial` must hold probabilities"),
        ({"emission": [[1.0, 0.0]]}, r"`emission` must have shape \(2, 3\), but has \(1, 2\)"),
    ],
)
def test_bad_parameters_are_named(clinic, values, message):
    with pytest.raises(ValueError, match=message):
        clinic.set_parameters(**values)


def test_bad_gaussian_parameters_are_named(gaussian, clinic):
    with pytest.raises(ValueError, match="`variance` must be positive, but that of state 1, column 0 is 0"):
        gaussian.set_parameters(emission={"variance": [[1.0, 1.0], [0.0, 1.0], [1.0, 1.0]]})
    with pytest.raises(ValueError, match="has the parameters mean, variance, but 'rate' was given"):
        gaussian.set_parameters(emission={"rate": [[1.0, 1.0]] * 3})
    with pytest.raises(AttributeError, match="a Gaussian emission has `mean` and `variance`"):
        gaussian.emission_probs  # noqa: B018
    with pytest.raises(AttributeError, match="'Categorical' object has no attribute 'mean'"):
        clinic.emission.mean  # noqa: B018


def test_an_emission_that_becomes_impossible_between_updates_stays_impossible():
    """States alternate. The first update leaves each state one symbol, so that the second sequence is impossible."""
    model = StandardHMM(2, 2, discount=0.0, sequences_per_update=1, frozen=["initial", "transition"])
    model.set_parameters(initial=[1.0, 0.0], transition=[[0.0, 1.0], [1.0, 0.0]])
    with pytest.raises(ValueError, match="Sequence 1 has probability zero"):
        fit(model, [[0, 1, 0, 1], [1, 0, 1, 0]], 1, 0)
