"""Tools, what a model is told of them if its chat template knows no tools, and calls.

Such a model is told to write calls as Hermes and Qwen do:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>

The tools are written into the system message, calls into the answers, and results of calls into the user's messages, as
plain text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from lce_serve.fields import Fields
from lce_serve.loosening import ANNOTATIONS
from lce_serve.refusals import Refusal

_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_TOLD = (
    "You may call functions. Their signatures are within <tools></tools>:\n<tools>\n{}\n</tools>\n"
    "For each call write the function's name and arguments as JSON within <tool_call></tool_call>:\n"
    '<tool_call>\n{{"name": NAME, "arguments": OBJECT}}\n</tool_call>'
)


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON schema of its arguments."""

    name: str
    description: str
    parameters: dict[str, Any]
    strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The schema that arguments are held to: that of an object, and of `{}` for a tool without parameters."""
        said = {name for name, value in self.parameters.items() if name not in ANNOTATIONS and value not in ({}, [])}
        none = said <= {"type", "additionalProperties"} and not self.parameters.get("additionalProperties")
        if none and self.parameters.get("type", "object") == "object":
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}

    def as_object(self) -> dict[str, Any]:
        """Return the tool in the form that chat templates take."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Tools:
    """The tools of a request. `choice` is `auto`, `required`, `none`, or the name of the tool that must be called."""

    tools: tuple[Tool, ...] = ()
    choice: str = "auto"
    parallel: bool = True

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that the answer may call."""
        if self.choice in ("auto", "required"):
            return self.tools
        return tuple(tool for tool in self.tools if tool.name == self.choice)

    @property
    def forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.choice not in ("auto", "none") and bool(self.tools)


@dataclass(frozen=True)
class Call:
    """A call that the model wrote. `arguments` is JSON text."""

    name: str
    arguments: str
    id: str


def tool_of(fields: Fields, schema: str) -> Tool:
    """Return a tool from its fields `name`, `description` and the one named `schema`."""
    name = fields.text("name")
    if not name or len(name) > 128:
        raise Refusal(400, f"{fields.name('name')} must be a name of 1 to 128 characters", fields.name("name"))
    parameters = fields.object(schema) or {"type": "object", "properties": {}}
    return Tool(name, fields.text("description") or "", parameters, fields.flag("strict"))


def openai_tools(fields: Fields) -> Tools:
    """Return the tools of a request to one of OpenAI's APIs. A custom tool is a function of a text, `input`."""
    tools = []
    for given in fields.each("tools"):
        if (kind := given.text("type")) in ("function", "custom"):
            tool = tool_of(given.inner(kind) if given.has(kind) else given, "parameters")
            tools.append(tool if kind == "function" else replace(tool, parameters=_INPUT))
    choice = fields.value("tool_choice", (str, dict), "auto, none, required or an object")
    if isinstance(choice, dict):
        named = fields.inner("tool_choice")
        if named.text("type") == "allowed_tools":
            named = named.inner("allowed_tools") if named.has("allowed_tools") else named
            allowed = {_name_of(each) for each in named.each("tools")}
            tools, choice = [tool for tool in tools if tool.name in allowed], named.text("mode")
        else:
            choice = _name_of(named)
    return checked(tools, choice or "auto", fields.flag("parallel_tool_calls", True))


def _name_of(tool: Fields) -> str | None:
    return next((name for part in ("function", "custom") if (name := tool.inner(part).text("name"))), tool.text("name"))


def checked(tools: list[Tool], choice: str, parallel: bool) -> Tools:
    """Return the tools of a request. Refuses a choice that no tool has, and two tools of a name."""
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        raise Refusal(400, "two tools have the same name", "tools")
    if choice not in ("auto", "none", "required", *names):
        raise Refusal(400, f"tool_choice names {choice[:64]!r}, which is not among the tools", "tool_choice")
    if choice == "required" and not tools:
        raise Refusal(400, "tool_choice requires a call, and there are no tools", "tool_choice")
    return Tools(tuple(tools), choice, parallel)


def in_plain_text(messages: list[dict[str, Any]], tools: tuple[Tool, ...]) -> list[dict[str, Any]]:
    """Return messages in which tools, calls and results are plain text, for a template that does not know tools.

    Neighbouring results become one user's message, because many templates want roles to alternate.
    """
    found: list[dict[str, Any]] = []
    for message in messages:
        content = message["content"] or ""
        if message["role"] == "tool":
            written = f"<tool_response>\n{content}\n</tool_response>"
            if found and found[-1].get("results"):
                found[-1]["content"] += f"\n{written}"
            else:
                found.append({"role": "user", "content": written, "results": "yes"})
            continue
        functions = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
        calls = [f"<tool_call>\n{function}\n</tool_call>" for function in functions]
        found.append({**message, "content": "\n".join(filter(None, [content, *calls]))})
    if tools:
        told = _TOLD.format("\n".join(json.dumps(tool.as_object(), ensure_ascii=False) for tool in tools))
        if found and found[0]["role"] == "system":
            found[0]["content"] += f"\n\n{told}"
        else:
            found.insert(0, {"role": "system", "content": told})
    kept = ("role", "content", "reasoning_content")
    return [{name: message[name] for name in kept if name in message} for message in found]
