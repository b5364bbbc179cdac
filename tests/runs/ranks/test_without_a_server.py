"""Two gloo ranks and no server: a small model is sampled from a copy, a cold start from nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from ludic.distributed.local import LocalCopyPublisher
from ludic.errors import ConfigError
from ludic.inference import LocalChatClient
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.runs import ranks
from ludic.runs.ranks import NoSampler, gathered_copy, samples
from ludic.runs.settings import parse_run
from ludic.sharding.ranks import Launched
from ludic.sharding.weights import ModelWeights
from tests.forked import run_ranks
from tests.runs.ranks.test_command import LESSONS, reports

RUN = """\
[model]
name = "tiny"
device = "cpu"
kwargs = { hidden_size = 32, heads = 2, kv_heads = 1, layers = 1 }

[env]
kind = "tic_tac_toe"

[protocol]
kwargs = { parser = { kind = "xml", tag = "move" } }

[inference.sampling]
max_tokens = 24

[sft]
teacher = "lessons:teacher"
examples = 8
steps = 2
batch_size = 8
learning_rate = 0.01

[algorithm]
kwargs = { group_size = 4 }

[training]
steps = 2
rollouts_per_update = 8
learning_rate = 0.01
max_seq_len = 1024
checkpoint_every = 1

[eval]
episodes = 2
"""


def write(where: Path, more: str = "") -> None:
    (where / "lessons.py").write_text(LESSONS)
    (where / "run.toml").write_text(RUN + more)


@pytest.mark.integration
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("adapter", [False, True])
def test_two_cpu_ranks_sample_from_a_gathered_copy(tmp_path: Path, adapter: bool) -> None:
    write(tmp_path, "\n[model.lora]\nrank = 2\n" if adapter else "")
    out = run_ranks("ludic", "train", "run.toml", "--out", "two", where=tmp_path)
    assert out.count("sampled from a copy that is gathered on rank 0 after every update") == 1
    lines = [json.loads(line) for line in (tmp_path / "two/metrics.jsonl").open()]
    trained = [line for line in lines if "train/step" in line]
    assert [line["train/step"] for line in trained] == [1, 2]
    # What was sampled from the copy is what the ranks compute with their shards.
    assert all(line["train/mismatch_max"] < 1e-3 for line in trained)
    assert all(line["train/staleness_max"] == 0 for line in trained)
    manifest = json.loads((tmp_path / "two/checkpoints/rl/step-00000002/manifest.json").read_text())
    assert manifest["world_size"] == 2
    kept = {path.name for path in (tmp_path / "two/eval").iterdir()}
    assert kept == {"before.json", "after_sft.json", "after_rl.json"}


@pytest.mark.integration
@pytest.mark.timeout(1200)
def test_a_cold_start_on_two_ranks_needs_no_sampler(tmp_path: Path) -> None:
    write(tmp_path)
    out = run_ranks("ludic", "sft", "run.toml", "--out", "two", where=tmp_path)
    assert not reports(out)
    assert "a cold start needs no sampler" in out
    assert "No held-out episode was played" in out
    lines = [json.loads(line) for line in (tmp_path / "two/sft/metrics.jsonl").open()]
    assert [line["train/step"] for line in lines] == [1, 2]
    checkpoint = tmp_path / "two/checkpoints/sft/step-00000002"
    assert json.loads((checkpoint / "manifest.json").read_text())["world_size"] == 2
    assert not list((tmp_path / "two").glob("eval/*"))
    assert "seconds" in json.loads((tmp_path / "two/summary.json").read_text())


TWO = Launched(0, 2, 0)
COLD = '[env]\nkind = "tic_tac_toe"\n[sft]\ndata = "x.jsonl"\nsteps = 1\n[training]\nsteps = 0\n'


def test_only_a_cold_start_on_several_ranks_samples_nothing() -> None:
    cold = parse_run(COLD)
    assert samples(cold, Launched())
    assert not samples(cold, TWO)
    assert samples(parse_run(COLD + '[inference]\nbackend = "vllm"\n'), TWO)
    assert samples(parse_run('[env]\nkind = "tic_tac_toe"\n'), TWO)


async def test_without_a_sampler_asking_is_an_error() -> None:
    with pytest.raises(ConfigError, match="ludic eval"):
        await NoSampler().complete_tokens(None)


def test_a_model_that_is_not_small_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "MOST_PARAMETERS", 1000)
    with pytest.raises(ConfigError, match="up to 1,000 parameters"):
        gathered_copy(tiny_model())


def adapted(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    wrapped: nn.Module = get_peft_model(model, config)
    return wrapped


@pytest.mark.parametrize("lora", [False, True])
async def test_a_publish_makes_the_copy_what_the_model_is(lora: bool) -> None:
    model: nn.Module = tiny_model()
    model = adapted(model) if lora else model
    copied = gathered_copy(model)
    ids = torch.arange(1, 9)[None]
    before = copied(ids).logits
    torch.testing.assert_close(before, model(ids).logits, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05)
    assert torch.equal(copied(ids).logits, before)  # it is a copy
    async with LocalChatClient(copied, tiny_tokenizer()) as client:
        report = await LocalCopyPublisher(client).publish(ModelWeights(model), 3)
        assert await client.get_policy_version() == report.version == 3
    assert not torch.allclose(copied(ids).logits, before, atol=1e-3)
    torch.testing.assert_close(copied(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)
