"""Draw small charts as inline SVG, described in words for those who cannot see them."""

import html
from collections.abc import Mapping, Sequence

_WIDTH = 340
_ROW = 24
_LABELS = 128
_COUNTS = 46


def bars(name: str, caption: str, values: Sequence[tuple[str, int]]) -> str:
    """Horizontal bars, one for each label."""
    longest = max((count for _, count in values), default=0) or 1
    room = _WIDTH - _LABELS - _COUNTS
    shapes = []
    for index, (label, count) in enumerate(values):
        top = index * _ROW
        length = room * count / longest
        shapes.append(
            f'<text x="{_LABELS - 8}" y="{top + 16}" text-anchor="end">{html.escape(label)}</text>'
            f'<rect class="bar" x="{_LABELS}" y="{top + 4}" width="{length:.1f}" height="16" '
            f'rx="2"/><text x="{_LABELS + length + 6:.1f}" y="{top + 16}">{count:,}</text>'
        )
    return _figure(name, caption, values, "".join(shapes), height=max(1, len(values)) * _ROW)


def stacked_bar(name: str, caption: str, parts: Mapping[str, int]) -> str:
    """One bar whose parts are shares of a whole; each part's name is its CSS class too."""
    shown = [(label, count) for label, count in parts.items() if count]
    whole = sum(count for _, count in shown) or 1
    shapes, left = [], 0.0
    for index, (label, count) in enumerate(shown):
        length = _WIDTH * count / whole
        safe = html.escape(label)
        shapes.append(
            f'<rect class="{safe}" x="{left:.1f}" y="0" width="{length:.1f}" height="20"/>'
            f'<rect class="{safe}" x="0" y="{32 + index * _ROW}" width="12" height="12" rx="2"/>'
            f'<text x="20" y="{43 + index * _ROW}">{count:,} {safe}</text>'
        )
        left += length
    return _figure(name, caption, shown, "".join(shapes), height=30 + len(shown) * _ROW)


def _figure(
    name: str, caption: str, values: Sequence[tuple[str, int]], shapes: str, *, height: int
) -> str:
    told = "; ".join(f"{label}: {count:,}" for label, count in values) or "nothing to show"
    return (
        f"<figure><figcaption>{html.escape(caption)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-labelledby="{name}-title {name}-desc">'
        f'<title id="{name}-title">{html.escape(caption)}</title>'
        f'<desc id="{name}-desc">{html.escape(told)}</desc>{shapes}</svg></figure>\n'
    )
