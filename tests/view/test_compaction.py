"""A compacted rollout on its pages: a seam, with both sides of it."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from ludic.types import AgentStep, EnvironmentStep, Fork, ForkReason
from ludic.view.export import rollout_html
from ludic.view.folders import RunPlace
from ludic.view.index import RunIndex
from ludic.view.rollout_page import group_page, rollout_page, texts_of
from tests.view.made import make_run, rollout


def test_a_compaction_is_a_seam_with_both_sides(tmp_path: Path) -> None:
    made = rollout("step-0/0/0", ["I go.", "I went.", "On."], group="g")
    steps = list(made.steps)
    summary, after = steps[3], steps[4]
    assert isinstance(summary, EnvironmentStep)
    assert isinstance(after, AgentStep)
    info = {"compacted": True, "left_out": [0], "kept_turns": 1}
    steps[3] = replace(summary, action=None, stepped=False, info=info)
    steps[4] = replace(after, fork=Fork(ForkReason.COMPACTED, "a summary replaced <all>"))
    folder = make_run(tmp_path / "run", [replace(made, steps=tuple(steps))])
    place = RunPlace("run", folder.resolve(), folder.resolve())
    index = RunIndex(place)
    index.update()
    with index.reading() as db:
        page = rollout_page(place, db, "step-0/0/0/agent", texts_of(place))
        group = group_page(place, db, "g")
    assert page["steps"][3]["info"]["compacted"]
    assert page["steps"][4]["fork"]["reason"] == "compacted"
    turns = group["attempts"][0]["turns_shown"]
    assert [turn["compacted"] for turn in turns] == [False, True, False]
    html = rollout_html(page, "run")
    assert "<b>compacted</b>: a summary, and no move" in html
    assert "Compacted: a summary replaced &lt;all&gt;." in html
    before, _, rest = html.partition("class=seam>")
    assert "went" in before
    assert "tokens that the model sees from here on" in rest
    assert "Your move?" in rest
