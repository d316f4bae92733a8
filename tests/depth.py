"""Which cases of a test are tried every day, and which are slow: `make test-slow` tries those."""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import pytest


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
