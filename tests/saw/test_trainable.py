from __future__ import annotations

from typing import Any

import pytest

from ludic.errors import NotTrainableError
from ludic.saw.trainable import check_sampling


def test_settings_that_were_not_recorded_count_as_the_defaults() -> None:
    check_sampling({}, kept_ids_recorded=False, where="here")


@pytest.mark.parametrize(
    ("setting", "value"), [("temperature", 0), ("top_k", 20), ("repetition_penalty", 1.2)]
)
def test_a_refusal_names_the_call_and_the_setting(setting: str, value: float) -> None:
    with pytest.raises(NotTrainableError, match=f"step 3 was sampled .*{setting}"):
        check_sampling({setting: value}, kept_ids_recorded=False, where="step 3")


def test_a_temperature_alone_does_not_speak_for_the_settings_beside_it() -> None:
    with pytest.raises(NotTrainableError, match="step 3 was sampled with top_k=20"):
        check_sampling({"temperature": 1.0, "top_k": 20}, kept_ids_recorded=False, where="step 3")


PLAIN = {
    **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
    **{"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
}


@pytest.mark.parametrize(
    ("extensions", "named"),
    [
        ({"max_think_tokens": 64}, "max_think_tokens"),
        ({"extra_body_overrides": {"temperature": 0.5, "bad_words": ["a"]}}, "bad_words, temper"),
        ({"extra_body_overrides": {"sampling_params": {"min_tokens": 4}}}, "min_tokens"),
    ],
)
def test_what_makes_a_server_force_or_forbid_tokens_is_refused(
    extensions: dict[str, Any], named: str
) -> None:
    for kept in (False, True):
        with pytest.raises(NotTrainableError, match=f"step 3 was sampled with {named}"):
            check_sampling(
                PLAIN | {"extensions": extensions}, kept_ids_recorded=kept, where="step 3"
            )


def test_what_only_ends_or_schedules_a_completion_may_be_trained_on() -> None:
    overrides = {"stop_token_ids": [7], "priority": 1}
    harmless = {"ignore_eos": True, "extra_body_overrides": overrides}
    check_sampling(PLAIN | {"extensions": harmless}, kept_ids_recorded=False, where="step 3")
    as_it_is = {"extra_body_overrides": {"repetition_penalty": 1.0, "logit_bias": None}}
    check_sampling(PLAIN | {"extensions": as_it_is}, kept_ids_recorded=False, where="step 3")
