"""The real server: clients that go away or are slow, what is not HTTP, the command, and the end."""

import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from lce_serve.service import Service
from tests.command import Process, assert_error, run, until
from tests.lce_serve.conftest import is_healthy, serving, with_options

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"
JSON = b"Content-Type: application/json\r\n"
HI: Any = [{"role": "user", "content": "the quick fox"}]


def connected(address: str) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_request(service: Service, address: str, stream: bool) -> None:
    gate = threading.Event()
    made = with_options(service, progress=lambda *_: gate.wait(20))
    body = json.dumps({"messages": HI, "stream": stream}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n" + JSON + b"Content-Length: %d\r\n\r\n"
    with closing(connected(address)) as sock:
        sock.sendall(head % len(body) + body)
        if stream:
            found = b""
            while b": prefill " not in found:  # headers came at once, and a ping while nothing else is said
                found += sock.recv(1 << 16)
            assert found.startswith(b"HTTP/1.1 200")
        until(lambda: made)
        assert service.active
    until(lambda: not service.active, 10)
    gate.set()
    until(lambda: made[0].result.finish_reason == "cancelled", 10)


@pytest.mark.parametrize(
    ("limit", "said", "answer"),
    [
        ("head_s", b"GET /health HTTP/1.1\r\nHost: localh", b""),
        ("body_s", b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\n" + JSON + b"Content-Length: 99\r\n\r\n{", b" 408 "),
    ],
)
def test_what_never_ends_is_dropped(service: Service, limit: str, said: bytes, answer: bytes) -> None:
    service.settings = replace(service.settings, **{limit: 0.3})  # type: ignore[arg-type]
    with serving(service) as address, closing(connected(address)) as sock:
        sock.sendall(said)
        began, found = time.monotonic(), sock.recv(1 << 16)
        assert answer in found.partition(b"\r\n")[0]
        assert bool(found) == bool(answer)
        assert time.monotonic() - began < 5


def test_connections_are_bounded(service: Service) -> None:
    service.settings = replace(service.settings, most_connections=2)
    with serving(service) as address:
        kept = [connected(address) for _ in range(2)]
        asked = lambda: httpx2.get(f"{address}/v1/models")  # noqa: E731
        until(lambda: asked().status_code == 503)
        assert (asked().headers["connection"], asked().json()["error"]["code"]) == ("close", "crowded")
        assert is_healthy(address)
        for sock in kept:
            sock.close()
        until(lambda: asked().status_code == 200)


def test_what_is_not_http_is_refused(address: str) -> None:
    with closing(connected(address)) as sock:
        sock.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert b" 400 " in sock.recv(1 << 16).partition(b"\r\n")[0]
    assert is_healthy(address)


@pytest.mark.parametrize(
    ("sig", "code"), [pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow), (signal.SIGINT, 130)]
)
def test_a_signal_lets_streams_end_and_says_what_is_saved(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sig: int, code: int
) -> None:
    monkeypatch.setenv("LCE_API_KEY", "k")
    command = [sys.executable, "-m", "lce", "serve", "-m", chat_model, "--port", "0", "--threads", "1"]
    with Process([*command, "--cache-dir", tmp_path]) as process:
        lines = [process.line("stderr") for _ in range(3)]
        assert f"and 10.0 GiB of disk in {tmp_path}; --cache-memory or --cache-budget" in lines[1], lines
        assert "is loaded" in lines[2], lines
        url = f"{lines[0].split()[-1]}/v1/chat/completions"
        body = {"messages": HI, "stream": True, "max_tokens": 600, "logit_bias": {"77": 100}}
        key = {"Authorization": "Bearer k"}
        with httpx2.stream("POST", url, json=body, headers=key, timeout=30) as answer:
            lines = answer.iter_lines()
            assert "lce" in next(lines)
            process.send_signal(sig)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        request, *rest = iter(lambda: process.line("stderr"), "")
        assert process.wait(20) == code
        (file,) = tmp_path.rglob("*.lce")
        was_quick = file.stat().st_mtime - json.loads(request)["time"] < 0.5  # else it was saved as an idle one
        assert not was_quick or any("saved now: 1" in line for line in rest)


def test_what_ends_the_command_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LCE_API_KEY", raising=False)
    assert_error(run("serve", "-m", "demo", "--host", "0.0.0.0"), 2, "--api-key")
    found = run("serve", "-m", tmp_path / "nothing", "--port", "0")
    assert (found.exit_code, found.stdout) == (3, ""), found.stderr
    assert_error(run("serve", "-m", "demo", "--port", "70000"), 2, "70000")
    found = run("serve", "-m", tmp_path / "nothing", "--host", "[::1]", "--port", "0")  # IPv6 may be switched off
    assert "--api-key" not in found.stderr
    assert "does not exist" in found.stderr or "of ::1 cannot" in found.stderr
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert_error(run("serve", "-m", "demo"), 2, "pip install -e '.[serve]'")


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_no_answer_is_lost_or_another_ones(chat_model: Path) -> None:
    """Many clients for a while, each answer beside its own, asked alone. `LCE_SOAK_MINUTES=30` makes it long."""
    minutes = float(os.environ.get("LCE_SOAK_MINUTES", "1"))
    command = [sys.executable, SOAK, "-m", chat_model, "--minutes", str(minutes), "--check", str(minutes / 8)]
    command += ["--cache-memory", os.environ.get("LCE_SOAK_MEMORY", "16MiB")]
    with Process(command) as process:
        out, err = process.communicate(timeout=120 * minutes + 900)
    assert process.returncode == 0, out + err
    assert "0 requests did not end; 0 answers of 500 or more" in out
    assert "memory is level" in out
    n_checked = int(out.partition(" answers were compared")[0].splitlines()[-1].split()[0])
    assert n_checked >= 10
