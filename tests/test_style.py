"""The mechanical part of the style: budgets and habits that every file of the package keeps."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "shoal"
FILES = sorted(SOURCE.rglob("*.py"))
FILE_LINES, AXIS_LINES, FUNCTION_LINES, METHODS = 300, 120, 40, 12
VAGUE = {"utils", "helpers", "manager", "handler", "base", "common", "misc"}
SPEAKS = {"cli", "ui", "__main__.py"}  # may print
Function = ast.FunctionDef | ast.AsyncFunctionDef

every_file = pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
every_axis_module = pytest.mark.parametrize(
    "path",
    [path for axis in sorted((SOURCE / "axes").iterdir()) for path in sorted(axis.glob("*.py"))],
    ids=lambda p: str(p.relative_to(SOURCE)),
)


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text()))


def length(node: Function) -> int:
    """Lines of a function without its docstring, which may be as long as it is useful."""
    told = node.body[0] if ast.get_docstring(node) else None
    told_lines = (told.end_lineno or 0) - told.lineno + 1 if told else 0
    return (node.end_lineno or node.lineno) - node.lineno + 1 - told_lines


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
def test_a_file_is_one_idea(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= FILE_LINES


@every_file
def test_a_function_fits_on_a_screen(path: Path) -> None:
    long = {n.name: length(n) for n in nodes(path) if isinstance(n, Function)}
    assert not {name: lines for name, lines in long.items() if lines > FUNCTION_LINES}


@every_file
def test_a_class_has_few_methods(path: Path) -> None:
    for node in nodes(path):
        if isinstance(node, ast.ClassDef):
            own = [m.name for m in node.body if isinstance(m, Function) and does(m)]
            assert len(own) <= METHODS, f"{node.name} does {len(own)} things: {own}"


def does(method: Function) -> bool:
    """Whether it is a verb of the class: not private, not a fact, not a protocol of torch's."""
    is_fact = any(isinstance(d, ast.Name) and d.id == "property" for d in method.decorator_list)
    is_torchs = method.name in {"forward", "state_dict", "load_state_dict"}
    return not (method.name.startswith("_") or is_fact or is_torchs)


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
def test_an_axis_file_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= AXIS_LINES


@every_axis_module
def test_an_axis_never_touches_a_process_group(path: Path) -> None:
    assert "torch.distributed" not in path.read_text()


def test_sizes_stay_small_as_a_whole() -> None:
    lines = sorted(len(path.read_text().splitlines()) for path in FILES)
    functions = sorted(length(n) for p in FILES for n in nodes(p) if isinstance(n, Function))
    assert lines[len(lines) // 2] <= 130
    assert functions[len(functions) // 2] <= 10
