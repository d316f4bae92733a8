"""Thoughts are parted from answers, however the text comes in pieces."""

from pathlib import Path

import pytest
import tokenizers

from lce.tokenizer.chat import render_chat
from lce.tokenizer.thinking import MARKS, Thinking, thinking_of
from lce.weights.source import Source
from tests.checkpoints import save_chat

ASKED = {"role": "user", "content": "2+2?"}
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
    found += [reader(text[i : i + size]) for i in range(0, len(text), size)]
    found.append(reader("", last=True))
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


@pytest.mark.parametrize("reads", [False, True])
def test_a_thought_is_written_where_the_template_reads_it(reads: bool) -> None:
    template = "{# </think> #}{% for m in messages %}{{ m.content }}{{ m.reasoning_content }}.{% endfor %}"
    template = template if reads else template.replace("{{ m.reasoning_content }}", "")
    thought = {"role": "assistant", "content": "4", "reasoning_content": "Two"}
    written = "4Two" if reads else "<think>\nTwo\n</think>\n\n4"
    assert render_chat(template, [ASKED, thought, ASKED], {}).text == f"2+2?.{written}.2+2?."
    assert render_chat("{{ messages[1].content }}", [ASKED, thought], {}).text == "4"


def test_marks_that_are_special_tokens_are_shown_but_never_read_in_a_message(tmp_path: Path) -> None:
    save_chat(tmp_path, "{{ messages[0].content }}[THINK]{# [/THINK] #}")
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.add_special_tokens(["[THINK]", "[/THINK]"])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Source(tmp_path).tokenizer()
    chat = tokenizer.render_chat([{"role": "user", "content": "a [THINK]"}])
    ids = tokenizer.encode_parts(chat)
    assert (chat.thinking, ids.count(302), ids[-1]) == (Thinking("[THINK]", "[/THINK]", True), 1, 302)
    assert tokenizer.decode([302, *tokenizer.encode("hm", bos=False), 303, 301]) == "[THINK]hm[/THINK]"
