"""Rotary position embedding (Su et al., 2021) and the scalings that stretch it.

A `Rope` is a fixed set of frequencies; `Rope.turn` gives the rotation of a position as cosines and sines. Angles are
computed in float64, and only the cosines and sines are cast: at position 1,000,000 a float32 angle is already off by several hundredths.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lce.attention import Turn
from lce.models.config import RopeConfig


class Rope:
    """The frequencies of one context, and the factor that YaRN puts on the rotated vectors.

    `length` is the length announced when the context starts. Only `dynamic` uses it, and only here, so that its base
    never changes under cached keys.
    """

    def __init__(self, config: RopeConfig, head_dim: int, window: int, length: int = 0) -> None:
        self.config = config
        self.head_dim = head_dim
        self.inv_freq, self.scale = _SCALINGS[config.kind](config, head_dim, window, length)

    def turn(self, positions: Tensor, dtype: torch.dtype) -> Turn:
        """Cosines and sines `[*positions.shape, D/2]` in `dtype`, on the positions' device. Time: O(positions · D)."""
        angles = positions.to(torch.float64)[..., None] * self.inv_freq.to(positions.device)
        return Turn((angles.cos() * self.scale).to(dtype), (angles.sin() * self.scale).to(dtype))


def _base_frequencies(theta: float, head_dim: int) -> Tensor:
    return theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)


def _unscaled(config: RopeConfig, head_dim: int, window: int, length: int) -> tuple[Tensor, float]:
    return _base_frequencies(config.theta, head_dim), 1.0


def _linear(config: RopeConfig, head_dim: int, window: int, length: int) -> tuple[Tensor, float]:
    """Position interpolation (Chen et al., 2023): positions divided by the factor."""
    return _base_frequencies(config.theta, head_dim) / config.factor, 1.0


def _ntk_theta(theta: float, factor: float, head_dim: int) -> float:
    """The NTK-aware base (bloc97, 2023): the slowest frequency is interpolated, the fastest left alone."""
    return float(theta * factor ** (head_dim / (head_dim - 2)))


def _ntk(config: RopeConfig, head_dim: int, window: int, length: int) -> tuple[Tensor, float]:
    return _base_frequencies(_ntk_theta(config.theta, config.factor, head_dim), head_dim), 1.0


def _dynamic(config: RopeConfig, head_dim: int, window: int, length: int) -> tuple[Tensor, float]:
    """Dynamic NTK: the base follows the announced length once it passes the trained window."""
    trained = config.original_window or window
    stretch = config.factor * max(length, trained) / trained - (config.factor - 1)
    return _base_frequencies(_ntk_theta(config.theta, stretch, head_dim), head_dim), 1.0


def _yarn(config: RopeConfig, head_dim: int, window: int, length: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al., 2023): slow frequencies interpolated, fast ones kept, a ramp between; logits scaled."""
    trained = config.original_window or window
    base = _base_frequencies(config.theta, head_dim)

    def dimension_of(turns: float) -> float:  # the pair that makes so many turns over the trained window
        return head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)
    interpolated = ramp.clamp(0, 1)
    return base / config.factor * interpolated + base * (1 - interpolated), _yarn_scale(config)


def _yarn_scale(config: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * weight * math.log(config.factor) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)


def _llama3(config: RopeConfig, head_dim: int, window: int, length: int) -> tuple[Tensor, float]:
    """Llama 3.1: wavelengths beyond the trained window interpolated, short ones kept, a smooth step between."""
    trained = config.original_window or window
    base = _base_frequencies(config.theta, head_dim)
    turns = trained * base / (2 * math.pi)
    smooth = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    kept = smooth.clamp(0, 1)
    return base / config.factor * (1 - kept) + base * kept, 1.0


_SCALINGS: dict[str, Callable[[RopeConfig, int, int, int], tuple[Tensor, float]]] = {
    "none": _unscaled,
    "linear": _linear,
    "ntk": _ntk,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "llama3": _llama3,
}
