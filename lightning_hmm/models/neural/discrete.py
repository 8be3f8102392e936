"""A hidden Markov model with K states whose transitions and emissions are networks of embeddings of the states."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_hmm import inference
from lightning_hmm.distributions import Moments
from lightning_hmm.distributions.densities import Family, PartialDensity
from lightning_hmm.inference import particle
from lightning_hmm.inference.evidence import Rows
from lightning_hmm.inference.operators import Dense
from lightning_hmm.inference.particle import Streams
from lightning_hmm.models.discrete import DiscreteHMM
from lightning_hmm.models.last_seen import up_to_last_seen
from lightning_hmm.models.neural.networks import (
    Activation,
    ConditionalDensity,
    DensityOptions,
    Mean,
    NetworkOptions,
    WindowKind,
    require_features,
    seeded_modules,
)
from lightning_hmm.models.neural.rollout import EmissionRollout
from lightning_hmm.models.neural.units import Observations, StandardizedObservations
from lightning_hmm.models.prediction_errors import PredictionErrors
from lightning_hmm.models.sequence_model import check_counts
from lightning_hmm.random import generator
from lightning_hmm.sequences import Sequences


class NeuralDiscreteHMM(StandardizedObservations, PredictionErrors, DiscreteHMM):
    r"""A hidden Markov model with K states, whose transitions and emissions are networks of embeddings e_k of the
    states.

    .. math:: A_i = \text{softmax}(f(e_i)), \qquad
        y_t \mid z_t = k \sim p(\cdot \mid g(e_k, y_{t-\tau_e}, \dots, y_{t-1}))

    Use it for sequences of real vectors that switch between a few regimes. It is the discrete model that the paper of
    `NeuralHMM` compares with in its Figure 1a (Tran et al., 2016). Inference is exact and needs no particles. The
    E-step is the forward-backward pass over a batch, in O(steps K^2), and the M-step is `m_steps` gradient steps on the
    expected log-likelihood of states and observations.

    Args:
        num_states: K, the number of states.
        num_features: D, the number of entries of an observation.
        emission_order: Number of past observations that the emission reads.
        emission_mean: "residual" adds g to the observation last seen, "absolute" does not.
        emission: Family of emission densities: "gaussian", "student" or "mixture" of Gaussians.
        num_components: Number of components of a mixture.
        window: How the emission reads a window: "mlp" concatenates its observations, "lstm" reads one after the other.
        embedding_dim: Number of entries of an embedding.
        num_layers: Number of layers of each network. With 1 they are linear.
        width: Units of the hidden layers and of an LSTM.
        activation: Activation of the hidden layers, "relu" or "tanh".
        emission_log_variance: Initial log-variance of emissions, in units of the variance of the data, or of its
            changes where emissions are residual.
        m_steps: Number of gradient steps for each batch.
        learning_rate: Learning rate of Adam.
        gradient_clip: Largest norm of a gradient.
        seed: Seed for the initial parameters.

    References:
        Tran, Bisk, Vaswani, Marcu, Knight: Unsupervised neural hidden Markov models, 2016.

    Example:
        >>> from lightning_hmm import NeuralDiscreteHMM, fit
        >>> values = [[0.0], [0.1], [0.0], [5.0], [5.1], [5.0], [0.0], [0.1]]
        >>> model = fit(NeuralDiscreteHMM(num_states=2, num_features=1), [values], max_epochs=2)
        >>> model.decode([values]).values.shape
        torch.Size([8])
    """

    def __init__(
        self,
        num_states: int,
        num_features: int | None = None,
        emission_order: int = 1,
        emission_mean: Mean = "residual",
        emission: Family = "gaussian",
        num_components: int = 2,
        window: WindowKind = "mlp",
        embedding_dim: int = 16,
        num_layers: int = 3,
        width: int = 32,
        activation: Activation = "relu",
        emission_log_variance: float = 0.0,
        m_steps: int = 2,
        learning_rate: float = 5e-3,
        gradient_clip: float = 5.0,
        seed: int = 0,
    ) -> None:
        features, dtype = require_features(num_features), torch.float64
        check_counts(embedding_dim=embedding_dim, m_steps=m_steps)
        for name, value in {"learning_rate": learning_rate, "gradient_clip": gradient_clip}.items():
            if not value > 0:
                raise ValueError(f"`{name}` must be positive, but is {value} instead.")
        networks = NetworkOptions(features, window, num_layers, width, activation, num_components, dtype)
        emissions = DensityOptions("emission", emission, emission_order, emission_mean, emission_log_variance)
        super().__init__(num_states=num_states, num_symbols=None, num_features=num_features)
        self.save_hyperparameters()
        self.automatic_optimization = False  # several optimizer steps for each batch
        self.m_steps = m_steps
        self.learning_rate = learning_rate
        self.gradient_clip = gradient_clip
        self.seed = seed
        with seeded_modules(seed):
            self.embedding = nn.Parameter(torch.randn(num_states, embedding_dim, dtype=dtype))
            self.transition = networks.make_mlp(embedding_dim, 0, num_states)
            past = networks.make_window(emission_order)
            head = emissions.make_head(features, num_components, torch.float32).to(dtype)
            network = networks.make_mlp(embedding_dim, past.num_outputs, head.num_outputs)
            self.emission = ConditionalDensity(past, network, head)
        self.initial = nn.Parameter(torch.zeros(num_states, dtype=dtype))
        self._make_units(emission_mean == "residual", dtype)

    # Inference

    @property
    def uses_labels(self) -> bool:
        return True

    def chain(self, restart: int, sequences: Sequences | None = None) -> tuple[Tensor, Dense]:
        transition = self.transition(self.embedding, self.transition.bias)
        return self.initial.log_softmax(0), Dense(transition.log_softmax(1))

    def evidence(self, restart: int, sequences: Sequences) -> Rows:
        return Rows(self._log_obs(self.observations(sequences)))

    def _emission(self, observations: Observations, steps: Tensor) -> PartialDensity:
        """(rows, K) densities of the steps where (T or T + 1, B) `steps` is true."""
        inputs = self.emission.window.inputs_of_each_step(observations.window_features)
        prepared = self.emission.prepare(inputs[: len(steps)][steps] if inputs.dim() > 1 else inputs)
        density: PartialDensity = self.emission(self.embedding.expand(int(steps.sum()), -1, -1), prepared)
        return density

    def _log_obs(self, observations: Observations) -> Tensor:
        """(steps, K) log p(y_t | z_t = k, y_1:t-1), packed like the values of the sequences."""
        inside = observations.inside
        targets, observed = observations.targets[inside].unsqueeze(1), observations.observed[inside].unsqueeze(1)
        rows = self._emission(observations, inside).log_prob(targets, observed)
        constant = (observations.log_units + self.first_log_prob(observations))[inside].unsqueeze(1)
        return _by_sequence(inside, rows + constant)

    @property
    def initial_probs(self) -> Tensor:
        """(K,) p(z_1)."""
        return self.chain(0)[0].detach().exp()

    @property
    def transition_probs(self) -> Tensor:
        """(K, K) p(z_t+1 = j | z_t = i)."""
        return self.chain(0)[1].log_probs.detach().exp()

    @property
    def num_free_parameters(self) -> int:
        """The number of weights of the networks, which exceeds the degrees of freedom of their densities."""
        return sum(parameter.numel() for parameter in self.parameters())

    # Predictions

    @torch.no_grad()
    def predict_each(self, sequences: Any) -> Sequences:
        """(steps, D) the mean of each observation given those before it."""
        sequences = self.as_sequences(sequences)
        observations = self.observations(sequences)
        probs = self.initial_probs.expand(sequences.num_steps, -1).clone()
        filtered = self.posterior(sequences).filtered.values
        is_later = torch.ones(sequences.num_steps, dtype=torch.bool)
        is_later[sequences.offsets[:-1][sequences.lengths > 0]] = False
        rows = torch.nonzero(is_later).flatten().to(probs.device)
        probs[rows] = filtered[rows - 1] @ self.transition_probs
        inside = observations.inside
        mean = (probs.unsqueeze(2) * _by_sequence(inside, self._emission(observations, inside).mean)).sum(1)
        base = _by_sequence(inside, observations.base[:-1][inside])
        unseen = _by_sequence(inside, observations.unseen[:-1][inside])
        return sequences.with_values(self.in_data_units(mean, base, unseen))

    @torch.no_grad()
    def predict_next(self, sequences: Any, steps: int = 1, num_draws: int = 1000) -> Moments:
        """Moments of the observation `steps` after the end of each sequence.

        One step ahead they are exact. Further ahead, `num_draws` paths of states and of the observations in between are
        drawn for each sequence. Steps at the end at which nothing is observed are drawn as well: three missing steps at
        the end and one step ahead give the same prediction as four steps ahead.
        """
        check_counts(steps=steps, num_draws=num_draws)
        seen, ahead = up_to_last_seen(self.as_sequences(sequences), steps)
        found = self._one_step_ahead(seen)
        far = torch.nonzero(ahead > 1).flatten()
        if len(far):
            drawn = self._several_steps_ahead(seen[far], ahead[far], num_draws, far.tolist())
            for moment, drawn_moment in zip(found, drawn, strict=True):
                moment[far] = drawn_moment
        return found

    def _several_steps_ahead(self, sequences: Sequences, ahead: Tensor, num_draws: int, numbers: list[int]) -> Moments:
        """Moments of the observation (N,) `ahead` steps after the end of each sequence, estimated with draws.

        The random numbers of a sequence depend on its entry of `numbers`.
        """
        streams = Streams([generator(self.seed, "next", number) for number in numbers])
        cumulative = self.transition_probs.cumsum(1)
        log_probs = inference.predict(*self.problem(sequences)).log()
        states = particle.resample(log_probs, num_draws, streams)  # (N, draws)
        run = EmissionRollout(self, self.observations(sequences), num_draws, self.emission.window.order)
        moments = torch.zeros(2, len(sequences), len(self.center), dtype=torch.float64, device=self.device)
        for step in range(1, int(ahead.max()) + 1):
            if step > 1:
                level = particle.uniform((*states.shape, 1), log_probs, streams)
                states = (cumulative[states] <= level).sum(2).clamp(max=len(cumulative) - 1)
            mean, variance, _, _ = run.emit(self.embedding[states], streams).summary(0.5)
            rows = torch.nonzero(ahead == step).flatten()
            moments[:, rows] = torch.stack([mean, variance])[:, rows]
        return Moments(*moments)

    def _one_step_ahead(self, sequences: Sequences) -> Moments:
        """Exact moments of the observation after the end of each sequence."""
        observations = self.observations(sequences)
        probs = inference.predict(*self.problem(sequences))  # (N, K)
        lengths = observations.lengths
        end = torch.arange(len(observations.base), device=lengths.device).unsqueeze(1) == lengths
        order = torch.nonzero(end)[:, 1].argsort()
        density = self._emission(observations, end)
        mean, variance = density.mean[order], density.variance[order] * self.units.emission_std.square()
        base, unseen = (part[end][order].unsqueeze(1) for part in (observations.base, observations.unseen))
        means = self.in_data_units(mean, base, unseen)
        if self.residual:
            variance = torch.where(unseen, self.first_variance, variance)
        expected = (probs.unsqueeze(2) * means).sum(1)
        deviations = means - expected.unsqueeze(1)
        return Moments(expected, (probs.unsqueeze(2) * (variance + deviations.square())).sum(1))

    def emit(self, states: Sequences, generator: torch.Generator) -> Sequences:
        nothing = Sequences.from_lengths(self.center.new_zeros(0, len(self.center)), [0] * len(states))
        path = self.embedding[states.padded().clamp(min=0)].detach()  # (N, longest, entries)
        run = EmissionRollout(self, self.observations(nothing), 1, self.emission.window.order)
        seeds = torch.randint(2**62, (len(states),), generator=generator).tolist()
        streams = Streams([torch.Generator().manual_seed(seed) for seed in seeds])
        drawn = [run.emit(path[:, t : t + 1], streams).drawn for t in range(path.shape[1])]
        nowhere = self.center.new_zeros(0, len(self.center))
        return states.with_values(states.packed(torch.cat(drawn, 1)) if drawn else nowhere)

    def predict_emission(self, state_probs: Tensor, inputs: Tensor | None = None) -> Any:
        raise NotImplementedError(
            "An emission depends on the observations before it. Use `predict_next` or `predict_each` instead."
        )

    # Training

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate, fused=self.device.type in ("cpu", "cuda"))

    def training_step(self, batch: Sequences, batch_idx: int) -> None:
        self._require_sequences(batch)
        with torch.no_grad():
            found = inference.e_step(*self.problem(batch), batch.weights)
        weights = torch.ones_like(found.log_likelihood) if batch.weights is None else batch.weights
        self.train_likelihood.update(found.log_likelihood @ weights, batch.num_observed())
        observations = self.observations(batch)
        num_steps = self._sum_over_ranks(torch.as_tensor(batch.num_observed(), device=self.device)).clamp(min=1)
        optimizer: Any = self.optimizers()
        parameters = list(self.parameters())
        for step in range(self.m_steps):
            initial, transition = self.chain(0)
            states = (found.initial * initial).sum() + (found.counts[0] * transition.log_probs).sum()
            expected = states + (found.evidence * self._log_obs(observations)).sum()
            self._set_gradients(torch.autograd.grad(-expected, parameters), num_steps)
            nn.utils.clip_grad_norm_(parameters, self.gradient_clip)
            # Lightning counts the last step only, so that `global_step` advances once per batch.
            (optimizer if step == self.m_steps - 1 else optimizer.optimizer).step()


def _by_sequence(inside: Tensor, rows: Tensor) -> Tensor:
    """Reorders rows of the steps that are (T, B) `inside` from time-major order to sequence after sequence."""
    steps = torch.nonzero(inside)  # (rows, 2)
    return rows[(steps[:, 1] * len(inside) + steps[:, 0]).argsort()]
