"""Regression emissions against scipy, least squares and enumeration-free identities."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from scipy.special import expit, log_softmax, softmax

import lightning_hmm
from lightning_hmm import HMM, Column, Gaussian, Product, Regression, Sequences, TorchEmission, fit
from lightning_hmm.cli import main

P = 2
FAMILIES = ("gaussian", "bernoulli", "poisson", "categorical")


def parameters(rng, family, states=2, columns=2):
    values = {
        "coefficients": rng.normal(size=(states, columns, P)) / 2,
        "intercept": rng.normal(size=(states, columns)),
    }
    return values | ({"variance": rng.uniform(0.5, 2.0, (states, columns))} if family == "gaussian" else {})


def new_model(family, states=2, columns=2, model_options=None, **options):
    sizes = {"num_symbols": columns} if family == "categorical" else {"num_features": columns}
    return HMM(states, Regression(family, P, **options), **sizes, **(model_options or {}))


def drawn(rng, family, lengths=(30, 1, 12), columns=2, missing=0.1):
    inputs = [rng.normal(size=(n, P)) for n in lengths]
    model = new_model(family, columns=columns).set_parameters(emission=parameters(rng, family, columns=columns))
    sequences = model.sample(inputs=inputs, seed=int(rng.integers(1000)))
    values = sequences.values.clone()
    hidden = torch.from_numpy(rng.random(values.shape) < missing)
    values[hidden] = -1 if family == "categorical" else torch.nan
    return sequences.with_values(values)


def densities(family, parameters, values, inputs):
    """(steps, K) by scipy; `parameters` are arrays."""
    scores = np.einsum("np,kdp->nkd", inputs, parameters["coefficients"]) + parameters["intercept"]
    if family == "categorical":
        logs = log_softmax(scores, -1)
        return np.stack([np.where(y < 0, 0.0, row[:, max(y, 0)]) for y, row in zip(values, logs, strict=True)])
    y = values[:, None]
    logs = {
        "gaussian": lambda: stats.norm(scores, np.sqrt(parameters.get("variance", 1.0))).logpdf(y),
        "bernoulli": lambda: stats.bernoulli(expit(scores)).logpmf(np.nan_to_num(y)),
        "poisson": lambda: stats.poisson(np.exp(scores)).logpmf(np.nan_to_num(y)),
    }[family]()
    return np.where(np.isnan(y), 0.0, logs).sum(2)


@pytest.mark.parametrize("missing", [0.0, 0.2])
@pytest.mark.parametrize("family", FAMILIES)
def test_densities_are_those_of_scipy(rng, family, missing):
    sequences, values = drawn(rng, family, missing=missing), parameters(rng, family)
    model = new_model(family).set_parameters(emission=values)
    if family == "gaussian":  # the center is a part of the representation, not of the distribution
        model.emission.set_data_stats(sequences)
    rows = model.evidence(0, sequences).rows().detach().numpy()
    expected = densities(family, values, sequences.values.numpy(), sequences.inputs.numpy())
    np.testing.assert_allclose(rows, expected, rtol=1e-10, atol=1e-10)


def objective(family, values, sequences, gamma, ridge, variance_prior, data_variance):
    """The expected log-likelihood plus the log prior as the docstring defines it."""
    with np.errstate(over="ignore"):
        rows = densities(family, values, sequences.values.numpy(), sequences.inputs.numpy())
    squares = (values["coefficients"] ** 2).sum(2)
    if family == "gaussian":
        added = variance_prior * data_variance / (2 * values["variance"])
        prior = -(ridge * squares / (2 * values["variance"])).sum() - added.sum()
    else:
        prior = -ridge / 2 * (squares.sum() + (values["intercept"] ** 2).sum())
    return (gamma * rows).sum() + prior


RESTRICTIONS = [
    ((), ()),
    (("coefficients",), ()),
    (("intercept",), ()),
    ((), ("coefficients",)),
    (("coefficients",), ("intercept",)),
]


@pytest.mark.parametrize(("tied", "frozen"), RESTRICTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_m_step_is_the_optimum_of_scipy(rng, family, tied, frozen):
    columns = 3 if family == "categorical" else 1
    sequences = drawn(rng, family, (60,), columns)
    gamma = rng.dirichlet(np.ones(2), 60) * rng.uniform(0.5, 1.5, (60, 1))
    model = new_model(family, columns=columns, coefficient_prior=0.3, tied=tied, frozen=frozen)
    before = {name: np.repeat(value[:1], 2, 0) for name, value in parameters(rng, family, 2, columns).items()}
    model.set_parameters(emission=before)
    emission = model.emission
    emission.set_data_stats(sequences)
    emission.start(sequences, [torch.from_numpy(gamma)])
    found = {name: getattr(emission, name).numpy() for name in emission.names}
    data_variance = emission.data_variance.numpy() if family == "gaussian" else None
    free = [name for name in emission.names if name not in frozen]
    shapes = {name: (1 if name in tied else 2, *before[name].shape[1:]) for name in free}

    def unpacked(x):
        values, first = dict(before), 0
        for name in free:
            size = int(np.prod(shapes[name]))
            value = x[first : first + size].reshape(shapes[name])
            values[name] = np.repeat(value, 2 // len(value), 0)
            first += size
        return values | ({"variance": np.exp(values["variance"])} if family == "gaussian" else {})

    def loss(x):
        return -objective(family, unpacked(x), sequences, gamma, 0.3, 1e-6, data_variance)

    start = np.concatenate([np.zeros(int(np.prod(shapes[name]))) for name in free])
    best = optimize.minimize(loss, start, method="BFGS", options={"gtol": 1e-7})
    reached = objective(family, found, sequences, gamma, 0.3, 1e-6, data_variance)
    assert reached >= -best.fun - 1e-8
    for name, value in unpacked(best.x).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-4)
    assert emission.num_free_parameters(0) == sum(map(np.prod, shapes.values())) * (
        2 / 3 if family == "categorical" else 1
    )


@pytest.mark.parametrize("tied", [("variance",), ("coefficients", "intercept", "variance")])
def test_tied_variances(rng, tied):
    sequences = drawn(rng, "gaussian", (60,), 1, missing=0)
    model = new_model("gaussian", columns=1, coefficient_prior=0, variance_prior=0, tied=tied)
    model.emission.set_data_stats(sequences)
    gamma = rng.dirichlet(np.ones(2), 60)
    model.emission.start(sequences, [torch.from_numpy(gamma)])
    design, y = np.c_[sequences.inputs.numpy(), np.ones(60)], sequences.values.numpy()[:, 0]
    weights = gamma if len(tied) == 1 else np.repeat(gamma.sum(1, keepdims=True), 2, 1) / 2
    solutions = [np.linalg.lstsq(design * np.sqrt(w)[:, None], y * np.sqrt(w), rcond=None)[0] for w in weights.T]
    residual = sum((w * (y - design @ b) ** 2).sum() for w, b in zip(weights.T, solutions, strict=True))
    np.testing.assert_allclose(model.emission.variance, residual / 60, rtol=1e-9)
    np.testing.assert_allclose(model.emission.coefficients[:, 0], [b[:-1] for b in solutions], rtol=1e-8)
    np.testing.assert_allclose(model.emission.intercept[:, 0], [b[-1] for b in solutions], rtol=1e-8)


def test_a_state_without_steps_keeps_its_own_coefficients(rng):
    sequences = drawn(rng, "gaussian", (60,), 1, missing=0)
    model = new_model("gaussian", columns=1, coefficient_prior=0, tied=("intercept",))
    values = parameters(rng, "gaussian", 2, 1)
    values["intercept"][:] = 0.5
    emission = model.set_parameters(emission=values).emission
    emission.set_data_stats(sequences)
    emission.start(sequences, [torch.tensor([[1.0, 0.0]]).double().expand(60, 2)])
    design, y = np.c_[sequences.inputs.numpy(), np.ones(60)], sequences.values.numpy()[:, 0]
    solution = np.linalg.lstsq(design, y, rcond=None)[0]
    np.testing.assert_allclose(emission.coefficients[:, 0], [solution[:-1], values["coefficients"][1, 0]], rtol=1e-9)
    np.testing.assert_allclose(emission.intercept[:, 0], [solution[-1]] * 2, rtol=1e-9)
    np.testing.assert_allclose(emission.variance[1], values["variance"][1], rtol=1e-12)


def test_one_state_is_least_squares_far_from_zero(rng):
    inputs = rng.normal(size=(80, P)) + 1e4
    values = inputs @ [[0.5, 1.0], [2.0, -1.0]] + 1e6 + rng.normal(size=(80, 2))
    model = fit(HMM(1, Regression("gaussian", P, 0.0, 0.0)), Sequences.from_list([values], inputs=[inputs]), 2)
    centered = inputs - inputs.mean(0)
    slopes = np.linalg.lstsq(centered, values - values.mean(0), rcond=None)[0]
    np.testing.assert_allclose(model.emission.coefficients[0], slopes.T, rtol=1e-9)
    residual = values - values.mean(0) - centered @ slopes
    np.testing.assert_allclose(model.emission.variance[0], (residual**2).mean(0), rtol=1e-8)


def test_rates_that_overflow_at_impossible_steps_do_not_disturb_the_m_step(rng):
    inputs, counts = rng.normal(size=(40, 1)), rng.poisson(1.0, (40, 1)).astype(float)
    inputs[7], gamma = 1000.0, torch.full((40, 2), 0.5).double()
    gamma[7] = torch.tensor([1.0, 0.0])
    found = []
    for kept in (np.arange(40), np.arange(40) != 7):
        emission = HMM(2, Regression("poisson", 1, 0.1), num_features=1).emission
        emission.set(coefficients=[[[0.0]], [[1.0]]], intercept=np.zeros((2, 1)))
        emission.start(Sequences.from_list([counts[kept]], inputs=[inputs[kept]]), [gamma[kept]])
        found.append(emission.coefficients)
    assert bool(found[0].isfinite().all())
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-8, atol=1e-10)


def test_a_glm_hmm_recovers_its_weights():
    """The model of Ashwood et al.

    (2022): Bernoulli choices, three states that differ in bias and in stimulus weight.
    """
    rng = np.random.default_rng(4)
    inputs = [np.c_[rng.choice([-1, -0.5, -0.25, 0.25, 0.5, 1], 400), rng.choice([-1, 1], 400)] for _ in range(15)]
    truth = HMM(3, Regression("bernoulli", P), num_features=1)
    values = {"coefficients": [[[6.0, 0.0]], [[1.0, 0.3]], [[1.0, 0.0]]], "intercept": [[0.0], [2.5], [-2.5]]}
    truth.set_parameters([1 / 3] * 3, np.full((3, 3), 0.02) + 0.94 * np.eye(3), values)
    sequences, states = truth.sample(inputs=inputs, return_states=True)
    model = fit(HMM(3, Regression("bernoulli", P), num_features=1, restarts=3), sequences, 60)
    order = [int(model.emission.coefficients[:, 0, 0].argmax())]
    order += [int(model.emission.intercept[:, 0].argmax()), int(model.emission.intercept[:, 0].argmin())]
    np.testing.assert_allclose(model.emission.coefficients[order], values["coefficients"], atol=0.6)
    np.testing.assert_allclose(model.emission.intercept[order], values["intercept"], atol=0.3)
    assert float(model.score(sequences).sum()) > float(truth.score(sequences).sum())
    assert float((model.decode(sequences).values == torch.tensor(order)[states.values]).double().mean()) > 0.75


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_and_predictions_have_the_moments_of_the_model(rng, family):
    columns, values = (3, 1)[family != "categorical"], parameters(rng, family, 1, (3, 1)[family != "categorical"])
    model = new_model(family, 1, columns).set_parameters(emission=values)
    x = rng.normal(size=P)
    sample = model.sample(inputs=[np.tile(x, (40_000, 1))]).values.numpy()
    prediction = model.predict_next(drawn(rng, family, (3,), columns), 2, inputs=np.stack([x * 0, x])[None])
    scores = values["coefficients"][0] @ x + values["intercept"][0]
    if family == "categorical":
        np.testing.assert_allclose(np.bincount(sample, minlength=3) / len(sample), softmax(scores), atol=0.01)
        np.testing.assert_allclose(prediction[0], softmax(scores), rtol=1e-12)
        return
    mean = {"gaussian": lambda s: s, "bernoulli": expit, "poisson": np.exp}[family](scores)
    variance = {"gaussian": values.get("variance", [None])[0], "bernoulli": mean * (1 - mean), "poisson": mean}[family]
    np.testing.assert_allclose(prediction.mean[0], mean, rtol=1e-12)
    np.testing.assert_allclose(prediction.variance[0], variance, rtol=1e-12)
    np.testing.assert_allclose(sample.mean(0), mean, atol=5 * np.sqrt(np.max(variance) / len(sample)))
    np.testing.assert_allclose(sample.var(0), variance, rtol=0.05)


class Laplace(torch.nn.Module):
    def __init__(self, num_states, num_columns):
        super().__init__()
        self.loc = torch.nn.Parameter(torch.randn(num_states, num_columns))

    def forward(self, values):
        return torch.distributions.Laplace(self.loc, 1.0).log_prob(values[:, None]).sum(2)

    def moments(self):
        return self.loc.detach(), torch.full_like(self.loc, 2.0)


def test_a_product_of_closed_and_iterative_parts_is_trained_as_its_parts(rng):
    """With one state, each part has the estimate that it has alone."""
    values, inputs = rng.normal(size=(50, 3)), rng.normal(size=(50, P))
    values[:, 1] = rng.poisson(np.exp(inputs[:, 0]))
    sequences = Sequences.from_list([values], inputs=[inputs])
    parts = {"a": Gaussian(), "b": Regression("poisson", P), "c": TorchEmission(Laplace, m_steps=50)}
    columns = [Column(name) for name in parts]
    model = fit(HMM(1, Product(parts), columns=columns), sequences, 3, 0)
    alone = [
        fit(HMM(1, part), sequences.with_values(sequences.values[:, [n]]), 3, 0)
        for n, part in enumerate([Gaussian(), Regression("poisson", P)])
    ]
    torch.testing.assert_close(model.emission.parts[0].mean, alone[0].emission.mean)
    torch.testing.assert_close(model.emission.parts[1].coefficients, alone[1].emission.coefficients)
    assert model.emission.parts[2].networks[0].loc.item() == pytest.approx(np.median(values[:, 2]), abs=0.1)
    assert model.predict_next(sequences, inputs=np.zeros((1, 1, P)))[1].mean.shape == (1, 1)
    assert model.num_free_parameters == 0 + 0 + 2 + 3 + 1


def test_training_from_the_command_line(rng, tmp_path, monkeypatch):
    """Short names of the parts, and input columns of a file; the checkpoint has the whole model."""
    x, w = rng.normal(size=(2, 200))
    choice = (rng.random(200) < expit(3 * x)).astype(int)
    rows = "\n".join(f"{n // 50},{c},{a},{b}" for n, (c, a, b) in enumerate(zip(choice, x, w, strict=True)))
    (tmp_path / "trials.csv").write_text(f"mouse,choice,x,w\n{rows}\n")
    (tmp_path / "config.yaml").write_text(f"""
model:
  class_path: lightning_hmm.HMM
  init_args:
    num_states: 2
    emission: {{class_path: Regression, init_args: {{family: bernoulli, inputs: [0]}}}}
    transition: {{class_path: InputDriven, init_args: {{inputs: 2}}}}
    initial: {{class_path: InputDrivenInitial, init_args: {{inputs: 2}}}}
data:
  class_path: datamodules.FileDataModule
  init_args:
    path: {tmp_path / "trials.csv"}
    sequence_column: mouse
    columns: [choice]
    input_columns: [x, w]
    kind: vectors
    data_dir: {tmp_path}
trainer:
  max_epochs: 3
  enable_progress_bar: false
  default_root_dir: {tmp_path}
""")
    monkeypatch.setattr(sys, "argv", ["lightning_hmm"])
    main(["fit", f"--config={tmp_path / 'config.yaml'}"])
    model = lightning_hmm.load(next(tmp_path.rglob("*.ckpt")))
    assert model.emission.config["init_args"].items() >= {"family": "bernoulli", "inputs": [0]}.items()
    assert model.transition.coefficients.shape == (2, 2, 2)
    assert model.initial.coefficients.shape == (2, 2)


def bernoulli(**options):
    return HMM(2, Regression("bernoulli", P, **options), num_features=1)


def binary(inputs):
    return Sequences(torch.tensor([[0.0], [1.0], [1.0]]).double(), torch.tensor([0, 3]), inputs=inputs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Regression("gamma", 1), "`family` must be one of gaussian, .*, but is 'gamma' instead"),
        (lambda: Regression("poisson", 0), "`inputs` must be the number of inputs, at least 1, .* but is 0 instead"),
        (lambda: Regression("poisson", [1, 1]), r"but is \[1, 1\] instead"),
        (lambda: Regression("poisson", 1, tied=["variance"]), "`tied` must name parameters of a Regression emission"),
        (lambda: Regression("categorical", 1, 0.0), "`coefficient_prior` must be positive for a categorical"),
        (lambda: fit(bernoulli(), binary(None)), "The emission depends on inputs, but none are given. Pass `inputs`"),
        (lambda: fit(bernoulli(), binary(torch.ones(3, 1))), "depends on 2 inputs, but each step has 1"),
        (lambda: binary(torch.tensor([[0.0], [torch.nan], [1.0]])),
         "`inputs` must be finite, but input 0 at position 1 of sequence 0 is nan instead"),
        (lambda: fit(bernoulli(), Sequences.from_list([[[0.0], [2.0]]], inputs=[[[0.0, 1.0]] * 2])),
         "the numbers 0 and 1, but column 0 at position 1 of sequence 0 is 2"),
        (lambda: fit(HMM(1, Regression("gaussian", P, 0.0)), Sequences.from_list(
            [[[0.0], [2.0], [1.0]]], inputs=[[[0.0, 1.0], [1.0, 3.0], [2.0, 5.0]]])),
         "but input 1 is a linear combination of those before it. Leave it out, or set `coefficient_prior`"),
        (lambda: bernoulli(tied=["intercept"]).set_parameters(emission={"intercept": [[0.0], [1.0]]}),
         "`intercept` must be the same for all states because it is tied"),
        (lambda: bernoulli().predict_next([[[0.0]]]), "requires those of the predicted steps. Give `inputs`"),
        (lambda: bernoulli().sample(2, 3), "The emission depends on inputs, but none are given"),
        (lambda: new_model("gaussian").set_parameters(
            emission={"coefficients": np.zeros((2, 2, P)), "intercept": np.zeros((2, 2)),
                      "variance": [[1, 1], [1, -1]]}),
         "`variance` must be positive and finite, but that of state 1, column 1 is -1"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
