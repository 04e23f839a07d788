"""Kernels against PyTorch's operators and optimizers, in both precisions."""

import numpy as np
import pytest
import torch

from tests.kernel_cases import ADAM, DECAYED, normal, run

functional = torch.nn.functional

pytestmark = pytest.mark.torch

PRECISIONS = [("f8", 1e-10), ("f4", 3e-5)]


def check(actual, expected, tolerance):
    expected = expected.detach().numpy()
    scale = max(1.0, np.abs(expected).max())
    assert np.abs(actual - expected).max() <= tolerance * scale


def leaves(*arrays):
    return [torch.from_numpy(a.copy()).requires_grad_() for a in arrays]


@pytest.fixture(params=PRECISIONS, ids=["float64", "float32"])
def precision(request):
    return request.param


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("shape", [(9, 40), (3, 33, 90), (5, 20, 50, 31)])
def test_batch_norm_then_relu(shape, summed, precision):
    dtype, tolerance = precision
    C = shape[1]
    x, dy, term = (normal(*shape, seed=i, dtype=dtype) for i in range(3))
    gamma, beta, mean, var = (normal(C, seed=i, dtype=dtype) for i in range(4))
    var = var**2
    tx, tg, tb, tt = leaves(x, gamma, beta, term)
    tm, tv = torch.from_numpy(mean.copy()), torch.from_numpy(var.copy())
    ty = functional.batch_norm(tx, tm, tv, tg, tb, True, 0.3, 1e-4)
    ty = functional.relu(ty + tt if summed else ty)
    ty.backward(torch.from_numpy(dy))
    attrs = {"eps": 1e-4, "momentum": 0.3, "update": True}
    outputs = [(shape, dtype), ((C,), dtype), ((C,), dtype)]
    inputs = [x, gamma, beta, mean, var]
    if summed:
        y, m, s = run("batch_norm_add_relu", [*inputs, term], outputs, attrs)
        inputs = [x, dy, y, gamma, m, s]
        dterm, *found = run("batch_norm_add_relu_grad", inputs, [outputs[0], *outputs])
        check(dterm, tt.grad, tolerance)
    else:
        y, m, s = run("batch_norm_relu", inputs, outputs, attrs)
        found = run("batch_norm_relu_grad", [x, dy, gamma, beta, m, s], outputs)
    check(y, ty, tolerance)
    check(mean, tm, tolerance)
    check(var, tv, tolerance)
    for ours, theirs in zip(found, (tx, tg, tb), strict=True):
        check(ours, theirs.grad, tolerance)


OPTIMIZERS = {
    "sgd": ({}, 0, lambda p, **k: torch.optim.SGD(p, **k)),
    "momentum": (
        {"momentum": 0.9, "nesterov": False},
        1,
        lambda p, **k: torch.optim.SGD(p, momentum=0.9, **k),
    ),
    "nesterov": (
        {"momentum": 0.9, "nesterov": True},
        1,
        lambda p, **k: torch.optim.SGD(p, momentum=0.9, nesterov=True, **k),
    ),
    "adam": (ADAM, 2, lambda p, **k: torch.optim.Adam(p, betas=(0.9, 0.99), **k)),
    "adamw": (
        ADAM | {"decoupled": True},
        2,
        lambda p, **k: torch.optim.AdamW(p, betas=(0.9, 0.99), **k),
    ),
    "adagrad": ({"eps": 1e-10}, 1, lambda p, **k: torch.optim.Adagrad(p, **k)),
    "rmsprop": (
        {"eps": 1e-8, "alpha": 0.99},
        1,
        lambda p, **k: torch.optim.RMSprop(p, **k),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_five_steps_of_an_optimizer(name, precision):
    dtype, tolerance = precision
    attrs, slots, make = OPTIMIZERS[name]
    w = normal(30, 71, dtype=dtype)
    (leaf,) = leaves(w)
    theirs = make([leaf], lr=0.05, weight_decay=DECAYED["weight_decay"])
    state = [np.zeros_like(w) for _ in range(slots)]
    for step in range(5):
        dw = normal(30, 71, seed=step + 1, dtype=dtype)
        leaf.grad = torch.from_numpy(dw * DECAYED["gradient_scale"])
        theirs.step()
        op = {"nesterov": "momentum", "adamw": "adam"}.get(name, name)
        counter = [np.array(step)] if op == "adam" else []
        lr = np.array(0.05, dtype)
        run(op, [w, dw, lr, *counter, *state], [], DECAYED | attrs)
    check(w, leaf, tolerance)
