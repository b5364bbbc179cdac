"""A run file is checked before anything starts, and its errors say what to write instead."""

from pathlib import Path

import pytest

from ludic.errors import ConfigError
from ludic.runs.settings import load_run, parse_run

MINIMAL = '[env]\nkind = "tic_tac_toe"\n'


def test_a_minimal_file_is_a_whole_run() -> None:
    run = parse_run(MINIMAL)
    assert run.env[0].kind == "tic_tac_toe"
    assert run.model.name == "tiny"
    assert run.protocol.kind == "single_agent"


def test_overrides_are_toml_values_or_plain_strings() -> None:
    run = parse_run(
        MINIMAL,
        [
            "training.learning_rate=1e-5",
            "run.name=mine",
            "env.kwargs.opponent=perfect",
            "inference.sampling.stop=['x', 'y']",
            "training.overlap=true",
        ],
    )
    assert run.training.learning_rate == 1e-5
    assert run.run.name == "mine"
    assert run.env[0].kwargs == {"opponent": "perfect"}
    assert run.inference.sampling.stop == ["x", "y"]
    assert run.training.overlap is True


def test_several_environments_are_a_mix() -> None:
    run = parse_run('[[env]]\nkind = "a"\n[[env]]\nkind = "b"\nweight = 2.0\n')
    assert [(env.kind, env.weight) for env in run.env] == [("a", 1.0), ("b", 2.0)]


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        (
            MINIMAL + "[training]\nlearning_rat = 3\n",
            [],
            ["training.learning_rat", "did you mean 'learning_rate'", "line 4"],
        ),
        (MINIMAL + "[training]\nsteps = 'many'\n", [], ["training.steps", "many", "line 4"]),
        (MINIMAL, ["training.step=3"], ["training.step", "'steps'", "from the command line"]),
        (MINIMAL, ["steps"], ["section.key=value"]),
        (MINIMAL, ["env.kind.deep=3"], ["'kind' is not a table"]),
        ("[trainig]\n" + MINIMAL, [], ["trainig", "'training'", "line 1"]),
        ("[training]\nsteps = 1\n", [], ["'env' is missing"]),
        ("[env]\n", [], ["env.0.kind", "missing", "line 1"]),
        ('[[env]]\nkind = "a"\nweigth = 3\n', [], ["weigth", "'weight'", "line 3"]),
        ("schema = 2\n" + MINIMAL, [], ["schema 2", "upgrade"]),
        ("env = [\n", [], ["not valid TOML"]),
        (MINIMAL + "[training]\nlearning_rate = -1.0\n", [], ["greater than 0", "line 4"]),
    ],
)
def test_a_wrong_run_is_one_error_that_says_what_to_write(
    text: str, overrides: list[str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run(text, overrides)
    for word in words:
        assert word in str(caught.value)


def test_a_missing_or_binary_file_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_run(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_run(tmp_path / "binary.toml")


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run(MINIMAL + "[training]\nstep = 1\nlr = 1\n")
    assert "training.step" in str(caught.value)
    assert "training.lr" in str(caught.value)
