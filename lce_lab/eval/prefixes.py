"""Reads many texts with one context. A beginning that several texts share is read once.

Few-shot examples come before every question of a task, and a document before each of its questions. Texts are read in
sorted order. If the next text begins like the current text, the context is marked at the end of the common blocks, and
later goes back to the mark, without a copy. Marks stand at ends of blocks, so a text is always read in the blocks in
which it would be read alone, and results do not depend on other texts.

    texts, in blocks of 2     a b c d e     a b c f     a b c f     g h
    tokens that are read      a b c d e         c f                 g h
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import lce


def read_all(
    engine: lce.Engine, texts: Sequence[Sequence[int]], lengths: Sequence[int] | None = None
) -> Iterator[tuple[int, lce.Context]]:
    """Read texts of token ids in sorted order; yield each text's number and the context that holds the text.

    Tokens that the caller adds to the context are dropped before the next text. `lengths` has for each text the length
    that the context may reach, by default the text's. The RoPE scaling `dynamic` depends on this length, so with it
    only equal texts share a context. Raises `CapacityError` before any work if the longest text cannot fit.
    """
    if not texts:
        return
    lengths = [len(text) for text in texts] if lengths is None else lengths
    order = sorted(range(len(texts)), key=lambda number: (texts[number], -lengths[number]))
    following = [*order[1:], None]
    alone = engine.setup.rope.follows_length
    reader = _Reader(engine, lengths[order[0]] if alone else max(lengths))
    try:
        for number, after in zip(order, following, strict=True):
            text = texts[number]
            yield number, reader.read(text, 0 if after is None or alone else n_common(text, texts[after]))
            if alone and after is not None and texts[after] != text:
                reader.context.close()
                reader = _Reader(engine, lengths[after])
    finally:
        reader.context.close()


class _Reader:
    """A context that reads one text after the other. `marks` are its marks to go back to, shortest first."""

    def __init__(self, engine: lce.Engine, length: int) -> None:
        self.engine = engine
        self.context = engine.new_context(length)
        self.marks = [self.context.mark()]

    def read(self, text: Sequence[int], n_kept: int) -> lce.Context:
        """Read `text` into the context, and mark the end of the last whole block of `text[:n_kept]`."""
        context, block = self.context, self.engine.setup.block
        n_known = n_common(context.token_ids, text)
        while (n := self.marks[-1].n_tokens) > n_known or (n % block and n != len(text)):
            self.marks.pop()  # the mark is beyond the common beginning, or within a block
        context.go_back(self.marks[-1])
        for stop in (n_kept // block * block, len(text)):
            if len(context) < stop:
                self.engine.prefill(text[len(context) : stop], context=context)
                self.marks.append(context.mark())
        return context


def n_common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two sequences."""
    n = min(len(one), len(other))
    if one[:n] == other[:n]:
        return n
    return next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
