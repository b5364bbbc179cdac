"""The way that a run's weights take to its servers, and what is wrong with one before it begins."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ludic.distributed import BroadcastPolicyPublisher
from ludic.distributed.addresses import is_here, own_address
from ludic.distributed.vllm.planes import HTTPPlane, SharedMemoryPlane
from ludic.errors import ConfigError
from ludic.inference import VLLMChatClient
from ludic.runs import vllm_backend
from ludic.runs.settings import parse_run
from ludic.runs.vllm_backend import check_publishing, plane_of
from tests.inference.vllm.fake_server import FakeVLLM

ENV = '[env]\nkind = "tic_tac_toe"\n[model]\ndevice = "cpu"\n[inference]\nbackend = "vllm"\n'
CPU = torch.device("cpu")


async def chosen(said: Any, lines: str = "") -> Any:
    server = FakeVLLM(faults={"/collective_rpc": lambda _: {"results": [said]}})
    async with server.serving() as fake, VLLMChatClient(fake.url, model="tiny") as client:
        return await plane_of(parse_run(ENV + lines), client, CPU, gathered=False)


async def test_a_server_on_this_machine_reads_shared_memory() -> None:
    from ludic.distributed.vllm.placement import Place

    here = Place.of(CPU)
    assert isinstance(await chosen({"memory": here.memory, "gpu": None}), SharedMemoryPlane)


async def test_a_server_that_does_not_say_is_found_by_its_address() -> None:
    assert isinstance(await chosen({"error": "unknown method"}), SharedMemoryPlane)


async def test_a_server_elsewhere_fetches_from_an_address_that_it_reaches_and_a_run_says_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plane = await chosen({"memory": "another host", "gpu": "GPU-0"})
    assert isinstance(plane, HTTPPlane)
    assert plane.host == "127.0.0.1"
    why = "a worker is on another host, and NCCL is not possible"
    assert f"weights go to the servers over http: {why}" in capsys.readouterr().out


async def test_what_the_run_says_goes_before_that() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    lines = f'publish_plane = "gloo"\npublish_address = "127.0.0.1"\npublish_port = {port}\n'
    plane = await chosen({"memory": "x"}, lines)
    invitation = plane.invitation(1, 5.0)
    assert (invitation["backend"], invitation["host"], invitation["port"]) == (
        *("gloo", "127.0.0.1"),
        port,
    )


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ('publish_plane = "ncll"\n', r"did you mean 'nccl'\?"),
        ('publish_plane = "ipc"\npublish_port = 5\n', "publish_port belongs to a broadcast"),
        ("publish_port = 70000\n", "less than or equal to 65535"),
        ("publish_prot = 7000\n", "did you mean 'publish_port'"),
        (
            'publish_lora = "adapter"\npublish_plane = "gloo"\n',
            "publish_plane is for whole weights",
        ),
        ('publish_plane = "nccl"\n', 'the model is on the CPU: set "shared_memory"'),
        ('publish_plane = "ipc"\npublish_differences = true\n', "where nothing travels"),
        ('publish_lora = "adapter"\npublish_differences = true\n', "is for whole weights"),
        ('publish_plane = "ipc"\n', 'the model is on the CPU: set "shared_memory"'),
        (
            'publish_address = "192.0.2.7"\n',
            "not one of this machine's addresses .*: try '127.0.0.1'",
        ),
    ],
)
def test_a_value_that_cannot_work_gets_one_sentence(lines: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_publishing(parse_run(ENV + lines))


def test_a_plane_is_for_vllm() -> None:
    with pytest.raises(ConfigError, match='publish_plane is for backend = "vllm"'):
        parse_run('[env]\nkind = "tic_tac_toe"\n[inference]\npublish_plane = "gloo"\n')


def test_a_port_that_is_taken_is_said_with_a_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"publish_port={port} cannot .*: try \d+"):
            check_publishing(parse_run(ENV + f"publish_port = {port}\n"))


def test_ipc_is_refused_on_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("ludic.runs.vllm_backend.check_device", lambda _: torch.device("cuda"))
    with pytest.raises(ConfigError, match="on 2 ranks the weights are gathered on the CPU"):
        check_publishing(parse_run(ENV + 'publish_plane = "ipc"\n'))


def test_addresses_of_this_machine() -> None:
    assert is_here("http://127.0.0.1:8000")
    assert is_here("http://localhost:8000")
    assert not is_here("http://192.0.2.7:8000")
    assert not is_here("http://no.such.host.invalid:8000")
    assert own_address("http://127.0.0.1:8000") == "127.0.0.1"


async def test_servers_and_the_plane_change_in_the_publishers_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config: Any = SimpleNamespace(
        inference=SimpleNamespace(vllm=SimpleNamespace(start_timeout_s=60.0))
    )
    async with FakeVLLM().serving() as fake, VLLMChatClient(fake.url) as client:
        publisher = BroadcastPolicyPublisher(client)
        seen: list[tuple[str, bool]] = []

        class Roster:
            async def update(self, _: VLLMChatClient) -> bool:
                seen.append(("servers", publisher._lock.locked()))
                return True

        async def plane_of(*_: Any, **__: Any) -> None:
            seen.append(("plane", publisher._lock.locked()))

        async def any_answers() -> bool:
            seen.append(("waiting", publisher._lock.locked()))
            return True

        monkeypatch.setattr(vllm_backend, "plane_of", plane_of)
        monkeypatch.setattr(client, "any_answers", any_answers)
        await vllm_backend._follow(Roster(), config, publisher, torch.nn.Linear(1, 1))
    assert seen == [("servers", True), ("waiting", False), ("plane", True)]
