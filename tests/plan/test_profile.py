"""Profiles: the shipped ones, one that is written and read back, and what is wrong with others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ludic.errors import ConfigError
from ludic.plan.profile import FIGURES, ORIGINS, load_profile, shape_named, shipped


@pytest.mark.parametrize("name", shipped())
def test_every_shipped_profile_has_all_figures_with_their_origin(name: str) -> None:
    profile = load_profile(name)
    assert set(profile.figures) == set(FIGURES)
    assert {figure.origin for figure in profile.figures.values()} <= set(ORIGINS)


def test_only_the_machines_that_we_had_are_called_measured() -> None:
    measured = {
        name
        for name in shipped()
        if any(figure.origin == "measured" for figure in load_profile(name).figures.values())
    }
    assert measured == {"cpu", "h200"}


def test_a_data_sheets_profile_is_in_proportion_to_what_was_measured() -> None:
    h200, a100 = load_profile("h200"), load_profile("a100-80")
    assert a100["pass_flop_s"] == pytest.approx(h200["pass_flop_s"] * 989 / 312)
    assert a100["decode_weight_s"] == pytest.approx(h200["decode_weight_s"] * 4.8 / 2.04)
    assert a100["host_episode_s"] == h200["host_episode_s"]
    assert a100.figures["host_episode_s"].origin == "measured on another machine"


def test_a_written_profile_is_read_back(tmp_path: Path) -> None:
    profile = load_profile("h200").with_figures("assumed", "a test", latency_s=1e-3)
    profile.write(tmp_path / "mine.json")
    assert load_profile(tmp_path / "mine.json") == profile


def test_a_file_that_is_no_profile_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    with pytest.raises(ConfigError, match=r"h100.*calibrate"):
        load_profile("b300")
    for text in ("[]", '{"name": "x"}', '{"name": 1, "figures": []}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="cannot be read"):
            load_profile(path)
    load_profile("h200").write(path)
    facts = json.loads(path.read_text())
    for odd in ({"like": 5}, {"like": "h200", "figures": {}}):
        path.write_text(json.dumps(facts | odd))
        with pytest.raises(ConfigError, match="cannot be read"):
            load_profile(path)
    facts["figures"]["decode_row_s"]["value"] = -1
    del facts["figures"]["latency_s"]
    path.write_text(json.dumps(facts))
    with pytest.raises(ConfigError, match=r"latency_s.*decode_row_s"):
        load_profile(path)


def test_a_models_sizes_are_found_by_its_name() -> None:
    assert shape_named("Qwen/Qwen2.5-Coder-1.5B-Instruct") == shape_named("Qwen2.5-1.5B")
    assert shape_named("qwen2.5-7b").parameters == pytest.approx(7.62e9, rel=0.01)
    with pytest.raises(ConfigError, match="--shape"):
        shape_named("Qwen2.5-7")
