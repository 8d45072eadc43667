"""The part of the style that can be checked by machine: the shape of the tree, and habits."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.axes import AXES

SOURCE = Path(__file__).parents[1] / "src" / "shoal"
FILES = sorted(SOURCE.rglob("*.py"))
FUNCTION_LINES, FOLDER_MODULES = 40, 12
PARTICIPLES = {"told", "found", "held", "kept", "given", "said", "heard", "went"}
VAGUE = {"utils", "helpers", "manager", "handler", "base", "common", "misc"}
SPEAKS = {"cli", "ui", "__main__.py"}  # may print
Function = ast.FunctionDef | ast.AsyncFunctionDef

every_file = pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
FOLDERS = sorted({path.parent for path in FILES})
every_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: str(p.relative_to(SOURCE)))
every_axis = pytest.mark.parametrize("axis", sorted(AXES))
every_axis_module = pytest.mark.parametrize(
    "path",
    sorted((SOURCE / "axes").rglob("*.py")),
    ids=lambda p: str(p.relative_to(SOURCE)),
)


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text()))


def length(node: Function) -> int:
    """Lines of a function without its docstring, which may be as long as it is useful."""
    docstring = node.body[0] if ast.get_docstring(node) else None
    doc_lines = (docstring.end_lineno or 0) - docstring.lineno + 1 if docstring else 0
    return (node.end_lineno or node.lineno) - node.lineno + 1 - doc_lines


def public(tree: ast.Module) -> Iterator[ast.ClassDef | Function]:
    """Classes, functions and methods a reader may call; what is inside a function is not."""
    open_ = [tree.body]
    while open_:
        for node in open_.pop():
            if not isinstance(node, ast.ClassDef | Function) or node.name.startswith("_"):
                continue
            yield node
            if isinstance(node, ast.ClassDef):
                open_.append(node.body)


@every_file
def test_a_function_fits_on_a_screen(path: Path) -> None:
    long = {n.name: length(n) for n in nodes(path) if isinstance(n, Function)}
    assert not {name: lines for name, lines in long.items() if lines > FUNCTION_LINES}


@every_file
def test_everything_public_says_what_it_is(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), "the module has no docstring"
    torchs_own = {"forward", "backward", "setup_context"}  # named by torch, told by the class
    silent = [n.name for n in public(tree) if not ast.get_docstring(n)]
    assert set(silent) <= torchs_own


@every_file
def test_the_library_does_not_print(path: Path) -> None:
    if SPEAKS & set(path.relative_to(SOURCE).parts):
        return
    calls = (n.func for n in nodes(path) if isinstance(n, ast.Call))
    assert not [f.lineno for f in calls if isinstance(f, ast.Name) and f.id == "print"]


@every_file
def test_there_is_no_global_state_and_no_bare_except(path: Path) -> None:
    for node in nodes(path):
        assert not isinstance(node, ast.Global), f"line {node.lineno}: global"
        bare = isinstance(node, ast.ExceptHandler) and node.type is None
        assert not bare, f"line {node.lineno}: bare except"


@every_file
def test_nothing_is_pickled(path: Path) -> None:
    if path.relative_to(SOURCE).parts[0] == "testing":
        return  # the pipes to its own children, inside one test
    imported = {a.name for n in nodes(path) if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module or "" for n in nodes(path) if isinstance(n, ast.ImportFrom)}
    assert not imported & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}


@every_file
def test_no_name_is_vague(path: Path) -> None:
    assert not VAGUE & {*path.relative_to(SOURCE).with_suffix("").parts}


@every_file
def test_no_path_of_one_machine_is_written_down(path: Path) -> None:
    assert not re.search(r"[\"'](/root|/work|/home|/farm)/", path.read_text())


@every_axis_module
def test_an_axis_never_touches_a_process_group(path: Path) -> None:
    assert "torch.distributed" not in path.read_text()


def test_functions_are_short_as_a_whole() -> None:
    functions = sorted(length(n) for p in FILES for n in nodes(p) if isinstance(n, Function))
    assert functions[len(functions) // 2] <= 10


@every_folder
def test_a_folder_is_a_room_that_one_can_survey(folder: Path) -> None:
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    if folder.parent == SOURCE / "axes":
        modules -= {member.__name__ for member in AXES[folder.name]}
    assert len(modules) <= FOLDER_MODULES


@every_axis
def test_an_axis_folder_holds_its_protocol_and_its_members_only(axis: str) -> None:
    folder = SOURCE / "axes" / axis
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    members = {member.__name__ for member in AXES[axis]}
    assert len(modules - members) == 1, "one module besides the members: the protocol"


def test_a_class_name_means_one_thing_in_the_package() -> None:
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert not {name: where for name, where in places.items() if len(where) > 1}


@every_file
def test_a_name_says_what_it_holds(path: Path) -> None:
    names = {n.id for n in nodes(path) if isinstance(n, ast.Name)}
    names |= {n.attr for n in nodes(path) if isinstance(n, ast.Attribute)}
    names |= {n.arg for n in nodes(path) if isinstance(n, ast.arg)}
    names |= {n.name for n in nodes(path) if isinstance(n, ast.ClassDef | Function)}
    assert not {name for name in names if name.strip("_").lower() in PARTICIPLES}
