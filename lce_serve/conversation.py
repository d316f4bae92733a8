"""Reads the messages of the chat endpoints, and renders them with the model's chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from lce_serve.fields import Fields
from lce_serve.refusals import Refusal, wrong
from lce_serve.tools import MOST_TOOLS, Tool, Tools, checked, in_plain_text, knows_tools, tool_of

MOST_MESSAGES = 4096
MOST_PARTS = 1024
ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_KINDS = ("text", "input_text", "output_text")


def text_of(fields: Fields, field: str = "content") -> str:
    """Return a content that is a string or a list of text parts. Refuses pictures, sounds and files."""
    found = fields.value(field, (str, list), "a string or a list of text parts")
    if found is None or isinstance(found, str):
        return found or ""
    texts = []
    for part in fields.each(field, MOST_PARTS):
        if (kind := part.text("type")) not in _TEXT_KINDS:
            raise Refusal(400, f"{part.name('type')} is {str(kind)[:40]!r}; this model reads text only", part.where)
        texts.append(part.text("text") or "")
    return "".join(texts)


def call_object(name: str, arguments: object, call_id: str | None) -> dict[str, Any]:
    """Return a call in the form that chat templates take. Arguments that are JSON text become an object."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = {"text": arguments}
    function = {"name": name, "arguments": arguments if isinstance(arguments, dict) else {}}
    return {"type": "function", "id": call_id or "", "function": function}


def openai_messages(fields: Fields) -> list[dict[str, Any]]:
    """Return the messages of a chat request in the form that chat templates take."""
    if not fields.has("messages"):
        raise wrong("messages", None, "a list of messages")
    found: list[dict[str, Any]] = []
    for message in fields.each("messages", MOST_MESSAGES):
        role = message.text("role")
        if role not in ROLES:
            raise Refusal(400, f"{message.name('role')} must be one of {', '.join(ROLES)}", message.name("role"))
        made: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": text_of(message)}
        if calls := message.each("tool_calls", MOST_PARTS):
            inner = [call.inner("function") for call in calls]
            pairs = zip(inner, calls, strict=True)
            made["tool_calls"] = [
                call_object(each.text("name") or "", each.body.get("arguments"), call.text("id"))
                for each, call in pairs
            ]
        for name in ("tool_call_id", "name"):
            if (value := message.text(name)) is not None:
                made[name] = value
        found.append(made)
    if not found:
        raise Refusal(400, "messages is empty; expected one message or more", "messages")
    return found


def prompt_or_messages(fields: Fields) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the text `prompt` or None, and the messages. Refuses a request that has both or neither of the two."""
    prompt = fields.text("prompt")
    if (prompt is None) == (not fields.has("messages")):
        raise Refusal(400, "expected either prompt, a text, or messages", "prompt")
    return prompt, [] if prompt is not None else openai_messages(fields)


def openai_tools(fields: Fields) -> Tools:
    """Return the tools of a chat request."""
    tools = []
    for tool in fields.each("tools", MOST_TOOLS):
        if tool.text("type") == "function":
            tools.append(tool_of(tool.inner("function"), "parameters"))
    choice = fields.value("tool_choice", (str, dict), "auto, none, required or an object")
    if isinstance(choice, dict):
        named = fields.inner("tool_choice")
        choice = named.inner("function").text("name") or named.text("name") or ""
    return checked(tools, choice or "auto", fields.flag("parallel_tool_calls", True))


def rendered(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    tools: tuple[Tool, ...] = (),
    variables: Mapping[str, Any] | None = None,
    *,
    following: bool = False,
    answer: bool = True,
) -> Any:
    """Return a conversation as the chat template writes it. Blocks while a process renders the template.

    With `following`, the conversation continues a named context. Without `answer`, the text does not ask for an answer.
    """
    if tokenizer.chat_template is None:
        raise Refusal(400, "this model has no chat template: it continues text; use /v1/completions", "messages")
    given: dict[str, Any] = dict(variables or {})
    if any(name in given for name in ("messages", "tools", "bos_token", "eos_token")):
        raise Refusal(400, "chat_template_kwargs may not name messages, tools or tokens", "chat_template_kwargs")
    if knows_tools((tools and tokenizer.tool_template) or tokenizer.chat_template):
        given |= {"tools": [tool.as_object() for tool in tools]} if tools else {}
    else:
        messages = in_plain_text(messages, tools)
    return tokenizer.render_chat(messages, answer, variables=given, following=following)


def rendering(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Tools, fields: Fields, following: bool
) -> Callable[[], Any]:
    """Return a function that renders a request's conversation as `rendered` does, with the tools that may be called."""
    shown, variables = () if tools.choice == "none" else tools.tools, fields.object("chat_template_kwargs")
    return lambda: rendered(tokenizer, messages, shown, variables, following=following)
