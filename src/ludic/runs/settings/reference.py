"""The table of all settings, for the docs."""

from __future__ import annotations

import inspect
import json
import re
from typing import Annotated, Any, get_args, get_origin

from pydantic_core import PydanticUndefined

from ludic.runs.settings.base import Section, section_of


def reference_table(section: type[Section], name: str = "") -> str:
    """Returns Markdown: every key of every table, with what it does, its default and what it
    takes."""
    rows, below = [], []
    for key, field in section.model_fields.items():
        inner = section_of(field.annotation)
        if inner is not None:
            shown = f"{name}.{key}" if name else key
            below.append(reference_table(inner, shown))
            continue
        default = field.get_default(call_default_factory=True)
        missing = default is PydanticUndefined
        takes = _takes(field.annotation)
        does = DESCRIPTIONS.get(name, {}).get(key, "")
        cells = [f"`{field.alias or key}`", does, "" if missing else _shown(default), takes]
        rows.append(f"| {' | '.join(cells)} |")
    about = " ".join((inspect.getdoc(section) or "").split())
    about = re.split(r"(?<=\.) (?=[A-Z`])", about)[0]  # the table says the rest
    title = f"### `[{name}]`\n\n{about}\n\n" if name else ""
    table = "\n".join(["| key | what it does | default | takes |", "|---|---|---|---|", *rows])
    return "\n\n".join([title + table if name else "", *below]).strip()


def _shown(default: Any) -> str:
    return "" if default is None else f"`{json.dumps(default)}`"


def _takes(annotation: Any) -> str:
    options = [o for o in get_args(annotation) if o is not type(None)]
    origin = get_origin(annotation)
    if origin is not None and str(origin) == "typing.Literal":
        return " or ".join(f"`{json.dumps(option)}`" for option in options)
    if origin is Annotated:
        return _takes(options[0])
    if origin is list:
        return f"a list of {_takes(options[0])}"
    if origin is tuple:
        return f"a list of {len(options)}: {_takes(options[0])}"
    if origin is dict:
        return "a table"
    if options:
        return " or ".join(_takes(option) for option in options)
    return {str: "text", int: "a whole number", float: "a number", bool: "`true` or `false`"}.get(
        annotation, "a table"
    )


_KEY = {
    "api_key_env": "the environment variable with the server's key; a run file contains no secrets",
    "api_key_file": "the file with the server's key",
}
_OTHER_MODEL = _KEY | {
    "model": "a model, named as in `[model]`",
    "server": "the address of a server, instead of `model`",
    "served_name": "the model's name on the server; default: its first one",
    "revision": "as in `[model]`",
    "device": "as in `[model]`",
    "kwargs": "as in `[model]`",
}
_ENV = {
    "kind": "its registered name, or `module:Class`",
    "kwargs": "its arguments",
    "weight": "its share of the episodes, if a run mixes several",
    "name": "its name in the run; default: its `kind`",
    "isolation": "`process` runs every environment of this `kind` in its own process, which can "
    "be killed if it hangs",
}
_PROTOCOL = {
    "kind": "its registered name",
    "kwargs": "its arguments: the parser, tools, seats, a `reward`",
}

DESCRIPTIONS: dict[str, dict[str, str]] = {
    "run": {
        "name": "the start of the run folder's name",
        "seed": "decides all episodes, samples and initial weights",
        "folder": "where run folders are created",
        "threads": "of torch on the CPU; with the same seed and threads, a run is repeatable bit "
        "for bit; default: one per core",
        "imports": "modules to import first, so that what they register has a name",
    },
    "model": {
        "name": "`tiny`, a folder, a name on the hub, or an earlier run: `runs/first`, "
        "`runs/first:sft`, `runs/first:step-40`",
        "revision": "a branch, tag or commit on the hub",
        "dtype": "the older name of `precision`; only the type of the weights",
        "precision": "of trainer and engine; default on a CPU: float32",
        "device": "`cpu`, `cuda`, `cuda:1`; default: the GPU if there is one",
        "kwargs": "arguments of the model's configuration, or sizes of the tiny one",
        "tool_parser": "how tool calls are read from the model's text; default: as its family "
        "writes them",
        "chat_template": "a file with a Jinja template that replaces the tokenizer's",
    },
    "model.lora": {
        "rank": "of the adapter's matrices",
        "alpha": "the adapter's scale, divided by its rank",
        "target_modules": "the layers that get one",
    },
    "inference": _KEY
    | {
        "backend": "the in-process engine, or vLLM",
        "servers": "addresses of vLLM servers; default: one is started for the run",
        "vllm_python": "the Python that starts it; default: this one",
        "publish_lora": "`adapter` sends vLLM the LoRA adapter alone, `merged` all weights with it "
        "merged in",
        "publish_plane": "how new weights are sent to the servers; `auto` depends on where they "
        "are",
        "publish_address": "this machine's address for a broadcast; default: any that works",
        "publish_port": "its port; default: any free one",
        "slots": "how many completions the in-process engine samples at once",
        "max_context_tokens": "the longest conversation; default: the model's own limit",
        "deterministic": "whether samples depend only on their seed, at some cost in speed; "
        "default: yes on a CPU",
    },
    "inference.sampling": {
        "temperature": "1 samples from the model as it is; 0 takes the likeliest token",
        "top_p": "sample from the likeliest tokens that together have this probability",
        "top_k": "sample from this many likeliest tokens; 0 for all",
        "min_p": "drop tokens less likely than this share of the likeliest",
        "max_tokens": "the longest completion",
        "stop": "texts that end a completion",
        "stop_token_ids": "tokens that end a completion",
    },
    "inference.vllm": {
        "gpu_memory": "its share of the GPU's memory; default: leaves a trainer room",
        "eager": "turn CUDA graphs off",
        "kv_cache_gib": "the cache of vLLM's CPU build",
        "start_timeout_s": "how long a server may take to start",
        "flags": "other vLLM flags: `{ max-num-batched-tokens = 8192 }`",
    },
    "env": _ENV,
    "protocol": _PROTOCOL,
    "algorithm": {
        "name": "`ludic algorithms` lists them",
        "kwargs": "[its arguments](algorithm_arguments.md), including an `aggregation`",
        "summaries": "what the summaries of the context `compacting` get of group-relative credit: "
        "their rollout's advantage, or none, so that they are not trained on",
        "corrections": "of the mismatch between sampler and trainer: "
        '`{ kind = "truncated_importance", upper = 2.0 }`',
    },
    "reference": _OTHER_MODEL
    | {
        "model": 'a model, named as in `[model]`; `"start"` is the policy at the start of RL',
        "kl_in_reward": "the coefficient of the KL in the reward; in the loss it is `kl_coeff` "
        "among the algorithm's arguments",
        "horizon": "how far ahead a token is charged for the KL in the reward",
    },
    "teacher": _OTHER_MODEL
    | {
        "envs": "the environments that it teaches, by name; default: the rest",
        "tasks": "the task keys that it teaches; `*` matches anything",
    },
    "player": _OTHER_MODEL
    | {
        "name": 'used by a seat of the protocol: `client = "…"`',
        "api": "of its server: vLLM's, or OpenAI's completions, as text",
        "tokenizer": "of a server's model, named like a model; default: the run's",
        "temperature": "default: the run's",
        "max_tokens": "default: the run's",
    },
    "curriculum": {
        "kind": "`mix`: all, by their weights; `stages`: one after another; `target_solve_rate`: "
        "those near a solve rate; `uncertain`: those whose outcome is least certain (`spo`)",
        "tasks_per_env": "split each environment into this many tasks, each with a fixed seed",
        "target": "the preferred solve rate",
        "width": "how far from it a task may be",
        "floor": "the lowest probability of a task, so that none is forgotten",
        "learning_rate": "how fast the estimated solve rate adapts",
        "threshold": "the lowest reward that counts as solved",
    },
    "curriculum.stage": {
        "envs": "the environments that the stage mixes, by name",
        "episodes": "the stage ends after this many",
        "solve_rate": "or once this share of the latest episodes was solved",
        "window": "how many episodes count as the latest",
        "threshold": "the lowest reward that counts as solved",
    },
    "training": {
        "steps": "number of updates",
        "rollouts_per_update": "episodes per update",
        "max_steps": "the most turns of an episode, in training, evaluation and `[sft]`",
        "concurrency": "how many episodes run at once",
        "workers": "further processes that play the training episodes, for environments that "
        "compute a lot",
        "step_timeout_s": "how long an environment may take for a step",
        "episode_timeout_s": "how long an episode may take",
        "lost_member": "what happens to a group if one of its episodes fails",
        "learning_rate": "of AdamW",
        "betas": "of AdamW",
        "eps": "of AdamW",
        "warmup_steps": "updates over which the learning rate rises from 0",
        "schedule": "the learning rate after that",
        "final_lr_ratio": "the share of the learning rate at the end of a schedule",
        "weight_decay": "of AdamW",
        "max_grad_norm": "longer gradients are scaled down to this; `inf`: no limit",
        "micro_token_budget": "the most tokens in a forward pass (`ludic calibrate` finds it)",
        "max_seq_len": "a longer sample costs its episode; in your own data it is an error",
        "mini_batches": "optimizer steps per batch",
        "epochs": "passes over each batch",
        "overlap": "sample the next batch while this one is trained on",
        "max_lag": "how many updates old a sample may be, with `overlap` or `[pipeline]`",
        "attention": "the kernel for packed sequences; `auto` takes the best one available",
        "gradient_checkpointing": "recompute activations: less memory, more time",
        "compile": "compile the model with `torch.compile`",
        "head_kernels": "how log-probs are computed from hidden states",
        "graphs": "replay updates as CUDA graphs where possible",
        "max_nonfinite_steps": "how many updates with a loss or gradient that is not finite are "
        "skipped before the run ends",
        "batch_timeout_s": "how long a batch may take",
        "publish_timeout_s": "how long publishing new weights may take",
        "rank_timeout_s": "how long a rank waits for the others; more than rank 0 takes for a "
        "batch or an evaluation",
        "checkpoint_every": "updates between checkpoints; 0: only at the end",
        "keep_checkpoints": "how many of the newest are kept",
        "filters": 'which turns to drop: a name (`"drop_truncated"`), a table with its `kind`, or '
        'a function (`"module:function"`)',
        "dynamic_sampling": "drop groups with equal rewards and sample others, in at most this "
        "many rounds; 0: off",
        "past_opponents": "how many earlier policies to play against, one per checkpoint",
        "past_share": "the share of episodes with one of them",
    },
    "training.replay_buffer": {
        "share": "of the batch's groups that come from the buffer",
        "max_age": "how many policy versions old they may be",
        "half_life": "the age at which the chance of being drawn halves; default: all are equal",
    },
    "pipeline": {
        "actors": "how many to start with the trainer; more can join with `ludic actor`",
        "url": "of Redis; default: one is started for the run",
        "url_env": "the environment variable with a URL that has a password",
        "name": "of the run's keys in Redis; default: that of its folder",
        "stale": "`wait`: actors wait so that no sample is too old; `drop`: such samples are "
        "dropped and their prompts requested again; `correct`: they are trained on, corrected",
        "in_order": "batches have groups in the order of their requests, not of arrival",
        "max_groups": "the most groups between actors and trainer",
        "max_bytes": "about the most memory they take",
        "lease_s": "an actor that is silent for this long loses its work to another",
        "patience_s": "how long to wait for a Redis that does not answer",
        "policy_folder": "where actors that sample in-process find the weights; they must share it",
    },
    "sft": {
        "data": "a file of rows or rollouts",
        "teacher": "a function that plays (`module:function`), of the observation, a "
        "`random.Random` and optionally the `history`",
        "examples": "how many episodes it plays",
        "steps": "number of updates",
        "batch_size": "samples per update",
        "learning_rate": "of these updates",
        "aggregation": "as in an algorithm's arguments",
    },
    "eval": {
        "outcomes": "the endings to report, as the environment calls them; the first one counts "
        "and is the headline",
        "success_above": "an episode with a higher reward is a success, for environments without "
        "named endings; default: the mean reward is the headline",
        "episodes": "how many held-out episodes",
        "every": "updates between evaluations; 0 evaluates only when a stage ends",
        "seed": "decides the held-out episodes",
        "samples_per_task": "episodes with the same environment seed, for pass@k",
        "temperature": "default: that of training",
    },
    "eval.env": _ENV,
    "eval.protocol": _PROTOCOL,
    "logging": {
        "loggers": "where metrics go besides `metrics.jsonl`",
        "keep_rollouts": "write every episode",
        "keep_tokens": "write weights, log-probs and entropies of its tokens, for `ludic view`",
    },
}
