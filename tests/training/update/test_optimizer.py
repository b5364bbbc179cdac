"""Masters in float32: small steps add up, and LoRA trains only its own."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from ludic.errors import CheckpointError, ConfigError, PublishError
from ludic.inference.tiny import tiny_model
from ludic.sharding import weights as weights_module
from ludic.sharding.weights import ModelWeights, dithered
from ludic.training.config import (
    CheckpointConfig,
    TrainerConfig,
    curve,
    describe_change,
    learning_rate,
)
from ludic.training.trainer import Trainer
from ludic.training.update.optimizer import MasterAdamW
from tests.training.synthetic import RecordingPublisher, SyntheticSource, reinforce


def test_steps_too_small_for_bfloat16_are_not_lost() -> None:
    parameter = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = MasterAdamW([("w", parameter)], TrainerConfig(learning_rate=1e-5))
    start = optimizer.masters["w"].clone()
    for _ in range(1000):
        parameter.grad = torch.ones_like(parameter)
        optimizer.accumulate()
        optimizer.step(1e-5)
    assert parameter.dtype == torch.bfloat16
    assert optimizer.masters["w"].dtype == torch.float32
    assert torch.allclose(optimizer.masters["w"], start - 0.01, atol=1e-4)
    assert torch.equal(parameter, optimizer.masters["w"].bfloat16())
    assert parameter[0, 0].item() < 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_master_rounds_to_its_weight_and_lies_anywhere_among_those_that_do(
    dtype: torch.dtype,
) -> None:
    gen = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 70, generator=gen).to(dtype)
    weight[0, :5] = 0.0
    weight[1, :5] = 1.0
    master = dithered(weight, 1)
    assert master.dtype == torch.float32
    assert torch.equal(master.to(dtype), weight)
    assert torch.equal(master[0, :5], torch.zeros(5))
    assert len(set(master[1, :5].tolist())) > 1  # as a norm's weights are, at first
    spacing = torch.finfo(dtype).eps / 2 * 2.0 ** torch.frexp(weight.float()).exponent
    place = (master - weight.float()) / spacing
    assert place.abs().max() <= 0.5
    assert place.mean().abs() < 0.01
    assert place.std() == pytest.approx(1 / 12**0.5, abs=0.01)


def test_masters_are_the_same_however_the_weight_is_sharded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = torch.randn(10, 7).bfloat16()
    whole = dithered(weight, 1)
    monkeypatch.setattr(weights_module, "_DITHERED_AT_ONCE", 11)
    assert torch.equal(dithered(weight, 1), whole)
    monkeypatch.setattr(weights_module, "local_rows", lambda rows: (rows, 4, (10, 7)))
    assert torch.equal(dithered(weight[4:], 1), whole[4:])
    assert not torch.equal(dithered(weight[4:], 2), whole[4:])


def test_bfloat16_weights_move_in_proportion_from_the_first_step_on() -> None:
    gen = torch.Generator().manual_seed(0)
    parameter = nn.Parameter((0.1 * torch.randn(400, 400, generator=gen)).bfloat16())
    start = parameter.detach().float().clone()
    optimizer = MasterAdamW([("w", parameter)], TrainerConfig(learning_rate=1e-5))
    for steps in range(1, 4):
        parameter.grad = torch.ones_like(parameter)
        optimizer.accumulate()
        optimizer.step(1e-5)
        moved = (start - parameter.detach().float()).mean().item()
        assert moved == pytest.approx(steps * 1e-5, rel=0.1)


def test_mixed_precision_moves_the_matrices_of_a_bfloat16_checkpoint_within_their_rounding() -> (
    None
):
    def parameters() -> dict[str, nn.Parameter]:
        gen = torch.Generator().manual_seed(0)
        made = {
            "rounded": torch.randn(50, 50, generator=gen).bfloat16().float(),
            "full": torch.randn(50, 50, generator=gen),
            "vector": torch.ones(50),
        }
        return {name: nn.Parameter(value) for name, value in made.items()}

    for precision in ("mixed", "float32", "tf32", None):
        before, after = parameters(), parameters()
        MasterAdamW(after.items(), TrainerConfig(precision=precision))
        moved = {name for name in after if not torch.equal(before[name], after[name])}
        assert moved == ({"rounded"} if precision == "mixed" else set())
        assert torch.equal(before["rounded"].bfloat16(), after["rounded"].bfloat16())


def test_gradients_of_micro_batches_add_up_in_float32() -> None:
    parameter = nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16))
    optimizer = MasterAdamW([("w", parameter)], TrainerConfig())
    for value in (256.0, *[0.5] * 64):  # in bfloat16, 256 + 0.5 is 256
        parameter.grad = torch.full_like(parameter, value)
        optimizer.accumulate()
    assert optimizer.gradients()[0].item() == 288.0
    assert optimizer.gradient_norm().item() == 288.0


def test_masters_take_the_weights_that_somebody_else_trained_meanwhile() -> None:
    module = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    optimizer = MasterAdamW(module.named_parameters(), TrainerConfig())
    with torch.no_grad():
        module.weight.add_(1)
    optimizer.take_weights()
    master = optimizer.masters["weight"].clone()
    assert torch.equal(master.bfloat16(), module.weight)
    assert not torch.equal(master, module.weight.float())  # nor are they on the grid now
    module.weight.grad = torch.ones_like(module.weight)
    optimizer.accumulate()
    optimizer.step(1e-5)  # too little for most weights to show
    stepped = optimizer.masters["weight"].clone()
    assert not torch.equal(stepped, master)
    optimizer.take_weights()
    assert torch.equal(optimizer.masters["weight"], stepped)


def test_a_float32_module_takes_the_steps_of_plain_adamw() -> None:
    torch.manual_seed(0)
    ours, theirs = nn.Linear(5, 3), nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    cfg = TrainerConfig(learning_rate=1e-2, weight_decay=0.1)
    optimizer = MasterAdamW(ours.named_parameters(), cfg)
    plain = torch.optim.AdamW(
        [
            {"params": [theirs.weight], "weight_decay": 0.1},
            {"params": [theirs.bias], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=cfg.betas,
    )
    for _ in range(5):
        x = torch.randn(7, 5)
        for module in (ours, theirs):
            module(x).square().sum().backward()
        optimizer.step(1e-2)
        plain.step()
        plain.zero_grad()
    assert torch.equal(ours.weight, theirs.weight)
    assert torch.equal(ours.bias, theirs.bias)
    assert optimizer.masters["weight"] is ours.weight


def test_the_state_comes_back_and_nothing_trainable_is_an_error() -> None:
    torch.manual_seed(0)
    a = nn.Linear(5, 3, dtype=torch.bfloat16)
    b = copy.deepcopy(a)
    first, second = (MasterAdamW(m.named_parameters(), TrainerConfig()) for m in (a, b))
    for _ in range(2):
        a(torch.ones(2, 5, dtype=torch.bfloat16)).sum().backward()
        first.accumulate()
        first.step(1e-2)
    second.load_state_dict(first.state_dict())
    state, again = first.state_dict(), second.state_dict()
    assert state.keys() == again.keys()
    assert all(torch.equal(state[k], again[k]) for k in state)
    b(torch.ones(2, 5, dtype=torch.bfloat16)).sum().backward()
    second.accumulate()
    second.step(1e-2)
    assert state["weight/step"] == 2  # the two share nothing
    with pytest.raises(CheckpointError, match="no master weights for 'weight'"):
        second.load_state_dict({k: v for k, v in state.items() if k != "weight/master"})
    with pytest.raises(ConfigError, match="no parameter"):
        MasterAdamW([("w", nn.Parameter(torch.ones(1), requires_grad=False))], TrainerConfig())


def test_the_state_comes_back_where_the_first_weight_has_never_had_a_gradient() -> None:
    a = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)).bfloat16()
    b = copy.deepcopy(a)
    first, second = (MasterAdamW(m.named_parameters(), TrainerConfig()) for m in (a, b))
    a[1](torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    first.accumulate()
    first.step(1e-2)
    state = first.state_dict()
    assert "0.weight/step" not in state
    assert state["1.weight/step"] == 1
    second.load_state_dict(state)
    again = second.state_dict()
    assert state.keys() == again.keys()
    assert all(torch.equal(state[k], again[k]) for k in state)


def test_schedules_warm_up_and_fall_to_their_floor() -> None:
    cfg = TrainerConfig(
        learning_rate=1.0, warmup_steps=4, total_steps=12, schedule="linear", final_lr_ratio=0.1
    )
    assert [learning_rate(cfg, s) for s in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert learning_rate(cfg, 4) == 1.0
    assert learning_rate(cfg, 8) == pytest.approx(0.55)
    assert learning_rate(cfg, 12) == learning_rate(cfg, 99) == pytest.approx(0.1)
    cosine = replace(cfg, schedule="cosine", total_steps=10, warmup_steps=2)
    assert learning_rate(cosine, 2) == 1.0
    assert learning_rate(cosine, 4) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert learning_rate(cosine, 6) == pytest.approx(0.55)
    assert learning_rate(cosine, 10) == learning_rate(cosine, 99) == pytest.approx(0.1)
    assert learning_rate(TrainerConfig(learning_rate=3.0), 1000) == 3.0


def test_only_settings_that_move_the_learning_rate_change_its_curve() -> None:
    constant = TrainerConfig(learning_rate=1.0, total_steps=4)
    linear = replace(constant, schedule="linear")
    assert describe_change(replace(constant, total_steps=8), curve(constant), 2) is None
    assert describe_change(linear, curve(linear), 2) is None
    assert describe_change(linear, {}, 2) is None
    said = describe_change(replace(linear, total_steps=8), curve(linear), 2)
    assert said is not None
    assert "from step 2 on: total_steps=8 (was 4); it is 0.75" in said
    assert describe_change(replace(linear, final_lr_ratio=0.5), curve(linear), 2) is not None


def lora(dtype: torch.dtype = torch.float32, *, head: bool = False) -> PeftModel:
    targets = ["q_proj", "v_proj", "down_proj", *(["lm_head"] if head else [])]
    config = LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
    torch.manual_seed(1)
    return get_peft_model(tiny_model().to(dtype), config)


def lora_trainer(model: PeftModel, folder: Path, publisher: RecordingPublisher) -> Trainer:
    return Trainer(
        model=model,
        algo=reinforce(),
        batch_source=SyntheticSource(),
        publisher=publisher,
        cfg=TrainerConfig(
            learning_rate=1e-2,
            max_seq_len=64,
            micro_token_budget=64,
            run_dir=folder,
            checkpoint=CheckpointConfig(folder / "ck", every=1),
        ),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_trains_adapters_only_and_publishes_merged_weights_without_drift(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    model, publisher = lora(dtype), RecordingPublisher()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainer = lora_trainer(model, tmp_path, publisher)
    trainer.train_sync(3)
    trainer.close()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed
    assert all(".lora_" in n for n in changed)
    names = {n for n, _ in tiny_model().named_parameters()}
    published = publisher.weights[-1]
    assert published.keys() == names
    again = dict(ModelWeights(model))
    assert all(torch.equal(published[n], again[n]) for n in names)
    merged = copy.deepcopy(model).float().merge_and_unload()
    for name, tensor in merged.named_parameters():
        torch.testing.assert_close(published[name].float(), tensor, rtol=1e-2, atol=1e-2)
    ids = torch.arange(10)[None]
    plain = tiny_model().to(dtype)
    plain.load_state_dict(published, strict=False)
    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(plain(ids).logits, model(ids).logits, rtol=0, atol=tolerance)


def test_a_lora_run_resumes_to_the_bit_and_its_adapter_loads_with_peft(tmp_path: Path) -> None:
    straight = lora_trainer(lora(), tmp_path / "a", RecordingPublisher())
    straight.train_sync(3)
    first = lora_trainer(lora(), tmp_path / "b", RecordingPublisher())
    first.train_sync(2)
    second = lora_trainer(lora(), tmp_path / "b", RecordingPublisher())
    second.train_sync(3)
    for trainer in (straight, first, second):
        trainer.close()
    ours = dict(second.model.named_parameters())
    assert all(torch.equal(p, ours[n]) for n, p in straight.model.named_parameters())
    loaded = PeftModel.from_pretrained(tiny_model(), str(tmp_path / "b/ck/step-00000003/model"))
    ids = torch.arange(10)[None]
    torch.testing.assert_close(loaded(ids).logits, second.model(ids).logits)


def test_an_adapter_on_the_head_is_scored_too(tmp_path: Path) -> None:
    model = lora(head=True)
    trainer = Trainer(
        model=model,
        algo=reinforce(),
        batch_source=SyntheticSource(),
        cfg=TrainerConfig(
            learning_rate=1e-2, max_seq_len=64, micro_token_budget=64, run_dir=tmp_path
        ),
    )
    trainer.train_sync(1)
    trainer.close()
    head = [p for n, p in model.named_parameters() if "lm_head.lora_B" in n]
    fresh = [p for n, p in lora(head=True).named_parameters() if "lm_head.lora_B" in n]
    assert head
    assert not torch.equal(head[0], fresh[0])
    with pytest.raises(PublishError, match="tied"):
        list(ModelWeights(model))


def test_modules_that_an_adapter_trains_whole_are_published_by_their_own_name() -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["norm"])
    model = get_peft_model(tiny_model(), config)
    saved = dict(model.named_parameters())[
        "base_model.model.model.norm.modules_to_save.default.weight"
    ]
    with torch.no_grad():
        saved.fill_(7.0)
    published = dict(ModelWeights(model))
    assert published.keys() == {n for n, _ in tiny_model().named_parameters()}
    assert torch.equal(published["model.norm.weight"], saved)


@pytest.mark.parametrize("fused", [False, True])
def test_loaded_counts_of_steps_are_where_the_step_looks_for_them(fused: bool) -> None:
    weight = torch.nn.Parameter(torch.empty(2, 2, device="meta"))  # stands for one on a GPU
    optimizer = MasterAdamW([("w", weight)], TrainerConfig())
    optimizer._fused = fused
    zeros = torch.zeros(2, 2)
    optimizer.load_state_dict(
        {"w/step": torch.tensor(3.0), "w/exp_avg": zeros, "w/exp_avg_sq": zeros}
    )
    step = optimizer._adam.state[weight]["step"]
    assert step.device.type == ("meta" if fused else "cpu")


def test_a_step_takes_the_gradients_as_they_are_unless_told_and_forgets_them() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.nn.Parameter(torch.ones(2, 2, dtype=dtype))
        optimizer = MasterAdamW([("w", weight)], TrainerConfig(betas=(0.5, 0.5)))
        weight.grad = torch.full_like(weight, 8.0)
        optimizer.accumulate()
        assert [g.tolist() for g in optimizer.gradients()] == [[[8.0, 8.0], [8.0, 8.0]]]
        optimizer.step(1e-3)
        assert optimizer.state_dict()["w/exp_avg"].tolist() == [[4.0, 4.0], [4.0, 4.0]]
        assert weight.grad is None
        assert optimizer.gradients() == []


def test_clipped_gradients_are_what_the_moments_remember() -> None:
    # The first step of Adam has the same size at any scale: only its memory tells.
    weight = torch.nn.Parameter(torch.ones(2, 2))
    cfg = TrainerConfig(betas=(0.5, 0.5))
    optimizer = MasterAdamW([("w", weight)], cfg)
    weight.grad = torch.tensor([[8.0, 0.0], [0.0, -8.0]])
    optimizer.step(1e-3, scale=0.25)
    state = optimizer.state_dict()
    assert state["w/exp_avg"].tolist() == [[1.0, 0.0], [0.0, -1.0]]
    assert state["w/exp_avg_sq"].tolist() == [[2.0, 0.0], [0.0, 2.0]]


def test_a_gradient_over_the_limit_is_scaled_down_to_it(tmp_path: Path) -> None:
    norms, logged = {}, {}
    for limit in (None, 1e3, 1e-3):
        trainer = Trainer(
            model=tiny_model(),
            algo=reinforce(),
            batch_source=SyntheticSource(),
            cfg=TrainerConfig(
                max_grad_norm=limit,
                max_seq_len=64,
                micro_token_budget=64,
                run_dir=tmp_path / str(limit),
            ),
        )
        trainer.train_sync(1)
        trainer.close()
        state = trainer.optimizer.state_dict()
        moments = [value for name, value in state.items() if name.endswith("/exp_avg")]
        norms[limit] = float(torch.nn.utils.get_total_norm(moments)) / (1 - 0.9)
        line = json.loads((tmp_path / str(limit) / "metrics.jsonl").read_text())
        logged[limit] = line["train/grad_norm"]
    assert 0.01 < norms[None] == pytest.approx(logged[None], rel=1e-4)
    assert norms[1e3] == norms[None]
    assert logged[1e-3] == logged[None]
    assert norms[1e-3] == pytest.approx(1e-3, rel=1e-4)
