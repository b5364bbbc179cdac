"""A `Run` between its assembly and its end: its pieces, its callbacks, where it may be started."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import ludic
from ludic.distributed.local import LocalPolicyPublisher
from ludic.errors import ConfigError, UnknownNameError
from ludic.inference import LocalChatClient
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.registry import register_logger, unregister_logger
from ludic.runs.results.terminal import Update, command_name
from ludic.runs.settings.from_python import given_again, read_arguments
from ludic.runs.storage import RunFolder
from ludic.training import RolloutBatchSource, Trainer
from tests.runs.worlds import Letters

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

WORDS = ["A or B?", "user\n", "assistant\n"]
SIZE = {"hidden_size": 16, "layers": 1, "heads": 2, "kv_heads": 1, "max_position_embeddings": 64}


def teacher(obs: str, rng: Any) -> str:
    return str(rng.choice("AB"))


def small(**changes: Any) -> dict[str, Any]:
    """The arguments of a run that takes seconds."""
    return {
        "model": {"kwargs": {**SIZE, "words": WORDS}},
        "algorithm": ludic.grpo(group_size=2),
        "steps": 2,
        "training": {"rollouts_per_update": 4, "max_steps": 1, "max_seq_len": 64},
        "inference": {"slots": 4, "max_context_tokens": 48, "sampling": {"max_tokens": 2}},
        "eval": {"episodes": 4},
        "logging": {"loggers": []},
        **changes,
    }


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def weights(run: ludic.Run) -> bytes:
    return (run.folder.weights() / "model.safetensors").read_bytes()


class Lines:
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.closed = False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True


def test_the_pieces_are_there_before_the_run_and_are_the_ones_it_uses() -> None:
    run = ludic.Run(Letters, **small(out="run"))
    assert not Path("run").exists()
    assert isinstance(run.trainer, Trainer)
    assert isinstance(run.client, LocalChatClient)
    assert isinstance(run.publisher, LocalPolicyPublisher)
    assert isinstance(run.source, RolloutBatchSource)
    assert run.trainer.model is run.model
    assert run.trainer.source is run.source
    assert run.source.engine.runtime is run.runtime
    assert run.folder.path == Path("run")
    trainer = run.trainer
    run.go()
    assert run.trainer is trainer
    assert trainer.step == 2
    assert (run.folder.weights() / "tokenizer_config.json").is_file()


def test_a_replaced_piece_is_used_and_what_was_made_from_it_is_made_again() -> None:
    run = ludic.Run(Letters, **small(out="run"))
    before = run.trainer, run.source, run.client
    model = tiny_model(7, vocab_size=len(run.tokenizer), **SIZE)
    run.model = model
    assert run.client is not before[2]
    assert run.source is not before[1]
    assert run.trainer is not before[0]
    assert run.trainer.model is model
    lines = Lines()
    run.loggers = [lines]
    run.folder = RunFolder(Path("elsewhere"))
    run.go()
    assert lines.steps == [1, 2]
    assert lines.closed
    assert Path("elsewhere/summary.json").is_file()
    assert not Path("run").exists()
    with pytest.raises(ConfigError, match="model cannot be replaced: the run has begun"):
        run.model = model
    with pytest.raises(ConfigError, match="this run is over: resume it by"):
        run.go()


COLD_START = {"examples": 4, "steps": 3, "batch_size": 4}


class NamedLines(Lines):
    """One that is made by name, and remembers who was made."""

    made: ClassVar[list[NamedLines]] = []

    def __init__(self, mark: str = "") -> None:
        super().__init__()
        self.mark = mark
        self.made.append(self)


def test_loggers_are_named_registered_or_given_as_classes() -> None:
    register_logger("lines", NamedLines)
    NamedLines.made.clear()
    loggers = ["lines", {"kind": "lines", "mark": "x"}, NamedLines]
    sft = {"teacher": teacher, **COLD_START}
    try:
        ludic.train(Letters, **small(out="run", sft=sft, logging={"loggers": loggers}))
    finally:
        unregister_logger("lines")
    cold, warm = NamedLines.made[:3], NamedLines.made[3:]
    assert [logger.mark for logger in cold] == [logger.mark for logger in warm] == ["", "x", ""]
    assert all(logger.steps == [1, 2, 3] for logger in cold)
    assert all(logger.steps == [1, 2] for logger in warm)
    assert all(logger.closed for logger in NamedLines.made)


def test_a_logger_that_is_not_there_is_a_sentence_before_anything_runs() -> None:
    with pytest.raises(UnknownNameError, match=r"logger 'wandbb'.*wandb"):
        ludic.Run(Letters, **small(out="run", logging={"loggers": ["wandbb"]}))
    with pytest.raises(ConfigError, match="is a logger already"):
        ludic.Run(Letters, **small(out="run", logging={"loggers": [Lines()]}))
    assert not Path("run").exists()


def test_loggers_that_are_put_in_hear_the_cold_start_and_are_closed_once() -> None:
    class Counted(Lines):
        closes = 0

        def close(self) -> None:
            self.closes += 1

    run = ludic.Run(Letters, **small(out="run", sft={"teacher": teacher, **COLD_START}))
    lines = Counted()
    run.loggers = [lines]
    run.go()
    assert lines.steps == [1, 2, 3, 1, 2]
    assert lines.closes == 1


def test_looking_at_the_pieces_changes_no_bit() -> None:
    sft = {"teacher": teacher, "examples": 4, "steps": 2, "batch_size": 4}
    runs = [ludic.Run(Letters, **small(sft=sft, out=f"run-{i}")) for i in range(2)]
    assert runs[0].trainer.step == 0
    assert weights(runs[0].go()) == weights(runs[1].go())


def test_callbacks_see_every_update_and_may_stop_the_run() -> None:
    seen, awaited = list[Update](), list[Update]()

    async def see(update: Update) -> None:
        await asyncio.sleep(0)
        awaited.append(update)

    sft = {"teacher": teacher, "examples": 4, "steps": 1, "batch_size": 4}
    run = ludic.Run(Letters, **small(sft=sft, steps=50, out="run"), callbacks=[seen.append, see])
    run.callbacks.append(lambda u: run.stop() if (u.stage, u.step) == ("rl", 2) else None)
    run.go()
    assert [(update.stage, update.step) for update in seen] == [("sft", 1), ("rl", 1), ("rl", 2)]
    assert awaited == seen
    assert seen[-1].metrics["train/step"] == 2
    assert run.stopped
    assert list(run.report.stages) == ["before", "after_sft"]
    go_on = ludic.resume(run, steps=3)
    assert list(go_on.report.stages) == ["before", "after_sft", "after_rl"]


def test_a_stopped_run_says_how_to_resume_with_what_only_the_script_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Local(Letters): ...

    for env, said in ((Letters, "train --resume run-0"), (Local, "ludic.resume('run-1', env=…)")):
        run = ludic.Run(env, **small(out=f"run-{int(env is Local)}"))
        run.callbacks.append(lambda update, run=run: run.stop())  # type: ignore[misc]
        run.go()
        assert f"stopped; resume it with: {said}" in capsys.readouterr().out.replace(
            command_name() + " ", ""
        )


def test_a_callback_that_raises_ends_the_run_with_its_error() -> None:
    def fail(update: Update) -> None:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        ludic.train(Letters, **small(out="run"), callbacks=[fail])


async def test_a_notebook_with_a_running_loop_can_call_train() -> None:
    threads: set[str] = set()
    run = ludic.train(
        Letters,
        **small(out="run"),
        callbacks=[lambda update: threads.add(threading.current_thread().name)],
    )
    assert threads
    assert threading.current_thread().name not in threads
    assert "mean reward" in str(run.report)
    assert len(ludic.evaluate(run, episodes=2).episodes) == 2


async def test_async_code_awaits_a_run() -> None:
    run = await ludic.Run(Letters, **small(out="run")).go_async()
    assert run.report.before.episodes
    assert run.report.after is not run.report.before


def test_a_loaded_model_is_trained_itself_and_must_be_given_again() -> None:
    tokenizer = tiny_tokenizer(words=WORDS)
    pair = (tiny_model(3, vocab_size=len(tokenizer), **SIZE), tokenizer)
    run = ludic.train(Letters, **small(model=pair, out="run"))
    assert run.model is pair[0]
    recorded = json.loads(Path("run/run.json").read_text())["model"]["name"]
    assert recorded.startswith("object:transformers.")
    with pytest.raises(ConfigError, match=r"ludic\.resume\('run', model=…\)"):
        ludic.resume("run", steps=3)
    assert ludic.resume("run", model=pair, steps=3).trainer.step == 3
    assert len(ludic.evaluate("run", model=pair, episodes=2).episodes) == 2


def test_a_run_starts_from_an_earlier_one() -> None:
    sft = {"teacher": teacher, "examples": 4, "steps": 2, "batch_size": 4}
    decaying = {**small()["training"], "weight_decay": 0.5, "learning_rate": 0.1}
    first = ludic.train(Letters, **small(sft=sft, training=decaying, out="first"))
    second = ludic.Run(Letters, **small(model="first", out="second"))
    assert second.config.model.name == str(Path("first").absolute())
    assert same(second.model, first.model)
    taught = ludic.Run(Letters, **small(model="first:sft", out="third"))
    assert not same(taught.model, first.model)
    step = ludic.Run(Letters, **small(model="first:step-2", out="fourth"))
    assert same(step.model, first.model)
    assert step.go().report.after.episodes
    with pytest.raises(
        ConfigError, match="no checkpoint 'step-7'; there are: rl step-2, sft step-2"
    ):
        _ = ludic.Run(Letters, **small(model="first:step-7", out="fifth")).model


def test_a_run_starts_from_an_earlier_ones_adapter_merged_into_its_model() -> None:
    decaying = {**small()["training"], "weight_decay": 0.5, "learning_rate": 0.1}
    sft = {"teacher": teacher, "examples": 4, "steps": 2, "batch_size": 4, "learning_rate": 0.1}
    model = {**small()["model"], "lora": {"rank": 2}}
    first = ludic.train(Letters, **small(model=model, sft=sft, training=decaying, out="first"))
    second = ludic.Run(Letters, **small(model="first", out="second"))
    assert not hasattr(second.model, "peft_config")
    untrained = ludic.Run(Letters, **small(out="third"))
    assert second.model.state_dict().keys() == untrained.model.state_dict().keys()
    assert not same(second.model, untrained.model)
    ids = torch.tensor([[258, 259, 65]])
    merged, adapted = second.model(ids).logits, first.model(ids).logits
    assert torch.allclose(merged, adapted, atol=1e-4)


def test_an_adapter_is_in_the_models_type_with_masters_in_float32() -> None:
    model = {**small()["model"], "lora": {"rank": 2}, "precision": "bfloat16"}
    run = ludic.train(Letters, **small(model=model, training=small()["training"], out="run"))
    masters = run.trainer.optimizer.masters
    adapters = {n: p for n, p in run.model.named_parameters() if "lora_" in n}
    assert set(masters) == set(adapters)
    assert {p.dtype for p in adapters.values()} == {torch.bfloat16}
    assert {m.dtype for m in masters.values()} == {torch.float32}
    again = ludic.resume("run", steps=run.trainer.step + 1)
    assert again.trainer.step == run.trainer.step + 1


def same(a: Any, b: Any) -> bool:
    theirs = b.state_dict()
    return all(bool((tensor == theirs[name]).all()) for name, tensor in a.state_dict().items())


def test_what_a_run_has_already_cannot_be_given_again() -> None:
    run = ludic.train(Letters, **small(out="run"))
    with pytest.raises(ConfigError, match="learning_rate= cannot be given here"):
        ludic.resume("run", learning_rate=1.0)
    with pytest.raises(ConfigError, match="the run has its own settings: parser="):
        ludic.evaluate(run, parser="text")
    config, _ = read_arguments({"env": Letters, "parser": lambda text: None})
    with pytest.raises(ConfigError, match="give it again, and not 'text'"):
        given_again(config, {"parser": {"kind": "text"}})


def test_sft_alone_needs_a_teacher_or_data() -> None:
    sft = {"teacher": teacher, "examples": 4, "steps": 2, "batch_size": 4}
    run = ludic.sft(Letters, **{**small(out="run"), "steps": None, "sft": sft})
    assert list(run.report.stages) == ["before", "after_sft"]
    with pytest.raises(ConfigError, match="teacher"):
        ludic.sft(Letters)


def test_a_start_that_fails_leaves_no_folder_and_its_name_free() -> None:
    class Broken(Letters):
        def env_reset(self, *, seed: int | None = None) -> Any:
            raise OSError("no such level")

    with pytest.raises(ludic.errors.RolloutError, match="no such level"):
        ludic.train(Broken, **small(out="run"))
    assert not Path("run").exists()
    ludic.train(Letters, **small(out="run"))


def test_an_environment_that_cannot_be_made_is_a_sentence_and_no_folder() -> None:
    class Unready(Letters):
        def __init__(self) -> None:
            raise KeyError("level")

    with pytest.raises(ConfigError, match=r"Unready.* cannot be made: KeyError: 'level'"):
        ludic.train(Unready, **small(out="run"))
    assert not Path("run").exists()


def test_what_another_process_cannot_import_cannot_run_in_one() -> None:
    class Isolated(Letters):
        isolation = "process"

    with pytest.raises(ConfigError, match=r"cannot run in a separate process.*top of a module"):
        ludic.Run(Isolated, **small(out="run"))


def test_a_run_file_isolates_an_environment_that_does_not_ask_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs.py").write_text(
        "import os\n"
        "from ludic.envs import SingleAgentEnv\n"
        "from ludic.types import StepOutcome\n"
        "class Theirs(SingleAgentEnv):\n"
        "    def env_reset(self, *, seed=None):\n"
        "        with open('pids', 'a') as file:\n"
        "            print(os.getpid(), file=file)\n"
        "        return 'A or B?', {}\n"
        "    def env_step(self, action):\n"
        "        return StepOutcome('', 0.0, terminated=True)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    env = {"kind": "theirs:Theirs", "isolation": "process"}
    ludic.train(env, **small(out="run", steps=1))
    pids = [int(line) for line in Path("pids").read_text().splitlines()]
    assert len(pids) > len(set(pids))  # processes are used again
    assert os.getpid() not in pids


def test_two_runs_of_one_name_each_keep_their_own_objects() -> None:
    def make(word: str) -> type[Letters]:
        class Same(Letters):
            def env_current_obs(self) -> str:
                return word

        return Same

    runs = [
        ludic.Run(make(word), **small(out=f"run-{len(word)}", steps=1))
        for word in ("A or B?", "user\n")
    ]
    from ludic.rollouts import read_rollouts

    for run, word in zip(runs, ("A or B?", "user\n"), strict=True):
        run.go()
        (first, *_) = read_rollouts(run.folder.rollouts / "train.jsonl.zst")
        assert first.agent_steps[0].new_messages[-1]["content"] == word


def test_a_run_that_goes_wrong_says_so_at_its_end_and_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = small(out=tmp_path / "cut", steps=4)
    settings["inference"]["sampling"]["max_tokens"] = 1
    run = ludic.train(Letters, **settings)
    (sentence,) = (s for s in run.report.warnings if "of the completions" in s)
    assert "inference.sampling.max_tokens (now 1)" in sentence
    kept = json.loads((tmp_path / "cut" / "summary.json").read_text())["warnings"]
    assert kept == list(run.report.warnings)
    assert f"warning: {sentence}" in capsys.readouterr().out
    assert f"warning: {sentence}" in str(run.report)
