"""What people see: text made safe for a terminal, tables and progress, with or without `rich`."""

from __future__ import annotations

import collections
import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TextIO

from fanout_procrastinate import models
from fanout_procrastinate.cli import views

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
_LINES_BELOW = 8
_LEAST_FOLDED = 12
_JOINERS = "\N{ZERO WIDTH JOINER}\N{ZERO WIDTH NON-JOINER}"
_BESIDE = 2
_STYLES = {
    "completed": "green",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "yellow",
    "processing": "cyan",
}


class Live(Protocol):
    """Show runs as they go: call it with each reading of one."""

    def __call__(self, progress: models.Progress) -> None: ...

    def log(self, text: str) -> None:
        """Show a line of a run's."""


# -- words


def visible(text: object) -> str:
    """Return text on one line, without the characters that would steer a terminal.

    Joiners stay: Persian, Hindi and many emoji are not written without them.

    Example:
        >>> visible("two\\nlines, \\x1b[31mred")
        'two lines, \ufffd[31mred'
    """
    return "".join(
        letter
        if letter.isprintable() or letter in _JOINERS
        else (" " if letter.isspace() else "\N{REPLACEMENT CHARACTER}")
        for letter in str(text)
    )


# -- screens


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

    def block(self, text: str) -> None:
        """Write lines of our own as they are."""
        self._stream.write(text)

    def table(
        self, heads: Sequence[str], rows: Iterable[Sequence[object]], spare: Sequence[str] = ()
    ) -> None:
        """Write rows under their heads; a head that ends with ``>`` stands to the right.

        A terminal that is too narrow goes without the heads of `spare`, the last of them first.
        """
        cells = [[head.rstrip(">").upper() for head in heads]]
        cells += [[_cell(value) for value in row] for row in rows]
        widths = [max(len(row[place]) for row in cells) for place in range(len(heads))]
        for row in cells:
            self.line("  ".join(map(_padded, row, heads, widths)).rstrip())

    @contextlib.contextmanager
    def live(self) -> Iterator[Live]:
        """Show progress inside this block: give each reading of a run to what it yields."""
        yield Lines(self.line)


def _cell(value: object) -> str:
    return "" if value is None else visible(value)


def _padded(text: str, head: str, width: int) -> str:
    return text.rjust(width) if head.endswith(">") else text.ljust(width)


class Lines:
    """Tell of runs in lines: when one has moved, at most one a second for each, and its last."""

    def __init__(
        self, line: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._line = line
        self._clock = clock
        self._shown: dict[int, tuple[object, float]] = {}

    def log(self, text: str) -> None:
        """Tell a line of a run's."""
        self._line(text)

    def __call__(self, progress: models.Progress) -> None:
        state = _state(progress)
        before, at = self._shown.get(progress.run_id, (None, float("-inf")))
        now = self._clock()
        if state == before or (now - at < _SECONDS_BETWEEN_LINES and not progress.closed):
            return
        self._shown[progress.run_id] = (state, now)
        self._line(views.summary(progress))


def _state(progress: models.Progress) -> object:
    """What must differ for a line to be worth reading: not the rate alone."""
    counts = (progress.pending, progress.waiting, progress.processing, progress.failed)
    return progress.status, progress.total, progress.done, progress.paused, progress.reason, counts


class RichScreen(Screen):
    """Write tables and bars with `rich`, for a terminal."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._console = rich.console.Console(
            file=stream, markup=False, emoji=False, highlight=False
        )

    def line(self, text: str) -> None:
        self._console.print(rich.text.Text(visible(text)), soft_wrap=True)

    def table(
        self, heads: Sequence[str], rows: Iterable[Sequence[object]], spare: Sequence[str] = ()
    ) -> None:
        cells = [list(map(_text, row)) for row in rows]
        columns = {head: [row[place] for row in cells] for place, head in enumerate(heads)}
        dropped = [head for head in spare if head in columns]
        while dropped and _needed(columns) > self._console.width:
            del columns[dropped.pop()]
        fits = _needed(columns) <= self._console.width
        table = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
        for head, column in columns.items():
            table.add_column(
                head.rstrip(">"),
                justify="right" if head.endswith(">") else "left",
                no_wrap=fits and not _folds(head, column),
                overflow="fold",
            )
        for row in zip(*columns.values(), strict=True):
            table.add_row(*row)
        self._console.print(table)

    @contextlib.contextmanager
    def live(self) -> Iterator[Live]:
        bars = Bars(self._console)
        with bars.shown():
            yield bars
        for progress in bars.latest.values():
            self.line(views.summary(progress))


def _text(value: object) -> rich.text.Text:
    return rich.text.Text(_cell(value), style=_style(value))


def _needed(columns: Mapping[str, Sequence[rich.text.Text]]) -> int:
    """Return how wide a table must be, with what may be folded at its narrowest."""
    widths = [
        _LEAST_FOLDED if _folds(head, cells) else _width(head, cells)
        for head, cells in columns.items()
    ]
    return sum(widths) + _BESIDE * len(widths)


def _width(head: str, cells: Sequence[rich.text.Text]) -> int:
    return max([len(head.rstrip(">")), *(cell.cell_len for cell in cells)])


def _folds(head: str, cells: Sequence[rich.text.Text]) -> bool:
    """Whether a column may go on in the next line: figures, and short words, do not."""
    return not head.endswith(">") and _width(head, cells) > _LEAST_FOLDED


def _style(value: object) -> str:
    return _STYLES.get(value, "") if isinstance(value, models.RunStatus | models.ItemStatus) else ""


class Bars:
    """Show a bar for each run, and the latest lines below them."""

    def __init__(self, console: rich.console.Console) -> None:
        self.latest: dict[int, models.Progress] = {}
        self._console = console
        self._tasks: dict[int, rich.progress.TaskID] = {}
        self._lines: collections.deque[str] = collections.deque(maxlen=_LINES_BELOW)
        self._bars = _with_lines(self._lines)(
            _text_column("{task.description}"),
            rich.progress.BarColumn(bar_width=None),
            _text_column("{task.fields[counts]}"),
            _spare_column("{task.fields[failed]}", style="red"),
            _spare_column("{task.fields[pace]}"),
            console=console,
            expand=True,
        )

    def shown(self) -> contextlib.AbstractContextManager[object]:
        """Return the block inside which the bars are on the screen."""
        return self._bars

    def log(self, text: str) -> None:
        """Show a line below the bars; the oldest makes room for it."""
        self._lines.append(visible(text))
        self._bars.refresh()

    def __call__(self, progress: models.Progress) -> None:
        run_id = progress.run_id
        words: dict[str, Any] = {
            "counts": views.counts(progress),
            "failed": f"{progress.failed} failed" if progress.failed else "",
            "pace": progress.status if progress.closed else views.pace(progress),
        }
        self.latest[run_id] = progress
        if run_id not in self._tasks:
            name = visible(progress.name)
            self._console.print(rich.text.Text(f"run {run_id}: {name}"), soft_wrap=True)
            self._tasks[run_id] = self._bars.add_task(f"run {run_id}", total=None, **words)
        total, done = progress.total, progress.done
        if not total and progress.closed:
            total = done = 1  # bars know no empty whole
        self._bars.update(self._tasks[run_id], total=total, completed=done, **words)


def _with_lines(lines: Iterable[str]) -> type[rich.progress.Progress]:
    """Return a kind of progress display with these lines below its bars."""

    class Display(rich.progress.Progress):
        def get_renderables(self) -> Iterable[rich.console.RenderableType]:
            yield from super().get_renderables()
            for line in lines:
                yield rich.text.Text(line, style="dim", no_wrap=True, overflow="ellipsis")

    return Display


def _text_column(text: str, style: str = "none") -> rich.progress.TextColumn:
    return rich.progress.TextColumn(text, style=style, markup=False)


def _spare_column(text: str, style: str = "none") -> rich.progress.TextColumn:
    """A column that is cut, with a mark, before one that is not spare loses anything."""

    class Spare(rich.progress.TextColumn):
        def render(self, task: rich.progress.Task) -> rich.text.Text:
            shown = super().render(task)
            shown.no_wrap, shown.overflow = True, "ellipsis"
            return shown

    # Those that may wrap are the first to be narrowed.
    return Spare(text, style=style, markup=False, table_column=rich.table.Column(no_wrap=False))


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
