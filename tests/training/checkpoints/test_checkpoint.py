"""What is saved, what is refused, and what a failure leaves behind."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file as real_save_file
from transformers import AutoModelForCausalLM

from ludic.errors import CheckpointError, DamagedCheckpointError
from ludic.inference.tiny import tiny_model
from ludic.training import checkpoint_contents
from ludic.training.batching.ahead import SamplingAhead
from ludic.training.batching.scoring import ScoredBatchSource
from ludic.training.batching.source import WorksAhead
from ludic.training.checkpoint_contents import TrainerState, load_checkpoint, model_fingerprint
from ludic.training.config import CheckpointConfig, TrainerConfig
from ludic.training.trainer import Trainer
from tests.training.synthetic import RecordingPublisher, SyntheticSource, reinforce


def make(
    folder: Path, *, model: Any = None, source: Any = None, publisher: Any = None, **settings: Any
) -> Trainer:
    checkpoint = CheckpointConfig(folder / "ck", **{"every": 2, **settings})
    cfg = TrainerConfig(
        learning_rate=1e-3,
        max_seq_len=64,
        micro_token_budget=64,
        run_dir=folder,
        checkpoint=checkpoint,
    )
    return Trainer(
        model=model if model is not None else tiny_model(),
        algo=reinforce(),
        batch_source=source or SyntheticSource(),
        publisher=publisher,
        cfg=cfg,
    )


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


def run(trainer: Trainer, steps: int) -> dict[str, torch.Tensor]:
    trainer.train_sync(steps)
    trainer.close()
    return weights(trainer)


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("background", [False, True])
def test_a_resumed_run_is_the_same_to_the_bit(
    tmp_path: Path, dtype: torch.dtype, background: bool
) -> None:
    straight = run(make(tmp_path / "a", model=tiny_model().to(dtype), background=background), 5)
    run(make(tmp_path / "b", model=tiny_model().to(dtype), background=background), 3)
    resumed = make(tmp_path / "b", model=tiny_model().to(dtype), background=background)
    assert_equal(run(resumed, 5), straight)
    assert resumed.version == resumed.step == 5


def test_a_checkpoint_that_is_saved_while_the_adapter_is_off_is_this_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `overlap`, a reference may be read without the adapter at that moment."""
    adapted = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    trainer = make(tmp_path, model=adapted, every=1)
    named = model_fingerprint(adapted)
    save = trainer._save

    async def save_without_adapter() -> None:
        with adapted.disable_adapter():
            await save()

    monkeypatch.setattr(trainer, "_save", save_without_adapter)
    run(trainer, 1)
    manifest = json.loads((tmp_path / "ck/step-00000001/manifest.json").read_text())
    assert manifest["fingerprint"] == named


def test_a_run_that_is_not_resumable_keeps_its_weights_alone(tmp_path: Path) -> None:
    trained = run(make(tmp_path, resumable=False, background=True), 2)
    folder = tmp_path / "ck" / "step-00000002"
    assert (folder / "state-00000.safetensors").stat().st_size < 50_000  # torch's random state
    loaded = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert_equal(dict(loaded.named_parameters()), trained)
    with pytest.raises(CheckpointError, match=r"only the model's weights.* start another run"):
        run(make(tmp_path), 4)


def test_the_sampler_has_the_resumed_weights_before_the_first_batch(tmp_path: Path) -> None:
    saved = run(make(tmp_path), 2)
    publisher = RecordingPublisher()

    class Watching(SyntheticSource):
        async def next_batch(self) -> Any:
            assert publisher.versions[0] == 2
            assert_equal(publisher.weights[0], saved)
            return await super().next_batch()

    run(make(tmp_path, source=Watching(), publisher=publisher), 3)
    assert publisher.versions == [2, 3]


def test_a_steps_line_is_on_disk_before_its_checkpoint(tmp_path: Path) -> None:
    trainer = make(tmp_path, every=1)
    checkpoints = trainer._checkpoints
    assert checkpoints is not None
    save, seen = checkpoints.save, []

    def look_and_save(model: Any, optimizer: Any, state: Any, then: Any = bool) -> Any:
        lines = next(tmp_path.rglob("metrics.jsonl")).read_text().splitlines()
        seen.append((json.loads(lines[-1])["step"], state.step))
        return save(model, optimizer, state, then)

    checkpoints.save = look_and_save  # type: ignore[method-assign]
    run(trainer, 3)
    assert seen[:3] == [(1, 1), (2, 2), (3, 3)]


class Recording(SyntheticSource):
    """A source with a record that is flushed at the trainer's word."""

    def __init__(self, folder: Path, full_after: int = 99) -> None:
        super().__init__()
        self.folder, self.full_after = folder, full_after
        self.seen: list[tuple[int, list[str]]] = []

    async def flush_record(self) -> None:
        self.seen.append((self.count, sorted(p.name for p in self.folder.glob("ck/step-*"))))
        if len(self.seen) > self.full_after:
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("how", ["plain", "background", "scored", "ahead"])
def test_the_sources_record_is_on_disk_before_a_checkpoint_begins(tmp_path: Path, how: str) -> None:
    recording = Recording(tmp_path)
    source = {"scored": ScoredBatchSource(recording, ()), "ahead": SamplingAhead(recording)}
    run(make(tmp_path, source=source.get(how, recording), background=how == "background"), 4)
    written = [folders for _, folders in recording.seen]
    assert written[0] == []
    assert all("step-00000004" not in folders for folders in written)
    assert all(count >= step for (count, _), step in zip(recording.seen, (2, 4), strict=True))


class Told(SyntheticSource):
    """A source that notes which checkpoints were complete when it was told of a state."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.told: list[tuple[Any, str]] = []

    def committed(self, state: Mapping[str, Any]) -> None:
        self.told.append((dict(state), (self.folder / "ck/latest").read_text()))


@pytest.mark.parametrize("how", ["plain", "background", "scored", "ahead"])
def test_a_source_is_told_of_each_state_once_its_checkpoint_is_complete(
    tmp_path: Path, how: str
) -> None:
    source = Told(tmp_path)
    wrapped = {"scored": ScoredBatchSource(source, ()), "ahead": SamplingAhead(source)}
    run(make(tmp_path, source=wrapped.get(how, source), background=how == "background"), 5)
    names = ["step-00000002", "step-00000004", "step-00000005"]
    assert [latest for _, latest in source.told] == names
    for state, name in source.told:
        manifest = tmp_path / "ck" / name / "manifest.json"
        if manifest.is_file():  # the oldest is pruned
            saved = json.loads(manifest.read_text())["state"]["parts"]["batch_source"]
            assert (saved["source"] if how == "scored" else saved) == state


@pytest.mark.parametrize("background", [False, True])
def test_a_record_that_cannot_be_written_leaves_no_checkpoint(
    tmp_path: Path, background: bool
) -> None:
    trainer = make(tmp_path, source=Recording(tmp_path, full_after=1), background=background)
    with pytest.raises(OSError, match="No space left"):
        trainer.train_sync(6)
    trainer.close()
    assert (tmp_path / "ck/latest").read_text() == "step-00000002"
    assert [p.name for p in (tmp_path / "ck").glob("*step*")] == ["step-00000002"]


def test_an_evaluations_line_is_on_disk_before_its_checkpoint(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    async def evaluate(step: int) -> dict[str, float]:
        seen.append(sorted(path.name for path in (tmp_path / "ck").glob("step-*")))
        return {"eval/score": float(step)}

    trainer = make(tmp_path, every=1)
    trainer = Trainer(
        model=tiny_model(),
        algo=reinforce(),
        batch_source=SyntheticSource(),
        evaluate=evaluate,
        cfg=replace(trainer.cfg, eval_every=1),
    )
    run(trainer, 2)
    assert seen == [[], ["step-00000001"]]


def test_the_model_is_saved_as_transformers_loads_it(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trained = run(trainer, 2)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ck/step-00000002/model")
    assert_equal({n: p.detach() for n, p in loaded.named_parameters()}, trained)
    assert "ludic" not in (tmp_path / "ck/step-00000002/model/config.json").read_text()


@pytest.mark.parametrize(
    "options",
    [{"bias": "all"}, {"bias": "lora_only"}, {"trainable_token_indices": [3]}],
    ids=lambda options: "-".join(map(str, *options.items())),
)
def test_an_adapter_is_saved_with_all_that_peft_trains_with_it(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], **options)
    trained = run(make(tmp_path, model=get_peft_model(tiny_model(), config)), 2)
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path / "ck/step-00000002/model")
    assert_equal({n: p.detach() for n, p in loaded.named_parameters()}, trained)


@pytest.mark.filterwarnings("ignore:The following rank_pattern")
def test_an_adapter_that_has_chosen_ranks_is_saved_with_them(tmp_path: Path) -> None:
    config = AdaLoraConfig(target_modules=["q_proj"], total_step=9, init_r=4)
    adapted = get_peft_model(tiny_model(), config)
    ranked = [name for name in adapted.state_dict() if ".lora_E." in name]
    config.rank_pattern = {n.removeprefix("base_model.model."): [True, False] * 2 for n in ranked}
    run(make(tmp_path, model=adapted), 2)
    loaded = PeftModel.from_pretrained(tiny_model(), tmp_path / "ck/step-00000002/model")
    for name in ranked:
        torch.testing.assert_close(
            loaded.get_parameter(name), adapted.get_parameter(name)[::2], rtol=0, atol=0
        )


def test_weights_trained_beside_an_adapter_are_named_as_not_in_the_saved_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    adapted = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"]))
    run(make(tmp_path / "a", model=adapted), 1)
    assert "model/ lacks" not in caplog.text
    adapted.get_submodule("base_model.model.model.norm").requires_grad_(True)
    run(make(tmp_path / "b", model=adapted), 1)
    assert "model/ lacks 1 trained weights" in caplog.text
    assert "base_model.model.model.norm.weight" in caplog.text


def test_old_checkpoints_are_pruned_and_latest_names_the_newest(tmp_path: Path) -> None:
    run(make(tmp_path, every=1, keep=2), 5)
    assert sorted(p.name for p in (tmp_path / "ck").iterdir()) == [
        "latest",
        "step-00000004",
        "step-00000005",
    ]
    assert (tmp_path / "ck/latest").read_text() == "step-00000005"


def test_the_time_of_a_save_is_in_the_next_line_and_no_other(tmp_path: Path) -> None:
    run(make(tmp_path), 5)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()]
    assert [line["perf/checkpoint_s"] > 0 for line in lines] == [False, False, True, False, True]


def test_nothing_in_a_checkpoint_is_pickled(tmp_path: Path) -> None:
    run(make(tmp_path), 2)
    kinds = {p.suffix for p in (tmp_path / "ck/step-00000002").rglob("*") if p.is_file()}
    assert kinds == {".json", ".safetensors"}


DAMAGES = ["cut", "missing", "flipped", "no manifest", "bad manifest", "empty manifest"]


def damage_checkpoint(path: Path, damage: str) -> None:
    state, manifest = path / "state-00000.safetensors", path / "manifest.json"
    if damage == "cut":
        state.write_bytes(state.read_bytes()[:-100])
    elif damage == "missing":
        (path / "model/config.json").unlink()
    elif damage == "flipped":
        data = bytearray(state.read_bytes())
        data[-1] ^= 1
        state.write_bytes(bytes(data))
    elif damage == "no manifest":
        manifest.unlink()
    else:
        manifest.write_text(manifest.read_text()[:-10] if damage == "bad manifest" else "[]")


def files_of(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_never_loaded(tmp_path: Path, damage: str) -> None:
    run(make(tmp_path), 2)
    path = tmp_path / "ck/step-00000002"
    damage_checkpoint(path, damage)
    left = files_of(path)
    trainer = make(tmp_path)
    with pytest.raises(DamagedCheckpointError):  # the one that was asked for by name
        load_checkpoint(path, trainer.model, trainer.optimizer)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole: .*step-00000002"):
        run(trainer, 3)
    assert files_of(path) == left


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_newest_whole_checkpoint_stands_in_for_a_damaged_one(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    straight = run(make(tmp_path / "straight", every=1), 6)
    run(make(tmp_path, every=1), 4)
    newest = tmp_path / "ck/step-00000004"
    damage_checkpoint(newest, damage)
    left = files_of(newest)
    trainer = make(tmp_path, every=1, keep=1)
    asyncio.run(trainer.start())
    assert trainer.step == trainer.version == 3
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert str(newest) in warning
    assert "kept as damaged-step-00000004" in warning
    assert "from step 3" in warning
    assert (tmp_path / "ck/latest").read_text() == "step-00000003"
    assert_equal(run(trainer, 6), straight)
    assert files_of(tmp_path / "ck/damaged-step-00000004") == left  # not even pruned
    assert sorted(p.name for p in (tmp_path / "ck").glob("step-*")) == ["step-00000006"]


def test_every_damaged_checkpoint_on_the_way_is_named_and_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(make(tmp_path, every=1, keep=3), 3)
    for _ in range(2):  # the second time under further names
        damage_checkpoint(tmp_path / "ck/step-00000003", "flipped")
        damage_checkpoint(tmp_path / "ck/step-00000002", "missing")
        trainer = make(tmp_path, every=1, keep=3)
        run(trainer, 3)
        assert trainer.step == 3
    assert [r.getMessage().split(":")[0] for r in caplog.records] == [
        f"{tmp_path}/ck/step-0000000{step} is {what}"
        for step, what in [(3, "damaged"), (2, "half-written")] * 2
    ]
    assert sorted(p.name for p in (tmp_path / "ck").glob("damaged-*")) == [
        f"damaged-step-0000000{step}{again}" for step in (2, 3) for again in ("", "-2")
    ]


def test_a_latest_that_names_nothing_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(make(tmp_path, every=1), 3)
    shutil.rmtree(tmp_path / "ck/step-00000003")
    trainer = make(tmp_path)
    asyncio.run(trainer.start())
    trainer.close()
    assert trainer.step == 2
    assert "nothing is left of it" in caplog.text


def test_a_whole_checkpoint_that_does_not_fit_is_no_reason_to_take_an_older_one(
    tmp_path: Path,
) -> None:
    run(make(tmp_path, every=1), 2)
    manifest = tmp_path / "ck/step-00000002/manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        run(make(tmp_path), 3)


def scheduled(folder: Path, **settings: Any) -> Trainer:
    base = make(folder)
    base.close()
    return Trainer(
        model=tiny_model(),
        algo=reinforce(),
        batch_source=SyntheticSource(),
        cfg=replace(base.cfg, **settings),
    )


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_resumed_run_says_that_its_learning_rate_has_another_horizon(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, schedule: str
) -> None:
    run(scheduled(tmp_path, schedule=schedule, total_steps=4), 2)
    run(scheduled(tmp_path, schedule=schedule, total_steps=4), 3)
    assert caplog.messages == []
    run(scheduled(tmp_path, schedule=schedule, total_steps=8), 4)
    (warning,) = caplog.messages
    assert "from step 3 on" in warning
    assert "total_steps=8 (was 4)" in warning
    line = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[3])
    assert f"it is {line['train/learning_rate']:.3g}" in warning


def test_a_constant_learning_rate_has_no_horizon_to_speak_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(scheduled(tmp_path, total_steps=4), 2)
    run(scheduled(tmp_path, total_steps=8), 3)
    assert caplog.messages == []
    run(scheduled(tmp_path, schedule="linear", total_steps=8), 4)
    assert "schedule=linear (was constant), total_steps=8 (was None)" in caplog.text


def test_a_checkpoint_from_before_the_curve_was_saved_is_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(make(tmp_path), 2)
    path = tmp_path / "ck/step-00000002/manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["state"]["curve"], manifest["state"]["nonfinite_steps"]
    path.write_text(json.dumps(manifest))
    trainer = scheduled(tmp_path, schedule="linear", total_steps=8)
    run(trainer, 3)
    assert (trainer.step, trainer.nonfinite_steps) == (3, 0)
    assert caplog.messages == []


def test_leftovers_of_a_killed_write_are_ignored_and_swept(tmp_path: Path) -> None:
    straight = run(make(tmp_path / "straight"), 3)
    run(make(tmp_path), 2)
    half = tmp_path / "ck/.writing-step-00000004"
    (half / "model").mkdir(parents=True)
    (half / "state-00000.safetensors").write_bytes(b"half")
    assert_equal(run(make(tmp_path), 3), straight)
    assert not half.exists()


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run(make(tmp_path), 2)
    with pytest.raises(CheckpointError, match="another model"):
        run(make(tmp_path, model=tiny_model(hidden_size=48)), 3)


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_an_error_and_the_last_good_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    trainer = make(tmp_path, background=background)
    trainer.train_sync(2)
    good = {p: p.read_bytes() for p in (tmp_path / "ck/step-00000002").rglob("*") if p.is_file()}

    def full(tensors: Any, path: Path, **kwargs: Any) -> None:
        real_save_file(tensors, path, **kwargs)
        Path(path).write_bytes(Path(path).read_bytes()[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_contents, "save_file", full)
    with pytest.raises(CheckpointError, match=r"No space left.*step-00000002"):
        trainer.train_sync(2)
    trainer.close()
    assert all(p.read_bytes() == data for p, data in good.items())
    assert [p.name for p in (tmp_path / "ck").glob("*step*")] == ["step-00000002"]
    monkeypatch.undo()
    straight = run(make(tmp_path / "straight"), 4)
    assert_equal(run(make(tmp_path), 4), straight)


@pytest.mark.parametrize("background", [True, False])
def test_a_disk_that_hangs_is_an_error_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    trainer = make(tmp_path, background=background, write_timeout_s=0.2)
    writing, answers = threading.Event(), threading.Event()

    def hangs(tensors: Any, path: Path, **kwargs: Any) -> None:
        writing.set()
        answers.wait()
        real_save_file(tensors, path, **kwargs)

    monkeypatch.setattr(checkpoint_contents, "save_file", hangs)
    says = r"waited 0\.2 s .*ck, and the disk has not answered"
    try:
        with pytest.raises(CheckpointError, match=says):
            trainer.train_sync(2)
        assert writing.wait(60)
        saver = trainer._checkpoints
        assert saver is not None
        with pytest.raises(CheckpointError, match=says):  # the first one still writes
            saver.save(trainer.model, trainer.optimizer, TrainerState(4, 4))
        (writer,) = [t for t in threading.enumerate() if t.name == "ludic-checkpoint"]
        assert writer.daemon
    finally:
        answers.set()
    writer.join()
    saver._background.timeout_s = 60.0  # from here on the disk is only slow
    saver.save(trainer.model, trainer.optimizer, TrainerState(4, 4))
    saver.finish()
    assert [p.name for p in saver.complete()] == ["step-00000002", "step-00000004"]
    trainer.close()


def test_states_of_source_and_extra_parts_come_back(tmp_path: Path) -> None:
    class Tracker:
        def __init__(self) -> None:
            self.value = 0.5

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, state: Any) -> None:
            self.value = state["value"]

    tracker, again, source = Tracker(), Tracker(), SyntheticSource()
    tracker.value = 0.1 + 0.2
    for part, steps in ((tracker, 2), (again, 2)):
        base = make(tmp_path, source=source if part is again else None)
        trainer = Trainer(
            model=tiny_model(),
            algo=base.algo,
            batch_source=base.source,
            cfg=base.cfg,
            stateful={"tracker": part},
        )
        run(trainer, steps)
        base.close()
    assert again.value == 0.1 + 0.2
    assert source.count == 2


def test_with_overlap_the_batch_sampled_ahead_is_sampled_again(tmp_path: Path) -> None:
    trainer = make(tmp_path, every=1)
    trainer = Trainer(
        model=tiny_model(),
        algo=reinforce(),
        batch_source=SyntheticSource(),
        cfg=replace(trainer.cfg, overlap=True),
    )

    async def two_steps() -> None:
        await trainer.start()
        trainer._goal = -1
        await trainer.train_step()
        await trainer.train_step()
        assert isinstance(trainer.source, WorksAhead)
        await trainer.source.drop_ahead()

    asyncio.run(two_steps())
    trainer.close()
    manifest = json.loads((tmp_path / "ck/step-00000002/manifest.json").read_text())
    assert manifest["state"]["parts"]["batch_source"] == {"count": 2}
