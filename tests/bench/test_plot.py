"""Plots are valid SVG that shows every series, and refuse what logarithmic axes cannot show."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shoal.bench.plot import plot_svg, write_map, write_plot
from shoal.errors import BadArgument

SVG = "{http://www.w3.org/2000/svg}"
SERIES = {
    "ring": [(4096, 1e-3), (65536, 2e-3), (2**20, 3e-2)],
    "a < b & c": [(2**20, 1e-2), (4096, 5e-4)],
}


def tree(series: dict[str, list[tuple[float, float]]]) -> ElementTree.Element:
    return ElementTree.fromstring(plot_svg("Time & size", "bytes", "seconds", series))


def texts(root: ElementTree.Element) -> list[str]:
    return [node.text or "" for node in root.iter(f"{SVG}text")]


def places(line: ElementTree.Element) -> list[tuple[float, float]]:
    pairs = [pair.split(",") for pair in line.attrib["points"].split()]
    return [(float(x), float(y)) for x, y in pairs]


def test_the_file_is_svg_with_title_labels_and_a_legend(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    write_plot(path, "Time & size", "bytes", "seconds", SERIES)
    root = ElementTree.parse(path).getroot()
    assert root.tag == f"{SVG}svg"
    assert {"Time & size", "bytes", "seconds", *SERIES} <= set(texts(root))
    assert [p.name for p in tmp_path.iterdir()] == ["plot.svg"]


def test_it_needs_no_other_file() -> None:
    text = plot_svg("t", "x", "y", SERIES)
    assert not re.search(r"href|url\(|<script|@import", text)


def test_every_series_is_a_line_and_every_point_tells_its_numbers() -> None:
    root = tree(SERIES)
    assert [len(places(line)) for line in root.iter(f"{SVG}polyline")] == [3, 2]
    told = [node.text for node in root.iter(f"{SVG}title")]
    assert "ring: 65536, 0.002" in told
    assert len(told) == 5


def test_points_go_by_rising_x_and_larger_is_higher() -> None:
    for line in tree(SERIES).iter(f"{SVG}polyline"):
        found = places(line)
        assert found == sorted(found)
        assert [y for _, y in found] == sorted((y for _, y in found), reverse=True)


def test_equal_factors_take_equal_room() -> None:
    [line] = tree({"a": [(1, 1.0), (10, 10.0), (100, 100.0)]}).iter(f"{SVG}polyline")
    (x0, y0), (x1, y1), (x2, y2) = places(line)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)


def test_all_points_lie_on_the_page() -> None:
    root = tree(SERIES)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for line in root.iter(f"{SVG}polyline"):
        assert all(0 < x < width and 0 < y < height for x, y in places(line))


def test_sizes_in_bytes_are_told_in_binary_units() -> None:
    assert {"4K", "64K", "1M"} <= set(texts(tree(SERIES)))


@pytest.mark.parametrize("spread", [1.0, 1.01, 1.5, 3.0, 1e2, 1e9])
def test_there_are_some_ticks_whatever_the_spread(spread: float) -> None:
    root = tree({"a": [(float(i), 0.37 * spread ** (i / 40)) for i in range(1, 41)]})
    numbers = [t for t in texts(root) if re.fullmatch(r"[\d.e+-]+[kMGT]?", t)]
    assert 4 <= len(numbers) <= 24


def test_many_series_are_told_apart() -> None:
    root = tree({str(i): [(1.0, i + 1.0), (2.0, i + 2.0)] for i in range(20)})
    looks = {
        (line.attrib["stroke"], line.attrib.get("stroke-dasharray"))
        for line in root.iter(f"{SVG}polyline")
    }
    assert len(looks) == 20


def test_the_same_series_give_the_same_bytes() -> None:
    assert plot_svg("t", "x", "y", SERIES) == plot_svg("t", "x", "y", SERIES)


@pytest.mark.parametrize(
    "series",
    [{}, {"a": []}, {"a": [(0.0, 1.0)]}, {"a": [(1.0, -1.0)]}, {"a": [(1.0, float("nan"))]}],
)
def test_what_cannot_be_drawn_is_refused(series: dict[str, list[tuple[float, float]]]) -> None:
    with pytest.raises(BadArgument, match="plot"):
        tree(series)


def test_a_map_says_what_is_the_case_where_and_equal_cells_look_alike(tmp_path: Path) -> None:
    path = tmp_path / "map.svg"
    rows = {"2 ranks": {"4K": "ring", "1M": "tree\nor 2 more"}, "4 ranks": {"1M": "ring"}}
    write_map(path, "who wins", ["4K", "1M"], rows)
    root = ElementTree.parse(path).getroot()
    assert {"who wins", "4K", "1M", "2 ranks", "4 ranks", "ring", "tree", "or 2 more"} <= set(
        texts(root)
    )
    _, *cells = (rect.attrib["fill"] for rect in root.iter(f"{SVG}rect"))
    assert len(cells) == 3
    assert cells[0] == cells[2] != cells[1]


def test_marks_that_would_lie_over_each_other_give_way_to_round_ones() -> None:
    text = plot_svg("t", "x", "y", {"a": [(1.159, 0.74), (1.215, 1.0), (6.874, 2.2)]})
    assert ">1.159<" not in text
    for mark in (2, 5, 0.8, 1.2, 1.8):
        assert f">{mark}<" in text
