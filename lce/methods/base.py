"""`Method`, the base class of attention methods; and `LocalMethod`, of those that see near and far tokens apart.

A pass runs a block of tokens `start..stop-1` through every layer. In each layer `keep` caches the block's keys, rotated
to the positions that the method declares, and `attend` computes the attention of the block's queries.

What the engine may rely on in a class of methods are promises, each with the hooks on which it stands.
A class promises by a keyword: `class Mine(Method, promises={"counted": ("attend",)})`. A subclass that overrides one of
a promise's hooks loses the promise, unless the subclass repeats the promise. So a class with unknown hooks has the safe
answer. `Method` promises all but `analysis`, for classes that only declare parts.

- `alike`: a step of one token calls the same kernels in all layers of a kind; only addresses differ, and no operator of
  PyTorch computes anything. If all that the method keeps is `steady`, one layer's kernels may serve the others.
- `counted`: a run costs what `parts_of` and `choice_cost` declare.
- `recorded`: decode steps can be recorded as CUDA graphs: `attend` and `keep` take a `DeviceStep`.
- `noted`: the chunks or tokens that queries choose are passed to `Step.note`.
- `kept`: only `keep` and `keep_queries` write the method's state; attention does not.
- `by_head`: a KV head's outputs depend on no other KV head.
- `by_row`: a query's output depends on no other query of its block; generated tokens may be attended at once.
- `plain`: all parts are spans, attention is what they say, and only keys, values and recent keys are kept.
- `dense`, of a method that chooses chunks: a text of no more chunks than a query attends has full attention.
- `complete`, of the same: in a recorded step, incomplete chunks change no score or choice of other chunks.
- `kernel`, of the same: a GPU kernel may choose as `plain_choice` says.
- `hookless`, of a `SelectiveMethod`: its selector chooses; the class has no hooks of its own.
- `vectors`, of the same: scores are dot products with a vector for each chunk and query head.
- `best`, of the same: the chunks with the best scores are chosen.
- `analysis`: the method is for study only; error messages never suggest it.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, TypeVar

import torch
from torch import Tensor

from lce.attention import Attended, Turn
from lce.cache.layer import LayerCache
from lce.cache.layout import AccessPattern, CacheLayout
from lce.cache.method_state import FileTensor, MethodState
from lce.methods import hooks
from lce.methods.attending import PlacedPart, attend_parts, attend_spans, scaled
from lce.methods.costs import Cost, QueryBlock
from lce.methods.decoding import Span, bound_for, decode_parts
from lce.methods.knobs import fill_in
from lce.methods.knobs import knob as knob
from lce.methods.parts import CHOSEN, RECENT, LayerFacts, Part
from lce.methods.step import DeviceStep, ModelFacts, OnDevice, Step, is_recorded
from lce.methods.turned_keys import keep_recent, recent_keys, seen_keys, unrotated

T = TypeVar("T")
M = TypeVar("M", bound="Method")
_OfChoices = Literal["dense", "complete", "kernel", "hookless", "vectors", "best"]
Promise = Literal["alike", "counted", "recorded", "noted", "kept", "by_head", "by_row", "plain", "analysis", _OfChoices]
Promises = Mapping[Promise, Sequence[str]]
ATTENTION = ("keep", "keep_queries", "attend", "attend_part")  # the hooks that compute attention
ATTENDING = ("keep", "attend", "attend_part")


@functools.cache
def promises_of(cls: type) -> frozenset[Promise]:
    """Return what a class of methods promises."""
    found: dict[Promise, Sequence[str]] = {}
    for each in reversed(cls.__mro__):
        own = vars(each)
        found = {what: hooks for what, hooks in found.items() if own.keys().isdisjoint(hooks)}
        found |= own.get("_promises", {})
    return frozenset(found)


def resolved(knob: T | None) -> T:
    """Return a knob's value, which is not None after `Method.resolve`."""
    assert knob is not None, "resolved before use"
    return knob


def filled(method: M, **defaults: Any) -> M:
    """Return a method with `defaults` for knobs that are None. Raises `UsageError` for a knob out of range."""
    return fill_in(method, method.label, **defaults)


def is_like(x: FileTensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return whether a tensor of a context file has this shape and dtype."""
    return x.shape == shape and x.dtype == dtype


@dataclass(frozen=True)
class Example:
    """A configuration small enough to draw what a method attends: its knobs, the window, and the queries per block."""

    knobs: Mapping[str, Any] = field(default_factory=dict)
    window: int = 12
    block: int | None = None  # None: `Method.block`


@dataclass(frozen=True)
class Method:
    """An attention strategy. Its fields, declared by `knob`, are its knobs. `resolve` fills in the knobs that are None.

    `presets` are named sets of knob values, such as those of a paper's experiments. `-o preset=NAME` selects one, and
    other options override the preset's values. `example` is the configuration that `lce explain` shows by default.

    A method declares its parts in `parts_of`: which keys a query sees, and at which positions. Attention, costs and
    pictures are computed from the parts. A method overrides `key_positions` if keys are not cached at their absolute
    positions, and `keep_queries` if it stores more of a block than keys and values. A method whose attention is not
    made of parts overrides `attend` instead. What the engine may then still rely on, the class promises: see
    `lce.methods.base`.
    """

    name: ClassVar[str] = ""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    example: ClassVar[Example] = Example()
    _promises: ClassVar[Promises] = {
        "alike": ATTENTION,
        **dict.fromkeys(("counted", "recorded"), ATTENDING),
        **dict.fromkeys(("noted", "kept"), ATTENDING[1:]),
        **dict.fromkeys(("by_head", "by_row", "plain"), ATTENTION),
    }

    def __init_subclass__(cls, *, promises: Promises | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._promises = promises or {}
        if hooks.begun:
            hooks.guard(cls)

    def promised(self, what: Promise) -> bool:
        """Return whether the class promises `what`. A class overrides this method if its knobs decide."""
        return what in promises_of(type(self))  # type: ignore[arg-type]

    @property
    def label(self) -> str:
        """The method's name in error messages: the registered name, or else the class name."""
        return self.name or type(self).__name__

    def for_model(self, model: ModelFacts) -> Self:
        """Return this method with knobs set from the model's files. Called once, before `resolve`."""
        return self

    def resolve(self, window: int) -> Self:
        """Return this method with all knobs filled in, for a model that can be trusted on `window` positions.

        Raises `UsageError` for knobs that cannot work.
        """
        return filled(self)

    @property
    def block(self) -> int:
        """The best number of tokens to prefill in one step."""
        return 512

    @property
    def access(self) -> AccessPattern:
        """What the cache must know of the method: the chunk size, and the tokens that every query sees."""
        return AccessPattern()

    @property
    def choices(self) -> tuple[int, int]:
        """The pair `(first, size)`: number c in what `Step.note` gets means `size` tokens from `first + c·size` on."""
        return 0, self.access.chunk_size

    @property
    def couples_heads(self) -> str | None:
        """The reason why a KV head's outputs depend on other KV heads, and the remedy; None if they do not.

        Ranks, which divide the heads, refuse a method that couples them.
        """
        return None if self.promised("by_head") else "it may look at all heads; let its class promise by_head"

    def limit(self, window: int, sliding_window: int | None = None) -> int | None:
        """Return the length of the longest text that the resolved method reads without a warning; None: any length.

        `window` is the number of positions that the model can be trusted on, with RoPE scaling.
        """
        return None

    def state(self, layout: CacheLayout) -> Mapping[str, MethodState]:
        """Return the empty `MethodState`s of a layer by name, stored beside keys and values; `layout` has the sizes."""
        return {}

    def could_keep(self, layer: int, kept: Mapping[str, FileTensor], layout: CacheLayout, n_tokens: int) -> bool:
        """Return whether a file's tensors, `kept`, can be the method's state of a layer after `n_tokens` tokens.

        Called for context files, which are not trusted. `kept` has the names of `state`, without empty states. Each
        `MethodState` checks its tensors. The method checks sizes that could broadcast, and that tensors fit together.
        """
        if RECENT not in kept:  # after going back, recent keys are missing until they are made of unrotated keys
            return RECENT not in self.state(layout) or unrotated(self)
        return kept[RECENT].shape[::2] == (layout.n_kv_heads, layout.head_dim)

    def key_positions(self, indices: Tensor) -> Tensor | None:
        """Return the positions at which the keys of tokens `indices [T]` are cached; None: keys are unrotated."""
        return indices

    def parts_of(self, i: Tensor, layer: LayerFacts) -> Iterable[Part]:
        """Yield the parts that the block's queries see; `i [T]` are the queries' indices in the text, ascending.

        If a step is recorded as a CUDA graph, `i` is on the device, and which parts are yielded must not depend on `i`.
        Example: `yield Part(keys=(0, i + 1), query_at=i)` is full attention.
        """
        return ()

    def layer_kind(self, layer: int) -> str:
        """Return a label of a layer; layers with equal labels have the same parts."""
        return ""

    def query_scale(self, i: Tensor, window: int) -> Tensor | None:
        """Return a factor `[T]`, float64, for the logits of queries `i [T]`; None: no factor."""
        return None

    def keep(self, k: Tensor, v: Tensor, cache: LayerCache, step: Step) -> None:
        """Rotate the block's keys `[G, T, D]` to their `key_positions`, and write keys and values to the cache."""
        turn = None if cache.turned else step.key_turn(self.key_positions, k)
        cache.write(k, v, turn, step.at)
        if RECENT in cache.state:
            if turn is None and cache.layout.format.stored_dtype is not k.dtype:
                k = cache.span(step.start, step.stop)[0]  # as recent keys are made again after a truncation
            keep_recent(k, cache, step)

    def keep_queries(self, q: Tensor, cache: LayerCache, step: Step) -> None:
        """Update the method's state from the block's unrotated queries `[H, T, D]`; called before `attend`.

        Also called in decode steps recorded as a CUDA graph (`DeviceStep`), where reading `step.start` raises an error.
        """

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """Return attention outputs `[H, T, D]` for the block's unrotated queries `[H, T, D]`. Called after `keep`.

        Later steps overwrite the memory of queries, keys and values: a method that keeps any of them keeps a copy.
        A `DeviceStep` has one token, whose index only the device knows. It is recorded once, as a CUDA graph, and
        replayed for later tokens, so shapes depend on `step.bound` alone; all keys and values are in the cache's
        buffer (`LayerCache.whole`).
        """
        self.keep_queries(q, cache, step)
        q = scaled(self, q, step)
        return decode_parts(self, q, cache, step) if is_recorded(step) else attend_parts(self, q, cache, step)

    def attend_part(self, q: Tensor, placed: PlacedPart, cache: LayerCache, step: Step) -> Attended | None:
        """Return the attention of unrotated queries `[H, T, D]` to a part; None: to no key.

        A method with a part of chosen keys overrides `attend_part`, and chooses them there.
        """
        if placed.part.keys == CHOSEN:
            raise NotImplementedError(f"{self.label} has a part of chosen keys; define attend_part")
        return attend_spans(q, placed, seen_keys(self, placed.part, cache, step), step)

    def decode_chosen(
        self, q: Tensor, turn: Turn, others: Sequence[Span], cache: LayerCache, step: DeviceStep
    ) -> Attended:
        """Choose keys for an unrotated query `[H, 1, D]`; return attention to the chosen keys and to spans `others`.

        `turn` is the rotation of the query for the chosen keys. The decode steps of a method that does not define
        `decode_chosen` are not recorded as a CUDA graph.
        """
        raise OnDevice("decode_chosen")

    def bound(self, stop: int) -> int | None:
        """Return the `DeviceStep.bound` for a step that ends at `stop` tokens: an upper bound of the text's length.

        None: the step does work that most steps do not do, and is not recorded as a CUDA graph.
        """
        return bound_for(stop)

    def choice_cost(self, block: QueryBlock) -> Cost:
        """Return the cost of choosing keys and of attending the chosen keys. Example: `block.tokens(self.top_k)`."""
        return Cost(0)


class LocalMethod(Method):
    """A method whose queries see the last `local` tokens at true distances, and farther tokens at other distances.

    Keys are cached unrotated. The last `n_recent` keys are also stored at their absolute positions.
    """

    local: int | None  # each derived class declares this knob
    sinks = 0  # a knob of some derived classes

    @property
    def n_local(self) -> int:
        """The number of local tokens: the knob `local`, after `resolve`."""
        return resolved(self.local)

    @property
    def n_recent(self) -> int:
        """The number of earlier tokens whose keys are also stored at absolute positions, for parts with `exact`."""
        return self.n_local

    @property
    def access(self) -> AccessPattern:
        return AccessPattern(sinks=self.sinks, local=self.n_recent)

    def state(self, layout: CacheLayout) -> Mapping[str, MethodState]:
        return recent_keys(self, self.n_recent, layout)

    def key_positions(self, indices: Tensor) -> Tensor | None:
        return None
