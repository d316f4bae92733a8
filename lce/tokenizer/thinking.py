"""Thoughts: what a model writes before its answer, between two marks of its chat template.

The prompt ends with the opening mark, or the model writes it first of all. Elsewhere the marks are plain text.

    text        <think>\\nIt is a capital.\\n</think>\\n\\nParis
    thought               It is a capital.
    answer                                            Paris
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_OPENED = ("<think>", "[THINK]", "<thought>", "<thinking>", "<reasoning>", "<seed:think>")
MARKS = tuple((opened, f"{opened[0]}/{opened[1:]}") for opened in _OPENED)


@dataclass(frozen=True)
class Thinking:
    """How an answer may begin: within a thought that the prompt has opened (`is_open`), or with the mark `opened`."""

    opened: str
    closed: str
    is_open: bool

    def parted(self, text: str, *, whole: bool) -> tuple[str, str]:
        """Return the thought and the answer in a text, without line breaks at the marks.

        If the text is not `whole`, an end that may become a mark is left out.
        """
        start = text.lstrip()
        if not whole and self.opened.startswith(start) and start != self.opened:
            return "", ""
        if start.startswith(self.opened):
            text = start.removeprefix(self.opened)
        elif not self.is_open:
            return "", text
        thought, mark, answer = text.lstrip("\n").partition(self.closed)
        if not mark and not whole:
            thought = thought[: len(thought) - overlap(thought, self.closed)]
        return thought.rstrip("\n"), answer.lstrip("\n")

    def reader(self) -> Callable[..., tuple[str, str]]:
        """Return a function that takes an answer in pieces, and returns what each adds to thought and answer."""
        said = thought = answer = ""

        def push(text: str, *, last: bool = False) -> tuple[str, str]:
            nonlocal said, thought, answer
            if answer:
                return "", text
            said, n = said + text, len(thought)
            thought, answer = self.parted(said, whole=last)
            return thought[n:], answer

        return push


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `mark`, but not all of `mark`."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)


def thinking_of(template: str, prompt: str, begun: str = "") -> Thinking | None:
    """Return how the answer that a prompt asks for, or ends with as `begun`, may begin; None if it has no thought."""
    opened, closed = next((pair for pair in MARKS if pair[1] in template), ("", ""))
    if begun.strip():
        return Thinking(opened, closed, True) if opened and begun.rfind(opened) > begun.rfind(closed) else None
    end = prompt.rstrip()
    return None if not opened or end.endswith(closed) else Thinking(opened, closed, end.endswith(opened))


def with_thoughts(template: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with each thought between marks in its content, if the template does not read thoughts itself."""
    opened, closed = next((pair for pair in MARKS if pair[1] in template), ("", ""))
    if not opened or "reasoning_content" in template:
        return messages
    thought, said = "reasoning_content", f"{opened}\n{{}}\n{closed}\n\n{{}}".format
    return [m | {"content": said(m[thought], m["content"] or "")} if m.get(thought) else m for m in messages]
