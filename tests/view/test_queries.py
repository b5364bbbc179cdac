"""What the pages are told: filters, orders, curves, tokens, comparisons."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from ludic.eval import compare
from ludic.eval.report import EvalReport
from ludic.rollouts.storage import read_rollouts
from ludic.types import AgentStep, EnvironmentStep, TokenTrace
from ludic.view import queries
from ludic.view.curves import CurveStore, thinned
from ludic.view.export import rollout_html
from ludic.view.folders import RunPlace, ViewError
from ludic.view.index import RunIndex
from ludic.view.overview import compared, differing, flattened
from ludic.view.rollout_page import group_page, rollout_page, texts_of
from ludic.view.rows import beginning
from tests.view.made import add_metrics, ids, make_run, rollout, training


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunPlace:
    folder = make_run(tmp_path_factory.mktemp("runs") / "first").resolve()
    return RunPlace("first", folder, folder)


@pytest.fixture(scope="module")
def index(run: RunPlace) -> RunIndex:
    made = RunIndex(run)
    made.update()
    return made


def found(index: RunIndex, filters: dict[str, str], **order: Any) -> list[str]:
    with index.reading() as db:
        page = queries.page(db, filters, limit=200, **order)
        assert page["total"] == len(page["rows"])
        return [row["id"] for row in page["rows"]]


def test_the_table_has_the_start_of_what_the_model_said_first(
    run: RunPlace, index: RunIndex
) -> None:
    stored = {r.id: r for r in read_rollouts(run.path / "rollouts" / "train.jsonl.zst")}
    with index.reading() as db:
        rows = queries.page(db, {}, limit=200)["rows"]
    assert len(rows) == 16
    for row in rows:
        first = next(s for s in stored[row["id"]].agent_steps if s.message["content"].strip())
        assert row["said"] == beginning(first.message["content"])


@given(st.text(max_size=600))
def test_a_beginning_is_one_short_line(text: str) -> None:
    start = beginning(text)
    assert len(start) <= 121
    assert start.splitlines() in ([], [start])
    assert " ".join(text.split()).startswith(start.removesuffix("…"))
    if len(" ".join(text.split())) <= 120 and len(text) <= 480:
        assert start == " ".join(text.split())


@pytest.mark.parametrize(
    ("filters", "holds"),
    [
        ({"outcome": "win"}, lambda r: r.total_reward == 1.0 and not r.truncated),
        ({"reward.min": "0.5"}, lambda r: r.total_reward >= 0.5),
        ({"update.min": "2", "update.max": "3"}, lambda r: r.id[5] in "12"),
        ({"parse_failures": "yes"}, lambda r: any(s.info.get("parse_error") for s in r.env_steps)),
        ({"truncated": "yes"}, lambda r: r.truncated),
        ({"truncation": "max_steps"}, lambda r: r.truncated),
        ({"group": "step-1/group-0"}, lambda r: r.group_id == "step-1/group-0"),
        ({"component:env.max": "0"}, lambda r: r.total_reward <= 0),
        ({"weight.min": "0"}, lambda r: r.total_reward > 0.5),
        ({"forks": "no"}, lambda r: False),
        ({"trained": "no"}, lambda r: False),
        ({"q": "edge"}, lambda r: "edge" in r.agent_steps[0].message["content"]),
        ({"q": '"corner 1"'}, lambda r: "corner 1" in r.agent_steps[1].message["content"]),
        ({"q": "cor"}, lambda r: True),
        ({"q": "absent"}, lambda r: False),
        ({"agent": "agent", "source": "train"}, lambda r: True),
        ({"source": "all"}, lambda r: True),
    ],
)
def test_filters_leave_what_they_say(
    index: RunIndex, run: RunPlace, filters: dict[str, str], holds: Any
) -> None:
    every = list(read_rollouts(run.path / "rollouts" / "train.jsonl.zst"))
    assert len(every) == 16
    assert sorted(found(index, filters)) == sorted(r.id for r in every if holds(r))


@pytest.mark.parametrize("sort", ["n", "reward", "tokens", "upd", "weight", "component:env", "id"])
@pytest.mark.parametrize("descending", [True, False])
def test_pages_are_parts_of_one_order(index: RunIndex, sort: str, descending: bool) -> None:
    whole = found(index, {}, sort=sort, descending=descending)
    with index.reading() as db:
        pieces: list[str] = []
        for offset in range(0, 16, 5):
            page = queries.page(db, {}, sort=sort, descending=descending, offset=offset, limit=5)
            pieces += [row["id"] for row in page["rows"]]
            assert page["total"] == 16
        assert pieces == whole
        middle = queries.neighbours(db, whole[7], {}, sort=sort, descending=descending)
        last = queries.neighbours(db, whole[-1], {}, sort=sort, descending=descending)
    assert (middle["place"], middle["previous"], middle["following"]) == (8, whole[6], whole[8])
    assert last["following"] is None


@pytest.mark.parametrize(
    ("filters", "order"),
    [
        ({"reward.min": "abc"}, {}),
        ({"reward.min": "nan"}, {}),
        ({}, {"sort": "id; DROP TABLE rollouts"}),
        ({"component:x') OR 1=1 --.min": "0"}, {}),
    ],
)
def test_nonsense_is_refused_in_words(
    index: RunIndex, filters: dict[str, str], order: dict[str, str]
) -> None:
    with pytest.raises(ViewError):
        found(index, filters, **order)


def test_any_text_can_be_searched_for(index: RunIndex) -> None:
    with index.reading() as db:

        @given(st.text(max_size=40))
        def search(text: str) -> None:
            text = text.encode("utf-8", "ignore").decode()
            queries.page(db, {"q": text})

        search()


def test_a_histogram_counts_every_rollout(index: RunIndex) -> None:
    with index.reading() as db:
        data = queries.histogram(db, {})
        facets = queries.facets(db)
    assert sum(count for *_, count in data["cells"]) == 16
    assert (data["first"], data["columns"], data["bins"]) == (1, 4, 2)
    assert [mean for _, mean in data["means"]] == [0.5] * 4
    assert dict(facets["outcome"]) == {"win": 8, "loss": 7}
    assert facets["components"] == ["env", "parser"]


def test_a_rollout_has_its_tokens_and_their_credit(index: RunIndex, run: RunPlace) -> None:
    texts = texts_of(run)
    with index.reading() as db:
        page = rollout_page(run, db, "step-2/1/0/agent", texts)
    calls = [step for step in page["steps"] if step["kind"] == "agent"]
    assert [call["tokens"]["completion"] for call in calls] == [
        list(ids("I take B2.")),
        list(ids("Then corner 1.")),
    ]
    for call in calls:
        tokens = call["tokens"]
        assert tokens["trained"]
        assert tokens["update"] == 3
        assert set(tokens["weights"]) == {0.5}
        assert len(tokens["entropies"]) == len(tokens["completion"])
        shown = "".join(page["texts"][number] for number in tokens["completion"])
        assert shown == call["message"]["content"]
    # The second prompt begins with the first call's tokens.
    assert calls[1]["tokens"]["repeated"] == len(ids("Your move?")) + len(ids("I take B2."))
    assert calls[1]["fork"]["reason"] == "thinking_stripped"
    assert [row["id"] for row in page["same_group"]] == [f"step-2/{i}/0/agent" for i in range(4)]
    # Entropies grow along the update, so these are of this rollout and no other.
    entropies = [e for call in calls for e in call["tokens"]["entropies"]]
    assert entropies == sorted(entropies)
    assert 0 < entropies[0] < entropies[-1] < 1


def test_calls_of_one_turn_with_prompts_of_one_length_have_their_own_tokens(
    tmp_path: Path,
) -> None:
    made = rollout("step-0/0/0", ["I take B2."])
    first, outcome = made.steps
    assert isinstance(first, AgentStep)
    assert isinstance(outcome, EnvironmentStep)
    prompt = ids("Your move?")
    calls = [
        replace(first, trace=TokenTrace(prompt, ids(text), (logprob,) * len(text)))
        for text, logprob in (("I take B2.", -0.2), ("I take C3.", -0.3))
    ]
    made = replace(made, steps=(*calls, replace(outcome, agent_steps=(0, 1))))
    folder = make_run(tmp_path / "run", [made])
    place = RunPlace("run", folder.resolve(), folder.resolve())
    index = RunIndex(place)
    index.update()
    with index.reading() as db:
        page = rollout_page(place, db, made.id, None)
    shown = [step["tokens"] for step in page["steps"] if step["kind"] == "agent"]
    entropies = [entropy for tokens in shown for entropy in tokens["entropies"]]
    assert len(entropies) == 20
    assert entropies == sorted(entropies), "they grow along the update"
    assert entropies[9] < entropies[10]


def test_a_group_says_where_its_attempts_part(index: RunIndex, run: RunPlace) -> None:
    with index.reading() as db:
        page = group_page(run, db, "step-0/group-0")
    assert page["parting"] == {"agent": 0}
    first = [attempt["turns_shown"][0] for attempt in page["attempts"]]
    assert [turn["text"][: turn["common"]] for turn in first] == ["I take "] * 4
    assert [attempt["weight"] for attempt in page["attempts"]] == [-0.5, 0.5, -0.5, 0.5]


def test_unknown_names_are_errors_in_words(index: RunIndex, run: RunPlace) -> None:
    with index.reading() as db:
        with pytest.raises(ViewError, match="no rollout"):
            rollout_page(run, db, "nobody", None)
        with pytest.raises(ViewError, match="no group"):
            group_page(run, db, "nobody")


def test_an_exported_rollout_is_inert(tmp_path: Path) -> None:
    hostile = '</pre><script>bad()</script><img src=x onerror="bad()">\x1b[31m\u202ereversed'
    folder = make_run(tmp_path / "run", [rollout("step-0/0/0", [hostile], outcome=hostile)])
    place = RunPlace("run", folder.resolve(), folder.resolve())
    index = RunIndex(place)
    index.update()
    with index.reading() as db:
        page = rollout_page(place, db, "step-0/0/0/agent", texts_of(place))
    html = rollout_html(page, "<script>run</script>")
    assert "<script" not in html
    assert "<img" not in html
    assert "\x1b" not in html
    assert "\u202e" not in html
    assert "[U+202E]" in html
    assert "default-src 'none'" in html
    assert "http://" not in html


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(2, 50))
def test_thinning_keeps_extremes_and_the_mean(values: list[float], most: int) -> None:
    points = thinned(range(len(values)), values, most)
    assert len(points) == min(len(values), most)
    assert min(p[2] for p in points) == min(values)
    assert max(p[3] for p in points) == max(values)
    assert all(p[2] - 1e-6 <= p[1] <= p[3] + 1e-6 for p in points)
    assert [p[0] for p in points] == sorted(p[0] for p in points)


def test_curves_follow_their_file_and_forget_one_that_was_rewritten(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [])
    place, curves = RunPlace("run", folder.resolve(), folder.resolve()), CurveStore()
    assert [p[:2] for p in curves.curve(place, "train/reward_mean")] == [
        [step, step / 10] for step in (1, 2, 3, 4)
    ]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "train/st')
    assert len(curves.curve(place, "train/reward_mean")) == 4
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('ep": 5, "train/reward_mean": 9}\nnot json\n')
    assert curves.curve(place, "train/reward_mean")[-1] == [5, 9, 9, 9]
    assert curves.progress(place)["bad"] == 1
    assert [p[0] for p in curves.curve(place, "train/reward_mean", low=2, high=4)] == [2, 3, 4]
    (folder / "metrics.jsonl").unlink()
    add_metrics(folder, [1, 2])
    assert len(curves.curve(place, "train/reward_mean")) == 2
    assert curves.curve(place, "nothing") == []


def test_a_comparison_is_that_of_the_command(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [])
    a, b = (
        EvalReport.from_dict(json.loads((folder / "eval" / f"{name}.json").read_text()))
        for name in ("before", "after_rl")
    )
    data = compared(a, b)
    expected = compare(a, b)["reward"]
    assert data["test"]["reward"]["p"] == expected.p_value
    assert data["test"]["reward"]["value"] == expected.difference.value
    assert (data["better"], data["worse"], data["total"]) == (13, 0, 20)
    assert [pair["difference"] for pair in data["pairs"][:13]] == [1.0] * 13
    others = compared(a, EvalReport("other", b.episodes[:5]))
    assert "not evaluated on the same seeds" in others["why_not"]
    assert others["test"] == {}
    assert others["total"] == 20


def test_settings_that_differ_are_found() -> None:
    cards = [
        {"settings": flattened({"run": {"name": name}, "a": {"b": value}, "e": [{"k": 1}]})}
        for name, value in (("x", 1), ("y", 2))
    ]
    assert differing(cards) == ["a.b"]
    assert cards[0]["settings"]["e.0.k"] == 1


def test_token_texts_are_those_of_the_tokenizer(
    tmp_path: Path, smollm2_path: Path, smollm2_tokenizer: Any
) -> None:
    folder = make_run(tmp_path / "run", [], tokens=False)
    place = RunPlace("run", folder.resolve(), folder.resolve())
    assert texts_of(place) is None
    target = folder / "rollouts" / "tokenizer.json"
    target.write_bytes((smollm2_path / "tokenizer.json").read_bytes())
    texts = texts_of(place)
    assert texts is not None
    text = "Hello, world!\n\tnaïve  façade → 3.14"
    numbers = smollm2_tokenizer.encode(text)
    assert (
        "".join(texts.text(number) for number in numbers)
        .encode()
        .decode("unicode_escape" if "\\x" in text else "utf-8")
        .startswith("Hello, world!\n\tna")
    )
    assert texts.text(10**9) == f"⟨{10**9}⟩"
    assert smollm2_tokenizer.eos_token_id in texts.special


def test_numbers_that_are_not_finite_reach_the_browser_as_null() -> None:
    from ludic.view.app import dumped

    assert json.loads(dumped({"a": [math.nan, 1.0, (math.inf,)]})) == {"a": [None, 1.0, [None]]}
    assert json.loads(dumped("\ud800")) == "\ud800"


def test_training_has_what_the_tests_count_on() -> None:
    assert len(training()) == 16
