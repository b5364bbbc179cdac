"""The data types: what they refuse, what their properties answer, and JSON without loss."""

from __future__ import annotations

import json
import math
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic.errors import DataError, SerializationError
from ludic.inference.sampling import InferenceSpec, SamplingConfig
from ludic.rollouts.requests import RolloutRequest
from ludic.types import (
    AgentStep,
    ChatResponse,
    EnvironmentStep,
    EnvSpec,
    FinishReason,
    Fork,
    ForkReason,
    Message,
    ProtocolSpec,
    Rollout,
    Step,
    StepOutcome,
    TokenTrace,
    TruncationReason,
    Turn,
    VersionSpan,
    check_json,
    from_json,
    to_json,
)

TEXT = st.text()  # all of Unicode except surrogates, which UTF-8 does not have
FLOATS = st.floats()  # NaN, infinities, subnormals and -0.0 included
IDS = st.integers(0, 2**20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | FLOATS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)
INFO = st.dictionaries(TEXT, JSON, max_size=3)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
COMPONENTS = st.dictionaries(TEXT, FINITE, max_size=3)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    role: Any = draw(st.sampled_from(["system", "user", "assistant", "tool"]))
    message = Message(role=role, content=draw(TEXT))
    if draw(st.booleans()):
        message["tool_calls"] = [
            {
                "id": draw(TEXT),
                "type": "function",
                "function": {"name": draw(TEXT), "arguments": draw(INFO)},
            }
        ]
    if draw(st.booleans()):
        message["tool_call_id"] = draw(TEXT)
    if draw(st.booleans()):
        message["name"] = draw(TEXT)
    return message


@st.composite
def traces(draw: st.DrawFn) -> TokenTrace:
    completion = tuple(draw(st.lists(IDS, max_size=6)))
    n = len(completion)

    def per_token(item: st.SearchStrategy[Any]) -> Any:
        return draw(st.none() | st.lists(item, min_size=n, max_size=n).map(tuple))

    cut = draw(st.integers(0, n))
    return TokenTrace(
        prompt_token_ids=tuple(draw(st.lists(IDS, max_size=6))),
        completion_token_ids=completion,
        completion_logprobs=per_token(FINITE),
        version_spans=(VersionSpan(0, cut, 1), VersionSpan(cut, n, 2)),
        kept_token_ids=per_token(st.lists(IDS, max_size=3).map(tuple)),
    )


FORKS = st.builds(Fork, st.sampled_from(ForkReason), TEXT)
AGENT_STEPS = st.builds(
    AgentStep,
    turn_index=st.integers(0, 5),
    new_messages=st.lists(messages(), max_size=2).map(tuple),
    message=messages(),
    finish_reason=st.sampled_from(FinishReason),
    trace=st.none() | traces(),
    fork=st.none() | FORKS,
    tool_messages=st.lists(messages(), max_size=2).map(tuple),
    tool_call_errors=st.lists(TEXT, max_size=2).map(tuple),
    sampling=INFO,
    info=INFO,
)


@st.composite
def env_steps(draw: st.DrawFn) -> EnvironmentStep:
    reason = draw(st.none() | st.sampled_from(TruncationReason))
    return EnvironmentStep(
        turn_index=draw(st.integers(0, 5)),
        agent_steps=(),
        obs=draw(TEXT),
        action=draw(st.none() | TEXT),
        next_obs=draw(TEXT),
        reward=draw(FINITE),
        terminated=draw(st.booleans()),
        truncated=reason is not None,
        truncation_reason=reason,
        stepped=draw(st.booleans()),
        reward_components=draw(COMPONENTS),
        info=draw(INFO),
    )


ENV_SPECS = st.builds(EnvSpec, TEXT, INFO)
ROLLOUTS = st.builds(
    Rollout,
    id=TEXT,
    steps=st.lists(AGENT_STEPS | env_steps(), max_size=4).map(tuple),
    agent_id=TEXT,
    episode_id=TEXT,
    group_id=st.none() | TEXT,
    task_key=st.none() | TEXT,
    parent_id=st.none() | TEXT,
    env=st.none() | ENV_SPECS,
    protocol=st.none() | st.builds(ProtocolSpec, TEXT, INFO),
    env_seed=st.none() | st.integers(0, 2**63 - 1),
    sampling_seed=st.none() | st.integers(0, 2**63 - 1),
    error=st.none() | TEXT,
    meta=INFO,
)
EVERY_TYPE = {
    Message: messages(),
    TokenTrace: traces(),
    ChatResponse: st.builds(
        ChatResponse, st.none() | traces(), st.sampled_from(FinishReason), st.none() | TEXT, INFO
    ),
    StepOutcome: st.builds(
        StepOutcome,
        TEXT,
        FLOATS,
        terminated=st.booleans(),
        truncated=st.booleans(),
        info=INFO,
        reward_components=COMPONENTS,
    ),
    AgentStep: AGENT_STEPS,
    EnvironmentStep: env_steps(),
    Fork: FORKS,
    EnvSpec: ENV_SPECS,
    Rollout: ROLLOUTS,
    RolloutRequest: st.builds(
        RolloutRequest,
        env=ENV_SPECS,
        protocol=st.builds(ProtocolSpec, TEXT, INFO),
        inference=st.none()
        | st.builds(
            InferenceSpec,
            st.builds(
                SamplingConfig,
                temperature=st.floats(0, 10),
                stop=st.lists(st.text(min_size=1), max_size=2).map(tuple),
                seed=st.none() | st.integers(0, 2**63 - 1),
            ),
        ),
        meta=INFO,
    ),
}


def exactly(value: Any) -> Any:
    """A form in which NaN equals itself, and 1, 1.0 and True differ."""
    if isinstance(value, msgspec.Struct):
        pairs = [(name, exactly(item)) for name, item in msgspec.structs.asdict(value).items()]
        return (type(value), pairs)
    if isinstance(value, dict):
        return {key: exactly(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (type(value), [exactly(item) for item in value])
    if isinstance(value, float):
        return (float, "nan" if math.isnan(value) else value.hex())
    return (type(value), value)


@pytest.mark.parametrize("cls", EVERY_TYPE, ids=lambda cls: cls.__name__)
@given(data=st.data())
def test_every_type_comes_back_from_json_unchanged(cls: Any, data: st.DataObject) -> None:
    value = data.draw(EVERY_TYPE[cls])
    line = to_json(value, cls)
    assert b"\n" not in line
    assert exactly(from_json(cls, line)) == exactly(value)


def test_the_two_endings_of_an_outcome_cannot_be_given_by_place() -> None:
    with pytest.raises(TypeError, match="positional"):
        StepOutcome("", 0.0, True, False)  # type: ignore[call-arg]
    assert not StepOutcome("", 0.0, terminated=True).truncated


@given(step=AGENT_STEPS | env_steps())
def test_a_step_is_told_apart_by_its_kind(step: Step) -> None:
    back = from_json(Step, to_json(step))
    assert type(back) is type(step)
    assert exactly(back) == exactly(step)


@given(value=JSON)
def test_free_values_that_are_json_pass_the_check(value: Any) -> None:
    check_json(value, "info")


class Colour(StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    "value",
    [(1, 2), {1}, b"raw", np.int64(3), np.float32(0.5), np.zeros(2), object(), 1j, {1: "one"}],
    ids=lambda value: type(value).__name__,
)
def test_what_json_does_not_have_is_refused_with_its_place(value: Any) -> None:
    rollout = Rollout("r", (), meta={"deep": [0, {"it": value}]})
    with pytest.raises(SerializationError, match=r"Rollout\.meta\['deep'\]\[1\]\['it'\]"):
        to_json(rollout)
    with pytest.raises(SerializationError, match=r"the info\['x'\]"):
        check_json({"x": value}, "the info")


def test_numbers_and_strings_of_a_subclass_are_written_as_what_they_are() -> None:
    rollout = Rollout("r", (), meta={"score": np.float64(0.1), "colour": Colour.RED})
    assert from_json(Rollout, to_json(rollout)) == rollout


@pytest.mark.parametrize("ids", ["[-1]", "[1.0]", "[1.5]", "[true]", '["1"]', "[NaN]"])
@pytest.mark.parametrize("field", ["prompt_token_ids", "completion_token_ids"])
def test_ids_that_are_no_ids_are_refused_where_a_trace_is_read(field: str, ids: str) -> None:
    other = "completion_token_ids" if field.startswith("prompt") else "prompt_token_ids"
    with pytest.raises(SerializationError, match=field):
        from_json(TokenTrace, f'{{"{field}": {ids}, "{other}": [1]}}')
    if ids in ("[-1]", "[1.0]", "[1.5]"):
        with pytest.raises(DataError, match=field):
            TokenTrace(**{field: tuple(json.loads(ids)), other: (1,)})


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_rewards_and_log_probs_that_are_not_finite_are_refused(number: str) -> None:
    trace = '{"prompt_token_ids": [1], "completion_token_ids": [2], "completion_logprobs": [%s]}'
    with pytest.raises(SerializationError, match="completion_logprobs"):
        from_json(TokenTrace, trace % number)
    step = json.loads(
        to_json(EnvironmentStep(0, (), "", None, "", 1.0, reward_components={"a": 1.0}))
    )
    for changed in ({"reward": float(number)}, {"reward_components": {"a": float(number)}}):
        with pytest.raises(SerializationError, match="finite"):
            from_json(EnvironmentStep, json.dumps(step | changed))
    with pytest.raises(DataError, match="finite"):
        EnvironmentStep(0, (), "", None, "", float(number))
    with pytest.raises(DataError, match="finite"):
        TokenTrace((1,), (2,), (float(number),))


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(SerializationError, match="surrogate"):
        to_json(Rollout("r", (), meta={"text": "ab\ud800"}))
    with pytest.raises(SerializationError, match="surrogate"):
        to_json(Message(role="user", content="\udcff"), Message)


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(SerializationError, match="nested"):
        to_json(Rollout("r", (), meta={"loop": loop}))


def test_an_integer_too_long_for_python_to_print_is_refused() -> None:
    with pytest.raises(SerializationError, match="digits"):
        to_json(Rollout("r", (), meta={"n": 10**5000}))


def test_an_integer_reward_comes_back_as_the_equal_float() -> None:
    outcome = StepOutcome("", 1)
    assert from_json(StepOutcome, to_json(outcome)) == outcome
    with pytest.raises(SerializationError, match=r"StepOutcome\.reward"):
        to_json(StepOutcome("", 10**400))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "Invalid JSON"),
        ("{", "Invalid JSON"),
        (b"\xff\xfe", "Invalid JSON"),
        ("[]", "Rollout: .*`object`"),
        ("null", "Rollout: .*`object`"),
        ('{"steps": []}', "Rollout: .* `id`"),
        ('{"id": 7, "steps": []}', r"Rollout\.id: .* `str`"),
        ('{"id": "r", "steps": {}}', r"\.steps: .*`array`"),
        ('{"id": "r", "steps": [], "wat": 1}', "Rollout: .*unknown field `wat`"),
        ('{"id": "r", "steps": [{"kind": "dream"}]}', r"\.steps\[0\]\.kind: .* 'dream'"),
        ('{"id": "r", "steps": [{"kind": ["agent"]}]}', "kind"),
        ('{"id": "r", "steps": [{"kind": "agent"}]}', r"\.steps\[0\]: .* `turn_index`"),
        ('{"id": "r", "steps": [], "env_seed": true}', r"\.env_seed: .* `int . null`"),
        ('{"id": "r", "steps": [], "env": {"kind": "x", "kwargs": []}}', r"\.env\.kwargs"),
        ("[" * 100_000, "object"),
        ('{"id": "r", "steps": [], "meta": {"a": ' + "[" * 100_000, "Invalid JSON"),
    ],
)
def test_wrong_input_names_the_field_at_fault(text: Any, complaint: str) -> None:
    with pytest.raises(SerializationError, match=complaint):
        from_json(Rollout, text)


@given(junk=st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_whatever_is_read_either_fits_or_is_a_serialization_error(junk: bytes) -> None:
    for cls in (Rollout, TokenTrace, Message, AgentStep):
        try:
            value = from_json(cls, junk)
        except SerializationError:
            continue
        assert to_json(value, cls)


def test_a_reason_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(SerializationError, match=r"ChatResponse\.finish_reason: .*'tired'"):
        from_json(ChatResponse, '{"trace": null, "finish_reason": "tired"}')


def test_a_contradiction_inside_a_file_is_a_serialization_error() -> None:
    trace = '{"prompt_token_ids": [], "completion_token_ids": [1], "completion_logprobs": []}'
    with pytest.raises(SerializationError, match="0 entries for 1 tokens"):
        from_json(TokenTrace, trace)


def test_token_ids_of_another_type_are_refused() -> None:
    ids: Any = (1, np.int64(2))
    with pytest.raises(DataError, match=r"completion_token_ids has np.int64\(2\)"):
        TokenTrace((), ids)


@pytest.mark.parametrize("wrong", ["1", None, 10**400])
def test_what_is_no_number_is_no_reward_and_no_log_prob(wrong: Any) -> None:
    with pytest.raises(DataError, match="finite"):
        EnvironmentStep(0, (), "", None, "", wrong)
    with pytest.raises(DataError, match="finite"):
        TokenTrace((1,), (2,), (wrong,))


def test_log_probs_and_kept_ids_have_the_length_of_the_completion() -> None:
    with pytest.raises(DataError, match="completion_logprobs has 1 entries for 2 tokens"):
        TokenTrace((1,), (2, 3), (-0.5,))
    with pytest.raises(DataError, match="kept_token_ids has 1 entries for 2 tokens"):
        TokenTrace((1,), (2, 3), kept_token_ids=((),))


@pytest.mark.parametrize(
    "spans",
    [
        [(0, 3)],
        [(0, 1), (1, 3)],
        [(-1, 2)],
        [(0, 1)],
        [(1, 2)],
        [(0, 1), (0, 2)],
        [(1, 2), (0, 1)],
        [(0, 2), (2, 0), (0, 2)],
    ],
)
def test_version_spans_that_do_not_cover_each_token_once_are_refused(
    spans: list[tuple[int, int]],
) -> None:
    with pytest.raises(DataError, match=r"version spans .* 2 completion tokens"):
        TokenTrace((), (2, 3), version_spans=tuple(VersionSpan(a, b, 1) for a, b in spans))


def test_a_completion_that_is_cut_takes_its_log_probs_kept_ids_and_versions_with_it() -> None:
    whole = TokenTrace((1,), (2, 3), (-0.5, -0.5), (VersionSpan(0, 2, 7),), ((2,), (3,)))
    for name in ("completion_logprobs", "kept_token_ids", "version_spans"):
        with pytest.raises(DataError, match=name.split("_")[0]):
            TokenTrace((1,), (2,), **{name: getattr(whole, name)})


def test_a_trace_given_lists_compares_like_one_given_tuples() -> None:
    lists: Any = ([1], [2], [-0.5])
    assert TokenTrace(*lists) == TokenTrace((1,), (2,), (-0.5,))
    arrays: Any = (np.array([1]), np.array([2]))
    with pytest.raises(DataError, match="ndarray"):
        TokenTrace(*arrays)


@given(first=traces(), more=st.lists(IDS, max_size=4))
def test_a_prompt_extends_a_trace_when_it_begins_with_all_its_tokens(
    first: TokenTrace, more: list[int]
) -> None:
    longer = TokenTrace(first.token_ids + tuple(more), ())
    assert longer.extends(first)
    changed = TokenTrace((*first.token_ids, 0), ())
    assert not TokenTrace(first.token_ids, ()).extends(changed)


def env_step(
    turn: int, calls: tuple[int, ...], reward: float = 0.0, **rest: Any
) -> EnvironmentStep:
    return EnvironmentStep(turn, calls, "", None, "", reward, **rest)


def agent_step(turn: int) -> AgentStep:
    said = Message(role="assistant", content="")
    return AgentStep(turn, (), said, FinishReason.STOP, TokenTrace((1,), (2, 3)))


def test_a_truncation_always_has_its_reason_and_nothing_else_has_one() -> None:
    with pytest.raises(DataError, match="a truncated step needs a reason"):
        env_step(0, (), truncated=True)
    with pytest.raises(DataError, match="a truncated step needs a reason"):
        env_step(0, (), truncation_reason=TruncationReason.MAX_STEPS)


def test_a_rollout_whose_actions_come_from_nowhere_is_refused() -> None:
    with pytest.raises(DataError, match="no model call at that place"):
        Rollout("r", (agent_step(0), env_step(0, (1,))))
    with pytest.raises(DataError, match="no model call at that place"):
        Rollout("r", (env_step(0, (1,)), agent_step(0)))
    with pytest.raises(DataError, match="two actions"):
        Rollout("r", (agent_step(0), env_step(0, (0,)), env_step(0, (0,))))


def test_a_turn_is_its_model_calls_its_step_and_what_was_heard_after() -> None:
    steps = (
        agent_step(0),
        agent_step(0),
        env_step(0, (0, 1), 1.0),
        agent_step(1),
        env_step(1, (3,), 2.0),
        env_step(1, (), 4.0, truncated=True, truncation_reason=TruncationReason.BUDGET),
    )
    rollout = Rollout("r", steps)
    first, second = rollout.turns()
    assert first == Turn(0, (steps[0], steps[1]), steps[2])
    assert (first.reward, second.reward) == (1.0, 6.0)
    assert second.outcomes == (steps[5],)
    assert rollout.total_reward == 7.0
    assert rollout.num_tokens == 6
    assert (rollout.terminated, rollout.truncated) == (False, True)
    assert rollout.truncation_reason is TruncationReason.BUDGET


@pytest.mark.parametrize("rewards", [[0.1] * 10, [0.7, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.7]])
def test_rewards_that_add_up_to_one_are_one_in_any_order(rewards: list[float]) -> None:
    steps = [
        step for n, r in enumerate(rewards) for step in (agent_step(n), env_step(n, (2 * n,), r))
    ]
    assert Rollout("r", tuple(steps)).total_reward == 1.0


@given(rollout=ROLLOUTS)
def test_turns_hold_every_step_once_and_all_of_the_reward(rollout: Rollout) -> None:
    turns = list(rollout.turns())
    held = [s for t in turns for s in (*t.agent_steps, *t.outcomes, t.env_step) if s is not None]
    assert len(held) == len(rollout.steps)
    assert {id(s) for s in held} == {id(s) for s in rollout.steps}
    assert [t.index for t in turns] == sorted({s.turn_index for s in rollout.steps})
