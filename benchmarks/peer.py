"""The side of a benchmark that runs in a peer's own virtual environment.

It reads commands from standard input, one JSON object per line, and writes one line of JSON for each; arrays are passed
as .npz files. It needs only numpy, so that every environment can import it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np


class Peer(Protocol):
    """One library, loaded with a model and its data."""

    versions: dict[str, str]

    def load(self, initial: np.ndarray, transition: np.ndarray, emission: np.ndarray, symbols: np.ndarray) -> None:
        """Takes probabilities (K,), (K, K), (K, V) and symbols (N, T)."""

    def reset(self) -> None:
        """Restores the parameters that were loaded. Not timed."""

    def step(self) -> None:
        """One Baum-Welch iteration, finished when this returns. Timed."""

    def transition(self) -> np.ndarray:
        """(K, K) the transition matrix now."""


def mean_seconds(reset: Callable[[], object], run: Callable[[], object], calls: int) -> float:
    """Returns the mean seconds of `calls` calls of `run`. `reset` is called before each and is not timed.

    If there are several calls, an untimed one precedes them, which starts the threads and fills the caches.
    """
    if calls > 1:
        reset()
        run()
    total = 0.0
    for _ in range(calls):
        reset()
        start = time.perf_counter()
        run()
        total += time.perf_counter() - start
    return total / calls


def serve(peer: Peer) -> None:
    """Executes commands until standard input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of a library must not mix with the results
    for line in sys.stdin:
        order = json.loads(line)
        answer: dict[str, object] = {}
        if order["do"] == "load":
            with np.load(order["file"]) as arrays:
                peer.load(*(arrays[name] for name in ("initial", "transition", "emission", "symbols")))
            answer["versions"] = peer.versions
        elif order["do"] == "step":
            peer.reset()
            peer.step()
            np.savez(order["file"], transition=peer.transition())
        elif order["do"] == "time":
            answer["seconds"] = mean_seconds(peer.reset, peer.step, order["calls"])
        else:
            raise ValueError(f"`do` must be load, step or time, but is {order['do']!r} instead.")
        print(json.dumps(answer), file=answers, flush=True)
