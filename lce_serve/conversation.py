"""Renders the conversations of the chat endpoints with the model's chat template, with the tools that may be called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from lce.errors import DataError
from lce_serve.answering import common
from lce_serve.fields import Fields
from lce_serve.forms import form_of
from lce_serve.generation import Asked
from lce_serve.grammar import grammar_for
from lce_serve.history import openai_messages
from lce_serve.refusals import Refusal
from lce_serve.service import Service
from lce_serve.tools import Tool, Tools, in_plain_text

_SWITCHES = ("enable_thinking", "thinking")  # the names by which templates ask whether the model is to think


def prompt_or_messages(fields: Fields) -> tuple[str | None, list[dict[str, Any]]]:
    """Return the text `prompt` or None, and the messages. Refuses a request that has both or neither of the two."""
    prompt = fields.text("prompt")
    if (prompt is None) == (not fields.has("messages")):
        raise Refusal(400, "expected either prompt, a text, or messages", "prompt")
    return prompt, [] if prompt is not None else openai_messages(fields)


def rendered(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    tools: tuple[Tool, ...] = (),
    variables: Mapping[str, Any] | None = None,
    *,
    following: bool = False,
    answer: bool = True,
    continues: bool = False,
) -> Any:
    """Return a conversation as the chat template writes it. Blocks while a process renders the template.

    With `following`, the conversation continues a named context. Without `answer`, the text does not ask for an answer.
    With `continues`, the last message is an answer that has begun.
    """
    if tokenizer.chat_template is None:
        line = "this model has no chat template: it continues text; use /v1/completions, or serve the model with one"
        raise Refusal(400, line, "messages")
    given: dict[str, Any] = dict(variables or {})
    if any(name in given for name in ("messages", "tools", "bos_token", "eos_token")):
        raise Refusal(400, "chat_template_kwargs may not name messages, tools or tokens", "chat_template_kwargs")
    how = {"following": following, "continue_final_message": continues}
    if form_of((tools and tokenizer.tool_template) or tokenizer.chat_template) is not None:
        own = given | ({"tools": [tool.as_object() for tool in tools]} if tools else {})
        with suppress(DataError):  # such as two calls in one message, which Llama 3's template refuses
            return tokenizer.render_chat(messages, answer, variables=own, **how)
    return tokenizer.render_chat(in_plain_text(messages, tools), answer, variables=given, **how)


def variables_of(fields: Fields) -> dict[str, Any]:
    """Return what a request gives the template to read: `chat_template_kwargs`, and whether and how much to think.

    Each API has a field of its own for thoughts: `reasoning_effort`, `reasoning.effort`, `thinking.type`.
    """
    effort = fields.text("reasoning_effort") or fields.inner("reasoning").text("effort")
    kind = fields.inner("thinking").text("type")
    wanted = fields.value("enable_thinking", bool, "true or false")
    if wanted is None and (effort or kind):
        wanted = (kind or "") != "disabled" and effort != "none"
    given: dict[str, Any] = {} if wanted is None else dict.fromkeys(_SWITCHES, wanted)
    given |= {"reasoning_effort": effort} if effort and effort != "none" else {}
    return given | (fields.object("chat_template_kwargs") or {})


def rendering(
    tokenizer: Any, messages: list[dict[str, Any]], tools: Tools, fields: Fields, following: bool, begun: bool = False
) -> Callable[[], Any]:
    """Return a function that renders a request's conversation as `rendered` does, with the tools that may be called.

    A last message of the assistant is continued if it is `begun`, or the request says so.
    """
    shown, variables = () if tools.choice == "none" else tools.tools, variables_of(fields)
    how = {"following": following, "answer": fields.flag("add_generation_prompt", True)}
    asked, last = fields.flag("continue_final_message"), messages[-1]
    is_answer = last["role"] == "assistant" and not last.get("tool_calls")
    if asked and not is_answer:
        line = "the last message cannot be continued; expected a message of the assistant without tool calls"
        raise Refusal(400, line, "continue_final_message")
    how["continues"] = asked or ((begun or not how["answer"]) and is_answer)
    return lambda: rendered(tokenizer, messages, shown, variables, **how)


def asked_of(
    service: Service,
    fields: Fields,
    messages: list[dict[str, Any]],
    tools: Tools,
    form: Fields,
    begun: bool = False,
    **more: Any,
) -> Asked:
    """Return a request for an answer of the form `form` to a conversation. `more` are other fields of `Asked`."""
    how = common(service, fields)
    render = rendering(service.engine.tokenizer, messages, tools, fields, how["context"] is not None, begun)
    return Asked([render], tools=tools, grammar=grammar_for(fields, form, tools), **how, **more)
