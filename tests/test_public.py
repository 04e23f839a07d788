"""What `import mucudnn` gives, what it costs, and who may import whom."""

import ast
import doctest
import importlib
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import mucudnn

ROOT = Path(mucudnn.__file__).parent
NAMES = [
    alias.asname
    for node in ast.walk(ast.parse((ROOT / "__init__.py").read_text()))
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mucudnn.")
    for alias in node.names
]


def test_importing_it_imports_no_array_library():
    code = (
        "import sys, mucudnn\n"
        "heavy = {'numpy', 'cupy', 'torch', 'pulp', 'rich', 'click', 'threadpoolctl'}\n"
        "print(*sorted(heavy & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == []


def test_the_names_that_others_rely_on():
    assert {
        "AlgoPerf",
        "BenchmarkCache",
        "ConvPlan",
        "ConvProblem",
        "Direction",
        "MucudnnError",
        "PerfTable",
        "Tuner",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_backward_data",
        "conv_backward_filter",
        "explain",
        "get_backend",
        "run_plan",
    } <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_documented(name):
    thing = getattr(mucudnn, name)
    first = (inspect.getdoc(thing) or "").splitlines()[0]
    assert first.endswith(".")
    if inspect.isclass(thing):
        members = [m for n, m in vars(thing).items() if not n.startswith("_")]
        methods = [m for m in members if callable(m) or isinstance(m, property)]
        assert all(inspect.getdoc(method) for method in methods)


@pytest.mark.parametrize("name", NAMES)
def test_a_public_function_is_annotated(name):
    thing = getattr(mucudnn, name)
    if inspect.isfunction(thing):
        signature = inspect.signature(thing)
        assert signature.return_annotation is not signature.empty
        for parameter in signature.parameters.values():
            assert parameter.annotation is not parameter.empty


def test_modules_say_what_they_offer():
    """`__all__` lists nothing that is missing; every module has a docstring."""
    for file in sorted(ROOT.rglob("*.py")):
        parts = file.relative_to(ROOT.parent).with_suffix("").parts
        if parts[-1] == "__main__":
            continue
        module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
        assert module.__doc__, file
        for name in getattr(module, "__all__", ()):
            assert hasattr(module, name), (file, name)


@pytest.mark.parametrize("module", ["ir.builder", "ir.numerics", "optim", "strategies"])
def test_docstrings_show_what_happens(module):
    found = doctest.testmod(importlib.import_module(f"mucudnn.{module}"))
    assert found.attempted
    assert not found.failed


def test_import_contracts(capsys, monkeypatch):
    pytest.importorskip("importlinter", reason="needs import-linter")
    code = (  # in a process of its own: it silences every logger there is
        "import sys; from importlinter.cli import lint_imports; "
        "sys.exit(lint_imports(config_filename=sys.argv[1], no_cache=True))"
    )
    config = Path(__file__).parent.parent / "pyproject.toml"
    done = subprocess.run(
        [sys.executable, "-c", code, str(config)],
        cwd=config.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
