"""Fused log-probs against whole logits, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from ludic.memory.update import chunk_tokens
from ludic.plumbing.model_parts import LogitRule
from ludic.training.update.logprobs import action_logits, token_logprobs
from ludic.training.update.packing import KeptIds

VOCAB, WIDTH = 23, 7


def make(
    seed: int, tokens: int, *, truncated: bool
) -> tuple[Tensor, Tensor, Tensor, KeptIds | None]:
    gen = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, WIDTH, generator=gen, dtype=torch.float64)
    targets = torch.randint(VOCAB, (tokens,), generator=gen)
    temperatures = 0.3 + torch.rand(tokens, generator=gen, dtype=torch.float64)
    if not truncated:
        return hidden, targets, temperatures, None
    rows = []
    for i in range(tokens):
        if i % 3 == 0:  # nothing was cut from this token's distribution
            rows.append(torch.zeros(0, dtype=torch.int64))
            continue
        others = torch.randperm(VOCAB, generator=gen)[:5]
        rows.append(torch.unique(torch.cat([others, targets[i : i + 1]])))
    lengths = torch.tensor([0, *(len(r) for r in rows)])
    return hidden, targets, temperatures, KeptIds(torch.cat(rows), lengths.cumsum(0))


def reference(
    hidden: Tensor,
    head: nn.Linear,
    targets: Tensor,
    temperatures: Tensor,
    kept: KeptIds | None,
    rule: LogitRule,
) -> tuple[Tensor, Tensor]:
    """Token by token, from whole logits."""
    logprobs, entropies = [], []
    for i in range(len(hidden)):
        logits = hidden[i] @ head.weight.t()
        logits = logits if head.bias is None else logits + head.bias
        logits = logits * rule.scale
        if rule.softcap is not None:
            logits = rule.softcap * torch.tanh(logits / rule.softcap)
        logits = logits / temperatures[i]
        ids = torch.arange(VOCAB)
        if kept is not None and kept.offsets[i] < kept.offsets[i + 1]:
            ids = kept.ids[kept.offsets[i] : kept.offsets[i + 1]]
        logp = logits[ids].log_softmax(0)
        logprobs.append(logp[ids == targets[i]].sum())
        entropies.append(-(logp.exp() * logp).sum())
    return torch.stack(logprobs), torch.stack(entropies)


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    tokens=st.integers(1, 17),
    chunk=st.integers(1, 20),
    bias=st.booleans(),
    truncated=st.booleans(),
    softcap=st.sampled_from([None, 4.0]),
    scale=st.sampled_from([1.0, 0.25]),
    keep=st.integers(0, 20),
)
def test_values_and_gradients_are_those_of_whole_logits(
    seed: int,
    tokens: int,
    chunk: int,
    bias: bool,
    truncated: bool,
    softcap: float | None,
    scale: float,
    keep: int,
) -> None:
    torch.manual_seed(seed)
    head = nn.Linear(WIDTH, VOCAB, bias=bias, dtype=torch.float64)
    hidden, targets, temperatures, kept = make(seed, tokens, truncated=truncated)
    rule = LogitRule(scale, softcap)
    upstream = torch.randn(2, tokens, dtype=torch.float64)
    results = []
    for fused in (True, False):
        h = hidden.clone().requires_grad_()
        head.zero_grad()
        if fused:
            logprobs, entropies = token_logprobs(
                h,
                head,
                targets,
                temperatures,
                kept=kept,
                rule=rule,
                entropy=True,
                chunk=chunk,
                keep_logits=keep,
            )
            assert entropies is not None
        else:
            logprobs, entropies = reference(h, head, targets, temperatures, kept, rule)
        ((logprobs * upstream[0]).sum() + (entropies * upstream[1]).sum()).backward()  # type: ignore[no-untyped-call]
        grads = [h.grad, *(p.grad for p in head.parameters())]
        results.append([logprobs.detach(), entropies.detach(), *grads])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


def test_the_gradient_passes_the_numerical_check() -> None:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCAB, dtype=torch.float64)
    hidden, targets, temperatures, kept = make(3, 5, truncated=True)

    def both(h: Tensor) -> tuple[Tensor, Tensor]:
        logprobs, entropy = token_logprobs(
            h, head, targets, temperatures, kept=kept, entropy=True, chunk=2
        )
        assert entropy is not None
        return logprobs, entropy

    assert torch.autograd.gradcheck(both, (hidden.requires_grad_(),))


def test_logits_for_a_loss_are_those_the_logprobs_come_from() -> None:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCAB, dtype=torch.float64)
    hidden, targets, temperatures, kept = make(1, 9, truncated=True)
    whole = action_logits(hidden, head, temperatures, kept=kept).log_softmax(1)
    ours, _ = token_logprobs(hidden, head, targets, temperatures, kept=kept)
    torch.testing.assert_close(whole.gather(1, targets[:, None])[:, 0], ours)


def test_a_head_that_is_more_than_a_matrix_gives_the_same() -> None:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCAB, dtype=torch.float64)

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = head

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)  # type: ignore[no-any-return]

    hidden, targets, temperatures, kept = make(2, 11, truncated=True)
    results = []
    for module in (head, Wrapped()):
        h = hidden.clone().requires_grad_()
        head.zero_grad()
        logprobs, entropy = token_logprobs(
            h, module, targets, temperatures, kept=kept, entropy=True, chunk=4
        )
        assert entropy is not None
        (logprobs.sum() + (entropy**2).sum()).backward()  # type: ignore[no-untyped-call]
        results.append((logprobs.detach(), entropy.detach(), h.grad, head.weight.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_results_of_a_bfloat16_model_are_float32_and_close() -> None:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCAB)
    hidden, targets, temperatures, _ = make(5, 40, truncated=False)
    exact, _ = token_logprobs(hidden.float(), head, targets, temperatures.float())
    narrow = nn.Linear(WIDTH, VOCAB, dtype=torch.bfloat16)
    narrow.load_state_dict(head.state_dict())
    h = hidden.bfloat16().requires_grad_()
    ours, _ = token_logprobs(h, narrow, targets, temperatures.float())
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().max() < 0.1
    ours.sum().backward()  # type: ignore[no-untyped-call]
    assert h.grad is not None
    assert h.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("vocab", [300, 151_936, 2**24])
def test_a_chunk_holds_at_least_some_tokens_and_at_most_64_mb_on_a_cpu(vocab: int) -> None:
    tokens = chunk_tokens(vocab, 64, "cpu")
    assert tokens == 32 or tokens * vocab * 4 <= 2**26


def test_a_chunk_is_as_large_as_its_device_allows() -> None:
    tokens = chunk_tokens(1000, 64, "cpu")
    assert tokens % 128 == 0
    assert tokens * 1000 * 4 <= 2**26 < (tokens + 128) * 1000 * 4
    for device in ("cpu", "cuda"):
        assert chunk_tokens(2**30, 64, device) == 32


@pytest.mark.parametrize(
    ("vocab", "width", "tokens"),
    [
        (151_936, 1536, 2816),  # 22 times 6 tiles of 128 x 256 are a Hopper's 132
        (152_064, 3584, 2304),  # 18 times 14: two for each, but 12
        (151_936, 896, 3456),  # 2 GiB are not enough for 33 times 4
    ],
)
def test_the_gradient_of_a_chunk_occupies_a_gpu_as_far_as_its_memory_allows(
    vocab: int, width: int, tokens: int
) -> None:
    assert chunk_tokens(vocab, width, "cuda") == tokens
    assert tokens * vocab * 4 <= 2**31


class OnAGPU:
    """What is asked of a tensor before a kernel is chosen for it."""

    is_cuda, dtype, device = True, torch.float32, torch.device("cuda")


def test_the_settings_say_what_works_on_logits_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from ludic.training.update import kernels, logprobs

    def chosen(scales: Any, how: Any) -> Any:
        return logprobs._kernel(logprobs._reduce, scales, how)

    plain, triton = logprobs._reduce, kernels.reduce
    gpu, compiled = OnAGPU(), logprobs._fused(logprobs._reduce)
    assert chosen(gpu, "eager") is plain
    assert chosen(gpu, "compiled") is compiled
    assert chosen(gpu, "triton") is triton
    for works, expected in ((True, triton), (False, plain)):
        monkeypatch.setattr(logprobs, "triton_works", lambda device, works=works: works)
        assert chosen(gpu, "auto") is expected
    for how in ("auto", "triton", "compiled"):
        assert chosen(torch.ones(1), how) is plain
        wide = OnAGPU()
        wide.dtype = torch.float64
        assert chosen(wide, how) is plain


def test_where_a_kernel_cannot_be_compiled_plain_torch_is_used_with_a_word(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ludic.training.update import kernels, logprobs

    works = logprobs.triton_works.__wrapped__
    monkeypatch.setattr(kernels, "reduce", lambda *args: None)
    assert works(torch.device("cpu"))
    assert caplog.messages == []

    def no_compiler(*args: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(kernels, "reduce", no_compiler)
    assert not works(torch.device("cpu"))
    assert "Failed to find C compiler" in caplog.text


def test_log_probs_alone_have_the_same_gradient_whatever_else_is_asked() -> None:
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCAB, dtype=torch.float64)
    hidden, targets, temperatures, kept = make(3, 9, truncated=True)
    found = []
    for entropy in (False, True):
        h = hidden.clone().requires_grad_()
        head.zero_grad()
        logprobs, _ = token_logprobs(
            h, head, targets, temperatures, kept=kept, entropy=entropy, chunk=4
        )
        logprobs.sum().backward()  # type: ignore[no-untyped-call]
        found.append([logprobs.detach(), h.grad, head.weight.grad, head.bias.grad])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    h = hidden.clone().requires_grad_()
    head.zero_grad()
    _, entropies = token_logprobs(h, head, targets, temperatures, entropy=True)
    assert entropies is not None
    entropies.sum().backward()  # type: ignore[no-untyped-call]
    ours = h.grad
    h = hidden.clone().requires_grad_()
    reference(h, head, targets, temperatures, None, LogitRule())[1].sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(ours, h.grad)


def test_what_is_frozen_gets_no_gradient_and_nothing_has_a_gradient_of_zero() -> None:
    hidden, targets, temperatures, _ = make(1, 5, truncated=False)
    for narrow in (None, torch.bfloat16):
        head = nn.Linear(WIDTH, VOCAB)
        head.weight.requires_grad_(False)
        h = hidden.float().requires_grad_()
        logprobs, _ = token_logprobs(h, head, targets, temperatures.float(), narrow=narrow)
        logprobs.sum().backward()  # type: ignore[no-untyped-call]
        assert head.weight.grad is None
        assert head.bias.grad is not None
        assert head.bias.grad.any()
        head = nn.Linear(WIDTH, VOCAB)
        frozen, _ = token_logprobs(
            hidden.float(), head, targets, temperatures.float(), narrow=narrow
        )
        frozen.sum().backward()  # type: ignore[no-untyped-call]
        assert head.weight.grad is not None
        assert head.weight.grad.any()
    head = nn.Linear(WIDTH, VOCAB)
    nothing, entropies = token_logprobs(
        hidden[:0].float(), head, targets[:0], temperatures[:0].float(), entropy=True
    )
    assert nothing.shape == (0,)
    assert entropies is not None
    assert entropies.shape == (0,)
    nothing.sum().backward()  # type: ignore[no-untyped-call]
    assert head.weight.grad is not None
    assert not head.weight.grad.any()


class Adapted(nn.Module):
    """A head that is more than one matrix, as one with an adapter is."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, hidden: Tensor) -> Tensor:
        return self.linear(hidden)  # type: ignore[no-any-return]


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_head_in_mixed_precision_multiplies_in_bfloat16_and_rounds_no_logits(
    softcap: float | None, bias: bool, adapted: bool
) -> None:
    hidden, targets, temperatures, _ = make(1, 12, truncated=False)
    hidden = hidden.float().requires_grad_()
    linear = nn.Linear(WIDTH, VOCAB, bias=bias)
    rounded = nn.Linear(WIDTH, VOCAB, bias=bias).double()
    with torch.no_grad():
        rounded.weight.copy_(linear.weight.bfloat16())
        if bias:
            rounded.bias.copy_(linear.bias)
    rule = LogitRule(softcap=softcap)
    found, _ = token_logprobs(
        hidden,
        Adapted(linear) if adapted else linear,
        targets,
        temperatures.float(),
        rule=rule,
        narrow=torch.bfloat16,
    )
    inputs = hidden.detach().bfloat16().double().requires_grad_()
    wanted, _ = reference(inputs, rounded, targets, temperatures, None, rule)
    assert found.dtype == torch.float32
    # A head of several parts rounds its own output, which nothing here can help.
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=0.05 if adapted else 2e-5)
    found.sum().backward()  # type: ignore[no-untyped-call]
    wanted.sum().backward()  # type: ignore[no-untyped-call]
    assert linear.weight.grad is not None
    assert linear.weight.grad.dtype == hidden.grad.dtype == torch.float32  # type: ignore[union-attr]
    for mine, theirs in (
        (hidden.grad, inputs.grad),
        (linear.weight.grad, rounded.weight.grad),
        *([(linear.bias.grad, rounded.bias.grad)] if bias else []),
    ):
        assert mine is not None
        assert theirs is not None
        torch.testing.assert_close(mine.double(), theirs, rtol=0.05, atol=0.05)


def test_whole_logits_of_a_bfloat16_head_are_not_rounded_either() -> None:
    hidden, _, temperatures, _ = make(1, 12, truncated=False)
    head = nn.Linear(WIDTH, VOCAB, bias=False).bfloat16()
    found = action_logits(hidden.bfloat16(), head, temperatures.float())
    wanted = hidden.bfloat16().double() @ head.weight.double().t() / temperatures[:, None]
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)
