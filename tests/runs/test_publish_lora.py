"""`inference.publish_lora`, and the flags that a server gets for it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from ludic.errors import ConfigError
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.inference.vllm.server import (
    ServerSettings,
    VLLMBuild,
    command_line,
    environment,
    parse,
)
from ludic.runs.settings import parse_run
from ludic.runs.vllm_backend import open_vllm

BUILD = VLLMBuild("py", "0.26.0", cpu=False, has_plugin=True)
ENV = '[env]\nkind = "tic_tac_toe"\n'


def test_adapters_are_for_vllm() -> None:
    run = parse_run(ENV + '[inference]\nbackend = "vllm"\npublish_lora = "adapter"\n')
    assert run.inference.publish_lora == "adapter"
    assert parse_run(ENV).inference.publish_lora == "merged"
    with pytest.raises(ConfigError, match=r'publish_lora.*needs backend = "vllm".*line 4'):
        parse_run(ENV + '[inference]\npublish_lora = "adapter"\n')


async def test_a_model_without_an_adapter_is_said_before_a_server_is_started() -> None:
    run = parse_run(ENV + '[inference]\nbackend = "vllm"\npublish_lora = "adapter"\n')
    async with AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match=r"set \[model\.lora\]"):
            await open_vllm(run, tiny_model(), tiny_tokenizer(), stack, None)


@pytest.mark.parametrize(("wanted", "given"), [(1, "8"), (8, "8"), (9, "16"), (300, "320")])
def test_a_server_makes_room_for_the_rank(tmp_path: Path, wanted: int, given: str) -> None:
    settings = ServerSettings("m", max_lora_rank=wanted, max_loras=3)
    command = command_line(settings, BUILD)
    assert "--enable-lora" in command
    assert command[command.index("--max-lora-rank") + 1] == given
    assert command[command.index("--max-loras") + 1] == "3"
    assert environment(settings, BUILD, tmp_path)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


def test_without_a_rank_a_server_takes_no_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", raising=False)
    assert not any("lora" in flag for flag in command_line(ServerSettings("m"), BUILD))
    env = environment(ServerSettings("m"), BUILD, tmp_path)
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in env


def test_a_rank_that_vllm_cannot_hold_is_refused() -> None:
    for rank in (0, 513):
        with pytest.raises(ConfigError, match="rank 1 to 512"):
            command_line(ServerSettings("m", max_lora_rank=rank), BUILD)


def test_serve_takes_the_rank_on_its_command_line() -> None:
    settings, _ = parse(["--model", "m", "--max-lora-rank", "16", "--max-loras", "2"])
    assert (settings.max_lora_rank, settings.max_loras) == (16, 2)
    assert parse(["--model", "m"])[0].max_lora_rank is None
