"""Norms, projections, and the gate between them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ludic.inference.local.gpu.kernels.adapters import low_rank, plus_low_rank, up_tile_of
from ludic.inference.local.gpu.kernels.early import (
    call_up,
    launch_options,
    let_next_begin,
    wait_for_others,
)
from ludic.plumbing.llama_layers import Adapter

MAX_PROJECT_ROWS = 256
"""Above this a matrix product is bound by arithmetic, and the vendor's kernels are better."""

_FEW_ELEMENTS = 5 << 20
"""Weights of more elements than this are read faster by the vendor's kernels than by ours."""

_MANY_ELEMENTS = 16 << 20
"""Weights of more elements than this do not fit into the L2 cache beside what else is there."""


class Tiles(NamedTuple):
    """How a product is cut: rows and columns of a program, its step along the sum, into how many
    parts the sum is split. A program takes `more` columns in a second tile, since a tile's columns
    are a power of two: so there can be as many programs as processors."""

    rows: int
    columns: int
    step: int
    warps: int = 4
    stages: int = 4
    parts: int = 1
    more: int = 0


MEASURED: dict[tuple[str, int, int, int], Tiles] = {
    ("gated", 32, 1536, 8960): Tiles(32, 64, 64),
    ("gated", 128, 1536, 8960): Tiles(128, 128, 64, 8, 4),
    ("gated", 128, 3584, 18944): Tiles(128, 128, 64, 8, 4, more=16),
}
"""The best of those that were tried, by product, rows, inner size and width; rules cut the rest."""


@triton.jit
def _project_kernel(
    x, w0, w1, w2, b0, b1, b2, low, up0, up1, up2, out,
    rows, inner, tiles0, tiles1, width, rank,
    BIAS: tl.constexpr, RANK: tl.constexpr, BESIDE: tl.constexpr, EARLY: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    tile, first_row = tl.program_id(0), tl.program_id(1) * M
    w, b, up, place, which = w0, b0, up0, tile, 0
    if tile >= tiles0 + tiles1:
        w, b, up, place, which = w2, b2, up2, tile - tiles0 - tiles1, 2
    elif tile >= tiles0:
        w, b, up, place, which = w1, b1, up1, tile - tiles0, 1
    row, col, at_k = first_row + tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    total = tl.zeros((M, N), dtype=tl.float32)
    if BIAS:
        # Before the loop: added after it, it takes 2 µs more.
        total += tl.load(b + place * N + col).to(tl.float32)[None, :]
    if RANK > 0:
        up_tile = up_tile_of(up, place * N + col, rank, RANK)
    w_at = w + (place * N + col)[None, :] * inner + at_k[:, None]
    if not BESIDE:
        wait_for_others(EARLY)
    if EARLY:
        for k in range(0, inner, K):
            total = tl.dot(x.load([first_row, k]), tl.load(w_at), total)
            w_at += K
    else:
        x_at = x + row[:, None] * inner + at_k[None, :]
        for _ in range(0, inner, K):
            a = tl.load(x_at, mask=row[:, None] < rows, other=0.0)
            total = tl.dot(a, tl.load(w_at), total)
            x_at += K
            w_at += K
    if BESIDE:
        wait_for_others(EARLY)
    if RANK > 0:
        total = plus_low_rank(total, low, up_tile, row, rows, which, RANK)
    let_next_begin(EARLY)
    at = out + row[:, None] * width + (tile * N + col)[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=row[:, None] < rows)


def project(
    x: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    biases: tuple[Tensor | None, ...],
    adapters: tuple[Adapter, ...] = (),
) -> Tensor:
    """[x @ w0.T + b0 | x @ w1.T + b1 | x @ w2.T + b2], side by side: [rows, n0 + n1 + n2].

    With `adapters`, three of one rank, the weights are those with the adapters added to them.
    """
    rows, inner = x.shape
    counts = [w.shape[0] for w in weights]
    added = low_rank(x, adapters, weights)
    out = x.new_empty(rows, sum(counts))
    options = launch_options(x.device)
    tiles = project_tiles(rows, inner, counts) if options["EARLY"] else _plain_tiles(rows)
    given: Any = x
    if options["EARLY"]:
        (given,) = _described((x, tiles.rows), step=tiles.step)
    places = [n // tiles.columns for n in counts]
    some = [w if b is None else b for w, b in zip(weights, biases, strict=True)]
    _project_kernel[(sum(places), triton.cdiv(rows, tiles.rows))](
        given, *weights, *some, added.low, *added.ups, out,
        rows, inner, places[0], places[1], out.shape[1], added.rank,
        BIAS=biases[0] is not None, RANK=added.padded_rank, BESIDE=added.beside,
        M=tiles.rows, N=tiles.columns, K=tiles.step,
        num_warps=tiles.warps, num_stages=tiles.stages, **options,
    )  # fmt: skip
    return out


@triton.jit
def _store_gated(
    gates, ups, low, gate_up, up_up, out, row, rows, first_col, width, rank,
    RANK: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    col = first_col + tl.arange(0, N)
    if RANK > 0:
        inside = tl.minimum(col, width - 1)
        up_tile = up_tile_of(gate_up, inside, rank, RANK)
        gates = plus_low_rank(gates, low, up_tile, row, rows, 0, RANK)
        up_tile = up_tile_of(up_up, inside, rank, RANK)
        ups = plus_low_rank(ups, low, up_tile, row, rows, 1, RANK)
    result = gates * tl.sigmoid(gates) * ups
    at = out + row[:, None] * width + col[None, :]
    mask = (row[:, None] < rows) & (col[None, :] < width)
    tl.store(at, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gated_kernel(
    x, gate, up, gate_2, up_2, low, gate_up, up_up, out,
    rows, inner, width, rank,
    RANK: tl.constexpr, BESIDE: tl.constexpr, EARLY: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, MORE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    first_col, first_row = tl.program_id(0) * (N + MORE), tl.program_id(1) * M
    row = first_row + tl.arange(0, M)
    gates = tl.zeros((M, N), dtype=tl.float32)
    ups = tl.zeros((M, N), dtype=tl.float32)
    let_next_begin(EARLY)
    if EARLY and RANK > 0 and tl.program_id(1) == 0:
        size = tl.minimum(N + MORE, width - first_col) * rank * 2
        call_up(gate_up + first_col * rank, size, EARLY)
        call_up(up_up + first_col * rank, size, EARLY)
    if not BESIDE:
        wait_for_others(EARLY)
    if MORE > 0:
        gates_2 = tl.zeros((M, MORE), dtype=tl.float32)
        ups_2 = tl.zeros((M, MORE), dtype=tl.float32)
        for k in range(0, inner, K):
            a = x.load([first_row, k])
            gates = tl.dot(a, gate.load([first_col, k]).T, gates)
            ups = tl.dot(a, up.load([first_col, k]).T, ups)
            gates_2 = tl.dot(a, gate_2.load([first_col + N, k]).T, gates_2)
            ups_2 = tl.dot(a, up_2.load([first_col + N, k]).T, ups_2)
    elif EARLY:
        for k in range(0, inner, K):
            a = x.load([first_row, k])
            gates = tl.dot(a, gate.load([first_col, k]).T, gates)
            ups = tl.dot(a, up.load([first_col, k]).T, ups)
    else:
        at_k = tl.arange(0, K)
        x_at = x + row[:, None] * inner + at_k[None, :]
        offsets = (first_col + tl.arange(0, N))[None, :] * inner + at_k[:, None]
        for _ in range(0, inner, K):
            a = tl.load(x_at, mask=row[:, None] < rows, other=0.0)
            gates = tl.dot(a, tl.load(gate + offsets), gates)
            ups = tl.dot(a, tl.load(up + offsets), ups)
            x_at += K
            offsets += K
    if BESIDE:
        wait_for_others(EARLY)
    _store_gated(
        gates, ups, low, gate_up, up_up, out, row, rows, first_col, width, rank, RANK, N
    )  # fmt: skip
    if MORE > 0:
        _store_gated(
            gates_2, ups_2, low, gate_up, up_up, out, row, rows, first_col + N, width, rank,
            RANK, MORE,
        )  # fmt: skip


def gated(x: Tensor, gate: Tensor, up: Tensor, adapters: tuple[Adapter, ...] = ()) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T), with `adapters`, two of one rank, added to the weights."""
    rows, inner = x.shape
    width = gate.shape[0]
    added = low_rank(x, adapters, (gate, up))
    out = x.new_empty(rows, width)
    options = launch_options(x.device)
    tiles = _plain_tiles(rows)
    if options["EARLY"]:
        tiles = gated_tiles(rows, inner, width, adapted=bool(adapters))
    given: tuple[Any, ...] = (x, gate, up, gate, up)
    if options["EARLY"]:
        cuts = [(w, n) for n in (tiles.columns, tiles.more or tiles.columns) for w in (gate, up)]
        given = _described((x, tiles.rows), *cuts, step=tiles.step)
    programs = triton.cdiv(width, tiles.columns + tiles.more), triton.cdiv(rows, tiles.rows)
    _gated_kernel[programs](
        *given, added.low, *added.ups, out, rows, inner, width, added.rank,
        RANK=added.padded_rank, BESIDE=added.beside,
        M=tiles.rows, N=tiles.columns, MORE=tiles.more, K=tiles.step,
        num_warps=tiles.warps, num_stages=tiles.stages, **options,
    )  # fmt: skip
    return out


def _described(*tiles: tuple[Tensor, int], step: int) -> tuple[Any, ...]:
    """Descriptors of matrices read in tiles of so many rows by `step`, for the hardware that copies
    whole tiles; what lies outside of a matrix reads as zero."""
    # A Triton without early launches may be without these.
    from triton.tools.tensor_descriptor import TensorDescriptor

    return tuple(TensorDescriptor.from_tensor(matrix, [rows, step]) for matrix, rows in tiles)


@triton.jit
def _split_product_kernel(
    y, w, weight, low, up, parts, rows, inner, share, width, rank,
    RANK: tl.constexpr, CALL_UP: tl.constexpr, BESIDE: tl.constexpr, EARLY: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    first_col, first_row, split = tl.program_id(0) * N, tl.program_id(1) * M, tl.program_id(2)
    begin = split * share
    end = tl.minimum(begin + share, inner)
    let_next_begin(EARLY)
    if EARLY and tl.program_id(1) == 0:
        if CALL_UP:
            for n in range(N):
                call_up(weight + (first_col + n) * inner + begin, (end - begin) * 2, EARLY)
        if RANK > 0:
            columns = tl.minimum(N, width - first_col)
            call_up(up + first_col * rank, columns * rank * 2, EARLY)
    if not BESIDE:
        wait_for_others(EARLY)
    total = tl.zeros((M, N), dtype=tl.float32)
    for k in range(begin, end, K):
        total = tl.dot(y.load([first_row, k]), w.load([first_col, k]).T, total)
    row, col = first_row + tl.arange(0, M), first_col + tl.arange(0, N)
    if BESIDE:
        wait_for_others(EARLY)
    if RANK > 0:
        # Each part of the sum has its own part of what the adapter adds.
        up_tile = up_tile_of(up, col, rank, RANK)
        total = plus_low_rank(total, low, up_tile, row, rows, split, RANK)
    at = row[:, None] * width + col[None, :]
    tl.store(parts + split * rows * width + at, total, mask=row[:, None] < rows)


def split_product(y: Tensor, weight: Tensor, adapters: tuple[Adapter, ...] = ()) -> Tensor:
    """Float32 parts [n, rows, width] whose sum is y @ weight.T, for `rms_norm` to add up. An
    adapter, the only one of `adapters`, is added to the weight.

    Each is a shorter sum, and nobody waits for the others: sums that the last program to arrive
    adds up take 1 µs more.
    """
    rows, inner = y.shape
    width = weight.shape[0]
    tiles = split_tiles(rows, inner, width)
    share = triton.cdiv(triton.cdiv(inner, tiles.step), tiles.parts) * tiles.step
    count = triton.cdiv(inner, share)
    added = low_rank(y, adapters, (weight,), share)
    parts = torch.empty(count, rows, width, dtype=torch.float32, device=y.device)
    given = _described((y, tiles.rows), (weight, tiles.columns), step=tiles.step)
    _split_product_kernel[(width // tiles.columns, triton.cdiv(rows, tiles.rows), count)](
        *given, weight, added.low, *added.ups, parts, rows, inner, share, width, added.rank,
        RANK=added.padded_rank, CALL_UP=weight.numel() <= _MANY_ELEMENTS, BESIDE=added.beside,
        M=tiles.rows, N=tiles.columns, K=tiles.step,
        num_warps=tiles.warps, num_stages=tiles.stages, **launch_options(y.device),
    )  # fmt: skip
    return parts


def split_pays(rows: int, weight: Tensor, *, adapted: bool) -> bool:
    """Whether `split_product` is quicker than the vendor's kernel, which ends the chain of early
    launches and leaves an adapter to two more."""
    width, inner = weight.shape
    most = _MANY_ELEMENTS if adapted else _FEW_ELEMENTS
    measured = ("split", rows, inner, width) in MEASURED
    return weight.numel() <= most or measured or (adapted and 64 < rows <= 128)


def _plain_tiles(rows: int) -> Tiles:
    """For matrices that are no descriptors."""
    return Tiles(min(32, _row_tile(rows)), 32, 64)


def project_tiles(rows: int, inner: int, counts: list[int]) -> Tiles:
    """For `project`."""
    if measured := MEASURED.get(("project", rows, inner, sum(counts))):
        return measured
    step = 128 if inner % 128 == 0 else 64
    if sum(counts) >= 4096 and rows > 32 and all(n % 64 == 0 for n in counts):
        # More than one wave of programs: large tiles read the rows less often.
        return Tiles(128, 64, step, 8) if rows > 64 else Tiles(64, 64, 64, stages=6)
    return Tiles(_row_tile(rows), 32, step)


def gated_tiles(rows: int, inner: int, width: int, *, adapted: bool = False) -> Tiles:
    """For `gated`."""
    measured = MEASURED.get(("gated", rows, inner, width))
    # A second tile leaves no memory for the adapters' first product beside this one.
    if measured and not (adapted and measured.more):
        return measured
    if rows <= 16 and inner % 128 == 0 and not adapted:
        return Tiles(16, 32, 128, stages=3)
    if rows <= 64:  # 32 rows by tiles of 32 take a fifth more: each warp reads all weights
        return Tiles(16 if rows <= 16 else 64, 32, 64)
    if width % 64 == 0 and (width >= 16384 or width <= 6144 or rows > 128):
        return Tiles(128, 64, 64, stages=6)
    return Tiles(128, 32, 64)


def split_tiles(rows: int, inner: int, width: int) -> Tiles:
    """For `split_product`."""
    if measured := MEASURED.get(("split", rows, inner, width)):
        return measured
    columns = 64 if width % 64 == 0 and rows > 64 else 32
    if columns == 64 and inner * width > _MANY_ELEMENTS and width % 128 == 0:
        return Tiles(128, 128, 64, 8, 6, parts=4)
    if columns == 64 and inner * width > _FEW_ELEMENTS:
        return Tiles(128, 64, 128, parts=4)
    programs = width // columns * triton.cdiv(rows, _row_tile(rows))
    parts = 1 if programs > 80 else 2 if programs > 40 else 4
    return Tiles(_row_tile(rows), columns, 128, parts=parts)


def _row_tile(rows: int) -> int:
    return 16 if rows <= 16 else 32 if rows <= 32 else 64


@triton.jit
def _silu_times_kernel(gates, ups, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(gates + at, mask=inside).to(tl.float32)
    u = tl.load(ups + at, mask=inside).to(tl.float32)
    tl.store(out + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


def silu_times(gates: Tensor, ups: Tensor) -> Tensor:
    """silu(gates) * ups, for tensors of one shape, written over `gates`."""
    size = gates.numel()
    _silu_times_kernel[(triton.cdiv(size, 2048),)](gates, ups, gates, size, BLOCK=2048, num_warps=8)
    return gates


@triton.jit
def _rms_norm_kernel(
    x, parts, weight, out, rows, width, eps,
    PARTS: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    scales = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    let_next_begin(EARLY)
    wait_for_others(EARLY)
    wide = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if PARTS > 0:
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for part in tl.static_range(PARTS):
            total += tl.load(parts + (part * rows + row) * width + at, mask=inside, other=0.0)
        added = (wide + total).to(x.dtype.element_ty)
        tl.store(x + row * width + at, added, mask=inside)
        wide = added.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    tl.store(out + row * width + at, (wide * scale * scales).to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, parts: Tensor | None = None) -> Tensor:
    """x / rms(x) * weight. The sum of `parts` is added to x first, and written there.

    A norm inside the product that follows keeps the product from loading ahead, and takes longer
    than both.
    """
    rows, width = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(rows,)](
        x, x if parts is None else parts, weight, out, rows, width, eps,
        PARTS=0 if parts is None else len(parts), BLOCK=block,
        num_warps=4 if block <= 2048 and parts is None else 8, **launch_options(x.device),
    )  # fmt: skip
    return out
