"""The next batch begins while this one is trained on, and is sampled under the new policy."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ludic.distributed.interfaces import PublishReport, Weights
from ludic.distributed.local import LocalPolicyPublisher
from ludic.inference.local import LocalChatClient
from ludic.inference.sampling import InferenceSpec, SamplingConfig
from ludic.inference.templates.hf import HFChatTemplate
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.interaction.base import Runtime
from ludic.rollouts import EnvSpec, ProtocolSpec, RolloutEngine, RolloutRequest
from ludic.training import (
    CheckpointConfig,
    RolloutBatchSource,
    Trainer,
    TrainerConfig,
    make_grpo,
)
from ludic.training import trainer as trainer_module
from ludic.training.batching.scoring import LocalScores, ReferenceScorer, ScoredBatchSource
from ludic.training.checkpoint_contents import model_fingerprint
from ludic.training.update.passes import Passes
from ludic.types import Action, Info, Obs, Rollout, StepOutcome
from tests.inference.local.asking import request
from tests.training.learning import ColourBandit

EPISODES, GROUP = 8, 4


@pytest.fixture(autouse=True)
def short_training_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "_EARLY_S", 0.0)


class Counted(ColourBandit):
    """Pays by the length of the answer, and notes when it is begun."""

    begun: list[float]

    def env_reset(self, *, seed: int | None = None) -> tuple[Obs, Info]:
        self.begun.append(time.monotonic())
        return super().env_reset(seed=seed)

    def env_step(self, action: Action) -> StepOutcome:
        return StepOutcome("", len(action) % 7 / 7, terminated=True)


class Requests:
    """Remembers how many it has given."""

    def __init__(self) -> None:
        self.given = 0

    def __call__(self) -> list[RolloutRequest]:
        protocol = ProtocolSpec("single_agent", {"parser": {"kind": "text"}})
        seeds = range(self.given, self.given + EPISODES // GROUP)
        self.given = seeds.stop
        return [
            RolloutRequest(EnvSpec("counted"), protocol, env_seed=n, sampling_seed=n) for n in seeds
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.given = state["given"]


class Run:
    """A small run with real tokens."""

    def __init__(self, folder: Path, step_timeout_s: float | None = 60.0, **settings: Any) -> None:
        self.folder, self.step_timeout_s, self.settings = folder, step_timeout_s, settings
        self.begun: list[float] = []
        self.rollouts: list[Rollout] = []
        self.evaluated: list[int] = []
        self.precision = settings.pop("precision", None)
        self.model = tiny_model(seed=1)

    def write(self, rollout: Rollout) -> None:
        self.rollouts.append(rollout)

    async def evaluate(self, step: int) -> dict[str, float]:
        self.evaluated.append(len(self.begun))
        return {}

    async def train(
        self, steps: int, then: Callable[[LocalChatClient], Any] | None = None
    ) -> Trainer:
        template = HFChatTemplate(tiny_tokenizer())
        made = type("Counted", (Counted,), {"begun": self.begun})
        async with LocalChatClient(
            self.model, template.tokenizer, max_slots=EPISODES, precision=self.precision
        ) as client:
            spec = InferenceSpec(SamplingConfig(max_tokens=5))
            source = RolloutBatchSource(
                engine=RolloutEngine(
                    {"counted": made},
                    runtime=Runtime(client, template, "tiny", spec),
                    step_timeout_s=self.step_timeout_s,
                ),
                request_fn=Requests(),
                algorithm=make_grpo(group_size=GROUP),
                max_steps=1,
                concurrency=EPISODES,
                writer=self,
            )
            trainer = Trainer(
                model=self.model,
                batch_source=source,
                publisher=LocalPolicyPublisher(client),
                evaluate=self.evaluate,
                cfg=TrainerConfig(
                    learning_rate=1e-2,
                    run_dir=self.folder,
                    precision=self.precision,
                    checkpoint=CheckpointConfig(self.folder / "ck", every=1),
                    **self.settings,
                ),
            )
            try:
                await trainer.train(steps)
            finally:
                trainer.close()
                if then is not None:
                    await then(client)
        return trainer

    def sampled(self) -> set[tuple[Any, ...]]:
        """Ids, tokens, log-probs and versions of all that was sampled."""
        return {
            (rollout.id, t.token_ids, t.completion_logprobs, t.version_spans)
            for rollout in self.rollouts
            for step in rollout.agent_steps
            if (t := step.trace) is not None
        }


def watch_passes(monkeypatch: pytest.MonkeyPatch, run: Run, wait_s: float) -> list[int]:
    """How many episodes had begun when each pass ended, which waits for those of the next batch."""
    seen: list[int] = []
    accumulate = Passes.accumulate

    def watched(self: Passes, *args: Any, **options: Any) -> Any:
        wanted, end = EPISODES * (len(seen) + 2), time.monotonic() + wait_s
        while len(run.begun) < wanted and time.monotonic() < end:
            time.sleep(0.005)
        seen.append(len(run.begun))
        return accumulate(self, *args, **options)

    monkeypatch.setattr(Passes, "accumulate", watched)
    return seen


@pytest.mark.parametrize("precision", [None, "mixed"])
def test_what_is_sampled_and_learnt_is_the_same_to_the_bit(
    tmp_path: Path, precision: str | None
) -> None:
    early, late = (
        Run(tmp_path / str(begin_early), begin_early=begin_early, precision=precision)
        for begin_early in (True, False)
    )
    for run in (early, late):
        trainer = asyncio.run(run.train(5))
        assert (trainer.step, trainer.version) == (5, 5)
        assert len(run.begun) == 5 * EPISODES
    assert early.sampled() == late.sampled()
    assert {v.version for _, _, _, spans in early.sampled() for v in spans} == {0, 1, 2, 3, 4}
    for a, b in zip(early.model.parameters(), late.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_it_begins_during_the_pass_but_for_the_first_and_after_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    seen = watch_passes(monkeypatch, run, wait_s=1.0)
    asyncio.run(run.train(4))
    # How long training takes is not known before the first; nothing comes after the last.
    assert [n // EPISODES for n in seen] == [1, 3, 4, 4]


@pytest.mark.parametrize(
    ("settings", "whole_batches"),
    [({"eval_every": 2}, [1, 2, 4, 4]), ({"step_timeout_s": 1.0}, [1, 2, 3, 4])],
    ids=["an evaluation comes first", "a deadline would come near"],
)
def test_it_waits_where_it_has_to(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    whole_batches: list[int],
) -> None:
    run = Run(tmp_path, **settings)
    seen = watch_passes(monkeypatch, run, wait_s=0.3)
    asyncio.run(run.train(4))
    assert [n // EPISODES for n in seen] == whole_batches
    assert run.evaluated == ([2 * EPISODES, 4 * EPISODES] if "eval_every" in settings else [])


def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight = Run(tmp_path / "straight")
    asyncio.run(straight.train(5))
    stopped = Run(tmp_path / "resumed")
    seen = watch_passes(monkeypatch, stopped, wait_s=1.0)
    save = Trainer._save

    async def stop_after(trainer: Trainer) -> None:
        await save(trainer)
        if trainer.step == 3:
            trainer.stop()

    monkeypatch.setattr(Trainer, "_save", stop_after)
    assert asyncio.run(stopped.train(5)).step == 3
    assert seen[-1] == 4 * EPISODES  # the fourth had begun, and is forgotten
    monkeypatch.undo()
    resumed = Run(tmp_path / "resumed")
    asyncio.run(resumed.train(5))
    for a, b in zip(straight.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_training_that_fails_lets_go_of_the_sampler_and_of_what_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    accumulate, passes = Passes.accumulate, []

    def failing(self: Passes, *args: Any, **options: Any) -> Any:
        passes.append(1)
        if len(passes) == 3:
            raise ValueError("out of luck")
        return accumulate(self, *args, **options)

    monkeypatch.setattr(Passes, "accumulate", failing)
    answers: list[Any] = []

    async def ask(client: LocalChatClient) -> None:
        answers.append(await client.complete_tokens(request([1, 2, 3], seed=1, max_tokens=3)))
        assert client.stats()["running"] == client.stats()["waiting"] == 0
        me = asyncio.current_task()
        left = [task for task in asyncio.all_tasks() if task is not me and not task.done()]
        assert left == []

    with pytest.raises(ValueError, match="out of luck"):
        asyncio.run(run.train(5, ask))
    assert answers


@pytest.mark.parametrize("where", ["accumulate", "_save"])
def test_training_that_goes_on_after_a_failure_loses_no_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    owner: Any = Passes if where == "accumulate" else Trainer
    original, train = getattr(owner, where), Trainer.train
    runs = [Run(tmp_path / str(early), begin_early=early) for early in (True, False)]

    async def twice(trainer: Trainer, steps: int | None = None) -> None:
        with pytest.raises(ValueError, match="out of luck"):
            await train(trainer, steps)
        await train(trainer, 2)

    monkeypatch.setattr(Trainer, "train", twice)
    for run in runs:
        calls: list[int] = []

        def failing(*args: Any, calls: list[int] = calls, **options: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                raise ValueError("out of luck")
            return original(*args, **options)

        monkeypatch.setattr(owner, where, failing)
        asyncio.run(run.train(4))
    early, late = runs
    assert early.sampled() == late.sampled()
    for a, b in zip(early.model.parameters(), late.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_that_is_saved_while_the_adapter_is_off_is_this_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import LoraConfig, get_peft_model

    run, scoring = Run(tmp_path), threading.Event()
    settings = LoraConfig(r=2, target_modules=["q_proj"])
    adapted: Any = get_peft_model(run.model, settings)
    run.model = adapted.eval()
    logprobs, flush, plain = LocalScores.logprobs, Trainer._flush_record, RolloutBatchSource

    async def slow(scores: LocalScores, items: Any) -> Any:
        with adapted.disable_adapter():
            scoring.set()
            await asyncio.sleep(0.3)
        return await logprobs(scores, items)

    async def late(trainer: Trainer) -> None:
        await flush(trainer)
        scoring.clear()
        await asyncio.to_thread(scoring.wait, 1.0)

    def scored(**options: Any) -> ScoredBatchSource:
        reference = LocalScores(run.model, without_adapter=True)
        return ScoredBatchSource(plain(**options), [ReferenceScorer(reference)])

    monkeypatch.setattr(LocalScores, "logprobs", slow)
    monkeypatch.setattr(Trainer, "_flush_record", late)
    monkeypatch.setitem(globals(), "RolloutBatchSource", scored)
    asyncio.run(run.train(3))
    manifests = [json.loads(p.read_text()) for p in tmp_path.glob("ck/step-*/manifest.json")]
    assert {m["fingerprint"] for m in manifests} == {model_fingerprint(run.model)}


class Coefficient:
    """What a loss adapts with every step."""

    def __init__(self) -> None:
        self.steps = 0

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.steps += 1

    def close(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]


@pytest.mark.parametrize("begin_early", [True, False])
def test_a_checkpoint_has_what_training_made_of_other_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin_early: bool
) -> None:
    other = Coefficient()
    monkeypatch.setitem(
        globals(), "Trainer", partial(Trainer, loggers=[other], stateful={"c": other})
    )
    asyncio.run(Run(tmp_path, begin_early=begin_early).train(4))
    states = [json.loads(p.read_text())["state"] for p in tmp_path.glob("ck/step-*/manifest.json")]
    assert {(s["step"], s["parts"]["c"]["steps"]) for s in states} == {(3, 3), (4, 4)}


def test_a_publisher_that_asks_the_sampler_itself_is_not_held_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Trying(LocalPolicyPublisher):
        async def publish(self, weights: Weights, version: int) -> PublishReport:
            report = await super().publish(weights, version)
            client: Any = self.client
            await client.complete_tokens(request([1, 2, 3], seed=1, max_tokens=2, timeout_s=5.0))
            return report

    monkeypatch.setitem(globals(), "LocalPolicyPublisher", Trying)
    assert asyncio.run(Run(tmp_path).train(4)).version == 4
