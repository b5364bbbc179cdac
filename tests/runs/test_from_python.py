"""What a script gives becomes the tables that a run file would have."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ludic
from ludic.context import WindowedDialog
from ludic.envs import TicTacToeEnv
from ludic.errors import ConfigError
from ludic.inference import SamplingConfig
from ludic.interaction import Runtime
from ludic.interaction.factories import single_agent_protocol
from ludic.runs.settings import TrainingSection, parse_run
from ludic.runs.settings.from_python import read_arguments
from ludic.training import Constant, TrainerConfig

HERE = __name__


class Mine(TicTacToeEnv):
    """An environment of a module."""


def make_env(opponent: str = "random") -> TicTacToeEnv:
    return TicTacToeEnv(opponent=opponent)  # type: ignore[arg-type]


def my_algorithm() -> Any:
    return ludic.grpo(group_size=2)


def my_protocol(runtime: Runtime, **options: Any) -> Any:
    return single_agent_protocol(runtime, **options)


def adds(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def tables(**arguments: Any) -> dict[str, Any]:
    """The tables of a run of these arguments, which hold no object without a name."""
    config, objects = read_arguments({"env": "tic_tac_toe", **arguments})
    assert not objects
    return config.plain()


@pytest.mark.parametrize(
    ("env", "recorded"),
    [
        ("tic_tac_toe", [("tic_tac_toe", {}, 1)]),
        (TicTacToeEnv, [("tic_tac_toe", {}, 1)]),
        (Mine, [(f"{HERE}:Mine", {}, 1)]),
        (make_env, [(f"{HERE}:make_env", {}, 1)]),
        (partial(Mine, opponent="perfect"), [(f"{HERE}:Mine", {"opponent": "perfect"}, 1)]),
        (ludic.EnvSpec("gsm8k", {"a": 1}), [("gsm8k", {"a": 1}, 1)]),
        (
            {"kind": Mine, "kwargs": {"opponent": "mixed"}},
            [(f"{HERE}:Mine", {"opponent": "mixed"}, 1)],
        ),
        ([Mine, "key_door"], [(f"{HERE}:Mine", {}, 1), ("key_door", {}, 1)]),
        ([(Mine, 2), ("key_door", 1)], [(f"{HERE}:Mine", {}, 2), ("key_door", {}, 1)]),
        ({Mine: 2, "key_door": 1}, [(f"{HERE}:Mine", {}, 2), ("key_door", {}, 1)]),
    ],
)
def test_an_environment_may_be_many_things(env: Any, recorded: list[Any]) -> None:
    found = tables(env=env)["env"]
    assert [(e["kind"], e["kwargs"], e["weight"]) for e in found] == recorded


def test_the_same_run_is_said_in_a_script_and_in_a_file() -> None:
    said = tables(
        env=partial(Mine, opponent="mixed"),
        model="Qwen/Qwen2.5-0.5B-Instruct",
        algorithm=ludic.cispo(8, aggregation=Constant(64)),
        parser=ludic.compose_parsers(ludic.think_prefix_parser(), ludic.xml_parser("move")),
        steps=200,
        learning_rate=1e-6,
        seed=3,
        name="mine",
        protocol={"kwargs": {"agent": "react", "tools": [adds]}},
        training=TrainerConfig(weight_decay=0.1, betas=(0.9, 0.99)),
        inference={"sampling": SamplingConfig(max_tokens=32, stop=("x",))},
        eval={"env": Mine, "episodes": 10},
        sft={"teacher": adds, "steps": 3},
    )
    file = f"""
[run]
name = "mine"
seed = 3
[model]
name = "Qwen/Qwen2.5-0.5B-Instruct"
[env]
kind = "{HERE}:Mine"
kwargs = {{ opponent = "mixed" }}
[protocol.kwargs]
agent = "react"
tools = ["{HERE}:adds"]
parser = ["think_prefix", {{ kind = "xml", tag = "move" }}]
[algorithm]
name = "cispo"
kwargs = {{ group_size = 8, aggregation = {{ kind = "constant", length = 64 }} }}
[training]
steps = 200
learning_rate = 1e-6
weight_decay = 0.1
betas = [0.9, 0.99]
[inference.sampling]
max_tokens = 32
stop = ["x"]
[sft]
teacher = "{HERE}:adds"
steps = 3
[eval]
episodes = 10
env = {{ kind = "{HERE}:Mine" }}
"""
    expected = parse_run(file).plain()
    expected["protocol"]["kwargs"]["parser"][0] = {"kind": "think_prefix"}
    assert said == expected


def test_a_section_may_be_its_model() -> None:
    assert tables(training=TrainingSection(steps=7))["training"]["steps"] == 7
    training: dict[str, Any] = {"steps": 7}
    protocol: dict[str, Any] = {"kwargs": {}}
    said = tables(training=training, steps=8, protocol=protocol, parser=ludic.boxed_parser())
    assert said["training"]["steps"] == 8
    assert said["protocol"]["kwargs"] == {"parser": {"kind": "boxed"}}
    assert (training, protocol) == ({"steps": 7}, {"kwargs": {}})


def test_functions_are_named_by_their_place() -> None:
    found = tables(algorithm=my_algorithm, protocol=my_protocol)
    assert found["algorithm"]["name"] == f"{HERE}:my_algorithm"
    assert found["protocol"]["kind"] == f"{HERE}:my_protocol"
    found = tables(
        algorithm={"name": ludic.grpo, "kwargs": {"group_size": 2}},
        protocol={"kind": single_agent_protocol, "kwargs": {"context": WindowedDialog}},
    )
    assert found["algorithm"]["name"] == "grpo"
    assert found["algorithm"]["kwargs"] == {"group_size": 2}
    assert found["protocol"] == {"kind": "single_agent", "kwargs": {"context": "windowed"}}


def test_what_has_no_name_is_recorded_as_an_object_and_kept() -> None:
    class Local(TicTacToeEnv): ...

    def read(text: str) -> Any: ...

    algorithm = my_algorithm()
    changed = type(algorithm)("mine", algorithm.credit_assigner, algorithm.loss)
    config, objects = read_arguments(
        {
            "env": [Local, {"kind": Mine, "kwargs": {"opponent": object()}}],
            "parser": read,
            "algorithm": changed,
            "sft": {"teacher": lambda obs, rng: "A1"},
        }
    )
    names = [env.kind for env in config.env]
    parser = config.protocol.kwargs["parser"]["kind"]
    assert config.sft is not None
    named = [*names, parser, config.algorithm.name, config.sft.teacher]
    assert all(str(name).startswith("object:") for name in named)
    assert set(named) == set(objects)
    assert objects[names[0]] is Local
    assert objects[parser]() is read
    assert objects[config.algorithm.name]() is changed
    assert config.env[1].kwargs == {}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"env": 3}, "env=3 is not an environment"),
        ({"training": 3}, "training=3: give a dict"),
        ({"training": {"learning_rat": 1}}, "did you mean 'learning_rate'"),
        ({"model": (1, 2)}, r"pair \(model, tokenizer\)"),
        ({"env": {"kind": "tic_tac_toe", "kwarg": {}}}, "'env.kwarg'.*'kwargs'"),
        ({"algoritm": "grpo"}, "no argument 'algoritm'"),
    ],
)
def test_what_cannot_be_a_run_is_said_in_a_sentence(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tables(**arguments)


def test_paths_of_a_file_are_relative_to_it_and_those_of_the_command_line_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ludic.runs.settings import load_run

    there, here = tmp_path / "there", tmp_path / "here"
    (there / "weights").mkdir(parents=True)
    here.mkdir()
    monkeypatch.chdir(here)
    file = there / "run.toml"
    file.write_text(
        '[run]\nfolder = "kept"\n[model]\nname = "weights"\n[env]\nkind = "tic_tac_toe"\n'
        '[sft]\ndata = "rows.jsonl"\n'
    )
    config = load_run(file)
    assert config.sft is not None
    assert config.model.name == str(there / "weights")
    assert config.sft.data == str(there / "rows.jsonl")
    assert config.run.folder == str(there / "kept")
    config = load_run(file, ["sft.data=rows.jsonl", "model.name=weights", "run.folder=kept"])
    assert config.sft is not None
    assert config.sft.data == str(here / "rows.jsonl")
    assert config.model.name == "weights"  # none here: it may be on the hub
    assert config.run.folder == str(here / "kept")
    (here / "rows.jsonl").touch()  # as older run files meant it
    config = load_run(file)
    assert config.sft is not None
    assert config.sft.data == str(here / "rows.jsonl")


def test_an_environments_file_beside_the_run_file_is_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ludic.runs.settings import load_run

    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    monkeypatch.chdir(here)
    (there / "rows.jsonl").touch()
    file = there / "run.toml"
    file.write_text(
        '[env]\nkind = "gsm8k"\nkwargs = { path = "rows.jsonl" }\n'
        '[eval.env]\nkind = "gsm8k"\nkwargs = { path = "elsewhere" }\n'
    )
    config = load_run(file)
    assert config.env[0].kwargs["path"] == str(there / "rows.jsonl")
    assert config.eval.env[0].kwargs["path"] == "elsewhere"  # no file: its environment's matter
    config = load_run(file, ["env.kwargs.path=rows.jsonl"])
    assert config.env[0].kwargs["path"] == "rows.jsonl"


def test_every_preset_is_there_under_its_short_name() -> None:
    from ludic.registry import ALGORITHMS

    # `ludic.sft` is the supervised part of a run. What a test registered has no place there.
    presets = {n for n in ALGORITHMS.names() if ALGORITHMS.builtin_name(ALGORITHMS.get(n)) == n}
    assert len(presets) >= 12
    for name in presets - {"sft"}:
        assert getattr(ludic, name) is ALGORITHMS.get(name)


def test_train_shows_the_arguments_of_a_run() -> None:
    assert inspect.signature(ludic.train) == inspect.signature(ludic.Run)
    assert {"model", "algorithm", "parser", "steps", "sft"} <= {
        *inspect.signature(ludic.train).parameters
    }


def test_sampling_without_a_limit_stays_without_one() -> None:
    for given, most in (
        (SamplingConfig(temperature=0.8), None),
        (SamplingConfig(max_tokens=7), 7),
        ({"temperature": 0.8}, 64),
    ):
        arguments = {"env": "tic_tac_toe", "inference": {"sampling": given}}
        assert read_arguments(arguments)[0].inference.sampling.max_tokens == most
