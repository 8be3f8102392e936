"""Many updates of online EM in one compiled pass, for categorical rows: the first state, a full transition matrix and symbols."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_hmm.inference.cpu.online import online_pass
from lightning_hmm.inference.results import impossible_message
from lightning_hmm.sequences import Sequences


def categorical_pass(
    initial: Tensor,
    transition: Tensor,
    emission: Tensor,
    sequences: Sequences,
    batch_size: int,
    *,
    size: Tensor,
    buffers: Sequence[Tensor],
    **options: Any,
) -> Tensor:
    """Online EM over consecutive batches of `batch_size` sequences; parameters and buffers change in place.

    Each batch is an E-step and a step of `BaumWelch`, without the cost of a Python step for each.

    Args:
        initial, transition, emission: (K,), (K, K) and (K, V) log-probabilities on the CPU.
        sequences: of symbols.
        batch_size: sequences of an update.
        size: the discounted number of sequences in a batch.
        buffers: the discounted counts of the parameters, in their order.
        options: see `inference.cpu.online.online_pass`.

    Returns:
        (N,) log p(y) of each sequence under the parameters that its batch met.
    """
    weights = np.ones(len(sequences)) if sequences.weights is None else sequences.weights.numpy()
    symbols = sequences.symbols(emission.shape[1]).numpy()
    log_initial, log_transition, log_emission = (tensor.detach().numpy() for tensor in (initial, transition, emission))
    memory = [buffer.numpy() for buffer in buffers]
    data = symbols, sequences.offsets.numpy(), weights
    scores, impossible = online_pass(log_initial, log_transition, log_emission, memory, size.reshape(1).numpy(), *data, batch_size=batch_size, **options)
    if impossible is not None:
        raise ValueError(impossible_message(sequences, *impossible))
    return torch.from_numpy(scores)
