"""The same tests for every emission family, generated from `tests.families`. A family without an entry fails."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import lightning_hmm
from lightning_hmm import Sequences, fit
from lightning_hmm.distributions import Emission
from tests.families import COMPOSED, FAMILIES, NOT_FAMILIES
from tests.table import ROWS
from tests.test_laws import Objectives

every_family = pytest.mark.parametrize("name", FAMILIES)
CONFIGS = Path(__file__).parents[1] / "configs"


def parts(emission: Any) -> list[Any]:
    """Returns an emission and the emissions that it is composed of."""
    return [part for part in emission.modules() if isinstance(part, Emission)]


def test_every_emission_has_an_entry():
    exported = [getattr(lightning_hmm, name) for name in lightning_hmm.__all__]
    families = {
        member.__name__ for member in exported if inspect.isclass(member) and issubclass(member, Emission)
    } - NOT_FAMILIES
    assert families - {"Emission"} == set(FAMILIES) | COMPOSED


@every_family
def test_the_laws_are_tested_on_a_row_of_the_table(name):
    """Among them: batches, ranks, resuming, weights, the reference backend."""
    found = [
        type(part).__name__
        for row in ROWS.values()
        for part in parts(getattr(row.make(), "emission", torch.nn.Module()))
    ]
    assert name in found


@every_family
def test_a_configuration_trains_the_family_from_the_command_line(name):
    """`test_cli.py` runs each of them."""

    def class_paths(node: Any) -> list[str]:
        if isinstance(node, dict):
            mine = [str(value) for key, value in node.items() if key == "class_path"]
            return mine + [path for value in node.values() for path in class_paths(value)]
        return [path for value in node for path in class_paths(value)] if isinstance(node, list) else []

    found = [path for file in CONFIGS.rglob("*.yaml") for path in class_paths(yaml.safe_load(file.read_text()))]
    defaults = ("lightning_hmm.StandardHMM",) if name == "Categorical" else ()
    assert any(path.rsplit(".", 1)[-1] == name or path in defaults for path in found)


@every_family
def test_em_never_decreases_the_objective_of_any_restart(name):
    family, objectives = FAMILIES[name], Objectives(FAMILIES[name].data())
    fit(family.model(restarts=2), objectives.sequences, 10, 0, callbacks=[objectives])
    gains = torch.stack(objectives.values).diff(dim=0)
    assert gains.min() > -1e-9
    assert gains[0].min() > 1e-5  # it moved at all


@every_family
def test_a_missing_step_at_the_end_does_not_change_the_likelihood(name):
    truth, sequences = FAMILIES[name].truth(), FAMILIES[name].data()
    lengths = sequences.lengths
    last = sequences.offsets[1:][lengths > 0] - 1
    values = sequences.values.clone()
    values[last] = -1 if sequences.is_discrete else torch.nan
    kept = torch.ones(sequences.num_steps, dtype=torch.bool)
    kept[last] = False
    shorter = sequences.with_steps(
        torch.nonzero(kept).flatten(), sequences.offsets - torch.cat([torch.zeros(1), (lengths > 0).cumsum(0)]).long()
    )
    torch.testing.assert_close(truth.score(sequences.with_values(values)), truth.score(shorter), rtol=1e-10, atol=1e-10)


@every_family
def test_training_with_missing_values_is_finite(name):
    sequences = FAMILIES[name].data()
    shape = sequences.values.shape[: 1 if FAMILIES[name].missing_together else None]
    hidden = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.2
    hidden = hidden.view(-1, 1).expand_as(sequences.values) if FAMILIES[name].missing_together else hidden
    missing = sequences.with_values(sequences.values.masked_fill(hidden, -1 if sequences.is_discrete else torch.nan))
    objectives = Objectives(missing)
    model = fit(FAMILIES[name].model(), missing, 5, 0, callbacks=[objectives])
    assert torch.stack(objectives.values).diff(dim=0).min() > -1e-9
    assert model.score(missing).isfinite().all()


@every_family
def test_restarts_differ_and_the_best_one_is_used(name):
    family, sequences = FAMILIES[name], FAMILIES[name].data()
    model = family.model(restarts=3)
    model.initialization = "random"
    fit(model, sequences, 2, 0)
    scores = []
    for restart in range(3):
        model.best_restart.fill_(restart)
        scores.append(float(model.score(sequences).sum()))
    assert len({round(score, 6) for score in scores}) > 1
    again = family.model(restarts=3)
    again.initialization = "random"
    assert float(fit(again, sequences, 2, 0).score(sequences).sum()) == max(scores)


def started(name: str, **options: Any) -> tuple[Any, Sequences]:
    """Returns a model with starting values from the data, and the data."""
    sequences = FAMILIES[name].data()
    model = FAMILIES[name].model(**options)
    model.initialize(sequences)
    return model, sequences


def value(model: Any, name: str) -> torch.Tensor:
    """Returns a parameter of the emission, which has the states as its first axis."""
    found: torch.Tensor = getattr(model.emission, name)
    return found.clone()


@every_family
def test_a_frozen_parameter_keeps_its_value(name):
    frozen = FAMILIES[name].frozen
    model, sequences = started(name, frozen=[frozen])
    before = value(model, frozen)
    objectives = Objectives(sequences)
    fit(model, sequences, 5, 0, callbacks=[objectives])
    torch.testing.assert_close(value(model, frozen), before, rtol=1e-12, atol=1e-12)
    assert torch.stack(objectives.values).diff(dim=0).min() > -1e-9
    assert model.num_free_parameters < FAMILIES[name].model().num_free_parameters


@every_family
def test_a_tied_parameter_is_the_same_in_all_states(name):
    tied = FAMILIES[name].tied
    model, sequences = started(name, tied=[tied])
    objectives = Objectives(sequences)
    fit(model, sequences, 5, 0, callbacks=[objectives])
    found = value(model, tied)
    torch.testing.assert_close(found, found[:1].expand_as(found), rtol=1e-12, atol=1e-12)
    assert torch.stack(objectives.values).diff(dim=0).min() > -1e-9
    assert model.num_free_parameters < FAMILIES[name].model().num_free_parameters


@every_family
def test_samples_have_the_predicted_moments(name):
    """Directions are measured from their mean direction."""
    truth, steps = FAMILIES[name].truth(), 20_000
    states = Sequences.from_lengths(torch.arange(2).repeat_interleave(steps), [1] * (2 * steps))
    inputs = torch.tensor([[0.5, -1.0]], dtype=torch.float64) if FAMILIES[name].num_inputs else None
    if inputs is not None:
        states = states.replaced(inputs=inputs.expand(2 * steps, -1))
    drawn = truth.emit(states, torch.Generator().manual_seed(0)).values.double()
    eye = torch.eye(2, dtype=torch.float64)
    predicted = truth.predict_emission(eye) if inputs is None else truth.predict_emission(eye, inputs.expand(2, -1))
    for state in range(2):
        mine = drawn[states.values == state]
        if isinstance(predicted, torch.Tensor):  # probabilities of symbols
            counts = torch.bincount(mine.long(), minlength=predicted.shape[1])
            torch.testing.assert_close(counts.double() / steps, predicted[state], rtol=0, atol=0.02)
            continue
        mean, variance = predicted.mean[state], predicted.variance[state]
        if name == "VonMises":
            mine = torch.atan2((mine - mean).sin(), (mine - mean).cos()) + mean
        error = (variance / steps).sqrt()
        assert ((mine.mean(0) - mean).abs() < 5 * error).all()
        kurtosis = ((mine - mine.mean(0)) ** 4).mean(0) / mine.var(0) ** 2
        assert ((mine.var(0) - variance).abs() < 6 * variance * (kurtosis / steps).sqrt()).all()


@every_family
def test_a_wrong_name_of_a_parameter_is_refused(name):
    for option in ("tied", "frozen"):
        with pytest.raises(ValueError, match=f"`{option}` must name parameters of a .* emission"):
            FAMILIES[name].make(**{option: ["nothing"]})
