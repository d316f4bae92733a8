"""The loop over one context: prefill in blocks, then decode token by token. Each pass has one lane."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from lce.engine.answer import Answer, Generation, Piece
from lce.engine.arguments import Options
from lce.engine.context import Context
from lce.engine.graph import CudaTape, DecodeGraph
from lce.engine.lanes import Lane, forward
from lce.engine.stream import CancelFlag
from lce.methods.run import Driver
from lce.models.layers import Model
from lce.progress import Progress, reported
from lce.system import uses_threads
from lce.tokenizer.tokenizer import Tokenizer


class _Cancelled(Exception):
    """Ends a prefill whose stream was cancelled; no caller of lce sees it."""


@dataclass(eq=False)
class Alone:
    """Prefills and decodes one context at a time. Holds no state; the caller has the context to itself."""

    model: Model
    driver: Driver
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    block: int
    device: torch.device  # the first layer's
    tape: Callable[[torch.device], CudaTape] | None  # records decode steps, if any

    def lane(self, context: Context, ids: Sequence[int], driver: Driver | None = None, *, ahead: bool = False) -> Lane:
        """Return the lane that appends `ids` to a context; another `driver` than the engine's is not recorded."""
        if self.tape is not None and context.graph is None:
            context.graph = DecodeGraph(self.model, self.driver, self.device, self.tape(self.device))
        recorder = context.graph if driver is None else None
        return Lane(driver or self.driver, context.cache, context.rope, ids, recorder, ahead)

    def run(self, context: Context, lane: Lane) -> None:
        """Run a pass of one lane. After an error or an interruption the cache has all of the tokens or none."""
        uses_threads()
        forward(self.model, [lane])
        try:
            lane.check()
        except Exception as error:
            context.data.blame(error)
            raise

    def append(self, context: Context, ids: Sequence[int], driver: Driver | None = None) -> Lane:
        """Append a block of tokens to a context's cache; the context keeps the logits after them."""
        lane = self.lane(context, ids, driver)
        try:
            self.run(context, lane)
        finally:
            context.keep(lane)
        return lane

    def read(self, context: Context, progress: Progress | None = None) -> None:
        """Read the context's uncached tokens, and its last token again if the logits after it are not known."""
        if context.logits is None and len(context) == context.cache.length > 0:
            context.cache.truncate(context.cache.nearest(context.cache.length - 1))
        for ids in blocks(context.uncached, self.block, progress):
            self.append(context, ids)

    def pieces(
        self, context: Context, ids: Sequence[int], options: Options, result: Generation, flag: CancelFlag, undo: bool
    ) -> Iterator[Piece]:
        """Read the prompt behind a context's tokens, and yield the answer as it comes; ends once `flag` is set.

        If prefill does not complete, or with `undo` the answer, the context is as before. Else the answer so far stays:
        the new tokens of the context and of `result` are those of `result.text`.
        """
        stats, started, mark = result.stats, time.perf_counter(), context.mark()
        said: int | None = None  # tokens before the answer
        before = lane = None
        try:
            stats.prompt_tokens, stats.read_before = len(ids), len(context)
            context.token_ids.extend(ids)
            with reported(options.progress, "prefill") as report:

                def tell(done: int, total: int) -> None:
                    report(done, total)
                    if flag.is_set:
                        raise _Cancelled

                self.read(context, tell)
            stats.prefill_s = time.perf_counter() - started
            said, answer = len(context), Answer(options, self.eos_ids, self.tokenizer, result)
            logits, likeliest = context.logits, None
            while not flag.is_set:
                assert logits is not None
                text = answer.take(logits, likeliest)
                context.token_ids.extend(result.token_ids[len(context) - said :])
                if text:
                    yield Piece(text)
                if answer.done:
                    break
                before, lane = lane, self.lane(context, context.uncached, ahead=answer.ahead)
                self.run(context, lane)
                logits, likeliest = lane.logits, lane.likeliest
        except BaseException as error:
            if said is None or undo:
                context.go_back(mark)
            else:
                context.token_ids[said:] = result.token_ids
            if not isinstance(error, _Cancelled):
                raise
        finally:
            context.keep(before)
            context.keep(lane)
            stats.memory, stats.traffic = context.cache.bytes_by_tier, context.cache.traffic


def blocks(ids: Sequence[int], block: int, progress: Progress | None = None, done: int = 0) -> Iterator[Sequence[int]]:
    """Yield `ids` in blocks; call `progress` after each block, counting `done` tokens before the first."""
    for start in range(0, len(ids), block):
        part = ids[start : start + block]
        yield part
        if progress:
            progress(done + start + len(part), done + len(ids))
