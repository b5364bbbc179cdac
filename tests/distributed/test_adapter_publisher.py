"""`AdapterPolicyPublisher`, with servers that fail on demand.

The same against a real server is in `tests/inference/vllm/test_adapters.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ludic.distributed import AdapterPolicyPublisher, BackgroundPublisher
from ludic.distributed.vllm.adapter_payload import AdapterPayload
from ludic.distributed.vllm.adapter_weights import AdapterWeights
from ludic.errors import ConfigError, DeadlineError, InferenceError, PublishError
from ludic.inference.tiny import tiny_model
from ludic.inference.vllm.client import VLLMChatClient
from ludic.sharding.weights import ModelWeights
from tests.distributed.lora_server import LOAD, STOCK, UNLOAD, FakeLoRA
from tests.inference.vllm.asking import request, trace_of
from tests.inference.vllm.fake_server import failing, hanging

MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
GENERATE = "/inference/v1/generate"


def adapter(value: float = 1.0, rank: int = 2) -> dict[str, Tensor]:
    return {
        f"{MODULE}.lora_A.weight": torch.full((rank, 6), value),
        f"{MODULE}.lora_B.weight": torch.full((4, rank), value),
    }


Fakes = tuple[FakeLoRA, FakeLoRA]


@pytest.fixture
async def fakes() -> AsyncIterator[Fakes]:
    async with FakeLoRA().serving() as first, FakeLoRA().serving() as second:
        yield first, second


@pytest.fixture
async def client(fakes: Fakes) -> AsyncIterator[VLLMChatClient]:
    async with VLLMChatClient([f.url for f in fakes], model="tiny", max_retries=4) as found:
        yield found


@pytest.fixture
async def publisher(
    client: VLLMChatClient, tmp_path: Path
) -> AsyncIterator[AdapterPolicyPublisher]:
    found = AdapterPolicyPublisher(client, folder=tmp_path)
    yield found
    await found.close()
    assert not os.listdir(tmp_path)


def versions(fake: FakeLoRA) -> list[int]:
    """Those of the adapters that requests to the server can name."""
    return sorted(int(name.partition("@")[2].partition("-")[0]) for name in fake.adapters)


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_every_server_gets_the_adapter_and_requests_name_it(
    client: VLLMChatClient, publisher: AdapterPolicyPublisher, fakes: Fakes
) -> None:
    report = await publisher.publish(adapter(), 3)
    assert report.verified
    assert report.bytes == 4 * (12 + 8)
    assert set(report.details["servers"]) == {f.url for f in fakes}
    assert [versions(f) for f in fakes] == [[3], [3]]
    assert await client.get_policy_version() == 3
    for _ in range(4):
        trace = trace_of(await client.complete_tokens(request()))
        assert [(s.start, s.end, s.version) for s in trace.version_spans] == [(0, 3, 3)]
    asked = [body["model"] for f in fakes for body in f.bodies if body]
    assert set(asked) == set(fakes[0].adapters)
    assert not any(f.calls["/pause"] for f in fakes)
    await publisher.close()
    assert [f.adapters for f in fakes] == [{}, {}]
    trace = trace_of(await client.complete_tokens(request()))
    assert [s.version for s in trace.version_spans] == [0]


async def test_a_thousand_publishes_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeLoRA().serving() as fake, VLLMChatClient(fake.url, model="tiny") as client:

        async def without_sockets(
            replica: Any, method: str, path: str, *, body: Any = None, **_: Any
        ) -> Any:
            answer = fake.reply(path, body)
            assert answer.status == 200
            return answer.text if path in (LOAD, UNLOAD) else json.loads(answer.text or "")

        monkeypatch.setattr(client, "control", without_sockets)
        publisher = AdapterPolicyPublisher(client, folder=tmp_path)
        folders, names = 0, set()
        for version in range(1000):
            report = await publisher.publish(adapter(float(version)), version)
            assert report.verified
            names.add(report.details["name"])
            folders = max(folders, len(os.listdir(publisher.folders.path)) - 1)  # its lock
        assert len(names) == 1000
        assert folders <= fake.max_loras + 1
        assert fake.most <= fake.max_loras
        await publisher.close()
        assert not fake.adapters
    assert not os.listdir(tmp_path)


async def test_old_adapters_go_when_their_last_request_ends_and_a_publish_waits_for_room(
    client: VLLMChatClient, publisher: AdapterPolicyPublisher, fakes: Fakes
) -> None:
    gate = asyncio.Event()

    def slow(fake: FakeLoRA) -> Any:
        async def answer(asked: Any) -> Any:
            await gate.wait()
            return fake.reply(GENERATE, await asked.json())

        return answer

    await publisher.publish(adapter(1.0), 1)
    for fake in fakes:
        fake.faults[GENERATE] = slow(fake)
    running = [asyncio.create_task(client.complete_tokens(request(seed=n))) for n in range(4)]
    await until(lambda: sum(f.calls[GENERATE] for f in fakes) >= 4)
    await publisher.publish(adapter(2.0), 2)
    assert [versions(f) for f in fakes] == [[1, 2], [1, 2]]

    waiting = asyncio.create_task(publisher.publish(adapter(3.0), 3))
    await until(lambda: list(publisher.folders.path.glob("v3-*")))
    later = [asyncio.create_task(client.complete_tokens(request(seed=n))) for n in range(4)]
    await until(lambda: sum(f.calls[GENERATE] for f in fakes) >= 8)
    assert not waiting.done()
    gate.set()
    assert (await waiting).version == 3
    for tasks, version in ((running, 1), (later, 2)):
        for response in await asyncio.gather(*tasks):
            assert [s.version for s in trace_of(response).version_spans] == [version]
    await until(lambda: [versions(f) for f in fakes] == [[3], [3]])
    assert all(f.most <= f.max_loras for f in fakes)


@pytest.mark.usefixtures("clock")
async def test_a_publish_that_finds_no_room_says_who_holds_it(
    client: VLLMChatClient, publisher: AdapterPolicyPublisher, fakes: Fakes
) -> None:
    await publisher.publish(adapter(1.0), 1)
    client.replicas[0].serving.requests += 1  # one that never ends
    await publisher.publish(adapter(2.0), 2)
    publisher.timeout_s = 0.3
    with pytest.raises(DeadlineError, match=r"publish of version 3 .*1 of version 1"):
        await publisher.publish(adapter(3.0), 3)
    assert [versions(f) for f in fakes] == [[1, 2], [2]]
    assert await client.get_policy_version() == 2


@pytest.mark.usefixtures("clock")
async def test_a_server_that_refuses_keeps_all_on_the_version_before(
    client: VLLMChatClient, publisher: AdapterPolicyPublisher, fakes: Fakes
) -> None:
    await publisher.publish(adapter(1.0), 1)
    fakes[1].faults[LOAD] = failing(500)
    with pytest.raises(PublishError, match=r"did not load the adapter.*made to fail.*go on with"):
        await publisher.publish(adapter(2.0), 2)
    assert [versions(f) for f in fakes] == [[1], [1]]
    assert [r.out for r in client.replicas] == [None, None]
    assert await client.get_policy_version() == 1
    fakes[1].faults.clear()
    await publisher.publish(adapter(2.0), 2)
    assert await client.get_policy_version() == 2


async def test_a_changed_tensor_is_found_and_the_version_before_stays(
    client: VLLMChatClient, publisher: AdapterPolicyPublisher, fakes: Fakes
) -> None:
    await publisher.publish(adapter(1.0), 1)
    wrong = {name: ["0", "float32", [1]] for name in fakes[1].newest}
    limits = {"enabled": True, "max_rank": 8, "max_loras": 2}
    answer = {"results": [{"tensors": wrong, "active": True, **limits}]}
    fakes[1].faults["/collective_rpc"] = lambda _: answer
    with pytest.raises(PublishError, match="2 of the adapter's tensors are not as they were sent"):
        await publisher.publish(adapter(2.0), 2)
    await until(lambda: [versions(f) for f in fakes] == [[1], [1]])


async def test_a_server_that_is_gone_is_named_and_comes_back_with_the_current_adapter(
    client: VLLMChatClient, publisher: AdapterPolicyPublisher, fakes: Fakes
) -> None:
    await publisher.publish(adapter(1.0), 1)
    client.replicas[1].url = "http://127.0.0.1:9"
    report = await publisher.publish(adapter(2.0), 2)
    assert report.details["servers"] == [fakes[0].url]
    assert list(report.details["lost"]) == ["http://127.0.0.1:9"]
    assert client.in_rotation() == [client.replicas[0]]
    client.replicas[1].url = fakes[1].url
    report = await publisher.publish(adapter(3.0), 3)
    assert len(report.details["servers"]) == 2
    await until(lambda: [versions(f) for f in fakes] == [[3], [3]])


async def test_servers_may_come_and_go_between_publishes(
    client: VLLMChatClient, publisher: AdapterPolicyPublisher, fakes: Fakes
) -> None:
    first, second = (fake.url for fake in fakes)
    client.set_servers({first: "a"}, joining="it is new")
    await publisher.publish(adapter(1.0), 1)
    client.set_servers({first: "a", second: "b"}, joining="it is new")
    report = await publisher.publish(adapter(2.0), 2)
    assert set(report.details["servers"]) == {first, second}
    client.set_servers({second: "b"}, joining="it is new")
    assert (await publisher.publish(adapter(3.0), 3)).details["servers"] == [second]
    payload = publisher.payload
    assert isinstance(payload, AdapterPayload)
    await until(lambda: set(payload.old) <= set(client.replicas))
    await until(lambda: versions(fakes[1]) == [3])


@pytest.mark.usefixtures("clock")
async def test_a_server_out_of_rotation_that_refuses_stays_out_and_stops_nobody(
    client: VLLMChatClient, publisher: AdapterPolicyPublisher, fakes: Fakes
) -> None:
    await publisher.publish(adapter(1.0), 1)
    client.replicas[1].out = "for a reason"
    fakes[1].max_rank = 1
    report = await publisher.publish(adapter(2.0), 2)
    assert "takes up to 1" in report.details["lost"][fakes[1].url]
    fakes[1].max_rank = 8
    fakes[1].faults[LOAD] = failing(500)
    report = await publisher.publish(adapter(3.0), 3)
    assert "made to fail" in report.details["lost"][fakes[1].url]
    assert report.details["servers"] == [fakes[0].url]
    fakes[1].faults.clear()
    await publisher.publish(adapter(4.0), 4)
    await until(lambda: [versions(f) for f in fakes] == [[4], [4]])
    assert client.in_rotation() == list(client.replicas)


async def test_a_server_that_was_restarted_gets_the_adapter_before_it_is_used(
    client: VLLMChatClient, publisher: AdapterPolicyPublisher, fakes: Fakes
) -> None:
    await publisher.publish(adapter(1.0), 5)
    for fake in fakes:
        fake.adapters.clear()
    responses = await asyncio.gather(*(client.complete_tokens(request(seed=n)) for n in range(8)))
    for response in responses:
        assert [s.version for s in trace_of(response).version_spans] == [5]
    await until(lambda: [versions(f) for f in fakes] == [[5], [5]])
    assert all(r.out is None for r in client.replicas)
    assert all(f.calls[GENERATE] for f in fakes)
    await publisher.publish(adapter(2.0), 6)
    await until(lambda: [versions(f) for f in fakes] == [[6], [6]])
    assert [f.calls[UNLOAD] for f in fakes] == [1, 1]


@pytest.mark.usefixtures("clock")
async def test_a_restarted_server_that_cannot_take_the_adapter_serves_nobody(
    client: VLLMChatClient, publisher: AdapterPolicyPublisher, fakes: Fakes
) -> None:
    await publisher.publish(adapter(1.0), 5)
    fakes[1].adapters.clear()
    fakes[1].faults[LOAD] = failing(500)
    for n in range(8):
        await client.complete_tokens(request(seed=n))
    await asyncio.gather(*client._learning.values())
    assert "did not load the adapter" in str(client.replicas[1].out)


@pytest.mark.usefixtures("clock")
async def test_a_load_that_hangs_meets_the_deadline_and_is_forgotten(
    client: VLLMChatClient, publisher: AdapterPolicyPublisher, fakes: Fakes
) -> None:
    await publisher.publish(adapter(1.0), 1)
    fakes[1].faults[LOAD] = hanging
    publisher.timeout_s = 0.5
    with pytest.raises(DeadlineError, match="the publish of version 2"):
        await publisher.publish(adapter(2.0), 2)
    assert [versions(f) for f in fakes] == [[1], [1]]
    del fakes[1].faults[LOAD]
    publisher.timeout_s = 120
    # Loaded, but the answer never came: the next publish clears it away.
    fakes[1].adapters[f"tiny@2-{'0' * 8}"] = publisher.folders.path / "v2"
    await publisher.publish(adapter(3.0), 3)
    await until(lambda: [versions(f) for f in fakes] == [[3], [3]])


async def test_what_a_dead_trainer_left_is_unloaded_and_what_a_live_one_has_is_not(
    client: VLLMChatClient, publisher: AdapterPolicyPublisher, fakes: Fakes, tmp_path: Path
) -> None:
    other = AdapterPolicyPublisher(VLLMChatClient("http://127.0.0.1:9"), folder=tmp_path)
    fakes[0].adapters = {
        f"tiny@9-{'a' * 8}": tmp_path / "ludic-publish-gone" / "v9",
        f"tiny@8-{'b' * 8}": other.folders.path / "v8",
        "somebody-s": tmp_path / "theirs",
    }
    await publisher.publish(adapter(), 1)
    left = set(fakes[0].adapters) - {client.replicas[0].serving.adapter}
    assert left == {f"tiny@8-{'b' * 8}", "somebody-s"}
    await other.close()


async def test_versions_never_go_back_but_the_first_may_be_any(
    client: VLLMChatClient, publisher: AdapterPolicyPublisher
) -> None:
    await publisher.publish(adapter(), 9)
    await publisher.publish(adapter(), 9)
    with pytest.raises(PublishError, match="never go back"):
        await publisher.publish(adapter(), 8)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"routes": STOCK[:-2]}, r"cannot load adapters while it runs.*--max-lora-rank 2"),
        ({"max_rank": 0}, "without --enable-lora"),
        ({"max_rank": 1}, r"rank 2, and .* takes up to 1.*publish merged"),
        ({"max_loras": 1}, "--max-loras 2 or more"),
    ],
)
async def test_a_server_that_cannot_take_it_is_said_before_anything_is_sent(
    tmp_path: Path, settings: dict[str, Any], says: str
) -> None:
    async with FakeLoRA(**settings).serving() as fake, VLLMChatClient(fake.url) as client:
        publisher = AdapterPolicyPublisher(client, folder=tmp_path)
        with pytest.raises(ConfigError, match=says):
            await publisher.publish(adapter(), 1)
        assert not fake.calls[LOAD]
        await publisher.close()


async def test_whole_weights_are_refused(publisher: AdapterPolicyPublisher) -> None:
    with pytest.raises(ConfigError, match="not a tensor of an adapter"):
        await publisher.publish({"model.embed_tokens.weight": torch.ones(2, 2)}, 1)
    lame = {f"{MODULE}.lora_A.weight": torch.ones(2, 3)}
    with pytest.raises(ConfigError, match=r"A is .* and B is None"):
        await publisher.publish(lame, 1)
    broken = adapter(float("inf"))
    with pytest.raises(PublishError, match="NaN or infinity"):
        await publisher.publish(broken, 1)


async def test_an_older_server_without_ludic_takes_adapters_unverified(tmp_path: Path) -> None:
    async with (
        FakeLoRA(routes=STOCK).serving() as fake,
        VLLMChatClient(fake.url, model="tiny") as client,
    ):
        publisher = AdapterPolicyPublisher(client, folder=tmp_path)
        for version in (4, 5):
            report = await publisher.publish(adapter(), version)
            assert not report.verified  # no receipt, and no model to score a canary with
            trace = trace_of(await client.complete_tokens(request()))
            assert [s.version for s in trace.version_spans] == [version]
        assert fake.bodies[-1]["model"] == client.replicas[0].serving.adapter
        await until(lambda: versions(fake) == [5])
        await publisher.close()
        assert not fake.adapters


async def test_weights_that_change_below_an_adapter_are_an_error(
    client: VLLMChatClient, publisher: AdapterPolicyPublisher, fakes: Fakes
) -> None:
    await publisher.publish(adapter(), 1)
    choice = {
        "finish_reason": "length",
        "token_ids": [7, 8],
        "logprobs": {"content": [{"logprob": -1.0}, {"logprob": -1.0}]},
        "weight_versions": [
            {"version": "default", "start": 0, "end": 1},
            {"version": "3", "start": 1, "end": 2},
        ],
    }
    for fake in fakes:
        fake.faults[GENERATE] = lambda _: {"choices": [choice]}
    with pytest.raises(InferenceError, match="the weights below the adapter changed"):
        await client.complete_tokens(request())


@pytest.mark.parametrize("settings", [{"timeout_s": 0}, {"max_loras": 1}])
def test_settings_that_cannot_work_are_named(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        AdapterPolicyPublisher(VLLMChatClient("http://a"), **settings)


async def test_an_adapter_goes_out_in_the_background_from_a_snapshot_of_it_alone(
    publisher: AdapterPolicyPublisher, fakes: Fakes
) -> None:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model: Any = get_peft_model(tiny_model(layers=1, hidden_size=32), lora)
    scored: list[Any] = []
    model.register_forward_pre_hook(lambda *_: scored.append(1))
    behind = BackgroundPublisher(publisher)
    for version in (1, 2, 3):
        taken = dict(AdapterWeights(model))
        report = await behind.publish(ModelWeights(model), version)
        assert report.bytes == sum(t.numel() * t.element_size() for t in taken.values())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)  # the trainer goes on
        await behind.settle()
        assert isinstance(publisher.payload, AdapterPayload)
        current = publisher.payload.current
        assert current is not None
        assert all(torch.equal(current.tensors[name], taken[name]) for name in taken)
    assert current is not None
    before = dict(current.tensors)
    kept = {name: tensor.clone() for name, tensor in before.items()}
    await behind.publish(ModelWeights(model), 4)
    await behind.settle()
    await behind.publish(ModelWeights(model), 5)
    await behind.settle()
    assert all(torch.equal(before[name], kept[name]) for name in kept)
    assert all(3 not in versions(fake) and 5 in versions(fake) for fake in fakes)
    # Nobody runs the module that the trainer steps, and so nobody samples for it to score.
    assert publisher._canary.enabled
    assert not scored
    assert not any(body for fake in fakes for body in fake.bodies)
    assert behind.last is not None
    assert behind.last.verified  # by receipts
