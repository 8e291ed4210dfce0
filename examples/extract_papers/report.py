"""Put the outcome of a run into files: JSON Lines for programs, one HTML page for people.

Functions over plain data, without a database; everything that comes from a paper is escaped.
"""

import dataclasses
import html
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fanout_procrastinate import Item

from . import charts
from .extraction import Extraction

_PAGES = (1, 2, 5, 10, 20, 50, 100, 200, 500)
_WORDS = (0, 1, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
_SIGNS = {"succeeded": "✓", "failed": "✗", "cancelled": "–"}  # noqa: RUF001 - a dash is meant

# Line ends to some readers of text, though not to JSON.
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
# Control characters are no HTML; a paper's text may have any of them.
_CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(9), *range(11, 32), 127)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One item: its key, how it ended, and the result or the reason why there is none."""

    key: str
    status: str
    result: dict[str, Any] | None = None
    error: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """The run as a whole; `reasons` are the kinds of errors, with how many items each took."""

    run_id: int
    folder: str
    status: str
    total: int
    succeeded: int
    failed: int
    cancelled: int = 0
    reasons: Sequence[tuple[str, int]] = ()


def row_of(item: Item) -> Row:
    """The row of an item of a run."""
    return Row(
        key=item.key or str(item.position),
        status=item.status,
        result=item.result,
        error=item.error["message"] if item.error else None,
    )


def json_lines(rows: Iterable[Row]) -> Iterator[str]:
    """One line of JSON for each item, in order: key, status, and result or error."""
    for row in rows:
        record: dict[str, Any] = {"key": row.key, "status": row.status}
        if row.status == "succeeded":
            record["result"] = row.result
        else:
            record["error"] = row.error
        yield json.dumps(record, ensure_ascii=False).translate(_LINE_ENDS) + "\n"


def html_report(summary: Summary, rows: Sequence[Row], results: Sequence[Extraction]) -> str:
    """A page that needs nothing else: numbers, charts, reasons and a table of all items."""
    sections = (_numbers(summary, results), _charts(summary, results), _reasons(summary))
    return _PAGE.format(
        style=_STYLE,
        title=f"Run {summary.run_id}: {summary.total} papers",
        lead=f"from {_text(summary.folder)}, {_text(summary.status)}",
        sections="".join(sections),
        rows="".join(_table_row(row) for row in rows),
        caption=f"All {summary.total:,} papers, in the order of the run",
    )


def _text(value: object) -> str:
    return html.escape(str(value)).translate(_CONTROLS)


def _foreign(value: object) -> str:
    """Text from a paper, which may run from right to left and must not turn its surroundings."""
    return f"<bdi>{_text(value)}</bdi>"


def _numbers(summary: Summary, results: Sequence[Extraction]) -> str:
    numbers = {
        "papers": summary.total,
        "read": summary.succeeded,
        "could not be read": summary.failed,
        "pages": sum(result.pages for result in results),
        "words": sum(result.words for result in results),
    }
    entries = (f"<div><dt>{name}</dt><dd>{number:,}</dd></div>" for name, number in numbers.items())
    return f'<dl class="numbers">{"".join(entries)}</dl>'


def _charts(summary: Summary, results: Sequence[Extraction]) -> str:
    pages = [result.pages for result in results]
    words = [result.words for result in results]
    languages = Counter(result.language or "unknown" for result in results)
    parts = {
        "succeeded": summary.succeeded,
        "failed": summary.failed,
        "cancelled": summary.cancelled,
    }
    figures = (
        charts.stacked_bar("status", "How the papers ended", parts),
        charts.bars("pages", "Pages per paper", _histogram(pages, _PAGES)),
        charts.bars("words", "Words per paper", _histogram(words, _WORDS)),
        charts.bars("languages", "Papers per language", languages.most_common()),
    )
    return f'<section class="charts" aria-label="Charts">{"".join(figures)}</section>'


def _histogram(values: Sequence[int], starts: Sequence[int]) -> list[tuple[str, int]]:
    """How many values lie in each class; the empty classes at both ends are left out."""
    ends = [start - 1 for start in starts[1:]]
    classes = [
        (_range_label(start, end), sum(start <= value <= end for value in values))
        for start, end in zip(starts, ends, strict=False)
    ]
    classes.append((f"{starts[-1]:,} +", sum(value >= starts[-1] for value in values)))
    filled = [index for index, (_, count) in enumerate(classes) if count]
    return classes[filled[0] : filled[-1] + 1] if filled else []


def _range_label(start: int, end: int) -> str:
    return f"{start:,}" if start == end else f"{start:,} to {end:,}"


def _reasons(summary: Summary) -> str:
    if not summary.reasons:
        return ""
    entries = (f"<li>{_foreign(reason)} ({count:,})</li>" for reason, count in summary.reasons)
    return f"<section><h2>Why papers failed</h2><ul>{''.join(entries)}</ul></section>"


def _table_row(row: Row) -> str:
    sign = _SIGNS.get(row.status, "…")
    cells = (
        f'<th scope="row">{_foreign(row.key)}</th>',
        f'<td class="{_text(row.status)}"><span aria-hidden="true">{sign}</span> '
        f"{_text(row.status)}</td>",
        *(_result_cells(row.result) if row.result is not None else _error_cells(row.error)),
    )
    return f"<tr>{''.join(cells)}</tr>\n"


def _result_cells(result: dict[str, Any]) -> tuple[str, ...]:
    title = _foreign(result["title"]) if result["title"] else "<em>no title</em>"
    lines = "<br>".join(_foreign(line) for line in result["first_lines"])
    about = f"<details><summary>{title}</summary><p>{lines}</p></details>" if lines else title
    return (
        f"<td>{about}</td>",
        f'<td class="number">{result["pages"]:,}</td>',
        f'<td class="number">{result["words"]:,}</td>',
        f"<td>{_text(result['language'] or 'unknown')}</td>",
    )


def _error_cells(error: str | None) -> tuple[str, ...]:
    return (f'<td colspan="4">{_foreign(error or "no result")}</td>',)


_STYLE = """
:root { color-scheme: light dark; --ink: #1d2129; --soft: #5b6472; --paper: #fbfbf9;
  --card: #ffffff; --line: #dcdfe4; --bar: #3a6ea5; --succeeded: #2f7d4f; --failed: #b3372f;
  --cancelled: #767d88; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #a3abb8; --paper: #15181d;
  --card: #1d2127; --line: #343a43; --bar: #7fb0e3; --succeeded: #6cc492; --failed: #f08a80;
  --cancelled: #9aa2ae; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1rem 4rem; max-width: 68rem; background: var(--paper);
  color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; }
h1 { margin: 0; font-size: 1.8rem; } h2 { font-size: 1.1rem; }
.lead { margin: 0 0 1.5rem; color: var(--soft); overflow-wrap: anywhere; }
.numbers { display: flex; flex-wrap: wrap; gap: .75rem; margin: 0 0 1rem; }
.numbers div { flex: 1 1 8rem; display: flex; flex-direction: column-reverse; }
.numbers div, figure { padding: .9rem 1rem; background: var(--card);
  border: 1px solid var(--line); border-radius: .5rem; }
dt { color: var(--soft); font-size: .9rem; }
dd { margin: 0; font-size: 1.6rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.charts { display: grid; gap: .75rem;
  grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); }
figure { margin: 0; } figcaption { margin-bottom: .5rem; font-weight: 600; }
svg { display: block; width: 100%; height: auto; font: 13px system-ui, sans-serif; }
svg text { fill: var(--ink); } svg .bar { fill: var(--bar); }
svg .succeeded { fill: var(--succeeded); } svg .failed { fill: var(--failed); }
svg .cancelled { fill: var(--cancelled); }
.scroll { margin-top: 1.5rem; overflow-x: auto; }
table { width: 100%; border-collapse: collapse; background: var(--card); }
caption { padding: .5rem 0; text-align: left; font-weight: 600; }
th, td { padding: .45rem .6rem; border-bottom: 1px solid var(--line); text-align: left;
  vertical-align: top; }
thead th { color: var(--soft); font-size: .85rem; }
tbody th { min-width: 9rem; font-weight: 500; overflow-wrap: anywhere; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; }
td.succeeded { color: var(--succeeded); white-space: nowrap; }
td.failed { color: var(--failed); white-space: nowrap; }
summary { cursor: pointer; } details p { margin: .3rem 0 0; color: var(--soft); font-size: .9rem; }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p class="lead">{lead}</p>
{sections}
<div class="scroll" role="region" aria-label="Table of papers" tabindex="0">
<table>
<caption>{caption}</caption>
<thead><tr><th scope="col">File</th><th scope="col">Status</th><th scope="col">Title or reason</th>
<th scope="col" class="number">Pages</th><th scope="col" class="number">Words</th>
<th scope="col">Language</th></tr></thead>
<tbody>
{rows}</tbody>
</table>
</div>
</main>
</body>
</html>
"""
