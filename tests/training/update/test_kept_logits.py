"""Logits that stay for the backward pass: made once, and no bit of a gradient changes."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ludic.inference.tiny import tiny_model
from ludic.memory.update import CHUNK_LOGITS
from ludic.plumbing.model_parts import base_causal_lm, head_of
from ludic.training import TrainerConfig
from ludic.training.update import logprobs
from ludic.training.update.logprobs import token_logprobs
from ludic.training.update.packing import lay_out, pack
from ludic.training.update.policy import Policy
from tests.training.synthetic import synthetic_batch
from tests.training.update.test_logprobs import VOCAB, WIDTH, make


class Counted:
    """Makes logits as the head does, counts how often, and knows which are still there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Any] = []
        self.most = 0
        self.own = logprobs._chunk_logits
        monkeypatch.setattr(logprobs, "_chunk_logits", self)

    def __call__(self, *args: Any) -> Tensor:
        logits = self.own(*args)
        self.made.append(weakref.ref(logits))
        self.most = max(self.most, self.alive)
        return logits

    @property
    def alive(self) -> int:
        return sum(made() is not None for made in self.made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("keep", "chunks"), [(0, 0), (3, 0), (4, 1), (9, 2), (16, 4), (17, 5), (99, 5)]
)
def test_logits_that_are_kept_are_not_made_again_and_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, keep: int, chunks: int
) -> None:
    hidden, targets, temperatures, ids = make(4, 17, truncated=True)
    results = []
    for keeping in (0, keep):
        torch.manual_seed(0)
        head = nn.Linear(WIDTH, VOCAB, dtype=dtype)
        h = hidden.to(dtype).requires_grad_()
        counted = Counted(monkeypatch)
        logprobs, entropy = token_logprobs(
            h,
            head,
            targets,
            temperatures.float(),
            kept=ids,
            entropy=True,
            chunk=4,
            keep_logits=keeping,
        )
        assert entropy is not None
        assert counted.alive == (chunks if keeping else 0)
        loss = (logprobs + 0.1 * entropy).sum()
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        assert counted.alive == 0
        assert len(counted.made) == 10 - (chunks if keeping else 0)
        first = [logprobs.detach(), entropy.detach(), h.grad, head.weight.grad, head.bias.grad]
        results.append([t.clone() for t in first if t is not None])
        loss.backward()  # type: ignore[no-untyped-call]
        monkeypatch.undo()
        assert torch.equal(h.grad, 2 * results[-1][2])  # type: ignore[arg-type]
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_a_frozen_head_gets_no_gradient_of_kept_logits_and_scores_keep_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hidden, targets, temperatures, _ = make(4, 17, truncated=False)
    head = nn.Linear(WIDTH, VOCAB, dtype=torch.float64).requires_grad_(False)
    found = []
    for keep in (0, 17):
        h = hidden.clone().requires_grad_()
        logprobs, _ = token_logprobs(h, head, targets, temperatures, chunk=4, keep_logits=keep)
        logprobs.sum().backward()  # type: ignore[no-untyped-call]
        assert head.weight.grad is None
        found.append(h.grad)
    assert found[0] is not None
    assert found[1] is not None
    assert torch.equal(found[0], found[1])
    counted = Counted(monkeypatch)
    with torch.no_grad():
        token_logprobs(
            hidden.requires_grad_(), head, targets, temperatures, chunk=4, keep_logits=17
        )
    assert (counted.most, len(counted.made)) == (1, 5)


def made(kind: str) -> Any:
    """A model whose head is the embedding, is its own, or is frozen below an adapter."""
    model: Any = tiny_model(layers=1).double()
    if kind == "untied":
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    if kind == "adapter":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        config = LoraConfig(
            r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
        )
        model = get_peft_model(model, config).double()
    return model


@pytest.mark.parametrize("kind", ["tied", "untied", "adapter"])
def test_gradients_of_several_passes_are_those_of_whole_logits_by_autograd(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setitem(CHUNK_LOGITS, "cpu", 1)  # chunks of 32 tokens
    layout = lay_out(synthetic_batch(3, 24))
    passes = [pack(layout, range(16), share=True), pack(layout, range(16, 24), share=True)]
    assert len(passes[0].target_ids) > 64
    gradients: list[dict[str, Tensor]] = []
    counts = []
    for keep in (None, 0, 40, 1000):
        model = made(kind)
        counted = Counted(monkeypatch)
        for micro in passes:
            policy = Policy(model, TrainerConfig(keep_logits=keep))
            scored = policy.score(micro, entropy=True, logits=keep is None)
            values, entropy = scored.logprobs, scored.entropy
            if scored.logits is not None:  # autograd's own
                logp = scored.logits.log_softmax(1)
                values = logp.gather(1, micro.target_ids[:, None])[:, 0]
                entropy = -(logp.exp() * logp).sum(1)
            assert entropy is not None
            (values.sum() + 0.3 * (entropy**2).sum()).backward()  # type: ignore[no-untyped-call]
        counts.append(len(counted.made))
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        weight = head_of(base_causal_lm(model)).weight
        assert (weight.grad is None) == (kind == "adapter")
    exact, again, some, whole = gradients
    assert counts[3] < counts[2] < counts[1] == 2 * counts[3]
    for name, gradient in exact.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-9, atol=1e-11)
        assert torch.equal(again[name], some[name])
        assert torch.equal(again[name], whole[name])
