"""What will not do is refused before any process starts, and the message says what would."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.runtime.launcher.launch import LaunchOptions, launch, torchrun_command
from shoal.runtime.launcher.options import check, most_workers, parse_workers
from shoal.runtime.launcher.processes import default_environment
from shoal.runtime.world.interfaces import bind


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('must never start')")
    return str(path)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"workers": 0}, "at least one"),
        ({"workers": -1}, "-n -1"),
        ({"workers": 10**6}, "--oversubscribe"),
        ({"servers": -1}, "negative"),
        ({"max_restarts": -1}, "--max-restarts -1"),
        ({"timeout_seconds": 0.0}, "--timeout 0"),
        ({"timeout_seconds": -2.0}, "positive"),
        ({"timeout_seconds": float("nan")}, "positive"),
        ({"port": 70000}, "65535"),
        ({"port": -1}, "--port -1"),
        ({"output": "al"}, "did you mean all"),
        ({"backend": "glo"}, "did you mean gloo"),
        ({"on_death": "shrink"}, "max-restarts"),
        ({"on_death": "panic"}, "unknown on_death"),
        ({"node_rank": 1}, "--hosts"),
        ({"directory": Path("/proc/nowhere")}, "--dir"),
        ({"checkpoint": Path("/" + "x" * 5000)}, "--checkpoint"),
    ],
)
def test_a_bad_option_is_named(script: str, change: dict[str, object], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        launch([script], replace(LaunchOptions(workers=2), **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"hosts": ("localhost", "localhost")}, "each host once"),
        ({"node_rank": 2}, "between 0 and 1"),
        ({"master": "localhost"}, "host:port"),
        ({"master": "localhost:70000"}, "host:port"),
        ({"master": "192.0.2.1:29500"}, "not this machine"),
        ({"max_restarts": 1}, "torchrun"),
        ({"servers": 1}, "one machine"),
        ({}, "SHOAL_TOKEN"),
    ],
)
def test_a_bad_option_for_several_hosts_is_named(
    script: str, change: dict[str, object], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOAL_TOKEN", raising=False)
    options = LaunchOptions(workers=2, hosts=("localhost", "other"))
    with pytest.raises(UsageError, match=word):
        launch([script], replace(options, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["two", "1.5", "", "1e6", "0x10"])
def test_a_number_of_workers_is_a_whole_number(text: str) -> None:
    with pytest.raises(UsageError, match="whole number"):
        parse_workers(text)


def test_a_thousand_workers_on_few_cores_need_insisting(script: str) -> None:
    too_many = LaunchOptions(workers=most_workers() + 1)
    with pytest.raises(UsageError, match="cores"):
        check([script], too_many)
    check([script], replace(too_many, oversubscribe=True))


def test_a_script_must_be_a_file(tmp_path: Path) -> None:
    for command, word in (
        ([], "no training script"),
        ([str(tmp_path)], "is a directory"),
        ([str(tmp_path / "nope.py")], "does not exist"),
    ):
        with pytest.raises(UsageError, match=word):
            launch(command, LaunchOptions())


def test_a_directory_must_be_one_that_can_be_used(script: str, tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for path, word in (
        (Path(script), "is a file"),
        (Path(script) / "below", "is a file"),
        (loop, "symbolic link"),
        (tmp_path / "two\nlines", "cannot be printed"),
    ):
        with pytest.raises(UsageError, match=word):
            check([script], LaunchOptions(checkpoint=path))
    check([script], LaunchOptions(checkpoint=tmp_path / "not" / "yet"))


def test_an_interface_that_is_missing_is_refused(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    with pytest.raises(UsageError, match="nosuch0"):
        check([script], LaunchOptions(workers=2))


def test_a_port_in_use_is_refused_at_once(script: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port} cannot be used"):
            launch([script], LaunchOptions(workers=2, port=port))


def test_the_torchrun_command_says_the_same() -> None:
    one = LaunchOptions(workers=4, strategy="all_reduce, topk(0.1)", max_restarts=2)
    assert torchrun_command(["train.py", "--lr", "0.1"], one) == (
        "SHOAL_STRATEGY='all_reduce, topk(0.1)' torchrun --standalone --nproc-per-node=4 "
        "--max-restarts=2 train.py --lr 0.1"
    )
    three = LaunchOptions(
        backend="gloo", resume=True, checkpoint=Path("/tmp/my runs"), timeout_seconds=9
    )
    assert torchrun_command(["t.py"], three) == (
        "SHOAL_BACKEND=gloo SHOAL_RESUME=1 SHOAL_CHECKPOINT='/tmp/my runs' SHOAL_TIMEOUT=9 "
        "torchrun --standalone --nproc-per-node=1 t.py"
    )
    with pytest.raises(UsageError, match="host:port"):
        torchrun_command(["t.py"], LaunchOptions(hosts=("a", "b"), master="a"))
    two = LaunchOptions(workers=2, hosts=("a", "b"), node_rank=1)
    assert torchrun_command(["t.py"], two) == (
        "torchrun --nnodes=2 --node-rank=1 --master-addr=a --master-port=29500 "
        "--nproc-per-node=2 t.py"
    )


def test_the_store_is_for_this_machine_alone_unless_hosts_are_given() -> None:
    with bind(0, everywhere=False) as here, bind(0, everywhere=True) as anywhere:
        assert here.getsockname()[0] == "127.0.0.1"
        assert anywhere.getsockname()[0] == "0.0.0.0"


def test_only_what_the_user_has_not_set_gets_a_default() -> None:
    options = LaunchOptions(workers=2)
    assert int(default_environment(options, {})["OMP_NUM_THREADS"]) >= 1
    assert "OMP_NUM_THREADS" not in default_environment(options, {"OMP_NUM_THREADS": "3"})
    assert "GLOO_SOCKET_IFNAME" not in default_environment(replace(options, hosts=("a", "b")), {})
