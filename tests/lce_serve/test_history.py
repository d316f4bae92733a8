"""Histories that agents send: whatever they hold, the model sees their texts, and notes for what it cannot read."""

import base64
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import lce
from lce_serve.app import application
from lce_serve.service import Service, Settings
from tests.checkpoints import save_chat
from tests.lce_serve.conftest import TEMPLATE, URL

STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('in front only') }}"
    "{% endif %}" + TEMPLATE.removeprefix("{% for m in messages %}")
)
ALTERNATING = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    + TEMPLATE.removeprefix("{% for m in messages %}")
)
DROPPING = TEMPLATE.replace(
    "<|turn|>{{ m.role", "{% if m.role == 'system' %}{% continue %}{% endif %}<|turn|>{{ m.role", 1
)
PATHS = {"c": "/v1/chat/completions", "m": "/v1/messages", "r": "/v1/responses"}
PNG = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
TEXT = base64.b64encode("Zürich is cold".encode()).decode()

Ask = Callable[..., tuple[Any, str]]


@contextmanager
def asking(folder: Path) -> Iterator[Ask]:
    """A function that sends a body to an API, and returns the answer and the prompt that the model saw."""
    with lce.load(folder, threads=1).batch(max_lanes=4) as batch:
        service, seen = Service(Settings("tiny"), batch), list[Any]()
        client = TestClient(application(service), base_url=URL, raise_server_exceptions=False)
        begin = batch.stream

        def spied(prompt: Any, **how: Any) -> Any:
            seen.append(prompt)
            return begin(prompt, **how)

        batch.stream = spied

        def ask(api: str, messages: Any, **more: Any) -> tuple[Any, str]:
            limit, field = ("max_output_tokens", "input") if api == "r" else ("max_tokens", "messages")
            seen.clear()
            answer = client.post(PATHS[api], json={field: messages, limit: 3, **more})
            return answer, seen[0].text if seen else ""

        yield ask


@pytest.fixture(scope="module")
def ask(chat_model: Path) -> Iterator[Ask]:
    with asking(chat_model) as ask:
        yield ask


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def turns(*pairs: str) -> str:
    """The text of turns that are written as `role: text`."""
    written = [pair.split(": ", 1) for pair in pairs]
    return "".join(f"<|turn|>{role}\n{text}<|end|>\n" for role, text in written) + "<|turn|>assistant\n"


CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "shot", "input": {}}]}
RESULT = [{"type": "text", "text": "taken"}, {"type": "image", "source": PNG}]
WRITTEN = '<tool_call>\n{"name": "shot", "arguments": {}}\n</tool_call>'
PICTURE = "data:image/png;base64,iVBORw0KGgo="

HISTORIES: dict[str, tuple[str, list[Any], str]] = {
    "a system message among messages": ("m", [user("Hi"), system("BLUE")], turns("user: Hi", "system: BLUE")),
    "a picture in a result": (
        "m",
        [user("shot"), CALL, user([{"type": "tool_result", "tool_use_id": "t1", "content": RESULT}])],
        turns("user: shot", f"assistant: {WRITTEN}", "user: <tool_response>\ntaken\n[image]\n</tool_response>"),
    ),
    "documents": (
        "m",
        [
            user(
                [
                    {"type": "document", "title": "A", "source": {"type": "text", "data": "plain"}},
                    {
                        "type": "document",
                        "title": "B",
                        "source": {"type": "content", "content": [{"type": "text", "text": "x"}]},
                    },
                    {"type": "document", "title": "C", "source": {**PNG, "media_type": "application/pdf"}},
                    {
                        "type": "search_result",
                        "title": "D",
                        "source": "http://d",
                        "content": [{"type": "text", "text": "y"}],
                    },
                    {"type": "text", "text": "which?"},
                ]
            )
        ],
        turns("user: A\nplain\nB\nx\n[document: C]\nD\nhttp://d\ny\nwhich?"),
    ),
    "blocks that a server ran": (
        "m",
        [
            user("look"),
            said(
                [
                    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
                    {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                    {"type": "text", "text": "found"},
                ]
            ),
            user([{"type": "text", "text": "and?"}, {"type": "tool_reference", "tool_name": "grep"}]),
        ],
        turns(
            "user: look",
            "assistant: [server_tool_use: web_search]\n[web_search_tool_result]\nfound",
            "user: and?\n[tool_reference: grep]",
        ),
    ),
    "a picture, a sound and files": (
        "c",
        [
            user(
                [
                    {"type": "text", "text": "see"},
                    {"type": "image_url", "image_url": {"url": PICTURE}},
                    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
                    {"type": "file", "file": {"filename": "a.txt", "file_data": f"data:text/plain;base64,{TEXT}"}},
                    {
                        "type": "file",
                        "file": {"filename": "b.pdf", "file_data": "data:application/pdf;base64,JVBERi0="},
                    },
                ]
            )
        ],
        turns("user: see\n[image]\n[audio]\na.txt\nZürich is cold\n[file: b.pdf]"),
    ),
    "a custom tool's call": (
        "c",
        [
            user("go"),
            said(None, tool_calls=[{"id": "a", "type": "custom", "custom": {"name": "shot", "input": "now"}}]),
            {"role": "tool", "tool_call_id": "a", "content": "ok"},
        ],
        turns(
            "user: go",
            "assistant: " + WRITTEN.replace("{}", '{"input": "now"}'),
            "user: <tool_response>\nok\n</tool_response>",
        ),
    ),
    "a refusal": (
        "c",
        [user("go"), said(None, refusal="No."), user("why?")],
        turns("user: go", "assistant: [refusal: No.]", "user: why?"),
    ),
    "items of all kinds": (
        "r",
        [
            {"role": "developer", "content": "BLUE"},
            user("go"),
            {"type": "reasoning", "summary": []},
            {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"]}},
            {"type": "local_shell_call_output", "call_id": "c", "output": {"stdout": "a"}},
            {"type": "shell_call", "call_id": "d", "action": {"commands": ["pwd"]}},
            {"type": "shell_call_output", "call_id": "d", "output": [{"stdout": "/b", "stderr": "", "outcome": {}}]},
            {"type": "web_search_call", "id": "w", "status": "completed"},
            {"type": "compaction", "encrypted_content": "xx"},
            user([{"type": "input_image", "image_url": PICTURE}, {"type": "input_text", "text": "and?"}]),
        ],
        turns(
            "system: BLUE",
            "user: go",
            "assistant: " + WRITTEN.replace("shot", "local_shell").replace("{}", '{"command": ["ls"]}'),
            'user: <tool_response>\n{"stdout": "a"}\n</tool_response>',
            "assistant: " + WRITTEN.replace("shot", "shell").replace("{}", '{"commands": ["pwd"]}'),
            "user: <tool_response>\n/b\n</tool_response>",
            "assistant: [web_search_call]\n[compaction]",
            "user: [image]\nand?",
        ),
    ),
    "a picture in an output": (
        "r",
        [
            user("shot"),
            {"type": "custom_tool_call", "name": "shot", "input": "{}", "call_id": "c1"},
            {
                "type": "custom_tool_call_output",
                "call_id": "c1",
                "output": [{"type": "input_image", "image_url": PICTURE}],
            },
        ],
        turns("user: shot", f"assistant: {WRITTEN}", "user: <tool_response>\n[image]\n</tool_response>"),
    ),
}


@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", HISTORIES)
def test_a_history_is_read_whatever_it_holds(ask: Ask, name: str, stream: bool) -> None:
    api, messages, seen = HISTORIES[name]
    answer, prompt = ask(api, messages, stream=stream)
    assert answer.status_code == 200, answer.text
    assert prompt == seen


@pytest.mark.parametrize("api", PATHS)
def test_only_a_last_turn_that_nobody_can_read_is_refused(ask: Ask, api: str) -> None:
    picture = {"c": {"type": "image_url", "image_url": {"url": PICTURE}}, "m": {"type": "image", "source": PNG}}
    seen = user([picture.get(api, {"type": "input_image", "image_url": PICTURE})])
    answer, _ = ask(api, [user("Hi"), said("Hello"), seen])
    assert (answer.status_code, "nothing that this model can read" in answer.text) == (400, True)
    for messages in ([seen, said("I see"), user("and?")], [user("look"), seen], [seen, user("look")]):
        answer, prompt = ask(api, messages)
        assert (answer.status_code, "user\n[image]<|end|>" in prompt) == (200, True), answer.text


MID = [system("Be terse."), user("Hi"), said("Hello."), system("Say BLUE."), user("And?")]
BOTH = "Be terse.\n\nSay BLUE."
FITS = {
    "as it stands": (TEMPLATE, MID, turns(*(f"{m['role']}: {m['content']}" for m in MID))),
    "in front": (STRICT, MID, turns(f"system: {BOTH}", "user: Hi", "assistant: Hello.", "user: And?")),
    "the user's": (ALTERNATING, MID, turns(f"user: {BOTH}\n\nHi", "assistant: Hello.", "user: And?")),
    "not dropped": (DROPPING, MID, turns(f"user: {BOTH}\n\nHi", "assistant: Hello.", "user: And?")),
    "alternating": (
        ALTERNATING,
        [said("Hello."), user("Hi"), system("BLUE"), user("And?")],
        turns("user: ", "assistant: Hello.", "user: BLUE\n\nHi\n\nAnd?"),
    ),
    "system alone": (ALTERNATING, [system("BLUE")], turns("user: BLUE")),
}


@pytest.mark.parametrize("name", FITS)
def test_system_text_stands_where_the_template_takes_it(tmp_path: Path, name: str) -> None:
    template, messages, seen = FITS[name]
    folder = save_chat(tmp_path, template, max_position_embeddings=4096)
    assert lce.load(folder, threads=1).tokenizer.chat(messages) == seen
    with asking(folder) as ask:
        for api in PATHS:
            answer, prompt = ask(api, messages)
            assert (answer.status_code, prompt) == (200, seen), answer.text


HELLO = [user("hello")]
BILLING = "x-anthropic-billing-header: cc_version=1; cch={};"
RULES = "rule " * 40 + "end"
FIRST_LINES: dict[str, tuple[str, Callable[[str], dict[str, Any]]]] = {
    "blocks": ("m", lambda line: {"system": [{"type": "text", "text": text} for text in (line, RULES)]}),
    "text": ("m", lambda line: {"system": f"{line}\n{RULES}"}),
    "alone": ("m", lambda line: {"system": line}),
    "chat": ("c", lambda line: {"messages": [{"role": "system", "content": f"{line}\n{RULES}"}, *HELLO]}),
    "in messages": ("m", lambda line: {"messages": [{"role": "system", "content": f"{line}\n{RULES}"}, *HELLO]}),
    "instructions": ("r", lambda line: {"instructions": f"{line}\n{RULES}"}),
}


@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", FIRST_LINES)
def test_a_first_system_line_that_only_changes_is_dropped(ask: Ask, case: str, stream: bool) -> None:
    api, body = FIRST_LINES[case]
    seen = []
    for cch in ("abc12", "9fe31"):
        more = body(BILLING.format(cch))
        answer, prompt = ask(api, more.pop("messages", HELLO), stream=stream, **more)
        assert answer.status_code == 200, answer.text
        seen.append(prompt)
    left = [] if case == "alone" else [f"system: {RULES}"]
    assert seen == [turns(*left, "user: hello")] * 2


@pytest.mark.parametrize(
    "said", ["rules\nx-anthropic-billing-header: cch=1;", "the x-anthropic-billing-header: cch=1;", "X-Other: 1\nrules"]
)
def test_no_other_line_is_dropped(ask: Ask, said: str) -> None:
    assert ask("m", HELLO, system=said)[1] == turns(f"system: {said}", "user: hello")
    line = BILLING.format("abc12")
    assert ask("m", [{"role": "user", "content": line}])[1] == turns(f"user: {line}")
    later = [*HELLO, {"role": "system", "content": line}, *HELLO]
    assert line in ask("m", later)[1]


BEGUN = [user("What is it?"), said("It is ")]
CONTINUED = turns("user: What is it?") + "It is "


@pytest.mark.parametrize(
    ("api", "more", "prompt"),
    [
        ("m", {}, CONTINUED),
        ("m", {"stream": True}, CONTINUED),
        ("c", {"continue_final_message": True}, CONTINUED),
        ("c", {"add_generation_prompt": False}, CONTINUED),
        ("c", {"add_generation_prompt": False, "stream": True}, CONTINUED),
        ("c", {}, turns("user: What is it?", "assistant: It is ")),
    ],
)
def test_an_answer_that_has_begun_is_continued(ask: Ask, api: str, more: dict[str, Any], prompt: str) -> None:
    answer, seen = ask(api, BEGUN, **more)
    assert (answer.status_code, seen) == (200, prompt), answer.text


def test_what_cannot_be_continued(ask: Ask) -> None:
    for messages in ([user("Hi")], [user("Hi"), said("", tool_calls=[{"function": {"name": "f"}}])]):
        answer, _ = ask("c", messages, continue_final_message=True)
        assert answer.status_code == 400
        assert "cannot be continued" in answer.json()["error"]["message"]
    answer, seen = ask("m", [user("shot"), CALL])
    assert seen == turns("user: shot", f"assistant: {WRITTEN}")
    assert ask("c", [user("Hi")], add_generation_prompt=False)[1] == "<|turn|>user\nHi<|end|>\n"


def test_a_template_that_loses_the_answer_is_refused(tmp_path: Path) -> None:
    lost = TEMPLATE.replace("{{ m.content }}", "{{ m.content if m.role == 'user' }}")
    with asking(save_chat(tmp_path, lost)) as ask:
        answer, _ = ask("m", BEGUN)
    assert answer.status_code == 400
    assert "does not write the last answer" in answer.json()["error"]["message"]
