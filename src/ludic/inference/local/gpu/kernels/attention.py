"""Rotary embedding, the cache, and attention of one token per row.

A program attends for one row and one head of keys and values. A few long rows would leave most of
the GPU idle, so several programs then share a row's context, and another kernel merges their parts.
Rows that begin alike read their beginning from one slot, so it is read from memory once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ludic.inference.local.gpu.kernels.early import launch_options, let_next_begin, wait_for_others

_BLOCK_BYTES = 1 << 16
_LOG2_E = tl.constexpr(1.4426950408889634)
_SHARED_BLOCK = 64
"""How many tokens are looked at at a time where programs share a row."""
_IDLE = 2
"""Rows are split where whole ones would give a program to fewer than one multiprocessor in two."""
_PROGRAMS = 2
"""How many programs there are then for each multiprocessor, at most, when all rows are full."""
_LEAST_RUN = 512
"""Fewer tokens than this are not worth a program of their own."""
_LEAST_PARTS = 4
"""Fewer parts are not worth another launch to merge them."""
_MOST_PARTS = 64
"""A program of the merging kernel holds all parts of a head at once."""


@triton.jit
def _rotate_store_kernel(
    q, k, v, cos, sin, out, keys, values, slots, positions,
    q_row, k_row, v_row, slot_step, head_step, heads, kv_heads,
    DIM: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = DIM // 2
    half = tl.arange(0, HALF)
    cos_1 = tl.load(cos + row * DIM + half).to(tl.float32)
    cos_2 = tl.load(cos + row * DIM + HALF + half).to(tl.float32)
    sin_1 = tl.load(sin + row * DIM + half).to(tl.float32)
    sin_2 = tl.load(sin + row * DIM + HALF + half).to(tl.float32)

    head = tl.arange(0, HEADS)
    inside = (head < heads)[:, None]
    at = head[:, None] * DIM + half[None, :]
    a = tl.load(q + row * q_row + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(q + row * q_row + at + HALF, mask=inside, other=0.0).to(tl.float32)
    where = out + row * heads * DIM + at
    tl.store(where, (a * cos_1 - b * sin_1).to(out.dtype.element_ty), mask=inside)
    tl.store(where + HALF, (b * cos_2 + a * sin_2).to(out.dtype.element_ty), mask=inside)

    head = tl.arange(0, KV)
    inside = (head < kv_heads)[:, None]
    at = head[:, None] * DIM + half[None, :]
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(positions + row).to(tl.int64)
    place = slot * slot_step + position * DIM + head[:, None] * head_step + half[None, :]
    a = tl.load(k + row * k_row + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(k + row * k_row + at + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(keys + place, (a * cos_1 - b * sin_1).to(keys.dtype.element_ty), mask=inside)
    tl.store(keys + place + HALF, (b * cos_2 + a * sin_2).to(keys.dtype.element_ty), mask=inside)
    tl.store(values + place, tl.load(v + row * v_row + at, mask=inside), mask=inside)
    tl.store(values + place + HALF, tl.load(v + row * v_row + at + HALF, mask=inside), mask=inside)


def rotate_and_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotary: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    slots: Tensor,
    positions: Tensor,
) -> Tensor:
    """Rotated queries; rotated keys, and values, written to `cache[slot, :, position]`.

    q is [rows, heads, dim], k and v [rows, kv_heads, dim], each dense in its last two; cos and sin
    are [rows, dim]; a cache is [slots, kv_heads, length, dim].
    """
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    cos, sin = rotary
    keys, values = cache
    out = q.new_empty(rows, heads, dim)
    _rotate_store_kernel[(rows,)](
        q, k, v, cos, sin, out, keys, values, slots, positions,
        q.stride(0), k.stride(0), v.stride(0), keys.stride(0), keys.stride(1), heads, kv_heads,
        DIM=dim, HEADS=triton.next_power_of_2(heads), KV=triton.next_power_of_2(kv_heads),
        num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _turned(x, at, dim, cos, sin, inside, ROTARY: tl.constexpr, DIM: tl.constexpr):
    """x at the places `at + dim`; with ROTARY, turned in half-split pairs. `sin` has its sign."""
    here = tl.load(x + at + dim, mask=inside, other=0.0)
    if ROTARY:
        other = (dim + DIM // 2) % DIM
        there = tl.load(x + at + other, mask=inside, other=0.0).to(tl.float32)
        here = (here.to(tl.float32) * cos + there * sin).to(here.dtype)
    return here


@triton.jit
def _attend_kernel(
    q, k, v, cos, sin, keys, values, positions, sources, lengths, out, peaks, totals,
    q_row, k_row, v_row, slot_step, head_step, kv_heads, scale, window, run,
    ROTARY: tl.constexpr, GROUP: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # Before the wait: these are set before the step begins.
    position = tl.load(positions + row).to(tl.int32)
    shared = tl.load(lengths + row).to(tl.int32)
    shared_base = tl.load(sources + row) * slot_step + head * head_step
    begin = 0
    if window > 0:
        begin = tl.maximum(position + 1 - window, 0)
    low, high, part = begin // BLOCK * BLOCK, position, 0
    if PARTS > 1:
        part = tl.program_id(2)
        low += part * run
        high = tl.minimum(low + run, position)
        # The first part always stays, and waits: so the kernel ends after those in front of it.
        if (part > 0) & (low >= position):
            return
    wait_for_others(EARLY)
    member, dim = tl.arange(0, PADDED), tl.arange(0, DIM)
    inside = (member < GROUP)[:, None]
    cosines = tl.zeros((DIM,), dtype=tl.float32)
    sines = cosines
    if ROTARY:
        cosines = tl.load(cos + row * DIM + dim).to(tl.float32)
        sines = tl.load(sin + row * DIM + dim).to(tl.float32)
        sines = tl.where(dim < DIM // 2, -sines, sines)
    first = row * q_row + (head * GROUP + member[:, None]) * DIM
    queries = _turned(q, first, dim[None, :], cosines[None, :], sines[None, :], inside, ROTARY, DIM)
    new_key = _turned(k, row * k_row + head * DIM, dim, cosines, sines, dim < DIM, ROTARY, DIM)
    new_value = tl.load(v + row * v_row + head * DIM + dim)
    base = row * slot_step + head * head_step
    if part == 0:
        tl.store(keys + base + position * DIM + dim, new_key)
        tl.store(values + base + position * DIM + dim, new_value)

    # The new token comes first, from registers: what was just stored need not be visible yet.
    scale = scale * _LOG2_E
    most = tl.sum(queries.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
    total = tl.full((PADDED,), 1.0, dtype=tl.float32)
    result = tl.zeros((PADDED, DIM), dtype=tl.float32) + new_value.to(tl.float32)[None, :]
    if PARTS > 1:
        most = tl.where(part == 0, most, float("-inf"))
        total = tl.where(part == 0, total, 0.0)
        result = tl.where(part == 0, result, 0.0)
    for start in range(low, high, BLOCK):
        at = start + tl.arange(0, BLOCK)
        seen = (at >= begin) & (at < high)
        places = tl.where(start + BLOCK <= shared, shared_base, base)
        places += at[:, None] * DIM + dim[None, :]
        block = tl.load(keys + places, mask=seen[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(block), input_precision=PRECISION) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(most - higher)
        total = total * shrink + tl.sum(weights, 1)
        block = tl.load(values + places, mask=seen[:, None], other=0.0)
        result = tl.dot(
            weights.to(block.dtype), block, result * shrink[:, None], input_precision=PRECISION
        )
        most = higher
    let_next_begin(EARLY)
    mine = (row * kv_heads + head) * GROUP + member
    if PARTS > 1:
        mine = mine * PARTS + part
        tl.store(peaks + mine, most, mask=member < GROUP)
        tl.store(totals + mine, total, mask=member < GROUP)
    else:
        result = result / total[:, None]
    places = mine[:, None] * DIM + dim[None, :]
    tl.store(out + places, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _merge_kernel(
    results, peaks, totals, positions, out, heads, window, run,
    DIM: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + row).to(tl.int32)
    wait_for_others(EARLY)
    let_next_begin(EARLY)
    begin = 0
    if window > 0:
        begin = tl.maximum(position + 1 - window, 0)
    part, dim = tl.arange(0, PADDED), tl.arange(0, DIM)
    # The same parts as in `_attend_kernel`. The others were never written.
    written = (part == 0) | (begin // BLOCK * BLOCK + part * run < position)
    written &= part < PARTS
    mine = (row * heads + head) * PARTS + part
    most = tl.load(peaks + mine, mask=written, other=float("-inf"))
    weights = tl.exp2(most - tl.max(most, 0))
    total = tl.sum(weights * tl.load(totals + mine, mask=written, other=0.0), 0)
    places = mine[:, None] * DIM + dim[None, :]
    result = tl.load(results + places, mask=written[:, None], other=0.0)
    result = tl.sum(weights[:, None] * result, 0) / total
    tl.store(out + (row * heads + head) * DIM + dim, result.to(out.dtype.element_ty))


def row_parts(rows: int, kv_heads: int, length: int, device: torch.device) -> int:
    """How many programs may share a row in a step of so many rows, whose slots have this length.
    That follows from the size of the step, like its products' tiles, and not from who is in it."""
    if device.type != "cuda":
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return parts_for(rows * kv_heads, length, processors)


def parts_for(programs: int, length: int, processors: int) -> int:
    """`row_parts` where whole rows would be so many programs."""
    if _IDLE * programs > processors:
        return 1
    parts = min(_PROGRAMS * processors // programs, length // _LEAST_RUN, _MOST_PARTS)
    return parts if parts >= _LEAST_PARTS else 1


def attend_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotary: tuple[Tensor, Tensor] | None,
    cache: tuple[Tensor, Tensor],
    positions: Tensor,
    scale: float,
    window: int | None,
    parts: int = 1,
    shared: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Writes row r's key and value to slot r at `positions[r]`; returns what its queries find in
    the slot up to there. With `rotary`, queries and key are rotated first. Shapes are those of
    `rotate_and_store`. `parts` programs at most share a row. `shared` says for each row which slot
    has the same keys and values for its first tokens, and for how many: they are read there."""
    rows, heads, dim = q.shape
    q, k, v = _dense(q), _dense(k), _dense(v)
    cos, sin = (q, q) if rotary is None else rotary
    keys, values = cache
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    out = q.new_empty(rows, heads, dim)
    # Few programs want long strides through their slots; many hide each other's waiting.
    block = 64 if rows * kv_heads > 128 or dim > 128 else 128
    if parts > 1:
        block = _SHARED_BLOCK
    # Several blocks of keys and values lie in shared memory at a time.
    block = min(block, _BLOCK_BYTES // (2 * dim * q.element_size()))
    # Each part is a run of whole blocks. A window has fewer of them; it may begin within a block.
    length = keys.shape[2]
    run = triton.cdiv(triton.cdiv(length, parts), block) * block
    parts = triton.cdiv(min(length, window + block) if window else length, run)
    sources, lengths = positions.new_zeros(2, rows) if shared is None else shared
    results, peaks, totals = out, positions, positions
    if parts > 1:
        results = q.new_empty(rows, heads, parts, dim, dtype=torch.float32)
        peaks, totals = results.new_empty(2, rows, heads, parts)
    early = launch_options(q.device)
    _attend_kernel[(rows, kv_heads, parts)](
        q, k, v, cos, sin, keys, values, positions, sources, lengths, results, peaks, totals,
        q.stride(0), k.stride(0), v.stride(0), keys.stride(0), keys.stride(1), kv_heads, scale,
        window or 0, run, ROTARY=rotary is not None,
        GROUP=group, PADDED=max(16, triton.next_power_of_2(group)), DIM=dim, BLOCK=block,
        PARTS=parts, PRECISION="ieee" if q.dtype == torch.float32 else "tf32", num_warps=4,
        num_stages=3, **early,
    )  # fmt: skip
    if parts > 1:
        _merge_kernel[(rows, heads)](
            results, peaks, totals, positions, out, heads, window or 0, run, DIM=dim, BLOCK=block,
            PARTS=parts, PADDED=triton.next_power_of_2(parts), num_warps=4, **early,
        )  # fmt: skip
    return out


@triton.jit
def _rotary_kernel(frequencies, positions, cos, sin, scaling, half, HALF: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, HALF)
    inside = at < half
    angle = tl.load(positions + row).to(tl.float32) * tl.load(frequencies + at, mask=inside)
    cosines = (tl.cos(angle) * scaling).to(cos.dtype.element_ty)
    sines = (tl.sin(angle) * scaling).to(sin.dtype.element_ty)
    place = row * 2 * half + at
    tl.store(cos + place, cosines, mask=inside)
    tl.store(cos + place + half, cosines, mask=inside)
    tl.store(sin + place, sines, mask=inside)
    tl.store(sin + place + half, sines, mask=inside)


def rotary_tables(
    frequencies: Tensor, positions: Tensor, scaling: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """cos and sin [rows, dim] of positions [rows] times frequencies [dim / 2], in halves alike."""
    half = frequencies.shape[0]
    cos = torch.empty(len(positions), 2 * half, dtype=dtype, device=positions.device)
    sin = torch.empty_like(cos)
    _rotary_kernel[(len(positions),)](
        frequencies, positions, cos, sin, scaling, half, HALF=triton.next_power_of_2(half),
        num_warps=1,
    )  # fmt: skip
    return cos, sin


def _dense(x: Tensor) -> Tensor:
    """x [rows, heads, dim], copied unless each row lies in one piece."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
