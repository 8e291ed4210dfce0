"""What people see: words, tables, bars, lines and JSON, from values alone."""

import datetime
import io
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from fanout_procrastinate import ErrorGroup, Item, ItemStatus, Progress, RunStatus
from fanout_procrastinate.cli import display, views

HOSTILE = "\x1b[2J\x07bad\r\n\u202eend\x9b\udc80"
NOON = datetime.datetime(2026, 7, 1, 12, 0, 0, tzinfo=datetime.UTC)
STYLE = re.compile(r"\x1b\[[0-9;]*m")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        """What was drawn, without colours."""
        return STYLE.sub("", self.getvalue())


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def progress(**values: Any) -> Progress:
    """A run at work: 12 of 22 items are final, one of them failed."""
    given: dict[str, Any] = {
        "run_id": 1,
        "name": "papers.extract",
        "status": RunStatus.PROCESSING,
        "total": 22,
        "pending": 8,
        "waiting": 0,
        "processing": 2,
        "succeeded": 11,
        "failed": 1,
        "cancelled": 0,
        "duplicates": 0,
        "paused": False,
        "generation": 1,
        "rate": 2.0,
        "reason": None,
        "callbacks": {},
        "max_in_flight": 100,
        "created_at": NOON,
        "scheduled_at": None,
        "deadline": None,
        "started_at": NOON,
        "closed_at": None,
        "last_activity_at": NOON,
    }
    return Progress(**given | values)


def closed(**values: Any) -> Progress:
    given: dict[str, Any] = {
        "status": RunStatus.COMPLETED,
        "pending": 0,
        "processing": 0,
        "succeeded": 18,
        "failed": 4,
        "closed_at": NOON + datetime.timedelta(seconds=75),
    }
    return progress(**given | values)


def item(**values: Any) -> Item:
    given: dict[str, Any] = {
        "position": 3,
        "key": None,
        "status": ItemStatus.PENDING,
        "payload": {"id": "a"},
        "result": None,
        "error": None,
        "attempts": 0,
        "crashes": 0,
        "sanitised": False,
        "due": None,
        "started_at": None,
        "finished_at": None,
    }
    return Item(**given | values)


def is_calm(text: str) -> bool:
    return all(letter.isprintable() or letter == "\n" for letter in text)


# -- words


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünïcode, 漢字", "plain, ünïcode, 漢字"),
        ("two\nlines\tand\r\nmore", "two lines and  more"),
        ("\x1b[31mred\x1b[0m", "\ufffd[31mred\ufffd[0m"),
        ("\x00\x07\x7f\x9b", "\ufffd" * 4),
        ("right\u202eleft\u2066", "right\ufffdleft\ufffd"),
        ("\u0645\u06cc\u200c\u062e", "\u0645\u06cc\u200c\u062e"),
        ("\U0001f468\u200d\U0001f33e", "\U0001f468\u200d\U0001f33e"),
        ("\u200b\u200e\u2060\ufeff\u00ad", "\ufffd" * 5),
        ("\ud800", "\ufffd"),
        (7, "7"),
    ],
)
def test_text_is_made_visible(text: object, shown: str) -> None:
    assert display.visible(text) == shown


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-1, "0.0 s"),
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 00 min"),
        (86399, "23 h 59 min"),
        (90000, "1 d 01 h"),
    ],
)
def test_durations_in_words(seconds: float, words: str) -> None:
    assert views.duration(seconds) == words


def test_long_text_is_cut_with_a_mark() -> None:
    assert views.cut("abcdef", 6) == "abcdef"
    assert views.cut("abcdefg", 6) == "abcde…"
    assert views.compact({"a": ["ü", None]}, 40) == '{"a": ["ü", null]}'
    assert len(views.compact(list(range(100)), 40)) == 40


def test_times_that_are_missing_are_empty() -> None:
    assert views.moment(None) == ""
    assert views.took(NOON, None) == ""
    assert views.took(None, NOON) == ""
    assert re.fullmatch(r"2026-0[67]-\d\d \d\d:\d\d:00", views.moment(NOON))
    assert views.dated(None) == ""
    assert re.fullmatch(r"2026-0[67]-\d\d \d\d:\d\d:00 [+-]\d{4}", views.dated(NOON))


# -- runs and items


@pytest.mark.parametrize(
    ("run", "line"),
    [
        (progress(), "run 1: processing, 12 of 22 (55 %), 1 failed, 2.0/s, 5.0 s left"),
        (
            progress(waiting=3, failed=0, rate=0.0),
            "run 1: processing, 11 of 22 (50 %), 3 waiting",
        ),
        (progress(paused=True), "run 1: processing, 12 of 22 (55 %), 1 failed, paused, 2.0/s"),
        (
            progress(reason="cancelled by an operator", rate=0.0),
            "run 1: processing, 12 of 22 (55 %), 1 failed, stopping: cancelled by an operator",
        ),
        (
            progress(reason="wrong folder", cancelled=8, pending=0, rate=0.0),
            "run 1: processing, 20 of 22 (91 %), 1 failed, stopping: wrong folder",
        ),
        (
            progress(
                status=RunStatus.PENDING, total=None, pending=500, succeeded=0, failed=0, rate=0.0
            ),
            "run 1: pending, 500 listed so far",
        ),
        (closed(), "run 1: completed, 22 items, 18 succeeded, 4 failed"),
        (
            closed(status=RunStatus.CANCELLED, succeeded=10, cancelled=8, reason="enough"),
            "run 1: cancelled, 22 items, 10 succeeded, 4 failed, 8 cancelled: enough",
        ),
        (
            closed(status=RunStatus.FAILED, total=None, succeeded=0, failed=0, reason="no"),
            "run 1: failed, 0 items, 0 succeeded, 0 failed: no",
        ),
    ],
)
def test_a_run_in_one_line(run: Progress, line: str) -> None:
    assert views.summary(run) == line


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (RunStatus.COMPLETED, "0 of 0 (100 %)"),
        (RunStatus.FAILED, "0 of 0"),
        (RunStatus.CANCELLED, "0 of 0"),
    ],
)
def test_nothing_is_all_of_nothing_only_where_the_run_completed(
    status: RunStatus, words: str
) -> None:
    assert views.counts(closed(status=status, total=0, succeeded=0, failed=0)) == words


def item_row(one: Item) -> dict[str, object]:
    return {head: column[0] for head, column in views.item_columns([one]).items()}


def test_an_item_in_a_row() -> None:
    assert item_row(item()) == {
        "item>": 3,
        "key": "",
        "payload": '{"id": "a"}',
        "status": "pending",
        "attempts>": 0,
        "took>": "",
        "outcome": "",
    }
    done = item(
        key="k" * 50,
        status=ItemStatus.SUCCEEDED,
        attempts=1,
        result={"title": "t" * 100},
        started_at=NOON,
        finished_at=NOON + datetime.timedelta(seconds=2),
    )
    row = item_row(done)
    assert list(row.values())[1:5] == ["k" * 39 + "…", "succeeded", 1, "2.0 s"]
    assert len(str(row["outcome"])) == 60
    failed = item(error={"type": "ValueError", "message": "m" * 500})
    assert len(str(item_row(failed)["outcome"])) == 200
    assert item_row(item(status=ItemStatus.SUCCEEDED))["outcome"] == "null"


def test_crashes_and_payloads_have_a_column_where_they_tell_something() -> None:
    dead, well = item(key="a", crashes=2), item(key="b")
    assert views.item_columns([dead, well])["crashes>"] == [2, 0]
    assert not {"crashes>", "payload"} & set(views.item_columns([well]))
    assert views.item_columns([well, item()])["key"] == ["b", ""]


def test_an_item_at_work_has_taken_the_time_since_its_start() -> None:
    started = views.now() - datetime.timedelta(minutes=90)
    at_work = item(status=ItemStatus.PROCESSING, started_at=started)
    assert item_row(at_work)["took>"] == "1 h 30 min"
    again = item(status=ItemStatus.PENDING, started_at=started)
    assert item_row(again)["took>"] == ""


def test_what_a_run_waits_for() -> None:
    assert views.wait("papers", None) == views.wait("papers", NOON - datetime.timedelta(days=999))
    assert views.wait("papers", None) == "waits for a worker on queue papers"
    later = views.now() + datetime.timedelta(days=1)
    assert views.wait("papers", later) == f"waits until {views.dated(later)}"


def test_an_error_in_a_row() -> None:
    group = ErrorGroup(error_type="ValueError", count=4, message="m" * 500, position=7, key=None)
    assert views.error_row(group)[:4] == (4, "ValueError", 7, "")
    assert len(str(views.error_row(group)[4])) == 200


# -- plain text


def test_a_plain_table_is_aligned_and_ends_no_line_with_blanks() -> None:
    stream = io.StringIO()
    display.Screen(stream).table(("n>", "name", "note"), [(1, "a\nb", None), (100, "long", "x")])
    assert stream.getvalue().splitlines() == [
        "  N  NAME  NOTE",
        "  1  a b",
        "100  long  x",
    ]


def test_named_values_that_are_missing_have_no_line() -> None:
    stream = io.StringIO()
    display.Screen(stream).fields([("a", 0), ("none", None), ("empty", ""), ("longer", HOSTILE)])
    assert stream.getvalue().startswith("  a       0\n  longer  \ufffd[2J")
    assert len(stream.getvalue().splitlines()) == 2
    assert is_calm(stream.getvalue())
    display.Screen(stream).fields([])


def test_a_stream_that_is_no_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(display.screen(io.StringIO())) is display.Screen
    assert type(display.screen(Terminal())) is display.RichScreen
    monkeypatch.setattr(display, "HAVE_RICH", False)
    assert type(display.screen(Terminal())) is display.Screen


@pytest.fixture
def told() -> Iterator[tuple[list[str], list[float], display.Lines]]:
    """What was said, a clock to set, and who says it."""
    said: list[str] = []
    now = [100.0]
    yield said, now, display.Lines(said.append, lambda: now[0])


def test_lines_come_at_most_once_a_second(told: Any) -> None:
    said, now, lines = told
    lines(progress())
    now[0] += 0.5
    lines(progress(succeeded=12, pending=7))
    assert len(said) == 1
    now[0] += 0.5
    lines(progress(succeeded=12, pending=7))
    assert len(said) == 2, "what was held back comes later"


def test_lines_come_on_change_alone(told: Any) -> None:
    said, now, lines = told
    for rate in (2.0, 3.0, 4.0):
        lines(progress(rate=rate))
        now[0] += 10
    assert len(said) == 1
    lines(progress(paused=True))
    assert len(said) == 2
    now[0] += 10
    lines(progress(paused=True, reason="enough", cancelled=0))
    assert len(said) == 3


def test_the_last_line_always_comes_and_comes_once(told: Any) -> None:
    said, _, lines = told
    lines(progress())
    lines(closed())
    lines(closed())
    assert said[1:] == ["run 1: completed, 22 items, 18 succeeded, 4 failed"]


def test_each_run_has_lines_of_its_own(told: Any) -> None:
    said, _, lines = told
    lines(progress())
    lines(progress(run_id=2))
    assert [line[:5] for line in said] == ["run 1", "run 2"]


# -- with rich


def test_a_table_on_a_terminal(terminal: Terminal) -> None:
    display.screen(terminal).table(
        views.RUNS, [views.run_row(closed()), views.run_row(progress(name="[red]:smile:[/red]"))]
    )
    drawn = terminal.text()
    assert "papers.extract" in drawn
    assert "[red]:smile:[/red]" in drawn, "names are no markup"
    assert "1 min 15 s" in drawn
    assert "\x1b[32mcompleted" in terminal.getvalue()


def test_long_text_in_a_table_is_folded_not_lost(terminal: Terminal) -> None:
    display.screen(terminal).table(("key", "sample"), [("k", "x" * 250)])
    assert terminal.text().count("x") == 250


LONG = {
    "": closed(run_id=12345, name="volume " * 9, status=RunStatus.CANCELLED),
    "dots": progress(run_id=7, name="papers.extract_folder.of_papers"),
}


@pytest.mark.parametrize("width", [20, 33, 40, 60, 80, 120])
def test_narrow_terminals_keep_what_tells_runs_apart(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """The id and the status of a run stand in one line, its name is folded, the rest may go."""
    monkeypatch.setenv("COLUMNS", str(width))
    rows = (views.run_row(one) for one in LONG.values())
    display.screen(terminal).table(views.RUNS, rows, views.RUNS_SPARE)
    lines = terminal.text().splitlines()
    assert max(map(len, lines)) <= width
    for one in LONG.values():
        (line,) = (line for line in lines if str(one.run_id) in line.split())
        assert str(one.status) in line.split()
    drawn = terminal.text()
    assert drawn.count("volume") == (9 if width >= 33 else 0), "folded, not lost"
    assert [word for word in ("failed", "total", "took") if word in drawn] == {
        60: ["failed", "total"],
        80: ["failed", "total"],
        120: ["failed", "total", "took"],
    }.get(width, [])


def test_hostile_text_on_a_terminal(terminal: Terminal) -> None:
    screen = display.screen(terminal)
    screen.line(HOSTILE)
    screen.fields([("name", HOSTILE)])
    screen.table(("a", "b"), [(HOSTILE, HOSTILE)])
    assert is_calm(terminal.text())
    with screen.live() as update:
        update(progress(name=HOSTILE))
        update(closed(name=HOSTILE, reason=HOSTILE))
    for harm in ("\x1b[2J", "\x07", "\u202e", "\x9b"):
        assert harm not in terminal.getvalue()


def test_bars_of_several_runs(terminal: Terminal) -> None:
    screen = display.screen(terminal)
    with screen.live() as update:
        update(progress(name="papers.first"))
        update(
            progress(
                run_id=2, status=RunStatus.PENDING, total=None, pending=5, name="papers.second"
            )
        )
        update(progress(run_id=3, total=0, pending=0, processing=0, succeeded=0, failed=0))
        update(closed())
        update(closed(run_id=2, status=RunStatus.FAILED, total=None, succeeded=0, failed=0))
        update(closed(run_id=3, total=0, succeeded=0, failed=0))
    drawn = terminal.text()
    assert "run 1: papers.first" in drawn
    assert "run 2: papers.second" in drawn
    assert "12 of 22 (55 %)" in drawn or "22 of 22 (100 %)" in drawn
    assert drawn.splitlines()[-3].endswith("run 1: completed, 22 items, 18 succeeded, 4 failed")
    assert "\x1b[?25h" in terminal.getvalue(), "the cursor is shown again"


@pytest.mark.parametrize("width", [40, 60, 80])
def test_bars_on_a_narrow_terminal_say_whose_they_are(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    reason = "stopped because the disk on which all of the papers lie is nearly full"
    with display.screen(terminal).live() as update:
        for run_id in (1, 22, 12345):
            update(progress(run_id=run_id, total=40_000, pending=39_986, reason=reason))
    *bars, _, _, _ = terminal.text().splitlines()
    for run_id, bar in zip((1, 22, 12345), bars[-3:], strict=True):
        assert re.search(rf"run {run_id} .*12 of 40000 \(0 %\)", bar)


def test_latest_lines_stand_below_the_bars(terminal: Terminal) -> None:
    screen = display.screen(terminal)
    with screen.live() as live:
        live(progress())
        for number in range(30):
            live.log(f"line {number} {HOSTILE}")
        live(closed())
    *above, last = terminal.text().splitlines()
    assert last.endswith("run 1: completed, 22 items, 18 succeeded, 4 failed")
    assert [line.split()[1] for line in above[-8:]] == [str(n) for n in range(22, 30)]
    for harm in ("\x1b[2J", "\x07", "\u202e", "\x9b"):
        assert harm not in terminal.getvalue()


def test_an_interrupt_leaves_the_terminal_in_order(terminal: Terminal) -> None:
    with pytest.raises(KeyboardInterrupt), display.screen(terminal).live() as update:
        update(progress())
        raise KeyboardInterrupt
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l")


# -- JSON


def test_json_is_ascii_without_control_characters() -> None:
    stream = io.StringIO()
    data = {"text": HOSTILE + "\x7f", "number": 1.5, "none": None}
    display.write_json(stream, data)
    assert json.loads(stream.getvalue()) == data
    assert stream.getvalue().isascii()
    assert is_calm(stream.getvalue())


@pytest.mark.parametrize("count", [0, 1, 3])
def test_an_iterator_becomes_an_array_piece_by_piece(count: int) -> None:
    stream = io.StringIO()
    data = [{"n": number} for number in range(count)]
    display.write_json(stream, iter(data))
    assert json.loads(stream.getvalue()) == data
    assert stream.getvalue().endswith("]\n")
