"""The example package in examples/custom_method, installed for real and used as its reader would."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
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
SPREADS = [1.0, 0.5, 0.0, -1.0]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the package, without a network."""
    folder = tmp_path_factory.mktemp("site")
    copy = tmp_path_factory.mktemp("source") / "custom_method"  # a build writes beside what it builds
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    line = [sys.executable, "-m", "pip", "install", "--quiet", *offline, "--target", folder, copy]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def lce_command(site: Path) -> Callable[..., str]:
    """Runs `lce` in a process of its own, where the package is installed; what it says on stdout."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (site, ROOT)))}

    def call(*args: str | Path) -> str:
        line = [sys.executable, "-m", "lce", *args]
        done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    return call


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process has the package installed, and forgets it afterwards."""
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    yield
    sys.modules.pop("keybounds", None)


def test_it_is_short() -> None:
    assert len((SOURCE / "keybounds.py").read_text(encoding="utf-8").splitlines()) < 30


@pytest.mark.slow
def test_it_is_listed_with_its_knobs(lce_command: Callable[..., str]) -> None:
    summary, *knobs = lce_command("methods").partition("\nkeybounds\n")[2].partition("\n\n")[0].splitlines()
    assert summary.startswith("  Chunks scored by")
    assert [re.split(" {2,}", line.strip())[:2] for line in knobs] == [
        ["chunk_size=none", "int or none"],
        ["chunks=none", "int or none"],
        ["placement=side_by_side", "side_by_side, true or constant"],
        ["top_p=none", "float or none"],
        ["spread=1.0", "float"],
    ]


def test_it_runs_from_the_command_line(lce_command: Callable[..., str], tiny_model: Path) -> None:
    knobs = ["-o", "spread=0.5", "-o", "chunk_size=4", "-o", "chunks=4"]
    prompt = ["--prompt", command.PROMPT, "--max-tokens", "6", "--json", "--quiet"]
    result = json.loads(lce_command("generate", "--model", tiny_model, "--method", "keybounds", *knobs, *prompt))
    assert result["method"]["name"] == "keybounds"
    expected = "KeyBounds(chunk_size=4, chunks=4, placement='side_by_side', top_p=None, spread=0.5)"
    assert result["method"]["repr"] == expected
    assert 1 <= len(result["token_ids"]) <= 6
    assert result["stats"]["prompt_tokens"] > 4 * 4  # more than the method's budget


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("knob", "message"),
    [
        (
            "spred=1",
            "no option 'spred'; valid, with defaults: chunk_size=none, chunks=none, "
            "placement=side_by_side, top_p=none, spread=1.0\n",
        ),
        ("spread=wide", "spread=wide is not a number; default spread=1.0\n"),
    ],
)
def test_wrong_knobs_are_explained(knob: str, message: str) -> None:
    result = command.run("generate", "--model", "demo", "--method", "keybounds", "-o", knob, "--prompt", "hi")
    command.assert_error(result, 2, message)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
@pytest.mark.parametrize("spread", SPREADS)
def test_equals_full_attention_while_everything_fits(spread: float, heads: tuple[int, int]) -> None:
    method = make("keybounds", {"chunk_size": 4, "spread": spread})
    q, k, v = vectors(5, *heads, WINDOW, 16)
    truth = run(make("full"), q, k, v, [WINDOW], window=WINDOW)
    for blocks in (cut(WINDOW, 1), cut(WINDOW, 7), [WINDOW]):
        assert (run(method, q, k, v, blocks, window=WINDOW) - truth).abs().max() <= 1e-5


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
@pytest.mark.parametrize("spread", SPREADS)
def test_equals_its_definition_far_beyond_the_window_in_any_blocks(spread: float, heads: tuple[int, int]) -> None:
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
    assert pass_keys(lce.load("demo", method="keybounds"), 1500, 3).mean >= 0.6


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
