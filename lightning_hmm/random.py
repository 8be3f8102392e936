"""Random generators that do not depend on the global state."""

from __future__ import annotations

import hashlib

import torch


def generator(*key: int | str) -> torch.Generator:
    """Returns a random generator that depends on the key only, such as ``generator(seed, "shuffle", epoch)``.

    The streams of different keys are independent. Seeds that are sums, such as ``seed + epoch``, would not have this
    property.

    Example:
        >>> first, second = generator(0, "shuffle", 3), generator(0, "shuffle", 3)
        >>> torch.equal(torch.rand(5, generator=first), torch.rand(5, generator=second))
        True
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
