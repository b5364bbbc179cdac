"""A run file names parts of one's own, and the plain command resumes such a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import LETTERS, RUN, Ludic
from tests.cli.test_bad_input import check
from tests.forked import Forked

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

PARTS = '''\
from ludic import get_tool, grpo, register_parser, register_tool, text_parser
from ludic.interaction.factories import single_agent_protocol

from letters import Letters


def make_env(right="A"):
    return Letters(right)


def make_protocol(runtime, **options):
    """Uses the tools that it names."""
    assert get_tool("adder")(1, 2) == 3
    return single_agent_protocol(runtime, **options)


def make_mine(group_size=4):
    return grpo(group_size)


@register_tool("adder")
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def subtract(a: int, b: int) -> int:
    """Subtracts one number from another."""
    return a - b


@register_parser("mine")
def make_parser():
    return text_parser()
'''


def ludic_in(where: Path, *arguments: str) -> None:
    process = Forked("ludic", *arguments, where=where)
    text, _ = process.communicate(timeout=500)
    assert process.returncode == 0, text


def test_a_run_with_parts_by_place_by_name_and_by_entry_point_is_trained_and_resumed(
    tmp_path: Path,
) -> None:
    (tmp_path / "letters.py").write_text(LETTERS)
    (tmp_path / "parts.py").write_text(PARTS)
    run = (
        RUN.replace('name = "letters"', 'name = "letters"\nimports = ["parts"]')
        .replace('kind = "letters:Letters"', 'kind = "parts:make_env"\nkwargs = { right = "B" }')
        .replace("[algorithm]", '[algorithm]\nname = "announced"')
    )
    run += '[protocol]\nkind = "parts:make_protocol"\n[protocol.kwargs]\nparser = "mine"\n'
    run += 'agent = "react"\ntools = ["adder", "parts:subtract"]\n'
    # The schemas of the tools are shown to the model.
    run = run.replace("max_position_embeddings = 64", "max_position_embeddings = 1024")
    run = run.replace("max_context_tokens = 48", "max_context_tokens = 1000")
    run = run.replace("max_seq_len = 64", "max_seq_len = 1000")
    (tmp_path / "run.toml").write_text(run)
    announced = tmp_path / "mine-1.0.dist-info"
    announced.mkdir()
    (announced / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (announced / "entry_points.txt").write_text("[ludic.algorithms]\nannounced = parts:make_mine\n")
    few = ["sft.steps=1", "eval.episodes=2", "training.steps=1"]
    ludic_in(tmp_path, "train", "run.toml", *few, "--out", "run")
    # From another folder, by the folder alone.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    ludic_in(elsewhere, "train", "--resume", "../run", "training.steps=2")
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["train/step"] for line in lines] == [1, 2]


def test_a_module_to_import_that_is_not_there_is_named(ludic: Ludic, letters: Path) -> None:
    check(ludic("train", letters, "run.imports=['nowhere']"), "run.imports", "'nowhere'")


def test_arguments_that_a_part_does_not_have_are_answered_with_those_it_has(
    ludic: Ludic, letters: Path
) -> None:
    done = ludic("train", letters, "model.kwargs.hiden_size=3")
    check(done, "no argument 'hiden_size'", "did you mean 'hidden_size'?", "layers", "words")
    done = ludic("train", letters, "algorithm.kwargs.groupsize=3")
    check(done, "'grpo'", "did you mean 'group_size'?", "normalize_adv")


def test_an_environment_that_raises_when_it_is_made_is_a_sentence(
    ludic: Ludic, letters: Path, tmp_path: Path
) -> None:
    module = tmp_path / "letters.py"
    module.write_text(module.read_text().replace("self.right = right", "1 / 0"))
    done = ludic("train", letters, "--out", "run")
    check(done, "letters:Letters", "cannot be made: ZeroDivisionError: division by zero")
    assert not (tmp_path / "run").exists()


def test_weights_that_were_cut_are_a_sentence(ludic: Ludic, letters: Path, tmp_path: Path) -> None:
    from ludic.inference.tiny import tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tiny_model(hidden_size=16, layers=1, heads=2, kv_heads=1).save_pretrained(tmp_path / "cut")
    tokenizer.save_pretrained(tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    arguments = [letters, "model.name=cut", "model.kwargs={}", "--out", "run"]
    check(ludic("train", *arguments), "cut", "damaged")
    assert not (tmp_path / "run").exists()
    (tmp_path / "cut" / "tokenizer.json").unlink()
    (tmp_path / "cut" / "tokenizer_config.json").unlink()
    done = ludic("train", *arguments)
    check(done, "model.name=")
    assert not done.err.rstrip().endswith(":")


def test_generating_no_episodes_is_refused(ludic: Ludic, letters: Path) -> None:
    check(ludic("generate", letters, "--episodes", "-1"), "--episodes -1", "at least 1")


def test_a_run_file_in_another_folder_names_an_earlier_run_beside_it(
    ludic: Ludic, trained: Path, tmp_path: Path
) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "first").symlink_to(trained)
    (tmp_path / "letters.py").write_text(LETTERS)
    (tmp_path / "deep" / "letters.py").write_text(LETTERS)
    start = RUN.index("kwargs = {")
    run = RUN[:start] + 'name = "first:step-4"\n' + RUN[RUN.index("[env]") :]
    (tmp_path / "deep" / "run.toml").write_text(run)
    few = ["sft.steps=0", "eval.episodes=2", "training.steps=1"]
    done = ludic("train", "deep/run.toml", *few, "--out", "second")
    assert done.code == 0, done.err
    stored = json.loads((tmp_path / "second/run.json").read_text())
    assert stored["model"]["name"] == f"{tmp_path}/deep/first:step-4"
    assert ludic("eval", tmp_path / "second", "eval.episodes=2").code == 0
