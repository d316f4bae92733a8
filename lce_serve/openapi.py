"""GET /openapi.json: what the endpoints take and answer, as an OpenAPI document."""

from __future__ import annotations

from typing import Any

import lce

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
CONTENT: Schema = {"oneOf": [TEXT, {"type": "array", "items": OBJECT}]}
STOP: Schema = {"oneOf": [TEXT, {"type": "array", "items": TEXT, "maxItems": 64}]}
TOOLS: Schema = {"type": "array", "items": OBJECT, "maxItems": 128}
CHOICE: Schema = {"oneOf": [TEXT, OBJECT]}


def _number(least: float, most: float) -> Schema:
    return {"type": "number", "minimum": least, "maximum": most}


def _whole(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


COUNT = _whole(-1, 1 << 63)
OWN: Schema = {
    "model": TEXT,
    "stream": FLAG,
    "prompt_cache_key": TEXT,
    "method": TEXT,
    "method_options": OBJECT,
    "context": TEXT,
}
SAMPLING: Schema = {
    "temperature": _number(0, 2),
    "top_p": _number(0, 1),
    "top_k": _whole(-1, 1 << 31),
    "min_p": _number(0, 1),
    "seed": {"type": "integer"},
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": _number(0.01, 100),
    "stop": STOP,
    "stop_token_ids": {"type": "array", "items": {"type": "integer"}},
    "logit_bias": OBJECT,
}
MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "maxItems": 4096,
    "items": {"type": "object", "required": ["role"], "properties": {"role": TEXT, "content": CONTENT}},
}
OPENAI: Schema = {**OWN, **SAMPLING, "n": _whole(1, 8), "stream_options": OBJECT, "response_format": OBJECT}
OPENAI |= {"min_tokens": _whole(0, 1 << 24), "ignore_eos": FLAG}
CHAT: Schema = {
    **OPENAI,
    "messages": MESSAGES,
    "max_tokens": COUNT,
    "max_completion_tokens": COUNT,
    "logprobs": FLAG,
    "top_logprobs": _whole(0, 20),
    "tools": TOOLS,
    "tool_choice": CHOICE,
    "parallel_tool_calls": FLAG,
    "reasoning_effort": TEXT,
    "enable_thinking": FLAG,
    "chat_template_kwargs": OBJECT,
    "continue_final_message": FLAG,
    "add_generation_prompt": FLAG,
}
COMPLETIONS: Schema = {
    **OPENAI,
    "prompt": {"oneOf": [TEXT, {"type": "array", "minItems": 1}]},
    "max_tokens": COUNT,
    "echo": FLAG,
    "logprobs": _whole(0, 20),
}
RESPONSES: Schema = {
    **OWN,
    **SAMPLING,
    "input": CONTENT,
    "instructions": TEXT,
    "max_output_tokens": COUNT,
    "text": OBJECT,
    "tools": TOOLS,
    "tool_choice": CHOICE,
    "parallel_tool_calls": FLAG,
    "reasoning": OBJECT,
    "chat_template_kwargs": OBJECT,
}
COUNTED: Schema = {
    **OWN,
    "messages": MESSAGES,
    "system": CONTENT,
    "tools": TOOLS,
    "tool_choice": OBJECT,
    "thinking": OBJECT,
    "chat_template_kwargs": OBJECT,
}
ANTHROPIC: Schema = {
    **COUNTED,
    "max_tokens": COUNT,
    "temperature": _number(0, 2),
    "top_p": _number(0, 1),
    "top_k": _whole(0, 1 << 31),
    "stop_sequences": STOP,
}
INSPECTED: Schema = {
    **{name: schema for name, schema in OWN.items() if name != "stream"},
    **SAMPLING,
    "prompt": TEXT,
    "messages": MESSAGES,
    "max_tokens": _whole(1, 64),
    "chat_template_kwargs": OBJECT,
}
CONTEXT: Schema = {"name": TEXT, "prompt": TEXT, "messages": MESSAGES, "method": TEXT, "method_options": OBJECT}

_BODIES: dict[str, tuple[str, Schema, list[str], bool]] = {  # summary, fields, required ones, whether it streams
    "/v1/chat/completions": ("Answer a conversation", CHAT, ["messages"], True),
    "/v1/completions": ("Continue a text", COMPLETIONS, ["prompt"], True),
    "/v1/responses": ("Answer a conversation of items", RESPONSES, ["input"], True),
    "/v1/messages": ("Answer a conversation, as Anthropic does", ANTHROPIC, ["messages"], True),
    "/v1/messages/count_tokens": ("Count the tokens of a conversation", COUNTED, ["messages"], False),
    "/tokenize": ("Turn text into token ids", {"content": TEXT, "prompt": TEXT, "add_special": FLAG}, [], False),
    "/detokenize": ("Turn token ids into text", {"tokens": {"type": "array", "items": {"type": "integer"}}}, [], False),
    "/contexts": ("Read a text and keep it under a name", CONTEXT, ["name"], False),
    "/inspect": ("Record what the tokens of an answer attend", INSPECTED, [], False),
}
_READ = {
    "/": "The page: ask about a document, and watch what is attended",
    "/inspect": "The page's picture of a recording",
    "/health": "Whether requests are taken",
    "/metrics": "Figures for Prometheus",
    "/props": "What is served",
    "/v1/models": "The model, and the model with each named context",
    "/v1/models/{model}": "One model",
    "/contexts": "The named contexts",
    "/openapi.json": "This document",
}
_KINDS = {"/": "text/html", "/inspect": "text/html", "/metrics": "text/plain"}
_REFUSED = {
    "400": "A field is wrong, or the text is too long",
    "401": "The key is missing or wrong",
    "403": "The Host or the origin is not allowed",
    "404": "There is no such model, context or path",
    "405": "Another verb is expected",
    "408": "The body came too slowly",
    "413": "The body is too large",
    "415": "The body is not JSON",
    "429": "The queue is full",
    "431": "Too many headers",
    "500": "The request failed",
    "503": "The server is loading or draining",
}


def document() -> Schema:
    """Return the document. Fields that no schema names are ignored; a field that is null counts as missing."""
    paths: dict[str, Schema] = {}
    for path, summary in _READ.items():
        kind = _KINDS.get(path, "application/json")
        paths.setdefault(path, {})["get"] = _operation(path, summary, {kind: {}})
    for path, (summary, fields, required, streams) in _BODIES.items():
        answers: Schema = {"application/json": {"schema": OBJECT}, **({"text/event-stream": {}} if streams else {})}
        operation = _operation(path, summary, answers)
        schema = {"type": "object", "properties": fields, "required": required}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths.setdefault(path, {})["post"] = operation
    paths["/contexts/{name}"] = {
        "delete": _operation("/contexts/{name}", "Give up a context", {"application/json": {}})
    }
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "lce", "version": lce.__version__},
        "paths": paths,
        "components": {"securitySchemes": schemes},
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _operation(path: str, summary: str, answers: Schema) -> Schema:
    """Return the description of one operation."""
    refused = {
        status: {"description": text, "content": {"application/json": {"schema": OBJECT}}}
        for status, text in _REFUSED.items()
    }
    made: Schema = {
        "summary": summary,
        "responses": {"200": {"description": "The answer", "content": answers}, **refused},
    }
    if "{" in path:
        name = path.partition("{")[2].rstrip("}")
        made["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {**TEXT, "minLength": 1}}]
    return made
