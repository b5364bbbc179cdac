"""Which handles are made, and where tensors are found behind them; `tests/gpu/` opens them.

Memory of this process stands in for a GPU's: the book-keeping is the same.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ludic.distributed.vllm import ipc_handles
from ludic.distributed.vllm.ipc_handles import Exports, Segment, open_tensors

PIECE = 4096


class Memory:
    """Pieces of memory from which tensors are cut, and what was asked of them."""

    def __init__(self, pieces: int = 2) -> None:
        self.pieces = [torch.zeros(PIECE, dtype=torch.uint8) for _ in range(pieces)]
        self.shared: list[int] = []
        self.asked = 0
        self.seen = True

    def tensor(self, piece: int, offset: int, values: Tensor) -> Tensor:
        """A tensor at that place, with a storage of its own, as an allocator makes it."""
        size = values.numel() * values.element_size()
        buffer = self.pieces[piece].numpy()[offset : offset + size]
        found = torch.frombuffer(buffer, dtype=values.dtype).view(values.shape)
        found.copy_(values)
        return found

    def share(self, tensor: Tensor) -> dict[str, Any]:
        begins = tensor.untyped_storage().data_ptr()
        number = next(i for i, p in enumerate(self.pieces) if 0 <= begins - p.data_ptr() < PIECE)
        self.shared.append(number)
        return {
            "gpu": "here",
            "handle": str(number),
            "bytes": tensor.untyped_storage().nbytes(),
            "offset": begins - self.pieces[number].data_ptr(),
        }

    def segments(self, device: int) -> list[Segment]:
        self.asked += 1
        return [Segment(p.data_ptr(), PIECE) for p in self.pieces] if self.seen else []

    def open(self, handle: Any, device: torch.device) -> Tensor:
        begins = handle["offset"]
        return self.pieces[int(handle["handle"])][begins : begins + handle["bytes"]]

    def exports(self) -> Exports:
        return Exports(self.share, self.segments)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    found = Memory()
    monkeypatch.setattr(ipc_handles, "_open", found.open)
    return found


def weights(memory: Memory) -> dict[str, Tensor]:
    return {
        "a": memory.tensor(0, 512, torch.arange(12.0).view(3, 4)),
        "b": memory.tensor(1, 0, torch.arange(7).to(torch.bfloat16)),
        "c": memory.tensor(0, 0, torch.ones(5)),
        "nothing": torch.zeros(0, 3),
    }


def assert_arrives(update: dict[str, Any], sent: dict[str, Tensor]) -> None:
    found = dict(open_tensors(update, torch.device("cpu")))
    assert list(found) == list(sent)
    for name, tensor in sent.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_one_handle_serves_all_tensors_of_a_piece(memory: Memory) -> None:
    sent = weights(memory)
    update = memory.exports().describe(sent)
    assert memory.shared == [0, 1]
    assert [handle["bytes"] for handle in update["memory"]] == [PIECE, PIECE]
    assert_arrives(update, sent)


def test_a_second_publish_makes_no_handle_and_sees_the_new_values(memory: Memory) -> None:
    sent, exports = weights(memory), memory.exports()
    exports.describe(sent)
    sent["a"].mul_(3)
    update = exports.describe(sent)
    assert memory.shared == [0, 1]
    assert memory.asked == 1
    assert_arrives(update, sent)


def test_a_handle_is_not_used_after_what_it_was_made_for_is_gone(memory: Memory) -> None:
    sent, exports = weights(memory), memory.exports()
    exports.describe(sent)
    # Nobody knows now whether the piece was given back and got anew: it is shared again.
    del sent["a"]
    update = exports.describe(sent)
    assert memory.shared == [0, 1, 0]
    assert_arrives(update, sent)


def test_memory_that_the_allocator_does_not_know_is_shared_tensor_by_tensor(
    memory: Memory,
) -> None:
    memory.seen = False
    sent = weights(memory)
    update = memory.exports().describe(sent)
    assert memory.shared == [0, 1, 0]
    assert_arrives(update, sent)


def test_a_piece_that_handle_and_allocator_see_differently_is_not_shared_whole(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins = memory.pieces[0].data_ptr() + 256
    monkeypatch.setattr(memory, "segments", lambda _: [Segment(begins, PIECE - 256)])
    sent = weights(memory)
    update = memory.exports().describe(sent)
    assert [handle["bytes"] for handle in update["memory"]] == [48, 14, 20]
    assert_arrives(update, sent)


def test_parts_of_one_storage_are_found_at_their_places(memory: Memory) -> None:
    whole = memory.tensor(0, 1024, torch.arange(100.0))
    sent = {"first": whole[:10], "last": whole[90:].view(2, 5)}
    for seen in (True, False):
        memory.seen = seen
        update = memory.exports().describe(sent)
        assert len(update["memory"]) == 1
        assert_arrives(update, sent)


def test_weights_of_another_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc_handles, "gpu_name", lambda _: "this one")
    with pytest.raises(ValueError, match="are on GPU that one and this server runs on this one"):
        open_tensors({"memory": [{"gpu": "that one"}], "tensors": []}, torch.device("cuda", 0))
