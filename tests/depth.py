"""Which cases of a test are tried, and which of them every day: `make test-slow` tries the others."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import combinations, product
from typing import Any

import pytest

PARAM = type(pytest.param())


def mark_slow(items: list[pytest.Item]) -> None:
    """Mark the cases of tests that are marked `covering` slow if earlier cases have all that they have.

    `covering("name")` looks at the parameter `name` alone, for tests whose cases take long.
    """
    seen: defaultdict[str, set[Hashable]] = defaultdict(set)
    for item in items:
        if marker := item.get_closest_marker("covering"):
            params: dict[str, Any] = getattr(item, "callspec").params  # noqa: B009  not of the base class
            params = {name: params[name] for name in marker.args or params}
            new = {*values(params)} - seen[item.nodeid.partition("[")[0]]
            seen[item.nodeid.partition("[")[0]] |= new
            if not new:
                item.add_marker(pytest.mark.slow)


def values(params: Mapping[str, Any]) -> Iterator[Hashable]:
    """What a case has: the value of each parameter, for the method `name` if there is one.

    Of a dictionary of knobs each key with its value; all numbers are one value.
    """
    method = params.get("name")
    for name, value in params.items():
        if isinstance(value, Mapping):
            for key, knob in value.items():
                yield method, key, "number" if type(knob) in (int, float) else repr(knob)
        else:
            yield method, name, repr(value)


def cover(cases: Iterable[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the cases of a method and its knobs that have a value which no earlier one has."""
    seen, found = set[Hashable](), []
    for name, knobs in cases:
        if new := {*values({"name": name, "knobs": knobs})} - seen:
            found.append((name, knobs))
            seen |= new
    return found


def pairs(*dimensions: Iterable[Any]) -> list[Any]:
    """Return cases, one value of each dimension, such that two values of any two dimensions are in one of them.

    For three dimensions of 2 values these are 4 of the product's 8 cases. A case has the marks of its values.
    """
    values = [list(dimension) for dimension in dimensions]
    indices = product(*(range(len(each)) for each in values))  # of each value in a case
    pairs_of = {case: {*combinations(enumerate(case), 2)} for case in indices}
    left, found = set().union(*pairs_of.values()), []
    while left:
        found.append(max(pairs_of, key=lambda case: len(pairs_of[case] & left)))
        left -= pairs_of[found[-1]]
    return [_case([of[i] for of, i in zip(values, case, strict=True)]) for case in sorted(found)]


def _case(values: list[Any]) -> Any:
    params = [value if isinstance(value, PARAM) else pytest.param(value) for value in values]
    return pytest.param(*(x for param in params for x in param.values), marks=[m for p in params for m in p.marks])
