"""A run folder with a checkpoint, one with an adapter, and a hub to push them to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ludic
from tests.runs.publishing.fake_hub import TOKEN, FakeHub, running_hub

SIZES = {"hidden_size": 32, "heads": 2, "kv_heads": 1, "layers": 1}


def train(out: Path, **settings: Any) -> Path:
    """A run of two updates."""
    run = ludic.train(
        "key_door",
        out=out,
        model=settings.pop("model", {"name": "tiny", "kwargs": SIZES}),
        algorithm=ludic.reinforce(),
        inference={"sampling": {"max_tokens": 4}},
        training={"rollouts_per_update": 2, "max_steps": 1, "max_seq_len": 512},
        eval={"episodes": 2},
        logging={"loggers": []},
        steps=settings.pop("steps", 2),
        **settings,
    )
    return run.folder.path


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "keys")


@pytest.fixture(scope="module")
def adapter_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = {"name": "tiny", "kwargs": SIZES, "lora": {"rank": 2}}
    return train(tmp_path_factory.mktemp("runs") / "adapter", model=model)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    # Between the client's attempts.
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with running_hub() as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        yield found
        assert found.unknown == []
