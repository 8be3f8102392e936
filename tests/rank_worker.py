"""Trains and tests every row of a table of models on the ranks of one `torchrun`; the first rank saves what came out.

Started by `tests/test_ranks.py`. All rows run in the same processes, since starting one takes longer than training a small model.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from lightning.pytorch import Trainer

from datamodules import SyntheticDataModule
from lightning_hmm import DMCHMM, ClonedHMM, DenseHMM, NeuralHMM, StandardHMM
from lightning_hmm.models import LinearGaussianHMM, NeuralDiscreteHMM
from lightning_hmm.models.baselines import RecurrentNet

# How to make a model, and the kind of data it is for.
MODELS: dict[str, tuple[Any, str]] = {
    "standard": (lambda: StandardHMM(3, 4, transition_pseudocount=0.1), "categorical"),
    "restarts": (lambda: StandardHMM(3, 4, restarts=2), "categorical"),
    "gaussian": (lambda: StandardHMM(2, emission="gaussian", num_features=2, variance_prior=0.1), "gaussian"),
    "online": (lambda: StandardHMM(3, 4, discount=0.8, transition_pseudocount=0.1), "categorical"),
    "many updates": (lambda: StandardHMM(3, 4, discount=0.8, sequences_per_update=1), "categorical"),
    "DMC": (lambda: DMCHMM(5, 2, num_symbols=4), "categorical"),
    "dense, EM": (lambda: DenseHMM(3, 4, 2, objective="em", m_steps=2), "categorical"),
    "dense, likelihood": (lambda: DenseHMM(3, 4, 2, objective="likelihood"), "categorical"),
    "dense, co-occurrences": (lambda: DenseHMM(3, 4, 2, objective="cooccurrence", steps_per_epoch=2), "categorical"),
    "cloned": (lambda: ClonedHMM(8, 4, pairs="all", transition_pseudocount=1e-3), "categorical"),
    "cloned, online then batch": (lambda: ClonedHMM(8, 4, pairs="all", discount=0.8, online_epochs=1, transition_pseudocount=1e-3), "categorical"),
    "linear-Gaussian": (lambda: LinearGaussianHMM(2, 2), "gaussian"),
    "neural": (lambda: NeuralHMM(2, 2, num_particles=8, num_paths=2, m_steps=1), "gaussian"),
    "neural, discrete": (lambda: NeuralDiscreteHMM(3, 2, m_steps=1), "gaussian"),
    "recurrent": (lambda: RecurrentNet(4, 4), "categorical"),
}
RANDOM_BY_RANK = ("neural",)  # float32 sums in another order change the resampling


def run(name: str, **trainer_options: Any) -> dict[str, Any]:
    """Two epochs and a test on fewer sequences than there are ranks: two to train on, one to validate on, one to test on."""
    make, emission = MODELS[name]
    model = make()
    data = SyntheticDataModule(
        emission=emission, num_states=3, num_symbols=4, num_features=2, num_sequences=4, length=12, val_fraction=0.25, test_fraction=0.25, batch_size=2
    )
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    precision = "64-true" if next(model.parameters()).dtype == torch.float64 else "32-true"
    trainer = Trainer(max_epochs=2, accelerator="cpu", precision=precision, **quiet, **trainer_options)
    trainer.fit(model, datamodule=data)
    metrics = trainer.test(model, datamodule=data, verbose=False)[0]
    return {"parameters": {key: value.detach().clone() for key, value in model.named_parameters()}, "metrics": metrics}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    world_size, path = int(sys.argv[1]), sys.argv[2]
    results = {}
    for row in MODELS:
        results[row] = run(row, strategy="ddp", devices=world_size)
        if torch.distributed.get_rank() == 0:
            torch.save(results, path)  # after every row, so that a failure names the first one that is missing
