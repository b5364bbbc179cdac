"""Run files that no person writes: refused in one sentence, whatever is in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ludic.errors import ConfigError
from ludic.inference.addresses import find_key
from ludic.runs.locate import read_run
from ludic.runs.run import Run
from ludic.runs.settings import load_run, parse_run
from ludic.runs.storage import RunFolder

MINIMAL = '[env]\nkind = "tic_tac_toe"\n'


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 100_000, "nested too deeply|not valid TOML"),
        ("a = " + "[" * 100_000, "nested too deeply"),
        ("a = " + "{a = " * 5_000, "nested too deeply"),
        (".".join(["a"] * 5_000) + " = 1", "nested too deeply|unknown key"),
        ("seed = " + "1" * 5_000, "not valid TOML"),
    ],
    ids=["headers", "lists", "tables", "dots", "digits"],
)
def test_a_file_that_is_nested_too_deeply_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError, match=f"run.toml.*({why})"):
        load_run(tmp_path / "run.toml")


def test_a_mark_of_byte_order_is_no_part_of_a_run_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("\ufeff" + MINIMAL, encoding="utf-8")
    assert load_run(path) == parse_run(MINIMAL)


def test_an_override_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'env\.kwargs\.x' is nested too deeply"):
        parse_run(MINIMAL, ["env.kwargs.x=" + "[" * 100_000])


def test_a_stored_run_that_is_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("[" * 100_000)
    (tmp_path / "origin.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot read"):
        RunFolder.open(tmp_path).config()
    with pytest.raises(ConfigError, match="cannot read"):
        read_run(str(tmp_path))


LONG = "k" * 5_000
KEYED = "[inference]\nbackend = 'vllm'\nservers = ['http://127.0.0.1:9']\napi_key_file = "


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (f"{KEYED}'{LONG}'\n", "api_key_file='.*…' cannot be read: File name"),
        (f'{KEYED}"a\\u0000b"\n', "api_key_file=.* cannot be read"),
        (f"{KEYED}'~nobody-here/key'\n", "cannot be read: No such file"),
        (f"[sft]\ndata = '{LONG}'\nsteps = 1\n", "no such file"),
        (f"[model]\nchat_template = '{LONG}'\n", "chat_template"),
        (f"[reference]\nmodel = '/{LONG}'\n", "reference.model"),
        (f"[run]\nfolder = '{LONG}'\n", "cannot create the run folder"),
        (f"[run]\nname = '{LONG}'\n", "cannot create the run folder"),
    ],
    ids=["key", "key-with-null", "key-of-nobody", "data", "template", "model", "folder", "name"],
)
def test_a_name_that_is_no_path_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(f"{MINIMAL}{settings}")
    with pytest.raises(ConfigError, match=why):
        Run.from_file(tmp_path / "run.toml").go()


def test_the_error_of_a_key_file_stays_short() -> None:
    with pytest.raises(ConfigError) as caught:
        find_key(None, LONG, "inference")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", ["../../x", "/x", "a/b", "..", ".", "", "a\0b"])
@pytest.mark.parametrize("out", [None, "here"])
def test_a_runs_name_is_one_part_of_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, out: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"run\.name=.*run\.folder"):
        Run("tic_tac_toe", name=name, out=out)
    assert list(tmp_path.iterdir()) == []


def test_an_older_run_with_such_a_name_is_still_read(tmp_path: Path) -> None:
    config = parse_run(MINIMAL, ["run.name=a/b"])
    folder = RunFolder(tmp_path / "run")
    folder.make(config, modules=tmp_path)
    assert RunFolder.open(folder.path).config().run.name == "a/b"
