"""Graphs read the weights where they lay at the capture; here with a capture that is none."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from ludic.inference.local import LocalChatClient
from ludic.inference.local.gpu.device_batch import GraphCache
from tests.inference.local.asking import request


class FakeGraph:
    """Remembers nothing: a replay changes no buffer."""

    pools: ClassVar[list[Any]] = []

    def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
        self.pools.append(pool)

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...


class FakeStream:
    def synchronize(self) -> None: ...


@pytest.fixture(autouse=True)
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeGraph.pools.clear()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: FakeStream())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)


def test_graphs_are_kept_over_updates_in_place_and_dropped_when_a_weight_moved() -> None:
    weights = [torch.zeros(4), torch.zeros(4)]
    graphs = GraphCache(torch.device("cpu"), capture=True, weights=lambda: weights)
    calls: list[str] = []
    for key in ("a", "b", "once", "a", "b", "a"):
        graphs.run(key, lambda key=key: calls.append(key))  # type: ignore[misc]
    # Once as it is; met again, once for the capture; then replayed.
    assert calls == ["a", "b", "once", "a", "b"]
    weights[1].add_(1)
    graphs.drop_if_moved()
    assert len(graphs) == 2
    weights[1] = weights[1].clone()
    graphs.drop_if_moved()
    assert len(graphs) == 0
    graphs.run("a", lambda: None)
    graphs.drop_if_moved()
    assert len(graphs) == 1
    first, second, again = FakeGraph.pools
    assert first is second
    assert again is not first  # the pool went with its graphs


@pytest.mark.parametrize("moved", [False, True])
async def test_a_weight_that_is_replaced_in_an_update_is_captured_anew(
    model: Any, tokenizer: Any, moved: bool
) -> None:
    async with LocalChatClient(
        model, tokenizer, deterministic=False, pipelined=True, request_timeout_s=10.0
    ) as client:
        scheduler: Any = client._scheduler
        graphs = scheduler.batch.graphs
        graphs.capture = True
        await client.complete_tokens(request([1, 2], max_tokens=3, seed=0, ignore_eos=True))
        captured = len(graphs)
        assert captured > 0
        norm = model.model.norm
        async with client.updating(version=1):
            if moved:
                norm.weight = torch.nn.Parameter(2 * norm.weight.detach())
            else:
                with torch.no_grad():
                    norm.weight.mul_(2)
        async with client.updating():  # the first one's end has been seen by now
            assert len(graphs) == (0 if moved else captured)
