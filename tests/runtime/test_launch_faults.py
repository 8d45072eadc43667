"""When one worker fails, hangs or is killed, the others say who and why, and a restart works."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.gloo

HEAD = """
import os, sys, time
import torch, torch.distributed as dist
from shoal.runtime.world.error_context import explain
from shoal.runtime.world.failures import POSITION
from shoal.runtime.world.join import join

torch.set_num_threads(1)
world = join()

def reduce(step):
    POSITION.step, POSITION.exchange = step, "bucket 0"
    try:
        dist.all_reduce(torch.ones(1))
    except Exception as error:
        raise explain(world, error) from error

reduce(0)
"""


def shoal_run(place: Path, text: str, *options: str, head: str = HEAD) -> tuple[int, str, str]:
    """Exit code, output and errors of ``shoal run``."""
    script = place / "train.py"
    script.write_text(head + textwrap.dedent(text))
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "run", str(script), *options],
        capture_output=True, text=True, timeout=200, check=False, env=env,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_a_rank_that_raises_is_on_top_and_the_other_says_why_it_stopped(tmp_path: Path) -> None:
    text = """
    if world.rank == 1:
        raise ValueError("bad sample 17")
    reduce(1)
    """
    code, _, err = shoal_run(tmp_path, text, "-n", "2", "--output", "all")
    report = err[err.index("shoal: rank 1 failed first: exit code 1") :]
    assert code == 1
    assert report.index("ValueError: bad sample 17") < report.index("then rank 0")
    assert "(PeerLost: rank 1 failed: ValueError: bad sample 17)" in report
    assert err.count("Traceback") == 1


def test_a_killed_rank_is_named_by_the_others(tmp_path: Path) -> None:
    text = """
    if world.rank == 1:
        os.kill(os.getpid(), 9)
    reduce(1)
    """
    code, _, err = shoal_run(tmp_path, text, "-n", "2")
    assert code == 137
    assert "rank 1 failed first: killed by SIGKILL" in err
    assert "then rank 0: exit code 1 (PeerLost: rank 1 died: killed by SIGKILL)" in err


def test_a_stopped_rank_is_found_by_the_timeout(tmp_path: Path) -> None:
    text = """
    if world.rank == 1:
        os.kill(os.getpid(), 19)
    reduce(1)
    """
    code, _, err = shoal_run(tmp_path, text, "-n", "3", "--timeout", "6")
    assert code == 1
    assert "exchange 'bucket 0' of step 1 did not end within 6 s: rank 1 is missing" in err
    assert "no answer" in err
    assert "then rank 1: stopped by the launcher" in err


def test_after_a_kill_all_ranks_meet_again_in_a_new_generation(tmp_path: Path) -> None:
    text = """
    if world.rank == 1 and world.env.generation == 0:
        os.kill(os.getpid(), 9)
    reduce(1)
    print("generation", world.env.generation, "resumes", os.environ.get("SHOAL_RESUME"))
    """
    code, out, err = shoal_run(tmp_path, text, "-n", "2", "--max-restarts", "1")
    assert code == 0, err
    assert out == "generation 1 resumes 1\n"


def test_a_rank_that_ends_without_joining_is_not_waited_for(tmp_path: Path) -> None:
    head = "import os\nif os.environ['RANK'] == '1': raise SystemExit(0)\n" + HEAD
    code, _, err = shoal_run(tmp_path, "", "-n", "2", head=head)
    assert code == 1
    assert "rank 1 ended: its script never called shoal.distribute" in err


def test_a_usage_error_in_the_script_is_exit_code_2_even_before_it_joins(tmp_path: Path) -> None:
    head = "from shoal.runtime.world.join import join\nfrom shoal.errors import UsageError\n"
    code, _, err = shoal_run(tmp_path, "raise UsageError('lr=nan')", "-n", "1", head=head)
    assert code == 2
    assert err.rstrip().endswith("shoal.errors.UsageError: lr=nan")
    assert err.count("Traceback") == 1


@pytest.mark.slow
def test_launchers_on_two_hosts_meet(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = tmp_path / "train.py"
    script.write_text(HEAD + "print(world.rank, 'of', world.size, world.env.local_size)\n")
    words = [sys.executable, "-m", "shoal", "run", str(script), "--hosts", "localhost,elsewhere"]
    nodes = [
        subprocess.Popen(
            [*words, "--master", f"localhost:{port}", "--node-rank", str(rank), "--output", "all"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "SHOAL_TOKEN": "the same"},
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [node.communicate(timeout=200) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert [out for out, _ in outputs] == [f"[rank {rank}] {rank} of 2 1\n" for rank in range(2)]


def test_the_same_script_runs_alone_and_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import pathlib, sys\n"
        "from shoal.runtime.world.join import join\n"
        "world = join()\n"
        "text = f'{world.rank} of {world.size} {world.backend}'\n"
        "pathlib.Path(sys.argv[1], str(world.rank)).write_text(text)\n"  # a pipe may mix lines
    )
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for words, expected in (([], ["0 of 1 none"]), (torchrun, ["0 of 2 shoal", "1 of 2 shoal"])):
        place = tmp_path / f"ranks of {len(expected)}"
        place.mkdir()
        subprocess.run(
            [sys.executable, *words, str(script), str(place)], check=True, timeout=200, env=env
        )
        assert [file.read_text() for file in sorted(place.iterdir())] == expected
