"""GPUs that are not there: the CUDA code of lce runs on the CPU, as strictly as CUDA would run it.

    def test_something(gpus):                     # the fixture of tests/conftest.py: one pretended GPU
        x = torch.ones(4, device="cuda")          # is_cuda, on cuda:0; numbers in CPU memory
        with gpus.counting() as counts:
            x.sum().item()
        assert counts.syncs == 1 and counts.uploads == 0, counts.at

    with pretended_gpus(2) as gpus:               # two of them, or outside a test
        engine = lce.load(tiny_model, device="cuda:1", dtype="bfloat16", attention="torch")

What CUDA refuses raises: tensors of two devices in one operator, `numpy()`, memory of the GPU in a kernel of Numba, an
operator that CUDA lacks, a wait or an upload while a graph captures. What it does not refuse is made to show:

- Fresh memory holds NaN and the least integer. Freed memory is overwritten.
- What is queued in a stream that is not the default one is done when something waits for it, and not before.
  So is a copy to pinned memory that does not wait.
- At the end `gpus.faults` must be empty: memory that was freed while another stream may use it (`record_stream` is
  missing), and pinned memory that was written to while a copy may read it.
- A `torch.cuda.graph` does nothing until it is replayed; it then reads and writes the memory that it was captured with.
  Memory that was freed since then raises.

`torch.ops.aten._flash_attention_forward` has a strict stand-in (`flash.py`). With `triton=True` (the
fixture `triton_gpus`) Triton kernels run in its interpreter, in their stream, and are captured by graphs; it is slow.
Without, lce finds no Triton there, and PyTorch's operators serve.

What is not pretended: the rounding of CUDA's kernels, atomics, launch failures, time. The work of the default stream is
done at once, so that what should wait for it and does not is not found. `x.inner` shows the numbers of a tensor without
a wait. Shapes never change in place (`resize_`, `unsqueeze_`). A thread must begin inside the pretence to make tensors.
"""

from tests.pretended import flash
from tests.pretended.device import Counts, Gpus
from tests.pretended.fakes import pretended_gpus

__all__ = ["Counts", "Gpus", "flash", "pretended_gpus"]
