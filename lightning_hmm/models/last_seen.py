"""What was last observed before each step of a sequence, and where the observed part of a sequence ends."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_hmm.sequences import Sequences


def last_seen(padded: Tensor) -> tuple[Tensor, Tensor]:
    """The values last observed before each step of (N, longest, D) padded sequences.

    Returns (N, longest, D) the last observed value of each feature, NaN if there is none, and whether it was observed
    at the step just before.
    """
    num_sequences, longest, num_features = padded.shape
    before = torch.cat([padded.new_full((num_sequences, 1, num_features), torch.nan), padded], 1)[:, :longest]
    observed = ~before.isnan()
    steps = torch.arange(longest, device=padded.device).view(1, -1, 1)
    latest = torch.where(observed, steps, 0).cummax(1).values if longest else steps.expand_as(before)
    return before.gather(1, latest), observed


def up_to_last_seen(sequences: Sequences, steps: int) -> tuple[Sequences, Tensor]:
    """Removes the steps at the ends of sequences at which nothing is observed.

    Returns the shorter sequences and (N,) how many steps after their new ends the `steps`-th step after the old ends
    is.
    """
    seen = (~sequences.padded().isnan()).any(2)
    number = torch.arange(1, seen.shape[1] + 1, device=seen.device)
    none = torch.zeros(len(seen), dtype=torch.int64)
    lengths = torch.where(seen, number, 0).amax(1).cpu() if seen.shape[1] else none
    kept = sequences.packed(number <= lengths.to(seen.device).unsqueeze(1))
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    shorter = sequences.with_steps(kept, offsets, sequences.weights)
    return shorter, sequences.lengths - lengths + steps
