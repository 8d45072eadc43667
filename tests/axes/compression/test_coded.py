"""Entropy coding: nothing is lost, messages are as long everywhere, and they are shorter."""

from __future__ import annotations

import dataclasses
import importlib
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import shoal
from shoal.axes.compression import (
    Compressor,
    Trait,
    by_size,
    coded,
    exact,
    int8,
    natural,
    qsgd,
    terngrad,
    topk,
)
from shoal.axes.compression.kit import entropy as lengths
from shoal.axes.compression.kit import entropy as prefix
from shoal.errors import BadArgument, ConflictError
from shoal.flow import nbytes
from shoal.strategy import parse
from shoal.testing.contracts import compression as laws
from shoal.testing.contracts.exchange import exchange
from shoal.testing.processes import run_workers

CODES = {"huffman": lengths.huffman, "elias": lengths.elias}
each_code = pytest.mark.parametrize("code", CODES)
QUANTISERS = [qsgd(16), qsgd(3), terngrad(), int8(), natural()]


def written(text: Tensor, code: str) -> prefix.Coded:
    return prefix.encode(text, CODES[code](lengths.counts(text)))


@each_code
@given(st.binary(max_size=1500))
@settings(max_examples=40, deadline=None)
def test_what_was_written_is_read(code: str, given: bytes) -> None:
    text = torch.tensor(list(given), dtype=torch.uint8)
    assert torch.equal(prefix.decode(written(text, code), len(text)), text)


@each_code
@pytest.mark.parametrize("count", [1, 511, 512, 513, 20_000])
@pytest.mark.parametrize("spread", [0.0, 0.4, 4.0, 90.0])
def test_texts_of_any_length_and_spread(code: str, count: int, spread: float) -> None:
    chance = torch.Generator().manual_seed(count)
    text = (torch.randn(count, generator=chance).abs() * spread).clamp(max=255).to(torch.uint8)
    said = written(text, code)
    longer = said._replace(stream=torch.cat([said.stream, torch.full((7,), 255).byte()]))
    assert torch.equal(prefix.decode(longer, count), text)


def test_huffman_is_within_a_bit_of_the_entropy_and_elias_is_not_far() -> None:
    chance = torch.Generator().manual_seed(0)
    text = (torch.randn(50_000, generator=chance) * 4 + 128).to(torch.uint8)
    p = lengths.counts(text).double() / len(text)
    entropy = -float((p[p > 0] * p[p > 0].log2()).sum())
    used = {code: written(text, code).stream.numel() * 8 / len(text) for code in CODES}
    assert entropy <= used["huffman"] <= entropy + 0.1
    assert used["huffman"] <= used["elias"] <= 2 * entropy + 1


def test_no_codeword_is_too_long_for_its_three_bytes() -> None:
    often = torch.tensor([2**i if i < 40 else 0 for i in range(256)])  # Huffman's tree: 39 deep
    bits = lengths.huffman(often)
    assert int(bits.max()) <= prefix.LONGEST
    assert sum(2.0 ** -int(b) for b in bits if b) <= 1
    assert int(lengths.elias(torch.ones(256)).max()) <= prefix.LONGEST


def test_elias_takes_one_bit_for_the_most_frequent_and_three_for_the_next_two() -> None:
    often = torch.zeros(256, dtype=torch.int64)
    often[7], often[9], often[200], often[1] = 50, 20, 30, 5
    assert [int(lengths.elias(often)[b]) for b in (7, 200, 9, 1, 0)] == [1, 3, 3, 5, 0]


def gradients(workers: int, numel: int = 30_000) -> list[Tensor]:
    chance = torch.Generator().manual_seed(1)
    return list(torch.randn(workers, numel, generator=chance))


@each_code
@pytest.mark.parametrize("inner", QUANTISERS, ids=repr)
def test_what_comes_out_is_what_the_inner_says(inner: Compressor, code: str) -> None:
    plain = exchange(inner, gradients(3)).ends
    ours = exchange(coded(inner, code), gradients(3)).ends
    for one, other in zip(plain, ours, strict=True):
        assert torch.equal(one.mean, other.mean)
        assert torch.equal(one.mine.dense(), other.mine.dense())


@each_code
def test_fewer_bytes_travel_and_all_send_as_many(code: str) -> None:
    inner = terngrad()
    plain = exchange(inner, gradients(3)).asks
    ours = exchange(coded(inner, code), gradients(3)).asks
    sizes = {tuple(nbytes(ask) for ask in asks) for asks in ours}
    assert len(sizes) == 1
    assert sum(next(iter(sizes))) < 0.75 * nbytes(plain[0][0])


def test_codes_that_packing_tore_apart_are_coded_whole() -> None:
    """qsgd(16) packs 6 bits as four and two; told so, the entropy of the levels is reached."""
    inner = dataclasses.replace(qsgd(16), width=6)
    (asks,) = exchange(coded(inner), gradients(1, 60_000)).asks
    bits = 8 * sum(map(nbytes, asks)) / 60_000
    assert bits < 2.6
    assert torch.equal(
        exchange(coded(inner), gradients(2)).ends[0].mean,
        exchange(inner, gradients(2)).ends[0].mean,
    )


def test_what_does_not_pay_travels_as_the_inner_sends_it() -> None:
    small, noise = torch.randn(100), torch.rand(20_000).mul(254).sub(127)
    assert len(exchange(coded(terngrad()), [small]).asks[0]) == 1
    one, two = exchange(coded(int8()), [noise]).asks[0]
    assert nbytes(two) == nbytes(exchange(int8(), [noise]).asks[0][0])
    assert nbytes(one) <= 4 * 258


@pytest.mark.parametrize("inner", [dataclasses.replace(qsgd(3), width=3), int8()], ids=repr)
def test_the_laws_hold_where_all_is_coded(
    inner: Compressor, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("shoal.axes.compression.coded")
    monkeypatch.setattr(module, "max_stream_nbytes", lambda raw, count: 10**4 * count)
    made = coded(inner, "elias")
    (asks,) = exchange(made, [torch.randn(7)]).asks
    assert len(asks) == 2, "or the laws would be empty"
    for law in (
        laws.mean_of_what_was_sent_is_the_mean,
        laws.all_workers_send_as_much,
        laws.strides_do_not_matter,
    ):
        law(made)


def test_it_is_not_one_message_but_keeps_the_rest() -> None:
    made = coded(terngrad())
    assert Trait.ONE_SHOT not in made.traits
    assert terngrad().traits & ~Trait.ONE_SHOT == made.traits
    with pytest.raises(ConflictError, match="these are no codes"):
        coded(exact())
    with pytest.raises(ConflictError, match="single message"):
        parse("parameter_server, asp, coded(terngrad)")
    for bad in ((topk, "huffman"), (terngrad(), "morse")):
        with pytest.raises(BadArgument, match="elias, huffman"):
            coded(*bad)  # type: ignore[arg-type]


def test_the_name_tells_the_code() -> None:
    assert coded(terngrad()).name == "coded(terngrad, huffman)"
    assert parse("coded(qsgd(16), elias)").compression == coded(qsgd(16), "elias")


def train(strategy: str) -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss: Any = nn.functional.cross_entropy
    chance = torch.Generator().manual_seed(2)
    x, y = torch.randn(24, 64, generator=chance), torch.arange(24) % 10
    with shoal.distribute(model, optimizer, loss=loss, strategy=strategy) as run:
        for _ in range(3):
            run.step((x, y))
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.gloo
@pytest.mark.parametrize("where", ["all_reduce", "parameter_server, bsp"])
def test_processes_end_where_uncoded_ones_do(where: str) -> None:
    servers = 1 if "server" in where else 0
    plain = run_workers(2, train, f"{where}, qsgd(16)", servers=servers)
    for text in ("coded(qsgd(16), huffman)", "by_size(8KB, exact, coded(qsgd(16), elias))"):
        ours = run_workers(2, train, f"{where}, {text}", servers=servers)
        assert torch.equal(ours[0], ours[1])
        if "exact" not in text:
            torch.testing.assert_close(ours[0], plain[0], rtol=0, atol=1e-6)
        assert math.isfinite(float(ours[0].norm()))


def test_by_size_passes_messages_of_both_kinds() -> None:
    made = by_size(1000, exact(), coded(terngrad()))
    assert len(exchange(made, gradients(2)).asks[0]) == 2
    assert len(exchange(made, [g[:100] for g in gradients(2)]).asks[0]) == 1
