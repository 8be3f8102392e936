"""The cloned hidden Markov model of Dedieu et al. (2019)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_hmm import inference
from lightning_hmm.distributions import Clones, Initial, OneSymbol
from lightning_hmm.distributions.transitions.clones import Allocation
from lightning_hmm.inference import cloned
from lightning_hmm.inference.cloned import Layout
from lightning_hmm.models.hmm import HMM
from lightning_hmm.sequences import Sequences


def _number_of_states(num_states: int | None, clones: list[int] | None) -> int:
    if clones is not None:
        if num_states not in (None, sum(clones)):
            raise ValueError(
                f"`num_states` must be the sum of `clones`, {sum(clones)}, but is {num_states} instead. Leave it out."
            )
        return sum(clones)
    if num_states is None:
        raise ValueError("`num_states` must be given, or `clones`.")
    return num_states


class ClonedHMM(HMM):
    r"""A hidden Markov model in which every state emits exactly one symbol.

    .. math:: z_1 \sim \pi, \quad z_t \mid z_{t-1} = i \sim A_i, \quad y_t = \text{symbol of } z_t

    Each symbol has several states, its *clones*, and only the transition matrix is learned. During training each clone
    specializes on one context of its symbol, so the model can represent contexts of any length, including contexts with
    gaps. Use it instead of `StandardHMM` for symbol sequences with long-range dependencies.

    An EM iteration takes O(steps M^2) time with M clones per symbol, and less as the forward messages concentrate on
    few clones. Only transitions between clones of symbols that follow each other in the training data are stored. A
    sequence with a pair of symbols that does not occur in the training data has a likelihood of zero, and a warning is
    issued. Use `transition_pseudocount` with `pairs` "all" to keep all sequences possible.

    Sequences of real vectors with one entry per symbol are *uncertain evidence*: each row is a distribution over the
    symbols of that step, and a row of NaN is a missing step. `score`, `decode`, `posterior`, `sample_posterior` and
    `predict_next` accept them.

    Args:
        num_states: Number of clones of all symbols together. Not required if `clones` is given.
        num_symbols: Number of symbols V.
        allocation: How clones are assigned to symbols: the same number for each ("uniform"), in proportion to their
            frequencies in the training data ("frequency"), or to the numbers of different n-grams that end in them
            ("ngram"). Each symbol has at least one clone.
        ngram_order: Length n of the n-grams.
        clones: Number of clones of each symbol, instead of an allocation.
        pairs: Pairs of symbols that may follow each other: those "seen" in the training data (all pairs if symbols are
            missing there), or "all".
        seed: Seed for the initial parameters.
        start_concentration: Concentration of the Dirichlet distribution that each row of the initial transition matrix
            is drawn from. With small values, such as 0.05, few transitions are probable, which helps EM to find
            long-range dependencies. If not given, rows are nearly uniform.
        restarts: Number of random initializations trained in the same run. The one with the best validation likelihood
            at the end (training likelihood if there is no validation set) is used for inference.
        discount: Discount factor (lambda) of online EM, which updates the parameters after every batch. If not given,
            batch EM updates them after every epoch.
        sequences_per_update: Number of sequences per update of online EM, for several updates inside each batch.
        online_epochs: Number of epochs of online EM, after which training switches to batch EM. If not given, all
            epochs are online. The noise of online updates helps to escape poor local optima; batch EM then converges to
            the nearby maximum.
        initial_pseudocount, transition_pseudocount: Pseudocounts of Dirichlet priors, added to each count of the whole
            training set. For transitions, values above 1e-3 keep small models from finding long-range dependencies.
            Online EM without any removes all transitions that are missing in the first batch with their source state;
            a tiny value, such as 1e-6, prevents this.
        transition_sparsity: Counts that are subtracted from each transition, as by a Dirichlet prior with a
            concentration below one. Transitions without remaining counts are removed.
        frozen: Parts whose parameters are not updated: any of "initial" and "transition". By default the first state is
            uniform over all clones, so a sequence may start in any context.
        arithmetic: Floating-point type of the messages. "float32" also stores transitions in 32 bits, which models with
            a billion of them require.
        symbol_names: Names of the symbols, for data with a vocabulary.
        unknown_symbol: The name in `symbol_names` that represents all symbols outside the vocabulary.

    References:
        Dedieu, Gothoskar, Swingle, Lehrach, Lázaro-Gredilla, George: Learning higher-order sequential structure with
        cloned HMMs, 2019.

    Example:
        The symbol after 0 depends on the symbol before it.

        >>> from lightning_hmm import ClonedHMM, fit
        >>> sequences = [[1, 0, 3, 2, 0, 4] * 4]
        >>> model = ClonedHMM(num_states=20, num_symbols=5, start_concentration=0.05)
        >>> model = fit(model, sequences, max_epochs=50)
        >>> model.predict_next([[1, 0], [2, 0]]).argmax(1).tolist()
        [3, 4]
    """

    transition: Clones

    def __init__(
        self,
        num_states: int | None = None,
        num_symbols: int | None = None,
        allocation: Allocation = "uniform",
        ngram_order: int = 5,
        clones: list[int] | None = None,
        pairs: Literal["seen", "all"] = "seen",
        seed: int = 0,
        start_concentration: float | None = None,
        restarts: int = 1,
        discount: float | None = None,
        sequences_per_update: int | None = None,
        online_epochs: int | None = None,
        initial_pseudocount: float = 0.0,
        transition_pseudocount: float = 0.0,
        transition_sparsity: float = 0.0,
        frozen: Sequence[str] = ("initial",),
        arithmetic: Literal["float64", "float32"] = "float64",
        symbol_names: list[str] | None = None,
        unknown_symbol: str | None = None,
    ) -> None:
        self._record_options(locals())
        if num_symbols is None:
            raise ValueError("`num_symbols` must be given, because a cloned HMM is a model of symbols.")
        num_states = _number_of_states(num_states, clones)
        if online_epochs is not None and (discount is None or online_epochs < 0):
            raise ValueError(
                f"`online_epochs` must not be negative and requires a `discount`, but is {online_epochs} with "
                f"`discount` {discount} instead."
            )
        for name in frozen:
            if name not in ("initial", "transition"):
                raise ValueError(f"`frozen` must name initial or transition, but names {name!r} instead.")
        super().__init__(
            num_states,
            OneSymbol(),
            Clones(
                transition_pseudocount, transition_sparsity, allocation, ngram_order, clones, pairs, start_concentration
            ),
            Initial(initial_pseudocount, start="uniform"),
            num_symbols=num_symbols,
            seed=seed,
            restarts=restarts,
            discount=discount,
            sequences_per_update=sequences_per_update,
            frozen=frozen,
            arithmetic=arithmetic,
            symbol_names=symbol_names,
            unknown_symbol=unknown_symbol,
        )
        self.online_epochs = online_epochs
        self.first_epoch = 0  # The epoch in which training started or was restarted.

    # Layout

    @property
    def layout(self) -> Layout:
        """The symbol of each state, and the transitions that are stored."""
        return self.transition.layout

    def set_layout(self, layout: Layout) -> ClonedHMM:
        """Sets the layout and draws random transitions for it. Call it before training."""
        self.transition.set_layout(layout)
        self.transition.randomize(torch.Generator().manual_seed(self.seed))
        return self

    @torch.no_grad()
    def start_over(self, sequences: Sequences) -> None:
        """Allocates clones and draws initial parameters again, for these sequences. `Retraining` calls this method."""
        generator = torch.Generator().manual_seed(self.seed)
        self.initial.randomize(generator)
        self.transition.start_over(sequences, generator)

    # Training

    @property
    def uses_labels(self) -> bool:
        return False  # Clones have no meaning before training, so that no label could name one.

    @property
    def is_online(self) -> bool:
        return super().is_online and (
            self.online_epochs is None or self.current_epoch - self.first_epoch < self.online_epochs
        )

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        if self.trainer.loggers:  # A call of `log` takes as long as an E-step of small data.
            num_nonzero = torch.count_nonzero(self.transition.probs.detach()[self.best_restart])
            self.log("transition_density", float(num_nonzero) / self.num_states**2)

    def _expected_transitions(self, sequences: Sequences) -> inference.EStep:
        """Runs the E-step of the best restart."""
        return inference.e_step(*self.problem(sequences), sequences.weights, dtype=self.message_dtype)

    # Interpretation

    @torch.no_grad()
    def state_graph(self, sequences: Any = None, threshold: float = 1e-3) -> Any:
        """Returns the states as a directed graph of networkx, for `graphs.communities` and `plotting.state_graph`.

        Nodes are states with the attributes `symbol` and `name`. The `weight` of an edge is the probability of the
        transition or, if `sequences` is given, its expected count in them, which emphasizes states that are visited
        often.

        Args:
            sequences: Sequences in which transitions are counted.
            threshold: Edges with smaller weights, and states without edges, are removed.
        """
        import networkx as nx

        weights = self.transition.probs.detach()[self.best_restart].double().cpu()
        if sequences is not None:
            weights = self._expected_transitions(self.as_sequences(sequences)).counts[0].double().cpu()
        entries = torch.nonzero(weights >= max(threshold, torch.finfo(torch.float64).tiny)).flatten()
        sources, targets = (states.tolist() for states in self.layout.states_of(entries))
        graph = nx.DiGraph()
        symbols = self.layout.symbols.tolist()
        for state in sorted({*sources, *targets}):
            graph.add_node(
                state,
                symbol=symbols[state],
                name=symbols[state] if self.vocabulary is None else self.vocabulary.names[symbols[state]],
            )
        graph.add_weighted_edges_from(zip(sources, targets, weights[entries].tolist(), strict=True))
        return graph

    def unscramble(self, text: str, separator: str = " ", reuse: bool = False) -> str:
        """Restores the order of the inner letters of each word of a text, by the most probable reading (Viterbi).

        The first and last letter of a word keep their places.

        Args:
            text: Text of symbols in the vocabulary of the model.
            separator: Separator of the words.
            reuse: Whether each inner letter is independent uncertain evidence, uniform over the inner letters of its
                word, as in Dedieu et al. A reading may then use a letter twice and another one not at all. Otherwise
                each letter is used exactly once.
        """
        if self.vocabulary is None:
            raise ValueError("`unscramble` requires a model with `symbol_names`, but the model has none.")
        if not text:
            return text
        if reuse:
            path = self.decode(Sequences.from_list([self.scrambled_evidence(text, separator)])).values.cpu()
        else:
            symbols = torch.as_tensor(self.vocabulary.encode(text), dtype=torch.int64)
            operator = self.transition.operator(self.transition.natural(int(self.best_restart)), None)
            path, _ = cloned.rearranged_viterbi(
                self.initial.natural(int(self.best_restart))[0].detach(),
                operator,
                symbols,
                _inner_groups(text, separator),
            )
        if int(path[0]) < 0:
            return text
        return "".join(str(name) for name in self.vocabulary.decode(self.layout.symbols[path].tolist()))

    def scrambled_evidence(self, text: str, separator: str = " ") -> np.ndarray:
        """Returns the (steps, V) rows of uncertain evidence that `unscramble` decodes with `reuse`."""
        assert self.vocabulary is not None
        symbols, first = np.asarray(self.vocabulary.encode(text), np.int64), 0
        rows = np.eye(len(self.vocabulary))[symbols]
        for length in _inner_groups(text, separator):
            rows[first : first + length] = rows[first : first + length].mean(0)
            first += length
        return rows

    # Smoothing and pruning

    def above(self, threshold: float) -> Tensor:
        """Returns a mask of the stored transitions with a probability of at least `threshold` in any restart.

        The most probable transition of each row is always included.
        """
        return self.transition.above(threshold)

    @torch.no_grad()
    def prune(self, keep: Tensor | float) -> ClonedHMM:
        """Removes transitions and stores the remaining ones as a sparse list.

        Do not call it during training, because the optimizer refers to the parameters. Use the callback `Pruning`.

        Args:
            keep: Mask of the transitions to keep, or the smallest probability to keep.
        """
        if not isinstance(keep, Tensor):
            if isinstance(keep, bool) or not isinstance(keep, int | float) or not 0 <= keep <= 1:
                raise ValueError(
                    f"`keep` must be a mask (a tensor of booleans) or a probability, but is {keep!r} instead."
                )
            keep = self.above(keep)
        self.transition.set_layout(*self.transition.pruned(keep))
        return self

    @torch.no_grad()
    def backed_off(self, sequences: Any, strength: float = 1.0) -> ClonedHMM:
        r"""Returns this model smoothed by a lower-order model of the same counts, so that no sequence is impossible.

        Each symbol has an additional clone, which represents the symbol in a context that does not occur in the data.
        The transitions from a clone to these have the weight of `strength` counts in addition to its own, and are
        distributed as symbols follow symbols. The transitions from an additional clone are the average over the other
        clones of its symbol:

        .. math:: A'_{ij} = \frac{n_{ij}}{n_i + c}, \quad A'_{i, b_v} = \frac{c\, q(v \mid u)}{n_i + c}, \quad
            A'_{b_u, j} = \frac{\sum_{i \in u} n_{ij}}{n_u + c}, \quad q(v \mid u) = \frac{n_{uv} + c\, q(v)}{n_u + c}

        with the expected counts n in `sequences`, the training data. It is the mean of a Dirichlet posterior whose base
        measure is the lower-order model (MacKay and Peto, 1995). The result is a cloned HMM with H + V states.
        """
        if not strength > 0:
            raise ValueError(f"`strength` must be positive, but is {strength} instead.")
        layout, sequences = self.layout, self.as_sequences(sequences)
        statistics = self._expected_transitions(sequences)
        base = _symbol_probs(sequences, layout.num_symbols, strength)  # q(v)
        # In the new numbering, the additional clone of a symbol is its last.
        new = torch.arange(self.num_states) + layout.symbols
        unknown = layout.clones.cumsum(0) + torch.arange(layout.num_symbols)
        sources, targets, values = self._backed_off_entries(statistics.counts[0], base, new, unknown, strength)
        smoothed = ClonedHMM(
            num_states=self.num_states + layout.num_symbols,
            num_symbols=layout.num_symbols,
            arithmetic="float32" if self.arithmetic == "float32" else "float64",
            symbol_names=None if self.vocabulary is None else self.vocabulary.names,
            unknown_symbol=None if self.vocabulary is None else self.vocabulary.unknown,
        )
        smoothed_layout, order = Layout.of_entries(layout.clones + 1, sources, targets)
        smoothed.transition.set_layout(smoothed_layout, values[order][None])
        num_starts = float(statistics.initial.double().sum())
        starts = torch.zeros(smoothed.num_states, dtype=torch.float64)
        starts[new] = self.initial_probs.double() * num_starts / (num_starts + strength)
        starts[unknown] = base * strength / (num_starts + strength)
        smoothed.initial.set(starts)
        return smoothed.eval()

    def _backed_off_entries(
        self, expected: Tensor, base: Tensor, new: Tensor, unknown: Tensor, strength: float
    ) -> list[Tensor]:
        """Returns sources, targets and probabilities of the transitions of `backed_off`.

        Args:
            expected: Expected counts of the stored transitions.
            base: (V,) probabilities of the symbols.
            new: (H,) numbers of the clones in the smoothed model.
            unknown: (V,) numbers of the additional clones.
            strength: Weight of the lower order in counts.
        """
        symbols, num_symbols = self.layout.symbols, self.layout.num_symbols
        counted = torch.nonzero(expected > 0).flatten()
        counts = expected[counted].double()
        rows, columns = self.layout.states_of(counted)
        visits = torch.zeros(self.num_states, dtype=torch.float64).index_add_(0, rows, counts)
        pair_counts = torch.zeros(num_symbols**2, dtype=torch.float64).index_add_(
            0, symbols[rows] * num_symbols + symbols[columns], counts
        )
        pair_counts = pair_counts.reshape(num_symbols, num_symbols)
        leaving = pair_counts.sum(1)
        lower = (pair_counts + strength * base) / (leaving + strength)[:, None]  # q(v | u)
        average, where = _sum_by(symbols[rows] * self.num_states + columns, counts)
        known_to_known = (new[rows], new[columns], counts / (visits[rows] + strength))
        known_to_unknown = (
            new.repeat_interleave(num_symbols),
            unknown.repeat(self.num_states),
            (strength * lower[symbols] / (visits + strength)[:, None]).reshape(-1),
        )
        unknown_to_known = (
            unknown[where // self.num_states],
            new[where % self.num_states],
            average / (leaving[where // self.num_states] + strength),
        )
        unknown_to_unknown = (
            unknown.repeat_interleave(num_symbols),
            unknown.repeat(num_symbols),
            (strength * base / (leaving + strength)[:, None]).reshape(-1),
        )
        entries = (known_to_known, known_to_unknown, unknown_to_known, unknown_to_unknown)
        return [torch.cat(parts) for parts in zip(*entries, strict=True)]

    def _why_impossible(self, sequences: Sequences, n: int, t: int) -> str:
        why = "There is no transition to its clones from those that are possible at the step before"
        if sequences.is_discrete and t > 0:
            u, v = sequences[n][t - 1 : t + 1].tolist()
            if u >= 0 and v >= 0 and not bool((self.layout.pairs == torch.tensor([u, v])).all(1).any()):
                names = (u, v) if self.vocabulary is None else tuple(self.vocabulary.decode([u, v]))
                why = f"Symbol {names[1]!r} does not follow {names[0]!r} in the training data"
        return f' ({why}.) A `transition_pseudocount` with `pairs` "all" keeps every pair possible.'


def _symbol_probs(sequences: Sequences, num_symbols: int, strength: float) -> Tensor:
    """Returns the (V,) weighted frequencies of the symbols, smoothed by `strength` counts, uniform over symbols."""
    known, weights = sequences.values >= 0, None
    if sequences.weights is not None:
        weights = sequences.repeat_interleave(sequences.weights)[known]
    counts = torch.bincount(sequences.values[known], weights, minlength=num_symbols).double() + strength / num_symbols
    return counts / counts.sum()


def _sum_by(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the sums of `values` with the same key, and those keys in ascending order."""
    found, place = torch.unique(keys, return_inverse=True)
    return values.new_zeros(len(found)).index_add_(0, place, values), found


def _inner_groups(text: str, separator: str) -> list[int]:
    """Returns the lengths of the groups of letters that may be permuted.

    The inner letters of a word are one group; each other letter is a group of its own.
    """
    words = ([1, len(word) - 2, 1] if len(word) > 3 else [1] * len(word) for word in text.split(separator))
    return list(chain.from_iterable([1] * len(separator) * (number > 0) + word for number, word in enumerate(words)))
