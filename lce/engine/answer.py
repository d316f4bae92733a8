"""From logits to the tokens and the text of an answer. Text is returned once no later token can change it."""

from __future__ import annotations

import time
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from torch import Tensor

from lce.cache.tier import Traffic
from lce.engine.arguments import Options
from lce.engine.sampling import Sampler
from lce.tokenizer.tokenizer import Tokenizer


@dataclass
class Stats:
    """The figures of one generation: times in seconds, memory of the cache in bytes by tier, its traffic so far."""

    prompt_tokens: int = 0  # of this call
    read_before: int = 0  # tokens that the context had before this call
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
        """Tokens a second after the first one; 0 for fewer than two tokens."""
        return max(0, self.generated_tokens - 1) / self.decode_s if self.decode_s else 0.0


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probabilities of a drawn token and of the likeliest ones, at temperature 1 and before all filters."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass
class Generation:
    """A generated `text`, its `token_ids`, and the figures.

    `finish_reason` is `stop` for an end token or a stop string, `length` for `max_tokens`, `cancelled` for a stream
    that was ended early, and empty until then. `logprobs`, if requested, has an entry for each token. `warning` says
    that the text became longer than the method can read.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stats: Stats = field(default_factory=Stats)
    logprobs: list[TokenLogprobs] | None = None
    warning: str | None = None


@dataclass(frozen=True)
class Piece:
    """A piece of a generation's text, `str(piece)` or `piece.text`. Later pieces do not change earlier ones."""

    text: str

    def __str__(self) -> str:
        return self.text


class Answer:
    """An answer being generated: `take` turns logits into a token and its text, and decides when the answer ends.

    An end token or a stop string ends the text and is not part of it. `result.text` is all that `take` returned. The
    caller appends the last of `result.token_ids` to the context before the next `take`, unless the answer is `done`.
    """

    def __init__(self, options: Options, eos_ids: Set[int], tokenizer: Tokenizer, result: Generation) -> None:
        self.options = options
        self.result = result
        self._eos_ids = eos_ids
        self._sampler = Sampler(options.sampling)
        self._detokenizer = tokenizer.stream()
        self._watch = StopWatch(options.sampling.stops)
        self._since = time.perf_counter()

    @property
    def done(self) -> bool:
        """Whether the answer has ended: `result.finish_reason` says why."""
        return bool(self.result.finish_reason)

    @property
    def ahead(self) -> bool:
        """Whether sampling is greedy, and the next token is to be read unless the text ends with it."""
        options = self.options
        plain = options.sampling.temperature == 0 and options.logprobs is None
        return plain and len(self.result.token_ids) + 1 < options.max_tokens

    def take(self, logits: Tensor, likeliest: int | None = None) -> str:
        """Draw a token under `logits [vocab]`, whose `likeliest` may be known; return the text that is now final.

        A call that fails changes nothing.
        """
        options, result, stats = self.options, self.result, self.result.stats
        n, said, reason = len(result.token_ids), result.text, result.finish_reason
        try:
            known = likeliest if options.sampling.temperature == 0 else None
            token_id = self._sampler.pick(logits) if known is None else known
            now = time.perf_counter()
            if not n:
                stats.first_token_s, self._since = stats.prefill_s + now - self._since, now
            stats.decode_s = now - self._since
            text = ""
            if token_id in self._eos_ids:
                result.finish_reason = "stop"
            else:
                if result.logprobs is not None and options.logprobs is not None:
                    result.logprobs.append(logprobs_of(logits, token_id, options.logprobs))
                result.token_ids.append(token_id)
                stats.generated_tokens = n + 1
                text = self._watch.push(self._detokenizer.push(token_id))
                if self._watch.stopped or options.sampling.wants_end(said + text):
                    result.finish_reason = "stop"
                elif n + 1 == options.max_tokens:
                    result.finish_reason = "length"
            if result.finish_reason:
                text += self._watch.push(self._detokenizer.finish()) + self._watch.finish()
                if self._watch.stopped:
                    result.finish_reason = "stop"
            result.text = said + text
        except BaseException:
            del result.token_ids[n:]
            if result.logprobs is not None:
                del result.logprobs[n:]
            stats.generated_tokens, result.text, result.finish_reason = n, said, reason
            raise
        return text


def logprobs_of(logits: Tensor, token_id: int, n_top: int) -> TokenLogprobs:
    """Return log-probabilities under logits `[vocab]`, in float32: the token's, and the `n_top` best, best first."""
    logprobs = logits.float().log_softmax(-1)
    best = logprobs.topk(min(n_top, len(logprobs)))
    top = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return TokenLogprobs(token_id, float(logprobs[token_id]), top)


class StopWatch:
    """A filter that holds back text that could begin a stop string, and ends at the first complete one.

    The first is the one whose last character comes first; of several, the longest. So tokenization does not matter.
    Example: with stops `abc` and `b`, the text `abc` ends before its `b`.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = stops
        self.stopped = False
        self._held = ""

    def push(self, text: str) -> str:
        """Add text; return the text that cannot be part of a stop string."""
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
        """Return the text still held back, at the end of the generation."""
        return "" if self.stopped else self._held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
