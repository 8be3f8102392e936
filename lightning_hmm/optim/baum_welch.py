r"""The Baum-Welch algorithm as an optimizer: computing the gradient is the E-step, and ``step`` is the M-step.

With natural parameters, the gradient of the log-likelihood equals the expected sufficient statistics::

    optimizer = BaumWelch({"transition": rows})
    (-log_likelihood).sum().backward()  # E-step: rows.log_probs.grad = -counts
    optimizer.step()                    # M-step

Gradients that are summed over batches and ranks are summed statistics. The state of the optimizer contains the
discounted counts of online EM. The optimizer does not depend on a model: it discounts the statistics and passes them,
with the weight of the prior, to the `maximize` method of each `Distribution`.

The statistics must be exact sums over the data. A maximum-likelihood estimate does not depend on their scale, but the
effect of a prior does. Under Lightning, the models sum the expected counts over batches and ranks themselves and pass
them as ``step(counts=...)``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_hmm.distributions import Distribution
from lightning_hmm.sequences import Sequences

# Name of the distribution whose counts sum to the (weighted) number of sequences, if that number is not given.
_MEASURE = "initial"


class BaumWelch(Optimizer):
    r"""Batch EM, or online EM if `discount` is given.

    Online EM updates the parameters from the discounted statistics of the batches,

    .. math:: S \leftarrow \lambda S + (1 - \lambda) s, \qquad \hat\theta = \operatorname{argmax}(S / (1 - \lambda^n))

    where s are the statistics of the n-th batch. The division by :math:`1 - \lambda^n` corrects the bias of the first
    updates, so that :math:`S / (1 - \lambda^n)` has the scale of one batch. Priors are given in counts of the whole
    data set. In online EM they are therefore multiplied by the ratio of the batch size to the size of the data set.

    Args:
        distributions: Distributions by name. Each has its parameters, its prior and its M-step.
        discount: Discount factor lambda of online EM, in [0, 1), or ``None`` for batch EM.
        frozen: Names of distributions whose parameters are not updated.
        data_size: (Weighted) number of sequences in the whole training set, required for priors in online EM.

    Attributes:
        rows_without_counts: By distribution, the number of rows that had no counts in the last M-step and kept their
            values.

    Example:
        >>> import torch
        >>> from lightning_hmm.distributions import Initial
        >>> from lightning_hmm.optim import BaumWelch
        >>> initial = Initial()
        >>> initial.allocate(restarts=1, num_states=2)
        >>> optimizer = BaumWelch({"initial": initial})
        >>> log_likelihood = 3 * initial.log_probs[0, 0] + initial.log_probs[0, 1]
        >>> (-log_likelihood).backward()
        >>> optimizer.step()
        >>> initial.probs
        tensor([0.7500, 0.2500], dtype=torch.float64)
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
        # The parameter groups are stored in checkpoints, so they contain only plain values and no modules or callables.
        self.distributions = dict(distributions)
        self.rows_without_counts: dict[str, Tensor] = {}
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
        """Performs one M-step and sets `rows_without_counts`.

        Args:
            closure: Function that is evaluated first, as in other torch optimizers.
            counts: Expected statistics of each distribution by name, one tensor for each of its parameters. The default
                are the negative gradients of the parameters. If no parameter has a gradient, nothing is updated.
            num_sequences: (Weighted) number of sequences from which `counts` were computed, required for priors in
                online EM. The default is the sum of the counts of "initial".
            discounted: ``False`` if the counts are statistics of the whole data set, in an optimizer with a `discount`.
                They are then used without discounting, and the discounted counts of online EM are left unchanged.
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
                # The state of the optimizer is kept by parameter. There are never more statistics than parameters.
                statistics = [
                    self._discounted(group, parameter, value)
                    for parameter, value in zip(group["params"], statistics, strict=False)
                ]
            group["updates"] += 1
            if not group["frozen"]:
                if online:
                    correction = 1.0 - group["discount"] ** group["updates"]
                    statistics = [value / correction for value in statistics]
                distribution = self.distributions[group["name"]]
                self.rows_without_counts[group["name"]] = distribution.maximize(statistics, weight)
        return loss

    def _from_gradients(self, group: dict[str, Any]) -> list[Tensor]:
        if not self.distributions[group["name"]].has_natural_parameters:
            raise RuntimeError(
                f"The parameters of `{group['name']}` are not natural parameters, so their gradients are not expected "
                "counts. Call `step(counts=...)` instead."
            )
        for parameter in group["params"]:
            if parameter.grad is None:
                raise RuntimeError(
                    f"`{group['name']}` has no gradient, so there are no counts to step from. "
                    "Call `backward()` on the negative log-likelihood first."
                )
        return [-parameter.grad for parameter in group["params"]]

    def _discounted(self, group: dict[str, Any], parameter: Tensor, counts: Tensor) -> Tensor:
        return (
            self._buffer(parameter, "statistics", counts)
            .mul_(group["discount"])
            .add_(counts, alpha=1 - group["discount"])
        )

    def _prior_weight(self, counts: Mapping[str, Sequence[Tensor]], size: Tensor | None) -> Tensor | float:
        """Returns the fraction of the data set that the statistics represent, which is the weight of the priors.

        It is 1 in batch EM, and the discounted batch size divided by the size of the data set in online EM.
        """
        group = next((group for group in self.param_groups if group["name"] == _MEASURE), self.param_groups[0])
        if group["discount"] is None or group["data_size"] is None:
            return 1.0
        parameter = group["params"][0]
        if size is None:
            (starts,) = counts[group["name"]]
            size = starts.sum() / parameter.shape[:-1].numel()  # all restarts are trained on the same sequences
        buffer = self._buffer(parameter, "size", size).mul_(group["discount"]).add_(size, alpha=1 - group["discount"])
        return buffer / (1.0 - group["discount"] ** (group["updates"] + 1)) / group["data_size"]

    def _buffer(self, parameter: Tensor, name: str, like: Tensor) -> Tensor:
        """Returns a tensor of the optimizer's state, which is created with zeros if it does not exist."""
        state = self.state[parameter]
        if name not in state:
            state[name] = torch.zeros_like(like)
        return state[name]

    @torch.no_grad()
    def compiled_pass(self, sequences: Sequences, batch_size: int, kernel: Callable[..., Tensor]) -> Tensor:
        """Performs many online updates, one for each `batch_size` consecutive sequences, in one compiled pass.

        The result is the same as that of `backward` and `step` for each batch.

        Args:
            sequences: The N sequences.
            batch_size: Number of sequences per update.
            kernel: Compiled pass for the parts of the model, from `compiled_kernel_for`. Its first arguments are the
                parameters of the groups, in their order.

        Returns:
            (restarts, N) log-likelihoods.
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
    def compiled_iteration(self, sequences: Sequences, kernel: Callable[..., Tensor]) -> Tensor:
        """Performs one iteration of batch EM, from all sequences, in one compiled pass.

        The discounted counts of online EM are neither used nor changed. Arguments and result are those of
        `compiled_pass`.
        """
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
        """Runs the compiled pass for each restart.

        All restarts are trained on the same sequences, so the discounted batch size is updated once.
        """
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
        """Resets the state of the optimizer, for a model that is trained again from the start."""
        self.state.clear()
        self.rows_without_counts = {}
        for group in self.param_groups:
            group["updates"] = 0

    def log_prior(self) -> Tensor:
        """Returns the (restarts,) log prior densities, up to a constant.

        Batch EM maximizes the sum of the log-likelihood and this term.
        """
        terms = [self.distributions[group["name"]].log_prior() for group in self.param_groups]
        return torch.stack(terms).sum(0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a saved state exactly.

        The buffers keep their precision. torch would cast them to the precision of the parameters, and resuming would
        not be exact.
        """
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for option in ("name", "discount", "prior", "frozen"):
                if group[option] != saved_group[option]:
                    raise ValueError(
                        f"The checkpoint was trained with `{option}` of {group['name']} {saved_group[option]}, "
                        f"but now it is {group[option]}. Go on with the same options, "
                        "or start from the checkpoint's parameters without its optimizer."
                    )
        super().load_state_dict(state_dict)
        saved = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(saved, parameters, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                self.state[parameter][name] = value.to(parameter.device).clone() if isinstance(value, Tensor) else value
