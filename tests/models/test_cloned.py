"""ClonedHMM: EM against the dense model, online EM, clones and pairs from data, uncertain evidence."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException

import lightning_hmm
from lightning_hmm import HMM, ClonedHMM, Clones, OneSymbol, Sequences, StandardHMM, Transition, fit, inference
from lightning_hmm.callbacks import Pruning, Retraining
from lightning_hmm.data import loader
from lightning_hmm.distributions.transitions.clones import allocate_clones, ngram_counts
from lightning_hmm.inference.cloned import Blocks, ClonedSymbols, Layout
from lightning_hmm.optim import BaumWelch
from tests.helpers import assert_identical_parameters, assert_same_parameters, random_symbols

OPTIONS = {"num_states": 11, "num_symbols": 5, "seed": 3}


def whole(rng: np.random.Generator, **options) -> Sequences:
    """Without missing symbols."""
    return random_symbols(rng, missing=0.0, **options)


def runs() -> Sequences:
    """a x b a x b c x d c x d: what follows x depends on what was before it, which two clones of x can hold."""
    text = np.concatenate([[[0, 1, 2], [3, 1, 4]][k] for k in np.random.default_rng(0).integers(0, 2, 2000)])
    return Sequences.from_lengths(text, [100] * 60)


# EM


@pytest.mark.parametrize("missing", [0.0, 0.1])
def test_batch_em_equals_the_dense_model_with_fixed_emissions(rng, missing):
    sequences = random_symbols(rng, missing=missing)
    model = ClonedHMM(**OPTIONS, frozen=(), transition_pseudocount=0.2, pairs="all")
    same = StandardHMM(num_states=11, num_symbols=5, frozen=["emission"], transition_pseudocount=0.2)
    emission = torch.zeros(11, 5, dtype=torch.float64)
    emission[torch.arange(11), model.layout.symbols] = 1
    same.set_parameters(model.initial_probs, model.transition_probs, emission)
    fit(model, sequences, 6, 0, batch_size=4)
    fit(same, sequences, 6, 0)
    torch.testing.assert_close(model.transition_probs, same.transition_probs, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(model.initial_probs, same.initial_probs, rtol=1e-9, atol=1e-12)


def test_gradients_of_probabilities_are_not_taken_for_counts(rng):
    sequences, model = whole(rng), ClonedHMM(**OPTIONS)
    model.initialize(sequences)
    inference.log_likelihood(*model.problem(sequences)).sum().neg().backward()
    with pytest.raises(RuntimeError, match=r"`transition` are not natural parameters.*step\(counts=...\)"):
        BaumWelch(model.distributions).step()


@pytest.mark.parametrize("keep", [torch.ones(16, dtype=torch.int64), True, float("nan"), 1.5, "all"])
def test_what_is_no_mask_and_no_probability_is_not_pruned_by(keep):
    with pytest.raises(ValueError, match="`keep` must be a mask"):
        ClonedHMM(4, 2, pairs="all").prune(keep)


def test_a_sparse_start_carries_a_context_over_noise():
    """A signal, five symbols of noise, its answer: found from a sparse start, and not from an even one."""
    rng = np.random.default_rng(3)
    runs = [[signal, *rng.integers(2, 4, 5), 4 + signal] for signal in rng.integers(0, 2, 600)]
    sequences = Sequences.from_lengths(np.concatenate(runs), [420] * 10)
    bits = {}
    for concentration in (None, 0.05):
        model = ClonedHMM(
            clones=[1, 1, 20, 20, 1, 1],
            num_symbols=6,
            start_concentration=concentration,
            discount=0.5,
            sequences_per_update=1,
        )
        fit(model, sequences, 10, 0)
        bits[concentration] = -float(model.score(sequences).sum()) / sequences.num_steps / np.log(2)
        sums = torch.segment_reduce(model.transition.probs.detach()[0], "sum", lengths=model.layout.row_lengths)
        np.testing.assert_allclose(sums, 1, rtol=1e-12)
    # A run has a bit for its signal and five of noise, and the answer is free if the signal is remembered.
    assert bits[0.05] < 6 / 7 + 0.05
    assert bits[None] > 6 / 7 + 0.1


@pytest.mark.parametrize("missing", [0.0, 0.1], ids=["one compiled pass", "batch by batch"])
@pytest.mark.parametrize("frozen", [("initial",), ()])
def test_many_updates_in_a_batch_equal_steps(rng, frozen, missing):
    sequences = random_symbols(rng, missing=missing)
    options = OPTIONS | {
        "discount": 0.8,
        "transition_pseudocount": 0.01,
        "initial_pseudocount": 0.1,
        "frozen": frozen,
        "restarts": 2,
    }
    steps = fit(ClonedHMM(**options), sequences, 3, 0, batch_size=2)
    at_once = fit(ClonedHMM(**options, sequences_per_update=2), sequences, 3, 0)
    assert_same_parameters(steps, at_once)


def test_a_batch_that_runs_out_of_float_range_is_done_exactly():
    sequences = Sequences.from_list([[0, 1, 0, 1], [0, 1, 0, 1], [1, 0, 1, 0]])
    matrix = [[1 - 1e-210, 0, 1e-210, 0], [0, 1 - 1e-210, 0, 1e-210], [0.5, 0, 0, 0.5], [0.5, 0, 0, 0.5]]
    models = []
    for more in ({"sequences_per_update": 1}, {}):
        model = ClonedHMM(clones=[2, 2], num_symbols=2, pairs="all", discount=0.9, **more).set_parameters(
            transition=torch.tensor(matrix, dtype=torch.float64)
        )
        models.append(fit(model, sequences, 2, 0, batch_size=None if more else 1))
    assert_same_parameters(*models)


def test_online_em_finds_what_repeats():
    sequences = runs()
    model = fit(
        ClonedHMM(num_states=10, num_symbols=5, discount=0.9, sequences_per_update=1, restarts=4), sequences, 40, 0
    )
    bits = -float(model.score(sequences).sum()) / sequences.num_steps / np.log(2)
    assert bits < 1 / 3 + 0.03  # a bit in three symbols, and the starts


def test_a_sparsity_prior_ends_transitions(rng):
    sequences = whole(rng)
    plain, sparse = (fit(ClonedHMM(**OPTIONS, transition_sparsity=taken), sequences, 20, 0) for taken in (0.0, 0.3))
    assert int((sparse.transition.probs == 0).sum()) > int((plain.transition.probs == 0).sum()) + 10
    sums = torch.segment_reduce(sparse.transition.probs.detach()[0], "sum", lengths=sparse.layout.row_lengths)
    np.testing.assert_allclose(sums, 1, rtol=1e-12)


def test_the_m_step_elsewhere_is_the_same(rng, monkeypatch):
    """On the meta level: the torch version of the M-step against the compiled one."""
    model = ClonedHMM(**OPTIONS, restarts=2, transition_sparsity=0.4)
    model.initialize(whole(rng))
    counts = torch.rand(model.transition.probs.shape, dtype=torch.float64)
    counts[:, : int(model.layout.row_lengths[0])] = 0
    before = model.transition.probs.detach().clone()
    kept = model.transition.maximize([counts], 0.5)
    compiled = model.transition.probs.detach().clone()
    model.transition.probs.data = before
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    assert int(model.transition.maximize([counts], 0.5)) == int(kept) >= 2
    torch.testing.assert_close(model.transition.probs.detach(), compiled, rtol=1e-12, atol=1e-15)


def test_float32_stores_in_float32_and_comes_near(rng):
    sequences = whole(rng)
    wide, single = (
        fit(ClonedHMM(**OPTIONS, arithmetic=arithmetic), sequences, 5, 0) for arithmetic in ("float64", "float32")
    )
    assert single.transition.probs.dtype == torch.float32
    assert single.score(sequences).dtype == torch.float64
    assert (
        float(single.score(sequences).sum()) > float(ClonedHMM(**OPTIONS, pairs="all").score(sequences).sum()) + 20
    )  # it learned; its start is drawn in float32
    start = ClonedHMM(**OPTIONS, arithmetic="float32").set_layout(wide.layout)
    start.transition.probs.data.copy_(wide.transition.probs)
    np.testing.assert_allclose(start.score(sequences), wide.score(sequences), rtol=1e-5)


# Clones and pairs


def test_clones_follow_the_data():
    sequences = Sequences.from_list([[0] * 6 + [1] * 3, [1, 2, 0]])
    assert allocate_clones(12, np.array([70, 20, 10])).tolist() == [9, 2, 1]
    assert allocate_clones(5, np.array([1000, 1, 0])).tolist() == [3, 1, 1]
    assert allocate_clones(3, np.array([0, 0, 0])).tolist() == [1, 1, 1]
    assert ngram_counts(sequences, 3, 1, unique=False).tolist() == [7, 4, 1]
    # different trigrams, shorter at the start: 0, 00, 000, 1 2 0 | 001, 011, 111, 1 | 12
    assert ngram_counts(sequences, 3, 3, unique=True).tolist() == [4, 4, 1]
    for allocation, expected in (("uniform", [6, 6, 6]), ("frequency", [11, 6, 1]), ("ngram", [8, 8, 2])):
        model = ClonedHMM(num_states=18, num_symbols=3, allocation=allocation, ngram_order=3)
        model.initialize(sequences)
        assert model.layout.clones.tolist() == expected
        assert model.layout.pairs.tolist() == [[0, 0], [0, 1], [1, 1], [1, 2], [2, 0]]
    assert ClonedHMM(clones=[1, 2, 3], num_symbols=3, pairs="all").layout.clones.tolist() == [1, 2, 3]


@pytest.mark.parametrize("missing", [0.0, 0.3])
@pytest.mark.parametrize("order", [1, 2, 4])
def test_many_ngrams_are_counted_right(rng, missing, order):
    """A missing symbol is not the start of a sequence."""
    sequences = random_symbols(rng, missing=missing)
    found = {
        tuple(sequence[max(0, t - order + 1) : t + 1]) for sequence in sequences.tolist() for t in range(len(sequence))
    }
    assert ngram_counts(sequences, 5, order, unique=True).tolist() == [
        sum(gram[-1] == v for gram in found) for v in range(5)
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_states": 4, "num_symbols": 5}, "at least 5, a clone for each symbol, but is 4"),
        ({"num_symbols": 5}, "`num_states` must be given"),
        ({"num_states": 9}, "`num_symbols` must be given"),
        ({"clones": [1, 2], "num_symbols": 3}, "a number for each of the 3 symbols, but has 2"),
        ({"clones": [1, 0, 2], "num_symbols": 3, "pairs": "all"}, "symbol 1 has none"),
        ({"num_states": 9, "num_symbols": 3, "allocation": "even"}, "but is 'even'"),
        ({"num_states": 9, "num_symbols": 3, "start_concentration": 0.0}, "must be positive, but is 0.0"),
        ({"num_states": 9, "num_symbols": 3, "frozen": ["emission"]}, "but names 'emission'"),
    ],
)
def test_bad_options_are_said(options, message):
    with pytest.raises(ValueError, match=message):
        ClonedHMM(**options)


def test_a_model_without_clones_says_so(rng):
    model = ClonedHMM(**OPTIONS)
    with pytest.raises(RuntimeError, match="no clones yet"):
        model.score(whole(rng))
    trainer = Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False
    )
    with pytest.raises(MisconfigurationException, match=r"model\.initialize"):
        trainer.fit(model, loader(whole(rng)))


def test_an_unseen_pair_has_probability_zero_and_a_reason():
    model = ClonedHMM(num_states=4, num_symbols=2, symbol_names=["a", "b"])
    fit(model, ["abababab"], 3)
    with pytest.warns(UserWarning, match=r"step 2 .*Symbol 'b' does not follow 'b' in the training data.*pseudocount"):
        assert model.score(["abba"]).tolist() == [-np.inf]
    smoothed = fit(
        ClonedHMM(num_states=4, num_symbols=2, symbol_names=["a", "b"], pairs="all", transition_pseudocount=0.01),
        ["abababab"],
        3,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isfinite(float(smoothed.score(["abba"])))


# Questions


def test_lists_of_symbols_are_symbols():
    text = [[1, 0, 3, 2, 0, 4] * 3, [], [2, 0]]
    model = fit(ClonedHMM(**OPTIONS), text, 2, 0)
    torch.testing.assert_close(model.score(text), model.score(Sequences.from_list(text)), rtol=0, atol=0)


def test_uncertain_evidence_is_a_mixture_of_strings(rng):
    model = ClonedHMM(**OPTIONS, pairs="all")
    rows = np.zeros((4, 5))
    rows[0, 2], rows[1, [0, 3]], rows[2] = 1, (0.25, 0.75), np.nan
    rows[3, 1] = 1
    uncertain = Sequences.from_list([rows])
    strings = Sequences.from_list([[2, 0, -1, 1], [2, 3, -1, 1]])
    expected = torch.logsumexp(model.score(strings) + torch.tensor([0.25, 0.75]).double().log(), 0)
    np.testing.assert_allclose(model.score(uncertain), [float(expected)], rtol=1e-12)
    shares = torch.softmax(model.score(strings) + torch.tensor([0.25, 0.75]).double().log(), 0)
    mixture = (model.predict_next(strings) * shares[:, None]).sum(0)
    np.testing.assert_allclose(model.predict_next(uncertain)[0], mixture, rtol=1e-10)
    symbols = model.layout.symbols[model.decode(uncertain).values]
    assert symbols[0] == 2
    assert symbols[1] in (0, 3)
    assert symbols[3] == 1
    with pytest.raises(ValueError, match="sums to 2 instead"):
        model.score(Sequences.from_list([rows[:1] * 2]))


def test_samples_are_of_the_clones_symbols_and_predictions_sum_to_one(rng):
    model = ClonedHMM(**OPTIONS, pairs="all")
    observed, states = model.sample(3, 50, seed=1, return_states=True)
    assert torch.equal(model.layout.symbols[states.values], observed.values)
    assert torch.equal(model.layout.symbols[model.decode(observed).values], observed.values)
    np.testing.assert_allclose(model.predict_next(observed, steps=2).sum(1), 1, rtol=1e-12)
    assert model.num_free_parameters == 11 * 11 - 11  # the initial probabilities are frozen
    assert model.posterior(observed).smoothed[0].shape == (50, 11)


def test_degrees_of_freedom_leave_out_structural_zeros_and_frozen_parts(tmp_path):
    options = {"num_symbols": 2, "clones": [2, 1], "pairs": "all"}
    model = ClonedHMM(**options)
    assert model.num_free_parameters == 3 * 2
    assert ClonedHMM(**options, frozen=()).num_free_parameters == 2 + 3 * 2
    assert ClonedHMM(**options, frozen=["transition"]).num_free_parameters == 2
    model.set_parameters(transition=[[0.5, 0.5, 0], [0, 0.3, 0.7], [1, 0, 0]])
    assert model.num_free_parameters == 1 + 1 + 0
    saving = {"callbacks": [ModelCheckpoint(tmp_path, save_last=True)], "enable_checkpointing": True}
    fit(model, [[0, 0, 0, 1, 0, 0, 0, 0]], 200, 0, **saving)
    assert float(model.transition_probs.max()) == 1
    assert model.num_free_parameters == 2  # an estimate of zero was free all the same
    assert lightning_hmm.load(tmp_path / "last.ckpt").num_free_parameters == 2
    two = ClonedHMM(**options, restarts=2)
    two.prune(two.above(0.4))
    stored = two.transition.probs.detach()
    with torch.no_grad():
        stored[1, int(stored[1].argmin())] = 0
    two.transition.set_layout(two.layout, stored)
    for restart in range(2):
        two.best_restart.fill_(restart)
        assert two.num_free_parameters == int((stored[restart] > 0).sum()) - 3


def test_large_models_have_no_matrix():
    model = ClonedHMM(num_states=5000, num_symbols=2)
    model.set_layout(Layout([4999, 1], [(0, 1), (1, 0)]))
    with pytest.raises(AttributeError, match="up to 4096 states"):
        _ = model.transition_probs
    assert model.transition.probs.shape == (1, 2 * 4999)


SENTENCE = "a small reader of scrambled letters finds words "


def test_scrambled_words_are_set_right():
    names = sorted({*SENTENCE})
    model = ClonedHMM(
        num_states=60, allocation="frequency", num_symbols=len(names), symbol_names=names, transition_pseudocount=1e-6
    )
    fit(model, [SENTENCE * 5], 30, 0)
    rows = model.scrambled_evidence("of raeders")
    letters = ["".join(model.vocabulary.names[v] for v in np.flatnonzero(row)) for row in rows]
    assert letters == ["o", "f", " ", "r", *["ader"] * 5, "s"]
    assert {name: row for name, row in zip(names, rows[5], strict=True) if row} == pytest.approx(
        {"a": 0.2, "d": 0.2, "e": 0.4, "r": 0.2}
    )
    given = "a salml rdaeer of sclarbemd lretets fndis wrdos "
    assert model.unscramble(given) == model.unscramble(given, reuse=True) == SENTENCE
    assert model.unscramble("") == ""
    with pytest.raises(ValueError, match="`symbol_names`"):
        ClonedHMM(**OPTIONS, pairs="all").unscramble("ab")


def test_the_graph_has_the_transitions_as_edges(rng):
    sequences = whole(rng)
    model = fit(ClonedHMM(**OPTIONS, symbol_names=[*"abcde"]), sequences, 20, 0)
    graph, matrix = model.state_graph(threshold=0.05), model.transition_probs
    edges = {(i, j): weight for i, j, weight in graph.edges(data="weight")}
    assert edges == {(i, j): float(matrix[i, j]) for i, j in torch.nonzero(matrix >= 0.05).tolist()}
    assert all(graph.nodes[state]["name"] == "abcde"[model.layout.symbols[state]] for state in graph)
    counts = model.layout.expand(inference.e_step(*model.problem(sequences)).counts[0])
    counted = model.state_graph(sequences, threshold=0.0)
    assert {(i, j) for i, j in counted.edges} == {(i, j) for i, j in torch.nonzero(counts > 0).tolist()}
    assert all(weight == pytest.approx(float(counts[i, j])) for i, j, weight in counted.edges(data="weight"))


# Online EM first, batch EM then


PHASES = {"discount": 0.8, "sequences_per_update": 2, "online_epochs": 2, "transition_pseudocount": 1e-3}


def test_batch_em_goes_on_where_online_em_ended(rng):
    sequences = whole(rng)
    both = fit(ClonedHMM(**OPTIONS, **PHASES), sequences, 5, 0, batch_size=6)
    online = fit(ClonedHMM(**OPTIONS, **PHASES), sequences, 2, 0, batch_size=6)
    batch = ClonedHMM(**OPTIONS, transition_pseudocount=1e-3).set_layout(online.layout)
    batch.transition.probs.data.copy_(online.transition.probs)
    assert_same_parameters(both, fit(batch, sequences, 3, 0))
    by_batch = {**PHASES, "sequences_per_update": None}
    steps = fit(ClonedHMM(**OPTIONS, **by_batch), sequences, 5, 0, batch_size=2)
    assert_same_parameters(both, steps)


# Chosen on validation, retrained on all


def selected(sequences: Sequences, **options) -> tuple[ClonedHMM, Retraining]:
    """20 sequences to train on, 10 to validate on."""
    callback = Retraining(patience=2)
    how = {
        "val_sequences": sequences[20:],
        "batch_size": 6,
        **options,
        "callbacks": [callback, *options.get("callbacks", ())],
    }
    return fit(ClonedHMM(**OPTIONS, **how.pop("model", {})), sequences[:20], how.pop("epochs", 30), 0, **how), callback


@pytest.mark.parametrize(
    "model",
    [{"allocation": "frequency"}, PHASES, PHASES | {"online_epochs": 30}],
    ids=["batch EM", "both", "both, as long as it helps"],
)
def test_retraining_takes_as_many_epochs_on_all_data_as_were_best(rng, model):
    sequences = whole(rng, num_sequences=30)
    found, callback = selected(sequences, model=model)
    alone = ClonedHMM(**OPTIONS, **model)
    bits = []
    for epochs in range(1, len(callback.validated) + 1):
        alone = ClonedHMM(**OPTIONS, **model | ({"online_epochs": callback.switched} if callback.switched else {}))
        fit(alone, sequences[:20], epochs, 0, batch_size=6)
        bits.append(-float(alone.score(sequences[20:]).sum()) / sequences[20:].num_steps / np.log(2))
    np.testing.assert_allclose(callback.validated, bits, rtol=1e-10)
    assert callback.best_epochs == int(np.argmin(bits)) + 1 < len(bits)  # it went on to see that it gets worse
    assert callback.switched == (0 if "online_epochs" not in model else callback.switched)
    again = ClonedHMM(**OPTIONS, **model | ({"online_epochs": callback.switched} if callback.switched else {}))
    assert_same_parameters(found, fit(again, sequences, callback.best_epochs, 0, batch_size=6))


@pytest.mark.parametrize("stop", [2, -1, 1], ids=["in the first part", "at its end", "in the second part"])
def test_retraining_resumes_in_either_part(rng, tmp_path, stop):
    sequences = whole(rng, num_sequences=30)
    straight, callback = selected(sequences, model=PHASES)
    first_part = len(callback.validated)
    assert callback.best_epochs > 1
    epochs = {2: 2, -1: first_part, 1: first_part + 1}[stop]
    keep = {"dirpath": tmp_path, "save_last": True, "save_on_train_epoch_end": True}
    saving = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(**keep), StopAfter(epochs)]}
    with pytest.raises(RuntimeError, match="stopped"):
        selected(sequences, model=PHASES, **saving)
    resumed, _ = selected(
        sequences,
        model=PHASES,
        ckpt_path=str(tmp_path / "last.ckpt"),
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(**keep)],
    )
    assert_identical_parameters(straight, resumed)


class StopAfter(Callback):
    """As if the process had been ended after so many epochs."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def on_train_epoch_start(self, trainer, pl_module) -> None:
        if trainer.current_epoch == self.epochs:
            raise RuntimeError("stopped")


def test_retraining_says_what_it_needs(rng):
    sequences = whole(rng)
    with pytest.raises(MisconfigurationException, match="there are none"):
        fit(ClonedHMM(**OPTIONS), sequences, 2, callbacks=[Retraining()])
    with pytest.raises(TypeError, match="is a StandardHMM instead"):
        fit(StandardHMM(2, 5), sequences, 2, val_sequences=sequences, callbacks=[Retraining()])
    with pytest.raises(ValueError, match="`patience` must be at least 1"):
        Retraining(0)


# Pruning


def test_a_pruned_model_says_nearly_the_same(rng):
    sequences = whole(rng)
    model = fit(ClonedHMM(**OPTIONS), sequences, 40, 0)
    before, entries = model.score(sequences), model.layout.num_entries
    matrix = model.transition_probs
    model.prune(1e-6)
    assert model.layout.is_sparse
    assert model.layout.num_entries < entries
    assert float(model.transition_probs[matrix < 1e-6].max()) == 0
    torch.testing.assert_close(model.score(sequences), before, rtol=1e-3, atol=1e-3)
    sums = torch.segment_reduce(model.transition.probs.detach()[0], "sum", lengths=model.layout.row_lengths)
    np.testing.assert_allclose(sums, 1, rtol=1e-12)


@pytest.mark.parametrize(
    "keep", [[False, True, True, True], [False, False, True, True]], ids=["only a zero", "nothing"]
)
def test_a_mask_that_leaves_a_state_without_transitions_is_refused(keep):
    model = ClonedHMM(num_symbols=2, clones=[1, 1], pairs="all").set_parameters(transition=[[1, 0], [0.5, 0.5]])
    with pytest.raises(ValueError, match=r"leaves state 0 none\. `keep \| model\.above\(1\)` also keeps"):
        model.prune(torch.tensor(keep))
    assert model.prune(torch.tensor(keep) | model.above(1)).transition_probs.tolist() == [[1, 0], [0.5, 0.5]]


def test_a_sequence_of_weight_zero_does_not_keep_training_from_pruning():
    """It has a pair that no other sequence has, and would be impossible without it."""
    sequences = Sequences.from_list([[0, 1, 2] * 10, [0, 0]], weights=[1.0, 0.0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = fit(
            ClonedHMM(num_states=6, num_symbols=3, pairs="all"),
            sequences,
            20,
            0,
            callbacks=[Pruning(1e-3, 0.9, every_n_epochs=20)],
        )
    assert model.layout.is_sparse


def test_a_chain_that_ends_cannot_be_sampled_past_its_end():
    model = ClonedHMM(num_states=5, num_symbols=3)
    model.initialize(Sequences.from_list([[0, 1, 2], [1, 0, 1, 2]]))  # nothing follows 2
    model.set_parameters(initial=[0, 0, 0, 0, 1])
    assert model.sample(2, 1).tolist() == [[2], [2]]
    with pytest.raises(ValueError, match="state 4, a clone of symbol 2, has no transitions"):
        model.sample(2, 2)


@pytest.mark.parametrize(
    "options",
    [{}, {"discount": 0.8, "sequences_per_update": 2, "transition_pseudocount": 1e-6}],
    ids=["batch EM", "online EM"],
)
def test_pruning_in_training_goes_on_and_resumes(tmp_path, options):
    sequences = runs()

    def train(epochs: int, path: str | None) -> ClonedHMM:
        callbacks = [Pruning(1e-3, 0.95, every_n_epochs=5), ModelCheckpoint(tmp_path, save_last=True)]
        saving = {"enable_checkpointing": True, "callbacks": callbacks, "ckpt_path": path}
        return fit(ClonedHMM(num_states=10, num_symbols=5, **options, restarts=2), sequences, epochs, 0, **saving)

    straight = train(24, None)
    assert straight.layout.is_sparse
    half = train(12, None)
    assert half.layout.num_entries >= straight.layout.num_entries
    resumed = train(24, str(tmp_path / "last.ckpt"))
    assert_identical_parameters(straight, resumed)
    assert resumed.layout == straight.layout
    assert lightning_hmm.load(tmp_path / "last.ckpt").layout == straight.layout


def test_pruning_leaves_alone_what_it_would_make_impossible():
    """The second symbol needs a transition of probability 0.1."""
    model = ClonedHMM(clones=[1, 1], num_symbols=2, pairs="all", frozen=("initial", "transition"))
    model.set_parameters(transition=torch.tensor([[0.9, 0.1], [0.9, 0.1]], dtype=torch.float64))
    with pytest.warns(UserWarning, match="some training data would be impossible"):
        fit(model, [[0, 0, 1]], 1, callbacks=[Pruning(0.2, 0.9)])
    assert not model.layout.is_sparse


def test_pruning_is_for_cloned_models():
    with pytest.raises(TypeError, match="is a StandardHMM instead"):
        fit(StandardHMM(2, 3), [[0, 1, 2]], 1, callbacks=[Pruning()])
    with pytest.raises(ValueError, match="`threshold` must be above 0"):
        Pruning(0.0)


# Smoothing


def test_backing_off_is_the_formula_and_leaves_nothing_impossible(rng):
    sequences = whole(rng)
    model = fit(ClonedHMM(num_states=7, num_symbols=3, seed=1), Sequences.from_list([[0, 1, 0, 1, 2, 0, 1] * 4]), 3)
    train, c = Sequences.from_list([[0, 1, 0, 1, 2, 0, 1] * 4]), 0.5
    smoothed = model.backed_off(train, c)
    n = model.layout.expand(inference.e_step(*model.problem(train)).counts[0])
    old = [k for k in range(10) if k not in (3, 6, 9)]  # clones 3, 2, 2: each symbol's last is the new one
    matrix = smoothed.transition_probs
    np.testing.assert_allclose(matrix.sum(1), 1, rtol=1e-12)
    np.testing.assert_allclose(matrix[np.ix_(old, old)], n / (n.sum(1, keepdim=True) + c), rtol=1e-10, atol=1e-14)
    symbols = model.layout.symbols
    blocks = torch.zeros(3, 7, dtype=torch.float64).index_add_(0, symbols, n)
    np.testing.assert_allclose(
        matrix[[3, 6, 9]][:, old], blocks / (blocks.sum(1, keepdim=True) + c), rtol=1e-10, atol=1e-14
    )
    pairs = torch.zeros(3, 3, dtype=torch.float64).index_add_(1, symbols, blocks)
    base = torch.bincount(train.values).double() + c / 3
    lower = (pairs + c * base / base.sum()) / (pairs.sum(1, keepdim=True) + c)
    np.testing.assert_allclose(
        matrix[np.ix_(old, [3, 6, 9])], c * lower[symbols] / (n.sum(1, keepdim=True) + c), rtol=1e-10
    )
    assert bool(torch.isfinite(smoothed.score(Sequences.from_list([[2, 2, 1, 1, 0, 2]]))).all())
    np.testing.assert_allclose(smoothed.predict_next(train).sum(1), 1, rtol=1e-12)
    assert bool(torch.isfinite(fit(ClonedHMM(**OPTIONS), sequences, 5).backed_off(sequences).score(sequences)).all())
    with pytest.raises(ValueError, match="`strength` must be positive"):
        model.backed_off(train, 0)


def test_weights_count_like_repeats_wherever_clones_count():
    lists, weights = [[0, 1, 2, 0, 1], [2, 2, 0, 1], [], [1, 2], [1, 0]], [1.0, 3.0, 2.0, 0.0, 2.0]
    weighted = Sequences.from_list(lists, weights)
    repeated = Sequences.from_list(
        [sequence for sequence, weight in zip(lists, weights, strict=True) for _ in range(int(weight))]
    )
    for allocation in ("frequency", "ngram"):
        models = [ClonedHMM(num_states=9, num_symbols=3, allocation=allocation) for _ in range(2)]
        for model, sequences in zip(models, (weighted, repeated), strict=True):
            model.initialize(sequences)
        assert models[0].layout == models[1].layout
    one, other = (models[0].backed_off(sequences) for sequences in (weighted, repeated))
    assert_same_parameters(one, other)
    one, other = (models[0].posterior(sequences).transition_counts for sequences in (weighted, repeated))
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


def test_backing_off_helps_on_data_that_were_not_seen():
    rng = np.random.default_rng(1)
    truth = ClonedHMM(num_states=12, num_symbols=4, pairs="all", seed=5)
    truth.transition.probs.data.copy_(truth.transition.probs**6)
    truth.transition.maximize([truth.transition.probs.detach()])
    train, test = (truth.sample(4, 300, seed=int(seed)) for seed in rng.integers(0, 1000, 2))
    model = fit(ClonedHMM(num_states=40, num_symbols=4, pairs="all"), train, 60, 0)
    assert float(model.backed_off(train, 1.0).score(test).sum()) > float(model.score(test).sum()) + 50


# A composition of parts


def test_the_parts_by_name_are_the_same_model(rng, tmp_path):
    """The parts by name, by instance and in `ClonedHMM` give the same parameters; a checkpoint restores the layout."""
    sequences = whole(rng)
    options = {"num_states": 11, "seed": 3, "restarts": 2, "frozen": ["initial"]}
    named = {
        "transition": {"class_path": "Clones", "init_args": {"pseudocount": 0.01}},
        "initial": {"class_path": "Initial", "init_args": {"start": "uniform"}},
    }
    saving = {"callbacks": [ModelCheckpoint(tmp_path, save_last=True)], "enable_checkpointing": True}
    by_name = fit(HMM(**options, **named), sequences, 4, 0, **saving)
    assert type(by_name.emission) is OneSymbol
    assert by_name.num_symbols == 5
    expected = fit(ClonedHMM(**OPTIONS, restarts=2, transition_pseudocount=0.01), sequences, 4, 0)
    assert isinstance(expected, HMM)
    assert_same_parameters(by_name, expected)
    for loaded in (lightning_hmm.load(tmp_path / "last.ckpt"), HMM.load_from_checkpoint(tmp_path / "last.ckpt")):
        assert_identical_parameters(loaded, by_name)
        assert torch.equal(loaded.predict_next(sequences), by_name.predict_next(sequences))
        assert torch.equal(loaded.decode(sequences).values, by_name.decode(sequences).values)
    assert type(HMM(11, "OneSymbol", num_symbols=5).transition) is Clones


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"transition": Clones(), "emission": "Categorical", "num_symbols": 3},
            "Clones transitions must be .* a OneSymbol emission, but .* is a Categorical",
        ),
        (
            {"transition": "Full", "emission": OneSymbol(), "num_symbols": 3},
            "emission OneSymbol must be .* Clones transitions, but .* are Full",
        ),
        (
            {"transition": Clones(), "num_features": 2},
            "A OneSymbol emission must have one column of symbols, but the columns are",
        ),
        (
            {"transition": Clones(clones=[1, 2, 1]), "num_symbols": 3},
            "`num_states` must be the sum of `clones`, 4, but is 5",
        ),
    ],
)
def test_parts_that_do_not_fit_together_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        HMM(5, **options)


def test_counts_of_another_parametrization_are_pulled_back_through_the_probabilities(rng):
    """The operator holds probabilities: a part that computes them from logits gets the gradient in the logits."""

    class Logits(Clones):
        statistics = Transition.statistics

        def operator(self, natural, batch):
            logits, rows = natural[0], self.layout.states_of()[0]
            weights = logits.exp()
            return Blocks(weights / weights.new_zeros(self.num_states).index_add(0, rows, weights)[rows], self.layout)

    sequences = whole(rng)
    model = HMM(11, OneSymbol(), Logits(pairs="all"), num_symbols=5)
    _, (_, found) = model._expected_counts(sequences, 0)
    logits = model.transition.probs.detach()[0].clone().requires_grad_()
    operator = model.transition.operator([logits], None)
    first = model.initial.log_probs.detach()[0]
    inference.log_likelihood(
        first, operator, ClonedSymbols.of(sequences, model.transition.layout), sequences.offsets
    ).sum().backward()
    torch.testing.assert_close(found, logits.grad)
