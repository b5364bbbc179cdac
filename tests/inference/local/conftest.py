"""A tiny model and its tokenizer, on one thread."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ludic.inference.tiny import tiny_model, tiny_tokenizer


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """The promise of equal bits is for one number of threads; this is the one of these tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return tiny_tokenizer()


@pytest.fixture
def model() -> Any:
    return tiny_model()
