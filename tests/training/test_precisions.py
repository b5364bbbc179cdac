"""Each precision trains, publishes to the engine in this process, and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from ludic.distributed import LocalPolicyPublisher
from ludic.errors import ConfigError
from ludic.inference import HFChatTemplate, InferenceSpec, LocalChatClient, SamplingConfig
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.interaction import Runtime
from ludic.plumbing.precision import Precision, weights_dtype
from ludic.rollouts import EnvSpec, ProtocolSpec, RolloutEngine, RolloutRequest
from ludic.training import RolloutBatchSource, Trainer, TrainerConfig
from ludic.training.config import CheckpointConfig
from ludic.training.update.policy import Policy
from tests.inference.local.test_shadow import is_rounded
from tests.training.synthetic import SyntheticSource, reinforce

PRECISIONS: tuple[Precision, ...] = get_args(Precision)


def model_in(precision: Precision) -> Any:
    return tiny_model().to(weights_dtype(precision))


def settings(precision: Precision, **more: Any) -> TrainerConfig:
    return TrainerConfig(
        learning_rate=1e-3, max_seq_len=512, micro_token_budget=1024, precision=precision, **more
    )


@pytest.mark.parametrize("precision", PRECISIONS)
async def test_each_precision_samples_trains_and_publishes(precision: Precision) -> None:
    model, tokenizer = model_in(precision), tiny_tokenizer()
    before = [p.detach().clone() for p in model.parameters()]
    async with LocalChatClient(model, tokenizer, precision=precision) as client:
        runtime = Runtime(
            client,
            HFChatTemplate(tokenizer),
            "tiny",
            InferenceSpec(SamplingConfig(max_tokens=4)),
        )
        algorithm = reinforce()
        source = RolloutBatchSource(
            engine=RolloutEngine(runtime=runtime),
            request_fn=lambda step: (
                [RolloutRequest(EnvSpec("tic_tac_toe"), ProtocolSpec("single_agent"))] * 2
            ),
            algorithm=algorithm,
            max_steps=1,
        )
        trainer = Trainer(
            model=model,
            algo=algorithm,
            batch_source=source,
            publisher=LocalPolicyPublisher(client),
            cfg=settings(precision),
        )
        for version in (1, 2):
            metrics = await trainer.train_step()
            assert metrics["train/version"] == version
            assert metrics["train/mismatch_abs"] < (
                0.05 if precision in ("bfloat16", "mixed") else 1e-4
            )
            if precision == "mixed":
                assert is_rounded(client, model)
        trainer.close()
    assert all(p.dtype == weights_dtype(precision) for p in model.parameters())
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(("precision", "allowed"), [("tf32", True), ("float32", False)])
async def test_the_switch_for_tf32_is_set_for_the_passes_alone(
    precision: Precision, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    forward = Policy.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(torch.backends.cuda.matmul.allow_tf32)
        return forward(*args, **kwargs)

    monkeypatch.setattr(Policy, "forward", watched)
    torch.backends.cuda.matmul.allow_tf32 = not allowed
    try:
        trainer = Trainer(
            model=model_in(precision),
            algo=reinforce(),
            batch_source=SyntheticSource(),
            cfg=settings(precision, mini_batches=2),
        )
        await trainer.train_step()
        trainer.close()
        assert torch.backends.cuda.matmul.allow_tf32 is not allowed
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert len(seen) > 4
    assert set(seen) == {allowed}


async def test_mixed_products_are_bfloat16_and_the_residual_stream_and_gradients_are_float32() -> (
    None
):
    model = model_in("mixed")
    products, streams = [], []
    layer = model.model.layers[0]
    layer.mlp.up_proj.register_forward_hook(lambda m, i, out: products.append(out.dtype))
    layer.register_forward_hook(lambda m, i, out: streams.append(out.dtype))
    trainer = Trainer(
        model=model, algo=reinforce(), batch_source=SyntheticSource(), cfg=settings("mixed")
    )
    products.clear()
    streams.clear()
    await trainer.train_step()
    trainer.close()
    assert set(products) == {torch.bfloat16}
    assert set(streams) == {torch.float32}
    assert all(
        m is p for m, p in zip(trainer.optimizer.masters.values(), model.parameters(), strict=True)
    )


@pytest.mark.parametrize("precision", PRECISIONS)
async def test_a_resumed_run_goes_on_to_the_bit(tmp_path: Path, precision: Precision) -> None:
    async def train(folder: Path, *steps: int) -> dict[str, torch.Tensor]:
        for upto in steps:
            trainer = Trainer(
                model=(model := model_in(precision)),
                algo=reinforce(),
                batch_source=SyntheticSource(),
                cfg=settings(precision, checkpoint=CheckpointConfig(folder, every=2)),
            )
            await trainer.train(upto)
            trainer.close()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    whole = await train(tmp_path / "whole", 5)
    resumed = await train(tmp_path / "resumed", 2, 5)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


async def test_a_resumed_model_is_what_the_engine_samples_from_in_mixed_precision(
    tmp_path: Path,
) -> None:
    cfg = settings("mixed", checkpoint=CheckpointConfig(tmp_path, every=1))
    for steps in (1, 2):
        model = model_in("mixed")
        async with LocalChatClient(model, tiny_tokenizer(), precision="mixed") as client:
            trainer = Trainer(
                model=model,
                algo=reinforce(),
                batch_source=SyntheticSource(),
                publisher=LocalPolicyPublisher(client),
                cfg=cfg,
            )
            await trainer.start()
            assert trainer.step == steps - 1
            assert is_rounded(client, model)
            await trainer.train(steps)
            trainer.close()


def test_weights_of_another_type_than_the_precision_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"TrainerConfig.precision='mixed' is for weights in"):
        Trainer(
            model=tiny_model().bfloat16(),
            algo=reinforce(),
            batch_source=SyntheticSource(),
            cfg=settings("mixed"),
        )
    with pytest.raises(ConfigError, match=r"LocalChatClient.precision='bfloat16' is for weights"):
        LocalChatClient(tiny_model(), tiny_tokenizer(), precision="bfloat16")
    with pytest.raises(ConfigError, match=r"precision='half': must be one of"):
        TrainerConfig(precision="half")  # type: ignore[arg-type]
