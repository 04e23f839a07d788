"""Steps of our networks and in parts against PyTorch's autograd and optimizers."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from mucudnn import Tuner
from mucudnn.backends import get_backend
from mucudnn.ir.optimizers import Momentum
from mucudnn.ir.tensor import Role
from mucudnn.models import get_model
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.runtime.training.trainer import Trainer
from mucudnn.runtime.tuning.timing import StoppingRule
from tests import numpy_runner, torch_models, torch_ops
from tests.graphs import split_batch
from tests.model_cases import furthest, random_feeds
from tests.one_algorithm import one_algorithm

pytestmark = pytest.mark.torch

STEPS = 4
RATE = 0.01
ONCE = StoppingRule(min_samples=1, max_samples=1)
"""Which algorithm is the fastest is no matter here: the deep networks have only one."""


@pytest.mark.parametrize(
    ("name", "module", "image", "classes"),
    [
        ("resnet18", torch_models.ResNet18, 64, 7),
        ("densenet121", torch_models.DenseNet121, 64, 7),
        ("unet2d_bn", torch_models.UNet2d, 32, 3),
    ],
)
def test_steps_follow_pytorch(name, module, image, classes):
    graph = get_model(name)(4, image=image, classes=classes, dtype="float64")
    backend = "cpu" if name == "resnet18" else one_algorithm("GEMM")
    trainer = Trainer(
        graph,
        tuner=Tuner(
            backend=backend, batch_policy="undivided", validate=False, rule=ONCE
        ),
        optimizer=Momentum(learning_rate=RATE, weight_decay=0.0),
    )
    net = module(classes).double()
    with torch.no_grad():
        names = [spec.name for spec in graph.with_role(Role.PARAMETER)]
        parameters = list(net.parameters())
        assert len(names) == len(parameters)
        for ours, theirs in zip(names, parameters, strict=True):
            theirs.copy_(torch.from_numpy(np.array(trainer.state[ours])))
    descent = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9)
    rng = np.random.default_rng(0)
    shape = graph.tensors["label"].shape
    for step in range(STEPS):
        images = rng.standard_normal(graph.tensors["image"].shape)
        labels = rng.integers(0, classes, shape)
        found = trainer.step(images, labels)
        descent.zero_grad()
        loss = functional.cross_entropy(
            net(torch.from_numpy(images)), torch.from_numpy(labels)
        )
        loss.backward()
        descent.step()
        assert found.loss == pytest.approx(loss.item(), rel=1e-4), step


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
