"""Everything that takes symbols gives the same for any type in which they are stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_hmm import DMCHMM, ClonedHMM, DenseHMM, Sequences, StandardHMM, fit, inference
from lightning_hmm.distributions.transitions.clones import ngram_counts, seen_pairs
from lightning_hmm.inference import cloned
from lightning_hmm.inference.cooccurrence import pair_counts
from lightning_hmm.models.baselines import KneserNey, RecurrentNet
from lightning_hmm.models.contexts import BackOff, Contexts

V = 128  # the most that int8 can hold: sums and products of such symbols cannot
CLONES: dict[str, Any] = {"pairs": "all", "initial_pseudocount": 0.1, "transition_pseudocount": 0.1, "seed": 0}


def data(dtype: torch.dtype, missing: bool) -> Sequences:
    values = torch.from_numpy(np.random.default_rng(3).integers(0, V, 66))
    values[:2] = V - 1
    if missing:
        values[7] = -1
    return Sequences.from_lengths(values.to(dtype), [40, 1, 0, 25])


def contexts(batch: Sequences) -> Any:
    made = Contexts(batch, V, 2)
    return made.symbols, made.encode(batch).values


def hmm(make: Callable[[], Any]) -> Callable[[Sequences], Any]:
    def run(batch: Sequences) -> Any:
        model = make()
        fit(model, batch, max_epochs=2)
        return model.score(batch), model.decode(batch).values, model.predict_next(batch)

    return run


def recurrent(batch: Sequences) -> Any:
    torch.manual_seed(0)
    net = RecurrentNet(4, num_symbols=V)
    return net.score(batch), net.predict_next(batch)


def e_step_of_clones(batch: Sequences) -> Any:
    layout = cloned.Layout(torch.full((V,), 2))
    draw = torch.Generator().manual_seed(0)
    weights = torch.rand(layout.num_entries, dtype=torch.float64, generator=draw)
    rows = layout.states_of(torch.arange(layout.num_entries))[0]
    probs = weights / torch.zeros(layout.num_states, dtype=torch.float64).index_add_(0, rows, weights)[rows]
    initial = torch.full((layout.num_states,), 1 / layout.num_states, dtype=torch.float64)
    problem = initial.log(), cloned.Blocks(probs, layout), cloned.ClonedSymbols.of(batch, layout), batch.offsets
    return *inference.e_step(*problem).counts, inference.predict(*problem)


def back_off(batch: Sequences) -> Any:
    model = ClonedHMM(num_symbols=V, clones=[1] * V, **CLONES)
    fit(model, batch, max_epochs=1)
    return BackOff([model], batch, V).joined(Contexts(batch, V, 1)).score(batch)


RUNS = {
    "pair_counts": lambda batch: pair_counts(batch, V),
    "ngram_counts": lambda batch: (ngram_counts(batch, V, 3, unique=True), ngram_counts(batch, V, 3, unique=False)),
    "seen_pairs": seen_pairs,
    "kneser_ney": lambda batch: KneserNey(V, 3).fit(batch).step_probs(batch),
    "contexts": contexts,
    "back_off": back_off,
    "recurrent": recurrent,
    "e_step": e_step_of_clones,
    "standard": hmm(lambda: StandardHMM(num_states=2, num_symbols=V, seed=0)),
    "online": hmm(
        lambda: StandardHMM(
            num_states=2, num_symbols=V, seed=0, emission_pseudocount=0.1, discount=0.9, sequences_per_update=1
        )
    ),
    "dense": hmm(lambda: DenseHMM(num_states=2, num_symbols=V, embedding_dim=2, seed=0)),
    "dmc": hmm(lambda: DMCHMM(num_states=3, num_symbols=V, num_kept=2, seed=0)),
    "cloned": hmm(lambda: ClonedHMM(num_symbols=V, clones=[2] * V, **CLONES)),
    "cloned_online": hmm(
        lambda: ClonedHMM(num_symbols=V, clones=[2] * V, **CLONES, discount=0.9, sequences_per_update=1)
    ),
}
WITHOUT_MISSING = {"kneser_ney", "contexts", "back_off"}


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("name", RUNS)
def test_results_do_not_depend_on_the_type(name, missing):
    if missing and name in WITHOUT_MISSING:
        with pytest.raises(ValueError, match="position 7 of sequence 0 is missing"):
            RUNS[name](data(torch.int8, missing))
        return
    expected = RUNS[name](data(torch.int64, missing))
    for dtype in (torch.int8, torch.int16):
        torch.testing.assert_close(RUNS[name](data(dtype, missing)), expected, rtol=0, atol=0, equal_nan=True)


def test_clones_take_symbols_in_the_narrowest_type_without_a_copy():
    batch = data(torch.int8, missing=False)
    symbols = cloned.ClonedSymbols.of(batch, cloned.Layout(torch.full((V,), 2))).symbols
    assert symbols.dtype == torch.uint8
    assert symbols.data_ptr() == batch.values.data_ptr()
