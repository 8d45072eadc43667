"""Write plots as self-contained SVG files: lines on logarithmic axes, or a table of coloured cells.

The axes are logarithmic, because times and sizes differ by orders of magnitude. A browser shows the
numbers of a point as its tooltip. The same data always give the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from shoal.errors import BadArgument
from shoal.timeline.files import replace_text

Points = Sequence[tuple[float, float]]

# The palette of Okabe and Ito, whose colours colour-blind readers can distinguish.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C8C00")
_DASHES = ("", "7 3", "2 3")  # line styles; each is used with all colours before the next one
_PLOT, _LEFT, _TOP, _BOTTOM = 630, 76, 44, 56  # pixels: right end of the plot, and margins
_LINE, _LETTER = 20, 6.6  # pixels: height of a line of the legend, width of a wide letter
_MOST_TICKS, _LABEL = 10, 36  # about the most ticks of an axis, and pixels of a label's width


class _Axis(NamedTuple):
    """A logarithmic axis: the value ``low`` is drawn at ``start``, ``high`` at ``end``."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(self.start + share * (self.end - self.start), 1)


def write_plot(
    path: str | Path, title: str, xlabel: str, ylabel: str, series: Mapping[str, Points]
) -> None:
    """Write a plot as an SVG file, atomically.

    ``series`` maps the name of each line to its (x, y) points, all positive, in any order.
    """
    replace_text(path, plot_svg(title, xlabel, ylabel, series))


def plot_svg(title: str, xlabel: str, ylabel: str, series: Mapping[str, Points]) -> str:
    """Return the plot as SVG text."""
    points = [point for line in series.values() for point in line]
    if not points:
        raise BadArgument(f"plot {title!r}", "it has no point to draw")
    if wrong := [p for p in points if not all(0 < v < math.inf for v in p)]:
        raise BadArgument(f"plot {title!r}", f"{wrong[0]} is not positive and finite")
    height = max(460, _TOP + _BOTTOM + _LINE * len(series))
    width = round(_PLOT + 60 + max(190, _LETTER * max(map(len, series))))
    across = _Axis(*_span(x for x, _ in points), _LEFT, _PLOT)
    up = _Axis(*_span(y for _, y in points), height - _BOTTOM, _TOP)
    sideways = f"translate(18 {(up.start + up.end) / 2}) rotate(-90)"
    parts = [
        *_page(width, height),
        _text(_LEFT, 24, title, extra='font-size="16"'),
        _text((across.start + across.end) / 2, height - 14, xlabel, anchor="middle"),
        _text(0, 0, ylabel, anchor="middle", extra=f'transform="{sideways}"'),
        *_grid(across, up, sorted({x for x, _ in points})),
    ]
    for index, (name, line) in enumerate(series.items()):
        parts += _line(index, name, sorted(line), (across, up))
    return "\n".join([*parts, "</svg>", ""])


def write_map(
    path: str | Path, title: str, columns: Sequence[str], rows: Mapping[str, Mapping[str, str]]
) -> None:
    """Write a table of coloured cells as an SVG file, atomically.

    ``rows`` maps the name of each row to the text of its cells, by column. A missing cell stays
    empty. Cells whose texts have the same first line have the same colour.
    """
    texts = [text.split("\n") for row in rows.values() for text in row.values()]
    kinds = list(dict.fromkeys(text[0] for text in texts))
    lines = max(map(len, texts), default=1)
    cell = max(72, 12 + round(_LETTER * max((len(line) for t in texts for line in t), default=1)))
    high, left = 18 + 15 * lines, 16 + round(_LETTER * max(map(len, rows)))
    width, height = left + cell * len(columns) + 16, _TOP + 26 + high * len(rows) + 10
    parts = [*_page(width, height), _text(16, 24, title, extra='font-size="16"')]
    for x, name in enumerate(columns):
        parts.append(_text(left + cell * (x + 0.5), _TOP + 14, name, anchor="middle"))
    for y, (name, row) in enumerate(rows.items()):
        top = _TOP + 26 + high * y
        parts.append(_text(left - 8, top + high / 2 + 4, name, anchor="end"))
        for x, column in enumerate(columns):
            if text := row.get(column):
                box = (left + cell * x, top, cell, high)
                kind = kinds.index(text.split("\n")[0])
                parts += _cell(box, text, _COLOURS[kind % len(_COLOURS)])
    replace_text(path, "\n".join([*parts, "</svg>", ""]))


def _cell(box: tuple[float, float, float, float], text: str, colour: str) -> Iterator[str]:
    left, top, width, height = box
    size = f'x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}"'
    yield f'<rect {size} fill="{colour}" fill-opacity="0.25" stroke="white" stroke-width="2"/>'
    lines = text.split("\n")
    first = top + height / 2 + 4 - 7.5 * (len(lines) - 1)
    for number, line in enumerate(lines):
        yield _text(left + width / 2, first + 15 * number, line, anchor="middle")


def _page(width: int, height: int) -> tuple[str, str]:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    )


def _span(values: Iterable[float]) -> tuple[float, float]:
    """Return the least and the largest value, moved apart by a margin."""
    listed = list(values)
    low, high = min(listed), max(listed)
    margin = max((high / low) ** 0.04, 1.1)
    return low / margin, high * margin


def _grid(across: _Axis, up: _Axis, xs: Sequence[float]) -> Iterator[str]:
    binary = all(x < 1024 or x % 1024 == 0 for x in xs) and xs[-1] >= 1024
    for x in xs if _labels_fit(across, xs) else _round_values(across.low, across.high):
        left = across.at(x)
        yield _rule(left, up.start, left, up.end)
        yield _text(left, up.start + 16, _label(x, binary=binary), anchor="middle")
    for y in _round_values(up.low, up.high):
        top = up.at(y)
        yield _rule(across.start, top, across.end, top)
        yield _text(across.start - 6, top + 4, _label(y, binary=False), anchor="end")


def _labels_fit(axis: _Axis, values: Sequence[float]) -> bool:
    """Return whether the labels of all values fit side by side."""
    positions = [axis.at(value) for value in values]
    return all(after - before >= _LABEL for before, after in pairwise(positions))


def _round_values(low: float, high: float) -> list[float]:
    """Return powers of ten as ticks, and 2 and 5 times these if fewer than three powers fit.

    If fewer than three of these fit, too, return evenly spaced ticks.
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 2, 5)):
        candidates = (s * 10.0**d for d in decades for s in steps)
        inside = [value for value in candidates if low <= value <= high]
        if len(inside) >= 3:
            return inside[:: 1 + len(inside) // _MOST_TICKS]
    tenth = 10.0 ** math.floor(math.log10(high - low)) / 10
    step = next(n * tenth for n in (1, 2, 5, 10, 20) if high - low <= _MOST_TICKS * n * tenth)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _label(value: float, *, binary: bool) -> str:
    """Return a number as text with a unit: 1500 as ``1.5k``; if ``binary``, 4096 as ``4K``."""
    base, units = (1024, "KMGT") if binary else (1000, "kMGT")
    for power in range(len(units), 0, -1):
        if value >= base**power:
            return f"{value / base**power:.4g}{units[power - 1]}"
    return f"{value:.4g}"


def _line(index: int, name: str, line: Points, axes: tuple[_Axis, _Axis]) -> Iterator[str]:
    """Yield the SVG elements of one series and of its entry in the legend."""
    across, up = axes
    colour = _COLOURS[index % len(_COLOURS)]
    dash = _DASHES[index // len(_COLOURS) % len(_DASHES)]
    style = f'stroke="{colour}" stroke-width="2"' + (f' stroke-dasharray="{dash}"' if dash else "")
    pixels = [(across.at(x), up.at(y)) for x, y in line]
    if pixels:
        path = " ".join(f"{x:g},{y:g}" for x, y in pixels)
        yield f'<polyline points="{path}" fill="none" {style}/>'
    for (x, y), (left, top) in zip(line, pixels, strict=True):
        tooltip = f"<title>{escape(name)}: {x:.10g}, {y:.4g}</title>"
        yield f'<circle cx="{left:g}" cy="{top:g}" r="3" fill="{colour}">{tooltip}</circle>'
    left, top = _PLOT + 14, _TOP + 6 + _LINE * index
    yield f'<line x1="{left}" y1="{top}" x2="{left + 26}" y2="{top}" {style}/>'
    yield _text(left + 32, top + 4, name)


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="#dddddd"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", extra: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" {extra}>{escape(text)}</text>'
