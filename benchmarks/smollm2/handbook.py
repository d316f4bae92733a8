"""Writes a book of Debian's packages, the Debian Administrator's Handbook, as plain text: a long text of one subject.

apt-get install debian-handbook    # or unpack the package: dpkg-deb -x debian-handbook_*.deb FOLDER
python benchmarks/smollm2/handbook.py /usr/share/doc/debian-handbook/html/en-US books/handbook.txt
"""

import html
import re
import sys
from pathlib import Path

FIRST = "the-debian-project.html"  # the first chapter, behind contents and prefaces

if __name__ == "__main__":
    folder, target = Path(sys.argv[1]), Path(sys.argv[2])
    pages = list(dict.fromkeys(re.findall(r'href="([\w.-]+\.html)"', (folder / "index.html").read_text("utf-8"))))
    texts = []
    for page in pages[pages.index(FIRST) :]:
        body = re.sub(r"(?s)<(script|style|head)\b.*?</\1>", "", (folder / page).read_text("utf-8"))
        texts.append(" ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split()))
    target.write_text("\n".join(texts), "utf-8")
