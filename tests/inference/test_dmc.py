"""The mostly constant HMM against the table of all paths, the textbook recursion and the dense routines on the full matrix."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from lightning_hmm import Sequences
from lightning_hmm.inference import dense, dmc
from tests.inference import oracle
from tests.inference.oracle import KINDS, Model

LENGTHS = [7, 1, 0, 4, 2, 5, 3, 9, 1, 6, 8, 2]  # enough to be worked on side by side


def random_transition(rng: np.random.Generator, num_states: int, num_kept: int, *, low: float = 0.0, zeros: float = 0.0) -> dmc.Transition:
    """Kept entries above the row's constant, but for a share `low` of them; a share `zeros` of them and of the constants is zero."""
    indices = np.stack([np.sort(rng.permutation(num_states)[:num_kept]) for _ in range(num_states)])
    values = np.where(rng.random(indices.shape) < low, rng.random(indices.shape) * 1e-3, 1 + 5 * rng.random(indices.shape))
    values = np.where(rng.random(indices.shape) < zeros, 0.0, values)
    constants = np.where((rng.random(num_states) < zeros) & (values.sum(1) > 0), 0.0, 0.2 + 0.8 * rng.random(num_states))
    total = values.sum(1) + (num_states - num_kept) * constants
    with np.errstate(divide="ignore"):
        arrays = np.log(values / total[:, None]), np.log(constants / total)
    return dmc.Transition(torch.from_numpy(indices), *map(torch.from_numpy, arrays))


def make(kind: str, num_states: int, num_kept: int, lengths=LENGTHS, *, seed: int = 0, low: float = 0.0, zeros: float = 0.0) -> tuple[Model, dmc.Transition]:
    """A random model of the oracle's with a mostly constant matrix."""
    transition = random_transition(np.random.default_rng(seed), num_states, num_kept, low=low, zeros=zeros)
    return oracle.make(kind, num_states, lengths, seed=seed + 1, zeros=zeros)._replace(transition=transition.expand()), transition


def arguments(model: Model, transition: dmc.Transition) -> tuple:
    return model.initial, transition, model.emission, model.sequences


def split(pairs: np.ndarray, transition: dmc.Transition) -> tuple[np.ndarray, np.ndarray]:
    places = transition.indices.numpy()
    others = pairs.copy()
    np.put_along_axis(others, places, 0, 1)
    return np.take_along_axis(pairs, places, 1), others.sum(1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_states", "num_kept"), [(2, 0), (2, 1), (3, 1), (3, 2)])
@pytest.mark.parametrize("low", [0.0, 0.7])
def test_all_paths(kind, num_states, num_kept, low):
    model, transition = make(kind, num_states, num_kept, [5, 1, 0, 2, 4], seed=num_states + num_kept, low=low, zeros=0.2 if low else 0.0)
    answers = model.answers(oracle.enumerate_paths)
    posterior = dmc.posterior(*arguments(model, transition), routine="sparse")
    path = dmc.viterbi(*arguments(model, transition), routine="sparse")
    kept, rest = split(sum(answer.pairs for answer in answers), transition)
    np.testing.assert_allclose(posterior.log_likelihood, [answer.log_likelihood for answer in answers], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(posterior.kept_counts, kept, rtol=1e-9, atol=1e-14)
    np.testing.assert_allclose(posterior.rest_counts, rest, rtol=1e-9, atol=1e-14)
    for n, answer in enumerate(answers):
        np.testing.assert_allclose(posterior.smoothed[n], answer.smoothed, rtol=1e-9, atol=1e-14)
        np.testing.assert_allclose(posterior.filtered[n], answer.filtered, rtol=1e-9, atol=1e-14)
        assert path.states[n].tolist() == answer.path.tolist()
        assert float(path.log_probability[n]) == pytest.approx(answer.score, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("low", "zeros"), [(0.0, 0.0), (0.8, 0.0), (0.5, 0.3)])
@pytest.mark.parametrize(("num_states", "num_kept"), [(5, 2), (40, 3), (37, 36), (20, 0)])
@pytest.mark.parametrize("lengths", [LENGTHS, [30]], ids=["many", "one"])
def test_textbook_recursion(kind, low, zeros, num_states, num_kept, lengths):
    model, transition = make(kind, num_states, num_kept, lengths, seed=num_kept, low=low, zeros=zeros)
    model = model.with_weights(np.linspace(0.5, 2, len(lengths)))
    answers = model.answers()
    possible = [answer.log_likelihood > -np.inf for answer in answers]
    initial, pairs, emission = oracle.statistics(model, answers, np.where(possible, model.sequences.weights, 0))
    found = dmc.e_step(*arguments(model, transition), routine="sparse")
    kept, rest = split(pairs, transition)
    tight = {"rtol": 1e-9, "atol": 1e-13}
    np.testing.assert_allclose(found.log_likelihood, [answer.log_likelihood for answer in answers], **tight)
    np.testing.assert_allclose(dmc.log_likelihood(*arguments(model, transition), routine="sparse"), found.log_likelihood, **tight)
    np.testing.assert_allclose(found.initial, initial, **tight)
    np.testing.assert_allclose(found.kept, kept, **tight)
    np.testing.assert_allclose(found.rest, rest, **tight)
    for ours, theirs in zip(found.emission, emission, strict=True):
        np.testing.assert_allclose(ours, theirs, **tight)
    path = dmc.viterbi(*arguments(model, transition), routine="sparse")
    np.testing.assert_allclose(path.log_probability, [answer.score for answer in answers], **tight)
    for n, answer in enumerate(answers):
        if possible[n] and len(answer.path):
            scores = oracle.path_score(model.initial.numpy(), model.transition.numpy(), model.rows[n], path.states[n].numpy())
            assert scores == pytest.approx(answer.score, rel=1e-10)
        else:
            assert path.states[n].tolist() == answer.path.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [LENGTHS * 3, [50]], ids=["many", "one"])
def test_float32(kind, lengths):
    model, transition = make(kind, 100, 7, lengths, low=0.3)
    exact, single = (dmc.e_step(*arguments(model, transition), single=single, routine="sparse") for single in (False, True))
    for ours, theirs in zip((*single[:1], *single[2:5], *single[5]), (*exact[:1], *exact[2:5], *exact[5]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5)
    scores = dmc.log_likelihood(*arguments(model, transition), single=True, routine="sparse")
    torch.testing.assert_close(scores, exact.log_likelihood, rtol=1e-5, atol=1e-5)
    assert not torch.equal(scores, exact.log_likelihood)  # it was float32
    path = dmc.viterbi(*arguments(model, transition), single=True, routine="sparse")
    torch.testing.assert_close(path.log_probability, dmc.viterbi(*arguments(model, transition), routine="sparse").log_probability, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_three_routines_agree(kind):
    """Compiled along the lists, compiled on the full matrix, and plain torch."""
    model, transition = make(kind, 12, 3, low=0.2)
    model = model.with_weights(np.linspace(0, 2, len(LENGTHS)))
    sparse, full = (dmc.e_step(*arguments(model, transition), routine=routine) for routine in ("sparse", "dense"))
    with dmc._e_step_op.set_kernel_enabled("cpu", enabled=False), dmc._viterbi_op.set_kernel_enabled("cpu", enabled=False):
        twin, twin_path = dmc.e_step(*arguments(model, transition)), dmc.viterbi(*arguments(model, transition))
    for other in (full, twin):
        for ours, theirs in zip((*sparse[:5], *sparse[5]), (*other[:5], *other[5]), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)
    for routine in ("sparse", "dense"):
        assert torch.equal(dmc.viterbi(*arguments(model, transition), routine=routine).states.values, twin_path.states.values)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("routine", ["sparse", "dense"])
def test_gradients_are_those_of_plain_torch(kind, routine):
    """One weight for all sequences, and a different one for each."""
    model, transition = make(kind, 6, 2, [5, 1, 3], low=0.3)
    leaves = [tensor.clone().requires_grad_() for tensor in (model.initial, transition.log_values, transition.log_constants, *model.emission[:3])]
    emission = type(model.emission)(*leaves[3:], *model.emission[3:])
    chain = leaves[0], dmc.Transition(transition.indices, leaves[1], leaves[2])
    for weights in (torch.ones(3).double(), torch.tensor([1.0, -2.0, 0.5]).double()):
        values = dmc.log_likelihood(*chain, emission, model.sequences, routine=routine)
        loss = values.sum() if bool((weights == 1).all()) else (values * weights).sum()
        ours = torch.autograd.grad(loss, leaves)
        kind_number, parameters = dense._unpack(emission)
        rows = dense.log_emissions(kind_number, parameters, model.sequences.values, torch.float64)
        bounds = model.sequences.offsets.tolist()
        parts = [oracle.differentiable(leaves[0], chain[1].expand(), rows[a:b]) for a, b in itertools.pairwise(bounds)]
        theirs = torch.autograd.grad((torch.stack(parts) * weights).sum(), leaves)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("routine", ["sparse", "dense"])
def test_pairs_are_the_expected_transitions(routine):
    model, transition = make("gaussian", 20, 3, low=0.3)
    model = model.with_weights(np.linspace(0, 2, len(LENGTHS)))
    expected = dense.e_step(model.initial, model.transition, model.emission, model.sequences).transition
    with torch.no_grad():
        *_, pairs = dmc.weighted_log_likelihood_and_pairs(*arguments(model, transition), routine=routine)
    counts = pairs.counts
    if pairs.alpha.numel():
        counts = (pairs.alpha[:-1].T @ pairs.kappa[1:])[:20, :20] * model.transition.exp()
    torch.testing.assert_close(counts, expected, rtol=1e-10, atol=1e-14)


def test_points_out_of_float_range():
    """A step that no state explains in probabilities, only in logarithms; a state that fits but cannot be reached."""
    model, transition = make("steps", 10, 3, [6, 6, 6, 6, 6], zeros=0.4)
    rows = model.emission.log_likelihoods.clone()
    rows[2] -= 1e5 * torch.arange(10)
    rows[9, 1:] = -3e4
    rows[20] = torch.linspace(0, -5000, 10)
    model = model._replace(emission=dense.Steps(rows), rows=[rows[6 * n : 6 * n + 6].numpy() for n in range(5)])
    answers = model.answers()
    for single in (False, True):
        found = dmc.e_step(*arguments(model, transition), single=single, routine="sparse")
        np.testing.assert_allclose(found.log_likelihood, [answer.log_likelihood for answer in answers], rtol=1e-5 if single else 1e-10)
        kept, rest = split(sum(answer.pairs for answer in answers), transition)
        np.testing.assert_allclose(found.kept, kept, rtol=1e-4 if single else 1e-9, atol=1e-5 if single else 1e-13)
        np.testing.assert_allclose(found.rest, rest, rtol=1e-4 if single else 1e-9, atol=1e-5 if single else 1e-13)
        scores = dmc.log_likelihood(*arguments(model, transition), single=single, routine="sparse")
        torch.testing.assert_close(scores, found.log_likelihood, rtol=1e-6, atol=1e-4)


def test_nothing_is_lost_where_much_is_subtracted():
    """Every row keeps state 0 at next to nothing, and the data ask for state 0: what is left is not what was rounded off."""
    num_states, tiny = 30, 1e-12
    indices = torch.zeros(num_states, 1, dtype=torch.int64)
    values, constants = torch.full((num_states, 1), tiny).double(), torch.full((num_states,), (1 - tiny) / (num_states - 1)).double()
    transition = dmc.Transition(indices, values.log(), constants.log())
    rows = torch.zeros(12, num_states).double()
    rows[5:, 0] = 40.0
    initial = torch.full((num_states,), 1 / num_states).double().log()
    for lengths in ([12], [2, 2, 2, 2, 2, 2]):
        sequences = Sequences.from_lengths(torch.zeros(12, dtype=torch.int64), lengths)
        expected = dense.e_step(initial, transition.expand(), dense.Steps(rows), sequences)
        found = dmc.e_step(initial, transition, dense.Steps(rows), sequences, routine="sparse")
        torch.testing.assert_close(found.log_likelihood, expected.log_likelihood, rtol=1e-12, atol=1e-12)
        kept, rest = split(expected.transition.numpy(), transition)
        np.testing.assert_allclose(found.kept, kept, rtol=1e-9)
        np.testing.assert_allclose(found.rest, rest, rtol=1e-9)
        scores = dmc.log_likelihood(initial, transition, dense.Steps(rows), sequences, routine="sparse")
        torch.testing.assert_close(scores, expected.log_likelihood, rtol=1e-12, atol=1e-12)


def test_impossible_sequences_are_named_and_add_nothing():
    model, transition = make("steps", 8, 2, [3, 4, 3, 3, 3])
    rows = model.emission.log_likelihoods.clone()
    rows[5] = -torch.inf
    for routine in ("sparse", "dense"):
        found = dmc.e_step(model.initial, transition, dense.Steps(rows), model.sequences, routine=routine)
        assert found.impossible_step.tolist() == [-1, 2, -1, -1, -1]
        assert found.log_likelihood[1] == -torch.inf
        assert float(found.kept.sum() + found.rest.sum()) == pytest.approx(4 * 2)
        path = dmc.viterbi(model.initial, transition, dense.Steps(rows), model.sequences, routine=routine)
        assert path.states[1].tolist() == [-1] * 4


@pytest.mark.parametrize("steps", [1, 3])
def test_prediction_is_the_dense_one(steps):
    model, transition = make("gaussian", 15, 4, low=0.3)
    expected = dense.predict_next(*model.parameters, steps=steps)
    torch.testing.assert_close(dmc.predict_next(*arguments(model, transition), steps=steps), expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("num_kept", [0, 3, 7])
def test_samples_have_the_rows_frequencies(num_kept):
    transition = random_transition(np.random.default_rng(5), 8, num_kept, low=0.3)
    initial = torch.full((8,), 1 / 8).double().log()
    states = dmc.sample(initial, transition, torch.full((400,), 200), torch.Generator().manual_seed(1))
    counts = torch.zeros(8, 8).double()
    for path in states:
        counts.index_put_((path[:-1], path[1:]), torch.ones(199).double(), accumulate=True)
    error = (counts / counts.sum(1, keepdim=True) - transition.expand().exp()).abs()
    assert error.max() < 5 * 0.5 / counts.sum(1).min().sqrt()  # five standard errors


def test_a_row_without_a_constant_is_never_left():
    zero = torch.tensor([-torch.inf] * 3).double()
    transition = dmc.Transition(torch.tensor([[1], [2], [0]]), torch.zeros(3, 1).double(), zero)
    states = dmc.sample(torch.tensor([0.0, -torch.inf, -torch.inf]).double(), transition, torch.tensor([7]), torch.Generator().manual_seed(0))
    assert states.values.tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_posterior_samples_visit_states_as_often_as_smoothed():
    model, transition = make("symbols", 5, 2, [4])
    sequences = Sequences.from_lengths(model.sequences.values.repeat(4000), [4] * 4000)
    drawn = dmc.sample_posterior(model.initial, transition, model.emission, sequences, torch.Generator().manual_seed(2)).values.reshape(4000, 4)
    expected = dmc.posterior(*arguments(model, transition)).smoothed.values
    shares = torch.stack([(drawn == state).double().mean(0) for state in range(5)], 1)
    assert (shares - expected).abs().max() < 5 * 0.5 / 4000**0.5


def test_dense_is_used_where_it_is_faster(monkeypatch):
    asked = []
    plain = dmc._e_step_op
    monkeypatch.setattr(dmc, "_e_step_op", lambda *args: asked.append(args[-1]) or plain(*args))
    for num_states, num_kept in ((20, 5), (500, 2)):
        model, transition = make("symbols", num_states, num_kept, [5])
        for routine in ("auto", "dense", "sparse"):
            dmc.log_likelihood(*arguments(model, transition), routine=routine)
    assert asked == [True, True, False, False, True, False]
    assert dmc.prefers_dense(200, 16, 1, single=True, smooth=True, pairs=True) > dmc.prefers_dense(200, 16, 1, single=True, smooth=True)


def test_bad_arguments_are_named():
    model, transition = make("symbols", 4, 2)
    with pytest.raises(ValueError, match="`routine` must be auto, dense or sparse, but is 'gpu'"):
        dmc.log_likelihood(*arguments(model, transition), routine="gpu")
    wide = dmc.Transition(torch.arange(4).repeat(4, 1), torch.zeros(4, 4).double(), transition.log_constants)
    with pytest.raises(ValueError, match="must keep fewer entries of a row than there are states, 4, but keeps 4"):
        dmc.log_likelihood(model.initial, wide, model.emission, model.sequences)
    with pytest.raises(ValueError, match="`transition` must have 4 rows"):
        dmc.log_likelihood(model.initial, transition._replace(log_constants=torch.zeros(3)), model.emission, model.sequences)
    with pytest.raises(ValueError, match="states by kept entries"):
        dmc.log_likelihood(model.initial, transition._replace(log_values=torch.zeros(4, 1)), model.emission, model.sequences)


@pytest.mark.parametrize("num_sequences", [1, 12])  # alone, and side by side
def test_rare_transitions_that_must_be_used_again_and_again(num_sequences):
    """Each step keeps more than it may lose, but the product of two is below the smallest float64."""
    rare = torch.full((2,), 1e-190, dtype=torch.float64).log()
    transition = dmc.Transition(torch.tensor([[0], [1]]), torch.zeros(2, 1, dtype=torch.float64), rare)
    emission = dense.Symbols(torch.eye(2, dtype=torch.float64).log())
    data = Sequences.from_list([[0, 1, 0, 1, 1]] * num_sequences)
    log_likelihood = dmc.log_likelihood(torch.tensor([0.5, 0.5], dtype=torch.float64).log(), transition, emission, data, routine="sparse")
    np.testing.assert_allclose(log_likelihood, np.log(0.5) + 3 * np.log(1e-190), rtol=1e-12)
