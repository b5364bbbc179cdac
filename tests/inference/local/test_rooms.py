"""Who imports whom inside the engine: CPU and GPU parts are apart, and nothing is circular."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import ludic.inference.local

PACKAGE = "ludic.inference.local"


def imports() -> dict[str, set[str]]:
    """For each module of the engine, those of its modules that it names in an import, whether at
    the top, inside a function or for annotations only."""
    (root,) = ludic.inference.local.__path__
    files = {
        ".".join((PACKAGE, *path.relative_to(root).with_suffix("").parts)): path
        for path in Path(root).rglob("*.py")
        if path.name != "__init__.py"
    }
    found: dict[str, set[str]] = {}
    for name, path in files.items():
        nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
        named = {str(n.module) for n in nodes}
        named |= {f"{n.module}.{a.name}" for n in nodes for a in n.names}
        found[name] = named & files.keys()
    return found


def test_no_module_of_the_engine_is_in_a_circle_of_imports() -> None:
    found = imports()
    assert found[f"{PACKAGE}.sequence"] == {f"{PACKAGE}.arena", f"{PACKAGE}.prefix_store"}
    assert len(list(TopologicalSorter(found).static_order())) == len(found)


def test_only_the_place_that_builds_an_engine_knows_its_cpu_and_gpu_parts() -> None:
    rooms = {room: f"{PACKAGE}.{room}." for room in ("cpu", "gpu")}
    for module, imported in imports().items():
        home = next((room for room, prefix in rooms.items() if module.startswith(prefix)), None)
        reached = {room for room, prefix in rooms.items() for m in imported if m.startswith(prefix)}
        assert module == f"{PACKAGE}.build" or reached <= {home}, module
