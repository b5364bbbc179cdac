"""The runs of `benchmarks.real_models`, the most important first."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

ALGORITHMS = {
    "grpo": "GRPO",
    "reinforce": "REINFORCE",
    "dr_grpo": "Dr. GRPO",
    "gspo": "GSPO",
    "cispo": "CISPO",
    "sapo": "SAPO",
    "gmpo": "GMPO",
    "scalerl": "ScaleRL",
    "spo": "SPO",
}
RATE, OTHER_RATE = "2e-6", "4e-6"
"""The learning rate of all algorithms on the 0.5B, and the one that is tried beside it."""
RATE_UPDATES, NO_RATE = 12, 1e-12
"""How long that one is tried; and a rate that moves nothing, for a run that only evaluates."""
BATCH = 128
"""Episodes an update, as the README's run has it."""
TEACHER = "gsm8k-1.5b-s0"
START_S, LARGE_S, SMALL_S = 35.0, 2.3, 0.9
"""Seconds to start a run, and of an update of the 1.5B and the 0.5B alone on an H200."""
LARGE_GB, SMALL_GB, ALONE_GB = 72.0, 36.0, 80.0
SHARED = ("training.max_seq_len=1024", "training.micro_token_budget=6144")
"""Settings of a run in company: the plan of one alone takes as much of the GPU as it is faster
with."""
LEAN = (
    *("training.checkpoint_every=0", "training.resumable=false"),
    *("logging.keep_rollouts=false", 'logging.loggers=["console"]'),
)


@dataclass(frozen=True)
class Job:
    """One run. `pages` are those that show it, with its name there. `alone`: nothing else runs
    beside it. `keep`: another run needs its weights. `optional`: only if asked for by name."""

    name: str
    pages: tuple[tuple[str, str], ...]
    work_s: float
    gb: float
    words: tuple[str, ...] = ()
    large: bool = False
    seed: int = 0
    kind: Literal["train", "generate", "trl"] = "train"
    needs: tuple[str, ...] = ()
    alone: bool = False
    keep: bool = False
    optional: bool = False
    start_s: float = START_S

    @property
    def label(self) -> str:
        """Its name on its first page."""
        return self.pages[0][1] if self.pages else self.name

    def command(self, args: argparse.Namespace, work: Path, folder: Path) -> list[str]:
        """The command; `{work}` in its words stands for the folder of all runs."""
        words = [word.replace("{work}", str(work)) for word in self.words]
        model = args.large if self.large else args.small
        if self.kind == "trl":
            return [sys.executable, "-m", "benchmarks.trl_loop", "--model", model, *words]
        if self.kind == "generate":
            return [sys.executable, "-m", "ludic", "generate", *words, *args.set]
        command = [sys.executable, "-m", "ludic", "train", str(work / "gsm8k.toml")]
        train, test = (args.data.resolve() / f"{split}.jsonl" for split in ("train", "test"))
        settings = [f"model.name={model}", f"run.seed={self.seed}"]
        settings += [f"env.kwargs.path={train}", f"eval.env.kwargs.path={test}"]
        episodes = args.eval_large if self.large else args.eval_small
        settings += [f"eval.episodes={episodes}", *LEAN, *(() if self.alone else SHARED)]
        return [*command, "--out", str(folder), *settings, *words, *args.set]


def all_jobs(args: argparse.Namespace) -> list[Job]:
    """Every run, in order."""
    return [
        _large(args, 0, alone=True),
        _algorithm(args, "grpo", 0),
        *_distillation(args),
        *(_algorithm(args, name, 0) for name in ALGORITHMS if name != "grpo"),
        *_several_teachers(args),
        _large(args, 1),
        _large(args, 2, alone=True),
        *_peer(args),
        _lora(args),
        *(_small(args, f"ahead-s{s}", s, "one ahead", "training.overlap=true") for s in range(3)),
        *(_algorithm(args, "grpo", seed) for seed in (1, 2)),
        *(_over_redis(args, seed) for seed in range(3)),
        *(_rate(args, name) for name in ALGORITHMS),
        *(_algorithm(args, n, s) for n in ALGORITHMS if n != "grpo" for s in (1, 2)),
    ]


def _large(args: argparse.Namespace, seed: int, *, alone: bool = False) -> Job:
    return Job(
        f"gsm8k-1.5b-s{seed}",
        (("gsm8k", "Ludic, all weights"), *((("distillation", "teacher, 1.5B"),) * (not seed))),
        work_s=args.updates_large * LARGE_S + 20,
        gb=ALONE_GB if alone else LARGE_GB,
        words=(f"training.steps={args.updates_large}",),
        large=True,
        seed=seed,
        alone=alone,
        keep=not seed,
    )


def _lora(args: argparse.Namespace) -> Job:
    return Job(
        "lora-1.5b-s0",
        (("gsm8k", "Ludic, LoRA of rank 16"),),
        work_s=args.updates_large * 2.8 + 20,
        gb=ALONE_GB,
        alone=True,
        words=(
            *(f"training.steps={args.updates_large}", "model.lora.rank=16"),
            "training.learning_rate=2e-5",
        ),
        large=True,
    )


def _small(
    args: argparse.Namespace,
    name: str,
    seed: int,
    label: str,
    *words: str,
    pages: tuple[tuple[str, str], ...] | None = None,
    updates: int | None = None,
    factor: float = 1.0,
    gb: float = SMALL_GB,
    needs: tuple[str, ...] = (),
    keep: bool = False,
    optional: bool = False,
) -> Job:
    steps = updates or args.updates_small
    return Job(
        name,
        pages or (("sync_async", label),),
        work_s=steps * SMALL_S * factor + 10,
        gb=gb,
        words=(f"training.steps={steps}", f"training.learning_rate={RATE}", *words),
        seed=seed,
        needs=needs,
        keep=keep,
        optional=optional,
    )


def _algorithm(args: argparse.Namespace, name: str, seed: int) -> Job:
    pages = [("algorithms", ALGORITHMS[name])]
    if name == "grpo":
        pages += [("sync_async", "one process")]
        pages += [("distillation", "GRPO of the student alone")] if not seed else []
    return _small(
        args,
        f"algo-{name}-s{seed}",
        seed,
        ALGORITHMS[name],
        *_words(name),
        pages=tuple(pages),
        optional=seed > 0 and name != "grpo",
    )


def _words(algorithm: str) -> tuple[str, ...]:
    words: tuple[str, ...] = (f"algorithm.name={algorithm}",)
    if algorithm == "spo":  # its baseline is what a question gave before: each must come again
        words += ("env.kwargs.limit=512", "algorithm.kwargs.returns=[-0.1, 1.0]")
    return words


def _rate(args: argparse.Namespace, name: str) -> Job:
    """A few updates at another rate, to be held against the first ones of the long run."""
    label = f"{ALGORITHMS[name]} at {OTHER_RATE}"
    words = (*_words(name), f"training.learning_rate={OTHER_RATE}")
    pages = (("algorithms", label),)
    return _small(args, f"rate-{name}", 0, label, *words, pages=pages, updates=RATE_UPDATES)


def _over_redis(args: argparse.Namespace, seed: int) -> Job:
    words = ("--async", "pipeline.actors=1")
    label = "actor and trainer over Redis"
    return _small(args, f"redis-s{seed}", seed, label, *words, factor=1.5, gb=2 * SMALL_GB)


def _distillation(args: argparse.Namespace) -> list[Job]:
    """The trained 1.5B teaches the 0.5B, on as many answers as GRPO of the student samples."""
    answers, lessons = args.updates_small * BATCH, "{work}/distil-samples/rollouts.jsonl.zst"
    page = "distillation"
    return [
        _small(
            *(args, "distil-opd", 0, ""),
            *("algorithm.name=opd", 'teacher=[{model="{work}/' + TEACHER + '"}]'),
            "training.learning_rate=5e-6",
            pages=((page, "OPD"),),
            factor=1.4,
            gb=SMALL_GB + 4,
            needs=(TEACHER,),
        ),
        Job(
            "distil-samples",
            ((page, "the teacher's samples"),),
            work_s=30 * answers / 5120,
            gb=16.0,
            words=(
                *("{work}/" + TEACHER, "--output", lessons, "--episodes", str(answers)),
                *("--keep", "complete"),
            ),
            kind="generate",
            needs=(TEACHER,),
        ),
        Job(
            "distil-sft",
            ((page, "SFT on the teacher's samples"),),
            work_s=args.updates_small * 0.5 + 10,
            gb=SMALL_GB,
            words=(
                *("training.steps=0", f"sft.data={lessons}", f"sft.steps={args.updates_small}"),
                *(f"sft.batch_size={BATCH}", "sft.learning_rate=5e-6"),
            ),
            needs=("distil-samples",),
        ),
    ]


def _several_teachers(args: argparse.Namespace) -> list[Job]:
    """A teacher of sums, and a student that learns from it and from the 1.5B."""
    page, gsm8k = "distillation", args.data.resolve()
    one = '{{kind="gsm8k",name="{}",kwargs={{path="{}"}}}}'
    return [
        _small(
            *(args, "mopd-sums", 0, ""),
            *(
                "env.kwargs.path={work}/sums-train.jsonl",
                "eval.env.kwargs.path={work}/sums-test.jsonl",
            ),
            pages=((page, "MOPD: the teacher of sums"),),
            keep=True,
        ),
        _small(
            *(args, "mopd-student", 0, ""),
            f"env=[{one.format('gsm8k', gsm8k / 'train.jsonl')},"
            f"{one.format('sums', '{work}/sums-train.jsonl')}]",
            f"eval.env=[{one.format('gsm8k', gsm8k / 'test.jsonl')},"
            f"{one.format('sums', '{work}/sums-test.jsonl')}]",
            *("algorithm.name=opd", "training.learning_rate=5e-6"),
            'teacher=[{model="{work}/' + TEACHER + '",envs=["gsm8k"]},'
            '{model="{work}/mopd-sums",envs=["sums"]}]',
            pages=((page, "MOPD: the student of both"),),
            factor=1.5,
            gb=SMALL_GB + 8,
            needs=(TEACHER, "mopd-sums"),
        ),
    ]


def _peer(args: argparse.Namespace) -> list[Job]:
    """TRL with vLLM in its process, and Ludic's evaluation of what it trained."""
    words = f"--generator vllm --precision mixed --updates {args.updates_large} --episodes {BATCH}"
    words += " --group 8 --max-tokens 512 --context 1024 --learning-rate 1e-6 --rows 16 --seed 0"
    where = ("--data", str(args.data.resolve()), "--save", "{work}/trl-1.5b-s0/model")
    return [
        Job(
            "trl-1.5b-s0",
            (("gsm8k", "TRL, vLLM colocated"),),
            work_s=args.updates_large * 7.0,
            start_s=70.0,
            gb=139.0,
            words=(*words.split(), *where),
            large=True,
            kind="trl",
            alone=True,
            keep=True,
        ),
        Job(
            "trl-evaluated",
            (("gsm8k", "TRL, evaluated by Ludic"),),
            work_s=10.0,
            gb=LARGE_GB,
            # A run has to train: one step, at a rate that moves nothing.
            words=(
                *("model.name={work}/trl-1.5b-s0/model", "training.steps=1"),
                f"training.learning_rate={NO_RATE}",
            ),
            large=True,
            needs=("trl-1.5b-s0",),
        ),
    ]


def write_sums(work: Path) -> None:
    """Writes sums of four numbers with three digits as rows of GSM8K, to train on and held out."""
    for split, seed, count in (("train", 0, 4000), ("test", 1, 400)):
        random, rows = Random(seed), []
        for _ in range(count):
            numbers = [random.randint(100, 999) for _ in range(4)]
            question = f"What is {' + '.join(map(str, numbers))}?"
            rows.append(json.dumps({"question": question, "answer": f"#### {sum(numbers)}"}))
        (work / f"sums-{split}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
