"""Packing: so many bits on the wire as were said, and the same codes come out."""

from __future__ import annotations

import pytest
import torch

from shoal.axes.compression.kit import bit_packing as bits

WIDTHS = range(1, 9)
COUNTS = (0, 1, 3, 7, 8, 9, 64, 1001)


def codes(width: int, count: int) -> torch.Tensor:
    chance = torch.Generator().manual_seed(width)
    return torch.randint(2**width, (count,), generator=chance).to(torch.uint8)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", COUNTS)
def test_what_is_packed_comes_out_again(width: int, count: int) -> None:
    given = codes(width, count)
    packed = bits.pack(given, width)
    assert packed.dtype == torch.uint8
    assert packed.shape == (bits.nbytes(count, width),)
    assert torch.equal(bits.unpack(packed, width, count), given)


@pytest.mark.parametrize("width", WIDTHS)
def test_codes_take_their_bits_and_no_more(width: int) -> None:
    assert bits.nbytes(8000, width) == 1000 * width
    assert bits.nbytes(0, width) == 0
    assert bits.nbytes(1001, width) <= -(-1001 * width // 8) + 2  # each part ends on a whole byte


@pytest.mark.parametrize(
    ("given", "width", "byte"),
    [
        ([1, 0, 0, 0, 0, 0, 0, 0], 1, 0b00000001),
        ([0, 1, 0, 0, 0, 0, 0, 1], 1, 0b10000010),
        ([1, 1, 1], 1, 0b00000111),
        ([1, 2, 3, 0], 2, 0b00111001),
        ([3, 0, 0, 3], 2, 0b11000011),
        ([0xA, 0xF], 4, 0xFA),
        ([200], 8, 200),
    ],
)
def test_the_first_code_is_the_lowest(given: list[int], width: int, byte: int) -> None:
    packed = bits.pack(torch.tensor(given, dtype=torch.uint8), width)
    assert packed.tolist() == [byte]


def test_six_bits_are_fours_and_then_twos() -> None:
    packed = bits.pack(torch.tensor([0b100001, 0b110010], dtype=torch.uint8), 6)
    assert packed.tolist() == [0b00100001, 0b00001110]


@pytest.mark.parametrize("width", [1, 2, 4])
def test_every_byte_is_some_codes(width: int) -> None:
    every = torch.arange(256).to(torch.uint8)
    found = bits.unpack(every, width, 256 * 8 // width)
    assert torch.equal(bits.pack(found, width), every)


def test_booleans_and_signed_bytes_are_codes_too() -> None:
    flags = torch.tensor([True, False, True, True])
    assert bits.pack(flags, 1).tolist() == [0b1101]
    assert bits.pack(flags.to(torch.int8), 1).tolist() == [0b1101]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_part_of_a_longer_tensor_is_packed_like_its_copy(width: int) -> None:
    part = codes(width, 50)[3:44]
    assert torch.equal(bits.pack(part, width), bits.pack(part.clone(), width))


def test_what_is_packed_is_left_as_it_was() -> None:
    for width in WIDTHS:
        given = codes(width, 21)
        before = given.clone()
        bits.pack(given, width)
        assert torch.equal(given, before)
