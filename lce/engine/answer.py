"""Samples the tokens of an answer, and turns them into text. Later tokens never change text that was returned."""

import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypedDict

import torch
from torch import Tensor

from lce.engine.arguments import Sampling
from lce.engine.context import Context
from lce.engine.options import Counted, Record, check_names, option, options_of
from lce.engine.stream import Generation, TokenLogprobs
from lce.errors import UsageError, shown
from lce.profiling import timed
from lce.progress import Progress, check_progress
from lce.sizes import count
from lce.tokenizer.thinking import overlap
from lce.tokenizer.tokenizer import Tokenizer

LEAST_TEMPERATURE, MOST_TEMPERATURE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


class Constraint(Protocol):
    """What a text must match, such as a grammar: it says which tokens may come next."""

    def apply(self, logits: Tensor) -> Tensor:
        """Return logits `[vocab]` with -inf for tokens that may not come next. May overwrite `logits`."""

    def accept(self, token_id: int) -> None:
        """Take the token that comes next."""


class GenerationOptions(TypedDict, total=False):
    """The options of `Engine.generate`, `stream` and `astream`."""

    max_tokens: int | str  # the most tokens to generate: 256 by default; "1k" is 1024
    context: Context | None  # the context to continue; None: a new context
    # None is greedy. The options `temperature` to `frequency_penalty` override fields of `sampling`.
    sampling: Sampling | Mapping[str, Any] | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | None
    stop: str | Sequence[str] | Callable[[str], object] | None
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    stop_token_ids: Sequence[int]
    schema: Mapping[str, Any] | None  # a JSON schema that the text must match
    grammar: str | None  # a grammar that the text must match, in llguidance's Lark syntax
    constraint: Constraint | None  # what else the text must match; an object for one answer alone
    logprobs: int | None  # record log-probabilities: each token's own, and those of this many likeliest tokens
    progress: Progress | bool | None  # prefill's progress: True for a bar, or a callback (tokens done, total)


def _sampling(value: Any, name: str) -> Sampling:
    if isinstance(value, Mapping):
        check_names(value, options_of(Sampling), "knob of sampling")
        return Sampling(**value)
    if value is not None and not isinstance(value, Sampling):
        raise UsageError(f"{name} is {shown(value)}; expected lce.Sampling(...), or its knobs as keywords")
    return value or Sampling()


@dataclass(frozen=True)
class Options(Record):
    """Checked `GenerationOptions`. Only `context` is not checked yet, because its check needs the engine."""

    max_tokens: int = option(256, parse=count)
    context: Context | None = None
    sampling: Sampling = option(factory=Sampling, parse=_sampling)
    schema: Mapping[str, Any] | None = None
    grammar: str | None = None
    constraint: Constraint | None = None
    logprobs: int | None = option(None, parse=Counted(0))
    progress: Progress | bool | None = None

    @property
    def seed(self) -> int | None:
        """The seed by which tokens are drawn; None if none is drawn."""
        return self.sampling.seed if self.sampling.temperature else None


_ELSEWHERE = {  # options of other libraries, and what does the same here
    "stream": "engine.stream yields pieces, for a chat of tokenizer.render_chat(messages)",
    "method": "give it to lce.load, or to batch.stream",
    "system": "give it as a message, or to engine.conversation",
    "n": "give a list of prompts",
}


def generation_options(given: Mapping[str, Any]) -> Options:
    """Check the options of a generation. Raises `UsageError` for an unknown option and an unusable value."""
    more = "".join(f"; {_ELSEWHERE[name]}" for name in given if name in _ELSEWHERE)
    check_names(given, GenerationOptions.__annotations__, "option", more)
    check_progress(given.get("progress"))
    if given.get("constraint") is not None and not hasattr(given["constraint"], "apply"):
        raise UsageError(f"constraint is {shown(given['constraint'])}; expected an object with `apply` and `accept`")
    if len(given_twice := [name for name in ("schema", "grammar", "constraint") if given.get(name) is not None]) > 1:
        raise UsageError(f"{' and '.join(given_twice)} are given; expected one of them")
    knobs = {name: given[name] for name in options_of(Sampling) if name in given}
    options = Options(**{name: value for name, value in given.items() if name not in knobs})
    return replace(options, sampling=replace(options.sampling, **knobs)) if knobs else options


class Sampler:
    """A sampler of the tokens of one answer to the tokens `prompt`, with a random generator of its own."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int] = ()) -> None:
        self.sampling = sampling
        self._prompt = torch.tensor(prompt if sampling.repetition_penalty != 1 else (), dtype=torch.int64).unique()
        self._random = torch.Generator()
        if sampling.seed is None:
            self._random.seed()
        else:  # by a hash: the first draws of neighbouring seeds of this generator are alike
            digest = hashlib.blake2b(str(sampling.seed).encode(), digest_size=8).digest()
            self._random.manual_seed(int.from_bytes(digest, "little") >> 1)

    @timed("sampling")
    def pick(self, logits: Tensor, answer: Sequence[int] = ()) -> int:
        """Draw the token after the tokens `answer` from logits `[vocab]`: on a GPU, unless penalties or biases act.

        Time: O(vocab), or O(vocab log vocab) if `top_p` keeps thousands; with penalties also O(n log n) for n tokens.
        """
        logits = logits.float()
        if bias := self.sampling.logit_bias:
            logits = logits.cpu().clone()
            logits[list(bias)] += torch.tensor(list(bias.values()))
        if self.sampling.penalises:
            logits = penalised(logits.cpu(), self.sampling, self._prompt, answer)
        if self.sampling.temperature == 0:
            return likeliest_of(logits)
        return draw(probabilities_of(logits, self.sampling), self._random)


@timed("sampling")
def likeliest_of(logits: Tensor) -> int:
    """Return the index of the largest logit, the first of equal ones. See `check_logits` for why NumPy looks for it."""
    return int(logits.numpy().argmax() if logits.is_cpu else logits.argmax())


def draw(probabilities: Tensor, random: torch.Generator) -> int:
    """Draw an index of `probabilities [vocab]`, by one random number, where they are. Time: O(vocab)."""
    sums = probabilities.double().cumsum(0)
    whole = float(sums[-1])
    number = min(whole * float(torch.rand((), dtype=torch.float64, generator=random)), math.nextafter(whole, 0.0))
    return int(torch.searchsorted(sums, number, right=True))


def penalised(logits: Tensor, sampling: Sampling, prompt: Tensor, answer: Sequence[int]) -> Tensor:
    """Return logits `[vocab]` with the penalties of the ids in `prompt` and of the tokens `answer`."""
    said, times = torch.tensor(answer, dtype=torch.int64).unique(return_counts=True)
    seen, logits = torch.cat((prompt, said)), logits.clone()
    found = logits[seen]
    logits[seen] = torch.where(found < 0, found * sampling.repetition_penalty, found / sampling.repetition_penalty)
    logits[said] -= sampling.presence_penalty + sampling.frequency_penalty * times
    return logits


def probabilities_of(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the distribution `[vocab]` from which a token is drawn, after all filters."""
    if 0 < sampling.top_k < len(logits):  # before a high temperature makes logits equal
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k).values[-1], -torch.inf)
    temperature = min(max(sampling.temperature, LEAST_TEMPERATURE), MOST_TEMPERATURE)  # in float32 not 0, not infinite
    probabilities = ((logits - logits.max()) / temperature).softmax(-1)
    if sampling.top_p < 1:
        _cut_nucleus(probabilities, sampling.top_p)
    if sampling.min_p > 0:
        probabilities[probabilities < sampling.min_p * probabilities.max()] = 0
    return probabilities / probabilities.sum()


def _cut_nucleus(probabilities: Tensor, top_p: float) -> None:
    """Set the `probabilities [vocab]` of the tokens that `top_p` drops to 0, in place.

    `top_p` drops a token if the likelier tokens add up to `top_p`. Of equally likely tokens, lower ids count as
    likelier. Time: O(vocab) if hundreds of tokens are kept. The cumulative sums equal those of a full sort bit by bit.
    """
    n_ranked = min(len(probabilities), 256)
    while True:
        ranked = probabilities.topk(n_ranked).values
        beyond = ranked.cumsum(0) - ranked >= top_p
        if beyond[-1] or n_ranked == len(probabilities):
            break
        n_ranked = min(len(probabilities), 8 * n_ranked)
    n_kept = max(1, n_ranked - int(beyond.sum()))  # `top_p` may be smaller than any float32
    least = ranked[n_kept - 1]
    equal = (probabilities == least).nonzero().squeeze(1)
    n_equal = n_kept - int((ranked > least).sum())
    probabilities[probabilities < least] = 0
    probabilities[equal[n_equal:]] = 0


class Answer:
    """An answer being generated: `take` turns logits into a token and its text, and decides when the answer ends.

    An end token or a stop string ends the text and is not part of the text. `result.text` joins all texts that `take`
    returned. Until the answer is `done`, the caller adds the last of `result.token_ids` to the context, and calls
    `take` with the logits after that token.
    """

    def __init__(
        self, options: Options, eos_ids: Set[int], tokenizer: Tokenizer, result: Generation, prompt: Sequence[int] = ()
    ) -> None:
        self.options, self.result, self.done = options, result, False
        stops = {i: stop for stop in options.sampling.stops if (i := tokenizer.special_id(stop)) is not None}
        self._stops: dict[int, str | None] = {**dict.fromkeys((*eos_ids, *options.sampling.stop_token_ids)), **stops}
        self._sampler = None if options.sampling.greedy else Sampler(options.sampling, prompt)
        self._detokenizer = tokenizer.stream()
        self._watch = StopWatch(options.sampling.stops)
        self._since = time.perf_counter()

    @property
    def ahead(self) -> bool:
        """Whether the next step may be launched before its token is read: if sampling is greedy and a step follows."""
        plain = self._sampler is None and self.options.logprobs is None and self.options.constraint is None
        return plain and len(self.result.token_ids) + 1 < self.options.max_tokens

    def take(self, logits: Tensor, likeliest: int | None = None) -> str:
        """Draw a token from `logits [vocab]`, and return the new text that later tokens cannot change.

        `likeliest` is the argmax of the logits, if known. A call that fails changes nothing.
        """
        options, result, stats, n = self.options, self.result, self.result.stats, len(self.result.token_ids)
        constraint, stop = options.constraint, options.sampling.stop
        allowed = logits if constraint is None else constraint.apply(logits.clone())
        if self._sampler is not None:
            token_id = self._sampler.pick(allowed, result.token_ids)
        else:
            token_id = likeliest_of(allowed) if likeliest is None or constraint is not None else likeliest
        if constraint is not None:
            constraint.accept(token_id)
        now = time.perf_counter()
        ids, entries, text, reason = [token_id], list[TokenLogprobs](), "", ""
        if token_id in self._stops:
            ids, reason = [], "stop"
        else:
            if options.logprobs is not None:
                entries = [logprobs_of(logits, token_id, options.logprobs)]
            text = self._watch.push(self._detokenizer.push(token_id))
            if self._watch.stopped or (callable(stop) and stop(result.text + text)):
                reason = "stop"
            elif n + 1 == options.max_tokens:
                reason = "length"
        if reason:
            text += self._watch.push(self._detokenizer.finish()) + self._watch.finish()
            reason = "stop" if self._watch.stopped else reason
        n_said = n + len(ids)
        if not n:  # from here on nothing is called, so nothing can fail or be interrupted
            stats.first_token_s, self._since = stats.prefill_s + now - self._since, now
        stats.decode_s, stats.generated_tokens = now - self._since, n_said
        result.token_ids += ids
        if result.logprobs is not None:
            result.logprobs += entries
        result.text, result.finish_reason, self.done = result.text + text, reason, reason != ""
        result.stop = self._watch.stopped or self._stops.get(token_id)
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
        self.stopped: str | None = None  # the stop string that ended the text
        self._held = ""

    def push(self, text: str) -> str:
        """Add text; return the text that cannot be part of a stop string."""
        if self.stopped:
            return ""
        self._held += text
        found = [(at + len(stop), at, stop) for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if found:
            _, at, self.stopped = min(found)
            return self._held[:at]
        certain = len(self._held) - max((overlap(self._held, stop) for stop in self.stops), default=0)
        text, self._held = self._held[:certain], self._held[certain:]
        return text

    def finish(self) -> str:
        """Return the text that is still held back when the generation ends."""
        return "" if self.stopped else self._held
