"""Which replica answers: sessions, known beginnings, and replicas with too many requests. No Ray, no model."""

import json
from collections import Counter
from typing import Any

import pytest

from lce_serve.affinity import BLOCK, Affinity, Known, affinity_of, ranked

SLACK = 8
REPLICAS = dict.fromkeys(["a", "b", "c", "d"], 0)


def chat(*texts: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text} for text in texts], **more}


def prompt(text: object) -> Affinity:
    return affinity_of(None, {"prompt": text})


def first(session: str, replicas: dict[str, int]) -> str:
    return ranked(Affinity(session), replicas, Known(), SLACK)[0]


def test_a_session_has_one_replica() -> None:
    found = [[first(f"session {number}", REPLICAS) for number in range(1000)] for _ in range(2)]
    assert found[0] == found[1]
    assert all(180 < count < 320 for count in Counter(found[0]).values())


@pytest.mark.parametrize("gone", REPLICAS)
def test_only_the_sessions_of_a_replica_that_goes_move(gone: str) -> None:
    left = {name: 0 for name in REPLICAS if name != gone}
    for number in range(200):
        before, after = first(f"session {number}", REPLICAS), first(f"session {number}", left)
        assert after == before or before == gone


def test_the_key_is_the_header_or_the_field() -> None:
    for header, key, session in (("one", "two", "one"), (None, "two", "two"), (None, 2, None)):
        assert affinity_of(header, {"prompt_cache_key": key}).session == session
    for body in (None, [], "text", 3, {"messages": None}):
        assert affinity_of(None, body) == Affinity()


def test_the_next_turn_goes_where_the_first_one_went() -> None:
    known, turn = Known(), affinity_of(None, chat("x" * 2000))
    known.note(turn, "c")
    for body in (chat("x" * 2000, "y" * 3000), chat("x" * 2000)):
        assert ranked(affinity_of(None, body), REPLICAS, known, SLACK)[0] == "c"


def test_the_longest_known_beginning_decides() -> None:
    known, x, y = Known(), "x" * 1000, "y" * 2000
    known.note(prompt(x), "a")
    known.note(prompt(x + y), "b")
    for text, found in ((x + y + "z", "b"), (x + "z" * 2000, "b"), ("z" * 1000, None)):  # x was sent to b last
        assert known.longest(prompt(text), REPLICAS) == found
    assert known.longest(prompt(x + y), ["a", "c"]) is None


def test_a_short_common_beginning_does_not_count() -> None:
    known = Known()
    known.note(prompt("x" * 2 * BLOCK), "a")
    assert known.longest(prompt("x" * 2 * BLOCK + "y" * 10 * BLOCK), REPLICAS) == "a"
    assert known.longest(prompt("x" * 2 * BLOCK + "y" * 100 * BLOCK), REPLICAS) is None


@pytest.mark.parametrize(
    "more", [{"model": "m@book"}, {"context": "book"}, {"method": "full"}, {"tools": [{}]}, {"instructions": "x"}]
)
def test_the_same_text_behind_another_beginning_is_another_text(more: dict[str, Any]) -> None:
    known = Known()
    known.note(affinity_of(None, chat("x" * 2000)), "a")
    assert known.longest(affinity_of(None, chat("x" * 2000, **more)), REPLICAS) is None


def test_a_first_line_that_only_changes_is_no_other_beginning() -> None:
    line = "x-anthropic-billing-header: cch={};"
    for system in (line + "\n" + "x" * 900, [{"type": "text", "text": line}, {"type": "text", "text": "y" * 900}]):
        a, b = (json.loads(json.dumps({"system": system, **chat("hi")}).replace("{}", cch)) for cch in ("abc", "9fe"))
        assert affinity_of(None, a) == affinity_of(None, b)
        assert len(affinity_of(None, a).digests) > 3


def test_token_ids_and_all_endpoints_have_texts() -> None:
    for body in ({"prompt": list(range(500))}, {"input": "x" * 500}, {"input": chat("x" * 500)["messages"]}):
        assert len(affinity_of(None, body).digests) > 1


@pytest.mark.parametrize("affinity", [Affinity("s"), prompt("x" * 1000)])
def test_a_replica_with_too_many_requests_loses_some(affinity: Affinity) -> None:
    known = Known()
    best = ranked(affinity, REPLICAS, known, SLACK)[0]
    known.note(affinity, best)
    assert ranked(affinity, REPLICAS | {best: SLACK}, known, SLACK)[0] == best
    assert ranked(affinity, REPLICAS | {best: SLACK + 1}, known, SLACK)[-1] == best
    assert ranked(affinity, dict.fromkeys(REPLICAS, 100), known, SLACK)[0] == best


def test_all_replicas_are_ranked_and_without_affinity_by_the_fewest_requests() -> None:
    for affinity in (Affinity("s"), Affinity(), prompt("x" * 1000)):
        found = ranked(affinity, {"a": 3, "b": 1, "c": 2}, Known(), SLACK)
        assert sorted(found) == ["a", "b", "c"]
        assert affinity != Affinity() or found == ["b", "c", "a"]
    assert ranked(Affinity("s"), {}, Known(), SLACK) == []


def test_the_known_beginnings_are_bounded() -> None:
    known, texts = Known(4), [prompt(letter * 500) for letter in "xyz"]
    for text in texts:
        known.note(text, "a")
    assert [known.longest(text, REPLICAS) for text in texts] == [None, "a", "a"]
