"""The standard hidden Markov model, as described by Rabiner (1989)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from lightning_hmm.distributions import Categorical, Emission, Full, Gaussian, Initial
from lightning_hmm.distributions.base import check_not_negative, make_part
from lightning_hmm.models.hmm import HMM


class StandardHMM(HMM):
    r"""A hidden Markov model with K states and a full transition matrix, trained by Baum-Welch.

    .. math:: z_1 \sim \pi, \quad z_t \mid z_{t-1} = i \sim A_i, \quad
        y_t \mid z_t = k \sim B_k \text{ or } N(\mu_k, \operatorname{diag} v_k)

    Use it for up to a few hundred states. `DMCHMM` is faster for more, and `ClonedHMM` is better suited to symbol
    sequences with long-range dependencies. An EM iteration takes O(steps K^2) time. In addition to the data, it needs
    memory for the messages of 32 sequences at a time, O(longest sequence x K).

    Args:
        num_states: Number of states K.
        num_symbols: Number of symbols V, for categorical emissions.
        emission: "categorical" for symbols, "gaussian" for real vectors with diagonal covariances, or any `Emission`.
        num_features: Number of columns D, for real vectors.
        seed: Seed for the initial parameters.
        restarts: Number of random initializations trained in the same run. The one with the best validation likelihood
            at the end (training likelihood if there is no validation set) is used for inference.
        initialization: Initialization of emissions that depend on the data: from the clusters of k-means ("kmeans"), or
            from the points nearest to random points ("random").
        discount: Discount factor (lambda) of online EM, which updates the parameters after every batch. If not given,
            batch EM updates them after every epoch.
        sequences_per_update: Number of sequences per update of online EM, for several updates inside each batch.
        initial_pseudocount, transition_pseudocount, emission_pseudocount: Pseudocounts of Dirichlet priors, added to
            each count of the whole training set.
        variance_prior: Strength s of the prior of a Gaussian emission. It adds s times the variance of each column to
            the scatter of each state, which keeps the variances positive.
        iterations_per_epoch: Number of batch-EM iterations in each epoch of the Trainer, for small data in one batch.
        frozen: Parts whose parameters are not updated: any of "initial", "transition" and "emission".
        arithmetic: Floating-point type of the messages. "float32" is faster; "float64" has 15 digits.
        symbol_names: Names of the symbols, for data with a vocabulary.
        unknown_symbol: The name in `symbol_names` that represents all symbols outside the vocabulary.

    Example:
        >>> from lightning_hmm import StandardHMM, fit
        >>> sequences = [[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]]
        >>> model = fit(StandardHMM(num_states=2, num_symbols=2, seed=1), sequences, max_epochs=50)
        >>> states = model.decode([[0, 0, 1, 1, 1]])[0]
        >>> states.eq(states[0]).int().tolist()
        [1, 1, 0, 0, 0]
        >>> [round(value, 2) for value in model.predict_next([[0, 0, 1]])[0].tolist()]
        [0.0, 1.0]
    """

    def __init__(
        self,
        num_states: int,
        num_symbols: int | None = None,
        emission: Literal["categorical", "gaussian"] | Emission = "categorical",
        num_features: int | None = None,
        seed: int = 0,
        restarts: int = 1,
        initialization: Literal["kmeans", "random"] = "kmeans",
        discount: float | None = None,
        sequences_per_update: int | None = None,
        initial_pseudocount: float = 0.0,
        transition_pseudocount: float = 0.0,
        emission_pseudocount: float = 0.0,
        variance_prior: float = 1e-6,
        iterations_per_epoch: int = 1,
        frozen: Sequence[str] = (),
        arithmetic: Literal["float64", "float32"] = "float64",
        symbol_names: list[str] | None = None,
        unknown_symbol: str | None = None,
    ) -> None:
        self._record_options(locals())
        check_not_negative(
            initial_pseudocount=initial_pseudocount,
            transition_pseudocount=transition_pseudocount,
            emission_pseudocount=emission_pseudocount,
            variance_prior=variance_prior,
        )
        part = standard_emission(emission, num_symbols, num_features, emission_pseudocount, variance_prior)
        symbolic = isinstance(part, Categorical)
        super().__init__(
            num_states,
            part,
            Full(transition_pseudocount),
            Initial(initial_pseudocount),
            num_symbols=num_symbols if symbolic else None,
            num_features=None if symbolic else num_features,
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


def standard_emission(
    given: Any, num_symbols: int | None, num_features: int | None, pseudocount: float, variance_prior: float
) -> Emission:
    """Creates the emission of an option. Raises a `ValueError` if it does not match the sizes of the data."""
    if given == "categorical":
        part: Emission = Categorical(pseudocount)
    elif given == "gaussian":
        part = Gaussian(variance_prior=variance_prior)
    elif isinstance(given, str):
        raise ValueError(f"`emission` must be categorical, gaussian or an Emission, but is {given!r} instead.")
    else:
        part = make_part(given, Emission, "emission")
    if isinstance(part, Categorical) and num_symbols is None:
        hint = " For real vectors set `emission` to gaussian." if num_features is not None else ""
        raise ValueError(f"`num_symbols` must be given for categorical emissions.{hint}")
    if not isinstance(part, Categorical) and num_features is None:
        hint = " For symbols set `emission` to categorical." if num_symbols is not None else ""
        raise ValueError(f"`num_features` must be given for {type(part).__name__} emissions.{hint}")
    return part
