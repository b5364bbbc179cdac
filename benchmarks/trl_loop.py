"""TRL's `GRPOTrainer` on the sums: the peer of the whole step, fed its fastest way.

    python -m benchmarks.trl_loop --model PATH --device cuda --precision mixed --updates 60

One turn goes through its ordinary path, several through `rollout_func`, its interface for that,
which calls the same generation once per turn. A completion that was cut is a failure, as in Ludic.
Prints one line of JSON per update (`step`, `seconds`, `reward`), then the medians.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from ludic.inference.tiny import tiny_model, tiny_tokenizer

PRECISIONS = ("mixed", "bfloat16", "float32")
GENERATORS = ("generate", "vllm")


@dataclass(frozen=True)
class Settings:
    """One run of the peer; the defaults are the study's."""

    model: str
    device: str = "cuda"
    precision: str = "mixed"
    generator: str = "generate"
    updates: int = 10
    episodes: int = 512
    group: int = 16
    turns: int = 1
    max_tokens: int = 24
    learning_rate: float = 1e-5
    seed: int = 0


@dataclass(frozen=True)
class Update:
    """What one update took, from its prompts to the stepped weights, and its mean reward."""

    step: int
    seconds: float
    reward: float


def is_installed() -> bool:
    """Whether TRL and what it needs can be imported."""
    return all(importlib.util.find_spec(name) for name in ("trl", "datasets", "accelerate"))


def question(random: Random) -> tuple[str, str]:
    """Returns a sum of two numbers of one or two digits, and its answer."""
    top = 9 if random.random() < 0.5 else 99
    a, b = random.randint(1, top), random.randint(1, top)
    return f"What is {a} + {b}? Answer with the number only.", str(a + b)


def trl_step_s(args: argparse.Namespace) -> float | None:
    """Returns the seconds of one update by the fastest of TRL's ways that run here, each in a
    process by itself; None where TRL is not installed. `args` are those of `benchmarks.loop`."""
    if not is_installed():
        return None
    folder = args.model
    if folder == "tiny":
        folder = tempfile.mkdtemp()
        tiny_model().save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    on_gpu = args.device == "cuda"
    ways = [("mixed" if on_gpu else "float32", "generate")]
    if on_gpu and importlib.util.find_spec("vllm"):
        ways.append(("mixed", "vllm"))
    taken = []
    for precision, generator in ways:
        command = [sys.executable, "-m", "benchmarks.trl_loop", "--model", folder]
        command += ["--device", args.device, "--precision", precision, "--generator", generator]
        for name in ("episodes", "group", "turns", "max_tokens"):
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        done = subprocess.run(
            [*command, "--updates", str(args.trl_updates)], capture_output=True, text=True
        )
        if done.returncode:
            print(f"TRL with {generator} failed: {done.stderr.strip().splitlines()[-1]}")
            continue
        taken.append(float(json.loads(done.stdout.splitlines()[-1])["trl_step_s"]))
        print(f"TRL, {precision}, {generator}: {taken[-1]:.3f} s an update")
    return min(taken, default=None)


def train(settings: Settings) -> list[Update]:
    """Trains, and returns every update."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    import datasets
    import transformers
    from trl import GRPOConfig, GRPOTrainer

    # A dataset's fingerprint pickles what cannot be pickled everywhere, and nothing here needs it.
    datasets.fingerprint.Hasher.hash = classmethod(lambda cls, value: "sums")
    random = Random(settings.seed)
    pairs = [
        question(random) for _ in range(settings.updates * settings.episodes // settings.group)
    ]
    rows = [{"prompt": [{"role": "user", "content": q}], "answer": a} for q, a in pairs]
    weights = torch.bfloat16 if settings.precision == "bfloat16" else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(settings.model, dtype=weights)
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    updates: list[Update] = []

    class Watch(transformers.TrainerCallback):  # type: ignore[misc]
        started = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = self.started or time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if settings.device == "cuda":
                torch.cuda.synchronize()
            now = time.perf_counter()
            updates.append(Update(len(updates) + 1, now - self.started, rewards[-1]))
            self.started = now

    rewards: list[float] = []

    def right(
        completions: Sequence[Any], completion_ids: Sequence[Any], answer: Sequence[str], **_: Any
    ) -> list[float]:
        found = []
        for completion, ids, wanted in zip(completions, completion_ids, answer, strict=True):
            whole = len(ids) > 0 and ids[-1] == tokenizer.eos_token_id
            text = completion[0]["content"].strip().rstrip(".")
            found.append(float(whole and text == wanted))
        rewards.append(sum(found) / len(found))
        return found

    on_gpu = settings.device == "cuda"
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=settings.episodes,
        generation_batch_size=settings.episodes,
        num_generations=settings.group,
        max_completion_length=settings.max_tokens * settings.turns,
        bf16=settings.precision == "mixed",
        fp16=False,
        beta=0.0,
        loss_type="grpo",
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant",
        max_steps=settings.updates,
        temperature=1.0,
        seed=settings.seed,
        use_cpu=not on_gpu,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        use_vllm=settings.generator == "vllm",
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=1024,
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=right,
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        rollout_func=_several_turns(settings, tokenizer) if settings.turns > 1 else None,
        callbacks=[watch := Watch()],
    )
    watch.started = time.perf_counter()
    trainer.train()
    return updates


def _several_turns(settings: Settings, tokenizer: Any) -> Any:
    """Returns a rollout function that asks the next question after each answer."""
    asking = "<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    end = tokenizer.eos_token_id

    def rollout(prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        random = Random(len(prompts))
        begin = tokenizer.apply_chat_template(
            list(prompts), add_generation_prompt=True, return_dict=True
        )["input_ids"]
        rows, masks = [list(ids) for ids in begin], [list[int]() for _ in prompts]
        trainer.max_completion_length = settings.max_tokens
        trainer.generation_config.max_new_tokens = settings.max_tokens
        for turn in range(settings.turns):
            found, _ = trainer._generate_single_turn(rows, None, {}, 1)
            for row, mask, ids in zip(rows, masks, found, strict=True):
                row += ids
                mask += [1] * len(ids)
                if turn < settings.turns - 1:
                    text = asking.format(question(random)[0])
                    said = tokenizer.encode(text, add_special_tokens=False)
                    said = said[1:] if ids and ids[-1] == end else said
                    row += said
                    mask += [0] * len(said)
        completions = [row[len(ids) :] for row, ids in zip(rows, begin, strict=True)]
        return {
            "prompt_ids": [list(ids) for ids in begin],
            "completion_ids": completions,
            "logprobs": None,
            "env_mask": masks,
        }

    return rollout


def median_step_s(updates: Sequence[Update]) -> float:
    """Returns the median of the updates after the first two, which warm up."""
    return statistics.median(update.seconds for update in updates[2:] or updates)


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--precision", default="mixed", choices=PRECISIONS)
    parser.add_argument("--generator", default="generate", choices=GENERATORS)
    for name in ("updates", "episodes", "group", "turns", "max_tokens", "seed"):
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=getattr(Settings, name)
        )
    parser.add_argument("--learning-rate", type=float, default=Settings.learning_rate)
    updates = train(Settings(**vars(parser.parse_args(argv))))
    for update in updates:
        print(json.dumps(vars(update)))
    last = updates[-5:]
    print(
        json.dumps(
            {
                "trl_step_s": round(median_step_s(updates), 4),
                "total_s": round(sum(update.seconds for update in updates), 2),
                "last_reward": round(sum(u.reward for u in last) / len(last), 4),
            }
        )
    )


if __name__ == "__main__":
    main()
