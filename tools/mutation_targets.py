"""What `tools.mutation` puts faults into, the tests that are to notice, and what none can see."""

from __future__ import annotations

_UPDATE = "tests/training/update"
_TRAINER = (
    "tests/training/test_trainer.py",
    "tests/training/test_updates.py",
    "tests/training/test_drift.py",
)
_GRADIENTS = "tests/training/test_policy_gradient.py"
_RANKS = "tests/sharding/test_fsdp.py"

TARGETS: dict[str, tuple[str, ...]] = {
    "saw/batch.py": ("tests/saw/test_batch.py", f"{_UPDATE}/test_packing.py", "tests/saw"),
    "saw/building.py": ("tests/saw/test_building.py", "tests/saw/test_assembly.py", "tests/saw"),
    "saw/codec.py": ("tests/saw/test_codec.py", "tests/saw"),
    "saw/filters.py": ("tests/saw/test_filters.py", "tests/saw"),
    "saw/statistics.py": ("tests/saw/test_statistics.py", "tests/saw"),
    "saw/trainable.py": (
        "tests/saw/test_trainable.py",
        f"{_UPDATE}/test_packing.py",
        "tests/inference/test_sampling.py",
        "tests/saw",
    ),
    "training/preprocess.py": (
        "tests/training/test_preprocess.py",
        "tests/training/test_one_way.py",
    ),
    "training/credit_assignment/returns.py": (
        "tests/training/credit_assignment",
        "tests/training/test_algorithms.py",
        _GRADIENTS,
    ),
    "training/credit_assignment/value_tracker.py": (
        "tests/training/credit_assignment/test_value_tracker.py",
        "tests/training/credit_assignment",
    ),
    "training/losses/aggregation.py": (
        "tests/training/losses",
        "tests/training/test_algorithms.py",
        _GRADIENTS,
    ),
    "training/losses/composite.py": ("tests/training/losses", "tests/training/test_algorithms.py"),
    "training/losses/corrections.py": (
        "tests/training/losses/test_corrections.py",
        "tests/training/losses",
    ),
    "training/losses/policy_ratio.py": (
        "tests/training/losses",
        "tests/training/test_algorithms.py",
        _GRADIENTS,
    ),
    "training/update/packing.py": (f"{_UPDATE}/test_packing.py", _UPDATE, _GRADIENTS),
    "training/update/planning.py": (
        f"{_UPDATE}/test_planning.py",
        f"{_UPDATE}/test_sharing.py",
        _UPDATE,
    ),
    "training/update/logprobs.py": (f"{_UPDATE}/test_logprobs.py", _UPDATE),
    "training/update/checks.py": (
        f"{_UPDATE}/test_checks.py",
        f"{_UPDATE}/test_policy.py",
        f"{_UPDATE}/test_sharing.py",
        "tests/tools/test_families.py",
    ),
    "training/update/policy.py": (
        f"{_UPDATE}/test_policy.py",
        f"{_UPDATE}/test_packing.py",
        f"{_UPDATE}/test_sharing.py",
        "tests/tools/test_families.py",
        _UPDATE,
        "tests/training/test_precisions.py",
        "tests/training/test_trainer.py",
    ),
    "training/update/passes.py": (
        f"{_UPDATE}/test_passes.py",
        f"{_UPDATE}/test_recovery.py",
        f"{_UPDATE}/test_sharing.py",
        *_TRAINER,
        _RANKS,
    ),
    "plumbing/model_parts.py": (
        f"{_UPDATE}/test_logprobs.py",
        f"{_UPDATE}/test_policy.py",
        _UPDATE,
    ),
    "sharding/weights.py": (
        f"{_UPDATE}/test_optimizer.py",
        "tests/distributed/test_publisher.py",
        "tests/distributed/test_adapter_weights.py",
        "tests/sharding",
    ),
    "training/config.py": (
        "tests/training/test_config.py",
        f"{_UPDATE}/test_optimizer.py",
        "tests/runs/test_defaults.py",
        "tests/training/test_trainer.py",
        "tests/training/checkpoints/test_checkpoint.py",
        f"{_UPDATE}/test_host_optimizer.py",
    ),
    "training/update/recovery.py": (
        f"{_UPDATE}/test_splitting.py",
        f"{_UPDATE}/test_recovery.py",
        _UPDATE,
        _RANKS,
    ),
    "training/update/scores.py": (f"{_UPDATE}/test_passes.py", *_TRAINER, _RANKS),
    "training/update/optimizer.py": (
        f"{_UPDATE}/test_optimizer.py",
        f"{_UPDATE}/test_recovery.py",
        "tests/training/test_trainer.py",
    ),
    "training/trainer.py": (
        *_TRAINER,
        "tests/training/test_one_way.py",
        "tests/training/checkpoints/test_checkpoint.py",
        "tests/training/test_ending.py",
        "tests/training/test_publish_behind.py",
        f"{_UPDATE}/test_recovery.py",
        _RANKS,
    ),
    "training/checkpoint.py": (
        "tests/training/checkpoints/test_checkpoint.py",
        "tests/training/checkpoints/test_starting_over.py",
        "tests/training/checkpoints",
    ),
    "training/checkpoint_contents.py": (
        "tests/training/checkpoints/test_checkpoint.py",
        "tests/training/checkpoints",
        _RANKS,
    ),
    "training/update/graphed.py": (
        f"{_UPDATE}/test_graph_sizes.py",
        f"{_UPDATE}/test_graphed.py",
    ),
    "rollouts/requests.py": (
        "tests/rollouts/test_requests.py",
        "tests/rollouts/test_curricula.py",
        "tests/rollouts/test_engine.py",
    ),
    "interaction/collector.py": ("tests/interaction",),
}
"""Which tests are to notice the faults of a file: those that are quick and meant for it first."""

_AT_ONCE = "how much is taken at once changes no result"
_ORDER = "it only makes ranks wait for each other"
_ON_A_GPU = "only a GPU does it: tests/gpu"
_MARGIN = "what leaks lies far above the bound, and what is rounded far below"
_SAME_LENGTH = "the two are made of one list, so neither can be longer"
_ANY_TOKENS = "any tokens that differ show it"
_CHECKS = "training/update/checks.py"
_GRAPHED = "training/update/graphed.py"
_PACKING = "training/update/packing.py"
_RETURNS = "training/credit_assignment/returns.py"
_CHECKPOINT = "training/checkpoint.py"
_CONTENTS = "training/checkpoint_contents.py"
_CUDA_STATE = 'if world.device.type == "cuda" and "rng/cuda" in file.keys(): # noqa: SIM118'

UNSEEN: dict[tuple[str, str, str], str] = {
    (
        "training/update/recovery.py",
        'if not self._sharded or device.type != "cuda":',
        "sign or not gone",
    ): _ON_A_GPU,
    (_PACKING, "starts, lengths = zip(*rows, strict=True)", "True -> False"): _SAME_LENGTH,
    (
        "sharding/weights.py",
        "begin = (first or 0) * (rows[0].numel() if rows.ndim else 1)",
        "1 -> 2",
    ): "a scalar is whole wherever it is, so its part begins at 0",
    (_GRAPHED, "return (None,) * 4", "4 -> 5"): "torch takes further gradients that are None",
    (
        _CHECKS,
        "def check_packing(policy: Policy, device: torch.device, longest: int = 2048) -> None:",
        "2048 -> 2049",
    ): _MARGIN,
    ("sharding/weights.py", "_DITHERED_AT_ONCE = 1 << 22", "1 -> 2"): _AT_ONCE,
    ("sharding/weights.py", "_DITHERED_AT_ONCE = 1 << 22", "22 -> 23"): _AT_ONCE,
    (
        "training/update/packing.py",
        "return _map_tensors(self, lambda t: t.to(device, non_blocking=True))",
        "True -> False",
    ): _ON_A_GPU,
    (
        _CHECKS,
        "limit = 8 * max(eps, rounding, torch.finfo(dtype).eps * own.abs().mean().item() / 4)",
        "8 -> 9",
    ): _MARGIN,
    (_CHECKS, "if apart > limit:", "Gt -> GtE"): _MARGIN,
    (_CHECKS, "if leaked > (least := max(eps, 3 * rounding)):", "3 -> 4"): _MARGIN,
    (_CHECKS, "if leaked > (least := max(eps, 3 * rounding)):", "Gt -> GtE"): _MARGIN,
    (
        _CHECKS,
        "own = min(5, len(ids) - 1)",
        "1 -> 2",
    ): "in very short rows; an end of any length shows what leaks into it",
    (
        "training/trainer.py",
        '1, "ludic-train", initializer=work_on, initargs=(self.world.device,)',
        "1 -> 2",
    ): "a thread more has nothing to do: one piece of work is awaited before the next",
    (
        "training/trainer.py",
        "self._goal: int | None = 0",
        "0 -> 1",
    ): "both are reached by the first step",
    (
        "training/update/optimizer.py",
        "return 1.0 if limit is None or norm <= limit else limit / norm",
        "LtE -> Lt",
    ): "at the limit the factor is 1 either way",
    ("training/trainer.py", "if self.cfg.overlap:", "condition turned round"): _ORDER,
    (
        "training/trainer.py",
        "self._compute.shutdown(wait=True)",
        "True -> False",
    ): "everything that was begun has been awaited",
    (_CHECKPOINT, "self.last_step = -1", "1 -> 2"): "neither is the number of a step",
    (_CONTENTS, "while block := data.read(1 << 22):", "1 -> 2"): _AT_ONCE,
    (_CONTENTS, "while block := data.read(1 << 22):", "22 -> 23"): _AT_ONCE,
    (
        _CHECKPOINT,
        'own = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)',
        "True -> False",
    ): _ORDER,
    (
        _CONTENTS,
        "if rows is not None and start < count:",
        "Lt -> LtE",
    ): "rows that begin at the end of what is compared give nothing either way",
    (_CONTENTS, _CUDA_STATE, "Eq -> NotEq"): _ON_A_GPU,
    (_CONTENTS, _CUDA_STATE, "In -> NotIn"): _ON_A_GPU,
    (_CONTENTS, _CUDA_STATE, "and <-> or"): _ON_A_GPU,
    (_RETURNS, "_LARGEST_RETURN = 1e150", "1e+150 -> 1e+150"): "it is the same number",
    (
        _RETURNS,
        "std = centred[counted].std(ddof=1) if counted.sum() > 1 else 0.0",
        "0.0 -> 1.0",
    ): "what it divides is 0 then",
    (
        _RETURNS,
        "if len(members) < group_size and allow_partial:",
        "Lt -> LtE",
    ): "a whole group has been passed before",
    (
        "training/update/planning.py",
        "if packs and size <= micro_token_budget:",
        "LtE -> Lt",
    ): "what fills a micro-batch is alone in it either way",
    (
        _CHECKS,
        "return SAWItem(ids.numpy(), mask, np.concatenate([np.zeros(1, np.int8), mask[1:]]), 1.0)",
        "1.0 -> 2.0",
    ): "a log-prob does not depend on its token's weight",
    (
        _CHECKS,
        "for row, first in zip(rows, (0, 1, 0), strict=True): "
        "# the second row comes last in their order",
        "1 -> 2",
    ): "any token above the others' comes last",
    (_CHECKS, "rows[1][-own:] += 1", "Add= -> Sub="): _ANY_TOKENS,
    (_CHECKS, "rows[2][-own:] += 2", "2 -> 3"): _ANY_TOKENS,
    (_CHECKS, "rows[2][-own:] += 2", "Add= -> Sub="): _ANY_TOKENS,
    (_CHECKS, "ids = _random_ids(causal, 8, device)[None]", "8 -> 9"): _ANY_TOKENS,
    (
        _CHECKS,
        "changed[0, -1].add_(1).remainder_(vocabulary_size(causal))",
        "1 -> 2",
    ): _ANY_TOKENS,
    (_CHECKS, "_LARGEST_LOGIT = 100.0", "100.0 -> 101.0"): _MARGIN,
    (
        _CHECKS,
        "return bool((a - b).abs().max() <= 32 * eps * "
        "torch.maximum(a.abs().max(), b.abs().max()))",
        "32 -> 33",
    ): _MARGIN,
    (_GRAPHED, "for _ in range(8):", "8 -> 9"): "sizes that fit are found sooner, or not at all",
    (
        _GRAPHED,
        "old.copy_(value, non_blocking=True)",
        "True -> False",
    ): _ON_A_GPU,
    (
        _GRAPHED,
        "return torch.cat([cu_seqlens, cu_seqlens[-1:] + "
        "more.to(cu_seqlens.device, non_blocking=True)])",
        "True -> False",
    ): _ON_A_GPU,
    (_GRAPHED, "self._before = 0", "0 -> 1"): "it is set before it is read",
    (_GRAPHED, "self.took = 0", "0 -> 1"): "it is set before it is read",
    **{
        (path, line, "True -> False"): _SAME_LENGTH
        for path, line in (
            (
                "saw/batch.py",
                "for column in zip(*[_attached(item.attachments) for item in items], strict=True):",
            ),
            ("saw/batch.py", "for values, count in zip(column, counts, strict=True):"),
            ("saw/batch.py", "for item, count in zip(items, counts, strict=True):"),
            (
                "saw/batch.py",
                "for name, value in zip(_ATTACHED, _attached(attachments), strict=True):",
            ),
            (
                "training/preprocess.py",
                "items = (_charge(i, c) for i, c in zip(batch.items, charges, strict=True))",
            ),
            (_PACKING, "return list(zip(rows, shared, strict=True))"),
            (
                "training/update/planning.py",
                "return sum(max(map(_load, together)) for together in zip(*plan, strict=True))",
            ),
            (
                _CHECKS,
                "for row, first in zip(rows, (0, 1, 0), strict=True): "
                "# the second row comes last in their order",
            ),
            (_GRAPHED, "if any(mine < other for mine, other in zip(self, inner, strict=True)):"),
            (_GRAPHED, "for (parameter, _), copy in zip(fresh, copies, strict=True):"),
            (
                _GRAPHED,
                "for fixed, new in zip(self.grads, (grad_logprobs, grad_entropies), strict=True):",
            ),
        )
    },
}
"""(file, the line with the fault, white space folded; what is changed) -> why no test notices."""
