"""Make the sample papers: `python -m examples.extract_papers.make_papers [FOLDER]`.

Ten of the twelve can be read; `11-cut-short.pdf` lacks its second half and `12-locked.pdf` needs a
password. The bytes are the same each time, so a change of the files is a change of this script.
"""

import sys
from pathlib import Path

from . import texts
from .tiny_pdf import Document, drawing_page, render, text_pages

PAPERS = Path(__file__).with_name("papers")
PASSWORD = "open sesame"  # noqa: S105 - the point of that paper is that nobody gives it


def papers() -> dict[str, bytes]:
    """Name and bytes of each sample paper."""
    counting = Document(pages=text_pages(texts.COUNTING_SHEEP), title="On Counting Sheep")
    locked = Document(pages=text_pages(texts.GETTYSBURG), title="Locked", password=PASSWORD)
    documents = {
        "01-counting-sheep.pdf": counting,
        "02-gettysburg.pdf": Document(pages=text_pages(texts.GETTYSBURG)),
        "03-nebel.pdf": Document(pages=text_pages(texts.NEBEL), title="Sicht im Nebel"),
        "04-dernier-train.pdf": Document(pages=text_pages(texts.TRAIN)),
        "05-relojes.pdf": Document(pages=text_pages(texts.RELOJES), title="Los relojes del pueblo"),
        "06-inferno.pdf": Document(pages=text_pages(texts.INFERNO), title="Inferno"),
        "07-laatste-brug.pdf": Document(pages=text_pages(texts.BRUG)),
        "08-primes.pdf": Document(pages=_primes(), title="A Table of Primes"),
        "09-drawing.pdf": Document(pages=[drawing_page(range(20, 260, 15))]),
        "10-hostile-title.pdf": Document(
            pages=text_pages(texts.HOSTILE), title='<script>alert("papers")</script> & other names'
        ),
        "12-locked.pdf": locked,
    }
    files = {name: render(document) for name, document in documents.items()}
    whole = files["01-counting-sheep.pdf"]
    files["11-cut-short.pdf"] = whole[: len(whole) // 2]
    return dict(sorted(files.items()))


def _primes(limit: int = 15_000, per_line: int = 12) -> list[bytes]:
    sieve = bytearray([1]) * (limit + 1)
    for number in range(2, int(limit**0.5) + 1):
        sieve[number * number :: number] = bytes(len(sieve[number * number :: number]))
    primes = [f"{number:>6}" for number in range(2, limit + 1) if sieve[number]]
    lines = ["".join(primes[at : at + per_line]) for at in range(0, len(primes), per_line)]
    return text_pages("\n".join(lines))


def main() -> None:
    """Write the papers into the folder given, or into the one that ships with the example."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else PAPERS
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in papers().items():
        (folder / name).write_bytes(data)
        print(f"{len(data):>7,} bytes  {folder / name}")


if __name__ == "__main__":
    main()
