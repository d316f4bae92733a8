"""The backend of the flash-attn package."""

import importlib.util

from torch import Tensor

from lce.attention.attention import Attended
from lce.attention.compiled import Compiled


class Flash(Compiled):
    """The backend that runs flash-attn on CUDA in half precision; elsewhere it does what `compiled` does."""

    name = "flash"
    speed, for_gpus = 3, True

    @classmethod
    def missing(cls) -> str | None:
        if importlib.util.find_spec("flash_attn") is None:
            return "the flash-attn package: pip install 'lce[flash]'; it is for GPUs alone"
        return None

    def flash(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None) -> Attended:
        """Do what `Torch.flash` does, by flash-attn. Tiles take PyTorch's kernel; flash-attn cannot skip tiles."""
        from flash_attn import flash_attn_func

        span = (-1, -1) if window is None else (window - 1, 0)
        out, lse, _ = flash_attn_func(q, k, v, causal=causal, window_size=span, return_attn_probs=True)
        return out, lse
