"""A page's table of model families by verdict: written, read back, and the command that does it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs"
END = "<!-- end of the table -->"


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a family is handled, and why."""

    how: str
    why: str = ""


@dataclass(frozen=True)
class FamilyTable:
    """The table that `python -m tools.{tool} --write` puts between two marks of a page of the docs.
    Each verdict has a heading; those in `reasons` list their reasons, and the families of each."""

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
                alike: dict[str, list[str]] = {}
                for name in names:
                    alike.setdefault(reason(verdicts[name].why), []).append(f"`{name}`")
                lines += ["| families | why |", "|---|---|"]
                lines += [f"| {', '.join(those)} | {why} |" for why, those in alike.items()]
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
            elif line.startswith(("`", "| `")):
                names = line.removeprefix("| ").partition(" |")[0].split(",")
                found |= dict.fromkeys((name.strip("` ") for name in names), how)
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
        """The command line: tries families one after another, and prints the verdict on each."""
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


def reason(why: str) -> str:
    """A reason without the name of the class, figures and shapes: what families have in common."""
    bare = re.sub(r"^\w+(ForCausalLM|ForConditionalGeneration|LMHeadModel|Decoder)[: ]+", "", why)
    bare = re.sub(r"\b\w+Attention (?=adds|asks)", "its attention ", bare)
    return short(re.sub(r"\[[\d, ]*\]|\([\d, ]+\)|(?<![\w.])\d[\d.]*(e-\d+)?\b", "…", bare))


def short(why: str) -> str:
    """A reason as a table's cell."""
    line = " ".join(why.split()).replace("|", "\\|").replace("<", "&lt;")
    return line if len(line) <= 160 else f"{line[:157]}…"
