from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ludic.errors import (
    BatchError,
    CheckpointError,
    ConfigError,
    SchemaVersionError,
    SerializationError,
    TemplateError,
)
from ludic.inference.templates.chat_template import ParsedCompletion
from ludic.inference.templates.hf import HFChatTemplate
from ludic.rollouts import CutFileWarning, GRPORequestStrategy, RolloutWriter
from ludic.rollouts.storage import rollout_row
from ludic.saw import SAWItem, drop_if, drop_overlong
from ludic.training.algorithms.grpo import make_grpo
from ludic.training.batching import OfflineBatchSource
from ludic.types import ChatResponse, Fork, ForkReason, Message, Rollout, TokenTrace
from tests.oracles.rollouts import make_rollout
from tests.rollouts.worlds import engine, request, template

DIALOGUE: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Two and two?"},
    {"role": "assistant", "content": "Four."},
    {"role": "user", "content": "And one?"},
    {"role": "assistant", "content": "Five."},
]


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"Question {i}?", "completion": f"Answer {i}."} for i in range(count)]


def source(data: Any, **options: Any) -> OfflineBatchSource:
    defaults: dict[str, Any] = {"chat_template": template(), "batch_size": 4}
    if "batch_tokens" in options:
        del defaults["batch_size"]
    return OfflineBatchSource(data, **{**defaults, **options})


def actions(item: SAWItem) -> str:
    return template().codec.decode(item.input_ids[item.action_mask == 1].tolist())


def ids(batch: Any) -> list[str]:
    return [item.rollout_id for item in batch.items]


async def epoch_of(running: OfflineBatchSource, batches: int) -> list[list[str]]:
    return [ids(await running.next_batch()) for _ in range(batches)]


def flat(batches: list[list[str]]) -> list[str]:
    return [name for batch in batches for name in batch]


async def test_assistant_messages_and_their_closing_tokens_are_the_actions() -> None:
    batch = await source([{"messages": DIALOGUE}]).next_batch()
    [item] = batch.items
    assert actions(item) == "Four.<|im_end|>Five.<|im_end|>"
    whole = template().render(DIALOGUE[:4])
    assert item.input_ids[: len(whole)].tolist() == whole
    assert item.attachments.behavior_logprobs is None
    assert [s.weight for s in item.turns] == [1.0, 1.0]
    assert batch.counts.turns == 2


async def test_only_the_last_message_is_trained_on_where_that_is_asked_for() -> None:
    [item] = (await source([{"messages": DIALOGUE}], train_on="last").next_batch()).items
    assert actions(item) == "Five.<|im_end|>"


async def test_prompt_and_completion_may_be_text_or_messages() -> None:
    pairs = [
        {"prompt": "Two and two?", "completion": "Four."},
        {"prompt": DIALOGUE[:2], "completion": [DIALOGUE[2]]},
    ]
    batch = await source(pairs, shuffle=False).next_batch()
    assert [actions(i) for i in batch.items] == ["Four.<|im_end|>"] * 2
    assert len(batch.items[0].input_ids) < len(batch.items[1].input_ids)


async def test_a_weight_scales_the_credit_of_its_row() -> None:
    data = [{**r, "weight": w} for r, w in zip(rows(3), (0.5, 2.0, None), strict=True)]
    batch = await source(data, shuffle=False).next_batch()
    assert [i.weight for i in batch.items] == [0.5, 2.0, 1.0]
    rollout = make_rollout("a", [1.0])
    weights = {"a": 0.5, "b": None}
    stored = [{**rollout_row(rollout.labelled(id=n)), "weight": w} for n, w in weights.items()]
    batch = await source(stored, shuffle=False).next_batch()
    assert [i.weight for i in batch.items] == [0.5, 1.0]


async def test_offline_rl_uses_rewards_and_keeps_groups_together() -> None:
    data = [{**r, "reward": float(i == 0), "group_id": f"g{i % 3}"} for i, r in enumerate(rows(6))]
    running = source(data, algorithm=make_grpo(2, normalize_adv=False), batch_size=2, seed=3)
    for _ in range(6):
        batch = await running.next_batch()
        assert batch.counts.groups == 1
        assert batch.counts.rollouts == 2
        group = batch.items[0].group_id
        assert [abs(i.weight) for i in batch.items] == (
            [0.5, 0.5] if group == "g0/agent" else [0, 0]
        )


async def test_every_epoch_holds_every_row_once_in_an_order_of_its_own() -> None:
    running = source(rows(10), seed=1)
    first, second = await epoch_of(running, 3), await epoch_of(running, 3)
    assert [len(b) for b in first] == [4, 4, 2]
    everything = sorted(f"row-{i}" for i in range(10))
    assert sorted(flat(first)) == sorted(flat(second)) == everything
    assert flat(first) != flat(second)
    assert await epoch_of(source(rows(10), seed=1), 3) == first
    assert await epoch_of(source(rows(10), seed=2), 3) != first
    assert flat(await epoch_of(source(rows(10), shuffle=False), 3)) == [
        f"row-{i}" for i in range(10)
    ]


@pytest.mark.parametrize("after", range(6))
async def test_a_resumed_source_goes_on_at_its_position(after: int) -> None:
    whole = source(rows(10), seed=1)
    for _ in range(after):
        await whole.next_batch()
    resumed = source(rows(10), seed=1)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert await epoch_of(resumed, 4) == await epoch_of(whole, 4)


@pytest.mark.parametrize("other", [{"rows": 9}, {"seed": 2}, {"shuffle": False}])
def test_a_position_in_other_data_is_refused(other: dict[str, Any]) -> None:
    running = source(rows(10), seed=1)
    with pytest.raises(CheckpointError, match=next(iter(other))):
        running.load_state_dict({**running.state_dict(), **other})


async def test_the_source_ends_after_its_epochs() -> None:
    running = source(rows(5), epochs=2)
    await epoch_of(running, 4)
    with pytest.raises(StopAsyncIteration, match="2 epochs"):
        await running.next_batch()


async def test_batches_by_tokens_fill_up_to_the_limit() -> None:
    running = source(rows(10), batch_tokens=120, epochs=1)
    sizes = []
    seen = 0
    while seen < 10:
        batch = await running.next_batch()
        tokens = sum(len(i.input_ids) for i in batch.items)
        assert tokens <= 120 or len(batch.items) == 1
        sizes.append(len(batch.items))
        seen += len(batch.items)
    assert seen == 10
    assert max(sizes) > 1


async def test_jsonl_files_are_read_plain_and_compressed(tmp_path: Path) -> None:
    lines = "".join(json.dumps(r) + "\n" for r in rows(3))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    assert len(source(tmp_path / "a.jsonl")) == 3
    both = source([tmp_path / "a.jsonl", str(tmp_path / "b.jsonl.gz")], batch_size=6)
    assert len((await both.next_batch()).items) == 6


async def test_a_file_cut_in_a_line_is_used_up_to_there_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows(3))[:-9])
    with pytest.warns(CutFileWarning, match=r"line 3.*2 rows before it"):
        assert len(source(path)) == 2


def test_a_broken_line_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": \n{"prompt": "x", "completion": "y"}\n')
    with pytest.raises(SerializationError, match=r"a.jsonl, line 1: not JSON"):
        source(path)


async def test_stored_rollouts_give_the_batch_that_they_gave_online(tmp_path: Path) -> None:
    asked = GRPORequestStrategy(2).expand([request(env_seed=1), request(env_seed=2)])
    path = tmp_path / "r.jsonl.gz"
    with RolloutWriter(path) as writer:
        online = await engine(writer=writer).generate_batch(
            asked, make_grpo(2, normalize_adv=False), max_steps=3
        )
    algorithm = make_grpo(2, normalize_adv=False)
    offline = source(path, algorithm=algorithm, chat_template=None, shuffle=False)
    batch = await offline.next_batch()
    assert batch.counts == online.counts
    by_id = {i.rollout_id: i for i in online.items}
    for item in batch.items:
        twin = by_id[item.rollout_id]
        assert item.input_ids.tolist() == twin.input_ids.tolist()
        np.testing.assert_array_equal(
            item.attachments.behavior_logprobs, twin.attachments.behavior_logprobs
        )
        np.testing.assert_equal(item.weight, twin.weight)


async def test_rollouts_themselves_are_data_too() -> None:
    rollouts: Sequence[Rollout] = await engine().generate_rollouts([request(num_episodes=3)], 3)
    batch = await OfflineBatchSource(rollouts, batch_size=3).next_batch()
    assert sorted(ids(batch)) == sorted(r.id for r in rollouts)


async def test_a_newer_schema_is_refused() -> None:
    with pytest.raises(SchemaVersionError):
        await source([{"schema": 99, "rollout": "{}"}]).next_batch()


async def test_hugging_face_datasets_are_data() -> None:
    from datasets import Dataset

    table = Dataset.from_list([{"question": f"{i}?", "answer": str(i)} for i in range(5)])
    running = source(table, row_fn=lambda r: {"prompt": r["question"], "completion": r["answer"]})
    assert len((await running.next_batch()).items) == 4
    nested = Dataset.from_list([{"messages": DIALOGUE}, {"messages": [*DIALOGUE[:3]]}])
    batch = await source(nested, shuffle=False).next_batch()
    assert [i.turns[-1].turn_index for i in batch.items] == [1, 0]


class Unclosed:
    """A template that does not say how a message ends."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        return [len(messages)]

    def extend(
        self, messages: Sequence[Message], previous: TokenTrace, tools: Any = None
    ) -> list[int] | Fork:
        return Fork(ForkReason.TEMPLATE_NOT_EXTENSIBLE)

    def parse(self, response: ChatResponse) -> ParsedCompletion:
        return ParsedCompletion({"role": "assistant", "content": ""})


class Rewriting(Unclosed):
    """A template that spells the prompt anew as soon as there is an answer."""

    end_token_id = 7

    def render(self, messages: Sequence[Message], tools: Any = None) -> list[int]:
        return [100 + len(messages), 7]


@pytest.mark.parametrize(("kind", "says"), [(Unclosed, "end_token_id"), (Rewriting, "differently")])
async def test_a_template_that_cannot_give_masks_is_refused(kind: type, says: str) -> None:
    with pytest.raises(TemplateError, match=says):
        await source(rows(1), chat_template=kind()).next_batch()


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"text": "x"}, SerializationError),
        ({"messages": "x"}, SerializationError),
        ({"messages": [{"content": "x"}]}, SerializationError),
        ({"messages": DIALOGUE[:2]}, TemplateError),
        ({"messages": DIALOGUE[2:3]}, TemplateError),
    ],
)
async def test_rows_that_cannot_be_used_are_errors(row: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        await source([row]).next_batch()


async def test_messages_need_a_template() -> None:
    with pytest.raises(ConfigError, match="chat_template"):
        await source(rows(1), chat_template=None).next_batch()


async def test_what_filters_drop_is_counted_and_a_whole_epoch_of_it_is_an_error() -> None:
    judge = drop_if("first", lambda s: s.rollout.id == "row-0")
    batch = await source(rows(4), sample_filter=judge).next_batch()
    assert batch.meta["dropped"] == {"first": 1}
    with pytest.raises(BatchError, match="overlong"):
        await source(rows(4), sample_filter=drop_overlong(1)).next_batch()


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": None},
        {"batch_size": 2, "batch_tokens": 9},
        {"batch_size": 0},
        {"epochs": 0},
        {"train_on": "first"},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        OfflineBatchSource(rows(1), **{"batch_size": 1, **wrong})


def test_data_that_is_empty_or_has_no_order_is_refused() -> None:
    with pytest.raises(ConfigError, match="no rows"):
        source([])
    with pytest.raises(ConfigError, match="no length"):
        source(iter(rows(2)))


@pytest.mark.parametrize("kind", ["smollm2", "qwen25_tools", "qwen3_thinking", "llama3"])
async def test_masks_are_exact_with_real_templates(kind: str) -> None:
    from tests.inference.template_kinds import tokenizer_of

    real = HFChatTemplate(tokenizer_of(kind))
    thought = "<think>\nsmall numbers\n</think>\n\nFour." if kind == "qwen3_thinking" else "Four."
    answer: Message = {"role": "assistant", "content": thought}
    dialogue = [*DIALOGUE[:2], answer, *DIALOGUE[3:]]
    batch = await source([{"messages": dialogue}], chat_template=real).next_batch()
    end = real.codec.decode([real.end_token_id])
    spoken = {}
    for item in batch.items:
        at = np.flatnonzero(item.action_mask)
        for span in item.turns:
            tokens = at[span.start : span.end]
            spoken[span.turn_index] = real.codec.decode(item.input_ids[tokens].tolist())
            # What the model is shown is exactly the template's prompt for that message.
            shown = dialogue[: 2 + 2 * span.turn_index]
            prompt = item.input_ids[: tokens[0]].tolist()
            if len(item.turns) == 1:
                assert prompt == real.render(shown)
    assert spoken[0].endswith(f"Four.{end}")
    assert spoken[1].endswith(f"Five.{end}")
    if kind == "qwen3_thinking":
        assert "small numbers" in spoken[0]
        assert len(batch.items) == 2


async def test_assistant_messages_inside_the_prompt_are_state_and_not_trained_on() -> None:
    row = {"prompt": DIALOGUE[:4], "completion": DIALOGUE[4:]}
    for train_on in ("all", "last"):
        (item,) = (await source([row], train_on=train_on).next_batch()).items
        trained = item.input_ids[item.action_mask.astype(bool)].tolist()
        assert "Five." in template().codec.decode(trained)
        assert "Four." not in template().codec.decode(trained)
        assert "Four." in template().codec.decode(item.input_ids.tolist())


@pytest.mark.parametrize(
    ("row", "options", "words"),
    [
        (5, {}, "row 1 is int, not a mapping"),
        ({**rows(1)[0], "weight": "heavy"}, {}, "row 1: weight is 'heavy'"),
        ({**rows(1)[0], "reward": float("nan")}, {}, "row 1: reward is nan"),
        ({"messages": [{"role": "user", "content": 5}]}, {}, "row 1: message 0 has content of"),
        ({"messages": [{"role": 5, "content": "x"}]}, {}, "row 1: message 0 has no role"),
        ({"other": 1}, {"row_fn": lambda row: {"prompt": row["prompt"]}}, "row 1: row_fn raised"),
    ],
)
async def test_a_bad_row_is_named_by_its_number(
    row: Any, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(SerializationError, match=words):
        await source([rows(1)[0], row], shuffle=False, **options).next_batch()
