"""Gemma 3: the layout of checkpoints for images and text, from 4B on."""

from lce.models.layers import family
from lce.models.mistral3 import Mistral3


@family("gemma3", "Gemma3ForConditionalGeneration")
class Gemma3(Mistral3):
    """The layout of Mistral 3: a text model, of the family `gemma3_text`, and an image encoder, which is not used."""
