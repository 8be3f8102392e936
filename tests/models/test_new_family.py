"""Parts that the library does not have, as a user adds them: an emission and a transition, each in one short class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from scipy import stats
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

import lightning_hmm
from lightning_hmm import HMM, BaumWelch, Sequences, fit, inference
from lightning_hmm.callbacks import Figures
from lightning_hmm.distributions import Categorical, Transition
from lightning_hmm.distributions.exponential_family import ExponentialFamily
from lightning_hmm.distributions.parameters import POSITIVE, NamedParameter
from lightning_hmm.inference.operators import Operator
from tests.helpers import assert_identical_parameters


class NegativeBinomial(ExponentialFamily):
    """Counts y with means (K, D).

    .. math:: \\log p(y) = y \\log q + r \\log(1 - q) + \\log \\binom{y + r - 1}{y}, \\qquad q = mean / (mean + r)

    The number of failures r is fixed.
    """

    products = ((0, None),)
    support = ("counts, whole numbers from 0", "Round them.")
    typical = (1.0,)
    mean = NamedParameter(POSITIVE, "(K, D) means of the best restart.")

    def __init__(self, failures: float = 2.0, prior_steps: float = 0.01, **options: Any) -> None:
        super().__init__(prior_steps, **options)
        self.failures = failures

    def blocks(self, values: Tensor) -> list[Tensor]:
        return [values]

    def log_base(self, values: Tensor) -> Tensor:
        r = torch.full_like(values, self.failures)
        return torch.lgamma(values + r) - torch.lgamma(values + 1) - torch.lgamma(r)

    def supports(self, values: Tensor) -> Tensor:
        return (values >= 0) & (values == values.floor())

    def estimate(self, sums: Tensor, visits: Tensor) -> tuple[Tensor, ...]:
        return (sums[:, :, 0] / visits,)

    def weights_of(self, *parameters: Tensor) -> Tensor:
        (mean,) = parameters
        return torch.stack([-torch.log1p(self.failures / mean), -self.failures * torch.log1p(mean / self.failures)], -2)

    def parameters_of(self, weights: Tensor) -> tuple[Tensor, ...]:
        return (self.failures / torch.expm1(-weights[..., 0, :]),)

    def moments(self) -> tuple[Tensor, Tensor]:
        return self.mean, self.mean + self.mean**2 / self.failures

    def draw(self, parameters: Sequence[Any], random: np.random.Generator) -> Any:
        return random.negative_binomial(self.failures, self.failures / (self.failures + parameters[0]))


@dataclass(frozen=True)
class Pairs(Operator):
    """Two independent chains. The state is the pair of their states, and the matrix of all pairs is never formed."""

    first: Tensor
    second: Tensor

    @property
    def num_states(self) -> int:
        return len(self.first) * len(self.second)

    def predict(self, alpha: Tensor, at: Tensor) -> Tensor:
        pairs = alpha.reshape(-1, len(self.first), len(self.second))
        return (self.first.exp().T @ pairs @ self.second.exp()).flatten(1)


class TwoChains(Transition):
    """Two independent chains, of `sizes` states."""

    def __init__(self, sizes: Sequence[int], pseudocount: float = 0.0) -> None:
        super().__init__()
        self.sizes, self.prior = list(sizes), {"pseudocount": pseudocount}

    def allocate(self, restarts: int, num_states: int) -> None:
        self._begin_allocation()
        self.first, self.second = (
            nn.Parameter(torch.zeros(restarts, size, size, dtype=torch.float64)) for size in self.sizes
        )

    def operator(self, natural: Sequence[Tensor], batch: Sequences | None) -> Pairs:
        return Pairs(*natural)

    @torch.no_grad()
    def maximize(self, statistics: Sequence[Tensor], weight: Tensor | float = 1.0) -> Tensor:
        for parameter, counts in zip(self.parameters(), statistics, strict=True):
            counts = counts + self.prior["pseudocount"] * weight
            parameter.copy_((counts / counts.sum(-1, keepdim=True)).log())
        return torch.zeros(())

    @torch.no_grad()
    def randomize(self, generator: torch.Generator) -> None:
        for parameter in self.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=generator, dtype=torch.float64).log_softmax(-1))

    @torch.no_grad()
    def set(self, probs: Any) -> None:
        for parameter, matrix in zip(self.parameters(), probs, strict=True):
            parameter.copy_(torch.as_tensor(matrix, dtype=torch.float64).log())

    def log_prior(self) -> Tensor:
        return self.prior["pseudocount"] * sum(parameter.detach().flatten(1).sum(1) for parameter in self.parameters())

    def num_free_parameters(self, restart: int) -> int:
        return sum(size * (size - 1) for size in self.sizes)

    def matrix(self, restart: int) -> Tensor:
        return torch.kron(*(parameter[restart].detach().exp() for parameter in self.parameters()))


def assert_em_never_decreases(model: HMM, sequences: Sequences, steps: int = 25) -> None:
    """Log-likelihood plus log prior, of every restart."""
    optimizer, objectives = BaumWelch(model.distributions), []
    for _ in range(steps):
        optimizer.zero_grad()
        totals = torch.stack(
            [inference.log_likelihood(*model.problem(sequences, r)).sum() for r in range(model.restarts)]
        )
        objectives.append(totals.detach() + optimizer.log_prior())
        totals.sum().neg().backward()
        optimizer.step()
    gains = torch.stack(objectives).diff(dim=0) / sequences.num_steps
    assert gains.min() > -1e-9
    assert gains[0].min() > 1e-4  # it moved at all


# An emission


@pytest.fixture
def counts() -> tuple[Sequences, Sequences]:
    """Counts of two columns, some of them missing, and the states that they were drawn from."""
    truth = HMM(2, NegativeBinomial(), num_features=2)
    truth.set_parameters(transition=[[0.95, 0.05], [0.1, 0.9]], emission={"mean": [[1.0, 4.0], [40.0, 60.0]]})
    sequences, states = truth.sample(30, 100, seed=1, return_states=True)
    missing = torch.rand(sequences.values.shape, generator=torch.Generator().manual_seed(2)) < 0.1
    return sequences.with_values(sequences.values.masked_fill(missing, torch.nan)), states


def test_the_emission_is_the_distribution_of_scipy():
    model = HMM(1, NegativeBinomial(3.5), num_features=1).set_parameters(emission={"mean": [[7.0]]})
    values = [0.0, 1.0, 5.0, 30.0, float("nan")]
    expected = stats.nbinom(3.5, 3.5 / 10.5).logpmf(values[:4]).sum()
    assert float(model.score([[[value] for value in values]])) == pytest.approx(expected, rel=1e-12)
    assert float(model.emission.mean) == pytest.approx(7.0)
    assert float(model.emission.moments()[1]) == pytest.approx(stats.nbinom(3.5, 3.5 / 10.5).var())


def test_em_of_the_emission_never_decreases(counts):
    model = HMM(3, NegativeBinomial(prior_steps=0.5), num_features=2, restarts=3, initialization="random")
    model.initialize(counts[0])
    assert_em_never_decreases(model, counts[0])


def test_the_prior_of_the_emission_moves_the_estimate(counts):
    """Towards the mean of the data in both states."""
    means = [fit(HMM(2, NegativeBinomial(prior_steps=steps)), counts[0], 3).emission.mean for steps in (1e-9, 1e9)]
    assert ((means[0][0] - means[0][1]).abs() > 5).all()
    torch.testing.assert_close(means[1][0], means[1][1], rtol=1e-3, atol=0)


def test_a_parameter_of_the_emission_can_be_tied_or_frozen(counts):
    model = fit(HMM(2, NegativeBinomial(tied=["mean"])), counts[0], 3)
    assert torch.equal(model.emission.mean[0], model.emission.mean[1])
    assert model.num_free_parameters == 1 + 2 + 2
    model = HMM(2, NegativeBinomial(frozen="mean"), num_features=2).set_parameters(emission={"mean": [[1, 2], [3, 4]]})
    before = model.emission.mean
    assert torch.equal(fit(model, counts[0], 3).emission.mean, before)


def test_the_emission_learns_samples_decodes_saves_and_loads(counts, tmp_path):
    sequences, states = counts
    saving = {"enable_checkpointing": True, "callbacks": [ModelCheckpoint(tmp_path, save_last=True)]}
    model = fit(HMM(2, NegativeBinomial(), restarts=2), sequences, 30, **saving)
    order = model.emission.mean[:, 0].argsort()
    torch.testing.assert_close(
        model.emission.mean[order], torch.tensor([[1.0, 4.0], [40.0, 60.0]]).double(), rtol=0.15, atol=0
    )
    assert (model.decode(sequences).values == order[states.values]).double().mean() > 0.98
    assert model.num_free_parameters == 1 + 2 + 4
    prediction = model.predict_next(sequences[:1], steps=1000)
    assert (prediction.mean > model.emission.mean.amin(0)).all()
    assert (prediction.mean < model.emission.mean.amax(0)).all()
    drawn, path = model.sample(40, 100, seed=3, return_states=True)
    torch.testing.assert_close(
        drawn.values[path.values == order[1]].mean(0), model.emission.mean[order[1]], rtol=0.15, atol=0
    )
    loaded = lightning_hmm.load(tmp_path / "last.ckpt")
    assert type(loaded.emission) is NegativeBinomial
    assert torch.equal(loaded.score(sequences), model.score(sequences))


def test_resuming_with_the_emission_equals_never_stopping(counts, tmp_path):
    def run(**options: Any) -> HMM:
        saving = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
        return fit(
            HMM(2, NegativeBinomial(), restarts=2),
            counts[0],
            4,
            0,
            enable_checkpointing=True,
            callbacks=[saving],
            **options,
        )

    whole = run()
    for epoch in (2, 3):
        (tmp_path / f"epoch={epoch}.ckpt").unlink()
    resumed = run(ckpt_path=str(tmp_path / "epoch=1.ckpt"))
    assert (tmp_path / "epoch=2.ckpt").exists()
    assert_identical_parameters(resumed, whole)


def test_figures_of_the_emission_are_drawn(counts, tmp_path):
    fit(HMM(2, NegativeBinomial()), counts[0], 1, logger=TensorBoardLogger(tmp_path, ""), callbacks=[Figures()])
    events = EventAccumulator(str(next(tmp_path.rglob("events*")).parent)).Reload()
    assert sorted(events.Tags()["images"]) == [
        f"figures/{name}" for name in ("convergence", "emissions", "state_usage", "transition_matrix")
    ]


# A transition


def test_the_operator_is_the_kronecker_product(rng):
    matrices = [torch.from_numpy(rng.dirichlet(np.ones(size), size)) for size in (2, 3)]
    operator = Pairs(*(matrix.log() for matrix in matrices))
    torch.testing.assert_close(operator.to_dense(torch.zeros(1, dtype=torch.int64)).exp(), torch.kron(*matrices))


def two_chains(**options: Any) -> HMM:
    return HMM(6, Categorical(0.1), TwoChains([2, 3], 0.3), num_symbols=5, **options)


def test_em_of_two_chains_never_decreases(rng):
    sequences = Sequences.from_list([rng.integers(-1, 5, n) for n in (30, 1, 12, 50)])
    model = two_chains(restarts=2, seed=4)
    assert_em_never_decreases(model, sequences)
    torch.testing.assert_close(model.transition_probs.sum(1), torch.ones(6).double())


def test_two_chains_are_the_full_model_with_their_matrix(rng, tmp_path):
    """Likelihood, posterior, the best path and prediction; and a checkpoint."""
    sequences = Sequences.from_list([rng.integers(-1, 5, n) for n in (30, 1, 12, 0)])
    model = fit(
        two_chains(), sequences, 5, 0, enable_checkpointing=True, callbacks=[ModelCheckpoint(tmp_path, save_last=True)]
    )
    full = HMM(6, num_symbols=5).set_parameters(model.initial_probs, model.transition_probs, model.emission_probs)
    torch.testing.assert_close(model.score(sequences), full.score(sequences), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        model.posterior(sequences).smoothed.values, full.posterior(sequences).smoothed.values, rtol=1e-8, atol=1e-12
    )
    torch.testing.assert_close(
        model.predict_next(sequences, 3), full.predict_next(sequences, 3), rtol=1e-10, atol=1e-12
    )
    assert model.decode(sequences).tolist() == full.decode(sequences).tolist()
    assert model.sample(3, 7).lengths.tolist() == [7, 7, 7]
    assert model.sample_posterior(sequences).lengths.tolist() == sequences.lengths.tolist()
    assert model.num_free_parameters == 5 + 2 + 6 + 24
    assert torch.equal(lightning_hmm.load(tmp_path / "last.ckpt").score(sequences), model.score(sequences))
