"""A tiny chat model behind the server: in this process by Starlette's client, or by uvicorn on a port."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette", reason="lce[serve] is not installed")

import httpx2
from starlette.testclient import TestClient

import lce
from lce_serve import running
from lce_serve.app import application
from lce_serve.service import Service, Settings
from tests.checkpoints import save_chat

TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
URL = "http://127.0.0.1:8000"


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model that chats; its window is long enough for the tests' prompts."""
    return save_chat(tmp_path_factory.mktemp("chat"), TEMPLATE, max_position_embeddings=4096)


@pytest.fixture(scope="session")
def engine(chat_model: Path) -> lce.Engine:
    return lce.load(chat_model, threads=1)


@pytest.fixture
def batch(engine: lce.Engine) -> Iterator[Any]:
    with engine.batch(max_lanes=4, max_waiting=8) as batch:
        yield batch


@pytest.fixture
def service(batch: Any) -> Service:
    return Service(Settings("tiny", ping_s=0.2), batch)


@pytest.fixture
def client(service: Service) -> TestClient:
    return TestClient(application(service), base_url=URL, raise_server_exceptions=False)


@pytest.fixture
def address(service: Service) -> Iterator[str]:
    with serving(service) as address:
        yield address


@contextmanager
def serving(service: Service) -> Iterator[str]:
    """A real server on a free port, in a thread; gives its address."""
    sock = running.bound("127.0.0.1", 0)
    server = running.Server(service)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        yield running.address(sock)
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)
        sock.close()
        assert not thread.is_alive()


def free_ports(n: int) -> list[int]:
    with ExitStack() as open_socks:
        socks = [open_socks.enter_context(running.bound("127.0.0.1", 0)) for _ in range(n)]
        return [sock.getsockname()[1] for sock in socks]


def is_healthy(address: str) -> bool:
    try:
        return bool(httpx2.get(f"{address}/health").json()["status"] == "ok")
    except (httpx2.HTTPError, ValueError):
        return False


def with_options(service: Service, **options: Any) -> list[Any]:
    """Have every answer made with options for which no request can ask. Returns the streams as they begin."""
    stream, made = service.batch.stream, list[Any]()

    def begin(*given: Any, **how: Any) -> Any:
        made.append(stream(*given, **how, **options))
        return made[-1]

    service.batch.stream = begin
    return made


def events(text: str) -> list[str]:
    """The data of the events in a stream."""
    return [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
