"""POST /inspect: answers a prompt beside the batch, and returns a recording of what each token of the answer attended.

The batch reads all but the end of the prompt, and gives a fork of the context. The end and the answer are read there,
one token at a time, under an observer. docs/inspect.md has the format of recordings.
"""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import lce
from lce.sizes import size_text
from lce_serve.answering import common, openai_options
from lce_serve.conversation import prompt_or_messages, rendered, variables_of
from lce_serve.fields import Fields
from lce_serve.generation import AGAIN, REMEDY, beginning, room
from lce_serve.refusals import Refusal
from lce_serve.service import Record, Service
from lce_serve.sse import Gone, unless_gone

MOST_TOKENS = 64  # of an answer
LAST = 16  # tokens of the prompt that are recorded, too
MOST_BYTES = 64 << 20  # of a recording


async def inspect(service: Service, request: Request, fields: Fields) -> Response:
    """Answer a prompt, and return what was attended."""
    batch, how, sampling = service.batch, common(service, fields), openai_options(fields)
    prompt, messages = prompt_or_messages(fields)
    variables, n = variables_of(fields), fields.whole("max_tokens", 1, MOST_TOKENS) or LAST
    context = how["context"]

    def begin() -> tuple[Any, list[int], int]:
        """Have the batch read the prompt but for its end. Return the stream, the ids of the end, and the room."""
        engine, start = beginning(service, context, how["method"], how["method_options"])
        tokenizer, before = engine.tokenizer, 0 if start is None else len(start)
        if prompt is None:
            text = rendered(tokenizer, messages, variables=variables, following=context is not None)
            ids = tokenizer.encode_parts(text)
        else:
            ids = tokenizer.encode(prompt, bos=None if context is None else False)
        most = room(engine, before + len(ids), n, AGAIN if before else REMEDY)
        cut = max(len(ids) - LAST, 0 if before else 1)
        if cut >= len(ids):
            raise Refusal(400, "the prompt is too short; expected two tokens or more", "prompt")
        sampling.update(engine.setup.sampling_for(sampling))
        return batch.read(ids[:cut], method=engine.setup, context=start), ids[cut:], most

    stream, rest, n = await asyncio.to_thread(begin)
    try:
        await unless_gone(request, stream.afinish())
    finally:
        stream.cancel()
    record: Record = request.scope["lce.record"]
    record.prompt_tokens, record.cached_tokens = len(stream.prompt_ids) + len(rest), stream.result.stats.read_before
    name = service.settings.model
    found = await unless_gone(request, service.beside(lambda gone: _recorded(stream, rest, n, sampling, name, gone)))
    record.generated_tokens, record.finish = found[1], "inspected"
    return Response(found[0], media_type="application/json")


def _recorded(
    stream: Any, rest: list[int], n: int, sampling: dict[str, Any], name: str, gone: threading.Event
) -> tuple[bytes, int]:
    """Return the recording as JSON, and the number of generated tokens. Blocks."""
    from lce_lab.study.recording import RecordingRequest, record_after  # imports torch, for which nobody should wait

    def check() -> None:
        if gone.is_set():
            raise Gone

    asked = RecordingRequest(rest, n, spread=0, last=LAST, sampling=sampling)
    with stream.context as context:
        found = record_after(context, lce.Engine(stream.setup), asked, name, most_bytes=MOST_BYTES, check=check)
    data = json.dumps(found, separators=(",", ":"), allow_nan=False).encode()
    if len(data) > MOST_BYTES:
        raise Refusal(400, f"the recording has {size_text(len(data))}; give a smaller max_tokens", "max_tokens")
    return data, len(found["runs"][0]["generated"])
