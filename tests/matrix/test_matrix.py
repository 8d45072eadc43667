"""Every product of every axis either says why it cannot be, or trains."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Hashable
from dataclasses import fields

import pytest
import torch
from torch import nn

from shoal import rules
from shoal.axes.compression import Trait
from shoal.strategy import Strategy, parse
from shoal.testing.contracts.matrix import (
    computation,
    cover,
    legal,
    legal_products,
    samples_by_axis,
)
from shoal.testing.trainer import LockstepTrainer, digits, tiny

MOST = 500  # computations trained here; beyond, a pairwise covering array of them
STEPS = 12
BATCHES = digits(24)

ANSWERS = samples_by_axis()
PRODUCTS = math.prod(map(len, ANSWERS.values()))
LEGAL = [Strategy(*row) for row in legal_products(ANSWERS)]


def groups() -> dict[Hashable, list[Strategy]]:
    found: dict[Hashable, list[Strategy]] = {}
    for s in LEGAL:
        found.setdefault(computation(s), []).append(s)
    return found


def row(s: Strategy) -> tuple[str, ...]:
    return tuple(repr(getattr(s, f.name)) for f in fields(s))


DISTINCT = groups()
FIRSTS = [same[0] for same in DISTINCT.values()]
TRAINED = FIRSTS if len(FIRSTS) <= MOST else [FIRSTS[i] for i in cover([row(s) for s in FIRSTS])]
KEYS = [computation(s) for s in TRAINED]


def workers(s: Strategy) -> int:
    return s.partition.data or 4


@functools.cache
def trained(s: Strategy) -> LockstepTrainer:
    school = LockstepTrainer(s, workers=workers(s), build=tiny)
    school.train(BATCHES, steps=STEPS)
    return school


def loss(model: nn.Module) -> float:
    x, y = BATCHES[0]
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(x), y))


def test_the_matrix_is_as_large_as_it_claims(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(
            f"\nmatrix: {PRODUCTS} products, {len(LEGAL)} legal, "
            f"{len(DISTINCT)} distinct computations, {len(TRAINED)} trained"
        )
    assert PRODUCTS >= 10_000
    assert 0 < len(LEGAL) < PRODUCTS
    assert 0 < len(DISTINCT) <= len(LEGAL)
    assert len(TRAINED) == len(DISTINCT) or len(DISTINCT) > MOST


def test_what_declares_the_same_is_legal_alike() -> None:
    """Legality is decided once for all that rules cannot tell apart; here, for some one by one."""
    chance, known = random.Random(0), set(legal_products(ANSWERS))
    for _ in range(3000):
        row = {axis: chance.choice(values) for axis, values in ANSWERS.items()}
        assert (legal(row) is not None) == (tuple(row.values()) in known)


@pytest.mark.parametrize("axis", ANSWERS)
def test_every_answer_is_legal_somewhere(axis: str) -> None:
    used = {getattr(s, axis) for s in LEGAL}
    assert used == set(ANSWERS[axis])


def test_every_legal_product_reads_back_as_it_is_written() -> None:
    for s in LEGAL:
        assert parse(repr(s)) == s


def test_every_legal_product_binds_to_as_many_ranks_as_it_names() -> None:
    for s in LEGAL:
        assert s.bind(rules.Facts(ranks=workers(s) * s.partition.ranks)) is s


@pytest.mark.parametrize("s", TRAINED, ids=repr)
def test_every_legal_product_trains(s: Strategy) -> None:
    before = loss(tiny()[0])
    for worker in trained(s).workers:
        after = loss(worker.model)
        assert math.isfinite(after)
        assert after < 0.97 * before


@pytest.mark.parametrize("key", KEYS, ids=lambda key: "-".join(map(str, key)))
def test_what_shares_a_key_shares_every_number(key: Hashable) -> None:
    first, last = DISTINCT[key][0], DISTINCT[key][-1]
    traits = first.compression.traits
    narrow = Trait.ELEMENTWISE in traits and Trait.LOSSLESS not in traits
    atol = 1e-3 if narrow else 0.0  # 16-bit sums round differently at the end of a vector
    one, other = trained(first), trained(last)
    for worker in range(workers(first)):
        for name, p in one.parameters(worker).items():
            torch.testing.assert_close(p, other.parameters(worker)[name], rtol=0, atol=atol)


def test_slices_do_change_what_looks_at_more_than_one_entry() -> None:
    whole, cut = (
        trained(parse(f"{order}, topk(0.25)")).parameters() for order in ("wfbp", "priority(256)")
    )
    assert Trait.ELEMENTWISE not in parse("topk(0.25)").compression.traits
    assert any(not torch.equal(whole[name], cut[name]) for name in whole)
