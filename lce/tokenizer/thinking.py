"""Thoughts: what a model writes before its answer, between two marks of its chat template.

The prompt ends with the opening mark, or the model writes it first of all. Elsewhere the marks are plain text.

    text        <think>\\nIt is a capital.\\n</think>\\n\\nParis
    thought               It is a capital.
    answer                                            Paris
"""

from dataclasses import dataclass

_OPENED = ("<think>", "[THINK]", "<thought>", "<thinking>", "<reasoning>", "<seed:think>")
MARKS = tuple((opened, f"{opened[0]}/{opened[1:]}") for opened in _OPENED)


@dataclass(frozen=True)
class Thinking:
    """How an answer may begin: within a thought that the prompt has opened (`is_open`), or with the mark `opened`."""

    opened: str
    closed: str
    is_open: bool

    def reader(self) -> "ThoughtReader":
        """Return a reader of an answer that begins so."""
        return ThoughtReader(self)

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
            ends = range(len(self.closed) - 1, 0, -1)
            thought = next((thought[:-n] for n in ends if thought.endswith(self.closed[:n])), thought)
        return thought.rstrip("\n"), answer.lstrip("\n")


def thinking_of(template: str, prompt: str, begun: str = "") -> Thinking | None:
    """Return how the answer behind a rendered prompt may begin; None if it has no thought.

    `begun` is the text of an answer that has begun, with which the prompt ends.
    """
    opened, closed = next((pair for pair in MARKS if pair[1] in template), ("", ""))
    if begun.strip():
        return Thinking(opened, closed, True) if opened and begun.rfind(opened) > begun.rfind(closed) else None
    end = prompt.rstrip()
    return None if not opened or end.endswith(closed) else Thinking(opened, closed, end.endswith(opened))


class ThoughtReader:
    """A reader of an answer that comes in pieces. It parts the answer as `Thinking.parted` does."""

    def __init__(self, thinking: Thinking) -> None:
        self._thinking, self._text, self._said = thinking, "", ("", "")

    def push(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """Add text, and return what it adds to the thought and to the answer."""
        if self._said[1]:  # the answer has begun
            return "", text
        self._text += text
        before, self._said = self._said, self._thinking.parted(self._text, whole=last)
        return self._said[0][len(before[0]) :], self._said[1]
