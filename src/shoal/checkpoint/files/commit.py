"""The moment a checkpoint comes to be, and when old ones go."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.checkpoint.files.audit import DATA_FILE
from shoal.checkpoint.files.directory import (
    TEMPORARY,
    read_manifest,
    step_name,
    steps,
    sync_directory,
)
from shoal.checkpoint.files.manifest import NAME, Manifest, encode
from shoal.checkpoint.files.raw import write_all
from shoal.errors import CheckpointError

_NEW = ".new"


@dataclass(frozen=True)
class Draft:
    """One save under way: its names follow from root, step and a token of its own."""

    root: Path
    step: int
    token: str

    @property
    def path(self) -> Path:
        """Where the checkpoint will be."""
        return self.root / step_name(self.step)

    @property
    def temporary(self) -> Path:
        """Where its data files are written."""
        return self.root / f"{TEMPORARY}{self.step:08d}-{self.token}"

    def file(self, rank: int) -> Path:
        """The data file of one worker; the token keeps it apart from that of an earlier save."""
        return self.temporary / f"rank-{rank:05d}-{self.token}.bin"

    @property
    def manifest(self) -> Path:
        """The manifest before it is in force."""
        return self.path / f"manifest-{self.token}{_NEW}"

    def withdraw(self) -> None:
        """Take back data files that were moved, if no manifest names them."""
        if self.token.encode() in _read(self.path / NAME):
            return
        with contextlib.suppress(OSError):
            _drop(self.path, lambda name: self.token in name)
            if not any(self.path.iterdir()):
                self.path.rmdir()


def commit(draft: Draft, manifest: Manifest) -> None:
    """Move the data into place, then write the manifest, with fsync between."""
    sync_directory(draft.temporary)
    if draft.path.exists():  # the step is saved again: old files stay until the manifest turns
        for name in manifest.files:
            os.rename(draft.temporary / name, draft.path / name)
        os.rmdir(draft.temporary)
        sync_directory(draft.path)
    else:
        os.rename(draft.temporary, draft.path)
    sync_directory(draft.root)
    fd = os.open(draft.manifest, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, memoryview(encode(manifest)))
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(draft.manifest, draft.path / NAME)
    sync_directory(draft.path)


def prune(draft: Draft, keep: int) -> None:
    """Remove what the new checkpoint replaces; the one just saved always stays."""
    _drop(draft.path, lambda name: _is_ours(name) and draft.token not in name)
    others = [path for path in steps(draft.root) if path != draft.path and _sound(path)]
    for path in others[max(keep - 1, 0) :]:
        grave = draft.root / f"{TEMPORARY}old-{path.name}-{draft.token}"
        os.rename(path, grave)  # at once: a half-removed checkpoint must not look like one
        shutil.rmtree(grave)


def sweep(draft: Draft) -> None:
    """Remove what dead saves left; under the lock nobody else can be at work."""
    for path in draft.root.iterdir():
        if path.name.startswith(TEMPORARY) and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
    for path in steps(draft.root):
        names = [child.name for child in path.iterdir()]
        if NAME in names:
            _drop_unnamed(path)
        elif all(_is_ours(name) for name in names):
            shutil.rmtree(path, ignore_errors=True)


def _drop_unnamed(path: Path) -> None:
    """Remove what a save of the same step left; of a damaged checkpoint remove nothing."""
    with contextlib.suppress(CheckpointError, OSError):
        named = read_manifest(path).files
        _drop(path, lambda name: _is_ours(name) and name not in named)


def _drop(path: Path, unwanted: Callable[[str], bool]) -> None:
    for child in list(path.iterdir()):
        if unwanted(child.name):
            child.unlink()


def _is_ours(name: str) -> bool:
    return name.endswith(_NEW) or DATA_FILE.fullmatch(name) is not None


def _sound(path: Path) -> bool:
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:
        return b""
