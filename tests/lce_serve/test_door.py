"""The door in front of replicas, here two of one process: what it checks, passes on and asks again. No Ray."""

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from starlette.testclient import TestClient

from lce.errors import BusyError
from lce_serve.affinity import Affinity
from lce_serve.app import application
from lce_serve.door import TRIES, DoorService, ReplicaLost, answered, door, merged
from lce_serve.service import Service, Settings
from tests.lce_serve.conftest import URL, events

BODY = {"prompt": "hello", "max_tokens": 8, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
ASKED = {"/v1/completions": BODY, "/v1/chat/completions": CHAT, "/v1/messages": CHAT}
ASKED |= {"/v1/responses": {"input": "hi", "max_output_tokens": 8}}
STREAMS = [(path, body | {"stream": True}) for path, body in ASKED.items()]


class Two:
    """Replicas in this process. `deaths` has for each request the messages after which its replica ends."""

    def __init__(self, service: Service) -> None:
        self.app, self.service = application(service), service
        self.deaths: list[int] = []
        self.asked: list[Affinity] = []

    async def ask(self, affinity: Affinity, head: dict[str, Any], body: bytes) -> AsyncGenerator[Any]:
        left = self.deaths.pop(0) if self.deaths else None
        self.asked.append(affinity)
        async with aclosing(answered(self.app, dict(head), body, f"r{len(self.asked)}")) as messages:
            async for message in messages:
                if left == 0:
                    raise ReplicaLost("killed")
                left = left and left - 1
                yield message

    async def figures(self) -> dict[str, str]:
        return {name: self.service.metrics.text().decode() for name in ("r1", "r2")}


@pytest.fixture
def two(service: Service, monkeypatch: pytest.MonkeyPatch) -> Two:
    monkeypatch.setattr("lce_serve.door.PAUSE_S", 0.001)
    return Two(service)


def outside(replicas: Any, settings: Settings) -> TestClient:
    service = DoorService(settings)
    service.serve(replicas)
    return TestClient(door(service), base_url=URL, raise_server_exceptions=False)


@pytest.fixture
def behind(two: Two) -> TestClient:
    return outside(two, Settings("tiny", ping_s=0.2))


@pytest.mark.parametrize("path", ["/v1/models", "/props", "/openapi.json", "/nothing", "/contexts"])
def test_a_door_passes_on_what_replicas_answer(behind: TestClient, client: TestClient, path: str) -> None:
    found, expected = behind.get(path), client.get(path)
    assert (found.status_code, found.json()) == (expected.status_code, expected.json())


def test_an_answer_tells_its_replica_once(behind: TestClient, client: TestClient) -> None:
    found, expected = behind.post("/v1/completions", json=BODY), client.post("/v1/completions", json=BODY)
    assert (found.json()["choices"], found.headers["x-lce-replica"]) == (expected.json()["choices"], "r1")
    assert len(found.headers.get_list("x-request-id")) == 1


def test_the_log_has_one_line_with_the_replica(behind: TestClient, capsys: pytest.CaptureFixture[str]) -> None:
    found = behind.post("/v1/completions", json=BODY)
    of_replica, of_door = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    for line in (of_replica, of_door):
        assert (line["id"], line["generated_tokens"]) == (found.headers["x-request-id"], 8)
    assert (of_door["replica"], of_door["finish"]) == ("r1", "length")


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_a_stream_comes_through(behind: TestClient, client: TestClient, path: str, body: Any) -> None:
    found, expected = behind.post(path, json=body).text, client.post(path, json=body).text
    assert found.startswith(": lce\n\n")
    assert len(events(found)) == len(events(expected)) > 3


@pytest.mark.parametrize("deaths", [[0], [1], [0, 1, 0]])
def test_a_whole_answer_is_asked_again(behind: TestClient, two: Two, client: TestClient, deaths: list[int]) -> None:
    two.deaths = list(deaths)
    found = behind.post("/v1/completions", json=BODY)
    assert found.json()["choices"] == client.post("/v1/completions", json=BODY).json()["choices"]
    assert found.headers["x-lce-replica"] == f"r{len(deaths) + 1}"


def test_a_whole_answer_stays_whole_if_the_replica_ends_behind_it(behind: TestClient, two: Two) -> None:
    two.deaths = [2]
    assert behind.post("/v1/completions", json=BODY).json()["choices"][0]["finish_reason"] == "length"
    assert len(two.asked) == 1


def test_a_request_that_ends_every_replica_is_refused(behind: TestClient, two: Two) -> None:
    two.deaths = [0] * 100
    found = behind.post("/v1/completions", json=BODY)
    assert (found.status_code, found.json()["error"]["code"], len(two.asked)) == (503, "replica_lost", TRIES)


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_a_stream_that_has_not_begun_is_asked_again(behind: TestClient, two: Two, path: str, body: Any) -> None:
    two.deaths = [2]  # behind the head and the first comment
    found = behind.post(path, json=body).text
    assert (len(two.asked), found.count(": lce")) == (2, 2)
    assert "replica_lost" not in found


@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_a_stream_that_has_begun_ends_with_an_error(behind: TestClient, two: Two, path: str, body: Any) -> None:
    two.deaths = [4]
    found = behind.post(path, json=body)
    assert found.status_code == 200
    last = json.loads(events(found.text)[-1])
    told = last if path == "/v1/responses" else last["error"]
    assert "the replica ended" in told["message"]
    if path == "/v1/messages":
        assert last["type"] == "error"
        assert "event: error\n" in found.text
    elif path == "/v1/responses":
        assert (last["type"], last["sequence_number"]) == ("error", 2)
    else:
        assert told["code"] == "replica_lost"
    assert len(two.asked) == 1


def test_a_full_queue_is_429(behind: TestClient, two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(*_: Any) -> AsyncGenerator[Any]:
        raise BusyError("full")
        yield

    monkeypatch.setattr(two, "ask", ask)
    found = behind.post("/v1/completions", json=BODY)
    assert (found.status_code, "retry-after" in found.headers) == (429, True)


def test_affinity_comes_from_the_header_and_the_body(behind: TestClient, two: Two) -> None:
    behind.post("/v1/completions", json=BODY, headers={"x-session-id": "s"})
    behind.post("/v1/completions", json=BODY | {"prompt_cache_key": "t"})
    behind.get("/v1/models")
    assert [each.session for each in two.asked] == ["s", "t", None]
    assert two.asked[0].digests == two.asked[1].digests != two.asked[2].digests == ()


def test_the_door_checks_before_it_asks(two: Two) -> None:
    service = DoorService(Settings("tiny", key="k", most_body=1000))
    client = TestClient(door(service), base_url=URL, raise_server_exceptions=False)
    key = {"Authorization": "Bearer k"}

    def status(path: str = "/v1/completions", headers: dict[str, str] = key, verb: str = "POST", **body: Any) -> int:
        return client.request(verb, path, headers=headers, **(body or {"json": BODY})).status_code

    assert (client.get("/health").json(), status()) == ({"status": "loading"}, 503)
    service.serve(two)
    assert (client.get("/health/").json(), client.head("/health").status_code, status(headers={})) == (
        {"status": "ok"},
        200,
        401,
    )
    other = {**key, "Content-Type": "text/plain"}
    assert (status(json={"prompt": "x" * 2000}), status(content=b"x", headers=other)) == (413, 415)
    assert (status("/contexts", json={"name": "x", "prompt": "y"}), status("/contexts/x", verb="DELETE")) == (501, 501)
    service.draining = True
    assert (status(), two.asked) == (503, [])


def test_figures_have_the_replicas_as_a_label(behind: TestClient) -> None:
    behind.post("/v1/completions", json=BODY)
    text = behind.get("/metrics").text
    for name in ("r1", "r2"):
        assert f'vllm:generation_tokens_total{{model_name="tiny",replica="{name}"}} 8.0' in text
        assert f'vllm:time_to_first_token_seconds_count{{model_name="tiny",replica="{name}"}} 1.0' in text
    assert text.count("# TYPE vllm:generation_tokens_total counter") == 1
    assert merged({}) == b""


def test_a_page_of_a_named_origin_reads_answers(two: Two) -> None:
    settings = Settings("tiny", origins=("http://page.example",))
    two.app = application(Service(settings, two.service.batch))
    found = outside(two, settings).post("/v1/completions", json=BODY, headers={"Origin": "http://page.example"})
    assert found.headers.get_list("access-control-allow-origin") == ["http://page.example"]
