"""The example package in examples/custom_method, installed for real and used as its reader would."""

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import lce
from lce.methods import make, registry
from tests import command, oracle
from tests.asking import pass_keys
from tests.running import cut, run, vectors

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "examples" / "custom_method"
WINDOW = 32


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the package, without a network."""
    folder = tmp_path_factory.mktemp("site")
    copy = tmp_path_factory.mktemp("source") / "custom_method"  # a build writes beside what it builds
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    line = [sys.executable, "-m", "pip", "install", "--quiet", *offline, "--target", folder, copy]
    with command.Process(line) as process:
        _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return folder


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process has the package installed, and forgets it afterwards."""
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    yield
    sys.modules.pop("keybounds", None)


def test_it_is_short() -> None:
    assert len((SOURCE / "keybounds.py").read_text(encoding="utf-8").splitlines()) < 30


def test_it_runs_from_the_command_line(site: Path, tiny_model: Path) -> None:
    knobs = ["-o", "spread=0.5", "-o", "chunk_size=4", "-o", "chunks=4", "--prompt", command.PROMPT]
    line = ["generate", "--model", tiny_model, "--method", "keybounds", *knobs, "-n", "6", "--json", "--quiet"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (site, ROOT)))}
    with command.Process([sys.executable, "-m", "lce", *line], env=env) as process:
        out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    result = json.loads(out)
    expected = "KeyBounds(chunk_size=4, chunks=4, placement='side_by_side', top_p=None, spread=0.5)"
    assert (result["method"]["name"], result["method"]["repr"]) == ("keybounds", expected)
    assert 1 <= len(result["token_ids"]) <= 6
    assert result["stats"]["prompt_tokens"] > 4 * 4  # more than the method's budget


@pytest.mark.usefixtures("installed")
def test_wrong_knobs_are_explained() -> None:
    ask = ["generate", "--model", "demo", "--method", "keybounds", "--prompt", "hi", "-o"]
    valid = "valid, with defaults: chunk_size=none, chunks=none, placement=side_by_side, top_p=none, spread=1.0\n"
    command.assert_error(command.run(*ask, "spred=1"), 2, f"no option 'spred'; {valid}")
    command.assert_error(command.run(*ask, "spread=wide"), 2, "spread=wide is not a number; default spread=1.0\n")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
@pytest.mark.parametrize("spread", [1.0, 0.5, 0.0, -1.0])
@pytest.mark.covering("spread", "heads")
def test_equals_its_definition_far_beyond_the_window_in_any_blocks(spread: float, heads: tuple[int, int]) -> None:
    """While everything fits, the first tokens, that is full attention."""
    size, n = 4, 5 * WINDOW + 3
    q, k, v = vectors(7, *heads, n, 16)
    low, high = bounds(q, k, size)
    scores = (high + low) / 2 + spread * (high - low) / 2

    def choose(h: int, i: int) -> list[int]:
        own = i // size
        forced = {0, own - 1} if own else set()
        free = sorted({*range(own)} - forced, key=lambda c: -float(scores[h, i, c]))
        return sorted({*forced, *free[: WINDOW // size - 1 - 2]})

    truth = oracle.attention(q, k, v, oracle.placed(len(q), n, size, choose), oracle.Setting(WINDOW))
    method = make("keybounds", {"chunk_size": size, "spread": spread})
    for blocks in ([n], cut(n, 64), cut(n, 7), [100, *cut(n - 100, 1)]):
        assert (run(method, q, k, v, blocks, window=WINDOW) - truth).abs().max() <= 1e-4, f"blocks: {blocks[:3]}"


@pytest.mark.usefixtures("installed")
def test_it_answers_beyond_the_window() -> None:
    assert pass_keys(lce.load("demo", method="keybounds"), 1100, 3).mean >= 0.6


def turned(k: Tensor, size: int) -> Tensor:
    """Keys `[G, N, D]` rotated at their offsets in chunks of `size`, by the oracle's arithmetic."""
    offsets = torch.arange(k.shape[1]) % size
    rotated = torch.stack([oracle.turned(head, offsets, oracle.Setting(WINDOW)) for head in k])
    return torch.cat((rotated.real, rotated.imag), dim=-1).float()


def bounds(q: Tensor, k: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The least and the most that a chunk's keys could answer, dimension by dimension: `[H, N, M]` each, in float64."""
    n_chunks = k.shape[1] // size
    chunked = turned(k, size)[:, : n_chunks * size].double().unflatten(1, (n_chunks, size))
    chunked = chunked.repeat_interleave(len(q) // len(k), dim=0)
    ends = q.double()[:, :, None, None] * torch.stack((chunked.amin(2), chunked.amax(2)), dim=2)[:, None]
    return ends.amin(3).sum(-1), ends.amax(3).sum(-1)
