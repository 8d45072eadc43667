"""Laws of launching, with real processes: the torchrun environment, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.gloo

JOINED = """
import os, sys, time, json, signal
from pathlib import Path
rank = int(os.environ.get("RANK", -1))
here = Path(os.environ["SHOAL_DIR"])
(here / f"joined-{rank}").touch()  # what join() does, without the cost of torch
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start ``shoal run`` on a script given as text; its temporary files go to tmp_path/tmp."""
    started: list[subprocess.Popen[str]] = []
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    def begin(text: str, *options: str, head: str = JOINED) -> subprocess.Popen[str]:
        script = tmp_path / "train.py"
        script.write_text(head + textwrap.dedent(text))
        env = {**os.environ, "TMPDIR": str(temporary), "WATCHED": str(tmp_path)}
        for name in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
            env.pop(name, None)
        process = subprocess.Popen(
            [sys.executable, "-m", "shoal", "run", str(script), *options],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        )  # fmt: skip
        started.append(process)
        return process

    yield begin
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    assert list(temporary.iterdir()) == []


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def wait_for(condition: Callable[[], bool]) -> None:
    """Until it holds; gives up after a minute."""
    end = time.monotonic() + 60
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("waited for a minute")
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_every_line_is_prefixed_and_arguments_arrive(start: Start) -> None:
    process = start(
        "print('args', sys.argv[1:]); print('oops', file=sys.stderr)",
        "-n", "2", "--output", "all", "--lr", "0.1", "--", "--output", "x",
    )  # fmt: skip
    code, out, err = finish(process)
    assert code == 0
    assert sorted(out.splitlines()) == [
        f"[rank {rank}] args ['--lr', '0.1', '--output', 'x']" for rank in range(2)
    ]
    assert "[rank 0] oops" in err
    assert "[rank 1] oops" in err
    assert "torchrun --standalone --nproc-per-node=2" in err


def test_only_rank_0_is_seen_and_the_others_kept_in_files(start: Start, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    code, out, _ = finish(start("print('I am', rank)", "-n", "2", "--dir", str(directory)))
    assert (code, out) == (0, "I am 0\n")
    assert (directory / "logs" / "rank-1.log").read_text() == "I am 1\n"


def test_a_script_that_never_joins_is_told_so(start: Start) -> None:
    code, _, err = finish(start("print('hello')", "-n", "2", head=""))
    assert code == 2
    assert "without calling shoal.distribute" in err


def test_the_first_to_fail_is_shown_with_its_code_and_the_others_are_stopped(start: Start) -> None:
    process = start(
        """
        (Path(os.environ["WATCHED"]) / f"pid-{rank}").write_text(str(os.getpid()))
        if rank == 1:
            print("about to fail")
            sys.exit(7)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
        """,
        "-n", "2",
    )  # fmt: skip
    code, _, err = finish(process)
    assert code == 7
    assert "rank 1 failed first: exit code 7\n  | about to fail" in err
    assert "then rank 0: stopped by the launcher (SIGKILL)" in err


def test_a_killed_worker_is_named_with_its_signal(start: Start) -> None:
    code, _, err = finish(start("os.kill(os.getpid(), 9)", "-n", "1"))
    assert code == 137
    assert "rank 0 failed first: killed by SIGKILL" in err


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_are_forwarded_and_even_the_deaf_are_gone(
    start: Start, tmp_path: Path, number: int, code: int
) -> None:
    process = start(
        """
        if rank == 1:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        (Path(os.environ["WATCHED"]) / f"pid-{rank}").write_text(str(os.getpid()))
        time.sleep(600)
        """,
        "-n", "2",
    )  # fmt: skip
    wait_for(lambda: len(pids(tmp_path)) == 2)
    process.send_signal(number)
    assert finish(process)[0] == code
    assert not any(map(alive, pids(tmp_path)))


def pids(place: Path) -> list[int]:
    """Of those who have begun."""
    return [int(text) for file in place.glob("pid-*") if (text := file.read_text())]


def test_a_killed_launcher_leaves_no_process_and_no_file(start: Start, tmp_path: Path) -> None:
    process = start(
        """
        import subprocess
        child = subprocess.Popen(["sleep", "600"])
        watched = Path(os.environ["WATCHED"])
        (watched / f"pid-child-{rank}").write_text(str(child.pid))
        (watched / f"pid-{rank}").write_text(str(os.getpid()))
        time.sleep(600)
        """,
        "-n", "2",
    )  # fmt: skip
    wait_for(lambda: len(pids(tmp_path)) == 4)
    process.kill()
    wait_for(lambda: not any(map(alive, pids(tmp_path))))
    wait_for(lambda: not list((tmp_path / "tmp").iterdir()))


def test_restarts_get_a_fresh_generation_and_resume(start: Start, tmp_path: Path) -> None:
    process = start(
        """
        names = ("SHOAL_GENERATION", "TORCHELASTIC_RESTART_COUNT", "SHOAL_RESUME", "MASTER_PORT")
        with open(Path(os.environ["WATCHED"], "seen"), "a") as file:
            file.write(json.dumps([os.environ.get(name) for name in names]) + "\\n")
        sys.exit(int(os.environ["SHOAL_GENERATION"]) == 0)
        """,
        "-n", "1", "--max-restarts", "2",
    )  # fmt: skip
    code, _, err = finish(process)
    assert code == 0
    assert "restarting all workers from the last checkpoint" in err
    first, second = map(json.loads, (tmp_path / "seen").read_text().splitlines())
    assert first[:3] == ["0", "0", None]
    assert second[:3] == ["1", "1", "1"]


def test_servers_are_extra_processes_without_a_rank(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LORA_RANK", "8")  # the script's own, which is no rank of ours
    process = start(
        """
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SHOAL_ROLE", "SHOAL_SERVER", "LORA_RANK")
        print(*[os.environ.get(name) for name in names], flush=True)
        """,
        "-n", "2", "--output", "all", "--strategy", "parameter_server(1)",
    )  # fmt: skip
    code, out, err = finish(process)
    assert code == 0, err
    assert sorted(out.splitlines()) == [
        "[rank 0] 0 0 2 worker None 8",
        "[rank 1] 1 1 2 worker None 8",
        "[server 0] None None 2 server 0 8",
    ]


def test_the_environment_has_all_that_torchrun_sets(start: Start, tmp_path: Path) -> None:
    dump = """
import json, os, sys
if os.environ["RANK"] == "0":
    json.dump(dict(os.environ), open(sys.argv[1], "w"))
"""
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    assert finish(start(dump, "-n", "2", str(ours), head=""))[0] == 2  # it never joins
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(tmp_path / "train.py"), str(theirs)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    mine, reference = json.loads(ours.read_text()), json.loads(theirs.read_text())
    private = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "LINES", "COLUMNS"}
    added = set(reference) - set(os.environ) - private
    assert added - set(mine) == set()
    places = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"}
    for name in added - places:
        assert mine[name] == reference[name], name
