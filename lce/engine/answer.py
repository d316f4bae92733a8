"""Turns logits into the tokens and the text of an answer. Later tokens never change text that was returned."""

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
    """The token counts, times and memory of one call that generates or prefills.

    `prompt_tokens` counts the tokens of the call's prompt, `read_before` those that the context had before the call.
    `first_token_s` is the time from the beginning of the call to the first token, `decode_s` the time after that token,
    `more_s` has the time of further work, by its name.
    `memory` has the cache's bytes by tier (device, host, disk), `traffic` each tier's hits, misses and copied bytes.
    """

    prompt_tokens: int = 0
    read_before: int = 0
    generated_tokens: int = 0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    more_s: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    traffic: dict[str, Traffic] = field(default_factory=dict)

    @property
    def prefill_tokens_per_s(self) -> float:
        """The prompt tokens per second; 0 if nothing was prefilled."""
        return self.prompt_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """The generated tokens per second after the first token; 0 for fewer than two tokens."""
        return max(0, self.generated_tokens - 1) / self.decode_s if self.decode_s else 0.0


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probabilities of a drawn token and, in `top`, of the likeliest tokens, before temperature and filters."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass
class Generation:
    """A generated `text`, its `token_ids`, and the figures in `stats`.

    `finish_reason` says why the text ended: `stop` for an end token or the option `stop`, `length` for `max_tokens`,
    `cancelled` for a stream that was ended early. It is empty until the text ends. `logprobs`, if requested, has an
    entry for each token. `warning` says that the text became longer than the method can read.
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

    An end token or a stop string ends the text and is not part of the text. `result.text` joins all texts that `take`
    returned. Until the answer is `done`, the caller adds the last of `result.token_ids` to the context, and calls
    `take` with the logits after that token.
    """

    def __init__(
        self, options: Options, eos_ids: Set[int], tokenizer: Tokenizer, result: Generation, prompt: Sequence[int] = ()
    ) -> None:
        self.options = options
        self.result = result
        self._eos_ids = eos_ids
        self._sampler = Sampler(options.sampling, prompt)
        self._detokenizer = tokenizer.stream()
        self._watch = StopWatch(options.sampling.stops)
        self._since = time.perf_counter()

    @property
    def done(self) -> bool:
        """Whether the answer has ended."""
        return bool(self.result.finish_reason)

    @property
    def ahead(self) -> bool:
        """Whether the next step may be launched before its token is read: if sampling is greedy and a step follows."""
        options = self.options
        plain = options.sampling.greedy and options.logprobs is None and options.constraint is None
        return plain and len(self.result.token_ids) + 1 < options.max_tokens

    def take(self, logits: Tensor, likeliest: int | None = None) -> str:
        """Draw a token from `logits [vocab]`, and return the new text that later tokens cannot change.

        `likeliest` is the argmax of the logits, if known. A call that fails changes nothing.
        """
        options, result, stats, stop = self.options, self.result, self.result.stats, self.options.sampling.stop
        n, said, reason = len(result.token_ids), result.text, result.finish_reason
        try:
            constraint = options.constraint
            allowed = logits if constraint is None else constraint.apply(logits.clone())
            known = likeliest if options.sampling.greedy and constraint is None else None
            token_id = self._sampler.pick(allowed, result.token_ids) if known is None else known
            if constraint is not None:
                constraint.accept(token_id)
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
                if self._watch.stopped or (callable(stop) and stop(said + text)):
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
    """Return float32 log-probabilities under logits `[vocab]`: a token's, and those of the `n_top` largest logits.

    The largest logit comes first, and of equal logits the lower id, which is the token that greedy sampling draws.
    """
    logprobs = logits.float().log_softmax(-1)
    least = logits.topk(min(max(n_top, 1), len(logits))).values[-1]
    ids = (logits >= least).nonzero()[:, 0]
    ids = ids[logits[ids].argsort(descending=True, stable=True)][:n_top]
    top = list(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
    return TokenLogprobs(token_id, float(logprobs[token_id]), top)


class StopWatch:
    """A filter that holds back text which may begin a stop string, and ends the text at the first complete one.

    The first stop string is the one that ends first; of several that end there, the longest. So the result does not
    depend on how the text is cut into tokens. Example: with stops `abc` and `b`, the text `abc` ends before its `b`.
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
        """Return the text that is still held back when the generation ends."""
        return "" if self.stopped else self._held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`, but not all of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
