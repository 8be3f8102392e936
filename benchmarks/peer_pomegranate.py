"""pomegranate's `DenseHMM`: one `summarize` and one `from_summaries` in float32.

`baum_welch.py` starts this program; see `peer.py`.

These two calls are what its `fit` makes in each iteration, without the sorting of sequences by length that `fit` does
first.
"""

from __future__ import annotations

from importlib.metadata import version

import numpy as np
import torch
from peer import serve
from pomegranate.distributions import Categorical
from pomegranate.hmm import DenseHMM


class Pomegranate:
    def __init__(self) -> None:
        self.versions = {name: version(name) for name in ("pomegranate", "torch")}

    def load(self, initial: np.ndarray, transition: np.ndarray, emission: np.ndarray, symbols: np.ndarray) -> None:
        self.start = [torch.from_numpy(array).float() for array in (initial, transition, emission)]
        self.symbols = torch.from_numpy(symbols[:, :, None])
        self.reset()

    def reset(self) -> None:
        initial, transition, emission = self.start
        # Its models have an end state, uniform unless given. Left out, the model would count as not initialized, and
        # `summarize` would begin with k-means.
        ends = torch.full_like(initial, 1 / len(initial))
        rows = [Categorical(row[None], check_data=False) for row in emission]
        self.model = DenseHMM(rows, edges=transition, starts=initial, ends=ends, check_data=False)

    def step(self) -> None:
        self.model.summarize(self.symbols)
        self.model.from_summaries()

    def transition(self) -> np.ndarray:
        return self.model.edges.exp().numpy()


if __name__ == "__main__":
    serve(Pomegranate())
