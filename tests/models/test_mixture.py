"""A mixture of hidden Markov models against the separate models."""

from __future__ import annotations

import pytest
import torch

import lightning_hmm
from lightning_hmm import HMM, Gaussian, MixtureOfHMMs, Sequences, StandardHMM, fit
from lightning_hmm.distributions import Components


def separate(model: MixtureOfHMMs, component: int, size: int) -> StandardHMM:
    here = slice(component * size, (component + 1) * size)
    initial = model.initial_probs[here] / model.mixture_weights[component]
    return StandardHMM(size, model.num_symbols).set_parameters(
        initial, model.transition_probs[here, here], model.emission_probs[here]
    )


@pytest.mark.parametrize(("components", "size"), [(1, 3), (2, 2), (3, 2), (4, 1)])
def test_the_likelihood_is_that_of_the_separate_models(components, size):
    model = MixtureOfHMMs(components, size, num_symbols=3, seed=3)
    sequences = Sequences.from_list([[0, 1, 2, 2], [1], [], [2, -1, 0, 0, 1, 1, 2]])
    joint = torch.stack(
        [separate(model, c, size).score(sequences) + model.mixture_weights[c].log() for c in range(components)], 1
    )
    torch.testing.assert_close(model.score(sequences), joint.logsumexp(1), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(model.cluster_probs(sequences), joint.softmax(1), rtol=1e-10, atol=1e-13)
    assert model.assign(sequences).tolist() == joint.argmax(1).tolist()
    assert model.num_free_parameters == components * size - 1 + components * size * (size - 1) + components * size * 2
    states = model.decode(sequences)
    found = model.components_of(states)
    for n in range(len(sequences)):  # one component in each sequence
        assert len(set(found[n].tolist())) <= 1
    assert torch.equal(found.values, states.values // size)


def test_one_em_step_is_that_of_the_separate_models_with_weights():
    """The posterior probabilities of the components are weights of the sequences."""
    model = MixtureOfHMMs(2, 2, num_symbols=3, seed=1)
    sequences = model.sample(20, 15, seed=2)
    shares = model.cluster_probs(sequences)
    parts = [separate(model, component, 2) for component in range(2)]
    fit(model, sequences, 1, 0)
    torch.testing.assert_close(model.mixture_weights, shares.mean(0), rtol=1e-12, atol=0)
    for component, part in enumerate(parts):
        fit(part, sequences.replaced(weights=shares[:, component]), 1, 0)
        torch.testing.assert_close(separate(model, component, 2).transition_probs, part.transition_probs)
        torch.testing.assert_close(separate(model, component, 2).emission_probs, part.emission_probs)


@pytest.mark.parametrize("initialization", ["kmeans", "random"])
def test_sequences_of_vectors_are_clustered(initialization, tmp_path):
    generator = torch.Generator().manual_seed(0)
    jumps = 3.0 * (torch.arange(40) // 5 % 2)[:, None]
    truth = [n % 3 > 0 for n in range(15)]
    data = [torch.randn(40, 2, generator=generator) + (20.0 if far else 0.0) + jumps for far in truth]
    data[3][5, 0] = torch.nan
    model = MixtureOfHMMs(
        2, 2, Gaussian(), transition_pseudocount=0.1, restarts=3, initialization=initialization, seed=1
    )
    fit(model, data, 30, enable_checkpointing=True, default_root_dir=tmp_path)
    found = model.assign(data)
    assert found.eq(found[0]).tolist() == [far == truth[0] for far in truth]
    assert sorted(model.mixture_weights.tolist()) == pytest.approx([1 / 3, 2 / 3])
    loaded = lightning_hmm.load(model.trainer.checkpoint_callback.best_model_path)
    assert type(loaded) is MixtureOfHMMs
    assert loaded.num_components == 2
    assert torch.equal(loaded.cluster_probs(data), model.cluster_probs(data))


def test_an_impossible_sequence_has_no_component():
    model = MixtureOfHMMs(2, 1, num_symbols=3)
    model.set_parameters(transition=[[[1.0]], [[1.0]]], emission=[[1, 0, 0], [0, 1, 0]])
    with pytest.warns(UserWarning, match="probability zero"):
        assert model.assign([[0, 0], [0, 1], [1]]).tolist() == [0, -1, 1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: MixtureOfHMMs(0, 2), "`num_components` must be"),
        (lambda: Components(0), "`num_components` must be a whole number of at least 1, but is 0"),
        (lambda: HMM(5, transition=Components(2), num_symbols=2), "must be a multiple of the 2 components, but is 5"),
        (
            lambda: MixtureOfHMMs(2, 2, num_symbols=2).set_parameters(transition=torch.full((4, 4), 0.25)),
            "must be zero between components of 2 states, but row 0",
        ),
        (
            lambda: fit(MixtureOfHMMs(3, 1, Gaussian()), [[[1.0], [2.0]], [[4.0]]]),
            "3 components need at least as many observed sequences",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()
