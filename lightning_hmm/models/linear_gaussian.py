"""The linear-Gaussian state-space model, trained by exact EM: a neural HMM of depth 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lightning_hmm.distributions import Distribution, GaussianState, LinearGaussianEmission, LinearGaussianTransition, Moments
from lightning_hmm.distributions.gaussian import data_location
from lightning_hmm.inference import kalman
from lightning_hmm.metrics import LogLikelihoodPerSymbol
from lightning_hmm.models.baselines.recurrent import last_seen
from lightning_hmm.models.prediction_errors import PredictionErrors
from lightning_hmm.models.sequence_model import check_counts
from lightning_hmm.models.training_loop import BaumWelchTraining
from lightning_hmm.random import generator
from lightning_hmm.sequences import Sequences

Observed = Literal["positions", "increments"]


class LinearGaussianHMM(BaumWelchTraining, PredictionErrors):
    r"""A hidden Markov model with a state in R^d, linear means and Gaussian noise.

    .. math:: x_0 \sim N(m, P), \quad x_t \sim N(A x_{t-1} + b, Q), \quad y_t \sim N(C x_t + c, \operatorname{diag} r)

    Inference is Kalman's and the M-step a closed form (Shumway and Stoffer, 1982), so an epoch is an EM step that never lowers the
    likelihood, whatever the batches. Missing entries are integrated out. Time O(steps d^3), all sequences in parallel.

    With ``of="increments"`` the equations describe the differences of successive observations, from the second step on. The observation at the first
    step of a sequence is Gaussian and independent of the states; its moments are those of the first observed values in the training data. Across a gap,
    an observation is the value last seen plus one increment for every step since then. `score`, `predict_each`, `predict_next` and the E-step all use this
    joint distribution. Time O(steps (d + D)^3).

    Args:
        latent_dim: d.
        num_features: D.
        of: "positions" or "increments".
        seed: of the starting values.
        discount: lambda of online EM, with an update after each batch; without it batch EM, an update after each epoch.
        sequences_per_update: online EM with several updates inside each batch.
        variance_prior: scatter that a prior adds to the noise of each feature, in units of the variance of what is described. A positive value keeps
            the variances above zero.
        frozen: any of "initial", "transition", "emission"; they keep their values.
        arithmetic: "float64".

    References:
        Shumway, Stoffer: An approach to time series smoothing and forecasting using the EM algorithm, 1982.
    """

    centre: Tensor
    scale: Tensor
    first_centre: Tensor
    first_scale: Tensor
    located: Tensor

    def __init__(
        self,
        latent_dim: int,
        num_features: int | None = None,
        of: Observed = "positions",
        seed: int = 0,
        discount: float | None = None,
        sequences_per_update: int | None = None,
        variance_prior: float = 0.0,
        frozen: Sequence[str] = (),
        arithmetic: Literal["float64"] = "float64",
    ) -> None:
        if num_features is None:
            raise ValueError("`num_features` must be given: the model is for real vectors. For symbols use another one.")
        check_counts(latent_dim=latent_dim)
        if of not in get_args(Observed):
            raise ValueError(f"`of` must be one of {', '.join(get_args(Observed))}, but is {of!r} instead.")
        if arithmetic != "float64":
            raise ValueError(f"`arithmetic` must be float64, but is {arithmetic!r} instead: covariances need its digits.")
        for name in frozen:
            if name not in ("initial", "transition", "emission"):
                raise ValueError(f"`frozen` must name initial, transition or emission, but names {name!r} instead.")
        super().__init__(
            num_symbols=None,
            num_features=num_features,
            discount=discount,
            sequences_per_update=sequences_per_update,
            frozen=frozen,
            arithmetic=arithmetic,
        )
        self.save_hyperparameters()
        self.latent_dim, self.of, self.seed = latent_dim, of, seed
        random = generator(seed, "start")

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=random)

        def zeros(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.float64)

        unit = torch.eye(latent_dim, dtype=torch.float64)
        self.initial = GaussianState(zeros(latent_dim), unit.clone())
        # EM takes long to reach slow turns from fast ones. The covariance keeps the variance of the state at about 1.
        self.transition = LinearGaussianTransition(0.9 * unit + 0.05 * draw(latent_dim, latent_dim), zeros(latent_dim), 0.2 * unit)
        self.emission = LinearGaussianEmission(draw(num_features, latent_dim) / latent_dim**0.5, zeros(num_features), zeros(num_features) + 0.1, variance_prior)
        for name, value in {"centre": 0.0, "scale": 1.0, "first_centre": 0.0, "first_scale": 1.0}.items():
            self.register_buffer(name, torch.full((num_features,), value, dtype=torch.float64))
        self.register_buffer("located", torch.tensor(False))

    @property
    def distributions(self) -> dict[str, Distribution]:
        return {"initial": self.initial, "transition": self.transition, "emission": self.emission}

    @property
    def parameters_in_units(self) -> kalman.LinearGaussian:
        """Of what is described, in units of its spread."""
        initial, transition, emission = self.initial, self.transition, self.emission
        return kalman.LinearGaussian(
            initial.mean.detach(),
            initial.cov.detach(),
            transition.matrix.detach(),
            transition.offset.detach(),
            transition.cov.detach(),
            emission.matrix.detach(),
            emission.offset.detach(),
            emission.variance.detach().diag(),
        )

    @property
    def _first_variance(self) -> Tensor | None:
        """(D,) of the observation at the first step, in units of the spread of increments; ``None`` for positions."""
        return self.first_scale / self.scale if self.of == "increments" else None

    @property
    def _joint(self) -> kalman.LinearGaussian:
        """The model of the observations themselves, in units of the spread of what is described."""
        first = self._first_variance
        return self.parameters_in_units if first is None else kalman.summed(self.parameters_in_units, first)

    def _location(self, steps: Tensor) -> Tensor:
        """(steps, D) the centre of observations at the given steps, counted from 0 at the beginning of a sequence. That of sums of increments moves."""
        return self.centre if self.of == "positions" else self.first_centre + steps.to(self.centre).unsqueeze(1) * self.centre

    def _locations(self, sequences: Sequences) -> Tensor:
        """The location of each step of the sequences."""
        return self._location(torch.arange(sequences.num_steps) - sequences.repeat_interleave(sequences.offsets[:-1]))

    def _in_units(self, sequences: Sequences) -> Sequences:
        """The observations as `_joint` describes them."""
        sequences.check(None, self.num_features)
        return sequences.with_values((sequences.values.double() - self._locations(sequences)) / self.scale.sqrt())

    def _described(self, sequences: Sequences) -> Tensor:
        """What the linear model is of: the observations or, with the step of their later end, their increments; NaN where these are not known."""
        values = sequences.values.double()
        if self.of == "positions":
            return values
        before = torch.cat([torch.full_like(values[:1], torch.nan), values[:-1]])
        before[sequences.offsets[:-1][sequences.lengths > 0].to(values.device)] = torch.nan
        return values - before

    # Questions to ask

    @torch.no_grad()
    def score(self, sequences: Any) -> Tensor:
        """(N,) the natural log-likelihood of each sequence, exact."""
        sequences = self.as_sequences(sequences)
        found = kalman.log_likelihood(self._joint, self._in_units(sequences))
        units = torch.where(sequences.observed, -0.5 * self.scale.log(), 0.0).sum(1)
        return found.index_add(0, sequences.repeat_interleave(torch.arange(len(sequences), device=units.device)), units)

    @torch.no_grad()
    def posterior(self, sequences: Any) -> kalman.Posterior:
        """Filtered and smoothed states."""
        return kalman.posterior(self._joint, self._in_units(self.as_sequences(sequences))).of_first(self.latent_dim)

    def latents(self, sequences: Any) -> Sequences:
        """(steps, d) smoothed means of the state."""
        sequences = self.as_sequences(sequences)
        return sequences.with_values(self.posterior(sequences).mean)

    decode = latents

    @torch.no_grad()
    def predict_each(self, sequences: Any) -> Sequences:
        """(steps, D) what is expected at each step from those before it."""
        sequences = self.as_sequences(sequences)
        model = self._joint
        mean = kalman.predict_next(model, self._in_units(sequences))[0]
        expected = torch.cat([mean[:1], mean[:-1]])  # row t of `mean` is about step t + 1
        expected[sequences.offsets[:-1][sequences.lengths > 0].to(mean.device)] = model.emission @ model.initial_mean + model.emission_offset
        return sequences.with_values(self._locations(sequences) + expected * self.scale.sqrt())

    @torch.no_grad()
    def predict_next(self, sequences: Any, steps: int = 1) -> Moments:
        """The observation `steps` after the end of each sequence; of one without a step, the `steps`-th of all."""
        check_counts(steps=steps)
        sequences, model = self.as_sequences(sequences), self._joint
        found = kalman.posterior(model, self._in_units(sequences))
        begun = (sequences.lengths > 0).to(self.centre.device)
        last = (sequences.offsets[1:] - 1).to(self.centre.device)[begun]
        mean, cov = model.initial_mean.repeat(len(begun), 1), model.initial_cov.repeat(len(begun), 1, 1)
        mean[begun], cov[begun] = kalman.later(model, found.filtered_mean[last], found.filtered_cov[last])
        for _ in range(steps - 1):
            mean, cov = kalman.later(model, mean, cov)
        expected, spread = kalman.emitted(model, mean, cov)
        location = self._location(sequences.lengths.to(self.centre.device) + steps - 1)
        return Moments(location + expected * self.scale.sqrt(), spread.diagonal(dim1=1, dim2=2) * self.scale)

    @torch.no_grad()
    def sample(self, num_sequences: int = 1, length: int | Sequence[int] = 100, seed: int = 0, return_states: bool = False) -> Any:
        """Draws sequences of one length or of the given lengths; with `return_states`, also the hidden paths."""
        lengths = torch.as_tensor(length).expand(num_sequences)
        if num_sequences < 0 or bool((lengths < 0).any()):
            raise ValueError(f"`num_sequences` and `length` must not be negative, but are {num_sequences} and {length} instead.")
        model, random, longest = self.parameters_in_units, torch.Generator().manual_seed(seed), int(lengths.max()) if num_sequences else 0
        noise = torch.randn(longest, num_sequences, self.latent_dim + len(self.centre), dtype=torch.float64, generator=random)
        states: list[Tensor] = []
        values: list[Tensor] = []
        factors = [torch.linalg.cholesky(cov) for cov in (model.initial_cov, model.transition_cov, model.emission_cov)]
        for t in range(longest):
            inner, outer = noise[t].split([self.latent_dim, len(self.centre)], 1)
            mean = states[-1] @ model.transition.T + model.transition_offset if t else model.initial_mean
            states.append(mean + inner @ factors[1 if t else 0].T)
            drawn = (states[-1] @ model.emission.T + model.emission_offset + outer @ factors[2].T) * self.scale.sqrt() + self.centre
            if self.of == "increments":
                drawn = values[-1] + drawn if t else self.first_centre + outer * self.first_scale.sqrt()
            values.append(drawn)
        shape = Sequences.from_lengths(self.centre.new_zeros(int(lengths.sum()), 1), lengths)
        parts = [torch.stack(part, 1) if part else self.centre.new_zeros(num_sequences, 0, 1) for part in (values, states)]
        drawn_values, drawn_states = (shape.with_values(shape.packed(part)) for part in parts)
        return (drawn_values, drawn_states) if return_states else drawn_values

    # Training

    @property
    def starts_from_data(self) -> bool:
        return not bool(self.located)

    def initialize(self, sequences: Sequences) -> None:
        """Takes the units of what is described from the data."""
        sequences.check(None, self.num_features)
        sequences = sequences.counted()
        if not bool((sequences.lengths > 1).any()):
            raise ValueError("Sequences must have at least two steps somewhere for a transition to be learned, but each has one step or none.")
        for name, value in zip(("centre", "scale"), data_location(sequences.with_values(self._described(sequences))), strict=True):
            getattr(self, name).copy_(value)
        if self.of == "increments":
            unseen = sequences.packed(last_seen(sequences.padded())[0]).isnan()
            first = sequences.with_values(sequences.values.double().where(unseen, torch.nan))
            for name, value in zip(("first_centre", "first_scale"), data_location(first), strict=True):
                getattr(self, name).copy_(value)
        self.located.fill_(True)

    def on_train_start(self) -> None:
        if not bool(self.located):
            raise ValueError(
                "Observations are in units of the training data, which a plain DataLoader does not show as a whole. "
                "Call `model.initialize(sequences)` before training, or train with a datamodule or `lightning_hmm.fit`."
            )

    @torch.no_grad()
    def _e_step(self, batch: Sequences) -> dict[str, list[Tensor]]:
        # The stored parameters are means and covariances, so their gradients are not the statistics: the smoother computes these.
        self._require_sequences(batch)
        weights = torch.ones(len(batch), dtype=torch.float64, device=self.device) if batch.weights is None else batch.weights
        self.train_likelihood.update(self.score(batch) @ weights, batch.num_observed())
        return self.statistics(batch, weights)

    @torch.no_grad()
    def statistics(self, sequences: Sequences, weights: Tensor) -> dict[str, list[Tensor]]:
        """The expected statistics of sequences with (N,) weights, by distribution and in the order of its parameters."""
        found = kalman.expected_statistics(self.parameters_in_units, self._in_units(sequences), weights, self._first_variance)
        return {
            "initial": [found.starts[-1], found.starts[:-1, :-1].contiguous()],
            "transition": [found.across, found.before, found.after],
            "emission": [found.products, found.emitters, found.squares],
        }

    # Validation, test, prediction

    def _update(self, metric: LogLikelihoodPerSymbol, batch: Sequences) -> None:
        self._require_sequences(batch)
        scores = self.score(batch)
        metric.update(scores.sum() if batch.weights is None else scores @ batch.weights, batch.num_observed())

    def predict_step(self, batch: Sequences, batch_idx: int) -> dict[str, Any]:
        """The smoothed state and what was expected at each step, and the log-likelihood of each sequence."""
        return {"latents": self.latents(batch), "predictions": self.predict_each(batch), "log_likelihood": self.score(batch)}
