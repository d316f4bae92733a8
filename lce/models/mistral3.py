"""Mistral 3: an image-and-text checkpoint around a text model. Mistral Small 3.1 and Ministral 3 are published so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from lce.models.config import ModelConfig
from lce.models.fields import Fields
from lce.models.registry import family, family_of

# Keys that describe the whole checkpoint and stand beside `text_config`.
_OF_THE_WHOLE = ("dtype", "torch_dtype", "quantization_config", "compression_config")


@family("mistral3", "Mistral3ForConditionalGeneration")
class Mistral3:
    """Reads the text model of `text_config` and leaves the image encoder's weights unread."""

    model_type: ClassVar[str]
    architecture: ClassVar[str]

    @classmethod
    def read(cls, fields: Fields, folder: Path) -> ModelConfig:
        text = fields.inner("text_config", inherited=_OF_THE_WHOLE)
        config = family_of(text).read(text, folder)
        return replace(
            config,
            tied=fields.flag("tie_word_embeddings", default=True),
            weight_prefix="language_model.",
            unread=("vision_tower.*", "multi_modal_projector.*"),
        )
