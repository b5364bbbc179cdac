"""Many numbers in one array, for whoever reads them as a tuple."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Numbers(Sequence[Any]):
    """Token ids or log-probs that read as a tuple of plain numbers does, and are made and joined at
    a fraction of its price: no object for each. Equal to that tuple, with its hash and its text.

    Whoever makes one has checked `array`: floats are finite, and ints are from 0 on. Nobody may
    write to it.

    >>> import numpy as np
    >>> ids = Numbers(np.array([5, 6, 7]))
    >>> ids, ids[0], ids[1:] + (8,), ids == (5, 6, 7)
    ((5, 6, 7), 5, (6, 7, 8), True)
    """

    __slots__ = ("array",)

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.array.tolist())

    def __getitem__(self, at: Any) -> Any:
        part = self.array[at]
        return Numbers(part) if isinstance(at, slice) else part.item()

    def __add__(self, other: Any) -> Any:
        if isinstance(other, Numbers):
            import numpy as np  # here, so that records are read and written without it

            return Numbers(np.concatenate((self.array, other.array)))
        return tuple(self) + other if isinstance(other, tuple) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return other + tuple(self) if isinstance(other, tuple) else NotImplemented

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Numbers):
            return len(self) == len(other) and bool((self.array == other.array).all())
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))
