"""The fan-out: list the PDF files of a folder, read each one, report when all are done.

In the checkout, start workers with
`python -m procrastinate --app=examples.extract_papers.app.app worker --queues=papers`; the database
is that of `FANOUT_EXAMPLE_DSN`, else of the usual `PG...` variables.
"""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import unquote_to_bytes

import procrastinate
import pydantic

from fanout_procrastinate import PermanentError, Run, fanout_child, fanout_manager

from . import report
from .extraction import Extraction, extract

app = procrastinate.App(
    connector=procrastinate.PsycopgConnector(conninfo=os.environ.get("FANOUT_EXAMPLE_DSN", "")),
    import_paths=["examples.extract_papers.app"],
)


class Paper(pydantic.BaseModel):
    """A file to read: its path, and its path below the folder, which tells it from the others."""

    key: str
    path: str


@fanout_child(app, queue="papers", max_attempts=4, timeout=300)
def extract_paper(paper: Paper) -> Extraction:
    """Read one paper."""
    return extract(text_to_path(paper.path))


@fanout_manager(app, child=extract_paper, item_key=lambda paper: paper.key)
def extract_folder(folder: str, output: str) -> Iterator[Paper]:
    """Find the papers; `output` is the folder for the report."""
    root = text_to_path(folder)
    if not root.is_dir():
        raise PermanentError(f"no such folder: {folder}")
    for path in find_papers(root):
        yield Paper(key=path_to_text(path.relative_to(root)), path=path_to_text(path))


@extract_folder.on_complete
def report_run(run: Run) -> None:
    """Write `results.jsonl` and `report.html`; written again, they replace the earlier ones."""
    progress = run.progress()
    rows = [report.row_of(item) for item in run.items()]
    summary = report.Summary(
        run_id=run.id,
        folder=run.args["folder"],
        status=progress.status,
        total=progress.total or 0,
        succeeded=progress.succeeded,
        failed=progress.failed,
        cancelled=progress.cancelled,
        reasons=[(group.message, group.count) for group in run.errors()],
    )
    output = text_to_path(run.args["output"])
    _write(output / "results.jsonl", report.json_lines(rows))
    _write(output / "report.html", [report.html_report(summary, rows, list(run.results()))])


def find_papers(folder: Path) -> list[Path]:
    """All PDF files of a folder and the folders below it, in order; links to nothing too."""
    files = (path for path in folder.rglob("*") if path.suffix.lower() == ".pdf")
    return sorted(path for path in files if path.is_file() or not path.exists())


def path_to_text(path: Path) -> str:
    """A path as text that JSON can hold: bytes that are no UTF-8 become %XX, as in a URL."""
    return re.sub("[\udc80-\udcff%]", lambda match: f"%{ord(match[0]) & 0xFF:02X}", str(path))


def text_to_path(text: str) -> Path:
    """The way back from `path_to_text`."""
    return Path(os.fsdecode(unquote_to_bytes(text)))


def _write(path: Path, parts: Iterable[str]) -> None:
    """Write a file in one go for its readers: it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.part")
    with draft.open("w", encoding="utf-8") as file:
        file.writelines(parts)
    draft.replace(path)
