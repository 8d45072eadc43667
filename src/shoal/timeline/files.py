"""Write the timeline of each worker to a file, atomically, and read all of them back.

If there is at least one file, missing or incomplete files are no error, because the timeline of a
failed run is useful, too. The ``meta`` of the merged timeline names the workers whose files are
missing or incomplete.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from shoal.errors import UsageError
from shoal.timeline.timeline import Timeline, read_lines

_NAME = re.compile(r"spans-(\d+)\.jsonl")


def write_spans(timeline: Timeline, directory: str | Path, *, worker: int) -> Path:
    """Write ``worker``'s timeline to ``<directory>/spans-<worker>.jsonl``; return this path."""
    path = Path(directory) / f"spans-{worker}.jsonl"
    replace_text(path, timeline.to_json())
    return path


def collect(directory: str | Path) -> Timeline:
    """Return one timeline, merged from the files of all workers in ``directory``.

    ``meta["torn"]`` names the workers whose file is incomplete, and ``meta["missing"]`` names those
    without a file. Missing files are noticed only if ``meta["workers"]`` is the number of workers.
    """
    paths = {
        int(match[1]): path
        for path in Path(directory).glob("spans-*.jsonl")
        if (match := _NAME.fullmatch(path.name))
    }
    if not paths:
        why = "record the run with timeline=True, and wait for its end"
        raise UsageError(f"there is no spans-*.jsonl in {directory}; {why}")
    texts = {w: paths[w].read_text("utf-8", errors="replace") for w in sorted(paths)}
    read = {str(worker): read_lines(text) for worker, text in texts.items()}
    first, *others = (timeline for timeline, _ in read.values())
    merged = first.merge(*others)
    workers = merged.meta.get("workers")
    expected = range(workers) if isinstance(workers, int) else ()
    meta = dict(merged.meta)
    if torn := {worker: why for worker, (_, why) in read.items() if why}:
        meta["torn"] = torn
    if missing := sorted(set(expected) - paths.keys()):
        meta["missing"] = missing
    return Timeline(merged.spans, meta)


def replace_text(path: str | Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically: a reader sees the old file or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8", errors="xmlcharrefreplace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it private, but others may read a timeline
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
