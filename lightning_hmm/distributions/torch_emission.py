"""Emissions defined by a torch module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hmm.columns import Column
from lightning_hmm.distributions.base import Emission
from lightning_hmm.distributions.by_gradient import decrease
from lightning_hmm.distributions.iterative import MOST_HELD, Iterative
from lightning_hmm.distributions.moments import mixture_moments
from lightning_hmm.inference.evidence import Evidence, Rows
from lightning_hmm.sequences import Sequences


class TorchEmission(Iterative, Emission):
    r"""An emission whose log-densities are computed by a torch module.

    Use it for a family that has no class of its own. The module class is constructed as
    ``module(num_states, num_columns, **options)``. Called with (steps, columns) values, it returns (steps, K)
    log-densities. Two further methods are optional: ``sample(states, generator)`` is used to sample from the model, and
    ``moments()``, which returns (K, columns) means and variances, is used for predictions. A step with a missing value
    is treated as missing in all columns.

    There is no closed-form M-step. The posterior probabilities of an epoch are stored, and L-BFGS increases the
    expected log-likelihood, so that the objective never decreases. In online EM, and if an epoch has more than
    `most_held` posterior probabilities, a single gradient step is made instead; see `Iterative`.

    Args:
        module: The class, or the path of a class that has been imported, such as "my_package.Densities".
        options: Further arguments of the class, as plain values.
        m_steps: Number of L-BFGS iterations in each M-step.
        most_held: Maximum number of posterior probabilities that are stored, with 8 bytes each.
        learning_rate: Step size of a single step along the gradient of the mean log-likelihood.

    Example:
        >>> import torch
        >>> from lightning_hmm import HMM, TorchEmission
        >>> class Laplace(torch.nn.Module):
        ...     def __init__(self, num_states, num_columns):
        ...         super().__init__()
        ...         self.mean = torch.nn.Parameter(torch.randn(num_states, num_columns))
        ...
        ...     def forward(self, values):
        ...         return torch.distributions.Laplace(self.mean, 1.0).log_prob(values[:, None]).sum(2)
        >>> model = HMM(num_states=2, emission=TorchEmission(Laplace), num_features=3)
        >>> model.emission.num_free_parameters(restart=0)
        6
    """

    support = ("values for which the module returns log-densities", "Mark other values as missing.")
    m_step = "L-BFGS on stored posteriors"

    def __init__(
        self,
        module: str | type,
        options: dict[str, Any] | None = None,
        m_steps: int = 5,
        most_held: int = MOST_HELD,
        learning_rate: float = 0.1,
    ) -> None:
        super().__init__(most_held=most_held, learning_rate=learning_rate)
        if isinstance(m_steps, bool) or not isinstance(m_steps, (int, float)) or not m_steps > 0:
            raise ValueError(f"`m_steps` must be a positive number, but is {m_steps!r} instead.")
        self.family = _imported(module)
        self.options = dict(options or {})
        self.m_steps = m_steps

    @property
    def config(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "module": f"{self.family.__module__}.{self.family.__qualname__}",
            "options": self.options,
        }
        options |= {"m_steps": self.m_steps, "most_held": self.most_held, "learning_rate": self.learning_rate}
        return {"class_path": "lightning_hmm.TorchEmission", "init_args": options}

    @property
    def num_restarts(self) -> int:
        return len(self.networks)

    def allocate(self, restarts: int, num_states: int, columns: Sequence[Column]) -> None:
        self._begin_allocation()
        self.num_states = num_states
        self.num_columns = len(columns)
        self.networks = nn.ModuleList(self._network(seed) for seed in range(restarts))

    def _network(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):  # torch modules draw their initial values from the global random state
            torch.manual_seed(seed)
            network: nn.Module = self.family(self.num_states, self.num_columns, **self.options).double()
        return network

    def randomize(self, generator: torch.Generator) -> None:
        """Draws new initial parameters for each restart."""
        for number in range(len(self.networks)):
            self.networks[number] = self._network(int(torch.randint(2**62, (), generator=generator)))

    def natural(self, restart: int) -> tuple[Tensor, ...]:
        """Returns the parameters of the module of one restart, followed by its buffers, which are not trained."""
        return (*self.networks[restart].parameters(), *self.networks[restart].buffers())

    def evidence(self, natural: Sequence[Tensor], batch: Sequences) -> Rows:
        network, values = self.networks[0], batch.values.double()
        names = [name for name, _ in (*network.named_parameters(), *network.named_buffers())]
        size = len(list(network.parameters()))
        tensors = [value if number < size else value.detach() for number, value in enumerate(natural)]
        complete = ~values.isnan().any(1)
        rows: Tensor = torch.func.functional_call(
            network, dict(zip(names, tensors, strict=True)), (torch.where(complete[:, None], values, 0.0),)
        )
        if rows.shape != (len(values), self.num_states):
            wanted = (len(values), self.num_states)
            raise ValueError(
                f"The module of a TorchEmission must return {wanted}, steps by states, "
                f"but {self.family.__name__} returns {tuple(rows.shape)}."
            )
        return Rows(torch.where(complete[:, None], rows, 0.0))

    def statistics(self, evidence: Evidence, gradient: Tensor, natural: Sequence[Tensor]) -> list[Tensor]:
        return []

    def check(self, sequences: Sequences) -> None:
        sequences.check(None, self.num_columns)

    def start(self, sequences: Sequences, responsibilities: Sequence[Tensor]) -> None:
        self.increase_from(sequences, responsibilities)

    def increase(self, restart: int, examples: Sequence[tuple[Any, ...]], weight: Tensor | float) -> None:
        """Increases the expected log-likelihood of the examples of all ranks by L-BFGS."""
        parameters, natural = list(self.networks[restart].parameters()), self.natural(restart)
        size = self._sum(
            torch.tensor(sum(float(posteriors.sum()) for _, posteriors in examples), dtype=torch.float64)
        ).clamp(min=1)

        def loss() -> Tensor:
            with torch.enable_grad():
                total = parameters[0].new_zeros(())
                for example in examples:
                    total = total - self.expected(natural, *example) / size
                if total.requires_grad:
                    gradients = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
                else:
                    gradients = tuple(torch.zeros_like(parameter) for parameter in parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = self._sum(gradient)
            return self._sum(total.detach())

        decrease(loss, parameters, self.m_steps)

    def num_free_parameters(self, restart: int) -> int:
        return sum(parameter.numel() for parameter in self.networks[restart].parameters())

    def copy_from(self, other: Any, restart: int) -> None:
        for network in self.networks:
            network.load_state_dict(other.networks[restart].state_dict())
        self.is_set.copy_(other.is_set)
        self.has_data_stats.copy_(other.has_data_stats)

    # Values

    def set(self, **values: Any) -> None:
        """Sets parameters of the module by their names in its state dictionary, to the same values in all restarts."""
        for network in self.networks:
            network.load_state_dict(
                {**network.state_dict(), **{name: torch.as_tensor(value) for name, value in values.items()}}
            )
        self.is_set.fill_(True)

    def _method(self, name: str) -> Callable[..., Any]:
        network = self.networks[self.restart]
        if not hasattr(network, name):
            raise ValueError(
                f"The module of a TorchEmission must have a method `{name}` for this, "
                f"but {self.family.__name__} has none."
            )
        method: Callable[..., Any] = getattr(network, name)
        return method

    def sample(self, states: Tensor, generator: torch.Generator) -> Tensor:
        drawn: Tensor = self._method("sample")(states, generator)
        return drawn

    def predict(self, state_probs: Tensor) -> Any:
        return mixture_moments(state_probs, *self._method("moments")())


def _imported(module: str | type) -> Any:
    """Returns the class, which is looked up among the imported modules if a path is given."""
    if not isinstance(module, str):
        if not isinstance(module, type) or not issubclass(module, nn.Module):
            raise ValueError(
                f"`module` must be an nn.Module class, or the path of one, but is {module!r} instead. "
                "Its options are given as `options`."
            )
        return module
    package, _, name = module.rpartition(".")
    found = getattr(sys.modules.get(package), name, None)
    if not isinstance(found, type) or not issubclass(found, nn.Module):
        raise ValueError(
            f"`module` must be the path of an nn.Module class that is imported, but {module!r} is none. "
            "Import the file that defines it first."
        )
    return found
