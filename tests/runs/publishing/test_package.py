"""What would be uploaded: it loads again, and its card states the run."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ludic.cli.app import app
from ludic.errors import ConfigError
from ludic.inference.tiny import tiny_tokenizer
from ludic.runs.model import build_model
from ludic.runs.publishing.card import hub_name, in_public
from ludic.runs.publishing.push import write_push
from ludic.runs.storage import RunFolder
from tests.runs.publishing.conftest import train

SAID = [{"role": "user", "content": "Hello"}]


def logits(model: torch.nn.Module, folder: Path) -> torch.Tensor:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template(SAID, return_dict=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return model(input_ids=ids).logits  # type: ignore[no-any-return]


def trained(run: Path) -> torch.nn.Module:
    folder = RunFolder.open(run)
    return build_model(folder.config(), folder.weights())[0].eval()


def test_a_checkpoint_loads_again_with_transformers(run_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    write_push(run_folder, "me/keys", out)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(logits(model, out), logits(trained(run_folder), out))
    assert (out / "chat_template.jinja").read_text() == tiny_tokenizer().chat_template


def test_an_adapter_loads_again_with_peft(
    adapter_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import AutoPeftModelForCausalLM

    out, base = tmp_path / "out", tmp_path / "me/base"
    write_push(adapter_run, "me/adapter", out, base_model="me/base")
    said = json.loads((out / "adapter_config.json").read_text())
    assert said["base_model_name_or_path"] == "me/base"
    wrapped = trained(adapter_run)
    config = RunFolder.open(adapter_run).config()
    bare = config.model.model_copy(update={"lora": None})
    unwrapped = build_model(config.model_copy(update={"model": bare}))[0]
    unwrapped.save_pretrained(base)  # type: ignore[operator]
    monkeypatch.chdir(tmp_path)  # where the base model is found under its name
    model = AutoPeftModelForCausalLM.from_pretrained(out)
    assert torch.allclose(logits(model, out), logits(wrapped, out), atol=1e-6)
    card = (out / "README.md").read_text()
    assert "library_name: peft\n" in card
    assert "base_model: me/base\n" in card
    assert "AutoPeftModelForCausalLM" in card


def test_an_adapter_can_be_published_merged(adapter_run: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    out = tmp_path / "out"
    names = write_push(adapter_run, "me/adapter", out, merged=True)
    assert "model.safetensors" in names
    assert not any(name.startswith("adapter") for name in names)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert torch.allclose(logits(model, out), logits(trained(adapter_run), out), atol=1e-5)


def test_an_adapter_whose_base_nobody_has_is_refused(adapter_run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--base-model OWNER/NAME, or publish both .* --merged"):
        write_push(adapter_run, "me/adapter", tmp_path / "out")


def test_merged_needs_an_adapter(run_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--merged is for the run folder of an adapter"):
        write_push(run_folder, "me/keys", tmp_path / "out", merged=True)


def test_a_card_states_the_run(run_folder: Path, tmp_path: Path) -> None:
    write_push(run_folder, "me/keys", tmp_path / "out", revision="v1")
    card = (tmp_path / "out/README.md").read_text()
    reports = RunFolder.open(run_folder)
    before = json.loads((reports.evals / "before.json").read_text())["reward"]
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "2 updates of `reinforce` on `key_door`, seed 0" in card
    assert "checkpoint `rl/step-00000002`" in card
    assert f"{before['value']:.3f} [{before['low']:.3f}, {before['high']:.3f}]" in card
    assert "| after rl | 2 |" in card
    assert "| updates | 2 |" in card
    assert '"max_tokens": 4' in card
    assert '"temperature"' not in card  # a default
    assert 'from_pretrained("me/keys", revision="v1")' in card
    assert f"torch {version('torch')}" in card


def test_a_cold_start_and_an_earlier_checkpoint_say_what_they_are(tmp_path: Path) -> None:
    run = train(
        tmp_path / "run",
        steps=2,
        sft={"teacher": lambda obs, rng: "up", "steps": 1, "examples": 2, "batch_size": 2},
    )
    write_push(f"{run}:sft", "me/keys", tmp_path / "sft")
    card = (tmp_path / "sft/README.md").read_text()
    assert "1 supervised updates, then 2 updates of `reinforce`" in card
    assert "checkpoint `sft/step-00000001`" in card
    assert "| after sft |" in card
    assert "| after rl |" not in card
    assert "this checkpoint is an earlier one" in card


def test_a_plain_folder_has_a_plain_card(run_folder: Path, tmp_path: Path) -> None:
    model = next(run_folder.glob("checkpoints/rl/step-*/model"))
    names = write_push(model, "me/keys", tmp_path / "out")
    assert "ludic_run.json" not in names
    assert "## Settings" not in (tmp_path / "out/README.md").read_text()
    with pytest.raises(ConfigError, match="holds no model"):
        write_push(run_folder / "eval", "me/keys", tmp_path / "more")
    with pytest.raises(ConfigError, match="neither a run folder nor"):
        write_push(tmp_path / "away", "me/keys", tmp_path / "more")


def test_the_command_writes_the_folder_and_never_over_another(
    run_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ["push", str(run_folder), "me/keys", "--dry-run", "--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert (out / "README.md").is_file()
    with pytest.raises(ConfigError, match="exists already"):
        CliRunner().invoke(app, words, catch_exceptions=False)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("/data/me/models/smollm2", "smollm2"),
        ("~/models/smollm2/", "smollm2"),
        ("model.name=/data/x", "model.name=x"),
        ("runs/first:sft", "runs/first:sft"),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("my_parts:subtract", "my_parts:subtract"),
        ("http://10.0.0.3:8000", "a server"),
        ("either/or", "either/or"),
        ("<b>bold</b>", "<b>bold</b>"),
        ({"servers": ["http://a"], "slots": 4}, {"slots": 4}),
        ({"player": [{"api_key_file": "/k", "name": "x"}]}, {"player": [{"name": "x"}]}),
    ],
)
def test_what_is_said_in_public(said: object, shown: object) -> None:
    assert in_public(said) == shown


def test_names_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub_name("owner/name") == "owner/name"
    assert hub_name("tiny") is None
    assert hub_name("/owner/name") is None
    (tmp_path / "owner/name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_name("owner/name") is None
