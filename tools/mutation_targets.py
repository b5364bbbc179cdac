"""What `tools.mutation` puts faults into, and the tests that are to notice."""

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
        "tests/test_model_parts.py",
        f"{_UPDATE}/test_logprobs.py",
        f"{_UPDATE}/test_policy.py",
        _UPDATE,
    ),
    "sharding/weights.py": (
        f"{_UPDATE}/test_optimizer.py",
        "tests/distributed/test_publisher.py",
        "tests/sharding/test_merged_weights.py",
        "tests/distributed/test_checkpoint_shapes.py",
        "tests/distributed/test_adapter_weights.py",
        "tests/training/checkpoints/test_state_shards.py",
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
    "training/update/graphed.py": (f"{_UPDATE}/test_graph_sizes.py", f"{_UPDATE}/test_graphed.py"),
    "rollouts/requests.py": (
        "tests/rollouts/test_requests.py",
        "tests/rollouts/test_curricula.py",
        "tests/rollouts/test_engine.py",
    ),
    "interaction/collector.py": ("tests/interaction",),
}
"""Which tests are to notice the faults of a file: those that are quick and meant for it first."""
