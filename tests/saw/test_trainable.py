from __future__ import annotations

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
