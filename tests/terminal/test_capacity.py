"""What does not fit is refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

import lce
from lce.terminal.capacity import PLANNED, check_capacity


def test_the_first_method_that_does_not_fit_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    loading = dict.fromkeys(PLANNED) | {"device": "cpu", "dtype": "auto", "weights": "auto", "kv_dtype": "auto"}
    methods = [lce.methods.make("full"), lce.methods.make("streaming")]
    check_capacity(str(tiny_model), methods, 100, loading)
    with pytest.raises(lce.CapacityError, match="tokens"):
        check_capacity(str(tiny_model), methods, 1 << 40, loading)
