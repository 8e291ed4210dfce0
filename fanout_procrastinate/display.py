"""What people see: text made safe for a terminal, tables and progress, with or without `rich`."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO

from fanout_procrastinate import models

try:
    import rich.box
    import rich.console
    import rich.progress
    import rich.table
    import rich.text
except ImportError:  # the extra `cli` is not installed
    HAVE_RICH = False
else:
    HAVE_RICH = True

_SECONDS_BETWEEN_LINES = 1.0
_MINUTE, _HOUR, _DAY = 60, 3600, 86400
_STYLES = {
    "completed": "green",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "yellow",
    "processing": "cyan",
}

Update = Callable[[models.Progress], None]


# -- words


def visible(text: object) -> str:
    """Return text on one line, without the characters that would steer a terminal.

    Example:
        >>> visible("two\\nlines, \\x1b[31mred")
        'two lines, \ufffd[31mred'
    """
    return "".join(
        letter
        if letter.isprintable()
        else (" " if letter.isspace() else "\N{REPLACEMENT CHARACTER}")
        for letter in str(text)
    )


def cut(text: object, length: int) -> str:
    """Return text of at most so many characters; a mark shows where it was cut."""
    whole = str(text)
    return whole if len(whole) <= length else whole[: length - 1] + "…"


def compact(value: Any, length: int = 60) -> str:
    """Return JSON on one line, cut."""
    return cut(json.dumps(value, ensure_ascii=False), length)


def duration(seconds: float | None) -> str:
    """Return seconds in words, as exact as a person needs.

    Example:
        >>> duration(0.42), duration(42), duration(3723)
        ('0.4 s', '42 s', '1 h 02 min')
    """
    if seconds is None:
        return ""
    if seconds < 10:
        return f"{max(seconds, 0.0):.1f} s"
    whole = int(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE:02} s"
    if whole < _DAY:
        return f"{whole // _HOUR} h {whole % _HOUR // _MINUTE:02} min"
    return f"{whole // _DAY} d {whole % _DAY // _HOUR:02} h"


def moment(when: datetime.datetime | None) -> str:
    """Return a time in the reader's time zone."""
    return "" if when is None else when.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def took(start: datetime.datetime | None, end: datetime.datetime | None) -> str:
    """Return in words how long something took, where it has ended."""
    return "" if start is None or end is None else duration((end - start).total_seconds())


def standing(progress: models.Progress) -> str:
    """Return where an open run stands: counts, rate and time left."""
    if progress.total is None:
        parts = [f"{progress.pending} listed so far"]
    else:
        parts = [f"{progress.done} of {progress.total} ({progress.percent:.0f} %)"]
    parts += [
        f"{number} {word}"
        for word, number in (("failed", progress.failed), ("waiting", progress.waiting))
        if number
    ]
    if progress.paused:
        parts.append("paused")
    if progress.rate >= 0.05:
        parts.append(f"{progress.rate:.1f}/s")
    if progress.eta is not None:
        parts.append(f"about {duration(progress.eta)} left")
    return ", ".join(parts)


def summary(progress: models.Progress) -> str:
    """Return a run in one line.

    A closed run reads ``run 1: completed, 22 items, 18 succeeded, 4 failed``.
    """
    start = f"run {progress.run_id}: {progress.status}"
    if not progress.closed:
        stopping = f": {progress.reason}" if progress.reason else ""
        return f"{start}, {standing(progress)}{stopping}"
    line = (
        f"{start}, {progress.total or 0} items, "
        f"{progress.succeeded} succeeded, {progress.failed} failed"
    )
    if progress.cancelled:
        line += f", {progress.cancelled} cancelled"
    return f"{line}: {progress.reason}" if progress.reason else line


# -- screens


@dataclasses.dataclass(frozen=True)
class Column:
    """Head one column of a table; numbers stand to the right."""

    name: str
    right: bool = False


class Screen:
    """Write plain text. Whatever it is given, nothing in it steers the terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def line(self, text: str) -> None:
        """Write one line."""
        self._stream.write(visible(text) + "\n")
        self._stream.flush()

    def fields(self, pairs: Iterable[tuple[str, object]]) -> None:
        """Write what is there of named values, one a line."""
        there = [(name, value) for name, value in pairs if value not in (None, "")]
        width = max((len(name) for name, _ in there), default=0)
        for name, value in there:
            self.line(f"  {name:<{width}}  {value}")

    def table(self, columns: Sequence[Column], rows: Iterable[Sequence[object]]) -> None:
        """Write rows under their heads."""
        cells = [[column.name.upper() for column in columns]]
        cells += [[_cell(value) for value in row] for row in rows]
        widths = [max(len(row[place]) for row in cells) for place in range(len(columns))]
        for row in cells:
            self.line("  ".join(map(_padded, row, columns, widths)).rstrip())

    @contextlib.contextmanager
    def live(self) -> Iterator[Update]:
        """Show progress inside this block: give each reading of a run to what it yields."""
        yield Lines(self.line).update


def _cell(value: object) -> str:
    return "" if value is None else visible(value)


def _padded(text: str, column: Column, width: int) -> str:
    return text.rjust(width) if column.right else text.ljust(width)


class Lines:
    """Tell of runs in lines: when one has moved, at most one a second for each, and its last."""

    def __init__(
        self, line: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._line = line
        self._clock = clock
        self._shown: dict[int, tuple[object, float]] = {}

    def update(self, progress: models.Progress) -> None:
        state = (progress.status, progress.total, progress.pending, progress.waiting)
        state += (progress.processing, progress.done, progress.failed, progress.paused)
        before, at = self._shown.get(progress.run_id, (None, float("-inf")))
        now = self._clock()
        if state == before or (now - at < _SECONDS_BETWEEN_LINES and not progress.closed):
            return
        self._shown[progress.run_id] = (state, now)
        self._line(summary(progress))


class RichScreen(Screen):
    """Write tables and bars with `rich`, for a terminal."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._console = rich.console.Console(
            file=stream, markup=False, emoji=False, highlight=False
        )

    def line(self, text: str) -> None:
        self._console.print(rich.text.Text(visible(text)), soft_wrap=True)

    def table(self, columns: Sequence[Column], rows: Iterable[Sequence[object]]) -> None:
        table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
        for column in columns:
            table.add_column(column.name, justify="right" if column.right else "left")
        for row in rows:
            table.add_row(*(rich.text.Text(_cell(value), style=_style(value)) for value in row))
        self._console.print(table)

    @contextlib.contextmanager
    def live(self) -> Iterator[Update]:
        bars = Bars(self._console)
        with bars.shown():
            yield bars.update
        for progress in bars.latest.values():
            self.line(summary(progress))


def _style(value: object) -> str:
    return _STYLES.get(value, "") if isinstance(value, models.RunStatus | models.ItemStatus) else ""


class Bars:
    """Show a bar for each run."""

    def __init__(self, console: rich.console.Console) -> None:
        self.latest: dict[int, models.Progress] = {}
        self._bars = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}", markup=False),
            rich.progress.BarColumn(bar_width=None),
            rich.progress.TextColumn("{task.fields[standing]}", markup=False),
            console=console,
            expand=True,
        )
        self._tasks: dict[int, rich.progress.TaskID] = {}

    def shown(self) -> contextlib.AbstractContextManager[object]:
        """Return the block inside which the bars are on the screen."""
        return self._bars

    def update(self, progress: models.Progress) -> None:
        run_id = progress.run_id
        self.latest[run_id] = progress
        if run_id not in self._tasks:
            name = f"run {run_id} {cut(visible(progress.name), 32)}"
            self._tasks[run_id] = self._bars.add_task(name, total=None, standing="")
        # Bars know no empty whole.
        total, done = (1, 1) if progress.total == 0 else (progress.total, progress.done)
        self._bars.update(
            self._tasks[run_id],
            total=1 if progress.closed and total is None else total,
            completed=done,
            standing=visible(progress.status if progress.closed else standing(progress)),
        )


def screen(stream: TextIO) -> Screen:
    """Return a screen for a stream: with colours and bars on a terminal, where `rich` is there."""
    return RichScreen(stream) if HAVE_RICH and stream.isatty() else Screen(stream)


# -- JSON


def write_json(stream: TextIO, data: Any) -> None:
    """Write JSON in ASCII, so that nothing in it steers a terminal; an iterator as an array.

    An iterator is written piece by piece, and may be long.
    """
    if isinstance(data, Iterator):
        before = "["
        for one in data:
            stream.write(before + "\n" + _ascii(one))
            before = ","
        stream.write("[]\n" if before == "[" else "\n]\n")
    else:
        stream.write(_ascii(data) + "\n")
    stream.flush()


def _ascii(data: Any) -> str:
    return json.dumps(data, indent=2).replace("\x7f", "\\u007f")
