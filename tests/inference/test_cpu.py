"""The compiled CPU driver against the torch reference and log space: every operator with every form of evidence."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.testing import assert_close

from lightning_hmm.inference import cpu, log_space, reference
from lightning_hmm.inference.cpu.estep import e_step as own_e_step
from lightning_hmm.inference.cpu.viterbi import viterbi as own_viterbi
from lightning_hmm.inference.evidence import Evidence, Quadratic, Rows, Table
from lightning_hmm.inference.operators import Dense, Duration, MostlyConstant, Operator, TimeVarying
from lightning_hmm.inference.results import EStep

STATES, SYMBOLS = 6, 5
LENGTHS = (4, 0, 7, 1, 2, 90, 1, 5, 33, 33, 12, 0, 3)
STEPS = sum(LENGTHS)
OFFSETS = torch.tensor([0, *LENGTHS]).cumsum(0)
WEIGHTS = torch.tensor([1.0, 1.0, -2.0, 0.0, 0.5, 1.0, 3.0, 1e-3, 1.0, -0.25, 1.0, 2.0, 0.1], dtype=torch.float64)
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
INF = torch.inf


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log_rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return normal(*shape, seed=seed).mul(2).log_softmax(-1)


def left_right(size: int, jump: int = 1, seed: int = 1) -> torch.Tensor:
    distance = torch.arange(size) - torch.arange(size)[:, None]
    return log_rows(size, size, seed=seed).masked_fill((distance < 0) | (distance > jump), -INF).log_softmax(-1)


def mostly_constant(states: int, kept: int, *, low: bool = False, sparse: bool = False) -> MostlyConstant:
    """With `low`, some kept entries are far below the constant of their row, which cancels."""
    indices = torch.stack(
        [torch.randperm(states, generator=torch.Generator().manual_seed(n))[:kept].sort().values for n in range(states)]
    )
    if sparse:
        return MostlyConstant(indices, log_rows(states, kept, seed=3), torch.full((states,), -INF, dtype=torch.float64))
    values = log_rows(states, kept + 1, seed=2)
    constants = values[:, kept] - torch.tensor(float(states - kept)).log()
    values = values[:, :kept].clone()
    if low:
        values[::2] = constants[::2, None] - 30
        values[1] = -INF
    return MostlyConstant(indices, values, constants)


OPERATORS: dict[str, Operator] = {
    "dense": Dense(log_rows(STATES, STATES)),
    "dense with zeros": Dense(left_right(STATES)),
    "time-varying": TimeVarying(log_rows(3, STATES, STATES, seed=4), torch.arange(STEPS) * 7 % 3),
    "time-varying with zeros": TimeVarying(
        torch.stack([left_right(STATES, 1), left_right(STATES, 3, seed=2)]), torch.arange(STEPS) * 5 % 3 % 2
    ),
    "mostly constant": mostly_constant(STATES, 2),
    "mostly constant with low entries": mostly_constant(STATES, 4, low=True),
    "sparse": mostly_constant(STATES, 3, sparse=True),
    "duration": Duration(log_rows(2, 2, seed=5), log_rows(2, 3, seed=6)),
    "duration with zeros": Duration(left_right(3), log_rows(3, 2, seed=7)),
}


def evidence(form: str, labelled: bool = False, steps: int = STEPS, states: int = STATES) -> Evidence:
    labels = None
    if labelled:
        labels = torch.where(torch.arange(steps) % 4 == 1, torch.arange(steps) * 7 % states, -1)
    if form == "table":
        log_probs = log_rows(states, SYMBOLS, seed=20)
        log_probs[0, 1] = -INF
        return Table(log_probs, torch.arange(steps) * 3 % 11 % (SYMBOLS + 1), labels)
    if form == "quadratic":
        columns = torch.cat([normal(steps, 2, seed=21), torch.ones(steps, 1, dtype=torch.float64)], 1)
        pairs = torch.tensor([[0, 2], [1, 2], [0, 0], [0, 1], [1, 1], [2, 2]])
        weights = normal(states, 6, seed=22)
        weights[:, 2:5] -= torch.tensor([2.0, 0.0, 2.0])
        return Quadratic(columns, pairs, weights, labels)
    rows = normal(steps, states, seed=23).mul(2)
    rows[::5, 0] = -INF
    return Rows(rows, labels)


FORMS = ("table", "quadratic", "rows")


def check(
    found: EStep, expected: EStep, single: bool = False, rtol: float | None = None, atol: float | None = None
) -> None:
    """All fields that `found` has rows for."""
    tolerance = {"rtol": 1e-4 if single else 1e-10, "atol": 1e-4 if single else 1e-12}
    tolerance |= {name: value for name, value in (("rtol", rtol), ("atol", atol)) if value is not None}
    for name in EStep._fields:
        mine, theirs = getattr(found, name), getattr(expected, name)
        if name == "counts":
            assert len(mine) == len(theirs)
            for left, right in zip(mine, theirs, strict=True):
                assert_close(left, right, **tolerance, msg=lambda text: f"counts: {text}")
        elif name == "impossible_step":
            assert mine.tolist() == theirs.tolist()
        elif name == "evidence" or len(mine):
            assert_close(mine, theirs, **tolerance, msg=lambda text, name=name: f"{name}: {text}")
        assert mine.dtype == theirs.dtype if name != "counts" else all(value.dtype == torch.float64 for value in mine)


@pytest.mark.parametrize("oracle", [reference, log_space], ids=["reference", "log space"])
@pytest.mark.parametrize("per_step", [False, True], ids=["sums", "per step"])
@pytest.mark.parametrize("labelled", [False, True], ids=["unlabelled", "labelled"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OPERATORS)
@DTYPES
def test_e_step(name, form, labelled, per_step, oracle, dtype):
    given = log_rows(STATES, seed=10), OPERATORS[name], evidence(form, labelled), OFFSETS, WEIGHTS
    assert cpu.supports(given[1], given[2]) is None
    found, expected = cpu.e_step(*given, dtype=dtype, per_step=per_step), oracle.e_step(*given)
    check(found, expected, single=dtype == torch.float32)
    assert len(found.smoothed) == len(found.filtered) == (STEPS if per_step else 0)
    scored = cpu.e_step(*given, dtype=dtype, smooth=False, per_step=per_step)
    forward = oracle.e_step(*given, smooth=False)
    check(scored._replace(evidence=forward.evidence), forward, single=dtype == torch.float32)
    assert len(scored.last) == len(LENGTHS)


@pytest.mark.parametrize("low", [False, True], ids=["high", "low"])
@pytest.mark.parametrize(("states", "sequences"), [(9, 3), (37, 9), (37, 41), (64, 70)])
@DTYPES
def test_mostly_constant_of_tiles_of_any_size(states, sequences, low, dtype):
    """Tiles have less than one vector of sequences, exactly one, or several, and sequences end at different steps.

    The route through a dense matrix, which is taken for few states, is switched off.
    """
    offsets = torch.tensor([0, *(1 + n * 5 % 13 for n in range(sequences))]).cumsum(0)
    given = (
        log_rows(states, seed=10),
        mostly_constant(states, 5, low=low),
        evidence("rows", steps=int(offsets[-1]), states=states),
        offsets,
    )
    weights = torch.linspace(0.5, 2, sequences, dtype=torch.float64)
    check(own_e_step(*given, weights, dtype=dtype), reference.e_step(*given, weights), single=dtype == torch.float32)
    scored, forward = (
        own_e_step(*given, weights, dtype=dtype, smooth=False),
        reference.e_step(*given, weights, smooth=False),
    )
    check(scored._replace(evidence=forward.evidence), forward, single=dtype == torch.float32)


@pytest.mark.parametrize("labelled", [False, True], ids=["unlabelled", "labelled"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OPERATORS)
def test_viterbi(name, form, labelled):
    given = log_rows(STATES, seed=10), OPERATORS[name], evidence(form, labelled), OFFSETS
    path, score = cpu.viterbi(*given)
    expected_path, expected_score = log_space.viterbi(*given)
    assert_close(score, expected_score, rtol=1e-12, atol=1e-12)
    assert path.tolist() == expected_path.tolist()


@pytest.mark.parametrize("scale", [0.0, 1.0, 20.0])
@pytest.mark.parametrize("kind", [{}, {"low": True}, {"sparse": True}], ids=["high", "low", "sparse"])
def test_viterbi_of_mostly_constant_transitions(kind, scale):
    """With a larger `scale` of the evidence, fewer rows have a kept entry that is better than the best constant.

    Without the route by a dense matrix, which is taken for few states.
    """
    rows = normal(STEPS, 40, seed=23).mul(scale)
    rows[::5, 0] = -INF
    given = log_rows(40, seed=10), mostly_constant(40, 5, **kind), Rows(rows), OFFSETS
    found, expected = own_viterbi(*given), log_space.viterbi(*given)
    assert_close(found[1], expected[1], rtol=1e-12, atol=1e-12)
    assert found[0].tolist() == expected[0].tolist()


@pytest.mark.parametrize("states", [1, 9, 40])
def test_viterbi_of_many_states(states):
    given = log_rows(states, seed=10), Dense(log_rows(states, states)), evidence("rows", states=states), OFFSETS
    found, expected = cpu.viterbi(*given), log_space.viterbi(*given)
    assert_close(found[1], expected[1], rtol=1e-12, atol=1e-12)
    assert found[0].tolist() == expected[0].tolist()


@pytest.mark.parametrize("low", [False, True])
@DTYPES
def test_many_states_of_which_few_entries_are_kept(low, dtype):
    given = log_rows(70, seed=10), mostly_constant(70, 5, low=low), evidence("table", states=70), OFFSETS, WEIGHTS
    check(
        cpu.e_step(*given, dtype=dtype),
        log_space.e_step(*given),
        single=dtype == torch.float32,
        rtol=1e-3 if dtype == torch.float32 else None,
    )
    found, expected = cpu.viterbi(*given[:4]), log_space.viterbi(*given[:4])
    assert_close(found[1], expected[1], rtol=1e-12, atol=1e-12)
    assert found[0].tolist() == expected[0].tolist()


def test_equally_probable_paths_and_no_steps():
    """With everything uniform all paths tie: the first state throughout."""
    flat = torch.zeros(6, 3, dtype=torch.float64)
    path, score = cpu.viterbi(flat[0], Dense(flat[:3]), Rows(flat), torch.tensor([0, 4, 4, 6]))
    assert path.tolist() == [0] * 6
    assert score.tolist() == [0.0] * 3


def test_labels_matter():
    given = log_rows(STATES, seed=10), OPERATORS["dense"]
    likelihoods = [
        cpu.e_step(*given, evidence("table", labelled), OFFSETS, WEIGHTS).log_likelihood for labelled in (False, True)
    ]
    assert bool((likelihoods[1] < likelihoods[0]).any())


@pytest.mark.parametrize("symbol_type", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_types_of_symbols(symbol_type):
    table = evidence("table")
    given = log_rows(STATES, seed=10), OPERATORS["dense"]
    expected = cpu.e_step(*given, table, OFFSETS, WEIGHTS)
    found = cpu.e_step(*given, table._replace(symbols=table.symbols.to(symbol_type)), OFFSETS, WEIGHTS)
    check(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("column_type", [torch.float32, torch.float64, torch.int64])
def test_types_of_columns_and_rows(column_type):
    given = log_rows(STATES, seed=10), OPERATORS["dense"]
    quadratic, rows = evidence("quadratic"), evidence("rows")
    for narrow in (
        quadratic._replace(columns=quadratic.columns.round().to(column_type)),
        Rows(rows.log_likelihoods.clamp(min=-9).round().to(column_type)),
    ):
        check(
            cpu.e_step(*given, narrow, OFFSETS, WEIGHTS), log_space.e_step(*given, narrow, OFFSETS, WEIGHTS), rtol=1e-9
        )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("weight", [0.0, -1.0, 1e12, 1e-12, -1e200, 1e-300])
@DTYPES
def test_weights_of_any_size(form, weight, dtype):
    given = log_rows(STATES, seed=10), OPERATORS["dense with zeros"], evidence(form), OFFSETS
    one = cpu.e_step(*given, torch.ones(len(LENGTHS), dtype=torch.float64), dtype=dtype)
    many = cpu.e_step(*given, torch.full((len(LENGTHS),), weight, dtype=torch.float64), dtype=dtype)
    assert torch.equal(many.log_likelihood, one.log_likelihood)
    for mine, theirs in (
        (many.initial, one.initial),
        (many.counts[0], one.counts[0]),
        (many.evidence, one.evidence),
        (many.smoothed, one.smoothed),
    ):
        assert_close(mine, theirs * weight, rtol=1e-4 if dtype == torch.float32 else 1e-12, atol=1e-30 * abs(weight))


@pytest.mark.parametrize("form", FORMS)
@DTYPES
def test_one_very_long_sequence(form, dtype):
    """It is worked on alone, next to short ones; scoring it takes many chunks."""
    lengths = [5000, 3, 0, 17]
    offsets, steps = torch.tensor([0, *lengths]).cumsum(0), sum(lengths)
    given = (
        log_rows(3, seed=10),
        Dense(log_rows(3, 3)),
        evidence(form, steps=steps, states=3),
        offsets,
        torch.tensor([1.0, 2.0, 1.0, -1.0]).double(),
    )
    found, expected = cpu.e_step(*given, dtype=dtype), reference.e_step(*given)
    check(found, expected, single=dtype == torch.float32, rtol=1e-4 if dtype == torch.float32 else 1e-9)
    assert_close(cpu.e_step(*given, dtype=dtype, smooth=False).log_likelihood, found.log_likelihood, rtol=1e-12, atol=0)


@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [1], [2], [1, 1, 1, 1, 1]])
@pytest.mark.parametrize("form", FORMS)
def test_few_steps(form, lengths):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    weights = torch.ones(len(lengths), dtype=torch.float64)
    given = log_rows(STATES, seed=10), OPERATORS["dense"], evidence(form, steps=sum(lengths)), offsets, weights
    check(cpu.e_step(*given), log_space.e_step(*given))
    assert cpu.e_step(*given, smooth=False).log_likelihood.shape == (len(lengths),)


@pytest.mark.parametrize("states", [1, 2, 7, 8, 9, 16, 17, 40])
@pytest.mark.parametrize("form", FORMS)
@DTYPES
def test_numbers_of_states(states, form, dtype):
    """Below, at and above the width of a vector."""
    given = log_rows(states, seed=10), Dense(log_rows(states, states)), evidence(form, states=states), OFFSETS, WEIGHTS
    check(
        cpu.e_step(*given, dtype=dtype),
        reference.e_step(*given),
        single=dtype == torch.float32,
        rtol=2e-4 if dtype == torch.float32 else None,
    )


@pytest.mark.parametrize("form", FORMS)
@DTYPES
def test_the_number_of_threads_does_not_change_a_bit(form, dtype):
    lengths = [int(n) for n in torch.arange(200) * 13 % 60]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    given = (
        log_rows(20, seed=10),
        Dense(log_rows(20, 20)),
        evidence(form, True, sum(lengths), 20),
        offsets,
        torch.ones(200, dtype=torch.float64),
    )
    threads, results = torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            results.append(cpu.e_step(*given, dtype=dtype))
    finally:
        torch.set_num_threads(threads)
    for left, right in zip(results[0], results[1], strict=True):
        for mine, theirs in zip(left, right, strict=True) if isinstance(left, tuple) else [(left, right)]:
            assert torch.equal(mine, theirs)


# Where the range of floats ends


def agree_with_log_space(
    initial: torch.Tensor, transition: torch.Tensor, rows: list[torch.Tensor], dtype: torch.dtype
) -> EStep:
    """The E-step and the forward pass, with the sequences in one batch with ordinary ones."""
    ordinary = [normal(length, len(initial), seed=length) for length in (5, 9, 30)]
    sequences = [*rows, *ordinary]
    offsets = torch.tensor([0, *map(len, sequences)]).cumsum(0)
    given = (
        initial,
        Dense(transition),
        Rows(torch.cat(sequences)),
        offsets,
        torch.ones(len(sequences), dtype=torch.float64),
    )
    exact = log_space.e_step(*given)
    found = cpu.e_step(*given, dtype=dtype)
    single = dtype == torch.float32
    check(found, exact, rtol=1e-5 if single else 1e-8, atol=1e-3 if single else 1e-8)
    assert_close(
        cpu.e_step(*given, dtype=dtype, smooth=False).log_likelihood,
        exact.log_likelihood,
        rtol=1e-5 if single else 1e-10,
        atol=1e-4 if single else 1e-8,
    )
    return found


@pytest.mark.parametrize("favor", [1.0, 10.0, 200.0, 20000.0])
@DTYPES
def test_a_left_right_chain_with_a_better_state_that_cannot_be_reached(favor, dtype):
    rows = torch.zeros(60, 4, dtype=torch.float64)
    rows[:, 0] = favor
    found = agree_with_log_space(torch.tensor([0.0, 1.0, 0.0, 0.0]).double().log(), left_right(4), [rows], dtype)
    assert not found.smoothed[:60, 0].any()


@pytest.mark.parametrize("distance", [40.0, 300.0, 3000.0, 30000.0])
@pytest.mark.parametrize("chain", ["full", "separate"])
@DTYPES
def test_points_many_standard_deviations_away(distance, chain, dtype):
    means = torch.tensor([0.0, 1.0]).double()
    values = torch.tensor([0.1, -0.2, distance, 0.3, -distance, 0.8]).double()
    weights = torch.stack([means, torch.full((2,), -0.5).double(), -0.5 * means**2], 1)
    columns = torch.stack([values, torch.ones_like(values)], 1)
    transition = (torch.tensor([[0.9, 0.1], [0.2, 0.8]]) if chain == "full" else torch.eye(2)).double().log()
    pairs = torch.tensor([[0, 1], [0, 0], [1, 1]])
    given = (
        torch.tensor([0.5, 0.5]).double().log(),
        Dense(transition),
        Quadratic(columns, pairs, weights),
        torch.tensor([0, 6]),
        torch.ones(1).double(),
    )
    found, exact = cpu.e_step(*given, dtype=dtype), log_space.e_step(*given)
    rounding = 1e-15 * distance**2  # of a log-density in float64, which posteriors cannot be better than
    assert_close(found.log_likelihood, exact.log_likelihood, rtol=1e-6 if dtype == torch.float32 else 1e-10, atol=0)
    assert_close(
        found.smoothed, exact.smoothed, rtol=max(rounding, 1e-4 if dtype == torch.float32 else 1e-10), atol=1e-5
    )


@pytest.mark.parametrize("gap", [20.0, 60.0, 100.0, 400.0, 690.0, 720.0, 5000.0])
@pytest.mark.parametrize("later", [1, 2, 3, 10])
@DTYPES
def test_a_lost_path_that_matters_later(gap, later, dtype):
    """There are two chains that cannot reach each other.

    The evidence speaks against the second by `gap` nats at one step, and against the first by more a few steps later.
    The steps in between carry no evidence, so no step collapses next to the loss.
    """
    transition = torch.full((4, 4), -INF, dtype=torch.float64)
    transition[:2, :2] = transition[2:, 2:] = torch.tensor(0.5).log()
    rows = torch.zeros(later + 4, 4, dtype=torch.float64)
    rows[1, 2:] = -gap
    rows[1 + later, :2] = -gap - 3
    agree_with_log_space(
        torch.full((4,), 0.25, dtype=torch.float64).log(), transition, [rows, rows[:2], rows[:3]], dtype
    )


@pytest.mark.parametrize("rate", [0.3, 1.0, 10.0])
@DTYPES
def test_a_left_right_chain_that_seemed_to_have_moved_on(rate, dtype):
    rows = torch.zeros(900, 3, dtype=torch.float64)
    rows[:300, 0] = -rate
    rows[300:, 1:] = -rate
    chain = torch.tensor([[0.9, 0.1, 0], [0, 0.9, 0.1], [0, 0, 1]]).double().log()
    agree_with_log_space(torch.tensor([1.0, 0, 0]).double().log(), chain, [rows, rows[:310], rows[::7]], dtype)


@pytest.mark.parametrize("log_probability", [-20, -43, -60, -90, -460, -667, -690, -1000])
@pytest.mark.parametrize("both_ways", [False, True])
@DTYPES
def test_a_rare_transition_that_pays_off_slowly(log_probability, both_ways, dtype):
    rare = torch.tensor([[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]]).double().log()
    rare[0, 2] = log_probability
    if both_ways:
        rare[1, 2] = rare[2, 0] = rare[2, 1] = log_probability
    rows = torch.zeros(4 + int(2 * -log_probability / 5), 3, dtype=torch.float64)
    rows[3:, :2] = -5
    agree_with_log_space(torch.tensor([0.5, 0.5, 0]).double().log(), rare, [rows], dtype)


@pytest.mark.parametrize("probability", [1e-9, 1e-30, 1e-39, 1e-190, 1e-300, 1e-320])
@DTYPES
def test_a_rare_transition_that_must_be_used_again_and_again(probability, dtype):
    rare = torch.tensor([[1, probability], [probability, 1]]).double().log()
    rows = torch.tensor([[1.0, 0], [0, 1], [1, 0], [0, 1], [0, 1]]).double().log()
    agree_with_log_space(torch.tensor([0.5, 0.5]).double().log(), rare, [rows, rows[:2]], dtype)


@pytest.mark.parametrize("scale", [1.0, 10.0, 100.0, 1000.0])
@pytest.mark.parametrize("seed", range(3))
@DTYPES
def test_random_evidence_and_random_zeros(scale, seed, dtype):
    """Half of the transitions are impossible; the evidence wanders over many orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    initial = log_rows(5, seed=seed).masked_fill(torch.rand(5, generator=generator) < 0.3, -INF)
    transition = log_rows(5, 5, seed=seed + 50).masked_fill(torch.rand(5, 5, generator=generator) < 0.5, -INF)
    rows = [(torch.randn(40, 5, generator=generator) * scale).cumsum(0).double() / 3 for _ in range(20)]
    rows = [row.masked_fill(torch.rand(40, 5, generator=generator) < 0.05, -INF) for row in rows]
    agree_with_log_space(initial.nan_to_num(neginf=-INF), transition, rows, dtype)


@DTYPES
def test_log_probabilities_above_zero(dtype):
    """Every natural parameter is free: rows need not sum to one."""
    given = log_rows(STATES, seed=10) + 3, Dense(log_rows(STATES, STATES) + 5), evidence("rows"), OFFSETS, WEIGHTS
    check(cpu.e_step(*given, dtype=dtype), log_space.e_step(*given), single=dtype == torch.float32)
    zeros = given[0], Dense(left_right(STATES) + 5), *given[2:]
    check(cpu.e_step(*zeros, dtype=dtype), log_space.e_step(*zeros), single=dtype == torch.float32)
    huge = given[0], Dense(log_rows(STATES, STATES) + 800), *given[2:]
    check(cpu.e_step(*huge, dtype=dtype), log_space.e_step(*huge), single=dtype == torch.float32)


@pytest.mark.parametrize("form", FORMS)
@DTYPES
def test_impossible_sequences_are_located_and_add_nothing(form, dtype):
    labels = torch.full((STEPS,), -1)
    seen = evidence(form, states=3)._replace(labels=labels)
    seen = seen.with_live(seen.live.clamp(min=-20))
    given = torch.tensor([0.0, -INF, -INF]).double(), Dense(left_right(3)), seen, OFFSETS, WEIGHTS
    labels[2], labels[3] = 2, 1  # no way back in the first sequence
    labels[int(OFFSETS[5])] = 1  # not the first state in the sixth
    found = cpu.e_step(*given, dtype=dtype)
    check(found, log_space.e_step(*given), single=dtype == torch.float32)
    assert found.impossible_step[[0, 5]].tolist() == [3, 0]
    assert not found.smoothed[:4].any()
    assert not found.filtered[:4].any()


# What is refused


@pytest.mark.parametrize("spoiled", ["initial", "transition", "emission"])
def test_nan_is_refused(spoiled):
    parameters = {"initial": log_rows(3), "transition": log_rows(3, 3), "emission": log_rows(3, SYMBOLS)}
    parameters[spoiled][..., 1] = torch.nan
    given = (
        parameters["initial"],
        Dense(parameters["transition"]),
        Table(parameters["emission"], torch.tensor([0, 1])),
        torch.tensor([0, 2]),
    )
    with pytest.raises(
        ValueError, match=rf"^`{spoiled}` must hold numbers, but the entry at \((0, )?1,?\) is nan instead"
    ):
        cpu.e_step(*given, torch.ones(1).double())


def test_data_that_cannot_be_used_are_refused():
    chain, offsets, weights = (log_rows(STATES), OPERATORS["dense"]), torch.tensor([0, 3]), torch.ones(1).double()
    table = evidence("table", steps=3)
    for symbol, labels, message in (
        (6, None, "`symbols` .* from 0 to 5 .* step 2 is 6"),
        (-1, None, "step 2 is -1"),
        (0, [0, 6, 0], "`labels` .* step 1 is 6"),
    ):
        spoiled = table._replace(
            symbols=torch.tensor([0, 1, symbol]), labels=None if labels is None else torch.tensor(labels)
        )
        with pytest.raises(ValueError, match=message):
            cpu.e_step(*chain, spoiled, offsets, weights)
    for value in (torch.nan, INF):
        rows = normal(3, STATES)
        rows[1, 2] = value
        with pytest.raises(ValueError, match=r"`log_likelihoods` .* step 1"):
            cpu.e_step(*chain, Rows(rows), offsets, weights)
    quadratic = evidence("quadratic", steps=3)
    quadratic.columns[1, 0] = torch.nan
    with pytest.raises(ValueError, match=r"`columns` .* \(1, 0\) is nan"):
        cpu.e_step(*chain, quadratic, offsets, weights)


def test_what_is_not_supported_is_said():
    class Other(Dense):
        pass

    reason = cpu.supports(Other(log_rows(2, 2)), evidence("rows", states=2))
    assert reason == "The compiled CPU backend has no kernels for the operator Other."
    table = evidence("table")._replace(symbols=torch.zeros(STEPS, dtype=torch.int8))
    assert "int8" in (cpu.supports(OPERATORS["dense"], table) or "")


def test_results_are_the_same_whatever_shares_the_batch():
    """A sequence that needs log space does not change the others' likelihoods."""
    rows = torch.zeros(300, 2, dtype=torch.float64)
    rows[:100, 1], rows[100:, 0] = -10.0, -10.0
    chains = torch.tensor([0.5, 0.5]).double().log(), Dense(torch.eye(2).double().log())
    alone = cpu.e_step(*chains, Rows(rows[:50]), torch.tensor([0, 50]), torch.ones(1).double())
    both = cpu.e_step(
        *chains, Rows(torch.cat([rows[:50], rows, rows[:50]])), torch.tensor([0, 50, 350, 400]), torch.ones(3).double()
    )
    assert both.log_likelihood[[0, 2]].tolist() == alone.log_likelihood.tolist() * 2
    assert_close(
        both.counts[0], 2 * alone.counts[0] + torch.tensor([[0, 0], [0, 299.0]]).double(), rtol=1e-12, atol=1e-12
    )
    assert len(list(itertools.chain(both.counts))) == 1
