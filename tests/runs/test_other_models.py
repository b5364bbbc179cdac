"""Runs with a second model: a reference, a teacher, a teacher for each environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

import ludic
from ludic.errors import ConfigError, LudicError
from ludic.inference.tiny import tiny_model, tiny_tokenizer
from ludic.runs.run import Run
from ludic.training.batching.scoring import ScoredBatchSource
from tests.inference.vllm.fake_server import FakeVLLM
from tests.runs.test_run import SIZE, WORDS, small, teacher, weights
from tests.runs.worlds import Letters

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

RUN = """
[run]
imports = ["tests.runs.test_other_models"]
[model.kwargs]
hidden_size = 16
layers = 1
heads = 2
kv_heads = 1
max_position_embeddings = 64
words = ["A or B?", "user\\n", "assistant\\n"]
[inference]
slots = 4
max_context_tokens = 48
sampling.max_tokens = 2
[[env]]
kind = "tests.runs.worlds:Letters"
[training]
steps = 2
rollouts_per_update = 4
max_steps = 1
max_seq_len = 64
learning_rate = 0.05
weight_decay = 0.5
[eval]
episodes = 2
[logging]
loggers = []
"""
GRPO = '[algorithm]\nname = "grpo"\nkwargs = { group_size = 2, kl_coeff = 0.5 }\n'
OPD = '[algorithm]\nname = "opd"\n'


class Others(Letters):
    """The same question, as another environment."""


def pair(seed: int) -> tuple[Any, Any]:
    tokenizer = tiny_tokenizer(words=WORDS)
    return tiny_model(seed, vocab_size=len(tokenizer), **SIZE), tokenizer


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with a model that is not the run's."""
    model, tokenizer = pair(5)
    model.save_pretrained(tmp_path / "saved")
    tokenizer.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def from_file(text: str, *overrides: str, out: str = "run") -> Run:
    Path("run.toml").write_text(RUN + text)
    return Run.from_file("run.toml", overrides, out=out)


def metrics(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]


def test_a_run_stays_near_its_start_and_a_resumed_one_near_the_same() -> None:
    text = GRPO + '[reference]\nmodel = "start"\n'
    whole = from_file(text, "training.steps=3", out="whole").go()
    first, *later = [line["train/kl_reference"] for line in metrics(whole)]
    assert first == pytest.approx(0, abs=1e-5)
    assert any(abs(kl) > 1e-4 for kl in later)
    part = from_file(text, "training.checkpoint_every=1", out="part").go()
    again = ludic.resume(part, steps=3)
    assert weights(again) == weights(whole)


def test_the_start_is_the_policy_after_the_cold_start() -> None:
    sft = {"teacher": teacher, "examples": 4, "steps": 2, "batch_size": 4}
    algorithm = ludic.grpo(group_size=2, kl_coeff=0.1)
    run = ludic.train(Letters, **small(algorithm=algorithm, sft=sft, reference="start", out="run"))
    assert metrics(run)[0]["train/kl_reference"] == pytest.approx(0, abs=1e-5)


def test_the_start_of_a_new_adapter_is_the_model_below_it() -> None:
    model = {**small()["model"], "lora": {"rank": 2}}
    algorithm = ludic.grpo(group_size=2, kl_coeff=0.1)
    run = ludic.train(Letters, **small(model=model, algorithm=algorithm, reference="start"))
    assert metrics(run)[0]["train/kl_reference"] == pytest.approx(0, abs=1e-5)
    assert not (run.folder.path / "reference").exists()


def test_a_new_adapter_is_drawn_from_the_runs_seed_and_takes_nobodys_random_numbers() -> None:
    def drawn(seed: int) -> list[Any]:
        model = {**small()["model"], "lora": {"rank": 2}}
        run = ludic.Run(Letters, **small(model=model, seed=seed, out=f"run-{seed}"))
        return [p for name, p in run.model.named_parameters() if "lora_A" in name]

    before = torch.get_rng_state()
    first, again, other = drawn(1), drawn(1), drawn(2)
    assert torch.equal(torch.get_rng_state(), before)
    assert first
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_the_reference_is_a_folder_an_earlier_run_or_a_loaded_model(saved: Path) -> None:
    by_folder = from_file(GRPO + '[reference]\nmodel = "saved"\n', out="by-folder")
    assert by_folder.config.reference is not None
    assert by_folder.config.reference.model == str(saved)
    first = metrics(by_folder.go())[0]["train/kl_reference"]
    assert abs(first) > 1e-4
    given = small(algorithm=ludic.grpo(group_size=2, kl_coeff=0.5), steps=1, seed=0)
    loaded = ludic.train(Letters, **given, reference=pair(5), out="loaded")
    assert metrics(loaded)[0]["train/kl_reference"] == pytest.approx(first, abs=1e-6)
    with pytest.raises(ConfigError, match=r"reference=…"):
        ludic.resume("loaded", steps=2)
    assert ludic.resume("loaded", steps=2, reference=pair(5)).trainer.step == 2
    by_run = from_file(GRPO + '[reference]\nmodel = "by-folder:step-2"\n', out="by-run").go()
    assert abs(metrics(by_run)[0]["train/kl_reference"]) > 1e-4


def test_a_kl_in_the_reward_changes_what_is_learned() -> None:
    plain = '[algorithm]\nname = "reinforce"\n'
    charged = plain + '[reference]\nmodel = "saved"\nkl_in_reward = 0.5\nhorizon = "token"\n'
    model, tokenizer = pair(5)
    model.save_pretrained("saved")
    tokenizer.save_pretrained("saved")
    runs = [from_file(text, out=f"run-{i}").go() for i, text in enumerate((plain, charged))]
    assert weights(runs[0]) != weights(runs[1])


def test_opd_learns_from_a_teacher(saved: Path) -> None:
    more = ["training.steps=16", "training.rollouts_per_update=32", "training.weight_decay=0"]
    run = from_file(OPD + '[[teacher]]\nmodel = "saved"\n', *more, "training.learning_rate=0.01")
    assert isinstance(run.source, ScoredBatchSource)
    gaps = [line["train/kl_teacher"] for line in metrics(run.go())]
    assert sum(gaps[-4:]) < 0.5 * sum(gaps[:4])


def test_two_teachers_have_an_environment_each(saved: Path) -> None:
    more = '[[env]]\nkind = "tests.runs.test_other_models:Others"\nname = "others"\n'
    both = (
        '[[teacher]]\nmodel = "saved"\nenvs = ["others"]\n'
        '[[teacher]]\nmodel = "tiny"\nkwargs = { hidden_size = 16, layers = 1, heads = 2, '
        'kv_heads = 1, max_position_embeddings = 64, words = ["A or B?", "user\\n", '
        '"assistant\\n"] }\n'
    )
    run = from_file(more + OPD + both, "training.steps=1").go()
    rows = [
        {"teacher": r.meta["teacher"], "env": r.meta["curriculum"]} for r in ludic_rollouts(run)
    ]
    assert {(row["env"], row["teacher"]) for row in rows} == {
        ("others", "teacher-1"),
        ("tests.runs.worlds:Letters", "teacher-2"),
    }
    with pytest.raises(LudicError, match=r"environment of teacher 1, 'otters'; did you mean 'oth"):
        from_file(more + OPD + both.replace('"others"', '"otters"'), out="no")
    with pytest.raises(ConfigError, match=r"no teacher is for environment 'tests\.runs"):
        from_file(more + OPD + both + 'tasks = []\nenvs = ["others"]\n', out="no")


def ludic_rollouts(run: Run) -> list[Any]:
    from ludic.rollouts import read_rollouts

    return list(read_rollouts(run.folder.rollouts / "train.jsonl.zst"))


def test_teachers_by_task_are_chosen_by_its_key() -> None:
    from ludic.runs.players.scoring import _router
    from ludic.runs.settings import TeacherSection

    route = _router([TeacherSection(model="a", tasks=["maths/*"]), TeacherSection(model="b")])

    class Item:
        def __init__(self, **meta: Any) -> None:
            self.meta = meta

    assert route(Item(task_key="maths/3", teacher="teacher-2")) == "teacher-1"
    assert route(Item(task_key="code/3", teacher="teacher-2")) == "teacher-2"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GRPO, r"needs a reference: add \[reference\] with model = \"start\""),
        (OPD, r"'opd' needs a teacher: .* \[\[teacher\]\]"),
        ('[reference]\nmodel = "start"\n', r"nothing uses the \[reference\]: .*kl_coeff"),
        ('[[teacher]]\nmodel = "saved"\n', "'grpo' does not use a .*name='opd'"),
        (GRPO + '[reference]\nmodel = "./savd"\n', "no such folder; did you mean 'saved'"),
        (GRPO + '[reference]\nmodle = "saved"\n', "'reference.modle': did you mean 'model'"),
        (GRPO + "[reference]\n", "either a `model`"),
        (GRPO + '[reference]\nserver = "localhost:8000"\n', "try http://localhost:8000"),
        (
            GRPO + '[reference]\nserver = "http://localhost:8000"\nkwargs = { a = 1 }\n',
            "kwargs belongs to a `model`",
        ),
        (
            GRPO + '[reference]\nserver = "http://localhost:8000"\n# at temperature 0.5\n',
            "scores at temperature 1",
        ),
        (OPD + '[[teacher]]\nmodel = "start"\n', "teaches nothing"),
        (OPD + '[[teacher]]\nmodel = "saved"\n' * 2, "both have neither `envs` nor `tasks`"),
        (
            GRPO + '[reference]\nmodel = "saved"\nhorizon = "turns"\n',
            "reference.horizon.*'token', 'turn' or 'rollout'",
        ),
        (GRPO + '[reference]\nmodel = "saved"\nkl_in_reward = -1\n', "reference.kl_in_reward"),
        (
            GRPO + '[reference]\nserver = "http://a"\napi_key_env = "LUDIC_NO_SUCH"\n',
            "api_key_env='LUDIC_NO_SUCH': this environment variable is not set",
        ),
        (
            GRPO + '[reference]\nserver = "http://a"\napi_key_file = "nowhere"\n',
            "api_key_file=.*nowhere.* cannot be read",
        ),
    ],
)
def test_a_second_model_that_does_not_fit_is_refused_in_a_sentence(
    saved: Path, text: str, said: str
) -> None:
    overrides = ["inference.sampling.temperature=0.5"] if "# at" in text else []
    if "[algorithm]" not in text:
        overrides.append("algorithm.kwargs.group_size=2")
    with pytest.raises(LudicError, match=said):
        from_file(text, *overrides)
    assert not Path("run").exists()


def test_a_teacher_with_another_tokenizer_is_refused_before_anything_is_played() -> None:
    other = tiny_tokenizer(words=["user\n", "A or B?"])
    model = tiny_model(5, vocab_size=len(other), **SIZE)
    with pytest.raises(ConfigError, match="teacher 1 has another tokenizer"):
        ludic.train(Letters, **small(algorithm="opd", out="run"), teacher=(model, other))
    assert not Path("run").exists()


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    (tmp_path / "key").write_text("secret\n")
    return str(tmp_path / "key")


async def test_a_teacher_behind_a_server_scores_with_the_key_that_a_file_holds(
    key_file: str,
) -> None:
    keys: set[str | None] = set()

    async def tokenize(request: web.Request) -> Any:
        text = (await request.json())["prompt"]
        tokens = tiny_tokenizer(words=WORDS).encode(text, add_special_tokens=False)
        return {"tokens": tokens}

    async def score(request: web.Request) -> Any:
        keys.add(request.headers.get("Authorization"))
        body = await request.json()
        if not body:
            return None
        rows = [{str(i): {"logprob": -1.0}} for i in body["token_ids"]]
        choice = {"index": 0, "finish_reason": "length", "token_ids": [7]}
        return {"choices": [choice], "prompt_logprobs": rows}

    faults: dict[str, Any] = {"/tokenize": tokenize, "/inference/v1/generate": score}
    async with FakeVLLM(faults=faults).serving() as fake:
        table = {"server": fake.url, "api_key_file": key_file}
        run = ludic.Run(Letters, **small(algorithm="opd", teacher=table, out="run"))
        await run.go_async()
    gaps = [line["train/kl_teacher"] for line in metrics(run)]
    assert all(gap < 0 for gap in gaps)  # a tiny model finds every token less likely than e^-1
    assert keys == {"Bearer secret"}
    assert run.config.teacher[0].api_key_file == key_file
    assert "secret" not in json.dumps(run.config.plain())
