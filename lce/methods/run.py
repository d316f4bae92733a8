"""Runs a method over a cache (`Driver`), or on plain tensors without a model (`run`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from lce.attention import Attention
from lce.cache.kv import KVCache
from lce.cache.layer import LayerCache
from lce.cache.layout import AccessPattern, CacheLayout
from lce.errors import CapacityError, UsageError, shown
from lce.methods.attending import prepare
from lce.methods.base import Method
from lce.methods.full import OwnWindow
from lce.methods.registry import as_method
from lce.methods.step import DeviceStep, Note, Step
from lce.methods.wrapped import Handover, Observed
from lce.models.config import LayerKind, RopeConfig
from lce.models.layers import Attend
from lce.models.rope import Rope
from lce.profiling import section
from lce.sizes import count

T = TypeVar("T")


def method_of(method: Method, kind: LayerKind) -> Method:
    """Return the method of layers of this kind: `method`, or `OwnWindow` in layers with a sliding window."""
    if kind.sliding_window is None:
        return method
    if isinstance(method, Observed):
        return replace(method, inner=method_of(method.inner, kind))
    return OwnWindow(kind.sliding_window)


def access_of(method: Method, kinds: Iterable[LayerKind]) -> AccessPattern:
    """Return a method's access in layers of these kinds; a layer's own sliding window counts as local tokens."""
    local = (method_of(method, kind).access.local for kind in {*kinds})
    return replace(method.access, local=max(method.access.local, *local))


@dataclass(frozen=True)
class Driver:
    """A method with its attention backend and the model's sizes, which runs over any cache. A driver has no state.

    `kinds` has each layer's kind; it is empty if all layers are alike. The method acts in layers without a sliding
    window of their own.
    """

    method: Method  # resolved, by `Method.resolve`
    attention: Attention
    window: int
    n_kv_heads: int
    sliding_window: int | None = None
    kinds: tuple[LayerKind, ...] = ()

    @cached_property
    def methods(self) -> Mapping[LayerKind, Method]:
        """The method of each kind of layer."""
        return {kind: method_of(self.method, kind) for kind in self.kinds or (LayerKind(),)}

    @cached_property
    def numbers(self) -> Sequence[int]:
        """For each layer, the number of its kind in `methods`."""
        return [[*self.methods].index(kind) for kind in self.kinds]

    @cached_property
    def _facts(self) -> Mapping[str, Any]:  # what `PassFacts` has of every pass
        return {name: getattr(self, name) for name in ("attention", "window", "n_kv_heads", "sliding_window")}

    def begin(
        self, cache: KVCache, rope: Rope, n_tokens: int, note: Note | None = None, decoding: bool = False
    ) -> Block:
        """Reserve space in a cache for `n_tokens` more tokens; return the block that appends them. See also `Step`."""
        cache.begin()
        start, stop = cache.length, cache.length + n_tokens
        cache.reserve(stop)
        if n_tokens == 1:  # decode: a token mostly chooses what the previous token chose
            cache.prefetch(0)
        whole = Step(start, stop, rope=rope, note=note, decoding=decoding, **self._facts)
        firsts, kinds = [part.first_layer for part in cache.layout.by_device], self.methods.items()
        steps = {
            first: [(method, replace(whole, rope=rope.of(kind), memo={})) for kind, method in kinds] for first in firsts
        }
        return Block(cache, steps, self.numbers)

    def recorded(self, layers: Sequence[LayerCache], rope: Rope, at: Tensor, bound: int, completes: bool) -> Attend:
        """Return a function that computes a layer's attention for one token, whose index `at [1]` is on the device.

        The method must promise `recorded`, and the cache must have space for the token. The caller begins and commits
        the cache. The function's work can be recorded once, as a CUDA graph, and replayed for each token of a text
        of at most `bound` tokens. `completes` is as in `DeviceStep`.
        """
        made = DeviceStep(at, bound, completes, rope=rope, **self._facts)
        steps: list[Any] = [replace(made, rope=rope.of(kind), memo={}) for kind in self.methods]
        methods, numbers = [*self.methods.values()], self.numbers

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            number = numbers[layer] if numbers else 0
            methods[number].keep(k, v, layers[layer], steps[number])
            return methods[number].attend(q, layers[layer], steps[number])

        return attend

    def forward(
        self,
        cache: KVCache,
        rope: Rope,
        n_tokens: int,
        call: Callable[[Attend], T],
        note: Note | None = None,
        decoding: bool = False,
    ) -> T:
        """Append a block of `n_tokens` tokens to the cache; return what `call(attend)` returns.

        `call` acts as a model: it calls `attend` once for each layer, in order. If `call` raises, the block is dropped.
        """
        try:
            result = call(self.begin(cache, rope, n_tokens, note, decoding))
            cache.commit()
        except BaseException:
            cache.settle()
            raise
        return result

    def attend(
        self,
        cache: KVCache,
        rope: Rope,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        note: Note | None = None,
        decoding: bool = False,
    ) -> Tensor:
        """Append a block of `q [H, T, D]`, `k v [G, T, D]` to a cache of one layer; return the output `[H, T, D]`."""
        return self.forward(cache, rope, q.shape[1], lambda attend: attend(0, q, k, v), note, decoding)


@dataclass(frozen=True)
class Block:
    """A block of tokens of one context while it passes through the layers of a model.

    After the last layer the caller keeps the block by `cache.commit()`. If the pass fails, `cache.settle()` drops it.
    """

    cache: KVCache
    # For each device, by its first layer: the method and the step of each kind of layer.
    steps: Mapping[int, Sequence[tuple[Method, Step]]]
    numbers: Sequence[int]  # for each layer, the number of its kind; empty if all layers are alike

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend in a layer: `q [H, T, D]`, `k v [G, T, D]` to `[H, T, D]`. Call once for each layer, in order."""
        own = self.cache.layers[layer]
        method, step = self.steps[own.layout.first_layer][self.numbers[layer] if self.numbers else 0]
        with section("cache"):
            method.keep(k, v, own, step)
        with section("selection"):  # what profiles call selection: all except attention and cache
            if q.shape[1] == 1 or not step.decoding or method.promised("by_row"):
                out = method.attend(q, own, step)
            else:
                out = _attend_rows(method, q, own, step)
        if q.shape[1] == 1:  # load pages for the next layer, after this layer's work
            self.cache.prefetch(layer + 1)
        return out

    @property
    def acting(self) -> tuple[Method, Step]:
        """The method that attends, and the step, of the first kind of layers."""
        method, step = next(iter(self.steps.values()))[0]
        return (method.inner if isinstance(method, Handover) and step.decoding else method), step

    def prepare(self) -> None:
        """Compute what all layers share for a token: then one layer's kernels serve all."""
        (method, step), cache = self.acting, self.cache.layers[0]
        prepare(method, cache.buffer.k.new_empty(1, 0, 1, dtype=cache.layout.dtype), cache, step)

    def memory(self) -> list[list[tuple[int, int]]] | None:
        """Make space in all layers for the tokens; return the addresses and bytes of what each layer's attention reads.

        Returns None unless the kernels of all layers' attention differ in addresses alone: there is one kind of layers,
        the method promises `alike`, its state is `steady`, nobody notes choices, and everything is in buffers. Several
        tokens must be of a `plain` method.
        """
        (acting, step), layers = self.acting, self.cache.layers
        if len(self.steps) > 1 or len(next(iter(self.steps.values()))) > 1:
            return None
        if step.stop > step.start + 1 and not acting.promised("plain"):
            return None
        if step.note or step.note_scores or not acting.promised("alike"):
            return None
        if layers[0].layout.format.rounds or len({acting.layer_kind(layer) for layer in range(len(layers))}) > 1:
            return None
        found, forms, stop = [], set(), step.stop
        for own in layers:
            kept = [state.steady(stop - 1) for state in own.state.values()]
            if own.stack or any(x is None for x, _ in kept):
                return None
            own.extend(stop)
            buffer = own.buffer
            k, v = buffer.rows
            forms.add((buffer.first, k.capacity, *((number, x.shape) for x, number in kept if x is not None)))
            found.append([k.place, v.place, *((x.data_ptr(), x.nbytes) for x, _ in kept if x is not None)])
        for own in layers[:2]:  # whose attention is watched: an operator there would keep it from being replayed
            _ = own.buffer.index
        return found if len(forms) == 1 and not buffer.first else None


def _attend_rows(method: Method, q: Tensor, own: LayerCache, step: Step) -> Tensor:
    """Return the method's output `[H, T, D]` for T generated tokens. Each has the bits of its own step."""
    rows = [step.once(f"row {t}", lambda t=t: step.part(t, t + 1)) for t in range(q.shape[1])]  # type: ignore[misc]
    return torch.cat([method.attend(q[:, t : t + 1], own, row) for t, row in enumerate(rows)], dim=1)


@torch.no_grad()
def run(
    method: str | Method,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    blocks: int | str | Sequence[int] | None = None,
    rope: Rope | None = None,
    attention: str = "auto",
    sliding_window: int | None = None,
    note: Note | None = None,
    prompt: int | None = None,
) -> Tensor:
    """Run a method as the first layer of a model does: unrotated `q [H, N, D]`, `k v [G, N, D]` to `[H, N, D]`.

    `window` is the number of positions that the model can be trusted on. `blocks` is the size of all blocks, or a
    list of sizes; None: `Method.block`. `rope` is by default RoPE of base 10000 without scaling. `attention` names a
    backend; `note` is as in `Step`. Blocks that begin at token `prompt` or later are decode steps (`Step.decoding`),
    which matters to `Handover` alone; None: no block is a decode step. Raises `UsageError` for shapes that do not fit,
    and `CapacityError` for knobs that need more memory than is free.

    Example: queries of zeros weigh all keys alike, so each output is the mean of the values so far.

        q, v = torch.zeros(1, 3, 2), torch.tensor([[[3.0, 0.0], [1.0, 0.0], [2.0, 6.0]]])
        lce.methods.run("full", q, q, v, window=8)  # [[[3, 0], [2, 0], [2, 2]]]
    """
    _check_shapes(q, k, v, rope)
    window = count(window, "window")
    sliding_window = None if sliding_window is None else count(sliding_window, "sliding_window")
    prompt = None if prompt is None else count(prompt, "prompt", least=0)
    if note is not None and not callable(note):
        raise UsageError(f"note is {shown(note)}; expected a function of a layer and its choice")
    method = as_method(method).resolve(window)
    n_kv_heads, n, dim = k.shape
    sizes = _block_sizes(method.block if blocks is None else blocks, n)
    rope = rope or Rope(RopeConfig(), dim, window, n)
    layout = CacheLayout(1, len(q), n_kv_heads, dim, k.dtype, k.device, method.access, make_state=method.state)
    cache = KVCache.empty(layout)
    driver = Driver(method, Attention.choose(attention), window, n_kv_heads, sliding_window)
    parts = zip(q.split(sizes, dim=1), k.split(sizes, dim=1), v.split(sizes, dim=1), strict=True)
    try:
        found = []
        for part in parts:
            decoding = prompt is not None and cache.length >= prompt
            found.append(driver.attend(cache, rope, *part, note=note, decoding=decoding))
        return torch.cat(found, dim=1)
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
            raise CapacityError(f"no memory for what {method.label} keeps of a text; give it smaller knobs") from error
        raise


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, rope: Rope | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = f"a tensor of {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise UsageError(f"{name} is {got}; expected a torch.Tensor of floating-point numbers")
    if rope is not None and not isinstance(rope, Rope):
        raise UsageError(f"rope is {shown(rope)}; expected a lce.methods.Rope")
    shapes = f"q is {list(q.shape)}, k is {list(k.shape)}, v is {list(v.shape)}"
    if q.ndim != 3 or k.shape != v.shape or q.shape[1:] != k.shape[1:] or not q.numel() or not k.numel():
        raise UsageError(f"{shapes}; expected q [H, N, D] and k, v [G, N, D], none of them empty")
    if len(q) % len(k):
        raise UsageError(f"{shapes}; expected a multiple of {len(k)} query heads, not {len(q)}")
    if q.shape[2] % 2 or (rope is not None and rope.head_dim != q.shape[2]):
        raise UsageError(f"{shapes}; expected D to be {'even' if rope is None else f'{rope.head_dim}, as in rope'}")
    kinds = [f"{x.dtype} on {x.device}" for x in (q, k, v)]
    if len({*kinds}) > 1:
        raise UsageError(f"q, k, v are {', '.join(kinds)}; expected one dtype and one device")


def _block_sizes(blocks: int | str | Sequence[int], n_tokens: int) -> list[int]:
    if isinstance(blocks, str) or not isinstance(blocks, Sequence):
        size = count(blocks, "blocks")
        return [min(size, n_tokens - start) for start in range(0, n_tokens, size)]
    sizes = [count(size, "a size in blocks") for size in blocks]
    if sum(sizes) != n_tokens:
        raise UsageError(f"blocks add up to {sum(sizes)}; expected sizes of 1 or more that add up to {n_tokens}")
    return sizes
