"""TRL's `GRPOTrainer` on the sums or on GSM8K: the peer of the whole step, fed its fastest way.

    python -m benchmarks.trl_loop --model PATH --device cuda --precision mixed --updates 60

One turn goes through its ordinary path, several through `rollout_func`, its interface for that,
which calls the same generation once per turn. A completion that was cut is a failure, as in Ludic.
Weights are float32 under bfloat16 autocast; with LoRA the frozen ones are bfloat16, the adapter's
float32. Prints one line of JSON per update (`step`, `seconds`, `reward`, `tokens`), then medians.
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
from dataclasses import dataclass, fields
from pathlib import Path
from random import Random
from typing import Any

import torch

from benchmarks import gsm8k
from benchmarks.loop_meters import MemoryPeak
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
    data: Path | None = None
    hashed: bool = False
    lora: int = 0
    rows: int = 0
    context: int = 1024
    vllm_memory: float = 0.3
    checkpointing: bool = False
    save: Path | None = None


@dataclass(frozen=True)
class Update:
    """What one update took, from its prompts to the stepped weights, its mean reward, and how many
    tokens a completion had on average."""

    step: int
    seconds: float
    reward: float
    tokens: float


def is_installed() -> bool:
    """Whether TRL and what it needs can be imported."""
    return all(importlib.util.find_spec(name) for name in ("trl", "datasets", "accelerate"))


def question(random: Random) -> tuple[str, str]:
    """Returns a sum of two numbers of one or two digits, and its answer."""
    top = 9 if random.random() < 0.5 else 99
    a, b = random.randint(1, top), random.randint(1, top)
    return f"What is {a} + {b}? Answer with the number only.", str(a + b)


def trl_figures(args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one update by the fastest of TRL's ways that run here, each in a process by
    itself; none where TRL is not installed. `args` are those of `benchmarks.loop`."""
    if not is_installed():
        print("TRL is not installed")
        return {}
    folder = args.model
    if folder == "tiny":
        folder = tempfile.mkdtemp()
        tiny_model().save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
    on_gpu = args.device == "cuda"
    command = [sys.executable, "-m", "benchmarks.trl_loop", "--model", folder]
    command += ["--device", args.device, "--precision", "mixed" if on_gpu else "float32"]
    command += ["--updates", str(args.trl_updates), "--vllm-memory", str(args.trl_vllm_memory)]
    for name in ("episodes", "group", "turns", "max_tokens"):
        command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    if args.trl_checkpointing:
        command += ["--checkpointing"]
    if args.task == "gsm8k":
        command += ["--data", str(args.data), "--context", str(args.context)]
        command += ["--learning-rate", str(args.learning_rate), "--lora", str(args.lora or 0)]
        command += ["--hashed"] if args.shape else []
    with_vllm = on_gpu and importlib.util.find_spec("vllm") is not None
    generators = ["generate", "vllm"] if with_vllm else ["generate"]
    results = []
    for generator in generators[-1:] if args.task == "gsm8k" else generators:
        for rows in args.trl_rows or [args.episodes]:
            way = f"TRL, {generator}, {rows} rows a pass"
            figures = _run([*command, "--generator", generator, "--rows", str(rows)], way, args)
            if figures is not None:
                results.append(figures | {"trl_generator": generator, "trl_rows": rows})
                print(f"{way}: {figures['trl_step_s']:.3f} s an update", flush=True)
                break
    return min(results, key=lambda figures: float(figures["trl_step_s"]), default={})


def _run(command: list[str], way: str, args: argparse.Namespace) -> dict[str, Any] | None:
    """The last line of a command; None, and why is printed, if it fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.trl_limit_s)
    except subprocess.TimeoutExpired:
        print(f"{way}: not done after {args.trl_limit_s:.0f} s", flush=True)
        return None
    if done.returncode:
        print(f"{way} failed: " + "\n".join(done.stderr.strip().splitlines()[-12:]), flush=True)
        return None
    for line in done.stdout.splitlines():
        if line.startswith('{"step"'):
            print(f"  {line}")
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def train(settings: Settings) -> list[Update]:
    """Trains, and returns every update."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    import datasets
    import transformers
    from trl import GRPOConfig, GRPOTrainer

    # A dataset's fingerprint pickles what cannot be pickled everywhere, and nothing here needs it.
    datasets.fingerprint.Hasher.hash = classmethod(lambda cls, value: "sums")
    data, on_gpu = settings.data, settings.device == "cuda"
    prompts = settings.updates * settings.episodes // settings.group
    if data is not None:
        rows = gsm8k.questions(data, prompts, settings.seed)
    else:
        random = Random(settings.seed)
        pairs = [question(random) for _ in range(prompts)]
        rows = [{"prompt": [{"role": "user", "content": q}], "answer": a} for q, a in pairs]
    half = settings.precision == "bfloat16" or (settings.lora and settings.precision == "mixed")
    weights = torch.bfloat16 if half else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(settings.model, dtype=weights)
    tokenizer = transformers.AutoTokenizer.from_pretrained(settings.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    ends = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}
    updates: list[Update] = []

    class Watch(transformers.TrainerCallback):  # type: ignore[misc]
        started = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.started = self.started or time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            now = time.perf_counter()
            updates.append(Update(len(updates) + 1, now - self.started, *answers[-1]))
            print(json.dumps(vars(updates[-1])), flush=True)
            self.started = now

    answers: list[tuple[float, float]] = []

    def judged(
        completions: Sequence[Any], completion_ids: Sequence[Any], answer: Sequence[str], **_: Any
    ) -> list[float]:
        rewards = []
        for completion, ids, wanted in zip(completions, completion_ids, answer, strict=True):
            whole = len(ids) > 0 and ids[-1] in ends
            text = completion[0]["content"]
            if settings.hashed:
                rewards.append(gsm8k.hashed(text))
            elif data is not None:
                rewards.append(gsm8k.reward(data, wanted, text, whole=whole))
            else:
                rewards.append(float(whole and text.strip().rstrip(".") == wanted))
        tokens = sum(len(ids) for ids in completion_ids) / len(rewards)
        answers.append((sum(rewards) / len(rewards), tokens))
        return rewards

    rows_a_pass = settings.rows or settings.episodes
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=rows_a_pass,
        gradient_accumulation_steps=settings.episodes // rows_a_pass,
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
        gradient_checkpointing=settings.checkpointing,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        use_vllm=settings.generator == "vllm",
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=settings.vllm_memory,
        vllm_max_model_length=settings.context,
    )
    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=judged,
        args=config,
        train_dataset=datasets.Dataset.from_list(rows),
        peft_config=_adapter(settings.lora) if settings.lora else None,
        rollout_func=_several_turns(settings, tokenizer) if settings.turns > 1 else None,
        callbacks=[watch := Watch()],
    )
    watch.started = time.perf_counter()
    trainer.train()
    if settings.save is not None:
        trainer.save_model(str(settings.save))
        tokenizer.save_pretrained(str(settings.save))
    return updates


def _adapter(rank: int) -> Any:
    """The adapter that a run of Ludic with this rank trains."""
    from peft import LoraConfig

    return LoraConfig(
        r=rank, lora_alpha=32, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"
    )


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


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--precision", default="mixed", choices=PRECISIONS)
    parser.add_argument("--generator", default="generate", choices=GENERATORS)
    for field in fields(Settings):
        if (kind := type(field.default)) in (int, float):
            name = field.name.replace("_", "-")
            parser.add_argument(f"--{name}", type=kind, default=field.default)
    parser.add_argument("--data", type=Path, help="a folder with GSM8K; sums without it")
    parser.add_argument("--save", type=Path, help="where the trained weights go")
    parser.add_argument("--hashed", action="store_true", help="rewards by the answers' hashes")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    settings = Settings(**vars(parser.parse_args(argv)))
    with MemoryPeak(settings.device) as peak:
        updates = train(settings)
    last, counted = updates[-5:], updates[2:] or updates  # the first two warm up
    figures = {
        "trl_step_s": round(statistics.median(u.seconds for u in counted), 4),
        "trl_peak_gb": None if peak.gb is None else round(peak.gb, 2),
        "trl_mean_tokens": round(statistics.median(u.tokens for u in counted), 1),
        "trl_total_s": round(sum(update.seconds for update in updates), 2),
        "trl_last_reward": round(sum(u.reward for u in last) / len(last), 4),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
