"""The page on loopback: what it serves, and hostile requests, which get 4xx in one line and harm nothing."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from lce.errors import UsageError
from lce_lab.study import live_server as servers
from lce_lab.study.live import Live
from lce_lab.study.live_server import LiveServer
from tests.command import until

Answer = tuple[int, dict[str, str], bytes]  # status, headers, content


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[LiveServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers._Handler, "timeout", 0.4)
        patch.setattr(LiveServer, "request_queue_size", 64)  # the kernel drops what is beyond, and tries a second later
        made = LiveServer(Live(tiny_model, 200), prompt="<b>")
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield made
        made.shutdown()
        made.close()
        thread.join(60)


def exchange(server: LiveServer, raw: bytes) -> bytes:
    """All that the server answers to these bytes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20.0) as connection:
        answer = b""
        with suppress(BrokenPipeError, ConnectionResetError):  # it has answered already
            connection.sendall(raw)
        with suppress(ConnectionResetError):
            while part := connection.recv(1 << 16):
                answer += part
        return answer


def ask(server: LiveServer, path: str = "", body: Any = None, **headers: str | None) -> Answer:
    """A request as the page makes it, but for `headers` that are changed, or left out with None."""
    sent: dict[str, str | None] = {"Host": f"127.0.0.1:{server.port}"}
    data = b""
    if body is not None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent |= {"Origin": f"http://127.0.0.1:{server.port}", "Content-Type": "application/json"}
        sent["Content-Length"] = str(len(data))
    sent |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{name}: {value}" for name, value in sent.items() if value is not None]
    target = path if path.startswith(("/", "http")) else f"/{server.token}/{path}"
    head = "\r\n".join([f"{'GET' if body is None else 'POST'} {target} HTTP/1.1", *lines, "", ""])
    return parsed(exchange(server, head.encode("latin-1") + data))


def parsed(answer: bytes) -> Answer:
    head, _, content = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    return int(status.split()[1]), dict(line.split(": ", 1) for line in lines), content


def assert_refused(answer: Answer, status: int) -> None:
    """4xx, and one line of JSON with an error."""
    got, headers, content = answer
    assert got == status, content
    assert (headers["Content-Type"], content.count(b"\n")) == ("application/json", 1)
    assert set(json.loads(content)) == {"error"}


def test_the_page_and_its_headers(server: LiveServer) -> None:
    status, headers, content = ask(server)
    html = content.decode()
    (nonce,) = {*re.findall(r'nonce="([\w-]+)"', html)}
    live = json.loads(html.partition('id="lce-live">')[2].partition("</script>")[0])
    assert (status, live) == (200, {"base": f"/{server.token}/", "prompt": "<b>"})
    policy = headers["Content-Security-Policy"]
    assert policy.startswith(f"default-src 'none'; script-src 'nonce-{nonce}' 'self'; ")
    assert "unsafe" not in policy
    assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")
    assert not any(name.startswith("Access-Control") for name in headers)
    assert nonce not in ask(server)[2].decode(), "a nonce is used once"
    assert len(server.token) >= 22
    address = f"http://127.0.0.1:{server.port}/{server.token}/"
    assert (server.address, server.server_address[0]) == (address, "127.0.0.1")


def test_a_run_over_http(server: LiveServer) -> None:
    body = {"prompt": "the dogs and the moon", "method": "longheads", "knobs": {"chunk_size": 4}, "max_tokens": 1}
    status, _, content = ask(server, "run", body)
    assert status == 202
    number = json.loads(content)["id"]
    until(lambda: json.loads(ask(server, "state")[2])["state"] != "running")
    state = json.loads(ask(server, "state")[2])
    assert (state["state"], state["id"]) == ("done", number)
    source = state["recording"]["runs"][0]["segments"][0]["src"]
    status, headers, content = ask(server, source)
    assert (status, headers["Content-Type"]) == (200, "text/javascript; charset=utf-8")
    assert content.startswith(b"lceSegment(0,0,")
    assert "recording" not in json.loads(ask(server, f"state?known={number}")[2])
    for wrong in ("/7-0", "/0-999"):
        assert_refused(ask(server, source.replace("/0-0", wrong)), 404)
    assert json.loads(ask(server, "about")[2])["max_tokens"] == 256
    assert json.loads(ask(server, "cancel", {})[2]) == {"id": number}


def test_wrong_addresses(server: LiveServer) -> None:
    token = server.token
    before = [f"{start}{token}/" for start in ("//evil/", "//", "http://evil/", "/%2e%2e/", "/../")]
    for path in ("/", "/é/", f"/{token}", f"/{token[:-1]}/", f"/{token}x/", f"/{token.swapcase()}/", *before):
        assert_refused(ask(server, path), 403)
    for path in "../.. %2e%2e/etc/passwd web/page.js data/../0-0.js data/00/0-0.js state/ run/x /".split():
        assert_refused(ask(server, f"/{token}/{path}"), 404)
    assert_refused(ask(server, "run"), 405)
    assert_refused(ask(server, "state", {}), 405)
    assert_refused(ask(server, "nothing", {}), 404)


def test_other_sites_can_do_nothing(server: LiveServer) -> None:
    port = server.port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port}.evil", "", None):
        assert_refused(ask(server, Host=host), 403)
    assert ask(server, Host=f"localhost:{port}")[0] == 200
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{port}", None):
        assert_refused(ask(server, "cancel", {}, Origin=origin), 403)
    for kind in ("text/plain", "application/x-www-form-urlencoded", None):
        assert_refused(ask(server, "cancel", {}, Content_Type=kind), 415)


def test_bodies(server: LiveServer) -> None:
    values = b"[" + b"1," * (1 << 20) + b"1]"
    for raw in (b"", b"{", b"\xff", b"[" * 100_000, b'{"prompt": "a", "prompt": "b"}', values):
        assert_refused(ask(server, "run", raw), 400)
    for body in ([], {"prompt": "x", "method": "longheads", "knobs": {"chunk_size": 0}}):
        assert_refused(ask(server, "run", body), 400)
    assert_refused(ask(server, "run", b"{}", Content_Length=str((4 << 20) + 1)), 413)
    assert_refused(ask(server, "run", b"{}", Content_Length="9" * 18), 413)
    for length in ("-1", "+2", "2, 2", "two", "9" * 30, None):
        assert_refused(ask(server, "run", b"{}", Content_Length=length), 411)
    assert_refused(ask(server, "run", b"2\r\n{}\r\n0\r\n\r\n", Transfer_Encoding="chunked"), 411)
    assert json.loads(ask(server, "state?known=1")[2])["state"] in ("idle", "done")


def test_slow_and_broken_requests(server: LiveServer) -> None:
    token, host = server.token, f"Host: 127.0.0.1:{server.port}\r\n"
    ours = f"{host}Origin: http://127.0.0.1:{server.port}\r\nContent-Type: application/json\r\n"
    slow = f"POST /{token}/run HTTP/1.1\r\n{ours}Content-Length: 100\r\n\r\n{{"
    assert_refused(parsed(exchange(server, slow.encode())), 408)
    assert exchange(server, f"GET /{token}/ HTTP/1.1\r\nX: a".encode()) == b"", "a head that does not end is cut off"
    assert_refused(parsed(exchange(server, f"GET /{token}/ HTTP/9.9\r\n{host}\r\n".encode())), 400)
    for method in ("PUT", "DELETE", "OPTIONS", "HEAD", "TRACE", "CONNECT", "get"):
        assert_refused(parsed(exchange(server, f"{method} /{token}/ HTTP/1.1\r\n{host}\r\n".encode())), 405)
    assert_refused(parsed(exchange(server, b"GET / \x00 x y\r\n\r\n")), 400)
    long = exchange(server, b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n")
    assert not long or parsed(long)[0] == 414
    many = "".join(f"X-{i}: 1\r\n" for i in range(150))
    assert_refused(parsed(exchange(server, f"GET /{token}/ HTTP/1.1\r\n{host}{many}\r\n".encode())), 431)
    assert ask(server)[0] == 200, "nothing of this did harm"


def test_connections_are_limited_in_number(server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers._Handler, "timeout", 30.0)
    request = f"GET /{server.token}/state HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode()
    for _ in range(2):
        with ExitStack() as stack:
            for _ in range(servers.MOST_CONNECTIONS):
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20.0))
            assert exchange(server, request) == b"", "closed at once"
        assert any(exchange(server, request) or time.sleep(0.05) for _ in range(200)), "the closed ones count no more"


def test_a_port_that_is_taken(server: LiveServer, tiny_model: Path) -> None:
    with pytest.raises(UsageError, match=f"port {server.port} cannot be used"):
        LiveServer(server.live, server.port)
    with pytest.raises(UsageError, match="port 70000 cannot be used"):
        LiveServer(server.live, 70000)
