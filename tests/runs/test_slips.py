"""Slips in settings: what was meant is named, and nothing passes as something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ludic
from ludic.errors import ConfigError, near_names
from ludic.eval.report import read_report
from ludic.runs.model import algorithm_of, build_model
from ludic.runs.players.scoring import check_scoring
from ludic.runs.pretrained import load_tokenizer
from ludic.runs.settings import parse_run
from ludic.runs.settings.reading import find_run

ENV = '[env]\nkind = "tic_tac_toe"\n'


@pytest.mark.parametrize(
    ("text", "overrides", "meant"),
    [
        ("[training]\nlr = 0.1\n", [], "'training.lr': did you mean 'learning_rate'"),
        ("[sft]\nteacher = 'a:b'\nlr = 0.1\n", [], "'sft.lr': did you mean 'learning_rate'"),
        ("", ["training.lr=0.1"], "did you mean 'learning_rate'? (from the command line)"),
        ("", ["lr=0.1"], "'lr': did you mean 'training.learning_rate'"),
        ("", ["training.temperature=1"], "did you mean 'inference.sampling.temperature'"),
        ("[inference.sampling]\ntemp = 1\n", [], "did you mean 'temperature'"),
        ("", ["training.rollout_per_update=8"], "did you mean 'rollouts_per_update'"),
        ("", ["steps=3"], "did you mean 'training.steps' or 'sft.steps'?"),
        ("", ["trainng.steps=3"], "did you mean 'training'? (from the command line)"),
        ("", ["zebra=1"], "known here: algorithm, cluster, curriculum"),
    ],
)
def test_an_unknown_key_names_the_one_that_was_meant(
    text: str, overrides: list[str], meant: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run(ENV + text, overrides)
    assert meant in str(caught.value)


def test_a_misspelt_run_file_or_report_is_told_from_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "first").mkdir()
    (tmp_path / "first/run.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no run file or run folder 'frist'.*mean 'first'\?"):
        find_run("frist")
    with pytest.raises(ConfigError, match=r"did you mean 'tic-tac-toe'\?"):
        find_run("tic-tac-to")
    with pytest.raises(ConfigError, match=r"first is a folder.*ludic train --resume first"):
        find_run("first")
    with pytest.raises(ConfigError, match=r"there is no report at first/eval/after_rl\.json"):
        read_report(Path("first"))


@pytest.mark.parametrize("call", [ludic.train, ludic.evaluate, ludic.sft])
def test_so_does_an_unknown_argument_in_python(call: Any) -> None:
    with pytest.raises(ConfigError, match="'lr'; did you mean 'learning_rate'"):
        call("tic_tac_toe", lr=0.1, sft={"teacher": "a:b"})
    with pytest.raises(ConfigError, match="did you mean 'learning_rate'"):
        call("tic_tac_toe", training={"lr": 0.1}, sft={"teacher": "a:b"})


def test_a_slip_of_the_finger_comes_before_an_abbreviation() -> None:
    assert near_names("stepz", ["steps", "stepzone"]) == ["steps"]
    assert near_names("gs", ["gradient_checkpointing", "group_size"]) == ["group_size"]
    assert near_names("xyzzy", ["steps", "learning_rate"]) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('steps = "4"', "'training.steps' = '4': input should be a number, not \"4\""),
        ("steps = true", "'training.steps' = True: input should be a number, not true"),
        ('learning_rate = "1e-4"', 'a number, not "1e-4"'),
        ('betas = ["0.9", "0.99"]', 'a number, not "0.9"'),
        ('overlap = "yes"', 'true or false, not "yes"'),
        ('micro_token_budget = "big"', 'a number, not "big"'),
    ],
)
def test_text_does_not_pass_as_a_number(line: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run(f"{ENV}[training]\n{line}\n")
    assert said in str(caught.value)
    assert "line 4" in str(caught.value)


def test_overrides_may_be_spelled_as_in_python() -> None:
    run = parse_run(ENV, ["training.overlap=True", "training.past_share=.25", "run.name=True-ish"])
    assert run.training.overlap is True
    assert run.training.past_share == 0.25
    assert run.run.name == "True-ish"


def _unreachable(*args: Any, **options: Any) -> Any:
    raise ConnectionError("no route to host")


def test_a_model_that_is_not_here_is_refused_at_once_where_there_is_no_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import transformers
    from huggingface_hub import HfApi, constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(HfApi, "model_info", _unreachable)

    def tried(*args: Any, **options: Any) -> Any:
        raise AssertionError("it was tried all the same, which takes minutes")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", tried)
    config = parse_run(ENV, ["model.name=nobody/nothing-of-the-kind"])
    with pytest.raises(ConfigError, match=r"the hub cannot be reached .*no route to host"):
        build_model(config)
    with pytest.raises(ConfigError, match="the hub cannot be reached"):
        load_tokenizer("nobody/nothing-of-the-kind", "player 1")


def test_a_model_that_was_downloaded_earlier_is_taken_from_this_machine_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import huggingface_hub
    import transformers

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", _unreachable)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *a, **o: "config.json")
    options: dict[str, Any] = {}
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda name, **given: options.update(given)
    )
    load_tokenizer("somebody/something", "player 1")
    assert options == {"local_files_only": True}


def test_a_kl_coefficient_of_0_measures_the_reference_only() -> None:
    text = ENV + '[reference]\nmodel = "start"\n'
    config = parse_run(text, ["algorithm.kwargs.kl_coeff=0"])
    check_scoring(config, algorithm_of(config), ["tic_tac_toe"])
    forgotten = parse_run(text)
    with pytest.raises(ConfigError, match=r"nothing uses the \[reference\]"):
        check_scoring(forgotten, algorithm_of(forgotten), ["tic_tac_toe"])
