"""Threads and memory for compiled kernels.

Work is dealt to a fixed number of lanes, each with sums of its own, that depends on shapes only. So one thread and
sixteen give the same bits. Threads are Python's, as the kernels release the GIL: numba's own OpenMP layer kills forked
children, and its parallel compiler triples the compile time.
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

_MAX_LANES = 32
_LANE_BYTES = 1 << 28  # the lanes' sums together stay below this
_KEPT_BYTES = 1 << 26  # a larger workspace is given back after the call


def num_lanes(num_tiles: int, lane_bytes: int) -> int:
    """How many lanes share the tiles, if each has sums of `lane_bytes`."""
    return max(1, min(num_tiles, _MAX_LANES, _LANE_BYTES // max(1, lane_bytes)))


_pool: tuple[int, int, ThreadPoolExecutor] | None = None


def run_lanes(lanes: int, work: Callable[[int], Any], *, spread: bool = False) -> None:
    """Calls ``work(lane)`` for each lane, on as many threads as torch uses; this thread is one of them.

    With `spread`, it steps aside for a moment first: the scheduler starts the other threads on this one's processor, and if that is kept busy may
    take some milliseconds to move them.
    """
    global _pool
    threads = min(lanes, torch.get_num_threads())
    waiting = iter(range(lanes))

    def take() -> None:
        for lane in waiting:  # the next that nobody has taken
            work(lane)

    if threads == 1:
        take()
        return
    # A forked child has no threads of its parent's: it makes a pool of its own.
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
    """In this thread, numbers below the normal range are zero: arithmetic with them is up to a hundred times slower."""
    already = _SMALLEST * float(np.ones(1)[0]) == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(already)


_scratch = threading.local()


def workspace(dtype: np.dtype, size: int) -> np.ndarray:
    """`size` numbers, kept by the thread between calls: fresh pages would cost as much as the arithmetic."""
    if size * dtype.itemsize > _KEPT_BYTES:
        return aligned_zeros(dtype, size)
    kept = getattr(_scratch, dtype.name, None)
    if kept is None or kept.shape[0] < size:
        kept = aligned_zeros(dtype, size)
        setattr(_scratch, dtype.name, kept)
    return kept[:size]


def aligned_zeros(dtype: Any, *shape: int) -> np.ndarray:
    """Zeros that begin at a cache line; a vector across two of them takes twice as long to load."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)
