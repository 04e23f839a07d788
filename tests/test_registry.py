"""Tables of strategies: complete whoever imports them first; a name or a function."""

import ast
import json
import sys

import pytest

from mucudnn import strategies
from mucudnn.passes.registry import Strategies, name_of
from tests.commands import python
from tests.sources import sources

TABLES = {
    ("mucudnn.strategies", "POLICIES", "names"): 14,
    ("mucudnn.strategies", "SCHEDULERS", "names"): 3,
    ("mucudnn.strategies", "PLANNERS", "names"): 5,
    ("mucudnn.strategies", "ORDERS", "names"): 3,
    ("mucudnn.passes.residency.policies", "POLICIES", "table"): 14,
    ("mucudnn.passes.scheduling", "SCHEDULERS", "table"): 3,
    ("mucudnn.passes.microbatch", "PLANNERS", "table"): 5,
    ("mucudnn.passes.microbatch", "BATCH_POLICIES", "table"): 3,
    ("mucudnn.passes.ordering", "ORDERS", "table"): 3,
    ("mucudnn.passes.planning.plan_step", "STEP_PLANNERS", ""): 2,
    ("mucudnn.passes.graph.autodiff", "RULES", ""): None,
    ("mucudnn.ir.operations", "OPERATIONS", ""): None,
    ("mucudnn.passes.graph.precision", "LOSS_SCALES", ""): 2,
    ("mucudnn.backends.cpu.kernels", "KERNELS", ""): None,
    ("mucudnn.ir.optimizers", "OPTIMIZERS", ""): 7,
    ("mucudnn.ir.devices", "DEVICES", ""): None,
    ("mucudnn.ir.numerics", "NUMERICS", ""): 5,
    ("mucudnn.models", "MODELS", ""): 31,
    ("mucudnn.suites", "SUITES", ""): 7,
    ("mucudnn.data", "FORMATS", ""): None,
}
"""Module, table, attribute that holds the names -> how many ship."""

TABULAR = ("Strategies", "MappingProxyType")


def table_literals():
    """Every module-level table of functions in the package: (module, name)."""
    for module, tree in sources().items():
        for node in tree.body:
            match node:
                case ast.Assign([target], ast.Call(ast.Name(made))):
                    pass
                case ast.AnnAssign(target, _, ast.Call(ast.Name(made))):
                    pass
                case _:
                    continue
            if made in TABULAR:
                yield module, target.id


EVERYTHING = """
import importlib, pkgutil, mucudnn
for m in pkgutil.walk_packages(mucudnn.__path__, "mucudnn."):
    guests = ("mucudnn.backends.cuda", "mucudnn.torch.", "mucudnn.__main__")
    if not m.name.startswith(guests):
        importlib.import_module(m.name)
"""
NAMES = """
import importlib, json, os, sys
import click, cloup, numpy, pulp, safetensors.numpy  # of each process; none is ours
exec(sys.argv[2])
sys.stdout.write("[")
for number, (module, table, attribute) in enumerate(json.loads(sys.argv[1])):
    sys.stdout.write(", " * (number > 0))
    sys.stdout.flush()
    if os.fork() == 0:
        found = getattr(importlib.import_module(module), table)
        names = getattr(found, attribute) if attribute else found
        sys.stdout.write(json.dumps(sorted(names)))
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0
sys.stdout.write("]")
"""


def names_in_tables(before=""):
    """Names in every table, each in a process that has imported what `before` does."""
    return json.loads(python("-c", NAMES, json.dumps([*TABLES]), before)[0])


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
def test_a_table_is_complete_when_its_module_is_the_first_to_be_imported():
    every = zip(TABLES, names_in_tables(), names_in_tables(EVERYTHING), strict=True)
    for key, names, whole in every:
        assert names == whole, key
        assert len(names) == (TABLES[key] or len(names)) > 0, key


def test_every_table_of_strategies_is_looked_at():
    known = {(module, table) for module, table, _ in TABLES}
    found = {(m, t) for m, t in table_literals() if not t.startswith("_")}
    strategies_of_package = {
        (m, t) for m, t in found if t.isupper() and m.startswith("mucudnn.passes")
    }
    assert strategies_of_package <= known


def test_no_strategy_of_the_package_registers_itself():
    for module, tree in sources().items():
        if module.endswith(".notebook"):  # by type, of functools.singledispatch
            continue
        for node in ast.walk(tree):
            for decorator in getattr(node, "decorator_list", ()):
                assert ".register" not in ast.unparse(decorator), module


@pytest.fixture
def table():
    def one():
        return 1

    return Strategies("thing", (one,), reserved=("all",))


def test_a_strategy_is_a_name_or_a_function(table):
    def mine():
        return 2

    assert table.resolve("one")() == 1
    assert table.resolve(mine) is mine
    assert table.register(mine) is mine
    assert table.resolve("mine") is mine
    assert table.names == ("one", "mine")
    with pytest.raises(ValueError, match="give it another name"):
        table.register(lambda: 2)
    table.register(lambda: 2, name="two")
    assert table.resolve("two")() == 2


@pytest.mark.parametrize("name", ["one", "all"])
def test_a_name_is_given_once(table, name):
    with pytest.raises(ValueError, match=f"thing '{name}' is already registered"):
        table.register(lambda: 2, name=name)


@pytest.mark.parametrize("bad", [None, 3, ["one"], 2.5])
def test_what_is_no_strategy_is_told_which_there_are(table, bad):
    with pytest.raises(TypeError, match=r"a name or a function, got .*one"):
        table.resolve(bad)
    with pytest.raises(TypeError, match="a thing must be a function"):
        table.register(bad)


def test_an_unknown_name_lists_those_that_are_known():
    for name in strategies.__all__:
        found = getattr(strategies, name)
        with pytest.raises(ValueError, match=r"unknown .* 'x'; choose one of: ") as e:
            found.resolve("x")
        assert all(known in str(e.value) for known in found.table)


def test_what_strategies_are_called():
    import functools

    class Mine:
        def __call__(self):
            return None

    assert name_of("a") == "a"
    assert name_of(name_of) == "name_of"
    assert name_of(functools.partial(name_of)) == "name_of"
    assert name_of(Mine()) == "Mine"
