"""The devices that a user names, and the division of a model's layers among several GPUs.

Each GPU has consecutive layers, so that hidden states move once from one GPU to the next. The embedding is on the first
layer's GPU, the head on the last layer's. Several GPUs have more memory than one, but compute one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lce import system
from lce.errors import UsageError, shown

EXPECTED = "expected auto, cpu, cuda or cuda:N, or several GPUs: cuda:0,cuda:1 or cuda:all"
Borders = tuple[tuple[int, torch.device], ...]  # (first layer, device) of each device except the first


def devices_of(name: object) -> tuple[torch.device, ...]:
    """Return the devices that a user names: one, or several GPUs in a comma-separated text or a list.

    Raises `UsageError` for devices that this machine lacks, or that cannot share one model.
    """
    names: Sequence[object] = name if isinstance(name, list | tuple) else [name]
    if isinstance(name, str):
        names = [part.strip() for part in name.split(",")]
        if name == "cuda:all":
            names = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cuda"]
    if not names:
        raise UsageError(f"device is {shown(name)}; {EXPECTED}")
    devices = [device_of(each) for each in names]
    if len(devices) == 1:
        return tuple(devices)
    if any(each in (None, "auto") for each in names) or any(device.type != "cuda" for device in devices):
        raise UsageError(f"device is {shown(name)}; a model's layers can be on several GPUs, such as cuda:0,cuda:1")
    devices = [torch.device("cuda", torch.cuda.current_device() if x.index is None else x.index) for x in devices]
    if len({*devices}) < len(devices):
        raise UsageError(f"device is {shown(name)}; expected each device once")
    return tuple(devices)


def device_of(name: object) -> torch.device:
    """Return the device that a user names. Raises `UsageError` for a device that this machine lacks."""
    if name is None or (isinstance(name, str) and name == "auto"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not isinstance(name, str | torch.device):
        raise UsageError(f"device is {shown(name)}; {EXPECTED}")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"unknown device {shown(name)}; {EXPECTED}") from None
    n_devices = {"cpu": 1, "cuda": torch.cuda.device_count()}.get(device.type, 0)
    if not n_devices or (device.index or 0) >= n_devices:
        cuda = " or cuda" if torch.cuda.is_available() else ""
        raise UsageError(f"device {shown(str(name))} is not available here; expected auto, cpu{cuda}")
    return device


def borders_of(devices: Sequence[torch.device], n_layers: int, sizes: Mapping[str, int]) -> Borders:
    """Divide `n_layers` layers among devices by free memory (see `counts_of`); return each later device's first layer.

    `sizes` has each weight's bytes, by lce's name. A tied head is copied to the last device.
    """
    if len(devices) > n_layers:
        raise UsageError(f"{len(devices)} devices for {n_layers} layers; expected one layer or more on each device")
    free = [system.free_memory(device) or 0 for device in devices]
    free[0] -= sizes["embed"]
    free[-1] -= sizes.get("head", sizes["embed"]) + sizes["norm"]
    counts = counts_of(free, n_layers)
    return tuple((sum(counts[:i]), device) for i, device in enumerate(devices) if i)


def counts_of(free: Sequence[int], n_layers: int) -> list[int]:
    """Return how many layers each device gets, one or more, given the `free` bytes of each device.

    The least memory per layer on any device bounds the length of contexts, so it is maximised: each next layer goes to
    the device that would then have the most memory per layer. Example: 40, 40 and 20 GiB get 3, 3 and 1 of 7 layers.
    """
    counts = [1] * len(free)
    for _ in range(n_layers - len(free)):
        counts[max(range(len(free)), key=lambda i: free[i] / (counts[i] + 1))] += 1
    return counts
