"""Random generators that do not depend on the global state."""

from __future__ import annotations

import hashlib

import torch


def generator(*key: int | str) -> torch.Generator:
    """Returns a random generator that depends on the key alone, such as ``generator(seed, "shuffle", epoch)``.

    The streams of different keys are unrelated. Those of neighboring seeds, or of sums of numbers, need not be.
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
