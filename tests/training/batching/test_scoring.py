"""Reference and teacher log-probs: from a local model, from a client, from several teachers."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from ludic.errors import BatchError, ConfigError, DeadlineError, NotTrainableError, UnknownNameError
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.saw.batch import make_batch
from ludic.saw.items import SampleAttachments, SAWBatch, SAWItem
from ludic.training import ReplayBufferSource, Trainer, TrainerConfig, make_reinforce
from ludic.training.batching.scoring import (
    ClientScores,
    LocalScores,
    ReferenceScorer,
    RoutedScores,
    ScoredBatchSource,
    TeacherScorer,
)
from ludic.training.update import checks
from ludic.training.update import scores as scores_module
from ludic.types import ChatResponse, FinishReason
from tools.families import tiny


class Silent:
    async def next_batch(self) -> SAWBatch:
        raise StopAsyncIteration


def make_item(length: int, seed: int, **changes: Any) -> SAWItem:
    rng = np.random.default_rng(seed)
    mask = (rng.random(length) < 0.5).astype(np.int8)
    mask[0], mask[-1] = 0, 1
    return SAWItem(
        input_ids=rng.integers(0, 256, length),
        attention_mask=np.ones(length, dtype=np.int8),
        action_mask=mask,
        weight=1.0,
        rollout_id=f"r{seed}",
        **changes,
    )


@torch.no_grad()
def plain_scores(model: Any, item: SAWItem) -> list[float]:
    """One forward pass over the whole row, and a softmax over every position."""
    logits = model(input_ids=torch.from_numpy(item.input_ids)[None]).logits[0].double()
    kept = item.attachments.kept_token_ids
    found = []
    for number, place in enumerate(np.flatnonzero(item.action_mask)):
        row = logits[place - 1] / item.temperature
        if kept is not None and len(kept[number]):
            cut = torch.full_like(row, -torch.inf)
            cut[torch.from_numpy(kept[number])] = row[torch.from_numpy(kept[number])]
            row = cut
        found.append(row.log_softmax(0)[item.input_ids[place]].item())
    return found


async def test_a_local_model_scores_like_a_plain_forward_pass_at_each_items_temperature() -> None:
    items = [make_item(n, n, temperature=t) for n, t in ((5, 1.0), (17, 0.7), (9, 1.3))]
    truncated = make_item(8, 8)
    targets = truncated.input_ids[np.flatnonzero(truncated.action_mask)]
    kept = tuple(np.array([t, (t + 1) % 256, (t + 2) % 256]) for t in targets)
    items.append(replace(truncated, attachments=SampleAttachments(kept_token_ids=kept)))
    scores = await LocalScores(tiny_model(), micro_token_budget=20).logprobs(items)
    for item, found in zip(items, scores, strict=True):
        assert found.tolist() == pytest.approx(plain_scores(tiny_model(), item), abs=1e-4)


@pytest.mark.parametrize("name", ["phi3 with longrope", "llama with dynamic rope"])
async def test_rows_past_a_threshold_leave_the_scores_of_the_others_alone(name: str) -> None:
    model = tiny(name)
    items = [
        replace(item, input_ids=item.input_ids % 96)
        for item in (make_item(n, n) for n in (11, 30, 7, 21, 12))
    ]
    scores = await LocalScores(model).logprobs(items)
    for item, found in zip(items, scores, strict=True):
        assert found.tolist() == pytest.approx(plain_scores(tiny(name), item), abs=1e-4)


async def test_packing_is_tried_at_the_length_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    real = checks.check_packing

    def noting(policy: Any, device: torch.device, longest: int) -> None:
        tried.append(longest)
        real(policy, device, longest)

    monkeypatch.setattr(checks, "check_packing", noting)
    scores = LocalScores(tiny_model())
    for length in (5, 2049, 3000, 9):
        await scores.logprobs([make_item(length, length)])
    assert tried == [2048, 4096]


@pytest.mark.parametrize("packs", [True, False])
async def test_a_reference_that_is_the_base_of_the_trained_model_stays_right(
    tmp_path: Path, packs: bool
) -> None:
    from peft import LoraConfig, get_peft_model

    adapter = LoraConfig(target_modules=["q_proj"], lora_dropout=0.5, init_lora_weights=False)
    model = get_peft_model(tiny_model(), adapter).train()
    reference = LocalScores(model, without_adapter=True)
    trainer = Trainer(
        model=model,
        algo=make_reinforce(),
        batch_source=Silent(),
        cfg=TrainerConfig(run_dir=tmp_path),
    )
    if not packs:
        trainer.policy.one_at_a_time("a test")
    items = [make_item(n, n) for n in (5, 12, 9)]
    for item, found in zip(items, await reference.logprobs(items), strict=True):
        assert found.tolist() == pytest.approx(plain_scores(tiny_model(), item), abs=1e-4)
    trainer.close()


def adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))


async def test_what_is_frozen_of_an_adapter_stays_frozen_where_its_base_scores() -> None:
    model = adapted()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    await LocalScores(model, without_adapter=True).logprobs([make_item(5, 5)])
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2
    assert all("lora_B" in name for name in trained)


@pytest.mark.parametrize("routed", [False, True])
def test_the_base_of_the_trained_model_is_no_reference_for_batches_that_are_made_ahead(
    tmp_path: Path, routed: bool
) -> None:
    """Passes would be computed without the adapter while the next batch is scored."""
    model, another = adapted(), adapted()

    def train_with(scored: Any, *, overlap: bool) -> None:
        scores: Any = LocalScores(scored, without_adapter=True)
        scorer = TeacherScorer(RoutedScores({"a": scores})) if routed else ReferenceScorer(scores)
        source = ScoredBatchSource(Silent(), [scorer])
        cfg = TrainerConfig(run_dir=tmp_path, overlap=overlap)
        Trainer(model=model, algo=make_reinforce(), batch_source=source, cfg=cfg).close()

    train_with(model, overlap=False)
    train_with(another, overlap=True)
    with pytest.raises(ConfigError, match="with the trained model, or its base, while"):
        train_with(model, overlap=True)


def test_the_trained_model_is_no_reference_for_itself(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = tiny_model()
    apart = copy.deepcopy(base)
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj"]))

    def train_with(scores: LocalScores, **settings: Any) -> None:
        source = ReplayBufferSource(ScoredBatchSource(Silent(), [ReferenceScorer(scores)]))
        cfg = TrainerConfig(run_dir=tmp_path, **settings)
        Trainer(model=model, algo=make_reinforce(), batch_source=source, cfg=cfg).close()

    train_with(LocalScores(apart), overlap=True)
    train_with(LocalScores(model, without_adapter=True))
    for itself in (model, base):  # PEFT puts the adapter into the base
        train_with(LocalScores(itself), epochs=2)  # a trust region around each batch's policy
        with pytest.raises(ConfigError, match="its KL is always 0"):
            train_with(LocalScores(itself))
        with pytest.raises(ConfigError, match="while it is trained"):
            train_with(LocalScores(itself), overlap=True)
    model.requires_grad_(False)  # as PeftModel.from_pretrained leaves an adapter
    with pytest.raises(ConfigError, match="no parameter that requires a gradient"):
        train_with(LocalScores(apart))


async def test_the_adapter_is_on_again_for_whoever_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, scoring = adapted(), threading.Event()
    reference = LocalScores(model, without_adapter=True)

    def slow(*_: Any) -> None:
        scoring.set()
        time.sleep(0.3)

    monkeypatch.setattr(scores_module, "score_layout", slow)
    task = asyncio.ensure_future(reference.logprobs([make_item(5, 5)]))
    await asyncio.to_thread(scoring.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert any(p.requires_grad for p in model.parameters())  # as PEFT has them with it off: none


async def test_a_model_that_drops_units_does_not_score() -> None:
    model = tiny_model()
    scores = LocalScores(model)
    model.model.layers[0].mlp.drop = torch.nn.Dropout(0.1)
    model.train()
    with pytest.raises(ConfigError, match=r"mlp.drop \(p=0.1\): its scores would be random"):
        await scores.logprobs([make_item(5, 5)])
    model.eval()
    await scores.logprobs([make_item(5, 5)])


async def test_a_client_scores_as_the_local_model_does() -> None:
    from ludic.inference import LocalChatClient

    items = [make_item(n, n, temperature=0.8) for n in (5, 12)]
    local = await LocalScores(tiny_model(seed=3)).logprobs(items)
    async with LocalChatClient(tiny_model(seed=3), tiny_tokenizer()) as client:
        remote = await ClientScores(client, "tiny", tempered=True).logprobs(items)
    for ours, theirs in zip(local, remote, strict=True):
        assert theirs.tolist() == pytest.approx(ours.tolist(), abs=1e-4)


class Source:
    def __init__(self, batch: SAWBatch) -> None:
        self.batch, self.position = batch, 0

    async def next_batch(self) -> SAWBatch:
        self.position += 1
        return self.batch

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: Any) -> None:
        self.position = state["position"]


class Fixed:
    def __init__(self, value: float) -> None:
        self.value = value

    async def logprobs(self, items: Sequence[SAWItem]) -> list[Any]:
        return [np.full(int(i.action_mask.sum()), self.value, dtype=np.float32) for i in items]


async def test_scorers_attach_their_log_probs_and_leave_the_rest() -> None:
    batch = make_batch([make_item(5, 1), make_item(6, 2)], {"reward": 1.0})
    scored = await ReferenceScorer(Fixed(-1.0)).score(batch)
    scored = await TeacherScorer(Fixed(-2.0)).score(scored)
    assert scored.meta == {"reward": 1.0}
    assert scored.counts == batch.counts
    for item in scored.items:
        assert set(item.attachments.reference_logprobs.tolist()) == {-1.0}  # type: ignore[union-attr]
        assert set(item.attachments.teacher_logprobs.tolist()) == {-2.0}  # type: ignore[union-attr]


async def test_each_item_is_scored_by_the_teacher_that_it_names() -> None:
    items = [make_item(4 + i, i, meta={"teacher": name}) for i, name in enumerate("abab")]
    routed = RoutedScores({"a": Fixed(-1.0), "b": Fixed(-2.0)})
    batch = await TeacherScorer(routed).score(make_batch(items))
    values = [set(i.attachments.teacher_logprobs.tolist()) for i in batch.items]  # type: ignore[union-attr]
    assert values == [{-1.0}, {-2.0}, {-1.0}, {-2.0}]
    with pytest.raises(UnknownNameError, match=r"rollout 'r9'.*'c'"):
        await routed.logprobs([make_item(4, 9, meta={"teacher": "c"})])


async def test_scores_that_are_not_finite_are_refused() -> None:
    with pytest.raises(BatchError, match=r"r1.*not all finite"):
        await ReferenceScorer(Fixed(float("nan"))).score(make_batch([make_item(5, 1)]))


class Server:
    """A client that answers what it is told to, for faults a real one does not produce."""

    max_context_tokens = None

    def __init__(self, info: dict[str, Any] | None) -> None:
        self.info = info

    async def complete_tokens(self, request: TokenCompletionRequest) -> ChatResponse:
        if self.info is None:
            await asyncio.sleep(60)
        return ChatResponse(None, FinishReason.STOP, info=self.info or {})

    async def sync_weights(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError


async def test_a_client_that_cannot_score_is_named() -> None:
    item = make_item(5, 1)
    with pytest.raises(BatchError, match="none prompt log-probs for 5"):
        await ClientScores(Server({}), "t").logprobs([item])
    with pytest.raises(BatchError, match="2 prompt log-probs for 5"):
        await ClientScores(Server({"prompt_logprobs": [None, -1.0]}), "t").logprobs([item])
    with pytest.raises(BatchError, match="without a log-prob"):
        await ClientScores(Server({"prompt_logprobs": [None] * 5}), "t").logprobs([item])
    with pytest.raises(DeadlineError, match=r"scores of rollout 'r1' from 't'"):
        await ClientScores(Server(None), "t", timeout_s=0.05).logprobs([item])


async def test_a_server_is_not_asked_for_what_it_cannot_reproduce() -> None:
    server = Server({"prompt_logprobs": [None, -1.0, -1.0, -1.0, -1.0]})
    with pytest.raises(NotTrainableError, match=r"temperature 0.7"):
        await ClientScores(server, "t").logprobs([make_item(5, 1, temperature=0.7)])
    item = make_item(5, 1)
    kept = tuple(np.array([1, 2]) for _ in range(int(item.action_mask.sum())))
    item = replace(item, attachments=SampleAttachments(kept_token_ids=kept))
    with pytest.raises(NotTrainableError, match="truncation"):
        await ClientScores(server, "t").logprobs([item])


async def test_the_base_of_an_adapter_is_scored_with_the_adapter_off() -> None:
    from peft import LoraConfig, get_peft_model

    item = make_item(9, 4)
    base = await LocalScores(tiny_model()).logprobs([item])
    adapted = get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.5)
    on = await LocalScores(adapted).logprobs([item])
    off = await LocalScores(adapted, without_adapter=True).logprobs([item])
    assert off[0].tolist() == pytest.approx(base[0].tolist(), abs=1e-5)
    assert on[0].tolist() != pytest.approx(base[0].tolist(), abs=1e-3)


class Bounded(Server):
    """A server with a context of five tokens, one of them for the completion it insists on."""

    max_context_tokens = 5  # type: ignore[assignment]

    async def complete_tokens(self, request: TokenCompletionRequest) -> ChatResponse:
        assert len(request.prompt_token_ids) + 1 <= 5
        scores = [None, *(-float(i) for i in range(1, len(request.prompt_token_ids)))]
        return ChatResponse(None, FinishReason.LENGTH, info={"prompt_logprobs": scores})


async def test_a_row_that_fills_the_context_is_scored() -> None:
    item = make_item(5, 1)
    count = int(item.action_mask.sum())
    sampled = SampleAttachments(behavior_logprobs=np.full(count, -0.25, np.float32))
    (found,) = await ClientScores(Bounded({}), "t").logprobs([replace(item, attachments=sampled)])
    assert found.tolist() == [*(-float(i) for i in np.flatnonzero(item.action_mask)[:-1]), -0.25]
    with pytest.raises(BatchError, match=r"'r1' has 5 tokens.*context of at least 6"):
        await ClientScores(Bounded({}), "t").logprobs([item])
    with pytest.raises(BatchError, match=r"'r1' has 6 tokens.*context of at least 7"):
        await ClientScores(Bounded({}), "t").logprobs([make_item(6, 1)])


async def test_a_teacher_whose_rows_do_not_pack_is_scored_row_by_row() -> None:
    from tools.families import tiny

    teacher = tiny("lfm2")
    items = [make_item(n, n) for n in (6, 9, 14)]
    items = [replace(item, input_ids=item.input_ids % 96) for item in items]
    wanted = [plain_scores(teacher, item) for item in items]
    scores = await LocalScores(teacher).logprobs(items)
    for found, plain in zip(scores, wanted, strict=True):
        assert found.tolist() == pytest.approx(plain, abs=1e-4)
