"""A run that could never train is refused at once, in words of the run file, and leaves nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ludic.envs.tic_tac_toe import TicTacToeEnv
from ludic.errors import ConfigError
from ludic.interaction import MultiAgentProtocol
from ludic.rollouts import read_rollouts
from ludic.runs.check import check_parts
from ludic.runs.settings import parse_run
from ludic.runs.storage import locked
from tests.cli.conftest import Ludic
from tests.cli.test_bad_input import check

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["inference.sampling.temperature=0"], ["inference.sampling.temperature=0", "above 0"]),
        (["inference.backend=vllm", "inference.sampling.top_p=0.9"], ["top_k", "servers"]),
        (["algorithm.name=spo", "algorithm.kwargs={}"], ["'spo'", "Letters", "task_key()"]),
        (["algorithm.name=opd", "algorithm.kwargs={}"], ["'opd'", "[[teacher]]"]),
        (["algorithm.kwargs.kl_coeff=0.1"], ["kl_coeff=0", "[reference]", '"start"']),
        (["algorithm.kwargs.clip=[1,2,3]"], ["'grpo'", "[1, 2, 3]"]),
        (["protocol.kind=single"], ["'single'", "'single_agent'"]),
        (["protocol.kwargs.parser=xmll"], ["'xmll'", "'xml'"]),
        (["protocol.kind=multi_agent", "protocol.kwargs.parser=xmll"], ["'xmll'", "'xml'"]),
        (["eval.protocol.kwargs.parser=xmll"], ["'xmll'", "'xml'"]),
        (["model.tool_parser=hermess"], ["'hermess'", "'hermes'"]),
        (["model.kwargs.layers=abc"], ["model.kwargs", "abc"]),
        (["model.kwargs.words=3"], ["model.kwargs"]),
        (["training.schedule=linear", "training.warmup_steps=4"], ["training.warmup_steps=4"]),
        (["training.micro_token_budget=32"], ["micro_token_budget=32", "max_seq_len=64"]),
        (["training.steps=0", "sft.steps=0"], ["training.steps", "sft.steps"]),
        (["sft.teacher=../x"], ["'../x'", "module:function"]),
        (["model.device=mps"], ["model.device='mps'", "cpu or cuda"]),
        (["model.device=meta"], ["model.device='meta'", "cpu or cuda"]),
        (["training.weight_decay=inf"], ["training.weight_decay", "finite"]),
        (["env.kind=key_door", "env.kwargs.step_cost=nan"], ["step_cost", "nan"]),
        (["training.lost_member=keep"], ["training.lost_member", "'keep_partial'"]),
    ],
)
def test_a_run_that_could_never_train_leaves_no_folder(
    ludic: Ludic, letters: Path, tmp_path: Path, overrides: list[str], words: list[str]
) -> None:
    check(ludic("train", letters, *overrides, "--out", "run"), *words)
    assert not (tmp_path / "run").exists()


def test_a_delegating_run_has_its_sub_agents_checked() -> None:
    run = """
[env]
kind = "tic_tac_toe"
[protocol]
kind = "delegating"
[protocol.kwargs.sub_agents.solver]
description = "Solves."
"""
    check_parts(parse_run(run))
    with pytest.raises(LookupError, match="'xmll'"):
        check_parts(parse_run(run, ["protocol.kwargs.sub_agents.solver.parser=xmll"]))


def test_an_environment_that_refuses_its_arguments_is_one_sentence(
    ludic: Ludic, letters: Path, tmp_path: Path
) -> None:
    module = tmp_path / "letters.py"
    module.write_text(module.read_text().replace("self.right = right", "self.right = int(right)"))
    check(ludic("train", letters, "--out", "run"), "letters:Letters", "'A'")


def test_spo_trains_where_the_environment_names_its_tasks(
    ludic: Ludic, letters: Path, tmp_path: Path
) -> None:
    module = tmp_path / "letters.py"
    named = '    def task_key(self):\n        return "the question"\n\n    def env_reset'
    module.write_text(module.read_text().replace("    def env_reset", named))
    spo = ["algorithm.name=spo", "algorithm.kwargs={}", "training.steps=1"]
    done = ludic("train", letters, *spo, "--out", "run")
    check(done, "'spo'", "[0, 1]", "-0.1", "algorithm.kwargs.returns", "error_reward")
    assert not (tmp_path / "run").exists()
    # One token is no answer: every return is the parser's penalty.
    spo += [
        "algorithm.kwargs.returns=[-0.1, 1.0]",
        "inference.sampling.max_tokens=1",
        "sft.steps=0",
    ]
    done = ludic("train", letters, *spo, "--out", "run")
    assert done.code == 0, done.err
    metrics = json.loads((tmp_path / "run/metrics.jsonl").read_text())
    assert metrics["train/reward_mean"] == pytest.approx(-0.1)


def test_spo_is_refused_where_the_environment_says_that_returns_leave_its_interval() -> None:
    run = '[env]\nkind = "key_door"\n[algorithm]\nname = "spo"\n'
    run += "[protocol]\nkwargs = { parser = { kind = 'text', error_reward = 0.0 } }\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ludic.envs.key_door.KeyDoorEnv.task_key", lambda self: "level")
        with pytest.raises(ConfigError, match=r"from -1.4 to 0.99: set algorithm.kwargs.returns"):
            check_parts(parse_run(run))
        check_parts(parse_run(run, ["algorithm.kwargs.returns=[-1.4, 1]"]))


def test_what_is_left_of_a_group_is_trained_on_where_the_run_says_so(
    ludic: Ludic, letters: Path, tmp_path: Path
) -> None:
    module = tmp_path / "letters.py"
    failing = "next(steps) % 5 or 1 / 0\n        right = action"
    text = module.read_text().replace("right = action", failing)
    module.write_text("from itertools import count\n\nsteps = count(1)\n" + text)
    done = ludic("train", letters, "training.lost_member=keep_partial", "--out", "run")
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert len(lines) == 4
    log = read_rollouts(tmp_path / "run/rollouts/train.jsonl.zst")
    assert any("ZeroDivisionError" in (rollout.error or "") for rollout in log)


@pytest.mark.parametrize("setting", ["top_p=0.6", "top_k=2", "min_p=0.3"])
def test_truncated_sampling_is_trained_on_with_the_ids_that_were_kept(
    ludic: Ludic, letters: Path, tmp_path: Path, setting: str
) -> None:
    """The trainer renormalises over them, so that its log-probs are the sampler's."""
    done = ludic("train", letters, f"inference.sampling.{setting}", "--out", "run")
    assert done.code == 0, done.err
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert len(lines) == 4
    assert max(line["train/mismatch_max"] for line in lines) < 1e-4
    assert max(line["train/grad_norm"] for line in lines) > 0


def test_a_cold_start_of_no_steps_is_skipped(ludic: Ludic, letters: Path, tmp_path: Path) -> None:
    done = ludic("train", letters, "sft.steps=0", "training.steps=1", "--out", "run")
    assert done.code == 0, done.err
    reports = {path.name for path in (tmp_path / "run/eval").iterdir()}
    assert reports == {"before.json", "after_rl.json"}
    assert not (tmp_path / "run/checkpoints/sft").exists()


def test_sft_needs_a_cold_start(ludic: Ludic, letters: Path, tmp_path: Path) -> None:
    text = letters.read_text()
    start, end = text.index("[sft]"), text.index("[algorithm]")
    letters.write_text(text[:start] + text[end:])
    check(ludic("sft", letters, "--out", "run"), "letters.toml", "[sft]")
    assert not (tmp_path / "run").exists()


def test_a_resume_that_could_not_train_changes_nothing(
    ludic: Ludic, letters: Path, tmp_path: Path
) -> None:
    settings = ["training.schedule=linear", "training.warmup_steps=1", "training.steps=2"]
    assert ludic("train", letters, *settings, "sft.steps=1", "--out", "run").code == 0
    before = {path: path.read_bytes() for path in (tmp_path / "run").glob("**/*.json")}
    check(ludic("train", "--resume", "run", "training.steps=1"), "training.warmup_steps=1")
    assert {path: path.read_bytes() for path in (tmp_path / "run").glob("**/*.json")} == before


def test_a_resumed_dry_run_prints_the_run_and_changes_nothing(
    ludic: Ludic, trained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    before = {path: path.read_bytes() for path in folder.glob("**/*") if path.is_file()}
    done = ludic("train", "--resume", folder, "training.steps=9", "--dry-run")
    assert done.code == 0, done.err
    assert json.loads(done.out)["training"]["steps"] == 9
    assert {path: path.read_bytes() for path in folder.glob("**/*") if path.is_file()} == before


def test_a_cold_start_from_data_is_resumed_from_another_working_directory(
    ludic: Ludic, trained: Path, letters: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(trained / "sft.jsonl.zst", tmp_path / "lessons.jsonl.zst")
    text = letters.read_text()
    letters.write_text(text.replace('teacher = "letters:teacher"', 'data = "lessons.jsonl.zst"'))
    assert ludic("sft", letters, "sft.steps=1", "--out", "run").code == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    done = ludic("train", "--resume", "../run", "training.steps=1")
    assert done.code == 0, done.err


def test_a_micro_batch_that_the_run_sets_must_hold_the_longest_sample() -> None:
    text = '[env]\nkind = "tic_tac_toe"\n[training]\nmax_seq_len = 20000\n'
    check_parts(parse_run(text))
    with pytest.raises(ConfigError, match="micro_token_budget=16384 is below max_seq_len=20000"):
        check_parts(parse_run(text, ["training.micro_token_budget=16384"]))


def test_eval_refuses_what_it_cannot_give_before_it_plays(
    ludic: Ludic, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def played(*_: object) -> None:
        raise AssertionError("episodes were played")

    monkeypatch.setattr("ludic.runs.playing.evaluate_run", played)
    refused = ludic("eval", trained, "--pass-at", 0)
    assert refused.code == 2
    assert "--pass-at" in refused.err
    check(ludic("eval", trained, "--output", "no/such/report.json"), "no/such")
    check(ludic("eval", trained, "--output", tmp_path), "is a folder")


def test_a_report_is_written_also_where_pass_at_k_has_too_few_samples(
    ludic: Ludic, trained: Path, tmp_path: Path
) -> None:
    done = ludic("eval", trained, "eval.episodes=2", "--pass-at", 4, "--output", "report.json")
    check(done, "samples per task")
    assert len(json.loads((tmp_path / "report.json").read_text())["episodes"]) == 2


def test_a_run_folder_from_before_small_budgets_were_refused_can_be_resumed(
    ludic: Ludic, trained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    data = json.loads((folder / "run.json").read_text())
    data["training"]["micro_token_budget"] = data["training"]["max_seq_len"] - 1
    (folder / "run.json").write_text(json.dumps(data))
    done = ludic("train", "--resume", folder, "--dry-run")
    assert done.code == 0, done.err
    training = json.loads(done.out)["training"]
    assert training["micro_token_budget"] == training["max_seq_len"]


def test_players_are_made_for_the_seats_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def player(seat: object) -> Any:
        asked.append(str(seat))
        return lambda *_: "A1"

    def protocol(kind: str, runtime: Any, **_: Any) -> MultiAgentProtocol:
        return MultiAgentProtocol({}, default=player)

    monkeypatch.setattr("ludic.runs.check_episodes.make_protocol", protocol)
    check_parts(parse_run('[env]\nkind = "tic_tac_toe_two_player"\n'))
    assert set(asked) == {"X", "O"}


class Closable(TicTacToeEnv):
    """Counts how many of it are open."""

    open: ClassVar[int] = 0
    built: ClassVar[int] = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        Closable.open += 1
        Closable.built += 1

    def close(self) -> None:
        Closable.open -= 1


@pytest.mark.parametrize("sound", [True, False])
def test_environments_that_are_built_for_checking_are_closed(sound: bool) -> None:
    Closable.open = Closable.built = 0
    kind = f"{__name__}:Closable"
    overrides = [] if sound else ["protocol.kwargs.parser=xmll"]
    run = parse_run(f'[env]\nkind = "{kind}"\n[[eval.env]]\nkind = "{kind}"\n', overrides)
    if sound:
        check_parts(run)
    else:
        with pytest.raises(LookupError, match="'xmll'"):
            check_parts(run)
    assert Closable.built == 2
    assert Closable.open == 0


def test_a_run_that_another_process_trains_is_not_resumed(
    ludic: Ludic, trained: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    before = {path: path.read_bytes() for path in folder.glob("**/*") if path.is_file()}
    with locked(folder):
        done = ludic("train", "--resume", "copy", "training.steps=5")
        check(done, "copy is being trained by process", "since")
    assert {p: p.read_bytes() for p in folder.glob("**/*") if p.is_file()} == before
