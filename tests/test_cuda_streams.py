"""Work beside other threads' on a GPU, as far as it can be seen without one."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ludic.plumbing.cuda_streams import aside


def test_each_thread_keeps_one_stream_and_waits_for_it_even_after_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    class Stream:
        waits = 0

        def __init__(self, device: torch.device, priority: int) -> None:
            made.append(self)

        def synchronize(self) -> None:
            self.waits += 1

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    tensor: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))

    def twice() -> None:
        with aside([tensor]):
            pass
        with pytest.raises(RuntimeError, match="half-way"), aside([tensor]):
            raise RuntimeError("half-way")

    for _ in range(2):
        thread = threading.Thread(target=twice)  # not this one: it would keep a stream of the test
        thread.start()
        thread.join(60)
    assert [stream.waits for stream in made] == [2, 2]
