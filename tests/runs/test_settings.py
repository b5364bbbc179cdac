"""A run file is checked before anything starts, and its errors say what to write instead."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ludic.errors import ConfigError
from ludic.plumbing.precision import DEFAULT_ON_A_GPU, Precision, weights_dtype
from ludic.rollouts import RolloutEngine
from ludic.runs.model import build_model, precision_of, trainer_config
from ludic.runs.playing import open_policy
from ludic.runs.settings import RunConfig, Section, load_run, parse_run

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


def test_an_override_has_no_comment() -> None:
    assert parse_run(MINIMAL, ["run.name=a#b"]).run.name == "a#b"
    assert parse_run(MINIMAL, ["run.name='a # b'"]).run.name == "a # b"
    for override in ("training.steps=5#6", "training.steps=5 # six", "training.steps=5,"):
        with pytest.raises(ConfigError, match=r"training\.steps"):
            parse_run(MINIMAL, [override])


@pytest.mark.parametrize(
    "override",
    [
        "training.steps=7",
        "training.checkpoint_every=7",
        "training.rank_timeout_s=9000",
        "logging.loggers=['csv']",
        "cluster.trainer_nodes=2",
    ],
)
def test_what_may_change_on_a_resume_makes_no_other_run_of_it_on_redis(override: str) -> None:
    from ludic.runs.pipeline.address import fingerprint

    assert fingerprint(parse_run(MINIMAL, [override])) == fingerprint(parse_run(MINIMAL))
    assert fingerprint(parse_run(MINIMAL, ["run.seed=7"])) != fingerprint(parse_run(MINIMAL))


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
        ("[env]\n", [], ["'env.kind' is missing", "line 1"]),
        ('[[env]]\nkind = "a"\nweigth = 3\n', [], ["weigth", "'weight'", "line 3"]),
        ("schema = 2\n" + MINIMAL, [], ["schema 2", "update your clone"]),
        ("env = [\n", [], ["not valid TOML"]),
        (MINIMAL + "[training]\nlearning_rate = -1.0\n", [], ["greater than 0", "line 4"]),
        (
            MINIMAL + '[model]\ndtype = "bfloat16"\nprecision = "mixed"\n',
            [],
            ["model.precision", "contradicts dtype = 'bfloat16': leave dtype out", "line 5"],
        ),
        (
            MINIMAL + '[model]\ndtype = "float32"\n',
            ["model.precision=bfloat16"],
            ["model.precision", "contradicts dtype = 'float32'", "from the command line"],
        ),
    ],
)
def test_a_wrong_run_is_one_error_that_says_what_to_write(
    text: str, overrides: list[str], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run(text, overrides)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "precision"),
    [
        ([], "float32"),
        (["model.dtype=bfloat16"], "bfloat16"),
        (["model.dtype=float32"], "float32"),
        (["model.precision=mixed"], "mixed"),
        (["model.precision=tf32", "model.dtype=float32"], "tf32"),
        (["model.precision=bfloat16", "model.dtype=bfloat16"], "bfloat16"),
    ],
)
def test_the_precision_goes_to_the_model_and_the_trainer(
    overrides: list[str], precision: Precision
) -> None:
    run = parse_run(MINIMAL, ["model.device=cpu", *overrides])
    assert precision_of(run) == precision
    assert trainer_config(run, "rl", Path()).precision == precision
    model, _ = build_model(run)
    assert {p.dtype for p in model.parameters()} == {weights_dtype(precision)}


def test_a_run_without_a_word_on_a_gpu_has_the_default_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ludic.runs.model.check_device", lambda section: torch.device("cuda"))
    assert precision_of(parse_run(MINIMAL)) == DEFAULT_ON_A_GPU
    assert precision_of(parse_run(MINIMAL, ["model.dtype=float32"])) == "float32"


async def test_an_open_run_holds_the_switch_for_its_products_and_gives_it_back() -> None:
    run = parse_run(MINIMAL, ["model.device=cpu", "model.precision=tf32", "inference.slots=2"])
    async with open_policy(run) as policy:
        assert torch.backends.cuda.matmul.allow_tf32
        assert policy.runtime.client is not None
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize(
    ("settings", "together"),
    [
        ([], (64, 64)),
        (["training.rollouts_per_update=128"], (128, 128)),
        (["training.rollouts_per_update=1000"], (256, 256)),
        (["training.rollouts_per_update=128", "training.concurrency=8"], (8, 8)),
        (["training.rollouts_per_update=128", "inference.slots=32"], (128, 32)),
    ],
)
def test_all_episodes_of_an_update_run_at_once_unless_the_run_says_otherwise(
    settings: list[str], together: tuple[int, int]
) -> None:
    run = parse_run(MINIMAL, settings)
    assert (run.concurrency, run.slots) == together


def float_keys(section: type[Section] = RunConfig, prefix: str = "") -> Iterator[str]:
    """Every key of a run file that takes a number with a fraction."""
    for name, field in section.model_fields.items():
        options = getattr(field.annotation, "__args__", None) or [field.annotation]
        if float in options:
            yield prefix + name
        for option in options:
            if isinstance(option, type) and issubclass(option, Section):
                yield from float_keys(option, f"{prefix}{name}.")


def test_no_number_of_a_run_may_be_nan() -> None:
    keys = list(float_keys())
    assert {"training.learning_rate", "sft.learning_rate", "env.weight", "model.lora.alpha"} <= {
        *keys
    }
    for key in keys:
        with pytest.raises(ConfigError, match=f"{key.rpartition('.')[2]}' = nan"):
            parse_run(MINIMAL, ["sft.data=x"] * key.startswith("sft") + [f"{key}=nan"])


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("env.kwargs.win_reward=nan", "win_reward"),
        ("protocol.kwargs.parser={kind='xml', tag='a', error_reward=nan}", "error_reward"),
        ("algorithm.kwargs.clip=[nan, 1.2]", "0 is not a number"),
        ("model.kwargs.initializer_range=nan", "initializer_range"),
    ],
)
def test_no_argument_of_a_part_may_be_nan(override: str, named: str) -> None:
    with pytest.raises(ConfigError, match=f"{named}.*nan"):
        parse_run(MINIMAL, [override])


@pytest.mark.parametrize("key", ["training.learning_rate", "training.weight_decay"])
def test_what_must_be_finite_is_not_infinite(key: str) -> None:
    with pytest.raises(ConfigError, match="finite"):
        parse_run(MINIMAL, [f"{key}=inf"])


def test_a_gradient_without_a_limit_can_be_said() -> None:
    assert parse_run(MINIMAL, ["training.max_grad_norm=inf"]).training.max_grad_norm == math.inf


def test_deadlines_and_the_fate_of_groups_default_to_those_of_the_engine() -> None:
    training = parse_run(MINIMAL).training
    arguments = inspect.signature(RolloutEngine).parameters
    for name in ("step_timeout_s", "episode_timeout_s", "lost_member"):
        assert getattr(training, name) == arguments[name].default


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


def test_an_infinite_norm_turns_clipping_off_in_the_trainer_too(tmp_path: Path) -> None:
    config = parse_run(MINIMAL, ["training.max_grad_norm=inf"])
    assert trainer_config(config, "rl", tmp_path).max_grad_norm == math.inf
