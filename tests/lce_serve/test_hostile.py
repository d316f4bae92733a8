"""Thousands of hostile requests: each is refused or its connection closed, and nobody else notices."""

import http.client
import json
import os
import random
import socket
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import httpx2
import pytest

from lce_serve.service import Service
from tests.command import begun, until
from tests.lce_serve.conftest import serving

POSTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize")
HEAD = "{} {} HTTP/1.1\r\nHost: localhost\r\n"
PATHS = [("POST", "/" + "a" * 80_000), ("GET", "/%00%ff/../../etc/passwd"), ("TRACE", "/health")]
PATHS += [("DELETE", "/contexts/..%2f.."), ("GET", "http://evil.example/")]
LINES = [b"\x16\x03\x01\x02\x00\x01\x00", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\r\n" * 3]
LINES += [b"PRI * HTTP/2.0\r\n\r\n"]
GOOD = {"model": "tiny", "messages": [{"role": "user", "content": "the quick fox"}], "temperature": 0, "max_tokens": 6}


def post(body: bytes, path: str, *headers: str, length: int | None = None) -> bytes:
    lines = [f"Content-Length: {len(body) if length is None else length}", "Content-Type: application/json", *headers]
    return (HEAD.format("POST", path) + "\r\n".join(lines) + "\r\n\r\n").encode() + body


def broken_json(chance: random.Random) -> bytes:
    good, size = json.dumps(GOOD).encode(), chance.randrange(60)
    cut = [good[:size], good[:size] + b"\x00" + good[size + 1 :], good + b"}", b'{"a":' * 20]
    none = [b"", b"NaN", b"[Infinity]", b'"\\ud800"', b"nul", b"1e999999", b"{'a': 1}"]
    return post(chance.choice([*cut, *none, b"[" + b"9" * 10_000 + b"]"]), chance.choice(POSTS))


def too_much(chance: random.Random) -> bytes:
    opened, closed = chance.choice([(b"[", b"]"), (b'{"a":', b"}")])
    depth, path = chance.choice([65, 200, 5_000, 200_000]), chance.choice(POSTS)
    deep, wide = opened * depth + b"1" + closed * depth, b"[" + b"1," * chance.choice([5_000, 200_000]) + b"1]"
    huge = post(b"{", path, length=chance.choice([1 << 27, 1 << 40, 1 << 62, 10**30]))
    return chance.choice([post(deep, path), post(wide, path), huge])


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
    chunked = "Transfer-Encoding: chunked"
    headers = ["Content-Length: 7", chunked, "X: a\x00b", "Content-Encoding: gzip", "X" * 70_000 + ": 1"]
    many = post(b"{}", POSTS[0], *(f"X-{i}: 1" for i in range(200)))
    wrong = [post(b"{}", POSTS[0], length=-1), post(b"zz\r\nx\r\n0\r\n\r\n", POSTS[0], chunked), many]
    wrong += [post(b"{}", POSTS[0], header) for header in headers]
    return chance.choice([*LINES, *wrong, *((HEAD.format(*each) + "\r\n").encode() for each in PATHS)])


def wrong_values(chance: random.Random) -> bytes:
    field = chance.choice("max_tokens temperature n stop seed tools response_format method model".split())
    odd: list[Any] = [-1, 2**80, -1e308, "\x00", [[]] * 50, {"a": "b"}, ["x"] * 10_000, "é" * 100_000, True]
    value = chance.choice([{"type": "json_schema"}] if field == "response_format" else odd)
    return post(json.dumps(GOOD | {"messages": "no", field: value}).encode(), POSTS[0])


def bomb(chance: random.Random) -> bytes:
    schema: Any = {"type": "string", "pattern": chance.choice(["(a{1000}){1000}", "(", "(?=a)b", "a{99999999}"])}
    if chance.random() < 0.5:
        schema = {"type": "object", "properties": {"x" * 100 + str(i): {"type": "no such type"} for i in range(500)}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return post(json.dumps(GOOD | {"response_format": form}).encode(), POSTS[0])


KINDS = (broken_json, too_much, too_much, too_much, bad_text, wrong_host, wrong_origin, wrong_head, wrong_values, bomb)


def status_of(address: str, raw: bytes, chance: random.Random) -> int:
    """Send a request in one of several hostile manners; return the status, 0 if the connection was closed."""
    host, port = address.removeprefix("http://").split(":")
    manner, half = chance.choice(["whole", "whole", "split", "slow", "half", "gone"]), len(raw) // 2
    pieces = {
        "split": [*(raw[i : i + 7] for i in range(0, 301, 7)), raw[301:]],
        "slow": [raw[:half], raw[half:]],
        "half": [raw[:half]],  # and nothing more
    }.get(manner, [raw])
    with socket.create_connection((host, int(port)), timeout=30) as sock, suppress(ConnectionError):
        for piece in pieces:
            sock.sendall(piece)
            time.sleep(0.05 if manner == "slow" else 0)
        if manner == "gone":
            return 0
        answer = http.client.HTTPResponse(sock)
        with suppress(http.client.HTTPException):
            answer.begin()
            answer.read()
            return answer.status
    return 0


def attack(address: str, numbers: range) -> list[tuple[str, int, bytes]]:
    """Send requests; return the kind, the status and the beginning of each."""
    found = []
    for number in numbers:
        chance, kind = random.Random(number), KINDS[number % len(KINDS)]
        raw = kind(chance)
        found.append((kind.__name__, status_of(address, raw, chance), raw[:300]))
    return found


def ask(address: str) -> Any:
    """Ask the right question, as a neighbour of the attackers does again and again."""
    return httpx2.post(address + POSTS[0], json=GOOD, timeout=60).raise_for_status().json()["choices"]


@pytest.mark.parametrize("n", [60, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_hostile_requests_disturb_nobody(n: int, service: Service) -> None:
    service.settings = replace(service.settings, head_s=0.5, body_s=0.5)
    with serving(service) as address:
        answers = [ask(address), ask(address)]  # the second one finds the prompt, by kernels of its own
        n_open = len(os.listdir("/proc/self/fd"))
        attacks = [begun(partial(attack, address, range(first, n, 16))) for first in range(16)]
        while not all(each.done() for each in attacks):
            answers.append(ask(address))
            time.sleep(0.02)
        found = [each for one in attacks for each in one.result(0)]
        wrong = [each for each in found if each[1] and not 400 <= each[1] < 500]
        assert [each for each in wrong if each[:2] != ("bomb", 200)] == []  # a grammar may be large, but not too large
        assert sum(status == 400 for _, status, _ in found) > n // 5
        answers.append(ask(address))
        assert len(answers) > 3
        assert all(answer == answers[0] for answer in answers)
        until(lambda: not service.active)
        until(lambda: len(os.listdir("/proc/self/fd")) <= n_open + 2)
