"""Cases that show nothing new are slow, or are none."""

from itertools import combinations, product
from math import prod

import pytest

from tests.depth import pairs, values


def test_what_a_case_has() -> None:
    found = {*values({"name": "m", "knobs": {"a": 2, "b": False}, "heads": (8, 2)})}
    assert found == {("m", "name", "'m'"), ("m", "a", "number"), ("m", "b", "False"), ("m", "heads", "(8, 2)")}


@pytest.mark.parametrize("heads", [8, 4])
@pytest.mark.parametrize(("name", "knobs"), [("m", {}), ("m", {"a": 1}), ("m", {"a": 2}), ("n", {"a": 2, "b": True})])
@pytest.mark.covering
def test_new_cases_run_daily(name: str, knobs: dict[str, object], heads: int, request: pytest.FixtureRequest) -> None:
    new = knobs != {"a": 2} if heads == 8 else name == "n" or not knobs
    assert bool(request.node.get_closest_marker("slow")) == (not new)


def test_all_pairs_are_in_few_cases() -> None:
    sizes, heads = [pytest.param(1, 70), pytest.param(5, 70, marks=pytest.mark.cuda)], [(3, 3), (8, 2)]
    found = pairs(sizes, heads, "ab")
    of_one, of_five = [(1, 70, (3, 3), "a"), (1, 70, (8, 2), "b")], [(5, 70, (3, 3), "b"), (5, 70, (8, 2), "a")]
    assert [case.values for case in found] == [*of_one, *of_five]
    assert [len(case.marks) for case in found] == [0, 0, 1, 1]
    for dimensions in ([range(3)] * 4, [range(5), range(2), range(4)]):
        cases = [case.values for case in pairs(*dimensions)]
        assert len(cases) < prod(map(len, dimensions)) / 1.5
        for (i, some), (j, others) in combinations(enumerate(dimensions), 2):
            assert {(case[i], case[j]) for case in cases} == {*product(some, others)}
