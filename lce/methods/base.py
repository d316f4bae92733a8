"""The attention hook: what a method is.

A pass runs a block of queries `start..stop-1` through every layer. Before each layer's `attend` its keys are in the
cache, placed as the method declared; `attend` says which of them each query sees, at which positions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from lce.cache.layer import LayerCache
from lce.cache.layout import CacheLayout, Reach
from lce.cache.method_state import MethodState, RecentRows
from lce.errors import UsageError
from lce.methods.costs import Cost, PaperFigure, QueryBlock
from lce.methods.decoding import bucket
from lce.methods.hooks import METHOD_CHECKS, Check, guard
from lce.methods.parts import RECENT, keep_recent, mask_of
from lce.methods.step import DeviceStep, ModelFacts, OnDevice, Step


def says_for(cls: type, hook: str, *others: str) -> bool:
    """Whether a hook still stands for others that it summarises: no class below its own overrides one of them."""

    def depth(name: str) -> int:
        return next(i for i, parent in enumerate(cls.__mro__) if name in vars(parent))

    return all(depth(hook) <= depth(other) for other in others)


@dataclass(frozen=True)
class Example:
    """A setting so small that a picture of it shows a method's idea: knobs, a window, and a block of queries.

    `block` None is what suits the method.
    """

    knobs: Mapping[str, Any] = field(default_factory=dict)
    window: int = 12
    block: int | None = None


@dataclass(frozen=True)
class Method(ABC):
    """A strategy behind the attention hook; its fields are its knobs, `None` where the window decides.

    `knob_help` says in a few words what each knob means. `presets` are named settings of knobs, such as those of a
    paper's experiments: `-o preset=NAME` sets them first. `example` is what `lce explain` shows if it is not told more.

    A method defines `attend`. It overrides `key_positions` if keys are not cached at their absolute positions, and
    `keep` if it keeps more of a block than keys and values. `reach` tells the cache what it needs to know, and `state`
    what else is kept. Everything has a default but `attend`.
    """

    name: ClassVar[str] = ""
    knob_help: ClassVar[Mapping[str, str]] = {}
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    example: ClassVar[Example] = Example()
    analysis: ClassVar[bool] = False  # not to serve with: nobody is referred to it
    hook_checks: ClassVar[Mapping[str, Check]] = METHOD_CHECKS

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__module__.partition(".")[0] != "lce":
            guard(cls, cls.hook_checks)

    @property
    def label(self) -> str:
        """What errors call the method: its name, or its class's if it is not registered."""
        return self.name or type(self).__name__

    def for_model(self, model: ModelFacts) -> Self:
        """This method with what a model's own files hold for it; called once, before `resolve`."""
        return self

    def resolve(self, window: int) -> Self:
        """This method with every `None` filled in for a model that can be trusted on `window` positions.

        Raises `UsageError` for knobs that cannot work.
        """
        return self

    def expect(self, **least: int) -> None:
        """Raise `UsageError` for a knob below its least value."""
        for knob, value in least.items():
            if getattr(self, knob) < value:
                raise UsageError(f"{self.label}: {knob} is {getattr(self, knob)}; expected {value} or more")

    @property
    def block(self) -> int:
        """Tokens best prefilled in one step."""
        return 512

    @property
    def reach(self) -> Reach:
        """What the cache must know: the chunk size, and which tokens every query sees."""
        return Reach()

    @property
    def choices(self) -> tuple[int, int]:
        """`(first, size)`: choice c, as `step.note` is given it, is the `size` tokens from `first + c·size` on."""
        return 0, self.reach.chunk_size

    def limit(self, window: int, sliding_window: int | None = None) -> int | None:
        """The longest text that the resolved method can read; None: any, because no distance leaves the window.

        `window` counts the positions that the model can be trusted on, RoPE scaling included. A warning says so of
        longer texts.
        """
        return None

    def state(self, layout: CacheLayout) -> Mapping[str, MethodState]:
        """What the method keeps in each layer besides keys and values, empty yet, by names of its own.

        `layout` has the sizes: plans are made from the same objects.
        """
        return {}

    def could_keep(self, layer: int, kept: Mapping[str, Tensor], layout: CacheLayout, n_tokens: int) -> bool:
        """Whether a layer could keep these tensors, by the names of `state`, of `n_tokens` tokens.

        Asked of a context file, which is not trusted. Kinds of state check what they know; a method checks the shapes
        that would broadcast, and what must agree between states. What keeps nothing yet has no tensor.
        """
        return True

    def key_positions(self, indices: Tensor) -> Tensor | None:
        """Where the keys of tokens `indices [T]` are rotated to before they are cached; None: left unrotated."""
        return indices

    def keep(self, k: Tensor, v: Tensor, cache: LayerCache, step: Step) -> None:
        """Put the block's unrotated keys and its values `[G, T, D]` into the cache."""
        cache.write(k, v, step.key_turn(self.key_positions, k), step.at)

    @abstractmethod
    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        """The block's unrotated queries `[H, T, D]` to their outputs `[H, T, D]`; `keep` has been called."""

    def spans(self, cache: LayerCache, step: Step) -> Tensor | None:
        """Which tokens each query of the block attends whatever is chosen; for study, after `attend`.

        `[T, S, 2]` int64: tokens `start..stop-1` of S spans, disjoint and in order; an empty one has `stop <= start`.
        With the choices that `step.note` is given these are all that a query attends. None: the method does not say.
        """
        return None

    def always(self, cache: LayerCache, step: Step) -> Tensor | None:
        """The same as a mask, `[T, N]` bool. It follows from `spans`, or a method defines it instead."""
        found = self.spans(cache, step)
        return None if found is None else mask_of(found, step.stop)

    def distance(self, index: Tensor, token: Tensor, step: Step) -> Tensor | None:
        """The distance at which queries of the block see tokens that they attend whatever is chosen; for study.

        `index [T, 1]` are the queries' indices, `token [n]` or `[T, n]` the tokens'; returns `[T, n]`. Tokens that a
        query does not attend may get any number. None: the method does not say.
        """
        positions = self.key_positions(token.flatten())
        return index - token if positions is not None and torch.equal(positions, token.flatten()) else None

    def choice_distance(self, chosen: Tensor, step: Step) -> Tensor | None:
        """The least and the largest distance at which the block's queries see what they chose; for study.

        `chosen [H, T, K]` as `step.note` is given it; returns `[H, T, K, 2]`. The tokens of a choice are at distances
        that fall by 1 from each to the next, or all at one. None: the method does not say.
        """
        return None

    def decode(self, q: Tensor, cache: LayerCache, step: DeviceStep) -> Tensor:
        """What `attend` gives for a token whose index only the device knows: `[H, 1, D]` to `[H, 1, D]`.

        Such a step is recorded once and run again for the tokens after it. So all that depends on the index is on the
        device, and shapes depend on `step.bound` alone; everything is in the cache's buffer (`LayerCache.whole`).
        Optional: the steps of a method that has none run one by one.
        """
        raise OnDevice("decode")

    def bound(self, stop: int) -> int | None:
        """How long a text a decode step may be recorded for that makes it `stop` tokens long; `DeviceStep.bound`.

        None: this very step is not `decode`'s, because something is to be done that most steps do not do.
        """
        return bucket(stop)

    def cost(self, block: QueryBlock) -> Cost | None:
        """What the resolved method costs for a block of queries in one layer, for `lce plan --operations`.

        None: not counted. Example: `return block.recent(self.local) + block.behind(self.local, stop=self.sinks)`.
        """
        return None

    @property
    def counted(self) -> bool:
        """Whether `cost` is there, and means what `attend` and `keep` do: no class below its own overrides them."""
        return type(self).cost is not Method.cost and says_for(type(self), "cost", "attend", "keep")

    def paper_figures(self, block: QueryBlock) -> Sequence[PaperFigure]:
        """Figures of cost that the method's paper states, for a model of such sizes."""
        return ()

    @property
    def decodes(self) -> bool:
        """Whether `decode` is there, and means what `attend` and `keep` do: no class below its own overrides them."""
        own = type(self).decode is not Method.decode
        return own and says_for(type(self), "decode", "attend", "keep")


class LocalMethod(Method):
    """A method that sees the last `local` tokens at their true distance, and farther ones from positions of its own.

    Keys are cached unrotated, to be seen from one position; the last `n_recent` are also kept at their own.
    """

    local: int | None  # a knob of each derived class, as is `sinks` where there are some
    sinks = 0

    @property
    def n_local(self) -> int:
        """`local`, once it is resolved."""
        assert self.local is not None, "resolved before use"
        return self.local

    @property
    def n_recent(self) -> int:
        """How many tokens before a block are kept with their keys at their absolute positions (`attend_local`)."""
        return self.n_local

    @property
    def reach(self) -> Reach:
        return Reach(sinks=self.sinks, local=self.n_recent)

    def state(self, layout: CacheLayout) -> Mapping[str, MethodState]:
        unrotated = self.key_positions(torch.zeros(0, dtype=torch.int64)) is None
        return {RECENT: RecentRows(self.n_recent, layout.key_bytes, remade=unrotated)}

    def could_keep(self, layer: int, kept: Mapping[str, Tensor], layout: CacheLayout, n_tokens: int) -> bool:
        return RECENT in kept and kept[RECENT].shape[::2] == (layout.n_kv_heads, layout.head_dim)

    def key_positions(self, indices: Tensor) -> Tensor | None:
        return None

    def keep(self, k: Tensor, v: Tensor, cache: LayerCache, step: Step) -> None:
        super().keep(k, v, cache, step)
        keep_recent(k, cache, step)
