"""A model as a policy: what its family does to logits, and what is left alone for a sampler."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ludic.errors import ConfigError
from ludic.inference.tiny import tiny_model
from ludic.plumbing import model_parts
from ludic.plumbing.model_parts import LogitRule, config_facts, logit_rule
from ludic.plumbing.precision import Precision
from ludic.saw.batch import make_batch
from ludic.saw.items import SAWBatch, SAWItem
from ludic.sharding.world import World
from ludic.training import Trainer, TrainerConfig, make_reinforce
from ludic.training.types import Scope
from ludic.training.update import attention as attention_module
from ludic.training.update import policy as policy_module
from ludic.training.update.attention import forget_longer_rows, rope_threshold
from ludic.training.update.checks import check_packing, check_split
from ludic.training.update.packing import lay_out, pack
from ludic.training.update.planning import attention_cost, plan_micro_batches
from ludic.training.update.policy import Policy
from ludic.training.update.recovery import Recovery
from ludic.training.update.scores import score_layout
from tests.training.synthetic import synthetic_batch
from tools.families import tiny

CPU = torch.device("cpu")


class Again:
    def __init__(self, batch: SAWBatch) -> None:
        self.batch = batch

    async def next_batch(self) -> SAWBatch:
        return self.batch


@pytest.mark.parametrize(
    ("name", "changes", "rule"),
    [
        ("llama", {}, LogitRule(1.0, None)),
        ("cohere", {"logit_scale": 0.25}, LogitRule(0.25, None)),
        ("granite", {"logits_scaling": 4.0}, LogitRule(0.25, None)),
        ("gemma2", {"final_logit_softcapping": 2.0}, LogitRule(1.0, 2.0)),
        ("recurrent_gemma", {"logits_soft_cap": 2.0}, LogitRule(1.0, 2.0)),
        ("hyperclovax", {"logits_scaling": 2.0}, LogitRule(2.0, None)),
        ("mpt", {"logit_scale": 4.0}, LogitRule(1.0, None)),
    ],
)
def test_what_a_family_does_to_its_logits_is_done_to_the_policys(
    name: str, changes: dict[str, Any], rule: LogitRule
) -> None:
    model: Any = tiny(name).double()
    for key, value in changes.items():
        setattr(model.config, key, value)
        if hasattr(model, key):
            setattr(model, key, value)
    assert logit_rule(config_facts(model)) == rule
    ids = np.arange(3, 13)
    with torch.no_grad():
        own = model(torch.from_numpy(ids)[None]).logits[0]
        mask = np.array([0] + [1] * 9, np.int8)
        item = SAWItem(ids, np.ones(10, np.int8), mask, 1.0)
        micro = pack(lay_out(make_batch([item])), [0])
        policy = Policy(model)
        check_packing(policy, CPU)
        found = policy.score(micro, logits=True)
    assert found.logits is not None
    torch.testing.assert_close(found.logits, own[:-1].to(found.logits.dtype), rtol=1e-5, atol=1e-6)
    wanted = own[:-1].log_softmax(1).gather(1, torch.from_numpy(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(found.logprobs, wanted, rtol=1e-5, atol=1e-6)


def test_a_model_that_does_more_to_its_logits_is_refused() -> None:
    model = tiny_model()
    check_split(model, CPU)
    own = model.forward

    def shifted(*args: Any, **kwargs: Any) -> Any:
        output = own(*args, **kwargs)
        output.logits = output.logits.roll(1, -1)
        return output

    model.forward = shifted
    with pytest.raises(ConfigError, match=r"differs from the model's own logits"):
        check_split(model, CPU)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("recurrent_gemma", torch.float32),
        ("recurrent_gemma", torch.bfloat16),
        ("gemma2", torch.bfloat16),
        ("xlstm", torch.float32),
    ],
)
def test_a_soft_cap_that_is_not_known_is_seen_however_small_the_logits(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    model = tiny(name).to(dtype)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(0.01)  # type: ignore[operator]
    check_split(model, CPU)
    monkeypatch.setattr(model_parts, "_SOFT_CAPS", ())
    with pytest.raises(ConfigError, match=r"something to the head's logits"):
        check_split(model, CPU)


def test_the_split_is_as_exact_as_the_models_type() -> None:
    model = tiny_model()
    own = model.forward

    def nearly(*args: Any, **kwargs: Any) -> Any:
        output = own(*args, **kwargs)
        output.logits = output.logits * (1 + 1e-4)
        return output

    model.forward = nearly
    with pytest.raises(ConfigError, match=r"differs from the model's own logits"):
        check_split(model, CPU)


def with_dropout(where: str) -> Any:
    """A model in training mode that drops units: in a layer, in attention, or in an adapter."""
    from peft import LoraConfig, get_peft_model

    model = tiny_model()
    if where == "adapter":
        adapter = LoraConfig(target_modules=["q_proj"], lora_dropout=0.5, init_lora_weights=False)
        return get_peft_model(model, adapter).train()
    if where == "attention":
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.5
    else:
        model.model.layers[0].mlp.act_fn = torch.nn.Sequential(
            model.model.layers[0].mlp.act_fn, torch.nn.Dropout(0.5)
        )
    return model.train()


@pytest.mark.parametrize("first", ["train", "eval"])
@pytest.mark.parametrize("where", ["layer", "attention", "adapter"])
def test_active_dropout_is_trained_with_whenever_it_was_turned_on(
    tmp_path: Path, where: str, first: str
) -> None:
    model = with_dropout(where)
    model.train(first == "train")
    before = [m.training for m in model.modules()]
    trainer = Trainer(
        model=model,
        algo=make_reinforce(),
        batch_source=Again(synthetic_batch(0, 4)),
        cfg=TrainerConfig(run_dir=tmp_path),
    )
    assert [m.training for m in model.modules()] == before
    assert trainer.policy.packs
    model.train()
    assert trainer.policy.longest_packed == (sys.maxsize if where == "adapter" else 0)
    assert not trainer.policy.shares
    micro = pack(lay_out(synthetic_batch(0, 2)), range(2))
    with torch.no_grad():
        drawn = [trainer.policy.score(micro).logprobs for _ in range(2)]
        assert not torch.equal(*drawn)
        model.eval()
        assert trainer.policy.longest_packed == sys.maxsize
        assert torch.equal(*(trainer.policy.score(micro).logprobs for _ in range(2)))
    model.train()
    trainer.train_sync(1)
    trainer.close()
    assert trainer.nonfinite_steps == 0


@pytest.mark.parametrize("later", ["module", "attention", "replaced"])
def test_dropout_that_comes_after_the_policy_is_seen(later: str) -> None:
    model: Any = tiny_model(layers=2).train()
    layer = model.model.layers[1]
    layer.self_attn.attention_dropout = 0  # as a configuration may have it
    policy = Policy(model)
    assert (policy.longest_packed, policy.shares) == (sys.maxsize, True)
    if later == "module":
        layer.mlp.act_fn = torch.nn.Sequential(layer.mlp.act_fn, torch.nn.Dropout(0.5))
    elif later == "attention":
        layer.self_attn.attention_dropout = 0.5
    else:
        model.model.layers[1] = with_dropout("layer").model.layers[0]
    assert (policy.longest_packed, policy.shares) == (0, False)
    model.model.layers[1] = tiny_model().train().model.layers[0]
    assert (policy.longest_packed, policy.shares) == (sys.maxsize, True)


@pytest.mark.parametrize("name", ["phi3 with longrope", "llama with dynamic rope"])
@pytest.mark.parametrize("scope", ["token", "rollout"])
def test_rows_above_a_threshold_run_alone_and_the_others_packed(name: str, scope: Scope) -> None:
    model: Any = tiny(name).double()
    rng = np.random.default_rng(0)
    start = rng.integers(3, 96, 10)
    items = []
    for length in (9, 21, 11, 17, 12, 16, 13, 12):
        ids = np.concatenate([start, rng.integers(3, 96, 20)])[:length]
        mask = np.array([0, *[1] * (length - 1)], np.int8)
        items.append(SAWItem(ids, np.ones(length, np.int8), mask, 1.0, rollout_id="one"))
    layout = lay_out(make_batch(items))
    policy = Policy(model)
    check_packing(policy, CPU)
    (plan,) = plan_micro_batches(
        layout,
        micro_token_budget=64,
        scope=scope,
        longest_packed=policy.longest_packed,
        shares=policy.shares,
    )
    if scope == "token":
        assert all(len(m) == 1 for m in plan if any(len(items[i].input_ids) > 12 for i in m))
        assert any(len(m) > 1 for m in plan)
    found = score_layout(Recovery(policy, World(device=CPU), 64), layout, [(m, True) for m in plan])
    for item, scores in zip(items, found, strict=True):
        row = torch.from_numpy(item.input_ids)
        fresh: Any = tiny(name).double()
        with torch.no_grad():
            logits = fresh(row[None]).logits[0, :-1].double()
        own = logits.log_softmax(1).gather(1, row[1:, None])[:, 0]
        assert scores == pytest.approx(own.numpy(), abs=1e-5)


def test_a_stretched_rotary_embedding_is_taken_back_for_every_kind_of_layer() -> None:
    rotary = torch.nn.Module()
    rotary.rope_type = {"full": "dynamic", "sliding": "default"}  # type: ignore[assignment]
    rotary.original_max_seq_len, rotary.max_seq_len_cached = 8, 8  # type: ignore[assignment]
    rotary.full_max_seq_len_cached = 99  # type: ignore[assignment]
    for kind, value in (("full", 7.0), ("sliding", 3.0)):
        rotary.register_buffer(f"{kind}_inv_freq", torch.tensor([value]))
        setattr(rotary, f"{kind}_original_inv_freq", torch.tensor([1.0]))
    forget_longer_rows(rotary)
    assert rotary.full_max_seq_len_cached == 8
    buffers = dict(rotary.named_buffers())
    assert buffers["full_inv_freq"].item() == 1.0
    assert buffers["sliding_inv_freq"].item() == 3.0


def test_who_stops_packing_leaves_a_shared_model_to_who_still_packs() -> None:
    model = tiny_model()
    own = model.config._attn_implementation
    micro = pack(lay_out(synthetic_batch(0, 3)), range(3))
    scorer, trainer = Policy(model), Policy(model, TrainerConfig(attention="sdpa"))
    expected = scorer.score(micro).logprobs
    trainer.one_at_a_time("a test")
    torch.testing.assert_close(scorer.score(micro).logprobs, expected)
    scorer.one_at_a_time("a test")
    assert model.config._attn_implementation == own


def test_each_user_of_a_shared_model_has_the_kernel_that_it_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = []
    real = attention_module.packed_attention

    def noting(*args: Any, **kwargs: Any) -> Any:
        used.append(kwargs["ludic_kind"])
        return real(*args, **kwargs)

    monkeypatch.setattr(attention_module, "packed_attention", noting)
    model = tiny_model()
    first, _ = Policy(model, TrainerConfig(attention="sdpa")), Policy(model)
    first.score(pack(lay_out(synthetic_batch(0, 2)), range(2)))
    assert set(used) == {"sdpa"}


def test_attention_costs_what_its_layers_and_width_say() -> None:
    model = tiny_model()
    layers, width = model.config.num_hidden_layers, model.config.hidden_size
    parameters = sum(p.numel() for p in model.parameters())
    assert attention_cost(model).quadratic == pytest.approx(layers * width / parameters)
    assert attention_cost(torch.nn.Linear(2, 2)).quadratic == 0  # it does not say


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_activations_are_recomputed_only_where_a_backward_pass_follows_and_never_for_a_sampler(
    monkeypatch: pytest.MonkeyPatch, checkpointing: bool, grad: bool
) -> None:
    used = []
    real: Any = getattr(policy_module, "checkpoint")  # noqa: B009

    def counting(*args: Any, **kwargs: Any) -> Any:
        used.append(kwargs["use_reentrant"])
        return real(*args, **kwargs)

    monkeypatch.setattr(policy_module, "checkpoint", counting)
    model = tiny_model()
    policy = Policy(model, TrainerConfig(gradient_checkpointing=checkpointing))
    Policy(
        model, TrainerConfig(gradient_checkpointing=checkpointing)
    )  # wrapped once, however often
    micro = pack(lay_out(synthetic_batch(0, 2)), range(2))
    with torch.set_grad_enabled(grad):
        model(micro.input_ids[None])
        assert used == []
        policy.score(micro)
    layers = model.config.num_hidden_layers
    assert used == ([False] * layers if checkpointing and grad else [])


def test_a_pass_keeps_no_cache_of_keys_and_values() -> None:
    model, caches = tiny_model(), list[object]()
    policy, micro = Policy(model), pack(lay_out(synthetic_batch(0, 2)), range(2))
    model.model.register_forward_hook(lambda *call: caches.append(call[-1].past_key_values))
    policy.score(micro)
    policy.one_at_a_time("a test")
    policy.score(micro)
    assert caches == [None] * 3


def test_entropies_and_logits_come_where_they_are_asked_for() -> None:
    policy = Policy(tiny_model())
    micro = pack(lay_out(synthetic_batch(0, 2)), range(2))
    plain = policy.score(micro)
    assert (plain.entropy, plain.logits) == (None, None)
    assert policy(micro)[1:] == (None, None)
    both = policy.score(micro, entropy=True, logits=True)
    assert both.entropy is not None
    assert both.logits is not None
    torch.testing.assert_close(both.entropy, torch.special.entr(both.logits.softmax(1)).sum(1))


@pytest.mark.parametrize(
    ("facts", "threshold"),
    [
        ({}, None),
        ({"rope_parameters": {"rope_type": "default"}, "max_position_embeddings": 5}, None),
        ({"rope_parameters": {"rope_type": "dynamic"}, "max_position_embeddings": 5}, 5),
        (
            {
                "rope_parameters": {
                    "full": {"rope_type": "longrope", "original_max_position_embeddings": 7},
                    "sliding": {"rope_type": "dynamic"},
                    "other": None,
                },
                "max_position_embeddings": 9,
            },
            7,
        ),
    ],
)
def test_the_shortest_length_that_changes_a_rotary_embedding_counts(
    facts: dict[str, Any], threshold: int | None
) -> None:
    found = rope_threshold(facts)
    assert found == threshold if threshold is not None else found > 10**9


def test_rows_that_are_computed_one_at_a_time_are_those_of_the_model_itself() -> None:
    batch = synthetic_batch(1, 3)
    model = tiny_model().double()
    layout = lay_out(batch)
    packed = Policy(model).score(pack(layout, range(3))).logprobs
    policy = Policy(model)
    policy.one_at_a_time("a test")
    torch.testing.assert_close(policy.score(pack(layout, range(3))).logprobs, packed)


@pytest.mark.parametrize(
    ("precision", "dtype", "replayed"),
    [
        (None, torch.bfloat16, True),
        (None, torch.float16, True),
        (None, torch.float32, False),
        ("mixed", torch.float32, True),
        ("tf32", torch.float32, False),
    ],
)
def test_passes_on_a_gpu_are_replayed_where_they_compute_in_16_bits(
    precision: Precision | None,
    dtype: torch.dtype,
    replayed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cfg = TrainerConfig(precision=precision)
    policy = Policy(tiny_model().to(dtype), cfg)
    assert not policy._has_graphs("auto")  # on a CPU
    monkeypatch.setattr(torch.nn.Parameter, "is_cuda", True)
    graphs = Policy(policy.model, cfg, graphs=True).graphs
    assert (graphs is not None and graphs.capture) is replayed
    assert policy._has_graphs("auto") == policy._has_graphs("varlen") == replayed
    assert not policy._has_graphs("sdpa")
    policy.packs = False
    assert not policy._has_graphs("auto")


def test_only_rows_that_may_be_packed_are_replayed() -> None:
    layout, asked = lay_out(synthetic_batch(0)), list[object]()
    micro = pack(layout, range(len(layout.items)))
    policy: Any = Policy(tiny_model())
    policy.graphs = asked.append  # which replays nothing
    policy.rope_threshold = micro.longest
    packed = policy.score(micro).logprobs
    assert asked == [micro]
    policy.rope_threshold -= 1
    torch.testing.assert_close(policy.score(micro).logprobs, packed)
    assert asked == [micro]
