"""CUDA IPC between two processes on one GPU, and the checks of weights that lie there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from ludic.distributed.vllm.checksums import checksums, not_finite
from ludic.distributed.vllm.planes import IPCPlane

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

READER = """
import json, sys
import torch
from ludic.distributed.vllm.checksums import checksums
from ludic.distributed.vllm.ipc_handles import open_tensors

found = open_tensors(json.load(sys.stdin), torch.device("cuda", 0))
print(json.dumps({name: str(total) for name, total in checksums(found).items()}))
"""


def read_elsewhere(update: Mapping[str, Any]) -> dict[str, int]:
    """The checksums that another process computes of what it sees."""
    done = subprocess.run(
        [sys.executable, "-c", READER],
        input=json.dumps(dict(update)),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {name: int(total) for name, total in json.loads(done.stdout).items()}


def weights(seed: int = 0) -> dict[str, Tensor]:
    """Many small tensors, some that fill a piece of memory, one turned, one empty."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

    found = {f"norm.{n}": drawn(896) for n in range(60)}
    found |= {f"bias.{n}": drawn(17 + n, dtype=torch.float32) for n in range(20)}
    found |= {f"proj.{n}": drawn(4864, 896) for n in range(12)}
    found |= {"embed": drawn(40000, 896), "turned": drawn(896, 300).t(), "empty": drawn(0, 4)}
    return found


def on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return checksums((name, tensor.cpu()) for name, tensor in tensors.items())


def test_another_process_sees_every_bit_through_few_handles() -> None:
    sent = weights()
    shipment = IPCPlane().prepare(sent)
    assert len(shipment.update["memory"]) < len(sent) / 2
    assert read_elsewhere(shipment.update) == on_cpu(sent)
    shipment.close()


def test_later_publishes_use_the_same_handles_and_show_the_new_values() -> None:
    plane, sent = IPCPlane(), weights()
    del sent["turned"]  # a copy of it is made each time
    first = plane.prepare(sent)
    assert read_elsewhere(first.update) == on_cpu(sent)
    first.close()
    for _ in range(3):
        for tensor in sent.values():
            tensor.mul_(1.5).add_(1)
        later = plane.prepare(sent)
        assert later.update == first.update
        assert read_elsewhere(later.update) == on_cpu(sent)
        later.close()


def test_memory_that_was_given_back_and_got_again_is_shared_anew() -> None:
    plane = IPCPlane()
    for seed in range(3):
        sent = weights(seed)
        shipment = plane.prepare(sent)
        assert read_elsewhere(shipment.update) == on_cpu(sent)
        shipment.close()
        del sent, shipment
        torch.cuda.empty_cache()


def test_checksums_are_the_same_on_the_gpu_and_on_the_cpu() -> None:
    sent = weights(5)
    sent["odd"] = torch.arange(13, dtype=torch.uint8, device="cuda")
    assert checksums(sent.items()) == on_cpu(sent)
    changed = sent["proj.7"].view(torch.int16)
    changed[3, 5] ^= 1
    after = checksums(sent.items())
    assert after == on_cpu(sent)
    changed[3, 5] ^= 1
    before = checksums(sent.items())
    assert [name for name in after if after[name] != before[name]] == ["proj.7"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_element_that_is_not_finite_is_found_on_the_gpu(bad: float) -> None:
    sent = weights(6)
    assert not_finite(sent.items()) == []
    sent["proj.3"][4000, 17] = bad
    sent["bias.2"][1] = bad
    assert not_finite(sent.items()) == ["bias.2", "proj.3"]
