"""The engine: prefills, generates, scores, traces and chats with one model and one method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, overload

from torch import Tensor

from lce.engine.answer import GenerationOptions
from lce.engine.arguments import Prompt, Prompts, are_many
from lce.engine.context import Context, Unique, new_context, open_context, own_context
from lce.engine.options import CACHE_BUDGET
from lce.engine.prefilling import FilePrefill, prefill, prefill_file
from lce.engine.running import checked_options, stream
from lce.engine.setup import Setup
from lce.engine.stream import AsyncStream, CancelFlag, Generation, Stats, Stream
from lce.progress import Progress

if TYPE_CHECKING:
    from lce.engine.batch import Batch
    from lce.engine.chat import Conversation
    from lce.engine.scoring import TokenScores
    from lce.engine.trace import Trace


class Engine(Unique):
    """A model with an attention method. An engine prefills and generates, and never changes: all state is in contexts.

    `method` has every knob filled in. `window` is the number of positions that the model can be trusted on. `tokenizer`
    turns text into ids and back. `setup` has these, the model, and what else `lce.load` decided;
    `lce.Engine(engine.setup.using("dca"))` is an engine with the same weights and another method.
    """

    _instead = "load the model again in the other process, and hand over contexts as files"

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.method = setup.method
        self.tokenizer = setup.tokenizer
        self.window = setup.window

    def __repr__(self) -> str:
        return f"Engine({self.setup!r})"

    @overload
    def generate(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> Generation: ...

    @overload
    def generate(self, prompt: Prompts, **options: Unpack[GenerationOptions]) -> list[Generation]: ...

    def generate(self, prompt: Prompt | Prompts, **options: Unpack[GenerationOptions]) -> Generation | list[Generation]:
        """Prefill `prompt` (text, token ids, or a rendered chat) and generate up to `max_tokens` tokens.

        Options: `max_tokens` (256), `context` to continue, the knobs of `Sampling` as keywords, such as `temperature`,
        `top_p`, `seed` and `stop`, or `sampling=Sampling(...)`, `logprobs=k` for the log-probability of each token and
        of the k likeliest, `schema={...}` for a JSON schema or `grammar="..."` that the text must match, and
        `progress`: True for a bar, or a function of the tokens done and the total.

        A list of prompts gives a list of results. Up to 8 prompts are answered at once, each on its own fork of
        `context`, if given. Raises `UsageError` for a prompt or an option that cannot be used, and `CapacityError`
        before any work if memory cannot hold the prompt and `max_tokens` more tokens. Warns by `WindowWarning` if the
        text is longer than the method can read. After any error or Ctrl-C, `context` is as it was before.
        """
        if are_many(prompt):
            from lce.engine.batch import answers

            return answers(self.setup, prompt, options)
        checked = checked_options(self.setup, options, prompt)
        return stream(self.setup, prompt, checked, CancelFlag(), rest="nothing").finish()

    def stream(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> Stream:
        """Return a stream that generates text piece by piece from its first `next` on; `stream.result` has the figures.

        If prefill fails, or is interrupted or cancelled, `context` is as it was before. Once prefill is complete, the
        answer so far stays in `context`. No other call may use `context` until the stream ends. Any thread may end the
        stream early: see `Stream.cancel` and `Stream.close`.
        """
        return stream(self.setup, prompt, checked_options(self.setup, options, prompt), CancelFlag())

    def astream(self, prompt: Prompt, **options: Unpack[GenerationOptions]) -> AsyncStream:
        """Generate like `stream`, for `async for`. The stream's own thread does the work once the loop starts."""
        checked = checked_options(self.setup, options, prompt)
        return AsyncStream(lambda flag: stream(self.setup, prompt, checked, flag))

    def batch(
        self,
        max_lanes: int | str | None = None,
        max_waiting: int | str = 256,
        *,
        cache_dir: str | Path | None = None,
        cache_budget: int | str = CACHE_BUDGET,
        cache_memory: int | str | None = None,
        repeatable: bool = False,
    ) -> Batch:
        """Begin a batch, which runs many requests at once.

        Up to `max_lanes` requests run, by default 8, and 64 on a GPU, and `max_waiting` more wait; further ones are
        refused. Contexts of ended requests are kept, and of a prompt that begins with a kept context's tokens only the
        rest is read. In the folder `cache_dir`, contexts are also kept as files of up to `cache_budget` bytes in all,
        which outlive the process. In memory, kept contexts take up to `cache_memory` bytes, by default a quarter of the
        free memory. With `repeatable`, no generated token is kept: an answer depends on its request alone, not on those
        before.
        """
        from lce.engine.batch import Batch

        self.setup.check_undivided("a batch", "ask prompt by prompt, with Engine.generate or stream")
        kept = cache_dir, cache_budget, cache_memory
        return Batch(self.setup, max_lanes, max_waiting, *kept, repeatable=repeatable)

    def prefill(
        self,
        document: Prompt,
        *,
        context: Context | None = None,
        length: int | str | None = None,
        progress: Progress | bool | None = None,
    ) -> Context:
        """Append a document to `context`, or to a new context, by prefilling the document; return the context.

        `length` announces how many tokens the context will have in the end. Raises `UsageError` for an unusable
        document, and `CapacityError` before any work if memory is too small. After an error `context` is unchanged.
        """
        return prefill(self.setup, document, context, length, progress)

    def prefill_file(
        self,
        document: Prompt,
        path: str | Path,
        *,
        context: Context | None = None,
        length: int | str | None = None,
        checkpoint_every: int | str | None = None,
        force: bool = False,
        progress: Progress | bool | None = None,
        keep: float | None = None,
    ) -> Stats:
        """Prefill a document into the context file `path`, after a copy of `context` if given; return `Stats`.

        Keys and values beyond the memory budget go straight to the file and are written once. `checkpoint_every` is the
        number of tokens between checkpoints: an interrupted call that is repeated resumes at the last one. `length` is
        that of `prefill`; with a `context`, the length announced for `context` counts. `context` stays as it is, and
        `path` may be the file from which it was opened: any other file is replaced only with `force`. Raises
        `DataError` for the unfinished prefill of another text or engine, and `CapacityError` if space is short.

        With `keep`, the file has that share of the keys and values: see `evict`. The text is then prefilled in memory,
        or within the budgets, as it is after a `context` of which keys were evicted; `checkpoint_every` is refused.
        """
        asked = partial(FilePrefill, document, path, context, length, checkpoint_every, force, progress, keep)
        return prefill_file(self.setup, self.setup.together(asked))

    def evict(self, context: Context, keep: float, *, progress: Progress | bool | None = None) -> Context:
        """Return a new context with the share `keep` of the keys and values of `context`, which stays as it is.

        The model repeats the text, and each KV head keeps the keys that it attends most (KVzip; `lce.engine.eviction`
        has the details). This takes longer than prefill did. The text's later tokens are cached as usual. With `keep`
        1 the new context is a fork. Raises `UsageError` for a method other than `full`, for a model with a sliding
        window, and for a context of which keys were evicted before.
        """
        from lce.engine.eviction import evict

        return evict(self.setup, context, keep, progress)

    def logits(self, token_ids: Prompt) -> Tensor:
        """Return the logits after each of T tokens, `[T, vocab]` float32. Raises `UsageError` for unknown ids."""
        from lce.engine.scoring import logits

        return logits(self.setup, token_ids)

    def score(
        self,
        token_ids: Prompt,
        *,
        context: Context | None = None,
        first: int | None = None,
        progress: Progress | bool | None = None,
    ) -> TokenScores:
        """Return the log-probability of each token from `first` on, given all tokens before it.

        The tokens are appended to `context`, if given. By default `first` is 0 after a `context` that has tokens, and
        otherwise 1, because nothing precedes the first token. Logits are in memory for one slice of the text at a time,
        and are not computed for tokens before `first`. After any error or Ctrl-C, `context` is as it was before.

        Example: `engine.score(ids).logprobs.sum()` is the log-probability of a text, given its first token.
        """
        from lce.engine.scoring import score

        return score(self.setup, token_ids, context, first, progress)

    def trace(self, token_ids: Prompt, *, scores: bool = False) -> Trace:
        """Prefill a text; return the chunks that each head of each layer chose for each token, with scores and ranks.

        With `scores`, the trace also has the scores of all M chunks: N · M numbers per layer and head for N tokens.
        """
        from lce.engine.trace import trace

        return trace(self.setup, token_ids, scores)

    def open_context(self, path: str | Path) -> Context:
        """Open a file that `Context.save` or `prefill_file` wrote. Keys and values are read when needed.

        Raises `DataError` for a file of another model, method, RoPE scaling or dtype, and for a damaged file.
        """
        return open_context(self.setup, path)

    def new_context(self, length: int | str) -> Context:
        """Return an empty context with memory for `length` tokens. Raises `CapacityError` if they cannot fit."""
        return new_context(self.setup, length)

    def conversation(
        self, system: str | None = None, *, context: Context | None = None, length: int | str = 0
    ) -> Conversation:
        """Begin a chat whose turns prefill only new tokens. `system` is the text of a system message.

        With `context` the chat continues that context. `length` announces how many tokens the chat will have in the
        end. Raises `ModelError` if the model has no chat template.
        """
        from lce.engine.chat import Conversation

        return Conversation(self.setup, system, context=own_context(self.setup, context), length=length)

    def chat(self, messages: str | Sequence[Mapping[str, Any]], **options: Unpack[GenerationOptions]) -> Generation:
        """Answer a list of messages `{"role": ..., "content": ...}`, or one user's message given as a text.

        A last message of the assistant is continued: the text is what comes behind it. Takes the options of
        `generate`; sampling that is left out is as the model's makers recommend. With `context`, the messages are
        formatted as if they followed an answer. Raises `ModelError` without a template, `DataError` if it refuses them.
        """
        from lce.engine.chat import Conversation

        context = self.setup.together(lambda: own_context(self.setup, options.pop("context", None)))
        return Conversation(self.setup, context=context, rest="answer").ask(messages, **options)
