"""A page's table of model families by verdict: written, read back, and the command that does it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
END = "<!-- end of the table -->"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a family; `why` says it for those that were not taken."""

    how: str
    why: str = ""


@dataclass(frozen=True)
class FamilyTable:
    """The table that `python -m tools.{tool} --write` puts between two marks of a page of the docs.
    Each verdict has a heading; those in `reasons` list a reason for each family."""

    tool: str
    page: str
    level: str
    headings: Mapping[str, str]
    reasons: Collection[str]

    @property
    def _begin(self) -> str:
        return f"<!-- table: python -m tools.{self.tool} --write -->"

    def text(self, verdicts: Mapping[str, Verdict]) -> str:
        """The table as Markdown."""
        lines = []
        for how, heading in self.headings.items():
            names = [name for name, verdict in verdicts.items() if verdict.how == how]
            lines += [f"{self.level} {heading} ({len(names)})", ""]
            if how in self.reasons:
                lines += ["| family | why |", "|---|---|"]
                lines += [f"| `{name}` | {short(verdicts[name].why)} |" for name in names]
            else:
                lines.append(", ".join(f"`{name}`" for name in names))
            lines.append("")
        return "\n".join(lines)

    def written(self) -> dict[str, str]:
        """What the page says of each family."""
        found: dict[str, str] = {}
        how = ""
        verdicts = {heading: how for how, heading in self.headings.items()}
        text = (DOCS / self.page).read_text(encoding="utf-8")
        for line in text.partition(self._begin)[2].partition(END)[0].splitlines():
            if line.startswith(f"{self.level} "):
                how = verdicts[line.removeprefix(self.level).strip().rpartition(" (")[0]]
            elif line.startswith("`"):
                found |= dict.fromkeys((name.strip("` ") for name in line.split(",")), how)
            elif line.startswith("| `"):
                found[line.split("`")[1]] = how
        return found

    def write(self, verdicts: Mapping[str, Verdict]) -> None:
        """Puts the table into the page."""
        page = DOCS / self.page
        text = page.read_text(encoding="utf-8")
        before, after = text.partition(self._begin)[0], text.partition(END)[2]
        new = f"{before}{self._begin}\n\n{self.text(verdicts)}{END}{after}"
        page.write_text(new, encoding="utf-8")

    def command(
        self,
        tried: Callable[[str], Verdict],
        families: Callable[[], Iterable[str]],
        about: str,
        arguments: Iterable[str] | None = None,
    ) -> None:
        """The command line: tries families one after another, and says what became of each."""
        parser = argparse.ArgumentParser(description=about.partition("\n")[0])
        parser.add_argument("names", nargs="*", help="families; none: all of them")
        parser.add_argument("--write", action="store_true", help=f"into {self.page}")
        chosen = parser.parse_args(None if arguments is None else list(arguments))
        verdicts = {}
        for name in chosen.names or families():
            verdicts[name] = tried(name)
            print(f"{name:32} {verdicts[name].how:20} {short(verdicts[name].why)}", flush=True)
        if chosen.write:
            self.write(verdicts)


def short(why: str) -> str:
    """A reason as a table's cell."""
    line = " ".join(why.split()).replace("|", "\\|").replace("<", "&lt;")
    return line if len(line) <= 160 else f"{line[:157]}…"
