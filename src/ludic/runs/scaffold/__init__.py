"""A new package with an environment, its test, and a run file that trains at once."""

from __future__ import annotations

import keyword
from pathlib import Path

from ludic.errors import ConfigError, UnknownNameError
from ludic.registry import list_envs

TEMPLATES = Path(__file__).parent
"""The packages as they would be for the name `my_env`, a folder for each kind, and what they share.
What ends in `.txt` here is Python there, and is kept from being taken for code of this package."""
KINDS = {"single": "one question", "steps": "several steps", "two-seats": "two players"}


def write(name: str, where: Path, kind: str = "single") -> str:
    """Writes the package `name` under `where`, with an environment of one of `KINDS`; returns what
    to do next, for a person."""
    if kind not in KINDS:
        raise UnknownNameError("--kind", kind, KINDS)
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower():
        raise ConfigError(f"{name!r} is not a valid package name: use one such as my_env")
    if name in list_envs():
        raise ConfigError(f"an environment {name!r} exists already: choose another name")
    folder = where / name
    if folder.exists():
        raise ConfigError(f"{folder} exists already: choose another name, or remove it")
    cls = "".join(part.capitalize() for part in name.split("_"))

    def renamed(text: str) -> str:
        return (
            text.replace("my_env", name)
            .replace("MyEnv", cls)
            .replace("my-env", name.replace("_", "-"))
        )

    folder.mkdir(parents=True)
    own = TEMPLATES / kind.replace("-", "_")
    for file in (*own.iterdir(), *(TEMPLATES / "shared").iterdir()):
        text = renamed(file.read_text(encoding="utf-8"))
        (folder / renamed(file.name).removesuffix(".txt")).write_text(text, encoding="utf-8")
    return (
        f"wrote {name}/: the environment in {name}.py, its test, and run.toml\n"
        f"next: cd {name} && ludic train run.toml"
    )
