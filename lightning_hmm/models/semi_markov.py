"""The hidden semi-Markov model with explicit durations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lightning_hmm.columns import Column
from lightning_hmm.distributions import Durations, Emission, Initial
from lightning_hmm.distributions.transitions.durations import DurationFamily
from lightning_hmm.models.hmm import HMM


class SemiMarkovHMM(HMM):
    r"""A hidden semi-Markov model: an `HMM` whose transitions are `Durations`.

    .. math:: z_1 \sim \pi, \quad d \mid z = k \sim p_k(d), \quad z' \mid z = k \sim J_k, \quad y_t \mid z_t = k \sim
        p(\cdot \mid \theta_k)

    Each state k has a distribution :math:`p_k(d)` of the number of steps d = 1, ..., D for which it lasts. After d
    steps the chain moves to another state with the jump probabilities. The last stay of a sequence is right-censored.
    Use it instead of `StandardHMM` if stays have a typical length. An EM iteration takes O(steps (K^2 + K D)) time and
    O(longest sequence x K D) memory. States in `decode`, `posterior`, `sample` and `predict_next` are the K states of
    the model.

    Args:
        num_states: Number of states K, at least 2.
        max_duration: Longest duration D of a stay, in steps.
        duration: Family of the durations: "categorical", "poisson", "negative_binomial" or "geometric".
        emission: Distribution of the observations. By default `Categorical` for symbols and a diagonal `Gaussian` for
            real vectors.
        num_symbols: Number of symbols, for sequences of symbols.
        num_features: Number of columns, for sequences of real vectors.
        columns: Descriptions of the observed columns, instead of `num_symbols` or `num_features`. If none of the three
            is given, the columns are those of the training data.
        initial_pseudocount, jump_pseudocount, duration_pseudocount: Pseudocounts of Dirichlet priors on the first
            state, the jumps and the durations, added to each count of the whole training set.
        seed: Seed for the initial parameters.
        restarts: Number of random initializations trained in the same run. The one with the best validation likelihood
            at the end (training likelihood if there is no validation set) is used for inference.
        initialization: Initialization of emissions that depend on the data, as in `HMM`.
        discount: Discount factor of online EM. If not given, batch EM updates the parameters after every epoch.
        sequences_per_update: Number of sequences per update of online EM.
        iterations_per_epoch: Number of batch-EM iterations in each epoch of the Trainer, for small data in one batch.
        frozen: Parts whose parameters are not updated: any of "initial", "transition" and "emission".
        arithmetic: Floating-point type of the messages.
        symbol_names: Names of the symbols, for data with a vocabulary.
        unknown_symbol: The name in `symbol_names` that represents all symbols outside the vocabulary.

    Example:
        >>> from lightning_hmm import SemiMarkovHMM, fit
        >>> sequences = [[0, 0, 0, 1, 1] * 6, [1, 1, 0, 0, 0] * 5]
        >>> model = fit(SemiMarkovHMM(2, max_duration=6, num_symbols=2, seed=1), sequences, max_epochs=30)
        >>> sorted(round(mean, 1) for mean in model.transition.mean_durations.tolist())
        [2.0, 3.0]
    """

    transition: Durations

    def __init__(
        self,
        num_states: int,
        max_duration: int,
        duration: DurationFamily = "categorical",
        emission: Emission | None = None,
        num_symbols: int | None = None,
        num_features: int | None = None,
        columns: list[Column] | None = None,
        initial_pseudocount: float = 0.0,
        jump_pseudocount: float = 0.0,
        duration_pseudocount: float = 1e-3,
        seed: int = 0,
        restarts: int = 1,
        initialization: Literal["kmeans", "random"] = "kmeans",
        discount: float | None = None,
        sequences_per_update: int | None = None,
        iterations_per_epoch: int = 1,
        frozen: Sequence[str] = (),
        arithmetic: Literal["float64", "float32"] = "float64",
        symbol_names: list[str] | None = None,
        unknown_symbol: str | None = None,
    ) -> None:
        self._record_options(locals())
        super().__init__(
            num_states,
            emission,
            Durations(max_duration, duration, jump_pseudocount, duration_pseudocount),
            Initial(initial_pseudocount),
            num_symbols=num_symbols,
            num_features=num_features,
            columns=columns,
            seed=seed,
            restarts=restarts,
            initialization=initialization,
            discount=discount,
            sequences_per_update=sequences_per_update,
            iterations_per_epoch=iterations_per_epoch,
            frozen=frozen,
            arithmetic=arithmetic,
            symbol_names=symbol_names,
            unknown_symbol=unknown_symbol,
        )
