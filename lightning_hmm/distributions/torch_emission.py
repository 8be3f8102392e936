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
from lightning_hmm.inference.evidence import Rows
from lightning_hmm.sequences import Sequences


class TorchEmission(Emission):
    r"""An emission whose log-densities are computed by a torch module.

    Use it for a family that has no class of its own. The module class is constructed as
    ``module(num_states, num_columns, **options)``. Called with (steps, columns) values, it returns (steps, K)
    log-densities. Two further methods are optional: ``sample(states, generator)`` is used to sample from the model, and
    ``moments()``, which returns (K, columns) means and variances, is used for predictions. A step with a missing value
    is treated as missing in all columns.

    There is no closed-form M-step. The posterior probabilities of an epoch are stored, and L-BFGS increases the
    expected log-likelihood

    .. math:: Q(\theta) = \sum_t \sum_k p(z_t = k \mid y) \log p(y_t \mid k, \theta)

    so that the objective never decreases. In online EM, and if an epoch has more than `most_held` posterior
    probabilities, a single gradient step is made instead, which may decrease the objective.

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

    is_closed = False

    def __init__(
        self,
        module: str | type,
        options: dict[str, Any] | None = None,
        m_steps: int = 5,
        most_held: int = 50_000_000,
        learning_rate: float = 0.1,
    ) -> None:
        super().__init__()
        for name, value in {"m_steps": m_steps, "most_held": most_held, "learning_rate": learning_rate}.items():
            if not isinstance(value, (int, float)) or not value > 0:
                raise ValueError(f"`{name}` must be a positive number, but is {value!r} instead.")
        self.family = _imported(module)
        self.options = dict(options or {})
        self.m_steps = m_steps
        self.most_held = most_held
        self.learning_rate = learning_rate
        self._held: list[tuple[int, Tensor, Tensor]] = []
        self._gradients: dict[int, list[Tensor]] = {}

    @property
    def config(self) -> dict[str, Any]:
        options: dict[str, Any] = {
            "module": f"{self.family.__module__}.{self.family.__qualname__}",
            "options": self.options,
        }
        options |= {"m_steps": self.m_steps, "most_held": self.most_held, "learning_rate": self.learning_rate}
        return {"class_path": "lightning_hmm.TorchEmission", "init_args": options}

    @property
    def num_statistics(self) -> int:
        return 0  # the M-step uses the batches that `hold` has stored

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
        return tuple(self.networks[restart].parameters())

    def evidence(self, natural: Sequence[Tensor], batch: Sequences) -> Rows:
        restart = next(
            number for number, network in enumerate(self.networks) if next(iter(natural)) is next(network.parameters())
        )
        return Rows(self._rows(restart, batch.values.double()))

    def _rows(self, restart: int, values: Tensor) -> Tensor:
        complete = ~values.isnan().any(1)
        rows: Tensor = self.networks[restart](torch.where(complete[:, None], values, 0.0))
        if rows.shape != (len(values), self.num_states):
            wanted = (len(values), self.num_states)
            raise ValueError(
                f"The module of a TorchEmission must return {wanted}, steps by states, "
                f"but {self.family.__name__} returns {tuple(rows.shape)}."
            )
        return torch.where(complete[:, None], rows, 0.0)

    def check(self, sequences: Sequences) -> None:
        sequences.check(None, self.num_columns)

    def start(self, sequences: Sequences, responsibilities: Sequence[Tensor]) -> None:
        for restart, guess in enumerate(responsibilities):
            self.hold(restart, sequences, guess)
        self.maximize([])
        self.is_set.fill_(True)

    # EM

    def hold(self, restart: int, batch: Sequences, posteriors: Tensor) -> None:
        """Stores the posterior probabilities of a batch for the M-step.

        In online EM, and if there are more than `most_held` probabilities, only their gradient is stored.

        Args:
            restart: Number of the restart.
            batch: The batch.
            posteriors: (steps, K) posterior probabilities of the states.
        """
        online = bool(self._owner) and self._owner[0].discount is not None
        self._held.append((restart, batch.values.double(), posteriors.detach()))
        if online or self._gradients or sum(held.numel() for _, _, held in self._held) > self.most_held:
            for number, values, held in self._held:
                parameters = list(self.networks[number].parameters())
                with torch.enable_grad():
                    found = torch.autograd.grad((self._rows(number, values) * held).sum(), parameters)
                size = held.sum()
                known = self._gradients.get(
                    number, [torch.zeros_like(size), *(torch.zeros_like(parameter) for parameter in parameters)]
                )
                self._gradients[number] = [total.add(part) for total, part in zip(known, (size, *found), strict=True)]
            self._held = []

    def forget(self) -> None:
        """Discards stored batches, such as those of an interrupted run."""
        self._held, self._gradients = [], {}

    def maximize(self, statistics: Sequence[Tensor], weight: Tensor | float = 1.0) -> Tensor:
        for restart, network in enumerate(self.networks):
            parameters = list(network.parameters())
            if restart in self._gradients:
                size, *total = (self._sum(part) for part in self._gradients[restart])
                with torch.no_grad():
                    for parameter, gradient in zip(parameters, total, strict=True):
                        parameter.add_(self.learning_rate * gradient / size.clamp(min=1))
            elif self._held or self._is_distributed:
                self._increase(restart, parameters)
        self.forget()
        return torch.zeros((), dtype=torch.int64)

    def _increase(self, restart: int, parameters: list[nn.Parameter]) -> None:
        """Increases the expected log-likelihood of the batches stored on all ranks, by L-BFGS."""
        held = [(values, posteriors) for number, values, posteriors in self._held if number == restart]
        size = self._sum(
            torch.tensor(sum(float(posteriors.sum()) for _, posteriors in held), dtype=torch.float64)
        ).clamp(min=1)

        def loss() -> Tensor:
            with torch.enable_grad():
                total = parameters[0].new_zeros(())
                for values, posteriors in held:
                    total = total - (self._rows(restart, values) * posteriors).sum() / size
                if total.requires_grad:
                    gradients = torch.autograd.grad(total, parameters, allow_unused=True, materialize_grads=True)
                else:
                    gradients = tuple(torch.zeros_like(parameter) for parameter in parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = self._sum(gradient)
            return self._sum(total.detach())

        decrease(loss, parameters, self.m_steps)

    @property
    def _is_distributed(self) -> bool:
        return bool(self._owner) and self._owner[0]._trainer is not None and self._owner[0].trainer.world_size > 1

    def _sum(self, value: Tensor) -> Tensor:
        return self._owner[0]._sum_over_ranks(value.clone()) if self._is_distributed else value

    def log_prior(self) -> Tensor:
        return torch.zeros(len(self.networks), dtype=torch.float64)

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
        from lightning_hmm.distributions.exponential import mixture_moments

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
