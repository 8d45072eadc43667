"""Commands that cannot be done end with exit code 2, one message, and nothing left behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

from shoal.cli import main
from shoal.runtime.launcher.processes import Processes

HEAD = """
import os, sys, math
import torch
from torch import nn
import shoal

RANK = int(os.environ.get("RANK", "0"))
X, Y = torch.linspace(-1, 1, 32).reshape(8, 4), torch.arange(8) % 2
model = nn.Linear(4, 2)
loss = nn.functional.cross_entropy

def start(loss=loss, lr=0.1, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return shoal.distribute(model, optimizer, loss=loss, **options)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A script that is never started."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(Processes, "start", never)
    path = tmp_path / "train.py"
    path.write_text("")
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    return "train.py"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["-n", "0"], "-n 0: at least one worker"),
        (["-n", "-1"], "-n -1: at least one worker"),
        (["-n", "1.5"], "-n 1.5: the number of workers must be a whole"),
        (["-n", "two"], "-n two: the number of workers must be a whole"),
        (["-n", "1000"], "cores"),
        (["-n", "1000000"], "or add --oversubscribe to start"),
        (["--port", "70000"], "--port 70000: the port must lie in 1 .. 65535"),
        (["--port", "-1"], "--port -1"),
        (["--timeout", "0"], "--timeout 0: seconds must be positive"),
        (["--timeout", "-3"], "--timeout -3"),
        (["--timeout", "nan"], "--timeout nan"),
        (["--max-restarts", "-1"], "--max-restarts -1"),
        (["--checkpoint", "file"], "--checkpoint file: "),
        (["--dir", "file/below"], "is a file, not a directory"),
        (["--backend", "mpi"], "unknown --backend 'mpi'"),
        (["--output", "everything"], "unknown --output 'everything': choose one of: all, main"),
        (["--stratgy", "bsp"], "unknown option --stratgy: did you mean --strategy"),
        (["--node-rank", "1"], "no effect without --hosts"),
        (["--hosts", "a,a"], "each host once"),
        (["-s", "all_reduc"], "unknown technique 'all_reduc': did you mean all_reduce"),
        (["-s", "topk(2)"], "topk(2): ratio must lie in (0, 1]"),
        (["-s", "parameter_server, ssp(-1)"], "ssp(-1)"),
        (["-s", "local(0)"], "local(0)"),
        (["-s", "bsp, asp"], "two techniques of the axis synchrony"),
        (["-s", "((("], "cannot read '((('"),
        (["-s", "x" * 5000], "5000 characters"),
        (["-n", "3", "-s", "tensor=2"], "3 workers cannot be cut as"),
    ],
)
def test_an_option_that_cannot_be_is_exit_code_2_before_any_process_starts(
    script: str, options: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", script, *options]) == 2
    text = capsys.readouterr().err
    assert expected in text
    assert text.startswith("shoal: ")
    assert "Traceback" not in text


def test_all_conflicts_of_a_strategy_are_told_at_once(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["run", script, "-n", "2", "-s"], ["explain"]):
        code = main([*command, "gossip, ssp(3), topk(0.1), priority, ring"])
        text = capsys.readouterr()
        assert code == 2, text
        assert (text.out + text.err).count("instead: ") >= 4


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nowhere.py", "nowhere.py does not exist (the current directory"),
        ("folder", "folder is a directory; name the training script in it"),
        ("file/below.py", "does not exist"),
    ],
)
def test_a_script_is_a_file(
    script: str, name: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", name, "-n", "2"]) == 2
    assert expected in capsys.readouterr().err


def test_a_script_can_be_read(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may read anything
    assert main(["run", script]) == 2
    assert "train.py is not a file, or cannot be read" in capsys.readouterr().err


def test_a_port_in_use_is_told_at_once(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["run", script, "-n", "2", "--port", str(port)]) == 2
    assert f"port {port} cannot be used: Address already in use" in capsys.readouterr().err


def test_an_interface_that_does_not_exist_is_told_at_once(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    assert main(["run", script, "-n", "2"]) == 2
    assert "GLOO_SOCKET_IFNAME=nosuch0: this machine has no interface" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["rum", "train.py"], "unknown command 'rum': did you mean run"),
        (["explain", "all_reduc"], "did you mean all_reduce"),
        (["explain", "bsp", "-n", "none"], "-n none: the number of workers"),
        (["strategies", "compresion"], "did you mean compression"),
        (["bench", "overhed"], "did you mean overhead"),
    ],
)
def test_other_commands_refuse_alike(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert expected in capsys.readouterr().err


class Ended(NamedTuple):
    """What became of a command."""

    code: int
    out: str
    err: str


def shoal_run(place: Path, text: str, *options: str, **env: str) -> Ended:
    """Run a script with ``shoal run`` and see that it leaves neither process nor file."""
    script = place / "train.py"
    script.write_text(HEAD + textwrap.dedent(text))
    (place / "tmp").mkdir()
    known = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "run", str(script), *options],
        capture_output=True, text=True, timeout=120, check=False, cwd=place,
        env={**known, "TMPDIR": str(place / "tmp"), "OMP_NUM_THREADS": "1", **env},
    )  # fmt: skip
    left = [entry for entry in Path("/proc").glob("[0-9]*/cmdline") if names(entry, script)]
    assert not left, "processes were left behind"
    assert not list((place / "tmp").glob("shoal*"))
    return Ended(done.returncode, done.stdout, done.stderr)


def names(entry: Path, script: Path) -> bool:
    """Whether a process was started with this script."""
    try:
        return str(script).encode() in entry.read_bytes()
    except OSError:
        return False


@pytest.mark.gloo
def test_a_script_that_never_calls_distribute_is_told_so(tmp_path: Path) -> None:
    code, _, err = shoal_run(tmp_path, "", "-n", "2")
    assert code == 2
    assert "ended without calling shoal.distribute(model, optimizer, ...)" in err


@pytest.mark.gloo
def test_a_script_that_raises_on_one_rank_is_on_top_and_the_others_say_why(tmp_path: Path) -> None:
    text = """
    def forward(x):
        if RANK == 1 and run.steps == 2:
            raise ValueError("bad sample 17")
        return type(model).forward(model, x)
    model.forward = forward
    run = start()
    for _ in range(5):
        run.step((X, Y))
    """
    code, _, err = shoal_run(tmp_path, text, "-n", "2", "--timeout", "60")
    assert code == 1
    assert err.index("rank 1 failed first: exit code 1") < err.index("ValueError: bad sample 17")
    assert "then rank 0: exit code 1 (PeerLost: rank 1 failed: ValueError: bad sample 17)" in err
    assert err.count("Traceback") == 1


@pytest.mark.gloo
def test_a_sample_that_cannot_be_read_on_one_rank_is_named_with_exit_code_2(
    tmp_path: Path,
) -> None:
    text = """
    class Rows(torch.utils.data.Dataset):
        def __len__(self):
            return 8
        def __getitem__(self, index):
            if index == 7:
                raise OSError("disk gone")
            return X[index], Y[index]
    run = start()
    for batch in run.loader(Rows(), 4, shuffle=False):
        run.step(batch)
    """
    code, _, err = shoal_run(tmp_path, text, "-n", "2", "--timeout", "60")
    assert code == 2
    assert "rank 1 failed first" in err
    assert "UsageError: sample 7 of Rows cannot be read: OSError('disk gone')" in err
    assert "then rank 0" in err
    assert "(PeerLost: rank 1 failed: UsageError: sample 7" in err


@pytest.mark.gloo
def test_a_learning_rate_that_differs_is_told_once_with_exit_code_2(tmp_path: Path) -> None:
    code, _, err = shoal_run(tmp_path, "start(lr=0.1 * (RANK + 1))", "-n", "2")
    assert code == 2
    assert "LayoutMismatch: rank 0 and rank 1 differ in lr" in err
    assert "0.1 on rank 0, 0.2 on rank 1" in err
    assert err.count("Traceback") == 1


@pytest.mark.gloo
def test_a_nan_on_one_rank_is_named_with_its_step(tmp_path: Path) -> None:
    text = """
    run = start(loss=lambda o, t: loss(o, t) * (math.nan if RANK == 1 and run.steps else 1))
    for _ in range(3):
        run.step((X, Y))
    """
    code, _, err = shoal_run(tmp_path, text, "-n", "2")
    assert code == 1
    assert "NonFinite: the loss is NaN or inf at step 1 on rank 1" in err
    assert err.count("Traceback") == 1


@pytest.mark.gloo
def test_a_strategy_with_servers_trains_on_one_worker_without_any(tmp_path: Path) -> None:
    text = "print(start().step((X, Y)).samples)"
    code, out, err = shoal_run(tmp_path, text, "-n", "1", "-s", "parameter_server, asp")
    assert code == 0, err
    assert out.startswith("8\n")


@pytest.mark.gloo
def test_a_bad_strategy_in_the_environment_is_exit_code_2(tmp_path: Path) -> None:
    code, _, err = shoal_run(tmp_path, "start()", "-n", "1", SHOAL_STRATEGY="al_reduce")
    assert code == 2
    assert "SHOAL_STRATEGY='al_reduce': unknown technique 'al_reduce': did you mean" in err
