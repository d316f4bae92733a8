"""GET /openapi.json: what the endpoints take and answer, as an OpenAPI document."""

from __future__ import annotations

from typing import Any

import lce
from lce_serve.answering import ANTHROPICS, MOST_CHOICES, NUMBERS
from lce_serve.fields import MOST_ITEMS, MOST_TOKENS
from lce_serve.history import MOST_MESSAGES

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
IDS: Schema = {"type": "array", "items": {"type": "integer"}}
CONTENT: Schema = {"oneOf": [TEXT, {"type": "array", "items": OBJECT}]}
STOP: Schema = {"oneOf": [TEXT, {"type": "array", "items": TEXT, "maxItems": 64}]}
TOOLS: Schema = {"type": "array", "items": OBJECT, "maxItems": MOST_ITEMS}
CHOICE: Schema = {"oneOf": [TEXT, OBJECT]}


def _number(least: float, most: float, kind: type[float]) -> Schema:
    return {"type": "integer" if kind is int else "number", "minimum": least, "maximum": most}


def _all(schema: Schema, names: str) -> Schema:
    """Return fields of one schema."""
    return dict.fromkeys(names.split(), schema)


COUNT = _number(-1, 1 << 63, int)
LIKELIEST = _number(0, 20, int)
MESSAGE: Schema = {"type": "object", "required": ["role"], "properties": {"role": TEXT, "content": CONTENT}}
MESSAGES: Schema = {"type": "array", "minItems": 1, "maxItems": MOST_MESSAGES, "items": MESSAGE}
PROMPTS: Schema = {"oneOf": [TEXT, {"type": "array", "minItems": 1}]}

OWN: Schema = {**_all(TEXT, "model prompt_cache_key method context"), "method_options": OBJECT}
SAMPLING: Schema = {name: _number(*limits) for name, limits in NUMBERS.items()}
SAMPLING |= {"stop": STOP, "stop_token_ids": IDS, "logit_bias": OBJECT}
TOLD: Schema = {"tools": TOOLS, "tool_choice": CHOICE, "parallel_tool_calls": FLAG, "chat_template_kwargs": OBJECT}
OPENAI: Schema = {**OWN, **SAMPLING, **_all(OBJECT, "stream_options response_format"), "max_tokens": COUNT}
OPENAI |= {"n": _number(1, MOST_CHOICES, int), "min_tokens": _number(0, MOST_TOKENS, int), "ignore_eos": FLAG}
CHAT: Schema = {**OPENAI, **TOLD, "messages": MESSAGES, "max_completion_tokens": COUNT, "top_logprobs": LIKELIEST}
CHAT |= _all(FLAG, "logprobs enable_thinking continue_final_message add_generation_prompt")
CHAT |= {"reasoning_effort": TEXT}
COMPLETIONS: Schema = {**OPENAI, "prompt": PROMPTS, "echo": FLAG, "logprobs": LIKELIEST}
RESPONSES: Schema = {**OWN, **SAMPLING, **TOLD, "input": CONTENT, "instructions": TEXT, "max_output_tokens": COUNT}
RESPONSES |= _all(OBJECT, "text reasoning")
COUNTED: Schema = {**OWN, "messages": MESSAGES, "system": CONTENT, "tools": TOOLS}
COUNTED |= _all(OBJECT, "tool_choice thinking chat_template_kwargs")
ANTHROPIC: Schema = {**COUNTED, "max_tokens": COUNT, "stop_sequences": STOP, "stop_token_ids": IDS}
ANTHROPIC |= {name: SAMPLING[name] for name in ANTHROPICS}
INSPECTED: Schema = {**OWN, **SAMPLING, "prompt": TEXT, "messages": MESSAGES, "max_tokens": _number(1, 64, int)}
INSPECTED |= {"chat_template_kwargs": OBJECT}
CONTEXT: Schema = {**_all(TEXT, "name prompt method"), "messages": MESSAGES, "method_options": OBJECT}
TOKENIZED: Schema = {**_all(TEXT, "content prompt"), "add_special": FLAG}

_BODIES: dict[str, tuple[str, Schema, list[str], bool]] = {  # summary, fields, required ones, whether it may stream
    "/v1/chat/completions": ("Answer a conversation", CHAT, ["messages"], True),
    "/v1/completions": ("Continue a text", COMPLETIONS, ["prompt"], True),
    "/v1/responses": ("Answer a conversation of items", RESPONSES, ["input"], True),
    "/v1/messages": ("Answer a conversation, as Anthropic does", ANTHROPIC, ["messages"], True),
    "/v1/messages/count_tokens": ("Count the tokens of a conversation", COUNTED, ["messages"], False),
    "/tokenize": ("Turn text into token ids", TOKENIZED, [], False),
    "/detokenize": ("Turn token ids into text", {"tokens": IDS}, [], False),
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
_JSON: Schema = {"application/json": {"schema": OBJECT}}
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
        paths[path] = {"get": _operation(path, summary, {_KINDS.get(path, "application/json"): {}})}
    for path, (summary, fields, required, streams) in _BODIES.items():
        operation = _operation(path, summary, _JSON | ({"text/event-stream": {}} if streams else {}))
        properties = fields | ({"stream": FLAG} if streams else {})
        schema = {"type": "object", "properties": properties, "required": required}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths.setdefault(path, {})["post"] = operation
    name = "/contexts/{name}"
    paths[name] = {"delete": _operation(name, "Give up a context", {"application/json": {}})}
    key = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "lce", "version": lce.__version__},
        "paths": paths,
        "components": {"securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}, "key": key}},
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _operation(path: str, summary: str, answers: Schema) -> Schema:
    """Return the description of one operation."""
    responses: Schema = {status: {"description": text, "content": _JSON} for status, text in _REFUSED.items()}
    made: Schema = {
        "summary": summary,
        "responses": {"200": {"description": "The answer", "content": answers}, **responses},
    }
    if "{" in path:
        name = path.partition("{")[2].rstrip("}")
        made["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {**TEXT, "minLength": 1}}]
    return made
