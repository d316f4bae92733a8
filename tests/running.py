"""Runs a method on plain tensors as `lce.methods.run` does, with any budget and with blocks that fail."""

import ast
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lce.attention import Attention
from lce.cache.kv import KVCache
from lce.cache.layout import AccessPattern, Budgets, CacheLayout
from lce.cache.limits import Limits
from lce.methods import Driver, Method, Rope, RopeConfig
from lce.methods.lowdim import LowDimMap
from lce.methods.step import Note
from lce.models.layers import Attend

# Other blocks, other outputs: the queries of a block choose together.
BY_BLOCK = {"esa", "infllm"}


def as_knobs(text: str) -> dict[str, Any]:
    """Return the knobs in a text as "page=4 budget.top_p=0.5 select=mean"."""

    def value(word: str) -> Any:
        return ast.literal_eval(word) if word[0] in "-0123456789" or word in ("True", "False", "None") else word

    return {name: value(word) for name, _, word in (pair.partition("=") for pair in text.split())}


def by_block(name: str, knobs: Mapping[str, object]) -> bool:
    return name in BY_BLOCK or knobs.get("queries") == "page"


def vectors(seed: int, n_heads: int, n_kv_heads: int, n: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random `q [H, N, D]`, `k v [G, N, D]`, large enough for a softmax with clear maxima."""
    random = torch.Generator().manual_seed(seed)
    q = torch.randn(n_heads, n, dim, generator=random) * 1.5
    k = torch.randn(n_kv_heads, n, dim, generator=random) * 1.5
    return q, k, torch.randn(n_kv_heads, n, dim, generator=random)


def low_dim_map(n_heads: int, n_kv_heads: int, dim: int, low_dim: int, seed: int = 5) -> LowDimMap:
    """Random maps of a layer, with biases."""
    random, shapes = torch.Generator().manual_seed(seed), LowDimMap.shapes(n_heads, n_kv_heads, dim, low_dim)
    return LowDimMap(**{name: torch.randn(shape, generator=random) for name, shape in shapes.items()})


def run(
    method: Method,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Sequence[int],
    *,
    window: int,
    sliding_window: int | None = None,
    backend: str = "torch",
    scaling: RopeConfig | None = None,
    note: Note | None = None,
    disturb: int = 0,
    truncate: Sequence[int] = (),
    pieces: tuple[int, int] | None = None,
    budgets: Budgets | None = None,
    kv_dtype: str = "auto",
) -> Tensor:
    """The method's output `[H, N, D]` for a sequence fed in blocks of these sizes.

    With `disturb`, a block of that many other tokens fails before each block, and the cache is copied after it; before
    some blocks other tokens are read, from which it goes back. At the end the text is truncated to each of `truncate`
    tokens, as near as the method can, and the rest is read again.
    `pieces` is how many tokens are read in one go, and the chunk size if the method has none. `budgets` bound the
    cache; they are raised to the least that the method can work with. `kv_dtype` is that of pages below the device.
    """
    method = method.resolve(window)
    dim = q.shape[-1]
    layout = layout_for(method, len(q), k, max(blocks), budgets or Budgets())
    layout = dataclasses.replace(layout, kv_dtype=kv_dtype)
    if pieces is not None:
        chunk = pieces[0] if method.access.chunk_size == AccessPattern().chunk_size else method.access.chunk_size
        access = dataclasses.replace(layout.access, chunk_size=chunk)
        layout = dataclasses.replace(layout, access=access, read_size=pieces[1])
    cache = KVCache.empty(legal(layout) if budgets else layout)
    rope = Rope(scaling or RopeConfig(), dim, window, q.shape[1])
    driver = Driver(method, Attention.choose(backend), window, k.shape[0], sliding_window)
    outs, start = [], 0
    for size in blocks:
        block = [x[:, start : start + size] for x in (q, k, v)]
        if disturb:
            with suppress(Failed):
                driver.forward(cache, rope, disturb, partial(fail_behind, [x[:, :1] * 3 for x in (q, k, v)], disturb))
            cache = cache.fork()
        if disturb and len(outs) % 5 == 1:
            mark = cache.mark()
            for _ in range(2):
                driver.attend(cache, rope, *(x[:, :1].expand(-1, disturb, -1) * 2 for x in (q, k, v)))
            cache.go_back(mark)
        outs.append(driver.attend(cache, rope, *block, note=note))
        start += size
    assert start == q.shape[1]
    out = torch.cat(outs, dim=1)
    for n in truncate:
        cache.truncate(start := cache.nearest(n))
        assert start <= n
        again = [x[:, start:].split(max(blocks), dim=1) for x in (q, k, v)]
        out = torch.cat((out[:, :start], *(driver.attend(cache, rope, *x) for x in zip(*again, strict=True))), dim=1)
    return out


class Failed(Exception):
    pass


def fail_behind(vectors: Sequence[Tensor], n_tokens: int, attend: Attend) -> None:
    """A model call on the repeated vectors of one token. It fails after its layer."""
    attend(0, *(x.expand(-1, n_tokens, -1) for x in vectors))
    raise Failed


def layout_for(method: Method, n_heads: int, k: Tensor, block: int, budgets: Budgets) -> CacheLayout:
    """The layout of a cache of one layer, for keys `k [G, N, D]` in blocks of `block`."""
    sizes = (1, n_heads, len(k), k.shape[-1])
    return CacheLayout(*sizes, k.dtype, k.device, method.access, budgets, block, make_state=method.state)


def legal(layout: CacheLayout) -> CacheLayout:
    """The layout with its host budget raised to the least that works."""
    host = max(layout.budgets.host or 0, Limits(layout).least_budget)
    return dataclasses.replace(layout, budgets=dataclasses.replace(layout.budgets, host=host))


def rounded(x: Tensor, size: int) -> Tensor:
    """`[…, N, D]` with every chunk of `size` tokens rounded as keys and as values are: packing leaves it as it is."""
    whole = -(-x.shape[-2] // size) * size
    chunks = torch.nn.functional.pad(x, (0, 0, 0, whole - x.shape[-2])).unflatten(-2, (-1, size)).flatten(0, -3)
    if not x.numel():
        return x
    chunks = (chunks * 127 / chunks.abs().amax()).round_().clamp_(-127, 127)
    chunks[:, 0] = chunks[:, :, 0] = 127.0  # the peak of each channel, and of each token
    return (chunks / 64).flatten(0, 1).view(*x.shape[:-2], whole, x.shape[-1])[..., : x.shape[-2], :]


def keys_of(layout: CacheLayout, n: int, seed: int = 0) -> Tensor:
    """Keys `[layers, G, n, D]`, the same in 8 bits. A longer text has the same first ones."""
    shape = (layout.n_layers, max(n, 400), layout.n_kv_heads, layout.head_dim)
    keys = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).transpose(1, 2)
    return rounded(keys, layout.chunk_size)[:, :, :n].to(layout.dtype)


def assert_are(found: Iterable[Tensor], keys: Tensor) -> None:
    """The keys, and values that are their negatives."""
    k, v = found
    assert torch.equal(k, keys)
    assert torch.equal(v, -keys)


def cut(n: int, block: int) -> list[int]:
    return [min(block, n - start) for start in range(0, n, block)]


@contextmanager
def threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)
