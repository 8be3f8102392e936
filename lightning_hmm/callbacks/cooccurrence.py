"""Co-occurrence metrics of Sicking et al. (2020), for any model of symbols."""

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

_MOST_STEPS = 1 << 20  # number of steps that are sampled at a time


class CooccurrenceReport(Callback):
    """Compares the frequencies of symbol pairs under a model with those of the test data, after a test.

    The metrics are those of Sicking et al. (2020). MAD is the mean absolute deviation over all pairs of symbols.

    - ``test/cooccurrence_mad_analytic``: MAD between the long-run frequencies of the model and the frequencies in the
      test data. It is not logged, with a warning, for a `ClonedHMM` with more than 4096 states, and if the chain ends
      because it reaches a state without transitions.
    - ``test/cooccurrence_mad_sampled``: MAD between the frequencies in sequences sampled from the model and those in
      the test data. The sample has the number of sequences, the lengths and the weights of the test data. Unlike the
      analytic metric, this one includes the effects of the initial distribution and of sampling noise. The sample
      depends only on `seed`, not on batches or ranks. The metric is not logged, with a warning, if the model cannot
      generate sequences of these lengths.
    - ``test/nll_per_symbol``: negative log-likelihood per symbol.
    - ``test/nll_normalised``: negative log-likelihood divided by the number of sequences and by the length of the
      longest sequence; see `NormalizedNLL`.

    If the data were sampled from a known model (by a synthetic datamodule), the exact frequencies under that model are
    used instead of those in the test data.

    Args:
        seed: Seed of the sampled sequences.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_hmm.callbacks import CooccurrenceReport
        >>> report = CooccurrenceReport(seed=1)
        >>> trainer = Trainer(callbacks=[report], logger=False, accelerator="cpu")
        >>> report in trainer.callbacks
        True
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        # This is also checked before training, so that a run does not fail only when it is tested.
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
        # Lengths and weights of the sequences with positive weight on this rank.
        self._shapes = [torch.zeros(0, 2, dtype=torch.float64)]

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
        pl_module.log(
            "test/nll_per_symbol", -pl_module.test_likelihood.compute().reshape(-1)[int(pl_module.best_restart)]
        )

    def _drawn_frequencies(self, model: Any) -> Tensor | None:
        """Computes the (V, V) frequencies of symbol pairs in a sample with the lengths and weights of the test data.

        Every rank draws the whole sample, in the order of lengths and weights, so that the result does not depend on
        how the data are distributed. If no sample can be drawn, a warning is issued and ``None`` is returned.
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
    """Splits rows of lengths and weights into chunks with about `_MOST_STEPS` steps each."""
    number = (shapes[:, 0].cumsum(0) / _MOST_STEPS).floor()
    return iter(shapes.split(torch.unique_consecutive(number, return_counts=True)[1].tolist()))


def _long_run_frequencies(model: Any) -> Tensor | None:
    """Computes the (V, V) long-run frequencies of symbol pairs under the model.

    If they cannot be computed, a warning is issued and ``None`` is returned.
    """
    transition = getattr(model, "transition_probs", None)
    if transition is None:
        rank_zero_warn(
            f"`test/cooccurrence_mad_analytic` is not logged: the {type(model).__name__} has too many states "
            "for a transition matrix."
        )
        return None
    if getattr(model, "needs_inputs", False):
        rank_zero_warn("`test/cooccurrence_mad_analytic` is not logged: the model depends on inputs.")
        return None
    emission = model.predict_emission(torch.eye(len(transition), dtype=transition.dtype, device=transition.device))
    frequencies = cooccurrences(transition, emission, long_run(model.initial_probs.to(transition.dtype), transition))
    if abs(float(frequencies.sum()) - 1) > 1e-6:
        rank_zero_warn(
            "`test/cooccurrence_mad_analytic` is not logged: "
            "the chain reaches states without transitions, where it ends."
        )
        return None
    return frequencies
