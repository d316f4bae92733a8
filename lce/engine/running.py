"""The generation loop of one context: prefills the prompt in blocks, then decodes token by token."""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from lce.cache.kv import expect, off_grid
from lce.engine.answer import Answer, Options, generation_options
from lce.engine.arguments import ids_of
from lce.engine.context import Context, ContextMark, new_context, own_context, reserve
from lce.engine.lanes import Lane, forward
from lce.engine.saving import text_hash
from lce.engine.setup import Setup
from lce.engine.stream import CancelFlag, Generation, Piece, Stream
from lce.errors import UsageError
from lce.methods.run import Driver
from lce.models.products import Slices
from lce.models.ranks import ALONE, Facts, Ranks
from lce.progress import Progress, check_progress, reported
from lce.system import uses_threads
from lce.tokenizer.chat import ChatText
from lce.tokenizer.tokenizer import NoTokenizer

Rest = Literal["nothing", "answer", "blocks"]  # what a generation that fails leaves in its context


class _Cancelled(Exception):
    """An exception that ends the prefill of a cancelled stream; `_pieces` catches it."""


def checked_options(setup: Setup, given: Mapping[str, Any], prompt: object = None) -> Options:
    """Check the options of `Engine.generate`. Raises `UsageError` for options that this engine cannot use.

    A schema or a grammar begins behind the thought with which the answer to `prompt`, a rendered chat, may begin.
    """

    def check() -> Options:
        options = generation_options(given)
        own_context(setup, options.context)
        options.sampling.check(setup.config.vocab_size)
        if options.sampling.stop and isinstance(setup.tokenizer, NoTokenizer):
            raise UsageError("stop is given, but this checkpoint has no tokenizer, so there is no text; leave it out")
        if options.schema is None and options.grammar is None:
            return options
        vocabulary = setup.vocabulary.behind(prompt.thinking if isinstance(prompt, ChatText) else None)
        return replace(options, constraint=vocabulary.constraint(options.schema, options.grammar))

    return setup.together(check, lambda found: {"schema": repr(found.schema), "grammar": found.grammar})


def prompt_ids(setup: Setup, prompt: object, context: Context | None = None) -> list[int]:
    """Return a prompt as checked token ids. Text that continues a context gets no beginning-of-text token."""
    own_context(setup, context)
    if isinstance(prompt, ChatText):
        ids = setup.tokenizer.encode_parts(prompt)
    elif isinstance(prompt, str):
        ids = setup.tokenizer.encode(prompt, bos=None if context is None else False) if prompt else []
    else:
        ids = ids_of(prompt, setup.config.vocab_size)
    if not ids and (context is None or not len(context)):
        raise UsageError("the prompt is empty; expected some text")
    return ids


def agreed_ids(
    setup: Setup, prompt: object, context: Context | None = None, progress: object = None, **how: Any
) -> list[int]:
    """Return `prompt_ids`. Ranks raise an error, all of them, unless all have this prompt, context and arguments."""

    def facts_of(ids: list[int]) -> Facts:
        check_progress(progress)
        held = None if context is None else (len(context), context.cache.length)
        return {"prompt": f"{len(ids)} tokens of SHA-256 {text_hash(ids)[:16]}", "context": held, **how}

    return setup.together(lambda: prompt_ids(setup, prompt, context), facts_of)


def seeded(options: Options, ranks: Ranks = ALONE) -> Options:
    """Return options that have a seed if tokens are drawn. Ranks with one seed draw the same tokens."""
    if options.sampling.seed is not None or options.sampling.temperature == 0:
        return options
    return replace(options, sampling=replace(options.sampling, seed=ranks.exchange(secrets.randbits(32))[0]))


def stream(setup: Setup, prompt: object, options: Options, flag: CancelFlag, rest: Rest = "answer") -> Stream:
    """Return a stream of the answer to a prompt; `rest` stays in the context if the generation fails."""
    how = {name: value for name, value in vars(options.sampling).items() if not callable(value)}
    ids = agreed_ids(setup, prompt, options.context, max_tokens=options.max_tokens, **how)
    options = seeded(options, setup.ranks)
    result = Generation(logprobs=None if options.logprobs is None else [], seed=options.seed)
    before = options.context
    result.warning = setup.warn(len(ids) + len(before or ()), None if before is None else before.rope)
    return Stream(_pieces(setup, ids, options, result, flag, rest), result, flag)


def lane_of(setup: Setup, context: Context, ids: Sequence[int], driver: Driver | None = None, **how: Any) -> Lane:
    """Return a `Lane` with the flags `how` that appends `ids`."""
    expect(context.cache, len(context))
    return Lane(driver or setup.driver, context.cache, context.rope, ids, **how)


def append(
    setup: Setup,
    context: Context,
    parts: Iterable[Sequence[int]],
    driver: Driver | None = None,
    *,
    slices: Slices | None = None,
    **how: Any,
) -> Lane | None:
    """Run blocks of tokens through the model, and append them to a context; return the last block's lane, if any.

    The context keeps the logits after each block. After an error or an interruption the cache has all tokens of a block
    or none.
    """
    lane = None
    uses_threads()
    for ids in parts:
        lane = lane_of(setup, context, ids, driver, **how)
        try:
            forward(setup.model, [lane], setup.recorder, slices)
            lane.check()
        except Exception as error:
            context.data.blame(error)
            raise
        finally:
            context.store_logits(lane)
    return lane


def goes_on(context: Context, prompt: Sequence[int]) -> bool:
    """Return whether an empty prompt has an answer go on: the only uncached token was drawn from the last logits."""
    return not prompt and context.logits is not None and len(context.uncached) == 1


def unread(setup: Setup, context: Context, progress: Progress | None = None) -> Iterator[Sequence[int]]:
    """Return blocks of the uncached tokens; or of the last token, if it is cached and the logits after it are unknown.

    So the context has logits once the blocks are appended.
    """
    if context.logits is None and len(context) == context.cache.n_tokens > 0:
        context.cache.truncate(context.cache.nearest(context.cache.n_tokens - 1))
    return blocks(context.uncached, setup.block, progress, offset=off_grid(context.cache))


def _pieces(
    setup: Setup, ids: list[int], options: Options, result: Generation, flag: CancelFlag, rest: Rest
) -> Generator[Piece, None, None]:
    """Reserve memory for all tokens, prefill the prompt `ids`, then yield the answer's text until `flag` is set.

    `rest` says what stays in the context if the call fails or is cancelled. With "answer" or "blocks", the answer's
    tokens so far stay; `result` has them, too. With "blocks", an incomplete prefill's blocks stay as well. Otherwise
    the context goes back to its state before the call.
    """
    if flag.is_set:
        return
    n_new, stats = len(ids) + options.max_tokens, result.stats
    context = new_context(setup, n_new) if options.context is None else options.context
    with context.hold():
        reserve(setup, context.cache, len(context) + n_new)
        started, mark = time.perf_counter(), context.mark()
        said: int | None = None  # the number of the context's tokens before the answer; None during prefill
        try:
            stats.prompt_tokens, stats.read_before = len(ids), len(context)
            context.token_ids.extend(ids)
            with reported(options.progress, "prefill") as report:

                def tell(done: int, total: int) -> None:
                    report(done, total)
                    if flag.is_set:
                        raise _Cancelled

                drawn = goes_on(context, ids)
                append(setup, context, unread(setup, context, tell), decoding=drawn)
            stats.prefill_s = time.perf_counter() - started
            said, answer = len(context), Answer(options, setup.eos_ids, setup.tokenizer, result, context.token_ids)
            logits, likeliest = context.logits, None
            while not flag.is_set:
                assert logits is not None
                text = answer.take(logits, likeliest)
                context.token_ids.extend(result.token_ids[len(context) - said :])
                if text:
                    yield Piece(text)
                if answer.done:
                    break
                lane = append(setup, context, [context.uncached], ahead=answer.ahead, decoding=True)
                assert lane is not None, "of one block"
                logits, likeliest = lane.logits, lane.likeliest
        except BaseException as error:
            _end_early(context, mark, rest, said, result)
            if not isinstance(error, _Cancelled):
                raise
        finally:
            stats.memory, stats.traffic = context.cache.bytes_by_tier, context.cache.traffic
        result.warning = result.warning or setup.warn(len(context), context.rope)


def _end_early(context: Context, mark: ContextMark, rest: Rest, said: int | None, result: Generation) -> None:
    """Leave in a context what `rest` says of a generation that failed; `said` tokens came before the answer."""
    if said is not None and rest != "nothing":
        context.token_ids[said:] = result.token_ids
    elif rest == "blocks":
        del context.token_ids[max(mark.n_tokens, context.cache.n_tokens) :]
    else:
        context.go_back(mark)


def blocks(
    ids: Sequence[int], block: int, progress: Progress | None = None, done: int = 0, offset: int = 0
) -> Iterator[Sequence[int]]:
    """Yield `ids` in blocks, and call `progress` after each. Progress begins at `done`, the tokens read before.

    The first block has `offset` tokens fewer: those of its block that were read before.
    """
    for start in range(-offset, len(ids), block) if ids else ():
        stop = min(start + block, len(ids))
        yield ids[max(0, start) : stop]
        if progress:
            progress(done + stop, done + len(ids))
