"""How names are looked up: `Registry` knows one kind of thing by name, wherever it comes from."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, overload

from ludic.errors import (
    ConfigError,
    DuplicateNameError,
    LudicError,
    MissingExtraError,
    UnknownNameError,
)
from ludic.plumbing.arguments import misfit
from ludic.plumbing.given import given, is_given
from ludic.plumbing.lazy import names_are_stored as names_are_stored
from ludic.plumbing.lazy import resolve
from ludic.plumbing.lazy import stored_names as stored_names

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

F = TypeVar("F", bound=Callable[..., Any])

_PLACE = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")


@dataclass(frozen=True, slots=True)
class Entry:
    """What a name stands for, with one line about it: the thing itself, or for a built-in its
    place as `module:attribute`."""

    target: str | Callable[..., Any]
    description: str


class Registry:
    """One kind of thing by name: built in, registered in this process, or from entry points.

    Things of a kind with a `base` (itself a place) are named by place only if they are classes
    derived from it; of the other kinds, any callable will do.
    """

    def __init__(
        self, kind: str, builtins: Mapping[str, Entry], group: str, base: str = ""
    ) -> None:
        self.kind, self.group = kind, group
        self._base = base
        self._entries = dict(builtins)

    @cached_property
    def _announced(self) -> dict[str, list[EntryPoint]]:
        """Entry points by name; read once and only when needed, since it takes milliseconds."""
        from importlib.metadata import entry_points

        by_name: dict[str, list[EntryPoint]] = {}
        for entry in entry_points(group=self.group):
            by_name.setdefault(entry.name, []).append(entry)
        return by_name

    @overload
    def register(self, name: str, factory: F, *, description: str = "") -> F: ...
    @overload
    def register(
        self, name: str, factory: None = None, *, description: str = ""
    ) -> Callable[[F], F]: ...
    def register(
        self, name: str, factory: F | None = None, *, description: str = ""
    ) -> F | Callable[[F], F]:
        """Registers `factory` under `name`, or, without a factory, decorates one.

        The description defaults to the first line of the factory's docstring.
        """
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(f"the name of a {self.kind} must be text, not {name!r}")

        def add(thing: F) -> F:
            if not callable(thing):
                raise ConfigError(f"{self.kind} {name!r}: {thing!r} cannot be called")
            if owner := self._owner(name):
                raise DuplicateNameError(
                    f"{self.kind} {name!r} already exists ({owner}): choose another name"
                )
            self._entries[name] = Entry(thing, description or _first_line(thing))
            return thing

        return add if factory is None else add(factory)

    def unregister(self, name: str) -> None:
        """Removes a name that this process registered; built-in names stay."""
        registered = [n for n, entry in self._entries.items() if callable(entry.target)]
        if name not in registered:
            raise UnknownNameError(f"registered {self.kind}", name, registered)
        del self._entries[name]

    def get(self, name: str) -> Callable[..., Any]:
        """The factory behind `name`; an `UnknownNameError` suggests the nearest names.

        A name of the form `module:attribute` is imported.
        """
        if not isinstance(name, str):
            how = f"register it with `{self._register}`, and give the name"
            raise ConfigError(f"{self.kind} {name!r}: a name must stand here; {how}")
        if is_given(name):
            return given(name, self.kind)  # type: ignore[no-any-return]
        entry, announced = self._entries.get(name), self._announced.get(name, ())
        if entry is not None and not announced:
            target = entry.target
            return _load(self.kind, name, target) if isinstance(target, str) else target
        sources = [self._owner(name)] if entry else []
        sources += [f"the package {_package(point)}" for point in announced]
        if len(sources) > 1:
            raise DuplicateNameError(
                f"{self.kind} {name!r} comes from {' and '.join(map(str, sources))}: "
                "uninstall one of them, or use a factory instead of a name"
            )
        if announced:
            return _load(self.kind, name, announced[0].value, f" of {sources[0]}")
        if _PLACE.fullmatch(name):
            return self._import(name)
        raise UnknownNameError(self.kind, name, self.names())

    def _import(self, place: str) -> Callable[..., Any]:
        """What stands at `module:attribute`. Names also come from stored data, which must not
        get just anything called: there, only a class that is seen to be of this kind will do."""
        stored = names_are_stored()
        if stored and not self._base:
            raise ConfigError(
                f"{self.kind} {place!r} is named by stored data, for which no function is "
                f"imported: register it first, under this name, with `{self._register}`"
            )
        thing: Any = _load(self.kind, place, place)
        if not self._base or not (stored or isinstance(thing, type)):
            return thing  # type: ignore[no-any-return]
        base: Any = resolve(self._base)
        if isinstance(thing, type) and issubclass(thing, base):
            return thing
        by = "is named by stored data and " if stored else ""
        raise ConfigError(
            f"{self.kind} {place!r} {by}is not a class derived from {base.__name__}: derive it, "
            f"or register a function under another name, with `{self._register}`"
        )

    @property
    def _register(self) -> str:
        return f"register_{self.kind.replace(' ', '_').replace('environment', 'env')}"

    def make(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Calls the factory behind `name`; arguments it does not take are a `ConfigError`."""
        return self.make_with(self.get(name), name, args, kwargs)

    def make_with(
        self, factory: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Calls `factory`, which `get(name)` returned, as `make` does."""
        try:
            return factory(*args, **kwargs)
        except TypeError as exc:
            # Reading a signature costs more than most factories: only when the call went wrong.
            if complaint := misfit(factory, args, kwargs):
                raise ConfigError(f"{self.kind} {name!r} cannot be made: {complaint}") from exc
            raise

    def make_from(self, spec: str | Mapping[str, Any]) -> Any:
        """What a run file describes: a name, or a mapping of "kind" and the arguments."""
        return self.maker(spec)()

    def maker(self, spec: str | Mapping[str, Any]) -> Callable[[], Any]:
        """Returns what does `make_from(spec)` as often as it is called. The name is looked up now,
        and not again."""
        options: dict[str, Any] = {"kind": spec}
        if type(spec) is dict or isinstance(spec, Mapping):
            options = dict(spec)
        name = options.pop("kind", None)
        if not isinstance(name, str):
            names = ", ".join(self.names())
            raise ConfigError(f"{self.kind} {spec!r} needs a 'kind', one of: {names}")
        try:
            factory = self.get(name)
        except TypeError as exc:
            raise self._failed(name, options, exc) from exc

        def make() -> Any:
            try:
                return self.make_with(factory, name, (), options)
            except TypeError as exc:
                raise self._failed(name, options, exc) from exc

        return make

    def _failed(self, name: str, options: Mapping[str, Any], exc: TypeError) -> ConfigError:
        return ConfigError(f"{self.kind} {name!r} with {options}: {exc}")

    def builtin_name(self, thing: object) -> str | None:
        """The name under which `thing` is built in, if it is."""
        called = f":{getattr(thing, '__name__', '')}"
        places = {n: e.target for n, e in self._entries.items() if isinstance(e.target, str)}
        likely = (n for n, place in places.items() if place.endswith(called))
        return next((name for name in likely if resolve(places[name]) is thing), None)

    def names(self) -> list[str]:
        """Every known name, sorted."""
        return sorted({*self._entries, *self._announced})

    def describe(self) -> dict[str, str]:
        """Every known name with one line about it. A broken package is noted there and does
        not raise."""
        return {name: self._describe(name) for name in self.names()}

    def _describe(self, name: str) -> str:
        if entry := self._entries.get(name):
            return entry.description
        try:
            return _first_line(self.get(name))
        except LudicError as exc:
            return f"(cannot be used: {exc})"

    def _owner(self, name: str) -> str | None:
        entry = self._entries.get(name)
        if entry is None:
            return None
        if isinstance(entry.target, str):
            return "built in"
        module = getattr(entry.target, "__module__", "?")
        return f"registered by {module}.{getattr(entry.target, '__qualname__', '?')}"


def _package(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else entry.value


def _load(kind: str, name: str, place: str, of: str = "") -> Callable[..., Any]:
    try:
        thing: Any = resolve(place)
    except MissingExtraError:  # says itself what to install
        raise
    except (ImportError, AttributeError, ValueError) as exc:
        source = "" if place == name else f" from {place!r}"
        problem = f"{kind} {name!r}{of} cannot be loaded{source}: {exc}"
        if isinstance(exc, ModuleNotFoundError) and exc.name == re.split("[.:]", place)[0]:
            problem += f" (start in the folder of {exc.name}.py, or put that folder on PYTHONPATH)"
        raise ConfigError(problem) from exc
    if not callable(thing):
        raise ConfigError(f"{kind} {name!r}{of}: {place!r} cannot be called")
    return thing  # type: ignore[no-any-return]


def _first_line(thing: Any) -> str:
    text = inspect.getdoc(thing) or ""
    return text.strip().partition("\n")[0]
