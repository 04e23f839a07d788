"""The backward pass as data: what is computed, what is not, and in whose bytes."""

from collections.abc import Iterator

import pytest

from mucudnn.errors import PlanningError
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.conv import Direction
from mucudnn.ir.graph import Graph, Phase
from mucudnn.ir.initializers import Constant
from mucudnn.ir.tensor import Role
from mucudnn.models import MODELS
from mucudnn.passes.graph.autodiff import LOSS_SCALE, training_graph
from tests.model_cases import CASES


def overwritten(graph: Graph) -> Iterator[tuple[str, str]]:
    """(node that overwrites, tensor lost by it that is still wanted)."""
    last = {
        name: i for i, node in enumerate(graph.nodes) for name in node.inputs
    } | dict.fromkeys((*graph.outputs, *graph.gradients.values()), len(graph.nodes))
    sharing: dict[str, list[str]] = {}
    for name in graph.tensors:
        sharing.setdefault(graph.storages[name], []).append(name)
    written = {name: i for i, n in enumerate(graph.nodes) for name in n.outputs}
    for i, node in enumerate(graph.nodes):
        for out in node.outputs:
            if graph.tensors[out].alias is None or node.op == "reshape":
                continue
            for other in sharing[graph.storages[out]]:
                if written.get(other, -1) < i < last.get(other, -1):
                    yield node.name, other


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_in_place_overwrite_nothing_that_is_wanted(case):
    assert list(overwritten(training_graph(case.graph()))) == []


def test_forks_are_summed_in_place():
    graph = training_graph(MODELS["resnet50"](2))
    sums = [n for n in graph.nodes if n.phase is Phase.BACKWARD and n.op == "add"]
    assert len(sums) == 16
    assert all(graph.tensors[n.outputs[0]].alias == n.inputs[0] for n in sums)


def test_a_sum_of_two_borrowed_gradients_has_bytes_of_its_own():
    g = GraphBuilder()
    x = g.parameter("x", (2, 3), Constant(1.0))
    target = g.input("target", (2, 3))
    graph = training_graph(g.build(g.mean_squared_error(g.add(x, x), target)))
    (total,) = (n for n in graph.nodes if n.name.startswith("add.grad"))
    assert total.inputs[0] == total.inputs[1]
    assert graph.tensors[total.outputs[0]].alias is None
    assert graph.gradients == {"x": total.outputs[0]}


def test_the_forward_graph_stays_as_it_is():
    forward = MODELS["resnet20"](2)
    graph = training_graph(forward)
    count = len(forward.nodes)
    assert graph.nodes[:count] == forward.nodes
    assert all(node.phase is Phase.BACKWARD for node in graph.nodes[count:])
    assert all(graph.tensors[name] == s for name, s in forward.tensors.items())
    new = graph.tensors.keys() - forward.tensors.keys()
    assert {graph.tensors[name].role for name in new} == {Role.GRADIENT}


def test_the_image_gets_no_gradient():
    graph = training_graph(MODELS["vgg16"](2))
    directions = [n.attrs["problem"].direction for n in graph.nodes if n.op == "conv"]
    assert directions.count(Direction.FORWARD) == 13
    assert directions.count(Direction.BACKWARD_FILTER) == 13
    assert directions.count(Direction.BACKWARD_DATA) == 12


def test_what_the_loss_does_not_depend_on_gets_no_gradient():
    g = GraphBuilder()
    x, target = g.input("x", (2, 3)), g.input("target", (2, 4))
    g.linear(x, 4, name="unused")
    y = g.linear(x, 4, name="used")
    graph = training_graph(g.build(g.mean_squared_error(y, target)))
    assert graph.gradients.keys() == {"used/weight", "used/bias"}


def test_another_loss_may_be_named():
    g = GraphBuilder()
    x, target = g.input("x", (2, 3)), g.input("target", (2, 4))
    y = g.linear(x, 4)
    first = g.mean_squared_error(y, target)
    second = g.mean_squared_error(g.relu(y), target)
    graph = training_graph(g.build(first, second), second)
    assert "relu_grad" in {node.op for node in graph.nodes}
    assert graph.outputs == (first, second)


def test_the_gradient_of_the_loss_can_be_an_input():
    graph = training_graph(MODELS["lenet"](2), loss_scale=None)
    assert graph.tensors[LOSS_SCALE].role is Role.INPUT
    assert LOSS_SCALE in graph.inputs
    assert "fill" not in {node.op for node in graph.nodes}
    (fill,) = (n for n in training_graph(MODELS["lenet"](2)).nodes if n.op == "fill")
    assert fill.attrs["value"] == 1.0


@pytest.mark.parametrize("loss", ["conv", "image", "nothing"])
def test_a_loss_is_a_scalar_that_is_computed(loss):
    with pytest.raises(ValueError, match=f"the loss '{loss}' is no scalar"):
        training_graph(MODELS["lenet"](2), loss)


def test_running_statistics_are_not_trained_through():
    with pytest.raises(PlanningError, match=r"'batch_norm_eval' .* has no gradient"):
        training_graph(MODELS["resnet20"](2, training=False))
