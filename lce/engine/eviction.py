"""KVzip (Kim et al., 2025, arXiv:2505.23416): evicts the keys that the model needs least to repeat its context.

After prefill the model is made to repeat the text, chunk by chunk: a pass appends a prompt and the chunk's own tokens,
and is then dropped. The score of a key is the largest attention weight that the pass of its chunk gives it, over all
queries of the pass and the query heads that share the key. The softmax is over the chunk's keys, the first `SINKS` keys
of the text, and the keys of the pass itself, as in the authors' code. Each KV head of each layer keeps the keys with
the best scores, all heads the same number: the paper's uniform variant. Its main form shares one number among all
heads, which a cache with the same number of rows in all heads and layers cannot hold. Keys stay at their positions.

Example: of 8 tokens, `keep=0.5` keeps 4 rows in each head, maybe those of tokens 0, 1, 3, 6 in one and 0, 1, 2, 7 in
another. Token 8 then comes into row 4, at position 8.

Full attention alone reads such rows, because it sees every row and need not know which token a row has.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lce.attention import SCORES_AT_ONCE, best_first, rotate
from lce.cache.kv import Eviction, KVCache
from lce.engine.context import Context, context_of, given_context, reserve
from lce.engine.options import Checked
from lce.engine.running import append, blocks, unread
from lce.engine.setup import Setup
from lce.errors import UsageError
from lce.methods.full import Full
from lce.methods.step import Step
from lce.methods.wrapped import Observation, Observed
from lce.progress import Progress, check_progress, reported
from lce.tokenizer.tokenizer import Tokenizer

CHUNK = 2048  # the most tokens that a pass repeats
LEAST = 256  # the fewest, where the window has no space for more
LEAD = 8  # the tokens before a later chunk that its prompt ends with
SINKS = 4  # first tokens, which are never evicted and in every softmax, as the system prompt is in the authors' code
FIRST = "\n\nRepeat the previous context exactly.\n\n"
SHARE = Checked("a share above 0, at most 1", lambda keep: 0 < keep <= 1)
LATER = "\n\nRepeat the part of the previous context exactly, starting with "


def evict(setup: Setup, context: Context, keep: float, progress: Progress | bool | None = None) -> Context:
    """Return a new context with the share `keep` of the keys and values of `context`: see `Engine.evict`."""
    setup.together(lambda: check(setup, keep, given_context(setup, context), progress), lambda _: {"keep": keep})
    n_rows = max(1, round(keep * len(context)))
    if n_rows >= len(context):
        return context.fork()
    passes = repetitions(context.token_ids, setup.tokenizer, setup.readable)
    with context.hold(), reported(progress, "repeat") as tell:
        needed = len(context) + max(len(each.ids) for each in passes)
        setup.warn(needed, context.rope)
        append(setup, context, unread(setup, context))
        reserve(setup, context.cache, needed)
        rows = [best_rows(peaks, n_rows) for peaks in attention_peaks(setup, context, passes, tell)]
        cache = KVCache.empty(setup.layout)
        reserve(setup, cache, n_rows)
        copy_rows(context.cache, rows, cache)
        return context_of(setup, replace(context.data, cache=cache, source=None, saves=set()))


def check(setup: Setup, keep: object, context: Context | None, progress: object = None) -> None:
    """Raise `UsageError` if `keep` is no share, or if no keys of such contexts, or of this one, can be evicted."""
    SHARE(keep, "keep")
    check_progress(progress)
    method, config = setup.method, setup.model.config
    if type(method) is not Full:
        raise UsageError(f"keys are evicted under the method full alone, and this engine has {method.label}; load full")
    if config.sliding_window is not None or any(kind.sliding_window is not None for kind in config.kinds):
        raise UsageError("keys are not evicted of a model with a sliding window, which must know each key's position")
    if context is not None and context.cache.fixed:
        raise UsageError("keys of this context were evicted before, which is done once; prefill its text again")


class Repetition(NamedTuple):
    """A pass in which the model repeats tokens `start..stop-1` of its text, by `ids`: a prompt, then these tokens."""

    start: int
    stop: int
    ids: Sequence[int]


def repetitions(text: Sequence[int], tokenizer: Tokenizer, longest: int | None) -> list[Repetition]:
    """Return the passes that repeat a text, each short enough for a text of `longest` tokens, if any."""
    first, later = (tokenizer.encode(prompt, bos=False) for prompt in (FIRST, LATER))
    space = CHUNK if longest is None else longest - len(text) - max(len(first), len(later) + LEAD)
    size, found = max(LEAST, min(CHUNK, space)), []
    for start in range(0, len(text), size):
        prompt, own = ([*later, *text[start - LEAD : start]], start) if start else (first, 0)
        if start == 0 and text[0] == tokenizer.bos_id:
            own = 1  # a second beginning of the text would draw attention from the first
        stop = min(start + size, len(text))
        found.append(Repetition(start, stop, [*prompt, *text[own:stop]]))
    return found


class AttentionPeaks:
    """Observes passes after a text of `n_tokens` tokens: the largest attention weight of each key of a `span`."""

    def __init__(self, n_tokens: int) -> None:
        self.n_tokens, self.span = n_tokens, (0, n_tokens)
        self.peaks: dict[int, Tensor] = {}  # `[G, n_tokens]`, by layer

    def rows(self, step: Step) -> Tensor:
        """Return no rows: choices are not observed."""
        return torch.zeros(0, dtype=torch.int64)

    def observe(self, seen: Observation, out: Tensor) -> Tensor:
        """Update the peaks of the layer's keys by the queries of a block."""
        (start, stop), step, cache = self.span, seen.step, seen.cache
        n_sinks, turn = min(SINKS, start), step.true_turn(seen.q)
        spans = (0, n_sinks), (start, stop), (self.n_tokens, step.stop)
        k = torch.cat([cache.span(*span)[0] for span in spans], dim=1)
        lse = step.attention.dense(seen.q, k, k, causal=True, turn=turn)[1].reshape(len(k), -1, 1)
        q = (rotate(seen.q, turn).float() / math.sqrt(k.shape[2])).reshape(len(k), -1, k.shape[2])  # [G, H/G · T, D]
        k = k[:, n_sinks : n_sinks + stop - start].float().mT
        if seen.layer not in self.peaks:
            self.peaks[seen.layer] = q.new_zeros(len(k), self.n_tokens)
        peaks = self.peaks[seen.layer][:, start:stop]
        at_once = max(1, SCORES_AT_ONCE // (len(k) * k.shape[2]))
        for some, total in zip(q.split(at_once, 1), lse.split(at_once, 1), strict=True):
            weights = torch.baddbmm(-total, some, k).amax(dim=1).exp_()  # all queries of the pass see the whole chunk
            torch.maximum(peaks, weights, out=peaks)
        return out


@torch.inference_mode()
def attention_peaks(setup: Setup, context: Context, passes: Sequence[Repetition], progress: Progress) -> list[Tensor]:
    """Run the passes after a context, which stays as it is. Return the peaks of its keys, `[G, N]` for each layer."""
    observer, mark, done = AttentionPeaks(len(context)), context.mark(), 0
    driver = replace(setup.driver, method=Observed(setup.method, observer))
    try:
        for each in passes:
            context.cache.go_back(mark.cache)
            observer.span = each.start, each.stop
            for part in blocks(each.ids, setup.block):
                append(setup, context, [part], driver)
                progress(done := done + len(part), sum(len(each.ids) for each in passes))
    finally:
        context.go_back(mark)
    return [observer.peaks[layer.index] for layer in context.cache.layers]


def best_rows(peaks: Tensor, n_rows: int) -> Tensor:
    """Return the `n_rows` tokens with the largest peaks in each KV head, and the sinks: `[G, N]` to `[G, n_rows]`."""
    peaks = peaks.index_fill(1, torch.arange(min(SINKS, peaks.shape[1]), device=peaks.device), torch.inf)
    return best_first(peaks, n_rows).sort(dim=1).values


@torch.inference_mode()
def copy_rows(cache: KVCache, rows: Sequence[Tensor], into: KVCache) -> None:
    """Fill an empty cache with the tokens `rows [G, n]` of each layer of `cache`, ascending in each KV head."""
    n_rows = rows[0].shape[1]
    into.evicted = Eviction(cache.length, n_rows)
    for some in zip(*(x.split(cache.layout.block, dim=1) for x in rows), strict=True):
        into.begin()
        into.reserve(into.length + some[0].shape[1])
        for layer, made, index in zip(cache.layers, into.layers, some, strict=True):
            first, last = (int(x) for x in index.aminmax())
            columns = (index - first)[..., None].expand(-1, -1, cache.layout.head_dim)
            k, v = (x.gather(1, columns) for x in layer.span(first, last + 1))
            made.write(k, v)
        into.commit()
