"""Python objects in the place of names.

A run is recorded as JSON, where a part stands by its name. What a script gives instead is named
here: by its place if it can be imported, as it was made if a preset or a built-in parser made it,
and otherwise as "object:…", a name that means something only while its object is in use.

>>> from json import loads
>>> place_of(loads)
'json:loads'
>>> with bind_objects({"object:note:half": 0.5}):
...     given("object:note:half")
0.5
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ludic.errors import ConfigError
from ludic.plumbing.contexts import holding
from ludic.plumbing.lazy import resolve

P = ParamSpec("P")
T = TypeVar("T")

PREFIX = "object:"
_RECIPE = "_ludic_recipe"
_objects: ContextVar[Mapping[str, Any]] = ContextVar("objects", default={})  # noqa: B039


def bind_objects(objects: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Within it, these names stand for these objects. Threads of `ludic.workers` inherit this."""
    return holding(_objects, {**_objects.get(), **objects})


def is_given(name: object) -> bool:
    """Whether this is the name of an object that was given, and not of something importable."""
    return isinstance(name, str) and name.startswith(PREFIX)


def is_bound(name: str) -> bool:
    """Whether `given(name)` has an object to return."""
    return name in _objects.get()


def given(name: str, kind: str = "part") -> Any:
    """The object of that name; raises a `ConfigError` where it is not in use."""
    try:
        return _objects.get()[name]
    except KeyError:
        raise ConfigError(
            f"{kind} {name!r} was a Python object of a script, which no file holds: give it again, "
            "as in ludic.resume(folder, env=…), or name it as module:attribute from the start"
        ) from None


def place_of(thing: Any) -> str | None:
    """The `module:attribute` that any process can import `thing` from; None if there is none."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if not module or not name or module == "__main__" or "<" in name:
        return None
    try:
        found = resolve(f"{module}:{name}")
    except (ImportError, AttributeError):
        return None
    return f"{module}:{name}" if found is thing else None


def unplaced_name(thing: Any) -> str:
    """What to call an object without a place: "object:script:Guess". The part behind the prefix is
    the place that a class would have if its script were imported as a module."""
    owner = thing if hasattr(thing, "__qualname__") else type(thing)
    module = getattr(owner, "__module__", None) or "__main__"
    if module == "__main__":
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        module = Path(script).stem if script else module
    return f"{PREFIX}{module}:{owner.__qualname__}"


def remembered(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorates a factory so that what it makes can be described: by `name`, and the arguments."""

    def decorate(make: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(make)
        def made(*args: P.args, **kwargs: P.kwargs) -> T:
            thing = make(*args, **kwargs)
            # Reading a signature is slow and rarely needed: `recipe_of` does it.
            object.__setattr__(thing, _RECIPE, (name, make, args, kwargs))
            return thing

        return made

    return decorate


def recipe_of(thing: Any) -> tuple[str, dict[str, Any]] | None:
    """The name and arguments that a `remembered` factory made `thing` with, if one did."""
    if (recipe := getattr(thing, _RECIPE, None)) is None:
        return None
    name, make, args, kwargs = recipe
    return name, dict(inspect.signature(make).bind(*args, **kwargs).arguments)
