"""Thoughts: parted from answers in all three APIs, taken back in histories, and never bound by a grammar."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

import lce
from lce_serve.app import application
from lce_serve.service import Service, Settings
from tests.checkpoints import save_chat
from tests.lce_serve.conftest import URL, events, serving

TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|end|>\n"
    "{% endfor %}{{ reasoning_effort }}{% if add_generation_prompt %}<|turn|>assistant\n"
    "{% if enable_thinking is defined %}<think>\n{{ '' if enable_thinking else '\n</think>\n\n' }}{% endif %}"
    "{% endif %}"
)
PATHS = {"c": "/v1/chat/completions", "m": "/v1/messages", "r": "/v1/responses"}
ASKED = {"role": "user", "content": "What is 2+2? Think in <think> tags."}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"name": "look", "parameters": SCHEMA}
CALL = '<tool_call>\n{"name": "look", "arguments": {"a": 4}}\n</tool_call>'


class Script:
    """A constraint that draws given tokens, and notes which of them the request's grammar does not allow."""

    def __init__(self, ids: list[int], grammar: Any) -> None:
        self.left, self.grammar, self.refused = ids, grammar, list[int]()

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        wanted = self.left[0]
        if self.grammar is not None and not self.grammar.apply(logits)[wanted].isfinite():
            self.refused.append(wanted)
        return torch.full_like(logits, float("-inf")).index_fill(0, torch.tensor([wanted]), 0.0)

    def accept(self, token_id: int) -> None:
        del self.left[:1]
        if self.grammar is not None and not self.refused:
            self.grammar.accept(token_id)


class Server:
    """A client of a server whose model says what a test tells it to. `prompt` is what the model saw."""

    def __init__(self, batch: Any) -> None:
        self.service = Service(Settings("tiny"), batch)
        self.client = TestClient(application(self.service), base_url=URL)
        self.tokenizer, self.begin = batch.setup.tokenizer, batch.stream
        batch.stream = self.stream

    def stream(self, prompt: Any, constraint: Any = None, **how: Any) -> Any:
        self.prompt, self.script = prompt.text, Script(self.ids, constraint)
        return self.begin(prompt, constraint=self.script, **how)

    def says(self, text: str) -> None:
        """Have the next answer be this text."""
        self.ids = [*self.tokenizer.encode(text, bos=False), 301]

    def ask(self, api: str, says: str, *messages: dict[str, Any], **more: Any) -> Any:
        """Return the answer as an object, or its events."""
        self.says(says)
        field, limit = ("input", "max_output_tokens") if api == "r" else ("messages", "max_tokens")
        answer = self.client.post(PATHS[api], json={field: list(messages) or [ASKED], limit: 200, **more})
        assert answer.status_code == 200, answer.text
        assert self.script.refused == []
        return (
            [json.loads(each) for each in events(answer.text) if each != "[DONE]"]
            if more.get("stream")
            else answer.json()
        )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = save_chat(tmp_path_factory.mktemp("think"), TEMPLATE, max_position_embeddings=4096)
    with lce.load(folder, threads=1).batch(max_lanes=4) as batch:
        yield Server(batch)


def parts(api: str, answer: Any) -> tuple[str, str, list[str]]:
    """The thought, the text and the arguments of calls in an answer."""
    if api == "c":
        said = answer["choices"][0]["message"]
        calls = [call["function"]["arguments"] for call in said.get("tool_calls", [])]
        return said.get("reasoning_content", ""), said["content"] or "", calls
    blocks = answer["content"] if api == "m" else answer["output"]
    found = {"thinking": "", "text": "", "reasoning": "", "message": ""}
    for block in blocks:
        if block["type"] in found:
            found[block["type"]] += block.get(block["type"]) or block["content"][0]["text"]
    calls = [block.get("arguments") or json.dumps(block["input"]) for block in blocks if block["type"] not in found]
    return found["thinking"] + found["reasoning"], found["text"] + found["message"], calls


def streamed(api: str, found: list[Any]) -> tuple[str, str, list[str]]:
    """The same, of a stream of events."""
    if api == "c":
        deltas = [each["choices"][0]["delta"] for each in found if each["choices"]]
        calls = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", [])]
        thought, text = (
            "".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning_content", "content")
        )
        return thought, text, calls
    if api == "m":
        deltas = [each["delta"] for each in found if each["type"] == "content_block_delta"]
        names = ("thinking", "text", "partial_json")
        thought, text, call = ("".join(delta.get(name, "") for delta in deltas) for name in names)
        return thought, text, [call] if call else []
    names = ("reasoning_text", "output_text", "function_call_arguments")
    kinds = {name: [each["delta"] for each in found if each["type"] == f"response.{name}.delta"] for name in names}
    whole = parts(api, found[-1]["response"])
    assert whole == ("".join(kinds[names[0]]), "".join(kinds[names[1]]), kinds[names[2]])
    done = [each["item"] for each in found if each["type"] == "response.output_item.done"]
    assert [each["id"] for each in done] == [each["id"] for each in found[-1]["response"]["output"]]
    return whole


@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize(("opens", "switch"), [("", {"enable_thinking": True}), ("<think>\n", {})])
@pytest.mark.covering
def test_a_thought_comes_as_such(server: Server, api: str, opens: str, switch: dict[str, bool]) -> None:
    says = f"{opens}Two and two.\n</think>\n\nFour <think>."
    for more in ({}, {"stream": True}):
        answer = server.ask(api, says, **switch, **more)
        found = streamed(api, answer) if more else parts(api, answer)
        assert found == ("Two and two.", "Four <think>.", [])
        assert server.prompt.endswith("assistant\n<think>\n" if switch else "assistant\n")


def test_usage_counts_the_thought(server: Server) -> None:
    thought = len(server.tokenizer.encode("<think>\nTwo.\n</think>", bos=False))
    for api, names in {
        "c": ("completion_tokens", "completion_tokens_details"),
        "r": ("output_tokens", "output_tokens_details"),
    }.items():
        usage = server.ask(api, "<think>\nTwo.\n</think>Four.")["usage"]
        assert usage[names[1]] == {"reasoning_tokens": thought}
        assert usage[names[0]] == thought + len(server.tokenizer.encode("Four.", bos=False))
        assert server.ask(api, "Four.")["usage"][names[1]] == {"reasoning_tokens": 0}


def test_a_thought_that_is_cut_is_no_content(server: Server) -> None:
    answer = server.ask("c", says := "<think>\nTwo and two", max_tokens=len(server.tokenizer.encode(says, bos=False)))
    message = answer["choices"][0]["message"]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert (message["content"], message["reasoning_content"]) == ("", "Two and two")


@pytest.mark.parametrize("api", ["c", "r"])
@pytest.mark.parametrize(
    ("says", "switch"),
    [
        ('<think>\nSay {"b"} or [].\n</think>\n\n{"a": 4}', {}),
        ('{"a": 4}', {}),
        ('I say {"b"}.</think>{"a": 4}', {"enable_thinking": True}),
        ('{"a": 4}', {"enable_thinking": False}),
    ],
)
@pytest.mark.covering
def test_a_schema_begins_behind_the_thought(server: Server, api: str, says: str, switch: dict[str, bool]) -> None:
    form = {"type": "json_schema", "name": "a", "schema": SCHEMA}
    asked: dict[str, Any] = (
        {"text": {"format": form}} if api == "r" else {"response_format": {**form, "json_schema": form}}
    )
    thought, text, _ = parts(api, server.ask(api, says, **asked, **switch))
    assert text == '{"a": 4}'
    assert bool(thought) == ("</think>" in says)


def test_what_a_schema_does_not_allow(server: Server) -> None:
    form = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}
    for says in ("Four", "<think>Two.</think>Four", "<thought>"):
        with pytest.raises(AssertionError, match="== \\[\\]"):
            server.ask("c", says, **form)


@pytest.mark.parametrize("api", PATHS)
@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.covering
def test_calls_come_behind_the_thought(server: Server, api: str, forced: bool) -> None:
    says = f"<think>\nI may write <tool_call> here.\n</think>\n\n{CALL}"
    tools: dict[str, Any] = {"tools": [{"type": "function", "function": TOOL, **TOOL, "input_schema": SCHEMA}]}
    if forced:
        tools["tool_choice"] = {"type": "any"} if api == "m" else "required"
    for more in ({}, {"stream": True}):
        answer = server.ask(api, says, **tools, **more)
        found = streamed(api, answer) if more else parts(api, answer)
        assert found == ("I may write <tool_call> here.", "", ['{"a": 4}'])


THOUGHTS: dict[str, list[dict[str, Any]]] = {
    "c": [{"role": "assistant", "content": "Four.", "reasoning_content": "Two and two."}],
    "m": [
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Two and two.", "signature": ""},
                {"type": "text", "text": "Four."},
            ],
        }
    ],
    "r": [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Two and two."}]},
        {"role": "assistant", "content": "Four."},
    ],
}


@pytest.mark.parametrize("api", PATHS)
def test_a_thought_in_the_history_is_given_to_the_template(server: Server, api: str) -> None:
    server.ask(api, "Yes.", ASKED, *THOUGHTS[api], ASKED)
    assert "assistant\n<think>\nTwo and two.\n</think>\n\nFour.<|end|>" in server.prompt


@pytest.mark.parametrize(
    ("api", "fields", "ends"),
    [
        ("c", {"reasoning_effort": "high"}, "high<|turn|>assistant\n<think>\n"),
        ("c", {"reasoning_effort": "none"}, "<|turn|>assistant\n<think>\n\n</think>\n\n"),
        (
            "c",
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "x"}},
            "x<|turn|>assistant\n<think>\n",
        ),
        ("r", {"reasoning": {"effort": "low"}}, "low<|turn|>assistant\n<think>\n"),
        ("m", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "<|turn|>assistant\n<think>\n"),
        ("m", {"thinking": {"type": "disabled"}}, "<|turn|>assistant\n<think>\n\n</think>\n\n"),
        ("m", {}, "<|turn|>assistant\n"),
    ],
)
def test_whether_and_how_much_to_think_reaches_the_template(
    server: Server, api: str, fields: dict[str, Any], ends: str
) -> None:
    server.ask(api, "Yes.", **fields)
    assert server.prompt.endswith("<|end|>\n" + ends)


def test_a_thought_that_has_begun_is_continued(server: Server) -> None:
    begun = {"role": "assistant", "content": "<think>\nTwo"}
    assert parts("m", server.ask("m", " and two.</think>Four.", ASKED, begun)) == (" and two.", "Four.", [])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_published_clients_collect_thoughts(server: Server) -> None:
    openai, anthropic = pytest.importorskip("openai"), pytest.importorskip("anthropic")
    says, tools = f"<think>\nTwo and two.\n</think>\n\nFour. {CALL}", [{"type": "function", **TOOL}]
    with serving(server.service) as address:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
            server.says(says)
            with client.responses.stream(model="tiny", input="Hi", tools=tools) as stream:
                kinds = [event.type for event in stream]
                items = stream.get_final_response().output
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
        assert [item.type for item in items] == ["reasoning", "message", "function_call"]
        assert (items[0].content[0].text, items[1].content[0].text) == ("Two and two.", "Four. ")
        with anthropic.Anthropic(base_url=address, api_key="none", max_retries=0) as client:
            server.says(says)
            asked: Any = {"model": "tiny", "max_tokens": 200, "messages": [ASKED]}
            with client.messages.stream(**asked, tools=[{"name": "look", "input_schema": SCHEMA}]) as stream:
                blocks = stream.get_final_message().content
        assert [block.type for block in blocks] == ["thinking", "text", "tool_use"]
        assert (blocks[0].thinking, blocks[1].text, blocks[2].input) == ("Two and two.", "Four. ", {"a": 4})
