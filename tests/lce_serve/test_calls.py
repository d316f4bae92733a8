"""Calls over HTTP: the template says in which form a call is enforced, and calls of every form reach the client."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from starlette.testclient import TestClient

import lce
from lce_serve.app import application
from lce_serve.conversation import rendered
from lce_serve.grammar import tools_constraint
from lce_serve.service import Service, Settings
from lce_serve.tools import Tool, Tools
from tests.checkpoints import save_chat
from tests.lce_serve.conftest import URL
from tests.lce_serve.test_tools import HI, ask, called, is_allowed, schema, tool

SPECIAL = ["[TOOL_CALLS]", "[ARGS]"]
N: dict[str, Any] = {**schema(n={"type": "integer", "enum": [1, 2]}), "x-guidance": {}}
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
# The marks in a template, and how its model writes a call with the argument 1; two calls; and a call without its end.
FORMS = {
    "Hermes": ("<tool_call>", '<tool_call>\n{"name": "w", "arguments": {"n": 1}}\n</tool_call>'),
    "XML": (
        "<tool_call><function=",
        "<tool_call>\n<function=w>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
    ),
    "list": ("[TOOL_CALLS]", '[TOOL_CALLS][{"name": "w", "arguments": {"n": 1}}]'),
    "args": ("[TOOL_CALLS][ARGS]", '[TOOL_CALLS]w[ARGS]{"n": 1}'),
    "Llama": ('{"name": "parameters": ', '{"name": "w", "parameters": {"n": 1}}'),
    "no tools": ("", '<tool_call>\n{"name": "w", "arguments": {"n": 1}}\n</tool_call>'),
}
BETWEEN = {"Hermes": "\n", "XML": "\n", "no tools": "\n", "args": "", "Llama": "; "}


class Script:
    """A constraint by which an answer has the tokens `ids`, and then ends."""

    def __init__(self, ids: list[int], end: int) -> None:
        self._ids = [*ids, end]

    def apply(self, logits: Any) -> Any:
        return logits.index_fill(
            0, logits.new_tensor([i for i in range(len(logits)) if i != self._ids[0]]).long(), -9e9
        )

    def accept(self, token_id: int) -> None:
        self._ids = self._ids[1:] or self._ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model to whom the marks of Mistral's calls are special tokens."""
    folder = save_chat(tmp_path_factory.mktemp("calls"), PLAIN, max_position_embeddings=4096)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    library.add_special_tokens(SPECIAL)
    library.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module", params=FORMS)
def model(request: pytest.FixtureRequest, folder: Path) -> Iterator[tuple[str, Service]]:
    marks = FORMS[request.param][0]
    template = (
        PLAIN if not marks else f"{{% if tools %}}{{{{ '{marks}' ~ tools[0].function.name }}}}{{% endif %}}{PLAIN}"
    )
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    with lce.load(folder, threads=1).batch(max_lanes=2) as batch:
        yield request.param, Service(Settings("tiny"), batch)


def answering(service: Service, text: str, monkeypatch: pytest.MonkeyPatch) -> tuple[TestClient, int]:
    """A client of a server whose answers have a given text, and the number of its tokens."""
    ids, stream = service.engine.tokenizer.encode(text, bos=False), service.batch.stream

    def begin(*given: Any, **how: Any) -> Any:
        return stream(*given, **{**how, "constraint": Script(ids, 1)})

    monkeypatch.setattr(service.batch, "stream", begin)
    return TestClient(application(service), base_url=URL), len(ids)


@pytest.mark.covering
@pytest.mark.parametrize("stream", [False, True])
def test_the_template_says_which_form_is_enforced(model: tuple[str, Service], stream: bool) -> None:
    client = TestClient(application(model[1]), base_url=URL)
    message, reason, headers = ask(client, tool("w", N), tool("v", N), tool_choice="required", stream=stream)
    ((name, arguments),) = called(message)
    assert (reason, message["content"] or "", "x-lce-warning" in headers) == ("tool_calls", "", False)
    assert name in ("w", "v")
    assert arguments["n"] in (1, 2)


def test_a_text_is_free_until_a_call_begins(model: tuple[str, Service]) -> None:
    form, service = model
    call, between = FORMS[form][1], BETWEEN.get(form)
    tools = Tool("w", "", N), Tool("v", "", N)
    free, forced = (tools_constraint(service.vocabulary, Tools(tools, choice)) for choice in ("auto", "required"))
    for text in ("a fox", call, call.replace("1", "2"), *([] if between is None else [f"{call}{between}{call}"])):
        assert is_allowed(service, free, text), text
        assert is_allowed(service, forced, text) == (text != "a fox"), text
    for wrong in (call.replace("1", "3"), call.replace("n", "m").replace("mame", "name")):
        assert not is_allowed(service, free, wrong), wrong
        assert not is_allowed(service, forced, wrong), wrong
    alone = tools_constraint(service.vocabulary, Tools(tools, "required", parallel=False))
    assert between is None or not is_allowed(service, alone, f"{call}{between}{call}")


@pytest.mark.covering
@pytest.mark.parametrize("stream", [False, True])
def test_the_whole_calls_before_a_cut_one_are_delivered(model: Any, stream: bool, monkeypatch: Any) -> None:
    form, service = model
    call = FORMS[form][1]
    for whole in (True, False):
        text = call + BETWEEN.get(form, "") + call if form != "list" else f"{call[:-1]}, {call[13:]}"
        client, n_tokens = answering(service, text, monkeypatch)
        n_cut = len(service.engine.tokenizer.encode(text[: text.rindex("1")], bos=False)) - 1
        how = {"stream": stream, "max_tokens": n_tokens + 1 if whole else n_cut}
        message, reason, _ = ask(client, tool("w", N), **how)
        assert called(message) == [("w", {"n": 1})] * (2 if whole else 1)
        assert (reason, message["content"] or "") == ("tool_calls" if whole else "length", "")
        monkeypatch.undo()


@pytest.mark.covering
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["messages", "responses"])
@pytest.mark.parametrize("model", ["args"], indirect=True)
def test_calls_of_special_tokens_reach_the_other_apis(model: Any, api: str, stream: bool, monkeypatch: Any) -> None:
    form, service = model
    client, n_tokens = answering(service, "Well.\n" + FORMS[form][1], monkeypatch)
    body: dict[str, Any] = {"stream": stream, "tool_choice": "auto"}
    if api == "messages":
        own = {"name": "w", "input_schema": N}
        body |= {"messages": HI, "max_tokens": n_tokens + 1, "tools": [own], "tool_choice": {"type": "auto"}}
    else:
        body |= {"input": HI, "tools": [{"type": "function", "name": "w", "parameters": N}]}
    answer = client.post(f"/v1/{api}", json=body).text
    assert "[TOOL_CALLS]" not in answer
    assert '"name":"w"' in answer.replace(" ", "")


@pytest.mark.covering
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "is_call"),
    [
        ('```json\n{"name": "w", "arguments": {"n": 1}}\n```', True),
        ('{"name": "w", "parameters": {"n": 1}}', True),
        ('Like this:\n```json\n{"name": "w", "arguments": {"n": 1}}\n```', False),
        ('```json\n{"name": "x", "arguments": {"n": 1}}\n```', False),
    ],
)
def test_a_fenced_block_that_is_the_whole_answer(
    service: Service, text: str, is_call: bool, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, n_tokens = answering(service, text, monkeypatch)
    message, reason, _ = ask(client, tool("w", N), stream=stream, max_tokens=n_tokens + 1)
    assert (reason, message["content"] or "") == (("tool_calls", "") if is_call else ("stop", text))
    assert not is_call or called(message) == [("w", {"n": 1})]


def test_gemmas_form_has_its_names_enforced_and_says_so(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text(f"{{{{ tools }}}}<start_function_call>{PLAIN}", encoding="utf-8")
    with lce.load(folder, threads=1).batch() as batch:
        service = Service(Settings("tiny"), batch)
        found = tools_constraint(service.vocabulary, Tools((Tool("w", "", N),), "required"))
        call = "<start_function_call>call:w{city:<escape>Oslo<escape>}<end_function_call>"
        assert is_allowed(service, found, call)
        assert not is_allowed(service, found, call.replace("call:w", "call:x"))
        assert found.notes == ["not enforced: arguments (in this model's form of calls only names are)"]


def test_a_history_that_the_template_refuses_is_written_as_text(folder: Path) -> None:
    """Such as two calls in one message, which Llama 3's template refuses."""
    strict = "{% for m in messages if m.tool_calls %}{{ raise_exception('one') if m.tool_calls[1:] }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(f"{{{{ tools }}}}<tool_call>{strict}{PLAIN}", encoding="utf-8")
    tokenizer = lce.load(folder, threads=1).tokenizer
    call = {"type": "function", "id": "c", "function": {"name": "w", "arguments": {"n": 1}}}
    for n_calls in (1, 2):
        answer = {"role": "assistant", "content": "", "tool_calls": [call] * n_calls}
        text = rendered(tokenizer, [*HI, answer, *HI], (Tool("w", "", N),)).text
        assert text.count('"arguments": {"n": 1}') == (0 if n_calls == 1 else 2)
