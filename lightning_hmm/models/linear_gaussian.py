"""The linear-Gaussian state-space model, trained by exact EM: a neural HMM of depth 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_hmm.distributions.gaussian import data_location
from lightning_hmm.inference import kalman
from lightning_hmm.loading import generator
from lightning_hmm.metrics import LogLikelihoodPerSymbol
from lightning_hmm.models.baselines.recurrent import last_seen
from lightning_hmm.models.prediction_errors import PredictionErrors
from lightning_hmm.models.sequence_model import check_counts
from lightning_hmm.models.standard import GaussianPrediction
from lightning_hmm.sequences import Sequences

Observed = Literal["positions", "increments"]


class LinearGaussianHMM(PredictionErrors):
    r"""A hidden Markov model with a state in R^d, linear means and Gaussian noise.

    .. math:: x_0 \sim N(m, P), \quad x_t \sim N(A x_{t-1} + b, Q), \quad y_t \sim N(C x_t + c, \operatorname{diag} r)

    Inference is Kalman's and the M-step a closed form (Shumway and Stoffer, 1982), so an epoch is an EM step that never lowers the
    likelihood, whatever the batches. With ``of="increments"`` it is the differences of successive observations that are described, where both are
    observed; the first observation, and the first after a gap, then are Gaussian on their own. Missing entries are integrated out.
    Time O(steps d^3), all sequences side by side.

    Args:
        latent_dim: d.
        num_features: D.
        of: "positions" or "increments".
        seed: of the starting values.
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
        self, latent_dim: int, num_features: int | None = None, of: Observed = "positions", seed: int = 0, arithmetic: Literal["float64"] = "float64"
    ) -> None:
        if num_features is None:
            raise ValueError("`num_features` must be given: the model is for real vectors. For symbols use another one.")
        check_counts(latent_dim=latent_dim)
        if of not in get_args(Observed):
            raise ValueError(f"`of` must be one of {', '.join(get_args(Observed))}, but is {of!r} instead.")
        if arithmetic != "float64":
            raise ValueError(f"`arithmetic` must be float64, but is {arithmetic!r} instead: covariances need its digits.")
        super().__init__(num_symbols=None, num_features=num_features, arithmetic=arithmetic)
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.latent_dim, self.of, self.seed = latent_dim, of, seed
        random = generator(seed, "start")

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, dtype=torch.float64, generator=random)

        unit = torch.eye(latent_dim, dtype=torch.float64)
        start = kalman.LinearGaussian(
            initial_mean=torch.zeros(latent_dim, dtype=torch.float64),
            initial_cov=unit,
            transition=0.9 * unit + 0.05 * draw(latent_dim, latent_dim),  # slow: EM takes long to get there from fast turns
            transition_offset=torch.zeros(latent_dim, dtype=torch.float64),
            transition_cov=0.2 * unit,  # so that the variance stays about 1
            emission=draw(num_features, latent_dim) / latent_dim**0.5,
            emission_offset=torch.zeros(num_features, dtype=torch.float64),
            emission_cov=0.1 * torch.eye(num_features, dtype=torch.float64),
        )
        self.linear = nn.ParameterDict(start._asdict())
        for name, value in {"centre": 0.0, "scale": 1.0, "first_centre": 0.0, "first_scale": 1.0}.items():
            self.register_buffer(name, torch.full((num_features,), value, dtype=torch.float64))
        self.register_buffer("located", torch.tensor(False))
        self._statistics: kalman.Statistics | None = None

    @property
    def parameters_in_units(self) -> kalman.LinearGaussian:
        """Of what is described, in units of its spread."""
        return kalman.LinearGaussian(**{name: value.detach() for name, value in self.linear.items()})

    def _described(self, sequences: Any) -> Sequences:
        """What the linear model is of, in units of its spread; increments have the step of their later end, and the first is missing."""
        sequences = self.as_sequences(sequences)
        sequences.check(None, self.num_features)
        return sequences.with_values((self._raw(sequences) - self.centre) / self.scale.sqrt())

    def _raw(self, sequences: Sequences) -> Tensor:
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
        described = self._described(sequences)
        found = kalman.log_likelihood(self.parameters_in_units, described)
        units = torch.where(described.observed, -0.5 * self.scale.log(), 0.0).sum(1)
        if self.of == "increments":
            alone = sequences.observed & ~described.observed  # the first of a feature, or the first after a gap
            density = torch.distributions.Normal(self.first_centre, self.first_scale.sqrt()).log_prob(sequences.values.double().nan_to_num())
            units = units + torch.where(alone, density, 0.0).sum(1)
        return found.index_add(0, sequences.repeat_interleave(torch.arange(len(sequences), device=units.device)), units)

    @torch.no_grad()
    def posterior(self, sequences: Any) -> kalman.Posterior:
        """Filtered and smoothed states."""
        return kalman.posterior(self.parameters_in_units, self._described(sequences))

    def latents(self, sequences: Any) -> Sequences:
        """(steps, d) smoothed means of the state."""
        sequences = self.as_sequences(sequences)
        return sequences.with_values(self.posterior(sequences).mean)

    decode = latents

    @torch.no_grad()
    def predict_each(self, sequences: Any) -> Sequences:
        """(steps, D) what is expected at each step from those before it."""
        sequences = self.as_sequences(sequences)
        mean = kalman.predict_next(self.parameters_in_units, self._described(sequences))[0] * self.scale.sqrt() + self.centre
        first = sequences.offsets[:-1][sequences.lengths > 0].to(mean.device)
        late = torch.cat([mean[:1], mean[:-1]])  # what is said at one step is about the next
        model = self.parameters_in_units
        late[first] = (model.emission @ model.initial_mean + model.emission_offset) * self.scale.sqrt() + self.centre
        if self.of == "positions":
            return sequences.with_values(late)
        base = sequences.packed(last_seen(sequences.padded())[0])
        return sequences.with_values(torch.where(base.isnan(), self.first_centre, base + late))

    @torch.no_grad()
    def predict_next(self, sequences: Any, steps: int = 1) -> GaussianPrediction:
        """The observation `steps` after the end of each sequence; of one without a step, the `steps`-th of all."""
        check_counts(steps=steps)
        sequences, model = self.as_sequences(sequences), self.parameters_in_units
        found = self.posterior(sequences)
        begun = (sequences.lengths > 0).to(self.centre.device)
        last = (sequences.offsets[1:] - 1).to(self.centre.device)[begun]
        mean, cov = model.initial_mean.repeat(len(begun), 1), model.initial_cov.repeat(len(begun), 1, 1)
        mean[begun], cov[begun] = kalman.later(model, found.filtered_mean[last], found.filtered_cov[last])
        # Increments add up: of their sum, the moments, and the covariance of the state with it.
        total, variance, shared = mean.new_zeros(()), mean.new_zeros(()), mean.new_zeros(len(begun), self.latent_dim, len(self.centre))
        for step in range(steps):
            if step > 0:
                mean, cov = kalman.later(model, mean, cov)
            own_mean, own_cov = kalman.emitted(model, mean, cov)
            own = own_cov.diagonal(dim1=1, dim2=2)
            if self.of == "positions":
                total, variance = own_mean, own
                continue
            shared = model.transition @ shared
            total, variance = total + own_mean, variance + own + 2 * (model.emission @ shared).diagonal(dim1=1, dim2=2)
            shared = shared + cov @ model.emission.T
        variance = variance * self.scale
        if self.of == "positions":
            return GaussianPrediction(total * self.scale.sqrt() + self.centre, variance)
        total = total * self.scale.sqrt() + steps * self.centre
        longer = torch.cat([sequences.padded(), self.centre.new_full((len(sequences), 1, len(self.centre)), torch.nan)], 1)
        base = last_seen(longer)[0][torch.arange(len(sequences)), sequences.lengths]
        return GaussianPrediction(torch.where(base.isnan(), self.first_centre, base + total), torch.where(base.isnan(), self.first_scale, variance))

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

    def initialise(self, sequences: Sequences) -> None:
        """Takes the units of what is described from the data."""
        sequences.check(None, self.num_features)
        if not bool((sequences.lengths > 1).any()):
            raise ValueError("Sequences must have at least two steps somewhere for a transition to be learned, but each has one step or none.")
        described = sequences.with_values(self._raw(sequences))
        for name, value in zip(("centre", "scale"), data_location(described), strict=True):
            getattr(self, name).copy_(value)
        if self.of == "increments":
            alone = sequences.with_values(torch.where(sequences.observed & ~described.observed, sequences.values.double(), torch.nan))
            for name, value in zip(("first_centre", "first_scale"), data_location(alone), strict=True):
                getattr(self, name).copy_(value)
        self.located.fill_(True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)  # moves nothing: it counts EM steps, and without a count no checkpoint would be written

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._statistics = None  # an interrupted run may have left something

    def on_train_start(self) -> None:
        if not bool(self.located):
            raise ValueError(
                "Observations are in units of the training data, which a plain DataLoader does not show as a whole. "
                "Call `model.initialise(sequences)` before training, or train with a datamodule or `lightning_hmm.fit`."
            )

    @torch.no_grad()
    def training_step(self, batch: Sequences, batch_idx: int) -> None:
        self._require_sequences(batch)
        weights = torch.ones(len(batch), dtype=torch.float64, device=self.device) if batch.weights is None else batch.weights
        self.train_likelihood.update(self.score(batch) @ weights, batch.num_observed())
        found = kalman.expected_statistics(self.parameters_in_units, self._described(batch), weights)
        if self._statistics is not None:
            found = kalman.Statistics(*(old + new for old, new in zip(self._statistics, found, strict=True)))
        self._statistics = found
        if self.trainer.is_last_batch:
            totals = kalman.Statistics(*map(self._sum_over_ranks, found))
            self._statistics = None
            for name, value in kalman.maximised(self.parameters_in_units, totals)._asdict().items():
                self.linear[name].copy_(value)
            optimizer: Any = self.optimizers()
            optimizer.step()

    # Validation, test, prediction

    def _update(self, metric: LogLikelihoodPerSymbol, batch: Sequences) -> None:
        self._require_sequences(batch)
        scores = self.score(batch)
        metric.update(scores.sum() if batch.weights is None else scores @ batch.weights, batch.num_observed())

    def predict_step(self, batch: Sequences, batch_idx: int) -> dict[str, Any]:
        """The smoothed state and what was expected at each step, and the log-likelihood of each sequence."""
        return {"latents": self.latents(batch), "predictions": self.predict_each(batch), "log_likelihood": self.score(batch)}
