"""Create a checkpoint atomically, and delete old ones.

A save has four phases. Rank 0 holds the lock of the root during all of them. The files that a
phase writes are on disk (fsync) before the next phase begins:

1. :func:`sweep` deletes what interrupted saves left behind.
2. All ranks write their data files into a temporary directory.
3. :func:`commit` moves the data files to the checkpoint's directory, then writes the manifest and
   renames it into place. From this moment the checkpoint exists.
4. :func:`prune` deletes the oldest valid checkpoints, so that only the number to keep is left.

A crash at any point leaves the new manifest, the old one or none, but never a part of one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.checkpoint.files.directory import read_manifest, step_name, steps
from shoal.checkpoint.files.manifest import DATA_FILE, NAME, Manifest, encode
from shoal.checkpoint.files.raw import write_all
from shoal.errors import CheckpointError

LOCK = ".lock"
TEMPORARY = ".tmp-"
_NEW = ".new"
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@dataclass(frozen=True)
class PendingSave:
    """The paths of a save that is not yet committed. The random token makes them unique."""

    root: Path
    step: int
    token: str

    @property
    def path(self) -> Path:
        """The directory of the finished checkpoint."""
        return self.root / step_name(self.step)

    @property
    def temporary(self) -> Path:
        """The directory into which data files are written."""
        return self.root / f"{TEMPORARY}{self.step:08d}-{self.token}"

    def data_file(self, rank: int) -> Path:
        """Return the data file of one rank; no earlier save of this step has the same name."""
        return self.temporary / f"rank-{rank:05d}-{self.token}.bin"

    @property
    def manifest(self) -> Path:
        """The manifest before it is renamed into place."""
        return self.path / f"manifest-{self.token}{_NEW}"

    def roll_back(self) -> None:
        """Delete the files of this save, unless its manifest is already in place."""
        shutil.rmtree(self.temporary, ignore_errors=True)
        try:
            committed = self.token.encode() in (self.path / NAME).read_bytes()
        except OSError:
            committed = False
        if not committed:
            with contextlib.suppress(OSError):
                _delete(self.path, lambda name: self.token in name)
                if not any(self.path.iterdir()):
                    self.path.rmdir()


def commit(save: PendingSave, manifest: Manifest) -> None:
    """Move the data files into place and fsync, then write the manifest."""
    sync_directory(save.temporary)
    if save.path.exists():  # the step is saved again: old files stay until the manifest is replaced
        for name in manifest.files:
            os.rename(save.temporary / name, save.path / name)
        os.rmdir(save.temporary)
        sync_directory(save.path)
    else:
        os.rename(save.temporary, save.path)
    sync_directory(save.root)
    fd = os.open(save.manifest, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, memoryview(encode(manifest)))
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(save.manifest, save.path / NAME)
    sync_directory(save.path)


def prune(save: PendingSave, keep: int) -> None:
    """Delete valid checkpoints except the new one and the ``keep - 1`` highest other steps.

    Data of earlier saves of the new checkpoint's step are deleted, too.
    """
    _delete(save.path, lambda name: _is_checkpoint_file(name) and save.token not in name)
    others = [path for path in steps(save.root) if path != save.path and _is_valid(path)]
    for path in others[max(keep - 1, 0) :]:
        renamed = save.root / f"{TEMPORARY}old-{path.name}-{save.token}"
        os.rename(path, renamed)  # a half-deleted directory must not look like a checkpoint
        shutil.rmtree(renamed)


def sweep(save: PendingSave) -> None:
    """Delete what interrupted saves left behind. The caller must hold the lock of the root."""
    for path in save.root.iterdir():
        if path.name.startswith(TEMPORARY) and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
    for path in steps(save.root):
        names = [child.name for child in path.iterdir()]
        if NAME in names:
            with contextlib.suppress(CheckpointError, OSError):  # leave a damaged checkpoint alone
                files = read_manifest(path).files
                for name in filter(_is_checkpoint_file, names):
                    if name not in files:
                        (path / name).unlink()
        elif all(_is_checkpoint_file(name) for name in names):
            shutil.rmtree(path, ignore_errors=True)


def _delete(path: Path, unwanted: Callable[[str], bool]) -> None:
    for child in list(path.iterdir()):
        if unwanted(child.name):
            child.unlink()


def _is_checkpoint_file(name: str) -> bool:
    return name.endswith(_NEW) or DATA_FILE.fullmatch(name) is not None


def _is_valid(path: Path) -> bool:
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True


def make_root(root: Path) -> None:
    """Make the directory and its parents if absent, and fsync the parent of each new one."""
    missing = [path for path in (root, *root.parents) if not path.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        for path in missing:
            sync_directory(path.parent)
    except FileExistsError:
        raise CheckpointError(f"{root} is a file; pass a directory for checkpoints") from None
    except OSError as error:
        why = f"cannot make the directory {root} for checkpoints: {error.strerror}"
        raise CheckpointError(f"{why}; choose another path") from error


def sync_directory(path: Path) -> None:
    """Make new and renamed files in ``path`` survive a power failure, if the filesystem can."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        # some network filesystems cannot fsync a directory
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the lock of ``root``, unless the filesystem has none. Raise if another run holds it."""
    fd = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        why = "another run is saving there now; give each run its own directory"
        raise CheckpointError(f"{root}: {why}") from None
    except OSError:  # this filesystem has no locks: save without one
        pass
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # closing is not enough if a forked child has fd
        with contextlib.suppress(OSError):
            os.close(fd)


@contextlib.contextmanager
def disk_space(root: Path, nbytes: int) -> Iterator[None]:
    """Raise a CheckpointError if fewer than ``nbytes`` are free, or the block fills the disk."""
    free = shutil.disk_usage(root).free
    text = f"No space left in {root}: needed {nbytes:,} bytes, had {free:,}"
    text = f"{text}; free some space, lower keep, or choose another path"
    if free < nbytes:
        raise CheckpointError(text)
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        raise CheckpointError(f"{text} ({error.strerror})") from error
