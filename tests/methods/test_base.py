"""Options that all methods refuse, and their errors."""

from __future__ import annotations

import pytest

from lce.errors import UsageError
from lce.methods import make


@pytest.mark.parametrize(
    ("name", "knobs", "words"),
    [
        ("streaming", {"sinks": -1}, "streaming: sinks is -1; expected 0 or more"),
        ("streaming", {"local": 0}, "streaming: local is 0; expected 1 or more"),
        ("lm_infinite", {"top_k": -2}, "lm_infinite: top_k is -2; expected 0 or more"),
        ("rerope", {"local": 0}, "rerope: local is 0; expected 1 or more"),
        ("self_extend", {"group": 0}, "self_extend: group is 0; expected 1 or more"),
        ("dca", {"chunk_size": 0}, "dca: chunk_size is 0; expected 1 or more"),
        ("infllm", {"repr_tokens": 0}, "infllm: repr_tokens is 0; expected 1 or more"),
        ("infllm", {"block_size": 0}, "infllm: block_size is 0; expected 1 or more"),
        ("esa", {"compress": "none", "eps": -1}, "esa: eps is -1; expected 0 or more"),
        ("esa", {"compress": "none", "top_k": 0}, "esa: top_k is 0; expected 1 or more"),
    ],
)
def test_knobs_that_cannot_work(name: str, knobs: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make(name, knobs).resolve(32)
