"""Cases that other libraries answer wrongly or not at all, each with its right answer; and hmmlearn, where it is right."""

from __future__ import annotations

import hmmlearn.hmm
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from lightning_hmm.inference import dense
from lightning_hmm.sequences import Sequences
from tests.inference import oracle


def log(*probabilities) -> torch.Tensor:
    with np.errstate(divide="ignore"):
        return torch.from_numpy(np.log(np.array(probabilities, dtype=np.float64)))


def symbols(*sequences, weights=None) -> Sequences:
    return Sequences.from_list(list(sequences), weights)


CHAIN = log(0.6, 0.4), log([0.7, 0.3], [0.2, 0.8])
COIN = dense.Symbols(log([0.9, 0.1], [0.3, 0.7]))


class TestAgainstHmmlearn:
    """Same parameters: same score, same path, same posteriors."""

    LENGTHS = (40, 1, 7, 120)

    def same(self, peer, ours: tuple, data: np.ndarray, lengths: tuple) -> None:
        sequences = ours[3]
        assert float(dense.log_likelihood(*ours).sum()) == pytest.approx(peer.score(data, lengths), rel=1e-10)
        score, path = peer.decode(data, lengths, algorithm="viterbi")
        viterbi = dense.viterbi(*ours)
        assert_array_equal(viterbi.states.values, path)
        assert float(viterbi.log_probability.sum()) == pytest.approx(score, rel=1e-10)
        assert_allclose(dense.posterior(*ours).smoothed.values, peer.predict_proba(data, lengths), rtol=1e-9, atol=1e-12)
        assert sequences.num_steps == len(data)

    def test_categorical(self, rng):
        peer = hmmlearn.hmm.CategoricalHMM(5, implementation="log")
        chain, log_probs = (oracle.log_rows(rng, 5), oracle.log_rows(rng, 5, 5)), oracle.log_rows(rng, 5, 6)
        peer.startprob_, peer.transmat_, peer.emissionprob_, peer.n_features = chain[0].exp().numpy(), chain[1].exp().numpy(), log_probs.exp().numpy(), 6
        data = rng.integers(0, 6, sum(self.LENGTHS))
        self.same(peer, (*chain, dense.Symbols(log_probs), Sequences.from_lengths(data, self.LENGTHS)), data[:, None], self.LENGTHS)

    def test_diagonal_gaussian(self, rng):
        peer = hmmlearn.hmm.GaussianHMM(4, "diag", implementation="log")
        chain, means, variances = (oracle.log_rows(rng, 4), oracle.log_rows(rng, 4, 4)), rng.normal(0, 2, (4, 3)), rng.gamma(2, size=(4, 3)) + 0.1
        peer.startprob_, peer.transmat_, peer.means_, peer.covars_, peer.n_features = chain[0].exp().numpy(), chain[1].exp().numpy(), means, variances, 3
        data = rng.normal(0, 2, (sum(self.LENGTHS), 3))
        emission = oracle.natural(means, variances, data.mean(0))
        self.same(peer, (*chain, emission, Sequences.from_lengths(data, self.LENGTHS)), data, self.LENGTHS)

    def test_wikipedia(self):
        """Normal, cold, dizzy: healthy, healthy, fever, with probability 0.01512 (en.wikipedia.org/wiki/Viterbi_algorithm)."""
        emission = dense.Symbols(log([0.5, 0.4, 0.1], [0.1, 0.3, 0.6]))
        path = dense.viterbi(log(0.6, 0.4), log([0.7, 0.3], [0.4, 0.6]), emission, symbols([0, 1, 2]))
        assert path.states.tolist() == [[0, 0, 1]]
        assert float(path.log_probability.exp()) == pytest.approx(0.01512, rel=1e-12)


class TestHmmlearn:
    def test_a_point_40_standard_deviations_off(self):
        """Its scaled pass stops with "underflow"; its log pass has the number."""
        means, variances, data = np.array([[0.0], [1.0]]), np.ones((2, 1)), np.array([[0.0], [1.0], [40.0], [0.5]])
        peer = hmmlearn.hmm.GaussianHMM(2, "diag", implementation="log")
        peer.startprob_, peer.transmat_, peer.means_, peer.covars_, peer.n_features = CHAIN[0].exp().numpy(), CHAIN[1].exp().numpy(), means, variances, 1
        ours = *CHAIN, oracle.natural(means, variances, np.zeros(1)), Sequences.from_list([data])
        for single in (False, True):
            assert float(dense.log_likelihood(*ours, single=single)) == pytest.approx(peer.score(data), rel=1e-7 if single else 1e-12)

    def test_a_symbol_never_seen_in_training(self):
        """Its IndexError says nothing of where; ours names the place. A symbol of probability zero is -inf."""
        with pytest.raises(ValueError, match=r"0 to 1.*position 2 of sequence 1 is 2"):
            dense.log_likelihood(*CHAIN, COIN, symbols([0], [1, 0, 2]))
        never = dense.Symbols(log([0.5, 0.5, 0], [0.3, 0.7, 0]))
        assert dense.log_likelihood(*CHAIN, never, symbols([0, 2])).tolist() == [-np.inf]

    def test_missing_values(self):
        """It refuses NaN; here a missing value is integrated out, which for a whole step is a likelihood of one."""
        ours = *CHAIN, oracle.natural(np.array([[0.0], [3.0]]), np.ones((2, 1)), np.zeros(1))
        missing = Sequences.from_list([[np.nan, np.nan, np.nan], [0.5, np.nan, 2.0]])
        first, second = dense.log_likelihood(*ours, missing).tolist()
        assert first == pytest.approx(0, abs=1e-15)
        grid = np.linspace(-12, 15, 4001)
        with_it = dense.log_likelihood(*ours, Sequences.from_list([[0.5, y, 2.0] for y in grid])).exp()
        assert np.exp(second) == pytest.approx(float(torch.trapezoid(with_it, torch.from_numpy(grid))), rel=1e-10)


class TestDynamax:
    def test_impossible_evidence(self):
        """A zero normaliser replaced by one gives a finite likelihood. It is zero."""
        deterministic = dense.Symbols(log([1, 0], [0, 1]))
        stays = log(1, 0), log([1, 0], [0, 1])
        step = dense.e_step(*stays, deterministic, symbols([0, 1], [0, 0]))
        assert step.log_likelihood.tolist() == [-np.inf, 0]
        assert step.impossible_step.tolist() == [1, -1]
        assert step.transition.tolist() == [[1, 0], [0, 0]]

    @pytest.mark.parametrize("probability", [1e-7, 1e-9, 1e-15, 1e-40])
    @pytest.mark.parametrize("single", [False, True])
    def test_a_needed_state_of_small_predicted_probability(self, probability, single):
        """The only path is 0 -> 1 -> 1. Counts must not go to 0 -> 0 because 1e-9 is "close to zero"."""
        deterministic = dense.Symbols(log([1, 0], [0, 1]))
        chain = log(1, 0), log([1 - probability, probability], [0, 1])
        step = dense.e_step(*chain, deterministic, symbols([0, 1, 1]), single=single)
        assert_allclose(step.transition, [[0, 1], [0, 1]], rtol=1e-6, atol=0)
        assert float(step.log_likelihood) == pytest.approx(np.log(probability), rel=1e-7)

    def test_a_step_that_no_state_explains(self):
        evidence = torch.zeros(3, 2, dtype=torch.float64)
        evidence[1] = -torch.inf
        posterior = dense.posterior(*CHAIN, dense.Steps(evidence), symbols([0, 0, 0]))
        assert posterior.log_likelihood.tolist() == [-np.inf]
        assert not posterior.smoothed.values.isnan().any()

    def test_evidence_of_200_nats_a_step(self):
        """Evidence is relative: 200 nats less at every step change the likelihood by 200 a step and no posterior."""
        evidence = torch.from_numpy(np.random.default_rng(0).normal(size=(50, 2)))
        near, far = (dense.posterior(*CHAIN, dense.Steps(evidence - shift), symbols([0] * 50)) for shift in (0, 200))
        assert_allclose(far.smoothed.values, near.smoothed.values, rtol=1e-10, atol=0)
        assert float(far.log_likelihood) == pytest.approx(float(near.log_likelihood) - 10000, rel=1e-12)


class TestPomegranate:
    def test_no_hidden_factor_for_the_end(self):
        """Probabilities of all sequences of a length sum to one, not to 1 / K."""
        everything = symbols(*([a, b, c] for a in (0, 1) for b in (0, 1) for c in (0, 1)))
        assert float(dense.log_likelihood(*CHAIN, COIN, everything).exp().sum()) == pytest.approx(1, rel=1e-12)

    def test_sequences_of_one_step(self):
        step = dense.e_step(*CHAIN, COIN, symbols([0], [1, 1], [1]))
        assert float(step.log_likelihood[0].exp()) == pytest.approx(0.6 * 0.9 + 0.4 * 0.3, rel=1e-12)
        assert float(step.transition.sum()) == pytest.approx(1, rel=1e-12)

    def test_an_impossible_observation_is_not_nan(self):
        never = dense.Symbols(log([1, 0], [1, 0]))
        assert dense.log_likelihood(*CHAIN, never, symbols([0, 1, 0])).tolist() == [-np.inf]

    def test_ragged_prediction(self):
        """Lists of different lengths, one by one or together."""
        parts = [[0, 1, 1], [0], [1, 1, 0, 0, 1]]
        together = dense.posterior(*CHAIN, COIN, symbols(*parts)).smoothed
        for n, part in enumerate(parts):
            assert_allclose(together[n], dense.posterior(*CHAIN, COIN, symbols(part)).smoothed.values, rtol=1e-14, atol=0)

    def test_states_far_apart_do_not_share_a_shift(self):
        """One shift for all states lets the smaller underflow; it is the only one that can go on."""
        evidence = torch.tensor([[0.0, -2000.0], [-np.inf, 0.0]], dtype=torch.float64)
        chain = log(0.5, 0.5), log([1, 0], [0, 1])
        assert float(dense.log_likelihood(*chain, dense.Steps(evidence), symbols([0, 0]))) == pytest.approx(np.log(0.5) - 2000, rel=1e-12)


class TestPyro:
    def test_no_transition_before_the_first_step(self):
        """p(y_1) = initial . B, not initial . A . B."""
        first = float(dense.log_likelihood(*CHAIN, COIN, symbols([0])).exp())
        initial, transition, emission = (tensor.exp().numpy() for tensor in (*CHAIN, COIN.log_probs))
        assert first == pytest.approx(initial @ emission[:, 0], rel=1e-12)
        assert abs(first - initial @ transition @ emission[:, 0]) > 0.01


class TestTorchStruct:
    def test_one_step_and_no_sequence_as_long_as_the_longest_allowed(self):
        assert dense.posterior(*CHAIN, COIN, symbols([1])).smoothed.values.shape == (1, 2)
        assert dense.log_likelihood(*CHAIN, COIN, symbols([], [1], [])).tolist()[::2] == [0, 0]


class TestChadhmm:
    def test_viterbi_is_the_best_of_all_paths(self):
        """Fifty random sequences; the emission belongs to the state that is entered, not to the one that is left."""
        for seed in range(10):
            model = oracle.make("symbols", 3, [6] * 5, seed=seed, missing=0)
            answers = model.answers(oracle.enumerate_paths)
            path = dense.viterbi(*model.parameters)
            assert_allclose(path.log_probability, [answer.score for answer in answers], rtol=1e-12, atol=0)
            assert path.states.tolist() == [answer.path.tolist() for answer in answers]


class TestTorchmm:
    def test_viterbi_of_a_ragged_batch(self):
        """Padding must not take part: together is the same as one by one, whatever the order."""
        model = oracle.make("symbols", 3, [5, 1, 2, 4, 1, 5, 3], seed=4, missing=0)
        parts = [[int(symbol) for symbol in sequence] for sequence in model.sequences]
        alone = [dense.viterbi(*model.parameters[:3], symbols(part)).states.tolist()[0] for part in parts]
        assert dense.viterbi(*model.parameters).states.tolist() == alone
        assert dense.viterbi(*model.parameters[:3], symbols(*parts[::-1])).states.tolist() == alone[::-1]


class TestClonedCode:
    def test_ties_are_broken_the_same_way_every_time(self):
        flat = log([0.25] * 4), log(*[[0.25] * 4] * 4), dense.Symbols(log(*[[0.5, 0.5]] * 4))
        paths = {tuple(dense.viterbi(flat[0][0], *flat[1:], symbols([0, 1] * 20)).states.values.tolist()) for _ in range(3)}
        assert paths == {(0,) * 40}

    def test_any_whole_numbers_are_symbols(self):
        for dtype in (np.int8, np.uint8, np.int32, np.int64, bool):
            assert float(dense.log_likelihood(*CHAIN, COIN, Sequences.from_list([np.array([0, 1, 1], dtype)]))) == pytest.approx(
                float(dense.log_likelihood(*CHAIN, COIN, symbols([0, 1, 1]))), rel=0
            )

    def test_out_of_range_is_an_error(self):
        for bad in (2, 10**9, -2):
            with pytest.raises(ValueError, match=f"position 1 of sequence 0 is {bad}"):
                dense.viterbi(*CHAIN, COIN, symbols([0, bad]))


class TestCtrlG:
    def test_a_missing_symbol_where_emissions_are_zero(self):
        """0 times -inf is not taken."""
        sparse = dense.Symbols(log([1, 0], [0, 1]))
        step = dense.e_step(*CHAIN, sparse, symbols([-1, 0, -1], [-1]))
        assert float(step.log_likelihood[0].exp()) == pytest.approx(0.6 * 0.7 + 0.4 * 0.2, rel=1e-12)
        assert float(step.log_likelihood[1]) == pytest.approx(0, abs=1e-15)
        assert_allclose(step.emission[0], [[1, 0], [0, 0]], rtol=1e-12, atol=0)
