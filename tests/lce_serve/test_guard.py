"""What every request passes: key, Host, origins, and bounds on bodies."""

import json
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from lce.errors import BusyError
from lce_serve.app import application
from lce_serve.service import Service, Settings
from tests.lce_serve.conftest import URL

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
PATH = "/v1/chat/completions"


def client_of(service: Service, **changes: Any) -> TestClient:
    service.settings = replace(service.settings, **changes)
    return TestClient(application(service), base_url=URL, raise_server_exceptions=False)


def test_the_key_is_needed_for_all_but_health(service: Service) -> None:
    client = client_of(service, key="s3cret")
    assert client.get("/health").json() == {"status": "ok"}
    for path in ("/v1/models", "/metrics", "/props", "/openapi.json", "/nothing"):
        assert client.get(path).status_code == 401
    for header in ({"Authorization": "Bearer s3cret"}, {"x-api-key": "s3cret"}):
        assert client.post(PATH, json=CHAT, headers=header).status_code == 200
    for header in ({"Authorization": "Bearer s3cre"}, {"Authorization": "s3cret"}, {"x-api-key": "é"}):
        raw = {name: value.encode() for name, value in header.items()}
        assert client.post(PATH, json=CHAT, headers=raw).status_code == 401
    client = client_of(service, key="s3cret", open_metrics=True)
    assert (client.get("/metrics").status_code, client.get("/v1/models").status_code) == (200, 401)


def test_without_a_key_names_of_this_machine_are_taken_and_no_others(client: TestClient) -> None:
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", ""):
        assert client.get("/v1/models", headers={"Host": host}).status_code == 403
    for host in ("localhost", "localhost:1", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST:8000"):
        assert client.get("/v1/models", headers={"Host": host}).status_code == 200


def test_only_named_origins_may_ask(service: Service) -> None:
    client = client_of(service, origins=("http://page.example",))
    wanted = {"Origin": "http://page.example"}
    assert client.get("/v1/models", headers={"Origin": "http://other.example"}).status_code == 403
    assert client.get("/v1/models", headers=wanted).headers["access-control-allow-origin"] == "http://page.example"
    answer = client.options(PATH, headers={**wanted, "Access-Control-Request-Method": "POST"})
    assert (answer.status_code, answer.content) == (204, b"")
    assert "POST" in answer.headers["access-control-allow-methods"]


def test_bodies_and_headers_are_bounded(service: Service) -> None:
    client = client_of(service, most_body=2000, most_values=200)
    send = lambda data, kind="application/json": client.post(PATH, content=data, headers={"Content-Type": kind})  # noqa: E731
    assert (send(b" " * 2001).status_code, send(iter([b" " * 1500] * 2)).status_code) == (413, 413)
    deep = [b'{"a":' * 90 + b"0" + b"}" * 90, b"[" * 1000 + b"]" * 1000]
    for body in (b"[" + b"0," * 300 + b"0]", *deep, b"{", b"\xff", b"[]"):
        assert send(body).status_code == 400
    assert send(json.dumps(CHAT).encode(), "text/plain").status_code == 415
    assert client.get("/health", headers={f"x-{i}": "1" for i in range(120)}).status_code == 431


def test_paths_and_verbs_that_are_not_there(client: TestClient) -> None:
    assert client.get("/nothing").json()["error"]["type"] == "not_found_error"
    answer = client.get(PATH)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/tiny", "/health", "/props", "/", "/metrics"])
def test_trailing_slashes_and_head_are_as_people_expect_them(service: Service, path: str) -> None:
    client = client_of(service)
    found, expected = client.get(f"{path}/"), client.get(path)
    assert (found.status_code, found.headers["content-type"]) == (200, expected.headers["content-type"])
    found = client.head(path)
    assert (found.status_code, found.headers["content-type"]) == (200, expected.headers["content-type"])
    assert client.post(f"{PATH}/", json=CHAT).status_code == 200
    assert (client.head(PATH).status_code, client.head("/nothing/").status_code) == (405, 404)


def test_open_paths_need_no_key_with_head_or_a_slash(service: Service) -> None:
    client = client_of(service, key="k")
    assert [client.request(verb, path).status_code for verb in ("GET", "HEAD") for path in ("/health/", "/")] == [
        200
    ] * 4
    assert [client.request(verb, "/v1/models/").status_code for verb in ("GET", "HEAD")] == [401, 401]
    assert client.post("/health/").status_code == 401


def test_json_that_is_called_a_form_is_read_and_its_origin_checked(client: TestClient) -> None:
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    body = json.dumps(CHAT).encode()
    assert client.post(PATH, content=body, headers=kind).status_code == 200
    assert client.post(PATH, content=body).status_code == 200
    for origin in ("http://other.example", "null"):
        assert client.post(PATH, content=body, headers={**kind, "Origin": origin}).status_code == 403
        assert client.post(PATH, content=body, headers={"Origin": origin}).status_code == 403
    assert client.post(PATH, content=b"model=tiny&prompt=x", headers=kind).status_code == 400
    assert (
        client.post(PATH, content=body, headers={"Content-Type": "multipart/form-data; boundary=x"}).status_code == 415
    )


def test_a_server_that_loads_or_drains_says_so(service: Service) -> None:
    loading = TestClient(application(Service(Settings("tiny"))), base_url=URL)
    assert loading.get("/health").status_code == 503
    assert loading.post(PATH, json=CHAT).json()["error"]["code"] == "loading"
    named = loading.post(PATH, json=CHAT | {"context": "book"}), loading.get("/contexts"), loading.delete("/contexts/a")
    assert [each.status_code for each in named] == [503] * 3
    service.draining = True
    client = client_of(service)
    assert (client.get("/health").json(), client.post(PATH, json=CHAT).status_code) == ({"status": "draining"}, 503)


def test_a_full_queue_is_429(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise BusyError("too many wait")

    monkeypatch.setattr(service.batch, "stream", full)
    answer = client_of(service).post(PATH, json=CHAT)
    assert (answer.status_code, int(answer.headers["retry-after"]) > 0) == (429, True)


def test_an_unexpected_failure_is_one_requests_own(service: Service, monkeypatch: Any, capfd: Any) -> None:
    client = client_of(service)
    with monkeypatch.context() as patch:
        patch.setattr(service.batch, "stream", lambda *_, **__: 1 / 0)
        answer = client.post(PATH, json=CHAT)
    assert (answer.status_code, "ZeroDivisionError" in answer.text) == (500, False)
    assert answer.headers["x-request-id"] in answer.text
    assert client.post(PATH, json=CHAT).status_code == 200
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert any("ZeroDivisionError" in line.get("traceback", "") for line in lines)
    assert [line["status"] for line in lines if "status" in line] == [500, 200]


def test_the_log_has_no_texts(client: TestClient, capfd: pytest.CaptureFixture[str]) -> None:
    client.post(PATH, json={**CHAT, "messages": [{"role": "user", "content": "a secret"}]})
    (line,) = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert (line["endpoint"], line["generated_tokens"], "secret" in str(line)) == (PATH, 1, False)
    assert line["prompt_tokens"] > 0
