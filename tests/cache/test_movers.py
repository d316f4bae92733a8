"""Movers: pages are in their slots once they were waited for, and no method sees what has not arrived."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from lce.attention import Attention
from lce.cache.formats import Parts
from lce.cache.kv import KVCache
from lce.cache.layout import AccessPattern, Budgets, CacheLayout
from lce.cache.limits import Limits
from lce.cache.movers import Cuda, Mover, Pinned, Slabs
from lce.cache.tier import Nowhere
from lce.cache.tiers import TierStack
from lce.methods import Driver, Method, Rope, RopeConfig, make
from lce.models.layers import Attend
from tests.late import ORDERS, Late, LateDevice, no_gpu
from tests.pretended import Gpus
from tests.running import cut, rounded, vectors

CPU = torch.device("cpu")


def check_mover(mover: Mover, slabs: Slabs, source: torch.device) -> None:
    """Slots are filled in any order and again, from any memory, and picked in any order; the others stay as they are.

    `slabs` have five slots: see `slabs_of`.
    """
    for x in (x for slab in slabs for x in slab):
        x.zero_()
    new = torch.randn(3, 2, 4, 3)
    for slots, pages in (([4, 0, 2], [0, 1, 2]), ([2, 4], [0, 2])):
        mover.put(slabs, np.array(slots), (new[pages].to(source), -new[pages].to(source)))
    mover.wait(np.array([0, 2, 4]))
    mover.wait(np.array([0, 2, 4]))
    found_k, found_v = mover.pick(slabs, np.array([2, 0, 4]))
    assert found_k.device == slabs[0][0].device
    assert torch.equal(found_k.cpu(), new[[0, 1, 2]])
    assert torch.equal(found_v.cpu(), -new[[0, 1, 2]])
    k = torch.cat([slab[0] for slab in slabs])
    assert not k[[1, 3]].any()
    found_k.zero_()
    assert torch.equal(mover.pick(slabs, np.array([2]))[0].cpu(), new[:1]), "what is picked is a copy"


def slabs_of(mover: Mover, *sizes: int) -> list[Parts]:
    return [tuple(mover.empty((size, 2, 4, 3), torch.float32) for _ in range(2)) for size in sizes]


@pytest.mark.parametrize("sizes", [(5,), (2, 2, 1), (1, 1, 1, 1, 1)])
def test_slots_lie_in_slabs(sizes: tuple[int, ...]) -> None:
    check_mover(Mover(), slabs_of(Mover(), *sizes), CPU)
    for order in ORDERS:
        check_mover(late := Late(order), slabs_of(late, *sizes), CPU)


def test_memory_of_inference_mode_can_be_written_outside_it() -> None:
    with torch.inference_mode():
        slabs = slabs_of(Mover(), 2)
        Mover().put(slabs, np.array([1]), (torch.ones(1, 2, 4, 3), torch.ones(1, 2, 4, 3)))
    Mover().put(slabs, np.array([0]), (torch.zeros(1, 2, 4, 3), torch.ones(1, 2, 4, 3)))
    assert slabs[0][0].mean() == 0.5


def test_several_threads_gather_pages(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lce.cache.movers.PIECE", 1)
    mover = Pinned(torch.device("cuda"))
    slabs = slabs_of(mover, 5, 5)
    pages = torch.arange(10.0)[:, None, None, None].expand(-1, *slabs[0][0].shape[1:]).contiguous()
    mover.put(slabs, np.arange(10), (pages, -pages))
    slots = np.array([7, 2, 3, 9, 0, 4, 8])
    for found, truth in zip(mover.pick(slabs, slots), (pages, -pages), strict=True):
        assert torch.equal(found, truth[torch.from_numpy(slots)])


@pytest.mark.cuda
def test_memory_of_a_gpu() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for mover in (Cuda(device), Pinned(device)):
        for source in (device, CPU):
            check_mover(mover, slabs_of(mover, 5), source)
    for source in (device, CPU):
        check_mover(Pinned(device), slabs_of(Pinned(device), 2, 2, 1), source)
    slabs = slabs_of(Pinned(device), 2, 2)
    assert slabs[1][1].is_pinned()
    assert all(x.is_pinned() for x in Pinned(device).pick(slabs, np.array([3, 1])))
    assert Cuda.asynchronous


# Whole methods over a device whose copies are late.
WINDOW = 32
SLOW = pytest.mark.slow
METHODS: dict[str, tuple[str, dict[str, object]]] = {
    "longheads": ("longheads", {"chunk_size": 4, "chunks": 6, "share": "head"}),
    "longheads, heads together": ("longheads", {"chunk_size": 8, "chunks": 4, "share": "layer"}),
    "quest": ("quest", {"page": 4, "dense_layers": 1}),
    "esa": ("esa", {"sinks": 4, "local": 10, "top_k": 24, "eps": 2, "compress": "none"}),
    "infllm": ("infllm", {"block_size": 4, "sinks": 4, "local": 10, "top_k": 6, "repr_tokens": 2}),
    "full": ("full", {}),
    "dca": ("dca", {"chunk_size": 20}),
}


def layout_for(method: Method, text: tuple[Tensor, ...], block: int) -> CacheLayout:
    n_layers, n_heads, _, dim = text[0].shape
    access = method.access
    if access.chunk_size == AccessPattern().chunk_size:
        access = replace(access, chunk_size=4)
    sizes = (n_layers, n_heads, text[1].shape[1], dim)
    return CacheLayout(*sizes, torch.float32, CPU, access, block=block, make_state=method.state, read_size=24)


def beside_a_gpu(layout: CacheLayout, folder: Path, below: int | None, spare: int) -> LateDevice:
    """`spare` pages of four tokens more than the least on the device, `below` pages in memory, the rest in a file."""
    device = Limits(layout).least_budget + spare * 4 * layout.format.row_bytes
    values = {field.name: getattr(layout, field.name) for field in fields(layout)}
    return LateDevice(**{**values, "budgets": Budgets(device, below and below * layout.page_bytes, folder)})


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

        def layers(attend: Attend, here: slice = slice(start, start + size)) -> list[Tensor]:
            return [attend(layer, *(x[layer][:, here] for x in text)) for layer in range(n_layers)]

        out[:, :, start : start + size] = torch.stack(driver.forward(cache, rope, size, layers))
        start += size
    return out, cache


def text_of(n_layers: int, n: int, n_decoded: int) -> tuple[Tensor, ...]:
    """`q [layers, H, N, D]`, `k v [layers, G, N, D]`; the last queries ask for much the same, one after another."""
    q, k, v = (torch.stack(x) for x in zip(*(vectors(layer, 4, 2, n, 16) for layer in range(n_layers)), strict=True))
    q[:, :, n - n_decoded :] = 0.2 * q[:, :, n - n_decoded :] + q[:, :, n - n_decoded - 1 : n - n_decoded]
    return q, k, v


BLOCKS = [30, 1, 1, *cut(6 * WINDOW - 47, 37), *cut(15, 1)]
FEWER = [30, 1, 1, *cut(4 * WINDOW - 40, 37), *cut(8, 1)]


@pytest.mark.parametrize("called", [pytest.param(x, marks=[SLOW] * (x in ("longheads", "quest"))) for x in METHODS])
def test_no_method_sees_what_has_not_arrived(called: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit as if all were resident: with the fewest slots there may be, and with some to spare."""
    text, method = text_of(3, sum(FEWER), 8), make(*METHODS[called]).resolve(WINDOW)
    layout = layout_for(method, text, max(FEWER))
    calm, _ = read_text(method, text, FEWER, layout)
    for (spare, below), order in zip(((0, 1), (7, 3), (24, None)), ORDERS, strict=True):
        no_gpu(monkeypatch, order)
        out, cache = read_text(method, text, FEWER, beside_a_gpu(layout, tmp_path, below, spare))
        assert torch.equal(out, calm), f"{spare} pages to spare"
        assert cache.stacks
        assert isinstance(cache.stacks[0].top.mover, Late)
        assert cache.traffic["device"].bytes_in > 0
        assert (cache.traffic["disk"].bytes_in > 0) == (below is not None)


@pytest.mark.parametrize(
    ("called", "spare"),
    [pytest.param("longheads", 30, marks=SLOW), ("infllm", 12), pytest.param("esa", 20, marks=SLOW)],
)
def test_more_is_found_if_prefetched(called: str, spare: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device holds what two layers ask for, and not what four do."""
    no_gpu(monkeypatch)
    method, text = make(*METHODS[called]).resolve(WINDOW), text_of(4, sum(BLOCKS), 15)
    layout = beside_a_gpu(layout_for(method, text, max(BLOCKS)), tmp_path, 50, spare)
    out, cache = read_text(method, text, BLOCKS, layout)
    without, plain = read_text(method, text, BLOCKS, layout, prefetch=False)
    assert torch.equal(out, without)
    assert cache.traffic["device"].early > plain.traffic["device"].early == 0
    assert cache.traffic["device"].hits > plain.traffic["device"].hits * 1.1


@pytest.mark.cuda
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_pages_leave_a_gpu_without_a_copy(monkeypatch: pytest.MonkeyPatch, kv_dtype: str) -> None:
    monkeypatch.setattr("lce.cache.pool.SLAB", 1 << 18)
    tiers, text = tiers_on_a_gpu(kv_dtype)
    monkeypatch.delattr("lce.cache.pool.Pool._hand_down")
    device, host = tiers.pools
    assert (host.slots.group >= 0).sum() == 32 * 4 * 2
    assert len(host.slots.slabs) > 1
    assert all(x.is_pinned() for slab in host.slots.slabs for x in slab)
    for _ in range(3):
        for layer in range(4):
            wanted = np.random.default_rng(layer).random((2, 32)) < 0.2
            for tiles in tiers.rounds(layer, wanted):
                for head, chunk in zip(*np.nonzero(wanted), strict=True):
                    if len(wanted[wanted]) <= device.capacity or int(tiles.index[head, chunk]) >= 0:
                        tile = int(tiles.index[head, chunk])
                        assert torch.equal(tiles.k[tile], text[layer, head, chunk * 16 : chunk * 16 + 16])
                        assert torch.equal(tiles.v[tile], -tiles.k[tile])
            tiers.prefetch((layer + 1) % 4)
    assert device.traffic.early > 0
    for layer in range(4):
        assert torch.equal(tiers.chunks(layer, 0, 32)[0], text[layer])


@pytest.mark.cuda
def test_a_gpu_does_not_use_memory_again_that_is_still_written() -> None:
    """A context is dropped while copies into its slots are queued: who gets their memory is not written to."""
    tiers, _ = tiers_on_a_gpu()
    for layer in (0, 1):
        for _ in tiers.rounds(layer, np.ones((2, 32), bool)):
            pass
    torch.cuda.synchronize()
    n_bytes, early = tiers.top.slots.slabs[0][0].nbytes, tiers.top.traffic.early
    assert isinstance(tiers.top.mover, Cuda)
    with torch.cuda.stream(tiers.top.mover.stream):
        torch.cuda._sleep(200_000_000)  # about a tenth of a second
    tiers.prefetch(0)
    tiers.settle()
    assert tiers.top.traffic.early > early
    del tiers
    new = [torch.zeros(n_bytes, dtype=torch.uint8, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    assert not any(bool(x.any()) for x in new)


def tiers_on_a_gpu(kv_dtype: str = "auto") -> tuple[TierStack, Tensor]:
    """Tiers of four layers with 32 chunks of two heads each, of which the device holds few, added while it is busy.

    And the keys, which are the same in 8 bits, `[4, 2, 512, 64]`; values are their negatives.
    """
    access = AccessPattern(16, sinks=16, local=16, per_head=True)
    layout = CacheLayout(4, 4, 2, 64, torch.bfloat16, torch.device("cuda"), access, block=64, kv_dtype=kv_dtype)
    budget = Limits(layout).least_budget + 24 * layout.page_bytes
    tiers = TierStack(replace(layout, budgets=Budgets(budget)), Nowhere())
    text = rounded(torch.randn(8, 512, 64), 16).view(4, 2, 512, 64).bfloat16().cuda()
    busy = torch.randn(2048, 2048, device="cuda")
    for first in range(0, 32, 4):
        for layer in range(4):
            busy = (busy @ busy).clamp(-1, 1)
            keys = text[layer, :, first * 16 : first * 16 + 64] * busy[0, 0].isfinite()  # there once it has computed
            tiers.add(layer, first, keys, -keys)
            del keys
    return tiers, text


@pytest.mark.cuda
@pytest.mark.parametrize("below", [0, 3, None])
def test_a_gpu_finds_every_page_again(tmp_path: Path, below: int | None) -> None:
    access = AccessPattern(16, sinks=16, local=16, per_head=True)
    layout = CacheLayout(4, 4, 2, 64, torch.bfloat16, torch.device("cuda"), access, block=64)
    chunk = layout.token_bytes * layout.chunk_size
    layout = replace(layout, budgets=Budgets(Limits(layout).least_budget + chunk, below and below * chunk, tmp_path))
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
    assert torch.equal(cache.fork().layers[3].span(0, 1024)[0], text[3])


@pytest.mark.parametrize("sizes", [(5,), (2, 2, 1)])
def test_a_gpu_reads_pages_of_the_host_itself(triton_gpus: Gpus, sizes: tuple[int, ...]) -> None:
    """No core gathers them; who fills their slots again waits until they were read, and nobody else waits."""
    host, device = Pinned(torch.device("cuda")), Cuda(torch.device("cuda"))
    held, slabs = ([each[:1] for each in slabs_of(mover, *n)] for mover, n in ((host, sizes), (device, (5,))))
    new, slots = torch.randn(2, 5, 2, 4, 3), np.array([4, 0, 2])
    host.put(held, np.arange(5), (new[0],))
    with triton_gpus.counting() as counts:
        host.wait(slots)
        with device.beside():
            found = host.lend(held, slots)
        assert found is not None
        device.put(slabs, slots, found)
    assert (counts.syncs, counts.at["launches: _gather_pages"]) == (0, 1)
    host.put(held, np.array([4]), (new[1, 1:2].cuda(),))
    host.wait(np.array([4]))
    host.put(held, np.array([2]), (new[1, :1],))
    device.wait(slots)
    assert torch.equal(device.pick(slabs, slots)[0].cpu(), new[0][[4, 0, 2]])
    host.wait(np.arange(5))
    assert torch.equal(host.pick(held, np.array([2, 4]))[0], new[1, :2])


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_pages_come_back_without_a_core(triton_gpus: Gpus, monkeypatch: pytest.MonkeyPatch, kv_dtype: str) -> None:
    tiers, text = tiers_on_a_gpu(kv_dtype)
    monkeypatch.delattr("lce.cache.movers.Pinned.gather")
    monkeypatch.delattr("lce.cache.movers.Mover.gather")
    for layer in range(4):
        wanted = np.random.default_rng(layer).random((2, 32)) < 0.2
        for tiles in tiers.rounds(layer, wanted):
            for head, chunk in zip(*np.nonzero(wanted), strict=True):
                if (tile := int(tiles.index[head, chunk])) >= 0:
                    assert torch.equal(tiles.k[tile].cpu(), text[layer, head, chunk * 16 : chunk * 16 + 16].cpu())
        tiers.prefetch((layer + 1) % 4)
    assert tiers.top.traffic.bytes_in > 0
