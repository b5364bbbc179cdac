from __future__ import annotations

import gzip
import json
import re
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ludic.errors import ConfigError, LudicError, SchemaVersionError, SerializationError
from ludic.rollouts import CutFileWarning, RolloutWriter, read_rollouts
from ludic.rollouts.lines import as_stored
from ludic.rollouts.storage import dialogue, rollout_from_row, rollout_line, rollout_row
from ludic.types import (
    AgentStep,
    EnvironmentStep,
    FinishReason,
    Message,
    Rollout,
    Step,
    TokenTrace,
    VersionSpan,
)
from tests.rollouts.worlds import engine, request
from tests.saw.drawing import damaged
from tests.saw.drawing import rollouts as drawn_rollouts

SUFFIXES = [".jsonl", ".jsonl.gz", ".jsonl.zst"]


async def some_rollouts() -> list[Rollout]:
    return await engine().generate_rollouts(
        [request(num_episodes=3), request("duel"), request("broken")], 3, 4
    )


def write(path: Path, rollouts: list[Rollout], **options: Any) -> None:
    with RolloutWriter(path, **options) as writer:
        for rollout in rollouts:
            writer.write(rollout)


@pytest.mark.parametrize("suffix", SUFFIXES)
async def test_what_is_written_is_read_back_equal(tmp_path: Path, suffix: str) -> None:
    rollouts = await some_rollouts()
    write(tmp_path / f"r{suffix}", rollouts)
    assert list(read_rollouts(tmp_path / f"r{suffix}")) == rollouts


@settings(max_examples=25)
@given(st.lists(drawn_rollouts(), max_size=3))
def test_any_rollout_survives_a_row(rollouts: list[Rollout]) -> None:
    for rollout in rollouts:
        row = json.loads(json.dumps(rollout_row(rollout), allow_nan=False))
        assert rollout_from_row(row) == rollout


@pytest.mark.parametrize("logprob", [-0.5, -1, np.float64(-0.25)])
def test_any_number_is_stored_as_a_log_prob(logprob: float) -> None:
    trace = TokenTrace((1, 2), (3, 4), (-0.5, logprob))
    step = AgentStep(0, (), {"role": "assistant", "content": "a"}, FinishReason.STOP, trace)
    rollout = Rollout("r", (step,))
    assert rollout_from_row(json.loads(rollout_line(rollout))) == rollout


@pytest.mark.parametrize(("logprob", "info"), [(True, 1), (-0.5, (1,))])
def test_what_json_would_change_is_refused(logprob: float, info: Any) -> None:
    trace = TokenTrace((1,), (2,), (logprob,))
    message: Message = {"role": "assistant", "content": "a"}
    step = AgentStep(0, (), message, FinishReason.STOP, trace, info={"x": info})
    with pytest.raises(SerializationError):
        rollout_line(Rollout("r", (step,)))


async def test_rewards_whose_sum_is_no_number_are_a_null_for_others_and_kept_for_us() -> None:
    rollout = (await some_rollouts())[0]
    step = replace(rollout.env_steps[-1], reward=1e308, agent_steps=())
    large = replace(rollout, steps=(*rollout.steps, step, step))
    row = json.loads(rollout_line(large), parse_constant=pytest.fail)
    assert row["total_reward"] is None
    assert rollout_from_row(row) == large


@pytest.mark.parametrize("number", ["NaN", "Infinity"])
async def test_a_stored_reward_that_is_not_finite_is_refused(number: str) -> None:
    row = rollout_row((await some_rollouts())[0])
    row["rollout"] = re.sub(r'"reward":[^,]+,', f'"reward":{number},', row["rollout"])
    with pytest.raises(SerializationError, match=r"this row: .*finite"):
        rollout_from_row(row)


@pytest.mark.parametrize("suffix", SUFFIXES)
async def test_a_file_cut_anywhere_is_read_up_to_the_cut(tmp_path: Path, suffix: str) -> None:
    rollouts = await some_rollouts()
    path = tmp_path / f"r{suffix}"
    sizes = [0]
    with RolloutWriter(path) as writer:
        for rollout in rollouts:
            writer.write(rollout)
            writer.flush()
            sizes.append(path.stat().st_size)
    data = path.read_bytes()
    for cut in [
        *range(1, sizes[1], 97),
        *(s - 1 for s in sizes[1:]),
        *(s + 1 for s in sizes[1:-1]),
    ]:
        path.write_bytes(data[:cut])
        whole = sum(size <= cut for size in sizes[1:])
        # A plain line that lacks nothing but its end of line is whole.
        if suffix == ".jsonl" and cut + 1 in sizes:
            assert list(read_rollouts(path, on_cut="error")) == rollouts[: whole + 1]
            continue
        # A compressed line may lack nothing but the checksum that follows it.
        if suffix == ".jsonl.gz" and any(cut < size <= cut + 8 for size in sizes):
            whole += 1
        with pytest.warns(CutFileWarning, match=f"the {whole} rollouts before it are whole"):
            assert list(read_rollouts(path)) == rollouts[:whole]
        with pytest.raises(SerializationError, match=f"line {whole + 1}"):
            list(read_rollouts(path, on_cut="error"))


@pytest.mark.parametrize("suffix", SUFFIXES)
async def test_a_whole_file_is_read_without_a_word(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / f"r{suffix}", await some_rollouts())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(read_rollouts(tmp_path / f"r{suffix}"))) == 6


@pytest.mark.parametrize("suffix", SUFFIXES)
async def test_appending_cuts_off_what_a_killed_run_left_unfinished(
    tmp_path: Path, suffix: str
) -> None:
    rollouts = await some_rollouts()
    path = tmp_path / f"r{suffix}"
    write(path, rollouts[:1])
    write(path, rollouts[1:2], append=True)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.warns(CutFileWarning, match="cut off"):
        write(path, rollouts[2:], append=True)
    assert list(read_rollouts(path)) == [rollouts[0], *rollouts[2:]]


@pytest.mark.parametrize("suffix", SUFFIXES)
async def test_appending_keeps_a_last_line_that_lacks_only_its_end(
    tmp_path: Path, suffix: str
) -> None:
    rollouts = await some_rollouts()
    path = tmp_path / f"r{suffix}"
    lines = "\n".join(json.dumps(rollout_row(rollout)) for rollout in rollouts[:2]).encode()
    path.write_bytes(as_stored(path, lines))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write(path, rollouts[2:], append=True)
    assert list(read_rollouts(path)) == rollouts


async def test_a_file_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    write(path, await some_rollouts())
    with pytest.raises(ConfigError, match="append=True"):
        RolloutWriter(path)


async def test_files_of_the_first_schema_are_read() -> None:
    now = await engine().generate_rollouts(
        [request(env_seed=2, kwargs={"tries": 3}), request("duel")], 3, 4
    )
    assert list(read_rollouts(Path(__file__).with_name("schema_1.jsonl"))) == now


def chat(turns: int, *, forgets: bool = False) -> Rollout:
    """Every prompt has all the tokens before it; one that forgets lacks each answer's second."""
    steps: list[Step] = []
    prompt = tuple(range(100))
    for turn in range(turns):
        answer = tuple(range(turn, turn + 20))
        message = Message(role="assistant", content="x" * 40)
        trace = TokenTrace(prompt, answer, (-0.5,) * 20, (VersionSpan(0, 20, turn),))
        steps.append(AgentStep(turn, (), message, FinishReason.STOP, trace))
        steps.append(EnvironmentStep(turn, (2 * turn,), "o", "a", "n", 0.0))
        prompt += (answer[:1] + answer[2:] if forgets else answer) + (7,) * 10
    return Rollout("r", tuple(steps))


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_stored_rollout_grows_with_its_turns_and_not_with_their_square(
    tmp_path: Path, suffix: str, forgets: bool
) -> None:
    sizes = []
    for turns in (10, 80):
        path = tmp_path / f"{turns}{suffix}"
        write(path, [chat(turns, forgets=forgets)])
        assert list(read_rollouts(path)) == [chat(turns, forgets=forgets)]
        sizes.append(path.stat().st_size)
    assert sizes[1] < 10 * sizes[0]


@pytest.mark.parametrize("shared", [[0, 125], [0, -1], [0], [0, 0, 0], [1, 0]])
def test_prompts_that_share_more_than_there_is_are_refused(shared: list[int]) -> None:
    row = rollout_row(chat(2))
    stored = json.loads(row["rollout"]) | {"shared": shared}
    with pytest.raises(SerializationError, match=r"that row: .*shared"):
        rollout_from_row(row | {"rollout": json.dumps(stored)}, "that row")


async def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    row = rollout_row((await some_rollouts())[0]) | {"schema": 4}
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(row).encode() + b"\n"))
    with pytest.raises(SchemaVersionError, match=r"line 1: schema 4.*reads up to 3"):
        list(read_rollouts(path))


async def test_a_broken_line_that_others_follow_is_an_error(tmp_path: Path) -> None:
    good = json.dumps(rollout_row((await some_rollouts())[0]))
    path = tmp_path / "r.jsonl"
    path.write_text(f"{good}\n{good[:50]}\n{good}\n")
    with pytest.raises(SerializationError, match="line 2: not JSON"):
        list(read_rollouts(path))


@pytest.mark.parametrize(
    "row",
    [
        "{}",
        "[]",
        "5",
        '{"schema": "1"}',
        *(
            f'{{"schema": {schema}{rest}}}'
            for schema in (0, 1, 2, 3)
            for rest in (
                "",
                *(f', "rollout": {value}' for value in ('"{}"', 5, "null", r'"\ud800"')),
            )
        ),
        "[" * 200_000,
        '{"a":' * 200_000,
    ],
    ids=lambda row: row[:40],
)
def test_rows_that_hold_no_rollout_are_refused(tmp_path: Path, row: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(row + "\n")
    with pytest.raises(SerializationError, match="line 1"):
        list(read_rollouts(path))


@st.composite
def damaged_lines(draw: st.DrawFn) -> bytes:
    """A line with another value somewhere in its row or its rollout, or with other bytes."""
    row = json.loads(json.dumps(rollout_row(draw(drawn_rollouts()))))
    where = draw(st.sampled_from(("row", "rollout", "bytes")))
    if where == "rollout":
        row["rollout"] = json.dumps(draw(damaged(json.loads(row["rollout"]))))
    line = json.dumps(draw(damaged(row)) if where == "row" else row).encode()
    if where == "bytes":
        at = draw(st.integers(0, len(line)))
        line = line[:at] + draw(st.binary(max_size=3)) + line[at + draw(st.integers(0, 9)) :]
    return line


@given(damaged_lines(), st.sampled_from(SUFFIXES), st.booleans())
def test_a_damaged_line_is_read_or_refused_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, line: bytes, suffix: str, ended: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / f"damaged{suffix}"
    text = line + b"\n" * ended
    path.write_bytes(as_stored(path, text))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CutFileWarning)
        with suppress(LudicError):
            assert all(isinstance(rollout, Rollout) for rollout in read_rollouts(path))


@given(
    st.lists(drawn_rollouts(), min_size=1, max_size=3),
    st.sampled_from((".jsonl.gz", ".jsonl.zst")),
    st.data(),
)
def test_a_damaged_compressed_file_is_read_or_refused_and_nothing_else(
    tmp_path_factory: pytest.TempPathFactory,
    rollouts: list[Rollout],
    suffix: str,
    data: st.DataObject,
) -> None:
    path = tmp_path_factory.getbasetemp() / f"damaged-bytes{suffix}"
    path.unlink(missing_ok=True)
    write(path, rollouts)
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    path.write_bytes(whole[:at] + data.draw(st.binary(max_size=3)) + whole[at + 1 :])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CutFileWarning)
        with suppress(LudicError):
            assert len(list(read_rollouts(path))) <= len(rollouts)
        with suppress(LudicError):
            write(path, rollouts[:1], append=True)


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".jsonl.zst"])
def test_damage_in_the_middle_of_a_compressed_file_is_an_error(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"r{suffix}"
    path.write_bytes(b"this is no compressed data at all")
    with pytest.raises(SerializationError, match="damaged"):
        list(read_rollouts(path))


@pytest.mark.parametrize("suffix", SUFFIXES)
async def test_pandas_reads_the_columns(tmp_path: Path, suffix: str) -> None:
    import pandas as pd

    rollouts = await some_rollouts()
    write(tmp_path / f"r{suffix}", rollouts)
    table = pd.read_json(tmp_path / f"r{suffix}", lines=True)
    assert table["id"].tolist() == [r.id for r in rollouts]
    assert table["total_reward"].tolist() == [r.total_reward for r in rollouts]
    assert table["num_tokens"].tolist() == [r.num_tokens for r in rollouts]
    assert table["messages"][0][0] == {"role": "user", "content": "Guess a digit from 0 to 3."}


@pytest.mark.parametrize("suffix", SUFFIXES)
async def test_datasets_reads_the_columns(tmp_path: Path, suffix: str) -> None:
    from datasets import load_dataset

    rollouts = await some_rollouts()
    write(tmp_path / f"r{suffix}", rollouts)
    table = load_dataset(
        "json",
        data_files=str(tmp_path / f"r{suffix}"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    assert table["id"] == [r.id for r in rollouts]
    assert [rollout_from_row(row) for row in table] == rollouts


async def test_datasets_reads_files_in_pieces_in_which_columns_are_first_empty(
    tmp_path: Path,
) -> None:
    from datasets import load_dataset

    fine = await engine().generate_rollouts([request(num_episodes=20)], 3, 4)
    failed = await engine().generate_rollouts(
        [request("broken", group_id="g", task_key="t")], 3, 1, prefix="later"
    )
    write(tmp_path / "r.jsonl", [*fine, *failed])
    table = load_dataset(
        "json",
        data_files=str(tmp_path / "r.jsonl"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
        chunksize=4096,
    )
    assert table["error"][:-1] == [""] * 20
    assert "fell off" in table["error"][-1]
    assert table["group_id"][-1] == "g"


async def test_the_dialogue_holds_every_message_once() -> None:
    [rollout] = await engine(lambda call: "9").generate_rollouts([request()], 3, 1)
    roles = [m["role"] for m in dialogue(rollout)]
    assert roles == ["user", "assistant"] * 3


async def test_nothing_is_written_after_the_end(tmp_path: Path) -> None:
    writer = RolloutWriter(tmp_path / "r.jsonl")
    writer.close()
    with pytest.raises(SerializationError, match="closed"):
        writer.write((await some_rollouts())[0])
