"""GSM8K for the loop's benchmark: the README's run, and its questions and rewards for TRL.

With random weights no answer is ever right or ends by itself, and a group without variance in its
rewards would cost nothing. There the reward is a hash of the answer, cut or not.
"""

from __future__ import annotations

import argparse
import re
import tomllib
import zlib
from pathlib import Path
from random import Random
from typing import Any

from ludic.agents.base_agent import ActResult, Agent
from ludic.agents.model_calls import ModelCall
from ludic.envs import GSM8KEnv
from ludic.parsers import boxed_parser
from ludic.runs.settings import RunConfig, check_run
from ludic.types import Action, StepOutcome

README = Path(__file__).resolve().parent.parent / "README.md"
GROUP = 8
"""The size of GRPO's groups if a run does not say."""


def readme_text() -> str:
    """The `gsm8k.toml` in the README."""
    text = README.read_text(encoding="utf-8")
    match = re.search(r"`gsm8k\.toml`[^\n]*:\n+```toml\n(.*?)```", text, re.DOTALL)
    if match is None:
        raise SystemExit(f"{README} has no gsm8k.toml")
    return match[1]


def readme_tables() -> dict[str, Any]:
    """Its tables, with one environment and one protocol."""
    return tomllib.loads(readme_text())


def settle(args: argparse.Namespace) -> None:
    """Sets those of the benchmark's arguments that were left out as the README's run has them."""
    tables = readme_tables()
    training, inference = tables["training"], tables["inference"]
    usual = {
        "episodes": training["rollouts_per_update"],
        "group": GROUP,
        "max_tokens": 256 if args.shape else inference["sampling"]["max_tokens"],
        "context": inference["max_context_tokens"],
        "learning_rate": training["learning_rate"],
        "host_updates": 0,
    }
    for name, value in usual.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def run_of(args: argparse.Namespace, *, updates: int) -> RunConfig:
    """The README's run on this device, with the model and the data of `args`, for so many updates
    and without checkpoints. What `args` leave out stays as it is."""
    tables = readme_tables()
    tables["model"] = {"name": args.model, "device": args.device}
    if args.precision:
        tables["model"]["precision"] = args.precision
    if args.lora:
        tables["model"]["lora"] = {"rank": args.lora}
    tables["env"]["kwargs"] = {"path": str(rows_file(args.data))}
    if args.shape:
        tables["env"]["kind"] = "benchmarks.gsm8k:HashedGSM8K"
        tables["protocol"]["kwargs"] = {"agent": "benchmarks.gsm8k:UncutAgent", "parser": "text"}
    tables["algorithm"] = {"name": "grpo", "kwargs": {"group_size": args.group}}
    tables["inference"]["max_context_tokens"] = args.context
    tables["inference"]["sampling"]["max_tokens"] = args.max_tokens
    tables["training"] |= {
        "steps": updates,
        "rollouts_per_update": args.episodes,
        "max_seq_len": max(2048, args.context),
        "learning_rate": args.learning_rate,
        "workers": args.workers,
        "overlap": args.overlap,
        "checkpoint_every": 0,
        "optimizer_device": args.optimizer_device,
        "gradient_checkpointing": args.recompute,
    }
    if args.micro_tokens:
        tables["training"]["micro_token_budget"] = args.micro_tokens
    if args.slots:
        tables["inference"]["slots"] = tables["training"]["concurrency"] = args.slots
    tables["logging"] = {"loggers": ["console"], "keep_rollouts": not args.no_rollouts}
    del tables["eval"]
    return check_run(tables)


def rows_file(data: Path) -> Path:
    """The questions that are trained on."""
    return (data / "train.jsonl").resolve()


def hashed(text: str) -> float:
    """A reward between 0 and 1 that hardly two answers share."""
    return zlib.crc32(text.encode()) / 2**32


class HashedGSM8K(GSM8KEnv):
    """GSM8K's questions; any answer gets a reward by its hash."""

    def env_step(self, action: Action) -> StepOutcome:
        return StepOutcome("", hashed(action), terminated=True, info={})


class UncutAgent(Agent):
    """Takes an answer that was cut at its length limit for an answer."""

    def conclude(self, call: ModelCall) -> ActResult:
        return ActResult(self.steps_of_turn, self.parser(call.parsed.message["content"]))


# For TRL


def questions(data: Path, count: int, seed: int) -> list[dict[str, Any]]:
    """So many of TRL's rows: the messages that Ludic's agent sends, and the question's number."""
    random, path = Random(seed), str(rows_file(data))
    system, total = GSM8KEnv.default_system_prompt, GSM8KEnv(path=path).num_rows()
    rows = []
    for index in (random.randrange(total) for _ in range(count)):
        question, _ = GSM8KEnv(path=path, index=index).env_reset()
        prompt = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        rows.append({"prompt": prompt, "answer": str(index)})
    return rows


def reward(data: Path, index: str, text: str, *, whole: bool) -> float:
    """What Ludic's run gives for a text; one that is not `whole` was cut at its length limit."""
    parse = boxed_parser()
    verdict = parse(text if whole else "")
    if verdict.action is None:
        return verdict.reward
    env = GSM8KEnv(path=str(rows_file(data)), index=int(index))
    env.env_reset()
    outcome = env.env_step(verdict.action)
    assert isinstance(outcome, StepOutcome)
    return verdict.reward + outcome.reward
