"""The decode loop: one token after another, and their text as soon as no later token can change it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from lce.cache.tiers import Traffic
from lce.engine.context import Context
from lce.engine.sampling import Sampler, Sampling
from lce.tokenizer.tokenizer import Tokenizer


@dataclass
class Stats:
    """The figures of one generation: times in seconds, memory of the cache in bytes by tier, its traffic so far."""

    prompt_tokens: int = 0  # those of this call
    read_before: int = 0  # tokens in front of them, which the context had already
    generated_tokens: int = 0
    prefill_s: float = 0.0  # of this call's prompt
    first_token_s: float = 0.0  # from the beginning of the call
    decode_s: float = 0.0  # after the first token
    memory: dict[str, int] = field(default_factory=dict)  # bytes of the cache by tier
    traffic: dict[str, Traffic] = field(default_factory=dict)  # by tier, where the cache has more than one

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens a second; 0 where nothing was prefilled."""
        return self.prompt_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens a second after the first one; 0 where there is one at most."""
        return max(0, self.generated_tokens - 1) / self.decode_s if self.decode_s else 0.0


@dataclass(frozen=True)
class Request:
    """One generation to make: the tokens to prefill, how to draw the next ones, and when to end."""

    token_ids: Sequence[int]
    sampling: Sampling
    max_tokens: int
    eos_ids: frozenset[int]
    logprobs: int | None = None  # how many of the likeliest tokens are kept beside each drawn one; None: nothing


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of a drawn token, and the likeliest tokens with theirs.

    They are the model's own, at temperature 1 and before all filters.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass
class Generation:
    """What was generated: `text`, its `token_ids`, and the figures.

    `finish_reason` is `stop` for an end token or a stop, `length` for `max_tokens`, `cancelled` for a stream that was
    ended early, and empty until it ends. `logprobs` has an entry a token where they were asked for. `warning` says that
    the text became longer than the method can read.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stats: Stats = field(default_factory=Stats)
    logprobs: list[TokenLogprobs] | None = None
    warning: str | None = None


@dataclass(frozen=True)
class Piece:
    """A piece of a generation's text, `str(piece)` or `piece.text`; later pieces do not change it."""

    text: str

    def __str__(self) -> str:
        return self.text


class Advance(Protocol):
    """Prefills the context's tokens that are not cached yet: see `Runner._advance`."""

    def __call__(self, context: Context, *, ahead: bool) -> None: ...


def decode(
    context: Context, request: Request, tokenizer: Tokenizer, result: Generation, advance: Advance,
    cancelled: Callable[[], bool] = lambda: False,
) -> Iterator[Piece]:  # fmt: skip
    """Draw up to `max_tokens` tokens and yield their text; `advance` prefills the context's tokens not cached yet.

    It is told when it may go ahead: the next token will be the likeliest one, unless the text ends before it.

    An end token ends the text and is not added to it. A stop string ends it too; only the text before it is yielded.
    Ends before the next token when `cancelled`. `result.text` is always what was yielded; after an error the tokens of
    the context and of the result are those of that text.
    """
    sampling = request.sampling
    sampler, detokenizer = Sampler(sampling), tokenizer.stream()
    watch = StopWatch(sampling.stops)
    started, said = time.perf_counter(), _Said(len(context))
    plain = sampling.temperature == 0 and request.logprobs is None
    try:
        for left in range(request.max_tokens - 1, -1, -1):
            if cancelled():
                return
            advance(context, ahead=plain and left > 0)
            assert context.logits is not None
            token_id = context.likeliest if plain else None
            if token_id is None:
                token_id = sampler.pick(context.logits)
            now = time.perf_counter()
            if not result.token_ids:
                result.stats.first_token_s = result.stats.prefill_s + now - started
                started = now
            result.stats.decode_s = now - started
            if token_id in request.eos_ids:
                result.finish_reason = "stop"
                break
            if request.logprobs is not None:
                assert result.logprobs is not None
                result.logprobs.append(logprobs_of(context.logits, token_id, request.logprobs))
            context.token_ids.append(token_id)
            result.token_ids.append(token_id)
            result.stats.generated_tokens = len(result.token_ids)
            piece = watch.push(detokenizer.push(token_id))
            result.text += piece
            if watch.stopped or sampling.wants_end(result.text):
                result.finish_reason = "stop"
            elif not left:
                result.finish_reason = "length"
            said = _Said(said.n_before, len(result.token_ids), result.text, result.finish_reason)
            if piece:
                yield Piece(piece)
            if result.finish_reason:
                break
        piece = watch.push(detokenizer.finish()) + watch.finish()
        if watch.stopped:
            result.finish_reason = "stop"
        result.text += piece
        said = _Said(said.n_before, len(result.token_ids), result.text, result.finish_reason)
        if piece:
            yield Piece(piece)
    except BaseException:
        said.restore(context, result)
        raise


@dataclass(frozen=True)
class _Said:
    """What was said so far. A token counts once all that it brings is known: an error before that takes it back."""

    n_before: int  # tokens of the context before the answer
    n_tokens: int = 0
    text: str = ""
    finish_reason: str = ""

    def restore(self, context: Context, result: Generation) -> None:
        del context.token_ids[self.n_before + self.n_tokens :]
        del result.token_ids[self.n_tokens :]
        if result.logprobs is not None:
            del result.logprobs[self.n_tokens :]
        result.stats.generated_tokens = self.n_tokens
        result.text, result.finish_reason = self.text, self.finish_reason


def logprobs_of(logits: Tensor, token_id: int, n_top: int) -> TokenLogprobs:
    """Log-probabilities under logits `[vocab]`, in float32: the token's, and the `n_top` best, best first."""
    logprobs = logits.float().log_softmax(-1)
    best = logprobs.topk(min(n_top, len(logprobs)))
    top = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprobs(token_id, float(logprobs[token_id]), top)


class StopWatch:
    """Holds back text that could begin a stop string, and ends at the first complete one.

    The first is the one that is complete first; of several, the longest. So the cut of the text into tokens does not
    matter. Example: with stops `abc` and `b`, the text `abc` ends before its `b`.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = stops
        self.stopped = False
        self._held = ""

    def push(self, text: str) -> str:
        """Add text; returns the text that no stop string can end before."""
        if self.stopped:
            return ""
        self._held += text
        found = [(at + len(stop), at) for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._held[: min(found)[1]]
        certain = len(self._held) - max((_overlap(self._held, stop) for stop in self.stops), default=0)
        text, self._held = self._held[:certain], self._held[certain:]
        return text

    def finish(self) -> str:
        """The text that is still held back, at the end of the generation."""
        return "" if self.stopped else self._held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop` and is not all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
