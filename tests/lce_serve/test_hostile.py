"""Thousands of hostile requests: each is refused or its connection closed, and nobody else notices."""

import http.client
import json
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from lce_serve.service import Service
from tests.command import until
from tests.lce_serve.conftest import serving

POSTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize")
HEAD = "{} {} HTTP/1.1\r\nHost: localhost\r\n"
PATHS = [
    ("POST", "/" + "a" * 80_000),
    ("GET", "/%00%ff/../../etc/passwd"),
    ("TRACE", "/health"),
    ("DELETE", "/contexts/..%2f.."),
    ("GET", "http://evil.example/"),
]
GOOD = {"model": "tiny", "messages": [{"role": "user", "content": "the quick fox"}], "temperature": 0, "max_tokens": 6}


def post(body: bytes, path: str, *headers: str, length: int | None = None) -> bytes:
    lines = [f"Content-Length: {len(body) if length is None else length}", "Content-Type: application/json", *headers]
    return (HEAD.format("POST", path) + "\r\n".join(lines) + "\r\n\r\n").encode() + body


def broken_json(chance: random.Random) -> bytes:
    good = json.dumps(GOOD).encode()
    cut = chance.randrange(len(good) - 1)
    found: bytes = chance.choice(
        [
            good[:cut],
            good[:cut] + b"\x00" + good[cut + 1 :],
            good + b"}",
            b"",
            b"NaN",
            b"[Infinity]",
            b'"\\ud800"',
            b"nul",
            b'{"a":' * 20,
            b"\xef\xbb\xbf{}",
            b"1e999999",
            b"[" + b"9" * 10_000 + b"]",
            b"{'a': 1}",
        ]
    )
    return post(found, chance.choice(POSTS))


def deep(chance: random.Random) -> bytes:
    depth = chance.choice([65, 200, 5_000, 200_000])
    opened, closed = chance.choice([(b"[", b"]"), (b'{"a":', b"}")])
    return post(opened * depth + b"1" + closed * depth, chance.choice(POSTS))


def wide(chance: random.Random) -> bytes:
    return post(b"[" + b"1," * chance.choice([5_000, 200_000]) + b"1]", chance.choice(POSTS))


def huge(chance: random.Random) -> bytes:
    size = chance.choice([1 << 27, 1 << 40, 1 << 62, 10**30])
    return post(b"{", chance.choice(POSTS), length=size)


def bad_text(chance: random.Random) -> bytes:
    raw = bytes(chance.randrange(128, 256) for _ in range(20))
    return post(b'{"messages": [{"role": "user", "content": "' + raw + b'"}]}', chance.choice(POSTS[:4]))


def wrong_host(chance: random.Random) -> bytes:
    host = chance.choice(["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "[", "a b", "\x7f"])
    return f"{chance.choice(['GET', 'POST'])} /v1/models HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()


def wrong_origin(chance: random.Random) -> bytes:
    origin = chance.choice(["http://evil.example", "null", "http://localhost.evil.example", "file://"])
    return post(json.dumps(GOOD).encode(), POSTS[0], f"Origin: {origin}")


def wrong_head(chance: random.Random) -> bytes:
    return chance.choice(
        [
            b"\x16\x03\x01\x02\x00\x01\x00",
            b"GET\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"\r\n\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\n",
            post(b"{}", POSTS[0], "Content-Length: 7"),
            post(b"{}", POSTS[0], "Transfer-Encoding: chunked"),
            post(b"zz\r\nx\r\n0\r\n\r\n", POSTS[0], "Transfer-Encoding: chunked"),
            post(b"{}", POSTS[0], "X: a\x00b"),
            post(b"{}", POSTS[0], "Content-Encoding: gzip"),
            post(b"{}", POSTS[0], "X" * 70_000 + ": 1"),
            post(b"{}", POSTS[0], *(f"X-{i}: 1" for i in range(200))),
            post(b"{}", POSTS[0], length=-1),
            *((HEAD.format(verb, path) + "\r\n").encode() for verb, path in PATHS),
        ]
    )


def wrong_values(chance: random.Random) -> bytes:
    field = chance.choice(
        ["max_tokens", "temperature", "n", "stop", "seed", "tools", "response_format", "method", "model"]
    )
    odd: list[Any] = [-1, 2**80, -1e308, "\x00", [[]] * 50, {"a": "b"}, ["x"] * 10_000, "é" * 100_000, True]
    value = chance.choice([{"type": "json_schema"}] if field == "response_format" else odd)
    return post(json.dumps(GOOD | {"messages": "no", field: value}).encode(), POSTS[0])


def bomb(chance: random.Random) -> bytes:
    schema: Any = {"type": "string", "pattern": chance.choice(["(a{1000}){1000}", "(", "(?=a)b", "a{99999999}"])}
    if chance.random() < 0.5:
        schema = {"type": "object", "properties": {"x" * 100 + str(i): {"type": "no such type"} for i in range(500)}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return post(json.dumps(GOOD | {"response_format": form}).encode(), POSTS[0])


KINDS: list[Callable[[random.Random], bytes]] = [
    broken_json,
    deep,
    wide,
    huge,
    bad_text,
    wrong_host,
    wrong_origin,
    wrong_head,
    wrong_values,
    bomb,
]


def status_of(address: tuple[str, int], raw: bytes, chance: random.Random) -> int:
    """Send a request in one of several hostile manners; return the status, 0 if the connection was closed."""
    manner = chance.choice(["whole", "whole", "split", "slow", "half", "gone"])
    with socket.create_connection(address, timeout=30) as sock, suppress(ConnectionError):
        if manner == "split":
            for i in range(0, min(len(raw), 300), 7):
                sock.sendall(raw[i : i + 7])
            sock.sendall(raw[min(len(raw) - len(raw) % 7, 301) :] if len(raw) > 300 else b"")
        elif manner == "slow":
            sock.sendall(raw[: len(raw) // 2])
            time.sleep(0.05)
            sock.sendall(raw[len(raw) // 2 :])
        elif manner == "half":
            sock.sendall(raw[: len(raw) // 2])  # and nothing more
        else:
            sock.sendall(raw)
        if manner == "gone":
            return 0
        answer = http.client.HTTPResponse(sock)
        try:
            answer.begin()
            answer.read()
            return answer.status
        except http.client.HTTPException:
            return 0
    return 0


class Neighbour(threading.Thread):
    """A client who asks the same right question again and again."""

    def __init__(self, address: str) -> None:
        super().__init__(daemon=True)
        self.address, self.ended, self.answers = address.removeprefix("http://"), threading.Event(), list[Any]()

    def ask(self) -> Any:
        connection = http.client.HTTPConnection(self.address, timeout=60)
        try:
            connection.request("POST", POSTS[0], json.dumps(GOOD), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read()).get("choices")
        finally:
            connection.close()

    def run(self) -> None:
        while not self.ended.is_set():
            self.answers.append(self.ask())
            time.sleep(0.02)


@pytest.fixture
def neighbour(service: Service) -> Iterator[Neighbour]:
    service.settings = replace(service.settings, head_s=0.5, body_s=0.5)
    with serving(service) as address:
        made = Neighbour(address)
        made.start()
        yield made
        made.ended.set()
        made.join(60)


@pytest.mark.parametrize("n", [150, pytest.param(5000, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_hostile_requests_disturb_nobody(n: int, service: Service, neighbour: Neighbour) -> None:
    truth, host, port = neighbour.ask(), *neighbour.address.split(":")
    before, lock, statuses, left = os.listdir("/proc/self/fd"), threading.Lock(), Counter[int](), list(range(n))
    failed: list[tuple[str, int, bytes]] = []

    def attack() -> None:
        while left:
            with lock:
                number = left.pop() if left else None
            if number is None:
                return
            chance = random.Random(number)
            kind = KINDS[number % len(KINDS)]
            raw = kind(chance)
            status = status_of((host, int(port)), raw, chance)
            with lock:
                statuses[status] += 1
                is_answer = kind is bomb and status == 200  # a grammar that is large, but not too large
                if status and not 400 <= status < 500 and not is_answer:
                    failed.append((kind.__name__, status, raw[:300]))

    threads = [threading.Thread(target=attack, daemon=True) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(580)
        assert not thread.is_alive()
    assert not failed, failed[:5]
    assert statuses[400] > n // 5
    assert neighbour.ask() == truth
    assert neighbour.answers
    assert all(answer == truth for answer in neighbour.answers)
    until(lambda: service.active <= 1)  # the neighbour's
    until(lambda: len(os.listdir("/proc/self/fd")) <= len(before) + 2)
