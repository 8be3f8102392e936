"""One row for each kind of model. The laws that hold for every model are tested on all rows.

Add a model as a row of `ROWS`: `test_laws.py`, `test_ranks.py` and `test_weights.py` then apply to it. The rows use the
public interface of the models only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback

from experiments.dmc.lazy import LazyDMCHMM
from lightning_hmm import (
    DMCHMM,
    HMM,
    ClonedHMM,
    DenseHMM,
    MixtureOfHMMs,
    NeuralHMM,
    SemiMarkovHMM,
    Sequences,
    StandardHMM,
    fit,
)
from lightning_hmm.callbacks import Pruning
from lightning_hmm.columns import Column
from lightning_hmm.distributions import (
    Autoregressive,
    Bernoulli,
    Beta,
    Binomial,
    Categorical,
    ContinuousTime,
    EmbeddedCategorical,
    EmbeddedGaussian,
    EmbeddedTransition,
    Emission,
    Exponential,
    Full,
    Gamma,
    Gaussian,
    GaussianMixture,
    Geometric,
    Histories,
    Initial,
    InputDriven,
    InputDrivenInitial,
    LeftRight,
    LogNormal,
    Mixture,
    Multinomial,
    NegativeBinomial,
    Poisson,
    Product,
    Regression,
    StudentT,
    Transition,
    VonMises,
    Weibull,
    ZeroInflated,
)
from lightning_hmm.models import LinearGaussianHMM, NeuralDiscreteHMM
from lightning_hmm.models.baselines import RecurrentNet
from tests.helpers import random_symbols, random_vectors

V, D = 5, 2  # symbols, features


@dataclass(frozen=True)
class Row:
    """
    Attributes:
        make: returns a new model.
        kind: which of `data` it is trained on.
        once_per_epoch: parameters are updated once in an epoch, from all of its batches, so that the batches do not
            matter.
        closed: the M-step is exact, so that the objective never decreases.
        random_by_rank: other ranks, or the same sums in another order, make another random run.
        random_shares: a random share of each batch is used, and a sequence of weight 0 changes which one.
        several_updates: parameters are updated several times inside a batch, so that a sequence of weight 0 changes
            which sequences share an update.
        states: the model has states that can be given other numbers by `set_parameters`.
        tolerance: relative and absolute, of parameters that equal others up to rounding.
        batch_size: number of sequences in a batch of all ranks together.
        epochs: number of epochs in which everything that the row is about happens.
        callbacks: makes the callbacks of `fit`.
    """

    make: Callable[[], Any]
    kind: str = "symbols"
    once_per_epoch: bool = True
    closed: bool = True
    random_by_rank: bool = False
    random_shares: bool = False
    several_updates: bool = False
    states: bool = False
    tolerance: float = 1e-10
    batch_size: int = 5
    epochs: int = 3
    callbacks: Callable[[], list[Callback]] = field(default=list)

    @property
    def is_symbolic(self) -> bool:
        return "vectors" not in self.kind

    def fit(self, sequences: Sequences, *, callbacks: Sequence[Callback] = (), **options: Any) -> Any:
        """A new model, trained as the row says where `options` do not say otherwise."""
        options = {"max_epochs": self.epochs, "batch_size": self.batch_size, "tolerance": 0, **options}
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore",
                message=".*(rows of .* got no counts|is a single gradient step|has probability zero|"
                "likelihood of these data is zero)",
            )
            warnings.filterwarnings("ignore", message=".*callbacks used to create the checkpoint.*")
            return fit(self.make(), sequences, callbacks=[*self.callbacks(), *callbacks], **options)


def data(kind: str, seed: int = 0) -> Sequences:
    """Ragged sequences, of length 0 or 1 too, whose number is not a multiple of a number of ranks."""
    rng = np.random.default_rng(seed)
    if kind == "single steps":
        return Sequences.from_list([[0], [3], [4]])
    if kind == "few vectors":
        return random_vectors(rng, num_sequences=5, longest=8)
    sequences = (
        random_vectors(rng)
        if "vectors" in kind
        else random_symbols(rng, missing=0.0 if kind == "whole symbols" else 0.1)
    )
    if kind.startswith("weighted"):
        return Sequences(sequences.values, sequences.offsets, torch.from_numpy(rng.integers(0, 4, len(sequences)) / 2))
    return suited(kind, sequences)


def suited(kind: str, sequences: Sequences) -> Sequences:
    """Sequences as what the models of a kind observe.

    These are counts for "count vectors", two numbers, a symbol and a count for "mixed vectors", and so on, with some
    known states for the kinds that begin with "labeled" and "soft", times for those that begin with "timed", and inputs
    for those that end in "inputs".
    """
    if kind.startswith(("labeled", "soft")):
        first = sequences.values if sequences.is_discrete else sequences.values[:, 0]
        states = (first.long() // 2).clamp(0, 1)
        known = torch.arange(sequences.num_steps) % 3 == 0
        if kind.startswith("labeled"):
            return sequences.replaced(labels=torch.where(known, states, -1))
        weights = 1.0 + 3 * known[:, None] * (states[:, None] == torch.arange(2))
        return sequences.replaced(state_weights=weights)
    if kind.startswith("timed"):
        steps = torch.arange(sequences.num_steps, dtype=torch.float64)
        return sequences.replaced(times=(steps + steps.sin()).div(2).floor())  # some steps are at the same time
    if kind.endswith(" inputs"):
        inputs = np.random.default_rng(7).normal(size=(sequences.num_steps, 2))
        return suited(kind.removesuffix(" inputs"), sequences).replaced(inputs=torch.from_numpy(inputs))
    counts = sequences.values.abs().floor()
    if kind == "positive vectors":
        return sequences.with_values(sequences.values.exp())
    if kind == "fraction vectors":
        return sequences.with_values(0.5 + sequences.values.atan() / 4)
    if kind == "binary vectors":
        return sequences.with_values(torch.where(counts.isnan(), torch.nan, (counts > 1).double()))
    if kind == "whole count vectors":  # with a count for each feature or for none
        return sequences.with_values(torch.where(counts.isnan().any(1, keepdim=True), torch.nan, counts))
    if kind == "count vectors":
        return sequences.with_values(counts)
    if kind == "short vectors":
        return sequences.with_values(sequences.values[:, :1])
    if kind == "mixed vectors":
        return sequences.with_values(torch.cat([sequences.values, counts[:, :1] % 3, counts[:, 1:2]], 1))
    return sequences


def _left_right() -> StandardHMM:
    """With transitions that are impossible."""
    steps = [[0.7, 0.3, 0.0], [0.0, 0.6, 0.4], [0.0, 0.0, 1.0]]
    return StandardHMM(3, V, transition_pseudocount=0.5).set_parameters(initial=[0.6, 0.4, 0.0], transition=steps)


def _composed(
    emission: Emission,
    num_features: int | None = D,
    transition: Transition | None = None,
    restarts: int = 2,
    **options: Any,
) -> HMM:
    steps = transition or Full(0.5)
    return HMM(2, emission, steps, Initial(0.3), num_features=num_features, restarts=restarts, **options)


def _mixed(tied: Sequence[str] = (), **options: Any) -> HMM:
    symbols = Categorical(0.1, tied=tied)
    parts: dict[str, Emission] = {"x, y": Gaussian("full", 0.1), "symbol": symbols, "count": Poisson(0.2)}
    columns = [Column("x"), Column("y"), Column("symbol", "categorical", 3), Column("count")]
    return _composed(Product(parts), None, columns=columns, **options)


PRIORS: dict[str, Any] = {"initial_pseudocount": 0.3, "transition_pseudocount": 0.5}
SYMBOLS: dict[str, Any] = {"num_states": 3, "num_symbols": V, "emission_pseudocount": 0.1, **PRIORS}
GAUSSIAN: dict[str, Any] = {"emission": "gaussian", "num_features": D}
VECTORS: dict[str, Any] = {"num_states": 2, "variance_prior": 0.1, **GAUSSIAN, **PRIORS}
OF_STAYS: dict[str, Any] = {"num_symbols": V, "initial_pseudocount": 0.3, "jump_pseudocount": 0.5}
CLONES: dict[str, Any] = {"num_states": 11, "num_symbols": V, "seed": 3}
SPARSE: dict[str, Any] = {"pairs": "all", "start_concentration": 0.1, "transition_pseudocount": 1e-9}
PARTICLES: dict[str, Any] = {"latent_dim": 2, "num_features": D, "num_particles": 16, "num_paths": 4, "width": 8}
EXACT: dict[str, Any] = {**PARTICLES, "arithmetic": "float64"}

# What the rows of a family have in common.
ONLINE: dict[str, Any] = {"once_per_epoch": False, "closed": False, "batch_size": 4}
MANY: dict[str, Any] = {"once_per_epoch": False, "closed": False, "batch_size": 8, "several_updates": True}
GRADIENT: dict[str, Any] = {"once_per_epoch": False, "closed": False}
NEURAL: dict[str, Any] = {
    "kind": "few vectors",
    "once_per_epoch": False,
    "closed": False,
    "batch_size": 2,
    "tolerance": 1e-8,
    "epochs": 4,
}
LINEAR: dict[str, Any] = {"kind": "vectors"}

ROWS: dict[str, Row] = {
    "standard": Row(lambda: StandardHMM(**SYMBOLS), states=True),
    "standard, no priors": Row(lambda: StandardHMM(3, V), states=True),
    "standard, restarts": Row(lambda: StandardHMM(**SYMBOLS, restarts=3)),
    "standard, weights": Row(lambda: StandardHMM(**SYMBOLS), "weighted symbols", states=True),
    "standard, left-right": Row(_left_right, states=True),
    "standard, float32": Row(lambda: StandardHMM(**SYMBOLS, arithmetic="float32"), tolerance=1e-4),
    "standard, single steps": Row(lambda: StandardHMM(**SYMBOLS, frozen=["transition"]), "single steps", batch_size=1),
    "standard, online": Row(lambda: StandardHMM(**SYMBOLS, discount=0.8), **ONLINE),
    "standard, one large update": Row(lambda: StandardHMM(**SYMBOLS, discount=0.8, sequences_per_update=20), **ONLINE),
    "standard, many updates": Row(lambda: StandardHMM(**SYMBOLS, discount=0.8, sequences_per_update=3), **MANY),
    "Gaussian": Row(lambda: StandardHMM(**VECTORS), "vectors", states=True),
    "Gaussian, weights": Row(lambda: StandardHMM(**VECTORS), "weighted vectors", states=True),
    "Gaussian, restarts": Row(lambda: StandardHMM(2, restarts=2, **GAUSSIAN), "vectors"),
    "Gaussian, random start": Row(lambda: StandardHMM(2, initialization="random", restarts=2, **GAUSSIAN), "vectors"),
    "Gaussian, online": Row(lambda: StandardHMM(**VECTORS, discount=0.8), "vectors", **ONLINE),
    "composed, full": Row(lambda: _composed(Gaussian("full", 0.1)), "vectors"),
    "composed, full, weights": Row(
        lambda: _composed(Gaussian("full", 0.1), restarts=1), "weighted vectors", states=True
    ),
    "composed, tied": Row(lambda: _composed(Gaussian("tied", 0.1)), "vectors"),
    "composed, spherical": Row(lambda: _composed(Gaussian("spherical", 0.1)), "vectors"),
    "composed, Poisson": Row(lambda: _composed(Poisson(0.2)), "count vectors"),
    "composed, tied variance": Row(lambda: _composed(Gaussian(variance_prior=0.1, tied=["variance"])), "vectors"),
    "composed, tied mean": Row(lambda: _composed(Gaussian("full", 0.1, tied=["mean"])), "vectors"),
    "composed, frozen variance": Row(lambda: _composed(Gaussian("full", 0.1, frozen=["covariance"])), "vectors"),
    "composed, product, tied symbols": Row(lambda: _mixed(restarts=1, tied=["probs"]), "mixed vectors", states=True),
    "composed, Bernoulli": Row(lambda: _composed(Bernoulli(0.2)), "binary vectors"),
    "composed, binomial": Row(lambda: _composed(Binomial([60, 70], 0.2)), "count vectors"),
    "composed, geometric": Row(lambda: _composed(Geometric(0.2)), "count vectors"),
    "composed, multinomial": Row(lambda: _composed(Multinomial(prior_steps=0.2)), "whole count vectors"),
    "composed, exponential": Row(lambda: _composed(Exponential(0.2)), "positive vectors"),
    "composed, Gamma": Row(lambda: _composed(Gamma(0.2)), "positive vectors"),
    "composed, Gamma, one start": Row(
        lambda: _composed(Gamma(0.2, tied=["concentration"]), restarts=1), "positive vectors", states=True
    ),
    "composed, Gamma, frozen": Row(lambda: _composed(Gamma(0.2, frozen=["rate"])), "positive vectors"),
    "composed, Gamma, online": Row(lambda: _composed(Gamma(0.2), discount=0.8), "positive vectors", **ONLINE),
    "composed, log-normal": Row(lambda: _composed(LogNormal(0.2, tied=["scale"])), "positive vectors"),
    "composed, beta": Row(lambda: _composed(Beta(0.2)), "fraction vectors"),
    "composed, von Mises": Row(lambda: _composed(VonMises(0.2)), "vectors"),
    "composed, von Mises, tied": Row(lambda: _composed(VonMises(0.2, tied=["loc"])), "vectors"),
    "composed, autoregressive": Row(lambda: _composed(Autoregressive(1, "full", 0.1)), "vectors"),
    "composed, autoregressive, tied": Row(
        lambda: _composed(Autoregressive(2, tied=["intercept", "variance"], ridge=0.1), restarts=1), "weighted vectors"
    ),
    "composed, autoregressive, online": Row(
        lambda: _composed(Autoregressive(1, "tied", 0.1), discount=0.8), "vectors", **ONLINE
    ),
    "composed, around means": Row(
        lambda: HMM(2, Autoregressive(1, around_mean=True), Histories(0.5), Initial(0.3), num_features=1, restarts=2),
        "short vectors",
    ),
    "composed, stationary": Row(lambda: HMM(3, Categorical(0.1), Full(0.5), "stationary", num_symbols=V, restarts=2)),
    "composed, structure": Row(
        lambda: HMM(3, Categorical(0.1), Full(0.5, 1.0, fixed=[[0, 1]], tied_rows=[[1, 2]]), num_symbols=V, restarts=2)
    ),
    "composed, left-right": Row(lambda: HMM(3, Categorical(0.1), LeftRight(1, 0.5), num_symbols=V, restarts=2)),
    "composed, product": Row(_mixed, "mixed vectors"),
    "composed, product, one start": Row(lambda: _mixed(restarts=1), "mixed vectors", states=True),
    "composed, product, online": Row(lambda: _mixed(discount=0.8), "mixed vectors", **ONLINE),
    "labeled": Row(lambda: StandardHMM(**SYMBOLS, restarts=2), "labeled symbols"),
    "labeled, no priors": Row(lambda: StandardHMM(3, V), "labeled symbols"),
    "labeled, soft": Row(lambda: StandardHMM(2, V, restarts=2), "soft symbols"),
    "labeled, online": Row(lambda: StandardHMM(**SYMBOLS, discount=0.8), "labeled symbols", **ONLINE),
    "labeled, many updates": Row(
        lambda: StandardHMM(**SYMBOLS, discount=0.8, sequences_per_update=3), "labeled symbols", **MANY
    ),
    "composed, labeled": Row(lambda: _composed(Gaussian("full", 0.1)), "labeled vectors"),
    "composed, soft": Row(lambda: _composed(Gaussian("diagonal", 0.1), initialization="random"), "soft vectors"),
    "DMC, labeled": Row(lambda: DMCHMM(4, 1, restarts=2, **GAUSSIAN), "labeled vectors"),
    "dense, labeled": Row(lambda: DenseHMM(3, V, 2, objective="likelihood", restarts=2), "labeled symbols", **GRADIENT),
    "neural, discrete, labeled": Row(
        lambda: NeuralDiscreteHMM(2, D, width=8, embedding_dim=4), **{**NEURAL, "kind": "labeled vectors"}
    ),
    "composed, Gaussian mixture": Row(lambda: _composed(GaussianMixture(2, "full", 0.1, 0.2)), "vectors"),
    "composed, Gaussian mixture, weights": Row(
        lambda: _composed(GaussianMixture(2, "diagonal", 0.1, 0.2), restarts=1), "weighted vectors", states=True
    ),
    "composed, tied mixture": Row(lambda: _composed(Mixture(Poisson(0.2), 3, 0.1, ["components"])), "count vectors"),
    "composed, mixture, online": Row(lambda: _composed(GaussianMixture(2), discount=0.8), "vectors", **ONLINE),
    "composed, Student t": Row(lambda: _composed(StudentT(0.1)), "vectors", tolerance=1e-9),
    "composed, Student t, tied": Row(
        lambda: _composed(StudentT(0.1, ["df"]), restarts=1), "weighted vectors", states=True, tolerance=1e-9
    ),
    "composed, negative binomial": Row(lambda: _composed(NegativeBinomial(0.1)), "count vectors", tolerance=1e-9),
    "composed, negative binomial, tied": Row(
        lambda: _composed(NegativeBinomial(0.1, ["total_count"]), restarts=1), "count vectors", tolerance=1e-9
    ),
    "composed, zero-inflated": Row(lambda: _composed(ZeroInflated(Poisson(0.2), 0.1)), "count vectors"),
    "composed, zero-inflated, one start": Row(
        lambda: _composed(ZeroInflated(NegativeBinomial(0.1), 0.1), restarts=1),
        "count vectors",
        states=True,
        tolerance=1e-9,
    ),
    "composed, Gaussian regression": Row(
        lambda: _composed(Regression("gaussian", 2), restarts=1), "vectors inputs", states=True
    ),
    "composed, Gaussian regression, tied": Row(
        lambda: _composed(Regression("gaussian", [1], variance_prior=0.1, tied=["coefficients"])), "vectors inputs"
    ),
    "composed, Bernoulli regression": Row(
        lambda: _composed(Regression("bernoulli", 2, 0.1)), "binary vectors inputs", tolerance=1e-7
    ),
    "composed, Poisson regression": Row(
        lambda: _composed(Regression("poisson", 2, 0.1, tied=["coefficients"])), "count vectors inputs", tolerance=1e-7
    ),
    "composed, categorical regression": Row(
        lambda: HMM(2, Regression("categorical", 2, 0.1), num_symbols=V, restarts=2), "symbols inputs", tolerance=1e-7
    ),
    "composed, Weibull": Row(lambda: _composed(Weibull(0.1)), "positive vectors", tolerance=1e-7),
    "composed, iterative product": Row(
        lambda: _composed(Product([Weibull(0.1), Regression("gaussian", 2)])),
        "positive vectors inputs",
        tolerance=1e-7,
    ),
    "composed, iterative product, online": Row(
        lambda: _composed(Product([Weibull(0.1), Regression("gaussian", 2)]), discount=0.8),
        "positive vectors inputs",
        **ONLINE,
    ),
    "composed, input-driven": Row(
        lambda: HMM(2, Gaussian(), InputDriven(2, 0.1), InputDrivenInitial([0], 0.1), num_features=D, restarts=2),
        "vectors inputs",
        tolerance=1e-7,
    ),
    "composed, input-driven, online": Row(
        lambda: HMM(2, Gaussian(), InputDriven(2, 0.1), InputDrivenInitial(2, 0.1), num_features=D, discount=0.8),
        "vectors inputs",
        **ONLINE,
    ),
    "DMC": Row(lambda: DMCHMM(6, 2, V, restarts=2, transition_pseudocount=0.1, reselect_every=2), epochs=4),
    "DMC, many states": Row(
        lambda: DMCHMM(160, 2, V, restarts=2, transition_pseudocount=0.1, reselect_every=2)
    ),  # the sparse routine
    "DMC, lazy": Row(lambda: LazyDMCHMM(8, 2, V, criterion="largest", reselect_every=2, restarts=2), epochs=4),
    "DMC, Gaussian": Row(lambda: DMCHMM(4, 1, **GAUSSIAN), "vectors"),
    "dense, EM": Row(lambda: DenseHMM(3, V, 2, objective="em", m_steps=3, restarts=2), closed=False),
    "dense, likelihood": Row(lambda: DenseHMM(3, V, 2, objective="likelihood", restarts=2), **GRADIENT),
    "dense, co-occurrences": Row(
        lambda: DenseHMM(3, V, 2, objective="cooccurrence", steps_per_epoch=3, restarts=2), closed=False
    ),
    "dense, Poisson": Row(
        lambda: DenseHMM(2, m_steps=3, emission=Poisson(0.2), num_features=D), "count vectors", closed=False
    ),
    "composed, durations": Row(lambda: SemiMarkovHMM(3, 4, duration_pseudocount=0.1, restarts=2, **OF_STAYS)),
    "composed, durations, weights": Row(lambda: SemiMarkovHMM(3, 4, **OF_STAYS), "weighted symbols"),
    "composed, Poisson durations": Row(lambda: SemiMarkovHMM(3, 4, "poisson", restarts=2, **OF_STAYS)),
    "composed, negative-binomial durations": Row(
        lambda: SemiMarkovHMM(2, 5, "negative_binomial", duration_pseudocount=0.1, num_features=D),
        "vectors",
        tolerance=1e-6,
    ),
    "composed, geometric durations, online": Row(
        lambda: SemiMarkovHMM(3, 4, "geometric", discount=0.8, duration_pseudocount=0.1, **OF_STAYS),
        tolerance=1e-8,
        **ONLINE,
    ),
    "continuous time": Row(
        lambda: _composed(Categorical(0.1), None, ContinuousTime(0.2, 0.1), num_symbols=V), "timed symbols"
    ),
    "continuous time, exact entry": Row(
        lambda: HMM(3, Categorical(0.1), ContinuousTime(0.2, 0.1, exact=[2]), Initial(0.3), num_symbols=V),
        "timed symbols",
    ),
    "continuous time, online": Row(
        lambda: _composed(Gaussian("full", 0.1), D, ContinuousTime(0.2, 0.1), discount=0.8), "timed vectors", **ONLINE
    ),
    "composed, mixture of HMMs": Row(
        lambda: MixtureOfHMMs(2, 2, num_symbols=V, initial_pseudocount=0.3, transition_pseudocount=0.5, restarts=2)
    ),
    "composed, mixture of HMMs, vectors": Row(
        lambda: MixtureOfHMMs(2, 2, Gaussian(variance_prior=0.1), num_features=D, transition_pseudocount=0.5),
        "weighted vectors",
    ),
    "composed, embedded": Row(
        lambda: HMM(
            3,
            EmbeddedCategorical(2, pseudocount=0.1),
            EmbeddedTransition(2, pseudocount=0.2),
            num_symbols=V,
            restarts=2,
        ),
        tolerance=1e-7,
    ),
    "composed, embedded Gaussian": Row(lambda: HMM(2, EmbeddedGaussian(2), num_features=D), "vectors", tolerance=1e-7),
    "dense, Gaussian": Row(lambda: DenseHMM(2, m_steps=3, **GAUSSIAN), "vectors", closed=False),
    "cloned": Row(lambda: ClonedHMM(**CLONES, pairs="all", transition_pseudocount=0.1, restarts=2), "whole symbols"),
    "cloned, missing symbols": Row(lambda: ClonedHMM(**CLONES, pairs="all", transition_pseudocount=0.1)),
    "cloned, weights": Row(lambda: ClonedHMM(**CLONES, transition_pseudocount=0.1), "weighted symbols"),
    "cloned, seen pairs": Row(lambda: ClonedHMM(**CLONES, restarts=2), "whole symbols"),
    "cloned, frequency": Row(
        lambda: ClonedHMM(20, V, allocation="frequency", pairs="all", transition_pseudocount=0.1), "whole symbols"
    ),
    "cloned, ngram": Row(
        lambda: ClonedHMM(**CLONES, allocation="ngram", ngram_order=2, transition_pseudocount=1e-3), "whole symbols"
    ),
    "cloned, online": Row(
        lambda: ClonedHMM(**CLONES, discount=0.8, transition_pseudocount=1e-3), "whole symbols", **ONLINE
    ),
    "cloned, many updates": Row(
        lambda: ClonedHMM(**CLONES, discount=0.8, sequences_per_update=3, transition_pseudocount=0.05),
        "whole symbols",
        tolerance=1e-8,
        **MANY,
    ),
    "cloned, online then batch": Row(
        lambda: ClonedHMM(**CLONES, discount=0.8, online_epochs=2, transition_pseudocount=1e-3),
        "whole symbols",
        epochs=4,
        **ONLINE,
    ),
    "cloned, many updates then batch": Row(
        lambda: ClonedHMM(**CLONES, discount=0.8, sequences_per_update=2, online_epochs=1, transition_pseudocount=1e-3),
        "whole symbols",
        tolerance=1e-8,
        **MANY,
    ),
    "cloned, pruned": Row(
        lambda: ClonedHMM(15, V, **SPARSE),
        "whole symbols",
        closed=False,
        callbacks=lambda: [Pruning(1e-3, density=0.9)],
        tolerance=1e-8,
    ),
    "linear-Gaussian": Row(lambda: LinearGaussianHMM(2, D), **LINEAR),
    "linear-Gaussian, increments": Row(lambda: LinearGaussianHMM(2, D, target="increments"), **LINEAR),
    "linear-Gaussian, online": Row(
        lambda: LinearGaussianHMM(2, D, discount=0.8, variance_prior=0.1), "vectors", **ONLINE
    ),
    "neural": Row(lambda: NeuralHMM(**EXACT), **NEURAL),
    "neural, shares": Row(
        lambda: NeuralHMM(**EXACT, e_step_fraction=0.5, transition_order=1), random_shares=True, **NEURAL
    ),
    "neural, slow": Row(lambda: NeuralHMM(**EXACT, emission_mean="absolute", start_window=3), **NEURAL),
    "neural, float32": Row(lambda: NeuralHMM(**PARTICLES), random_by_rank=True, **NEURAL),
    "neural, genealogy": Row(
        lambda: NeuralHMM(
            **EXACT, e_step_fraction=0.6, fine_tuning_epochs=1, smoothing="genealogy", transition_order=1
        ),
        random_shares=True,
        **NEURAL,
    ),
    "neural, discrete": Row(lambda: NeuralDiscreteHMM(2, D, width=8, embedding_dim=4), **NEURAL),
    "neural, discrete, absolute": Row(
        lambda: NeuralDiscreteHMM(3, D, width=4, m_steps=1, emission_mean="absolute"), **NEURAL
    ),
    "recurrent": Row(
        lambda: RecurrentNet(4, V, bptt_steps=5, learning_rate_decay=0.5, arithmetic="float64"), **GRADIENT
    ),
    "recurrent, vectors": Row(
        lambda: RecurrentNet(4, num_features=D, bptt_steps=7, arithmetic="float64"), "vectors", **GRADIENT
    ),
    "recurrent, dropout": Row(
        lambda: RecurrentNet(4, num_features=D, num_layers=2, dropout=0.5, bptt_steps=5, learning_rate_decay=0.5),
        "vectors",
        random_by_rank=True,
        **GRADIENT,
    ),
}


def state(model: Any) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint keeps of a model, as copies."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same_state(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> None:
    """Whole numbers must be equal. A tolerance of 0 means bit for bit."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        limit = tolerance if value.is_floating_point() else 0.0
        torch.testing.assert_close(
            found[name], value, rtol=limit, atol=limit, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )
