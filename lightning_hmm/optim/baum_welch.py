r"""Baum-Welch: the gradient is the E-step, the step is the M-step.

With natural parameters, the gradient of the log-likelihood is the expected sufficient statistics, so that EM is::

    optimizer = BaumWelch({"transition": rows})
    (-log_likelihood).sum().backward()  # E-step: rows.log_probs.grad = -counts
    optimizer.step()  # M-step

Gradients that are summed over batches and ranks are summed statistics, and the state of the optimizer holds the count buffer
of online EM. The optimizer does not depend on a model: it discounts statistics and adds priors, and each `Distribution` brings
its maximizer.

The statistics must be exact sums over the data. A maximum-likelihood estimate does not depend on their scale, but a prior does.
Under Lightning the models gather expected counts over batches and ranks themselves and pass them as ``step(counts=...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hmm.distributions import Distribution
from lightning_hmm.sequences import Sequences

# Where only gradients are given, the counts of this distribution add up to the (weighted) number of sequences they come from.
_MEASURE = "initial"


class BaumWelch(Optimizer):
    r"""Batch EM, or online EM where `discount` is given.

    Online EM keeps the lambda-discounted statistics of the batches,

    .. math:: S \leftarrow \lambda S + (1 - \lambda) s, \qquad \hat\theta = \operatorname{argmax}(S / (1 - \lambda^n))

    which hold about one batch's worth of counts; division by :math:`1 - \lambda^n` makes that exact from the first batch
    on. Priors are given in counts of the whole data set, so here they enter with the share batch / data.

    Args:
        distributions: by name; each has its parameters, its prior and its maximizer.
        discount: lambda in [0, 1); ``None`` for batch EM.
        frozen: names of distributions that keep their parameters.
        data_size: the (weighted) number of sequences in the whole training set; needed for priors in online EM.
    """

    def __init__(
        self,
        distributions: Mapping[str, Distribution],
        discount: float | None = None,
        frozen: Collection[str] = (),
        data_size: float | None = None,
    ) -> None:
        if discount is not None and not 0 <= discount < 1:
            raise ValueError(f"`discount` must be at least 0 and below 1, but is {discount} instead.")
        for name in frozen:
            if name not in distributions:
                raise ValueError(f"`frozen` must name one of {', '.join(distributions)}, but names {name!r} instead.")
        if (
            discount is not None
            and data_size is None
            and any(value for part in distributions.values() for value in part.prior.values())
        ):
            raise ValueError(
                "`data_size` must be given for online EM with a prior: priors are in counts of the whole data set."
            )
        # Callables and modules stay out of the groups: these go into checkpoints, which hold plain values only.
        self.distributions = dict(distributions)
        self.kept_rows: dict[str, Tensor] = {}
        groups = [
            {
                "params": list(distribution.parameters()),
                "name": name,
                "prior": dict(distribution.prior),
                "frozen": name in frozen,
                "updates": 0,
            }
            for name, distribution in distributions.items()
        ]
        super().__init__(groups, {"discount": discount, "data_size": data_size})

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        counts: Mapping[str, Sequence[Tensor]] | None = None,
        num_sequences: Tensor | None = None,
        discounted: bool = True,
    ) -> Any:
        """Performs one M-step. Afterwards `kept_rows` holds the number of rows without statistics by distribution.

        Args:
            closure: evaluated first, as in other optimizers of torch.
            counts: the expected statistics of each distribution by its name, one tensor for each of its parameters. If not given,
                they are the negative gradients of the parameters; without any gradient nothing happens.
            num_sequences: the (weighted) number of sequences that `counts` come from, which priors in online EM need. If not given, it is the sum
                of the counts of "initial".
            discounted: ``False`` for statistics of the whole data set in an optimizer with a `discount`: they are used as they are
                and the count buffer stays unchanged.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if counts is None:
            if all(parameter.grad is None for group in self.param_groups for parameter in group["params"]):
                return loss
            counts = {group["name"]: self._from_gradients(group) for group in self.param_groups}
        weight = self._prior_weight(counts, num_sequences) if discounted else 1.0
        for group in self.param_groups:
            online = discounted and group["discount"] is not None
            statistics = list(counts[group["name"]])
            if online and statistics:
                statistics = [
                    self._discounted(group, parameter, value)
                    for parameter, value in zip(group["params"], statistics, strict=True)
                ]
            group["updates"] += 1
            if not group["frozen"]:
                if online:
                    correction = 1.0 - group["discount"] ** group["updates"]
                    statistics = [value / correction for value in statistics]
                distribution = self.distributions[group["name"]]
                self.kept_rows[group["name"]] = distribution.maximize(statistics, weight)
        return loss

    def _from_gradients(self, group: dict[str, Any]) -> list[Tensor]:
        if not self.distributions[group["name"]].has_natural_parameters:
            raise RuntimeError(
                f"The parameters of `{group['name']}` are not natural parameters, so their gradients are not expected counts. Call `step(counts=...)` instead."
            )
        for parameter in group["params"]:
            if parameter.grad is None:
                raise RuntimeError(
                    f"`{group['name']}` has no gradient, so there are no counts to step from. Call `backward()` on the negative log-likelihood first."
                )
        return [-parameter.grad for parameter in group["params"]]

    def _discounted(self, group: dict[str, Any], parameter: Tensor, counts: Tensor) -> Tensor:
        return (
            self._buffer(parameter, "statistics", counts)
            .mul_(group["discount"])
            .add_(counts, alpha=1 - group["discount"])
        )

    def _prior_weight(self, counts: Mapping[str, Sequence[Tensor]], size: Tensor | None) -> Tensor | float:
        """The share of the data that the statistics represent: 1 in batch EM, the discounted batch size in online EM."""
        group = next((group for group in self.param_groups if group["name"] == _MEASURE), self.param_groups[0])
        if group["discount"] is None or group["data_size"] is None:
            return 1.0
        parameter = group["params"][0]
        if size is None:
            (starts,) = counts[group["name"]]
            size = starts.sum() / parameter.shape[:-1].numel()  # restarts see the same sequences
        buffer = self._buffer(parameter, "size", size).mul_(group["discount"]).add_(size, alpha=1 - group["discount"])
        return buffer / (1.0 - group["discount"] ** (group["updates"] + 1)) / group["data_size"]

    def _buffer(self, parameter: Tensor, name: str, like: Tensor) -> Tensor:
        """A tensor of the optimizer's state, zero at first."""
        state = self.state[parameter]
        if name not in state:
            state[name] = torch.zeros_like(like)
        return state[name]

    @torch.no_grad()
    def fused_pass(self, sequences: Sequences, batch_size: int, kernel: Callable[..., Tensor]) -> Tensor:
        """Many online updates at once: one for each `batch_size` consecutive sequences, in one compiled pass.

        The result is that of `backward` and `step` for each batch. `kernel` is the compiled pass of the family. Its first arguments are the parameters of
        the groups in their order. Returns (restarts, N) log-likelihoods.
        """
        first = self.param_groups[0]
        if first["discount"] is None:
            raise ValueError(
                "`discount` must be given for a pass of many updates: batch EM makes one update from all data."
            )
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        buffers = [self._buffer(parameter, "statistics", parameter) for parameter in parameters]
        size = self._buffer(parameters[0], "size", parameters[0].new_zeros(()))
        data_size = 1.0 if first["data_size"] is None else first["data_size"]
        scores = self._run(
            kernel, sequences, batch_size, first["discount"], first["updates"], data_size, size, parameters, buffers
        )
        for group in self.param_groups:
            group["updates"] += -(-len(sequences) // batch_size)
        return scores

    @torch.no_grad()
    def fused_iteration(self, sequences: Sequences, kernel: Callable[..., Tensor]) -> Tensor:
        """One iteration of batch EM in one compiled pass: an update from all sequences that remembers nothing. Arguments and result as `fused_pass`."""
        filled = sequences.lengths > 0
        data_size = float(filled.sum() if sequences.weights is None else sequences.weights[filled].sum())
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        buffers = [torch.zeros_like(parameter) for parameter in parameters]
        scores = self._run(
            kernel,
            sequences,
            max(1, len(sequences)),
            0.0,
            0,
            data_size,
            parameters[0].new_zeros(()),
            parameters,
            buffers,
        )
        for group in self.param_groups:
            group["updates"] += 1
        return scores

    def _run(
        self,
        kernel: Callable[..., Tensor],
        sequences: Sequences,
        batch_size: int,
        discount: float,
        updates: int,
        data_size: float,
        size: Tensor,
        parameters: list[Tensor],
        buffers: list[Tensor],
    ) -> Tensor:
        """The compiled pass of each restart. All restarts see the same sequences, so the buffer of batch sizes advances once."""
        groups = [group for group in self.param_groups for _ in group["params"]]
        priors = [group["prior"].get("pseudocount", 0.0) - group["prior"].get("sparsity", 0.0) for group in groups]
        options = {"discount": discount, "updates": updates, "data_size": data_size, "priors": priors}
        options["frozen"] = [group["frozen"] for group in groups]
        scores, size_before = [], size.clone()
        for restart in range(parameters[0].shape[0]):
            size.copy_(size_before)
            views = [parameter[restart] for parameter in parameters]
            scores.append(
                kernel(
                    *views, sequences, batch_size, size=size, buffers=[buffer[restart] for buffer in buffers], **options
                )
            )
        return torch.stack(scores)

    def forget(self) -> None:
        """Forgets the updates made so far, as for a model that starts over."""
        self.state.clear()
        self.kept_rows = {}
        for group in self.param_groups:
            group["updates"] = 0

    def log_prior(self) -> Tensor:
        """(restarts,) the logarithm of the prior density, up to a constant: what batch EM adds to the log-likelihood."""
        terms = [self.distributions[group["name"]].log_prior() for group in self.param_groups]
        return torch.stack(terms).sum(0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As saved. (torch would cast the buffers to the parameters' precision, and resuming would not be exact.)"""
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for option in ("name", "discount", "prior", "frozen"):
                if group[option] != saved_group[option]:
                    raise ValueError(
                        f"The checkpoint was trained with `{option}` of {group['name']} {saved_group[option]}, but now it is {group[option]}. "
                        "Go on with the same options, or start from the checkpoint's parameters without its optimizer."
                    )
        super().load_state_dict(state_dict)
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(saved, parameters, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                self.state[parameter][name] = value.to(parameter.device).clone() if isinstance(value, Tensor) else value
