"""Recurrent networks against their equations, written out step by step."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from datamodules import MovingTargetDataModule, ToyMachineDataModule
from lightning_hmm import Sequences, fit
from lightning_hmm.metrics import PredictionError
from lightning_hmm.models.baselines import RecurrentNet, persistence, recurrent
from tests.helpers import assert_same_parameters, random_symbols, random_vectors

EXACT = {"arithmetic": "float64"}


def cell_step(
    kind: str, weights: dict[str, Tensor], layer: int, x: Tensor, h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    """One step of one layer, from the equations of the cell."""
    from_input = weights[f"weight_ih_l{layer}"] @ x + weights[f"bias_ih_l{layer}"]
    from_state = weights[f"weight_hh_l{layer}"] @ h + weights[f"bias_hh_l{layer}"]
    if kind == "rnn":
        return (from_input + from_state).tanh(), c
    if kind == "gru":
        (reset_i, update_i, new_i), (reset_h, update_h, new_h) = from_input.chunk(3), from_state.chunk(3)
        update = (update_i + update_h).sigmoid()
        return (1 - update) * (new_i + (reset_i + reset_h).sigmoid() * new_h).tanh() + update * h, c
    enter, forget, cell, leave = (from_input + from_state).chunk(4)
    c = forget.sigmoid() * c + enter.sigmoid() * cell.tanh()
    return leave.sigmoid() * c.tanh(), c


def written_out(model: RecurrentNet, sequence: Tensor) -> tuple[Tensor, Tensor]:
    """(T, V or D) predictions and (T,) log-probabilities, one sequence and one step at a time."""
    kind, layers, size = type(model.cell).__name__.lower(), model.cell.num_layers, model.cell.hidden_size
    weights = dict(model.cell.named_parameters())
    state = [(torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)) for _ in range(layers)]
    width = model.num_symbols or model.num_features
    last = torch.full((width,), torch.nan, dtype=torch.float64)
    seen_just_now = torch.zeros(width, dtype=torch.float64)
    before, predictions, log_probs = -1, [], []
    for value in sequence:
        if model.num_symbols:
            x = model.embedding.weight[before if before >= 0 else model.num_symbols]
        else:
            standard = ((last - model.center) / model.data_variance.sqrt()).nan_to_num(nan=0.0)
            x = torch.cat([standard, seen_just_now])
        for layer in range(layers):
            state[layer] = cell_step(kind, weights, layer, x, *state[layer])
            x = state[layer][0]
        for layer in model.head:
            x = layer.weight @ x + layer.bias if isinstance(layer, nn.Linear) else x.clamp(min=0)
        if model.num_symbols:
            probs = x.exp() / x.exp().sum()
            predictions.append(probs)
            log_probs.append(probs[value].log() if value >= 0 else torch.zeros((), dtype=torch.float64))
            before = int(value)
        else:
            mean = model.center + model.data_variance.sqrt() * (x + standard if model.residual else x)
            predictions.append(mean)
            variance = (
                model.data_variance * torch.where(last.isnan(), model.log_variance[0], model.log_variance[1]).exp()
            )
            density = torch.distributions.Normal(mean, variance.sqrt()).log_prob(value.nan_to_num())
            seen_just_now = (~value.isnan()).double()
            log_probs.append((density * seen_just_now).sum())
            last = torch.where(value.isnan(), last, value)
    return torch.stack(predictions), torch.stack(log_probs)


def vector_model(sequences: Sequences, **options) -> RecurrentNet:
    model = RecurrentNet(**{"hidden_size": 4, "num_features": 2, **EXACT, **options})
    model.initialize(sequences)
    nn.init.normal_(model.log_variance)
    return model


@pytest.mark.parametrize("cell", ["rnn", "lstm", "gru"])
@pytest.mark.parametrize("kind", ["symbols", "vectors", "residual"])
def test_the_equations(rng, cell, kind):
    """Ragged batches with missing values, in pieces of three steps, against one sequence and one step at a time.

    The model is in training mode and has dropout, which must be off in evaluation and on again afterwards.
    """
    if kind == "symbols":
        data, longer = random_symbols(rng, num_sequences=6, missing=0.2), torch.tensor([-1])
        model = RecurrentNet(4, num_symbols=5, cell=cell, num_layers=2, dropout=0.5, **EXACT)
    else:
        data, longer = (
            random_vectors(rng, num_sequences=6, missing=0.2),
            torch.full((1, 2), torch.nan, dtype=torch.float64),
        )
        model = vector_model(data, cell=cell, num_layers=2, dropout=0.5, residual=kind == "residual")
    expected = [written_out(model, sequence) for sequence in data if len(sequence)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrent, "_AT_ONCE", 3 * len(data))
        torch.testing.assert_close(
            model.predict_each(data).values,
            torch.cat([predictions for predictions, _ in expected]).detach(),
            rtol=1e-10,
            atol=1e-12,
        )
        scores = torch.stack([log_probs.sum() for _, log_probs in expected]).detach()
        torch.testing.assert_close(model.score(data)[data.lengths > 0], scores, rtol=1e-10, atol=1e-12)
    assert (model.score(data)[data.lengths == 0] == 0).all()
    assert model.training
    assert model.dropout.training
    following = model.predict_next(data)
    mean = following if kind == "symbols" else following.mean
    torch.testing.assert_close(
        mean, torch.stack([written_out(model, torch.cat([sequence, longer]))[0][-1] for sequence in data]).detach()
    )
    if kind != "symbols":
        unseen = torch.stack([~(~sequence.isnan()).any(0) for sequence in data])
        torch.testing.assert_close(
            following.variance,
            model.data_variance * torch.where(unseen, model.log_variance[0], model.log_variance[1]).detach().exp(),
        )


def test_bits_of_a_fixed_model_by_hand():
    """The cost of each symbol is its probability under a head without input, also at the start and after a gap."""
    model = RecurrentNet(3, num_symbols=3, learning_rate=1e-30, **EXACT)
    probs = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    with torch.no_grad():
        model.head[0].weight.zero_()
        model.head[0].bias.copy_(probs.log())
    data = Sequences.from_list([[0, 1, -1, 2], [0], []], [1.0, 2.0, 1.0])
    torch.testing.assert_close(model.score(data) / -math.log(2), torch.tensor([5.0, 1.0, 0.0], dtype=torch.float64))
    metrics = fit(model, data, 1, 0, val_sequences=data).trainer.callback_metrics
    for part in ("train", "val"):
        assert float(metrics[f"{part}/bits_per_symbol"]) == pytest.approx(7 / 5, rel=1e-12)


def test_truncated_gradients_with_carried_state(rng):
    """One epoch against a loop that cuts the graph by hand: the state continues, and the gradient does not."""
    data = Sequences.from_list([rng.integers(0, 5, n) for n in (11, 4, 8)], [1.0, 2.0, 0.5])
    options = {"hidden_size": 4, "num_symbols": 5, "bptt_steps": 3, "learning_rate": 0.01, **EXACT}
    trained, model = fit(RecurrentNet(**options), data, 2, 0), RecurrentNet(**options)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(2):
        states = [None] * len(data)
        for first in range(0, 11, 3):
            loss, share = 0.0, 0.0
            for n, (sequence, weight) in enumerate(zip(data, data.weights, strict=True)):
                piece = sequence[first : first + 3]
                if len(piece):
                    late = torch.cat([torch.tensor([5]), sequence])[first : first + len(piece)]
                    hidden, (h, c) = model.cell(model.embedding(late), states[n])
                    states[n] = (h.detach(), c.detach())
                    loss = loss + weight * nn.functional.cross_entropy(model.head(hidden), piece, reduction="sum")
                    share += weight * len(piece)
            optimizer.zero_grad()
            (loss / share).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
    assert_same_parameters(trained, model)
    assert (trained.head[0].bias - RecurrentNet(**options).head[0].bias).abs().max() > 1e-3  # it moved


def test_it_learns_the_toy_machine():
    """The answer depends on a symbol five steps back, which no smaller context tells."""
    data = ToyMachineDataModule(k=2, val_length=2000)
    data.setup()
    model = fit(
        RecurrentNet(24, num_symbols=data.num_symbols, bptt_steps=50, learning_rate=0.01), data.train_sequences, 25, 0
    )
    bits = -float(model.score(data.val_sequences).sum()) / data.val_sequences.num_steps / math.log(2)
    without_memory = data.optimal_bits + 1 / 6  # one bit more for each answer
    assert data.exact_bits("val") - 0.01 < bits < (data.optimal_bits + without_memory) / 2


@pytest.mark.parametrize("residual", [False, True])
def test_it_beats_persistence_on_moving_targets(residual):
    data = MovingTargetDataModule(num_features=2, num_sequences=120)
    data.setup()
    model = RecurrentNet(8, num_features=2, cell="gru", residual=residual, learning_rate=0.01)
    fit(model, data.train_sequences, 15, 0, batch_size=16, shuffle=True)
    error, standing_still = PredictionError(), PredictionError()
    error.update(model.predict_each(data.test_sequences).values, data.test_sequences)
    standing_still.update(persistence(data.test_sequences).values, data.test_sequences)
    assert float(standing_still.compute()) == pytest.approx(1, rel=1e-12)
    assert data.bayes_error() < float(error.compute()) < 0.85


def test_persistence_waits_for_what_is_missing():
    nan = math.nan
    data = Sequences.from_list([[[nan, 1.0], [2.0, nan], [nan, nan], [3.0, 4.0]], [[5.0, 6.0]]])
    expected = [[9.0, 9.0], [9.0, 1.0], [2.0, 1.0], [2.0, 1.0], [9.0, 9.0]]
    np.testing.assert_array_equal(persistence(data, start=9.0).values, expected)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "One of `num_symbols` and `num_features` must be given, but they are None and None"),
        ({"num_symbols": 3, "hidden_size": 0}, "`hidden_size` must be a whole number of at least 1, but is 0"),
        ({"num_symbols": 3, "cell": "transformer"}, "`cell` must be one of rnn, lstm, gru"),
        ({"num_symbols": 3, "residual": True}, "symbols have no differences"),
        ({"num_symbols": 3, "dropout": 1.0}, r"`dropout` must be at least 0 and below 1, but is 1\.0"),
        ({"num_symbols": 3, "learning_rate": 0.0}, r"`learning_rate` must be positive, but is 0\.0"),
    ],
)
def test_bad_options_are_said(options, said):
    with pytest.raises(ValueError, match=said):
        RecurrentNet(**{"hidden_size": 2, **options})


def test_bad_data_are_said(rng):
    with pytest.raises(ValueError, match="Symbols must be 0 to 2"):
        RecurrentNet(2, num_symbols=3).score([[0, 3]])
    with pytest.raises(ValueError, match="Vectors are standardized with the mean and variance of the training set"):
        RecurrentNet(2, num_features=2).on_train_start()
    with pytest.raises(ValueError, match="`precision` must be that of the network's parameters, but is float64"):
        fit(RecurrentNet(2, num_symbols=5), random_symbols(rng), 1, precision=64)
