"""Gradients of a step in slices against PyTorch's of the whole one."""

import numpy as np
import pytest
import torch

from mucudnn.backends import get_backend
from mucudnn.models import get_model
from mucudnn.passes.graph.autodiff import training_graph
from tests import numpy_runner, torch_ops
from tests.graphs import split_batch
from tests.model_cases import furthest, random_feeds

pytestmark = pytest.mark.torch

CASES = {
    "lenet": {"image": 16},
    "cifar_quick": {"image": 16},
    "resnet20": {"image": 8},
    "densenet40": {"image": 8},
    "vgg16": {"image": 32},
}

SLOW = ("densenet40", "vgg16")


def masks(shape, attrs, step):
    """Those that the whole step's dropout draws."""
    kernel = get_backend("cpu").kernels["dropout"]
    kept = np.empty(tuple(shape))
    kernel.run([np.ones_like(kept), np.array(step)], [kept], attrs, None)
    return torch.from_numpy(kept != 0).double()


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CASES],
)
def test_gradients_are_those_of_autograd(name):
    forward = get_model(name)(5, classes=7, dtype="float64", **CASES[name])
    cut = split_batch(training_graph(forward), 3)
    feeds = random_feeds(forward)
    parameters = list(cut.gradients)
    values = {k: torch.from_numpy(v.copy()) for k, v in feeds.items()}
    for parameter in parameters:
        values[parameter].requires_grad_()
    values = torch_ops.execute(forward, values, masks)
    wrt = [values[parameter] for parameter in parameters]
    grads = torch.autograd.grad(values[forward.outputs[0]], wrt)
    expected = {p: g.numpy() for p, g in zip(parameters, grads, strict=True)}
    own = {k: v.copy() for k, v in feeds.items()}
    found = numpy_runner.execute(get_backend("cpu"), cut, own)
    error, where = furthest({p: found[cut.gradients[p]] for p in parameters}, expected)
    assert error < 1e-10, where
