"""One answer of a request as it is generated: its text, thought and calls, and why it ended."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

from lce.errors import CapacityError
from lce_serve.calls import CallReader
from lce_serve.tools import Call, Tools

Shorter = Callable[[], Any]


@dataclass(frozen=True)
class Delta:
    """New text, calls, log-probabilities and thought of the choice `index`."""

    index: int
    text: str
    calls: list[Call]
    logprobs: list[Any]
    thought: str = ""

    @property
    def says_anything(self) -> bool:
        """Whether there is anything new."""
        return bool(self.text or self.calls or self.logprobs or self.thought)


@dataclass(frozen=True)
class Ended:
    """The end of the choice `index`, by `reason`: `stop`, `length` or `tool_calls`."""

    index: int
    reason: str


class Choice:
    """An answer that is being generated. `indices` are its numbers among the choices: several if nothing is drawn.

    `shorter` starts its stream again with fewer tokens, or returns None. `thinking` says how the answer may begin with
    a thought; None if it has no thought.
    """

    def __init__(self, stream: Any, tools: Tools, shorter: Shorter, thinking: Any = None) -> None:
        self.stream, self.indices = stream, list[int]()
        self._shorter, self._thinking = shorter, thinking
        self.text, self.thought, self.calls = "", "", list[Call]()
        self.reason = ""
        self._thoughts = None if thinking is None else thinking.reader()
        self._reader = CallReader(tools) if tools.callable else None
        self._n_logprobs = 0

    @property
    def seed(self) -> dict[str, int]:
        """The field `seed` of the answer, which says how to draw it again; empty if nothing is drawn."""
        found = self.stream.result.seed
        return {} if found is None else {"seed": found}

    @property
    def logprobs(self) -> list[Any] | None:
        """The log-probabilities of all tokens, if they were asked for."""
        found: list[Any] | None = self.stream.result.logprobs
        return found

    @property
    def thought_tokens(self) -> int:
        """The number of tokens of the thought, its marks included."""
        if not self.thought:
            return 0
        decode, ids = self.stream.setup.tokenizer.decode, self.stream.result.token_ids
        return bisect_left(range(len(ids)), True, key=lambda n: self._thinking.closed in decode(ids[:n]))

    def take(self, text: str, *, last: bool = False) -> Delta:
        """Add a piece of text, and return what is new."""
        thought, calls = "", list[Call]()
        if self._thoughts is not None:
            thought, text = self._thoughts(text, last=last)
        if self._reader is not None:
            text, calls = self._reader.push(text)
            if last:
                rest, more = self._reader.finish(cut=self.stream.result.finish_reason == "length")
                text, calls = text + rest, calls + more
        fresh = (self.logprobs or [])[self._n_logprobs :]
        self._n_logprobs += len(fresh)
        self.text, self.thought = self.text + text, self.thought + thought
        self.calls += calls
        return Delta(self.indices[0], text, calls, fresh, thought)

    async def pieces(self) -> AsyncGenerator[Any]:
        """Yield the pieces of the stream. The limit is lowered until memory suffices."""
        begun = False
        while True:
            try:
                async for piece in self.stream:
                    begun = True
                    yield piece
                return
            except CapacityError:
                stream = None if begun else await asyncio.to_thread(self._shorter)
                if stream is None:
                    raise
                self.stream = stream

    def end(self) -> Ended:
        """Note why the answer ended."""
        reason = self.stream.result.finish_reason
        self.reason = "length" if reason == "length" else "tool_calls" if self.calls else "stop"
        return Ended(self.indices[0], self.reason)
