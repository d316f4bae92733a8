"""`lce check`: why a wrong answer about a text is wrong, in about the time of two readings of the text.

1. The text is read and asked by the method. If the answer has what is expected, that is all.
2. `model`: full attention is asked the same about a part of the text around the fact, half of the window at most. If
   it does not find the fact there, the method is not the cause.
3. `beyond`: the text is longer than the method can read of this model.
4. `selection`: the same reading is asked again, while the method chooses by true attention (`lce_lab.analysis.oracle`).
   If the answer is then right, the chunks with the fact were not chosen.
5. `placement`: else the fact is seen, but not used: where the method places it, or that it drops it, is the cause.

`lce_lab.eval.why` tries more changes of a method, each of which reads the text again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import lce
from lce.errors import UsageError, shown
from lce.methods import Method
from lce.methods.auto import candidates, reads_whole
from lce.methods.choices import Choice
from lce_lab.analysis.oracle import cheating, selects
from lce_lab.eval.why import budget_of

INSIDE = 1 / 2  # of the window, at most, for the part of the text that full attention is asked about

Advance = Callable[[int, int], None]


@dataclass(frozen=True)
class Checked:
    """What was found. `answers` maps what was asked to its answer; `next` are things to try, the first one first."""

    tokens: int
    method: str
    cause: str
    reason: str
    answers: Mapping[str, str]
    next: tuple[str, ...]


@dataclass(frozen=True)
class Question:
    """A question about a text, in the model's chat format if `chat` is set. A right answer has `expect` in it.

    `fact` is a part of the text that the answer depends on.
    """

    text: str
    question: str
    expect: str
    fact: str
    chat: bool = False
    max_tokens: int = 64

    def at(self) -> int:
        """Return where the fact stands. Raises `UsageError` if the text does not have it."""
        if (found := self.text.find(self.fact)) < 0:
            found = self.text.casefold().find(self.fact.casefold())
        if found < 0:
            remedy = "give --fact, a part of the text that the answer depends on"
            raise UsageError(f"the text does not have {shown(self.fact)}, so no method finds it there; {remedy}")
        return found

    def ids(self, engine: lce.Engine, text: str) -> list[int]:
        """Return the tokens of a text and the question on a line of its own, as `lce generate` reads them."""
        prompt, tokenizer = f"{text}\n{self.question}", engine.tokenizer
        if not self.chat:
            return tokenizer.encode(prompt)
        return tokenizer.encode_parts(tokenizer.render_chat([{"role": "user", "content": prompt}]))

    def is_answered(self, said: str) -> bool:
        return " ".join(self.expect.casefold().split()) in " ".join(said.casefold().split())

    def around(self, engine: lce.Engine, n_tokens: int) -> str:
        """Return a part of the text around the fact that has, with the question, at most `n_tokens` tokens."""
        at, size = self.at(), len(self.text)
        while True:
            start = max(0, min(at + len(self.fact) // 2 - size // 2, len(self.text) - size))
            part = self.text[start : start + size]
            n = len(self.ids(engine, part)) + self.max_tokens
            if n <= n_tokens or size <= len(self.fact):
                return part
            size = max(len(self.fact), int(size * min(0.9, n_tokens / n)))


def check(
    model: str,
    asked: Question,
    method: Mapping[str, Any],
    *,
    progress: Advance | None = None,
    tell: Callable[[str], None] = lambda line: None,
    **loading: Any,
) -> Checked:
    """Ask a question about a text, and find out why the answer is wrong, if it is.

    `method` has the options `method` and `prefill_method` of `lce.load`; `loading` are others. `progress` is called
    with the tokens of the text that are read. `tell` is called with lines that say what is done. Raises what `lce.load`
    raises, and `UsageError` if the text does not have the fact.
    """
    asked.at()
    plain = lce.load(model, **loading)
    ids = asked.ids(plain, asked.text)
    length = len(ids) + asked.max_tokens
    name = method.get("method", "full")
    usual = plain.setup.choice(length)
    own = {"method": usual.make(), **usual.loading} if name == "auto" else {}
    engine = lce.load(model, sharing=plain, **{**method, **loading, **own})
    tell(f"{engine.method.label} reads {len(ids):,} tokens, then full attention some of them within the window")
    n_asked = min(len(asked.ids(engine, "")), len(ids) - 1)
    answers = dict[str, str]()
    with engine.prefill(ids[:-n_asked], length=length, progress=progress) as context:
        answers[engine.method.label] = said = _say(engine, ids[-n_asked:], context, asked)

        def found(cause: str, reason: str, *more: str) -> Checked:
            return Checked(len(ids), engine.method.label, cause, reason, answers, more)

        if asked.is_answered(said):
            return found("answered", "the answer has what is expected")
        part = asked.around(plain, max(len(asked.ids(plain, asked.fact)), int(INSIDE * plain.window)))
        inside = asked.ids(plain, part)
        answers[f"full, {len(inside):,} tokens around the fact"] = said = _say(plain, inside, None, asked)
        if not asked.is_answered(said):
            why = f"the model fails inside its window as well, in {len(inside):,} tokens by full attention"
            more = ("other words for the question", *(() if asked.chat else ("--chat",)), "a larger model")
            return found("model", f"{why}, so the method is not the cause", *more)
        if engine.setup.beyond(length) is not None:
            why = f"{length:,} tokens are beyond the {engine.setup.readable:,} that the method reads of this model"
            return found("beyond", why, f"--method {usual.spelled}")
        others = [f"--method {each.spelled}" for each in _others(engine, plain, length)]
        if selects(engine.method):
            answers["chosen by true attention"] = said = _say(_seeing(engine), ids[-n_asked:], context, asked)
            if asked.is_answered(said):
                why = "the chunks with the fact were not chosen; with those of most true attention the answer is right"
                return found("selection", why, *_wider(engine.method), *others)
    chunks, keys = "; choosing by true attention does not help", ", or the method drops the fact"
    chunks, keys = (chunks, "") if selects(engine.method) else ("", keys)
    why = f"the model finds the fact inside its window{chunks}: at the distances of this method it does not{keys}"
    return found("placement", why, *others, "`lce eval why`, which tries each change of a method on made texts")


def _say(engine: lce.Engine, ids: list[int], context: lce.Context | None, asked: Question) -> str:
    own = None if context is None else context.fork()
    return engine.generate(ids, context=own, max_tokens=asked.max_tokens, temperature=0).text


def _seeing(engine: lce.Engine) -> lce.Engine:
    """Return an engine whose method chooses by true attention, and which may use the contexts of `engine`."""
    setup = engine.setup
    return lce.Engine(replace(setup.using(cheating(setup.method)), identity=setup.identity, files=setup.files))


def _wider(method: Method) -> tuple[str, ...]:
    knob, *_ = budget_of(method)
    return () if knob is None else (f"-o {knob}={2 * lce.methods.settings(method)[knob]}",)


def _others(engine: lce.Engine, plain: lce.Engine, length: int) -> list[Choice]:
    """Return other methods that read so long a text whole: first what `auto` takes, then those that attend all keys."""
    setup, usual = plain.setup, plain.setup.choice(length)
    every = (each for each in candidates(setup.asked) if each != usual and not selects(each.make()))
    reads = (each for each in (usual, *every) if reads_whole(each, length, setup.asked))
    own = engine.method.name, engine.setup.rope.kind, engine.window
    return [x for x in reads if (x.method, x.rope or setup.rope.kind, x.window or plain.window) != own][:3]
