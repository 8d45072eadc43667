"""Damaged and hostile files: never a crash, never code run, always the previous checkpoint."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_forms import forge, seal, small

from shoal.checkpoint import State, load, newest, save
from shoal.checkpoint.dcp import read
from shoal.errors import (
    CheckpointCorrupt,
    CheckpointMismatch,
    CheckpointMissing,
)

Damage = Callable[[Path], Any]


def data(path: Path, rank: int = 0) -> Path:
    return sorted(path.glob("rank-*.bin"))[rank]


def last(root: Path) -> Path:
    return root / "step-00000020"


def falls_back(root: Path, caplog: pytest.LogCaptureFixture) -> str:
    """Check that loading takes step 10 and says why; return what it said."""
    caplog.clear()
    loaded = load(root, rank=0, size=1)
    assert loaded.step == 10
    assert loaded.shared["model"]["w"].tolist() == [[10.0] * 2] * 3
    with pytest.raises((CheckpointCorrupt, CheckpointMissing)) as caught:
        load(last(root), rank=0, size=1)
    (record,) = caplog.records
    text = record.getMessage()
    assert text == f"using previous checkpoint step 10 because {caught.value}"
    assert str(last(root)) in text
    return text


def truncated(count: Callable[[int], int]) -> Callable[[Path], None]:
    return lambda file: os.truncate(file, count(file.stat().st_size))


LENGTHS = {
    "0": truncated(lambda n: 0),
    "10": truncated(lambda n: 10),
    "half": truncated(lambda n: n // 2),
    "-1": truncated(lambda n: n - 1),
    "+1": truncated(lambda n: n + 1),
}


@pytest.mark.parametrize("file", ["manifest.json", "data"])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_file_cut_short_or_grown_is_noticed(
    file: str, length: str, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = data(last(root)) if file == "data" else last(root) / file
    LENGTHS[length](target)
    assert target.name in falls_back(root, caplog)


def test_a_manifest_cut_at_100_bytes_is_noticed(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.truncate(last(root) / "manifest.json", 100)
    assert "manifest.json: its CRC-32 is" in falls_back(root, caplog)


def test_every_flipped_bit_of_the_data_is_noticed_with_file_and_tensor(root: Path) -> None:
    file = data(last(root))
    sound = file.read_bytes()
    for bit in range(8 * len(sound)):
        bad = bytearray(sound)
        bad[bit // 8] ^= 1 << bit % 8
        file.write_bytes(bad)
        with pytest.raises(
            CheckpointCorrupt, match=rf"{file.name}: tensor (shared|rank0)/.*CRC-32"
        ):
            load(last(root), rank=0, size=1)


def test_200_random_flipped_bits_of_the_manifest_are_noticed(root: Path) -> None:
    file = last(root) / "manifest.json"
    sound = file.read_bytes()
    for bit in [*range(256), *random.Random(0).sample(range(8 * len(sound)), 200)]:
        bad = bytearray(sound)
        bad[bit // 8] ^= 1 << bit % 8
        file.write_bytes(bad)
        with pytest.raises(CheckpointCorrupt, match=r"manifest\.json"):
            load(last(root), rank=0, size=1)


def _two_workers(path: Path) -> None:
    """Make the checkpoint in ``path`` look like one of two workers with files of one size."""

    def split(body: dict[str, Any]) -> None:
        (name,) = body["files"]
        second = name.replace("rank-00000", "rank-00001")
        shutil.copy(path / name, path / second)
        (path / second).write_bytes(bytes(reversed((path / name).read_bytes())))
        nbytes = body["files"][name]
        body["files"][second] = nbytes
        import zlib

        crc = zlib.crc32((path / second).read_bytes())
        chunk = {"file": second, "at": 0, "nbytes": nbytes, "crc32": crc}
        chunk |= {"offsets": [0], "sizes": [nbytes], "stride": [1]}
        body["tensors"]["rank1/x"] = {"dtype": "uint8", "shape": [nbytes], "chunks": [chunk]}
        body["ranks"].append({"x": {"$tensor": "rank1/x"}})
        body["size"] = 2

    forge(path, split)
    assert load(path, rank=0, size=1).size == 2


def test_swapped_shards_are_noticed(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    _two_workers(last(root))
    a, b = data(last(root), 0), data(last(root), 1)
    spare = last(root) / "spare"
    a.rename(spare)
    b.rename(a)
    spare.rename(b)
    assert "CRC-32" in falls_back(root, caplog)


def test_a_duplicated_shard_is_noticed(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    _two_workers(last(root))
    shutil.copy(data(last(root), 0), data(last(root), 1))
    assert data(last(root), 1).name in falls_back(root, caplog)


def test_a_manifest_newer_than_its_shards_is_noticed(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    newer = save(root.parent / "other", small(20), step=20)
    shutil.copy(newer / "manifest.json", last(root) / "manifest.json")
    assert f"{data(newer).name} is missing" in falls_back(root, caplog)


def test_a_manifest_of_another_step_is_noticed(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    forge(last(root), lambda body: body.update(step=30))
    assert "belongs to step 30, but is in the directory of step 20" in falls_back(root, caplog)


def _first_chunk(body: dict[str, Any]) -> dict[str, Any]:
    chunk: dict[str, Any] = body["tensors"]["shared/model/b"]["chunks"][0]
    return chunk


def _rename_file(name: str) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        ((_, nbytes),) = body["files"].items()
        body["files"] = {name: nbytes}
        for entry in body["tensors"].values():
            entry["chunks"][0]["file"] = name

    return change


def _overlap_boxes(body: dict[str, Any]) -> None:
    first = _first_chunk(body) | {"sizes": [2], "nbytes": 8}
    second = first | {"at": first["at"] + 8}
    body["tensors"]["shared/model/b"]["chunks"] = [first, second]


FORGERIES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "version": (lambda b: b.update(version=2), "version is 2; this Shoal reads 1"),
    "format": (lambda b: b.update(format="other"), "format is 'other'"),
    "lacks": (lambda b: b.pop("tensors"), "has no key 'tensors'"),
    "path up": (_rename_file("../../etc/passwd"), "cannot be a data file"),
    "path absolute": (_rename_file("/etc/passwd"), "cannot be a data file"),
    "path nul": (_rename_file("rank-00000-0123456789abcdef.bin\0"), "cannot be a data file"),
    "size 2^63": (lambda b: _first_chunk(b).update(nbytes=1 << 63), "is not a size"),
    "offset 2^63": (lambda b: _first_chunk(b).update(at=1 << 63), "is not a size"),
    "offset -1": (lambda b: _first_chunk(b).update(at=-1), "is not a size"),
    "offset 0.5": (lambda b: _first_chunk(b).update(at=0.5), "is not a size"),
    "offset true": (lambda b: _first_chunk(b).update(at=True), "is not a size"),
    "overlap": (lambda b: _first_chunk(b).update(at=0), "a gap or an overlap"),
    "boxes": (_overlap_boxes, "chunks overlap"),
    "gap": (lambda b: _first_chunk(b).update(at=25), "a gap or an overlap"),
    "nbytes": (lambda b: _first_chunk(b).update(nbytes=8), "a chunk has 8 bytes"),
    "stride": (lambda b: _first_chunk(b).update(stride=[1 << 40]), "leave gaps"),
    "dims": (lambda b: _first_chunk(b).update(sizes=[2, 2]), "dimensions"),
    "outside": (lambda b: _first_chunk(b).update(offsets=[1]), "outside of shape"),
    "not whole": (lambda b: b["tensors"]["shared/model/b"].update(shape=[5]), "do not fill"),
    "no chunks": (lambda b: b["tensors"]["shared/model/b"].update(chunks=[]), "do not fill"),
    "huge": (lambda b: b["tensors"]["shared/model/b"].update(shape=[1 << 61] * 9), "too large"),
    "dtype": (lambda b: b["tensors"]["shared/model/b"].update(dtype="object"), "unknown dtype"),
    "chunk type": (lambda b: b["tensors"]["shared/model/b"].update(chunks=[3]), "wrong type"),
    "tensors type": (lambda b: b.update(tensors=[]), "wrong type"),
    "workers": (lambda b: b.update(size=2), "size is 2, but it has"),
    "alias": (lambda b: b["alias"].update(x="absent"), "tied to absent"),
    "tied twice": (
        lambda b: b["alias"].update({"rank0/residual": "rank0/residual"}),
        "saved and tied",
    ),
    "no tensor": (lambda b: b["shared"].update(x={"$tensor": "y"}), "'y' is absent"),
    "form": (lambda b: b["shared"].update(x={"$python": "os.system"}), "an invalid object"),
    "key": (lambda b: b["shared"].update(x={"$dict": [[[], 1]]}), "not a scalar"),
    "part": (lambda b: b.update(meta=[1]), "not a dict"),
    "nan": (lambda b: b["meta"].update(x=float("nan")), "NaN is not a finite number"),
}


@pytest.mark.parametrize("case", FORGERIES)
def test_a_forged_manifest_with_a_right_checksum_is_refused(
    case: str, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change, why = FORGERIES[case]
    forge(last(root), change)
    assert why in falls_back(root, caplog)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"step":1,"step":2}', "occurs twice"),
        (b'{"step":1e400}', "not a finite number"),
        (b'{"step":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deep"),
        (b'{"step":' + b"9" * 5000 + b"}", "manifest.json"),
        (b'{"step":"\xff"}', "manifest.json"),
        (b'{"step"', "manifest.json"),
    ],
    ids=["twice", "1e400", "deep", "digits", "utf8", "cut"],
)
def test_text_that_is_not_our_json_is_refused(
    text: bytes, why: str, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seal(last(root) / "manifest.json", text)
    assert why in falls_back(root, caplog)


class Bomb:
    """Runs code when unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("file", ["manifest.json", "data"])
def test_a_pickle_in_place_of_a_file_is_never_run(
    file: str, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mark = root.parent / "executed"
    target = data(last(root)) if file == "data" else last(root) / file
    bomb = pickle.dumps(Bomb(mark))
    size = target.stat().st_size
    target.write_bytes(bomb.ljust(size, b"\0")[: max(size, len(bomb))])
    falls_back(root, caplog)
    assert not mark.exists()


@pytest.mark.parametrize("file", ["manifest.json", "data"])
def test_a_link_out_of_the_directory_is_not_followed(
    file: str, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = data(last(root)) if file == "data" else last(root) / file
    outside = root.parent / "outside"
    target.rename(outside)
    target.symlink_to(outside)
    assert f"{target.name}: it is a symlink" in falls_back(root, caplog)


def test_a_pipe_or_directory_in_place_of_a_file_does_not_block(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = data(last(root))
    file.unlink()
    os.mkfifo(file)
    assert "is not a regular file" in falls_back(root, caplog)
    file.unlink()
    file.mkdir()
    assert "is not a regular file" in falls_back(root, caplog)


def test_a_linked_step_is_not_taken_for_one_of_this_root(root: Path) -> None:
    elsewhere = root.parent / "elsewhere"
    last(root).rename(elsewhere)
    last(root).symlink_to(elsewhere)
    assert newest(root) == root / "step-00000010"


def test_a_directory_without_manifest_is_not_a_checkpoint(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (last(root) / "manifest.json").unlink()
    assert newest(root) == root / "step-00000010"
    assert "the save did not finish" in falls_back(root, caplog)


def test_a_sparse_giant_is_refused_by_its_size(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.truncate(data(last(root)), 1 << 40)
    assert "1099511627776 bytes" in falls_back(root, caplog)
    os.truncate(last(root) / "manifest.json", 1 << 40)
    assert "too many for a manifest" in falls_back(root, caplog)


def test_a_file_replaced_after_it_was_verified_is_noticed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = read.fill

    def replace_and_fill(path: Path, *args: Any) -> Any:
        data(path).write_bytes(b"\1" * data(path).stat().st_size)
        return fill(path, *args)

    monkeypatch.setattr(read, "fill", replace_and_fill)
    with pytest.raises(CheckpointCorrupt, match="CRC-32"):
        load(root, rank=0, size=1)


def test_when_all_are_damaged_every_reason_is_given(root: Path) -> None:
    for path in root.glob("step-*"):
        os.truncate(data(path), 0)
    with pytest.raises(CheckpointCorrupt, match=r"step-00000020.*; .*step-00000010"):
        load(root, rank=0, size=1)


def test_a_checkpoint_of_another_model_is_refused_without_falling_back(root: Path) -> None:
    save(root, State({"model": {"w": torch.zeros(9)}}), step=30)
    with pytest.raises(CheckpointMismatch, match=r"w has shape \(3, 2\) in the model, but \(9"):
        load(root, rank=0, size=1, into={"model": {"w": torch.zeros(3, 2)}})


def test_a_clock_in_the_future_decides_nothing(root: Path) -> None:
    forge(root / "step-00000010", lambda body: body.update(written="9999-01-01T00:00:00+00:00"))
    assert load(root, rank=0, size=1).step == 20


def test_the_manifest_is_plain_json(root: Path) -> None:
    body = json.loads((last(root) / "manifest.json").read_text())
    assert body["tensors"]["shared/model/w"]["shape"] == [3, 2]
