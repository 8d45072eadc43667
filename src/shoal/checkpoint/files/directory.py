"""Find checkpoints in a directory, and open and verify their files."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from shoal.checkpoint.files.manifest import NAME, Chunk, Manifest, TensorEntry, decode
from shoal.checkpoint.files.raw import DTYPES, crc_of, read_all, view_bytes
from shoal.errors import CheckpointCorrupt, CheckpointError, CheckpointMissing

MANIFEST_NBYTES_MAX = 1 << 30
_STEP = re.compile(r"step-(\d{8,18})")


def step_name(step: int) -> str:
    """Return the directory name of a step, such as ``step-00000120``."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step in the name of a directory, or None if the name has no step."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def check_path(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` if it can name a directory of checkpoints.

    Raises:
        CheckpointError: ``path`` is empty or has unprintable characters, or ``os.stat`` raises an
            OSError other than FileNotFoundError.
    """
    text = os.fspath(path)
    if not text or not text.isprintable():
        why = "it is empty or has unprintable characters"
        raise CheckpointError(f"{text!r} cannot be the path of a checkpoint: {why}")
    try:
        os.stat(text)
    except FileNotFoundError:
        pass
    except OSError as error:  # a loop of symlinks, a name too long, a parent that is a file
        shown = text if len(text) <= 120 else f"{text[:80]}… ({len(text)} characters)"
        raise CheckpointError(f"{shown}: {error.strerror}; choose another path") from error
    return Path(text)


def steps(root: Path) -> list[Path]:
    """Return the directories that may be checkpoints, sorted by step, the newest first."""
    try:
        paths = [p for p in root.iterdir() if step_of(p) is not None]
    except (FileNotFoundError, NotADirectoryError):
        return []
    real = [p for p in paths if p.is_dir() and not p.is_symlink()]
    return sorted(real, key=lambda p: step_of(p) or 0, reverse=True)


def newest(root: str | os.PathLike[str]) -> Path | None:
    """Return the newest checkpoint under ``root`` with a valid manifest and file sizes, or None.

    The bytes of tensors are not checked here. ``load(root)`` checks them, and loads an older
    checkpoint if they are damaged.
    """
    for path in steps(check_path(root)):
        with contextlib.suppress(CheckpointError):
            read_manifest(path)
            return path
    return None


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the checkpoint ``path``, after checking it and the data files' sizes.

    Raises:
        CheckpointMissing: there is no manifest, so the save did not finish.
        CheckpointCorrupt: the manifest is invalid, or a data file is absent or of another size.
    """
    file = path / NAME
    try:
        fd, nbytes = _open_regular(file)
    except FileNotFoundError:
        raise CheckpointMissing(f"{file} is missing, so the save did not finish") from None
    try:
        if nbytes > MANIFEST_NBYTES_MAX:
            raise CheckpointCorrupt(f"{file}: {nbytes} bytes are too many for a manifest")
        with os.fdopen(fd, "rb", closefd=False) as stream:
            manifest = decode(stream.read(nbytes))
    except ValueError as error:
        raise CheckpointCorrupt(f"{file}: {error}") from None
    finally:
        os.close(fd)
    for name, size in manifest.files.items():
        os.close(_open_data(path / name, size))
    return manifest


class DataFiles:
    """The data files of a checkpoint. Each is opened at its first use; all are closed on exit."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self._descriptors: dict[str, int] = {}

    def __enter__(self) -> DataFiles:
        return self

    def __exit__(self, *_: object) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def read(self, name: str, entry: TensorEntry, chunk: Chunk) -> Tensor:
        """Return one chunk of tensor ``name``, with its saved strides; raise if it is damaged."""
        count = chunk.nbytes // DTYPES[entry.dtype].itemsize
        flat = torch.empty(count, dtype=DTYPES[entry.dtype])
        self._check(name, chunk, lambda fd: read_all(fd, view_bytes(flat), chunk.at))
        return flat.as_strided(chunk.sizes, chunk.stride)

    def verify(self, name: str, chunk: Chunk) -> None:
        """Raise if the bytes of one chunk of tensor ``name`` do not have the saved CRC-32."""
        self._check(name, chunk, lambda fd: crc_of(fd, chunk.at, chunk.nbytes))

    def _check(self, name: str, chunk: Chunk, read: Callable[[int], int]) -> None:
        file = self.path / chunk.file
        try:
            if chunk.file not in self._descriptors:
                self._descriptors[chunk.file] = _open_data(file, self.manifest.files[chunk.file])
            crc = read(self._descriptors[chunk.file])
        except (EOFError, OSError) as error:
            raise CheckpointCorrupt(f"{file}: tensor {name}: {error}") from error
        if crc != chunk.crc32:
            why = f"its CRC-32 is {crc:08x}, but {chunk.crc32:08x} was written"
            raise CheckpointCorrupt(f"{file}: tensor {name}: {why}")


def _open_data(file: Path, nbytes: int) -> int:
    """Return a descriptor of a data file; raise unless it is a regular file of this size."""
    try:
        fd, size = _open_regular(file)
    except FileNotFoundError:
        raise CheckpointCorrupt(f"{file} is missing") from None
    if size != nbytes:
        os.close(fd)
        raise CheckpointCorrupt(f"{file} has {size} bytes, but {nbytes} were written")
    return fd


def _open_regular(file: Path) -> tuple[int, int]:
    """Return descriptor and size of a regular file; raise for a symlink, pipe or device."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        why = "it is a symlink" if error.errno == errno.ELOOP else error.strerror
        raise CheckpointCorrupt(f"{file}: {why}") from None
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise CheckpointCorrupt(f"{file} is not a regular file")
    return fd, status.st_size
