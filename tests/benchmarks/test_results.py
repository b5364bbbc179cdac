"""A page of results from run folders, as they come from another machine."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import ludic
from benchmarks.results import main
from benchmarks.series import Point, grouped, reached, read_all, spread

SIZES = {"hidden_size": 32, "heads": 2, "kv_heads": 1, "layers": 1}


def train(out: Path, seed: int, rate: float, **settings: Any) -> None:
    ludic.train(
        "key_door",
        out=out,
        seed=seed,
        model={"name": "tiny", "kwargs": SIZES},
        algorithm=ludic.reinforce(),
        inference={"sampling": {"max_tokens": 4}},
        training={
            **{"rollouts_per_update": 2, "max_steps": 1, "max_seq_len": 512},
            "learning_rate": rate,
        },
        eval={"episodes": 2},
        logging={"loggers": []},
        steps=3,
        **settings,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs of which only the small files were fetched: two seeds, and another rate."""
    made, found = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("fetched")
    for name, seed, rate in [("slow-0", 0, 1e-5), ("slow-1", 1, 1e-5), ("fast-0", 0, 1e-3)]:
        train(made / name, seed, rate)
        (found / name / "eval").mkdir(parents=True)
        for file in ("run.json", "origin.json", "metrics.jsonl", "summary.json"):
            shutil.copy(made / name / file, found / name / file)
        for report in (made / name / "eval").iterdir():
            shutil.copy(report, found / name / "eval")
    shutil.rmtree(made)
    return found


def test_runs_that_differ_in_the_seed_alone_are_one_line(runs: Path) -> None:
    groups = grouped(read_all([str(runs)]))
    assert {name: [run.seed for run in found] for name, found in groups.items()} == {
        "training.learning_rate=0.001": [0],
        "training.learning_rate=1e-05": [0, 1],
    }
    named = grouped(read_all([f"all of them={runs}/*"]))
    assert [run.seed for run in named["all of them"]] == [0, 0, 1]


def test_a_page_has_tables_curve_settings_command_versions_and_date(
    runs: Path, tmp_path: Path
) -> None:
    (tmp_path / "notes.md").write_text("What it **shows**.\n")
    out = tmp_path / "docs/results/keys.md"
    words = ["page", f"slow={runs}/slow-*", f"fast={runs}/fast-0", "--title", "Keys"]
    words += ["--out", str(out), "--goal", "-1", "--goal", "7"]
    main([*words, "--text", str(tmp_path / "notes.md")])
    text = out.read_text()
    assert text.startswith("# Keys\n\nWhat it **shows**.\n\n<!--")
    header, _, slow, fast = re.findall(r"^\|.*\|$", text, re.M)[:4]
    assert "| seeds | updates | s per update | mean of the last 10 |" in header
    assert re.match(r"\| slow \| 2 \| 3 \| [\d.]+ \| -0\.\d+ \(-0\.\d+ to -0\.\d+\) \|", slow)
    assert re.match(r"\| fast \| 1 \| 3 \| [\d.]+ \| -0\.\d+ \| -0\.\d+ \[", fast)
    assert slow.endswith(
        "| 3 updates, {} s | 0 of 2 |".format(re.findall(r", ([\d.]+) s", slow)[0])
    )
    assert "| slow | 1 | after rl | 2 |" in text
    assert "(../images/keys.png)" in text
    assert (tmp_path / "docs/images/keys.png").stat().st_size > 1000
    versions = json.loads((runs / "fast-0/origin.json").read_text())
    assert f"torch {versions['versions']['torch']}" in text
    assert versions["started"][:10] in text
    assert '"learning_rate": 0.001' in text
    assert "python -m benchmarks.results page" in text
    assert str(tmp_path) not in text
    assert str(runs) not in text


def test_a_page_that_is_made_again_is_the_same_and_keeps_its_words(
    runs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "keys.md"
    words = ["page", str(runs), "--title", "Keys", "--out", str(out)]
    main(words)
    image = (tmp_path / "keys.png").read_bytes()
    out.write_text(out.read_text().replace("# Keys\n", "# Keys\n\nBy hand.\n"))
    main(words)
    once = out.read_text()
    main(words)
    assert out.read_text() == once
    assert once.count("By hand.") == 1
    assert (tmp_path / "keys.png").read_bytes() == image
    out.write_text("A page by hand.")
    with pytest.raises(SystemExit, match="has no mark"):
        main(words)
    assert out.read_text() == "A page by hand."


def test_a_folder_without_evaluations_and_origin_will_do(runs: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in ("run.json", "metrics.jsonl"):
        shutil.copy(runs / "fast-0" / file, bare / file)
    main(["page", str(bare), "--title", "Bare", "--out", str(tmp_path / "bare.md")])
    text = (tmp_path / "bare.md").read_text()
    assert "Held-out" not in text
    assert '"learning_rate": 0.001' in text


def test_a_study_of_several_programs(tmp_path: Path) -> None:
    points = [[0.5 * i, 0.1 * i] for i in range(12)]
    runs = [{"name": n, "seed": s, "points": points} for n in ("ours", "theirs") for s in (0, 1)]
    (tmp_path / "study.json").write_text(json.dumps({"runs": runs}))
    out = tmp_path / "study.md"
    words = ["page", str(tmp_path / "study.json"), "--title", "Study", "--out", str(out)]
    main([*words, "--goal", "0.5"])
    line = "| theirs | 2 | 12 | 0.50 | 0.650 (0.650 to 0.650) | 7 updates, 3.0 s |"
    assert line in out.read_text()


def test_a_goal_is_reached_by_the_mean_of_three() -> None:
    points = [Point(float(i), r) for i, r in enumerate([0.0, 9.0, 0.0, 0.0, 1.0, 1.0, 1.0])]
    assert reached(points, 1.0) == (3, 2.0)
    assert reached(points[3:], 1.0) == (4, 6.0)
    assert reached(points[:2], 0.0) is None


def test_spread_of_one_is_itself() -> None:
    assert spread([0.5], "{:.1f}".format) == "0.5"
    assert spread([0.5, 1.5], "{:.1f}".format) == "1.0 (0.5 to 1.5)"


@pytest.mark.parametrize("metrics", ["", '{"step": 1}\n'])
def test_what_cannot_be_read_is_said(runs: Path, tmp_path: Path, metrics: str) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(runs / "fast-0/run.json", tmp_path / "run")
    (tmp_path / "run/metrics.jsonl").write_text(metrics)
    with pytest.raises(SystemExit, match=r"has no train/reward_mean"):
        read_all([str(tmp_path / "run")])
    with pytest.raises(SystemExit, match="there is nothing at"):
        read_all([str(tmp_path / "away")])


def test_the_pages_of_real_models_say_what_was_cut_and_fill_the_readme(
    runs: Path, tmp_path: Path
) -> None:
    fetched, root = tmp_path / "fetched", tmp_path / "repository"
    shutil.copytree(runs, fetched)
    (root / "docs").mkdir(parents=True)
    (root / "README.md").write_text("# Ludic\n\n```bash\nmake test\n```\n")
    (root / "mkdocs.yml").write_text("nav:\n  - Results:\n      - results/gsm8k.md\n")
    points = [[2.0 * i, 0.1 * i] for i in range(1, 4)]
    peer = {"runs": [{"name": "TRL", "seed": 0, "points": points}]}
    (fetched / "trl").mkdir()
    (fetched / "trl" / "trl.json").write_text(json.dumps(peer))
    ours = {
        "seed": 0,
        "state": "done",
        "beside": 0,
        "command": "python -m ludic train /a/b.toml",
    }
    entries = {
        "slow-0": {**ours, "pages": {"gsm8k": "Ludic, all weights"}},
        "slow-1": {**ours, "pages": {"gsm8k": "Ludic, all weights"}, "beside": 3},
        "fast-0": {**ours, "pages": {"algorithms": "GRPO"}, "beside": 4},
        "trl": {**ours, "pages": {"gsm8k": "TRL, vLLM colocated"}},
        "late": {"seed": 2, "state": "cut", "pages": {"algorithms": "SPO"}, "why": "not begun"},
    }
    (fetched / "plan.json").write_text(json.dumps({"runs": entries, "notes": ["On a CPU."]}))
    main(["real", str(fetched), "--root", str(root), "--readme"])
    pages = {path.stem: path.read_text() for path in (root / "docs/results").iterdir()}
    assert pages.keys() == {"index", "gsm8k", "algorithms"}  # the others have no run
    assert "| Ludic, all weights | 2 | 3 |" in pages["gsm8k"]
    assert "Alone on the GPU: Ludic, all weights (seed 0), TRL, vLLM colocated" in pages["gsm8k"]
    assert "- `late` (SPO, seed 2), cut: not begun" in pages["algorithms"]
    assert "shared one GPU" in pages["algorithms"]
    assert "On a CPU." in pages["algorithms"]
    assert "3 updates in 0.1 min" in pages["index"]
    assert "train b.toml" in pages["index"]
    assert "- `late` (SPO" in pages["index"]
    nav = (root / "mkdocs.yml").read_text()
    assert nav.endswith(
        "- results/index.md\n      - results/algorithms.md\n      - results/gsm8k.md\n"
    )
    readme = (root / "README.md").read_text()
    assert "[GSM8K](docs/results/gsm8k.md): Ludic, all weights" in readme
    assert readme.index("docs/images/gsm8k.png") < readme.index("make test")

    page = root / "docs/results/gsm8k.md"
    page.write_text(page.read_text().replace("A question of GSM8K", "What we found. A question"))
    main(["real", str(fetched), "--root", str(root), "--readme"])
    assert "What we found. A question" in page.read_text()
    assert (root / "README.md").read_text() == readme
    assert (root / "mkdocs.yml").read_text() == nav
