"""Thoughts are parted from answers, however the text comes in pieces."""

import pytest

from lce.tokenizer.thinking import MARKS, Thinking, thinking_of

OPEN, BEGINS = Thinking("<think>", "</think>", True), Thinking("<think>", "</think>", False)


@pytest.mark.parametrize(
    ("thinking", "text", "thought", "answer"),
    [
        (BEGINS, "<think>\nA\n\nb <i>\n</think>\n\nParis.\n", "A\n\nb <i>", "Paris.\n"),
        (BEGINS, "\n<think></think>Paris", "", "Paris"),
        (BEGINS, " \n Paris <think>no</think>", "", " \n Paris <think>no</think>"),
        (BEGINS, "<thin", "", "<thin"),
        (BEGINS, "<think>cut </thi", "cut </thi", ""),
        (BEGINS, "<think>a</think>b</think><think>", "a", "b</think><think>"),
        (BEGINS, "", "", ""),
        (OPEN, "\nA </\n</think> Paris", "A </", " Paris"),
        (OPEN, "<think>A</think>Paris", "A", "Paris"),
        (OPEN, "cut\n", "cut", ""),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 99])
def test_a_thought_is_parted_from_its_answer(
    thinking: Thinking, text: str, thought: str, answer: str, size: int
) -> None:
    reader, found = thinking.reader(), list[tuple[str, str]]()
    found += [reader.push(text[i : i + size]) for i in range(0, len(text), size)]
    found.append(reader.push("", last=True))
    assert ("".join(one for one, _ in found), "".join(other for _, other in found)) == (thought, answer)


@pytest.mark.parametrize("pair", MARKS)
def test_how_an_answer_begins(pair: tuple[str, str]) -> None:
    opened, closed = pair
    template = f"{{{{ '{opened}' }}}} {{{{ '{closed}' }}}}"
    is_open, may_open = Thinking(opened, closed, True), Thinking(opened, closed, False)
    assert thinking_of(template, "assistant\n") == may_open
    assert thinking_of(template, f"assistant\n{opened}\n") == is_open
    assert thinking_of(template, f"assistant\n{opened}\n\n{closed}\n\n") is None
    assert thinking_of(template, "assistant\nI am", "I am") is None
    assert thinking_of(template, f"assistant\n{opened}I am", f"{opened}I am") == is_open
    assert thinking_of(template, "assistant\n", " ") == may_open
    assert thinking_of("{{ messages }}", f"assistant\n{opened}") is None
