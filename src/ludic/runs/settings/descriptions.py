"""What each key of a run file does, in a line, for the page of all settings."""

from __future__ import annotations

_KEY = {
    "api_key_env": "the environment variable with the server's key; a run file holds no secret",
    "api_key_file": "the file with the server's key",
}
_OTHER_MODEL = _KEY | {
    "model": "a model, named as in `[model]`",
    "server": "the address of a server, in place of `model`",
    "served_name": "what the server calls the model; left out, its first one",
    "revision": "as in `[model]`",
    "device": "as in `[model]`",
    "kwargs": "as in `[model]`",
}
_ENV = {
    "kind": "its registered name, or its place (`module:Class`)",
    "kwargs": "its arguments",
    "weight": "its share of the episodes, where a run mixes several",
    "name": "what the run calls it; left out, its `kind`",
    "isolation": "`process` plays all of this `kind` in processes of their own, which can be "
    "killed when they hang",
}
_PROTOCOL = {
    "kind": "its registered name",
    "kwargs": "its arguments: the parser, tools, seats, a `reward`",
}

DESCRIPTIONS: dict[str, dict[str, str]] = {
    "run": {
        "name": "the start of the run folder's name",
        "seed": "decides all episodes, samples and initial weights",
        "folder": "where run folders are made",
        "threads": "of torch on the CPU; with the same seed and threads, a run repeats to the bit; "
        "left out, one per core",
        "imports": "modules to import first: what they register can then be named",
    },
    "model": {
        "name": "`tiny`, a folder, a name on the hub, or an earlier run: `runs/first`, "
        "`runs/first:sft`, `runs/first:step-40`",
        "revision": "a branch, tag or commit on the hub",
        "dtype": "the older word for `precision`; names the type of the weights only",
        "precision": "what trainer and engine compute in (see `ludic.precision`); left out, "
        "float32 on a CPU",
        "device": "`cpu`, `cuda`, `cuda:1`; left out, the GPU if there is one",
        "kwargs": "arguments of the model's configuration, or sizes of the tiny one",
        "tool_parser": "how tool calls are read from the model's text; left out, as its family "
        "writes them",
        "chat_template": "a file with a Jinja template to use in place of the tokenizer's",
    },
    "model.lora": {
        "rank": "of the adapter's matrices",
        "alpha": "the adapter's scale, divided by its rank",
        "target_modules": "the layers that get one",
    },
    "inference": _KEY
    | {
        "backend": "the in-process engine, or vLLM",
        "servers": "addresses of vLLM servers; left out, one is started for the run",
        "vllm_python": "the Python that starts it; left out, this one",
        "publish_lora": "`adapter` sends vLLM the LoRA adapter alone, `merged` all weights with it "
        "merged in",
        "publish_plane": "the way that new weights take to the servers; `auto` goes by where they "
        "are",
        "publish_address": "where a broadcast meets on this machine; left out, any that will do",
        "publish_port": "likewise",
        "slots": "how many completions the in-process engine samples at once",
        "max_context_tokens": "the longest conversation; left out, the model's own limit",
        "deterministic": "whether samples depend on nothing but their seed, at some cost in speed; "
        "left out, yes on a CPU",
    },
    "inference.sampling": {
        "temperature": "1 samples from the model as it is; 0 takes the likeliest token",
        "top_p": "sample from the likeliest tokens with this much probability together",
        "top_k": "sample from this many likeliest tokens; 0 for all",
        "min_p": "leave out tokens less likely than this share of the likeliest",
        "max_tokens": "the longest completion",
        "stop": "texts that end a completion",
        "stop_token_ids": "tokens that end a completion",
    },
    "inference.vllm": {
        "gpu_memory": "its share of the GPU's memory; left out, a trainer on the same GPU has room",
        "eager": "leave CUDA graphs out",
        "kv_cache_gib": "the cache of vLLM's CPU build",
        "start_timeout_s": "how long a server may take until it is healthy",
        "flags": "any others of vLLM: `{ max-num-batched-tokens = 8192 }`",
    },
    "env": _ENV,
    "protocol": _PROTOCOL,
    "algorithm": {
        "name": "`ludic algorithms` lists them",
        "kwargs": "[its arguments](algorithm_arguments.md), an `aggregation` among them",
        "corrections": "of the mismatch between sampler and trainer: "
        '`{ kind = "truncated_importance", upper = 2.0 }`',
    },
    "reference": _OTHER_MODEL
    | {
        "model": 'a model, named as in `[model]`; `"start"` is the policy as the reinforcement '
        "begins with it",
        "kl_in_reward": "the coefficient of the KL in the reward; in the loss it is `kl_coeff` "
        "among the algorithm's arguments",
        "horizon": "how far ahead a token is charged for the KL in the reward",
    },
    "teacher": _OTHER_MODEL
    | {
        "envs": "the environments that it teaches, by name; left out, the rest",
        "tasks": "the task keys that it teaches; `*` stands for anything",
    },
    "player": _OTHER_MODEL
    | {
        "name": 'by which a seat of the protocol takes it: `client = "…"`',
        "api": "of its server: vLLM's, or any with OpenAI's completions, which is sent text",
        "tokenizer": "of a server's model, named as a model is; left out, the run's",
        "temperature": "left out, the run's",
        "max_tokens": "left out, the run's",
    },
    "curriculum": {
        "kind": "`mix`: all, by their weights; `stages`: one after another; `target_solve_rate`: "
        "those near a solve rate; `uncertain`: those whose outcome is least certain (`spo`)",
        "tasks_per_env": "make each environment this many tasks, with a fixed seed each",
        "target": "the solve rate to look for",
        "width": "how far from it a task may be",
        "floor": "the least chance of a task, so that none is forgotten",
        "learning_rate": "how fast the estimate of a solve rate follows",
        "threshold": "the reward from which on a task counts as solved",
    },
    "curriculum.stage": {
        "envs": "the environments that the stage mixes, by name",
        "episodes": "the stage is over after this many",
        "solve_rate": "or once this share of the last episodes was solved",
        "window": "how many episodes are the last ones",
        "threshold": "the reward from which on an episode counts as solved",
    },
    "training": {
        "steps": "how many updates",
        "rollouts_per_update": "how many episodes for each",
        "max_steps": "the most turns of an episode, also of an evaluation's or a teacher's",
        "concurrency": "how many episodes run at once",
        "workers": "further processes that play the episodes to train on, for environments that "
        "compute much",
        "step_timeout_s": "how long an environment may take for a step",
        "episode_timeout_s": "how long an episode may take",
        "lost_member": "what becomes of a group when one of its episodes fails",
        "learning_rate": "of AdamW",
        "betas": "of AdamW",
        "eps": "of AdamW",
        "warmup_steps": "updates over which the learning rate rises from 0",
        "schedule": "the course of the learning rate after that",
        "final_lr_ratio": "the share of the learning rate that is left at the end of a schedule",
        "weight_decay": "of AdamW",
        "max_grad_norm": "longer gradients are scaled down to this; `inf` for none",
        "micro_token_budget": "the most tokens in a forward pass (`ludic calibrate` finds it)",
        "max_seq_len": "a longer sample costs its episode; in your own data it is an error",
        "mini_batches": "optimizer steps per batch",
        "epochs": "how often a batch is gone through",
        "overlap": "sample the next batch while this one is trained on",
        "max_lag": "how many updates old a sample may be, with `overlap` or `[pipeline]`",
        "attention": "the kernel for packed sequences; `auto` takes the best there is",
        "gradient_checkpointing": "recompute activations: less memory, more time",
        "compile": "compile the model with `torch.compile`",
        "head_kernels": "how log-probs are computed from hidden states",
        "graphs": "replay updates as CUDA graphs where that is possible",
        "max_nonfinite_steps": "how many updates with a loss or gradient that is not finite are "
        "skipped before the run ends",
        "batch_timeout_s": "how long a batch may take",
        "publish_timeout_s": "how long new weights may take to the servers",
        "rank_timeout_s": "how long a rank waits for the others; more than rank 0 takes for a "
        "batch or an evaluation",
        "checkpoint_every": "updates between checkpoints; 0 for the last one only",
        "keep_checkpoints": "how many are kept, the newest",
        "filters": 'which turns are left out: a name (`"drop_truncated"`), a table with its '
        '`kind`, or a function (`"module:function"`)',
        "dynamic_sampling": "drop groups without variance and sample others, in at most this many "
        "rounds; 0 for no",
        "past_opponents": "how many earlier policies, one per checkpoint, to play against",
        "past_share": "the share of episodes with one of them",
    },
    "training.replay_buffer": {
        "share": "of the batch's groups that are earlier ones",
        "max_age": "how many policy versions old they may be",
        "half_life": "the age at which the chance of being drawn halves; left out, all are alike",
    },
    "pipeline": {
        "actors": "how many are started with the trainer; more may join with `ludic actor`",
        "url": "of Redis; left out, one is started for the run",
        "url_env": "the environment variable with a URL that has a password",
        "name": "of the run's keys in Redis; left out, that of its folder",
        "stale": "`wait`: actors wait rather than sample what would be too old; `drop`: it is "
        "dropped and its prompt put back; `correct`: it is trained on with corrections",
        "in_order": "batches have groups in the order of their requests, and not as they arrive",
        "max_groups": "the most groups between actors and trainer",
        "max_bytes": "about the most memory that they take",
        "lease_s": "an actor that is silent for this long loses its work to another",
        "patience_s": "how long to wait for a Redis that does not answer",
        "policy_folder": "where actors that sample in-process find the weights; they must share it",
    },
    "sft": {
        "data": "a file of rows or rollouts",
        "teacher": "a function that plays (`module:function`), of the observation, a "
        "`random.Random` and, if it wants it, the `history`",
        "examples": "how many episodes it plays",
        "steps": "how many updates",
        "batch_size": "samples for each",
        "learning_rate": "of these updates",
        "aggregation": "as among an algorithm's arguments",
    },
    "eval": {
        "outcomes": "the endings to report, as the environment calls them; the first one counts "
        "and is the headline",
        "success_above": "an episode with a higher reward is a success, for environments without "
        "endings of their own; left out, the mean reward is the headline",
        "episodes": "how many held-out episodes",
        "every": "updates between evaluations; 0 evaluates only when a stage ends",
        "seed": "decides the held-out episodes",
        "samples_per_task": "episodes with the same environment seed, for pass@k",
        "temperature": "left out, that of the training",
    },
    "eval.env": _ENV,
    "eval.protocol": _PROTOCOL,
    "logging": {
        "loggers": "where metrics go besides `metrics.jsonl`",
        "keep_rollouts": "write every episode",
        "keep_tokens": "write weights, log-probs and entropies of its tokens, for `ludic view`",
    },
}
