"""The files in a checkpoint's folder: their names, and which safetensors files have the weights."""

import os
import re
from collections.abc import Sequence
from pathlib import Path, PureWindowsPath

from lce.errors import ModelError, shown
from lce.files import named, object_of, read_file
from lce.weights.safetensors_file import LARGEST_HEADER, MOST_TENSORS, Damaged, TensorInfo, few, read_header

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, GENERATION = "config.json", "generation_config.json"
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "tekken.json")  # the first is taken
_TOKENIZER = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
# The small files beside config.json and the weights, which `Source.read` gives.
BESIDE = (GENERATION, *VOCABULARIES, *_TOKENIZER, "chat_template.jinja", "chat_template.json")
# Names of files beside a model's own: what reads images, what was measured for quantising, and what adapts the model.
OTHER_PURPOSE = re.compile(r"(^|[-_./])(mmproj|imatrix|adapter|lora)([-_.]|$)", re.IGNORECASE)
MERGE = "merge it into its base model, for example with peft's merge_and_unload, and load the result"
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".npz", ".h5", ".msgpack")


def other_file(folder: Path) -> Path:
    """Return the file that says where the weights of a folder without `model.safetensors` are; see `weights_in`."""
    try:
        return folder / weights_in(sorted(os.listdir(folder)), named(folder))
    except OSError as error:
        fault = f"cannot be read ({error.strerror}); check the path and its permissions"
        raise ModelError(f"{named(folder)} {fault}") from None


def weights_in(names: Sequence[str], where: str) -> str:
    """Return the file of `names` that has all weights: `model.safetensors`, the index, or the only safetensors file.

    Mistral's `consolidated*`, which has other tensor names, comes last. Messages name the folder as `where`.
    """
    if plain := [name for name in (WEIGHTS, INDEX) if name in names]:
        return plain[0]
    found = [name for name in names if name.endswith(".safetensors")]
    own = [name for name in found if not name.startswith(("consolidated", "adapter"))]
    if found and all(name.startswith("adapter") for name in found):
        raise ModelError(f"{where} has the weights of an adapter alone ({few(found)}), not of a model; {MERGE}")
    best = [name for name in own if name.startswith("model")] or own or found
    if len(best) == 1 and not re.search(r"-\d+-of-\d+\.", best[0]):
        return best[0]
    if best:
        remedy = "download model.safetensors.index.json, or leave one whole file"
        raise ModelError(f"{where} has {few(best)} but no index; expected one file or shards with an index; {remedy}")
    if others := [name for name in names if name.endswith(_OTHER_WEIGHTS)]:
        remedy = "convert them, e.g. with transformers' save_pretrained(folder, safe_serialization=True)"
        raise ModelError(f"{where} has weights only as {few(others)}; lce reads safetensors and GGUF; {remedy}")
    raise ModelError(f"{where} has no weights; expected model.safetensors or shards with an index; check the path")


def weight_map_of(index: Path) -> dict[str, str]:
    """Return the shard of each tensor that an index lists. Raises ModelError for a shard that is not a plain name."""
    found = object_of(read_file(index, LARGEST_HEADER), index, unique=True).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(v, str) for v in found.values()):
        raise Damaged(index, "weight_map is not an object of tensor names and file names")
    for shard in sorted(set(found.values())):  # no path; the file may be a link, as in Hugging Face's cache
        if PureWindowsPath(shard).name != shard or not shard.endswith(".safetensors") or "\0" in shard:
            remedy = "use a checkpoint from a source you trust"
            raise ModelError(f"{named(index)}: the shard {shown(shard)} is not a plain *.safetensors name; {remedy}")
    return found


def read_shards(index: Path) -> tuple[dict[str, TensorInfo], dict[Path, tuple[int, ...]]]:
    """Read the headers of the shards that an index lists. Return their tensors by name, and the shards' stamps."""
    folder, weight_map = index.parent, weight_map_of(index)
    shards = sorted(set(weight_map.values()))
    if missing := [shard for shard in shards if not os.path.lexists(folder / shard)]:
        raise ModelError(f"{named(folder)} lacks {len(missing)} of the index's shards ({few(missing)}); download them")
    tensors, stamps = dict[str, TensorInfo](), dict[Path, tuple[int, ...]]()
    for shard in shards:
        found, _, stamps[folder / shard] = read_header(folder / shard)
        for name, info in found.items():
            if name in tensors or weight_map.get(name, shard) != shard:
                raise Damaged(index, f"tensor {shown(name)} is in {shown(shard)} and in another shard")
            tensors[name] = info
        if len(tensors) > MOST_TENSORS:
            raise Damaged(index, f"its shards have more than {MOST_TENSORS} tensors")
    if absent := [name for name in weight_map if name not in tensors]:
        raise Damaged(index, f"its shards lack {len(absent)} of the tensors that it lists ({few(absent)})")
    return tensors, stamps
