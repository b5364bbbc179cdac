"""The loop itself: what is invariant, what is refused, and in which order things happen."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from ludic.distributed.interfaces import PublishReport, Weights
from ludic.errors import (
    BatchError,
    ConfigError,
    DeadlineError,
    NonFiniteError,
    OutOfMemoryError,
    TrainingError,
)
from ludic.eval import EpisodeResult, EvalReport, Evaluator
from ludic.inference.tiny import tiny_model
from ludic.rollouts.token_log import TokenLog, read_token_log
from ludic.saw.batch import make_batch
from ludic.saw.codec import batch_from_dict
from ludic.saw.items import SAWBatch
from ludic.training.algorithm import RLAlgorithm
from ludic.training.algorithms.grpo import TokenClippedSurrogateLoss
from ludic.training.algorithms.gspo import make_gspo
from ludic.training.config import TrainerConfig
from ludic.training.credit_assignment.returns import ConstantCredit
from ludic.training.trainer import Trainer
from ludic.training.types import LossBatch, LossStats, Stat, TokenLogProbs
from tests.training.synthetic import (
    RecordingPublisher,
    SyntheticSource,
    reinforce,
    synthetic_batch,
)


class Fixed:
    """Gives the same batch again and again."""

    def __init__(self, batch: SAWBatch) -> None:
        self.batch = batch

    async def next_batch(self) -> SAWBatch:
        return self.batch


def config(folder: Path, **changes: Any) -> TrainerConfig:
    base = TrainerConfig(learning_rate=1e-3, max_seq_len=64, micro_token_budget=64, run_dir=folder)
    return replace(base, **changes)


def grpo() -> RLAlgorithm:
    return RLAlgorithm("grpo", ConstantCredit(), TokenClippedSurrogateLoss())


def train(
    batch: SAWBatch, cfg: TrainerConfig, algo: RLAlgorithm | None = None, steps: int = 1
) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """The weights after some steps in float64, and the metrics."""
    trainer = Trainer(
        model=tiny_model().double(), algo=algo or reinforce(), batch_source=Fixed(batch), cfg=cfg
    )
    trainer.train_sync(steps)
    trainer.close()
    lines = (Path(str(cfg.run_dir)) / "metrics.jsonl").read_text().splitlines()
    weights = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    return weights, [json.loads(line) for line in lines]


def assert_same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> None:
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("make", [reinforce, grpo, lambda: make_gspo(group_size=2)])
def test_neither_micro_batches_nor_order_nor_recomputation_change_a_step(
    tmp_path: Path, make: Any
) -> None:
    batch = synthetic_batch(0, 8)
    budget = 10 * max(len(i.input_ids) for i in batch.items)
    whole, metrics = train(batch, config(tmp_path / "a", micro_token_budget=budget), make(), 2)
    split, other = train(batch, config(tmp_path / "b"), make(), 2)
    assert_same(whole, split)
    for name in ("train/loss", "train/grad_norm", "train/entropy", "train/mismatch_abs"):
        assert metrics[1][name] == pytest.approx(other[1][name], rel=1e-6)
    order = np.random.default_rng(0).permutation(8)
    shuffled = make_batch([batch.items[i] for i in order])
    assert_same(whole, train(shuffled, config(tmp_path / "c"), make(), 2)[0])
    recomputed = config(tmp_path / "d", gradient_checkpointing=True)
    assert_same(whole, train(batch, recomputed, make(), 2)[0])
    start = dict(tiny_model().double().named_parameters())
    assert any(not torch.allclose(whole[n], start[n]) for n in whole)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_step_keeps_what_another_trainer_of_the_model_has_done(
    tmp_path: Path, device: Literal["cpu"] | None
) -> None:
    """Both have float32 masters of the bfloat16 weights."""
    model, batch = tiny_model().bfloat16(), Fixed(synthetic_batch(0))
    first, second = (
        Trainer(
            model=model,
            algo=reinforce(),
            batch_source=batch,
            cfg=config(tmp_path, learning_rate=rate, max_lag=None, optimizer_device=device),
        )
        for rate in (1e-1, 1e-9)
    )
    for _ in range(2):
        first.train_sync(1)
        trained = {n: p.detach().clone() for n, p in model.named_parameters()}
        second.train_sync(1)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter, trained[name], rtol=1e-2, atol=1e-6)
    for trainer in (first, second):
        trainer.close()


def adapt(model: torch.nn.Module) -> None:
    from peft import LoraConfig, get_peft_model

    get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))


@pytest.mark.parametrize(
    ("change", "steps"),
    [(lambda m: m.requires_grad_(True), 1), (lambda m: m.requires_grad_(True), 0), (adapt, 0)],
)
def test_parameters_that_are_to_be_trained_later_than_the_trainer_was_made_are_refused(
    tmp_path: Path, change: Callable[[torch.nn.Module], object], steps: int
) -> None:
    model = tiny_model()
    model.get_input_embeddings().requires_grad_(False)
    trainer = Trainer(
        model=model, algo=reinforce(), batch_source=SyntheticSource(), cfg=config(tmp_path)
    )
    if steps:
        trainer.train_sync(steps)
    change(model)
    with pytest.raises(ConfigError, match="when the trainer was made"):
        trainer.train_sync(1)
    trainer.close()


async def test_a_task_that_a_callback_starts_is_not_waited_for(tmp_path: Path) -> None:
    started: list[asyncio.Task[Any]] = []

    def start(step: int, metrics: Mapping[str, float]) -> object:
        started.append(asyncio.create_task(asyncio.Event().wait()))
        return started[-1]

    trainer = Trainer(
        model=tiny_model(),
        algo=reinforce(),
        batch_source=SyntheticSource(),
        cfg=config(tmp_path),
        callbacks=[start],
    )
    async with asyncio.timeout(60):
        await trainer.train(2)
    assert [task.cancel() for task in started] == [True, True]


def test_the_algorithm_of_a_trainer_stays(tmp_path: Path) -> None:
    trainer: Any = Trainer(
        model=tiny_model(), algo=reinforce(), batch_source=SyntheticSource(), cfg=config(tmp_path)
    )
    with pytest.raises(AttributeError):  # the passes would go on with the loss of the first one
        trainer.algo = reinforce()


class Detached:
    """A loss that leads to no parameter, and is nothing for a batch that has nothing for it."""

    needs_logits = False
    scope = "token"

    def compute(self, policy: TokenLogProbs, batch: LossBatch) -> tuple[torch.Tensor, LossStats]:
        loss = -(policy.logprobs.detach() * batch.weights).sum()
        return loss * float(batch.versions is not None and batch.versions[0] > 0), {}


def test_a_loss_without_a_gradient_ends_the_run(tmp_path: Path) -> None:
    algo = RLAlgorithm("mine", ConstantCredit(), Detached())  # type: ignore[arg-type]
    trainer = Trainer(
        model=tiny_model(), algo=algo, batch_source=SyntheticSource(), cfg=config(tmp_path)
    )
    trainer.train_sync(1)
    with pytest.raises(
        TrainingError, match=r"'mine' is .* and no trained parameter got a gradient"
    ):
        trainer.train_sync(1)
    trainer.close()


async def test_the_example_loop_publishes_every_version_once(tmp_path: Path) -> None:
    publisher = RecordingPublisher()
    trainer = Trainer(
        model=tiny_model(),
        algo=reinforce(),
        batch_source=SyntheticSource(),
        publisher=publisher,
        cfg=config(tmp_path),
    )
    await trainer.train(num_steps=2)
    await trainer.train(num_steps=1)
    assert publisher.versions == [0, 1, 2, 3]
    assert publisher.updates == 3
    assert trainer.step == trainer.version == 3
    last = publisher.weights[-1]
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(last[name], parameter)
    trainer.close()


@pytest.mark.parametrize("overlap", [False, True])
async def test_a_policy_that_no_sampler_has_any_more_is_published_again(
    tmp_path: Path, overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, source = RecordingPublisher(), SyntheticSource()
    source.loses_after = [0, 1, 1]
    trainer = Trainer(
        model=tiny_model(),
        algo=reinforce(),
        batch_source=source,
        publisher=publisher,
        cfg=config(tmp_path, overlap=overlap),
    )
    await trainer.train(num_steps=2)
    trainer.close()
    assert publisher.versions == [0, 0, 1, 1, 1, 2]
    for again, once in ((1, 0), (3, 2), (4, 2)):
        for name, tensor in publisher.weights[once].items():
            assert torch.equal(tensor, publisher.weights[again][name])
    words = "all samplers were started again: version 1 is published again"
    assert caplog.messages.count(words) == 2


async def test_a_policy_that_is_lost_again_and_again_ends_the_run_in_the_end(
    tmp_path: Path,
) -> None:
    publisher, source = RecordingPublisher(), SyntheticSource()
    source.loses_after = [0] * 1000
    trainer = Trainer(
        model=tiny_model(),
        algo=reinforce(),
        batch_source=source,
        publisher=publisher,
        cfg=config(tmp_path),
    )
    with pytest.raises(TrainingError, match="lost the policy 50 times"):
        await trainer.train(num_steps=1)
    trainer.close()
    assert publisher.versions == [0] * 51


async def test_steps_taken_one_by_one_do_not_count_against_those_asked_for(tmp_path: Path) -> None:
    trainer = Trainer(
        model=tiny_model(), algo=reinforce(), batch_source=SyntheticSource(), cfg=config(tmp_path)
    )
    await trainer.train_step()
    await trainer.train_step()
    await trainer.train(num_steps=2)
    assert trainer.step == 4
    trainer.source = Ended(lag=-4)
    await trainer.train()
    assert trainer.step == 6
    trainer.source = SyntheticSource(lag=-6)
    await trainer.train(num_steps=1)
    assert trainer.step == 7
    trainer.close()


class Losing(RecordingPublisher):
    """Says that a server was lost at version 1, and is back at version 3."""

    async def publish(self, weights: Weights, version: int) -> PublishReport:
        lost = {"http://b": "it died while its weights were written"} if version in (1, 2) else {}
        return PublishReport(version, 0.0, details={"lost": lost, "stall_s": 0.25})


class Silent(RecordingPublisher):
    """A user's publisher, which has nothing to report."""

    async def publish(self, weights: Weights, version: int) -> PublishReport:
        await super().publish(weights, version)
        return None  # type: ignore[return-value]


def test_a_publisher_may_report_nothing(tmp_path: Path) -> None:
    publisher = Silent()
    trainer = Trainer(
        model=tiny_model(),
        algo=reinforce(),
        batch_source=SyntheticSource(),
        publisher=publisher,
        cfg=config(tmp_path),
    )
    trainer.train_sync(1)
    trainer.close()
    assert publisher.versions == [0, 1]


async def test_servers_that_a_publish_lost_are_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = Trainer(
        model=tiny_model(),
        algo=reinforce(),
        batch_source=SyntheticSource(),
        publisher=Losing(),
        cfg=config(tmp_path),
    )
    with caplog.at_level("WARNING", logger="ludic"):
        metrics = [await trainer.train_step() for _ in range(3)]
    trainer.close()
    assert [m["perf/servers_lost"] for m in metrics] == [1.0, 1.0, 0.0]
    assert metrics[0]["perf/publish_stall_s"] == 0.25
    first, second = caplog.messages
    assert "version 1 is without http://b" in first
    assert "it died while its weights were written" in first
    assert second == "version 3: http://b is back in rotation"


def test_a_running_loop_is_told_to_await(tmp_path: Path) -> None:
    trainer = Trainer(
        model=tiny_model(), algo=reinforce(), batch_source=SyntheticSource(), cfg=config(tmp_path)
    )

    async def wrong() -> None:
        trainer.train_sync(1)

    with pytest.raises(ConfigError, match=r"await trainer\.train"):
        asyncio.run(wrong())
    trainer.close()


class Ended(SyntheticSource):
    async def next_batch(self) -> SAWBatch:
        if self.count == 2:
            raise StopAsyncIteration("the budget is spent")
        return await super().next_batch()


def test_training_ends_where_the_source_does(tmp_path: Path) -> None:
    for overlap in (False, True):
        trainer = Trainer(
            model=tiny_model(),
            algo=reinforce(),
            batch_source=Ended(),
            cfg=config(tmp_path, overlap=overlap),
        )
        trainer.train_sync(10)
        assert trainer.step == 2
        trainer.close()


class Versioned(RecordingPublisher):
    """Shares the weights: says so, and keeps a diary together with its source."""

    shares_weights = True

    def __init__(self, diary: list[str]) -> None:
        super().__init__()
        self.diary = diary

    async def publish(self, weights: Any, version: int) -> Any:
        self.diary.append(f"publish {version}")
        return await super().publish(weights, version)


class Slow(SyntheticSource):
    def __init__(self, diary: list[str]) -> None:
        super().__init__()
        self.diary = diary

    async def next_batch(self) -> SAWBatch:
        number = self.count + 1
        self.diary.append(f"begin {number}")
        await asyncio.sleep(0.02)
        self.diary.append(f"end {number}")
        return await super().next_batch()


def test_with_overlap_the_next_batch_is_sampled_wholly_under_the_present_policy(
    tmp_path: Path,
) -> None:
    diary: list[str] = []
    trainer = Trainer(
        model=tiny_model(),
        algo=reinforce(),
        batch_source=Slow(diary),
        publisher=Versioned(diary),
        cfg=config(tmp_path, overlap=True),
    )
    trainer.train_sync(3)
    trainer.close()
    assert diary == [
        "publish 0",
        "begin 1",
        "end 1",
        "begin 2",
        "end 2",
        "publish 1",
        "begin 3",
        "end 3",
        "publish 2",
        "publish 3",
    ]


def test_overlap_needs_a_lag_of_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_lag=0 allows none"):
        config(tmp_path, overlap=True, max_lag=0)


def test_without_overlap_every_batch_is_sampled_with_the_newest_policy(tmp_path: Path) -> None:
    diary: list[str] = []
    trainer = Trainer(
        model=tiny_model(),
        algo=reinforce(),
        batch_source=Slow(diary),
        publisher=Versioned(diary),
        cfg=config(tmp_path),
    )
    trainer.train_sync(2)
    trainer.close()
    assert diary == [
        "publish 0", "begin 1", "end 1", "publish 1", "begin 2", "end 2", "publish 2"
    ]  # fmt: skip


class Remembering:
    """A loss that looks at what it is given."""

    needs_logits = True
    scope = "token"

    def __init__(self) -> None:
        self.seen: list[tuple[TokenLogProbs, LossBatch]] = []

    def compute(self, policy: TokenLogProbs, batch: LossBatch) -> tuple[torch.Tensor, LossStats]:
        self.seen.append((policy, batch))
        loss = -(policy.logprobs * batch.weights).sum() / batch.counts.tokens
        return loss, {"own": Stat.mean(policy.logprobs)}


def test_a_users_loss_gets_logits_and_its_stats_are_logged(tmp_path: Path) -> None:
    loss = Remembering()
    algo = RLAlgorithm("mine", ConstantCredit(), loss)  # type: ignore[arg-type]
    _, metrics = train(synthetic_batch(0, 3), config(tmp_path), algo)
    policy, _ = loss.seen[0]
    assert policy.logits is not None
    assert policy.logits.shape == (len(policy.logprobs), tiny_model().config.vocab_size)
    everything = torch.cat([p.logprobs.detach() for p, _ in loss.seen])
    assert metrics[0]["train/own"] == pytest.approx(float(everything.mean()))


def test_several_updates_per_batch_see_proximal_logprobs_of_its_beginning(tmp_path: Path) -> None:
    loss = Remembering()
    algo = RLAlgorithm("mine", ConstantCredit(), loss)  # type: ignore[arg-type]
    batch = synthetic_batch(0, 6)
    cfg = config(tmp_path, epochs=2, mini_batches=3, micro_token_budget=1000, learning_rate=1e-2)
    trainer = Trainer(model=tiny_model().double(), algo=algo, batch_source=Fixed(batch), cfg=cfg)
    trainer.train_sync(1)
    trainer.close()
    assert len(loss.seen) == 6
    assert trainer.version == 1
    first_policy, first = loss.seen[0]
    assert first.proximal_logprobs is not None
    torch.testing.assert_close(
        first.proximal_logprobs, first_policy.logprobs.detach().float(), rtol=1e-5, atol=1e-5
    )
    last_policy, last = loss.seen[-1]
    assert last.proximal_logprobs is not None
    assert not torch.allclose(last.proximal_logprobs, last_policy.logprobs.float(), atol=1e-3)
    per_epoch = [sum(b.counts.rollouts for _, b in loss.seen[i : i + 3]) for i in (0, 3)]
    assert per_epoch == [6, 6]
    (line,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    gaps = [(b.proximal_logprobs - b.behavior_logprobs).abs() for _, b in loss.seen]  # type: ignore[operator]
    assert line["train/mismatch_abs"] == pytest.approx(np.mean([float(g.mean()) for g in gaps]))
    assert line["train/mismatch_max"] == pytest.approx(max(float(g.max()) for g in gaps))


class Poisoned:
    """A loss that is not finite on the batches it is told to spoil."""

    needs_logits = False
    scope = "token"

    def __init__(self, bad: set[int]) -> None:
        self.bad, self.calls = bad, 0

    def compute(self, policy: TokenLogProbs, batch: LossBatch) -> tuple[torch.Tensor, LossStats]:
        self.calls += 1
        loss = policy.logprobs.mean()
        return loss * (float("nan") if self.calls in self.bad else 1.0), {}


def poisoned(bad: set[int]) -> RLAlgorithm:
    return RLAlgorithm("poisoned", ConstantCredit(), Poisoned(bad))  # type: ignore[arg-type]


def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path: Path) -> None:
    cfg = config(tmp_path, micro_token_budget=1000)
    model = tiny_model()
    publisher = RecordingPublisher()
    trainer = Trainer(
        model=model,
        algo=poisoned({1}),
        batch_source=SyntheticSource(),
        publisher=publisher,
        cfg=cfg,
    )
    trainer.train_sync(1)
    for name, parameter in tiny_model().named_parameters():
        assert torch.equal(dict(model.named_parameters())[name], parameter)
    assert publisher.versions == [0]
    trainer.train_sync(1)
    assert (trainer.step, trainer.version, trainer.nonfinite_steps) == (2, 1, 1)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    trainer.close()


def test_past_the_limit_the_run_stops_and_the_samples_are_written_out(tmp_path: Path) -> None:
    cfg = config(tmp_path, micro_token_budget=1000, max_nonfinite_steps=1)
    trainer = Trainer(
        model=tiny_model(), algo=poisoned({1, 2, 3}), batch_source=SyntheticSource(), cfg=cfg
    )
    with pytest.raises(NonFiniteError, match=r"max_nonfinite_steps=1.*nonfinite-step-1"):
        trainer.train_sync(5)
    trainer.close()
    saved = json.loads((tmp_path / "samples/nonfinite-step-1.json").read_text())
    assert len(batch_from_dict(saved).items) == 6


def test_out_of_memory_names_the_setting_to_lower(tmp_path: Path) -> None:
    class Greedy(Poisoned):
        def compute(self, policy: Any, batch: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    algo = RLAlgorithm("greedy", ConstantCredit(), Greedy(set()))  # type: ignore[arg-type]
    trainer = Trainer(
        model=tiny_model(), algo=algo, batch_source=SyntheticSource(), cfg=config(tmp_path)
    )
    with pytest.raises(
        OutOfMemoryError, match=r"Lower max_seq_len or micro_token_budget.*calibrate"
    ):
        trainer.train_sync(1)
    trainer.close()


def test_a_sample_over_max_seq_len_stops_the_run_and_is_named(tmp_path: Path) -> None:
    cfg = config(tmp_path, max_seq_len=8)
    with pytest.raises(BatchError, match=r"rollout '0-r.*max_seq_len=8"):
        train(synthetic_batch(0, 3), cfg)


def test_an_overlong_sample_costs_its_episode_and_group_with_a_word_and_a_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = synthetic_batch(0, 6)
    longest = max(range(6), key=lambda i: len(given.items[i].input_ids))
    limit = len(given.items[longest].input_ids) - 1
    lost = {given.items[longest].group_id}
    assert not any(len(i.input_ids) > limit for i in given.items if i.group_id not in lost)
    played = make_batch(given.items, {**given.meta, "lost_member": "drop_group"})
    without = make_batch([i for i in given.items if i.group_id not in lost], given.meta)
    cfg = config(tmp_path / "a", max_seq_len=limit)
    weights, (line, second) = train(played, cfg, steps=2)
    assert line["train/overlong_episodes"] == second["train/overlong_episodes"] == 1
    assert caplog.text.count(f"over max_seq_len={limit} (the longest: {limit + 1} tokens)") == 1
    assert_same(weights, train(without, config(tmp_path / "b"), steps=2)[0])


def test_a_batch_of_nothing_but_overlong_episodes_says_which_setting_to_raise(
    tmp_path: Path,
) -> None:
    given = synthetic_batch(0, 2)
    played = make_batch(given.items, {**given.meta, "lost_member": "drop_group"})
    with pytest.raises(BatchError, match=r"'overlong': \d.*Raise max_seq_len=3"):
        train(played, config(tmp_path, max_seq_len=3))


def test_a_source_that_hangs_meets_its_deadline(tmp_path: Path) -> None:
    class Hanging:
        async def next_batch(self) -> SAWBatch:
            await asyncio.sleep(60)
            raise AssertionError

    for overlap in (False, True):
        trainer = Trainer(
            model=tiny_model(),
            algo=reinforce(),
            batch_source=Hanging(),
            cfg=config(tmp_path, batch_timeout_s=0.05, overlap=overlap),
        )
        with pytest.raises(DeadlineError, match="a batch from Hanging"):
            trainer.train_sync(1)
        trainer.close()


def test_evaluation_runs_every_so_many_steps(tmp_path: Path) -> None:
    seen: list[int] = []

    async def evaluate(step: int) -> dict[str, float]:
        seen.append(step)
        return {"eval/accuracy": 0.5}

    trainer = Trainer(
        model=tiny_model(),
        algo=reinforce(),
        batch_source=SyntheticSource(),
        cfg=config(tmp_path, eval_every=2),
        evaluate=evaluate,
    )
    trainer.train_sync(5)
    trainer.close()
    assert seen == [2, 4]
    lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    evals = [x for x in lines if "eval/accuracy" in x]
    assert [x["eval/step"] for x in evals] == [2, 4]


def test_an_evaluator_is_asked_for_its_report(tmp_path: Path) -> None:
    class Always:
        async def evaluate(self) -> EvalReport:
            return EvalReport("always", (EpisodeResult(1, None, 1.0, True),))

    evaluator: Evaluator = Always()
    trainer = Trainer(
        model=tiny_model(),
        algo=reinforce(),
        batch_source=SyntheticSource(),
        cfg=config(tmp_path, eval_every=2),
        evaluate=evaluator,
    )
    trainer.train_sync(2)
    trainer.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert (line["eval/step"], line["eval/reward"], line["eval/success"]) == (2, 1.0, 1.0)


def test_a_model_that_is_no_language_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Linear has no output embeddings: it is not a lang"):
        Trainer(
            model=torch.nn.Linear(2, 2),
            algo=reinforce(),
            batch_source=SyntheticSource(),
            cfg=config(tmp_path),
        )


@pytest.mark.parametrize(("epochs", "mini_batches"), [(1, 1), (2, 3)])
def test_every_trained_token_is_in_the_token_log_once(
    tmp_path: Path, epochs: int, mini_batches: int
) -> None:
    path = tmp_path / "tokens.jsonl.zst"
    log = TokenLog(path)
    trainer = Trainer(
        model=tiny_model(),
        algo=reinforce(),
        batch_source=SyntheticSource(),
        cfg=config(tmp_path, learning_rate=1e-9, epochs=epochs, mini_batches=mini_batches),
        token_log=log,
    )
    trainer.train_sync(2)
    trainer.close()
    log.close()
    found = list(read_token_log(path))
    assert [f.update for f in found] == [1] * 6 + [2] * 6
    again = SyntheticSource()
    for number in (1, 2):
        batch = asyncio.run(again.next_batch())
        scores = trainer.passes.score(batch)
        mine = [f for f in found if f.update == number]
        assert [f.rollout_id for f in mine] == [i.rollout_id for i in batch.items]
        for record, item, logprobs in zip(mine, batch.items, scores, strict=True):
            assert record.weights.tolist() == item.attachments.token_weights.tolist()  # type: ignore[union-attr]
            np.testing.assert_allclose(record.logprobs, logprobs, rtol=1e-5, atol=1e-6)
            assert (record.entropies > 0).all()
