"""Which neighbouring tasks are launched together, and which stay apart."""

import pytest

from mucudnn.backends.base import Kernel
from mucudnn.ir.graph import Graph, Phase
from mucudnn.ir.operations import make_node
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.runtime.executor.tasks import Task, batch_launches, batchable


@pytest.fixture
def ran():
    """What was called: a name, or the names that were one launch."""
    return []


@pytest.fixture
def kernels(ran):
    def joining(op, flags=()):
        def together(calls):
            names = tuple(attrs["name"] for _, _, attrs, _ in calls)
            return lambda: ran.append(names)

        return Kernel(lambda *_: None, run_batched=together, flags=flags)

    return {
        "momentum": joining("momentum"),
        "sgd": joining("sgd"),
        "find_overflow": joining("find_overflow", flags=(1,)),
        "fill": Kernel(lambda *_: None),
    }


def tasks(ran, kernels, *nodes):
    """Tasks of (operation, inputs, those that it writes); "copy" is one of a copy."""
    names = {t for _, inputs, _ in nodes for t in inputs}
    tensors = {t: TensorSpec(t, (2,), role=Role.STATE) for t in names}
    for i, (op, inputs, mutates) in enumerate(nodes):
        name = f"{op}{i}"

        def call(name=name):
            ran.append(name)

        if op == "copy":
            yield Task(name, call, waits_for=0)
            continue
        kernel = kernels[op]
        node = make_node(
            tensors, name, op, inputs, (), {"name": name}, Phase.UPDATE, mutates
        )
        graph = Graph(tensors, (node,), ())
        arguments = list(inputs), [], node.attrs, None
        joins = batchable(graph, node, kernel, arguments)
        yield Task(name, call, name, batchable=joins)


def update(op, i):
    w, dw, m = f"w{i}", f"dw{i}", f"m{i}"
    return op, (w, dw, "lr", m), (w, m)


CASES = {
    "neighbours": (
        [update("momentum", i) for i in range(3)],
        [("momentum0", "momentum1", "momentum2")],
    ),
    "another operation": (
        [update("momentum", 0), update("momentum", 1), update("sgd", 2)],
        [("momentum0", "momentum1"), "sgd2"],
    ),
    "a wait between": (
        [update("momentum", 0), ("copy", (), ()), update("momentum", 1)],
        ["momentum0", "copy1", "momentum2"],
    ),
    "no kernel for several": (
        [("fill", ("w0",), ("w0",)), ("fill", ("w1",), ("w1",))],
        ["fill0", "fill1"],
    ),
    "one weight twice": (
        [update("momentum", 0), update("momentum", 0), update("momentum", 1)],
        ["momentum0", ("momentum1", "momentum2")],
    ),
    "one reads what another writes": (
        [update("momentum", 0), ("momentum", ("w1", "w0", "lr", "m1"), ("w1", "m1"))],
        ["momentum0", "momentum1"],
    ),
    "one writes what another reads": (
        [update("momentum", 0), ("momentum", ("dw0", "x", "lr", "m1"), ("dw0", "m1"))],
        ["momentum0", "momentum1"],
    ),
    "flags are written alike": (
        [("find_overflow", (f"g{i}", "counts"), ("counts",)) for i in range(2)],
        [("find_overflow0", "find_overflow1")],
    ),
    "what flags stand for is read": (
        [
            ("find_overflow", ("g0", "counts"), ("counts",)),
            ("sgd", ("w0", "g0", "lr", "counts"), ("w0",)),
        ],
        ["find_overflow0", "sgd1"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_launched_together(name, ran, kernels):
    nodes, expected = CASES[name]
    for call in batch_launches(tasks(ran, kernels, *nodes)):
        call()
    assert ran == expected
