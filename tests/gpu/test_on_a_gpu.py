"""The parts that run other code on a GPU: graphs, packed kernels, fused log-probs, bfloat16."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from ludic.distributed import LocalPolicyPublisher
from ludic.inference import HFChatTemplate, InferenceSpec, LocalChatClient, SamplingConfig
from ludic.inference.client import TokenCompletionRequest
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.interaction import Runtime
from ludic.rollouts import EnvSpec, ProtocolSpec, RolloutEngine, RolloutRequest
from ludic.saw import make_batch
from ludic.saw.items import SampleAttachments, SAWItem, TurnSpan
from ludic.training import RolloutBatchSource, Trainer, TrainerConfig, make_grpo, make_reinforce
from ludic.training.config import AttentionKind, CheckpointConfig
from ludic.training.update.checks import check_packing
from ludic.training.update.logprobs import token_logprobs
from ludic.training.update.packing import lay_out, pack
from ludic.training.update.policy import Policy

pytestmark = pytest.mark.gpu


def requests(count: int) -> list[TokenCompletionRequest]:
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 256, 70).tolist()
    return [
        TokenCompletionRequest(
            "tiny",
            (*(shared if i % 2 else ()), *rng.integers(0, 256, int(rng.integers(1, 90))).tolist()),
            SamplingConfig(
                seed=i,
                max_tokens=int(rng.integers(1, 80)),
                temperature=(1.0, 0.7)[i % 2],
                top_k=(0, 0, 0, 9)[i % 4],
            ),
        )
        for i in range(count)
    ]


async def test_the_engines_log_probs_are_those_of_a_plain_pass() -> None:
    model = tiny_model(hidden_size=128, layers=3, initializer_range=0.02).cuda()
    asked = requests(64)
    async with LocalChatClient(model, tiny_tokenizer(), max_slots=16) as client:
        answers = await asyncio.gather(*(client.complete_tokens(r) for r in asked))
        assert client.stats()["slots_taken"] == 0
    for request, answer in zip(asked, answers, strict=True):
        trace = answer.trace
        assert trace is not None
        assert trace.completion_logprobs is not None
        if request.sampling.truncates:
            continue
        ids, n = trace.token_ids, len(trace.prompt_token_ids)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids], device="cuda")).logits[0].float()
        logp = torch.log_softmax(logits / request.sampling.temperature, -1).cpu()
        wanted = logp[torch.arange(n - 1, len(ids) - 1), list(ids[n:])]
        got = torch.tensor(trace.completion_logprobs)
        torch.testing.assert_close(got, wanted, atol=2e-4, rtol=0)


async def test_an_update_in_place_is_seen_by_the_captured_graphs() -> None:
    model = tiny_model(hidden_size=64).cuda()
    request = TokenCompletionRequest("tiny", (65, 66, 67), SamplingConfig(seed=1, max_tokens=24))
    async with LocalChatClient(model, tiny_tokenizer(), max_slots=8) as client:
        before = await client.complete_tokens(request)
        async with client.updating():
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)
        client.set_version(1)
        after = await client.complete_tokens(request)
    async with LocalChatClient(model, tiny_tokenizer(), max_slots=8) as fresh:
        anew = await fresh.complete_tokens(request)
    assert before.trace is not None
    assert after.trace is not None
    assert anew.trace is not None
    assert after.trace.completion_token_ids == anew.trace.completion_token_ids
    assert after.trace.completion_logprobs != before.trace.completion_logprobs
    assert {span.version for span in after.trace.version_spans} == {1}


def items(count: int) -> list[SAWItem]:
    rng = np.random.default_rng(3)
    made = []
    for i in range(count):
        length, actions = int(rng.integers(8, 120)), int(rng.integers(1, 7))
        mask = np.zeros(length, np.int8)
        mask[-actions:] = 1
        facts = SampleAttachments(
            behavior_logprobs=np.full(actions, -4.0, np.float32),
            token_weights=np.full(actions, rng.normal(), np.float32),
        )
        weight = float(facts.token_weights[0]) if facts.token_weights is not None else 0.0
        made.append(
            SAWItem(
                rng.integers(0, 250, length),
                np.ones(length, np.int8),
                mask,
                weight,
                attachments=facts,
                turns=(TurnSpan(0, actions, 0, weight),),
                rollout_id=str(i),
            )
        )
    return made


def test_the_packed_kernel_agrees_with_one_sequence_at_a_time() -> None:
    layout = lay_out(make_batch(items(12)), max_seq_len=256)
    micro = pack(layout, range(12)).to(torch.device("cuda"))
    found = {}
    kinds: tuple[AttentionKind, AttentionKind] = ("sdpa", "varlen")
    for chosen in kinds:
        model = tiny_model(hidden_size=128, heads=2, kv_heads=1, initializer_range=0.02)
        model.to("cuda", torch.bfloat16)
        policy = Policy(model, TrainerConfig(attention=chosen))
        logprobs = policy.score(micro).logprobs
        logprobs.sum().backward()  # type: ignore[no-untyped-call]
        gradient = torch.cat(
            [p.grad.float().flatten() for p in model.parameters() if p.grad is not None]
        )
        found[chosen] = (logprobs.detach(), gradient)
    torch.testing.assert_close(found["varlen"][0], found["sdpa"][0], atol=0.03, rtol=0)
    assert torch.cosine_similarity(found["varlen"][1], found["sdpa"][1], dim=0) > 0.99


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_on_a_gpu_is_not_taken_for_rows_that_leak(dtype: torch.dtype) -> None:
    model = tiny_model(hidden_size=512, layers=12, heads=8, initializer_range=0.05)
    policy = Policy(model.to("cuda", dtype))
    check_packing(policy, torch.device("cuda"))
    assert policy.packs


def test_fused_log_probs_agree_with_whole_logits_in_float64() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(300, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = torch.nn.Linear(64, 5000, bias=False, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(0, 5000, (300,), device="cuda")
    temperatures = torch.rand(300, device="cuda") + 0.5
    logprobs, entropy = token_logprobs(hidden, head, targets, temperatures, entropy=True, chunk=128)
    assert entropy is not None
    (logprobs.sum() + entropy.sum()).backward()  # type: ignore[no-untyped-call]
    wide = hidden.detach().double().requires_grad_()
    logits = wide @ head.weight.detach().double().t() / temperatures.double()[:, None]
    logp = torch.log_softmax(logits, -1)
    wanted = logp.gather(1, targets[:, None])[:, 0]
    wanted_entropy = -(logp.exp() * logp).sum(1)
    (wanted.sum() + wanted_entropy.sum()).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(logprobs.double(), wanted, atol=1e-4, rtol=0)
    torch.testing.assert_close(entropy.double(), wanted_entropy, atol=1e-4, rtol=0)
    assert hidden.grad is not None
    assert wide.grad is not None
    gap = (hidden.grad.double() - wide.grad).norm() / wide.grad.norm()
    assert gap < 1e-2


async def test_sampling_and_training_share_one_bfloat16_module() -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_model(hidden_size=128, heads=2, kv_heads=2, initializer_range=0.02)
    model.to("cuda", torch.bfloat16)
    template = HFChatTemplate(tokenizer)
    async with LocalChatClient(model, tokenizer, max_slots=16) as client:
        spec = InferenceSpec(SamplingConfig(max_tokens=6))
        engine = RolloutEngine(runtime=Runtime(client, template, "tiny", spec))
        game = RolloutRequest(EnvSpec("tic_tac_toe"), ProtocolSpec("single_agent", {}))
        algorithm = make_grpo(group_size=4)
        source = RolloutBatchSource(
            engine=engine, request_fn=lambda step: [game] * 2, algorithm=algorithm, max_steps=2
        )
        trainer = Trainer(
            model=model,
            algo=algorithm,
            batch_source=source,
            publisher=LocalPolicyPublisher(client),
            cfg=TrainerConfig(learning_rate=1e-3),
        )
        metrics = [await trainer.train_step() for _ in range(3)]
        trainer.close()
    assert all(m["train/mismatch_abs"] < 0.05 for m in metrics)
    assert all(p.dtype is torch.bfloat16 for p in model.parameters())
    assert metrics[-1]["train/version"] == 3


async def test_a_step_moves_bfloat16_weights_by_their_float32_masters() -> None:
    model = tiny_model(hidden_size=64).to("cuda", torch.bfloat16)
    batch = make_batch(items(8))

    class Source:
        async def next_batch(self):  # type: ignore[no-untyped-def]
            return batch

    trainer = Trainer(
        model=model,
        algo=make_reinforce(),
        batch_source=Source(),
        cfg=TrainerConfig(learning_rate=1e-5),
    )
    for _ in range(3):
        await trainer.train_step()
    trainer.close()
    for name, parameter in model.named_parameters():
        master = trainer.optimizer.masters[name]
        assert master.dtype is torch.float32
        assert torch.equal(master.to(torch.bfloat16), parameter.data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    batch = make_batch(items(8))

    class Source:
        async def next_batch(self):  # type: ignore[no-untyped-def]
            return batch

    async def train(folder: Path, steps: int) -> dict[str, torch.Tensor]:
        model = tiny_model(hidden_size=64).to("cuda", dtype)
        trainer = Trainer(
            model=model,
            algo=make_reinforce(),
            batch_source=Source(),
            cfg=TrainerConfig(
                learning_rate=1e-3,
                run_dir=folder,
                checkpoint=CheckpointConfig(folder / "checkpoints", every=2),
            ),
        )
        await trainer.train(steps)
        trainer.close()
        return {name: p.detach() for name, p in model.named_parameters()}

    straight = await train(tmp_path / "straight", 4)
    await train(tmp_path / "stopped", 2)
    resumed = await train(tmp_path / "stopped", 4)
    for name, weight in straight.items():
        torch.testing.assert_close(resumed[name], weight)
