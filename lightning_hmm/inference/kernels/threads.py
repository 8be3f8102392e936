"""Threads and memory for compiled kernels.

Work is divided into shares, and each share has its own sums. The number of shares depends on shapes only, so the bits
of the results do not depend on the number of threads. Python threads are used, because the kernels release the GIL.
numba's OpenMP layer terminates forked processes, and its parallel compiler triples the compile time.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_MAX_SHARES = 32
_SHARED_BYTES = 1 << 28  # largest size of the sums of all shares together
_KEPT_BYTES = 1 << 26  # A larger workspace is freed after the call.


def num_shares(num_tiles: int, share_bytes: int) -> int:
    """Returns the number of shares into which tiles are divided, if each share has sums of `share_bytes`."""
    return max(1, min(num_tiles, _MAX_SHARES, _SHARED_BYTES // max(1, share_bytes)))


_pool: tuple[int, int, ThreadPoolExecutor] | None = None


def run_shares(shares: int, work: Callable[[int], Any], *, spread: bool = False) -> None:
    """Calls ``work(share)`` for each share, on as many threads as torch uses, including the present one.

    With `spread`, the present thread sleeps for a moment after it has started the others. The scheduler starts them on
    the processor of the present thread, and if that is busy, it can take some milliseconds to move them.
    """
    global _pool
    threads = min(shares, torch.get_num_threads())
    waiting = iter(range(shares))

    def take() -> None:
        for share in waiting:  # All threads draw from the same iterator.
            work(share)

    if threads == 1:
        take()
        return
    # A forked process does not inherit the threads, so it creates its own pool.
    if _pool is None or _pool[0] != os.getpid() or _pool[1] != torch.get_num_threads():
        _pool = (os.getpid(), torch.get_num_threads(), ThreadPoolExecutor(torch.get_num_threads(), "lightning_hmm"))
    others = [_pool[2].submit(take) for _ in range(threads - 1)]
    if spread:
        time.sleep(1e-5)
    try:
        take()
    finally:
        for other in others:
            other.result()


_SMALLEST = float(np.nextafter(0.0, 1.0))


@contextmanager
def no_subnormals() -> Iterator[None]:
    """Treats subnormal numbers as zero in this thread, because arithmetic with them is up to a hundred times slower."""
    already = _SMALLEST * float(np.ones(1)[0]) == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(already)


_scratch = threading.local()


def workspace(dtype: np.dtype, size: int) -> np.ndarray:
    """Returns an array of `size` numbers that is reused by later calls in the same thread.

    Allocating new memory pages would take as long as the arithmetic.
    """
    if size * dtype.itemsize > _KEPT_BYTES:
        return aligned_zeros(dtype, size)
    kept = getattr(_scratch, dtype.name, None)
    if kept is None or kept.shape[0] < size:
        kept = aligned_zeros(dtype, size)
        setattr(_scratch, dtype.name, kept)
    return kept[:size]


def aligned_zeros(dtype: Any, *shape: int) -> np.ndarray:
    """Returns zeros aligned to a cache line, because loading a vector across two lines takes twice as long."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)
