"""Completions, Responses, Messages, and the small endpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import lce
from lce.errors import UsageError
from lce_serve.contexts import NamedContexts
from lce_serve.service import Load
from tests.lce_serve.conftest import events


def test_a_completion_is_what_the_engine_says(client: TestClient, engine: Any) -> None:
    ids = engine.tokenizer.encode("the lazy dog")
    own = engine.generate("the lazy dog", max_tokens=5).text
    for prompt in ("the lazy dog", ids):
        found = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 5}).json()
        assert found["choices"][0]["text"] == own
    found = client.post("/v1/completions", json={"prompt": [ids, ids], "max_tokens": 5}).json()
    assert [choice["text"] for choice in found["choices"]] == [own, own]


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("top", [0, 1])
def test_echo_scores_a_prompt_as_the_harness_reads_it(client: Any, engine: Any, max_tokens: int, top: int) -> None:
    ids = engine.tokenizer.encode("over the moon and the other dogs")
    how = {"prompt": [ids], "max_tokens": max_tokens, "echo": True, "logprobs": top}
    found = client.post("/v1/completions", json=how).json()["choices"][0]
    scores = engine.score(ids)
    logprobs = found["logprobs"]["token_logprobs"][: len(ids)]
    assert logprobs == [None, *(pytest.approx(each, abs=1e-4) for each in scores.logprobs.tolist())]
    assert len(found["logprobs"]["tokens"]) in (len(ids), len(ids) + max_tokens)
    assert found["text"].startswith(engine.tokenizer.decode(ids))
    if top:
        names, tops = found["logprobs"]["tokens"], found["logprobs"]["top_logprobs"]
        greedy = [max(tops[i], key=tops[i].get) == names[i] for i in range(1, len(ids))]
        assert greedy == scores.likeliest.tolist()


def test_a_streamed_completion_is_the_same(client: TestClient) -> None:
    how = {"prompt": "the lazy", "max_tokens": 5, "echo": True}
    whole = client.post("/v1/completions", json=how).json()["choices"][0]["text"]
    chunks = [json.loads(x) for x in events(client.post("/v1/completions", json={**how, "stream": True}).text)[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole


def test_responses_stream_numbered_events_without_done(client: TestClient) -> None:
    how: dict[str, Any] = {"input": "the quick fox", "instructions": "Be brief.", "tools": [{"type": "web_search"}]}
    whole = client.post("/v1/responses", json=how | {"max_output_tokens": 6}).json()
    text = whole["output"][0]["content"][0]["text"]
    answer = client.post("/v1/responses", json=how | {"max_output_tokens": 6, "stream": True})
    found = [json.loads(data) for data in events(answer.text)]
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    assert (found[0]["type"], found[-1]["type"]) == ("response.created", f"response.{whole['status']}")
    assert "".join(each["delta"] for each in found if each["type"] == "response.output_text.delta") == text
    assert found[-1]["response"]["output"][0]["content"][0]["text"] == text
    assert "[DONE]" not in answer.text


def test_responses_take_items_and_refuse_an_earlier_response(client: TestClient) -> None:
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "add"}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
    ]
    for body, status in (({"input": items, "max_output_tokens": 2}, 200), ({"previous_response_id": "resp_1"}, 400)):
        answer = client.post("/v1/responses", json={"input": "x", **body})
        assert answer.status_code == status, answer.text


def test_messages_answer_in_anthropics_form(client: TestClient) -> None:
    how: dict[str, Any] = {"messages": [{"role": "user", "content": "the fox"}], "system": "Be brief."}
    whole = client.post("/v1/messages", json=how | {"max_tokens": 6}).json()
    assert (whole["type"], whole["stop_reason"] in ("end_turn", "max_tokens")) == ("message", True)
    answer = client.post("/v1/messages", json=how | {"max_tokens": 6, "stream": True})
    found = [json.loads(data) for data in events(answer.text)]
    assert (found[0]["type"], found[-1]["type"]) == ("message_start", "message_stop")
    text = "".join(each["delta"]["text"] for each in found if each["type"] == "content_block_delta")
    assert text == "".join(block["text"] for block in whole["content"])
    counted = client.post("/v1/messages/count_tokens", json=how).json()
    usage = whole["usage"]
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_messages_are_refused_in_anthropics_form(client: TestClient) -> None:
    answer = client.post("/v1/messages", json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 0})
    assert (answer.status_code, answer.json()["type"]) == (400, "error")
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_tokens_go_there_and_back(client: TestClient) -> None:
    ids = client.post("/tokenize", json={"content": "the fox", "add_special": False}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": ids}).json()["content"] == "the fox"
    assert client.post("/detokenize", json={"tokens": [10**9]}).status_code == 400


def test_a_context_is_made_asked_and_dropped(client: TestClient, engine: Any) -> None:
    made = client.post("/contexts", json={"name": "book", "prompt": "the old miller took the bread"})
    assert (made.status_code, made.json()["n_tokens"]) == (200, 17), made.text
    wrong = ("book", "a@b", "a\n", "x" * 201)
    assert {client.post("/contexts", json={"name": each, "prompt": "a"}).status_code for each in wrong} == {400}
    assert [each["name"] for each in client.get("/contexts").json()["data"]] == ["book"]
    assert "tiny@book" in [each["id"] for each in client.get("/v1/models").json()["data"]]
    assert client.get("/v1/models/tiny@book").status_code == 200
    prompt = {"prompt": " out of the oven", "max_tokens": 4}
    found = client.post("/v1/completions", json={**prompt, "model": "tiny@book"})
    own = engine.generate(" out of the oven", context=engine.prefill("the old miller took the bread"), max_tokens=4)
    assert found.json()["choices"][0]["text"] == own.text
    asked = {"messages": [{"role": "user", "content": "and?"}], "context": "book", "max_tokens": 2}
    assert client.post("/v1/chat/completions", json=asked).status_code == 200
    assert "of its own" in client.post("/v1/completions", json={**prompt, "context": "book", "method": "dca"}).text
    assert (client.delete("/contexts/book").status_code, client.delete("/contexts/book").status_code) == (200, 404)
    assert client.post("/v1/completions", json={**prompt, "model": "tiny@book"}).status_code == 404


def test_files_of_contexts_are_served_by_name(engine: Any, chat_model: Path, tmp_path: Path) -> None:
    engine.prefill("the old miller").save(tmp_path / "book.lce")
    named, loading = NamedContexts(), {"model": chat_model, "threads": 1}
    with Load(loading, contexts={"book": str(tmp_path / "book.lce")}).begin(named) as batch:
        setup, context = named.get("book")
        assert batch.stream(" took", method=setup, context=context, max_tokens=2).finish().token_ids
    lce.load(chat_model, lce.methods.Streaming(local=9, sinks=2)).prefill("the old miller").save(tmp_path / "other.lce")
    other = NamedContexts()
    with Load(loading, contexts={"other": str(tmp_path / "other.lce")}).begin(other) as batch:
        setup, context = other.get("other")
        assert setup.method == lce.methods.Streaming(local=9, sinks=2), "the method by which the text was read"
        assert batch.stream(" took", method=setup, context=context, max_tokens=2).finish().token_ids
    with pytest.raises(UsageError, match="there is a context book already"):
        Load(loading, contexts={"book": str(tmp_path / "book.lce")}).begin(named)


def test_figures_have_vllms_names(client: TestClient) -> None:
    client.post("/v1/completions", json={"prompt": "the fox", "max_tokens": 4})
    text = client.get("/metrics").text
    names = "num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total "
    names += "prefix_cache_hits_total prompt_tokens_total generation_tokens_total time_to_first_token_seconds_count "
    names += "inter_token_latency_seconds_count time_per_output_token_seconds_count e2e_request_latency_seconds_sum"
    for name in names.split():
        assert f'vllm:{name}{{model_name="tiny"}}' in text, name


def test_the_document_lists_every_path(client: TestClient) -> None:
    from lce_serve.app import _VERBS

    paths = client.get("/openapi.json").json()["paths"]
    described = {(verb.upper(), path) for path, verbs in paths.items() for verb in verbs}
    assert described == {(verb, path.replace(":path", "")) for verb, path in _VERBS}
    assert client.get("/props").json()["model_alias"] == "tiny"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_offsets_of_tokens_hold_at_cut_characters(client: TestClient, stream: bool, echo: bool) -> None:
    wanted = client.post("/tokenize", json={"content": "aé€b😀", "add_special": False}).json()["tokens"]
    assert len(wanted) > 5, "the characters are cut into tokens"
    say = iter(wanted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lce.engine.answer.likeliest_of", lambda logits: next(say))
        body = {"prompt": "é the", "max_tokens": len(wanted), "logprobs": 0, "echo": echo, "stream": stream}
        answer = client.post("/v1/completions", json=body)
    if stream:
        choices = [json.loads(data)["choices"][0] for data in events(answer.text)[:-1]]
    else:
        choices = answer.json()["choices"]
    text = "".join(each["text"] for each in choices)
    assert text == ("é the" if echo else "") + "aé€b😀"
    names = [name for each in choices for name in each["logprobs"]["tokens"]]
    offsets = [at for each in choices for at in each["logprobs"]["text_offset"]]
    assert offsets == sorted(offsets)
    whole = [(name, at) for name, at in zip(names, offsets, strict=True) if "\ufffd" not in name and "<" not in name]
    assert [text[at : at + len(name)] for name, at in whole] == [name for name, _ in whole]
    assert offsets[-1] == len(text) - 1
