"""Buffers of bytes: tensors of any type, side by side and aligned, come back as they were."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.wire.wire import ALIGN, PendingAll, PendingWork, Ready, pack, unpack

dtypes = st.sampled_from([torch.float32, torch.int64, torch.uint8, torch.bfloat16, torch.bool])
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
tensors = st.lists(st.tuples(shapes, dtypes), max_size=5).map(
    lambda layouts: [torch.ones(s).mul(i + 1).to(d) for i, (s, d) in enumerate(layouts)]
)


@given(tensors)
@settings(deadline=None)
def test_unpack_undoes_pack(parts: list[torch.Tensor]) -> None:
    packed = pack(parts)
    assert packed.numel() % ALIGN == 0
    unpacked = unpack(packed, parts)
    for part, back in zip(parts, unpacked, strict=True):
        assert (part.dtype, part.shape) == (back.dtype, back.shape)
        assert torch.equal(part, back)


def test_nothing_may_lie_where_its_type_could_not_start() -> None:
    """Rows that nobody looked up: messages of no bytes, one behind the other."""
    rows = torch.empty(3, 0, dtype=torch.uint8)
    parts = [torch.empty(1, 0, dtype=torch.int64), torch.empty(0, 4, dtype=torch.float64)]
    for row in rows:
        assert [p.shape for p in unpack(row, parts)] == [p.shape for p in parts]


def test_answers_come_in_the_order_of_asks() -> None:
    assert PendingAll((Ready(1), PendingWork((), lambda: 2))).wait() == (1, 2)
