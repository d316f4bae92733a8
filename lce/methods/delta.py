"""Delta attention: a sparse prefill, corrected by the difference between dense and sparse attention of some queries."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, replace
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor

from lce.cache.layer import LayerCache
from lce.cache.layout import AccessPattern, CacheLayout
from lce.cache.method_state import FileTensor, FirstRow, MethodState, RecentRows
from lce.errors import UsageError, nearest, shown
from lce.methods.base import ATTENTION, Example, Method, Promise, filled, is_like, knob, resolved
from lce.methods.costs import Cost, QueryBlock, cost, cost_of_spans
from lce.methods.dca import DualChunk
from lce.methods.full import Full
from lce.methods.knobs import knobs_of, settings, spelled
from lce.methods.lm_infinite import LMInfinite
from lce.methods.parts import RECENT
from lce.methods.registry import UserFile, make, register, user_file
from lce.methods.rerope import ReRope
from lce.methods.self_extend import SelfExtend
from lce.methods.step import ModelFacts, Step
from lce.methods.streaming import Streaming
from lce.methods.turned_keys import recent_keys

DIFFERENCE = "difference"  # the name of the state that holds the open group's difference
DENSE: tuple[type[Method], ...] = Full, ReRope, SelfExtend, DualChunk
PAIRS = (
    "pairs that work: full with streaming, quest, or placement=true; rerope with lm_infinite, infllm, esa, or "
    "placement=constant; self_extend with placement=grouped and its group; dca with side_by_side or placement=dual and "
    "its chunk_size"
)


@register("delta")
@dataclass(frozen=True)
class Delta(Method, promises=dict.fromkeys(("alike", "counted", "recorded", "by_head"), ATTENTION)):
    """Delta attention (Willette et al., 2025, "Fast and Accurate Sparse Attention Inference by Delta Correction").

    The attention of the method `method`, corrected by that of the method `dense`, which attends every key. Queries are
    in groups of `every`, the paper's gamma. The first query of a group is dense. Its difference, dense output minus
    sparse output, is added to the sparse outputs of the group's other queries: neighbours miss nearly the same.

    In a block of at most `dense_up_to` queries all are dense. The default, 1, makes decode steps dense, as in the
    released code; with 0 decode steps are corrected, too. With `correct=false` no difference is added: the ablation
    `recompute` of the released code.

    `method` and `dense` are spelled `NAME:KNOB=VALUE:KNOB=VALUE`. Both must cache keys at the same positions. If
    `dense` is not given, it is the first of `full`, `rerope`, `self_extend` and `dca` that does. `streaming` and
    `lm_infinite` have a default of their own here: `local` is a quarter of the window.

    Example: `every=4`; query 6 is sparse, and gets the difference of query 4.

    Cost: that of `method`, and O(N / every · D) per token and head; O(N · D) in decode. A layer keeps H · D numbers.
    """

    method: str = knob("streaming", "the sparse method, and its knobs: streaming:sinks=4:local=1024")
    dense: str | None = knob(None, "the dense method, and its knobs; none is one that caches keys alike")
    every: int = knob(64, "queries of a group, whose first is dense", least=1)
    dense_up_to: int = knob(1, "queries of a block up to which all are dense; 1 is decode steps", least=0)
    correct: bool = knob(True, "add differences to the outputs of queries that are not dense")
    example: ClassVar = Example({"method": "lm_infinite:sinks=2:local=5", "dense": "rerope:local=6", "every": 6})

    def for_model(self, model: ModelFacts) -> Self:
        dense = None if self.dense is None else self._spell(self.dense_method.for_model(model))
        return replace(self, method=self._spell(self.sparse_method.for_model(model)), dense=dense)

    def resolve(self, window: int) -> Self:
        """Return this method with the knobs of both methods filled in. Raises `UsageError` if they do not pair."""
        made, sparse = filled(self), self.sparse_method
        if isinstance(sparse, Streaming | LMInfinite):
            sparse = filled(sparse, local=max(1, window // 4))
        sparse = sparse.resolve(window)
        if made.dense is not None:
            dense = made.dense_method.resolve(window)
        else:
            dense = next((each for each in dense_methods(sparse, window) if keys_match(sparse, each, window)), sparse)
        if not isinstance(dense, DENSE):
            expected = nearest(dense.label, [cls.name for cls in DENSE])
            why = "no dense method caches keys as" if self.dense is None else f"dense is {dense.label}; {expected};"
            raise UsageError(f"{self.label}: {why} {sparse.label}; {PAIRS}")
        if not keys_match(sparse, dense, window):
            raise UsageError(f"{self.label}: {dense.label} caches keys at other positions than {sparse.label}; {PAIRS}")
        return replace(made, method=made._spell(sparse), dense=made._spell(dense))

    @cached_property
    def sparse_method(self) -> Method:
        """The sparse method."""
        return self._made("method", self.method)

    @cached_property
    def dense_method(self) -> Method:
        """The dense method, if the knob is given or filled in."""
        return self._made("dense", resolved(self.dense))

    def _made(self, which: str, text: str) -> Method:
        name, *pairs = text.split(":")
        if wrong := [pair for pair in pairs if "=" not in pair]:
            raise UsageError(f"{self.label}: {which} has {shown(wrong[0])}; expected NAME:KNOB=VALUE:KNOB=VALUE")
        if name == self.name:
            raise UsageError(f"{self.label}: {which} is {name} itself; expected another method")
        return make(name, dict(pair.split("=", 1) for pair in pairs))

    def _spell(self, method: Method) -> str:
        usual, said = {each.name: each.default for each in knobs_of(type(method))}, []
        for name, value in settings(method).items():
            text = spelled(value)
            if not isinstance(value, str | int | float | None) or ":" in text:
                what = f"{name} of {method.label} cannot be spelled"
                raise UsageError(f"{self.label}: {what}; choose knobs without {name}")
            if value is not None or usual[name] not in (None, MISSING):
                said.append(f"{name}={text}")
        return ":".join((method.name, *said))

    @property
    def block(self) -> int:
        return self.sparse_method.block

    @property
    def access(self) -> AccessPattern:
        own, other = self.sparse_method.access, self.dense_method.access
        return replace(own, sinks=max(own.sinks, other.sinks), local=max(own.local, other.local))

    @property
    def choices(self) -> tuple[int, int]:
        return self.sparse_method.choices

    def limit(self, window: int, sliding_window: int | None = None) -> int | None:
        limits = [each.limit(window, sliding_window) for each in (self.sparse_method, self.dense_method)]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def couples_heads(self) -> str | None:
        return self.sparse_method.couples_heads or self.dense_method.couples_heads

    def state(self, layout: CacheLayout) -> Mapping[str, MethodState]:
        both = self.dense_method.state(layout), self.sparse_method.state(layout)
        recent = [each[RECENT] for each in both if RECENT in each]
        sizes = [(each.n_kept, each.grid) for each in recent if isinstance(each, RecentRows)]
        n_recent, grid = map(max, zip((0, 1), *sizes, strict=True))
        kept = {**both[0], **both[1], **recent_keys(self, n_recent, layout, grid)}
        row_bytes = layout.n_heads * layout.head_dim * torch.float32.itemsize
        return {**kept, DIFFERENCE: FirstRow(self.every, row_bytes)}

    def could_keep(self, layer: int, kept: Mapping[str, FileTensor], layout: CacheLayout, n_tokens: int) -> bool:
        own, shape = kept.get(DIFFERENCE), (layout.n_heads, 1, layout.head_dim)
        fits = n_tokens % self.every == 0 if own is None else is_like(own, shape, torch.float32)
        others = self.sparse_method, self.dense_method
        return fits and all(each.could_keep(layer, kept, layout, n_tokens) for each in others)

    def key_positions(self, indices: Tensor) -> Tensor | None:
        return self.sparse_method.key_positions(indices)

    def keep(self, k: Tensor, v: Tensor, cache: LayerCache, step: Step) -> None:
        self.sparse_method.keep(k, v, cache, step)

    def attend(self, q: Tensor, cache: LayerCache, step: Step) -> Tensor:
        if step.at is not None:
            self.sparse_method.keep_queries(q, cache, step)
            return self.dense_method.attend(q, cache, step)
        n, kept = q.shape[1], cache.kept(FirstRow, DIFFERENCE)
        first = -step.start % self.every  # the block's first query that begins a group
        begins, all_dense = first < n, n <= self.dense_up_to
        if self._needs_sparse(begins, all_dense):
            sparse = self.sparse_method.attend(q, cache, step).float()
        else:
            self.sparse_method.keep_queries(q, cache, step)
        differences = [kept.row(step.start // self.every)] if first and not all_dense else []
        if begins or all_dense:
            begin, stride = (0, 1) if all_dense else (first, self.every)
            dense_step = step.once("dense queries", lambda: step.part(begin, n, stride))
            dense = self.dense_method.attend(q[:, begin::stride], cache, dense_step)
        if begins:
            of_groups = dense[:, first :: self.every] if all_dense else dense
            differences.append(of_groups.float() - sparse[:, first :: self.every])
            kept.write(differences[-1][:, -1:], (step.stop - 1) // self.every)
        if all_dense:
            return dense
        if self.correct:
            group = step.once("groups", lambda: step.positions(q.device) // self.every - step.start // self.every)
            sparse = sparse + torch.cat(differences, dim=1)[:, group]
        out = sparse.to(q.dtype)
        if begins:
            out[:, first :: self.every] = dense
        return out

    def _needs_sparse(self, begins: bool, all_dense: bool) -> bool:
        # if all queries are dense: a method whose steps can be recorded keeps nothing while it attends
        return begins or not all_dense or not self.sparse_method.promised("recorded")

    def promised(self, what: Promise) -> bool:
        """Return whether the class and both its methods promise `what`; for `counted` the sparse method is enough."""
        if not super().promised(what) or (what == "recorded" and not self.dense_up_to):
            return False
        others = (self.sparse_method,) if what == "counted" else (self.sparse_method, self.dense_method)
        return all(each.promised(what) for each in others)

    def bound(self, stop: int) -> int | None:
        """Return the smaller bound of both methods; None for a step that begins a group, and writes its difference."""
        bounds = [each.bound(stop) for each in (self.sparse_method, self.dense_method)]
        known = [bound for bound in bounds if bound is not None]
        return min(known) if len(known) == 2 and (stop - 1) % self.every else None

    def choice_cost(self, block: QueryBlock) -> Cost:
        sparse, dense = cost(self.sparse_method, block), torch.arange(block.start, block.stop)
        begins, all_dense = dense % self.every == 0, len(block) <= self.dense_up_to
        if not self._needs_sparse(bool(begins.any()), all_dense):
            sparse = replace(sparse, attention=0, scores=0, rows_read=0, state_read=0)
        return sparse + cost_of_spans(self.dense_method, block, dense if all_dense else dense[begins])


@user_file.register(Delta)
def _(method: Delta) -> UserFile | None:
    return user_file(method.sparse_method)


def dense_methods(sparse: Method, window: int) -> list[Method]:
    """Return the dense methods, resolved, with the knobs of `sparse` that say where keys are cached."""
    knobs = settings(sparse)
    group, size, far = (knobs.get(name, knobs.get(f"placement.{name}")) for name in ("group", "chunk_size", "far"))
    made = [Full(), ReRope(), SelfExtend(group=SelfExtend.group if group is None else group)]
    if size is None or size <= window:
        made.append(DualChunk(chunk_size=size, far=None if far is None or size is None or far < size - 1 else far))
    return [each.resolve(window) for each in made]


def keys_match(one: Method, other: Method, window: int) -> bool:
    """Return whether two methods cache keys at the same positions, in a text of a few windows."""
    indices = torch.arange(4 * window + 1)
    a, b = one.key_positions(indices), other.key_positions(indices)
    return a is b if a is None or b is None else torch.equal(a, b)
