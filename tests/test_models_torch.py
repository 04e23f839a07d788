"""Networks, their gradients and their kernels against PyTorch.

Two steps: the graphs of some networks equal modules written independently; and our
kernels compute what PyTorch's and its autograd do. `test_autodiff_torch.py` has the
gradients of every operation.
"""

import numpy as np
import pytest
import torch
from torch.nn import functional

from mucudnn.ir.graph import Graph
from mucudnn.ir.tensor import Role
from mucudnn.models import IMAGE, LABEL
from mucudnn.passes.graph.autodiff import training_graph
from tests import numpy_runner, torch_models, torch_ops
from tests.model_cases import CASES, Case, furthest, random_feeds

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


@pytest.mark.parametrize(
    ("module", "case", "classes"),
    [
        (torch_models.ResNet18, Case("resnet18", 64), 11),
        (torch_models.DenseNet121, Case("densenet121", 64), 11),
        (torch_models.UNet2d, Case("unet2d_bn", 32, 2), 3),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_graphs_equal_modules_written_independently(module, case, classes):
    graph = case.graph(classes=classes)
    trained = training_graph(graph)
    feeds = random_feeds(graph)
    net = module(classes).double()
    names = [spec.name for spec in graph.with_role(Role.PARAMETER)]
    with torch.no_grad():
        for parameter, name in zip(net.parameters(), names, strict=True):
            assert parameter.shape == feeds[name].shape, name
            parameter.copy_(torch.from_numpy(feeds[name]))
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
