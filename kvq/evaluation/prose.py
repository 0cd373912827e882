"""Real prose from a package: the Wikipedia articles in the gensim wheel, stripped of markup.

    pip download --no-deps gensim==4.4.0
    python -m kvq.evaluation.prose gensim-4.4.0-*.whl wikipedia.txt

The text is under CC BY-SA 4.0 (Wikipedia) and is not part of kvq.
"""

from __future__ import annotations

import bz2
import hashlib
import html
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

#: What separates the documents of a text file.
SEPARATOR: Final = "\f"
#: The dump of some Wikipedia pages in the wheel.
MEMBER: Final = (
    "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
)
#: Shorter articles are left out: most are redirections.
SHORTEST: Final = 4000

_INNERMOST = re.compile(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}")
_REMOVED = (
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"<ref[^>]*/>"),
    re.compile(r"<(ref|math|gallery|timeline|table)\b.*?</\1>", re.DOTALL),
    re.compile(r"<[^>]+>"),
    re.compile(r"\[\[(?:File|Image|Category|[a-z-]{2,12}):(?:[^\[\]]|\[\[[^\[\]]*\]\])*\]\]"),
    re.compile(r"\[https?://\S+\]|https?://\S+"),
    re.compile(r"'{2,}"),
    re.compile(r"^=+.*?=+\s*$", re.MULTILINE),
    re.compile(r"^[*#:;|!].*$", re.MULTILINE),
)


def strip_markup(text: str) -> str:
    """The prose of an article in wiki markup: no templates, tables, notes, lists or headings."""
    text = html.unescape(text)
    while (shorter := _INNERMOST.sub("", text)) != text:
        text = shorter
    text = re.sub(r"\[https?://\S+ ([^\]]*)\]", r"\1", text)
    for pattern in _REMOVED:
        text = pattern.sub("", text)
    text = re.sub(r"\[\[(?:[^\[\]|]*\|)?([^\[\]]*)\]\]", r"\1", text)
    text = re.sub(r"[ \t]+", " ", html.unescape(text))
    return re.sub(r"\s*\n\s*", "\n", text).strip()


def read_articles(wheel: Path) -> Iterator[tuple[str, str]]:
    """Id and prose of the longer articles in a gensim wheel, in order.

    Raises:
        ValueError: The wheel does not have them.
    """
    with zipfile.ZipFile(wheel) as archive:
        if MEMBER not in archive.namelist():
            raise ValueError(f"wheel must hold {MEMBER}, got {wheel.name}")
        root = ElementTree.fromstring(bz2.decompress(archive.read(MEMBER)))
    space = root.tag.partition("}")[0] + "}"
    for page in root.iter(f"{space}page"):
        text = page.findtext(f"{space}revision/{space}text") or ""
        prose = strip_markup(text)
        if len(prose) >= SHORTEST:
            yield page.findtext(f"{space}id") or "", prose


def main(arguments: list[str]) -> None:
    """Write the articles of a wheel to a text file, and print its hash and their ids."""
    if len(arguments) != 2:
        raise SystemExit("usage: python -m kvq.evaluation.prose WHEEL OUT")
    articles = list(read_articles(Path(arguments[0])))
    contents = SEPARATOR.join(prose for _, prose in articles).encode()
    Path(arguments[1]).write_bytes(contents)
    print(f"{len(articles)} articles, {len(contents)} bytes")
    print(f"sha256 {hashlib.sha256(contents).hexdigest()}")
    print("page ids", " ".join(page for page, _ in articles))


if __name__ == "__main__":
    main(sys.argv[1:])
