"""The program that renders one template: what it writes, and the limits that it gives itself."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from lce.tokenizer import template


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{ ('a' * 2000) | length }}{{ x | int }}", {"text": "2000123"}),
        ("{% for c in x %}{{ loop.index }}{{ c }}{{ ',' if not loop.last }}{% endfor %}", {"text": "11,22,33"}),
        ("{% filter upper %}a{% endfilter %}{% set y | trim %} b {% endset %}{{ y }}", {"text": "Ab"}),
        ("{{ 'a' * 2001 }}", {"failed": "it makes a text of more than 2000 characters"}),
        (
            "{% for a in range(3) %}{{ 'a' * 700 }}{% endfor %}",
            {"failed": "it makes a text of more than 2000 characters"},
        ),
        ("{{ 1 / 0 }}", {"failed": "ZeroDivisionError: division by zero"}),
        ("{{ raise_exception('n' * 1999) }}", {"refused": "n" * 400}),
    ],
)
def test_what_becomes_of_a_template(text: str, expected: dict[str, str]) -> None:
    assert template.render(text, {"x": "123"}, 2000) == expected


def started(request: dict[str, Any]) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "lce.tokenizer.template"]
    return subprocess.run(command, input=json.dumps(request).encode(), capture_output=True, timeout=60)


def test_a_process_limits_itself() -> None:
    request = {"template": "{{ 'é' ~ x }}", "variables": {"x": "\ud800"}, "chars": 1 << 20, "bytes": 512 << 20}
    done = started(request | {"seconds": 1})
    assert json.loads(done.stdout.decode("utf-8", "surrogatepass")) == {"text": "é\ud800"}
    large = request | {"template": "{{ '%600000000d' % 1 }}", "seconds": 9}
    assert json.loads(started(large).stdout) == {"failed": "it takes too much memory"}
    endless = request | {"template": "{% for a in range(90) %}{{ range(99999) | sum }}{% endfor %}" * 99, "seconds": 1}
    done = started(endless)
    assert (done.returncode < 0, done.stdout) == (True, b"")
