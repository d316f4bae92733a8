"""Draws the pictures of the docs anew: `python docs/pictures/draw.py` runs every command after the words "Drawn by".

With names as arguments, only the commands that have one of them. From the repository's root, with lce[plot] installed.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).parents[1]


def commands(text: str) -> list[list[str]]:
    """The commands that a page says its pictures are drawn by; line breaks inside one are no part of it."""
    found = [" ".join(match.split()) for match in re.findall(r"Drawn by\s+`([^`]+)`", text)]
    return [shlex.split(command) for command in found]


def main() -> None:
    for page in sorted(DOCS.rglob("*.md")):
        for command in commands(page.read_text(encoding="utf-8")):
            if len(sys.argv) > 1 and not any(name in " ".join(command) for name in sys.argv[1:]):
                continue
            print("+", shlex.join(command), flush=True)
            start = ["-m", "lce"] if command[0] == "lce" else []
            if not start and command[0] != "python":
                sys.exit(f"{page.name}: {shlex.join(command)} begins with neither lce nor python")
            subprocess.run([sys.executable, *start, *command[1:]], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
