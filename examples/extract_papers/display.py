"""What the demonstration shows: a live bar on a terminal, plain lines elsewhere, then a table."""

import contextlib
import time
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from fanout_procrastinate import Progress

from .report import Row

PLAIN_WIDTH = 110
MAX_ROWS = 50
_SECONDS_BETWEEN_LINES = 1.0


class Display:
    """Everything that goes to the standard output."""

    def __init__(self) -> None:
        console = Console(highlight=False)
        self._console = (
            console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)
        )
        self._bar = Bar(
            TextColumn("run {task.fields[run]} {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]} failed"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None, run="", failed=0)
        self._line = ""
        self._line_at = 0.0

    def say(self, line: str) -> None:
        """Print one line as it is, however long."""
        self._console.print(line, markup=False, soft_wrap=True)

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        """Show the bar inside this block."""
        with self._bar:
            yield

    def update(self, progress: Progress) -> None:
        """Show how far the run is: the bar moves, or a line tells what has changed."""
        done = progress.succeeded + progress.failed + progress.cancelled
        if self._console.is_terminal:
            self._bar.update(
                self._task,
                description=progress.status,
                total=progress.total,
                completed=done,
                failed=progress.failed,
                run=progress.run_id,
            )
            return
        total = "?" if progress.total is None else progress.total
        line = f"{progress.status}: {done} of {total} done, {progress.failed} failed"
        final = progress.total == done
        due = final or time.monotonic() - self._line_at >= _SECONDS_BETWEEN_LINES
        if line != self._line and due:
            self._line, self._line_at = line, time.monotonic()
            self.say(line)

    def results(self, rows: Sequence[Row]) -> None:
        """Show what was found, then a line for each file without a result."""
        read = [row for row in rows if row.result is not None]
        table = Table(show_edge=False, expand=True)
        table.add_column("File", no_wrap=True, max_width=28)
        table.add_column("Title", no_wrap=True, ratio=1)
        for name in ("Pages", "Words"):
            table.add_column(name, no_wrap=True, justify="right")
        table.add_column("Language", no_wrap=True)
        for row in read[:MAX_ROWS]:
            table.add_row(*_cells(row))
        if read:
            self._console.print(table)
        if len(read) > MAX_ROWS:
            self.say(f"... and {len(read) - MAX_ROWS} more: see the report")
        for row in rows:
            if row.result is None:
                self.say(f"Not read: {_visible(row.key)}: {_visible(row.error or row.status)}")

    def last_line(self, progress: Progress) -> None:
        """Print how the run ended."""
        print(
            f"run {progress.run_id}: {progress.status}, {progress.total or 0} items, "
            f"{progress.succeeded} succeeded, {progress.failed} failed",
            flush=True,
        )


def _cells(row: Row) -> tuple[Text | str, ...]:
    result = row.result or {}
    return (
        Text(_visible(row.key)),
        Text(_visible(result["title"] or "")),
        f"{result['pages']:,}",
        f"{result['words']:,}",
        result["language"] or "?",
    )


def _visible(text: object) -> str:
    """Text from a file without the characters that would steer the terminal."""
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}"
        for character in str(text)
    )
