"""The parts of a run: each is made when it is first asked for, and replaced by assigning."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ludic.errors import ConfigError
from ludic.plumbing.given import bind_objects

if TYPE_CHECKING:
    from ludic.runs.run import Run

T = TypeVar("T")


class Parts:
    """The parts made so far. It notices which were made from which: when one is assigned, those
    that were made from it are forgotten, to be made again, except for those assigned themselves."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = objects
        self._values: dict[str, Any] = {}
        self._assigned: set[str] = set()
        self._users: defaultdict[str, set[str]] = defaultdict(set)
        self._being_made: list[str] = []
        self.frozen: str | None = None
        """Why none can be replaced any more."""

    def get(self, name: str, make: Callable[[], T]) -> T:
        """Returns the part, made by `make` if it is not there yet."""
        if self._being_made:
            self._users[name].add(self._being_made[-1])
        if name not in self._values:
            self._being_made.append(name)
            try:
                with bind_objects(self._objects):
                    self._values[name] = make()
            finally:
                self._being_made.pop()
        return self._values[name]  # type: ignore[no-any-return]

    def assign(self, name: str, value: Any) -> None:
        """Replaces a part."""
        if self.frozen is not None:
            raise ConfigError(f"{name} cannot be replaced: {self.frozen}")
        self._forget_users(name)
        self._values[name] = value
        self._assigned.add(name)

    def is_assigned(self, name: str) -> bool:
        """Whether the part was assigned."""
        return name in self._assigned

    def _forget_users(self, name: str) -> None:
        for user in self._users.pop(name, set()) - self._assigned:
            self._values.pop(user, None)
            self._forget_users(user)


class Part(Generic[T]):
    """Decorates the method of a run that makes a part, which is then an attribute: made when it is
    first asked for, and replaced by assigning."""

    def __init__(self, make: Callable[[Any], T]) -> None:
        self._make, self._name, self.__doc__ = make, make.__name__, make.__doc__

    def __get__(self, run: Run | None, cls: type) -> T:
        if run is None:
            return self  # type: ignore[return-value]
        return run.parts.get(self._name, lambda: self._make(run))

    def __set__(self, run: Run, value: T) -> None:
        run.parts.assign(self._name, value)
