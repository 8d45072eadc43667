"""What is written is read back, and nothing else is ever evaluated."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import notation
from shoal.axes import FUNCTIONS
from shoal.errors import BadArgument, UnknownName, UsageError
from shoal.strategy import parse

HOSTILE = {
    "a million characters": "topk(" + "0" * 1_000_000 + ".1)",
    "a million commas": "," * 1_000_000,
    "deep brackets": "(" * 900 + ")" * 900,
    "deep calls": "error_feedback(" * 120 + "topk(0.1)" + ")" * 120,
    "deep lists": "topk(" + "[" * 900 + "]" * 900 + ")",
    "deep minus": "topk(" + "-" * 1900 + "1)",
    "deep attributes": "data" + ".a" * 900,
    "deep products": "data" + "*data" * 380,
    "chained calls": "data" + "()" * 900,
    "import": "__import__('os')",
    "import inside": "topk(__import__('os').system('true'))",
    "lambda": "lambda: 0",
    "lambda inside": "topk(lambda: 0)",
    "attribute": "topk.__globals__",
    "attribute call": "topk.__call__(0.1)",
    "attribute inside": "topk(data.__class__)",
    "subscript": "topk[0]",
    "comprehension": "topk([x for x in (1,)])",
    "walrus": "topk((x := 0.1))",
    "conditional": "topk(0.1) if 1 else exact",
    "f-string": "topk(f'{1}')",
    "starred": "topk(*[0.1])",
    "keywords unpacked": "topk(0.1, **{})",
    "a gigabyte of text": "gossip('a' * 1000000000)",
    "a gigabyte of numbers": "topk(9 ** 9 ** 9)",
    "arithmetic": "topk(0.1 * 2)",
    "a huge number": "ssp(" + "9" * 1900 + ")",
    "a huge size": "fifo(" + "9" * 1900 + "GB)",
    "infinity": "topk(inf)",
    "not a number": "topk(nan)",
    "null byte": "topk(0.1)\0",
    "null byte inside": "gossip('\0')",
    "surrogate": "gossip('\ud800')",
    "lone surrogate": "\ud800",
    "unicode name": "töpk(0.1)",
    "emoji": "🐟",
    "right to left": "\u202etopk(0.1)",
    "other digits": "topk(٠.١)",
    "a statement": "import os",
    "two statements": "exact; exact",
    "a comment": "# exact",
    "newlines": "topk(\n\n",
    "unbalanced": "topk(0.1",
    "unbalanced the other way": ")(, topk",
    "bytes": "gossip(b'ring')",
    "nothing": "gossip(None)",
    "truth": "local(True)",
    "an ellipsis": "local(...)",
    "complex": "topk(1j)",
    "a bare number": "3",
    "a bare text": "'data'",
    "a tuple": "(data, exact)",
    "a set": "{exact}",
    "a fraction of a size": "fifo(2.5MB)",
    "sum": "data + shard(2)",
    "product with a number": "shard(2) * 2",
    "product of strangers": "data * exact",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert len(str(caught.value)) < 6000


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(UsageError):
        parse(text)


PIECES = ["topk", "data", "gossip", "local", "(", ")", ",", "0.1", "2", "*", "=", "ring", " ", "'"]


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_any_jumble_of_words_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert parse(repr(parse(text))) == parse(text)


@pytest.mark.parametrize("value", [None, 3, b"exact", ["exact"], object()])
def test_what_is_not_text_is_a_usage_error(value: object) -> None:
    with pytest.raises(UsageError, match="a text or a Strategy"):
        parse(value)  # type: ignore[arg-type]


def test_an_unknown_name_is_told_its_nearest() -> None:
    with pytest.raises(UnknownName, match=r"unknown technique 'topkk'.*topk"):
        parse("topkk(0.1)")
    with pytest.raises(UnknownName, match=r"'allreduce'.*all_reduce"):
        parse("allreduce")
    with pytest.raises(UnknownName, match=r"one of: .*wfbp"):
        parse("zzzzzzzz")


def test_a_missing_or_superfluous_argument_is_told() -> None:
    with pytest.raises(BadArgument, match=r"topk\(\): missing .*'ratio'"):
        parse("topk")
    with pytest.raises(BadArgument, match=r"asp\(3\): takes 0 positional"):
        parse("asp(3)")
    with pytest.raises(BadArgument, match=r"topk\(k=3\): .*'k'; its signature is topk\(ratio\)"):
        parse("topk(k=3)")


@pytest.mark.parametrize("text", ["adaptive(early=no)", "adaptive(3)"])
def test_whether_forwards_are_early_is_true_or_false(text: str) -> None:
    with pytest.raises(BadArgument, match="early must be True or False"):
        parse(text)


def test_names_inside_a_call_are_of_its_own_axis() -> None:
    assert repr(parse("gossip(ring)").coordination) == "gossip(ring)"
    assert repr(parse("ring").collectives) == "ring"


def test_quotes_and_keywords_are_other_ways_to_write_the_same() -> None:
    assert parse("gossip('ring')") == parse('gossip(graph="ring")') == parse("gossip(ring)")
    assert parse("topk(ratio=0.5)") == parse("topk(.5)") == parse("topk(5e-1)")


@given(st.integers(1, 2**40))
def test_sizes_read_back_as_they_are_written(nbytes: int) -> None:
    text = notation.nbytes_text(nbytes)
    made = notation.call(f"fifo({text})", FUNCTIONS, "technique")
    assert made == FUNCTIONS["fifo"](nbytes)
    assert notation.call(repr(made), FUNCTIONS, "technique") == made


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(1, "1"), (1024, "1KB"), (25 * 2**20, "25MB"), (3 * 2**30, "3GB"), (1025, "1025")],
)
def test_sizes_are_written_in_the_largest_unit_that_fits(nbytes: int, text: str) -> None:
    assert notation.nbytes_text(nbytes) == text


@pytest.mark.parametrize("wrong", [0, -1, 2**41, 1.5, True, "1", None])
def test_what_is_no_size_is_refused(wrong: object) -> None:
    with pytest.raises(BadArgument, match="whole number of bytes"):
        notation.check_nbytes("fifo", wrong)


def test_commas_inside_brackets_do_not_split() -> None:
    assert notation.split("a, b(c, d(e, f)), , g") == ["a", "b(c, d(e, f))", "g"]
