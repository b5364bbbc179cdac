"""An update is compared with the served checkpoint before any of it is applied."""

from __future__ import annotations

import importlib
import json
import logging
import secrets
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ludic.distributed.differences import encode_all
from ludic.distributed.in_vllm.served_model import checkpoint_shapes
from ludic.distributed.shared_folders import shared_folder
from ludic.distributed.vllm.checksums import receipt
from ludic.distributed.vllm.shared_memory import write_shared
from ludic.errors import PublishError

RIGHT = {"a": torch.ones(3, 4), "b": torch.ones(5)}
WRONG = {
    "left out": {"a": torch.ones(3, 4)},
    "unknown": {**RIGHT, "c": torch.ones(1)},
    "arrived with shape": {"a": torch.ones(3, 4), "b": torch.ones(6)},
}
SHAPES = {"a": (3, 4), "b": (5,)}
NAME = "somebody/some-model"


def downloaded(cache: Path, revision: str = "main") -> Path:
    """The folder of `NAME` as the hub's downloads lay it out."""
    repo = cache / f"models--{NAME.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True, exist_ok=True)
    (repo / "refs" / revision).write_text("0" * 39 + str(len(revision)))
    folder = repo / "snapshots" / (repo / "refs" / revision).read_text()
    folder.mkdir(parents=True)
    return folder


def test_a_name_on_the_hub_is_looked_up_where_it_was_downloaded(tmp_path: Path) -> None:
    save_file(RIGHT, downloaded(tmp_path) / "model.safetensors")
    save_file({"other": torch.ones(1)}, downloaded(tmp_path, "v2") / "model.safetensors")
    cache = str(tmp_path)
    assert checkpoint_shapes(NAME, cache=cache) == SHAPES
    assert checkpoint_shapes(NAME, revision="v2", cache=cache) == {"other": (1,)}
    assert checkpoint_shapes("somebody/never-downloaded", cache=cache) is None
    assert checkpoint_shapes("/no/such/folder", cache=cache) is None


def test_only_the_files_that_vllm_loads_count(tmp_path: Path) -> None:
    save_file(RIGHT, tmp_path / "model.safetensors")
    save_file({"layers.0.x": torch.ones(3, 4)}, tmp_path / "consolidated.safetensors")
    assert checkpoint_shapes(str(tmp_path)) == SHAPES
    (tmp_path / "model.safetensors").unlink()
    for name, tensor in RIGHT.items():
        save_file({name: tensor}, tmp_path / f"model-{name}.safetensors")
    index = {"weight_map": {name: f"model-{name}.safetensors" for name in RIGHT}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert checkpoint_shapes(str(tmp_path)) == SHAPES
    (tmp_path / "model-b.safetensors").unlink()
    assert checkpoint_shapes(str(tmp_path)) is None


def test_without_an_index_every_file_counts(tmp_path: Path) -> None:
    for name, tensor in RIGHT.items():
        save_file({name: tensor}, tmp_path / f"part-{name}.safetensors")
    assert checkpoint_shapes(str(tmp_path)) == SHAPES


class Base:
    """What vLLM's own engine class does."""

    def __class_getitem__(cls, _: object) -> type:
        return cls

    def __init__(self, vllm_config: Any, model: nn.Module, device: torch.device) -> None:
        self.vllm_config, self.model, self.device = vllm_config, model, device
        self.model_config = vllm_config.model_config


class Served(nn.Module):
    """A model that takes weights as vLLM's do: one by one, and raises in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(5))

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> set[str]:
        loaded, own = set(), dict(self.named_parameters())
        for name, tensor in weights:
            plain = name.removeprefix("model.")
            assert own[plain].shape == tensor.shape
            own[plain].data.copy_(tensor)
            loaded.add(plain)
        return loaded


@pytest.fixture
def engine_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The engine's module, with stand-ins for what it takes from vLLM."""
    base = "vllm.distributed.weight_transfer.base"
    reload = "vllm.model_executor.model_loader.reload"
    for name in (base, reload):
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            whole = ".".join(parts[:end])
            if whole not in sys.modules:
                monkeypatch.setitem(sys.modules, whole, ModuleType(whole))
    for attribute, value in (
        ("WeightTransferEngine", Base),
        ("WeightTransferInitInfo", object),
        ("WeightTransferUpdateInfo", object),
    ):
        monkeypatch.setattr(sys.modules[base], attribute, value, raising=False)
    for attribute in ("initialize_layerwise_reload", "finalize_layerwise_reload"):
        monkeypatch.setattr(sys.modules[reload], attribute, lambda *_: None, raising=False)
    name = "ludic.distributed.in_vllm.receiver"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


def engine_of(module: ModuleType, model: str, cache: Path | None = None) -> Any:
    hf = SimpleNamespace(tie_word_embeddings=False)
    config = SimpleNamespace(
        model_config=SimpleNamespace(model=model, revision=None, hf_config=hf),
        load_config=SimpleNamespace(download_dir=None if cache is None else str(cache)),
    )
    return module.LudicWeightTransferEngine(config, Served(), torch.device("cpu"))


def stage(
    module: ModuleType, engine: Any, weights: Mapping[str, Tensor], **copy: str | None
) -> None:
    path, folder = write_shared(weights)
    info = module.LudicUpdateInfo(plane="shared_memory", path=str(path), copy=copy or None)
    try:
        engine.start_weight_update()
        engine.receive_weights(info)
    finally:
        folder.close()


@pytest.mark.parametrize("what", WRONG)
def test_the_first_update_of_a_server_of_a_hub_name_is_checked_before_it_is_applied(
    tmp_path: Path, engine_module: ModuleType, what: str
) -> None:
    save_file(RIGHT, downloaded(tmp_path) / "model.safetensors")
    engine = engine_of(engine_module, NAME, tmp_path)
    with pytest.raises(ValueError, match=what):
        stage(engine_module, engine, WRONG[what])
    engine.finish_weight_update()
    assert engine.model.a.sum() == 0
    stage(engine_module, engine, RIGHT)
    engine.finish_weight_update()
    assert engine.model.a.sum() == 12


def test_the_same_tensors_under_other_names_are_let_through(
    tmp_path: Path, engine_module: ModuleType
) -> None:
    """As with checkpoints whose names transformers changes when it loads them."""
    save_file(RIGHT, tmp_path / "model.safetensors")
    engine = engine_of(engine_module, str(tmp_path))
    stage(engine_module, engine, {f"model.{name}": tensor for name, tensor in RIGHT.items()})
    engine.finish_weight_update()
    assert engine.model.a.sum() == 12
    with pytest.raises(ValueError, match="unknown"):
        stage(engine_module, engine, {"a": RIGHT["a"], "model.b": RIGHT["b"]})


def test_an_unknown_checkpoint_is_said_in_the_servers_log(
    engine_module: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="vllm.ludic"):
        engine = engine_of(engine_module, "somebody/never-downloaded")
    assert "somebody/never-downloaded" in caplog.text
    stage(engine_module, engine, RIGHT)
    engine.finish_weight_update()
    with pytest.raises(ValueError, match="left out"):
        stage(engine_module, engine, {"a": RIGHT["a"]})


def test_two_workers_of_a_host_take_a_difference_into_one_copy_and_load_from_it(
    tmp_path: Path, engine_module: ModuleType
) -> None:
    save_file(RIGHT, tmp_path / "model.safetensors")
    workers = [engine_of(engine_module, str(tmp_path)) for _ in range(2)]
    newer = {"a": RIGHT["a"].clone(), "b": RIGHT["b"] * 2}
    newer["a"][1, 1] = 7.0
    key = secrets.token_hex(16)
    for worker in workers:
        stage(engine_module, worker, RIGHT, key=key, name="one", base=None)
        worker.finish_weight_update()
    difference = encode_all(RIGHT, newer)
    for worker in workers:
        stage(engine_module, worker, difference, key=key, name="two", base="one")
        assert worker.model.a.sum() == 12  # staged, not used
        assert worker.receipt() == receipt(newer.items())
        assert worker.holds == "two"
    for worker in workers:
        worker.finish_weight_update()
        assert torch.equal(worker.model.a, newer["a"])
        assert torch.equal(worker.model.b, newer["b"])
    assert len(list(shared_folder().glob(f"*{key}"))) == 1
    for worker in workers:  # from a publisher without differences
        stage(engine_module, worker, RIGHT)
        assert worker.receipt() == receipt(RIGHT.items())
        assert worker.holds is None
    assert not list(shared_folder().glob(f"*{key}"))


def test_a_difference_to_what_a_worker_never_had_leaves_the_old_weights(
    tmp_path: Path, engine_module: ModuleType
) -> None:
    save_file(RIGHT, tmp_path / "model.safetensors")
    worker = engine_of(engine_module, str(tmp_path))
    stage(engine_module, worker, RIGHT)
    worker.finish_weight_update()
    with pytest.raises(PublishError, match="was made against one"):
        stage(engine_module, worker, {}, key=secrets.token_hex(16), name="two", base="one")
    assert worker.receipt() == {}
    worker.finish_weight_update()
    assert worker.model.a.sum() == 12
    assert worker.applied == 1
