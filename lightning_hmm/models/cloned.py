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


class ClonedHMM(HMM):
    r"""States that emit one symbol each for certain, the clones of that symbol; all that is learnt is how clones follow clones.

    .. math:: z_1 \sim \pi, \quad z_t \mid z_{t-1} = i \sim A_i, \quad y_t = \text{symbol of } z_t

    A clone comes to stand for a context of its symbol, so contexts of any length and with holes can be told apart. An EM
    iteration costs O(steps M^2) time with M clones a symbol, less as forward messages concentrate on few clones, and stores the
    transitions between clones of symbols that follow each other in the training data. Prefer it to `StandardHMM` for symbol
    sequences with long dependencies.

    Where a sequence goes from a symbol to another that never followed it in training, its likelihood is zero and a warning
    says so; `transition_pseudocount` with `pairs` "all" keeps everything possible.

    Sequences of real vectors as wide as there are symbols are *uncertain evidence*: each row is a distribution over the
    symbols of that step, a row of NaN a step of which nothing is known. `score`, `decode`, `posterior`, `sample_posterior` and
    `predict_next` take them.

    Args:
        num_states: the capacity: clones of all symbols together. Not needed where `clones` is given.
        num_symbols: V.
        allocation: of clones to symbols: the same number for each ("uniform"), in proportion to how often they occur in the
            training data ("frequency"), or to how many different n-grams end in them ("ngram"); each gets at least one.
        ngram_order: n of the n-grams.
        clones: the number of clones of each symbol, instead of an allocation.
        pairs: which pairs of symbols may follow each other: those "seen" in the training data (all, where symbols are missing
            there), or "all".
        seed: of the starting values.
        start_concentration: of the Dirichlet distribution that each row of the first transitions is drawn from. Small ones, such as
            0.05, make few transitions probable, so that a clone carries its context along from the start and EM has something
            to sharpen where dependencies are long; without it, rows are near even, and contexts fade within a few steps.
        restarts: number of random initializations trained in the same run. The one with the best validation likelihood at the end (training
            likelihood if there is no validation set) is used for inference.
        discount: lambda of online EM, with an update after each batch; without it batch EM, an update after each epoch.
        sequences_per_update: online EM with several updates inside each batch.
        online_epochs: epochs of online EM, after which batch EM goes on; online EM all the time if not given. Its noise leaves bad
            optima, and batch EM then sharpens what it found.
        initial_pseudocount, transition_pseudocount: of Dirichlet priors, in counts of the whole data. More than 1e-3 for
            transitions keeps small models from finding long dependencies; without any, online EM rules out for good what a row's
            first batch does not have, so give it a tiny one, such as 1e-6.
        transition_sparsity: counts that a Dirichlet prior of concentration below one takes from each transition; those that
            have none left end.
        frozen: any of "initial", "transition"; they keep their values. By default the first state is any clone alike, so
            that a text may begin anywhere.
        arithmetic: "float32" also stores transitions in 32 bits, which is what a billion of them needs.
        symbol_names: for data with a vocabulary.
        unknown_symbol: the one of them that stands for all others.

    References:
        Dedieu, Gothoskar, Swingle, Lehrach, Lázaro-Gredilla, George: Learning higher-order sequential structure with cloned
        HMMs, 2019.
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
            raise ValueError("`num_symbols` must be given: a cloned HMM is of symbols.")
        if clones is not None:
            if num_states not in (None, sum(clones)):
                raise ValueError(
                    f"`num_states` must be the sum of `clones`, {sum(clones)}, but is {num_states} instead. Leave it out."
                )
            num_states = sum(clones)
        if num_states is None:
            raise ValueError("`num_states` must be given, or `clones`.")
        if online_epochs is not None and (discount is None or online_epochs < 0):
            raise ValueError(
                f"`online_epochs` must not be negative and needs a `discount`, but is {online_epochs} with `discount` {discount} instead."
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
        self.first_epoch = 0  # the epoch in which training began, or began anew

    # Layout

    @property
    def layout(self) -> Layout:
        """Which states are clones of which symbol, and which transitions are stored."""
        return self.transition.layout

    def set_layout(self, layout: Layout) -> ClonedHMM:
        """Takes a layout and starts from random transitions; before training."""
        self.transition.set_layout(layout)
        self.transition.randomize(torch.Generator().manual_seed(self.seed))
        return self

    @torch.no_grad()
    def start_over(self, sequences: Sequences) -> None:
        """Forgets what was learned: clones, blocks and starting values as if these sequences were the first. The callback `Retraining` calls it."""
        generator = torch.Generator().manual_seed(self.seed)
        self.initial.randomize(generator)
        self.transition.start_over(sequences, generator)

    # Online EM first, batch EM then

    @property
    def is_online(self) -> bool:
        return super().is_online and (
            self.online_epochs is None or self.current_epoch - self.first_epoch < self.online_epochs
        )

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        if self.trainer.loggers:  # a name costs as much as a pass over a small language
            self.log(
                "transition_density",
                float(torch.count_nonzero(self.transition.probs.detach()[self.chosen])) / self.num_states**2,
            )

    def _expected_transitions(self, sequences: Sequences) -> inference.EStep:
        """The E-step of the chosen restart."""
        return inference.e_step(*self.problem(sequences), sequences.weights, dtype=self.message_dtype)

    # What is in it

    @torch.no_grad()
    def state_graph(self, sequences: Any = None, threshold: float = 1e-3) -> Any:
        """The states as a directed graph of networkx, for `graphs.communities`, `plotting.state_graph` and what else there is.

        Nodes are states, with `symbol` and `name`; edges have as `weight` the probability of the transition, or its expected number
        in `sequences` where these are given, which makes states count that are often visited.

        Args:
            sequences: to count transitions in.
            threshold: edges of a smaller weight, and states without any edge, are left out.
        """
        import networkx as nx

        weights = self.transition.probs.detach()[self.chosen].double().cpu()
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
        """A text whose words have their inner letters in any order, set right: the most probable reading (Viterbi).

        A word's first and last letter are taken as they are.

        Args:
            text: of symbols that the model knows.
            separator: between words.
            reuse: each letter is uncertain evidence by itself, any of the inner letters of its word, as Dedieu et al. have it; then a reading may take
                one twice and another not at all. Without it, each is taken once.
        """
        if self.vocabulary is None:
            raise ValueError("`unscramble` needs a model with `symbol_names`, so that letters mean something to it.")
        if not text:
            return text
        if reuse:
            path = self.decode(Sequences.from_list([self.scrambled_evidence(text, separator)])).values.cpu()
        else:
            symbols = torch.as_tensor(self.vocabulary.encode(text), dtype=torch.int64)
            operator = self.transition.operator(self.transition.natural(int(self.chosen)), None)
            path, _ = cloned.rearranged_viterbi(
                self.initial.natural(int(self.chosen))[0].detach(), operator, symbols, _inner_groups(text, separator)
            )
        if int(path[0]) < 0:
            return text
        return "".join(str(name) for name in self.vocabulary.decode(self.layout.symbols[path].tolist()))

    def scrambled_evidence(self, text: str, separator: str = " ") -> np.ndarray:
        """(steps, V) the rows of uncertain evidence that `unscramble` decodes with `reuse`."""
        assert self.vocabulary is not None
        symbols, first = np.asarray(self.vocabulary.encode(text), np.int64), 0
        rows = np.eye(len(self.vocabulary))[symbols]
        for length in _inner_groups(text, separator):
            rows[first : first + length] = rows[first : first + length].mean(0)
            first += length
        return rows

    # Smoothing and pruning

    def above(self, threshold: float) -> Tensor:
        """A mask of the stored transitions that are at least so probable, or the most probable of their row, in any restart."""
        return self.transition.above(threshold)

    @torch.no_grad()
    def prune(self, keep: Tensor | float) -> ClonedHMM:
        """Drops all transitions but those that `keep`, a mask or a least probability, says, and stores the rest one by one.

        Not inside training, where an optimizer knows the parameters: there the callback `Pruning` does it.
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
        r"""This model, smoothed by a lower-order model of the same counts, so that nothing is impossible.

        Each symbol gets one clone more, for "this symbol, in a context never seen". A clone goes to those with as much weight as
        `strength` counts have beside its own, by how symbols follow symbols; and such a clone goes on as the symbol's other
        clones do on average:

        .. math:: A'_{ij} = \frac{n_{ij}}{n_i + c}, \quad A'_{i, b_v} = \frac{c\, q(v \mid u)}{n_i + c}, \quad
            A'_{b_u, j} = \frac{\sum_{i \in u} n_{ij}}{n_u + c}, \quad q(v \mid u) = \frac{n_{uv} + c\, q(v)}{n_u + c}

        with n the expected counts of `sequences`, the training data. It is the mean of a Dirichlet posterior whose base measure
        is the lower order (MacKay and Peto, 1995). The result is a cloned HMM of H + V states like any other.
        """
        if not strength > 0:
            raise ValueError(f"`strength` must be positive, but is {strength} instead.")
        layout, sequences = self.layout, self.as_sequences(sequences)
        statistics = self._expected_transitions(sequences)
        counted = torch.nonzero(statistics.counts[0] > 0).flatten()
        counts = statistics.counts[0][counted].double()
        rows, columns = layout.states_of(counted)
        symbols, num_symbols = layout.symbols, layout.num_symbols
        visits = torch.zeros(self.num_states, dtype=torch.float64).index_add_(0, rows, counts)
        pair_counts = torch.zeros(num_symbols**2, dtype=torch.float64).index_add_(
            0, symbols[rows] * num_symbols + symbols[columns], counts
        )
        pair_counts = pair_counts.reshape(num_symbols, num_symbols)
        known, weights = sequences.values >= 0, None
        if sequences.weights is not None:
            weights = sequences.repeat_interleave(sequences.weights)[known]
        symbol_counts = (
            torch.bincount(sequences.values[known], weights, minlength=num_symbols).double() + strength / num_symbols
        )
        base = symbol_counts / symbol_counts.sum()
        leaving = pair_counts.sum(1)
        lower = (pair_counts + strength * base) / (leaving + strength)[:, None]  # q(v | u)
        # In the new numbering each symbol's clone for the unknown is its last.
        new = torch.arange(self.num_states) + symbols
        unknown = layout.clones.cumsum(0) + torch.arange(num_symbols)
        average, where = _sum_by(symbols[rows] * self.num_states + columns, counts)
        entries = [
            (new[rows], new[columns], counts / (visits[rows] + strength)),
            (
                new.repeat_interleave(num_symbols),
                unknown.repeat(self.num_states),
                (strength * lower[symbols] / (visits + strength)[:, None]).reshape(-1),
            ),
            (
                unknown[where // self.num_states],
                new[where % self.num_states],
                average / (leaving[where // self.num_states] + strength),
            ),
            (
                unknown.repeat_interleave(num_symbols),
                unknown.repeat(num_symbols),
                (strength * base / (leaving + strength)[:, None]).reshape(-1),
            ),
        ]
        sources, targets, values = (torch.cat(parts) for parts in zip(*entries, strict=True))
        smoothed = ClonedHMM(
            num_states=self.num_states + num_symbols,
            num_symbols=num_symbols,
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

    def _why_impossible(self, sequences: Sequences, n: int, t: int) -> str:
        why = "No clone that the steps before it leave possible leads there"
        if sequences.is_discrete and t > 0:
            u, v = sequences[n][t - 1 : t + 1].tolist()
            if u >= 0 and v >= 0 and not bool((self.layout.pairs == torch.tensor([u, v])).all(1).any()):
                names = (u, v) if self.vocabulary is None else tuple(self.vocabulary.decode([u, v]))
                why = f"Symbol {names[1]!r} never followed {names[0]!r} in training, so the model gives it probability zero there"
        return f' ({why}.) A `transition_pseudocount` with `pairs` "all" keeps every pair possible.'


def _sum_by(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The sums of `values` with the same key, and those keys, in rising order."""
    found, place = torch.unique(keys, return_inverse=True)
    return values.new_zeros(len(found)).index_add_(0, place, values), found


def _inner_groups(text: str, separator: str) -> list[int]:
    """Lengths of the stretches of a text in which letters may have changed places: the insides of words, and each other letter by itself."""
    words = ([1, len(word) - 2, 1] if len(word) > 3 else [1] * len(word) for word in text.split(separator))
    return list(chain.from_iterable([1] * len(separator) * (number > 0) + word for number, word in enumerate(words)))
