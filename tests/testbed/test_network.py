"""Real testbeds: they limit, they change, and they leave nothing behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.testbed import Testbed, down, find, limit, plan, records, up
from shoal.testbed import network as made
from shoal.testbed.removal import NETNS


def lacking() -> str:
    """Why no testbed can be made here, or nothing."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "a testbed needs root on Linux"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "a testbed needs ip and tc (iproute2)"
    trial = f"shoal-trial-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", trial], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "delete", trial], capture_output=True, check=False)
    return "" if done.returncode == 0 else "a testbed needs the right to make network namespaces"


WHY = lacking()
pytestmark = [pytest.mark.skipif(bool(WHY), reason=WHY), pytest.mark.gloo]
NAME = f"test-{os.getpid()}"


def namespaces() -> set[str]:
    said = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in said.stdout.splitlines() if line.split()}


def mine() -> set[str]:
    """Everything of this test's testbed that there is, anywhere."""
    files = {p.name for p in NETNS.glob(f"shoal-{NAME}-*")} if NETNS.exists() else set()
    return {n for n in namespaces() if n.startswith(f"shoal-{NAME}-")} | files


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield
    if find(NAME) is not None:
        down(NAME)
    assert mine() == set()
    assert find(NAME) is None


def rates(bed: Testbed) -> set[str]:
    said = ""
    for space in bed.plan.namespaces:
        shown = subprocess.run(
            ["tc", "-n", space, "qdisc"], capture_output=True, text=True, check=True
        )
        said += shown.stdout
    words = said.split()
    return {words[i + 1] for i, word in enumerate(words) if word == "rate"}


def test_hosts_reach_each_other_by_name_and_nobody_else() -> None:
    code = (
        "import socket, os; me = int(os.environ['RANK'])\n"
        "if me == 0:\n"
        "    with socket.create_server(('', 29500)) as s:\n"
        "        peer, where = s.accept(); print(where[0], peer.recv(9).decode())\n"
        "else:\n"
        "    import time\n"
        "    for _ in range(200):\n"
        "        try: c = socket.create_connection(('host0', 29500)); break\n"
        "        except ConnectionRefusedError: time.sleep(0.05)\n"
        "    c.sendall(b'hello'); c.close()\n"
        "    try: socket.create_connection(('192.0.2.1', 9), timeout=1); print('escaped')\n"
        "    except OSError as e: print(e.strerror)\n"
    )
    with Testbed(hosts=2, rate="100mbit", name=NAME) as bed:
        started = bed.start(["-c", code], stdout=subprocess.PIPE)
        told = [child.communicate(timeout=60)[0].strip() for child in started]
    assert told == ["10.77.0.2 hello", "Network is unreachable"]


def test_the_rate_is_that_of_every_cable_and_changes_in_use() -> None:
    with Testbed(hosts=3, rate="1gbit", name=NAME) as bed:
        assert rates(bed) == {"1Gbit"}
        bed.limit("50mbit")
        assert rates(bed) == {"50Mbit"}
        limit("20mbit", NAME)
        assert rates(bed) == {"20Mbit"}
        assert find(NAME).plan.rate == 20_000_000  # type: ignore[union-attr]


def test_a_block_leaves_nothing_behind_even_when_it_fails_with_workers_running() -> None:
    started = []

    def fail() -> None:
        with Testbed(hosts=2, name=NAME) as bed:
            started.extend(bed.start(["-c", "import time; time.sleep(600)"], stdout=None))
            assert len(mine()) == 3
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert mine() == set()
    assert all(child.wait(10) != 0 for child in started)


def test_an_owner_that_is_killed_leaves_nothing_behind() -> None:
    code = (
        "import time, sys; from shoal.testbed import Testbed\n"
        f"with Testbed(hosts=2, name={NAME!r}) as bed:\n"
        "    print('up', flush=True); time.sleep(600)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    assert owner.stdout.readline() == "up\n"
    assert len(mine()) == 3
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    end = time.monotonic() + 30
    while (mine() or find(NAME)) and time.monotonic() < end:
        time.sleep(0.1)
    assert mine() == set()


def test_up_stays_until_down_and_twice_is_an_error() -> None:
    wanted = plan(2, "1gbit", NAME)
    assert up(wanted).owner == ""
    with pytest.raises(UsageError, match=r"exists already .2 hosts at 1gbit"):
        up(wanted)
    assert wanted.name in [record.plan.name for record in records()]
    assert len(mine()) == 3
    down(NAME)
    assert mine() == set()
    with pytest.raises(UsageError, match="no testbed"):
        down(NAME)


def test_what_a_dead_process_left_is_removed_by_the_next_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = up(plan(2, "1gbit", NAME))
    made.TestbedRecord(record.plan, "1 0").write()  # process 1 did not begin at 0
    up(plan(3, "1gbit", NAME))
    assert len(mine()) == 4


def test_a_command_that_fails_takes_down_what_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = (
        ("ip", "netns", "add", f"shoal-{NAME}-0"),
        ("tc", "-n", f"shoal-{NAME}-0", "nonsense"),
    )
    monkeypatch.setattr(made, "build", lambda _: broken)
    with pytest.raises(UsageError, match=r"nonsense.*failed"), Testbed(hosts=2, name=NAME):
        pass
    assert mine() == set()


@pytest.mark.slow
def test_shoal_run_trains_on_the_hosts_with_one_command(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, shoal\n"
        "model = torch.nn.Linear(4, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "loss = torch.nn.functional.mse_loss\n"
        "with shoal.distribute(model, optimizer, loss=loss) as run:\n"
        "    run.step((torch.ones(2, 4), torch.ones(2, 4)))\n"
        "    print(f'{run.rank} of {run.size}', flush=True)\n"
    )
    up(plan(2, "1gbit", NAME))
    words = [sys.executable, "-m", "shoal", "run", str(script), "--hosts", NAME, "--output", "all"]
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=tmp_path, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    for line in ("[rank 0] 0 of 2", "[rank 1] 1 of 2"):
        assert line in done.stdout
