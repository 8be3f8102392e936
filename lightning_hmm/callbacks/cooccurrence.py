"""The measures of Sicking et al. (2020), for any model of symbols."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, Trainer

from lightning_hmm.inference.cooccurrence import cooccurrences, long_run
from lightning_hmm.metrics import NormalisedNLL, PairFrequencies


class CooccurrenceReport(Callback):
    """Logs, after a test, mean absolute deviations of the frequencies of symbol pairs, and likelihoods as that paper has them.

    - ``test/cooccurrence_mad_analytic``: of the model's frequencies in the long run from those of the test data.
    - ``test/cooccurrence_mad_sampled``: of the frequencies in sequences drawn from the model, as many and as long as the test
      data, from those of the test data. The model's own start and the noise of a sample are in it.
    - ``test/nll_per_symbol``, and ``test/nll_normalised``, which divides by the number of sequences times the longest length.

    Where the data were drawn from a known model (a synthetic datamodule), its exact frequencies stand for those of the test data.

    Args:
        seed: of the sampled sequences.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed

    def on_test_start(self, trainer: Trainer, pl_module: Any) -> None:
        num_symbols = getattr(pl_module, "num_symbols", None)
        if num_symbols is None:
            raise ValueError(f"CooccurrenceReport is for models of symbols, but the {type(pl_module).__name__} has none.")
        self._observed, self._drawn = (PairFrequencies(num_symbols).to(pl_module.device) for _ in range(2))
        self._nll = NormalisedNLL().to(pl_module.device)

    def on_test_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._observed.update(batch)
        self._nll.update(pl_module.score(batch), batch.lengths)
        seed = self.seed + batch_idx + 1_000_003 * trainer.global_rank
        self._drawn.update(pl_module.sample(len(batch), batch.lengths.tolist(), seed).to(pl_module.device))

    def on_test_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        datamodule: Any = getattr(trainer, "datamodule", None)
        true_transition, true_emission = getattr(datamodule, "transition_probs", None), getattr(datamodule, "emission_probs", None)
        if true_transition is None or true_emission is None:
            target = self._observed.compute()
        else:
            target = cooccurrences(true_transition, true_emission).to(pl_module.device)
        transition = pl_module.transition_probs
        model = cooccurrences(transition, pl_module.emission_probs, long_run(pl_module.initial_probs, transition))
        for kind, frequencies in {"analytic": model, "sampled": self._drawn.compute()}.items():
            pl_module.log(f"test/cooccurrence_mad_{kind}", (frequencies - target).abs().mean())
        pl_module.log("test/nll_normalised", self._nll.compute())
        pl_module.log("test/nll_per_symbol", -pl_module.test_likelihood.compute().reshape(-1)[int(pl_module.chosen)])
