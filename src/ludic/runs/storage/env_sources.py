"""The code of a run's environments, by which a resumed run notices that it changed.

env_sources.json    the modules that the environments are made of, each with a digest of its file
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from contextlib import suppress
from hashlib import blake2b
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType
from typing import Any

from ludic.registry import ENVS
from ludic.runs.settings import RunConfig
from ludic.runs.storage.folder import RunFolder

FILE = "env_sources.json"
_STDLIB = Path(inspect.__file__).parent


def note_env_sources(config: RunConfig, folder: RunFolder) -> str | None:
    """Writes down the code that the run's environments have now. Returns what to say if it had
    other code before; a folder from before this was written down has nothing to compare."""
    sources = env_sources(config)
    now = {name: digest for name, (digest, _) in sources.items()}
    before = folder.read_json(FILE) if folder.has(FILE) else now
    folder.write_json(FILE, now)
    if now == before:
        return None
    changed = sorted(n for n in now.keys() | before.keys() if now.get(n) != before.get(n))
    files = [str(sources[name][1]) if name in sources else name for name in changed]
    return (
        f"the environments' code changed since this run was last started, in "
        f"{', '.join(files)}: what was trained and measured before belongs to the old code"
    )


def env_sources(config: RunConfig) -> dict[str, tuple[str, Path]]:
    """The modules that the run's environments are made of, each with a digest and its file: those
    of the classes or functions, of their bases, and what these import from the same folder."""
    found: dict[str, tuple[str, Path]] = {}
    for section in (*config.env, *config.eval.env):
        factory = inspect.unwrap(ENVS.get(section.kind))
        parts = inspect.getmro(factory) if isinstance(factory, type) else (factory,)
        for name in dict.fromkeys(getattr(part, "__module__", "") for part in parts):
            _add(sys.modules.get(name), None, found)
    return found


def _add(module: Any, beside: Path | None, found: dict[str, tuple[str, Path]]) -> None:
    """Adds a module and, over and over, what it imports from its own folder."""
    if not isinstance(module, ModuleType) or module.__name__ in found:
        return
    file = Path(getattr(module, "__file__", None) or "")
    if file.suffix != ".py" or not file.is_file():
        return
    if file.is_relative_to(_STDLIB) and "site-packages" not in file.parts:
        return
    # A virtual environment may lie beside a user's modules, too.
    if beside is not None and not (
        file.is_relative_to(beside) and "site-packages" not in file.relative_to(beside).parts
    ):
        return
    text = file.read_bytes()
    found[module.__name__] = (blake2b(text, digest_size=16).hexdigest(), file)
    for name in _imported(text, module.__package__ or ""):
        _add(sys.modules.get(name), file.parent, found)


def _imported(text: bytes, package: str) -> Iterator[str]:
    """The names of all modules that a file imports, and of what else it imports from them."""
    with suppress(SyntaxError, ImportError):  # it was changed after it was imported
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                name = "." * node.level + (node.module or "")
                base = resolve_name(name, package) if node.level else name
                yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
