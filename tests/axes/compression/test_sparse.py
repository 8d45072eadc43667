"""The largest entries are found exactly, and places read back, in bytes whose number is known."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.axes.compression import error_feedback, topk
from shoal.axes.compression.kit.select import SAMPLE, top_k
from shoal.axes.compression.kit.sparse import code_nbytes, decode, encode
from shoal.testing.contracts.exchange import exchange

LARGE = 5 * SAMPLE + 3


def drawn(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 3000), st.data())
@settings(max_examples=60, deadline=None)
def test_places_read_back(numel: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, numel))
    seed = data.draw(st.integers(0, 9))
    where = torch.randperm(numel, generator=torch.Generator().manual_seed(seed))[:k].sort().values
    code = encode(where, numel)
    assert code.dtype == torch.uint8
    assert code.numel() == code_nbytes(k, numel) <= 4 * k
    assert torch.equal(decode(code, k, numel), where)


@pytest.mark.parametrize(
    ("numel", "k", "bytes_a_place"), [(2**20, 10_486, 1.4), (2**20, 1048, 2.1), (2**20, 4, 4.0)]
)
def test_places_take_few_bytes(numel: int, k: int, bytes_a_place: float) -> None:
    where = torch.arange(numel - k, numel)
    code = encode(where, numel)
    assert code.numel() / k == pytest.approx(bytes_a_place, rel=0.05)
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), code])[3:]  # as a wire may hold it
    assert torch.equal(decode(shifted, k, numel), where)


def test_full_blocks_are_counted() -> None:
    for numel in (254, 255, 256, 510, 70_000):
        where = torch.arange(numel)
        assert torch.equal(decode(encode(where, numel), numel, numel), where)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("numel", [100, LARGE, LARGE + 5])
def test_the_largest_are_found_exactly(numel: int, dtype: torch.dtype) -> None:
    row = drawn(numel).to(dtype)
    for k in (1, numel // 100, numel // 17, numel // 2, numel):
        where = top_k(row, k)[0]
        assert where.numel() == k
        assert bool((where[1:] > where[:-1]).all())
        expected = row.abs().topk(k).values.sort().values
        assert torch.equal(row[where].abs().sort().values, expected)  # ties: any of them


@pytest.mark.parametrize("piece", [2**9, 2**12, 2**19])
def test_pieces_do_not_matter(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.axes.compression.kit.select.PIECE", piece)
    row = drawn(LARGE)
    assert torch.equal(top_k(row, 700)[0], row.abs().topk(700).indices.sort().values)


def test_rows_unlike_their_sample_are_no_trap() -> None:
    few = torch.zeros(LARGE)
    few[[3, 70_001]] = torch.tensor([1.0, -2.0])
    assert {3, 70_001} <= set(top_k(few, 50)[0].tolist())
    sampled = drawn(LARGE) / 100
    sampled[:: LARGE // SAMPLE | 1] += 10  # what is sampled is larger than all else
    assert torch.equal(top_k(sampled, 4000)[0], sampled.abs().topk(4000).indices.sort().values)
    assert top_k(torch.ones(LARGE), 40)[0].numel() == 40


def test_a_nan_is_sent_and_not_kept() -> None:
    row = drawn(LARGE)
    row[77] = float("nan")
    assert 77 in top_k(row, 5)[0]
    end = exchange(error_feedback(topk(0.01)), [row]).ends[0]
    assert end.mean.isnan().sum() == 1
    assert end.state[0].isfinite().all()
