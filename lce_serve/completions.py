"""POST /v1/completions: OpenAI's completions, with `echo` and the log-probabilities of prompts."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from lce_serve.answering import (
    Json,
    OpenAIForm,
    answer,
    choices_of,
    common,
    finite,
    openai_options,
    openai_usage,
)
from lce_serve.choices import Delta, Ended
from lce_serve.fields import Fields
from lce_serve.generation import REMEDY, Asked, Run, engine_for
from lce_serve.grammar import grammar_for
from lce_serve.refusals import TOO_LONG, Refusal, wrong
from lce_serve.service import Service
from lce_serve.sse import unless_gone
from lce_serve.tools import Tools

MOST_PROMPTS = 128
MOST_LOGITS = 1 << 28  # logits that `echo` with `logprobs` above 0 may take: 1 GiB


async def completions(service: Service, request: Request, fields: Fields) -> Response:
    """Continue one prompt or more."""
    engine, how = service.engine, common(service, fields)
    prompts = [_ids(engine, prompt, how["context"] is not None) for prompt in _prompts(fields)]
    options, n_top = openai_options(fields), fields.whole("logprobs", 0, 20)
    max_tokens, n = fields.limit("max_tokens", 0), choices_of(fields)
    if n_top is not None:
        options["logprobs"] = n_top
    form = _Form(service, fields, n_top)
    if fields.flag("echo"):
        if how["context"] is not None:
            raise Refusal(400, "echo cannot show a named context; leave one of them out", "echo")
        method = how["method"], how["method_options"]
        ids = [await asyncio.to_thread(make) for make in prompts]
        form.echoes = [await unless_gone(request, _echo(service, each, n_top, *method)) for each in ids]
    if max_tokens == 0:
        ids = [await asyncio.to_thread(make) for make in prompts]
        return Json(form.unanswered([len(each) for each in ids], n))
    grammar = grammar_for(fields, fields.inner("response_format"), Tools())
    asked = Asked(prompts, max_tokens if "max_tokens" in fields.body else 16, options, n, grammar=grammar, **how)
    return await answer(service, request, asked, form)


def _prompts(fields: Fields) -> list[Any]:
    """Return the prompts: texts, or lists of token ids."""
    expected = "a string, token ids, or a list of these"
    found = fields.needed("prompt", (str, list), expected)
    prompts = [found] if isinstance(found, str) or (found and isinstance(found[0], int)) else found
    if not 0 < len(prompts) <= MOST_PROMPTS:
        raise Refusal(400, f"prompt has {len(prompts)} prompts; expected 1 to {MOST_PROMPTS}", "prompt")
    for prompt in prompts:
        if not isinstance(prompt, str | list):
            raise wrong("prompt", prompt, expected)
        if not prompt:
            raise Refusal(400, "prompt is empty; expected some text", "prompt")
    return list(prompts)


def _ids(engine: Any, prompt: Any, following: bool) -> Any:
    """Return a function that returns the token ids of a prompt."""
    if isinstance(prompt, str):
        return lambda: engine.tokenizer.encode(prompt, bos=False if following else None)
    size = engine.setup.model.config.vocab_size
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < size for i in prompt):
        raise Refusal(400, f"prompt holds what is no token id; expected whole numbers from 0 to {size - 1}", "prompt")
    return lambda: prompt


@dataclass(frozen=True)
class _Tokens:
    """Some tokens of a text with their log-probabilities: `top` has those of the likeliest tokens by their texts."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    top: list[dict[str, float] | None] = field(default_factory=list)


_NONE = _Tokens()


async def _echo(service: Service, ids: list[int], n_top: int | None, *method: Any) -> _Tokens:
    """Return a prompt's tokens; with `n_top`, also the log-probability of each token but the first."""
    engine = engine_for(service.batch, *method)
    if n_top is None or len(ids) < 2:
        none: list[Any] = [None] * len(ids)
        return _Tokens(ids, none, none)
    if (warning := engine.setup.beyond(len(ids), REMEDY)) is not None:
        raise Refusal(400, warning, "prompt", TOO_LONG)
    if n_top and len(ids) * engine.setup.model.config.vocab_size > MOST_LOGITS:
        most = MOST_LOGITS // engine.setup.model.config.vocab_size
        raise Refusal(400, f"echo with logprobs above 0 takes {most} tokens at most; give logprobs 0", "logprobs")
    return await service.beside(lambda _: _scored(engine, ids, n_top))


def _scored(engine: Any, ids: list[int], n_top: int) -> _Tokens:
    """Score a prompt. Blocks."""
    if not n_top:
        return _Tokens(ids, [None, *engine.score(ids).logprobs.tolist()], [None] * len(ids))
    name = engine.tokenizer.decode
    own: list[float] = []
    top: list[dict[str, float] | None] = [None]
    for row, i in zip(engine.logits(ids), ids[1:], strict=False):
        logprobs = row.log_softmax(-1)
        best = logprobs.topk(n_top)
        own.append(float(logprobs[i]))
        pairs = {name([int(j)], skip_special=False): float(x) for j, x in zip(best.indices, best.values, strict=True)}
        top.append({**pairs, name([i], skip_special=False): own[-1]})
    return _Tokens(ids, [None, *own], top)


class _Offsets:
    """Counts the characters before each token of a text. The tokens that share a character share its offset."""

    def __init__(self, tokenizer: Any, at: int = 0) -> None:
        self._stream, self._at = tokenizer.stream(), at

    def of(self, ids: list[int]) -> list[int]:
        """Return the offsets of the next tokens."""
        lengths = [len(self._stream.push(token_id)) for token_id in ids]
        *found, self._at = accumulate(lengths, initial=self._at)
        return found


class _Form(OpenAIForm):
    """The form of completions. `echoes` has each prompt's tokens, if the answer begins with them."""

    def __init__(self, service: Service, fields: Fields, n_top: int | None) -> None:
        super().__init__(service, fields, "cmpl-", "text_completion")
        self._n_top = n_top
        self.echoes: list[_Tokens] = []
        self._offsets = defaultdict[int, _Offsets](lambda: _Offsets(self._tokenizer))  # of each choice

    def unanswered(self, lengths: list[int], n: int) -> dict[str, Any]:
        """Return the answer to a request for no tokens: the prompts alone, or nothing."""
        choices = [self._choice(k, "", "length", self._echo(k // n)) for k in range(len(lengths) * n)]
        usage = {"prompt_tokens": sum(lengths), "completion_tokens": 0, "total_tokens": sum(lengths)}
        return {**self._common, "choices": choices, "usage": usage}

    def body(self, run: Run) -> dict[str, Any]:
        choices = []
        for index, each in enumerate(run.choices):
            echo, said = self._echo(index // run.asked.n), self._said(each.logprobs or [])
            choices.append(self._choice(index, each.text, each.reason, echo, said) | each.seed)
        return {**self._common, "choices": choices, "usage": openai_usage(run)}

    def begin(self, run: Run) -> Iterator[bytes]:
        for index in range(len(run.choices)) if self.echoes else ():
            made = self._choice(index, echo=self._echo(index // run.asked.n))
            self._offsets[index] = _Offsets(self._tokenizer, len(made["text"]))
            yield self._event(made)

    def add(self, run: Run, each: Delta | Ended) -> Iterator[bytes]:
        if isinstance(each, Ended):
            yield self._event(self._choice(each.index, reason=each.reason) | run.choices[each.index].seed)
        else:
            said, before = self._said(each.logprobs), self._offsets[each.index]
            yield self._event(self._choice(each.index, each.text, said=said, before=before))

    def _echo(self, prompt: int) -> _Tokens:
        return self.echoes[prompt] if self.echoes else _NONE

    def _name(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id], skip_special=False))

    def _said(self, found: list[Any]) -> _Tokens:
        """Return the generated tokens."""
        top = [{self._name(i): finite(x) for i, x in each.top} for each in found]
        return _Tokens([each.token_id for each in found], [finite(each.logprob) for each in found], [*top])

    def _choice(
        self,
        index: int,
        text: str = "",
        reason: str | None = None,
        echo: _Tokens = _NONE,
        said: _Tokens = _NONE,
        before: _Offsets | None = None,
    ) -> dict[str, Any]:
        """Return one choice: the echoed tokens, then the text that was generated, behind what `before` has seen."""
        logprobs, written = None, self._tokenizer.decode(echo.ids) if echo.ids else ""
        if self._n_top is not None:
            behind = before or _Offsets(self._tokenizer, len(written))
            logprobs = {
                "tokens": [self._name(i) for i in (*echo.ids, *said.ids)],
                "token_logprobs": [*echo.logprobs, *said.logprobs],
                "top_logprobs": [*echo.top, *said.top] if self._n_top else None,
                "text_offset": [*_Offsets(self._tokenizer).of(echo.ids), *behind.of(said.ids)],
            }
        return {"index": index, "text": written + text, "logprobs": logprobs, "finish_reason": reason}
