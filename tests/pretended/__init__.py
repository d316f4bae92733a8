"""GPUs that are not there: the CUDA code of lce runs on the CPU, as strictly as CUDA would run it.

    def test_something(gpus):                     # the fixture of tests/conftest.py: one pretended GPU
        x = torch.ones(4, device="cuda")          # is_cuda, on cuda:0, numbers in CPU memory
        with gpus.counting() as counts:
            x.sum().item()
        assert counts.syncs == 1 and counts.uploads == 0

    with pretended_gpus(2) as gpus:               # two, or outside a test
        engine = lce.load(tiny_model, device="cuda:1", dtype="bfloat16")

What CUDA refuses raises: tensors of two devices in one operator, `numpy()`, memory of the GPU in a kernel of Numba, an
operator that CUDA lacks. Fresh memory holds NaN, freed memory is overwritten. `counts.at` says what was counted. Triton
kernels run in its interpreter (`TRITON_INTERPRET=1`, which tests/conftest.py sets). Numbers on CUDA differ in the last
bits from those on a CPU: here they do not.

A tensor of a GPU shows its numbers as `x.inner`, for asserts. Shapes never change in place (`resize_`, `unsqueeze_`).
"""

from tests.pretended.device import Counts, Gpus
from tests.pretended.fixture import pretended_gpus

__all__ = ["Counts", "Gpus", "pretended_gpus"]
