"""What a run leaves out of its batches, samples anew, and corrects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ludic
from ludic.errors import LudicError
from ludic.runs.settings.from_python import read_arguments
from ludic.saw.filters import Sample, drop_overlong, drop_truncated
from ludic.training import (
    CorrectedLoss,
    MaskedImportance,
    RolloutBatchSource,
    TruncatedImportance,
)
from tests.runs.test_other_models import from_file, metrics
from tests.runs.test_run import small
from tests.runs.worlds import Letters

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def no_gain(sample: Sample) -> str | None:
    """Drops what credit finds worthless."""
    return "no_gain" if sample.weight == 0 else None


CORRECTED = """
[algorithm]
kwargs = { group_size = 2 }
corrections = [
    { kind = "truncated_importance", upper = 3.0, level = "token" },
    { kind = "masked_importance", lower = 0.1, upper = 10.0, level = "turn", mean = "geometric" },
]
"""


def test_a_run_file_has_filters_corrections_and_dynamic_sampling_together() -> None:
    run = from_file(
        CORRECTED,
        f"inference.sampling.stop_token_ids={list(range(128))}",  # what does not end is an error
        "training.dynamic_sampling=3",
        'training.filters=["drop_truncated", {kind="drop_overlong", max_seq_len=60}, '
        '"tests.runs.test_batches:no_gain"]',
    )
    assert isinstance(run.algorithm.loss, CorrectedLoss)
    assert run.algorithm.loss.corrections == (
        TruncatedImportance(3.0),
        MaskedImportance(0.1, 10.0, level="turn", mean="geometric"),
    )
    lines = metrics(run.go())
    assert len(lines) == 2
    assert lines[0]["train/correction_token_ratio_mean"] == pytest.approx(1, abs=1e-3)
    assert any(line["train/sampling_rounds"] > 1 for line in lines)


def test_filters_and_corrections_are_objects_in_a_script() -> None:
    mine = drop_overlong(60)
    arguments = {
        "env": Letters,
        "training": {"filters": [mine, no_gain, {"kind": drop_truncated, "reasons": None}]},
        "algorithm": {"name": ludic.grpo(group_size=2), "corrections": [TruncatedImportance(3.0)]},
    }
    config, objects = read_arguments(arguments)
    filters: list[Any] = list(config.training.filters)
    assert list(objects.values()) == [mine]
    assert filters[1:] == [
        "tests.runs.test_batches:no_gain",
        {"kind": "drop_truncated", "reasons": None},
    ]
    assert config.algorithm.name == "grpo"
    assert config.algorithm.kwargs == {"group_size": 2}
    assert config.algorithm.corrections == [
        {"kind": "truncated_importance", "upper": 3.0, "level": "token", "mean": "product"}
    ]
    training = {**small()["training"], "filters": [mine]}
    run = ludic.train(Letters, **small(training=training, out="run"))
    with pytest.raises(LudicError, match="training=…"):
        ludic.resume("run", steps=3)
    assert ludic.resume(run, steps=3).trainer.step == 3


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (['training.filters=["drop_truncatd"]'], "'drop_truncatd'; did you mean 'drop_truncated'"),
        (['training.filters=["drop_overlong"]'], "drop_overlong.*max_seq_len"),
        (
            ['training.filters=[{kind="drop_overlong", max_len=3}]'],
            "no argument 'max_len'; did you mean 'max_seq_len'",
        ),
        (['training.filters=["nowhere:filter"]'], "nowhere"),
        (["training.dynamic_sampling=-1"], "training.dynamic_sampling"),
        (["training.dynamic_sampling=2", "algorithm.name=reinforce"], "compares groups"),
        (
            ['algorithm.corrections=["truncated_importanc"]'],
            "'truncated_importanc'; did you mean 'truncated_importance'",
        ),
        (
            ['algorithm.corrections=[{kind="truncated_importance", uper=2.0}]'],
            "no argument 'uper'; did you mean 'upper'",
        ),
        (
            ['algorithm.corrections=[{kind="truncated_importance", level="tokn"}]'],
            "'tokn'.*did you mean 'token'",
        ),
        (
            ['algorithm.corrections=[{kind="masked_importance", mean="geo"}]'],
            "'geo'.*'geometric'",
        ),
    ],
)
def test_a_bad_value_gets_a_sentence_with_the_nearest_right_one(
    overrides: list[str], said: str
) -> None:
    if "algorithm.name=reinforce" not in overrides:
        overrides = [*overrides, "algorithm.kwargs.group_size=2"]
    with pytest.raises(LudicError, match=said):
        from_file("", *overrides)
    assert not Path("run").exists()


def test_a_run_without_any_has_none() -> None:
    source = from_file("", "algorithm.kwargs.group_size=2", "training.steps=1").go().source
    assert isinstance(source, RolloutBatchSource)
    assert source.sample_filter is None
    assert source.resample is None
