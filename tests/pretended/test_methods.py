"""Every method in half precision on a pretended GPU, grouped or not, against the definitions."""

import pytest
import torch

from lce.methods import available, make
from tests import oracle
from tests.methods.test_matrix import WINDOW, small
from tests.pretended import Gpus
from tests.running import cut, run, vectors

CASES = {"bfloat16, grouped": (torch.bfloat16, (4, 2), 0.03), "float16": (torch.float16, (2, 2), 0.005)}
BLOCKS = [30, 38, 1, 1]


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=[pytest.mark.slow] * (j == 1 and i % 4 > 0))
        for i, name in enumerate(available())
        for j, case in enumerate(CASES)
    ],
)
def test_equals_the_oracle(gpus: Gpus, name: str, case: str) -> None:
    """Where scores are close, another chunk may be chosen than in float64: for few queries."""
    dtype, heads, tolerance = CASES[case]
    q, k, v = (x.to(dtype) for x in vectors(3, *heads, sum(BLOCKS), 16))
    setting, knobs = oracle.Setting(WINDOW, BLOCKS), small(name)
    exact = [x.float() for x in (q, k, v)]
    truth = oracle.attention(*exact, oracle.DEFINITIONS[name](*exact, setting, **knobs), setting)
    with torch.inference_mode(), gpus.counting() as counts:
        q, k, v = q.cuda(), k.cuda(), v.cuda()
        out = run(make(name, knobs), q, k, v, BLOCKS, window=WINDOW)
    assert out.is_cuda
    assert out.dtype == dtype
    far = ((out.cpu().float() - truth).abs() > tolerance).any(-1)
    assert far.float().mean() <= 0.02, f"{int(far.sum())} of {far.numel()} outputs"
    assert counts.syncs == 0, counts.at
    assert counts.uploads <= 4, counts.at  # q, k, v, and RoPE's frequencies


def test_float32_takes_other_kernels(gpus: Gpus) -> None:
    q, k, v = vectors(3, 4, 2, 75, 16)
    setting = oracle.Setting(WINDOW, cut(75, 25))
    truth = oracle.attention(q, k, v, oracle.DEFINITIONS["longheads"](q, k, v, setting, chunk_size=4), setting)
    out = run(make("longheads", {"chunk_size": 4}), q.cuda(), k.cuda(), v.cuda(), setting.blocks, window=WINDOW)
    assert (out.cpu() - truth).abs().max() <= 1e-4
