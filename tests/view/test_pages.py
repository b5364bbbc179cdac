"""The pages in a real browser: read, filtered, compared, live, and unmoved by hostile text."""

from __future__ import annotations

import asyncio
import json
import re
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ludic.rollouts.storage import RolloutWriter, rollout_row
from ludic.rollouts.token_log import TokenLog
from ludic.runs.run import Run
from ludic.types import AgentStep, Rollout
from tests.agents.scripted import move, scripted_agent
from tests.agents.test_compaction import Policy, compacting, compactions, play, prompt, said_last
from tests.view.made import add_metrics, make_run, rollout, tokens_of, training
from tests.view.serving import Served, serving

pytestmark = [pytest.mark.browser, pytest.mark.integration, pytest.mark.timeout(170)]

Serve = Callable[..., Served]
HOSTILE = {
    "script": "<script>window.hacked = 1</script>",
    "handler": '<img src=x onerror="window.hacked = 2"><svg onload="window.hacked = 3">',
    "unclosed": "</pre></article><textarea><!-- <style>* { display: none }</style> \"'>",
    "controls": "bell \x07 null \x00 delete \x7f return \r escape \x1b[31mred\x1b[0m",
    "turned": "abc \u202edcba\u202c \u2066isolated\u2069 \u200bzero width",
    "template": "${window.hacked = 4} {{constructor}} javascript:alert(1)",
    "long": "x" * 1_000_000,
}


def until(page: Any, holds: str, seconds: float = 30.0) -> None:
    """Waits for an expression of the page. Playwright's own way evaluates text inside the page,
    which the policy forbids."""
    for _ in range(int(seconds * 10)):
        if page.evaluate(holds):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"after {seconds} s it does not hold: {holds}")


@pytest.fixture(scope="module")
def demo(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The built-in run, with fewer steps, by the library's own front door."""
    folder = tmp_path_factory.mktemp("demo") / "tic-tac-toe"
    smaller = [
        *("sft.examples=40", "sft.steps=2", "training.steps=3", "eval.episodes=4"),
        *("training.rollouts_per_update=8", 'logging.loggers=["console"]'),
        *("model.kwargs.hidden_size=32", "model.kwargs.layers=1"),
    ]
    Run.from_file("tic-tac-toe", smaller, out=folder).go()
    with serving(folder.parent) as found:
        yield found


def test_the_demo_is_opened_filtered_and_read_token_by_token(demo: Served, pages: Any) -> None:
    page = pages(demo.link())
    page.click("a.title >> text=tic-tac-toe")
    page.wait_for_selector("h1 >> text=tic-tac-toe")
    page.wait_for_selector(".chart path", state="attached")
    page.click("text=Rollouts →")
    page.wait_for_selector("table.rollouts tbody tr")
    demo.indexed("tic-tac-toe", 24)
    page.wait_for_selector("text=24 rollouts")
    page.fill("input[aria-label='update min']", "3")
    page.press("input[aria-label='update min']", "Enter")
    page.wait_for_selector("text=8 rollouts")
    assert "update.min=3" in page.url
    updates = page.locator("table.rollouts tbody tr td:first-child").all_inner_texts()
    assert set(updates) == {"3"}

    page.click("table.rollouts tbody tr >> nth=0")
    page.wait_for_selector(".tok.sampled")
    told = demo.ask("rollout", run="tic-tac-toe", id=page.locator("h1.id").inner_text())
    first = next(s for s in told["steps"] if s["kind"] == "agent")["tokens"]
    shown = page.locator(".toks.trained, .toks.untrained").first
    assert shown.locator(".tok").count() == len(first["completion"])
    page.hover(".tok.sampled >> nth=0")
    tip = page.locator(".inspector").inner_text()
    assert str(first["completion"][0]) in tip
    assert "policy version" in tip
    assert "trainer's log-prob" in tip
    page.click(".prompt summary >> nth=0")
    page.wait_for_selector(".tok.state")
    assert page.locator(".toks.state").first.locator(".tok").count() == len(first["prompt"])
    for way in ("logprob", "mismatch", "entropy", "version", "weight"):
        page.select_option("select[aria-label='Colour tokens by']", way)
        until(page, f"location.hash.includes('by={way}')")
    page.wait_for_selector(".legend")
    assert page.evaluate("getComputedStyle(document.querySelector('.tok.sampled')).backgroundColor")


def test_the_demos_group_is_compared_and_its_evaluations_too(demo: Served, pages: Any) -> None:
    demo.indexed("tic-tac-toe", 24)
    page = pages(demo.link("#/group?run=tic-tac-toe&id=step-1/group-0"))
    page.wait_for_selector(".attempt")
    assert page.locator(".attempt").count() == 8
    assert page.locator("text=weight").count() >= 1
    page.click(".attempt header a >> nth=0")
    page.wait_for_selector(".dot-link.here")
    page.goto(demo.address + "#/evaluations")
    page.wait_for_selector("text=Episode by episode")
    assert re.search(r"paired test: p (=|≤) [01]\.\d+", page.inner_text("main"))
    page.click("button[title='Exchange']")
    until(page, "location.hash.includes('a=after_rl')")


def test_a_live_run_grows_on_the_page(tmp_path: Path, serve: Serve, pages: Any) -> None:
    folder = make_run(tmp_path / "runs" / "live", training(2), steps=2)
    served = serve(tmp_path / "runs")
    page = pages(served.link("#/rollouts?run=live"))
    page.wait_for_selector("text=8 rollouts")
    curves = pages(served.link("#/run?run=live"))
    curves.wait_for_selector(".tile >> text=2")
    new = [r for r in training(3) if r.id.startswith("step-2/")]
    with RolloutWriter(folder / "rollouts" / "train.jsonl.zst", append=True) as writer:
        for each in new:
            writer.write(each)
    with TokenLog(folder / "rollouts" / "train.tokens.jsonl.zst", append=True) as log:
        log.write(tokens_of(3, new))
    add_metrics(folder, [3])
    page.wait_for_selector("text=12 rollouts")
    page.wait_for_selector("table.rollouts >> text=step-2/3/0/agent")
    until(curves, "[...document.querySelectorAll('.tile b')].some((b) => b.textContent === '3')")


def test_what_is_indexed_while_a_page_opens_is_not_missed(
    tmp_path: Path, serve: Serve, pages: Any
) -> None:
    make_run(tmp_path / "runs" / "live", training(2), steps=2)
    served = serve(tmp_path / "runs")
    served.indexed("live", 8)
    page = pages(served.link("#/"))
    page.wait_for_selector("main h1")
    refused: list[Any] = []

    def not_yet(route: Any) -> None:
        if refused:
            route.continue_()
            return
        refused.append(route)
        route.fulfill(status=200, json={"source": None})  # of which no page can be made

    def of_before(route: Any) -> None:
        if refused:
            route.continue_()
        else:
            route.fulfill(json={**served.ask("state", run="live"), "version": "of before"})

    page.route("**/api/facets?*", not_yet)
    page.route("**/api/state?run=*", of_before)
    page.goto(served.address + "#/rollouts?run=live")
    page.wait_for_selector("text=8 rollouts")
    assert refused


def test_hostile_text_is_shown_as_text(tmp_path: Path, serve: Serve, pages: Any) -> None:
    rollouts = [
        rollout(f"step-0/{name}", [text[:1500]], prompt=text, outcome=text[:80], reward=i)
        for i, (name, text) in enumerate(HOSTILE.items())
    ]
    make_run(tmp_path / "runs" / "<b>bold</b> & co", rollouts, steps=1)
    served = serve(tmp_path / "runs")
    page = pages(served.link())
    page.click("a.title")
    page.wait_for_selector("h1 >> text=<b>bold</b> & co")
    page.click("text=Rollouts →")
    page.wait_for_selector(f"text={len(HOSTILE)} rollouts")
    run = "<b>bold</b> & co"
    for name, text in HOSTILE.items():
        identity = f"step-0/{name}/agent"
        for shown_as in ("tokens", "text"):
            target = "#/rollout?run=%3Cb%3Ebold%3C%2Fb%3E+%26+co&"
            page.goto(f"{served.address}{target}id={identity}&as={shown_as}")
            until(page, f"document.querySelector('h1.id')?.textContent === '{identity}'")
            page.wait_for_selector(".message.user pre")
        said = page.locator(".message.user pre").first.text_content()
        plain = re.sub(r"[^ -~]", "", text)[:5000]
        assert re.sub(r"[^ -~]|U\+[0-9A-F]{4}|\\x[0-9a-f]{2}", "", said).startswith(plain[:5000])
        inside = page.evaluate(
            "[...document.querySelectorAll('main script, main img, main style, main textarea, "
            "main [onerror], main [onload]')].length"
        )
        assert inside == 0
        if name == "controls":
            assert page.locator("main .ctl").count() >= 5
            assert "\x1b" not in said
        if name == "turned":
            assert "\u202e" not in page.inner_text("main")
            assert page.locator("main .ctl >> text=U+202E").count() >= 1
        if name == "long":
            page.click("button.more >> nth=0")
            until(page, "document.querySelector('.message.user pre').textContent.length > 200000")
            wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0
        assert page.evaluate("window.hacked") is None
    with page.expect_download() as waiting:
        page.goto(
            f"{served.address}#/rollout?run=%3Cb%3Ebold%3C%2Fb%3E+%26+co&id=step-0/handler/agent"
        )
        until(page, "document.querySelector('h1.id').textContent.includes('handler')")
        page.click("text=Save as HTML")
    saved = tmp_path / "saved.html"
    waiting.value.save_as(saved)
    alone = pages(saved.as_uri())
    assert "onerror" in alone.inner_text("body")
    assert alone.evaluate("window.hacked") is None
    assert alone.evaluate("document.querySelectorAll('img, script, svg').length") == 0
    assert run in alone.inner_text("body")


def test_what_is_damaged_is_said_and_the_rest_works(
    tmp_path: Path, serve: Serve, pages: Any
) -> None:
    runs = tmp_path / "runs"
    make_run(runs / "whole")
    newer = make_run(runs / "newer")
    config = json.loads((newer / "run.json").read_text())
    (newer / "run.json").write_text(json.dumps({**config, "schema": 99, "unheard_of": {"x": 1}}))
    row = rollout_row(rollout("step-7/0"))
    (newer / "rollouts" / "later.jsonl").write_text(json.dumps({**row, "schema": 77}) + "\n")
    broken = make_run(runs / "broken")
    path = broken / "rollouts" / "train.jsonl.zst"
    data = bytearray(path.read_bytes())
    data[30:60] = bytes(30)
    path.write_bytes(data[:-7])  # damaged within, and cut off at its end
    (broken / "run.json").write_text("{half")
    (broken / "eval" / "after_rl.json").write_text('{"name": "x"}')
    with (broken / "metrics.jsonl").open("a") as file:
        file.write("no json\n")
    (tmp_path / "empty").mkdir()
    served = serve(runs, tmp_path / "empty")
    page = pages(served.link())
    page.wait_for_selector("table.runs")
    text = page.inner_text("main")
    assert "schema 99, newer than 1" in text
    assert "run.json cannot be read" in text
    assert "holds no run" in text
    assert "1 lines cannot be read" in text
    page.goto(served.address + "#/run?run=broken")
    page.wait_for_selector("text=not a report of this version")
    page.wait_for_selector("text=bytes cannot be read")
    page.goto(served.address + "#/rollouts?run=broken")
    page.wait_for_selector("table.rollouts tbody tr")
    page.goto(served.address + "#/rollouts?run=newer")
    page.wait_for_selector("text=rollouts of schema 77")
    page.wait_for_selector("text=16 rollouts")
    page.goto(served.address + "#/rollouts?run=whole")
    page.wait_for_selector("text=16 rollouts")


def test_agents_are_side_by_side_and_sub_agents_below(
    tmp_path: Path, serve: Serve, pages: Any
) -> None:
    episode: list[Rollout] = [
        rollout("step-0/0/0", ["I open."], agent="X", reward=1, tool=True),
        rollout("step-0/0/0", ["I answer."], agent="O", reward=-1),
        rollout("step-0/0/0", ["Looked up."], agent="helper", parent="step-0/0/0/X"),
        rollout("step-0/1/0", ["Alone."], agent="X", error="ValueError: the world ended"),
    ]
    make_run(tmp_path / "runs" / "two", episode, steps=1)
    served = serve(tmp_path / "runs")
    page = pages(served.link("#/rollout?run=two&id=step-0/0/0/X"))
    page.wait_for_selector(".message.assistant")
    assert "look_up" in page.inner_text(".call")
    page.click("text=side by side")
    page.wait_for_selector(".columns.several .column >> nth=1")
    assert "I answer." in page.locator(".column >> nth=1").inner_text()
    page.click(".sub summary")
    page.wait_for_selector(".sub >> text=Looked up.")
    page.goto(served.address + "#/rollout?run=two&id=step-0/1/0/X")
    page.wait_for_selector("text=The episode failed: ValueError: the world ended")


def test_a_compaction_is_a_seam_with_both_sides(tmp_path: Path, serve: Serve, pages: Any) -> None:
    def policy(summary: str) -> Policy:
        return lambda call: move("go") if said_last(call).startswith(tuple("123")) else summary

    played: list[Rollout] = []
    for number, summary in enumerate(("It went on.", "")):
        agent = scripted_agent(policy(summary), ctx=compacting())
        with ThreadPoolExecutor(1) as pool:  # this thread's loop is the browser's
            made = pool.submit(asyncio.run, play(agent)).result()
        played.append(replace(made, id=f"step-0/{number}/0/agent", episode_id=f"step-0/{number}/0"))
    make_run(tmp_path / "runs" / "long", played, steps=1)
    served = serve(tmp_path / "runs")
    for made, how in zip(played, ("a summary replaced", "no summary came: "), strict=True):
        page = pages(served.link(f"#/rollout?run=long&id={made.id}"))
        page.wait_for_selector(".seam")
        seams, steps = compactions(made), made.steps
        assert page.locator(".seam").count() == len(seams) >= 3
        assert page.locator(".turn.compaction + .seam + .turn:not(.compaction)").count() == len(
            seams
        )
        before, after = steps[seams[0].agent_steps[-1]], steps[steps.index(seams[0]) + 1]
        assert isinstance(before, AgentStep)
        assert isinstance(after, AgentStep)
        line = page.locator(".seam .line").first.inner_text()
        assert line.startswith(f"{len(prompt(before))} tokens before · {how}")
        assert line.endswith(f" · {len(prompt(after))} after")
        page.locator(".seam summary").first.click()
        shown = page.locator(".seam details").first.inner_text()
        assert seams[0].obs in shown
        assert (before.message["content"] or "turns were dropped here]") in shown
        assert "forked here: compacted" in page.locator(".seam + .turn").first.text_content()


def test_the_keyboard_the_address_and_the_phone(tmp_path: Path, serve: Serve, pages: Any) -> None:
    make_run(tmp_path / "runs" / "first")
    make_run(tmp_path / "runs" / "second", settings={"learning_rate": 5e-4})
    served = serve(tmp_path / "runs")
    served.indexed("first", 16)
    page = pages(served.link("#/rollouts?run=first&sort=reward&order=desc&outcome=win"))
    page.wait_for_selector("text=8 rollouts")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=1 of 8")
    first = page.inner_text("h1.id")
    page.keyboard.press("j")
    page.wait_for_selector("text=2 of 8")
    assert page.inner_text("h1.id") != first
    page.keyboard.press("k")
    page.wait_for_selector("text=1 of 8")
    page.keyboard.press("c")
    until(page, "location.hash.includes('by=')")
    page.keyboard.press("t")
    page.wait_for_selector(".message.assistant pre.said")
    address = page.url
    again = pages(served.link() + address[address.index("#") :])
    again.wait_for_selector("text=1 of 8")
    assert again.inner_text("h1.id") == first
    assert again.locator(".tok").count() == 0
    page.keyboard.press("g")
    page.wait_for_selector(".attempt")
    page.keyboard.press("?")
    page.wait_for_selector("dialog.help")

    runs = served.ask("runs")
    assert "training.learning_rate" in runs["differing"]
    for hash_ in ("#/", "#/run?run=first", "#/rollouts?run=first", address[address.index("#") :]):
        phone = pages(
            served.link(hash_),
            viewport={"width": 380, "height": 800},
            color_scheme="dark",
            has_touch=True,
        )
        phone.wait_for_selector("main h1")
        phone.wait_for_timeout(300)
        assert phone.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, hash_
        background = phone.evaluate("getComputedStyle(document.body).backgroundColor")
        assert sum(map(int, re.findall(r"\d+", background)[:3])) < 200
        phone.context.close()
        pages.contexts.remove(phone.context)


def test_the_table_takes_keys_before_its_picture_is_there(
    tmp_path: Path, serve: Serve, pages: Any
) -> None:
    make_run(tmp_path / "runs" / "first")
    served = serve(tmp_path / "runs")
    served.indexed("first", 16)
    page = pages(served.link("#/"))
    page.wait_for_selector("main h1")
    held: list[Any] = []
    page.route("**/histogram*", lambda route: held.append(route))  # and answers none
    page.goto(served.address + "#/rollouts?run=first&sort=reward&order=desc&outcome=win")
    page.wait_for_selector("text=8 rollouts")
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=1 of 8")
    assert held


def test_charts_are_zoomed_and_saved(tmp_path: Path, serve: Serve, pages: Any) -> None:
    folder = make_run(tmp_path / "runs" / "first")
    add_metrics(folder, range(5, 900))
    served = serve(tmp_path / "runs")
    served.indexed("first", 16)  # or the chart is drawn again under the pointer
    page = pages(served.link("#/run?run=first&keys=train/loss"))
    page.wait_for_selector(".chart svg path", state="attached")
    box = page.locator(".chart svg").bounding_box()
    page.mouse.move(box["x"] + 120, box["y"] + 60)
    page.wait_for_selector(".tip >> text=first")
    page.mouse.down()
    page.mouse.move(box["x"] + 240, box["y"] + 60)
    page.mouse.up()
    until(page, "location.hash.includes('x0=')")
    page.wait_for_selector(".chart >> text=whole")
    page.hover(".chart")
    with page.expect_download() as waiting:
        page.click(".chart >> text=SVG")
    picture = Path(waiting.value.path()).read_text()
    assert picture.startswith("<svg")
    assert "class=" not in picture
    with page.expect_download() as waiting:
        page.click(".chart >> text=PNG")
    data = Path(waiting.value.path()).read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (round(box["width"]) * 2, round(box["height"]) * 2)


def test_the_table_shows_what_was_said_and_the_curves_what_the_reward_is_made_of(
    tmp_path: Path, serve: Serve, pages: Any
) -> None:
    folder = make_run(tmp_path / "runs" / "first")
    with (folder / "metrics.jsonl").open("a") as file:
        for step in (5, 6):
            parts = {"train/reward_env_mean": 0.5, "train/reward_parser_mean": -0.25}
            row = {"step": step, "train/step": step, "train/reward_mean": 0.25, **parts}
            file.write(json.dumps(row) + "\n")
    served = serve(tmp_path / "runs")
    served.indexed("first", 16)
    page = pages(served.link("#/rollouts?run=first"))
    page.wait_for_selector("table.rollouts tbody tr")
    assert "Said" in page.locator("table.rollouts thead th").all_inner_texts()
    rows = served.ask("rollouts", run="first", source="train")["rows"]
    shown = page.locator("table.rollouts td.start").all_inner_texts()
    assert [text.strip() for text in shown] == [row["said"] for row in rows]
    assert all(shown)
    page.goto(served.address + "#/run?run=first")
    page.wait_for_selector(".chart svg path", state="attached")
    drawn = page.locator(".picked .chip").all_inner_texts()
    assert drawn[:3] == ["train/reward_mean", "train/reward_env_mean", "train/reward_parser_mean"]
    assert "train/loss" in drawn
