"""Each name and form of call that the backend takes from CuPy and the driver is there.

The sources are read, and a chain such as `cupy.cuda.runtime.memcpyAsync(…)` is looked
up in the packages that are installed: it exists, and takes so many arguments of these
names. The stand-ins are held against the packages, too. No GPU or driver is needed.
"""

import ast
import inspect
import re
from pathlib import Path

import numpy as np
import pytest

from tests.cupy_fake import StrictArray, StrictCupy
from tests.vmm_fake import StrictDriver

ROOT = Path(__file__).parent.parent
SOURCES = (
    *sorted((ROOT / "mucudnn" / "backends" / "cuda").rglob("*.py")),
    *(ROOT / "bench" / "gpu" / name for name in ("peers.py", "remember.py")),
)
CUPY, DRIVER = "cupy", "cuda.bindings.driver"
ROOTS = {
    "cupy": CUPY,
    "_cupy": CUPY,
    "_cupy()": CUPY,
    "_runtime": f"{CUPY}.cuda.runtime",
    "runtime": f"{CUPY}.cuda.runtime",
    "driver": DRIVER,
    "_driver": DRIVER,
}
"""What variables and attributes of these names hold, in the sources."""


def chain_of(node):
    """`cupy.cuda.Event` of its expression; None of one that begins elsewhere."""
    names = []
    while isinstance(node, ast.Attribute):
        if node.attr in ROOTS and isinstance(node.value, ast.Name):
            if node.value.id == "self":
                return ".".join([ROOTS[node.attr], *reversed(names)])
        elif node.attr in ROOTS and ast.unparse(node.value).endswith("self"):
            return ".".join([ROOTS[node.attr], *reversed(names)])
        names.append(node.attr)
        node = node.value
    root = ast.unparse(node)
    return ".".join([ROOTS[root], *reversed(names)]) if root in ROOTS else None


def uses():
    """(chain, call or None, where); of a chain that goes on, the whole."""
    for file in SOURCES:
        tree = ast.parse(file.read_text())
        inner, calls = set(), {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                inner.add(id(node.value))
            if isinstance(node, ast.Call):
                calls[id(node.func)] = node
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and id(node) not in inner:
                chain = chain_of(node)
                if chain is not None and "." in chain.removeprefix(DRIVER):
                    yield chain, calls.get(id(node)), f"{file.name}:{node.lineno}"


USES = [use for use in uses() if use[0] != DRIVER]


def found(chain, module, root):
    """What a chain names, below a module or what stands in for it."""
    for name in chain.removeprefix(f"{root}.").split("."):
        module = getattr(module, name)
    return module


def signature(function):
    """Of a function, also of one in C that only its documentation tells of."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        text = (function.__doc__ or "").split("\n")[0]
    told = re.search(r"\((.*)\)", text)
    if told is None:
        return None
    scope = {}
    exec(f"def told({', '.join(map(_parameter, _split(told[1])))}): ...", scope)
    return inspect.signature(scope["told"])


def _split(text):
    """At commas outside brackets."""
    return [one.strip() for one in re.split(r",(?![^\[(]*[\])])", text) if one.strip()]


def _parameter(text):
    """Python's `device=0` and `prop` of `int device=0` and `prop: Optional[Prop]`."""
    name, default, _ = text.partition("=")
    name = name.partition(":")[0].split()[-1]
    return f"{name}=None" if default else name


def refusal(function, call):
    """Why a function does not take so many arguments of these names, if it does not."""
    if any(isinstance(a, ast.Starred) for a in call.args):
        return None  # how many there are is not in the source
    known = signature(function)
    if known is None:
        return None
    try:
        known.bind(*call.args, **{k.arg: k.value for k in call.keywords})
    except TypeError as e:
        return f"{e}: {known}"
    return None


def wrong(root, module):
    """What of a package is not as the sources have it."""
    asked, said = 0, []
    for chain, call, where in USES:
        if not chain.startswith(f"{root}."):
            continue
        asked += 1
        try:
            function = found(chain, module, root)
        except AttributeError as e:
            said.append(f"{where}: {chain}: {e}")
            continue
        if call is not None and (why := refusal(function, call)):
            said.append(f"{where}: {ast.unparse(call)}: {why}")
    assert asked > 10
    return said


@pytest.mark.parametrize("root", [CUPY, DRIVER])
def test_what_the_sources_use_is_there_and_takes_it(root):
    module = pytest.importorskip(root)
    assert wrong(root, module) == []


def public(made):
    return {name for name in dir(made) if not name.startswith("_")}


# What a test asks a stand-in beside what CuPy has.
OWN = {
    "StrictArray": {"host"},
    "_Stream": {"begun", "drain", "end", "put", "queue"},
    "_Event": set(),
}


def strange(ours, real):
    """Parameters of a stand-in's function that the real one does not have."""
    mine, theirs = signature(ours), signature(real)
    if mine is None or theirs is None or {"args", "shape"} & {*theirs.parameters}:
        return set()  # `reshape` and `matmul` take any number of arguments
    return {*mine.parameters} - {*theirs.parameters}


def test_methods_of_the_stand_in_are_cupys():
    """Of arrays, streams and events; and so are their parameters."""
    cupy = pytest.importorskip("cupy")
    fake = StrictCupy()
    for made, real in (
        (StrictArray(np.zeros(1)), cupy.ndarray),
        (fake.cuda.Stream(non_blocking=True), cupy.cuda.Stream),
        (fake.cuda.Event(), cupy.cuda.Event),
    ):
        kind = type(made)
        names = public(made) - OWN[kind.__name__] - {"ptr"}  # ptr is an instance's
        assert names <= public(real), kind
        for name in names & public(kind):
            if inspect.isfunction(getattr(kind, name)):
                extra = strange(getattr(kind, name), getattr(real, name))
                assert extra <= {"self"}, (kind, name)


def test_functions_of_the_stand_in_are_cupys():
    cupy = pytest.importorskip("cupy")
    fake = StrictCupy()
    chains = {chain for chain, call, _ in USES if call and chain.startswith("cupy.")}
    compared = 0
    for chain in sorted(chains):
        try:
            ours = found(chain, fake, CUPY)
        except AttributeError:
            continue  # a test that needs it puts it there
        compared += 1
        assert strange(ours, found(chain, cupy, CUPY)) == set(), chain
    assert compared > 15


def test_the_stand_in_for_the_driver_has_what_the_sources_use():
    assert wrong(DRIVER, StrictDriver()) == []
