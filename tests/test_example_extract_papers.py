"""The example: what it reads from each paper, what it says of broken ones, and its two reports."""

import html.parser
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pypdf
import pytest

from examples import embedded
from examples.extract_papers import extraction, make_papers, report
from examples.extract_papers.app import find_papers, path_to_text, text_to_path
from examples.extract_papers.extraction import Extraction, extract
from examples.extract_papers.language import STOP_WORDS, guess_language
from fanout_procrastinate import PermanentError

CHECKOUT = Path(__file__).resolve().parents[1]
PAPERS = make_papers.PAPERS
HOSTILE_TITLE = '<script>alert("papers")</script> & other names'

# name: title, pages, words, language
READABLE = {
    "01-counting-sheep.pdf": ("On Counting Sheep", 2, 489, "en"),
    "02-gettysburg.pdf": ("The Gettysburg Address", 1, 281, "en"),
    "03-nebel.pdf": ("Sicht im Nebel", 1, 244, "de"),
    "04-dernier-train.pdf": ("Le dernier train et la pluie", 1, 225, "fr"),
    "05-relojes.pdf": ("Los relojes del pueblo", 1, 239, "es"),
    "06-inferno.pdf": ("Inferno", 1, 130, "it"),
    "07-laatste-brug.pdf": ("De laatste brug over de vaart", 1, 231, "nl"),
    "08-primes.pdf": ("A Table of Primes", 4, 1754, None),
    "09-drawing.pdf": (None, 1, 0, None),
    "10-hostile-title.pdf": (HOSTILE_TITLE, 1, 87, "en"),
}
BROKEN = {
    "11-cut-short.pdf": "truncated (its end is missing): ",
    "12-locked.pdf": "encrypted: it needs a password",
}


# The papers


def test_the_shipped_papers_are_those_that_the_script_makes() -> None:
    shipped = {path.name: path.read_bytes() for path in PAPERS.iterdir()}
    assert shipped == make_papers.papers()
    assert set(shipped) == {*READABLE, *BROKEN}
    assert max(map(len, shipped.values())) < 30_000


def test_the_locked_paper_opens_with_its_password() -> None:
    reader = pypdf.PdfReader(PAPERS / "12-locked.pdf", password=make_papers.PASSWORD)
    assert reader.metadata is not None
    assert reader.metadata.title == "Locked"
    assert "shall not perish from the earth" in " ".join(reader.pages[0].extract_text().split())


# Extraction


@pytest.mark.parametrize("name", READABLE)
def test_what_is_read_from_each_paper(name: str) -> None:
    found = extract(PAPERS / name)
    assert (found.title, found.pages, found.words, found.language) == READABLE[name]


def test_first_lines_and_excerpt() -> None:
    found = extract(PAPERS / "02-gettysburg.pdf")
    assert len(found.first_lines) == extraction.FIRST_LINES
    assert found.first_lines[:2] == [
        "The Gettysburg Address",
        "Four score and seven years ago our fathers brought forth on this continent, a",
    ]
    assert found.excerpt.startswith("The Gettysburg Address\nFour score")
    assert len(found.excerpt) == extraction.EXCERPT_LENGTH
    assert extract(PAPERS / "09-drawing.pdf").first_lines == []


def test_a_nul_in_the_text_is_left_for_the_library_to_clean() -> None:
    found = extract(PAPERS / "10-hostile-title.pdf")
    assert any("\0" in line for line in (*found.first_lines, found.excerpt))


@pytest.mark.parametrize("name", BROKEN)
def test_the_reason_of_each_broken_paper(name: str) -> None:
    with pytest.raises(PermanentError) as caught:
        extract(PAPERS / name)
    reason = str(caught.value)
    assert reason.startswith(BROKEN[name])
    assert "\n" not in reason
    assert len(reason) < 300


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is empty"),
        (b"just a note, no paper", "not a PDF file"),
        (b"%PDF-1.7\n" + bytes(2000), "truncated"),
        (b"%PDF-1.7\nstartxref\n-5\n%%EOF\n", "damaged: "),
        (b"%PDF-1.7\nstartxref\n99999\n%%EOF\n", "damaged: "),
        (b"%PDF-1.7\n" + b"[" * 50_000 + b"\n%%EOF\n", "damaged: "),
    ],
)
def test_the_reason_of_what_is_no_paper(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "paper.pdf"
    path.write_bytes(content)
    with pytest.raises(PermanentError, match=f"^{reason}"):
        extract(path)


def test_every_cut_of_a_paper_is_read_or_refused(tmp_path: Path) -> None:
    """Whatever pypdf raises on half a file, it becomes a permanent error."""
    whole = (PAPERS / "02-gettysburg.pdf").read_bytes()
    path = tmp_path / "cut.pdf"
    for length in range(1, len(whole), 61):
        path.write_bytes(whole[:length])
        try:
            assert extract(path).pages == 1
        except PermanentError as error:
            assert "\n" not in str(error)


def test_a_missing_file_is_permanent(tmp_path: Path) -> None:
    with pytest.raises(PermanentError, match="no longer there"):
        extract(tmp_path / "gone.pdf")


def test_what_is_no_file_is_permanent_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.pdf")
    for name in ("pipe.pdf", "."):
        with pytest.raises(PermanentError, match="not a regular file"):
            extract(tmp_path / name)


def test_trouble_with_the_disk_stays_an_oserror(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(OSError, match="Input/output error"):
        extract(PAPERS / "02-gettysburg.pdf")


def test_limits_of_size_and_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "MAX_PAGES", 3)
    with pytest.raises(PermanentError, match="too long: 4 pages, the limit is 3"):
        extract(PAPERS / "08-primes.pdf")
    monkeypatch.setattr(extraction, "MAX_BYTES", 1000)
    with pytest.raises(PermanentError, match="too big"):
        extract(PAPERS / "09-drawing.pdf")


def test_pypdf_keeps_quiet(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(PermanentError):
        extract(PAPERS / "11-cut-short.pdf")
    assert caplog.records == []


# The language


def test_a_language_needs_evidence() -> None:
    assert guess_language("") is None
    assert guess_language("The end") is None
    assert guess_language("2 3 5 7 11 13 17 19 23") is None
    lorem = "Lorem ipsum dolor sit amet, consetetur sadipscing elitr, sed diam nonumy eirmod tempor"
    assert guess_language(lorem * 20) is None


def test_two_languages_in_equal_parts_are_none() -> None:
    assert guess_language(f"{STOP_WORDS['en']} {STOP_WORDS['de']}") is None


@pytest.mark.parametrize("language", STOP_WORDS)
def test_each_language_is_known_by_its_own_words(language: str) -> None:
    assert guess_language(STOP_WORDS[language]) == language


# Paths


def test_any_file_name_survives_as_text() -> None:
    for name in (b"plain.pdf", "Übung 100 %.pdf".encode(), b"latin-\xe9.pdf", b"a%41b.pdf"):
        path = Path(os.fsdecode(name))
        text = path_to_text(path)
        assert text.encode("utf-8")
        assert text_to_path(text) == path
    assert path_to_text(Path("plain.pdf")) == "plain.pdf"


def test_papers_are_found_in_order_and_below(tmp_path: Path) -> None:
    (tmp_path / "sub.pdf").mkdir()
    for name in ("b.pdf", "a.PDF", "sub.pdf/c.pdf", "note.txt"):
        (tmp_path / name).touch()
    assert find_papers(tmp_path) == [
        tmp_path / name for name in ("a.PDF", "b.pdf", "sub.pdf/c.pdf")
    ]


def test_a_link_to_nothing_is_found_and_its_reason_is_told(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link, other = tmp_path / "gone.pdf", tmp_path / "other.pdf"
    link.symlink_to(tmp_path / "nowhere.pdf")
    other.symlink_to(tmp_path / "folder")
    assert find_papers(tmp_path) == [link]
    with pytest.raises(PermanentError, match="the link leads to no file"):
        extract(link)


# The reports


def _extraction(title: str | None = "A title", **changes: object) -> Extraction:
    values = {"pages": 3, "words": 250, "language": "en", "first_lines": ["One"], "excerpt": "One"}
    return Extraction.model_validate({"title": title, **values, **changes})


def _rows(results: list[Extraction]) -> list[report.Row]:
    rows = [
        report.Row(key=f"{number}.pdf", status="succeeded", result=result.model_dump())
        for number, result in enumerate(results)
    ]
    return [*rows, report.Row(key="bad<b>.pdf", status="failed", error='<img src=x onerror="1">')]


def _summary(results: list[Extraction]) -> report.Summary:
    return report.Summary(
        run_id=7,
        folder="/papers/<i>",
        status="completed",
        total=len(results) + 1,
        succeeded=len(results),
        failed=1,
        reasons=[("<u>broken</u>", 1)],
    )


class _Page(html.parser.HTMLParser):
    """The tags and texts of a page; fails on tags that do not match."""

    VOID = frozenset({"meta", "br", "rect"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_json_lines_hold_one_item_each_in_order() -> None:
    results = [_extraction(), _extraction("two\nlines\u2028and \x85 more"), _extraction(None)]
    lines = list(report.json_lines(_rows(results)))
    assert all(line.endswith("\n") and len(line.splitlines()) == 1 for line in lines)
    records = [json.loads(line) for line in lines]
    assert [record["key"] for record in records] == ["0.pdf", "1.pdf", "2.pdf", "bad<b>.pdf"]
    assert [record["result"] for record in records[:3]] == [one.model_dump() for one in results]
    assert records[3] == {
        "key": "bad<b>.pdf",
        "status": "failed",
        "error": '<img src=x onerror="1">',
    }


def test_the_page_shows_hostile_text_and_never_runs_it() -> None:
    hostile = [
        _extraction(HOSTILE_TITLE, first_lines=["</details><script>1</script>"], language="<x>"),
        _extraction("\0 \x1b[31m \u202e reversed"),
    ]
    text = report.html_report(_summary(hostile), _rows(hostile), hostile)
    page = _Page(text)
    assert not {"script", "img", "b", "i", "u", "x"} & {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    for shown in (HOSTILE_TITLE, "bad<b>.pdf", "<u>broken</u>", '<img src=x onerror="1">'):
        assert shown in page.texts
    assert not {character for character in text if character < " "} - {"\n"}


def test_the_page_loads_nothing() -> None:
    results = [_extraction()]
    text = report.html_report(_summary(results), _rows(results), results)
    assert "default-src 'none'" in text
    assert not any({"src", "href"} & set(attributes) for _, attributes in _Page(text).tags)
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text


def test_the_page_is_fit_for_screen_readers() -> None:
    results = [_extraction(), _extraction()]
    page = _Page(report.html_report(_summary(results), _rows(results), results))
    assert [cell["scope"] for cell in page.named("th")] == ["col"] * 6 + ["row"] * 3
    assert len(page.named("caption")) == 1
    known = {attributes["id"] for tag, attributes in page.tags if tag in ("title", "desc")
             and "id" in attributes}  # fmt: skip
    pictures = page.named("svg")
    assert len(pictures) == 4
    for picture in pictures:
        assert picture["role"] == "img"
        assert set(str(picture["aria-labelledby"]).split()) <= known
    assert page.named("html") == [{"lang": "en"}]
    assert "1 to 99: 1" not in page.texts
    assert "100 to 299: 2" in page.texts


def test_the_page_of_a_run_without_items() -> None:
    empty = report.Summary(
        run_id=1, folder="/none", status="completed", total=0, succeeded=0, failed=0
    )
    page = _Page(report.html_report(empty, [], []))
    assert len(page.named("svg")) == 4
    assert len(page.named("tr")) == 1


def test_every_value_has_its_bar() -> None:
    results = [_extraction(pages=pages, words=pages * 1000) for pages in (1, 2, 7, 5000)]
    page = _Page(report.html_report(_summary(results), _rows(results), results))
    pages = "1: 1; 2 to 4: 1; 5 to 9: 1; 10 to 19: 0; 20 to 49: 0; 50 to 99: 0; 100 to 199: 0; "
    assert f"{pages}200 to 499: 0; 500 +: 1" in page.texts
    assert any(text.endswith("100,000 +: 1") for text in page.texts)
    assert "3 succeeded" not in page.texts
    assert "4 succeeded" in page.texts


# The demonstration, from outside


@pytest.fixture
def shared_directory() -> Iterator[Path]:
    """A directory that the server's user can enter too, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="fanout-demo-") as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


def _start_demo(directory: Path, mark: str, *arguments: str | Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "examples.extract_papers.demo", *map(str, arguments)],
        cwd=CHECKOUT,
        env=os.environ | {"FANOUT_DEMO_MARK": mark, "TMPDIR": str(directory)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        # A shell starts what runs in the background with Ctrl-C ignored, and that is inherited.
        preexec_fn=_hear_ctrl_c,  # noqa: PLW1509 - it only sets a disposition
    )


def _hear_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _marked_processes(mark: str) -> list[str]:
    """Command lines of the processes that the demonstration has started and that still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has ended meanwhile, or belongs to somebody else
    return found


def _assert_nothing_left(mark: str, directory: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        left = _marked_processes(mark), [path.name for path in directory.glob("fanout-pg-*")]
        if left == ([], []):
            return
        time.sleep(0.05)
    pytest.fail(f"left behind: {left}")


@pytest.mark.acceptance
@pytest.mark.pg18_only  # it brings its own server
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_the_demonstration(shared_directory: Path) -> None:
    mark, out = uuid.uuid4().hex, shared_directory / "out"
    demo = _start_demo(shared_directory, mark, "--out", out)
    output, errors = demo.communicate(timeout=90)
    assert demo.returncode == 0, errors
    lines = output.splitlines()
    assert lines[-1] == "run 1: completed, 12 items, 10 succeeded, 2 failed"
    assert "Not read: 12-locked.pdf: encrypted: it needs a password" in lines
    _assert_nothing_left(mark, shared_directory, seconds=5)

    records = [json.loads(line) for line in io.StringIO((out / "results.jsonl").read_text("utf-8"))]
    assert [record["key"] for record in records] == sorted([*READABLE, *BROKEN])
    for record in records:
        if record["status"] == "succeeded":
            found = record["result"]
            told = (found["title"], found["pages"], found["words"], found["language"])
            assert told == READABLE[record["key"]]
        else:
            assert record["error"].startswith(BROKEN[record["key"]])
    page = _Page((out / "report.html").read_text("utf-8"))
    assert HOSTILE_TITLE in page.texts
    assert len(page.named("tr")) == 13


@pytest.mark.acceptance
@pytest.mark.pg18_only  # it brings its own server
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_the_demonstration_of_an_empty_folder(shared_directory: Path) -> None:
    papers = shared_directory / "papers"
    papers.mkdir()
    demo = _start_demo(shared_directory, "none", papers, "--out", shared_directory / "out")
    output, errors = demo.communicate(timeout=90)
    assert demo.returncode == 0, errors
    lines = output.splitlines()
    assert f"There is no *.pdf below {papers.resolve()}" in lines
    assert lines[-1] == "run 1: completed, 0 items, 0 succeeded, 0 failed"


@pytest.mark.acceptance
@pytest.mark.pg18_only  # it brings its own server
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_whatever_ends_the_demonstration(
    shared_directory: Path, number: signal.Signals
) -> None:
    mark = uuid.uuid4().hex
    with _start_demo(shared_directory, mark, "--out", shared_directory / "out") as demo:
        assert demo.stdout is not None
        assert any(line.startswith(("pending", "processing")) for line in demo.stdout)
        assert len(_marked_processes(mark)) >= 4  # itself, a server, two workers
        demo.send_signal(number)
        demo.communicate(timeout=30)
    assert demo.returncode != 0
    _assert_nothing_left(mark, shared_directory, seconds=10)


@pytest.mark.acceptance
@pytest.mark.pg18_only
@pytest.mark.skipif(os.geteuid() != 0, reason="only root needs another user for the server")
def test_a_server_whose_wheel_its_user_cannot_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "_open_to_all", lambda path: False)
    with embedded.EmbeddedPostgres({"max_connections": "17"}) as server:
        folder = server.log.parent
        assert Path(f"/proc/{server.pid}/exe").readlink().is_relative_to(folder)
        with psycopg.connect(server.conninfo) as connection:
            row = connection.execute("SELECT current_setting('max_connections')").fetchone()
        assert row == ("17",)
    assert server.pid is None
    assert not folder.exists()


@pytest.mark.acceptance
@pytest.mark.pg18_only
def test_a_server_that_cannot_start_says_why_and_leaves_nothing() -> None:
    server = embedded.EmbeddedPostgres({"max_connections": "many"})
    with pytest.raises(embedded.EmbeddedPostgresError, match="invalid value for parameter"):
        server.start()
    assert not server.log.parent.exists()


def test_a_missing_folder_is_said_so(tmp_path: Path) -> None:
    demo = _start_demo(tmp_path, "none", tmp_path / "nowhere")
    output, errors = demo.communicate(timeout=30)
    assert demo.returncode == 2
    assert "no such folder" in errors
    assert output == ""
