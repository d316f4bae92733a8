"""A server under pressure: few descriptors and thousands of prompts, memory that is short, and many clients at once."""

import os
import random
import resource
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

import lce
from lce.engine import scheduler
from lce_serve.service import Service
from tests.command import Process, begun, until
from tests.lce_serve.conftest import serving

FILES, CLIENTS = 256, 8


def prompt(i: int, part: int) -> list[int]:
    """A text like no other's; its second part begins with the first one."""
    chance = random.Random(i)
    return [0, i % 250 + 2, i // 250 + 2, *(chance.randrange(2, 300) for _ in range(20 + 8 * part))]


def pairs(url: str, numbers: range) -> list[tuple[int, int]]:
    """Ask texts, and then the same ones grown. Return the status and the cached tokens of each grown one."""
    found = []
    with httpx2.Client(base_url=url, timeout=60) as client:
        for i in numbers:
            for part in (0, 1):
                body = {"prompt": prompt(i, part), "max_tokens": 2, "logit_bias": {"300": 100}}
                answer = client.post("/v1/completions", json=body)
                if answer.status_code != 200:
                    return [*found, (answer.status_code, 0)]
            found.append((200, answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]))
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("n", "memory"), [(2500, 8 << 30), (600, 4 << 20)])
def test_contexts_are_kept_with_few_descriptors(n: int, memory: int, chat_model: Path) -> None:
    """Each second request grows on the one before. As many contexts are kept as there is memory for: once, all."""
    limits = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))  # noqa: E731
    line = [sys.executable, "-m", "lce", "serve", "-m", chat_model, "--port", "0", "--threads", "1"]
    with Process([*line, "--cache-memory", str(memory)], preexec_fn=limits, stdout=-3) as process:
        lines = [process.line("stderr") for _ in range(2)]
        while "is loaded" not in lines[-1]:
            lines.append(process.line("stderr"))
        url = next(each for each in lines if "http://" in each).split()[-1]
        threading.Thread(target=process.stderr.read, daemon=True).start()  # type: ignore[union-attr]
        began = time.monotonic()
        with ThreadPoolExecutor(CLIENTS) as pool:
            parts = [range(first, n // 2, CLIENTS) for first in range(CLIENTS)]
            found = [each for part in pool.map(lambda numbers: pairs(url, numbers), parts) for each in part]
        seconds = time.monotonic() - began
        lines = httpx2.get(f"{url}/metrics").text.splitlines()
        figures = {name: float(x) for name, x in (each.rsplit(" ", 1) for each in lines if each.startswith("lce:"))}
        n_open = len(os.listdir(f"/proc/{process.pid}/fd"))
        print(f"{n:,} requests in {seconds:.0f} s; {n_open} descriptors; {figures}")
        process.terminate()
        assert process.wait() == 0
    assert len(found) == n // 2
    assert {status for status, _ in found} == {200}
    assert all(n_cached >= 23 for _, n_cached in found), Counter(found)
    if memory >= 1 << 30:
        assert figures["lce:contexts"] == n
    else:
        assert 0.9 * memory < figures["lce:kept_bytes"] <= memory
    assert n_open < 64 + CLIENTS


@pytest.mark.slow
def test_a_large_request_is_not_starved(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside an answer, what never fits is refused at once, and small ones are answered before one that waits.

    Of these at most `MOST_OVERTAKING`: then memory that becomes free is the large one's.
    """
    is_free, new_context, began = threading.Event(), scheduler.new_context, list[int]()

    def limited(setup: lce.Setup, length: Any) -> lce.Context:
        if length > 3000 and not is_free.is_set():
            raise lce.CapacityError("no memory is free")
        began.append(length)
        return new_context(setup, length)

    monkeypatch.setattr(scheduler, "new_context", limited)
    with serving(service) as address:

        def ask(n_tokens: int, max_tokens: int, seed: int) -> httpx2.Response:
            ids = [seed % 250 + 2, seed // 250 + 2, *[7] * (n_tokens - 2)]
            body = {"prompt": ids, "max_tokens": max_tokens, "logit_bias": {"300": 100}}
            return httpx2.post(f"{address}/v1/completions", json=body, timeout=60)

        running = begun(lambda: ask(20, 2500, 1))
        until(lambda: service.active)
        at = time.monotonic()
        assert ask(9000, 2, 2).status_code == 400  # longer than the window
        assert ask(20, 2, 3).status_code == 200
        assert time.monotonic() - at < 5
        large = begun(lambda: ask(3500, 2, 4))
        until(lambda: service.batch.gauges()["waiting"])
        before = len(began)
        stop = threading.Event()

        def stream(first: int) -> list[int]:
            statuses = []
            while not stop.is_set():
                statuses.append(ask(20, 2, first + 10 * len(statuses)).status_code)
            return statuses

        streams = [begun(partial(stream, first)) for first in (10, 11, 12)]
        until(lambda: len(began) >= before + scheduler.MOST_OVERTAKING)
        time.sleep(1)
        assert len(began) == before + scheduler.MOST_OVERTAKING
        is_free.set()
        assert large.result(60).status_code == 200
        assert began.index(3502) == before + scheduler.MOST_OVERTAKING
        stop.set()
        assert {status for each in streams for status in each.result(60)} == {200}
        assert running.result(60).status_code == 200
