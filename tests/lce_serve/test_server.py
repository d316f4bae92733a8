"""The real server: other people's clients, pings, clients that go away or are slow, and the end."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lce_serve.service import Service, Settings
from tests.command import Process
from tests.lce_serve.conftest import serving

HI: Any = [{"role": "user", "content": "the quick fox"}]


@pytest.fixture
def address(service: Service) -> Iterator[str]:
    with serving(service) as address:
        yield address


def until(holds: Callable[[], object], most_s: float = 10) -> None:
    """Wait until something holds, but not without end."""
    deadline = time.monotonic() + most_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


def connected(address: str) -> socket.socket:
    host, port = address.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def test_openais_own_client(address: str) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=20) as client:
        assert [each.id for each in client.models.list()] == ["tiny"]
        how: Any = {"model": "tiny", "messages": HI, "max_tokens": 6}
        whole = client.chat.completions.create(**how)
        with client.chat.completions.create(**how, stream=True) as stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        assert text == whole.choices[0].message.content
        assert client.completions.create(model="tiny", prompt="the fox", max_tokens=3).choices[0].text
        answer = client.responses.create(model="tiny", input="the quick fox", max_output_tokens=6)
        with client.responses.stream(model="tiny", input="the quick fox", max_output_tokens=6) as events:
            kinds = [event.type for event in events]
        assert answer.output_text == text
        assert kinds[-1] in ("response.completed", "response.incomplete")
        with pytest.raises(openai.BadRequestError, match="more than the") as error:
            client.chat.completions.create(model="tiny", messages=HI, max_tokens=9999)
        assert error.value.code == "context_length_exceeded"


def test_anthropics_own_client(address: str) -> None:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=address, api_key="none", max_retries=0, timeout=20) as client:
        how: Any = {"model": "tiny", "max_tokens": 6, "messages": HI}
        whole = client.messages.create(**how)
        with client.messages.stream(**how) as stream:
            text = "".join(stream.text_stream)
            assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens
        assert text == whole.content[0].text
        assert client.messages.count_tokens(model="tiny", messages=HI).input_tokens > 3
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**{**how, "model": "claude"})


def test_streams_at_once_say_what_each_says_alone(address: str, engine: Any) -> None:
    openai = pytest.importorskip("openai")
    texts = [f"the {word} fox" for word in "quick brown lazy other".split()]
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=20) as client:

        def ask(text: str) -> str:
            how: Any = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 40}
            with client.chat.completions.create(**how, stream=True) as stream:
                return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(ask, texts))
    assert found == [engine.chat(text, max_tokens=40).text for text in texts]


class Held:
    """A stream of the batch that reads its prompt for ever."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.cancelled = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def cancel(self) -> None:
        self.cancelled = True
        self._stream.cancel()

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Any:
        import asyncio

        await asyncio.sleep(60)


@pytest.fixture
def held(service: Service, monkeypatch: pytest.MonkeyPatch) -> list[Held]:
    made: list[Held] = []
    stream = service.batch.stream

    def hold(*args: Any, **how: Any) -> Held:
        made.append(Held(stream(*args, **how)))
        return made[-1]

    monkeypatch.setattr(service.batch, "stream", hold)
    return made


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_ends_its_request(
    service: Service, held: list[Held], address: str, stream: bool
) -> None:
    body = json.dumps({"messages": HI, "stream": stream}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with closing(connected(address)) as sock:
        sock.sendall(head.encode() + body)
        if stream:
            found = b""
            while b": prefill " not in found:  # headers came at once, and a ping while nothing else is said
                found += sock.recv(1 << 16)
            assert found.startswith(b"HTTP/1.1 200")
        until(lambda: held)
        assert not held[0].cancelled
    until(lambda: held[0].cancelled)
    until(lambda: not service.active)


def test_a_head_that_never_ends_is_dropped(service: Service) -> None:
    service.settings = replace(service.settings, head_s=0.3)
    with serving(service) as address, closing(connected(address)) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localh")
        began = time.monotonic()
        assert sock.recv(100) == b""
        assert time.monotonic() - began < 5


def test_a_body_that_never_ends_is_refused(service: Service) -> None:
    service.settings = replace(service.settings, body_s=0.3)
    with serving(service) as address, closing(connected(address)) as sock:
        sock.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n")
        sock.sendall(b"Content-Length: 100\r\n\r\n{")
        assert b" 408 " in sock.recv(1 << 16).partition(b"\r\n")[0]


def test_connections_are_bounded(service: Service) -> None:
    service.settings = replace(service.settings, most_connections=2)
    with serving(service) as address:
        kept = [connected(address) for _ in range(2)]
        until(lambda: _answers(address) is False)
        for sock in kept:
            sock.close()
        until(lambda: _answers(address))


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def test_what_is_not_http_is_refused(address: str) -> None:
    with closing(connected(address)) as sock:
        sock.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert b" 400 " in sock.recv(1 << 16).partition(b"\r\n")[0]
    assert _answers(address)


@pytest.mark.parametrize(
    ("sig", "code"), [pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow), (signal.SIGINT, 130)]
)
def test_a_signal_lets_streams_end(chat_model: Path, sig: int, code: int) -> None:
    command = [sys.executable, "-m", "lce.cli", "serve", "-m", str(chat_model), "--port", "0", "--threads", "1"]
    start = "import sys; from lce.cli import main; sys.argv[0] = 'lce'; main()"
    command[1:3] = ["-c", start]
    own = {**os.environ, "LCE_API_KEY": "k"}
    process = Process(command, env=own)
    try:
        lines = [process.line("stderr"), process.line("stderr")]
        assert "is loaded" in lines[1], lines
        address = lines[0].split()[-1]
        body = json.dumps({"messages": HI, "stream": True, "max_tokens": 1500, "logit_bias": {"77": 100}}).encode()
        head = {"Content-Type": "application/json", "Authorization": "Bearer k"}
        with urllib.request.urlopen(
            urllib.request.Request(f"{address}/v1/chat/completions", body, head), timeout=30
        ) as answer:
            assert b"lce" in answer.readline(1 << 16)
            process.send_signal(sig)
            text = answer.read()
        assert text.rstrip().endswith(b"data: [DONE]")
        assert process.wait(20) == code
    finally:
        process.kill()
        process.communicate()


def run(*args: str) -> subprocess.CompletedProcess[str]:
    start = "import sys; from lce.cli import main; sys.argv[0] = 'lce'; main()"
    own = {name: value for name, value in os.environ.items() if name != "LCE_API_KEY"}
    command = [sys.executable, "-c", start, "serve", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=own)


@pytest.mark.slow
def test_an_open_host_needs_a_key() -> None:
    found = run("-m", "demo", "--host", "0.0.0.0")
    assert found.returncode == 2
    assert "--api-key" in found.stderr
    assert found.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path) -> None:
    found = run("-m", str(tmp_path / "nothing"), "--port", "0")
    assert found.returncode == 3, found.stderr


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import lce
    from lce_serve import serving as command

    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(lce.UsageError, match=r"pip install 'lce\[serve\]'"):
        command.serve(
            "demo",
            {},
            {},
            None,
            host="",
            port=0,
            api_key=None,
            cors=(),
            lanes=1,
            queue=1,
            cache_dir=None,
            cache_budget="1GiB",
            context=(),
            ping=1,
            name=None,
            drain=1,
            replicas=1,
            open_metrics=False,
        )  # type: ignore[arg-type]


def test_the_command_line_imports_neither_torch_nor_starlette() -> None:
    code = "import sys, lce.cli, lce_serve.serving; print({'torch', 'starlette', 'uvicorn'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).strip() == "set()"


def test_settings_are_plain() -> None:
    assert Settings("m").key is None
