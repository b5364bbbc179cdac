"""SPO's forgetting follows the policy: the trainer measures its updates and tells the tracker."""

from __future__ import annotations

import asyncio
import copy
import json
import tempfile
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from ludic.distributed.local import LocalPolicyPublisher
from ludic.inference.local import LocalChatClient
from ludic.inference.sampling import InferenceSpec, SamplingConfig
from ludic.inference.templates.hf import HFChatTemplate
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.interaction.base import Runtime
from ludic.rollouts import EnvSpec, ProtocolSpec, RolloutEngine, RolloutRequest
from ludic.saw.items import SAWBatch
from ludic.training import (
    BetaTracker,
    CheckpointConfig,
    DriftForgetting,
    RLAlgorithm,
    RolloutBatchSource,
    Trainer,
    TrainerConfig,
    make_reinforce,
    make_spo,
)
from ludic.training.credit_assignment.returns import ConstantCredit
from ludic.types import Info, Obs
from tests.training.learning import ColourBandit, bandit, teach_words
from tests.training.synthetic import SyntheticSource
from tests.training.test_trainer import poisoned

STEPS, EPISODES, TASKS = 3, 16, 4
PARSER = {"kind": "regex", "pattern": "red|green|blue|white", "error_reward": 0.0}


@dataclass(frozen=True)
class Watching(ConstantCredit):
    """Hears of every update."""

    watches_drift: bool = True
    heard: list[float] = field(default_factory=list)

    def observe_drift(self, kl: float) -> None:
        self.heard.append(kl)


def logprobs(model: Any, batch: SAWBatch) -> torch.Tensor:
    """Of every action token, one sample at a time."""
    found = []
    for item in batch.items:
        ids = torch.from_numpy(item.input_ids)[None]
        with torch.no_grad():
            logits = model(ids).logits[0, :-1] / item.temperature
        scored = logits.double().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        found.append(scored[torch.from_numpy(item.action_mask[1:]).bool()])
    return torch.cat(found)


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_an_update_is_as_far_as_the_log_probs_moved(tmp_path: Path, mini_batches: int) -> None:
    credit = Watching()
    algo = replace(make_reinforce(), credit_assigner=credit)
    trainer = Trainer(
        model=tiny_model(),
        algo=algo,
        batch_source=SyntheticSource(),
        cfg=TrainerConfig(
            learning_rate=1e-2, max_seq_len=64, mini_batches=mini_batches, run_dir=tmp_path
        ),
    )
    source = SyntheticSource()
    for step in range(2):
        batch = asyncio.run(source.next_batch())
        before = logprobs(trainer.model, batch)
        trainer.train_sync(1)
        gap = logprobs(trainer.model, batch) - before
        expected = float((gap.exp() - 1 - gap).mean())
        assert expected > 1e-3
        assert credit.heard[step] == pytest.approx(expected, rel=1e-3)
    trainer.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [line["train/update_kl"] for line in lines] == credit.heard


def test_a_skipped_update_is_no_drift(tmp_path: Path) -> None:
    credit = Watching()
    trainer = Trainer(
        model=tiny_model(),
        algo=replace(poisoned({1}), credit_assigner=credit),
        batch_source=SyntheticSource(),
        cfg=TrainerConfig(max_seq_len=64, run_dir=tmp_path),
    )
    trainer.train_sync(1)
    assert (trainer.nonfinite_steps, credit.heard) == (1, [])
    trainer.train_sync(1)
    assert len(credit.heard) == 1
    trainer.close()


class TaskBandit(ColourBandit):
    """The bandit again, as a task of its own for every seed."""

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        self.seed = seed
        return super().env_reset(seed=seed)

    def task_key(self) -> str | None:
        return f"task-{self.seed}"


WORLD = replace(bandit(), make=TaskBandit, seeds=tuple(range(TASKS)))


@cache
def speaker() -> tuple[Any, HFChatTemplate]:
    """A model that knows the words, not what they pay. Do not train it: take a copy."""
    template = HFChatTemplate(tiny_tokenizer((*WORLD.words, "user\n", "assistant\n")))
    model = tiny_model(vocab_size=len(template.tokenizer))
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(teach_words(model, template, WORLD, Path(folder)))
    return model, template


def run_spo(
    folder: Path,
    tracker: BetaTracker,
    learning_rate: float,
    steps: int = STEPS,
    *,
    overlap: bool = False,
) -> RLAlgorithm:
    """The bandit, played and learnt with real tokens."""
    model, template = copy.deepcopy(speaker()[0]), speaker()[1]
    algo = make_spo(tracker=tracker)
    protocol = ProtocolSpec("single_agent", {"system_prompt": ".", "parser": PARSER})

    def requests(step: int) -> list[RolloutRequest]:
        numbers = [step * EPISODES + i for i in range(EPISODES)]
        return [
            RolloutRequest(EnvSpec("bandit"), protocol, env_seed=n % TASKS, sampling_seed=n)
            for n in numbers
        ]

    async def run() -> None:
        async with LocalChatClient(model, template.tokenizer, max_slots=EPISODES) as client:
            spec = InferenceSpec(SamplingConfig(max_tokens=3))
            runtime = Runtime(client, template, "tiny", spec)
            source = RolloutBatchSource(
                engine=RolloutEngine({"bandit": TaskBandit}, runtime=runtime),
                request_fn=requests,
                algorithm=algo,
                max_steps=1,
            )
            checkpoint = CheckpointConfig(folder / "ck", every=1)
            trainer = Trainer(
                model=model,
                algo=algo,
                batch_source=source,
                publisher=LocalPolicyPublisher(client),
                cfg=TrainerConfig(
                    learning_rate=learning_rate,
                    run_dir=folder,
                    checkpoint=checkpoint,
                    overlap=overlap,
                ),
            )
            await trainer.train(steps)
            trainer.close()

    asyncio.run(run())
    return algo


def outcomes_kept(algo: RLAlgorithm) -> float:
    """How many outcomes the tracker still remembers, over all tasks."""
    tasks = algo.state_dict()["credit_assigner"]["tasks"]
    assert len(tasks) == TASKS
    return float(sum(alpha + beta for alpha, beta, _ in tasks.values()))


def drifting() -> BetaTracker:
    """A tracker that begins with next to nothing and whose forgetting has no bounds."""
    return BetaTracker(DriftForgetting(lower=0.0, upper=1.0), prior_count=1e-9)


def test_a_policy_that_moves_forgets_by_how_far_it_moved(tmp_path: Path) -> None:
    still = run_spo(tmp_path / "still", drifting(), learning_rate=1e-12)
    assert outcomes_kept(still) == pytest.approx(STEPS * EPISODES)
    moved = run_spo(tmp_path / "moved", drifting(), learning_rate=1e-3)
    lines = [json.loads(line) for line in (tmp_path / "moved/metrics.jsonl").open()]
    first, second, _ = (2 ** (-line["train/update_kl"] / 0.06) for line in lines)
    assert 0 < first < 0.999
    assert outcomes_kept(moved) == pytest.approx(EPISODES * ((first + 1) * second + 1))


def test_the_drift_of_a_resumed_run_is_that_of_one_never_interrupted(tmp_path: Path) -> None:
    straight = run_spo(tmp_path / "straight", drifting(), 1e-3)
    run_spo(tmp_path / "resumed", drifting(), 1e-3, steps=2)
    resumed = run_spo(tmp_path / "resumed", drifting(), 1e-3)
    assert resumed.state_dict() == straight.state_dict()


def test_with_a_constant_rate_no_update_is_measured(tmp_path: Path) -> None:
    algo = run_spo(tmp_path, BetaTracker(0.9), 1e-3, steps=1)
    assert not algo.watches_drift
    assert "update_kl" not in (tmp_path / "metrics.jsonl").read_text()


def test_with_overlap_a_checkpoint_has_the_drift_of_its_last_update(tmp_path: Path) -> None:
    """And of the batch that is sampled ahead nothing: a resumed run samples it again."""
    algo = run_spo(tmp_path, drifting(), 1e-3, overlap=True)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    drifts = list(accumulate(line["train/update_kl"] for line in lines))
    assert drifts[0] > 0
    found = {}
    for folder in sorted((tmp_path / "ck").glob("step-*")):
        state = json.loads((folder / "manifest.json").read_text())["state"]
        found[state["step"]] = state["parts"]["algorithm"]["credit_assigner"]
        assert found[state["step"]]["drift"] == pytest.approx(drifts[state["step"] - 1], rel=1e-12)
    seen = {
        step: sum(a + b for a, b, _ in state["tasks"].values()) for step, state in found.items()
    }
    assert seen[2] < 2 * EPISODES + 1e-6  # two batches, and not the third
    assert found[3] == algo.state_dict()["credit_assigner"]  # where nothing is sampled ahead


def test_a_state_that_drifts_leaves_the_algorithm_alone() -> None:
    algo = make_spo(tracker=drifting())
    algo.credit_assigner.tracker.update([("a", 1.0)])  # type: ignore[attr-defined]
    before = algo.state_dict()
    algo.observe_drift(0.5)
    present = algo.state_dict()
    assert algo.drifted(before, 0.5) == present
    assert algo.state_dict() == present
