"""Calls of the Triton kernels' wrappers for `compile_cuda`, one for each kind of launch.

Tensors are uninitialised; only shapes, strides and addresses count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from lce.kernels.product.blocks import BLOCK_TYPES, BlockMatrix
from lce.kernels.runtime.launching import LaneRows

HEAD_SIZES = (16, 64, 80, 96, 128, 256)  # the first is the tests' and the smallest of a block
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Call:
    """A call that launches one or several kernels. `spills` says whether these may spill registers; kernels of a decode
    step in half precision may not.
    """

    name: str
    run: Callable[[], object]
    spills: bool = True


def _lanes(n: int, *shape: int, dtype: torch.dtype) -> LaneRows:
    count = torch.zeros(1, dtype=torch.int64)
    return LaneRows(torch.zeros(n, shape[0], dtype=torch.int64), count, shape, dtype)


def _decode(
    dtype: torch.dtype, dim: int, n_heads: int, n_kv_heads: int, n_choosers: int, most: int = 256, n_lanes: int = 0
) -> None:
    from lce.kernels.routed.decoding_triton import attend_runs

    n, shape = n_lanes or 1, (n_kv_heads, 4096, dim)
    k = _lanes(n, *shape, dtype=dtype) if n_lanes else torch.empty(shape, dtype=dtype)
    first, turn = torch.zeros(n_choosers, n, 16, dtype=torch.int64), torch.zeros(16, dtype=torch.int64)
    cos = torch.empty(n, 16, dim // 2, dtype=dtype)
    attend_runs(torch.empty(n_heads, n, dim, dtype=dtype), k, k, first, first, turn, cos, cos, most)


def _dense(
    dtype: torch.dtype, dim: int, rep: int, n_queries: int, n_keys: int, window: int | None = None, turned: bool = True,
    causal: bool = True,
) -> None:  # fmt: skip
    from lce.kernels.dense.attention_triton import dense_attention

    k, cos = torch.empty(4, n_keys, dim, dtype=dtype), torch.empty(n_queries, dim // 2, dtype=dtype)
    turn = (cos, cos) if turned else ()
    dense_attention(torch.empty(4 * rep, n_queries, dim, dtype=dtype), k, k, causal, window, *turn)


def _chosen(dtype: torch.dtype, dim: int, n_queries: int, size: int, per_slot: bool = True) -> None:
    from lce.kernels.routed.chosen_triton import chosen_attention

    q, k = torch.empty(8, n_queries, dim, dtype=dtype), torch.empty(64, size, dim, dtype=dtype)
    cos, ids = torch.empty(64, dim // 2, dtype=dtype), torch.zeros(8, n_queries, 32, dtype=torch.int64)
    rows, index = ids[0] if per_slot else ids[0, :, :1], torch.zeros(4, 16, dtype=torch.int64)
    chosen_attention(q, (cos, cos), rows, ids, [(k, k, index)])


def _combine(dtype: torch.dtype, n_parts: int) -> None:
    from lce.kernels.merge.merging_triton import combined

    combined([(torch.empty(4, 32, 128, dtype=dtype), torch.empty(4, 32)) for _ in range(n_parts)])


def _merge_slots(dtype: torch.dtype, n_slots: int) -> None:
    from lce.kernels.merge.merging_triton import merge_pieces

    out, lse = torch.empty(4, 32, n_slots, 128, dtype=dtype), torch.empty(4, 32, n_slots)
    merge_pieces(out.movedim(2, 0), lse.movedim(2, 0), dtype)


def _attention() -> Iterator[Call]:
    for (name, dtype), dim in ((x, d) for x in DTYPES.items() for d in HEAD_SIZES):
        at, spills = f"{name} {dim}", dtype is torch.float32
        yield Call(f"decode one row {at}", partial(_decode, dtype, dim, 8, 8, 8), spills)
        yield Call(f"decode 4 rows {at}", partial(_decode, dtype, dim, 32, 8, 8), spills)
        yield Call(f"decode one row of lanes {at}", partial(_decode, dtype, dim, 8, 8, 8, n_lanes=8), spills)
        yield Call(f"decode 4 rows of lanes {at}", partial(_decode, dtype, dim, 32, 8, 8, n_lanes=8), spills)
        yield Call(f"decode short runs {at}", partial(_decode, dtype, dim, 32, 8, 8, 8), spills)
        yield Call(f"dense one query {at}", partial(_dense, dtype, dim, 1, 1, 8192), spills)
        yield Call(f"dense block {at}", partial(_dense, dtype, dim, 1, 1024, 8192))
        yield Call(f"dense block window {at}", partial(_dense, dtype, dim, 4, 1024, 8192, 4096))
        yield Call(f"dense few {at}", partial(_dense, dtype, dim, 1, 40, 8192, None, False))
        yield Call(f"dense unmasked {at}", partial(_dense, dtype, dim, 1, 256, 256, None, False, False))
        for size in (32, 256):
            yield Call(f"chosen block of {size} {at}", partial(_chosen, dtype, dim, 1024, size), True)
            yield Call(f"chosen one query of {size} {at}", partial(_chosen, dtype, dim, 1, size), True)
        for size in (8, 32, 128):
            own = partial(_chosen, dtype, dim, 1024, size, False)
            yield Call(f"chosen of {size} at one turn {at}", own, spills or size < 64)
    for name, dtype in DTYPES.items():
        spills = dtype is torch.float32
        yield Call(f"decode 64 rows {name} 128", partial(_decode, dtype, 128, 64, 1, 1), spills)
        yield Call(f"decode 7 rows {name} 128", partial(_decode, dtype, 128, 28, 4, 1, 4096), spills)
        yield Call(f"merge slots {name}", partial(_merge_slots, dtype, 15), False)
        yield Call(f"merge many slots {name}", partial(_merge_slots, dtype, 100), False)
        for n_parts in (2, 3, 4):
            yield Call(f"combine {n_parts} {name}", partial(_combine, dtype, n_parts), False)


def _product(dtype: torch.dtype, n: int, size: int, rows: int, all_at_once: bool = False) -> None:
    from lce.kernels.product.products_triton import product

    x, w = torch.empty(n, size, dtype=dtype), torch.empty(rows, size, dtype=dtype)
    if not all_at_once:
        product(x, w, onto=torch.empty(n, rows, dtype=dtype))
        return
    product(x, w, torch.empty(rows, dtype=dtype), norm=torch.empty(size, dtype=dtype), eps=1e-5, gated=True)


def _blocks(dtype: torch.dtype, kind: str, n: int, size: int, rows: int, all_at_once: bool = False) -> None:
    parts = BLOCK_TYPES[kind].parts(rows, size).items()
    matrix = BlockMatrix(BLOCK_TYPES[kind], (rows, size), {x: torch.empty(*s, dtype=d) for x, (s, d) in parts})
    x, norm = torch.empty(n, size, dtype=dtype), torch.empty(size, dtype=dtype)
    if all_at_once:
        matrix.product(x, torch.empty(rows, dtype=dtype), norm=norm, eps=1e-5, gated=True)
        return
    matrix.product(x, onto=torch.empty(n, rows, dtype=dtype))
    matrix.unpacked(0, x)
    matrix.rows(torch.zeros(n, dtype=torch.int64), dtype)


def _logits(dtype: torch.dtype, n: int, size: int, rows: int) -> None:
    from lce.kernels.product.products_triton import product

    x, w, norm = (torch.empty(*shape, dtype=dtype) for shape in ((n, size), (rows, size), (size,)))
    product(x, w, norm=norm, eps=1e-5, out_dtype=torch.float32)


def _layer(dtype: torch.dtype, dim: int, n: int) -> None:
    """Run a layer's work on `n` tokens besides products and attention."""
    from lce.kernels.elementwise import elementwise_triton as elementwise

    q, k = torch.empty(8, n, dim, dtype=dtype), torch.empty(2, n, dim, dtype=dtype)
    weight, cos, at = torch.empty(dim, dtype=dtype), torch.empty(n, dim // 2, dtype=dtype), torch.zeros(1).long()
    elementwise.rms_norms(1e-5, (torch.empty(n, 4096, dtype=dtype), torch.empty(4096, dtype=dtype)))
    elementwise.rms_norms(1e-5, (q, weight), (k, weight))
    elementwise.silu_mul(torch.empty(n, 28_672, dtype=dtype))
    elementwise.rotate(q, cos, cos)
    buffer = torch.empty(2, 4096, dim, dtype=dtype)
    rows, own = _lanes(n, 2, 4096, dim, dtype=dtype), torch.zeros(n).long()
    for into, place in ((buffer, 0), (buffer, at), (rows, own)):
        elementwise.append(k, k, into, into, place, cos, cos)
        elementwise.append(k, k, into, into, place, None, None)
    for first in (None, own):
        elementwise.take_lanes(rows, first, 32)
    elementwise.take_rows(buffer, buffer, torch.zeros(64, dtype=torch.int64))


def _turns(dtype: torch.dtype, n: int, scale: float) -> None:
    from lce.kernels.elementwise import elementwise_triton as elementwise

    elementwise.turns(torch.zeros(n, dtype=torch.int64), torch.empty(64, dtype=torch.float64), scale, dtype)


def _choice(dtype: torch.dtype, dim: int, n_chunks: int, choosers: int, bounds: bool = False) -> None:
    from lce.kernels.choose import choices_triton as choices

    shape = (8, n_chunks, 2, dim) if bounds else (32, n_chunks, dim)
    for n, kept in ((1, torch.empty(shape, dtype=dtype)), (8, _lanes(8, *shape, dtype=dtype))):
        q, at = torch.empty(32, n, dim, dtype=dtype), torch.zeros(n).long()
        choices.best_runs(q, kept, at, 256, 15, choosers=choosers, n_first=1, n_last=1, own=True)
        choices.best_runs(q, kept, at, 256, 15, choosers=choosers, least=True)
        for position in (at, None):
            choices.runs_of_chunks(torch.zeros(choosers, n, 15, dtype=torch.int64), 256, position)


def _choices_of_a_block(dtype: torch.dtype, n_chunks: int) -> None:
    from lce.kernels.choose import choices_triton as choices

    scores, forced = torch.empty(8, 4, n_chunks, dtype=dtype), torch.zeros(4, n_chunks, dtype=torch.bool)
    choices.best_chunks(scores, forced, 15, 4096, 256)
    choices.scores_of_few(torch.empty(8, 4, 128, dtype=dtype), torch.empty(8, n_chunks, 128, dtype=dtype))


def _best(dtype: torch.dtype, n_scores: int) -> None:
    from lce.kernels.choose.best_triton import best_tokens

    best_tokens(torch.empty(n_scores, dtype=dtype), 4)


def _pages() -> None:
    from lce.kernels.rows.pages_triton import gather_pages

    gather_pages(torch.empty(64, 32, 2, 8, 128, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int64))


def _rest() -> Iterator[Call]:
    for n_scores in (1024, 4096, 16_384, 32_768, 131_072):
        yield Call(f"best of {n_scores}", partial(_best, torch.float32, n_scores), False)
    yield Call("pages", _pages)
    for name, dtype in DTYPES.items():
        for n in range(1, 5):
            for size, rows in ((4096, 6144), (14_336, 4096), (2048, 2048), (896, 1152)):
                at = f"{n} x {size} x {rows} {name}"
                yield Call(f"product {at}", partial(_product, dtype, n, size, rows), False)
                yield Call(f"product gated {at}", partial(_product, dtype, n, size, 2 * rows, True), False)
            yield Call(f"product logits {n} {name}", partial(_logits, dtype, n, 4096, 32_000), False)
            for kind in BLOCK_TYPES:
                if n in (1, 4) or kind in ("Q4_K", "Q6_K"):
                    at = f"{n} {kind} {name}"
                    yield Call(f"blocks {at}", partial(_blocks, dtype, kind, n, 4096, 4096), False)
                    yield Call(f"blocks gated {at}", partial(_blocks, dtype, kind, n, 4096, 22_016, True), False)
        for n, scale in ((1, 1.0), (256, 1.25)):  # the processor reduces large angles in memory
            yield Call(f"turns {n} {name}", partial(_turns, dtype, n, scale))
        for dim in HEAD_SIZES:
            yield Call(f"layer one token {name} {dim}", partial(_layer, dtype, dim, 1), False)
            yield Call(f"layer block {name} {dim}", partial(_layer, dtype, dim, 500), False)
            for choosers in (32, 8, 1):
                yield Call(f"choice {choosers} {name} {dim}", partial(_choice, dtype, dim, 512, choosers), False)
            yield Call(f"choice bounds {name} {dim}", partial(_choice, dtype, dim, 8192, 32, True), False)
        for n_chunks in (128, 1024, 1 << 14):
            yield Call(f"choices {n_chunks} {name}", partial(_choices_of_a_block, dtype, n_chunks), n_chunks > 1024)


CALLS: tuple[Call, ...] = (*_attention(), *_rest())
