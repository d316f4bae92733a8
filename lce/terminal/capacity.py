"""Checks whether texts of some length fit, for several methods, before any is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lce
from lce.errors import CapacityError

PLANNED = (  # options that `lce.load` and `lce.plan` share
    "device", "dtype", "weights", "block", "window", "kv_device_budget", "kv_host_budget", "spill_dir", "kv_dtype"
)  # fmt: skip


def check_capacity(model: str, methods: Sequence[lce.Method], tokens: int, loading: Mapping[str, Any]) -> None:
    """Raise `CapacityError` for the first method under which `tokens` do not fit; `loading` is for `lce.load`."""
    for method in methods:
        planned = lce.plan(model, method, tokens=tokens, **{name: loading[name] for name in PLANNED})
        if planned.refusal is not None:
            raise CapacityError(planned.refusal)
