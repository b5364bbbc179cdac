"""Precision on a GPU: which kernels run, what TF32 is set to, and what the engine samples from."""

from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F

from ludic.distributed import LocalPolicyPublisher
from ludic.inference import LocalChatClient
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.plumbing.precision import Precision, float32_products, weights_dtype
from ludic.training import Trainer, TrainerConfig
from ludic.training.update.dense_attention import SequenceLengths, in_buckets, one_by_one
from ludic.training.update.logprobs import token_logprobs
from ludic.training.update.packing import lay_out, pack
from ludic.training.update.policy import Policy
from tests.inference.local.asking import ask_all, request
from tests.inference.local.test_shadow import is_rounded
from tests.training.synthetic import SyntheticSource, reinforce, synthetic_batch

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("window", [0, 20])
def test_attention_in_buckets_is_exact_in_float32(window: int) -> None:
    lengths = [60, 61, 70, 3, 1, 1100, 130, 64]
    gen = torch.Generator("cuda").manual_seed(0)
    inputs = [
        torch.randn(1, heads, sum(lengths), 64, device=CUDA, generator=gen) for heads in (9, 3, 3)
    ]
    results = []
    for attend in (in_buckets, one_by_one):
        double = attend is one_by_one
        q, k, v = leaves = [(t.double() if double else t.clone()).requires_grad_() for t in inputs]
        out = attend(q, k, v, SequenceLengths(lengths, CUDA), None, window)
        out.square().sum().backward()  # type: ignore[no-untyped-call]
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for a, b in zip(*results, strict=True):
        assert a is not None
        assert b is not None
        assert (a - b).abs().max() < 1e-4 * max(1.0, b.abs().max().item())


def test_short_sequences_in_float32_are_one_call_for_each_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    real = F.scaled_dot_product_attention

    def count(q: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(tuple(q.shape))
        return real(q, *args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", count)
    model = tiny_model(hidden_size=64, layers=2).to(CUDA)
    layout = lay_out(synthetic_batch(0, rollouts=64))
    buckets = len(SequenceLengths([p.input_ids.size for p in layout.packed], CUDA).buckets[0])
    Policy(model).score(pack(layout, range(64)).to(CUDA)).logprobs.sum().backward()  # type: ignore[no-untyped-call]
    assert buckets <= 3
    assert len(calls) == 2 * buckets


def test_tf32_is_on_or_off_as_the_word_says() -> None:
    """Off is shown by the numbers: TF32 keeps ten bits of each factor."""
    gen = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(512, 512, device=CUDA, generator=gen) for _ in range(2))
    exact = a.double() @ b.double()
    with float32_products("float32"):
        assert not torch.backends.cuda.matmul.allow_tf32
        strict = (a @ b - exact).abs().mean().item()
    with float32_products("tf32"):
        loose = (a @ b - exact).abs().mean().item()
    assert strict < 1e-4 < loose


@pytest.mark.parametrize("precision", get_args(Precision))
async def test_each_precision_trains_and_publishes(precision: Precision) -> None:
    model = tiny_model(hidden_size=64).to(CUDA, weights_dtype(precision))
    async with LocalChatClient(model, tiny_tokenizer(), precision=precision) as client:
        trainer = Trainer(
            model=model,
            algo=reinforce(),
            batch_source=SyntheticSource(),
            publisher=LocalPolicyPublisher(client),
            cfg=TrainerConfig(learning_rate=1e-3, precision=precision),
        )
        before = await ask_all(client, [request([1, 2, 3], max_tokens=8, seed=1)])
        for _ in range(3):
            await trainer.train_step()
            if precision == "mixed":
                assert is_rounded(client, model)
        after = await ask_all(client, [request([1, 2, 3], max_tokens=8, seed=1)])
        trainer.close()
    assert before[0].trace is not None
    assert after[0].trace is not None
    assert before[0].trace.completion_logprobs != after[0].trace.completion_logprobs


@pytest.mark.parametrize(
    ("dtype", "narrow"),
    [
        (torch.bfloat16, None),
        (torch.float16, None),
        (torch.float32, torch.bfloat16),
        (torch.float32, None),
        (torch.float64, None),
    ],
)
def test_chunks_are_added_up_by_their_products_and_kept_logits_change_no_bit(
    dtype: torch.dtype, narrow: torch.dtype | None
) -> None:
    gen = torch.Generator("cuda").manual_seed(0)
    head = torch.nn.Linear(64, 5003, bias=False, device=CUDA, dtype=dtype)
    hidden = torch.randn(700, 64, device=CUDA, generator=gen).to(dtype)
    targets = torch.randint(5003, (700,), device=CUDA, generator=gen)
    temperatures = 0.5 + torch.rand(700, device=CUDA, generator=gen)

    def scored(head: torch.nn.Linear, **settings: Any) -> list[torch.Tensor]:
        leaf = hidden.to(head.weight.dtype, copy=True).requires_grad_()
        head.weight.grad = None
        found, entropies = token_logprobs(
            leaf, head, targets, temperatures, entropy=True, **settings
        )
        assert entropies is not None
        with float32_products("float32"):
            (found + 0.3 * entropies).sum().backward()  # type: ignore[no-untyped-call]
        assert head.weight.grad is not None
        assert leaf.grad is not None
        return [found.detach(), leaf.grad, head.weight.grad]

    with float32_products("float32"):
        again, some, whole = (
            scored(head, chunk=128, narrow=narrow, keep_logits=keep) for keep in (0, 300, 700)
        )
        exact = scored(head.double(), chunk=1000)
    for a, b, c, wanted in zip(again, some, whole, exact, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
        tolerance = 0.02 if (narrow or dtype).itemsize == 2 else 1e-4
        assert (a - wanted).norm() < tolerance * wanted.norm()


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("narrow", [None, torch.bfloat16])
def test_all_ways_to_log_probs_agree(entropy: bool, narrow: torch.dtype | None) -> None:
    gen = torch.Generator("cuda").manual_seed(0)
    head = torch.nn.Linear(64, 5003, bias=False, device=CUDA)
    hidden = torch.randn(70, 64, device=CUDA, generator=gen)
    targets = torch.randint(5003, (70,), device=CUDA, generator=gen)
    temperatures = 0.5 + torch.rand(70, device=CUDA, generator=gen)
    results: list[list[torch.Tensor]] = []
    for kernels in ("eager", "triton", "compiled"):
        leaf = hidden.clone().requires_grad_()
        head.weight.grad = None
        found, entropies = token_logprobs(
            leaf, head, targets, temperatures, entropy=entropy, narrow=narrow, kernels=kernels
        )
        total = found.sum() if entropies is None else (found + 0.3 * entropies).sum()
        total.backward()  # type: ignore[no-untyped-call]
        assert head.weight.grad is not None
        assert leaf.grad is not None
        results.append([found.detach(), leaf.grad, head.weight.grad.clone()])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 if narrow is None else 2e-2)
