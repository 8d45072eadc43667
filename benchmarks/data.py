"""Data that is already on the machine: images of clothes, or of digits, and text.

Nothing is downloaded. Fashion-MNIST is present where Debian's ``dataset-fashion-mnist`` is
installed; otherwise scikit-learn's digits replace it, enlarged to the same size, and the report
says so. The text is that of the licences which every Debian has, or of Python's standard library.
"""

from __future__ import annotations

import gzip
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.errors import UsageError

SHARED = Path("/usr/share")
FASHION = "dataset*/**/{part}-{kind}.gz"  # wherever the package puts them
LICENCES = Path("/usr/share/common-licenses")
PIXELS = 28
TEXT_NBYTES = 2_000_000
HELD_OUT = 10  # one sample in so many is held out


class Data(NamedTuple):
    """Training samples and held-out samples."""

    source: str
    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]


def images() -> Data:
    """Return small grey images as rows of ``28 * 28`` numbers, and their classes."""
    if _fashion("train", "images-idx3-ubyte") is not None:
        return Data("Fashion-MNIST", _idx("train"), _idx("t10k"))
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UsageError(
            "no images to train on: apt install dataset-fashion-mnist, or pip install shoal[data]"
        ) from None
    digits = load_digits()
    small = torch.tensor(digits.images, dtype=torch.float32)[:, None]  # (n, 1, 8, 8)
    x = F.interpolate(small, size=PIXELS, mode="bilinear").flatten(1) / 16
    y = torch.tensor(digits.target, dtype=torch.long)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    cut = len(y) // HELD_OUT
    held_out, train = order[:cut], order[cut:]
    source = "scikit-learn's digits, enlarged"
    return Data(source, (x[train], y[train]), (x[held_out], y[held_out]))


def _idx(part: str) -> tuple[Tensor, Tensor]:
    """Read images and classes in the format of MNIST."""

    def read(kind: str, skip: int) -> Tensor:
        path = _fashion(part, kind)
        if path is None:
            raise UsageError(f"Fashion-MNIST without {part}-{kind}.gz: install it again")
        with gzip.open(path) as file:
            return torch.frombuffer(bytearray(file.read()[skip:]), dtype=torch.uint8)

    x = read("images-idx3-ubyte", 16).view(-1, PIXELS * PIXELS).float() / 255
    return x, read("labels-idx1-ubyte", 8).long()


def _fashion(part: str, kind: str) -> Path | None:
    paths = sorted(SHARED.glob(FASHION.format(part=part, kind=kind)))
    return next((path for path in paths if "fashion" in str(path)), None)


def text(context: int) -> Data:
    """Return pieces of text, one byte a token: ``context`` bytes, and the same shifted by one."""
    paths, source = sorted(p for p in LICENCES.glob("*") if not p.is_symlink()), "licences"
    if not paths:
        library = Path(sysconfig.get_path("stdlib"))
        paths, source = sorted(library.glob("*.py")), "Python's library"
    raw = b"\n".join(path.read_bytes() for path in paths if path.is_file())[:TEXT_NBYTES]
    tokens = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
    count = (len(tokens) - 1) // context
    x, y = tokens[: count * context].view(-1, context), tokens[1 : count * context + 1]
    y = y.view(-1, context)
    held_out = torch.arange(count) % HELD_OUT == 0
    train = ~held_out
    return Data(f"text of {source}", (x[train], y[train]), (x[held_out], y[held_out]))
