"""The sandbox of one template, in this process: its bounds, and the limits that a process gives itself."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from lce.tokenizer import template

STEPS, CHARS = 1000, 2000


def answer(text: str, **variables: Any) -> dict[str, str]:
    return template.render(text, variables, STEPS, CHARS)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{% for a in range(1001) %}{% endfor %}", "too many steps for these messages, expected at most 1000"),
        ("{% for a in 'x' * 1001 %}{% endfor %}", "too many steps"),
        ("{% for a in range(40) | map('string') %}{% for b in range(40) %}{% endfor %}{% endfor %}", "too many steps"),
        ("{% for a in range(600) %}{{ ''.upper() }}{% endfor %}", "too many steps"),
        ("{% for a in range(9) recursive %}{% endfor %}", "recursive loops are not allowed"),
        ("{{ 'a' * 2001 }}", "a text of 2001 characters, expected at most 2000"),
        ("{{ 'a' * 1500 ~ 'a' * 501 }}", "a text of 2001 characters"),
        ("{{ '%2001d' % 1 }}", "a text of 2001 characters"),
        ("{{ '{:2001d}'.format(1) }}", "a text of 2001 characters"),
        ("{{ 'a' | center(2001) }}", "a text of 2001 characters"),
        ("{{ ('a' * 1500).replace('a', 'bb') }}", "a text of 3000 characters"),
        ("{{ range(2001) | list | length }}", "a text of 2001 characters"),
        ("{{ 'a' | center(100001) }}", "the number 100001 is too large here"),
        ("{{ 'a'.center(width=100001) }}", "the number 100001 is too large here"),
        ("{{ 2 ** 4096 }}", "a number of 8192 bits"),
        ("{{ (2 ** 2047) * (2 ** 2047) * 4 }}", "a number of"),
        ("{% for a in range(3) %}" + "x" * 700 + "{% endfor %}", "a text of 2100 characters"),
        ("x" * ((1 << 20) + 1), "it has 1048577 characters"),
    ],
)
def test_bounds(text: str, words: str) -> None:
    assert words in answer(text)["failed"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{% for a in range(999) %}{% endfor %}!", "!"),
        ("{{ ('a' * 2000) | length }}", "2000"),
        ("{{ '%5d|%s' % (1, 'x') }}", "    1|x"),
        ("{{ 7 % 4 }}", "3"),
        ("{{ x | length }}{{ x | int }}", "6123456"),  # a number that comes out of a filter may be large
        ("{% for c in x %}{{ loop.index }}{{ c }}{{ ',' if not loop.last }}{% endfor %}", "11,22,33,44,55,66"),
        ("{% for c in x | map('upper') %}{{ loop.length }}{% endfor %}", "666666"),
        ("{% for c in nothing %}{{ c }}{% else %}none{% endfor %}", "none"),
        ("{% filter upper %}a{% endfilter %}{% set y | trim %} b {% endset %}{{ y }}", "Ab"),
    ],
)
def test_within_the_bounds(text: str, expected: str) -> None:
    assert answer(text, x="123456") == {"text": expected}


def test_refusals_and_long_messages() -> None:
    assert answer("{{ raise_exception('no') }}") == {"refused": "no"}
    assert len(answer("{{ raise_exception('n' * 1999) }}")["refused"]) == 400
    assert answer("{{ 1 / 0 }}") == {"failed": "ZeroDivisionError: division by zero"}


def started(request: dict[str, Any]) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "lce.tokenizer.template"]
    return subprocess.run(command, input=json.dumps(request).encode(), capture_output=True, timeout=60)


def test_a_process_limits_itself() -> None:
    request = {"template": "{{ 'é' ~ x }}", "variables": {"x": "\ud800"}, "steps": 99, "chars": 1 << 20}
    done = started(request | {"seconds": 1, "bytes": 512 << 20})
    assert json.loads(done.stdout.decode("utf-8", "surrogatepass")) == {"text": "é\ud800"}
    large = request | {"template": "{{ '%600000000d' % 1 }}", "seconds": 9, "bytes": 512 << 20}
    assert json.loads(started(large).stdout) == {"failed": "it takes too much memory"}
    endless = request | {"template": "{% for a in range(90) %}{{ range(99999) | sum }}{% endfor %}" * 99, "seconds": 1}
    done = started(endless | {"steps": 99999, "bytes": 512 << 20})
    assert (done.returncode < 0, done.stdout) == (True, b"")
