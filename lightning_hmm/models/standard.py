"""The hidden Markov model of Rabiner (1989)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from lightning_hmm.distributions import Categorical, Emission, Full, Gaussian, Initial
from lightning_hmm.distributions.base import check_not_negative, make_part
from lightning_hmm.models.hmm import HMM


class StandardHMM(HMM):
    r"""K states and a full transition matrix, trained by Baum-Welch.

    .. math:: z_1 \sim \pi, \quad z_t \mid z_{t-1} = i \sim A_i, \quad y_t \mid z_t = k \sim B_k \text{ or } N(\mu_k, \operatorname{diag} v_k)

    An EM iteration costs O(steps K^2) time and O(32 x longest sequence x K) memory in addition to the data.

    Args:
        num_states: K.
        num_symbols: V, for categorical emissions.
        emission: "categorical" for symbols, "gaussian" for real vectors with diagonal covariances, or any emission.
        num_features: D, for real vectors.
        seed: of the starting values.
        restarts: number of random initializations trained in the same run. The one with the best validation likelihood at the end (training
            likelihood if there is no validation set) is used for inference.
        initialization: of emissions that start from data: the clusters that k-means finds, or the points nearest to random ones.
        discount: lambda of online EM, with an update after each batch; without it batch EM, an update after each epoch.
        sequences_per_update: online EM with several updates inside each batch.
        initial_pseudocount, transition_pseudocount, emission_pseudocount: of Dirichlet priors, in counts of the whole data.
        variance_prior: keeps Gaussian variances off zero: scatter added to each state, in units of the data's variance.
        iterations_per_epoch: EM iterations in each epoch of the Trainer; for small data, all in one batch.
        frozen: any of "initial", "transition", "emission"; they keep their values.
        arithmetic: "float32" is faster, "float64" exact to 15 digits.
        symbol_names: for data with a vocabulary.
        unknown_symbol: the one of them that stands for all others.
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
    """The emission that an option names; it must suit the sizes of the data."""
    if given == "categorical":
        part: Emission = Categorical(pseudocount)
    elif given == "gaussian":
        part = Gaussian(variance_prior=variance_prior)
    elif isinstance(given, str):
        raise ValueError(f"`emission` must be categorical, gaussian or an Emission, but is {given!r} instead.")
    else:
        part = make_part(given, Emission, "emission")
    if isinstance(part, Categorical) and num_symbols is None:
        hint = " The data are vectors: set `emission` to gaussian." if num_features is not None else ""
        raise ValueError(f"`num_symbols` must be given for categorical emissions.{hint}")
    if not isinstance(part, Categorical) and num_features is None:
        hint = " The data are symbols: set `emission` to categorical." if num_symbols is not None else ""
        raise ValueError(f"`num_features` must be given for {type(part).__name__} emissions.{hint}")
    return part
