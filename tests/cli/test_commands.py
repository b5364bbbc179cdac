"""The commands around training: evaluate, compare, generate, replay, play, list, check."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ludic.rollouts import read_rollouts
from ludic.runs import machine
from tests.cli.conftest import Ludic, environment

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


def test_eval_reports_rates_with_intervals_and_writes_them(
    ludic: Ludic, trained: Path, tmp_path: Path
) -> None:
    done = ludic("eval", trained, "eval.episodes=12", "--output", "report.json")
    assert done.code == 0, done.err
    for word in ("right", "wrong", "parse_failure", "truncated", "mean reward", "n=12"):
        assert word in done.out
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["episodes"]) == 12
    assert {"success", "parse_failure", "cut_completion", "truncated"} <= report["rates"].keys()


def test_eval_of_a_finished_run_gives_its_own_figures_again(
    ludic: Ludic, trained: Path, tmp_path: Path
) -> None:
    ludic("eval", trained, "--output", "again.json")
    again = json.loads((tmp_path / "again.json").read_text())
    first = json.loads((trained / "eval" / "after_rl.json").read_text())
    assert again["episodes"] == first["episodes"]


def test_eval_gives_pass_at_k_over_samples_of_the_same_task(ludic: Ludic, trained: Path) -> None:
    done = ludic("eval", trained, "eval.samples_per_task=4", "--pass-at", 1, "--pass-at", 4)
    assert done.code == 0, done.err
    assert "pass@1: " in done.out
    assert "pass@4: " in done.out
    refused = ludic("eval", trained, "--pass-at", 4)
    assert refused.code == 2
    assert "samples per task" in refused.err


def test_eval_of_a_run_file_measures_the_untrained_model(
    ludic: Ludic, letters: Path, trained: Path, tmp_path: Path
) -> None:
    done = ludic("eval", letters, "--output", "before.json")
    assert done.code == 0, done.err
    untrained = json.loads((tmp_path / "before.json").read_text())
    assert (
        untrained["episodes"] == json.loads((trained / "eval/before.json").read_text())["episodes"]
    )


def test_compare_pairs_two_reports_seed_by_seed(ludic: Ludic, trained: Path) -> None:
    done = ludic("eval", "--compare", trained / "eval" / "before.json", trained)
    assert done.code == 0, done.err
    assert "right: B - A = " in done.out
    assert "paired permutation test p = " in done.out
    same = ludic("eval", "--compare", trained, trained)
    assert "right: B - A = +0.000 [+0.000, +0.000], paired permutation test p = 1.0000" in same.out


def test_reports_on_other_seeds_are_not_compared(
    ludic: Ludic, trained: Path, tmp_path: Path
) -> None:
    ludic("eval", trained, "eval.seed=5", "--output", "other.json")
    done = ludic("eval", "--compare", "other.json", trained)
    assert done.code == 2
    assert "same seeds" in done.err


def test_generate_keeps_what_passes_and_counts_the_rest(
    ludic: Ludic, trained: Path, tmp_path: Path
) -> None:
    done = ludic(
        "generate", trained, "--episodes", 40, "--keep", "success", "--output", "good.jsonl"
    )
    assert done.code == 0, done.err
    kept = list(read_rollouts(tmp_path / "good.jsonl"))
    assert all(rollout.total_reward > 0 for rollout in kept)
    assert 0 < len(kept) < 40
    assert f"wrote {len(kept)} of 40 rollouts" in done.out
    assert f"{40 - len(kept)} not success" in done.out


@pytest.mark.parametrize("episodes", [-1, 0])
def test_generate_plays_at_least_one_episode(
    ludic: Ludic, letters: Path, tmp_path: Path, episodes: int
) -> None:
    done = ludic("generate", letters, f"--episodes={episodes}")
    assert done.code == 2
    assert f"--episodes {episodes}: must be at least 1" in done.err
    assert not (tmp_path / "rollouts.jsonl.zst").exists()


def test_generated_data_can_be_trained_on(
    ludic: Ludic, trained: Path, letters: Path, tmp_path: Path
) -> None:
    ludic("generate", trained, "--episodes", 40, "--keep", "success", "--output", "good.jsonl.gz")
    text = letters.read_text().replace('teacher = "letters:teacher"', 'data = "good.jsonl.gz"')
    letters.write_text(text)
    done = ludic("sft", letters, "--out", "imitation")
    assert done.code == 0, done.err
    summary = json.loads((tmp_path / "imitation" / "summary.json").read_text())
    assert summary["right_after_sft"]["value"] > summary["right_before"]["value"]


def test_replay_runs_recorded_episodes_again(ludic: Ludic, trained: Path, tmp_path: Path) -> None:
    shutil.copy(trained.parent / "letters.py", tmp_path)
    log = trained / "rollouts" / "train.jsonl.zst"
    done = ludic("replay", log, "--limit", 5)
    assert done.code == 0, done.out + done.err
    assert "5 of 5 episodes match" in done.out


def test_replay_with_the_model_compares_token_by_token(ludic: Ludic, trained: Path) -> None:
    ludic("generate", trained, "--episodes", 4, "--output", "some.jsonl.zst")
    done = ludic("replay", "some.jsonl.zst", "--model", trained)
    assert done.code == 0, done.out + done.err
    assert "4 of 4 episodes match" in done.out
    assert " tokens compared" in done.out


def test_replay_reports_the_first_divergence_of_a_changed_record(
    ludic: Ludic, trained: Path, tmp_path: Path
) -> None:
    shutil.copy(trained.parent / "letters.py", tmp_path)
    ludic("generate", trained, "--episodes", 8, "--keep", "success", "--output", "some.jsonl")
    recorded = (tmp_path / "some.jsonl").read_text()
    (tmp_path / "changed.jsonl").write_text(recorded.replace("Right.", "Wrong."))
    done = ludic("replay", "changed.jsonl")
    assert done.code == 1
    assert "was 'Wrong.' and is now 'Right.'" in done.out
    assert "0 of " in done.out
    (tmp_path / "changed.jsonl").write_text(recorded.replace("right", "wrong"))
    done = ludic("replay", "changed.jsonl")
    assert done.code == 1
    assert "info['result'] was 'wrong' and is now 'right'" in done.out


def test_play_by_hand_takes_moves_from_the_keyboard(ludic: Ludic) -> None:
    moves = "\n".join(f"{column}{row}" for column in "ABC" for row in "123")
    done = ludic("play", "tic_tac_toe", "opponent=random", "illegal_ends=false", stdin=moves + "\n")
    assert done.code == 0, done.out
    assert "Free: A1 B1 C1" in done.out
    assert "total reward" in done.out


def test_play_that_is_left_says_so(ludic: Ludic) -> None:
    done = ludic("play", "tic_tac_toe")
    assert done.code == 1
    assert "left before the end" in done.out


def test_play_with_a_model_shows_its_words(ludic: Ludic, trained: Path) -> None:
    done = ludic("play", "letters:Letters", "--model", trained, "--seed", 3)
    assert done.code == 0, done.err
    assert "A or B?" in done.out
    assert "model:" in done.out
    assert "total reward" in done.out
    again = ludic("play", "letters:Letters", "--model", trained, "--seed", 3)
    assert again.out == done.out


def test_play_takes_the_environment_of_a_run_folder(ludic: Ludic, trained: Path) -> None:
    done = ludic("play", trained, stdin="A\n")
    assert done.code == 0, done.err
    assert "Right." in done.out


def test_envs_and_algorithms_list_names_with_a_line_each(ludic: Ludic) -> None:
    envs = ludic("envs").out
    assert "tic_tac_toe " in envs
    assert "gsm8k" in envs
    algorithms = ludic("algorithms").out
    for name in ("grpo", "cispo", "sft"):
        line = next(x for x in algorithms.splitlines() if x.split()[0] == name)
        assert len(line.split()) > 3


def test_doctor_checks_the_machine(ludic: Ludic, monkeypatch: pytest.MonkeyPatch) -> None:
    done = ludic("doctor")
    assert done.code == 0, done.out
    for word in ("python", "torch", "transformers", "peft"):
        assert word in done.out
    monkeypatch.setattr(machine, "_OPTIONAL", ("none_such",))
    assert "pip install -e '.[none_such]'" in " ".join(ludic("doctor").out.split())


def test_doctor_compares_sampler_and_trainer_for_a_run(ludic: Ludic, trained: Path) -> None:
    done = ludic("doctor", trained)
    assert done.code == 0, done.out + done.err
    for word in ("one request at a time", "16 at once", "packed", "publish", "all is well"):
        assert word in done.out


def test_doctor_finds_a_sampler_that_is_not_the_trainer(
    ludic: Ludic, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ludic.training.update.policy import Policy

    score = Policy.score

    def off(self, batch, **kwargs):  # type: ignore[no-untyped-def]
        batch.temperatures.mul_(1.5)
        return score(self, batch, **kwargs)

    monkeypatch.setattr(Policy, "score", off)
    done = ludic("doctor", trained)
    assert done.code == 1
    assert "over the budget" in done.out


def test_calibrate_needs_a_gpu_and_says_so(
    ludic: Ludic, letters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = ludic("calibrate", letters)
    assert done.code == 2
    assert "GPU" in done.err


def test_help_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; sys.argv = ['ludic', '--help']\n"
        "from ludic.cli import main\n"
        "try: main()\n"
        "except SystemExit as exc: assert not exc.code\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'pydantic'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert "train" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_plan_prints_a_table_and_the_lines_of_the_cluster(ludic: Ludic, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[model]\nname = "Qwen/Qwen2.5-7B"\n[env]\nkind = "tic_tac_toe"\n'
        "[training]\nrollouts_per_update = 64\nsteps = 20\n"
    )
    done = ludic("plan", "run.toml", "--gpus", "8", "--mode", "async", "--explain")
    assert done.code == 0, done.err
    for word in ("s an update", "[cluster]", "trainer_nodes = 1", "assumed:", "data sheet:"):
        assert word in done.out
    small = ludic("plan", "run.toml", "--gpus", "1", "--gpu", "a100-80")
    assert small.code == 1
    assert "no split of 1" in small.out
    assert ludic("plan", "run.toml", "--gpus", "some").code == 2


@pytest.mark.integration
def test_calibrate_writes_a_profile_that_plan_reads(ludic: Ludic, letters: Path) -> None:
    done = ludic("calibrate", letters, "--profile", "mine.json")
    assert done.code == 0, done.err
    done = ludic("plan", letters, "--gpu", "mine.json", "--gpus", "1", "--explain")
    assert done.code == 0, done.err
    assert "ludic calibrate" in done.out
