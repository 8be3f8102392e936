"""EM as an optimizer: the M-step, priors, frozen parts, structural zeros, online EM, the compiled pass, its state."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch

from lightning_hmm import BaumWelch, Sequences, StandardHMM, inference
from lightning_hmm.distributions import Categorical, Full, Gaussian
from lightning_hmm.inference.cpu import online
from tests.helpers import assert_same_parameters, random_symbols, random_vectors


def backward(model: StandardHMM, sequences: Sequences) -> float:
    """Leaves minus the expected statistics in ``.grad``; returns the weighted log-likelihood."""
    total = log_likelihoods(model, sequences).sum()
    (-total).backward()
    return float(total.detach())


def log_likelihoods(model: StandardHMM, sequences: Sequences) -> torch.Tensor:
    """(restarts,) weighted, differentiable."""
    return torch.stack(
        [inference.log_likelihood(*model.problem(sequences, r), sequences.weights).sum() for r in range(model.restarts)]
    )


def categorical(**options) -> StandardHMM:
    return StandardHMM(**{"num_states": 3, "num_symbols": 5, "seed": 1, **options})


def test_step_normalizes_the_counts(rng):
    sequences, model = random_symbols(rng), categorical()
    counts = inference.e_step(*model.problem(sequences, 0))
    backward(model, sequences)
    torch.testing.assert_close(-model.transition.log_probs.grad[0], counts.counts[0], rtol=1e-12, atol=0)
    BaumWelch(model.distributions).step()
    torch.testing.assert_close(model.initial_probs, counts.initial / counts.initial.sum(), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        model.transition_probs, counts.counts[0] / counts.counts[0].sum(1, keepdim=True), rtol=1e-12, atol=0
    )
    torch.testing.assert_close(
        model.emission_probs, counts.evidence / counts.evidence.sum(1, keepdim=True), rtol=1e-12, atol=0
    )


def test_pseudocounts_are_added_to_the_counts(rng):
    sequences, model = random_symbols(rng), categorical(transition_pseudocount=0.7)
    counts = inference.e_step(*model.problem(sequences, 0))
    backward(model, sequences)
    BaumWelch(model.distributions).step()
    expected = counts.counts[0] + 0.7
    torch.testing.assert_close(model.transition_probs, expected / expected.sum(1, keepdim=True), rtol=1e-12, atol=0)
    torch.testing.assert_close(model.initial_probs, counts.initial / counts.initial.sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_objective_never_falls(rng, kind):
    """Log-likelihood plus log prior, at every step and for every restart."""
    if kind == "categorical":
        sequences, model = (
            random_symbols(rng),
            categorical(restarts=3, transition_pseudocount=0.5, emission_pseudocount=0.1),
        )
    else:
        sequences = random_vectors(rng)
        priors = {"transition_pseudocount": 0.5, "variance_prior": 0.3}
        model = StandardHMM(
            num_states=3, emission="gaussian", num_features=2, restarts=3, initialization="random", **priors
        )
        model.initialize(sequences)
    optimizer = BaumWelch(model.distributions)
    objectives = []
    for _ in range(40):
        optimizer.zero_grad()
        scores = log_likelihoods(model, sequences)
        objectives.append((scores.detach() + optimizer.log_prior()) / float(sequences.num_observed()))
        (-scores.sum()).backward()
        optimizer.step()
    gains = torch.stack(objectives).diff(dim=0)
    assert gains.min() > -1e-9
    assert gains[0].min() > 1e-4  # it moved at all
    torch.testing.assert_close(model.transition_probs.sum(1), torch.ones(3, dtype=torch.float64), rtol=1e-12, atol=0)


def test_gaussian_step_matches_weighted_moments(rng):
    """With single entries missing, each feature has its own visits."""
    sequences = random_vectors(rng, missing=0.3)
    model = StandardHMM(num_states=2, emission="gaussian", num_features=2, variance_prior=0.0)
    model.initialize(sequences)
    smoothed = model.posterior(sequences).smoothed.values
    backward(model, sequences)
    BaumWelch(model.distributions).step()
    for d in range(2):
        seen = ~sequences.values[:, d].isnan()
        y, weight = sequences.values[seen, d], smoothed[seen]
        mean = (weight * y[:, None]).sum(0) / weight.sum(0)
        variance = (weight * (y[:, None] - mean) ** 2).sum(0) / weight.sum(0)
        torch.testing.assert_close(model.emission.mean[:, d], mean, rtol=1e-10, atol=0)
        torch.testing.assert_close(model.emission.variance[:, d], variance, rtol=1e-10, atol=0)


def test_a_far_offset_costs_no_digits(rng):
    """Uncentred sums of squares of data around 1e6 would leave ten digits fewer."""
    near = random_vectors(rng)
    models = []
    for offset in (0.0, 1e6):
        sequences = near.with_values(near.values + offset)
        model = StandardHMM(num_states=2, emission="gaussian", num_features=2, variance_prior=0.0)
        model.initialize(sequences)
        optimizer = BaumWelch(model.distributions)
        for _ in range(10):
            optimizer.zero_grad()
            backward(model, sequences)
            optimizer.step()
        models.append(model)
    torch.testing.assert_close(
        models[1].emission.mean - 1e6, models[0].emission.mean, rtol=1e-7, atol=1e-8
    )  # 1e6 itself leaves 1e-10
    torch.testing.assert_close(models[1].emission.variance, models[0].emission.variance, rtol=1e-7, atol=0)


def test_variance_prior_keeps_a_lone_point_from_collapsing():
    sequences = Sequences.from_list([[[0.0], [0.1], [0.2], [50.0]]])
    model = StandardHMM(num_states=2, emission="gaussian", num_features=1, variance_prior=1e-3)
    model.set_parameters(emission={"mean": [[0.0], [50.0]], "variance": [[1.0], [1.0]]})
    optimizer = BaumWelch(model.distributions)
    for _ in range(30):
        optimizer.zero_grad()
        backward(model, sequences)
        optimizer.step()
    torch.testing.assert_close(
        model.emission.variance[1, 0], torch.tensor(1e-3, dtype=torch.float64), rtol=1e-6, atol=0
    )


def test_structural_zeros_stay_even_with_a_prior(rng):
    model = categorical(transition_pseudocount=1.0)
    model.set_parameters(transition=[[0.5, 0.5, 0.0], [0.0, 0.5, 0.5], [0.0, 0.0, 1.0]])
    sequences = random_symbols(rng)
    optimizer = BaumWelch(model.distributions)
    for _ in range(5):
        optimizer.zero_grad()
        backward(model, sequences)
        assert torch.isfinite(model.transition.log_probs.grad).all()
        optimizer.step()
    zeros = torch.tensor([[0, 0, 1], [1, 0, 0], [1, 1, 0]], dtype=torch.bool)
    assert (model.transition_probs[zeros] == 0).all()
    assert (model.transition_probs[~zeros] > 0).all()


def test_frozen_parts_keep_their_values(rng):
    model = categorical()
    before = model.emission_probs
    backward(model, random_symbols(rng))
    BaumWelch(model.distributions, frozen=["emission"]).step()
    assert torch.equal(model.emission_probs, before)
    assert not torch.equal(model.transition_probs, categorical().transition_probs)


def test_a_row_without_counts_keeps_its_values():
    model = categorical()
    model.set_parameters(initial=[1.0, 0.0, 0.0], transition=[[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.2, 0.3, 0.5]])
    backward(model, Sequences.from_list([[0, 1, 2, 3, 4]]))
    optimizer = BaumWelch(model.distributions)
    optimizer.step()
    torch.testing.assert_close(
        model.transition_probs[2], torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64), rtol=1e-15, atol=0
    )
    assert int(optimizer.rows_without_counts["transition"]) == 1
    assert int(optimizer.rows_without_counts["initial"]) == 0


def test_length_one_sequences_give_zero_transition_counts_not_none():
    model = categorical()
    backward(model, Sequences.from_list([[0], [1], [4]]))
    assert torch.equal(model.transition.log_probs.grad, torch.zeros(1, 3, 3, dtype=torch.float64))
    before = model.transition_probs
    BaumWelch(model.distributions).step()
    assert torch.equal(model.transition_probs, before)


def test_an_empty_batch_is_connected_to_every_parameter():
    model = categorical()
    backward(model, Sequences.from_list([]))
    for distribution in model.distributions.values():
        assert all(parameter.grad is not None and not parameter.grad.any() for parameter in distribution.parameters())


# Online EM


def online_by_hand(
    model: StandardHMM, batches: list[Sequences], discount: float, pseudocount: float, total: float
) -> torch.Tensor:
    """The transition matrix after online EM, written out."""
    buffer, size = torch.zeros(3, 3, dtype=torch.float64), 0.0
    buffers = {"initial": torch.zeros(3, dtype=torch.float64), "emission": torch.zeros(3, 5, dtype=torch.float64)}
    for n, batch in enumerate(batches, start=1):
        counts = inference.e_step(*model.problem(batch, 0))
        buffer = discount * buffer + (1 - discount) * counts.counts[0]
        buffers["initial"] = discount * buffers["initial"] + (1 - discount) * counts.initial
        buffers["emission"] = discount * buffers["emission"] + (1 - discount) * counts.evidence
        size = discount * size + (1 - discount) * float(counts.initial.sum())
        correction = 1 - discount**n
        expected = buffer / correction + pseudocount * (size / correction) / total
        model.set_parameters(
            transition=expected / expected.sum(1, keepdim=True),
            initial=buffers["initial"] / buffers["initial"].sum(),
            emission=buffers["emission"] / buffers["emission"].sum(1, keepdim=True),
        )
    return model.transition_probs


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("pseudocount", [0.0, 2.0])
def test_online_em_is_the_discounted_buffer(rng, discount, pseudocount):
    sequences, model = random_symbols(rng, missing=0.0), categorical(transition_pseudocount=pseudocount)
    batches = list(sequences.split(4))
    optimizer = BaumWelch(model.distributions, discount, data_size=17)
    for batch in batches:
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
    torch.testing.assert_close(
        model.transition_probs, online_by_hand(categorical(), batches, discount, pseudocount, 17), rtol=1e-10, atol=0
    )


@pytest.mark.parametrize("restarts", [1, 3])
@pytest.mark.parametrize("frozen", [(), ("initial", "emission")])
def test_the_compiled_pass_equals_step_by_step(rng, restarts, frozen):
    """Ragged and weighted sequences, missing values, an incomplete batch and a prior, from a nonempty buffer."""
    sequences = random_symbols(rng, 33)
    sequences = Sequences(sequences.values, sequences.offsets, torch.from_numpy(rng.random(33)))
    models = [categorical(restarts=restarts, transition_pseudocount=1.0, emission_pseudocount=0.2) for _ in range(2)]
    optimizers = [BaumWelch(model.distributions, 0.9, frozen, float(sequences.weights.sum())) for model in models]
    scores = []
    for _ in range(2):
        for batch in sequences.split(4):
            optimizers[0].zero_grad()
            scores.append(backward(models[0], batch))
            optimizers[0].step()
    compiled = [optimizers[1].compiled_pass(sequences, 4, models[1].compiled_kernel) for _ in range(2)]
    assert_same_parameters(*models, rtol=1e-9)
    assert np.isclose(sum(scores), float(sum((part * sequences.weights).sum() for part in compiled)), rtol=1e-10)
    for first, second in zip(optimizers[0].state.values(), optimizers[1].state.values(), strict=True):
        torch.testing.assert_close(first["statistics"], second["statistics"], rtol=1e-9, atol=1e-14)


def test_the_compiled_pass_works_on_very_long_sequences_alone(rng, monkeypatch):
    """A tile of many has as many steps as its longest: the memory would be that of 32 sequences as long."""
    lengths = [40, 3, 0, 90, 8, 7, 60, 5]
    sequences = Sequences.from_lengths(rng.integers(5, size=sum(lengths)), lengths)
    models, sizes = [categorical(), categorical()], []
    workspace = online.workspace
    monkeypatch.setattr(online, "workspace", lambda dtype, size: sizes.append(size) or workspace(dtype, size))
    for model, longest_in_a_tile in zip(models, (1000, 16), strict=True):
        monkeypatch.setattr(online, "most_steps", lambda row_bytes, longest=longest_in_a_tile: longest)
        BaumWelch(model.distributions, 0.5).compiled_pass(sequences, 8, model.compiled_kernel)
    assert_same_parameters(*models)
    assert sizes[1] < sizes[0] / 1.5


def test_the_compiled_pass_names_an_impossible_sequence():
    model = categorical()
    model.set_parameters(emission=torch.tensor([[0.5, 0.5, 0.0, 0.0, 0.0]] * 3))
    optimizer = BaumWelch(model.distributions, 0.9)
    with pytest.raises(ValueError, match=r"Sequence 2 .* step 1 \(4\)"):
        optimizer.compiled_pass(Sequences.from_list([[0, 1], [1], [0, 4, 0]]), 2, model.compiled_kernel)


# State


def test_the_buffer_stays_float64_after_loading():
    """torch casts a state to its parameter's precision; then resuming would not be exact."""
    model = categorical()
    for distribution in model.distributions.values():
        distribution.float()
    optimizer = BaumWelch(model.distributions, 0.9)
    parameter = model.transition.log_probs
    value = torch.full((1, 3, 3), 1 / 3, dtype=torch.float64)
    optimizer.state[parameter]["statistics"] = value.clone()
    other = BaumWelch(model.distributions, 0.9)
    other.load_state_dict(optimizer.state_dict())
    assert other.state[parameter]["statistics"].dtype == torch.float64
    assert torch.equal(other.state[parameter]["statistics"], value)


def test_the_state_is_tensors_and_plain_values(rng):
    model = categorical(transition_pseudocount=1.0)
    optimizer = BaumWelch(model.distributions, 0.9, data_size=17)
    backward(model, random_symbols(rng))
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert [group["updates"] for group in loaded["param_groups"]] == [1, 1, 1]


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"discount": 1.0}, "`discount` must be at least 0 and below 1, but is 1.0"),
        ({"frozen": ["A"]}, "`frozen` must name one of initial, transition, emission, but names 'A'"),
        ({"discount": 0.9}, "`data_size` must be given"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        BaumWelch(categorical(transition_pseudocount=1.0).distributions, **options)


@pytest.mark.parametrize(
    ("part", "prior"),
    [(Full, {"pseudocount": -1.0}), (Categorical, {"pseudocount": float("nan")}), (Gaussian, {"variance_prior": -1.0})],
)
def test_bad_priors_are_named(part, prior):
    (name,) = prior
    with pytest.raises(ValueError, match=f"`{name}` must (not be negative|be a finite number), but is {prior[name]}"):
        part(**prior)


def test_a_missing_gradient_is_named(rng):
    model = categorical()
    optimizer = BaumWelch(model.distributions)
    optimizer.step()  # no gradient at all: nothing to do, as with torch's own optimizers
    backward(model, random_symbols(rng))
    model.emission.log_probs.grad = None
    with pytest.raises(RuntimeError, match="`emission` has no gradient"):
        optimizer.step()
