"""The commands: one clear message and the right exit code, and torch only where it is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shoal import __version__
from shoal.cli import main
from shoal.cli.run import show_timeline
from shoal.timeline import EXCHANGE, Recorder


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('must never start')")
    return str(path)


def test_the_list_of_commands_loads_nothing_heavy_of_its_own() -> None:
    code = (
        "import sys, shoal; before = 'torch' in sys.modules; from shoal.cli import main; "
        "assert main(['--help']) == 0; assert main(['run', '--help']) == 0; "
        "sys.exit(('torch' in sys.modules) != before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("run", "strategies", "explain", "doctor", "bench", "testbed"):
        assert name in done.stdout


def test_a_wrong_option_is_refused_before_torch_is_imported(script: str) -> None:
    code = (
        "import sys; from shoal.cli import main; "
        f"assert main(['run', {script!r}, '-n', '0']) == 2; sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"shoal {__version__}\n"


def test_python_m_shoal_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "rnu"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (
        2,
        "shoal: unknown command 'rnu': did you mean run?\n",
    )


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["-n", "0"], "at least one"),
        (["-n", "-1"], "at least one"),
        (["-n", "1.5"], "whole number"),
        (["-n", "two"], "whole number"),
        (["-n", "1000000"], "--oversubscribe"),
        (["--timeout", "0"], "--timeout 0"),
        (["--port", "70000"], "65535"),
        (["--output", "everything"], "unknown --output"),
        (["--stratgy", "all_reduce"], "did you mean --strategy"),
        (["-n", "2", "--strategy", "al_reduce"], "did you mean all_reduce"),
        (["-n", "2", "--strategy", "error_feedback(topk(7))"], "topk"),
        (["-n", "3", "--strategy", "tensor=2"], "multiply"),
    ],
)
def test_what_will_not_do_is_refused_with_exit_code_2(
    script: str, options: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", script, *options]) == 2
    expected = capsys.readouterr().err
    assert word in expected
    assert expected.startswith("shoal: ")
    assert "Traceback" not in expected


def test_a_missing_script_or_value_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "nowhere.py", "-n", "2"]) == 2
    assert "nowhere.py does not exist" in capsys.readouterr().err
    assert main(["run"]) == 2
    assert main(["run", "nowhere.py", "-n"]) == 2


def test_strategies_lists_every_axis(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strategies", "--json"]) == 0
    members = json.loads(capsys.readouterr().out)
    assert {
        "partition",
        "coordination",
        "synchrony",
        "scheduling",
        "compression",
        "collectives",
    } == {member["axis"] for member in members}
    assert main(["strategies", "synchrony"]) == 0
    shown = capsys.readouterr().out
    assert "When do I wait?" in shown
    assert "compression" not in shown


def test_an_unknown_axis_offers_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["strategies", "compresion"]) == 2
    assert "did you mean compression" in capsys.readouterr().err


def test_where_the_time_went_is_shown_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    show_timeline(tmp_path, None)
    assert capsys.readouterr().out == ""
    recorder = Recorder(0)
    with recorder.span(EXCHANGE, "bucket 0", nbytes=8, step=0):
        pass
    recorder.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    show_timeline(tmp_path, None)
    assert "exchange" in capsys.readouterr().out
    assert len(list(tmp_path.glob("shoal-runs/*/timeline.*"))) == 2
    monkeypatch.setenv("COLUMNS", "150")
    show_timeline(tmp_path, tmp_path / "here")
    assert "here/timeline.html" in capsys.readouterr().out
    (tmp_path / "file").touch()
    show_timeline(tmp_path, tmp_path / "file")
    assert "could not be written" in capsys.readouterr().out
