from __future__ import annotations

import math
from typing import Any

import pytest
from msgspec.structs import asdict

from ludic.errors import ConfigError, NotTrainableError
from ludic.inference import InferenceSpec, ReturnSpec, SamplingConfig, VLLMExtensions
from ludic.saw.trainable import check_sampling
from ludic.types import from_json, to_json


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf),
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("stop", ("",)),
        ("stop", "</move>"),
        ("stop_token_ids", (-1,)),
    ],
)
def test_a_setting_that_cannot_work_is_named(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"SamplingConfig\.{setting}"):
        SamplingConfig(**{setting: value})


def check(sampling: SamplingConfig, *, kept_ids_recorded: bool) -> None:
    check_sampling(asdict(sampling), kept_ids_recorded=kept_ids_recorded, where="a completion")


def test_the_defaults_may_be_trained_on() -> None:
    check(SamplingConfig(), kept_ids_recorded=False)
    check(SamplingConfig(temperature=0.7, stop=("x",), max_tokens=1), kept_ids_recorded=False)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(temperature=0),
        SamplingConfig(presence_penalty=0.1),
        SamplingConfig(frequency_penalty=-0.1),
        SamplingConfig(repetition_penalty=1.1),
    ],
)
def test_a_distribution_that_cannot_be_reproduced_is_not_trained_on(
    sampling: SamplingConfig,
) -> None:
    for recorded in (False, True):
        with pytest.raises(NotTrainableError):
            check(sampling, kept_ids_recorded=recorded)


@pytest.mark.parametrize(
    "sampling", [SamplingConfig(top_p=0.9), SamplingConfig(top_k=5), SamplingConfig(min_p=0.1)]
)
def test_truncated_sampling_is_trained_on_only_with_the_kept_ids(sampling: SamplingConfig) -> None:
    with pytest.raises(NotTrainableError, match="kept ids"):
        check(sampling, kept_ids_recorded=False)
    check(sampling, kept_ids_recorded=True)


def test_a_spec_survives_json() -> None:
    spec = InferenceSpec(
        SamplingConfig(temperature=0.5, stop=("a", "b"), stop_token_ids=(3,), seed=2**62),
        ReturnSpec(kept_ids=True),
        VLLMExtensions({"stop_token_ids": [1]}, max_think_tokens=9).to_mapping(),
    )
    assert from_json(InferenceSpec, to_json(spec)) == spec


def test_vllm_extensions_are_plain_data_and_back() -> None:
    made = VLLMExtensions({"stop_token_ids": [1]}, max_think_tokens=9)
    assert VLLMExtensions.from_mapping(made.to_mapping()) == made
    assert VLLMExtensions().to_mapping() == {} == dict(VLLMExtensions())
    spec = InferenceSpec(extensions=made)
    assert spec.extensions == made.to_mapping()
    assert from_json(InferenceSpec, to_json(spec)) == spec
    with pytest.raises(ConfigError, match="max_thoughts"):
        VLLMExtensions.from_mapping({"max_thoughts": 1})
    with pytest.raises(ConfigError, match="max_think_tokens"):
        VLLMExtensions(max_think_tokens=-1)
