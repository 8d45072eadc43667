"""The doctor: every finding has a name, a verdict, and a way out when something is wrong."""

from __future__ import annotations

import json
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from typing import NoReturn

import pytest

from shoal.cli import checks, main
from shoal.cli.checks import CHECKS, Finding, examine
from shoal.errors import UsageError
from shoal.wire.shm.memory import cma, segment
from shoal.wire.shm.options import DIRECT_MB


def test_this_machine_can_be_examined(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert [finding["name"] for finding in findings] == [
        check.__name__.replace("_", " ") for check in CHECKS
    ]
    assert {finding["status"] for finding in findings} <= {"ok", "warn", "fail"}
    assert main(["doctor"]) == 0
    assert "torch" in capsys.readouterr().out


def test_whatever_is_not_ok_says_what_to_do() -> None:
    assert all(finding.fix for finding in examine(3) if finding.status != "ok")


def test_a_failure_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = Finding("ports", "fail", "none free", "free one")
    monkeypatch.setattr(checks, "CHECKS", (lambda name, workers: bad,))
    assert main(["doctor"]) == 1
    assert "free one" in capsys.readouterr().out


def test_a_check_that_breaks_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def odd(name: str, workers: int) -> NoReturn:
        raise RuntimeError("no such call")

    monkeypatch.setattr(checks, "CHECKS", (odd,))
    assert examine(2) == [Finding("odd", "fail", "could not be checked: no such call")]


@pytest.mark.parametrize("text", ["0", "-1", "many"])
def test_the_doctor_wants_a_number_of_workers(text: str) -> None:
    assert main(["doctor", "-n", text]) == 2


@pytest.mark.parametrize(
    ("version", "status"),
    [("2.13.0+cpu", "ok"), ("2.10.1", "ok"), ("2.9.1", "fail"), ("1.13", "fail")],
)
def test_torch_must_be_new_enough(version: str, status: str) -> None:
    assert checks.torch_version("torch", version, version).status == status


def test_more_workers_than_cores_are_warned_of() -> None:
    assert checks.cores("cores", 10**6).status == "fail"
    assert checks.cores("cores", checks.most_workers()).status == "warn"
    assert checks.cores("cores", 1).status == "ok"


def test_threads_are_counted_over_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "usable_cores", lambda: 4)
    for text, status in (("", "ok"), ("2", "ok"), ("4", "warn"), ("0", "fail"), ("all", "fail")):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert checks.omp_threads("threads", 2).status == status


def test_little_room_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    full = type("Usage", (), {"free": 1 << 20})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    assert checks.shared_memory("shm", 2).status == "warn"
    assert checks.disk("disk", 2).status == "warn"


@pytest.mark.parametrize(("limit", "status"), [(20000, "ok"), (130, "warn"), (64, "fail")])
def test_open_files_must_suffice(monkeypatch: pytest.MonkeyPatch, limit: int, status: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    assert checks.open_files("files", 4).status == status


def test_an_interface_that_is_missing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    assert checks.network("network", 2).status == "fail"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(checks, "gloo_choice", lambda: "192.0.2.7")
    assert checks.network("network", 2).status == "ok"


def test_a_machine_without_loopback_or_room_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "bind", raising(UsageError("port 0 cannot be used")))
    assert checks.ports("ports", 2).status == "fail"
    monkeypatch.setattr(tempfile, "TemporaryDirectory", raising(OSError("read-only")))
    assert checks.temporary_files("temporary files", 2).status == "fail"


def test_the_backend_of_one_machine_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "shared by an anonymous file" in checks.shoal_backend("shoal backend", 2).fact
    fact = checks.shoal_backend("shoal backend", 2).fact
    assert "workers can read" in fact or "workers cannot read" in fact  # as the kernel has it
    monkeypatch.setenv(DIRECT_MB, "inf")
    assert "forbids workers" in checks.shoal_backend("shoal backend", 2).fact
    monkeypatch.delenv(DIRECT_MB)
    monkeypatch.setattr(cma, "_readv", None)
    assert "workers cannot read" in checks.shoal_backend("shoal backend", 2).fact
    monkeypatch.setattr(segment, "create", raising(UsageError("no space for a shared segment")))
    assert checks.shoal_backend("shoal backend", 2).status == "warn"


def raising(error: Exception) -> Callable[..., NoReturn]:
    """A function that only raises."""

    def call(*_: object, **__: object) -> NoReturn:
        raise error

    return call


def test_a_clock_that_jumps_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = iter([0.0, 3600.0])
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    assert checks.clock("clock", 2).status == "warn"


def test_loopback_can_be_listened_on() -> None:
    finding = checks.ports("ports", 2)
    assert finding.status == "ok"
    with socket.socket() as again:  # and it was let go
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", int(finding.fact.rpartition(":")[2])))
