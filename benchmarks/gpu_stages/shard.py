"""A plugin of pytest that keeps one process's share of all tests; the environment names it, as `SHARD=2/8`."""

from __future__ import annotations

import os

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    number, n_shards = map(int, os.environ["SHARD"].split("/"))
    items[:] = items[number::n_shards]
