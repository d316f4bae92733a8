"""What CUDA does otherwise than a CPU: which devices an operator may mix, which operators wait, and which it lacks."""

from typing import Any

import torch
from torch import Tensor

CPU_ONLY = ("mkldnn", "_for_cpu", "_cpu", "onednn", "fbgemm", "qlinear")
COPIES = {"aten::copy_", "aten::_to_copy", "aten::_copy_from", "aten::copy"}
# Operators whose result has a size that only the device knows, or that read a number back.
WAITING = {
    f"aten::{name}"
    for name in (
        "nonzero masked_select _unique _unique2 unique_dim unique_consecutive unique_dim_consecutive bincount "
        "equal is_nonzero _local_scalar_dense multinomial histc _linalg_svd _linalg_eigh linalg_qr linalg_inv_ex "
        "_linalg_solve_ex linalg_lstsq"
    ).split()
}
INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}
PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::addmv", "aten::dot", "aten::mv"}
# Pointwise in all but their tags: a number on the CPU is an argument of the kernel.
TAKES_SCALARS = {"aten::where", "aten::masked_fill", "aten::masked_fill_", "aten::fill_", "aten::fill"}


class Rule:
    """What an operator's schema says, looked up once."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = str(schema.name)
        self.full_name = f"{self.name}.{schema.overload_name}".removesuffix(".")
        self.composite = self.name != "prim::device" and func._can_decompose()
        writes = [x.alias_info is not None and x.alias_info.is_write for x in schema.arguments]
        self.writes = [(at, x.name) for at, x in enumerate(schema.arguments) if writes[at]]
        aliases = [x.alias_info for x in schema.returns if x.alias_info is not None]
        self.is_view = bool(aliases) and not any(x.is_write for x in aliases)
        self.pointwise = torch.Tag.pointwise in func.tags or self.name in TAKES_SCALARS
        self.missing = any(part in self.name for part in CPU_ONLY) or not self.name.startswith(("aten::", "prim"))
        self.makes_garbage = self.name.startswith(("aten::empty", "aten::new_empty"))

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The arguments that the operator writes to."""
        given = [(at, name) for at, name in self.writes if at < len(args) or name in kwargs]
        return [args[at] if at < len(args) else kwargs[name] for at, name in given]


def check_devices(rule: Rule, args: tuple[Any, ...], tensors: list[Tensor], written: list[Tensor]) -> None:
    """Raise as PyTorch does if an operator cannot take tensors of these devices together."""
    name = rule.name
    if rule.missing:
        raise NotImplementedError(f"Could not run '{name}' with arguments from the 'CUDA' backend.")
    if name in COPIES:
        return
    if name in INDEXING:
        _check_indexing(name, args)
        return
    if name in PRODUCTS and not tensors[0].is_floating_point():
        raise RuntimeError(f'"{name.removeprefix("aten::")}_cuda" not implemented for {tensors[0].dtype}')
    gpu = next(x.device for x in tensors if x.is_cuda)
    for x in tensors:
        is_scalar = x.device.type == "cpu" and x.ndim == 0 and rule.pointwise and not any(x is one for one in written)
        if x.device != gpu and not is_scalar:
            raise RuntimeError(f"Expected all tensors to be on the same device, not {gpu} and {x.device}, in {name}")


def _check_indexing(name: str, args: tuple[Any, ...]) -> None:
    """Indices may be on the CPU: they are copied. Values may not, save for a number."""
    x, indices, *values = args
    for index in indices:
        if index is not None and index.device not in (x.device, torch.device("cpu")):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor")
    for value in values[:1] if "put" in name else ():
        if value.device != x.device and not (value.device.type == "cpu" and value.ndim == 0):
            raise RuntimeError(f"Expected all tensors to be on the same device, {x.device} and {value.device}!")


def waits(rule: Rule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the CPU waits for the device in an operator (copies aside)."""
    name = rule.name
    if name in INDEXING:
        is_mask = any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
        filled = "put" in name and args[2].numel() == 1 and not (len(args) > 3 and args[3])  # as masked_fill
        return is_mask and not filled
    if name == "aten::repeat_interleave":
        return (kwargs.get("output_size") or (args[1] if len(args) > 1 else None)) is None
    return name in WAITING


def cpu_indices(rule: Rule, args: tuple[Any, ...]) -> int:
    """How many indices an operator has to upload."""
    if rule.name not in INDEXING or not args[0].is_cuda:
        return 0
    return sum(x is not None and not x.is_cuda and x.numel() > 0 for x in args[1])
