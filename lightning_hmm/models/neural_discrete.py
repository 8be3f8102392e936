"""A hidden Markov model with K states whose transitions and emissions are networks of vectors of the states."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_hmm import inference
from lightning_hmm.distributions import Moments
from lightning_hmm.distributions.densities import DensityHead, Family, PartialDensity
from lightning_hmm.inference import particle
from lightning_hmm.inference.evidence import Rows
from lightning_hmm.inference.operators import Dense
from lightning_hmm.inference.particle import Streams
from lightning_hmm.models.discrete import DiscreteHMM
from lightning_hmm.models.neural_networks import Activation, Window, WindowedMLP, WindowKind
from lightning_hmm.models.neural_rollout import Rollout
from lightning_hmm.models.neural_state_space import Conditional, Observations
from lightning_hmm.models.neural_units import InUnits, up_to_last_seen, window_inputs
from lightning_hmm.models.prediction_errors import PredictionErrors
from lightning_hmm.models.sequence_model import check_counts
from lightning_hmm.random import generator
from lightning_hmm.sequences import Sequences


class NeuralDiscreteHMM(InUnits, PredictionErrors, DiscreteHMM):
    r"""K states, each with a vector e_k, from which networks make its transitions and its emission.

    .. math:: A_i = \text{softmax}(f(e_i)), \qquad y_t \mid z_t = k \sim p(\cdot \mid g(e_k, y_{t-\tau_e}, \dots, y_{t-1}))

    The discrete model beside which `NeuralHMM` stands in Figure 1a of its paper (Tran et al., 2016). An E-step is the exact forward-backward pass over a
    batch, O(steps K^2); the M-step is `m_steps` gradient steps on the expected log-likelihood of states and observations.

    Args:
        num_states: K.
        num_features: D.
        emission_order: observations that an emission reads beside the state.
        emission_mean: "residual" adds g to the observation last seen, "absolute" does not.
        emission: family of its densities: "gaussian", "student" or "mixture" of `num_components` Gaussians.
        num_components: of a mixture.
        window: how observations are read: "mlp" or "lstm".
        embedding_dim: entries of e_k.
        num_layers: of each network; with 1 it is linear.
        width: units of hidden layers.
        activation: "relu" or "tanh".
        emission_log_variance: at the start, in units of the data's spread, or of its changes where the emission is residual.
        m_steps: gradient steps for each batch.
        learning_rate: of Adam.
        gradient_clip: largest norm of a gradient.
        seed: of starting values.

    References:
        Tran, Bisk, Vaswani, Marcu, Knight: Unsupervised neural hidden Markov models, 2016.
    """

    def __init__(
        self,
        num_states: int,
        num_features: int | None = None,
        emission_order: int = 1,
        emission_mean: Literal["absolute", "residual"] = "residual",
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
        if num_features is None:
            raise ValueError("`num_features` must be given: the model is for real vectors. For symbols use a DenseHMM.")
        check_counts(embedding_dim=embedding_dim, num_layers=num_layers, width=width, m_steps=m_steps, num_components=num_components)
        if emission_mean not in ("absolute", "residual"):
            raise ValueError(f"`emission_mean` must be absolute or residual, but is {emission_mean!r} instead.")
        if not isinstance(emission_order, int) or emission_order < 0:
            raise ValueError(f"`emission_order` must be a whole number of at least 0, but is {emission_order} instead.")
        for name, value in {"learning_rate": learning_rate, "gradient_clip": gradient_clip}.items():
            if not value > 0:
                raise ValueError(f"`{name}` must be positive, but is {value} instead.")
        super().__init__(num_states=num_states, num_symbols=None, num_features=num_features)
        self.save_hyperparameters()
        self.automatic_optimization = False  # several steps for each batch
        self.m_steps, self.learning_rate, self.gradient_clip, self.seed = m_steps, learning_rate, gradient_clip, seed
        dtype = torch.float64
        with torch.random.fork_rng(devices=[]):  # torch's modules draw from the global state
            torch.manual_seed(generator(seed, "start").initial_seed())
            self.embedding = nn.Parameter(torch.randn(num_states, embedding_dim, dtype=dtype))
            self.transition = WindowedMLP(embedding_dim, 0, num_states, num_layers, width, activation, dtype)
            past, head = Window(emission_order, num_features, window, width, dtype), DensityHead(emission, num_features, emission_log_variance, num_components)
            head = head.to(dtype)
            self.emission = Conditional(past, WindowedMLP(embedding_dim, past.num_outputs, head.num_outputs, num_layers, width, activation, dtype), head)
        self.initial = nn.Parameter(torch.zeros(num_states, dtype=dtype))
        self._make_units(emission_mean == "residual", dtype)

    # What the inference functions ask

    def chain(self, restart: int, sequences: Sequences | None = None) -> tuple[Tensor, Dense]:
        return self.initial.log_softmax(0), Dense(self.transition(self.embedding, self.transition.bias).log_softmax(1))

    def evidence(self, restart: int, sequences: Sequences) -> Rows:
        return Rows(self._evidence(self.observations(sequences)))

    def _emission(self, observations: Observations, steps: Tensor) -> PartialDensity:
        """(rows, K) densities, of the steps where (T or T + 1, B) `steps` is true."""
        inputs = window_inputs(self.emission.window, observations.entries)
        prepared = self.emission.prepare(inputs[: len(steps)][steps] if inputs.dim() > 1 else inputs)
        density: PartialDensity = self.emission(self.embedding.expand(int(steps.sum()), -1, -1), prepared)
        return density

    def _evidence(self, observations: Observations) -> Tensor:
        """(steps, K) packed like the values of the sequences, not like time."""
        inside = observations.inside
        rows = self._emission(observations, inside).log_prob(observations.targets[inside].unsqueeze(1), observations.observed[inside].unsqueeze(1))
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
        """All weights of the networks: more than the degrees of freedom of what they describe."""
        return sum(parameter.numel() for parameter in self.parameters())

    # Questions to ask

    @torch.no_grad()
    def predict_each(self, sequences: Any) -> Sequences:
        """(steps, D) what is expected at each step from those before it."""
        sequences = self.as_sequences(sequences)
        observations, probs = self.observations(sequences), self.initial_probs.expand(sequences.num_steps, -1).clone()
        filtered = self.posterior(sequences).filtered.values
        later = torch.ones(sequences.num_steps, dtype=torch.bool)
        later[sequences.offsets[:-1][sequences.lengths > 0]] = False
        rows = torch.nonzero(later).flatten().to(probs.device)
        probs[rows] = filtered[rows - 1] @ self.transition_probs
        inside = observations.inside
        mean = (probs.unsqueeze(2) * _by_sequence(inside, self._emission(observations, inside).mean)).sum(1)
        base, unseen = (_by_sequence(inside, part[:-1][inside]) for part in (observations.base, observations.unseen))
        return sequences.with_values(self.in_data_units(mean, base, unseen))

    @torch.no_grad()
    def predict_next(self, sequences: Any, steps: int = 1, num_draws: int = 1000) -> Moments:
        """Moments of the observation `steps` after the end of each sequence.

        One step ahead they are exact. Further ahead, `num_draws` paths of states and of the observations in between are drawn for each sequence. Steps at the
        end at which nothing is observed are drawn as well: three missing steps at the end and one step ahead are the same as four steps ahead.
        """
        check_counts(steps=steps, num_draws=num_draws)
        seen, ahead = up_to_last_seen(self.as_sequences(sequences), steps)
        found = self._predict_next(seen)
        far = torch.nonzero(ahead > 1).flatten()
        if len(far):
            for moment, drawn in zip(found, self._drawn_ahead(seen[far], ahead[far], num_draws, far.tolist()), strict=True):
                moment[far] = drawn
        return found

    def _drawn_ahead(self, sequences: Sequences, ahead: Tensor, num_draws: int, numbers: list[int]) -> Moments:
        """Moments of the observation (N,) `ahead` steps after the end of each sequence, from draws. `numbers` determine the random numbers."""
        streams = Streams([generator(self.seed, "next", number) for number in numbers])
        cumulative = self.transition_probs.cumsum(1)
        log_probs = inference.predict(*self.problem(sequences)).log()
        states = particle.resample(log_probs, num_draws, streams)  # (N, draws)
        run = Rollout.following(self, self.observations(sequences), self.embedding[states], max(self.emission.window.order, 1))
        moments = torch.zeros(2, len(sequences), len(self.centre), dtype=torch.float64, device=self.device)
        for step in range(1, int(ahead.max()) + 1):
            if step > 1:
                level = particle.uniform((*states.shape, 1), log_probs, streams)
                states = (cumulative[states] <= level).sum(2).clamp(max=len(cumulative) - 1)
                run.states = self.embedding[states]
            mean, variance, _, _ = run.summary(run.emit(streams), 0.5)
            rows = torch.nonzero(ahead == step).flatten()
            moments[:, rows] = torch.stack([mean, variance])[:, rows]
        return Moments(*moments)

    def _predict_next(self, sequences: Sequences) -> Moments:
        """Moments of the observation after the end of each sequence, exact."""
        observations = self.observations(sequences)
        probs = inference.predict(*self.problem(sequences))  # (N, K)
        lengths = observations.lengths
        end = torch.arange(len(observations.base), device=lengths.device).unsqueeze(1) == lengths
        order = torch.nonzero(end)[:, 1].argsort()
        density = self._emission(observations, end)
        mean, variance = density.mean[order], density.variance[order] * self.units.emitted.square()
        base, unseen = (part[end][order] for part in (observations.base, observations.unseen))
        means = self.in_data_units(mean, base.unsqueeze(1), unseen.unsqueeze(1))
        if self.residual:
            variance = torch.where(unseen.unsqueeze(1), self.units.scale.square() * self.first_log_variance.exp(), variance)
        expected = (probs.unsqueeze(2) * means).sum(1)
        return Moments(expected, (probs.unsqueeze(2) * (variance + (means - expected.unsqueeze(1)).square())).sum(1))

    def emit(self, states: Sequences, generator: torch.Generator) -> Sequences:
        nothing = Sequences.from_lengths(self.centre.new_zeros(0, len(self.centre)), [0] * len(states))
        path = self.embedding[states.padded().clamp(min=0)].detach()  # (N, longest, entries)
        run = Rollout.following(self, self.observations(nothing), path[:, :1], max(self.emission.window.order, 1))
        streams = Streams([torch.Generator().manual_seed(seed) for seed in torch.randint(2**62, (len(states),), generator=generator).tolist()])
        drawn = []
        for t in range(path.shape[1]):
            run.states = path[:, t : t + 1]
            drawn.append(run.emit(streams).drawn)
        return states.with_values(states.packed(torch.cat(drawn, 1)) if drawn else self.centre.new_zeros(0, len(self.centre)))

    def predict_emission(self, state_probs: Tensor) -> Any:
        raise NotImplementedError("An emission depends on the observations before it: use `predict_next` or `predict_each`.")

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
            expected = (found.initial * initial).sum() + (found.counts[0] * transition.log_probs).sum() + (found.evidence * self._evidence(observations)).sum()
            self._set_gradients(torch.autograd.grad(-expected, parameters), num_steps)
            nn.utils.clip_grad_norm_(parameters, self.gradient_clip)
            # Lightning counts the last of them.
            (optimizer if step == self.m_steps - 1 else optimizer.optimizer).step()


def _by_sequence(inside: Tensor, rows: Tensor) -> Tensor:
    """Rows of the steps that are (T, B) inside, in order of time, as they are packed: sequence after sequence."""
    steps = torch.nonzero(inside)  # (rows, 2)
    return rows[(steps[:, 1] * len(inside) + steps[:, 0]).argsort()]
