"""Products of emissions, for data with columns of different kinds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_hmm.columns import Column
from lightning_hmm.distributions.base import Emission, pull_back
from lightning_hmm.distributions.checks import require_observed
from lightning_hmm.inference.evidence import Evidence, Quadratic, Rows
from lightning_hmm.sequences import Sequences
from lightning_hmm.vocabulary import MISSING


class Product(Emission):
    """A product of emissions that are independent given the state. Each part emits some of the columns.

    Use it for data with columns of different kinds, such as a symbol and a real number per step.

    Args:
        parts: The emissions. In a list, each part emits one column, in the order of the columns. In a dictionary, each
            key is the name of the part's column, or the names of several columns separated by commas.

    Example:
        >>> from lightning_hmm import HMM, Categorical, Column, Gaussian, Product
        >>> columns = [Column("temperature"), Column("weather", "categorical", 3)]
        >>> emission = Product({"temperature": Gaussian(), "weather": Categorical()})
        >>> model = HMM(num_states=2, emission=emission, columns=columns)
        >>> model.emission.parts[1].probs.shape
        torch.Size([2, 3])
    """

    support = ("values of its parts", "Mark other values as missing.")
    m_step = "that of each part"

    def __init__(self, parts: list[Emission] | dict[str, Emission]) -> None:
        super().__init__()
        if not isinstance(parts, (list, tuple, Mapping)):
            raise ValueError(
                "`parts` must be a list of emissions, or a dictionary of them by the names of their columns, "
                f"but is {parts!r} instead."
            )
        if not parts:
            raise ValueError("`parts` must hold at least one emission, but is empty.")
        strange = (
            next((name for name in parts if not isinstance(name, str)), None) if isinstance(parts, Mapping) else None
        )
        if strange is not None:
            raise ValueError(
                f"The keys of `parts` must be names of columns, but one is {strange!r}. "
                "Give a list to take the columns in order."
            )
        self.column_groups = (
            [[name.strip() for name in names.split(",")] for names in parts] if isinstance(parts, Mapping) else None
        )
        given = list(parts.values() if isinstance(parts, Mapping) else parts)
        for part in given:
            if not isinstance(part, Emission):
                raise ValueError(f"The parts of a Product must be emissions, but one is {part!r}.")
        self.parts: Any = nn.ModuleList(given)
        self.prior = {
            f"{number} {name}": value for number, part in enumerate(given) for name, value in part.prior.items()
        }

    @property
    def is_closed(self) -> bool:  # type: ignore[override]
        return all(part.is_closed for part in self.parts)

    @property
    def needs_inputs(self) -> bool:  # type: ignore[override]
        return any(part.needs_inputs for part in self.parts)

    @property
    def starts_from_data(self) -> bool:  # type: ignore[override]
        return any(part.starts_from_data for part in self.parts)

    @property
    def depends_on_past(self) -> bool:  # type: ignore[override]
        return any(part.depends_on_past for part in self.parts)

    def belong_to(self, model: Any) -> None:
        super().belong_to(model)
        for part in self.parts:
            part.belong_to(model)

    def allocate(self, restarts: int, num_states: int, columns: Sequence[Column]) -> None:
        if len(columns) == 1:
            raise ValueError(
                f"A Product is for several columns, but there is only {columns[0].name!r}. "
                "Give its emission to the model itself."
            )
        places = self._places(columns)
        self._begin_allocation()
        self.places = places
        self.columns = list(columns)
        for part, place in zip(self.parts, places, strict=True):
            part.allocate(restarts, num_states, [columns[number] for number in place])

    def columns_of(self, columns: list[Column], parts: Sequence[Sequences]) -> list[Column]:
        """Returns the columns of data without a description; see `Emission.columns_of`.

        Columns of parts that emit symbols become categorical, with as many categories as occur in the data `parts`.
        """
        found = list(columns)
        for part, place in zip(self.parts, self._places(columns), strict=True):
            for number in place if part.reads_symbols else ():
                if not found[number].is_categorical:
                    entries = torch.cat([data.values[:, number] for data in parts])
                    entries = entries[~entries.isnan()]
                    require_observed(torch.tensor([len(entries)]), [found[number].name])
                    found[number] = Column(found[number].name, "categorical", max(int(entries.max()) + 1, 1))
        return found

    def _places(self, columns: Sequence[Column]) -> list[list[int]]:
        """Returns the numbers of the columns of each part."""
        names = [column.name for column in columns]
        if self.column_groups is None:
            if len(columns) != len(self.parts):
                raise ValueError(
                    f"A Product of {len(self.parts)} parts must have as many columns, but there are {len(columns)}: "
                    f"{', '.join(names)}. Give parts of several columns by name: Product({{'x, y': ..., 'z': ...}})."
                )
            return [[number] for number in range(len(columns))]
        given = [name for group in self.column_groups for name in group]
        for name in given:
            if name not in names:
                raise ValueError(
                    f"The parts of a Product must name columns of the data ({', '.join(names)}), "
                    f"but one names {name!r}."
                )
            if given.count(name) > 1:
                raise ValueError(f"The parts of a Product must have different columns, but {name!r} is named twice.")
        left = next((name for name in names if name not in given), None)
        if left is not None:
            raise ValueError(f"The parts of a Product must cover all columns of the data, but no part names {left!r}.")
        return [[names.index(name) for name in group] for group in self.column_groups]

    def _each(self, batch: Sequences) -> Iterator[tuple[Emission, Sequences]]:
        """Yields each part with its columns of the batch."""
        for part, place in zip(self.parts, self.places, strict=True):
            values = batch.values[:, place]
            if part.reads_symbols:
                values = torch.where(values[:, 0].isnan(), MISSING, values[:, 0]).long()
            yield part, batch.with_values(values)

    def _split(self, tensors: Sequence[Tensor], numbers: Sequence[int]) -> Iterator[tuple[Any, list[Tensor]]]:
        """Yields each part with its own of the tensors, given how many each part has."""
        first = 0
        for part, number in zip(self.parts, numbers, strict=True):
            yield part, list(tensors[first : first + number])
            first += number

    def natural(self, restart: int) -> tuple[Tensor, ...]:
        return tuple(value for part in self.parts for value in part.natural(restart))

    @property
    def num_statistics(self) -> int:
        return sum(part.num_statistics for part in self.parts)

    def _naturals(self, natural: Sequence[Tensor]) -> Iterator[tuple[Any, list[Tensor]]]:
        """Yields each part with its natural parameters."""
        return self._split(natural, [len(part.natural(0)) for part in self.parts])

    def evidence(self, natural: Sequence[Tensor], batch: Sequences) -> Evidence:
        found = [
            part.evidence(mine, data)
            for (part, mine), (_, data) in zip(self._naturals(natural), self._each(batch), strict=True)
        ]
        if not all(isinstance(evidence, Quadratic) for evidence in found):
            return Rows(torch.stack([evidence.rows() for evidence in found]).sum(0))
        columns: list[Tensor] = []
        pairs: list[Tensor] = []
        weights: list[Tensor] = []
        width = 0
        for evidence in found:
            assert isinstance(evidence, Quadratic)
            columns.append(evidence.centered(evidence.weights.dtype))
            pairs.append(evidence.pairs + width)
            weights.append(evidence.weights)
            width += columns[-1].shape[1]
        return Quadratic(torch.cat(columns, 1), torch.cat(pairs), torch.cat(weights, 1))

    def check(self, sequences: Sequences) -> None:
        sequences.check_columns(self.columns)
        for part, data in self._each(sequences):
            part.check(data)

    def set_data_stats(self, sequences: Sequences) -> None:
        for part, data in self._each(sequences):
            part.set_data_stats(data)

    def start(self, sequences: Sequences, responsibilities: Sequence[Tensor]) -> None:
        for part, data in self._each(sequences):
            if part.starts_from_data and not bool(part.is_set):
                part.start(data, responsibilities)
        self.is_set.fill_(True)

    # EM. Parts with an iterative M-step hold the batches, and have no statistics.

    def statistics(self, evidence: Evidence, gradient: Tensor, natural: Sequence[Tensor]) -> list[Tensor]:
        leaves = [leaf for part, mine in self._naturals(natural) if part.num_statistics for leaf in mine]
        return pull_back([evidence.live], [gradient], leaves)

    def hold(self, restart: int, batch: Sequences, *gradients: Tensor) -> None:
        for part, data in self._each(batch):
            if not part.is_closed:
                part.hold(restart, data, *gradients)

    def forget(self) -> None:
        for part in self.parts:
            part.forget()

    @torch.no_grad()
    def maximize(self, statistics: Sequence[Tensor], weight: Tensor | float = 1.0) -> Tensor:
        split = self._split(statistics, [part.num_statistics for part in self.parts])
        return torch.stack([part.maximize(mine, weight) for part, mine in split]).sum()

    @torch.no_grad()
    def copy_from(self, other: Any, restart: int) -> None:
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            mine.copy_from(theirs, restart)
        self.is_set.copy_(other.is_set)
        self.has_data_stats.copy_(other.has_data_stats)

    def log_prior(self) -> Tensor:
        return torch.stack([part.log_prior() for part in self.parts]).sum(0)

    def num_free_parameters(self, restart: int) -> int:
        return sum(part.num_free_parameters(restart) for part in self.parts)

    def set(self, **values: Any) -> None:
        raise ValueError(
            "The parameters of a Product are set part by part: "
            "give `emission` as a list with a dictionary for each part, or None."
        )

    def randomize(self, generator: torch.Generator) -> None:
        """Draws the initial values of the parts that are not initialized from data."""
        for part in self.parts:
            part.randomize(generator)

    def sample(self, states: Tensor, generator: torch.Generator) -> Tensor:
        return self.emit(Sequences(states, torch.tensor([0, len(states)])), generator).values

    def emit(self, states: Sequences, generator: torch.Generator) -> Sequences:
        drawn = torch.empty(states.num_steps, sum(map(len, self.places)), dtype=torch.float64, device=states.device)
        for part, place in zip(self.parts, self.places, strict=True):
            values = part.emit(states, generator).values.to(drawn)
            drawn[:, place] = values[:, None] if values.dim() == 1 else values
        return states.with_values(drawn)

    def predict(self, state_probs: Tensor, inputs: Tensor | None = None) -> list[Any]:
        """Returns the predictions of the parts, in their order. `inputs` (N, M) are those of the observations."""
        return [
            part.predict(state_probs, inputs) if part.needs_inputs else part.predict(state_probs) for part in self.parts
        ]
