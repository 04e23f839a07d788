"""Networks, their training and their kernels against PyTorch.

The graphs of some networks and their steps equal modules written independently; and our
kernels compute what PyTorch's and its autograd do. Then come the
gradients of every operation.
"""

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch.nn import functional

from mucudnn import Tuner
from mucudnn.ir.builder import GraphBuilder
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.initializers import Constant
from mucudnn.ir.optimizers import Momentum
from mucudnn.ir.tensor import Role, TensorSpec
from mucudnn.models import IMAGE, LABEL
from mucudnn.passes.graph.autodiff import RULES, training_graph
from mucudnn.passes.graph.fusion import fuse_elementwise
from mucudnn.passes.graph.layouts import channels_last_nodes, with_channels_last
from mucudnn.runtime.training.trainer import Trainer
from mucudnn.runtime.tuning.timing import StoppingRule
from tests import numpy_runner, torch_models, torch_ops
from tests.model_cases import CASES, Case, furthest, random_feeds
from tests.one_algorithm import one_algorithm

pytestmark = pytest.mark.torch

LIKE_OTHERS = (
    "googlenet_plain",
    *(f"resnet{depth}" for depth in (32, 34, 44, 56, 101, 110, 152)),
    "unet3d_plain",
    *("vgg19", "vgg116", "vgg216", "vgg316", "vgg416"),
)
"""Not trained here: others have their layers, fewer times."""

DISTINCT = [case for case in CASES if case.name not in LIKE_OTHERS]

SINGLE = ("alexnet", "densenet40", "googlenet", "resnet18", "unet2d_bn", "unet3d")
"""Trained in single precision: every layer that there is."""

RATE = 0.01

distinct = pytest.mark.parametrize("case", DISTINCT, ids=str)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Of PyTorch: on small images its threads mostly wait for each other."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


def as_torch(feeds):
    return {
        name: torch.from_numpy(array.copy() if "running" in name else array)
        for name, array in feeds.items()
    }


def by_autograd(graph: Graph, parameters, feeds, *how):
    """Values of the forward graph, and gradients of its loss."""
    values = as_torch(feeds)
    for name in parameters:
        values[name].requires_grad_()
    values = torch_ops.execute(graph, values, *how)
    loss = values[graph.outputs[0]]
    wrt = [values[name] for name in parameters]
    grads = torch.autograd.grad(loss, wrt)
    found = {name: g.numpy() for name, g in zip(parameters, grads, strict=True)}
    return values, found


independent = pytest.mark.parametrize(
    ("module", "case", "classes"),
    [
        (torch_models.ResNet18, Case("resnet18", 64), 11),
        (torch_models.DenseNet121, Case("densenet121", 64), 11),
        (torch_models.UNet2d, Case("unet2d_bn", 32, 2), 3),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)


def with_parameters(net, graph: Graph, values):
    """Return a module in double precision with the parameters of a graph."""
    net = net.double()
    names = [spec.name for spec in graph.with_role(Role.PARAMETER)]
    with torch.no_grad():
        for parameter, name in zip(net.parameters(), names, strict=True):
            assert parameter.shape == values[name].shape, name
            parameter.copy_(torch.from_numpy(np.array(values[name])))
    return net, names


@independent
def test_graphs_equal_modules_written_independently(module, case, classes):
    graph = case.graph(classes=classes)
    trained = training_graph(graph)
    feeds = random_feeds(graph)
    net, names = with_parameters(module(classes), graph, feeds)
    label = torch.from_numpy(feeds[LABEL])
    loss = functional.cross_entropy(net(torch.from_numpy(feeds[IMAGE])), label)
    loss.backward()
    with torch.no_grad():
        values = torch_ops.execute(trained, as_torch(feeds))
    assert float(values[graph.outputs[0]]) == pytest.approx(float(loss.detach()))
    found = {name: values[g].numpy() for name, g in trained.gradients.items()}
    expected = {
        name: parameter.grad.numpy()
        for name, parameter in zip(names, net.parameters(), strict=True)
    }
    error, where = furthest(found, expected)
    assert error < 1e-5, where


@independent
def test_steps_follow_pytorch(module, case, classes):
    graph = replace(case, batch=4).graph(classes=classes)
    backend = "cpu" if case.name == "resnet18" else one_algorithm("GEMM")
    # Which algorithm is the fastest is no matter here: deep networks have only one.
    once = StoppingRule(min_samples=1, max_samples=1)
    options = {"batch_policy": "undivided", "validate": False, "rule": once}
    trainer = Trainer(
        graph,
        tuner=Tuner(backend=backend, **options),
        optimizer=Momentum(learning_rate=RATE, weight_decay=0.0),
    )
    net, _ = with_parameters(module(classes), graph, trainer.state)
    descent = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9)
    rng = np.random.default_rng(0)
    for step in range(4):
        images = rng.standard_normal(graph.tensors[IMAGE].shape)
        labels = rng.integers(0, classes, graph.tensors[LABEL].shape)
        found = trainer.step(images, labels)
        descent.zero_grad()
        said = net(torch.from_numpy(images))
        loss = functional.cross_entropy(said, torch.from_numpy(labels))
        loss.backward()
        descent.step()
        assert found.loss == pytest.approx(loss.item(), rel=1e-4), step


def masks_of(backend):
    """The masks that a backend's own kernel draws: what dropout makes of ones."""

    def masks(shape, attrs, step):
        ones, kept = np.ones(shape), np.empty(shape)
        backend.kernels["dropout"].run([ones, np.array(step)], [kept], attrs, None)
        return torch.from_numpy((kept > 0).astype(float))

    return masks


def in_double(feeds):
    return {
        name: array.astype(float) if array.dtype.kind == "f" else array
        for name, array in feeds.items()
    }


def own(feeds):
    """State of its own for a run that changes it."""
    return {n: a.copy() if "running" in n else a for n, a in feeds.items()}


@distinct
def test_kernels_train_as_pytorch_does(case: Case, cpu):
    check_kernels(case, cpu, "float64", 1e-5)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in SINGLE], ids=str
)
def test_kernels_train_in_single_precision(case: Case, cpu):
    check_kernels(case, cpu, "float32", 1e-3)


def check_kernels(case: Case, cpu, dtype: str, tolerance: float) -> None:
    """Loss, every gradient and running statistics, against double precision."""
    graph = case.graph(dtype=dtype)
    trained = training_graph(graph)
    feeds = random_feeds(graph)
    values = numpy_runner.execute(cpu, trained, own(feeds))
    decided = as_torch(values) if dtype == "float32" else {}
    expected_values, expected = by_autograd(
        graph, trained.gradients, in_double(feeds), masks_of(cpu), decided
    )
    loss = graph.outputs[0]
    assert float(values[loss]) == pytest.approx(
        float(expected_values[loss].detach()), rel=tolerance
    )
    found = {name: values[g] for name, g in trained.gradients.items()}
    error, where = furthest(found, expected)
    assert error < tolerance, where
    for spec in graph.with_role(Role.STATE):
        np.testing.assert_allclose(
            values[spec.name],
            expected_values[spec.name],
            rtol=tolerance,
            atol=tolerance,
            err_msg=spec.name,
        )


@distinct
def test_kernels_answer_as_pytorch_does(case: Case, cpu):
    """Out of training: the loss and both counts of right answers."""
    graph = case.graph(training=False)
    feeds = random_feeds(graph)
    values = numpy_runner.execute(cpu, graph, feeds)
    expected = torch_ops.execute(graph, as_torch(feeds))
    for name in graph.outputs:
        assert float(values[name]) == pytest.approx(float(expected[name]), rel=1e-5)


Layer = Callable[[GraphBuilder, str], str]


def both(g: GraphBuilder, x: str) -> str:
    return g.parameter("other", g.shape(x), Constant(0.0))


def shared_weight(g: GraphBuilder, x: str) -> str:
    w = both(g, x)
    return g.add(g.multiply(x, w), g.multiply(g.tanh(x), w))


def fork_of_views(g: GraphBuilder, x: str) -> str:
    flat = g.flatten(x)
    n, f = g.shape(flat)
    turned = g.reshape(flat, (f, n))
    return g.add(g.add(flat, g.scale(g.reshape(turned, (n, f)), 3.0)), g.tanh(flat))


def normed_sum(g: GraphBuilder, x: str) -> str:
    return g.relu(g.add(both(g, x), g.batch_norm(x)))


def pixels(g: GraphBuilder, x: str) -> str:
    n, _, *spatial = g.shape(x)
    return g.softmax_cross_entropy(x, g.input("label", (n, *spatial), "int64"))


LAYERS: dict[str, tuple[tuple[int, ...], Layer]] = {
    "conv1d": ((2, 4, 6), lambda g, x: g.conv(x, 6, 3, padding=1, groups=2)),
    "conv2d": ((2, 2, 6, 5), lambda g, x: g.conv(x, 3, (3, 2), stride=2)),
    "conv3d": ((1, 2, 4, 3, 5), lambda g, x: g.conv(x, 2, 2, dilation=(1, 1, 2))),
    "conv_transpose1d": (
        (2, 4, 5),
        lambda g, x: g.conv_transpose(x, 4, 3, stride=2, padding=1, groups=2),
    ),
    "conv_transpose2d": (
        (2, 3, 3, 4),
        lambda g, x: g.conv_transpose(x, 2, (3, 2), stride=2, output_padding=(1, 0)),
    ),
    "conv_transpose3d": (
        (1, 2, 2, 3, 2),
        lambda g, x: g.conv_transpose(x, 3, 2, stride=2, bias=False),
    ),
    "linear": ((3, 5), lambda g, x: g.linear(x, 4)),
    "max_pool1d": ((2, 2, 9), lambda g, x: g.max_pool(x, 3, 2, 1)),
    "max_pool2d": (
        (1, 2, 6, 7),
        lambda g, x: g.max_pool(x, (3, 2), 2, 1, ceil_mode=True),
    ),
    "max_pool3d": ((1, 2, 4, 4, 5), lambda g, x: g.max_pool(x, 2, (1, 2, 3))),
    "global_max_pool": ((2, 3, 4, 4), lambda g, x: g.global_max_pool(x)),
    "avg_pool1d": ((2, 2, 8), lambda g, x: g.avg_pool(x, 3, 2, ceil_mode=True)),
    "avg_pool2d": (
        (1, 2, 6, 7),
        lambda g, x: g.avg_pool(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
    ),
    "avg_pool3d": ((1, 2, 4, 4, 5), lambda g, x: g.avg_pool(x, 2, 1, 1)),
    "global_avg_pool": ((2, 3, 4, 4), lambda g, x: g.global_avg_pool(x)),
    "batch_norm": ((3, 2, 2, 2), lambda g, x: g.batch_norm(x)),
    "group_norm": ((2, 6, 2, 2), lambda g, x: g.group_norm(x, 3)),
    "layer_norm": ((3, 2, 4), lambda g, x: g.layer_norm(x)),
    "lrn": ((2, 7, 2, 2), lambda g, x: g.lrn(x, alpha=0.5, k=2.0)),
    "lrn_even": ((1, 6, 3), lambda g, x: g.lrn(x, 4, alpha=0.9, beta=0.5)),
    "relu": ((3, 7), lambda g, x: g.relu(x)),
    "leaky_relu": ((3, 7), lambda g, x: g.leaky_relu(x, 0.2)),
    "gelu": ((3, 7), lambda g, x: g.gelu(x)),
    "sigmoid": ((3, 7), lambda g, x: g.sigmoid(x)),
    "tanh": ((3, 7), lambda g, x: g.tanh(x)),
    "dropout": ((3, 7), lambda g, x: g.dropout(x, 0.3)),
    "add": ((3, 4), lambda g, x: g.add(x, g.tanh(both(g, x)))),
    "add_to_itself": ((3, 4), lambda g, x: g.add(x, x)),
    "multiply": ((3, 4), lambda g, x: g.multiply(x, both(g, x))),
    "square": ((3, 4), lambda g, x: g.multiply(x, x)),
    "shared_weight": ((3, 4), shared_weight),
    "scale": ((3, 4), lambda g, x: g.scale(x, -1.5)),
    "cast": ((3, 4), lambda g, x: g.cast(x, "float64")),
    "concat": ((2, 2, 3), lambda g, x: g.concat((x, both(g, x), g.tanh(x)))),
    "slice": ((2, 4, 5), lambda g, x: g.slice(x, (0, 1, 2), (2, 3, 5))),
    "pad": ((2, 2, 3), lambda g, x: g.pad(x, (0, 1, 2), (1, 0, 1))),
    "fork_of_views": ((2, 2, 3), fork_of_views),
    "upsample_nearest": ((1, 2, 2, 3), lambda g, x: g.upsample_nearest(x, (2, 3))),
    "upsample_linear": ((2, 2, 4), lambda g, x: g.upsample_bilinear(x, 3)),
    "upsample_bilinear": ((1, 2, 2, 3), lambda g, x: g.upsample_bilinear(x)),
    "upsample_trilinear": ((1, 1, 2, 2, 3), lambda g, x: g.upsample_bilinear(x)),
    "fused_add_relu": ((3, 4), lambda g, x: g.relu(g.add(x, g.tanh(both(g, x))))),
    "fused_add_relu_of_one": ((3, 4), lambda g, x: g.relu(g.add(x, x))),
    "fused_batch_norm_relu": ((3, 2, 2, 2), lambda g, x: g.relu(g.batch_norm(x))),
    "fused_batch_norm_add_relu": ((3, 2, 2, 2), normed_sum),
    "fused_shortcut": ((4, 2, 3), lambda g, x: g.relu(g.add(g.batch_norm(x), x))),
    "fused_bias_relu": ((3, 2, 3), lambda g, x: g.relu(g.bias(x))),
    "turned": ((2, 3, 2, 4), lambda g, x: g.gelu(x)),
    "softmax_cross_entropy": ((4, 5), pixels),
    "softmax_of_pixels": ((2, 3, 2, 2), pixels),
    "mean_squared_error": ((3, 4), lambda g, x: g.mean_squared_error(x, both(g, x))),
}


def forward(name: str) -> Graph:
    """A layer over a parameter, between a warped input and a loss that is not flat."""
    shape, layer = LAYERS[name]
    g = GraphBuilder(dtype="float64")
    y = layer(g, g.parameter("x", shape, Constant(0.0)))
    if g.shape(y) == ():
        return g.build(y)
    graph = g.build(g.mean_squared_error(y, g.input("target", g.shape(y))))
    if name == "turned":
        return with_channels_last(graph, channels_last_nodes(graph))
    return fuse_elementwise(graph) if name.startswith("fused") else graph


def product(transpose_a: bool, transpose_b: bool) -> Graph:
    """A product of two parameters; layers only use one of its four forms."""
    a_shape = (5, 3) if transpose_a else (3, 5)
    b_shape = (4, 5) if transpose_b else (5, 4)
    specs = (
        TensorSpec("a", a_shape, "float64", Role.PARAMETER),
        TensorSpec("b", b_shape, "float64", Role.PARAMETER),
        TensorSpec("target", (3, 4), "float64", Role.INPUT),
        TensorSpec("y", (3, 4), "float64"),
        TensorSpec("loss", (), "float64"),
    )
    attrs = MappingProxyType({"transpose_a": transpose_a, "transpose_b": transpose_b})
    nodes = (
        Node("y", "matmul", ("a", "b"), ("y",), attrs),
        Node("loss", "mean_squared_error", ("y", "target"), ("loss",)),
    )
    return Graph({spec.name: spec for spec in specs}, nodes, ("loss",))


def numeric(graph: Graph, feeds, name: str, step: float = 1e-5) -> np.ndarray:
    """Central differences of the loss by every element of a parameter."""

    def loss(array: np.ndarray) -> float:
        values = {k: torch.from_numpy(v.copy()) for k, v in feeds.items()}
        values[name] = torch.from_numpy(array)
        return float(torch_ops.execute(graph, values)[graph.outputs[0]])

    gradient = np.zeros_like(feeds[name])
    for i in np.ndindex(gradient.shape):
        moved = np.zeros_like(gradient)
        moved[i] = step
        plus, minus = loss(feeds[name] + moved), loss(feeds[name] - moved)
        gradient[i] = (plus - minus) / (2 * step)
    return gradient


def check(graph: Graph) -> None:
    feeds = random_feeds(graph)
    if "x" in feeds:  # of every size, not only near zero
        feeds["x"] = np.random.default_rng(1).standard_normal(feeds["x"].shape)
    trained = training_graph(graph)
    values = {k: torch.from_numpy(v.copy()) for k, v in feeds.items()}
    values = torch_ops.execute(trained, values)
    assert trained.gradients
    for name, gradient in trained.gradients.items():
        found = values[gradient].numpy()
        expected = numeric(graph, feeds, name)
        assert np.abs(expected).max() > 0, name
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-8, err_msg=name)


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_are_finite_differences(name):
    check(forward(name))


@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("transpose_b", [False, True])
def test_gradients_of_every_product(transpose_a, transpose_b):
    check(product(transpose_a, transpose_b))


def test_a_loss_scale_scales_every_gradient():
    graph = forward("conv2d")
    feeds = {k: torch.from_numpy(v) for k, v in random_feeds(graph).items()}
    plain = training_graph(graph)
    for scaled, more in (
        (training_graph(graph, loss_scale=8.0), {}),
        (training_graph(graph, loss_scale=None), {"loss_scale": torch.tensor(8.0)}),
    ):
        once = torch_ops.execute(plain, feeds)
        often = torch_ops.execute(scaled, feeds | more)
        for name, gradient in plain.gradients.items():
            assert torch.equal(8 * once[gradient], often[scaled.gradients[name]])


def test_every_rule_is_checked_and_every_operation_has_a_formula():
    ops = {node.op for name in LAYERS for node in forward(name).nodes}
    assert ops == set(RULES)
    graphs = (training_graph(forward(name)) for name in LAYERS)
    used = {node.op for graph in graphs for node in graph.nodes}
    assert used - {"dropout"} == torch_ops.OPS.keys() - {"accuracy", "batch_norm_eval"}
