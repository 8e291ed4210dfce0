"""Write simple PDF files: text in Times, or a drawing; no dependency, the same bytes each time.

Only what the sample papers need: one built-in font, Western European characters, uncompressed
streams, and the oldest of the standard encryptions (section 7.6 of the PDF specification, revision
2: it keeps nothing secret, but every reader asks for the password).
"""

import dataclasses
import hashlib
import textwrap
from collections.abc import Callable, Iterable

CHARACTERS_PER_LINE = 78
LINES_PER_PAGE = 44
_PADDING = bytes.fromhex("28bf4e5e4e758a4164004e56fffa01082e2e00b6d0683e802f0ca9fe6453697a")
_PERMISSIONS = -4
_FILE_ID = hashlib.sha256(b"fanout-procrastinate sample paper").digest()[:16]
_CATALOG, _PAGES, _FONT, _INFO, _ENCRYPTION, _FIRST_PAGE = range(1, 7)

_ESCAPES = str.maketrans({"\\": "\\\\", "(": "\\(", ")": "\\)", "\0": "\\000"})

Seal = Callable[[int, bytes], bytes]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """One file to be: its pages as content streams, its title as the metadata say it."""

    pages: list[bytes]
    title: str | None = None
    password: str | None = None


def text_pages(text: str) -> list[bytes]:
    """Wrap paragraphs (separated by empty lines) to lines, lines to pages.

    A paragraph that starts with a space keeps its own line breaks.
    """
    lines: list[str] = []
    for paragraph in text.strip("\n").split("\n\n"):
        verse = paragraph.startswith(" ")
        lines += paragraph.split("\n") if verse else textwrap.wrap(paragraph, CHARACTERS_PER_LINE)
        lines.append("")
    starts = range(0, len(lines), LINES_PER_PAGE)
    return [_text_stream(lines[start : start + LINES_PER_PAGE]) for start in starts]


def drawing_page(bars: Iterable[int]) -> bytes:
    """A page without any text: a row of grey bars, their heights in points."""
    rectangles = (f"{72 + 24 * index} 300 18 {height} re" for index, height in enumerate(bars))
    return ("0.6 g\n" + "\n".join(rectangles) + "\nf\n").encode("ascii")


def render(document: Document) -> bytes:
    """The bytes of the file. The page tree comes last, so a file cut short has lost it."""
    seal: Seal = _unsealed
    objects: dict[int, bytes] = {}
    if document.password is not None:
        seal, objects[_ENCRYPTION] = _lock(document.password)
    numbers = [_FIRST_PAGE + 2 * index for index in range(len(document.pages))]
    for number, content in zip(numbers, document.pages, strict=True):
        objects[number] = _page(number + 1)
        objects[number + 1] = _stream(seal(number + 1, content))
    objects[_FONT] = (
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Times-Roman /Encoding /WinAnsiEncoding >>"
    )
    objects[_INFO] = _info(document.title, seal)
    objects[_CATALOG] = b"<< /Type /Catalog /Pages %d 0 R >>" % _PAGES
    kids = b" ".join(b"%d 0 R" % number for number in numbers)
    objects[_PAGES] = b"<< /Type /Pages /Count %d /Kids [%b] >>" % (len(numbers), kids)
    return _file(objects, encrypted=document.password is not None)


def _unsealed(number: int, data: bytes) -> bytes:
    return data


def _text_stream(lines: list[str]) -> bytes:
    shown = (f"({_escape(line)}) Tj T*" for line in lines)
    return ("BT /F1 11 Tf 15 TL 72 770 Td\n" + "\n".join(shown) + "\nET\n").encode("cp1252")


def _escape(line: str) -> str:
    return line.translate(_ESCAPES)


def _page(content: int) -> bytes:
    return (
        b"<< /Type /Page /Parent %d 0 R /MediaBox [0 0 595 842] "
        b"/Resources << /Font << /F1 %d 0 R >> >> /Contents %d 0 R >>" % (_PAGES, _FONT, content)
    )


def _stream(data: bytes) -> bytes:
    return b"<< /Length %d >>\nstream\n%b\nendstream" % (len(data), data)


def _info(title: str | None, seal: Seal) -> bytes:
    producer = _text_string("fanout-procrastinate, make_papers.py", seal)
    entry = b"" if title is None else b" /Title " + _text_string(title, seal)
    return b"<< /Producer %b%b >>" % (producer, entry)


def _text_string(text: str, seal: Seal) -> bytes:
    data = seal(_INFO, b"\xfe\xff" + text.encode("utf-16-be"))
    return b"<%b>" % data.hex().encode("ascii")


def _file(objects: dict[int, bytes], *, encrypted: bool) -> bytes:
    file = bytearray(b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n")
    offsets: dict[int, int] = {}
    for number, body in objects.items():
        offsets[number] = len(file)
        file += b"%d 0 obj\n%b\nendobj\n" % (number, body)
    table = len(file)
    size = max(objects) + 1
    file += b"xref\n0 %d\n" % size
    for number in range(size):
        used = number in offsets
        entry = (offsets[number], 0, b"n") if used else (0, 65535, b"f")
        file += b"%010d %05d %b \n" % entry
    lock = b" /Encrypt %d 0 R" % _ENCRYPTION if encrypted else b""
    file += b"trailer\n<< /Size %d /Root %d 0 R /Info %d 0 R" % (size, _CATALOG, _INFO)
    file += b" /ID [<%b> <%b>]%b >>" % (*2 * (_FILE_ID.hex().encode("ascii"),), lock)
    file += b"\nstartxref\n%d\n%%%%EOF\n" % table
    return bytes(file)


def _lock(password: str) -> tuple[Seal, bytes]:
    """A function that encrypts the data of an object, and the dictionary that says so."""
    padded = (password.encode("latin-1") + _PADDING)[:32]
    owner = _rc4(_md5(padded)[:5], padded)
    permissions = _PERMISSIONS.to_bytes(4, "little", signed=True)
    key = _md5(padded + owner + permissions + _FILE_ID)[:5]
    user = _rc4(key, _PADDING)

    def seal(number: int, data: bytes) -> bytes:
        return _rc4(_md5(key + number.to_bytes(3, "little") + b"\0\0")[:10], data)

    dictionary = b"<< /Filter /Standard /V 1 /R 2 /O <%b> /U <%b> /P %d >>" % (
        owner.hex().encode("ascii"),
        user.hex().encode("ascii"),
        _PERMISSIONS,
    )
    return seal, dictionary


def _md5(data: bytes) -> bytes:
    return hashlib.md5(data, usedforsecurity=False).digest()


def _rc4(key: bytes, data: bytes) -> bytes:
    state = list(range(256))
    j = 0
    for i in range(256):
        j = (j + state[i] + key[i % len(key)]) % 256
        state[i], state[j] = state[j], state[i]
    i = j = 0
    output = bytearray()
    for byte in data:
        i = (i + 1) % 256
        j = (j + state[i]) % 256
        state[i], state[j] = state[j], state[i]
        output.append(byte ^ state[(state[i] + state[j]) % 256])
    return bytes(output)
