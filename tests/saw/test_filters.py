from __future__ import annotations

from dataclasses import replace

import pytest

from ludic.errors import ConfigError
from ludic.saw import (
    Sample,
    combine,
    drop_if,
    drop_incomplete_completions,
    drop_overlong,
    drop_parse_errors,
    drop_truncated,
)
from ludic.types import (
    AgentStep,
    EnvironmentStep,
    FinishReason,
    Rollout,
    TokenTrace,
    TruncationReason,
)


def sample(
    *,
    finish: FinishReason = FinishReason.STOP,
    reason: TruncationReason | None = None,
    parse_error: bool = False,
) -> Sample:
    call = AgentStep(0, (), {"role": "assistant", "content": ""}, finish, TokenTrace((1, 2), (3,)))
    step = EnvironmentStep(
        0,
        (0,),
        "o",
        "a",
        "n",
        0.0,
        truncated=reason is not None,
        truncation_reason=reason,
        info={"parse_error": True} if parse_error else {},
    )
    rollout = Rollout("r", (call, step))
    return Sample(rollout, next(rollout.turns()), 1.0)


def test_each_filter_names_its_reason_and_keeps_the_rest() -> None:
    cut = sample(reason=TruncationReason.MAX_STEPS)
    assert drop_truncated()(cut) == "truncated"
    assert drop_truncated([TruncationReason.ENV_LIMIT])(cut) is None
    assert drop_incomplete_completions()(sample(finish=FinishReason.LENGTH)) == (
        "incomplete_completion"
    )
    assert drop_parse_errors()(sample(parse_error=True)) == "parse_error"
    assert drop_overlong(2)(sample()) == "overlong"
    keepers = (
        drop_truncated(),
        drop_incomplete_completions(),
        drop_parse_errors(),
        drop_overlong(3),
    )
    assert [judge(sample()) for judge in keepers] == [None] * 4


def test_an_episode_ending_and_a_completion_ending_are_told_apart() -> None:
    assert drop_truncated()(sample(finish=FinishReason.LENGTH)) is None
    assert drop_incomplete_completions()(sample(reason=TruncationReason.MAX_STEPS)) is None


def test_combined_filters_count_a_sample_once_under_the_first_reason() -> None:
    both = sample(parse_error=True, reason=TruncationReason.MAX_STEPS)
    assert combine(drop_parse_errors(), drop_truncated())(both) == "parse_error"
    assert combine(drop_truncated(), drop_parse_errors())(both) == "truncated"
    assert combine()(both) is None


def test_a_filter_of_ones_own_is_a_predicate_with_a_name() -> None:
    judge = drop_if("zero_weight", lambda s: s.weight == 0.0)
    assert judge(sample()) is None
    assert judge(replace(sample(), weight=0.0)) == "zero_weight"


def test_a_limit_below_one_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_seq_len=0"):
        drop_overlong(0)


def test_a_turn_without_token_ids_has_no_length() -> None:
    call = AgentStep(0, (), {"role": "assistant", "content": ""}, FinishReason.STOP, None)
    rollout = Rollout("r", (call, EnvironmentStep(0, (0,), "o", "a", "n", 0.0)))
    assert Sample(rollout, next(rollout.turns()), 1.0).length == 0
