"""Answers requests of lm-evaluation-harness: likelihoods of continuations, and generated texts.

Requests are token ids. Contexts that begin alike share their common tokens (`lce_lab.eval.prefixes`). Answers are
yielded in the order in which contexts are read, each with the number of its request.
"""

from __future__ import annotations

import bisect
import dataclasses
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lce
from lce.errors import UsageError, nearest, shown
from lce.sizes import count
from lce_lab.eval.prefixes import read_all

LONGEST = 1 << 31  # a method that can read this many tokens counts as one without a limit
LOADING = tuple(
    name for name in inspect.signature(lce.load).parameters if name not in ("model", "method", "sharing", "length")
)
# Generation arguments that lce does not have, with the values at which they have no effect and are accepted.
NEUTRAL = {"num_beams": 1, "repetition_penalty": 1.0, "length_penalty": 1.0, "num_return_sequences": 1}
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")


@dataclass(frozen=True)
class ModelArguments:
    """The harness's model arguments that are not for `lce.load`. Numbers may be texts, such as "4k".

    Requests of more than `max_length` tokens (by default the method's limit) lose their beginning. `max_gen_toks`
    limits answers of tasks without a limit of their own. `prefix_token_id` (by default BOS, or else EOS) is put before
    texts without a context. `add_bos_token` overrides the tokenizer's setting. Raises `UsageError` for unusable values.
    """

    max_length: Any = None
    max_gen_toks: Any = 256
    prefix_token_id: Any = None
    add_bos_token: bool | None = None

    def __post_init__(self) -> None:
        for name, least in (("max_length", 2), ("max_gen_toks", 1), ("prefix_token_id", 0)):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, count(value, name, least))
        if not isinstance(self.add_bos_token, bool | None):
            raise UsageError(f"add_bos_token is {shown(self.add_bos_token)}; expected True or False")


def model_arguments(given: Mapping[str, Any]) -> tuple[dict[str, Any], ModelArguments]:
    """Split the harness's model arguments into options of `lce.load` and `ModelArguments`.

    The harness turns the text "none" into None. For knobs and `rope`, None is turned back into "none"; other arguments
    that are None are left out. If `pretrained` is an engine, there are no options of `lce.load`.
    """
    own = [each.name for each in dataclasses.fields(ModelArguments)]
    loaded = isinstance(given["pretrained"], lce.Engine)
    method = given.get("method", "full")
    if isinstance(method, str) and method.endswith(".py"):
        method = lce.methods.from_file(method).name
    cls = lce.methods.find(method)
    knobs = [] if loaded else [each.name for each in lce.methods.knobs_of(cls)] + ["preset"] * bool(cls.presets)
    valid = ["pretrained", *own, *([] if loaded else ["method", *LOADING, *knobs])]
    if unknown := next((name for name in given if name not in valid), None):
        where = "beside an engine" if loaded else f"with method {method!r}"
        raise UsageError(f"unknown model argument {shown(unknown)} {where}; {nearest(unknown, valid)}")
    arguments = ModelArguments(**{name: given[name] for name in own if given.get(name) is not None})
    if loaded:
        return {}, arguments
    if given["pretrained"] is None:
        expected = "a folder, a .gguf file, a hub id, or demo"
        raise UsageError(f"the model arguments have no pretrained=PATH; expected {expected}")
    text = {name: "none" if value is None else value for name, value in given.items()}
    loading = {name: given[name] for name in LOADING if given.get(name) is not None}
    if "rope" in given:
        loading["rope"] = text["rope"]
    loading["model"] = str(given["pretrained"])
    loading["method"] = lce.methods.make(method, {name: text[name] for name in knobs if name in text})
    return loading, arguments


def longest(engine: lce.Engine) -> int | None:
    """Return the largest number of tokens that the engine's method can read; None for no limit."""
    limit = bisect.bisect_left(range(LONGEST), True, key=lambda n: engine.setup.beyond(n + 1) is not None)
    return None if limit == LONGEST else limit


def likelihoods(
    engine: lce.Engine, requests: Sequence[tuple[list[int], list[int]]], max_length: int | None = None
) -> Iterator[tuple[int, tuple[float, bool]]]:
    """Score continuations of contexts. A request is a context and a continuation, both with at least one token id.

    Yield a request's number, the continuation's log-probability, and whether greedy decoding would write the
    continuation. The last token of a continuation is scored but not read. If more than `max_length` tokens would be
    read, the context loses its beginning. Raises `UsageError` if no context is left.
    """
    contexts, lengths = [], []
    for context, continuation in requests:
        n = len(continuation)
        most = len(context) if max_length is None else min(len(context), max_length + 1 - n)
        if most < 1 or not n:
            expected = f"expected 1 or more of each, and a max_length of {n} or more"
            raise UsageError(f"a continuation of {n} tokens after {len(context)}; {expected}")
        contexts.append(context[-most:])
        lengths.append(most + n)
    for number, held in read_all(engine, contexts, lengths):
        yield number, _likelihood(engine, held, requests[number][1])


def _likelihood(engine: lce.Engine, context: lce.Context, continuation: list[int]) -> tuple[float, bool]:
    logits = context.logits
    if len(continuation) == 1 and logits is not None:  # the logits after the context score this token
        token_id = continuation[0]
        return float(logits[token_id] - logits.logsumexp(-1)), int(logits.argmax()) == token_id
    scores = engine.score(continuation, context=context)
    return float(scores.logprobs.double().sum()), bool(scores.likeliest.all())


def text_likelihood(engine: lce.Engine, windows: Sequence[tuple[list[int], list[int]]]) -> float:
    """Return the log-probability of a text in windows. A window is (context, tokens to score)."""
    scores = [engine.score([*context, *scored], first=len(context)) for context, scored in windows]
    return sum(float(each.logprobs.double().sum()) for each in scores)


@dataclass(frozen=True)
class Generating:
    """Options of a generation, which ends after `max_tokens` tokens or at the first text of `until` that is written."""

    until: tuple[str, ...]
    max_tokens: int
    sampling: Mapping[str, Any] = field(default_factory=dict)  # fields of `lce.Sampling`


def generating(given: Mapping[str, Any]) -> Generating:
    """Convert a task's `generation_kwargs`, to which the harness has added `until` and `max_gen_toks` if missing.

    With `do_sample`, the default temperature is 1. Raises `UsageError` for arguments unknown to lce.
    """
    options = {name: value for name, value in given.items() if NEUTRAL.get(name) != value}
    until, most = options.pop("until"), options.pop("max_gen_toks")
    sampled = options.pop("do_sample", False)
    if unknown := next((name for name in options if name not in SAMPLING), None):
        valid = ("until", "max_gen_toks", "do_sample", *SAMPLING)
        raise UsageError(f"unknown generation argument {unknown}={shown(options[unknown])}; {nearest(unknown, valid)}")
    if not all(isinstance(stop, str) for stop in until):
        raise UsageError(f"until is {shown(until)}; expected strings")
    sampling = {**options, "temperature": options.get("temperature", 1.0) if sampled else 0.0}
    return Generating(tuple(stop for stop in until if stop), count(most, "max_gen_toks"), sampling)


def generations(
    engine: lce.Engine, requests: Sequence[tuple[list[int], Generating]], max_length: int | None = None
) -> Iterator[tuple[int, str]]:
    """Continue each prompt; yield the request's number and the generated text before the first text of `until`.

    If a prompt and its `max_tokens` together exceed `max_length`, the prompt loses its beginning. A text of `until` may
    be a special token, such as `<|im_end|>`. Raises `UsageError` if no prompt is left.
    """
    prompts, lengths = [], []
    for prompt, how in requests:
        n = how.max_tokens
        most = len(prompt) if max_length is None else min(len(prompt), max_length - n)
        if most < 1:
            expected = f"expected a prompt, and a max_gen_toks below the max_length of {max_length}"
            raise UsageError(f"{n} tokens are to be written after {len(prompt)}; {expected}")
        prompts.append(prompt[-most:])
        lengths.append(most + n)
    for number, context in read_all(engine, prompts, lengths):
        yield number, _written(engine, context, requests[number][1])


def _written(engine: lce.Engine, context: lce.Context, how: Generating) -> str:
    tokenizer = engine.tokenizer
    until = [*how.until, tokenizer.eos_token] if tokenizer.eos_token else how.until
    encoded = [tokenizer.encode(stop, bos=False) for stop in until]
    # Special tokens decode to no text, so they end the text by their ids.
    special = {ids[0] for ids in encoded if len(ids) == 1 and not tokenizer.decode(ids)}
    ending = lce.Engine(dataclasses.replace(engine.setup, eos_ids=engine.setup.eos_ids | special))
    options: Any = {"max_tokens": how.max_tokens, "sampling": how.sampling}
    options["stop"] = lambda text: any(each in text for each in until)
    return cut(ending.generate("", context=context, **options).text, until)


def cut(text: str, until: Sequence[str]) -> str:
    """Return the part of a text before the first occurrence of any text of `until`."""
    return text[: min((at for stop in until if (at := text.find(stop)) >= 0), default=len(text))]
