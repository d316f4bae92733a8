"""Conversations: every turn reads only what is new, whatever the template makes of earlier turns."""

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import lce
from lce.engine.chat import Conversation
from lce.tokenizer import template
from tests.checkpoints import save_chat
from tests.interrupts import interrupted, places

TURN = "{{ '<|turn|>' ~ message.role ~ '\n' ~ %s ~ '<|end|>\n' }}"
AS_IT_IS = "{{ bos_token }}{%% for message in messages %%}%s{%% endfor %%}{{ '<|turn|>assistant\n' }}"
TEMPLATES = {
    "plain": AS_IT_IS % (TURN % "message.content"),
    "trim": AS_IT_IS % (TURN % "message.content | trim"),
    "spaced": AS_IT_IS % (TURN % "' ' ~ message.content.strip() ~ ' '"),
    "cut": AS_IT_IS % (TURN % "(message.content[:2] if message.role == 'assistant' else message.content)"),
    "no thoughts": AS_IT_IS.replace("assistant\n' }}", "assistant\n<think>' }}") % (TURN % "message.content"),
    "last only": (
        "{{ bos_token }}{% for message in messages[-1:] %}" + TURN % "message.content" + "{% endfor %}"
        "{{ '<|turn|>assistant\n' }}"
    ),
}
METHODS: dict[str, lce.Method] = {
    "longheads": lce.methods.LongHeads(chunk_size=8, chunks=4),
    "infllm": lce.methods.InfLLM(block_size=8, top_k=2, sinks=4, local=16),
    "streaming": lce.methods.Streaming(sinks=4, local=32),
}
APPENDING = ("plain", "trim", "spaced")
QUESTIONS = ["What is a llama?", "And an alpaca, is it smaller?", " Why?\n", "Thank you, that is all I wanted to know."]


@pytest.fixture(scope="module", autouse=True)
def _render_here() -> Iterator[None]:
    """Renders in this process: the templates are ours, and tests/tokenizer tests the other process."""

    def answer(request: str) -> bytes:
        asked = json.loads(request)
        return json.dumps(template.render(asked["template"], asked["variables"], asked["chars"])).encode()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lce.tokenizer.chat._answer", answer)
        yield


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., lce.Engine]:
    folders: dict[str, Path] = {}

    def load_one(name: str, method: lce.Method = METHODS["longheads"]) -> lce.Engine:
        if name not in folders:
            folders[name] = save_chat(tmp_path_factory.mktemp("chat"), TEMPLATES[name])
        return lce.load(folders[name], method, block=32)

    return load_one


@pytest.fixture
def engine(load: Callable[..., lce.Engine]) -> lce.Engine:
    return load("plain")


def read_and_said(conversation: Conversation, reply: lce.Generation) -> tuple[list[int], list[int]]:
    ids, n = conversation.context.token_ids, len(conversation.context) - len(reply.token_ids)
    return ids[:n], ids[n:]


@pytest.mark.parametrize("name", APPENDING)
def test_a_turn_reads_only_what_is_new(load: Callable[..., lce.Engine], name: str) -> None:
    engine = load(name)
    conversation = engine.conversation(system="Be brief.")
    total, first = 0, None
    for question in QUESTIONS:
        reply = conversation.ask(question, max_tokens=12)
        total += conversation.tokens_read
        assert reply.stats.prompt_tokens == conversation.tokens_read
        read, said = read_and_said(conversation, reply)
        assert (said, len(read)) == (reply.token_ids, total)
        first = first or conversation.context
        assert conversation.context is first
        assert engine.generate(read, max_tokens=12).token_ids == reply.token_ids
        total += len(reply.token_ids)
    assert conversation.tokens_read < total / 3
    assert [message["role"] for message in conversation.messages] == ["system", *["user", "assistant"] * len(QUESTIONS)]


@pytest.mark.parametrize(
    ("name", "method"),
    [
        pytest.param(name, method, marks=[pytest.mark.slow] * (i != j))
        for i, name in enumerate(("cut", "no thoughts", "last only"))
        for j, method in enumerate(("streaming", "infllm", "longheads"))
    ],
)
def test_a_template_that_rewrites_the_history(load: Callable[..., lce.Engine], name: str, method: str) -> None:
    """What was written otherwise before is dropped, and no more than the method needs is read again."""
    engine = load(name, METHODS[method])
    conversation = engine.conversation()
    for question in QUESTIONS:
        before = len(conversation.context or [])
        reply = conversation.ask(question, max_tokens=12)
        read, said = read_and_said(conversation, reply)
        assert said == reply.token_ids
        asked = conversation.messages[:-1]
        assert engine.tokenizer.decode(read, skip_special=False) == engine.tokenizer.chat(asked)
        if method != "infllm":  # its blocks depend on what is read in one go
            assert engine.generate(read, max_tokens=12).token_ids == reply.token_ids
        if name != "last only" and before and method == "streaming":
            assert conversation.tokens_read <= len(read) - before + 12 + len("assistant\n<think>")


def test_an_end_of_turn_ends_the_answer_and_is_not_read_twice(load: Callable[..., lce.Engine]) -> None:
    engine = load("plain")
    assert engine.setup.eos_ids == {1, 301}
    conversation = engine.conversation()
    for question in QUESTIONS[:2]:
        conversation.ask(question, max_tokens=5)
    assert conversation.context.token_ids.count(301) == 3  # two questions and the first answer


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_turn_that_fails_leaves_no_message(engine: lce.Engine, at: int) -> None:
    def fail(done: int, total: int) -> None:
        if done >= 32 * at:
            raise KeyboardInterrupt

    conversation = engine.conversation()
    conversation.ask(QUESTIONS[0], max_tokens=4)
    before, long = conversation.messages, "The quick brown fox jumps over the lazy dog. " * 12
    with pytest.raises(KeyboardInterrupt):
        conversation.ask(long, max_tokens=4, progress=fail)
    assert conversation.messages == before
    reply = conversation.ask(long, max_tokens=4)
    read, _ = read_and_said(conversation, reply)
    assert engine.generate(read, max_tokens=4).token_ids == reply.token_ids
    turn = f"<|end|>\n<|turn|>user\n{long}<|end|>\n<|turn|>assistant\n"
    left = len(engine.tokenizer.encode(turn, bos=False)) - (32 * at - 1)
    assert conversation.tokens_read == left, "with the answer's last token, blocks that were read stay read"


def test_blocks_of_an_interrupted_turn_are_not_saved(engine: lce.Engine, tmp_path: Path) -> None:
    fail, long = Mock(side_effect=KeyboardInterrupt), "The quick brown fox jumps over the lazy dog. " * 12
    conversation = engine.conversation()
    with pytest.raises(KeyboardInterrupt):
        conversation.ask(long, progress=fail)
    with pytest.raises(lce.UsageError, match="the conversation is empty"):
        conversation.save(tmp_path / "chat.lce")
    conversation.ask(QUESTIONS[0], max_tokens=4)
    n = len(conversation.context)
    with pytest.raises(KeyboardInterrupt):
        conversation.ask(long, progress=fail)
    assert len(conversation.context) == n + 31, "and the answer's last token"
    conversation.save(tmp_path / "chat.lce")
    assert len(engine.open_context(tmp_path / "chat.lce")) == n
    context = engine.prefill("A document.")
    with pytest.raises(KeyboardInterrupt):
        engine.chat(long, context=context, progress=fail)
    assert context.token_ids == engine.prefill("A document.").token_ids, "as it was: no conversation goes on"


ACTIONS = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from(QUESTIONS)),
    st.tuples(st.just("leave"), st.integers(0, 2)),  # a stream, after so many pieces
    st.tuples(st.just("fail"), st.integers(1, 3)),  # a prefill, after so many blocks
    st.tuples(st.just("reset"), st.none()),
)


@settings(max_examples=8, deadline=None)
@given(actions=st.lists(ACTIONS, max_size=4), name=st.sampled_from(["spaced", "no thoughts"]), behind=st.booleans())
@example(actions=[("ask", QUESTIONS[0]), ("leave", 0), ("leave", 1), ("leave", 3)], name="plain", behind=False)
def test_whatever_happens_the_context_holds_what_the_template_writes(
    load: Callable[..., lce.Engine], actions: list[tuple[str, Any]], name: str, behind: bool
) -> None:
    def fail(done: int, total: int) -> None:
        if done >= 32 * value:
            raise KeyboardInterrupt

    engine = load(name)
    document = engine.prefill("The llama is larger than the alpaca. " * 3) if behind else None
    before = document.token_ids[:] if document else []
    conversation = engine.conversation(context=document)
    for action, value in [*actions, ("ask", "Is that all?")]:
        messages = conversation.messages
        if action == "reset":
            conversation.reset()
        elif action == "leave":
            stream = conversation.stream("Tell me more.", max_tokens=6)
            for _ in range(value):
                next(stream)
            n, messages = len(messages), conversation.messages
            assert len(messages) == n + (2 if value else 0)
        elif action == "fail":
            with suppress(KeyboardInterrupt):
                conversation.ask("The quick brown fox jumps over the lazy dog. " * 4, max_tokens=2, progress=fail)
        else:
            reply = conversation.ask(value, max_tokens=6)
        if action != "reset":
            assert conversation.messages[: len(messages)] == messages
    read, said = read_and_said(conversation, reply)
    assert (said, read[: len(before)], engine.generate(read, max_tokens=6).token_ids) == (reply.token_ids, before, said)
    written = conversation.setup.tokenizer.render_chat(conversation.messages[:-1], following=behind).text
    assert words(engine.tokenizer.decode(read[len(before) :], skip_special=False)) == words(written)


def words(text: str) -> str:
    """The text without white space; the white space around an answer is the model's, not the template's."""
    return "".join(text.split())


def test_stop_strings_are_not_part_of_the_history(engine: lce.Engine) -> None:
    free = engine.conversation().ask(QUESTIONS[0], max_tokens=12).text
    conversation = engine.conversation()
    reply = conversation.ask(QUESTIONS[0], max_tokens=12, stop=[free[4:6]])
    assert reply.text == free[: free.index(free[4:6])]
    conversation.ask(QUESTIONS[1], max_tokens=2)
    assert conversation.messages[1] == {"role": "assistant", "content": reply.text}


def test_a_conversation_goes_on_from_a_file(engine: lce.Engine, tmp_path: Path) -> None:
    conversation = engine.conversation("Be brief.")
    conversation.ask(QUESTIONS[0], max_tokens=8)
    conversation.save(tmp_path / "chat.lce")
    expected = [conversation.ask(question, max_tokens=8).token_ids for question in QUESTIONS[1:]]
    other = engine.conversation(context=engine.open_context(tmp_path / "chat.lce"))
    assert [other.ask(question, max_tokens=8).token_ids for question in QUESTIONS[1:]] == expected
    assert [m["content"] for m in other.messages[::2]] == QUESTIONS[1:]
    assert other.tokens_read < 60


def test_one_question_behind_a_document(engine: lce.Engine) -> None:
    document = engine.prefill("The llama is larger than the alpaca. " * 9)
    n = len(document)
    said = engine.chat([{"role": "user", "content": "Which is larger?"}], context=document.fork(), max_tokens=6)
    assert said.stats.prompt_tokens < 60
    assert len(document) == n
    context = document.fork()
    stream = engine.conversation(context=context).stream("Which is larger?", max_tokens=6)
    assert "".join(piece.text for piece in stream) == said.text
    written = engine.tokenizer.decode(context.token_ids[n:-6], skip_special=False)
    assert written == "<|end|>\n<|turn|>user\nWhich is larger?<|end|>\n<|turn|>assistant\n"


@pytest.mark.parametrize("name", ["cut", "last only"])
def test_a_template_that_leaves_answers_out_cannot_go_on(load: Callable[..., lce.Engine], name: str) -> None:
    engine = load(name)
    with pytest.raises(lce.ModelError, match="leaves out earlier answers; begin a new conversation"):
        engine.chat("Hi", context=engine.prefill("A document."))


@pytest.mark.parametrize("name", ["plain", "trim"])
def test_an_answer_that_has_begun_is_continued(load: Callable[..., lce.Engine], name: str) -> None:
    engine = load(name)
    asked = [{"role": "user", "content": QUESTIONS[0]}, {"role": "assistant", "content": "A llama "}]
    written = engine.tokenizer.chat(asked[:1]) + "A llama "
    assert engine.tokenizer.render_chat(asked, continue_final_message=True).text == written
    conversation = engine.conversation()
    found = conversation.ask(asked, max_tokens=4)
    assert found.token_ids == engine.generate(engine.tokenizer.encode(written, bos=False), max_tokens=4).token_ids
    assert found.token_ids == engine.chat(asked, max_tokens=4).token_ids
    assert conversation.messages == [asked[0], {"role": "assistant", "content": f"A llama {found.text}"}]
    conversation.ask(QUESTIONS[1], max_tokens=2)
    assert conversation.tokens_read < 60
    for wrong in (asked[:1], [asked[0], {**asked[1], "tool_calls": [{"function": {"name": "f"}}]}]):
        with pytest.raises(lce.DataError, match="cannot be continued"):
            engine.tokenizer.render_chat(wrong, continue_final_message=True)


def test_one_question_alone(engine: lce.Engine) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    reply = engine.chat(messages, max_tokens=6)
    asked = engine.tokenizer.encode_parts(engine.tokenizer.render_chat(messages))
    assert reply.token_ids == engine.generate(asked, max_tokens=6).token_ids
    assert engine.chat("Hi", max_tokens=3).token_ids == engine.conversation().ask("Hi", max_tokens=3).token_ids
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]
    for same in ([{"role": "user", "content": parts}], {"role": "user", "content": parts}):
        assert engine.chat(same, max_tokens=3).token_ids == engine.chat("Hi\nyou", max_tokens=3).token_ids


def test_what_is_refused(engine: lce.Engine, tiny_model: Path) -> None:
    base = lce.load(tiny_model)
    for ask in (base.conversation, lambda: base.chat("Hi"), lambda: base.conversation().stream("Hi")):
        with pytest.raises(lce.ModelError, match="no chat template: it continues text; use generate"):
            ask()
    conversation = engine.conversation()
    for wrong in (3, None, [3], [{"role": "user"}], {"role": "user"}, [], b"Hi"):
        with pytest.raises(lce.DataError, match="expected a list"):
            conversation.ask(wrong)
    other = engine.prefill("Hi")
    refused: list[tuple[str, Callable[[], object]]] = [
        ("a system message begins a conversation", lambda: engine.conversation("Be brief.", context=other)),
        ("the conversation is empty", lambda: engine.conversation().save("chat.lce")),
        ("max_tokens", lambda: conversation.ask("Hi", max_tokens=0)),
        ("a context of its own", lambda: conversation.ask("Hi", context=other)),
        ("another engine", lambda: engine.conversation(context=base.prefill("Hi"))),
        ("length", lambda: engine.conversation(length="x")),
        ("cannot be pickled", lambda: copy.copy(conversation)),
    ]
    for message, call in refused:
        with pytest.raises(lce.UsageError, match=message):
            call()
    assert conversation.messages == []
    conversation.ask("Hi", max_tokens=2)


def begun(engine: lce.Engine) -> Conversation:
    conversation = engine.conversation("Be brief.")
    conversation.ask(QUESTIONS[0], max_tokens=4)
    return conversation


@pytest.mark.parametrize("name", ["plain", "trim"])
def test_an_interruption_loses_no_turn(name: str, load: Callable[..., lce.Engine]) -> None:
    engine = load(name)
    whole, probe = begun(engine), begun(engine)
    first, answer = whole.messages, whole.ask(QUESTIONS[1], max_tokens=4).text
    for place, nth in places(lambda: probe.ask(QUESTIONS[1], max_tokens=4), 37, "engine/chat.py"):
        conversation = begun(engine)
        interrupted(lambda conversation=conversation: conversation.ask(QUESTIONS[1], max_tokens=4), place, nth)
        assert conversation.messages[:3] == first, place
        if len(conversation.messages) == 3:
            assert conversation.ask(QUESTIONS[1], max_tokens=4).text == answer, place
        assert conversation.messages == whole.messages, place


def test_a_reset_that_is_interrupted_happens_or_does_not(engine: lce.Engine) -> None:
    first, probe = begun(engine).messages, begun(engine)
    for place, nth in places(probe.reset, 17, "engine/chat.py"):
        conversation = begun(engine)
        interrupted(conversation.reset, place, nth)
        assert conversation.messages in (first, first[:1]), place
        conversation.reset()
        assert conversation.ask(QUESTIONS[0], max_tokens=4).text == first[2]["content"]


def test_a_template_that_writes_nothing_is_the_models_fault(tmp_path: Path) -> None:
    engine = lce.load(save_chat(tmp_path, "{# nothing #}", max_position_embeddings=64))
    with pytest.raises(lce.ModelError, match="writes nothing for these messages"):
        engine.chat([{"role": "user", "content": "Hi"}], max_tokens=2)


def test_a_rendered_chat_is_a_prompt(load: Callable[..., lce.Engine]) -> None:
    engine, messages = load("plain"), [{"role": "user", "content": "Is <|end|> a llama?"}]
    chat = engine.tokenizer.render_chat(messages)
    asked = engine.chat(messages, max_tokens=9, temperature=0)
    assert engine.generate(chat, max_tokens=9).token_ids == asked.token_ids
    assert len(engine.prefill(chat)) == asked.stats.prompt_tokens == len(engine.tokenizer.encode_parts(chat))
    assert [each.token_ids for each in engine.generate([chat, chat], max_tokens=9)] == 2 * [asked.token_ids]


def test_a_batch_answers_messages(load: Callable[..., lce.Engine]) -> None:
    engine, messages = load("plain"), [{"role": "user", "content": QUESTIONS[0]}]
    with engine.batch() as batch:
        found = [batch.chat(each, max_tokens=9).finish() for each in (messages, QUESTIONS[0])]
    assert [each.token_ids for each in found] == 2 * [engine.chat(messages, max_tokens=9).token_ids]
