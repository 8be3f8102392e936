"""The names of symbols."""

from __future__ import annotations

from collections.abc import Iterable

MISSING = -1  # A symbol that was not observed, or an unknown label.


class Vocabulary:
    """The names of the symbols. Symbol 3 is ``vocabulary[3]``.

    Args:
        names: Different names, in the order of their numbers.
        unknown: One of the names, to which all names that are not in `names` are mapped. Without it, such a name raises
            a `ValueError`.

    Example:
        >>> vocabulary = Vocabulary(["<unk>", "rain", "sun"], unknown="<unk>")
        >>> vocabulary.encode(["sun", "rain", None, "snow"])
        [2, 1, -1, 0]
        >>> vocabulary.decode([2, 1, -1, 0])
        ['sun', 'rain', None, '<unk>']
    """

    def __init__(self, names: Iterable[str], unknown: str | None = None) -> None:
        self.names = [str(name) for name in names]
        self.unknown = unknown
        self._index = {name: i for i, name in enumerate(self.names)}
        if len(self._index) != len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise ValueError(f"`names` must all be different, but {twice!r} occurs more than once.")
        if unknown is not None and unknown not in self._index:
            raise ValueError(f"`unknown` must be one of the names, but is {unknown!r} instead.")

    @classmethod
    def from_data(cls, sequences: Iterable[Iterable[str]], unknown: str | None = None) -> Vocabulary:
        """Returns the vocabulary of all names that occur, in sorted order after `unknown`.

        Example:
            >>> Vocabulary.from_data(["abba", "cab"])
            Vocabulary(3 symbols: 'a', 'b', 'c')
        """
        found = sorted({name for sequence in sequences for name in sequence if name is not None} - {unknown})
        return cls([unknown, *found] if unknown is not None else found, unknown)

    def encode(self, sequence: Iterable[str | None]) -> list[int]:
        """Returns the numbers of names; ``None`` is a missing symbol."""
        fallback = None if self.unknown is None else self._index[self.unknown]
        numbers = []
        for position, name in enumerate(sequence):
            number = MISSING if name is None else self._index.get(name, fallback)
            if number is None:
                raise ValueError(
                    f"`vocabulary` has no symbol {name!r}, found at position {position}. "
                    "Add the symbol, or give an `unknown` symbol."
                )
            numbers.append(number)
        return numbers

    def decode(self, symbols: Iterable[int]) -> list[str | None]:
        """Returns the names of numbers; a missing symbol is ``None``."""
        return [None if symbol == MISSING else self.names[symbol] for symbol in symbols]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, symbol: int) -> str:
        return self.names[symbol]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Vocabulary) and (self.names, self.unknown) == (other.names, other.unknown)

    def __hash__(self) -> int:
        return hash((tuple(self.names), self.unknown))

    def __repr__(self) -> str:
        shown = ", ".join(map(repr, self.names[:8])) + (", ..." if len(self) > 8 else "")
        return f"Vocabulary({len(self)} symbols: {shown})"
