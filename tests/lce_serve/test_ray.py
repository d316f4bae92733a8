"""Replicas on a real Ray: two engines of a tiny model behind one address. Starting Ray takes time, so all are slow."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil
import pytest
from starlette.testclient import TestClient

import lce
from lce_serve.app import application
from lce_serve.service import Service, Settings
from tests.command import Process, until
from tests.lce_serve.conftest import URL, events, free_ports, is_healthy

pytest.importorskip("ray.serve", reason="lce[ray] is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

ROOT = Path(__file__).parents[2]
COMPLETE = "/v1/completions"
START_S = 180.0  # Ray and two replicas, on a machine that does other things too


class Server:
    """`lce serve --replicas 2` in a process of its own, which is loaded."""

    def __init__(self, process: Process, address: str) -> None:
        self.process, self.client = process, httpx2.Client(base_url=address, timeout=100)

    def stream(self, body: Any, session: str = "") -> httpx2.Response:
        """Return a stream that has begun; close it."""
        head = {"x-session-id": session}
        request = self.client.build_request("POST", COMPLETE, json=body | {"stream": True}, headers=head)
        return self.client.send(request, stream=True)

    def post(self, body: Any, session: str = "", path: str = COMPLETE) -> httpx2.Response:
        return self.client.post(path, json=body, headers={"x-session-id": session})

    def ask(self, body: Any, session: str = "", path: str = COMPLETE) -> tuple[Any, str]:
        """Return the answer to a request, and the replica that gave it."""
        answer = self.post(body, session, path).raise_for_status()
        return answer.json(), answer.headers["x-lce-replica"]

    def replicas(self) -> list[psutil.Process]:
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [each for each in found if "ServeReplica:default:Replica" in _title(each)]

    def running(self) -> list[float]:
        """Return how many requests each replica runs that tells its figures."""
        lines = self.client.get("/metrics").text.splitlines()
        return [float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{")]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@contextmanager
def started(model: Path, *options: str) -> Iterator[tuple[Process, list[str]]]:
    """Start `lce serve --replicas 2`, and end it. Gives the process, and what it has said on stderr so far."""
    line = [sys.executable, "-m", "lce", "serve", "-m", model, "--port", "0", "--replicas", "2", *options]
    own = {name: value for name, value in os.environ.items() if name != "LCE_API_KEY"} | {"OMP_NUM_THREADS": "1"}
    process, said = Process(line, env=own), list[str]()
    reading = threading.Thread(target=lambda: said.extend(iter(process.stderr.readline, "")), daemon=True)
    reading.start()
    try:
        yield process, said
    finally:
        for _ in range(2):  # the second one ends it at once
            process.send_signal(signal.SIGTERM)
        process.wait(60)
        reading.join(10)
        process.stdout.close()
        process.stderr.close()


@contextmanager
def serving(model: Path, *options: str) -> Iterator[Server]:
    """Start `lce serve --replicas 2`, and wait until it has loaded the model."""
    with started(model, *options) as (process, said):
        until(lambda: process.poll() is not None or any("is loaded" in line for line in said), START_S)
        assert process.poll() is None, said
        server = Server(process, next(line for line in said if "serving" in line).split()[-1])
        with server.client:
            yield server


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def server(chat_model: Path, cache: Path) -> Iterator[Server]:
    with serving(chat_model, "--cache-dir", str(cache)) as server:
        yield server


@pytest.fixture(scope="module")
def single(chat_model: Path) -> Iterator[TestClient]:
    """The server of one engine, whose answers are the right ones."""
    with lce.load(chat_model, threads=1).batch() as batch:
        yield TestClient(application(Service(Settings(chat_model.name), batch)), base_url=URL)


def text_of(number: object) -> str:
    """Return a text of several blocks, as affinity counts them. Texts of two numbers differ from the beginning."""
    return f"Number {number} was in the beginning, and then it came again; " * 12


def completion(text: str, n: int = 12, **more: Any) -> dict[str, Any]:
    return {"prompt": text, "max_tokens": n, "temperature": 0, **more}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETE, completion("a word", logprobs=2)),
        (COMPLETE, completion("another", temperature=1, seed=7, n=2)),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "seed": 1}),
        ("/tokenize", {"content": "some text"}),
    ],
)
def test_answers_are_those_of_the_single_server(server: Server, single: TestClient, path: str, body: Any) -> None:
    found, expected = server.ask(body, path=path)[0], single.post(path, json=body).json()
    assert (found.get("choices"), found.get("tokens")) == (expected.get("choices"), expected.get("tokens"))


def test_refusals_are_those_of_the_single_server(server: Server, single: TestClient) -> None:
    for body in ({"prompt": 3}, completion("x", model="other"), completion("x", temperature=-1)):
        found, expected = server.post(body), single.post(COMPLETE, json=body)
        assert (found.status_code, found.json()) == (expected.status_code, expected.json())
        assert found.is_error
    assert server.post({"name": "x", "prompt": "y"}, path="/contexts").status_code == 501


def test_sessions_stay_where_their_contexts_are(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    replicas: dict[int, set[str]] = {}
    hits = turns = 0
    for number in range(8):
        text = text_of(number)
        for turn in range(5):
            found, replica = server.ask(completion(text), f"session {number}")
            replicas.setdefault(number, set()).add(replica)
            text += found["choices"][0]["text"] + f" and turn {turn} said more;"
            hits += turn > 0 and found["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
            turns += turn > 0
    with capsys.disabled():
        print(f"\naffinity hits of sessions: {hits} of {turns}")
    assert hits >= 0.9 * turns
    assert len(set.union(*replicas.values())) == 2
    assert all(len(found) == 1 for found in replicas.values())


ENDLESS = completion("endless", 3000, logit_bias={"77": 100})


def begun(stream: httpx2.Response) -> Iterator[str]:
    """Return the lines of a stream behind the first event."""
    lines = stream.iter_lines()
    assert any(line.startswith("data: ") for line in lines)
    return lines


def _is_kept(path: Path, ids: bytes) -> bool:
    return path.with_suffix(".lce").exists() and path.read_bytes().startswith(ids)


def two_sessions(server: Server) -> tuple[str, str]:
    """Return sessions of different replicas."""
    one, other = {server.ask(completion("x", 1), f"s{n}")[1]: f"s{n}" for n in range(24)}.values()
    return one, other


def test_a_replica_finds_the_contexts_of_another_on_disk(server: Server, cache: Path) -> None:
    one, other = two_sessions(server)
    text = text_of("of the disk")
    _, first = server.ask(completion(text), one)
    ids = np.array(server.ask({"content": text}, path="/tokenize")[0]["tokens"], np.int32).tobytes()
    until(lambda: any(_is_kept(path, ids) for path in cache.rglob("*.ids")))
    found, second = server.ask(completion(text), other)
    assert first != second
    assert found["usage"]["prompt_tokens_details"]["cached_tokens"] > 100


def test_a_killed_replica_loses_no_whole_answer(server: Server, single: TestClient) -> None:
    until(lambda: len(server.running()) == 2, START_S)
    bodies = [completion(f"question {number}: " + text_of(number), 40) for number in range(24)]
    expected = [single.post(COMPLETE, json=body).json()["choices"] for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(server.ask, body, f"t{number}") for number, body in enumerate(bodies)]
        asked[2].result(100)
        server.replicas()[0].kill()
        found = [each.result(100) for each in asked]
    assert [answer["choices"] for answer, _ in found] == expected
    until(lambda: len(server.running()) == 2, START_S)


def test_a_stream_whose_replica_is_killed_ends_with_an_error(server: Server) -> None:
    until(lambda: len(server.running()) == 2, START_S)
    streams = [server.stream(ENDLESS, session) for session in two_sessions(server)]
    lines = [begun(stream) for stream in streams]
    server.replicas()[0].kill()
    ends = [events("\n".join(each))[-1] for each in lines]
    assert sorted(end == "[DONE]" for end in ends) == [False, True], ends
    error = json.loads(next(end for end in ends if end != "[DONE]"))["error"]
    assert error["code"] == "replica_lost"
    until(lambda: len(server.running()) == 2, START_S)


def test_a_client_that_goes_away_ends_its_request(server: Server) -> None:
    until(lambda: len(server.running()) == 2, START_S)
    stream = server.stream(ENDLESS)
    begun(stream)
    stream.close()
    until(lambda: not sum(server.running()), 20)


def test_the_example_of_a_cluster_answers_behind_rays_proxy(chat_model: Path, single: Any, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    changes = {"smollm2": chat_model, "self_extend": "full", "/shared/lce": tmp_path / "kept", "8000": port}
    changes |= {"threads: 4": "threads: 1", "max_replicas: 8": "max_replicas: 2"}
    text = (ROOT / "examples" / "routing" / "serve.yaml").read_text()
    for before, after in changes.items():
        assert before in text
        text = text.replace(before, str(after))
    (tmp_path / "serve.yaml").write_text(text)
    # Ctrl-C works there even if this process ignores it.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "from ray.serve.scripts import cli; cli()"
    own = {name: value for name, value in os.environ.items() if name != "LCE_API_KEY"} | {"RAY_ADDRESS": "local"}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": own | {"RAY_USAGE_STATS_ENABLED": "0"}}
    with Process([sys.executable, "-c", code, "run", tmp_path / "serve.yaml"], **quiet) as process:
        try:
            server = Server(process, f"http://127.0.0.1:{port}")
            until(lambda: is_healthy(f"http://127.0.0.1:{port}"), START_S)
            with server.client:
                found, replica = server.ask(completion("behind a proxy"))
                answer = server.post(completion("behind a proxy", stream=True))
            assert found["choices"] == single.post(COMPLETE, json=completion("behind a proxy")).json()["choices"]
            assert answer.headers["x-lce-replica"] == replica
            *said, done = events(answer.text)
            assert "".join(json.loads(each)["choices"][0]["text"] for each in said) == found["choices"][0]["text"]
            assert done == "[DONE]"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


def test_a_damaged_model_is_one_line(chat_model: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(chat_model, tmp_path / "broken")
    os.truncate(broken / "model.safetensors", (broken / "model.safetensors").stat().st_size - 1000)
    (tmp_path / "file").touch()
    for model, options, code, line in ((broken, (), 3, 0), (chat_model, ("--cache-dir", str(tmp_path / "file")), 2, 1)):
        with started(model, *options) as (process, said):
            assert process.wait(START_S) == code
            until(lambda: len(said) == line + 1)  # noqa: B023  the model's fault is said before Ray starts
        assert said[line].startswith("lce: error: ")
        assert ("cut short", "cache_dir is")[line] in said[line]


def test_a_killed_server_leaves_no_process(chat_model: Path) -> None:
    with serving(chat_model) as server:
        ray = psutil.Process(server.process.pid).children(recursive=True)
        server.process.kill()
        until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in ray), 10)


def test_a_signal_lets_streams_end_and_ends_ray(chat_model: Path, tmp_path: Path) -> None:
    with serving(chat_model, "--cache-dir", str(tmp_path)) as server:
        ray = psutil.Process(server.process.pid).children(recursive=True)
        lines = begun(server.stream(completion(text_of("the last"), 600, logit_bias={"77": 100})))
        server.process.send_signal(signal.SIGTERM)
        assert (events("\n".join(lines))[-1], server.process.wait(60)) == ("[DONE]", 0)
    assert [*tmp_path.rglob("*.lce")], "a stopped replica saves its contexts"
    until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in ray), 20)
