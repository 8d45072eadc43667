"""Timelines on disk: a worker writes its file whole or not at all; a reader takes what is there.

A run whose workers died is the one whose timeline is wanted most, so a missing or torn file is a
fact in ``meta``, not an error.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

from shoal.errors import UsageError
from shoal.timeline.timeline import Timeline, read_lines

_NAME = re.compile(r"spans-(\d+)\.jsonl")


def write_spans(timeline: Timeline, directory: str | Path, *, worker: int) -> Path:
    """Write ``worker``'s timeline as ``<directory>/spans-<worker>.jsonl``."""
    path = Path(directory) / f"spans-{worker}.jsonl"
    replace_text(path, timeline.to_json())
    return path


def collect(directory: str | Path) -> Timeline:
    """All workers' timelines in ``directory`` as one; ``meta`` says who is ``torn`` or ``missing``.

    Who is missing is known when the workers wrote how many they are, as the fact ``workers``.
    """
    found = {
        int(match[1]): path
        for path in Path(directory).glob("spans-*.jsonl")
        if (match := _NAME.fullmatch(path.name))
    }
    if not found:
        raise UsageError(f"no spans-*.jsonl in {directory}: was the run recorded, and did it end?")
    timelines: list[Timeline] = []
    torn: dict[str, str] = {}
    for worker in sorted(found):
        timeline, why = read_lines(found[worker].read_text("utf-8", errors="replace"))
        timelines.append(timeline)
        if why:
            torn[str(worker)] = why
    merged = timelines[0].merge(*timelines[1:])
    missing = sorted(set(range(_count(merged.meta.get("workers")))) - found.keys())
    lost: dict[str, Any] = {"torn": torn, "missing": missing}
    return Timeline(merged.spans, {**merged.meta, **{k: v for k, v in lost.items() if v}})


def replace_text(path: str | Path, text: str) -> None:
    """Write ``text`` to ``path`` so that a reader sees the old file or the new, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8", errors="xmlcharrefreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it private; a timeline is for the team
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _count(workers: Any) -> int:
    return workers if isinstance(workers, int) else 0
