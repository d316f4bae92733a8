"""Clients of other projects, as they are published, against a real server."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import lce
from tests.command import Process

pytestmark = pytest.mark.filterwarnings("ignore")
WAIT_S = 60
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
HI: Any = [{"role": "user", "content": "the quick fox"}]


def test_openais_own_client(address: str) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client:
        assert [each.id for each in client.models.list()] == ["tiny"]
        whole = client.chat.completions.create(model="tiny", messages=HI, max_tokens=6)
        assert client.completions.create(model="tiny", prompt="the fox", max_tokens=3).choices[0].text
        answer = client.responses.create(model="tiny", input="the quick fox", max_output_tokens=6)
        assert answer.output_text == whole.choices[0].message.content
        with client.responses.stream(model="tiny", input="the quick fox", max_output_tokens=6) as events:
            kinds = [event.type for event in events]
        assert kinds[-1] in ("response.completed", "response.incomplete")
        with pytest.raises(openai.BadRequestError, match="more than the") as error:
            client.completions.create(model="tiny", prompt=[5] * 5000, max_tokens=9999)
        assert error.value.code == "context_length_exceeded"
        lowered = client.chat.completions.create(model="tiny", messages=HI, max_tokens=9999, stop=[" "])
        assert lowered.choices[0].finish_reason == "stop"


def test_openais_client_asks_for_schemas_calls_and_streams_at_once(address: str, engine: lce.Engine) -> None:
    openai = pytest.importorskip("openai")
    texts = [f"the {word} fox" for word in "quick brown lazy other".split()]

    async def text_of(chunks: Any) -> str:
        return "".join([chunk.choices[0].delta.content or "" async for chunk in await chunks if chunk.choices])

    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", timeout=WAIT_S) as client:

            def make(text: str, n: int, **how: Any) -> Any:
                messages = [{"role": "user", "content": text}]
                return client.chat.completions.create(model="tiny", messages=messages, max_tokens=n, **how)

            form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
            found, called, *said = await asyncio.gather(
                make("hi", 80, response_format=form, logit_bias={"5": 1}),
                make("hi", 200, tools=[TOOL], tool_choice="required"),
                *(text_of(make(text, 40, stream=True)) for text in texts),
            )
            if found.choices[0].finish_reason == "stop":
                assert isinstance(json.loads(found.choices[0].message.content)["n"], int)
            assert called.choices[0].finish_reason in ("tool_calls", "length")
            for call in called.choices[0].message.tool_calls or []:
                assert call.function.name == "add"
                assert isinstance(json.loads(call.function.arguments)["n"], int)
            assert said == [engine.chat(text, max_tokens=40).text for text in texts]  # each what it says alone

    asyncio.run(asyncio.wait_for(ask(), WAIT_S))


def test_anthropics_own_client(address: str) -> None:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=address, api_key="none", max_retries=0, timeout=WAIT_S) as client:
        assert [each.display_name for each in client.models.list()] == ["tiny"]
        how: Any = {"model": "tiny", "max_tokens": 6, "messages": HI}
        whole = client.messages.create(**how)
        with client.messages.stream(**how) as stream:
            text = "".join(stream.text_stream)
            assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens
        assert text == whole.content[0].text
        tools = [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}]
        found = client.messages.create(**how | {"max_tokens": 100}, tools=tools, tool_choice={"type": "any"})
        assert all(isinstance(block.input["n"], int) for block in found.content if block.type == "tool_use")
        assert client.messages.count_tokens(model="tiny", messages=HI).input_tokens > 3
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**how | {"model": "claude"})


@pytest.mark.slow
def test_the_evaluation_harness_scores_as_in_process(engine: lce.Engine, address: str, chat_model: Path) -> None:
    """Log-likelihoods by `local-completions` over HTTP are those of the engine."""
    pytest.importorskip("lm_eval")
    pytest.importorskip("tenacity", reason="lm_eval[api] is not installed")
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    how: dict[str, Any] = {"tokenizer": str(chat_model), "tokenizer_backend": "huggingface", "num_concurrent": 2}
    url = f"{address}/v1/completions"
    model = LocalCompletionsAPI(base_url=url, model="tiny", max_length=512, max_retries=1, **how)
    pairs = [("one two three", " four"), ("a b", " c d"), ("hello", " world")]
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    for (before, after), (logprob, greedy) in zip(pairs, model.loglikelihood(asked), strict=True):
        whole, first = (engine.tokenizer.encode(text, bos=False) for text in (before + after, before))
        scores = engine.score(whole, first=len(first))
        assert logprob == pytest.approx(float(scores.logprobs.sum()), abs=1e-3)
        assert greedy == bool(scores.likeliest.all())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_schemathesis_finds_no_failure_of_the_server(address: str, tmp_path: Path) -> None:
    """Whatever the OpenAPI document allows, and what it does not, is answered below 500."""
    pytest.importorskip("schemathesis")
    options = "--checks not_a_server_error --max-examples 25 --request-timeout 30 --seed 1 --no-color".split()
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{address}/openapi.json", *options]
    with Process(command, cwd=tmp_path) as process:
        out, err = process.communicate(timeout=500)
    assert process.returncode == 0, out[-4000:] + err[-2000:]
