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

from lightning_hmm import DMCHMM, HMM, ClonedHMM, DenseHMM, NeuralHMM, Sequences, StandardHMM, fit
from lightning_hmm.callbacks import Pruning
from lightning_hmm.columns import Column
from lightning_hmm.distributions import (
    Categorical,
    EmbeddedCategorical,
    EmbeddedGaussian,
    EmbeddedTransition,
    Emission,
    Full,
    Gaussian,
    Initial,
    InputDriven,
    InputDrivenInitial,
    Poisson,
    Product,
    Regression,
    Weibull,
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
                message=".*(rows of .* got no counts|is a single gradient step|has probability zero|likelihood of these data is zero)",
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
    """Real vectors as what the models of a kind observe, with inputs for kinds that end in "inputs".

    They are counts for "count vectors", 0 and 1 for "binary vectors", positive for "positive vectors", and two numbers,
    a symbol and a count for "mixed vectors".
    """
    if kind.endswith(" inputs"):
        inputs = np.random.default_rng(7).normal(size=(sequences.num_steps, 2))
        return suited(kind.removesuffix(" inputs"), sequences).replaced(inputs=torch.from_numpy(inputs))
    counts = sequences.values.abs().floor()
    if kind == "count vectors":
        return sequences.with_values(counts)
    if kind == "binary vectors":
        return sequences.with_values(torch.where(counts.isnan(), torch.nan, (counts > 1).double()))
    if kind == "positive vectors":
        return sequences.with_values(sequences.values.abs() + 0.1)
    if kind == "mixed vectors":
        return sequences.with_values(torch.cat([sequences.values, counts[:, :1] % 3, counts[:, 1:2]], 1))
    return sequences


def _left_right() -> StandardHMM:
    """With transitions that are impossible."""
    steps = [[0.7, 0.3, 0.0], [0.0, 0.6, 0.4], [0.0, 0.0, 1.0]]
    return StandardHMM(3, V, transition_pseudocount=0.5).set_parameters(initial=[0.6, 0.4, 0.0], transition=steps)


def _composed(emission: Emission, num_features: int | None = D, restarts: int = 2, **options: Any) -> HMM:
    return HMM(2, emission, Full(0.5), Initial(0.3), num_features=num_features, restarts=restarts, **options)


def _mixed(**options: Any) -> HMM:
    parts: dict[str, Emission] = {"x, y": Gaussian("full", 0.1), "symbol": Categorical(0.1), "count": Poisson(0.2)}
    columns = [Column("x"), Column("y"), Column("symbol", "categorical", 3), Column("count")]
    return _composed(Product(parts), None, columns=columns, **options)


PRIORS: dict[str, Any] = {"initial_pseudocount": 0.3, "transition_pseudocount": 0.5}
SYMBOLS: dict[str, Any] = {"num_states": 3, "num_symbols": V, "emission_pseudocount": 0.1, **PRIORS}
GAUSSIAN: dict[str, Any] = {"emission": "gaussian", "num_features": D}
VECTORS: dict[str, Any] = {"num_states": 2, "variance_prior": 0.1, **GAUSSIAN, **PRIORS}
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
    "composed, product": Row(_mixed, "mixed vectors"),
    "composed, product, one start": Row(lambda: _mixed(restarts=1), "mixed vectors", states=True),
    "composed, product, online": Row(lambda: _mixed(discount=0.8), "mixed vectors", **ONLINE),
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
    "DMC, lazy": Row(
        lambda: DMCHMM(8, 2, V, criterion="largest", selection="lazy", reselect_every=2, restarts=2), epochs=4
    ),
    "DMC, Gaussian": Row(lambda: DMCHMM(4, 1, **GAUSSIAN), "vectors"),
    "DMC, lazy, Gaussian": Row(
        lambda: DMCHMM(
            9, 3, criterion="largest", selection="lazy", transition_pseudocount=0.1, variance_prior=0.1, **GAUSSIAN
        ),
        "vectors",
    ),
    "dense, EM": Row(lambda: DenseHMM(3, V, 2, objective="em", m_steps=3, restarts=2), closed=False),
    "dense, likelihood": Row(lambda: DenseHMM(3, V, 2, objective="likelihood", restarts=2), **GRADIENT),
    "dense, co-occurrences": Row(
        lambda: DenseHMM(3, V, 2, objective="cooccurrence", steps_per_epoch=3, restarts=2), closed=False
    ),
    "dense, Poisson": Row(
        lambda: DenseHMM(2, m_steps=3, emission=Poisson(0.2), num_features=D), "count vectors", closed=False
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
