"""A plugin of pytest: of all tests, those of one of several processes, which `SHARD=2/8` in the environment names."""

from __future__ import annotations

import os

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    number, n_shards = map(int, os.environ["SHARD"].split("/"))
    items[:] = items[number::n_shards]
