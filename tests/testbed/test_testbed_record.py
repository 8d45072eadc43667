"""Records: who made what, kept so that anybody can remove it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli import main
from shoal.errors import UsageError
from shoal.runtime.launcher.options import LaunchOptions
from shoal.testbed import launch, network, record
from shoal.testbed.plan import plan
from shoal.testbed.record import TestbedRecord, find, identity, records


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(record, "DIRECTORY", tmp_path)
    return tmp_path


def test_what_was_written_is_found_again() -> None:
    written = TestbedRecord(plan(3, "100mbit", "a"), "12 34")
    written.write(new=True)
    assert find("a") == written
    assert records() == (written,)
    assert find("b") is None


def test_a_second_one_of_the_same_name_loses(own_directory: Path) -> None:
    TestbedRecord(plan(2, "1gbit", "a")).write(new=True)
    with pytest.raises(FileExistsError):
        TestbedRecord(plan(3, "1gbit", "a")).write(new=True)
    assert len(find("a").plan.hosts) == 2  # type: ignore[union-attr]
    assert len(list(own_directory.iterdir())) == 1


def test_a_record_goes_stale_with_its_owner() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owned = TestbedRecord(plan(2, "1gbit", "a"), identity(child.pid))
    assert not owned.stale
    child.communicate(b"\n")
    assert owned.stale
    assert not TestbedRecord(plan(2, "1gbit", "a")).stale
    assert not TestbedRecord(plan(2, "1gbit", "a"), identity(os.getpid())).stale


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"name": "../x", "hosts": 2}', "\x00"])
def test_a_file_that_is_no_record_is_none(own_directory: Path, text: str) -> None:
    (own_directory / "shoal-testbed-a.json").write_text(text)
    assert find("a") is None
    assert records() == ()


def test_without_root_one_error_says_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["testbed", "up"]) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    assert "root (you are user 1000; run it with sudo)" in told


def test_without_the_tools_their_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(UsageError, match=r"ip .*iproute2.* and the command tc"):
        network.require_support()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["zzz"], "one of: down, list, rate, up"),
        (["upp"], "did you mean up"),
        (["up", "100mbit"], "rate needs a value"),
        (["rate"], "rate needs a value"),
        (["down", "--hosts", "3"], "options of up only"),
        (["up", "--hosts", "1"], "2 to 64"),
        (["up", "--rate", "fast"], "100mbit"),
        (["up", "--name", "a/b"], "--name"),
    ],
)
def test_what_will_not_do_is_said_before_anything_is_made(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str], own_directory: Path
) -> None:
    assert main(["testbed", *words]) == 2
    assert told in capsys.readouterr().err
    assert list(own_directory.iterdir()) == []


def test_list_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["testbed", "list"]) == 0
    assert "no testbed is up" in capsys.readouterr().out
    TestbedRecord(plan(3, "100mbit", "a")).write()
    TestbedRecord(plan(2, "1gbit", "b"), identity(os.getpid())).write()
    TestbedRecord(plan(2, "1gbit", "c"), "1 0").write()
    assert main(["testbed", "list"]) == 0
    a, b, c = capsys.readouterr().out.splitlines()
    assert a == "a: 3 hosts at 100mbit"
    assert b.endswith(f"of process {os.getpid()}")
    assert "dead process" in c


def test_run_names_a_testbed_only_where_there_is_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="shoal testbed up"):
        launch.find_testbed(("testbed",))
    assert launch.find_testbed(("elsewhere",)) is None
    assert launch.find_testbed(("a", "b")) is None
    TestbedRecord(plan(2, "1gbit", "testbed")).write()
    found = launch.find_testbed(("testbed",))
    assert found is not None
    assert found.addresses == ("10.77.0.1", "10.77.0.2")


def test_each_host_is_told_the_same_but_for_its_number_and_directory(tmp_path: Path) -> None:
    options = LaunchOptions(workers=2, strategy="bsp", resume=True, directory=tmp_path)
    bed, typed = plan(2, "1gbit"), ["train.py", "--lr", "1"]
    each = [
        launch.arguments(bed, typed, launch.options_of(rank, options, "spare"), rank)
        for rank in range(2)
    ]
    differ = {(a, b) for a, b in zip(*each, strict=True) if a != b}
    assert differ == {("0", "1"), (f"{tmp_path}/host0", f"{tmp_path}/host1")}
    assert each[0][0] == "train.py"
    assert each[0][-3:] == ["--", "--lr", "1"]
    assert "10.77.0.1,10.77.0.2" in each[0]
    assert "--resume" in each[0]
    assert "--checkpoint" not in each[0]


def test_without_a_directory_only_the_first_host_keeps_its_files() -> None:
    first, second = (launch.options_of(rank, LaunchOptions(), "spare") for rank in range(2))
    assert first.directory is None
    assert second.directory == Path("spare/host1")
