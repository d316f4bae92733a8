"""Movers: pages are in their slots once they were waited for, and no method sees what has not arrived."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lce.attention import Attention
from lce.cache.kv import KVCache, Whole
from lce.cache.layout import Budgets, CacheLayout, Reach
from lce.cache.movers import Cuda, Mover, Pinned
from lce.methods import Driver, Method, Rope, RopeConfig, make
from tests.late import ORDERS, Late, LateDevice, no_gpu
from tests.running import cut, vectors

CPU = torch.device("cpu")
CUDA = torch.cuda.is_available()


def check_mover(mover: Mover, device: torch.device) -> None:
    """Slots are filled in any order and again, and picked in any order; the others stay as they are."""
    k, v = (mover.empty((5, 2, 4, 3), torch.float32) for _ in range(2))
    assert k.shape == v.shape == (5, 2, 4, 3)
    assert k.device.type == device.type
    k.zero_()
    v.zero_()
    new = torch.randn(3, 2, 4, 3)
    for slots, pages in (([4, 0, 2], [0, 1, 2]), ([2, 4], [0, 2])):
        mover.put((k, v), np.array(slots), (new[pages], -new[pages].to(device)))
    mover.wait(np.array([0, 2, 4]))
    mover.wait(np.array([0, 2, 4]))
    found_k, found_v = (mover.pick(x, np.array([2, 0, 4])) for x in (k, v))
    assert torch.equal(found_k.cpu(), new[[0, 1, 2]])
    assert torch.equal(found_v.cpu(), -new[[0, 1, 2]])
    assert not k[[1, 3]].any()
    found_k.zero_()
    assert torch.equal(k[2].cpu(), new[0]), "what is picked is a copy"
    assert mover.pick(k, np.zeros(0, np.int64)).shape == (0, 2, 4, 3)


def test_plain_memory() -> None:
    check_mover(Mover(), CPU)
    assert not Mover.asynchronous


@pytest.mark.parametrize("order", ORDERS)
def test_a_device_whose_copies_are_late(order: str) -> None:
    """The stand-in for a GPU is late indeed, and has everything that was waited for."""
    mover = Late(order)
    k, v = (mover.empty((2, 1, 1, 1), torch.float32) for _ in range(2))
    mover.put((k, v), np.array([1]), (torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1)))
    assert k.isnan().all()
    mover.wait(np.array([1]))
    assert k.flatten().tolist()[1] == v.flatten().tolist()[1] == 1


@pytest.mark.cuda
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_memory_of_a_gpu() -> None:
    check_mover(Cuda(torch.device("cuda")), torch.device("cuda"))
    check_mover(Pinned(), CPU)
    pinned = Pinned().empty((5, 2, 4, 3), torch.float32)
    assert pinned.is_pinned()
    assert Pinned().pick(pinned, np.array([3, 1])).is_pinned()
    assert Cuda.asynchronous


# Whole methods over a device whose copies are late.

WINDOW = 32
METHODS: dict[str, tuple[str, dict[str, object]]] = {
    "longheads": ("longheads", {"chunk_size": 4, "chunks": 6}),
    "longheads, heads together": ("longheads", {"chunk_size": 8, "chunks": 4, "share": "layer"}),
    "quest": ("quest", {"page": 4, "dense_layers": 1}),
    "esa": ("esa", {"sinks": 4, "local": 10, "top_k": 24, "eps": 2, "compress": "none"}),
    "infllm": ("infllm", {"block_size": 4, "sinks": 4, "local": 10, "top_k": 6, "repr_tokens": 2}),
    "full": ("full", {}),
    "dca": ("dca", {"chunk_size": 20}),
}


def layout_for(method: Method, text: tuple[Tensor, ...], block: int) -> CacheLayout:
    """Of several layers; chunks of four tokens where the method does not say, and texts read 24 tokens at a time."""
    n_layers, n_heads, _, dim = text[0].shape
    reach = method.reach
    if reach.chunk_size == Reach().chunk_size:
        reach = replace(reach, chunk_size=4)
    return CacheLayout(
        n_layers, n_heads, text[1].shape[1], dim, torch.float32, CPU, reach, block=block, make_state=method.state,
        read_size=24,
    )  # fmt: skip


def beside_a_gpu(layout: CacheLayout, folder: Path, below: int | None, spare: int) -> LateDevice:
    """`spare` pages of four tokens more than the least on the device, `below` pages in memory, the rest in a file."""
    budgets = Budgets(
        layout.least_budget + spare * 4 * layout.row_bytes, None if below is None else below * layout.page_bytes, folder
    )
    values = {field.name: getattr(layout, field.name) for field in fields(layout)}
    return LateDevice(**{**values, "budgets": budgets})


def read_text(
    method: Method, text: tuple[Tensor, ...], blocks: list[int], layout: CacheLayout, prefetch: bool = True
) -> tuple[Tensor, KVCache]:
    """The method's outputs `[layers, H, N, D]` for a text of several layers, read as the engine does; and its cache."""
    n_layers, _, n, dim = text[0].shape
    cache = KVCache.empty(layout)
    if not prefetch:
        cache.prefetch = lambda layer: None  # type: ignore[method-assign]
    rope = Rope(RopeConfig(), dim, WINDOW, n)
    driver = Driver(method, Attention.choose("torch"), WINDOW, layout.n_kv_heads)
    out, start = torch.empty(text[0].shape), 0
    for size in blocks:
        here = slice(start, start + size)
        found = driver.forward(
            cache, rope, size, lambda attend, here=here: [  # type: ignore[misc]
                attend(layer, *(x[layer][:, here] for x in text)) for layer in range(n_layers)
            ],
        )  # fmt: skip
        out[:, :, here] = torch.stack(found)
        start += size
    return out, cache


def text_of(n_layers: int, n: int, n_decoded: int) -> tuple[Tensor, ...]:
    """`q [layers, H, N, D]`, `k v [layers, G, N, D]`; the last queries ask for much the same, one after another."""
    q, k, v = (torch.stack(x) for x in zip(*(vectors(layer, 4, 2, n, 16) for layer in range(n_layers)), strict=True))
    q[:, :, n - n_decoded :] = 0.2 * q[:, :, n - n_decoded :] + q[:, :, n - n_decoded - 1 : n - n_decoded]
    return q, k, v


BLOCKS = [30, 1, 1, *cut(6 * WINDOW - 47, 37), *cut(15, 1)]


@pytest.mark.parametrize(("name", "knobs"), METHODS.values(), ids=METHODS)
def test_no_method_sees_what_has_not_arrived(
    name: str, knobs: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit as if all were resident: with the fewest slots there may be, and with some to spare."""
    text, method = text_of(3, sum(BLOCKS), 15), make(name, knobs).resolve(WINDOW)
    layout = layout_for(method, text, max(BLOCKS))
    calm, _ = read_text(method, text, BLOCKS, layout)
    for (spare, below), order in zip(((0, 1), (7, 3), (40, None)), ORDERS, strict=True):
        no_gpu(monkeypatch, order)
        out, cache = read_text(method, text, BLOCKS, beside_a_gpu(layout, tmp_path, below, spare))
        assert torch.equal(out, calm), f"{spare} pages to spare"
        assert not isinstance(cache.residency, Whole)
        assert isinstance(cache.residency.tiers.top.mover, Late)
        assert cache.traffic["device"].bytes_in > 0
        assert (cache.traffic["disk"].bytes_in > 0) == (below is not None)


@pytest.mark.parametrize(("called", "spare"), [("longheads", 30), ("infllm", 12), ("esa", 20)])
def test_a_method_finds_more_of_what_was_prefetched(
    called: str, spare: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the device holds what two layers ask for, and not what four do."""
    no_gpu(monkeypatch)
    method, text = make(METHODS[called][0], METHODS[called][1]).resolve(WINDOW), text_of(4, sum(BLOCKS), 15)
    layout = beside_a_gpu(layout_for(method, text, max(BLOCKS)), tmp_path, 50, spare)
    out, cache = read_text(method, text, BLOCKS, layout)
    without, plain = read_text(method, text, BLOCKS, layout, prefetch=False)
    assert torch.equal(out, without)
    assert cache.traffic["device"].early > plain.traffic["device"].early == 0
    assert cache.traffic["device"].hits > plain.traffic["device"].hits * 1.1


@pytest.mark.cuda
@pytest.mark.skipif(not CUDA, reason="no CUDA device")
@pytest.mark.parametrize("below", [0, 3, None])
def test_a_gpu_finds_every_page_again(tmp_path: Path, below: int | None) -> None:
    """Copies on a stream of their own, while the model's stream is busy, are there when they are used."""
    reach = Reach(16, sinks=16, local=16, per_head=True)
    layout = CacheLayout(4, 4, 2, 64, torch.bfloat16, torch.device("cuda"), reach, block=64)
    chunk = layout.token_bytes * layout.chunk_size
    budgets = Budgets(layout.least_budget + chunk, None if below is None else below * chunk, tmp_path)
    layout = replace(layout, budgets=budgets)
    text = torch.randn(4, 2, 1024, 64, dtype=torch.bfloat16, device="cuda")
    cache, busy = KVCache.empty(layout, 1024), torch.randn(2048, 2048, device="cuda")
    for start in [*range(0, 960, 64), *range(960, 1024)]:
        stop = start + (64 if start < 960 else 1)
        for layer in cache.layers:
            keys = text[layer.index]
            cache.prefetch(layer.index + 1)
            busy = (busy @ busy).clamp(-1, 1)
            layer.write(keys[:, start:stop], -keys[:, start:stop])
            chosen = torch.randperm(stop // 16, device="cuda")[:4]
            n_found = 0
            for tiles in layer.tiles(chosen.view(1, 1, -1).expand(4, 1, -1)):
                for chunk_id in chosen.tolist():
                    for head in range(2):
                        if (tile := int(tiles.index[head, chunk_id])) >= 0:
                            n_found += 1
                            assert torch.equal(tiles.k[tile], keys[head, chunk_id * 16 : chunk_id * 16 + 16])
                            assert torch.equal(tiles.v[tile], -tiles.k[tile])
            assert n_found >= 2 * len(chosen)
        cache.commit()
    for layer in cache.layers:
        assert torch.equal(layer.span(0, 1024)[0], text[layer.index])
        index = torch.arange(0, 1024, 3, device="cuda")
        assert torch.equal(layer.tokens(index)[1], -text[layer.index][:, index])
    assert cache.traffic["device"].early > 0
    assert torch.equal(cache.copy().layers[3].span(0, 1024)[0], text[3])
