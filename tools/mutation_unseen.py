"""The faults of `tools.mutation` that no test can see, each with its reason."""

from __future__ import annotations

_AT_ONCE = "how much is taken at once changes no result"
_ORDER = "it only makes ranks wait for each other"
_ON_A_GPU = "only a GPU does it: tests/gpu"
_MARGIN = "what leaks lies far above the bound, and what is rounded far below"
_SAME_LENGTH = "the two are made of one list, so neither can be longer"
_ANY_TOKENS = "any tokens that differ show it"
_FINER = "how finely groups are split changes how long a plan takes, and nothing that it computes"
_NO_GRADIENT = "a gradient of zeros adds what none at all does"
_MORE_GRADIENTS = "torch takes further gradients that are None"
_CHECKS = "training/update/checks.py"
_GRAPHED = "training/update/graphed.py"
_LOGPROBS = "training/update/logprobs.py"
_OPTIMIZER = "training/update/optimizer.py"
_PACKING = "training/update/packing.py"
_PLANNING = "training/update/planning.py"
_POLICY = "training/update/policy.py"
_RECOVERY = "training/update/recovery.py"
_RETURNS = "training/credit_assignment/returns.py"
_TRAINER = "training/trainer.py"
_WEIGHTS = "sharding/weights.py"
_CHECKPOINT = "training/checkpoint.py"
_CONTENTS = "training/checkpoint_contents.py"
_CUDA_STATE = 'if world.device.type == "cuda" and "rng/cuda" in file.keys(): # noqa: SIM118'

UNSEEN: dict[tuple[str, str, str], str] = {
    (_PLANNING, "_PARTS = (1, 2, 4, 8)", "4 -> 5"): _FINER,
    (_PLANNING, "_PARTS = (1, 2, 4, 8)", "8 -> 9"): _FINER,
    (_PLANNING, "return Cost(layers * width / max(parameters, 1))", "1 -> 2"): (
        "a model without parameters has no layers"
    ),
    (_PLANNING, "shared = 0 if before is None else order.shared(before, row)", "0 -> 1"): (
        "what the first unit saves beside the one before it is not looked at"
    ),
    (_PLANNING, "if world_size > 1:", "Gt -> GtE"): (
        "on one rank nothing takes less than the largest bundles, which come first"
    ),
    (_PLANNING, "by_load = [(0.0, b) for b in range(total)] # a heap", "0.0 -> 1.0"): (
        "all begin with the same"
    ),
    (_PLANNING, "size = 0", "0 -> 1"): "it is set before it is read",
    (_RECOVERY, "self._fitted = 0", "0 -> 1"): "half of one token is none",
    (
        _RECOVERY,
        "self.budget = min(self.budget, max(split_size // 2, self._fitted // 2, 1))",
        "1 -> 2",
    ): "every row has two tokens, and the longest fits whatever the budget",
    (_POLICY, "if self.rope_threshold < sys.maxsize:", "Lt -> LtE"): (
        "a rotary embedding without a threshold has nothing to forget"
    ),
    (_LOGPROBS, 'vocab = int(getattr(head, "out_features", 2**17))', "2 -> 3"): _AT_ONCE,
    (_LOGPROBS, 'vocab = int(getattr(head, "out_features", 2**17))', "17 -> 18"): _AT_ONCE,
    (_LOGPROBS, "logp = logp.masked_fill_(mask, 0.0) # 0 * inf would be NaN", "0.0 -> 1.0"): (
        "it is multiplied by 0"
    ),
    (_LOGPROBS, "return torch.compile(function, dynamic=True)", "True -> False"): _ON_A_GPU,
    (_LOGPROBS, "ctx.set_materialize_grads(False)", "False -> True"): _NO_GRADIENT,
    (_LOGPROBS, "return grad_hidden, grad_weight, grad_bias, *[None] * 7", "7 -> 8"): (
        _MORE_GRADIENTS
    ),
    (_OPTIMIZER, "fused=self._fused or None,", "and <-> or"): _ON_A_GPU,
    (_OPTIMIZER, "if scale != 1.0:", "1.0 -> 2.0"): (
        "a scale is never above 1, and times 1 changes nothing"
    ),
    (_GRAPHED, "ctx.set_materialize_grads(False)", "False -> True"): _NO_GRADIENT,
    (
        _GRAPHED,
        "results, self.results = self.results, "
        "(self.results[0].detach(), self.results[1].detach())",
        "0 -> 1",
    ): _ON_A_GPU,
    (_PACKING, "starts, lengths = zip(*rows, strict=True)", "True -> False"): _SAME_LENGTH,
    (_WEIGHTS, "begin = (first or 0) * (rows[0].numel() if rows.ndim else 1)", "1 -> 2"): (
        "a scalar is whole wherever it is, so its part begins at 0"
    ),
    (_GRAPHED, "return (None,) * 4", "4 -> 5"): _MORE_GRADIENTS,
    (
        _CHECKS,
        "def check_packing(policy: Policy, device: torch.device, longest: int = 2048) -> None:",
        "2048 -> 2049",
    ): _MARGIN,
    (_WEIGHTS, "_DITHERED_AT_ONCE = 1 << 22", "1 -> 2"): _AT_ONCE,
    (_WEIGHTS, "_DITHERED_AT_ONCE = 1 << 22", "22 -> 23"): _AT_ONCE,
    (
        _PACKING,
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
    (_CHECKS, "own = min(5, len(ids) - 1)", "1 -> 2"): (
        "in very short rows; an end of any length shows what leaks into it"
    ),
    (_TRAINER, '1, "ludic-train", initializer=work_on, initargs=(self.world.device,)', "1 -> 2"): (
        "a thread more has nothing to do: one piece of work is awaited before the next"
    ),
    (_TRAINER, "self._goal: int | None = 0", "0 -> 1"): "both are reached by the first step",
    (_OPTIMIZER, "return 1.0 if limit is None or norm <= limit else limit / norm", "LtE -> Lt"): (
        "at the limit the factor is 1 either way"
    ),
    (_TRAINER, "if self.cfg.overlap:", "condition turned round"): _ORDER,
    (_TRAINER, "self._compute.shutdown(wait=True)", "True -> False"): (
        "everything that was begun has been awaited"
    ),
    (_CHECKPOINT, "self.last_step = -1", "1 -> 2"): "neither is the number of a step",
    (_CONTENTS, "while block := data.read(1 << 22):", "1 -> 2"): _AT_ONCE,
    (_CONTENTS, "while block := data.read(1 << 22):", "22 -> 23"): _AT_ONCE,
    (
        _CHECKPOINT,
        'own = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)',
        "True -> False",
    ): _ORDER,
    (_CONTENTS, "if rows is not None and start < count:", "Lt -> LtE"): (
        "rows that begin at the end of what is compared give nothing either way"
    ),
    (_CONTENTS, _CUDA_STATE, "Eq -> NotEq"): _ON_A_GPU,
    (_CONTENTS, _CUDA_STATE, "In -> NotIn"): _ON_A_GPU,
    (_CONTENTS, _CUDA_STATE, "and <-> or"): _ON_A_GPU,
    (_RETURNS, "_LARGEST_RETURN = 1e150", "1e+150 -> 1e+150"): "it is the same number",
    (_RETURNS, "std = centred[counted].std(ddof=1) if counted.sum() > 1 else 0.0", "0.0 -> 1.0"): (
        "what it divides is 0 then"
    ),
    (_RETURNS, "partial = allow_partial and len(members) < group_size", "Lt -> LtE"): (
        "a whole group is passed anyway"
    ),
    (_PLANNING, "if packs and size <= micro_token_budget:", "LtE -> Lt"): (
        "what fills a micro-batch is alone in it either way"
    ),
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
    (_CHECKS, "changed[0, -1].add_(1).remainder_(vocabulary_size(causal))", "1 -> 2"): _ANY_TOKENS,
    (_CHECKS, "_LARGEST_LOGIT = 100.0", "100.0 -> 101.0"): _MARGIN,
    (
        _CHECKS,
        "return bool((a - b).abs().max() <= 32 * eps * "
        "torch.maximum(a.abs().max(), b.abs().max()))",
        "32 -> 33",
    ): _MARGIN,
    (_GRAPHED, "for _ in range(8):", "8 -> 9"): "sizes that fit are found sooner, or not at all",
    (_GRAPHED, "old.copy_(value, non_blocking=True)", "True -> False"): _ON_A_GPU,
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
            ("saw/statistics.py", "for rollout, reward in zip(rollouts, rewards, strict=True):"),
            ("saw/statistics.py", "for r, reward in zip(rollouts, rewards, strict=True):"),
            (
                "saw/building.py",
                "for row, own, (at, end) in zip(rows, spans, pairwise(bounds), strict=True):",
            ),
            (
                "saw/trainable.py",
                "for index, (item, values) in enumerate(zip(items, found, strict=True)):",
            ),
            (
                "training/credit_assignment/value_tracker.py",
                "return dict(zip(self._tasks, weights, strict=True))",
            ),
            (
                _PLANNING,
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
                "for graph, work in zip(graphs, (self._forward, self._backward), strict=True):",
            ),
            (_CONTENTS, "pieces |= dict(zip(sharded, parts, strict=True))"),
            (
                _GRAPHED,
                "for fixed, new in zip(self.grads, (grad_logprobs, grad_entropies), strict=True):",
            ),
        )
    },
}
"""(file, the line with the fault, white space folded; what is changed) -> why no test notices."""
