"""The linear-Gaussian state-space model, trained by exact EM. It is a neural HMM whose networks are linear."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_hmm.distributions import (
    Distribution,
    GaussianState,
    LinearGaussianEmission,
    LinearGaussianTransition,
    Moments,
)
from lightning_hmm.distributions.gaussian import weighted_mean_var
from lightning_hmm.inference import kalman
from lightning_hmm.metrics import LogLikelihoodPerSymbol
from lightning_hmm.models.last_seen import last_seen
from lightning_hmm.models.prediction_errors import PredictionErrors
from lightning_hmm.models.sequence_model import check_choices, check_counts
from lightning_hmm.models.training_loop import BaumWelchTraining
from lightning_hmm.random import generator
from lightning_hmm.sequences import Sequences

Target = Literal["positions", "increments"]


class LinearGaussianHMM(BaumWelchTraining, PredictionErrors):
    r"""A hidden Markov model with a state in R^d, linear means and Gaussian noise.

    .. math:: x_0 \sim N(m, P), \quad x_t \sim N(A x_{t-1} + b, Q), \quad y_t \sim N(C x_t + c, \operatorname{diag} r)

    Use it for sequences of real vectors with a continuous state, and as an exact baseline for `NeuralHMM`. Inference is
    the Kalman filter and smoother, and the M-step has a closed form (Shumway and Stoffer, 1982). An epoch is one EM
    step, which never decreases the likelihood and does not depend on the batches. Missing entries are integrated out.
    The time is O(steps d^3), with all sequences in parallel.

    With ``target="increments"`` the equations describe the differences of successive observations, from the second step
    on. The observation at the first step of a sequence is Gaussian and independent of the states; its moments are those
    of the first observed values in the training data. Across a gap, an observation is the value last seen plus one
    increment for every step since then. `score`, `predict_each`, `predict_next` and the E-step all use this joint
    distribution. The time is O(steps (d + D)^3).

    Args:
        latent_dim: d, the number of entries of the state.
        num_features: D, the number of entries of an observation.
        target: What the equations describe: "positions", the observations themselves, or their "increments".
        seed: Seed for the initial parameters.
        discount: Discount of online EM, which updates after each batch. Batch EM, which updates after each epoch, if
            not given.
        sequences_per_update: Number of sequences per update of online EM. Several updates then run inside each batch.
        variance_prior: Scatter that the prior adds to the noise of each feature, in units of the variance of the
            target. A positive value keeps the variances above zero.
        frozen: Parts that keep their values: any of "initial", "transition" and "emission".
        arithmetic: Data type of the parameters. It must be "float64".

    References:
        Shumway, Stoffer: An approach to time series smoothing and forecasting using the EM algorithm, 1982.

    Example:
        >>> from lightning_hmm import LinearGaussianHMM, fit
        >>> values = [[0.9**t] for t in range(20)]
        >>> model = LinearGaussianHMM(latent_dim=1, num_features=1, variance_prior=0.01)
        >>> model = fit(model, [values], max_epochs=50)
        >>> round(model.predict_next([values]).mean.item(), 1)
        0.1
    """

    center: Tensor
    data_variance: Tensor
    first_center: Tensor
    first_data_variance: Tensor
    has_data_stats: Tensor

    def __init__(
        self,
        latent_dim: int,
        num_features: int | None = None,
        target: Target = "positions",
        seed: int = 0,
        discount: float | None = None,
        sequences_per_update: int | None = None,
        variance_prior: float = 0.0,
        frozen: Sequence[str] = (),
        arithmetic: Literal["float64"] = "float64",
    ) -> None:
        if num_features is None:
            raise ValueError(
                "`num_features` must be given: the model is for real vectors. For symbols use another one."
            )
        check_counts(latent_dim=latent_dim)
        check_choices(Target, target=target)
        if arithmetic != "float64":
            raise ValueError(
                f"`arithmetic` must be float64, but is {arithmetic!r} instead: covariances need its precision."
            )
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
        self.latent_dim = latent_dim
        self.target = target
        self.seed = seed
        self._make_parts(latent_dim, num_features, variance_prior)
        buffers = {"center": 0.0, "data_variance": 1.0, "first_center": 0.0, "first_data_variance": 1.0}
        for name, value in buffers.items():
            self.register_buffer(name, torch.full((num_features,), value, dtype=torch.float64))
        self.register_buffer("has_data_stats", torch.tensor(False))

    def _make_parts(self, size: int, features: int, variance_prior: float) -> None:
        random = generator(self.seed, "start")

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=random)

        def zeros(length: int) -> Tensor:
            return torch.zeros(length, dtype=torch.float64)

        unit = torch.eye(size, dtype=torch.float64)
        self.initial = GaussianState(zeros(size), unit.clone())
        # EM takes many iterations to reach slow dynamics from fast ones, so it starts from slow ones. The covariance
        # keeps the variance of the state at about 1.
        self.transition = LinearGaussianTransition(0.9 * unit + 0.05 * draw(size, size), zeros(size), 0.2 * unit)
        matrix, noise = draw(features, size) / size**0.5, zeros(features) + 0.1
        self.emission = LinearGaussianEmission(matrix, zeros(features), noise, variance_prior)

    @property
    def distributions(self) -> dict[str, Distribution]:
        return {"initial": self.initial, "transition": self.transition, "emission": self.emission}

    # Units

    @property
    def parameters_in_units(self) -> kalman.LinearGaussian:
        """The parameters of the model of the target, which is standardized with `data_variance`."""
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
        """(D,) variance of the first observation, in units of `data_variance`; ``None`` for positions."""
        return self.first_data_variance / self.data_variance if self.target == "increments" else None

    @property
    def _joint(self) -> kalman.LinearGaussian:
        """The model of the observations themselves, in units of `data_variance`."""
        first = self._first_variance
        inner = self.parameters_in_units
        return inner if first is None else kalman.cumulative_sum(inner, first)

    def _location(self, steps: Tensor) -> Tensor:
        """(steps, D) the center of observations at steps counted from 0. That of sums of increments moves with time."""
        if self.target == "positions":
            return self.center
        return self.first_center + steps.to(self.center).unsqueeze(1) * self.center

    def _locations(self, sequences: Sequences) -> Tensor:
        """The location of each step of the sequences."""
        starts = sequences.repeat_interleave(sequences.offsets[:-1])
        return self._location(torch.arange(sequences.num_steps) - starts)

    def _in_units(self, sequences: Sequences) -> Sequences:
        """The observations as `_joint` describes them."""
        sequences.check(None, self.num_features)
        centered = sequences.values.double() - self._locations(sequences)
        return sequences.with_values(centered / self.data_variance.sqrt())

    def _targets(self, sequences: Sequences) -> Tensor:
        """(steps, D) the observations, or their increments from the step before, NaN where these are not known."""
        values = sequences.values.double()
        if self.target == "positions":
            return values
        before = torch.cat([torch.full_like(values[:1], torch.nan), values[:-1]])
        before[sequences.offsets[:-1][sequences.lengths > 0].to(values.device)] = torch.nan
        return values - before

    # Inference

    @torch.no_grad()
    def score(self, sequences: Any) -> Tensor:
        """(N,) the exact natural log-likelihood of each sequence."""
        sequences = self.as_sequences(sequences)
        found = kalman.log_likelihood(self._joint, self._in_units(sequences))
        units = torch.where(sequences.observed, -0.5 * self.data_variance.log(), 0.0).sum(1)
        numbers = torch.arange(len(sequences), device=units.device)
        return found.index_add(0, sequences.repeat_interleave(numbers), units)

    @torch.no_grad()
    def posterior(self, sequences: Any) -> kalman.GaussianPosterior:
        """Filtered and smoothed states."""
        found = kalman.posterior(self._joint, self._in_units(self.as_sequences(sequences)))
        return found.of_first(self.latent_dim)

    def latents(self, sequences: Any) -> Sequences:
        """(steps, d) smoothed means of the state."""
        sequences = self.as_sequences(sequences)
        return sequences.with_values(self.posterior(sequences).mean)

    decode = latents

    @torch.no_grad()
    def predict_each(self, sequences: Any) -> Sequences:
        """(steps, D) the mean of each observation given those before it."""
        sequences = self.as_sequences(sequences)
        model = self._joint
        mean = kalman.predict_next(model, self._in_units(sequences))[0]
        expected = torch.cat([mean[:1], mean[:-1]])  # row t of `mean` is the prediction of step t + 1
        starts = sequences.offsets[:-1][sequences.lengths > 0].to(mean.device)
        expected[starts] = model.emission @ model.initial_mean + model.emission_offset
        return sequences.with_values(self._locations(sequences) + expected * self.data_variance.sqrt())

    @torch.no_grad()
    def predict_next(self, sequences: Any, steps: int = 1) -> Moments:
        """Moments of the observation `steps` after the end of each sequence, which may be empty."""
        check_counts(steps=steps)
        sequences, model = self.as_sequences(sequences), self._joint
        found = kalman.posterior(model, self._in_units(sequences))
        begun = (sequences.lengths > 0).to(self.center.device)
        last = (sequences.offsets[1:] - 1).to(self.center.device)[begun]
        mean = model.initial_mean.repeat(len(begun), 1)
        cov = model.initial_cov.repeat(len(begun), 1, 1)
        mean[begun], cov[begun] = kalman.predict_state(model, found.filtered_mean[last], found.filtered_cov[last])
        for _ in range(steps - 1):
            mean, cov = kalman.predict_state(model, mean, cov)
        expected, spread = kalman.predict_observation(model, mean, cov)
        location = self._location(sequences.lengths.to(self.center.device) + steps - 1)
        variance = spread.diagonal(dim1=1, dim2=2) * self.data_variance
        return Moments(location + expected * self.data_variance.sqrt(), variance)

    @torch.no_grad()
    def sample(
        self, num_sequences: int = 1, length: int | Sequence[int] = 100, seed: int = 0, return_states: bool = False
    ) -> Any:
        """Draws sequences of one length or of the given lengths. With `return_states` it also returns their states."""
        lengths = torch.as_tensor(length).expand(num_sequences)
        if num_sequences < 0 or bool((lengths < 0).any()):
            raise ValueError(
                f"`num_sequences` and `length` must not be negative, but are {num_sequences} and {length} instead."
            )
        values, states = self._draw(num_sequences, int(lengths.max()) if num_sequences else 0, seed)
        shape = Sequences.from_lengths(self.center.new_zeros(int(lengths.sum()), 1), lengths)
        parts = [
            torch.stack(part, 1) if part else self.center.new_zeros(num_sequences, 0, 1) for part in (values, states)
        ]
        drawn_values, drawn_states = (shape.with_values(shape.packed(part)) for part in parts)
        return (drawn_values, drawn_states) if return_states else drawn_values

    def _draw(self, num_sequences: int, longest: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:
        """For each step, (N, D) observations and (N, d) states."""
        model, random, features = self.parameters_in_units, torch.Generator().manual_seed(seed), len(self.center)
        shape = (longest, num_sequences, self.latent_dim + features)
        noise = torch.randn(shape, dtype=torch.float64, generator=random)
        factors = [torch.linalg.cholesky(cov) for cov in (model.initial_cov, model.transition_cov, model.emission_cov)]
        states: list[Tensor] = []
        values: list[Tensor] = []
        for t in range(longest):
            inner, outer = noise[t].split([self.latent_dim, features], 1)
            mean = states[-1] @ model.transition.T + model.transition_offset if t else model.initial_mean
            states.append(mean + inner @ factors[1 if t else 0].T)
            target = states[-1] @ model.emission.T + model.emission_offset + outer @ factors[2].T
            drawn = target * self.data_variance.sqrt() + self.center
            if self.target == "increments":
                first = self.first_center + outer * self.first_data_variance.sqrt()
                drawn = values[-1] + drawn if t else first
            values.append(drawn)
        return values, states

    # Training

    @property
    def starts_from_data(self) -> bool:
        return not bool(self.has_data_stats)

    def initialize(self, sequences: Sequences) -> None:
        """Sets the units of the target to those of the sequences."""
        sequences.check(None, self.num_features)
        sequences = sequences.counted()
        if not bool((sequences.lengths > 1).any()):
            raise ValueError(
                "Sequences must have at least two steps somewhere for a transition to be learned, "
                "but each has one step or none."
            )
        center, variance = weighted_mean_var(sequences.with_values(self._targets(sequences)))
        self.center.copy_(center)
        self.data_variance.copy_(variance)
        if self.target == "increments":
            unseen = sequences.packed(last_seen(sequences.padded())[0]).isnan()
            first = sequences.with_values(sequences.values.double().where(unseen, torch.nan))
            center, variance = weighted_mean_var(first)
            self.first_center.copy_(center)
            self.first_data_variance.copy_(variance)
        self.has_data_stats.fill_(True)

    def on_train_start(self) -> None:
        if not bool(self.has_data_stats):
            raise ValueError(
                "Observations are standardized with the mean and variance of the training set, which a plain "
                "`DataLoader` does not expose. Call `model.initialize(sequences)` before training, or train with a "
                "datamodule or `lightning_hmm.fit`."
            )

    @torch.no_grad()
    def _e_step(self, batch: Sequences) -> dict[str, list[Tensor]]:
        # The stored parameters are means and covariances, so their gradients are not the statistics. The smoother
        # computes these instead.
        self._require_sequences(batch)
        weights = torch.ones(len(batch), dtype=torch.float64, device=self.device)
        if batch.weights is not None:
            weights = batch.weights
        self.train_likelihood.update(self.score(batch) @ weights, batch.num_observed())
        return self.statistics(batch, weights)

    @torch.no_grad()
    def statistics(self, sequences: Sequences, weights: Tensor) -> dict[str, list[Tensor]]:
        """Expected statistics, for (N,) weights of the sequences: by distribution, in the order of its parameters."""
        in_units = self._in_units(sequences)
        found = kalman.expected_statistics(self.parameters_in_units, in_units, weights, self._first_variance)
        return {
            "initial": [found.starts[-1], found.starts[:-1, :-1].contiguous()],
            "transition": [found.across, found.before, found.after],
            "emission": [found.products, found.emitters, found.squares],
        }

    # Validation, test, prediction

    def _update_likelihood(self, metric: LogLikelihoodPerSymbol, batch: Sequences) -> None:
        self._require_sequences(batch)
        scores = self.score(batch)
        metric.update(scores.sum() if batch.weights is None else scores @ batch.weights, batch.num_observed())

    def predict_step(self, batch: Sequences, batch_idx: int) -> dict[str, Any]:
        """Smoothed states, one-step predictions and the log-likelihood of each sequence."""
        return {
            "latents": self.latents(batch),
            "predictions": self.predict_each(batch),
            "log_likelihood": self.score(batch),
        }
