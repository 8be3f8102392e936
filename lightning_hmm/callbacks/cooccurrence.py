"""The measures of Sicking et al. (2020), for any model of symbols."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_hmm.data import data_of
from lightning_hmm.inference.cooccurrence import cooccurrences, long_run, pair_counts
from lightning_hmm.metrics import NormalizedNLL, PairFrequencies

_MOST_STEPS = 1 << 20  # drawn at a time


class CooccurrenceReport(Callback):
    """Logs, after a test, mean absolute deviations of the frequencies of symbol pairs, and likelihoods as that paper has them.

    - ``test/cooccurrence_mad_analytic``: of the model's frequencies in the long run from those of the test data. Not logged, with a warning, for a
      `ClonedHMM` of more than 4096 states, and where the chain ends because it reaches a state without transitions.
    - ``test/cooccurrence_mad_sampled``: of the frequencies in sequences drawn from the model, as many and as long as the test
      data and with the same weights, from those of the test data. The model's own start and the noise of a sample are in it. The sample depends on
      `seed` only, not on batches or ranks. Not logged, with a warning, where the model cannot be sampled at those lengths.
    - ``test/nll_per_symbol``, and ``test/nll_normalised``, which divides by the number of sequences times the longest length.

    Where the data were drawn from a known model (a synthetic datamodule), its exact frequencies stand for those of the test data.

    Args:
        seed: of the sampled sequences.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        # Also before training, so that a run does not end only at its test.
        kind, num_symbols = type(pl_module).__name__, getattr(pl_module, "num_symbols", None)
        if num_symbols is None:
            raise ValueError(f"CooccurrenceReport is for models of symbols, but the {kind} has none.")
        if not hasattr(pl_module, "sample"):
            raise ValueError(
                f"CooccurrenceReport is for models that can be sampled from, but the {kind} has no `sample`."
            )

    def on_test_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._observed = PairFrequencies(pl_module.num_symbols).to(pl_module.device)
        self._nll = NormalizedNLL().to(pl_module.device)
        self._shapes = [
            torch.zeros(0, 2, dtype=torch.float64)
        ]  # lengths and weights of the sequences of this rank that count

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._observed.update(batch)
        self._nll.update(pl_module.score(batch), batch)
        counted = batch.counted()
        weights = torch.ones(len(counted), dtype=torch.float64) if counted.weights is None else counted.weights.cpu()
        self._shapes.append(torch.stack([counted.lengths.double(), weights], 1))

    def on_test_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        data = data_of(trainer)
        if data is None or data.transition_probs is None or data.emission_probs is None:
            target = self._observed.compute()
        else:
            target = cooccurrences(data.transition_probs, data.emission_probs).to(pl_module.device)
        for kind, frequencies in {
            "analytic": _long_run_frequencies(pl_module),
            "sampled": self._drawn_frequencies(pl_module),
        }.items():
            if frequencies is not None:
                pl_module.log(f"test/cooccurrence_mad_{kind}", (frequencies - target).abs().mean())
        pl_module.log("test/nll_normalised", self._nll.compute())
        pl_module.log("test/nll_per_symbol", -pl_module.test_likelihood.compute().reshape(-1)[int(pl_module.chosen)])

    def _drawn_frequencies(self, model: Any) -> Tensor | None:
        """(V, V) frequencies of symbol pairs in sequences of the lengths and weights of the test data; ``None``, with a warning, where none can be drawn.

        Every rank draws all of them, in the order of lengths and weights, so that it does not matter how the data are distributed.
        """
        shapes = model.gather_rows(torch.cat(self._shapes).to(model.device)).cpu()
        shapes = shapes[shapes[:, 1].argsort(stable=True)]
        shapes = shapes[shapes[:, 0].argsort(stable=True)]
        counts = torch.zeros(model.num_symbols, model.num_symbols, dtype=torch.float64)
        for number, part in enumerate(_parts(shapes)):
            try:
                drawn = model.sample(len(part), part[:, 0].long().tolist(), self.seed + number).to("cpu")
            except ValueError as error:
                rank_zero_warn(f"`test/cooccurrence_mad_sampled` is not logged: {error}")
                return None
            pair_counts(drawn.replaced(weights=part[:, 1]), model.num_symbols, counts)
        return (counts / counts.sum()).to(model.device)


def _parts(shapes: Tensor) -> Iterator[Tensor]:
    """Consecutive rows whose lengths, in the first column, sum to about as many steps as are drawn at a time."""
    number = (shapes[:, 0].cumsum(0) / _MOST_STEPS).floor()
    return iter(shapes.split(torch.unique_consecutive(number, return_counts=True)[1].tolist()))


def _long_run_frequencies(model: Any) -> Tensor | None:
    """(V, V) frequencies of symbol pairs under the model in the long run; ``None``, with a warning, where it has none that can be computed."""
    transition = getattr(model, "transition_probs", None)
    if transition is None:
        rank_zero_warn(
            f"`test/cooccurrence_mad_analytic` is not logged: the {type(model).__name__} has too many states for a transition matrix."
        )
        return None
    emission = model.predict_emission(torch.eye(len(transition), dtype=transition.dtype, device=transition.device))
    frequencies = cooccurrences(transition, emission, long_run(model.initial_probs.to(transition.dtype), transition))
    if abs(float(frequencies.sum()) - 1) > 1e-6:
        rank_zero_warn(
            "`test/cooccurrence_mad_analytic` is not logged: the chain reaches states without transitions, where it ends."
        )
        return None
    return frequencies
