"""The generation loop of one context: prefills the prompt in blocks, then decodes token by token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from lce.engine.answer import Answer, Generation, Piece
from lce.engine.arguments import Options
from lce.engine.context import Context
from lce.engine.graph import CudaTape, DecodeGraph
from lce.engine.lanes import Lane, forward
from lce.engine.stream import CancelFlag
from lce.methods.run import Driver
from lce.models.layers import Model
from lce.models.products import Slices
from lce.progress import Progress, reported
from lce.system import uses_threads
from lce.tokenizer.tokenizer import Tokenizer

Keep = Literal["nothing", "answer", "blocks"]  # what a generation that fails leaves in its context


class _Cancelled(Exception):
    """An exception that ends the prefill of a cancelled stream; `Alone.pieces` catches it."""


@dataclass(eq=False)
class Alone:
    """A runner without state that prefills and decodes one context at a time. The caller holds the context's lock.

    `device` is the first layer's device. `tape` makes a recorder of CUDA graphs; if it is None, no step is recorded.
    """

    model: Model
    driver: Driver
    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    block: int
    device: torch.device
    tape: Callable[[torch.device], CudaTape] | None

    def lane(
        self,
        context: Context,
        ids: Sequence[int],
        driver: Driver | None = None,
        *,
        ahead: bool = False,
        decoding: bool = False,
    ) -> Lane:
        """Return a `Lane` that appends `ids`. With a `driver`, or without a `tape`, no step is recorded."""
        if self.tape is not None and context._graph is None:
            context._graph = DecodeGraph(self.model, self.driver, self.device, self.tape(self.device))
        recorder = context._graph if driver is None and self.tape is not None else None
        return Lane(driver or self.driver, context.cache, context._rope, ids, recorder, ahead=ahead, decoding=decoding)

    def append(
        self,
        context: Context,
        ids: Sequence[int],
        driver: Driver | None = None,
        *,
        slices: Slices | None = None,
        **how: bool,
    ) -> Lane:
        """Run a block of tokens through the model, and append it to a context, which keeps the logits after the block.

        After an error or an interruption the cache has all tokens of the block or none.
        """
        lane = self.lane(context, ids, driver, **how)
        uses_threads()
        try:
            forward(self.model, [lane], slices)
            lane.check()
        except Exception as error:
            context._data.blame(error)
            raise
        finally:
            context._store_logits(lane)
        return lane

    def read(self, context: Context, progress: Progress | None = None) -> None:
        """Prefill uncached tokens. If there are none and the last logits are unknown, prefill the last token again."""
        if context.logits is None and len(context) == context.cache.n_tokens > 0:
            context.cache.truncate(context.cache.nearest(context.cache.length - 1))
        for ids in blocks(context._uncached, self.block, progress):
            self.append(context, ids)

    def pieces(
        self, context: Context, ids: Sequence[int], options: Options, result: Generation, flag: CancelFlag, keep: Keep
    ) -> Iterator[Piece]:
        """Prefill the prompt `ids` after a context's tokens, then yield the answer's text until `flag` is set.

        `keep` says what stays in the context if the call fails or is cancelled. The answer's tokens so far, which
        `result` has too, stay if it is "answer" or "blocks", blocks of an incomplete prefill only if it is "blocks".
        Without them the context goes back to its state before the call.
        """
        stats, started, mark = result.stats, time.perf_counter(), context._mark()
        said: int | None = None  # the number of the context's tokens before the answer; None during prefill
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
            said, answer = len(context), Answer(options, self.eos_ids, self.tokenizer, result, context.token_ids)
            logits, likeliest = context.logits, None
            while not flag.is_set:
                assert logits is not None
                text = answer.take(logits, likeliest)
                context.token_ids.extend(result.token_ids[len(context) - said :])
                if text:
                    yield Piece(text)
                if answer.done:
                    break
                lane = self.append(context, context._uncached, ahead=answer.ahead, decoding=True)
                logits, likeliest = lane.logits, lane.likeliest
        except BaseException as error:
            if said is not None and keep != "nothing":
                context.token_ids[said:] = result.token_ids
            elif keep == "blocks":
                del context.token_ids[max(mark.n_tokens, context.cache.n_tokens) :]
            else:
                context._go_back(mark)
            if not isinstance(error, _Cancelled):
                raise
        finally:
            stats.memory, stats.traffic = context.cache.bytes_by_tier, context.cache.traffic


def blocks(ids: Sequence[int], block: int, progress: Progress | None = None, done: int = 0) -> Iterator[Sequence[int]]:
    """Yield `ids` in blocks, and call `progress` after each. Progress begins at `done`, the tokens read before."""
    for start in range(0, len(ids), block):
        part = ids[start : start + block]
        yield part
        if progress:
            progress(done + start + len(part), done + len(ids))
