"""Rotary position embedding (Su et al., 2021) and the scalings that stretch it.

Angles are computed in float64, because at position 1,000,000 a float32 angle has an error of several hundredths. Only
their cosines and sines are cast to the model's dtype.
"""

import math

import torch
from torch import Tensor

from lce.attention import Turn
from lce.models.config import LayerKind, LongRope, RopeConfig
from lce.models.products import turns

NO_ROTATION = RopeConfig("linear", factor=math.inf)  # all frequencies are 0, and every rotation is by 0


class Rope:
    """RoPE's frequencies for one context, and the factor by which YaRN multiplies rotated vectors.

    The scaling's factor is a number: see `RopeConfig.fitted`. Scalings that follow the length depend on `length`, the
    context's final length. A user announces `length` when the context starts. `length` never changes, because cached
    keys are rotated with frequencies that depend on `length`.
    """

    def __init__(self, config: RopeConfig, head_dim: int, window: int, length: int = 0, offset: int = 0) -> None:
        self.config = config
        self.head_dim = head_dim
        self.window, self.length, self.offset = window, length, offset
        self._kinds: dict[LayerKind, Rope] = {}
        self.inv_freq = _frequencies(config, head_dim, config.original_window or window, length)
        self.scale = _scale(config) if config.kind in ("yarn", "longrope") else 1.0
        # Copies of `inv_freq` on other devices. Each is made once, because a copy waits for the device.
        self._uploaded: dict[torch.device, Tensor] = {}

    def of(self, kind: LayerKind) -> "Rope":
        """Return the RoPE of layers of this kind, made once: this RoPE, unless the kind has another or none."""
        own = kind.rope if kind.rotated else NO_ROTATION
        if own is None:
            return self
        if kind not in self._kinds:
            self._kinds[kind] = Rope(own, self.head_dim, self.window, self.length, self.offset)
        return self._kinds[kind]

    def positions(self, rows: Tensor) -> Tensor:
        """Return the positions of the tokens in these rows of the context's cache: `offset` more than the rows."""
        return rows + self.offset if self.offset else rows

    def rotates_as(self, other: "Rope") -> bool:
        """Return whether another RoPE turns vectors in the same way."""
        same = (self.config, self.scale, self.offset) == (other.config, other.scale, other.offset)
        return same and torch.equal(self.inv_freq, other.inv_freq)

    def turn(self, positions: Tensor, dtype: torch.dtype) -> Turn:
        """Return cosines and sines of the rotation to `positions`, `[*positions.shape, D/2]` each, on their device."""
        device = positions.device
        if device != self.inv_freq.device and device not in self._uploaded:
            self._uploaded[device] = self.inv_freq.to(device)
        return Turn(*turns(positions, self._uploaded.get(device, self.inv_freq), self.scale, dtype))


def _frequencies(config: RopeConfig, head_dim: int, trained: int, length: int) -> Tensor:
    """Return the frequencies `[D/2]`, float64, of a model that was trained on `trained` positions."""
    exponents = -torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    base: Tensor = config.theta**exponents
    return base if config.kind == "none" else _scaled(config, base, exponents, head_dim, trained, length)


def _scaled(config: RopeConfig, base: Tensor, powers: Tensor, head_dim: int, trained: int, length: int) -> Tensor:
    if isinstance(config, LongRope):
        divisors = torch.tensor(config.long_factor if length > trained else config.short_factor, dtype=torch.float64)
        powers = -torch.arange(0, config.rotary_dim, 2, dtype=torch.float64) / config.rotary_dim
        return torch.cat((config.theta**powers / divisors, divisors.new_zeros((head_dim - config.rotary_dim) // 2)))
    factor = float(config.factor)
    if factor == 1 and config.kind != "dynamic":
        return base
    match config.kind:
        case "linear":  # position interpolation (Chen et al., 2023): positions divided by the factor
            return base / factor
        case "ntk":
            return _ntk_theta(config.theta, factor, head_dim) ** powers
        case "dynamic":  # dynamic NTK: the base follows the announced length once it passes the trained window
            stretch = factor * max(length, trained) / trained - (factor - 1)
            return _ntk_theta(config.theta, stretch, head_dim) ** powers
        case "yarn":
            kept = 1 - _yarn_ramp(config, head_dim, trained)
        case other:  # long wavelengths are interpolated, short ones kept, others a weighted mean of both
            assert other == "llama3", other
            turns = trained * base / (2 * math.pi)
            smooth = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
            kept = smooth.clamp(0, 1)
    return base / factor * (1 - kept) + base * kept


def _ntk_theta(theta: float, factor: float, head_dim: int) -> float:
    """Return the NTK-aware base of RoPE (bloc97, 2023). It interpolates the slowest frequency and keeps the fastest."""
    return float(theta * factor ** (head_dim / (head_dim - 2)))


def _yarn_ramp(config: RopeConfig, head_dim: int, trained: int) -> Tensor:
    """Return YaRN's ramp `[D/2]` (Peng et al., 2023): 1 for slow, interpolated frequencies, 0 for kept ones."""

    def dimension_of(cycles: float) -> float:  # the index of the frequency with this many cycles in the trained window
        return head_dim * math.log(trained / (cycles * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return ((torch.arange(head_dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)


def _scale(config: RopeConfig) -> float:
    """Return the factor by which YaRN and LongRoPE multiply rotated queries and keys."""
    factor = float(config.factor)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)
