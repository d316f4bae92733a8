"""Cases that show nothing new are slow."""

import pytest

from tests.depth import values


def test_what_a_case_has() -> None:
    found = {*values({"name": "m", "knobs": {"a": 2, "b": False}, "heads": (8, 2)})}
    assert found == {("m", "name", "'m'"), ("m", "a", "number"), ("m", "b", "False"), ("m", "heads", "(8, 2)")}


@pytest.mark.parametrize("heads", [8, 4])
@pytest.mark.parametrize(("name", "knobs"), [("m", {}), ("m", {"a": 1}), ("m", {"a": 2}), ("n", {"a": 2, "b": True})])
@pytest.mark.covering
def test_a_case_with_something_new_is_tried_every_day(
    name: str, knobs: dict[str, object], heads: int, request: pytest.FixtureRequest
) -> None:
    new = knobs != {"a": 2} if heads == 8 else name == "n" or not knobs
    assert bool(request.node.get_closest_marker("slow")) == (not new)
