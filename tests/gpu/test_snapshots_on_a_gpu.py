"""Snapshots of weights on a GPU: whole before the weights change, beside work and captures."""

from __future__ import annotations

import threading

import pytest
import torch

from ludic.distributed.background import SnapshotBuffer
from ludic.distributed.vllm.checksums import receipt
from ludic.plumbing.cuda_streams import aside, capture

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("on_device", [True, False])
def test_a_snapshot_is_of_the_weights_before_the_next_step(on_device: bool) -> None:
    weights = {f"w{n}": torch.full((4096, 1024), float(n), device="cuda") for n in range(24)}
    buffer = SnapshotBuffer(on_device=on_device)
    for step in range(3):
        taken: list[dict[str, torch.Tensor]] = []
        thread = threading.Thread(target=lambda t=taken: t.append(buffer.take(weights)))
        thread.start()
        thread.join()
        for tensor in weights.values():
            tensor.add_(1)
        assert all(bool((taken[0][f"w{n}"] == n + step).all()) for n in range(24))
        assert all(tensor.is_cuda == on_device for tensor in taken[0].values())
        assert on_device or all(tensor.is_pinned() for tensor in taken[0].values())


def test_snapshots_and_checksums_go_on_while_another_thread_captures_a_graph() -> None:
    weights = {"w": torch.randn(1024, 1024, device="cuda")}
    expected = receipt((name, tensor.cpu()) for name, tensor in weights.items())
    work, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
    capturing, checked, pool = threading.Event(), threading.Event(), torch.cuda.graph_pool_handle()

    def captures() -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream), capture(graph, pool):
            work.add_(1)
            capturing.set()
            assert checked.wait(60)
            work.add_(1)

    thread = threading.Thread(target=captures)
    thread.start()
    assert capturing.wait(60)
    try:
        snapshot = SnapshotBuffer(on_device=True).take(weights)
        with aside(snapshot.values()):
            sums = receipt(snapshot.items())
    finally:
        checked.set()
        thread.join()
    assert sums == expected
    graph.replay()
    assert work.tolist() == [2.0] * 8
