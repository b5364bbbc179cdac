"""A piece of a run: built when it is first asked for, and replaceable until the run begins. What
was built from it is then built again."""

from __future__ import annotations

from collections.abc import Callable
from inspect import getmembers_static
from typing import Any, Generic, Protocol, TypeVar, overload

from ludic.errors import ConfigError
from ludic.plumbing.given import in_use

T = TypeVar("T")


class HasPieces(Protocol):
    """What pieces belong to. `_frozen` says why none can be replaced any more."""

    objects: dict[str, Any]
    _built: dict[str, Any]
    _replaced: set[str]
    _frozen: str | None


class Piece(Generic[T]):
    """An attribute that `build` makes of its owner, from the pieces named in `needs`."""

    def __init__(self, build: Callable[[Any], T], *needs: str) -> None:
        self._build, self._needs = build, needs

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, run: None, owner: type) -> Piece[T]: ...
    @overload
    def __get__(self, run: HasPieces, owner: type) -> T: ...
    def __get__(self, run: HasPieces | None, owner: type) -> T | Piece[T]:
        if run is None:
            return self
        if self._name not in run._built:
            with in_use(run.objects):
                run._built[self._name] = self._build(run)
        value: T = run._built[self._name]
        return value

    def __set__(self, run: HasPieces, value: T) -> None:
        if run._frozen is not None:
            raise ConfigError(f"{self._name} cannot be replaced: {run._frozen}")
        for name in self._users(type(run)):
            if name not in run._replaced:
                run._built.pop(name, None)
        run._built[self._name] = value
        run._replaced.add(self._name)

    def _users(self, owner: type) -> set[str]:
        """Returns the pieces that are built from this one, directly or not."""
        pieces = {n: p for n, p in getmembers_static(owner) if isinstance(p, Piece)}
        found: set[str] = set()
        fresh = {self._name}
        while fresh:
            fresh = {n for n, p in pieces.items() if fresh & set(p._needs)} - found
            found |= fresh
        return found
