"""The directory of checkpoints: its names, its lock, and writes that survive a power cut."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from shoal.checkpoint.files.audit import audit
from shoal.checkpoint.files.manifest import NAME, Manifest, decode
from shoal.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing

MANIFEST_NBYTES_MAX = 1 << 30
LOCK = ".lock"
TEMPORARY = ".tmp-"
_STEP = re.compile(r"step-(\d{8,18})")
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def step_name(step: int) -> str:
    """``step-00000120``."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """The step in the name of a directory, if it has one."""
    found = _STEP.fullmatch(path.name)
    return int(found[1]) if found else None


def checked(path: str | os.PathLike[str]) -> Path:
    """``path``, unless nobody could mean it.

    Raises:
        CheckpointError: it has control characters, or the system refuses it.
    """
    text = os.fspath(path)
    if not text or not text.isprintable():
        raise CheckpointError(f"{text!r} cannot name a checkpoint: empty or unprintable characters")
    try:
        os.stat(text)
    except FileNotFoundError:
        pass
    except OSError as error:  # loops of symlinks, names too long, files on the way
        raise CheckpointError(f"{_short(text)}: {error.strerror}; choose another path") from error
    return Path(text)


def steps(root: Path) -> list[Path]:
    """Directories that may be checkpoints, the newest (by step, not by clock) first."""
    try:
        found = [p for p in root.iterdir() if step_of(p) is not None]
    except (FileNotFoundError, NotADirectoryError):
        return []
    real = [p for p in found if p.is_dir() and not p.is_symlink()]
    return sorted(real, key=lambda p: step_of(p) or 0, reverse=True)


def newest(root: str | os.PathLike[str]) -> Path | None:
    """The newest checkpoint under ``root`` whose manifest and files' sizes are sound, if any.

    The bytes of tensors are not read here; :func:`load` does, and walks back if it must.
    """
    for path in steps(checked(root)):
        with contextlib.suppress(CheckpointError):
            read_manifest(path)
            return path
    return None


def read_manifest(path: Path) -> Manifest:
    """The audited manifest of the checkpoint in ``path``.

    Raises:
        CheckpointMissing: there is none: the save did not end.
        CheckpointCorrupt: it, or the size of a data file, is not what was written.
    """
    file = path / NAME
    try:
        fd, nbytes = open_regular(file)
    except FileNotFoundError:
        raise CheckpointMissing(f"{file}: missing, so the save did not end") from None
    try:
        if nbytes > MANIFEST_NBYTES_MAX:
            raise CheckpointCorrupt(f"{file}: {nbytes} bytes are too many for a manifest")
        with os.fdopen(fd, "rb", closefd=False) as stream:
            manifest = decode(stream.read(nbytes))
        audit(manifest)
    except ValueError as error:
        raise CheckpointCorrupt(f"{file}: {error}") from None
    finally:
        os.close(fd)
    for name, size in manifest.files.items():
        os.close(open_data(path / name, size))
    return manifest


def open_data(file: Path, nbytes: int) -> int:
    """A descriptor of a data file, which must be a plain file of this size."""
    try:
        fd, found = open_regular(file)
    except FileNotFoundError:
        raise CheckpointCorrupt(f"{file}: missing") from None
    if found != nbytes:
        os.close(fd)
        raise CheckpointCorrupt(f"{file}: {found} bytes, and {nbytes} were written")
    return fd


def open_regular(file: Path) -> tuple[int, int]:
    """A descriptor and the size of a plain file: a link or pipe could lead anywhere."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        why = "is a symlink" if error.errno == errno.ELOOP else error.strerror
        raise CheckpointCorrupt(f"{file}: {why}") from None
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise CheckpointCorrupt(f"{file}: is not a plain file")
    return fd, status.st_size


def make_root(root: Path) -> None:
    """Make the directory, and its parents, if absent."""
    made = [path for path in (root, *root.parents) if not path.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        for path in made:
            sync_directory(path.parent)
    except FileExistsError:
        raise CheckpointError(f"{root} is a file: name a directory for checkpoints") from None
    except OSError as error:
        why = f"cannot make the directory {root} for checkpoints: {error.strerror}"
        raise CheckpointError(f"{why}; choose another path") from error


def sync_directory(path: Path) -> None:
    """Make renames and new names in ``path`` survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network filesystems cannot
            raise
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Be the only one to save under ``root``; the kernel frees the lock of whoever dies."""
    fd = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        why = "another run is saving there now: give each run its own directory"
        raise CheckpointError(f"{root}: {why}") from None
    except OSError:  # a filesystem without locks: go on as everybody else does there
        pass
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)  # a child forked meanwhile holds a copy of fd
        with contextlib.suppress(OSError):
            os.close(fd)


@contextlib.contextmanager
def room(root: Path, nbytes: int) -> Iterator[None]:
    """Tell how much was needed when the disk runs full, before or while writing."""
    if (free := shutil.disk_usage(root).free) < nbytes:
        raise CheckpointError(_no_space(root, nbytes, free))
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        why = f"{_no_space(root, nbytes, free)} ({error.strerror})"
        raise CheckpointError(why) from error


def _no_space(root: Path, needed: int, had: int) -> str:
    text = f"No space left in {root}: needed {needed:,} bytes, had {had:,}"
    return f"{text}; free some, lower keep, or choose another path"


def _short(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:80]}… ({len(text)} characters)"
