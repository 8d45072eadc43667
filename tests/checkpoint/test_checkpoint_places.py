"""Places that cannot hold checkpoints: refused with the reason, and what was there stays."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_forms import small

from shoal.checkpoint import State, load, save
from shoal.errors import (
    CheckpointError,
    CheckpointMissing,
)


def _places(tmp: Path) -> dict[str, tuple[Path, str]]:
    (tmp / "file").touch()
    (tmp / "loop").symlink_to(tmp / "loop")
    return {
        "file": (tmp / "file", "is a file"),
        "under a file": (tmp / "file" / "run", "Not a directory"),
        "loop": (tmp / "loop", "Too many levels of symbolic links"),
        "long": (tmp / ("x" * 4096), "File name too long"),
        "deep": (tmp.joinpath(*["x" * 200] * 21), "File name too long"),
        "newline": (tmp / "a\nb", "unprintable"),
        "nul": (tmp / "a\0b", "unprintable"),
    }


@pytest.mark.parametrize("case", ["file", "under a file", "loop", "long", "deep", "newline", "nul"])
def test_a_place_that_cannot_hold_checkpoints_is_refused_with_the_reason(
    case: str, tmp_path: Path
) -> None:
    place, why = _places(tmp_path)[case]
    with pytest.raises(CheckpointError, match=why):
        save(place, small(1), step=1)
    with pytest.raises(CheckpointMissing):
        load(place, rank=0, size=1)


def test_an_empty_path_is_refused() -> None:
    with pytest.raises(CheckpointError, match="empty"):
        save("", small(1), step=1)


def test_a_read_only_place_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tmp_path))

    monkeypatch.setattr(os, "mkdir", refuse)  # root may write anywhere, so it must be played
    with pytest.raises(CheckpointError, match="Read-only file system"):
        save(tmp_path / "run", small(1), step=1)


def test_too_little_space_is_told_before_anything_is_written(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil._ntuple_diskusage(100, 90, 10)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(CheckpointError, match=r"No space left in .*: needed [\d,]+ bytes, had 10;"):
        save(root, small(30), step=30)
    monkeypatch.undo()
    assert sorted(p.name for p in root.iterdir()) == [".lock", "step-00000010", "step-00000020"]


def test_a_limit_met_while_writing_leaves_the_old_checkpoint_and_no_temporary(root: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(CheckpointError, match=r"No space left .* \(File too large\)"):
            save(root, State({"big": torch.zeros(1 << 16)}), step=30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(p.name for p in root.iterdir()) == [".lock", "step-00000010", "step-00000020"]
    assert load(root, rank=0, size=1).step == 20
