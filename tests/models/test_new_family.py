"""A family that the core has never heard of, in fifty lines: Poisson counts, EM included."""

from __future__ import annotations

import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

import lightning_hmm
from lightning_hmm import BaumWelchHMM, Sequences, fit
from lightning_hmm.distributions import CategoricalRows, Distribution
from lightning_hmm.inference import dense
from lightning_hmm.optim import BaumWelch


class Poisson(Distribution):
    """log p(y) = y eta - a - log y!, with eta = log rate and a = rate: dL/d eta = sum of y, -dL/d a = visits."""

    def __init__(self, restarts: int, num_states: int) -> None:
        super().__init__()
        self.log_rate = nn.Parameter(torch.linspace(0, 2, num_states, dtype=torch.float64).repeat(restarts, 1))
        self.rate = nn.Parameter(self.log_rate.detach().exp())

    def maximise(self, statistics: list[Tensor], share: Tensor | float = 1.0) -> Tensor:
        total, visits = statistics[0], -statistics[1]
        self.rate.copy_(total / visits)
        self.log_rate.copy_(self.rate.log())
        return torch.zeros(())

    def log_prior(self) -> Tensor:
        return self.rate.detach().new_zeros(len(self.rate))

    def num_free_parameters(self, restart: int) -> int:
        return self.rate.shape[1]


class PoissonHMM(BaumWelchHMM):
    def __init__(self, num_states: int, num_features: int = 1, seed: int = 0, restarts: int = 1) -> None:
        super().__init__(num_states=num_states, num_symbols=None, num_features=num_features, restarts=restarts)
        self.save_hyperparameters()
        self.initial = CategoricalRows(restarts, num_states, name="initial")
        self.transition = CategoricalRows(restarts, num_states, num_states, name="transition")
        self.transition.randomise(torch.Generator().manual_seed(seed))
        self.emission = Poisson(restarts, num_states)

    @property
    def distributions(self) -> dict[str, Distribution]:
        return {"initial": self.initial, "transition": self.transition, "emission": self.emission}

    def chain(self, restart: int) -> tuple[Tensor, Tensor]:
        return self.initial.log_probs[restart], self.transition.log_probs[restart]

    def evidence(self, restart: int, sequences: Sequences) -> dense.Steps:
        y = sequences.values  # (steps, 1) -> (steps, K)
        return dense.Steps(y * self.emission.log_rate[restart] - self.emission.rate[restart] - torch.lgamma(y + 1))

    def emit(self, states: Sequences, generator: torch.Generator) -> Sequences:
        rate = self.emission.rate.detach()[self.chosen]
        return states.with_values(torch.poisson(rate[states.values], generator=generator)[:, None])

    def predict_emission(self, state_probs: Tensor) -> Tensor:
        return state_probs @ self.emission.rate.detach()[self.chosen]


def test_it_learns_samples_decodes_saves_and_loads(tmp_path):
    truth = PoissonHMM(2)
    truth.transition.set(torch.tensor([[0.9, 0.1], [0.2, 0.8]]))
    with torch.no_grad():
        truth.emission.maximise([torch.tensor([[2.0, 30.0]]).double(), -torch.ones(1, 2).double()])
    sequences, states = truth.sample(50, 200, seed=1, return_states=True)
    model = fit(PoissonHMM(2, restarts=2), sequences, 60, callbacks=[ModelCheckpoint(tmp_path, save_last=True)], enable_checkpointing=True)
    np.testing.assert_allclose(model.emission.rate.detach()[0], [2.0, 30.0], rtol=0.03)
    np.testing.assert_allclose(model.transition.probs[0], truth.transition.probs[0], atol=0.03)
    assert (model.decode(sequences).values == states.values).double().mean() > 0.99
    assert torch.equal(lightning_hmm.load(tmp_path / "last.ckpt").score(sequences), model.score(sequences))
    assert model.num_free_parameters == 1 + 2 + 2
    assert 2.0 < float(model.predict_next(sequences[:1])) < 30.0


def test_its_objective_never_falls():
    sequences = PoissonHMM(2).sample(5, 30, seed=2)
    model = PoissonHMM(3, seed=3)
    optimizer, scores = BaumWelch(model.distributions), []
    for _ in range(20):
        optimizer.zero_grad()
        score = dense.log_likelihood(*model.inference_arguments(sequences)).sum()
        score.neg().backward()
        optimizer.step()
        scores.append(float(score.detach()))
    assert np.diff(scores).min() > -1e-9 * sequences.num_steps
