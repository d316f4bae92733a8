"""The one path by which all endpoints generate: a request becomes streams of the batch, and these become events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import lce
from lce.errors import CapacityError, LceError
from lce_serve.choices import Choice, Delta, Ended
from lce_serve.grammar import Grammar
from lce_serve.refusals import TOO_LONG, Refusal
from lce_serve.service import Record, Service
from lce_serve.tools import Tools

DEFAULT_TOKENS = 4096  # the most tokens of an answer whose request gives no limit
LEAST_TOKENS = 16  # while memory is short, a limit is not lowered below this
REMEDY = "{0.request}, which lce takes for this length"  # what a refusal says of the other method
AGAIN = 'make the named context anew, by the "method": "{0.method}", which lce takes for this length'
COMPILE_S = 10.0  # seconds that the grammar of a request may take


@dataclass
class Asked:
    """A request for answers. Each of `prompts` is a function that blocks and returns token ids or a rendered chat.

    `grammar` compiles the answer's grammar. `options` are those of `Batch.stream`. A `max_tokens` of None stands for
    `DEFAULT_TOKENS`. It is lowered to what the method and memory allow.
    """

    prompts: list[Callable[[], Any]]
    max_tokens: int | None
    options: dict[str, Any]
    n: int = 1
    context: str | None = None
    method: str | None = None
    method_options: dict[str, Any] | None = None
    tools: Tools = field(default_factory=Tools)
    grammar: Grammar | None = None
    stream: bool = False


class Run:
    """A request that runs. Close it in every case: closing cancels what still runs."""

    def __init__(self, service: Service, record: Record, asked: Asked, choices: list[Choice], notes: list[str]) -> None:
        self.choices, self.asked, self.notes = choices, asked, notes
        self._service, self._record = service, record

    async def events(self) -> AsyncGenerator[Delta | Ended]:
        """Yield the events of all choices, in the order in which they happen."""
        queue: asyncio.Queue[Delta | Ended | BaseException] = asyncio.Queue()
        tasks = [asyncio.create_task(self._follow(choice, queue)) for choice in dict.fromkeys(self.choices)]
        try:
            left = len(tasks)
            while left:
                event = await queue.get()
                if isinstance(event, BaseException):
                    raise event
                left -= isinstance(event, Ended)
                for index in self.choices[event.index].indices:
                    yield replace(event, index=index)
        finally:
            for task in tasks:
                task.cancel()
            self.close()

    async def finish(self) -> None:
        """Wait for all choices."""
        async for _ in self.events():
            pass

    async def _follow(self, choice: Choice, queue: asyncio.Queue[Any]) -> None:
        """Put the events of one choice into a queue; an error too."""
        metrics, before = self._service.metrics, None
        try:
            async for piece in choice.pieces():
                now = time.monotonic()
                if before is None:
                    metrics.first_token.observe(now - self._record.started)
                    self._record.first_token_s = self._record.first_token_s or now - self._record.started
                else:
                    metrics.between_tokens.observe(now - before)
                before = now
                delta = choice.take(piece.text)
                if delta.says_anything:
                    queue.put_nowait(delta)
            last = choice.take("", last=True)
            if last.says_anything:
                queue.put_nowait(last)
            ended = choice.end()
            self._note(choice)
            queue.put_nowait(ended)
        except Exception as error:
            queue.put_nowait(error)

    def _note(self, choice: Choice) -> None:
        stats, metrics = choice.stream.result.stats, self._service.metrics
        if stats.generated_tokens > 1:
            metrics.token.observe(stats.decode_s / (stats.generated_tokens - 1))
        metrics.ended(choice.reason)

    @property
    def progress(self) -> tuple[int, int]:
        """The tokens of all prompts that are read or cached so far, and all of them."""
        pairs = [choice.stream.progress for choice in self.choices]
        return sum(done for done, _ in pairs), sum(total for _, total in pairs)

    def usage(self) -> tuple[int, int, int]:
        """Return the tokens of the prompts, those of them that were cached, and the generated tokens.

        A prompt with several choices counts once.
        """
        firsts = self.choices[:: self.asked.n]
        stats = [choice.stream.result.stats for choice in firsts]
        prompt = sum(len(choice.stream.prompt_ids) for choice in firsts)
        cached = min(prompt, sum(each.read_before for each in stats))
        return prompt, cached, sum(len(choice.stream.result.token_ids) for choice in self.choices)

    def thought_tokens(self) -> int:
        """Return the number of generated tokens that belong to thoughts."""
        return sum(choice.thought_tokens for choice in self.choices)

    def close(self) -> None:
        """Cancel what still runs, and note the counts of tokens."""
        for choice in self.choices:
            if not choice.reason:
                choice.stream.cancel()
        record = self._record
        record.prompt_tokens, record.cached_tokens, record.generated_tokens = self.usage()
        record.finish = ",".join(sorted({choice.reason or "cancelled" for choice in self.choices}))


async def begin(service: Service, record: Record, asked: Asked) -> Run:
    """Start the streams of a request. Raises a refusal, or an error of lce, before anything is generated.

    Templates, tokenizers and the batch's checks run in a thread, so that they hold nobody up.
    """
    prompts = await asyncio.to_thread(lambda: [make() for make in asked.prompts])
    thinking = getattr(prompts[0], "thinking", None)  # a conversation is the only prompt of its request
    constraints = await _constraints(service, asked, len(prompts) * asked.n, thinking)
    submission = _Submission(service, asked, prompts, constraints, thinking)
    try:
        await asyncio.to_thread(submission.run)
    except BaseException:
        submission.cancel()
        raise
    return Run(service, record, asked, submission.choices, constraints[0].notes if constraints else [])


class _Submission:
    """Hands a request over to the batch. `cancel` may come at any time, from another thread."""

    def __init__(
        self, service: Service, asked: Asked, prompts: list[Any], constraints: list[Any], thinking: Any
    ) -> None:
        self._service, self._asked, self._prompts, self._constraints = service, asked, prompts, constraints
        self._thinking, self._cancelled = thinking, False
        self.choices: list[Choice] = []

    def run(self) -> None:
        """Encode all prompts, then start their streams: one for equal prompts if nothing is drawn."""
        asked = self._asked
        engine, self._start = beginning(self._service, asked.context, asked.method, asked.method_options)
        self._setup, before = engine.setup, 0 if self._start is None else len(self._start)
        given = engine.setup.sampling_for(asked.options, several=asked.n > 1)
        begun: dict[tuple[int, ...], list[Choice]] = {}  # the choices of each prompt
        for prompt in self._prompts:
            ids = prompt if isinstance(prompt, list) else engine.tokenizer.encode_parts(prompt)
            most = room(engine, before + len(ids), asked.max_tokens, AGAIN if before else REMEDY)
            same = begun.setdefault(tuple(ids), [])
            for _ in range(asked.n):
                options = dict(given)
                if self._constraints:
                    options["constraint"] = self._constraints[len(self.choices)]
                if same and options.get("seed") is not None:
                    options["seed"] = (options["seed"] + len(same)) % 2**63
                is_drawn = bool(options.get("temperature"))
                choice = same[0] if same and not is_drawn else self._begin(prompt, most, options)
                choice.indices.append(len(self.choices))
                same.append(choice)
                self.choices.append(choice)
                if self._cancelled:
                    self.cancel()
                    return

    def _begin(self, prompt: Any, most: int, options: dict[str, Any]) -> Choice:
        """Start a stream of the batch. Its limit of tokens is halved while memory is short."""
        where = {"method": self._setup, "context": self._start}
        limits = iter([most, *(most >> n for n in range(1, most.bit_length()) if most >> n >= LEAST_TOKENS)])

        def begin() -> Any:
            failure: CapacityError | None = None
            for limit in limits:
                try:
                    return self._service.batch.stream(prompt, max_tokens=limit, **where, **options)
                except CapacityError as error:
                    failure = error
            if failure is not None:
                raise failure
            return None

        return Choice(begin(), self._asked.tools, begin, self._thinking)

    def cancel(self) -> None:
        """Cancel all streams, and those that are still to come."""
        self._cancelled = True
        for choice in list(self.choices):
            choice.stream.cancel()


def beginning(service: Service, context: str | None, method: str | None, options: Any) -> tuple[Any, Any]:
    """Return the engine of a request, and the named context that the request continues, or None.

    Refuses what `engine_for` refuses, an unknown context, and another method than that of the context.
    """
    engine = engine_for(service.batch, method, options)
    if context is None:
        return engine, None
    setup, start = service.named.get(context)
    if method is not None and engine.method != setup.method:
        raise Refusal(400, f"the context {context} has a method of its own; leave `method` out", "method")
    return lce.Engine(setup), start


def engine_for(batch: Any, method: str | None, options: dict[str, Any] | None) -> Any:
    """Return the engine for a request's method. Refuses a method that cannot be had, and knobs that name files."""
    if options and "maps" in options:
        raise Refusal(400, "method_options.maps names a file of the server; leave it out", "method_options")
    try:
        return lce.Engine(batch.setup_of(method, options))
    except LceError as error:
        raise Refusal(400, " ".join(str(error).split()), "method") from None


def room(engine: Any, n_prompt: int, given: int | None, remedy: str = REMEDY) -> int:
    """Return the most tokens of an answer, lowered to what the method can read behind the prompt, but at least one.

    Refuses a prompt that is longer than the method can read.
    """
    if (warning := engine.setup.beyond(n_prompt, remedy)) is not None:
        raise Refusal(400, warning, "messages", TOO_LONG)
    most, limit = DEFAULT_TOKENS if given is None else given, engine.setup.readable
    return most if limit is None else max(1, min(most, limit - n_prompt))


async def _constraints(service: Service, asked: Asked, n: int, thinking: Any) -> list[Any]:
    """Return a constraint for each choice, none if the text is free. Waiting and compiling are bounded in time."""
    if (make := asked.grammar) is None:
        return []
    vocabulary = service.vocabulary
    try:
        async with asyncio.timeout(COMPILE_S):
            first = await service.compiling.call(lambda: make(vocabulary.behind(thinking)))
    except TimeoutError:
        raise Refusal(400, "the schema takes too long to compile; give a simpler one", "response_format") from None
    return [] if first is None else [first, *(first.copy() for _ in range(n - 1))]
