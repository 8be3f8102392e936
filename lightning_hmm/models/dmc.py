"""The hidden Markov model with dense, mostly constant (DMC) transitions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

from torch import Tensor

from lightning_hmm import inference
from lightning_hmm.distributions import Categorical, DenseMostlyConstant, Emission, Initial
from lightning_hmm.distributions.base import check_not_negative, make_part
from lightning_hmm.inference import selection
from lightning_hmm.inference.cpu import prefers_dense
from lightning_hmm.inference.operators import MostlyConstant
from lightning_hmm.inference.selection import Choice, Pairs, PairSums, factored_pairs
from lightning_hmm.models.hmm import HMM
from lightning_hmm.models.standard import StandardHMM, standard_emission
from lightning_hmm.sequences import Sequences


class DMCHMM(HMM):
    r"""A hidden Markov model whose transition matrix has K free entries per row and one constant for the other entries.

    .. math:: z_1 \sim \pi, \quad
        p(z_t = j \mid z_{t-1} = i) = a_{ij} \text{ for K kept } j, \; c_i \text{ for the others}, \quad
        y_t \mid z_t = k \sim B_k \text{ or } N(\mu_k, \operatorname{diag} v_k)

    All transitions are possible, but the exact likelihood, posteriors and most probable path take only O(steps N K)
    time. Use it instead of `StandardHMM` for hundreds of states or more, if each of them leads mainly to a few others.
    Below about 8 K states dense matrix products are faster and are used automatically. With K = 0 all states have the
    same transition probabilities (a mixture model); with K = N - 1 the transition matrix is unrestricted.

    EM selects the kept entries from the expected transition counts of all pairs of states, which takes O(steps N^2)
    time. Set `reselect_every` to do so less often. Only batch EM is available.

    Args:
        num_states: Number of states N, at least 2.
        num_kept: Number K of kept entries per row, from 0 to N - 1.
        num_symbols, emission, num_features, seed, restarts, initialization: As for `StandardHMM`.
        criterion: Which entries of a row EM keeps: "window", those that maximize the expected log-likelihood, or
            "largest", those with the largest expected counts.
        reselect_every: Number of epochs between selections, of which the first is in the first epoch. An epoch without
            a selection takes O(steps N K) time.
        initial_pseudocount, transition_pseudocount, emission_pseudocount, variance_prior: As for `StandardHMM`. The
            pseudocount of transitions is added to every entry of the full matrix.
        frozen, arithmetic, symbol_names, unknown_symbol: As for `StandardHMM`.

    Example:
        >>> from lightning_hmm import DMCHMM, fit
        >>> sequences = [[0, 1, 2, 3] * 5]
        >>> model = fit(DMCHMM(num_states=4, num_kept=1, num_symbols=4, seed=3), sequences, max_epochs=50)
        >>> model.values.shape, model.constants.shape
        (torch.Size([4, 1]), torch.Size([4]))
        >>> [round(value, 2) for value in model.predict_next([[0, 1, 2]])[0].tolist()]
        [0.0, 0.0, 0.0, 1.0]
    """

    transition: DenseMostlyConstant

    def __init__(
        self,
        num_states: int,
        num_kept: int,
        num_symbols: int | None = None,
        emission: Literal["categorical", "gaussian"] | Emission = "categorical",
        num_features: int | None = None,
        seed: int = 0,
        restarts: int = 1,
        initialization: Literal["kmeans", "random"] = "kmeans",
        criterion: Literal["window", "largest"] = "window",
        reselect_every: int = 1,
        initial_pseudocount: float = 0.0,
        transition_pseudocount: float = 0.0,
        emission_pseudocount: float = 0.0,
        variance_prior: float = 1e-6,
        frozen: Sequence[str] = (),
        arithmetic: Literal["float64", "float32"] = "float64",
        symbol_names: list[str] | None = None,
        unknown_symbol: str | None = None,
    ) -> None:
        self._record_options(locals())
        if not isinstance(num_states, int) or num_states < 2:
            raise ValueError(f"`num_states` must be a whole number of at least 2, but is {num_states} instead.")
        if not isinstance(num_kept, int) or not 0 <= num_kept < num_states:
            raise ValueError(
                f"`num_kept` must be a whole number from 0 to {num_states - 1}, the number of states minus 1, "
                f"but is {num_kept} instead."
            )
        if criterion not in ("window", "largest"):
            raise ValueError(f"`criterion` must be window or largest, but is {criterion!r} instead.")
        if not isinstance(reselect_every, int) or reselect_every < 1:
            raise ValueError(f"`reselect_every` must be a whole number of at least 1, but is {reselect_every} instead.")
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
            DenseMostlyConstant(num_kept, transition_pseudocount),
            Initial(initial_pseudocount),
            num_symbols=num_symbols if symbolic else None,
            num_features=None if symbolic else num_features,
            seed=seed,
            restarts=restarts,
            initialization=initialization,
            frozen=frozen,
            arithmetic=arithmetic,
            symbol_names=symbol_names,
            unknown_symbol=unknown_symbol,
        )
        self.num_kept, self.criterion, self.reselect_every = num_kept, criterion, reselect_every
        self._pair_sums: list[PairSums] | None = None  # one per restart, accumulated since the last M-step
        self.choices: list[Choice] = []  # selections of the last epoch by restart, if any

    @property
    def may_iterate(self) -> bool:
        return False  # Entries are selected once per epoch.

    @property
    def indices(self) -> Tensor:
        """(N, K) the columns of the kept entries of each row, in ascending order."""
        return self.transition.indices[self.best_restart]

    @property
    def values(self) -> Tensor:
        """(N, K) the probabilities of the kept entries."""
        return self.transition.log_values[self.best_restart].detach().exp()

    @property
    def constants(self) -> Tensor:
        """(N,) the probability of each of the other entries of a row."""
        return self.transition.log_constants[self.best_restart].detach().exp()

    def set_parameters(
        self, initial: Any = None, transition: Any = None, emission: Any = None, indices: Any = None, values: Any = None
    ) -> Self:
        """Sets parameters of all restarts, as `HMM.set_parameters`.

        Transitions are given by `indices` and `values` of the kept entries, or as a full matrix `transition`.
        """
        if (indices is None) != (values is None) or (indices is not None and transition is not None):
            raise ValueError("`indices` and `values` must be given together, or a full `transition` instead.")
        if indices is not None:
            self.transition.set_kept(indices, values)
        return super().set_parameters(initial, transition, emission)

    # Conversion

    @classmethod
    def from_standard(cls, model: StandardHMM, num_kept: int, **options: Any) -> DMCHMM:
        """Returns a model with the `num_kept` largest transitions of each state, and the average of the others.

        Args:
            model: The model to convert.
            num_kept: Number of kept entries per row.
            **options: Forwarded to the constructor.
        """
        return _copy(model, cls, {"num_kept": num_kept, **options})

    def to_standard(self, **options: Any) -> StandardHMM:
        """Returns the same model with a full matrix. `options` are forwarded to `StandardHMM`."""
        return _copy(self, StandardHMM, options)

    # Training by EM

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self._pair_sums = None  # An interrupted run leaves sums behind.

    def _new_pair_sums(self) -> list[PairSums]:
        """Returns accumulators of the counts of all pairs, one per restart; none in epochs without selection."""
        # With K = N - 1 every selection can represent every matrix; with K = 0 there is only one selection.
        choosing = (
            0 < self.num_kept < self.num_states - 1
            and "transition" not in self.frozen
            and self.current_epoch % self.reselect_every == 0
        )
        return [self._pair_sums_of(restart) for restart in range(self.restarts if choosing else 0)]

    def _pair_sums_of(self, restart: int) -> PairSums:
        operator = self.chain(restart)[1]
        assert isinstance(operator, MostlyConstant)
        return PairSums(operator)

    def _uses_full_matrix(self, operator: MostlyConstant, batch: Sequences) -> bool:
        """Returns whether the E-step of an epoch with selection uses the full matrix."""
        return prefers_dense(operator, len(batch), self.message_dtype, smooth=True, pairs=True)

    def _e_step(self, batch: Sequences) -> dict[str, list[Tensor]]:
        if self._pair_sums is None:  # This is the first batch of an epoch.
            self._pair_sums, self.choices = self._new_pair_sums(), []
        return super()._e_step(batch)

    def _expected_counts(self, batch: Sequences, restart: int, **options: Any) -> tuple[inference.EStep, list[Tensor]]:
        if not self._pair_sums:
            return super()._expected_counts(batch, restart)
        # The counts of all pairs of states are those of the full matrix, or are computed from one row per step.
        operator = self.chain(restart)[1]
        assert isinstance(operator, MostlyConstant)
        use_full = self._uses_full_matrix(operator, batch)
        found, counts = super()._expected_counts(batch, restart, full_matrix=use_full, per_step=not use_full)
        if use_full:
            empty = found.initial.new_zeros(0, 0)
            self._pair_sums[restart].add(Pairs(empty, empty, found.counts[0]))
        else:
            self._pair_sums[restart].add(factored_pairs(operator, found, batch.offsets))
        return found, counts

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        pair_sums, self._pair_sums = self._pair_sums, None
        for restart, sums in enumerate(pair_sums or []):
            choice = self._choose(restart, sums)
            self.transition.take(restart, choice, self._counts["transition"])
            self.choices.append(choice)

    def _choose(self, restart: int, sums: PairSums) -> Choice:
        """Selects the kept entries of one restart from the expected counts of all ranks."""
        return selection.choose(sums, self.criterion, self.transition.prior["pseudocount"], self._sum_over_ranks)

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        restart = int(self.best_restart)
        self.log("train/kept_mass", self.transition.kept_mass(restart).mean())
        if self.choices:
            self.log("train/support_changes", self.choices[restart].changes.sum().double())


def _copy(model: HMM, family: Any, options: dict[str, Any]) -> Any:
    """Returns a model of another class with the parameters of the best restart."""
    names = model.vocabulary
    same = {
        "num_states": model.num_states,
        "num_symbols": model.num_symbols,
        "emission": make_part(model.emission.config, Emission, "emission"),
        "num_features": model.num_features,
        "arithmetic": model.arithmetic,
        "symbol_names": None if names is None else names.names,
        "unknown_symbol": None if names is None else names.unknown,
    }
    other = family(**{**same, **options})
    other.emission.copy_from(model.emission, int(model.best_restart))
    return other.set_parameters(initial=model.initial_probs, transition=model.transition_probs)
