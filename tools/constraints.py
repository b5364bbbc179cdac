"""Writes `constraints.txt`: the installed version of everything that `make setup` installs.

Names and versions only. A local version such as `2.13.0+cpu` is written without its suffix, so
that the same pin finds whichever build a machine has.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
DISTRIBUTION = "ludic-rl"
EXTRAS = ("examples",)
GROUP = "dev"
HEADER = "# Written by `make constraints`: what the tests are run with.\n"


def group_requirements(groups: dict[str, list[Any]], name: str) -> Iterator[Requirement]:
    """The requirements of a dependency group, those of the groups it includes among them."""
    for entry in groups[name]:
        if isinstance(entry, str):
            yield Requirement(entry)
        else:
            yield from group_requirements(groups, entry["include-group"])


def closure(roots: list[Requirement]) -> dict[str, str]:
    """Installed versions of `roots` and of everything they need here, by canonical name."""
    versions: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(root, extra) for root in roots for extra in ("", *root.extras)]
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            found = distribution(name)
        except PackageNotFoundError:
            raise SystemExit(f"{requirement} is not installed: run `make setup` first") from None
        versions[name] = re.sub(r"\+.*", "", found.version)
        for text in found.requires or []:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                waiting += [(needed, inner) for inner in ("", *needed.extras)]
    versions.pop(DISTRIBUTION, None)
    return versions


def main() -> None:
    """Writes the file and says how many pins it holds."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    roots = [Requirement(f"{DISTRIBUTION}[{','.join(EXTRAS)}]")]
    roots += [r for r in group_requirements(groups, GROUP) if not r.marker or r.marker.evaluate()]
    versions = closure(roots)
    lines = [f"{name}=={versions[name]}\n" for name in sorted(versions)]
    (ROOT / "constraints.txt").write_text(HEADER + "".join(lines))
    print(f"constraints.txt: {len(lines)} packages")


if __name__ == "__main__":
    main()
