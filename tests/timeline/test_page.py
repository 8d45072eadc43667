"""Laws of the page: complete in itself, true to the summary, and no text in it can run."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shoal.timeline import Span, Timeline, page, write_page
from shoal.timeline.page import json_in_html

EVIL = "</script><img src=x onerror=alert(1)>{{data}}\u2028&\"'"


def steps(count: int, *, name: str = "forward") -> list[Span]:
    return [
        Span(worker, lane, name, step + 0.1 * i, 0.3, 1000, step)
        for step in range(count)
        for worker in range(2)
        for i, lane in enumerate(("data", "compute", "exchange", "exchange", "wait"))
    ]


class Seen(HTMLParser):
    """Every tag, attribute and script of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def data(text: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_the_page_loads_nothing() -> None:
    seen = Seen(page(Timeline(steps(2))))
    assert not [tag for tag, at in seen.tags if "src" in at or "href" in at or tag == "link"]
    text = page(Timeline(steps(2)))
    assert "http://" not in text
    assert "https://" not in text
    assert "url(" not in text
    assert "@import" not in text


@pytest.mark.parametrize("key", ["strategy", "title", "model", "torn", "dropped", "missing", EVIL])
def test_no_fact_can_become_markup(key: str) -> None:
    clean = Seen(page(Timeline(steps(2), {key: "x"})))
    value: Any = {"1": EVIL} if key in ("torn", "dropped") else [EVIL] if key == "missing" else EVIL
    meta = {key: value}
    seen = Seen(page(Timeline(steps(2), meta)))
    assert "img" not in {tag for tag, _ in seen.tags}
    assert [t for t, _ in seen.tags].count("script") == [t for t, _ in clean.tags].count("script")
    assert not [at for _, at in seen.tags if "onerror" in at]


def test_no_name_can_end_the_data() -> None:
    text = page(Timeline(steps(1, name=EVIL)))
    assert data(text)["names"] == [EVIL]
    assert "<img" not in text


def test_json_in_a_page_reads_back_equal_and_has_no_brackets() -> None:
    text = json_in_html({"a": EVIL, "b": "<!--"})
    assert json.loads(text) == {"a": EVIL, "b": "<!--"}
    assert not set("<>&\u2028") & set(text)


def test_only_the_pages_own_script_may_run() -> None:
    text = page(Timeline(steps(2), {"strategy": EVIL}))
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)
    assert script
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text
    assert "default-src 'none'" in text


def test_every_span_is_in_the_data_once_and_rows_do_not_overlap() -> None:
    found = data(page(Timeline(steps(3))))
    rows = [row for track in found["tracks"] for row in track["rows"]]
    assert sum(len(row) for row in rows) == 5 * len(steps(3))
    for row in rows:
        ends = [row[i] + row[i + 1] for i in range(0, len(row), 5)]
        assert all(a <= b + 0.2 for a, b in zip(ends, row[5::5], strict=False))


def test_steps_are_bounded_by_their_first_and_last_span() -> None:
    assert data(page(Timeline(steps(1))))["steps"] == {
        "0": [0, 0, 700000.0],
        "1": [0, 0, 700000.0],
    }


def test_facts_of_the_run_are_shown() -> None:
    meta = {"strategy": "all_reduce bsp", "model": "GPT", "samples_per_second": 3731.4, "lr": 0.1}
    text = page(Timeline(steps(4), {**meta, "tied": True, "shape": [2, 3], "origin_ns": 987654}))
    for shown in (
        "<h1>all_reduce bsp</h1>",
        "GPT",
        "samples/s",
        "3,731",
        ">0.1<",
        "True",
        "[2, 3]",
    ):
        assert shown in text
    assert "987654" not in text


def test_what_is_not_there_is_said() -> None:
    meta = {"torn": {"3": "line 7"}, "missing": [5], "dropped": {"1": 12}}
    text = page(Timeline(steps(1), meta))
    assert text.count('class="warning"') == 3
    assert 'class="warning">no spans' in page(Timeline([]))


def test_beyond_the_limit_the_last_whole_steps_are_drawn_and_it_says_so() -> None:
    text = page(Timeline(steps(10)), limit=35)
    drawn = data(text)["steps"]["0"][::3]
    assert drawn == [7, 8, 9]
    assert "the last 3 of 10 steps" in text


def test_the_limit_never_leaves_nothing() -> None:
    assert data(page(Timeline(steps(10)), limit=1))["steps"]["0"][::3] == [9]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_the_script_runs_under_its_own_policy(tmp_path: Path) -> None:
    write_page(Timeline(steps(12, name=EVIL)), tmp_path / "page.html")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run"
    flags += " --disable-background-networking --disable-component-update --disable-sync"
    place = [f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path / 'page.html'}"]
    command = ["chromium", *flags.split(), "--dump-dom", *place]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert (
        done.stdout.count('aria-pressed="true"') == 4
    )  # a button for each lane: the script's work


def test_a_name_that_utf8_cannot_hold_is_written(tmp_path: Path) -> None:
    write_page(Timeline(steps(1, name="\ud800"), {"model": "\ud800"}), tmp_path / "page.html")
    assert "<h1>" in (tmp_path / "page.html").read_text("utf-8")
