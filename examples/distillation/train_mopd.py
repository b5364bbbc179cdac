"""Multi-teacher on-policy distillation (MOPD), as MiMo-V2-Flash (arXiv 2601.02780) describes it.

    python examples/distillation/train_mopd.py                       # the tiny model on the CPU
    python examples/distillation/train_mopd.py --model HuggingFaceTB/SmolLM2-135M-Instruct  # a GPU

Three stages: a common start, one teacher for each domain (the start, trained there by RL), and
one student that learns both domains from its own answers. Each token's advantage is

    log π_teacher − log π_student + α · GRPO's advantage of the outcome

by its domain's teacher, times π_student / π_sampler where that lies within [ε_low, ε_high], else 0;
averaged over an answer's tokens, then over answers.
"""

import argparse
from pathlib import Path
from typing import Any

import ludic
from ludic.runs.settings import apply_override

ALPHA, WINDOW = 0.5, (0.5, 2.0)  # the report gives no values


def settings(model: str | None) -> dict[str, Any]:
    """Settings that all runs share, for the tiny model or a real one."""
    if model is None:
        words = ["user\n", "assistant\n", "What is ", " + ", "Which is larger, ", " or ", "?"]
        kwargs = {"layers": 2, "max_position_embeddings": 64, "words": words}
        return {
            "model": {"name": "tiny", "kwargs": kwargs},
            "inference": {"max_context_tokens": 48, "sampling": {"max_tokens": 3}},
            "training": {
                "rollouts_per_update": 128,
                "max_steps": 1,
                "max_seq_len": 64,
                "learning_rate": 1e-3,
            },
            "run": {"threads": 1},
        }
    return {
        "model": {"name": model},
        "inference": {"slots": 512, "max_context_tokens": 128, "sampling": {"max_tokens": 24}},
        "training": {
            "rollouts_per_update": 512,
            "concurrency": 512,
            "max_steps": 1,
            "max_seq_len": 128,
            "learning_rate": 1e-5,
        },
    }


def main(arguments: list[str] | None = None) -> ludic.Run:
    parser = argparse.ArgumentParser(description="Several teachers, one student.")
    parser.add_argument("--model", help="a folder or a name on the hub; default: the tiny model")
    parser.add_argument("--steps", type=int, default=40, help="updates of each teacher")
    parser.add_argument("--student-steps", type=int, default=40)
    parser.add_argument("--start-steps", type=int, default=150, help="of the tiny model's start")
    parser.add_argument("--episodes", type=int, default=200, help="held-out, for each evaluation")
    parser.add_argument("--out", type=Path, default=Path("runs/mopd"))
    parser.add_argument("settings", nargs="*", help="of every run, as section.key=value")
    args = parser.parse_args(arguments)
    tiny = args.model is None
    shared = settings(args.model) | {"eval": {"episodes": args.episodes}}
    for override in args.settings:
        apply_override(shared, override)
    questions = {"largest": 4 if tiny else 20, "short": tiny}
    domains = {
        name: {"kind": f"arithmetic:{kind}", "name": name, "kwargs": questions}
        for name, kind in (("sums", "Sums"), ("larger", "Larger"))
    }

    if tiny:  # a real model can answer already
        lessons = {
            "teacher": "arithmetic:sloppy_answer",
            "examples": 800,
            "steps": args.start_steps,
        }
        start = ludic.sft([*domains.values()], **shared, sft=lessons, out=args.out / "start")
        del shared["model"]["kwargs"]
        shared["model"]["name"] = str(start.folder.path)

    grpo = ludic.grpo(group_size=8)
    teachers = [
        ludic.train(env, **shared, algorithm=grpo, steps=args.steps, out=args.out / name)
        for name, env in domains.items()
    ]

    mopd = {
        "name": "opd",
        "kwargs": {"group_size": 8, "reward_coeff": ALPHA, "aggregation": "sequence_mean"},
        "corrections": [{"kind": "masked_importance", "lower": WINDOW[0], "upper": WINDOW[1]}],
    }
    student = ludic.train(
        [*domains.values()],
        **shared,
        algorithm=mopd,
        teacher=[
            {"model": str(run.folder.path), "envs": [name]}
            for name, run in zip(domains, teachers, strict=True)
        ],
        steps=args.student_steps,
        out=args.out / "student",
    )
    for name, run in zip((*domains, "both: MOPD"), (*teachers, student), strict=True):
        print(f"\n{name}\n{run.report}")
    return student


if __name__ == "__main__":
    main()
