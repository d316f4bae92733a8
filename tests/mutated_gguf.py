"""Reads damaged copies of GGUF files: `python -m tests.mutated_gguf FIRST COUNT FOLDER...`, in a process of its own.

The files of a FOLDER are one model. They are read as they are, and then in COUNT copies: copy number n has one of them
changed, at places that n decides. A copy must be refused with one line, or read as the gguf package reads it; then it
must be loaded, or refused with one line. No model may take more than `SECONDS` and `MEMORY`. Prints for each folder how
many copies were refused and how many were read. Exits with an error at the first copy that was neither.
"""

import os
import resource
import sys
import time
from pathlib import Path
from random import Random

from gguf import GGUFReader

import lce
from lce.errors import LceError, ModelError
from lce.weights.gguf_file import GgufFile, read_gguf

SECONDS = 10.0  # of processor time, for one model: two threads of one core take twice what one takes alone
MEMORY = 1 << 29  # bytes beyond what the process has before it reads the first
_EDGES = [0, 1, 2, 7, 8, 9, 31, 32, 63, 64, 127, 128, 255, 256, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
_EDGES += [1 << 32, 1 << 48, (1 << 62) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


def mutated(raw: bytes, random: Random) -> bytes:
    """The file with one to four changes, most of them near its beginning, where the header is."""
    for _ in range(random.choice([1, 1, 1, 2, 4])):
        at = random.randrange(max(1, len(raw) // random.choice([1, 2, 2, 4, 16])))
        width = random.choice([1, 2, 4, 8])
        old, new = raw[at : at + width], b""
        kind = random.randrange(7)
        if kind == 0:
            new = bytes(byte ^ 1 << random.randrange(8) for byte in old[:1]) + old[1:]
        elif kind == 1:
            new = random.randbytes(width)
        elif kind == 2:
            new = (random.choice([*_EDGES, len(raw)]) % (1 << 8 * width)).to_bytes(width, "little")
        elif kind == 3:
            number = int.from_bytes(old, "little") + random.choice([-32, -1, 1, 32])
            new = (number % (1 << 8 * width)).to_bytes(width, "little")
        elif kind == 4:
            start = random.randrange(len(raw) + 1)
            new = old + raw[start : start + random.randrange(64)]
        elif kind == 5:
            width = len(raw)  # cut off
        raw = raw[:at] + new + raw[at + width :]
    return raw


def as_others_read(file: GgufFile) -> None:
    """Compare what was read with what the gguf package reads of the same files."""
    readers = [GGUFReader(path) for path in file.stamps]
    fields = {key: field.contents() for key, field in readers[0].fields.items() if not key.startswith("GGUF.")}
    assert dict(file.metadata) == fields
    found = zip(file.stamps, readers, strict=True)
    tensors = {tensor.name: (path, tensor) for path, reader in found for tensor in reader.tensors}
    assert list(file.tensors) == list(tensors)
    for name, (path, tensor) in tensors.items():
        info = file.tensors[name]
        assert (info.file, info.dtype, info.start) == (path, tensor.tensor_type.name, tensor.data_offset)
        assert (info.shape, info.stop - info.start) == (tuple(map(int, tensor.shape[::-1])), tensor.n_bytes)


def read(path: Path) -> bool:
    """Read and load a model within the limits. Return whether it was read, not refused."""
    started = time.process_time()
    is_read, message, kind = False, "", LceError
    try:
        file = read_gguf(path)
        is_read = True
        if path.stat().st_size < 1 << 20:  # the package takes long for larger ones
            as_others_read(file)
        del file
        lce.info(path)
        lce.load(path)
    except LceError as error:
        message, kind = str(error), type(error)
    assert time.process_time() - started < SECONDS
    assert is_read or issubclass(kind, ModelError), message
    assert message.isprintable(), message
    assert len(message) < 900, message
    return is_read


def main(first: int, count: int, folder: Path) -> None:
    files = {path.name: path.read_bytes() for path in sorted(folder.glob("*.gguf"))}
    assert all(read(folder / name) for name in files)
    n_read = 0
    (folder / "copy").mkdir(exist_ok=True)
    for number in range(first, first + count):
        print(f"copy {number}", file=sys.stderr)  # the last of these lines names the copy that failed
        random = Random(number)
        changed = random.choice(list(files))
        for name, raw in files.items():
            (folder / "copy" / name).write_bytes(mutated(raw, random) if name == changed else raw)
        n_read += read(folder / "copy" / random.choice(list(files)))
    print(count - n_read, n_read, flush=True)


if __name__ == "__main__":
    lce.load("demo")  # whatever is imported late
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    for argument in sys.argv[3:]:
        main(int(sys.argv[1]), int(sys.argv[2]), Path(argument))
    os._exit(0)  # no wait for libraries' threads
