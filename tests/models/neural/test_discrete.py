"""Neural HMMs with K states against enumeration of the states, and on moving targets."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from datamodules import MovingTargetDataModule
from lightning_hmm import Sequences, fit, inference, load
from lightning_hmm.metrics import PredictionError
from lightning_hmm.models import NeuralDiscreteHMM
from tests.helpers import assert_identical_parameters, assert_same_parameters, random_vectors


@pytest.mark.parametrize("residual", [True, False])
def test_all_paths_of_states(rng, residual):
    """Score and predictions, with emissions of each state and step taken one by one."""
    data = random_vectors(rng, num_sequences=4, longest=5, missing=0.2)
    model = NeuralDiscreteHMM(3, 2, emission_order=1, emission_mean="residual" if residual else "absolute", width=8)
    model.initialize(data)
    initial, transition = model.initial_probs, model.transition_probs
    scores, each = model.score(data), model.predict_each(data)

    def evidence(past: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """(K,) p(value | state, past): the score of one step more, for a model in which that state is certain."""
        observations = model.observations(Sequences.from_list([torch.cat([past, value[None]])]))
        return model._log_obs(observations)[-1].detach().exp()

    for n, sequence in enumerate(data):
        probs = [evidence(sequence[:t], sequence[t]) for t in range(len(sequence))]
        total = 0.0
        for path in product(range(3), repeat=len(sequence)):
            joint = float(initial[path[0]] * probs[0][path[0]])
            for t in range(1, len(path)):
                joint *= float(transition[path[t - 1], path[t]] * probs[t][path[t]])
            total += joint
        assert float(scores[n]) == pytest.approx(math.log(total), abs=1e-9)
        for t in range(1, len(sequence)):
            if sequence[t - 1].isnan().all():
                continue  # `predict_next` draws missing steps at the end
            torch.testing.assert_close(each[n][t], model.predict_next(Sequences.from_list([sequence[:t]])).mean[0])


@pytest.mark.parametrize("residual", [True, False])
def test_one_step_ahead(rng, residual):
    """Both moments are exact, and the spread of the means of the states is part of the variance."""
    data = Sequences.from_list([*random_vectors(rng, num_sequences=4, longest=6, missing=0.0), np.zeros((0, 2))])
    model = NeuralDiscreteHMM(
        3,
        2,
        emission_order=0,
        emission_mean="residual" if residual else "absolute",
        width=8,
        emission_log_variance=-1.0,
    )
    model.initialize(data)
    density = model.emission(model.embedding.unsqueeze(0), model.emission.prepare(model.center.new_zeros(0)))
    means, variances = (
        density.mean[0].detach() * model.units.emission_std,
        density.variance[0].detach() * model.units.emission_std.square(),
    )
    found = model.predict_next(data)
    for n, (sequence, probs) in enumerate(zip(data, inference.predict(*model.problem(data)), strict=True)):
        if residual and not len(sequence):  # the first value is Gaussian on its own
            mean, variance = model.center, model.data_variance * model.first_log_variance.exp().detach()
        else:
            mean = (sequence[-1] if residual else model.center) + probs @ means
            spread = probs @ means.square() - (probs @ means).square()
            assert float(spread.min()) > 1e-3  # or leaving it out would pass
            variance = probs @ variances + spread
        torch.testing.assert_close(found.mean[n], mean)
        torch.testing.assert_close(found.variance[n], variance)


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("missing", [0, 2])
def test_several_steps_ahead(rng, residual, missing):
    """Three steps ahead against enumeration, also with missing steps at the end, for emissions without a window."""
    data = Sequences.from_list([*random_vectors(rng, num_sequences=4, longest=6, missing=0.0), np.zeros((0, 2))])
    model = NeuralDiscreteHMM(
        3,
        2,
        emission_order=0,
        emission_mean="residual" if residual else "absolute",
        width=8,
        emission_log_variance=-1.0,
    )
    model.initialize(data)
    density = model.emission(model.embedding.unsqueeze(0), model.emission.prepare(model.center.new_zeros(0)))
    means, variances = (
        density.mean[0].detach() * model.units.emission_std,
        density.variance[0].detach() * model.units.emission_std.square(),
    )
    probs = inference.predict(*model.problem(data))  # of the state one step ahead
    later = Sequences.from_list(
        [torch.cat([sequence, sequence.new_full((missing, 2), torch.nan)]) for sequence in data]
    )
    found = model.predict_next(later, steps=3 - missing, num_draws=20_000)
    for n, sequence in enumerate(data):
        base = sequence[-1] if len(sequence) else None
        moments = []
        for path in product(range(3), repeat=3):
            share = (
                probs[n, path[0]] * model.transition_probs[path[0], path[1]] * model.transition_probs[path[1], path[2]]
            )
            if not residual:
                moments.append((share, model.center + means[path[2]], variances[path[2]]))
            elif base is not None:
                moments.append(
                    (share, base + sum(means[state] for state in path), sum(variances[state] for state in path))
                )
            else:  # the first value is Gaussian on its own
                first = model.data_variance * model.first_log_variance.exp().detach()
                moments.append(
                    (
                        share,
                        model.center + sum(means[state] for state in path[1:]),
                        first + sum(variances[state] for state in path[1:]),
                    )
                )
        mean = sum(share * own for share, own, _ in moments)
        variance = sum(share * (own_variance + (own - mean).square()) for share, own, own_variance in moments)
        np.testing.assert_allclose((found.mean[n] - mean) / variance.sqrt(), [0, 0], atol=5 / 20_000**0.5)
        np.testing.assert_allclose(found.variance[n], variance, rtol=0.06)
    with pytest.raises(ValueError, match="`steps` must be a whole number of at least 1, but is 0"):
        model.predict_next(data, steps=0)


@pytest.mark.parametrize(
    "options", [{}, {"window": "lstm", "emission": "mixture"}, {"num_layers": 1, "emission": "student"}]
)
def test_a_step_of_training_is_a_step_of_adam(rng, options):
    """Fused Adam ignores strides, and some weights are not contiguous. Each must still receive its own gradient."""

    class Plain(NeuralDiscreteHMM):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=self.learning_rate, foreach=False)

    data = random_vectors(rng, num_sequences=6, longest=9)
    fused, plain = (kind(3, 2, width=8, embedding_dim=4, m_steps=3, **options) for kind in (NeuralDiscreteHMM, Plain))
    for model in (fused, plain):
        fit(model, data, max_epochs=2, tolerance=0, batch_size=3)
    assert not fused.transition.from_state.is_contiguous()
    assert_same_parameters(fused, plain, rtol=1e-6, atol=1e-8)


def test_learned_saved_and_sampled(tmp_path):
    data = MovingTargetDataModule(num_features=2, num_sequences=100, length=40)
    data.setup()
    keep = ModelCheckpoint(
        dirpath=tmp_path, filename="{epoch}", save_top_k=-1, every_n_epochs=1, save_on_train_epoch_end=True
    )

    def trained(**more) -> NeuralDiscreteHMM:
        model = NeuralDiscreteHMM(5, 2, m_steps=4, learning_rate=1e-2)
        return fit(
            model,
            data.train_sequences,
            6,
            0,
            batch_size=20,
            shuffle=True,
            callbacks=[keep],
            enable_checkpointing=True,
            **more,
        )

    model = trained()
    error = PredictionError()
    error.update(model.predict_each(data.test_sequences).values, data.test_sequences)
    assert data.bayes_error() < float(error.compute()) < 0.85
    loaded = load(tmp_path / "epoch=5.ckpt")
    assert_identical_parameters(model, loaded)
    assert torch.equal(loaded.score(data.test_sequences), model.score(data.test_sequences))
    assert_identical_parameters(model, trained(ckpt_path=str(tmp_path / "epoch=3.ckpt")))
    drawn, states = model.sample(20, 30, seed=2, return_states=True)
    assert drawn.values.shape == (600, 2)
    lengths = (drawn.values.view(20, 30, 2)[:, 1:] - drawn.values.view(20, 30, 2)[:, :-1]).norm(dim=2)
    assert 0.5 < float(lengths.mean()) < 1.8  # steps of about the length of those in the data
    assert set(states.values.tolist()) <= set(range(5))


def test_bad_options_are_said():
    with pytest.raises(ValueError, match="`num_features` must be given"):
        NeuralDiscreteHMM(3)
    with pytest.raises(ValueError, match="`emission_order` must be a whole number of at least 0, but is -1"):
        NeuralDiscreteHMM(3, 2, emission_order=-1)
