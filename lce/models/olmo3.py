"""OLMo 3 (Olmo Team, 2025): OLMo 2 with a sliding window in three of four layers, and YaRN in the others."""

from dataclasses import replace

from lce.models.config import SLIDING_KEYS, Fields, ModelConfig, sliding_kinds
from lce.models.layers import family
from lce.models.olmo2 import Olmo2

THETA = 500000.0


@family("olmo3", "Olmo3ForCausalLM")
class Olmo3(Olmo2):
    """OLMo 2 with layers of two kinds. RoPE has the same base in both; its scaling is for full attention alone."""

    defaults = Olmo2.defaults | {"sliding_window": 4096, "rope_theta": THETA}
    implements = SLIDING_KEYS

    @classmethod
    def configure(cls, config: ModelConfig, fields: Fields) -> ModelConfig:
        kinds = sliding_kinds(fields, config, interval=4, theta=fields.number("rope_theta"))
        return replace(super().configure(config, fields), layer_kinds=kinds)
