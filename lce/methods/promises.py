"""What the engine may rely on in a class of methods: promises, each with the hooks on which it stands.

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
- `plain`: attention to spans is what the parts say, and nothing is kept but keys, values and recent keys.
- `dense`, of a method that chooses chunks: a text of no more chunks than a query attends has full attention.
- `complete`, of the same: in a recorded step, incomplete chunks change no score or choice of other chunks.
- `kernel`, of the same: a GPU kernel may choose as `plain_choice` says.
- `hookless`, of a `SelectiveMethod`: its selector chooses; the class has no hooks of its own.
- `vectors`, of the same: scores are dot products with a vector for each chunk and query head.
- `best`, of the same: the chunks with the best scores are chosen.
- `analysis`: the method is for study only; error messages never suggest it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Literal

_OfChoices = Literal["dense", "complete", "kernel", "hookless", "vectors", "best"]
Promise = Literal["alike", "counted", "recorded", "noted", "kept", "by_head", "plain", "analysis", _OfChoices]
Promises = Mapping[Promise, Sequence[str]]
ATTENTION = ("keep", "keep_queries", "attend", "attend_part")  # the hooks that compute attention
ATTENDING = ("keep", "attend", "attend_part")
# The hooks of `SelectiveMethod`.
HOOKS = ("summarise", "score", "log_mass", "forced", "select", "uses_queries", "summary_vectors")
OF_HOOKS: Promises = {"hookless": (*HOOKS, "choose"), "vectors": ("score",), "best": ("select",)}


def selecting(*hooks: str) -> Promises:
    """Return the promises of methods whose choice depends on `choose` and, if any are given, on further `hooks`."""
    scored = [hook for hook in hooks if hook in ("score", "select", "forced")]
    return {
        **dict.fromkeys(("alike", "by_head"), (*ATTENTION, "choose", *hooks)),
        **dict.fromkeys(("recorded", "noted", "kept"), ATTENDING),
        "counted": (*ATTENDING, "choose"),
        "dense": ("attend_part", "parts_of", "key_positions", "choose", *(["select"] if hooks else [])),
        "complete": scored,
        "kernel": ("choose", *scored),
    }


def promises_of(cls: type) -> frozenset[Promise]:
    """Return what a class of methods promises."""
    return _promises(cls)


@functools.cache
def _promises(cls: type) -> frozenset[Promise]:
    found: dict[Promise, Sequence[str]] = {}
    for each in reversed(cls.__mro__):
        own = vars(each)
        found = {what: hooks for what, hooks in found.items() if own.keys().isdisjoint(hooks)}
        found |= own.get("_promises", {})
    return frozenset(found)
