"""One word for what trainer and engine compute in, and torch's switch that belongs to it."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator

import pytest
import torch

from ludic.errors import ConfigError
from ludic.inference.tiny import tiny_model
from ludic.plumbing.precision import (
    Precision,
    autocast,
    check_precision,
    default_precision,
    float32_products,
    sampling_dtype,
    weights_dtype,
)


def tf32() -> bool:
    """torch's switch, which both of its names must agree on."""
    allowed = bool(torch.backends.cuda.matmul.allow_tf32)
    assert (torch.backends.cuda.matmul.fp32_precision == "tf32") == allowed
    return allowed


@pytest.fixture(params=[False, True], ids=["off before", "on before"])
def before(request: pytest.FixtureRequest) -> Iterator[bool]:
    torch.backends.cuda.matmul.allow_tf32 = request.param
    yield request.param
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize(
    ("precision", "inside"), [("tf32", True), ("float32", False), ("mixed", None), (None, None)]
)
def test_the_switch_is_as_the_word_says_and_then_as_before(
    before: bool, precision: Precision | None, inside: bool | None
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with float32_products(precision):
            assert tf32() == (before if inside is None else inside)
        assert tf32() == before
        with pytest.raises(ZeroDivisionError), float32_products(precision):
            raise ZeroDivisionError
        assert tf32() == before


def test_the_switch_of_the_cpu_is_left_alone() -> None:
    own = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    with float32_products("tf32"):
        assert torch.backends.mkldnn.matmul.fp32_precision == own  # type: ignore[attr-defined]


def test_threads_that_hold_it_at_the_same_time_do_not_take_it_from_each_other() -> None:
    entered, leave, seen = threading.Event(), threading.Event(), []

    def engine() -> None:
        with float32_products("tf32"):
            entered.set()
            assert leave.wait(30)
            seen.append(tf32())

    thread = threading.Thread(target=engine)
    with float32_products("tf32"):
        thread.start()
        assert entered.wait(30)
    assert tf32()  # the other one holds it still
    with pytest.raises(ConfigError, match=r"'float32' cannot be used while .*'tf32' is"):
        float32_products("float32").__enter__()
    leave.set()
    thread.join(30)
    assert seen == [True]
    assert not tf32()


def test_a_choice_made_by_torchs_newer_name_is_kept() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with float32_products("float32"):
            assert not tf32()
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_the_words_name_the_types_of_the_weights() -> None:
    words: list[Precision] = ["bfloat16", "mixed", "tf32", "float32"]
    half, full = torch.bfloat16, torch.float32
    assert [weights_dtype(word) for word in words] == [half, full, full, full]
    assert [sampling_dtype(word) for word in words] == [half, half, full, full]
    assert default_precision("cpu") == "float32"


def test_weights_of_another_type_than_the_word_says_are_refused() -> None:
    model = tiny_model(hidden_size=16, layers=1)
    for fits in ("mixed", "tf32", "float32", None):
        check_precision(fits, model, "here")
    with pytest.raises(ConfigError, match=r"here.precision='bfloat16' is for weights in torch.bf"):
        check_precision("bfloat16", model, "here")
    with pytest.raises(ConfigError, match=r"here.precision='float16': must be one of"):
        check_precision("float16", model, "here")  # type: ignore[arg-type]


def test_only_mixed_precision_casts() -> None:
    a = torch.ones(2, 2)
    for precision in ("bfloat16", "tf32", "float32", None):
        with autocast(precision, a.device):
            assert (a @ a).dtype == torch.float32
    with autocast("mixed", a.device):
        assert (a @ a).dtype == torch.bfloat16
