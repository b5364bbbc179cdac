"""A PEFT model's adapter as vLLM takes it, and the folders it travels in."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn

from ludic.distributed import AdapterWeights
from ludic.distributed.shared_folders import is_abandoned
from ludic.distributed.vllm.adapter_payload import AdapterFolders
from ludic.distributed.vllm.adapter_weights import adapter_config, ranks
from ludic.errors import ConfigError
from ludic.inference.tiny import tiny_model
from ludic.runs.vllm_backend import save_for_vllm
from ludic.sharding.weights import plain_name
from tests.forked import Forked

IDS = torch.arange(12)[None]


def policy(dtype: torch.dtype = torch.float32, **lora: Any) -> nn.Module:
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **lora}
    found: nn.Module = get_peft_model(tiny_model().to(dtype), LoraConfig(**settings))
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2, generator=noise)
    return found.eval()


@pytest.mark.parametrize(
    "lora",
    [
        {},
        {"use_rslora": True, "r": 3},
        {"rank_pattern": {"q_proj": 8}, "alpha_pattern": {"k_proj": 1}},
        {"target_modules": ["v_proj"], "layers_to_transform": [0]},
    ],
    ids=["plain", "rslora", "patterns", "one layer"],
)
def test_the_folder_is_one_that_peft_reads_and_computes_the_same(
    tmp_path: Path, lora: dict[str, Any]
) -> None:
    model = policy(**lora)
    tensors = dict(AdapterWeights(model))
    folders = AdapterFolders(tmp_path)
    folder = folders.write("v1", tensors, adapter_config(tensors))
    assert sorted(os.listdir(folder)) == ["adapter_config.json", "adapter_model.safetensors"]
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == max(
        ranks(tensors).values()
    )
    read = PeftModel.from_pretrained(tiny_model(), folder).eval()
    with torch.no_grad():
        gap = (read(input_ids=IDS).logits - model(input_ids=IDS).logits).abs().max()
        moved = (read(input_ids=IDS).logits - tiny_model()(input_ids=IDS).logits).abs().max()
    assert gap <= 1e-5
    assert moved > 0.01
    folders.close()


def test_tensors_have_the_type_of_the_weights_below_and_the_scaling_is_rounded_once() -> None:
    model = policy(torch.bfloat16, lora_alpha=3)
    tensors = dict(AdapterWeights(model))
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    layer = model.get_submodule(name)
    exact = layer.lora_B["default"].weight.float() * 0.75  # type: ignore[index, union-attr]
    assert torch.equal(tensors[f"{name}.lora_B.weight"], exact.bfloat16())


def test_reading_an_adapter_leaves_the_model_alone() -> None:
    model = policy()
    before = {n: p.clone() for n, p in model.named_parameters()}
    for tensor in dict(AdapterWeights(model)).values():
        tensor.zero_()
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


@pytest.mark.parametrize(
    ("lora", "says"),
    [
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"use_dora": True}, "use_dora"),
        ({"lora_bias": True}, "lora_bias"),
        ({"bias": "all"}, "bias='all'"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens is an embedding"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head is the output head"),
        ({"init_lora_weights": "pissa"}, "pissa"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
    ],
)
def test_what_vllm_cannot_serve_is_refused_by_name_with_the_remedy(
    lora: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        AdapterWeights(policy(**lora))
    merges = says not in ("use_dora", "trainable_token_indices")
    remedy = 'inference.publish_lora = "merged"' if merges else "train without it"
    assert remedy in str(caught.value)


def test_weights_that_are_trained_beside_the_adapter_are_refused() -> None:
    model = policy()
    model.get_parameter("base_model.model.model.norm.weight").requires_grad_(True)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is trained, but is not part"):
        AdapterWeights(model)


def test_a_model_without_an_adapter_or_with_two_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no LoRA adapter"):
        AdapterWeights(tiny_model())
    model: Any = policy()
    model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "second"])
    with pytest.raises(ConfigError, match="2 adapters are active"):
        AdapterWeights(model)


def test_folders_are_private_and_gone_with_their_owner(tmp_path: Path) -> None:
    folders = AdapterFolders(tmp_path)
    tensors = dict(AdapterWeights(policy()))
    folder = folders.write("v1", tensors, adapter_config(tensors))
    assert stat.S_IMODE(folders.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not is_abandoned(folders.path)
    AdapterFolders(tmp_path).close()
    assert folder.is_dir()
    del folders
    assert not os.listdir(tmp_path)


def test_what_a_killed_process_leaves_is_removed_by_the_next(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    code = (
        "import sys, time; from ludic.distributed.vllm.adapter_payload import AdapterFolders;"
        "f = AdapterFolders(sys.argv[1]); (f.path / 'v1').mkdir(); print('up', flush=True);"
        "time.sleep(300)"
    )
    script = tmp_path_factory.mktemp("script") / "killed.py"
    script.write_text(code)
    process = Forked(script, tmp_path, where=tmp_path)
    assert process.stdout.readline() == "up\n"
    (theirs,) = tmp_path.iterdir()
    assert not is_abandoned(theirs)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert is_abandoned(theirs)
    folders = AdapterFolders(tmp_path)
    assert os.listdir(tmp_path) == [folders.path.name]
    folders.close()


def test_a_fork_that_ends_removes_nothing(tmp_path: Path) -> None:
    folders = AdapterFolders(tmp_path)
    child = os.fork()
    if child == 0:
        folders.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert folders.path.is_dir()
    with open(folders.path / "lock") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folders.close()


@pytest.mark.parametrize("merged", [True, False])
def test_a_server_is_started_from_names_that_vllm_knows(tmp_path: Path, merged: bool) -> None:
    model = policy()
    save_for_vllm(model, tmp_path, merged=merged)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == {n for n, _ in tiny_model().named_parameters()}
    name = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"
    same = torch.equal(saved[plain_name(name)], model.get_parameter(name))
    assert same is not merged
