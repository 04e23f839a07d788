"""Mixed precision: what is narrow, and that training is still the same training."""

from dataclasses import replace

import numpy as np
import pytest

from mucudnn import GraphBuilder, Tuner
from mucudnn.backends import get_backend
from mucudnn.errors import PlanningError
from mucudnn.ir.optimizers import Momentum
from mucudnn.ir.tensor import Role
from mucudnn.models import get_model
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.precision import to_mixed_precision
from mucudnn.passes.graph.updates import with_computed_gradients
from mucudnn.runtime.training.trainer import Trainer
from tests.model_cases import random_feeds
from tests.training_cases import tuner_of

NARROW = ("float16", "bfloat16")
WIDE = ["float32"]


def network(**options):
    return get_model("resnet20")(4, **options)


@pytest.mark.parametrize("dtype", NARROW)
def test_activations_are_narrow_and_nothing_else(dtype):
    graph = training_graph(to_mixed_precision(network(), dtype), loss_scale=256.0)
    for node in graph.nodes:
        types = [graph.tensors[t].dtype for t in node.inputs]
        results = [graph.tensors[t].dtype for t in node.outputs]
        if node.op in ("conv", "matmul", "relu", "relu_grad", "add", "avg_pool"):
            assert {*types, *results} == {dtype}, node.name
        elif node.op == "batch_norm":
            assert (types, results) == ([dtype, *WIDE * 4], [dtype, *WIDE * 2])
        elif node.op == "batch_norm_grad":
            assert (types, results) == ([dtype] * 2 + WIDE * 3, [dtype, *WIDE * 2])
        elif node.op == "softmax_cross_entropy":
            assert (types, results) == ([dtype, "int64"], WIDE * 2)
        elif node.op == "softmax_cross_entropy_grad":
            assert (types, results) == ([*WIDE, "int64", *WIDE], [dtype])
    for spec in graph.with_role(Role.PARAMETER):
        assert spec.dtype == "float32"
        assert graph.tensors[graph.gradients[spec.name]].dtype == "float32"


def test_casts_are_few():
    """Weights to the narrow type, the images, what the loss reads; and back."""
    graph = training_graph(to_mixed_precision(network(), "bfloat16"))
    read = {node.inputs[0] for node in graph.nodes if node.op == "cast"}
    sizes = [graph.tensors[name].nbytes for name in read]
    weights = [s.nbytes for s in graph.with_role(Role.PARAMETER) if len(s.shape) > 1]
    assert sum(sizes) < 1.6 * sum(weights)


def test_what_a_graph_returns_keeps_its_type():
    g = GraphBuilder()
    x = g.input("x", (2, 3, 8, 8))
    y = g.relu(g.conv(x, 4, 3))
    z = g.max_pool(g.reshape(y, (2, 4, 36)), 2)
    graph = to_mixed_precision(g.build(y, z), "bfloat16")
    assert [graph.tensors[name].dtype for name in (y, z)] == WIDE * 2
    relu = graph.tensors[f"{y}:bfloat16"]
    assert relu.dtype == "bfloat16"
    (view,) = (n for n in graph.nodes if n.op == "reshape")
    assert graph.tensors[view.outputs[0]].alias == view.inputs[0] == relu.name


def test_other_types_are_refused():
    with pytest.raises(ValueError, match="float16, bfloat16"):
        to_mixed_precision(network(), "float64")


@pytest.mark.slow
def test_the_loss_scale_changes_no_step():
    labels = np.arange(4)
    images = np.random.default_rng(0).standard_normal((4, 3, 32, 32))
    weights = []
    for scale in (1.0, 1024.0):
        trainer = Trainer(
            network(dtype="float64"),
            tuner=tuner_of(),
            optimizer=Momentum(learning_rate=0.1),
            loss_scale=scale,
        )
        for _ in range(2):
            trainer.step(images, labels)
        weights.append(trainer.state.save())
    for name, value in weights[0].items():
        np.testing.assert_allclose(weights[1][name], value, rtol=1e-9, atol=1e-12)


def test_a_backend_without_the_type_says_so():
    with pytest.raises(PlanningError, match="float16"):
        Trainer(
            network(),
            tuner=Tuner(batch_policy="undivided"),
            optimizer=Momentum(learning_rate=0.1),
            precision="float16",
        )


def test_a_backend_with_it_runs():
    trainer = Trainer(
        network(),
        tuner=Tuner(backend=get_backend("null")),
        optimizer=Momentum(learning_rate=0.1),
        precision="float16",
    )
    images = np.zeros((4, 3, 32, 32), "f4")
    assert trainer.step(images, np.zeros(4, "i8")).images == 4


@pytest.mark.torch
def test_narrow_gradients_are_near_the_wide_ones():
    torch = pytest.importorskip("torch")
    from tests import torch_ops

    wide = network()
    feeds = random_feeds(wide)
    found = []
    for forward in (wide, to_mixed_precision(wide, "bfloat16")):
        graph = training_graph(forward)
        values = {name: torch.from_numpy(np.array(v)) for name, v in feeds.items()}
        with torch.no_grad():
            done = torch_ops.execute(graph, values)
        found.append({n: done[g].double() for n, g in graph.gradients.items()})
    for name, expected in found[0].items():
        error = (found[1][name] - expected).norm() / expected.norm()
        assert error < 0.25, name


def test_updates_read_gradients_as_they_were_computed():
    """Weights of products get narrow ones, uncast; what is returned or shared stays."""
    before = training_graph(to_mixed_precision(network(), "float16"))
    graph = with_computed_gradients(before)
    changed = {w for w, g in graph.gradients.items() if g != before.gradients[w]}
    products = {s.name for s in graph.with_role(Role.PARAMETER) if len(s.shape) > 1}
    assert changed == products
    for w, gradient in graph.gradients.items():
        assert graph.tensors[gradient].dtype == ("float16" if w in changed else WIDE[0])
        assert graph.tensors[gradient].shape == graph.tensors[w].shape
    assert len(before.nodes) - len(graph.nodes) == len(changed)
    kept = with_computed_gradients(
        replace(before, outputs=(*before.outputs, *before.gradients.values()))
    )
    assert kept.gradients == before.gradients
    plain = training_graph(network())
    assert with_computed_gradients(plain).nodes == plain.nodes
