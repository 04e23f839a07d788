"""Who may import whom: what import-linter's layers in pyproject.toml do not say."""

import ast
import re
from functools import cache
from typing import NamedTuple

import pytest

from tests.sources import ROOT, sources

MAY_USE = {
    "load_balancing": set(),
    "convolution": set(),
    "graph": set(),
    "ordering": {"graph"},
    "residency": {"graph"},
    "scheduling": {"graph"},
    "placement": {"scheduling"},
    "planning": {"graph", "ordering", "residency", "scheduling", "placement"},
}
"""Package of the passes -> those that it may import: the way of a step, in order."""

MEETINGS = {"planning", "estimate"}
"""Where what is known of convolutions and of steps comes together."""

OPEN = {"mucudnn.backends.base", "mucudnn.passes.scheduling.problem"}
"""Interfaces, which anybody may name: who needs `Array` takes `Backend` from there."""


class Import(NamedTuple):
    module: str
    of: str
    names: tuple[str, ...]
    line: int


@cache
def packages():
    """Package -> what its `__init__` says is in it."""
    found = {}
    for path in ROOT.rglob("__init__.py"):
        name = ".".join(path.parent.relative_to(ROOT.parent).parts)
        found[name] = set()
        for node in sources()[name].body:
            match node:
                case ast.Assign(targets=[ast.Name("__all__")], value=ast.List(elts)):
                    found[name] = {e.value for e in elts}
    return found


@cache
def imports():
    """Every import from one module of ours into another."""
    found = []
    for module, tree in sources().items():
        for node in ast.walk(tree):
            match node:
                case ast.ImportFrom(module=str(of)) if of.startswith("mucudnn"):
                    names = tuple(a.name for a in node.names)
                    of_modules = [n for n in names if f"{of}.{n}" in sources()]
                    for name in of_modules:
                        found.append(Import(module, f"{of}.{name}", (), node.lineno))
                    if len(of_modules) < len(names):
                        found.append(Import(module, of, names, node.lineno))
                case ast.Import():
                    for alias in node.names:
                        if alias.name in sources():
                            found.append(Import(module, alias.name, (), node.lineno))
    return found


def room(module):
    """The package or module of the passes that something is in, or nothing."""
    parts = module.split(".")
    return parts[2] if module.startswith("mucudnn.passes.") else None


def told(offenders):
    """A line an offender."""
    return "\n" + "\n".join(sorted(offenders))


def test_packages_of_the_passes_are_used_in_the_order_of_a_step():
    wrong = [
        f"{i.module}:{i.line} imports {i.of}"
        for i in imports()
        if room(i.module) in MAY_USE
        and room(i.of) in MAY_USE.keys() - {room(i.module)} - MAY_USE[room(i.module)]
    ]
    assert not wrong, told(wrong)


def test_every_package_of_the_passes_has_its_row():
    rows = {name.split(".")[2] for name in packages() if name.count(".") == 2}
    here = {room(name) for name in packages() if room(name)}
    assert here <= rows
    assert here <= MAY_USE.keys() <= {room(name) for name in sources()}


def test_convolutions_and_steps_meet_in_planning_and_estimates():
    sides = {"convolution": "convolution", "microbatch": "convolution"}
    sides |= {name: "step" for name in MAY_USE if name not in (*sides, *MEETINGS)}
    touched = {}
    for i in imports():
        if room(i.module) and room(i.of) in sides:
            own = touched.setdefault(i.module, {sides.get(room(i.module))} - {None})
            own.add(sides[room(i.of)])
    both = [
        f"{module} knows convolutions and steps"
        for module, found in touched.items()
        if len(found) == 2 and room(module) not in MEETINGS
    ]
    assert not both, told(both)


def test_what_a_package_offers_is_taken_from_it():
    inside = [
        f"{i.module}:{i.line} takes {name} from {i.of}: {package} offers it"
        for i in imports()
        for package, offered in packages().items()
        if package != "mucudnn" and i.of not in OPEN
        if i.of.startswith(f"{package}.")
        if not f"{i.module}.".startswith(f"{package}.")
        for name in i.names
        if name in offered
    ]
    assert not inside, told(inside)


def test_values_look_up_their_pages_in_one_place():
    """Imports by name, which import-linter does not see."""
    named = {
        module
        for module, tree in sources().items()
        if not module.startswith(("mucudnn.report", "mucudnn.cli"))
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if node.value.startswith(("mucudnn.report", "mucudnn.cli"))
    }
    assert named == {"mucudnn.notebook"}


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_maps_name_files_that_exist(page):
    text = (ROOT.parent / page).read_text(encoding="utf-8")
    folders = [ROOT, ROOT.parent, *(path for path in ROOT.rglob("*") if path.is_dir())]
    named = set(re.findall(r"[\w/]+(?:\.py\b|(?<=\w)/(?=[`\s,;)]))", text))
    lost = {name for name in named if not any((f / name).exists() for f in folders)}
    assert len(named) > 10
    assert not lost, told(lost)


def test_every_package_says_what_it_holds():
    silent = [name for name in packages() if not ast.get_docstring(sources()[name])]
    assert not silent, told(silent)


def test_the_scan_sees_what_is_there():
    """The rules above would pass on nothing at all."""
    pairs = {(i.module, i.of) for i in imports()}
    assert ("mucudnn.runtime.executor.program", "mucudnn.backends.base") in pairs
    assert "Backend" in packages()["mucudnn.backends"]
    assert len(sources()) > 200
