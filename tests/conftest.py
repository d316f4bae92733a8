"""What every test has: one thread, fixed seeds, and a tiny model to load."""

import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait must not take the cores of other tests
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the real hub; those of `tests.hub` have one on this machine

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is loaded: kernels for a GPU run on CPU tensors

from lce.errors import ModelError
from lce.weights.source import source_of
from tests.checkpoints import save_tiny
from tests.compiling import take_turns
from tests.depth import mark_slow
from tests.interpreting import repair
from tests.pretended import Gpus, pretended_gpus

torch.set_num_threads(1)
repair()
take_turns()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`, a worker that has done its share takes from another's: neither waits for the other's long tests."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `tests.depth` finds slow. A slow test has seven times the time of others, unless it says otherwise."""
    mark_slow(items)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(840))
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    items.sort(key=lambda item: "test_compile_cuda" not in item.nodeid)  # minutes each: no worker ends with them alone


def pytest_collection_finish() -> None:
    """Have the garbage collector look at what tests make only: modules and thousands of cases stay for good."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeds() -> Iterator[None]:
    torch.set_num_threads(1)
    random.seed(0)
    torch.manual_seed(0)
    yield
    assert not torch.is_inference_mode_enabled(), "a test ended in inference mode: the next would learn nothing"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a checkpoint: Llama, 2 layers, 4 heads over 2, dimension 16, window 64, 300 tokens, float32."""
    return save_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct. Skips the test where its package is not installed."""
    try:
        return source_of("smollm2").path
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture
def gpus() -> Iterator[Gpus]:
    """One pretended GPU: see `tests.pretended`."""
    with pretended_gpus() as found:
        yield found


@pytest.fixture
def triton_gpus() -> Iterator[Gpus]:
    """One pretended GPU, where Triton's kernels run in its interpreter."""
    with pretended_gpus(triton=True) as found:
        yield found
