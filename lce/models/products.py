"""Products with weights, norms, gates and rotary angles: the only module of this package that chooses kernels.

Each function calls one of lce's kernels if it can take the tensors, else PyTorch's operators. No other module of this
package depends on kernels or devices.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lce import gpu
from lce.kernels.elementwise import elementwise
from lce.kernels.elementwise.elementwise import runs_on
from lce.kernels.product import panels
from lce.kernels.product.blocks import BlockMatrix
from lce.kernels.product.products import product
from lce.kernels.runtime.kernel import DTYPES
from lce.kernels.runtime.kernel import Slices as Slices  # for lanes and batches
from lce.kernels.runtime.kernel import seam as seam
from lce.kernels.runtime.kernel import sliced as sliced
from lce.kernels.runtime.shared import MOST_ROWS
from lce.kernels.runtime.shared import Gate as Gate  # for families
from lce.models.ranks import Ranks
from lce.profiling import timed
from lce.weights.packed import ROW_BLOCK, Matrix, PackedMatrix, Stacked

SHARED_ROWS = MOST_ROWS  # the most rows of generated tokens in a product
GPU_ROWS = gpu.launching.MOST_ROWS  # The most rows that the GPU's kernel multiplies.
SCRATCH = 64 << 20  # The most bytes of unpacked weights that a product with quantised weights holds at once.
_thread = threading.local()  # `memory`: this thread's scratch memory for unpacked weights


@timed("products")
def linear(
    x: Tensor,
    weight: "Matrix | SummedMatrix | VocabularyPart",
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gate: Gate | None = None,
    onto: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    generated: bool = False,
) -> Tensor:
    """Multiply `x [T, in]` with `weight [out, in]` transposed, plus `bias [out]`. Time: O(T · in · out).

    With `norm [in]`, `x` is first normalised by `rms_norm`. With `gate`, the result is that activation of the
    product's first half times its second half, `[T, out / 2]`. With `onto`, the result is added to that tensor in
    place. The result has the dtype of the weights, or `out_dtype` float32: the sums as they are, not rounded. If a norm
    is given, x may be float32. For up to `SHARED_ROWS` rows of `generated` tokens, one kernel does everything, reads
    the weights at memory bandwidth, and rounds once; also for read ones where PyTorch multiplies many rows on a CPU
    (`panels.arithmetic`). Where lce does, a row's bits depend on `generated`, and not on T.
    """
    if isinstance(weight, SummedMatrix | VocabularyPart):
        return weight.linear(x, bias, norm=norm, eps=eps, onto=onto, generated=generated)
    around: dict[str, Any] = {"norm": norm, "eps": eps, "gate": gate, "onto": onto, "out_dtype": out_dtype}
    computed = None if generated else _computed(x, weight, norm)
    generated |= x.is_cpu and len(x) <= SHARED_ROWS and not computed
    if not isinstance(weight, Tensor):
        if generated and x.is_cpu:
            return weight.product(x.contiguous(), bias, **around)
        if isinstance(weight, BlockMatrix) and gate != "gelu_tanh" and _few_on_gpu(x):
            around["gated"] = around.pop("gate") is not None
            return weight.product(x.contiguous(), bias, **around)
    elif generated and x.is_cpu and _plain(x, weight, norm, onto):
        return product(x, weight, bias, **around)
    elif gate != "gelu_tanh" and _few_on_gpu(x) and _plain(x, weight, norm, onto):
        around["gated"] = around.pop("gate") is not None
        return gpu.products.product(x, weight, bias, **around)
    if computed:
        dtype = _stored_dtype(x, weight, norm)
        if out_dtype or computed is torch.float32:
            x = (x if norm is None else rms_norm(x.float(), norm.float(), eps)).float().contiguous()
            dtype = torch.float32 if gate else out_dtype or dtype  # a gate's result is multiplied next, in float32
        else:
            x = (x if norm is None else rms_norm(x, norm, eps)).to(computed).contiguous()
        matrix: Any = weight  # of a kind for CPUs
        if not isinstance(weight, Stacked):
            return panels.product(x, matrix, bias, gate, onto, dtype)
        out = torch.cat([panels.product(x, part, b, None, None, dtype) for part, b in matrix.with_biases(bias)], dim=1)
        return _after(out, gate, onto)
    return _by_operators(x, weight, bias, **around)


def _by_operators(
    x: Tensor, weight: Matrix, bias: Tensor | None, norm: Tensor | None, eps: float, gate: Gate | None, **how: Any
) -> Tensor:
    onto: Tensor | None = how["onto"]
    out_dtype: torch.dtype | None = how["out_dtype"]
    wide = out_dtype is not None and x.is_cpu  # the norm's result is not rounded either
    if norm is not None:
        x = rms_norm(x.to(out_dtype), norm.to(out_dtype), eps) if wide else rms_norm(x, norm, eps)
    if onto is not None and x.is_cuda and bias is None and not gate and isinstance(weight, Tensor):
        return onto.addmm_(x, weight.T)  # one kernel launch, which adds before it rounds
    out = _product_of_many(x.to(out_dtype) if wide else x, weight, bias, out_dtype)
    return _after(out, gate, onto)


def _after(out: Tensor, gate: Gate | None, onto: Tensor | None) -> Tensor:
    out = gate_mul(out, gate) if gate else out
    return out if onto is None else onto.add_(out)


def _plain(x: Tensor, weight: Tensor, norm: Tensor | None, onto: Tensor | None) -> bool:
    """Return whether lce's kernels can take these tensors: of the dtypes named there, contiguous, without gradients."""
    dtype = x.dtype if norm is None else norm.dtype
    if x.dtype not in DTYPES or weight.dtype is not dtype or x.requires_grad or weight.requires_grad:
        return False
    return x.is_contiguous() and weight.is_contiguous() and (onto is None or onto.is_contiguous())


def _few_on_gpu(x: Tensor) -> bool:
    """Return whether the GPU's kernels for few rows take `x`."""
    return 0 < len(x) <= GPU_ROWS and gpu.launching.runs_on(x)


def products_in(dtype: str) -> str:
    """Return the dtype in which this CPU multiplies many rows of a model of `dtype`: float32 if that is faster."""
    computed = panels.arithmetic(getattr(torch, dtype))
    return dtype if computed is None else DTYPES[computed]


def _stored_dtype(x: Tensor, weight: Matrix, norm: Tensor | None) -> torch.dtype:
    """Return the dtype of plain weights; packed ones have that of the model: the dtype of the norm, or of x."""
    plain = [part for part in (weight.parts if isinstance(weight, Stacked) else (weight,)) if isinstance(part, Tensor)]
    return (plain[0] if plain else x if norm is None else norm).dtype


def _computed(x: Tensor, weight: Matrix, norm: Tensor | None) -> torch.dtype | None:
    """Return the dtype in which our kernel multiplies many rows; None: PyTorch multiplies them."""
    if not x.is_cpu or x.requires_grad:
        return None
    if isinstance(weight, Tensor) and (weight.requires_grad or not weight.is_contiguous()):
        return None
    return panels.arithmetic(_stored_dtype(x, weight, norm))


def rows_of(weight: "Tensor | PackedMatrix | VocabularyPart", ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows `ids [T]` of the embedding, `[T, in]`; on a CPU in float32: a layer's sums are not rounded."""
    dtype = torch.float32 if ids.is_cpu else dtype
    return F.embedding(ids, weight).to(dtype) if isinstance(weight, Tensor) else weight.rows(ids, dtype)


def _product_of_many(x: Tensor, weight: Matrix, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
    """Multiply many rows `x [T, in]` with a weight matrix. Quantised weights are unpacked first, to the dtype of x.

    On a CPU, half-precision weights are converted to float32 if x is float32, because PyTorch's products there round to
    the dtype of x.
    """
    if isinstance(weight, Stacked):
        return torch.cat([_product_of_many(x, *part, out_dtype) for part in weight.with_biases(bias)], dim=1)
    if isinstance(weight, BlockMatrix) and _few_on_gpu(x):
        return weight.product(x.contiguous(), bias, out_dtype=out_dtype)
    if not isinstance(weight, Tensor) or (x.is_cpu and weight.dtype is not x.dtype):
        return _product_of_unpacked(x, weight, bias, out_dtype)
    if out_dtype is not None and x.dtype is not out_dtype:
        out: Tensor = torch.mm(x, weight.T, out_dtype=out_dtype)
        return out if bias is None else out.add_(bias)
    return F.linear(x, weight, bias)


def _product_of_unpacked(
    x: Tensor, weight: Tensor | PackedMatrix, bias: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    """Multiply with weights converted to the dtype of x, `SCRATCH` bytes at a time, in memory that the thread keeps.

    A GPU's memory has `SCRATCH` bytes from the first time on, and never moves, as recorded graphs need.
    """
    n_rows, size = weight.shape
    block = min(n_rows, max(ROW_BLOCK, SCRATCH // (size * x.element_size()) // ROW_BLOCK * ROW_BLOCK))
    needed, kept = block * size * x.element_size(), vars(_thread).setdefault("memory", {})
    memory = kept.get(x.device)
    if memory is None or len(memory) < needed:
        memory = torch.empty(needed if x.is_cpu else max(needed, SCRATCH), dtype=torch.uint8, device=x.device)
        kept[x.device] = memory
    scratch = memory[:needed].view(x.dtype).view(block, size)
    bias = None if bias is None else bias.to(x.dtype)
    whole = x.new_empty(len(x), n_rows, dtype=out_dtype)
    for first in range(0, n_rows, block):
        rows = scratch[: n_rows - first]
        if isinstance(weight, Tensor):
            rows.copy_(weight[first : first + len(rows)])
        else:
            weight.unpacked(first, rows)
        part = None if bias is None else bias[first : first + len(rows)]
        whole[:, first : first + len(rows)] = _product_of_many(x, rows, part, out_dtype)
    return whole


@contextmanager
def scratch_in(memory: dict[torch.device, Tensor]) -> Iterator[None]:
    """Let this thread's products use other scratch memory inside `with`: a recorded graph may run in any thread."""
    own, _thread.memory = vars(_thread).get("memory", {}), memory
    try:
        yield
    finally:
        _thread.memory = own


@timed("norms")
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None, onto: Tensor | None = None
) -> Tensor:
    """Divide vectors `x [..., D]` by their root mean squares, times `weight [D]`: see `elementwise.rms_norm`."""
    if runs_on(x):
        return elementwise.rms_norm(x, weight, eps, dtype, onto)
    if gpu.launching.runs_on(x):
        out = gpu.elementwise.rms_norms(eps, (x, weight))[0]
    else:
        common = torch.promote_types(x.dtype, weight.dtype)
        out = F.rms_norm(x.to(common), weight.shape, weight.to(common), eps).to(weight.dtype)
    return out.to(dtype or out.dtype) if onto is None else onto.add_(out)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert `x [T, D]` to `dtype`."""
    if x.dtype is dtype:
        return x
    return elementwise.rms_norm(x, None, dtype=dtype) if runs_on(x) else x.to(dtype)


def norm_heads(q: Tensor, q_weight: Tensor, k: Tensor, k_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Apply `rms_norm` to queries and to keys, `[heads, T, D]` each; on a GPU in one launch."""
    if gpu.launching.runs_on(q):
        q, k = gpu.elementwise.rms_norms(eps, (q, q_weight), (k, k_weight))
        return q, k
    return rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)


@timed("activations")
def gate_mul(x: Tensor, gate: Gate) -> Tensor:
    """Multiply the activation `gate` of the first half of `x [T, 2·D]` with the second half: `[T, D]`."""
    if runs_on(x):
        return elementwise.gate_mul(x, gate)
    if gate == "silu" and gpu.launching.runs_on(x):
        return gpu.elementwise.silu_mul(x)
    first, second = x.chunk(2, dim=-1)
    return (F.silu(first) if gate == "silu" else F.gelu(first, approximate="tanh")).mul_(second)


@dataclass(frozen=True, eq=False)
class SummedMatrix:
    """A matrix whose columns are divided: this rank has `own`, and those columns of x. Sums are added in float32."""

    own: Matrix
    ranks: Ranks

    def linear(
        self, x: Tensor, bias: Tensor | None, *, norm: Tensor | None, eps: float, onto: Tensor | None, generated: bool
    ) -> Tensor:
        """Do what `linear` does with the whole matrix, as every rank does."""
        assert norm is None, "a rank has only a part of the vectors"
        out = self.ranks.sum(linear(x, self.own, out_dtype=torch.float32, generated=generated))
        if bias is not None:
            out += bias
        return out.to(_stored_dtype(x, self.own, None)) if onto is None else onto.add_(out)


@dataclass(frozen=True, eq=False)
class VocabularyPart:
    """An embedding or a head of `n_rows` tokens of which this rank has the rows `own`, from token `first` on.

    Each number of a result is computed by one rank, and has the same bits on all ranks, whatever their machines.
    """

    own: Tensor | PackedMatrix
    first: int
    n_rows: int
    ranks: Ranks

    def rows(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows `ids [T]`: `[T, in]`."""
        local = ids - self.first
        others = (local < 0) | (local >= self.own.shape[0])
        found = rows_of(self.own, local.masked_fill_(others, 0), dtype)
        return self.ranks.sum(found.masked_fill_(others[:, None], 0.0))

    def linear(
        self, x: Tensor, bias: Tensor | None, *, norm: Tensor | None, eps: float, onto: Tensor | None, generated: bool
    ) -> Tensor:
        assert bias is None, "a head has no bias"
        assert onto is None, "logits are added to nothing"
        out = x.new_zeros(len(x), self.n_rows, dtype=torch.float32)
        own = linear(x, self.own, norm=norm, eps=eps, out_dtype=torch.float32, generated=generated)
        out[:, self.first : self.first + own.shape[1]] = own
        return self.ranks.sum(out)


def merge_heads(out: Tensor) -> Tensor:
    """Return the heads' outputs `[H, T, D]` side by side, `[T, H · D]`. The result for one token is a view."""
    n = out.shape[1]
    return out.reshape(1, -1) if n == 1 else out.transpose(0, 1).reshape(n, -1)


def put_tokens(out: Tensor, joined: Tensor, first: int) -> None:
    """Copy attention's output `[H, n, D]` to tokens `first..first+n-1` of `joined`, whose memory is `[B, H, D]`."""
    for i in range(out.shape[1]):
        one, rows = out[:, i : i + 1], joined.transpose(0, 1)[first + i][:, None]
        if runs_on(out) and out.dtype is rows.dtype:
            elementwise.append(one, one, rows, rows, 0, None, None)
        else:
            rows.copy_(one)


def turns(positions: Tensor, frequencies: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `scale` · cosines and sines `[*positions.shape, D/2]` of positions times `frequencies [D/2]`, float64."""
    if not positions.is_cpu and dtype in gpu.launching.DTYPES and gpu.launching.installed():
        cos, sin = gpu.elementwise.turns(positions, frequencies, scale, dtype)
        return cos, sin
    angles = positions.to(torch.float64)[..., None] * frequencies
    return angles.cos().mul_(scale).to(dtype), angles.sin_().mul_(scale).to(dtype)
