"""Rewrite a checkpoint with value projections times a power of two and output projections divided by the same.

    python -m tools.rescale_values --model demo --factor 16 --out demo-large-values

Full attention stays the same to the bit, since a power of two changes only exponents. A method that compares values
with keys, as LongHeads' summary does, changes: see `lce/models/demo/README.md`.
"""

from __future__ import annotations

import argparse
import math
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lce.weights.source import DEMO


def rescale(model: Path, factor: float, out: Path) -> int:
    """Write `model`, rescaled, to the new folder `out`; return the number of changed tensors.

    Raises `ValueError` for a factor that is no power of two, a checkpoint without the projections, or a number that
    leaves the range of its dtype.
    """
    if factor <= 0 or math.frexp(factor)[0] != 0.5:
        raise ValueError(f"factor is {factor:g}; expected a power of two, such as 64 or 0.125")
    factors = {"v_proj.weight": factor, "v_proj.bias": factor, "o_proj.weight": 1 / factor}
    shards = sorted(model.glob("*.safetensors"))
    if not any(_ends(name, "v_proj.weight") for shard in shards for name in _names(shard)):
        raise ValueError(f"{model} has no v_proj.weight; expected a checkpoint with separate value projections")
    out.mkdir(parents=True)
    changed = 0
    for file in sorted(model.iterdir()):
        if file.suffix == ".safetensors":
            changed += _rescale_file(file, out / file.name, factors)
        elif file.is_file():
            shutil.copyfile(file, out / file.name)
    return changed


def _rescale_file(file: Path, target: Path, factors: dict[str, float]) -> int:
    tensors = load_file(file)
    wanted = {name: by for name in tensors for end, by in factors.items() if _ends(name, end)}
    for name, by in wanted.items():
        new = tensors[name] * by
        if not torch.equal(new / by, tensors[name]):
            dtype = tensors[name].dtype
            raise ValueError(f"{name} in {dtype} has numbers that leave its range; use a factor nearer to 1")
        tensors[name] = new
    with safe_open(file, "pt") as opened:
        save_file(tensors, target, metadata=opened.metadata())
    return len(wanted)


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith("." + end)


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a checkpoint's folder, or demo")
    parser.add_argument("--factor", type=float, default=16.0)
    parser.add_argument("--out", required=True, help="a new folder")
    args = parser.parse_args()
    changed = rescale(DEMO if args.model == "demo" else Path(args.model), args.factor, Path(args.out))
    print(f"{changed} tensors rescaled, in {args.out}")


if __name__ == "__main__":
    main()
