"""What `import mucudnn` gives, what it costs, and who may import whom."""

import ast
import doctest
import importlib
import importlib.metadata
import importlib.util
import inspect
from pathlib import Path

import pytest

import mucudnn
from tests.commands import run_code

ROOT = Path(mucudnn.__file__).parent
MODULES = ("data", "errors", "models", "optim", "strategies")
NAMES = [n for n in mucudnn.__all__ if n not in MODULES and n != "__version__"]


def test_what_a_type_checker_sees_is_what_there_is():
    """The lazy table, `__all__` and the imports for type checkers name the same."""
    tree = ast.parse((ROOT / "__init__.py").read_text())
    seen = {
        (node.module, alias.asname)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and (node.module or "").startswith("mucudnn")
        for alias in node.names
    }
    rooms = {name for module, name in seen if module == "mucudnn"}
    assert {name for module, name in seen if module != "mucudnn"} == set(NAMES)
    assert set(MODULES) <= rooms
    for module, name in seen:
        found = getattr(mucudnn, str(name))
        assert found is getattr(importlib.import_module(str(module)), str(name))
    assert set(mucudnn.__all__) <= set(dir(mucudnn))


def test_the_version_is_the_installed_one():
    assert mucudnn.__version__ == importlib.metadata.version("mucudnn")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'conv4d'"):
        _ = mucudnn.conv4d


def test_examples_import_from_the_public_face_only():
    rooms = (*MODULES, "torch")
    public = {"mucudnn", *(f"mucudnn.{module}" for module in rooms)}
    for file in sorted((ROOT.parent / "examples").glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            match node:
                case ast.ImportFrom(module=str(module)):
                    names = [module]
                case ast.Import():
                    names = [alias.name for alias in node.names]
                case _:
                    continue
            ours = {name for name in names if name.partition(".")[0] == "mucudnn"}
            assert ours <= public, file.name


def test_importing_it_imports_no_array_library():
    code = (
        "import sys, mucudnn\n"
        "heavy = {'numpy', 'cupy', 'torch', 'pulp', 'rich', 'click', 'threadpoolctl'}\n"
        "print(*sorted(heavy & sys.modules.keys()))"
    )
    assert run_code(code).split() == []


def test_the_names_that_others_rely_on():
    assert {
        *("AlgoPerf", "ConvPlan", "ConvProblem", "Direction", "Numerics", "PerfTable"),
        *("conv1d", "conv2d", "conv3d", "conv_backward_data", "conv_backward_filter"),
        *("BenchmarkCache", "Tuner", "explain", "get_backend", "run_plan"),
        *("GraphBuilder", "MemoryBudget", "StepRequest", "Trainer", "fit"),
        *("MucudnnError", "plan_step", "study_memory", "__version__", *MODULES),
    } <= set(mucudnn.__all__)


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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch, at import
def test_modules_say_what_they_offer():
    """`__all__` lists nothing that is missing; every module has a docstring.

    Those of PyTorch's room are looked at where PyTorch is installed.
    """
    no_torch = importlib.util.find_spec("torch") is None
    for file in sorted(ROOT.rglob("*.py")):
        parts = file.relative_to(ROOT.parent).with_suffix("").parts
        if parts[-1] == "__main__" or (no_torch and "torch" in parts):
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
