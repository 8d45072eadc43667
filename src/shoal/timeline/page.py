"""Write a timeline as one self-contained HTML page that needs no server and no network.

Python writes and escapes all text and the table. The page's script only draws the zoomable lanes.
The content security policy of the page has the hash of this script, so that browsers run no other
script and fetch nothing.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from shoal.timeline.files import replace_text
from shoal.timeline.intervals import pack
from shoal.timeline.span import LANES
from shoal.timeline.summary import PARTS, Row, Summary, windows
from shoal.timeline.table import CAPTION, HEADINGS, cells, milliseconds
from shoal.timeline.timeline import Timeline

FIRST = ("model", "workers", "samples_per_second")
NOT_FACTS = ("strategy", "title", "origin_ns", "dropped", "torn", "missing")  # not shown as facts
_FIELD = re.compile(r"\{\{(\w+)\}\}")
_SHARE, _SMALL = re.compile(r"\s+(\d+%)$"), r" <small>\1</small>"  # percentages are printed small
_SCRIPT = re.compile(r"<script>(.*?)</script>", re.DOTALL)


def page(timeline: Timeline, *, limit: int = 100_000) -> str:
    """Return the page as HTML. If there are over ``limit`` spans, only the last steps are drawn."""
    template = files("shoal.timeline").joinpath("page.html").read_text("utf-8")
    script = _SCRIPT.search(template)
    digest = hashlib.sha256((script[1] if script else "").encode()).digest()
    summary, drawn = timeline.summary(), _last_steps(timeline, limit)
    strategy = str(timeline.meta.get("strategy", ""))
    fields = {
        "title": html.escape(str(timeline.meta.get("title", "")) or strategy or "Timeline"),
        "hash": base64.b64encode(digest).decode(),
        "facts": "".join(_facts(timeline, summary)),
        "warnings": "".join(_warnings(timeline, drawn)),
        "bars": "".join(_bar(row) for row in (summary.total, *summary.rows)),
        "legend": "".join(_legend(summary.total)),
        "table": "".join(_table(summary)),
        "caption": html.escape(CAPTION),
        "data": json_in_html(_data(drawn)),
    }
    # Replace all fields in one pass, so that a {{...}} inside an inserted text is not replaced.
    return _FIELD.sub(lambda match: fields[match[1]], template)


def write_page(timeline: Timeline, path: str | Path) -> None:
    """Write the page to ``path``, atomically."""
    replace_text(path, page(timeline))


def json_in_html(value: Any) -> str:
    """Return ``value`` as JSON that cannot close the HTML element around it."""
    text = json.dumps(value, separators=(",", ":"))  # ASCII, so U+2028 is escaped as well
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _last_steps(timeline: Timeline, limit: int) -> Timeline:
    if len(timeline.spans) <= limit:
        return timeline
    first = timeline.spans[-limit].step + 1
    steps = timeline.steps
    return timeline.between(min(first, steps[-1]) if steps else first, 1 << 62)


def _facts(timeline: Timeline, summary: Summary) -> Iterator[str]:
    meta = timeline.meta
    known = [key for key in FIRST if key in meta]
    rest = [key for key in meta if key not in FIRST and key not in NOT_FACTS]
    shown: dict[str, Any] = {key: meta[key] for key in (*known, *rest)}
    shown.setdefault("workers", len(timeline.workers))
    shown |= {"steps": len(timeline.steps), "mean step": milliseconds(summary.total.step_seconds)}
    for key, value in shown.items():
        name = "samples/s" if key == "samples_per_second" else key.replace("_", " ")
        yield f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(_text(value))}</dd></div>"


def _text(value: Any) -> str:
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int | float):
        return f"{value:,.4g}" if isinstance(value, float) and value < 1000 else f"{value:,.0f}"
    return json.dumps(value)


def _warnings(timeline: Timeline, drawn: Timeline) -> Iterator[str]:
    meta = timeline.meta
    torn, dropped = (
        value.items() if isinstance(value := meta.get(key), Mapping) else ()
        for key in ("torn", "dropped")
    )
    lines = [f"worker {worker}: its file is incomplete ({why})" for worker, why in torn]
    lines += [f"worker {worker}: its oldest {n} spans were dropped" for worker, n in dropped]
    if meta.get("missing"):
        lines.append(f"there is no file of workers {', '.join(map(str, meta['missing']))}")
    if not timeline.spans:
        lines.append("no spans were recorded")
    if len(drawn.spans) < len(timeline.spans):
        part = f"the last {len(drawn.steps)} of {len(timeline.steps)} steps"
        lines.append(f"only {part} are drawn; the summary covers all steps")
    return (f'<p class="warning">{html.escape(line)}</p>' for line in lines)


def _bar(row: Row) -> str:
    """Return a row's parts as one HTML bar. A strip in compute shows the overlapped exchange."""
    name = "all workers" if row.worker is None else f"worker {row.worker}"
    overlap = row.overlapped / row.compute if row.compute else 0.0
    segments = []
    for part, seconds in zip(PARTS, row.parts, strict=True):
        share = row.share(seconds)
        if share < 5e-4:
            continue
        strip = f'<i style="width:{overlap:.2%}"></i>' if part == "compute" and overlap else ""
        label = f"<b>{share:.0%}</b>" if share > 0.03 else ""
        title = f"{part}: {milliseconds(row.per_step(seconds))} per step, {share:.1%}"
        segments.append(
            f'<span class="{part}" style="width:{share:.3%}" title="{title}">{label}{strip}</span>'
        )
    kind = "bar total" if row.worker is None else "bar"
    cut, tail = "".join(segments), milliseconds(row.step_seconds)
    return f'<div class="{kind}"><em>{name}</em><div>{cut}</div><small>{tail}</small></div>'


def _legend(total: Row) -> Iterator[str]:
    labels = {"exchange": "exchange, exposed", "wait": "wait, without exchange"}
    for part, seconds in zip(PARTS, total.parts, strict=True):
        if total.share(seconds) < 5e-4:
            continue
        name, mean = labels.get(part, part), milliseconds(total.per_step(seconds))
        yield f'<li><i class="{part}"></i>{name} <b>{mean}</b></li>'
    overlapped = milliseconds(total.per_step(total.overlapped))
    yield f'<li><i class="hidden"></i>exchange overlapped with compute <b>{overlapped}</b></li>'


def _table(summary: Summary) -> Iterator[str]:
    heads = "".join(f'<th scope="col">{heading}</th>' for heading in HEADINGS)
    yield f"<thead><tr>{heads}</tr></thead><tbody>"
    for row in (*summary.rows, summary.total):
        first, *others = (html.escape(cell) for cell in cells(row))
        kind = ' class="total"' if row.worker is None else ""
        columns = "".join(f"<td>{_SHARE.sub(_SMALL, cell)}</td>" for cell in others)
        yield f'<tr{kind}><th scope="row">{first}</th>{columns}</tr>'
    yield "</tbody>"


def _data(timeline: Timeline) -> dict[str, Any]:
    """Return the script's input as flat lists of numbers. Times are in µs from the first span."""
    zero = min((span.start for span in timeline.spans), default=0.0)
    names: dict[str, int] = {}
    tracks = []
    by_lane = sorted(timeline.spans, key=lambda s: (s.worker, LANES.index(s.lane), s.start))
    for (worker, lane), group in groupby(by_lane, key=lambda s: (s.worker, s.lane)):
        spans = list(group)
        rows = pack([(span.start, span.end) for span in spans])
        lists: list[list[float]] = [[] for _ in range(max(rows) + 1)]
        for span, row in zip(spans, rows, strict=True):
            start, duration = round((span.start - zero) * 1e6, 1), round(span.seconds * 1e6, 1)
            name = names.setdefault(span.name, len(names))
            lists[row].extend((start, duration, name, span.nbytes, span.step))
        tracks.append({"worker": worker, "lane": lane, "rows": lists})
    return {"names": list(names), "tracks": tracks, "steps": _boundaries(timeline, zero)}


def _boundaries(timeline: Timeline, zero: float) -> dict[int, list[float]]:
    """Return for each worker a flat list of step, start, end, step, start, end, ..."""
    steps: dict[int, list[tuple[float, int, float]]] = {}
    for (worker, step), (start, end) in windows(timeline.spans).items():
        window = round((start - zero) * 1e6, 1), step, round((end - zero) * 1e6, 1)
        steps.setdefault(worker, []).append(window)
    return {
        worker: list(chain.from_iterable((step, a, b) for a, step, b in sorted(listed)))
        for worker, listed in steps.items()
    }
