"""What a terminal would obey is shown to it as text."""

from __future__ import annotations

import io
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from ludic.eval import EvalReport
from ludic.eval.report import EpisodeResult
from ludic.plumbing.text import visible
from ludic.runs.results.report import RunReport
from ludic.runs.results.terminal import PlainConsole, plot_terminal

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\x08\r\u202e\ud800"


@given(st.text(alphabet=st.characters()))
def test_nothing_is_left_that_a_terminal_obeys_and_the_rest_stays(text: str) -> None:
    shown = visible(text)
    assert not any(unicodedata.category(c) in ("Cc", "Cs") for c in shown if c not in "\n\t")
    shown.encode("utf-8")
    assert visible(shown) == shown
    if all(c.isprintable() or c in "\n\t" for c in text):
        assert shown == text


def test_line_ends_of_other_systems_are_line_ends() -> None:
    assert visible("a\r\nb\rc") == "a\nb\\x0dc"


def test_a_run_shows_words_of_environments_and_models_harmlessly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")  # one that has colours
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = io.StringIO()
    console = PlainConsole(file=out, width=200, force_terminal=True)
    table = Table(HOSTILE)
    table.add_row(HOSTILE)
    for shown in (HOSTILE, Text(HOSTILE), table):
        console.print(shown)
    said = out.getvalue()
    assert said.count("\\x1b[2J") >= 2, "a column may be too narrow for it"
    assert said.count("\\x1b]0;") == 4
    assert "\x1b[2J" not in said
    assert "\x1b]0" not in said
    assert not {"\x07", "\x08", "\x9b", "\r", "\u202e", "\ud800"} & set(said)
    assert "\x1b[1m" in said, "the console's own colours stay"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_what_the_terminals_encoding_does_not_have_is_a_question_mark(encoding: str) -> None:
    out = io.BytesIO()
    file = io.TextIOWrapper(out, encoding=encoding, write_through=True)
    PlainConsole(file=file, width=80).print("│ 正解 [b] reward")
    assert out.getvalue() == b"? ?? [b] reward\n"


def test_a_terminal_too_narrow_for_a_plot_has_one_column_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for columns in (1, 12):
        monkeypatch.setattr("ludic.runs.results.terminal.console", PlainConsole(width=columns))
        assert plot_terminal(([1, 2, 3], [0.0, 0.5, 1.0]), "reward").count("│") == 8


def test_a_report_is_harmless_where_it_is_printed() -> None:
    result = EpisodeResult(0, None, 1.0, True, outcome=HOSTILE)
    assert "\x1b" not in str(RunReport({"before": EvalReport("before", (result,))}))
