"""Tools over HTTP: schemas that cannot be enforced loosen themselves, and calls are read in the forms of models."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

import lce
from lce.engine import grammar
from lce_serve.calls import CallReader
from lce_serve.conversation import rendered
from lce_serve.fields import Fields
from lce_serve.grammar import tools_constraint
from lce_serve.service import Service
from lce_serve.tools import Tool, Tools, openai_tools
from tests.checkpoints import save_chat
from tests.lce_serve.conftest import events

HI = [{"role": "user", "content": "the quick fox"}]
PATTERN = "^(?!-)(?!.*--)[a-z0-9.+-]{1,40}@(?:[a-z0-9]+\\.)+(?=[a-z]{2})[a-z]+$"
TIGHT = {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}


def schema(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], **TIGHT}


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    function = {"name": name, **({} if parameters is None else {"parameters": parameters}), **more}
    return {"type": "function", "function": function}


def ask(client: TestClient, *tools: Any, stream: bool = False, **how: Any) -> tuple[dict[str, Any], str, Any]:
    """The message, the reason why it ended, and the headers, of an answer that is whole or streamed."""
    body = {"messages": HI, "tools": tools, "max_tokens": 90, "stream": stream, "parallel_tool_calls": False, **how}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    if not stream:
        (choice,) = answer.json()["choices"]
        return choice["message"], choice["finish_reason"], answer.headers
    chunks = [json.loads(data)["choices"][0] for data in events(answer.text)[:-1]]
    content = "".join(chunk["delta"].get("content") or "" for chunk in chunks)
    calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    return {"content": content or None, "tool_calls": calls}, chunks[-1]["finish_reason"], answer.headers


def called(message: dict[str, Any]) -> list[tuple[str, Any]]:
    functions = [call["function"] for call in message["tool_calls"]]
    return [(each["name"], json.loads(each["arguments"])) for each in functions]


ODD: list[tuple[str, dict[str, Any], str]] = [
    ("look-ahead", {"type": "string", "pattern": PATTERN, "enum": ["a", "b"]}, "to.pattern (look-around"),
    ("remote", {"$ref": "https://example.com/schema.json"}, "to.$ref"),
    ("missing", {"anyOf": [{"$ref": "#/$defs/nowhere"}, {"const": 1}]}, "to.anyOf[0].$ref"),
    ("nonsense", {"type": "date-time"}, "to.type (Invalid type"),
    ("no schema", "string", "properties.to"),  # type: ignore[list-item]
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("odd", "note"), [x[1:] for x in ODD], ids=[x[0] for x in ODD])
@pytest.mark.covering
def test_a_keyword_that_cannot_be_enforced_is_left_out(client: Any, odd: Any, note: str, stream: bool) -> None:
    fine, mail = tool("fine", schema(yes={"type": "boolean"})), tool("mail", schema(yes={"type": "boolean"}, to=odd))
    message, reason, headers = ask(client, fine, mail, stream=stream, tool_choice="required")
    assert reason == "tool_calls"
    ((name, arguments),) = called(message)
    assert isinstance(arguments["yes"], bool), "everything else is enforced"
    assert "not enforced: mail: properties." in headers["x-lce-warning"]
    assert note in headers["x-lce-warning"], name


TEXT_ALONE = {"input": {"type": "string"}}
ALLOWED = [{"type": "function", "name": "b"}, {"type": "custom", "custom": {"name": "c"}}]


@pytest.mark.parametrize("nested", [True, False])
def test_only_allowed_tools_are_called(client: TestClient, nested: bool) -> None:
    given = {"mode": "required", "tools": ALLOWED}
    wanted = {"type": "allowed_tools", **({"allowed_tools": given} if nested else given)}
    message, reason, _ = ask(client, tool("a"), tool("b"), tool_choice=wanted)
    assert (reason, called(message)) == ("tool_calls", [("b", {})])


def test_a_custom_tool_is_a_function_of_a_text(client: TestClient) -> None:
    """The tiny model ends no text, so the call is cut."""
    for path, custom in (("chat/completions", {"custom": {"name": "c"}}), ("responses", {"name": "c"})):
        tools, said = [{"type": "custom", **custom}], {"messages": HI} if path.startswith("chat") else {"input": "hi"}
        (found,) = openai_tools(Fields({"tools": tools, "tool_choice": tools[0]})).callable
        assert (found.name, found.schema["required"], found.schema["properties"]) == ("c", ["input"], TEXT_ALONE)
        answer = client.post(f"/v1/{path}", json={**said, "tools": tools, "tool_choice": tools[0], "max_tokens": 9})
        assert answer.status_code == 200, answer.text


def test_what_responses_cannot_do_is_refused_by_name(client: TestClient) -> None:
    for more in ({"background": True}, {"prompt": {"id": "p"}}, {"top_logprobs": 2}, {"previous_response_id": "r"}):
        answer = client.post("/v1/responses", json={"input": "hi", **more})
        assert (answer.status_code, next(iter(more)) in answer.text) == (400, True)


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_messages_follow_a_schema(client: TestClient, field: str) -> None:
    form = {"type": "json_schema", "schema": schema(vote={"enum": [1, 2]})}
    body = {"messages": HI, "max_tokens": 60, field: {"format": form} if field == "output_config" else form}
    (block,) = client.post("/v1/messages", json=body).json()["content"]
    assert block["text"] in ('{"vote":1}', '{"vote":2}')


def test_what_a_reference_leads_to_is_still_enforced(client: TestClient) -> None:
    known = {"$defs": {"vote": {"enum": [True, False]}, "bad": {"type": "nonsense", "enum": [1]}}}
    inner = {"vote": {"$ref": "#/$defs/vote"}, "any": {"$ref": "#/$defs/bad"}, "last": {"$ref": "#/properties/vote"}}
    message, _, headers = ask(client, tool("vote", {**known, **schema(**inner)}), tool_choice="required")
    ((_, arguments),) = called(message)
    assert isinstance(arguments["vote"], bool)
    assert isinstance(arguments["last"], bool)
    assert headers["x-lce-warning"] == "not enforced: vote: $defs.bad.type (Invalid type: nonsense)"


def test_many_tools_and_large_schemas_are_enforced(service: Service) -> None:
    tools = tuple(Tool(f"tool_{i}", "", schema(n={"type": "integer"})) for i in range(150))
    properties = {f"field_{i}": {"type": "string", "description": "d" * 80} for i in range(700)}
    for given in (tools, (Tool("large", "", schema(**properties)),)):
        found = tools_constraint(service.vocabulary, Tools(given, "required"))
        assert (found.notes, is_allowed(service, found, "<tool_call>\n{"), is_allowed(service, found, "x")) == (
            [],
            True,
            False,
        )


def test_schemas_that_are_too_large_together_are_freed_the_largest_first(service: Service, monkeypatch: Any) -> None:
    monkeypatch.setitem(grammar._LIMITS, "max_grammar_size", 150)
    small, large = (
        Tool(name, "", schema(**{f"{n}_{i}": {"type": "null"} for i in range(n)}))
        for name, n in (("small", 15), ("large", 25))
    )
    notes = tools_constraint(service.vocabulary, Tools((small, large), "required")).notes
    assert [note[: note.index("(")] for note in notes] == ["not enforced: large: everything "]


def is_allowed(service: Service, constraint: Any, text: str) -> bool:
    """Whether a constraint lets the tokens of a text come."""
    constraint = constraint.copy()
    for token_id in service.engine.tokenizer.encode(text, bos=False):
        if constraint.apply(torch.zeros(service.engine.setup.config.vocab_size))[token_id] < 0:
            return False
        constraint.accept(token_id)
    return True


@pytest.mark.parametrize("change", [{"tool_choice": "required"}, {"strict": True}])
def test_a_call_of_which_nothing_can_be_enforced_is_refused(client: TestClient, change: dict[str, Any]) -> None:
    strict = change.pop("strict", None)
    bad = tool("bad", {"type": "nonsense"}, **({} if strict is None else {"strict": True}))
    answer = client.post("/v1/chat/completions", json={"messages": HI, "tools": [bad], "max_tokens": 4, **change})
    assert answer.status_code == 400
    assert "the tool bad can be enforced: type (Invalid type: nonsense)" in answer.json()["error"]["message"]
    assert ask(client, tool("bad", {"type": "nonsense"}), max_tokens=2)[2]["x-lce-warning"]


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"type": "object", "properties": {}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_without_parameters_takes_an_empty_object(client: TestClient, parameters: Any, stream: bool) -> None:
    message, _, _ = ask(client, tool("now", parameters), tool_choice="required", stream=stream)
    assert called(message) == [("now", {})]


def test_a_schema_of_an_answer_loosens_itself_as_well(client: TestClient) -> None:
    form = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": schema(a={"type": "boolean", "pattern": "("})},
    }
    form["json_schema"]["schema"]["properties"]["b"] = {"type": "nonsense"}  # type: ignore[index]
    message, _, headers = ask(client, response_format=form)
    assert isinstance(json.loads(message["content"])["a"], bool)
    assert "properties.b.type" in headers["x-lce-warning"]


WRITTEN = [
    '<tool_call>\n{"name": "w", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "<tool_call>\n<function=w>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>",
    "<function=w><parameter=city>Oslo</parameter></function>",
    '[TOOL_CALLS][{"name": "w", "arguments": {"city": "Oslo"}}]',
    '[TOOL_CALLS]w[ARGS]{"city": "Oslo"}',
    '[TOOL_CALLS]w[CALL_ID]a1b2c3d4e[ARGS]{"city": "Oslo"}',
    '[TOOL_CALLS] w{"city": "Oslo"}',
    '<|python_tag|>{"name": "w", "parameters": {"city": "Oslo"}}',
    '{"name": "w", "parameters": {"city": "Oslo"}}',
    "<start_function_call>call:w{city:<escape>Oslo<escape>}<end_function_call>",
    '<|tool_call>call:w{city:<|"|>Oslo<|"|>}<tool_call|>',
    '```json\n{"name": "w", "arguments": {"city": "Oslo"}}\n```',
]


def read(text: str, step: int, *, cut: bool = False) -> tuple[str, list[tuple[str, Any]]]:
    """The text and the calls of an answer that comes in pieces of `step` characters."""
    reader, outside, calls = CallReader(Tools((Tool("w", "", {}),))), "", list[Any]()
    for at in range(0, len(text), step):
        more, found = reader.push(text[at : at + step])
        outside, calls = outside + more, calls + found
    more, found = reader.finish(cut=cut)
    return outside + more, [(call.name, json.loads(call.arguments)) for call in calls + found]


@pytest.mark.parametrize("step", [1, 7, 1000])
@pytest.mark.parametrize("text", WRITTEN)
def test_calls_are_read_in_the_forms_that_models_write(text: str, step: int) -> None:
    assert read(text, step) == ("", [("w", {"city": "Oslo"})])
    other = (
        text.replace('"w"', '"x"')
        .replace("=w>", "=x>")
        .replace("call:w", "call:x")
        .replace("]w", "]x")
        .replace("] w", "] x")
    )
    assert read(other, step) == (other, []), "a call of no known tool is text"


@pytest.mark.parametrize("step", [1, 1000])
def test_a_cut_call_is_no_content(step: int) -> None:
    for text in WRITTEN[:3]:
        assert read(f"{text}\n{text[:-16]}", step, cut=True)[1][:1] == [("w", {"city": "Oslo"})]
        assert "tool_call" not in read(f"{text}\n{text[:-16]}", step, cut=True)[0]
    plain = 'Here: {"name": "w", "arguments": {}}'
    assert read(plain, step) == (plain, [])


@pytest.mark.parametrize("stream", [False, True])
def test_the_limit_cuts_a_call(client: TestClient, stream: bool) -> None:
    message, reason, _ = ask(
        client, tool("w", schema(n={"enum": [1]})), tool_choice="required", max_tokens=12, stream=stream
    )
    assert (reason, message["content"] or "", message.get("tool_calls") or []) == ("length", "", [])


def test_the_template_tool_use_is_taken_where_tools_are_given(tmp_path: Path) -> None:
    plain, using = "{{ messages[0].content }}", "{{ tools[0].function.name }}<tool_call>"
    folder = save_chat(tmp_path, [{"name": "default", "template": plain}, {"name": "tool_use", "template": using}])  # type: ignore[arg-type]
    tokenizer = lce.load(folder, threads=1).tokenizer
    assert rendered(tokenizer, HI).text == "the quick fox"
    assert rendered(tokenizer, HI, (Tool("w", "", {}),)).text == "w<tool_call>"


def test_arguments_in_xml_are_texts_where_the_schema_says_so() -> None:
    given = {"a": "1", "b": "1", "c": '{"d": 1}', "e": '{"d": 1}', "f": "true\nx", "g": "7", "h": "null", "i": "null"}
    inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
    text, optional = {"type": "string"}, {"anyOf": [{"type": "string"}, {"type": "null"}]}
    properties = schema(a=text, c=text, g=optional, h={"type": ["string", "null"]}, i=text)
    reader = CallReader(Tools((Tool("w", "", properties),)))
    ((call,),) = reader.push(f"<tool_call>\n<function=w>\n{inside}</function>\n</tool_call>")[1:]
    assert json.loads(call.arguments) == given | {"b": 1, "e": {"d": 1}, "h": None}
    assert len(call.id) == 9, "Mistral's templates take no other ids"
    assert call.id.isalnum()
