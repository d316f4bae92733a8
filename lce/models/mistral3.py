"""Mistral 3: the layout of checkpoints for images and text, such as Mistral Small 3.1 and Ministral 3."""

from dataclasses import replace

from lce.models.config import Fields, ModelConfig
from lce.models.layers import Model, family, family_of

# These keys of config.json, outside its `text_config`, describe the weights of the text model, too.
_SHARED = ("dtype", "torch_dtype", "quantization_config", "compression_config")


@family("mistral3", "Mistral3ForConditionalGeneration")
class Mistral3(Model):
    """The layout of a checkpoint with a text model and an image encoder. The encoder's weights are not used.

    `read` returns the config of the text model. The family that `text_config` names builds the model.
    """

    @classmethod
    def read(cls, fields: Fields, generation: Fields) -> ModelConfig:
        own = fields.values.get("text_config")
        if not isinstance(own, dict):
            raise fields.refusal("text_config", "an object")
        shared = {key: fields.values[key] for key in _SHARED if fields.values.get(key) is not None}
        text = Fields(f"{fields.where}: text_config", own | shared)
        found = family_of(text)
        if issubclass(found, Mistral3):
            raise text.refusal("model_type", "the name of a text model's family")
        config = found.read(text, generation)
        tied = fields.flag("tie_word_embeddings", default=text.flag("tie_word_embeddings", default=True))
        unused = ("vision_tower.*", "multi_modal_projector.*")
        return replace(config, tied=tied, weight_prefix="language_model.", unused=unused)
