"""Makes the files of a tokenizer from Mistral's tekken.json, which some models have alone.

tekken.json has the tokens of a byte-level BPE by rank, their bytes in base64, the regular expression that cuts a text
into words, and special tokens, which have the first ids. There are no merges: of two neighbours that are a token
together, those of the least rank are merged first. So each way to cut a token into two tokens is a merge.
"""

import base64
import json
from pathlib import Path
from typing import Any

from lce.errors import ModelError
from lce.files import named, object_of
from lce.tokenizer.files import one_line
from lce.tokenizer.gguf import byte_level_json
from lce.tokenizer.spelling import characters_of

MOST_VALUES, MOST_TOKENS = 8_000_000, 1 << 20  # The most JSON values, and tokens. Published files have 1e6 and 1 << 17.
MOST_BYTES = 512  # The most bytes of a token. Published ones have up to 76.
# The special tokens of files that list none, by their ids; others are <SPECIAL_20>, and so on.
_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)


def tekken_files(raw: bytes, path: Path, own: dict[str, Any]) -> dict[str, bytes]:
    """Return a tokenizer's files, by name, made of tekken.json's bytes; `own` has settings of the folder itself."""
    with one_line(ModelError, f"{named(path)} is not a tokenizer that lce reads", "download it again"):
        made = _json_of(object_of(raw, path, MOST_VALUES))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, **own}
    return {"tokenizer.json": made, "tokenizer_config.json": json.dumps(settings).encode()}


def _json_of(content: dict[str, Any]) -> bytes:
    """Return tokenizer.json. Raises an exception of Python for what is not as expected."""
    config = content["config"]
    n_special, n_all = config["default_num_special_tokens"], config["default_vocab_size"]
    if not 0 < n_special < n_all <= MOST_TOKENS:
        raise ValueError(f"it has {n_all} tokens, {n_special} of them special")
    usual: list[dict[str, Any]] = [{"rank": rank, "token_str": token} for rank, token in enumerate(_SPECIAL)]
    entries = content.get("special_tokens") or usual
    vocab, n_own = content["vocab"][: n_all - n_special], n_all - n_special
    if [entry["rank"] for entry in (*entries, *vocab)] != [*range(len(entries)), *range(n_own)]:
        raise ValueError(f"it lacks some of {n_own} tokens, in the order of their ranks")
    special = [*(x["token_str"] for x in entries), *(f"<SPECIAL_{i}>" for i in range(len(entries), n_special))]
    names = [characters_of(base64.b64decode(entry["token_bytes"], validate=True)) for entry in vocab]
    ids = {name: token_id for token_id, name in enumerate([*special, *names])}
    own, single = {*names}, {characters_of(bytes((i,))) for i in range(256)}
    if len(ids) != n_all or max(map(len, names)) > MOST_BYTES or not single <= own:
        raise ValueError(f"its tokens are not all bytes and different texts of at most {MOST_BYTES} bytes")
    cuts = ((name[:i], name[i:]) for name in names for i in range(1, len(name)))
    merges = [f"{left} {right}" for left, right in cuts if left in own and right in own]
    return byte_level_json(ids, dict.fromkeys(special, True), [config["pattern"]], merges, ignore_merges=True)
