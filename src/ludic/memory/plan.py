"""Puts a run's parts together: whether they fit, how many tokens of a pass do, and what would help.

Everything here is computed by the same sums: a setting is suggested only if they say that it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ludic.memory.engine import Engine as Engine
from ludic.memory.engine import EngineMemory, engine_bytes, grown_tokens
from ludic.memory.shape import Adapter, ModelShape
from ludic.memory.update import Training, pass_bytes, state_bytes

GIB = 2**30
HEADROOM = 0.05
"""Of what is free: for libraries' workspaces, and for others on the device."""
FRAGMENTATION = 0.05
"""Of a pass on a GPU: blocks that the allocator holds and cannot give to the next tensor."""
_SATURATED = 3e13
"""Parameters times tokens, from which on a larger pass is no quicker for each of its tokens."""
MOST_TOKENS = 131_072
_ROUND = 256


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run takes of one device, or of each rank's. `others` are bytes by name: further
    models in the process, a server on the same GPU."""

    shape: ModelShape
    training: Training
    engine: Engine | None = None
    others: Mapping[str, int] = field(default_factory=dict)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by what takes them, the largest sum that occurs at one time."""
        how, passes = self.training, pass_bytes(self.shape, self.training)
        parts = {**state_bytes(self.shape, how), **self._sampling(), **passes, **self.others}
        if how.device == "cuda":
            parts["fragmentation"] = int(FRAGMENTATION * sum(passes.values()))
        return {name: size for name, size in parts.items() if size > 0}

    def _sampling(self) -> dict[str, int]:
        engine, how = self.engine, self.training
        if engine is None:
            return {}
        found = self.engine_memory(engine)
        copied = 2 * self.shape.parameters if how.precision == "mixed" else 0
        names = ("rounded copy to sample from", "engine's slots", "prefix cache", "engine's step")
        sizes = (copied, found.slots, found.prefix_cache, found.step)
        return dict(zip(names, sizes, strict=True))

    def engine_memory(self, engine: Engine) -> EngineMemory:
        how = self.training
        return engine_bytes(self.shape, engine, item=how.item, device=how.device)

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def fits(self, free: int) -> bool:
        """Whether it fits into `free` bytes, with a little to spare."""
        return self.total <= (1 - HEADROOM) * free

    def taken(self, tokens: float, sampled: float, *, beside: bool = False) -> dict[str, int]:
        """What a run is expected to take, where `parts` are the most that it may: passes of
        `tokens` instead of full ones, a prefix cache that has grown to the `sampled` tokens of an
        update, and, unless sampling goes on `beside` them, passes in the memory of the engine's
        steps. Bytes by name; what the allocator holds in vain is the same share of a pass."""
        plan = self.with_tokens(min(int(tokens), self.training.tokens))
        parts = plan.parts
        if self.engine is None:
            return parts
        cache = parts.get("prefix cache", 0)
        each = self.shape.kv_numbers * self.training.item
        parts["prefix cache"] = min(cache, grown_tokens(sampled) * each)
        if not beside:
            passes = sum(pass_bytes(self.shape, plan.training).values())
            parts["engine's step"] = max(parts.get("engine's step", 0) - passes, 0)
        return {name: size for name, size in parts.items() if size > 0}

    def with_tokens(self, tokens: int) -> Plan:
        return replace(self, training=replace(self.training, tokens=tokens))

    def table(self, free: int) -> str:
        """What takes what, and what is free, in GiB."""
        rows = [*self.parts.items(), ("needed", self.total), ("free", free)]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{width}} {size / GIB:8.2f} GiB" for name, size in rows)


def worthwhile_tokens(shape: ModelShape, adapter: Adapter | None = None) -> int:
    """How many tokens a pass takes at most where nobody says: more would only take memory. With an
    adapter the host launches twice as many products, and the GPU has less to do."""
    tokens = int((2 if adapter else 1) * _SATURATED / max(shape.parameters, 1))
    return min(-(-tokens // _ROUND) * _ROUND, MOST_TOKENS)


def settled(
    plan: Plan,
    free: int,
    longest: int,
    *,
    tokens: int | None = None,
    checkpointing: bool | None = None,
    most: int | None = None,
) -> Plan:
    """The plan with the tokens of a pass and with recomputation as they were said or, where None,
    as they fit: as many tokens as are worthwhile (`most`), the `longest` row at least, and
    recomputation only if that row does not fit without it. The result may still not fit."""
    most = max(longest, most or worthwhile_tokens(plan.shape, plan.training.adapter))
    how = replace(plan.training, tokens=tokens or longest, checkpointing=bool(checkpointing))
    how = replace(how, keep_logits=0)
    plan = replace(plan, training=how)
    if checkpointing is None and not plan.fits(free):
        plan = replace(plan, training=replace(how, checkpointing=True))
    if tokens is not None or not plan.fits(free):
        return plan
    return plan.with_tokens(_largest(lambda n: plan.with_tokens(n).fits(free), longest, most))


def with_logits(plan: Plan, free: int, said: int | None = None) -> Plan:
    """The settled plan with the logits of so many tokens kept for the backward pass as were `said`
    or, where None, as there is room for once all else has its own: on a GPU, beside two copies of
    what is trained, which publishing may make, and with twice the usual to spare. Not on several
    ranks, where a backward pass that does not fit ends the run."""
    how = plan.training

    def keeping(tokens: int) -> Plan:
        return replace(plan, training=replace(how, keep_logits=tokens))

    def fits(tokens: int) -> bool:
        copies = 2 * how.weight_item * how.trained(plan.shape)
        return keeping(tokens).fits(int((1 - HEADROOM) * (free - copies)))

    if said is not None:
        return keeping(said)
    if how.device != "cuda" or how.ranks > 1 or not fits(0):
        return keeping(0)
    return keeping(_largest(fits, 0, how.tokens))


def _largest(fits: Callable[[int], bool], least: int, most: int) -> int:
    """The largest number up to `most` that fits, to 256 or exactly `least` or `most`; `least` does.
    What fits, fits with less."""
    if fits(most):
        return most
    low, high = least, most
    while high - low > _ROUND:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return max(least, low // _ROUND * _ROUND)


Change = tuple[str, Plan]
"""A setting as a run file writes it, and the plan with it."""


def remedies(plan: Plan, free: int, longest: int) -> list[str]:
    """Settings that make a plan fit, each by itself; where none does, the fewest of them together,
    in the order of what they cost; and how many ranks would hold it."""
    changes = list(_changes(plan, longest))
    alone = [name for name, changed in _numbered(plan, free, longest) if changed.fits(free)]
    alone += [name for name, change in changes if change(plan).fits(free)]
    changed = plan
    for number, (_, change) in enumerate([] if alone else changes, start=1):
        changed = change(changed)
        if changed.fits(free):
            alone.append(", ".join(name for name, _ in changes[:number]))
            break
    return alone + list(_ranks(plan, free))


def _changes(plan: Plan, longest: int) -> Iterator[tuple[str, Callable[[Plan], Plan]]]:
    """Settings that need no number, the cheapest first."""
    how = plan.training

    def trained(**changed: object) -> Callable[[Plan], Plan]:
        return lambda p: replace(p, training=replace(p.training, **changed))  # type: ignore[arg-type]

    if how.precision != "bfloat16":
        yield 'model.precision = "bfloat16"', trained(precision="bfloat16")
    if how.tokens > longest:
        yield f"training.micro_token_budget = {longest}", trained(tokens=longest)
    if not how.checkpointing:
        yield "training.gradient_checkpointing = true", trained(checkpointing=True)
    if how.device == "cuda" and how.optimizer_device == "cuda":
        yield 'training.optimizer_device = "cpu"', trained(optimizer_device="cpu")
    if how.adapter is None:
        yield "model.lora.rank = 16", _with_adapter


def _with_adapter(plan: Plan) -> Plan:
    how = replace(plan.training, adapter=Adapter(16))
    return replace(plan, shape=replace(plan.shape, trained=None), training=how)


def _numbered(plan: Plan, free: int, longest: int) -> Iterator[Change]:
    """Settings with a number, at the largest that fits."""
    how, engine = plan.training, plan.engine
    if how.tokens > longest and (fewer := plan.with_tokens(longest)).fits(free):
        found = _largest(lambda n: plan.with_tokens(n).fits(free), longest, how.tokens)
        yield f"training.micro_token_budget = {found}", fewer
    elif how.tokens == longest > 64 and (shorter := plan.with_tokens(64)).fits(free):
        found = _largest(lambda n: plan.with_tokens(n).fits(free), 64, longest)
        yield f"training.max_seq_len = {found}", shorter
    if engine is None:
        return

    def with_slots(slots: int) -> Plan:
        return replace(plan, engine=replace(engine, slots=slots))

    fitting = [n for n in range(1, engine.slots) if with_slots(n).fits(free)]
    if fitting:
        yield f"inference.slots = {fitting[-1]}", with_slots(fitting[-1])


def _ranks(plan: Plan, free: int) -> Iterator[str]:
    """The fewest ranks that hold it, with the sampler elsewhere."""
    if plan.training.device != "cuda":
        return
    for ranks in range(2, 65):
        how = replace(plan.training, ranks=ranks)
        if replace(plan, training=how, engine=None, others={}).fits(free):
            yield (
                f"torchrun --nproc-per-node {ranks}, each on a GPU like this one, and vLLM servers "
                "on others (inference.servers)"
            )
            return
