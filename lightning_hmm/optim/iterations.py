"""Iterations of batch EM on one batch. Everything that depends on the data alone is prepared once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hmm.distributions import Emission, Full, Initial
from lightning_hmm.inference import backends
from lightning_hmm.inference.cpu.estep import RepeatedEStep
from lightning_hmm.inference.operators import Dense
from lightning_hmm.optim.baum_welch import BaumWelch
from lightning_hmm.sequences import Sequences


class BatchIterations:
    """Iterations of batch EM for a full transition matrix, on the CPU and in float64.

    An iteration has the result of an E-step and of `BaumWelch.step`. Only for small data is it much faster: the plan of
    the E-step and its memory are kept, and no graph is built.

    Args:
        optimizer: Optimizer of the distributions "initial", "transition" and "emission".
        chunks: Parts of the batch, for each of which an E-step runs.

    Example:
        >>> from lightning_hmm import HMM, Sequences
        >>> from lightning_hmm.optim import BatchIterations, BaumWelch
        >>> model = HMM(2, num_symbols=2)
        >>> run = BatchIterations(BaumWelch(model.distributions), [Sequences.from_list([[0, 0, 1], [1, 0]])])
        >>> scores = [run().sum() for _ in range(3)]
        >>> scores[0] < scores[1] < scores[2]
        tensor(True)
    """

    def __init__(self, optimizer: BaumWelch, chunks: Sequence[Sequences]) -> None:
        self.optimizer = optimizer
        self.parts = [optimizer.distributions[name] for name in ("initial", "transition", "emission")]
        self.restarts = next(self.parts[0].parameters()).shape[0]
        for chunk in chunks:
            self.parts[2].check(chunk)
        self.work = [
            (chunk, RepeatedEStep(chunk.offsets, _weights_of(chunk), smooth=True, per_step=False)) for chunk in chunks
        ]

    @staticmethod
    @torch.no_grad()
    def apply_to(optimizer: Optimizer, chunks: Sequence[Sequences]) -> bool:
        """Whether there is a compiled E-step whose results are the statistics of the M-step."""
        if not isinstance(optimizer, BaumWelch):
            return False
        parts = optimizer.distributions
        initial, transition, emission = (parts.get(name) for name in ("initial", "transition", "emission"))
        if type(initial) is not Initial or type(transition) is not Full or not isinstance(emission, Emission):
            return False
        if not emission.is_closed or emission.num_statistics != 1 or any(map(emission.needs_graph, chunks)):
            return False
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(not parameter.is_cpu or parameter.dtype != torch.float64 for parameter in parameters):
            return False
        evidence = emission.evidence(emission.natural(0), chunks[0])
        operator = transition.operator(transition.natural(0), None)
        return backends.choose(operator, evidence, torch.device("cpu")).name == "cpu"

    @torch.no_grad()
    def __call__(self) -> Tensor | None:
        """Runs one iteration.

        Returns:
            (restarts, N) log-likelihoods of the sequences before the update, or ``None`` if a sequence is impossible.
            In that case nothing was updated.
        """
        scores, statistics = [], []
        for restart in range(self.restarts):
            results = [self._e_step(restart, chunk, e_step) for chunk, e_step in self.work]
            if any(result is None for result in results):
                return None
            found = [result for result in results if result is not None]
            scores.append(torch.cat([result[0] for result in found]) if len(found) > 1 else found[0][0])
            parts = zip(*(result[1:] for result in found), strict=True)
            statistics.append([sum(part[1:], start=part[0]) for part in parts])
        for group, part, *counts in zip(self.optimizer.param_groups, self.parts, *statistics, strict=True):
            group["updates"] += 1
            if not group["frozen"]:
                total = torch.stack(counts) if self.restarts > 1 else counts[0][None]
                self.optimizer.rows_without_counts[group["name"]] = part.maximize([total], 1.0)
        return torch.stack(scores) if self.restarts > 1 else scores[0][None]

    def _e_step(self, restart: int, chunk: Sequences, e_step: RepeatedEStep) -> tuple[Tensor, ...] | None:
        """Returns the log-likelihoods and the statistics of the three parts; ``None`` if a sequence is impossible."""
        emission = self.parts[2]
        assert isinstance(emission, Emission)
        (initial,), (transition,), natural = (part.natural(restart) for part in self.parts)
        evidence = emission.evidence(natural, chunk)
        found = e_step(initial.detach(), Dense(transition.detach()), evidence)
        if found.impossible_step.numel() and int(found.impossible_step.max()) >= 0:
            return None
        (gradient,) = emission.statistics(evidence, found.evidence, natural)
        return found.log_likelihood, found.initial, found.counts[0], gradient


def _weights_of(sequences: Sequences) -> Tensor:
    return torch.ones(len(sequences), dtype=torch.float64) if sequences.weights is None else sequences.weights
