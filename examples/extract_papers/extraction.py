"""Read the facts of one PDF file, or say in a line why it cannot be read.

Whatever is wrong with the file itself is a `PermanentError`: trying again would not help. Trouble
with the disk stays the `OSError` that it is, which the library retries.
"""

import io
import logging
import stat
import struct
import zlib
from pathlib import Path

import pydantic
import pypdf
import pypdf.errors

from fanout_procrastinate import PermanentError

from .language import guess_language

MAX_BYTES = 200 * 1024 * 1024
MAX_PAGES = 5_000
OPENING_PAGES = 3
FIRST_LINES = 5
LINE_LENGTH = 200
EXCERPT_LENGTH = 300
LANGUAGE_SAMPLE = 20_000

# pypdf reports each oddity that it could work around, a thousand lines for some files.
logging.getLogger("pypdf").setLevel(logging.CRITICAL)

# What pypdf is known to raise on damaged input, beside its own classes.
DAMAGE = (
    pypdf.errors.PyPdfError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    NotImplementedError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
)


class Extraction(pydantic.BaseModel):
    """What is known about a paper.

    `words` counts what stands between white space, over all pages. `first_lines` are those of the
    opening pages; `excerpt` is how the middle page begins.
    """

    title: str | None
    pages: int
    words: int
    language: str | None
    first_lines: list[str]
    excerpt: str


def extract(path: Path) -> Extraction:
    """Read one PDF file.

    Raises: `PermanentError` if the file is missing, empty, locked, damaged, too big or no PDF;
    `OSError` if it could not be read this time.
    """
    data = _read_bytes(path)
    try:
        return _extract(pypdf.PdfReader(io.BytesIO(data)))
    except pypdf.errors.FileNotDecryptedError as error:
        raise PermanentError("encrypted: it needs a password") from error
    except pypdf.errors.DependencyError as error:
        raise PermanentError(f"encrypted in a way that needs more: {_one_line(error)}") from error
    except DAMAGE as error:
        whole = b"%%EOF" in data[-1024:]
        kind = "damaged" if whole else "truncated (its end is missing)"
        raise PermanentError(f"{kind}: {_one_line(error)}") from error


def _read_bytes(path: Path) -> bytes:
    """The whole file, so that all that fails later is the file's fault and not the disk's."""
    try:
        status = path.stat()
    except FileNotFoundError as error:
        reason = "the link leads to no file" if path.is_symlink() else "the file is no longer there"
        raise PermanentError(reason) from error
    if not stat.S_ISREG(status.st_mode):
        raise PermanentError("not a regular file")
    if status.st_size > MAX_BYTES:
        raise PermanentError(
            f"too big: {status.st_size / 2**20:,.0f} MiB, the limit is {MAX_BYTES // 2**20} MiB"
        )
    data = path.read_bytes()
    if not data:
        raise PermanentError("the file is empty")
    if b"%PDF-" not in data[:1024]:
        raise PermanentError("not a PDF file: it has no %PDF header")
    return data


def _extract(reader: pypdf.PdfReader) -> Extraction:
    pages = len(reader.pages)
    if pages == 0:
        raise PermanentError("damaged: it has no pages")
    if pages > MAX_PAGES:
        raise PermanentError(f"too long: {pages:,} pages, the limit is {MAX_PAGES:,}")
    words, sample, excerpt = 0, "", ""
    first_lines: list[str] = []
    for index, page in enumerate(reader.pages):
        text = page.extract_text()
        words += len(text.split())
        if index < OPENING_PAGES:
            first_lines += _lines(text)[: FIRST_LINES - len(first_lines)]
        if index == pages // 2:
            excerpt = text[:EXCERPT_LENGTH]
        if len(sample) < LANGUAGE_SAMPLE:
            sample += text[:LANGUAGE_SAMPLE] + "\n"
    return Extraction(
        title=_metadata_title(reader) or _title_line(first_lines),
        pages=pages,
        words=words,
        language=guess_language(sample),
        first_lines=first_lines,
        excerpt=excerpt,
    )


def _lines(text: str) -> list[str]:
    lines = (" ".join(line.split()) for line in text.splitlines())
    return [line[:LINE_LENGTH] for line in lines if line]


def _metadata_title(reader: pypdf.PdfReader) -> str | None:
    title = reader.metadata.title if reader.metadata else None
    title = " ".join(title.split()) if isinstance(title, str) else ""
    return title[:LINE_LENGTH] if title and title.lower() != "untitled" else None


def _title_line(lines: list[str]) -> str | None:
    """The first line that reads like words, not like a page number or a rule."""
    for line in lines:
        letters = sum(character.isalpha() for character in line)
        if letters >= 3 and letters * 2 >= len(line):
            return line
    return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:LINE_LENGTH] or type(error).__name__
