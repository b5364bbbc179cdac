"""Reference pages for the documentation: one for each part of the package, made from docstrings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

SOURCE = Path(__file__).resolve().parent.parent / "src" / "ludic"


def parts() -> list[str]:
    """The public parts of the package: its packages, and its top-level modules."""
    found = [path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file()]
    found += [path.stem for path in SOURCE.glob("*.py") if not path.stem.startswith("_")]
    return sorted(found)


def page_of(part: str) -> str:
    """A module's page, or a package's: what it is for, then each of its public modules."""
    folder = SOURCE / part
    if not folder.is_dir():
        return f"# ludic.{part}\n\n::: ludic.{part}\n"
    inner = sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))
    packages = sorted(path.parent.name for path in folder.glob("*/__init__.py"))
    # The package only re-exports: its members are described where they are written.
    page = f"# ludic.{part}\n\n::: ludic.{part}\n    options:\n      members: false\n"
    return page + "".join(f"\n::: ludic.{part}.{name}\n" for name in [*inner, *packages])


def on_config(config: Any) -> Any:
    """Puts the reference pages behind the others of the last section."""
    pages = [{f"ludic.{part}": f"reference/{part}.md"} for part in parts()]
    (section,) = config["nav"][-1].values()
    section.append({"API": pages})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds `reference/<part>.md` for every part."""
    for part in parts():
        files.append(File.generated(config, f"reference/{part}.md", content=page_of(part)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Takes the marks for the tests off the fences, where Markdown knows only languages, and the
    links off names of files that are not part of the site."""
    markdown = re.sub(r"^( *```)(python no-run|text output)$", _language_only, markdown, flags=re.M)
    return re.sub(r"\[([^]]+)\]\(\.\./[^)]*\)", r"\1", markdown)


def _language_only(fence: re.Match[str]) -> str:
    return fence[1] + fence[2].split()[0]
