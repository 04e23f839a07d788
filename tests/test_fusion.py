"""Fused graphs: what becomes one node and what may not, and the numbers of both."""

from collections import Counter

import numpy as np
import pytest

from mucudnn.backends.cpu.kernels import bind as bind_cpu
from mucudnn.backends.cpu.threads import Workers
from mucudnn.backends.cuda.kernels import bind
from mucudnn.ir.builder import GraphBuilder
from mucudnn.models import get_model
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.fusion import fuse_elementwise
from mucudnn.passes.graph.inplace import in_place
from mucudnn.passes.graph.precision import to_mixed_precision
from tests.cuda_emulator import COMPILER, Emulator
from tests.graphs import split_batch
from tests.mirror_cases import Case, compute
from tests.model_cases import furthest, narrow_model, random_feeds
from tests.test_split import computed
from tests.training_cases import examples, trainer, weights

FUSED = {"batch_norm_relu", "batch_norm_add_relu", "bias_relu", "add_relu"}


def ops(graph):
    return Counter(node.op for node in graph.nodes)


def one(write):
    """A graph of one tensor (4, 3, 5, 5), which `write` makes the results from."""
    g = GraphBuilder()
    x = g.input("x", (4, 3, 5, 5))
    results = write(g, x)
    return g.build(*(results if isinstance(results, tuple) else (results,)))


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda g, x: g.relu(g.batch_norm(x)), {"batch_norm_relu": 1}),
        (lambda g, x: g.relu(g.add(g.batch_norm(x), x)), {"batch_norm_add_relu": 1}),
        (lambda g, x: g.relu(g.add(x, g.batch_norm(x))), {"batch_norm_add_relu": 1}),
        (
            lambda g, x: g.relu(
                g.add(g.batch_norm(x, name="a"), g.batch_norm(x, name="b"))
            ),
            {"batch_norm": 1, "batch_norm_add_relu": 1},
        ),
        (lambda g, x: g.relu(g.bias(x)), {"bias_relu": 1}),
        (lambda g, x: g.relu(g.add(x, g.tanh(x))), {"tanh": 1, "add_relu": 1}),
        (lambda g, x: g.relu(g.add(x, x)), {"add_relu": 1}),
        (
            lambda g, x: g.relu(g.add(y := g.batch_norm(x), y)),
            {"batch_norm": 1, "add_relu": 1},
        ),
    ],
)
def test_what_becomes_one_node(write, expected):
    assert ops(fuse_elementwise(one(write))) == expected


def read_twice(g, x):
    y = g.batch_norm(x)
    return g.add(g.relu(y), y)


def returned(g, x):
    y = g.bias(x)
    return g.relu(y), y


def kept_sum(g, x):
    total = g.add(g.batch_norm(x), x)
    return g.relu(total), g.tanh(total)


def statistics_between(g, x):
    """Another layer reads and moves the running statistics before the ReLU does."""
    y = g.batch_norm(x)
    norm = g.nodes[-1]
    shape, small = g.shape(x), ((3,), "float32")
    outputs = (("mean", *small), ("inv_std", *small))
    other = g.append(
        "batch_norm", norm.inputs, shape, outputs, mutates=norm.mutates, **norm.attrs
    )
    return g.relu(y), other


@pytest.mark.parametrize("write", [read_twice, returned, kept_sum, statistics_between])
def test_what_others_read_stays(write):
    graph = one(write)
    assert fuse_elementwise(graph) is graph


def test_tensors_between_are_gone_and_names_are_the_first_nodes():
    graph = one(lambda g, x: g.relu(g.add(g.batch_norm(x), x)))
    (node,) = fuse_elementwise(graph).nodes
    norm, add, relu = graph.nodes
    assert node.name == norm.name
    assert node.outputs == (relu.outputs[0], *norm.outputs[1:])
    assert node.mutates == norm.mutates
    gone = set(graph.tensors) - set(fuse_elementwise(graph).tensors)
    assert gone == {norm.outputs[0], add.outputs[0]}


MODELS = {
    "resnet20": {"image": 8},
    "resnet18": {"image": 32},
    "unet2d_bn": {"image": 16},
    "unet2d": {"image": 16},
}


def model(name, dtype="float64"):
    return narrow_model(name)(4, classes=3, dtype=dtype, **MODELS[name])


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "resnet20" else pytest.mark.slow)
        for name in MODELS
    ],
)
def test_networks_compute_what_they_did(name):
    forward = model(name)
    whole, short = training_graph(forward), training_graph(fuse_elementwise(forward))
    assert ops(short)["relu"] == ops(short)["relu_grad"] == 0
    assert set(ops(short)) & FUSED
    given = random_feeds(whole)
    expected = computed(whole, given)
    for graph in (short, in_place(short)):
        error, where = furthest(computed(graph, given), expected)
        assert error <= 1e-11, where
    assert set(short.gradients) == set(whole.gradients)


@pytest.mark.parametrize("parts", [2, 3])
def test_they_fall_into_pieces_where_the_batch_is_cut(parts):
    """Or are whole where only their gradients are cut."""
    forward = model("resnet20")
    given = random_feeds(forward)
    expected = computed(training_graph(forward), given)
    short = training_graph(fuse_elementwise(forward))
    cut = split_batch(short, parts)
    assert not FUSED & {op for op in ops(cut) if op.startswith("batch_norm")}
    backward = split_batch(short, lambda n: parts if n.op.endswith("_grad") else 1)
    for graph in (cut, backward):
        error, where = furthest(computed(graph, given), expected)
        assert error <= 1e-11, where


def test_a_biased_layer_of_narrow_activations_is_fused_as_well():
    graph = training_graph(
        fuse_elementwise(to_mixed_precision(get_model("vgg16")(2, image=32), "float16"))
    )
    nodes = [node for node in graph.nodes if node.op == "bias_relu_grad"]
    assert len(nodes) == 15
    for node in nodes:
        types = [graph.tensors[name].dtype for name in node.tensors]
        assert types == ["float16"] * 3 + ["float32"]


def near_zero(dtype, count=4):
    """Channels most of whose normalised elements are a rounding away from zero."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((count, 6, 4, 41)).astype(dtype)
    x += np.round(x, 1)
    mean, inv_std = (rng.random(6).astype(dtype) + 0.5 for _ in range(2))
    gamma = rng.standard_normal(6).astype(dtype)
    return x, gamma, mean, inv_std


def masks(kernels, dtype):
    """What the forward pass lets through, and the gradient: both by one backend."""
    x, gamma, _, _ = near_zero(dtype)
    C = gamma.shape
    small = [(C, dtype)] * 2
    running = [np.zeros(C, dtype), np.ones(C, dtype)]
    attrs = {"eps": 1e-5, "momentum": 0.1, "update": True}
    for row in range(4):  # shifts that put one row's elements to zero
        beta = np.zeros(C, dtype)
        case = Case(
            "batch_norm_relu",
            [x, gamma, beta, *running],
            [(x.shape, dtype), *small],
            attrs,
        )
        _, mean, inv_std, *_ = compute(kernels[case.op], case)
        factor = (gamma.astype("f8") * inv_std).astype(dtype)
        beta = -(x[0, :, row, 0] - mean) * factor
        case.inputs[2] = beta
        y, *_ = compute(kernels[case.op], case)
        dy = np.ones_like(x)
        inputs = [x, dy, gamma, beta, mean, inv_std]
        grad = Case("batch_norm_relu_grad", inputs, case.outputs)
        _, _, dbeta, *_ = compute(kernels[grad.op], grad)
        yield (y != 0).sum((0, 2, 3)), dbeta


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize(
    "kernels",
    [
        lambda: bind_cpu(Workers(1)),
        pytest.param(
            lambda: bind(Emulator()),
            marks=pytest.mark.skipif(COMPILER is None, reason="needs g++"),
        ),
    ],
)
def test_the_gradient_passes_exactly_where_the_result_is_positive(kernels, dtype):
    for passed, dbeta in masks(kernels(), dtype):
        assert np.array_equal(passed, dbeta)


def test_a_negative_zero_is_no_positive_number():
    x = np.array([-1.0, 0.0, 1.0])[:, None, None] * np.ones((3, 1, 2))
    gamma, beta, mean, inv_std = (np.array([v]) for v in (-1.0, -0.0, 0.0, 1.0))
    inputs = [x, np.ones_like(x), gamma, beta, mean, inv_std]
    outputs = [(x.shape, "f8"), ((1,), "f8"), ((1,), "f8")]
    case = Case("batch_norm_relu_grad", inputs, outputs)
    _, _, dbeta, *_ = compute(bind_cpu(Workers(1))[case.op], case)
    assert dbeta == 2


def test_infinite_gradients_of_what_was_cut_off_are_zero():
    x = np.array([[-1.0], [1.0], [3.0]])[..., None] * np.ones((3, 2, 4))
    y = np.maximum(x, 0)
    dy = np.where(x < 0, np.inf, 1.0)
    kernel = bind_cpu(Workers(1))["bias_relu_grad"]
    dx, db, *_ = compute(
        kernel, Case("bias_relu_grad", [y, dy], [(x.shape, "f8"), ((2,), "f8")])
    )
    assert np.array_equal(dx, (x > 0).astype("f8"))
    assert np.array_equal(db, [8, 8])


def test_training_is_the_same_and_so_are_checkpoints():
    images, labels = examples(8)
    made = [trainer(fuse=fuse) for fuse in (False, True)]
    losses = [[one.step(images, labels).loss for _ in range(5)] for one in made]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    plain, short = (weights(one) for one in made)
    assert list(plain) == list(short)
    for name, array in plain.items():
        np.testing.assert_allclose(short[name], array, rtol=1e-3, atol=1e-5)
    assert ops(made[1].graph)["batch_norm_relu"] == 1
    assert ops(made[0].graph)["relu"] == 1
