"""What the engine may rely on in a class of methods: promises, each with the hooks on which it stands.

A class promises by a keyword: `class Mine(Method, promises={"counted": ("attend",)})`. A subclass that overrides one of
a promise's hooks loses the promise, unless it promises the same again. So a class of which nobody knows what its hooks
do has the safe answer. `Method` promises all but `analysis` for a class that is what its parts are.

- `alike`: a step of one token calls the same kernels in all layers of a kind, with other addresses, so that one layer's
  kernels may serve the others, if all that the method keeps is `steady`. No operator of PyTorch computes anything.
- `counted`: the cost that `parts_of` and `choice_cost` declare is that of a run.
- `recorded`: decode steps can be recorded as CUDA graphs: `attend` and `keep` take a `DeviceStep`.
- `noted`: the chunks or tokens that queries choose are passed to `Step.note`.
- `kept`: `keep` and `keep_queries` alone make the method's state, not attention.
- `by_head`: a KV head's outputs depend on no other KV head.
- `plain`: attention to spans is what the parts say, and nothing is kept but keys, values and recent keys.
- `dense`, of a method that chooses chunks: a text of no more chunks than a query attends has full attention.
- `complete`, too: scores and choices of chunks that a recorded step finds incomplete change no others.
- `kernel`, too: a GPU kernel may choose as `plain_choice` says.
- `hookless`, of a `SelectiveMethod`: its selector chooses, and no hook of the class.
- `vectors`, too: scores are dot products with a vector for each chunk and query head.
- `best`, too: the chunks with the best scores are chosen.
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
    """Return what methods promise whose choice stands on `choose`, and on `hooks` that they have besides."""
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
