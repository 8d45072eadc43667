"""What a user may rely on: the names, the options, and that importing them is cheap."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import shoal
from shoal.axes import FUNCTIONS

HEAVY = (
    "rich",
    "typer",
    "click",
    "sklearn",
    "scipy",
    "transformers",
    "tensorboard",
    "mkdocs",
)
HEAVY_TORCH = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "torch.utils.tensorboard",
)


def modules() -> list[str]:
    walked = pkgutil.walk_packages(shoal.__path__, "shoal.")
    return ["shoal", *(found.name for found in walked if "__main__" not in found.name)]


@pytest.mark.parametrize("name", modules())
def test_all_is_sorted_and_every_name_of_it_exists(name: str) -> None:
    module: ModuleType = importlib.import_module(name)
    names = getattr(module, "__all__", None)
    if names is None:
        return
    assert len(set(names)) == len(names)
    assert list(names) == sorted(names, key=ruff_order)
    assert [name for name in names if not hasattr(module, name)] == []


def test_every_technique_is_a_name_of_shoal_and_means_the_technique() -> None:
    """Whatever was imported before: a submodule of the same name must not take its place."""
    assert set(FUNCTIONS) <= set(shoal.__all__)
    assert [name for name, f in FUNCTIONS.items() if getattr(shoal, name) is not f] == []


def test_the_names_of_shoal_are_those_it_lists() -> None:
    assert set(dir(shoal)) >= set(shoal.__all__)
    with pytest.raises(AttributeError, match="no attribute 'topq'"):
        shoal.topq  # noqa: B018


def ruff_order(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions (ruff's RUF022)."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[:1].isupper() else 2
    return kind, name


def loaded_by(statement: str) -> list[str]:
    """Modules that a fresh interpreter holds after a statement."""
    code = f"import sys; {statement}; import json; print(json.dumps(sorted(sys.modules)))"
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    found: list[str] = json.loads(ran.stdout.splitlines()[-1])
    return found


def under(names: tuple[str, ...], loaded: list[str]) -> set[str]:
    return {n for n in names for m in loaded if m == n or m.startswith(f"{n}.")}


def test_importing_shoal_loads_nothing_heavy_that_torch_does_not() -> None:
    before = set(loaded_by("import torch"))
    after = loaded_by("import torch, shoal")
    added = [name for name in after if name not in before]
    assert under(HEAVY + HEAVY_TORCH, added) == set()


def test_asking_for_help_does_not_load_torch() -> None:
    loaded = loaded_by("from shoal.cli import main; main(['--help'])")
    assert under(("torch", "numpy"), loaded) == set()


OPTIONS = {
    "bench": "--json --list --quick --ranks --seed --sizes",
    "doctor": "--json --workers -n",
    "explain": "--json --workers -n",
    "run": "--backend --checkpoint --dir --hosts --master --max-restarts --node-rank --output "
    "--oversubscribe --port --resume --strategy --timeout --workers -n -s",
    "strategies": "--json",
    "testbed": "--hosts --name --rate",
}


def test_the_options_of_every_command_are_these() -> None:
    """A change here changes what people typed into their scripts: say so in CHANGELOG.md."""
    from shoal.cli import build

    found = {
        name: " ".join(sorted(o for p in command.params for o in p.opts if o.startswith("-")))
        for name, command in build().commands.items()
    }
    assert found == OPTIONS
