"""The tests themselves: each of them can fail."""

import ast
import re
from functools import cache
from pathlib import Path

from tests.commands import python

FOLDER = Path(__file__).parent

RUNS = {
    "test_newcomer.test_what_is_right_works",
    "test_resumption.test_damaged_files_raise_nothing_else",
}
"""What fails by raising: that it runs is all that is claimed."""

ORACLES = {"verify"}
"""Functions that raise where something does not hold."""


@cache
def sources():
    return {
        path.stem: ast.parse(path.read_text("utf-8")) for path in FOLDER.glob("*.py")
    }


def tops(tree):
    return [node for node in tree.body if isinstance(node, ast.FunctionDef)]


def functions(tree):
    """Functions of a module, and methods of its classes."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return [node for body in (tree, *classes) for node in tops(body)]


def calls(node):
    """What is called in a function by a bare name: no method of something."""
    for inner in ast.walk(node):
        match inner:
            case ast.Call(func=ast.Name(name)):
                yield name


@cache
def claims(node):
    """Whether a function itself says what must hold."""
    if any(isinstance(inner, ast.Assert) for inner in ast.walk(node)):
        return True
    for inner in ast.walk(node):
        match inner:
            case ast.Call(func=ast.Attribute(ast.Name("pytest"), attr=name)):
                if name in {"raises", "warns", "fail"}:
                    return True
            case ast.Call(func=ast.Attribute(attr=name)):
                if name.startswith("assert_"):
                    return True
    return False


@cache
def known(module):
    """Functions that a module of the tests can call by their name, and where from."""
    found = {node.name: (module, node) for node in tops(sources()[module])}
    for node in sources()[module].body:
        match node:
            case ast.ImportFrom(module=str(of)) if of.startswith("tests."):
                there = known(of.removeprefix("tests."))
                found |= {a.name: there[a.name] for a in node.names if a.name in there}
    return found


@cache
def helps(module, name):
    """Whether a function claims something, by itself or by what it calls."""
    if name in ORACLES:
        return True
    where, node = known(module).get(name, (None, None))
    return where is not None and (
        claims(node) or any(helps(where, other) for other in {*calls(node)} - {name})
    )


def in_process(node):
    """Whether it runs code elsewhere, whose failure is one here."""
    return any(
        isinstance(inner, ast.keyword)
        and inner.arg == "check"
        and ast.unparse(inner.value) == "True"
        for inner in ast.walk(node)
    )


@cache
def every_test():
    """Module and function of every test."""
    return [
        (module, node)
        for module in sources()
        for node in functions(sources()[module])
        if module.startswith("test_") and node.name.startswith("test_")
    ]


def test_every_test_claims_something():
    empty = {
        f"{module}.{node.name}"
        for module, node in every_test()
        if not claims(node) and not in_process(node)
        if not any(helps(module, name) for name in calls(node))
    }
    assert empty - RUNS == set()
    assert len(every_test()) > 1000


def test_no_test_swallows_an_error():
    """`except X: pass` hides that nothing was looked at."""
    silent = [
        f"{module}.{node.name}:{handler.lineno}"
        for module, node in every_test()
        for handler in ast.walk(node)
        if isinstance(handler, ast.ExceptHandler)
        if isinstance(handler.body[0], ast.Pass)
    ]
    assert silent == []


def test_marks_that_choose_a_target_stand_in_the_files_of_its_tests():
    """`make test-slow` and its like read no other files."""
    helpers = {*FOLDER.glob("*.py")} - {*FOLDER.glob("test_*.py")}
    mark = re.compile(r"mark\.(slow|torch|cudnn|many)\b")
    found = {path.name for path in helpers if mark.search(path.read_text("utf-8"))}
    assert found == {"torch_marks.py"}


def test_what_needs_pytorch_belongs_to_its_target():
    """`make test` runs without PyTorch, and `make test-torch` only what is marked."""
    needs = re.compile(r'importorskip\("torch"|^(?:import|from) torch\b', re.MULTILINE)
    for path in FOLDER.glob("test_*.py"):
        text = path.read_text("utf-8")
        if path.stem != "test_fakecuda" and needs.search(text):
            assert re.search(r"mark\.torch|tests\.torch_marks", text), path.name


def test_files_that_import_pytorch_are_skipped_where_there_is_none():
    code = "import sys, pytest; sys.modules['torch'] = None; pytest.main(sys.argv[1:])"
    file = FOLDER / "test_torch_comparison.py"
    out, _ = python("-c", code, file, "-rs", "-p", "no:cacheprovider")
    assert re.search(r"^SKIPPED \[1\] .*: needs PyTorch$", out, re.MULTILINE)
