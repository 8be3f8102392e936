"""Cases in which other libraries are wrong or fail, each with its right result, and comparisons with hmmlearn."""

from __future__ import annotations

import itertools

import hmmlearn.hmm
import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from lightning_hmm import inference
from lightning_hmm.inference import Rows, Table
from lightning_hmm.inference.operators import Dense
from lightning_hmm.sequences import Sequences
from tests.inference import oracle


def log(*probabilities) -> torch.Tensor:
    with np.errstate(divide="ignore"):
        return torch.from_numpy(np.log(np.array(probabilities, dtype=np.float64)))


def symbols(log_probs: torch.Tensor, *sequences) -> tuple[Table, torch.Tensor]:
    """The evidence and the offsets of symbols."""
    batch = Sequences.from_list(list(sequences))
    return Table(log_probs, batch.symbols(log_probs.shape[1])), batch.offsets


def rows(log_likelihoods: torch.Tensor) -> tuple[Rows, torch.Tensor]:
    """The evidence and the offsets of one sequence."""
    return Rows(log_likelihoods), torch.tensor([0, len(log_likelihoods)])


def by_sequence(packed: torch.Tensor, offsets: torch.Tensor) -> list[torch.Tensor]:
    return [packed[first:last] for first, last in itertools.pairwise(offsets.tolist())]


CHAIN = log(0.6, 0.4), Dense(log([0.7, 0.3], [0.2, 0.8]))
CERTAIN = log([1, 0], [0, 1])
COIN = log([0.9, 0.1], [0.3, 0.7])


class TestAgainstHmmlearn:
    """Same parameters: same score, same path, same posteriors."""

    LENGTHS = (40, 1, 7, 120)

    def same(self, peer, ours: tuple, data: np.ndarray, lengths: tuple) -> None:
        assert float(inference.log_likelihood(*ours).sum()) == pytest.approx(peer.score(data, lengths), rel=1e-10)
        score, path = peer.decode(data, lengths, algorithm="viterbi")
        viterbi = inference.viterbi(*ours)
        assert_array_equal(viterbi.states, path)
        assert float(viterbi.log_probability.sum()) == pytest.approx(score, rel=1e-10)
        assert_allclose(inference.posterior(*ours).smoothed, peer.predict_proba(data, lengths), rtol=1e-9, atol=1e-12)

    def test_categorical(self, rng):
        peer = hmmlearn.hmm.CategoricalHMM(5, implementation="log")
        initial, matrix, log_probs = oracle.log_rows(rng, 5), oracle.log_rows(rng, 5, 5), oracle.log_rows(rng, 5, 6)
        peer.startprob_, peer.transmat_, peer.emissionprob_, peer.n_features = (
            initial.exp().numpy(),
            matrix.exp().numpy(),
            log_probs.exp().numpy(),
            6,
        )
        data = rng.integers(0, 6, sum(self.LENGTHS))
        offsets = torch.tensor([0, *self.LENGTHS]).cumsum(0)
        self.same(
            peer,
            (initial, Dense(matrix), Table(log_probs, torch.from_numpy(data)), offsets),
            data[:, None],
            self.LENGTHS,
        )

    def test_diagonal_gaussian(self, rng):
        peer = hmmlearn.hmm.GaussianHMM(4, "diag", implementation="log")
        initial, matrix, means, variances = (
            oracle.log_rows(rng, 4),
            oracle.log_rows(rng, 4, 4),
            rng.normal(0, 2, (4, 3)),
            rng.gamma(2, size=(4, 3)) + 0.1,
        )
        peer.startprob_, peer.transmat_, peer.means_, peer.covars_, peer.n_features = (
            initial.exp().numpy(),
            matrix.exp().numpy(),
            means,
            variances,
            3,
        )
        data = rng.normal(0, 2, (sum(self.LENGTHS), 3))
        evidence, offsets = (
            oracle.gaussian(means, variances, data.mean(0), data),
            torch.tensor([0, *self.LENGTHS]).cumsum(0),
        )
        self.same(peer, (initial, Dense(matrix), evidence, offsets), data, self.LENGTHS)

    def test_wikipedia(self):
        """The example of en.wikipedia.org/wiki/Viterbi_algorithm: healthy, healthy, fever, with probability 0.01512."""
        table = log([0.5, 0.4, 0.1], [0.1, 0.3, 0.6])
        path = inference.viterbi(log(0.6, 0.4), Dense(log([0.7, 0.3], [0.4, 0.6])), *symbols(table, [0, 1, 2]))
        assert path.states.tolist() == [0, 0, 1]
        assert float(path.log_probability.exp()) == pytest.approx(0.01512, rel=1e-12)


class TestHmmlearn:
    def test_a_point_40_standard_deviations_off(self):
        """Its scaled pass stops with "underflow"; its log pass has the number."""
        means, variances, data = np.array([[0.0], [1.0]]), np.ones((2, 1)), np.array([[0.0], [1.0], [40.0], [0.5]])
        peer = hmmlearn.hmm.GaussianHMM(2, "diag", implementation="log")
        matrix = CHAIN[1].log_probs.exp().numpy()
        peer.startprob_, peer.transmat_, peer.means_, peer.covars_, peer.n_features = (
            CHAIN[0].exp().numpy(),
            matrix,
            means,
            variances,
            1,
        )
        ours = *CHAIN, oracle.gaussian(means, variances, np.zeros(1), data), torch.tensor([0, 4])
        for dtype, rel in ((torch.float64, 1e-12), (torch.float32, 1e-7)):
            assert float(inference.log_likelihood(*ours, dtype=dtype)) == pytest.approx(peer.score(data), rel=rel)

    def test_a_symbol_never_seen_in_training(self):
        """Its IndexError says nothing of where; ours names the place. A symbol of probability zero is -inf."""
        with pytest.raises(ValueError, match=r"0 to 1.*position 2 of sequence 1 is 2"):
            symbols(COIN, [0], [1, 0, 2])
        never = log([0.5, 0.5, 0], [0.3, 0.7, 0])
        assert inference.log_likelihood(*CHAIN, *symbols(never, [0, 2])).tolist() == [-np.inf]

    def test_missing_values(self):
        """It refuses NaN; here a missing value is integrated out, which for a whole step is a likelihood of one."""

        def scores(sequences: list) -> torch.Tensor:
            values, offsets = np.concatenate(sequences)[:, None], torch.tensor([0, *map(len, sequences)]).cumsum(0)
            return inference.log_likelihood(
                *CHAIN, oracle.gaussian(np.array([[0.0], [3.0]]), np.ones((2, 1)), np.zeros(1), values), offsets
            )

        first, second = scores([[np.nan, np.nan, np.nan], [0.5, np.nan, 2.0]]).tolist()
        assert first == pytest.approx(0, abs=1e-15)
        grid = np.linspace(-12, 15, 4001)
        with_it = scores([[0.5, y, 2.0] for y in grid]).exp()
        assert np.exp(second) == pytest.approx(float(torch.trapezoid(with_it, torch.from_numpy(grid))), rel=1e-10)


class TestDynamax:
    def test_impossible_evidence(self):
        """A zero normaliser replaced by one gives a finite likelihood. It is zero."""
        stays = log(1, 0), Dense(log([1, 0], [0, 1]))
        step = inference.e_step(*stays, *symbols(CERTAIN, [0, 1], [0, 0]))
        assert step.log_likelihood.tolist() == [-np.inf, 0]
        assert step.impossible_step.tolist() == [1, -1]
        assert step.counts[0].tolist() == [[1, 0], [0, 0]]

    @pytest.mark.parametrize("probability", [1e-7, 1e-9, 1e-15, 1e-40])
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_a_needed_state_of_small_predicted_probability(self, probability, dtype):
        """The only path is 0 -> 1 -> 1. Counts must not go to 0 -> 0 because 1e-9 is "close to zero"."""
        chain = log(1, 0), Dense(log([1 - probability, probability], [0, 1]))
        step = inference.e_step(*chain, *symbols(CERTAIN, [0, 1, 1]), dtype=dtype)
        assert_allclose(step.counts[0], [[0, 1], [0, 1]], rtol=1e-6, atol=0)
        assert float(step.log_likelihood) == pytest.approx(np.log(probability), rel=1e-7)

    def test_a_step_that_no_state_explains(self):
        evidence = torch.zeros(3, 2, dtype=torch.float64)
        evidence[1] = -torch.inf
        posterior = inference.posterior(*CHAIN, *rows(evidence))
        assert posterior.log_likelihood.tolist() == [-np.inf]
        assert not posterior.smoothed.isnan().any()

    def test_evidence_of_200_nats_a_step(self):
        """Evidence is relative: 200 nats less at every step change the likelihood by 200 a step and no posterior."""
        evidence = torch.from_numpy(np.random.default_rng(0).normal(size=(50, 2)))
        near, far = (inference.posterior(*CHAIN, *rows(evidence - shift)) for shift in (0, 200))
        assert_allclose(far.smoothed, near.smoothed, rtol=1e-10, atol=0)
        assert float(far.log_likelihood) == pytest.approx(float(near.log_likelihood) - 10000, rel=1e-12)


class TestPomegranate:
    def test_no_hidden_factor_for_the_end(self):
        """Probabilities of all sequences of a length sum to one, not to 1 / K."""
        everything = symbols(COIN, *([a, b, c] for a in (0, 1) for b in (0, 1) for c in (0, 1)))
        assert float(inference.log_likelihood(*CHAIN, *everything).exp().sum()) == pytest.approx(1, rel=1e-12)

    def test_sequences_of_one_step(self):
        step = inference.e_step(*CHAIN, *symbols(COIN, [0], [1, 1], [1]))
        assert float(step.log_likelihood[0].exp()) == pytest.approx(0.6 * 0.9 + 0.4 * 0.3, rel=1e-12)
        assert float(step.counts[0].sum()) == pytest.approx(1, rel=1e-12)

    def test_an_impossible_observation_is_not_nan(self):
        never = log([1, 0], [1, 0])
        assert inference.log_likelihood(*CHAIN, *symbols(never, [0, 1, 0])).tolist() == [-np.inf]

    def test_ragged_prediction(self):
        """Lists of different lengths, one by one or together."""
        parts = [[0, 1, 1], [0], [1, 1, 0, 0, 1]]
        evidence, offsets = symbols(COIN, *parts)
        together = by_sequence(inference.posterior(*CHAIN, evidence, offsets).smoothed, offsets)
        for n, part in enumerate(parts):
            assert_allclose(together[n], inference.posterior(*CHAIN, *symbols(COIN, part)).smoothed, rtol=1e-14, atol=0)

    def test_states_far_apart_do_not_share_a_shift(self):
        """One shift for all states lets the smaller underflow; it is the only one that can go on."""
        evidence = torch.tensor([[0.0, -2000.0], [-np.inf, 0.0]], dtype=torch.float64)
        chain = log(0.5, 0.5), Dense(log([1, 0], [0, 1]))
        assert float(inference.log_likelihood(*chain, *rows(evidence))) == pytest.approx(np.log(0.5) - 2000, rel=1e-12)


class TestPyro:
    def test_no_transition_before_the_first_step(self):
        """p(y_1) = initial . B, not initial . A . B."""
        first = float(inference.log_likelihood(*CHAIN, *symbols(COIN, [0])).exp())
        initial, transition, emission = (tensor.exp().numpy() for tensor in (CHAIN[0], CHAIN[1].log_probs, COIN))
        assert first == pytest.approx(initial @ emission[:, 0], rel=1e-12)
        assert abs(first - initial @ transition @ emission[:, 0]) > 0.01


class TestTorchStruct:
    def test_one_step_and_no_sequence_as_long_as_the_longest_allowed(self):
        assert inference.posterior(*CHAIN, *symbols(COIN, [1])).smoothed.shape == (1, 2)
        assert inference.log_likelihood(*CHAIN, *symbols(COIN, [], [1], [])).tolist()[::2] == [0, 0]


class TestChadhmm:
    def test_viterbi_is_the_best_of_all_paths(self):
        """Fifty random sequences; the emission belongs to the state that is entered, not to the one that is left."""
        for seed in range(10):
            model = oracle.make("table", 3, [6] * 5, seed=seed, missing=0)
            answers = model.answers(oracle.enumerate_paths)
            path = inference.viterbi(*model.problem)
            assert_allclose(path.log_probability, oracle.gathered(answers, "score"), rtol=1e-12, atol=0)
            assert path.states.tolist() == oracle.gathered(answers, "path").tolist()


class TestTorchmm:
    def test_viterbi_of_a_ragged_batch(self):
        """Padding must not take part: together is the same as one by one, whatever the order."""
        model = oracle.make("table", 3, [5, 1, 2, 4, 1, 5, 3], seed=4, missing=0)
        parts = [[int(symbol) for symbol in sequence] for sequence in model.sequences]
        chain, table = model.problem[:2], model.evidence.log_probs
        alone = [inference.viterbi(*chain, *symbols(table, part)).states.tolist() for part in parts]
        assert inference.viterbi(*model.problem).states.tolist() == [*itertools.chain(*alone)]
        assert inference.viterbi(*chain, *symbols(table, *parts[::-1])).states.tolist() == [
            *itertools.chain(*alone[::-1])
        ]


class TestClonedCode:
    def test_ties_are_broken_the_same_way_every_time(self):
        flat = log(*[0.25] * 4), Dense(log(*[[0.25] * 4] * 4))
        paths = {
            tuple(inference.viterbi(*flat, *symbols(log(*[[0.5, 0.5]] * 4), [0, 1] * 20)).states.tolist())
            for _ in range(3)
        }
        assert paths == {(0,) * 40}

    def test_any_whole_numbers_are_symbols(self):
        expected = inference.log_likelihood(*CHAIN, *symbols(COIN, [0, 1, 1]))
        for dtype in (np.int8, np.uint8, np.int32, np.int64, bool):
            assert torch.equal(inference.log_likelihood(*CHAIN, *symbols(COIN, np.array([0, 1, 1], dtype))), expected)

    def test_out_of_range_is_an_error(self):
        for bad in (2, 10**9, -2):
            with pytest.raises(ValueError, match=f"position 1 of sequence 0 is {bad}"):
                symbols(COIN, [0, bad])


class TestCtrlG:
    def test_a_missing_symbol_where_emissions_are_zero(self):
        """0 times -inf is not taken."""
        step = inference.e_step(*CHAIN, *symbols(CERTAIN, [-1, 0, -1], [-1]))
        assert float(step.log_likelihood[0].exp()) == pytest.approx(0.6 * 0.7 + 0.4 * 0.2, rel=1e-12)
        assert float(step.log_likelihood[1]) == pytest.approx(0, abs=1e-15)
        assert_allclose(step.evidence, [[1, 0], [0, 0]], rtol=1e-12, atol=0)
