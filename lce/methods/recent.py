"""Recent keys: those of the last tokens, kept at their absolute positions besides where a method caches all keys."""

from __future__ import annotations

import torch
from torch import Tensor

from lce.attention import rotate
from lce.cache.layer import LayerCache
from lce.cache.layout import CacheLayout
from lce.cache.method_state import MethodState, RecentRows
from lce.methods.parts import RECENT, Declaring
from lce.methods.step import Step

NO_TOKENS = torch.zeros(0, dtype=torch.int64)


def unrotated(method: Declaring) -> bool:
    """Return whether a method caches keys unrotated."""
    return method.key_positions(NO_TOKENS) is None


def recent_keys(method: Declaring, n: int, layout: CacheLayout) -> dict[str, MethodState]:
    """Return the state of the keys of the last `n` tokens at absolute positions, for parts with `exact`; 0: none."""
    return {RECENT: RecentRows(n, layout.key_bytes, remade=unrotated(method))} if n else {}


def keep_recent(k: Tensor, cache: LayerCache, step: Step) -> None:
    """Rotate the block's unrotated keys `k [G, T, D]` to their absolute positions, and store them as recent keys.

    Recent keys that a truncation of the cache removed are computed again from the unrotated keys in the cache.
    """
    recent = cache.kept(RecentRows, RECENT)
    if step.at is not None:
        recent.write_on_device(rotate(k, step.true_turn(k)), step.at)
        return
    if lost := recent.missing(step.start):
        old = cache.span(lost.start, lost.stop)[0]
        positions = torch.arange(lost.start, lost.stop, device=k.device)
        recent.write(rotate(old, step.rope.turn(positions, k.dtype)), lost.start)
    recent.write(rotate(k, step.true_turn(k)), step.start)
