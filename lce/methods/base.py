"""`Method`, the base class of attention methods.

A pass runs a block of tokens `start..stop-1` through every layer. In each layer `keep` caches the block's keys, rotated
to the positions that the method declares, and `attend` computes the attention of the block's queries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from lce.attention import Attended, Turn
from lce.cache.layer import LayerCache
from lce.cache.layout import AccessPattern, CacheLayout
from lce.cache.method_state import FileTensor, MethodState, RecentRows
from lce.errors import UsageError
from lce.methods.attending import PlacedPart, attend_parts, attend_spans, keep_recent, scaled
from lce.methods.costs import Cost, PaperFigure, QueryBlock, cost_of_spans
from lce.methods.decoding import Span, bound_for, decode_parts
from lce.methods.hooks import METHOD_CHECKS, Check, guard
from lce.methods.parts import RECENT, LayerFacts, Part
from lce.methods.step import DeviceStep, ModelFacts, OnDevice, Step

NO_TOKENS = torch.zeros(0, dtype=torch.int64)
T = TypeVar("T")


def resolved(knob: T | None) -> T:
    """Return a knob's value, which is not None after `Method.resolve`."""
    assert knob is not None, "resolved before use"
    return knob


def says_for(method: object, hook: str, *others: str) -> bool:
    """Return whether `hook` is valid for `others`: no subclass overrides one of `others` without overriding `hook`."""

    def depth(name: str) -> int:
        return next(i for i, parent in enumerate(type(method).__mro__) if name in vars(parent))

    return all(depth(hook) <= depth(other) for other in others)


def is_like(x: FileTensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Return whether a tensor of a context file has this shape and dtype."""
    return x.shape == shape and x.dtype == dtype


def knob(default: T, meaning: str, *, least: int | None = None, is_share: bool = False, kw_only: bool = False) -> T:
    """Declare a knob (an option) of a method: a dataclass field with its meaning in a few words, and its allowed range.

    `least` is the smallest allowed value. With `is_share` a value is above 0 and at most 1. None is always allowed.
    """
    facts = {"meaning": meaning, "least": least, "is_share": is_share}
    return field(default=default, kw_only=kw_only, metadata=facts)


@dataclass(frozen=True)
class Example:
    """A configuration small enough to draw what a method attends: its knobs, the window, and the queries per block."""

    knobs: Mapping[str, Any] = field(default_factory=dict)
    window: int = 12
    block: int | None = None  # None: `Method.block`


class UserFile(NamedTuple):
    """The path of a user's file of code, and the SHA-256 of the text that was run."""

    path: str
    digest: str


@dataclass(frozen=True)
class Method:
    """An attention strategy. Its fields, declared by `knob`, are its knobs. `resolve` fills in the knobs that are None.

    `presets` are named sets of knob values, such as those of a paper's experiments. `-o preset=NAME` selects one, and
    other options override the preset's values. `example` is the configuration that `lce explain` shows by default.

    A method declares its parts in `parts_of`: which keys a query sees, and at which positions. Attention, costs and
    pictures are computed from the parts. A method overrides `key_positions` if keys are not cached at their absolute
    positions, and `keep_queries` if it stores more of a block than keys and values. A method whose attention is not
    made of parts overrides `attend` instead.
    """

    name: ClassVar[str] = ""
    user_file: ClassVar[UserFile | None] = None  # set by `lce.methods.from_file`; part of what identifies the method
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    example: ClassVar[Example] = Example()
    analysis: ClassVar[bool] = False  # whether the method is for study only; error messages never suggest it
    notes_choices: ClassVar[bool] = True  # whether the method passes the chunks or tokens it chooses to `Step.note`
    keeps_while_attending: ClassVar[bool] = False  # whether attention, not `keep` or `keep_queries`, makes the state
    hook_checks: ClassVar[Mapping[str, Check]] = METHOD_CHECKS

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.partition(".")[0] != "lce":
            guard(cls, cls.hook_checks)

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
        return self.filled()

    def filled(self, **defaults: Any) -> Self:
        """Return this method with `defaults` for knobs that are None. Raises `UsageError` for a knob out of range."""
        made = replace(self, **{knob: value for knob, value in defaults.items() if getattr(self, knob) is None})
        for each in fields(made):
            value, least = getattr(made, each.name), each.metadata.get("least")
            if isinstance(value, int | float) and least is not None and value < least:
                raise UsageError(f"{self.label}: {each.name} is {value}; expected {least} or more")
            if value is not None and each.metadata.get("is_share") and not 0 < value <= 1:
                raise UsageError(f"{self.label}: {each.name} is {value}; expected a share above 0, at most 1")
        return made

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

    def limit(self, window: int, sliding_window: int | None = None) -> int | None:
        """Return the length of the longest text that the resolved method reads without a warning; None: any length.

        `window` is the number of positions that the model can be trusted on, with RoPE scaling.
        """
        return None

    @cached_property
    def unrotated(self) -> bool:
        """Whether keys are cached unrotated."""
        return self.key_positions(NO_TOKENS) is None

    @property
    def n_recent(self) -> int:
        """The number of earlier tokens whose keys are also stored at absolute positions, for parts with `exact`."""
        return 0

    def state(self, layout: CacheLayout) -> Mapping[str, MethodState]:
        """Return the empty `MethodState`s of a layer by name, stored beside keys and values; `layout` has the sizes."""
        if not self.n_recent:
            return {}
        return {RECENT: RecentRows(self.n_recent, layout.key_bytes, remade=self.unrotated)}

    def could_keep(self, layer: int, kept: Mapping[str, FileTensor], layout: CacheLayout, n_tokens: int) -> bool:
        """Return whether a file's tensors, `kept`, can be the method's state of a layer after `n_tokens` tokens.

        Called for context files, which are not trusted. `kept` has the names of `state`, without empty states. Each
        `MethodState` checks its tensors. The method checks sizes that could broadcast, and that tensors fit together.
        """
        shape = (layout.n_kv_heads, layout.head_dim)
        return not self.n_recent or (RECENT in kept and kept[RECENT].shape[::2] == shape)

    def key_positions(self, indices: Tensor) -> Tensor | None:
        """Return the positions at which the keys of tokens `indices [T]` are cached; None: keys are unrotated."""
        return indices

    def parts_of(self, i: Tensor, layer: LayerFacts) -> Iterable[Part]:
        """Yield the parts that the block's queries see; `i [T]` are the queries' indices in the text, ascending.

        If a step is recorded as a CUDA graph, `i` is on the device, and which parts are yielded must not depend on `i`.
        Example: `yield Part(keys=(0, i + 1), query_at=i)` is full attention.
        """
        raise NotImplementedError(f"{self.label} declares no parts; define parts_of, or attend")

    @property
    def couples_heads(self) -> str | None:
        """Why a KV head's outputs depend on other KV heads, and what to do; None: on nothing but this head.

        Ranks, which divide the heads, refuse a method that couples them. A class from outside of lce says so itself.
        """
        ours = type(self).__module__.startswith("lce.")
        return None if ours else "it may look at all heads; say `couples_heads = None` in its class if it does not"

    def layer_kind(self, layer: int) -> str:
        """Return a label of a layer; layers with equal labels have the same parts."""
        return ""

    def alike(self, step: Step) -> bool:
        """Return whether a step of one token calls the same kernels in all layers of a kind, with other addresses.

        One layer's kernels may then serve the others, if all that the method keeps is `steady` and no operator of
        PyTorch computes anything. A class from outside of lce may do anything in its hooks: there it is alike if it is
        what its parts are, all of spans.
        """
        names = "keep", "keep_queries", "attend", "attend_spans", "attend_chosen"
        plain = all(getattr(type(self), name) is getattr(Method, name) for name in names)
        return plain or type(self).__module__.startswith("lce.")

    def in_sliding_layer(self, own: Method) -> Method:
        """Return the method of a layer with a sliding window of its own: `own`, or a method that observes `own`."""
        return own

    def query_scale(self, i: Tensor, window: int) -> Tensor | None:
        """Return a factor `[T]`, float64, for the logits of queries `i [T]`; None: no factor."""
        return None

    def keep(self, k: Tensor, v: Tensor, cache: LayerCache, step: Step) -> None:
        """Rotate the block's keys `[G, T, D]` to their `key_positions`, and write keys and values to the cache."""
        cache.write(k, v, step.key_turn(self.key_positions, k), step.at)
        if RECENT in cache.state:
            if self.unrotated and cache.layout.format.stored_dtype is not k.dtype:
                k = cache.span(step.start, step.stop)[0]  # as recent keys are made again after a truncation
            keep_recent(k, cache, step)

    def keep_queries(self, q: Tensor, cache: LayerCache, step: Step) -> None:
        """Update the method's state from the block's unrotated queries `[H, T, D]`; called before `attend`.

        Also called in decode steps recorded as a CUDA graph (`DeviceStep`), where reading `step.start` raises an error.
        """

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """Return attention outputs `[H, T, D]` for the block's unrotated queries `[H, T, D]`. Called after `keep`."""
        self.keep_queries(q, cache, step)
        return attend_parts(self, scaled(self, q, step), cache, step)

    def attend_spans(self, q: Tensor, placed: PlacedPart, cache: LayerCache, step: Step) -> Attended | None:
        """Return the attention of unrotated queries `[H, T, D]` to a part's spans; None: left to `attend_chosen`."""
        return attend_spans(q, placed, cache, step)

    def attend_chosen(self, q: Tensor, placed: PlacedPart, cache: LayerCache, step: Step) -> Attended | None:
        """Choose keys for unrotated queries `[H, T, D]`; return the attention to these keys (None: no candidates)."""
        raise NotImplementedError(f"{self.label} has a part of chosen keys; define attend_chosen")

    def sees_all(self, step: Step) -> bool:
        """Return whether all queries of a pass attend all tokens up to their own at the true distances."""
        return False

    def note_choice(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor | None:
        """Pass what unrotated queries `[H, T, D]` choose to `Step.note`, and return it; None: there is no choice."""
        return None

    def decode(self, q: Tensor, cache: LayerCache, step: DeviceStep) -> Tensor:
        """Do what `attend` does for one token whose index only the device knows: `q [H, 1, D]` to output `[H, 1, D]`.

        The step is recorded once, as a CUDA graph, and replayed for later tokens, so shapes depend on `step.bound`
        alone. All keys and values are in the cache's buffer (`LayerCache.whole`).
        """
        self.keep_queries(q, cache, step)
        return decode_parts(self, scaled(self, q, step), cache, step)

    def decode_chosen(
        self, q: Tensor, turn: Turn, others: Sequence[Span], cache: LayerCache, step: DeviceStep
    ) -> Attended:
        """Choose keys for an unrotated query `[H, 1, D]`; return attention to the chosen keys and to spans `others`.

        `turn` is the rotation of the query for the chosen keys. The decode steps of a method that does not define
        `decode_chosen` are not recorded as a CUDA graph.
        """
        raise OnDevice("decode_chosen")

    def bound(self, stop: int) -> int | None:
        """Return an upper bound of the text's length, `DeviceStep.bound`, to record a step that ends at `stop` tokens.

        None: the step is not recorded as a CUDA graph, because it does work that most steps do not do.
        """
        return bound_for(stop)

    @property
    def decodes(self) -> bool:
        """Whether decode steps can be recorded as CUDA graphs: where attention is overridden, `decode` is too."""
        spans = says_for(self, "decode", "attend", "attend_spans", "keep")
        return spans and says_for(self, "decode_chosen", "attend_chosen")

    @property
    def declares(self) -> bool:
        """Whether the class defines `parts_of`."""
        return type(self).parts_of is not Method.parts_of

    def cost(self, block: QueryBlock) -> Cost | None:
        """Return the resolved method's cost for a block of queries in one layer; None: the method declares no parts."""
        return cost_of_spans(self, block) + self.choice_cost(block) if self.declares else None

    def choice_cost(self, block: QueryBlock) -> Cost:
        """Return the cost of choosing keys and of attending the chosen keys. Example: `block.tokens(self.top_k)`."""
        return Cost(0)

    @property
    def counted(self) -> bool:
        """Whether `cost` is accurate: a class that overrides attention also overrides `parts_of` or `choice_cost`."""
        agrees = says_for(self, "parts_of", "attend", "keep") and says_for(self, "choice_cost", "attend_chosen")
        return self.declares and agrees

    @property
    def explained(self) -> Method:
        """The method that `lce explain` measures: this method, or one whose outputs are weighted means of values."""
        return self

    def paper_figures(self, block: QueryBlock) -> Sequence[PaperFigure]:
        """Return the costs that the method's paper states, computed for the model sizes in `block`."""
        return ()


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
        return self.n_local

    @property
    def access(self) -> AccessPattern:
        return AccessPattern(sinks=self.sinks, local=self.n_recent)

    def key_positions(self, indices: Tensor) -> Tensor | None:
        return None
