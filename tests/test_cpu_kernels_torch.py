"""Kernels against PyTorch's operators and optimizers, in both precisions."""

import numpy as np
import pytest

from tests.kernel_cases import ADAM, DECAYED, normal, run

torch = pytest.importorskip("torch", reason="needs PyTorch")
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


ACTIVATIONS = {
    "relu": ({}, functional.relu),
    "leaky_relu": ({"slope": 0.2}, lambda x: functional.leaky_relu(x, 0.2)),
    "gelu": ({}, functional.gelu),
    "sigmoid": ({}, torch.sigmoid),
    "tanh": ({}, torch.tanh),
}


@pytest.mark.parametrize("op", ACTIVATIONS)
def test_activations(op, precision):
    dtype, tolerance = precision
    attrs, theirs = ACTIVATIONS[op]
    x = normal(3, 17, 50, 61, dtype=dtype) * 3
    dy = normal(*x.shape, seed=1, dtype=dtype)
    (tx,) = leaves(x)
    ty = theirs(tx)
    ty.backward(torch.from_numpy(dy))
    (y,) = run(op, [x], [(x.shape, dtype)], attrs)
    check(y, ty, tolerance)
    known = x if op == "gelu" else y
    (dx,) = run(f"{op}_grad", [known, dy], [(x.shape, dtype)], attrs)
    check(dx, tx.grad, tolerance)


POOLS = [
    ((3, 5, 30), (3,), (2,), (1,)),
    ((3, 5, 31, 28), (3, 2), (2, 2), (1, 0)),
    ((2, 40, 112, 60), (3, 3), (2, 2), (1, 1)),
    ((2, 3, 12, 11, 14), (2, 3, 3), (2, 1, 2), (1, 1, 0)),
    ((4, 7, 7, 6), (7, 6), (7, 6), (0, 0)),
]


@pytest.mark.parametrize(("shape", "kernel", "stride", "padding"), POOLS)
@pytest.mark.parametrize("ceil", [False, True])
def test_pooling(shape, kernel, stride, padding, ceil, precision):
    dtype, tolerance = precision
    rank = len(kernel)
    max_pool = getattr(functional, f"max_pool{rank}d")
    avg_pool = getattr(functional, f"avg_pool{rank}d")
    x = normal(*shape, dtype=dtype)
    (tx,) = leaves(x)
    ty = max_pool(tx, kernel, stride, padding, ceil_mode=ceil)
    windows = zip(ty.shape[2:], shape[2:], kernel, stride, padding, strict=True)
    extra = [max(0, (o - 1) * s + k - n - 2 * p) for o, n, k, s, p in windows]
    attrs = {"kernel": kernel, "stride": stride, "padding": padding, "extra": extra}
    dy = normal(*ty.shape, seed=1, dtype=dtype)
    ty.backward(torch.from_numpy(dy))
    y, index = run("max_pool", [x], [(dy.shape, dtype), (dy.shape, np.uint8)], attrs)
    check(y, ty, 0)
    (dx,) = run("max_pool_grad", [dy, index], [(shape, dtype)], attrs)
    check(dx, tx.grad, tolerance)
    for padded in (False, True):
        (tx,) = leaves(x)
        ty = avg_pool(tx, kernel, stride, padding, ceil, padded)
        ty.backward(torch.from_numpy(dy))
        counted = attrs | {"count_include_pad": padded}
        (y,) = run("avg_pool", [x], [(dy.shape, dtype)], counted)
        check(y, ty, tolerance)
        (dx,) = run("avg_pool_grad", [dy], [(shape, dtype)], counted)
        check(dx, tx.grad, tolerance)


@pytest.mark.parametrize("shape", [(9, 40), (3, 33, 90), (5, 20, 50, 31)])
def test_batch_norm(shape, precision):
    dtype, tolerance = precision
    C = shape[1]
    x, dy = normal(*shape, dtype=dtype), normal(*shape, seed=1, dtype=dtype)
    gamma, beta, mean, var = (normal(C, seed=i, dtype=dtype) ** 2 for i in range(4))
    tx, tg, tb = leaves(x, gamma, beta)
    tm, tv = torch.from_numpy(mean.copy()), torch.from_numpy(var.copy())
    ty = functional.batch_norm(tx, tm, tv, tg, tb, True, 0.3, 1e-4)
    ty.backward(torch.from_numpy(dy))
    attrs = {"eps": 1e-4, "momentum": 0.3, "update": True}
    outputs = [(shape, dtype), ((C,), dtype), ((C,), dtype)]
    y, m, s = run("batch_norm", [x, gamma, beta, mean, var], outputs, attrs)
    check(y, ty, tolerance)
    check(mean, tm, tolerance)
    check(var, tv, tolerance)
    dx, dgamma, dbeta = run("batch_norm_grad", [x, dy, gamma, m, s], outputs)
    check(dx, tx.grad, tolerance)
    check(dgamma, tg.grad, tolerance)
    check(dbeta, tb.grad, tolerance)


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


@pytest.mark.parametrize("per_element", [False, True])
@pytest.mark.parametrize("shape", [(30, 48), (6, 48, 30, 11)])
def test_group_and_layer_norm(shape, per_element, precision):
    dtype, tolerance = precision
    groups = 1 if per_element else 4
    wide = shape[1:] if per_element else shape[1:2]
    x, dy = normal(*shape, dtype=dtype), normal(*shape, seed=1, dtype=dtype)
    gamma, beta = (normal(*wide, seed=i, dtype=dtype) for i in (2, 3))
    tx, tg, tb = leaves(x, gamma, beta)
    if per_element:
        ty = functional.layer_norm(tx, wide, tg, tb, 1e-4)
    else:
        ty = functional.group_norm(tx, groups, tg, tb, 1e-4)
    ty.backward(torch.from_numpy(dy))
    attrs = {"groups": groups, "eps": 1e-4, "per_element": per_element}
    small = ((shape[0], groups), dtype)
    outputs = [(shape, dtype), small, small]
    y, m, s = run("group_norm", [x, gamma, beta], outputs, attrs)
    check(y, ty, tolerance)
    outputs = [(shape, dtype), (wide, dtype), (wide, dtype)]
    grads = run("group_norm_grad", [x, dy, gamma, m, s], outputs, attrs)
    for actual, leaf in zip(grads, (tx, tg, tb), strict=True):
        check(actual, leaf.grad, tolerance)


@pytest.mark.parametrize("size", [3, 4, 5])
def test_lrn(size, precision):
    dtype, tolerance = precision
    x, dy = (
        normal(3, 20, 27, 27, dtype=dtype),
        normal(3, 20, 27, 27, seed=1, dtype=dtype),
    )
    (tx,) = leaves(x)
    ty = functional.local_response_norm(tx, size, 0.2, 0.75, 2.0)
    ty.backward(torch.from_numpy(dy))
    attrs = {"size": size, "alpha": 0.2, "beta": 0.75, "k": 2.0}
    (y,) = run("lrn", [x], [(x.shape, dtype)], attrs)
    check(y, ty, tolerance)
    (dx,) = run("lrn_grad", [x, y, dy], [(x.shape, dtype)], attrs)
    check(dx, tx.grad, tolerance)


@pytest.mark.parametrize(
    ("spatial", "mode"),
    [((7,), "linear"), ((5, 6), "bilinear"), ((3, 2, 4), "trilinear")],
)
@pytest.mark.parametrize("kind", ["nearest", "bilinear"])
def test_upsampling(spatial, mode, kind, precision):
    dtype, tolerance = precision
    scale = (3, 2, 2)[: len(spatial)]
    x = normal(2, 3, *spatial, dtype=dtype)
    (tx,) = leaves(x)
    mode = "nearest" if kind == "nearest" else mode
    corners = {} if kind == "nearest" else {"align_corners": False}
    ty = functional.interpolate(tx, scale_factor=scale, mode=mode, **corners)
    dy = normal(*ty.shape, seed=1, dtype=dtype)
    ty.backward(torch.from_numpy(dy))
    (y,) = run(f"upsample_{kind}", [x], [(dy.shape, dtype)], {"scale": scale})
    check(y, ty, tolerance)
    (dx,) = run(f"upsample_{kind}_grad", [dy], [(x.shape, dtype)], {"scale": scale})
    check(dx, tx.grad, tolerance)


@pytest.mark.parametrize("shape", [(11, 300), (3, 5, 60, 41)])
def test_losses(shape, precision):
    dtype, tolerance = precision
    x, target = normal(*shape, dtype=dtype), normal(*shape, seed=1, dtype=dtype)
    labels = np.random.default_rng(0).integers(0, shape[1], (shape[0], *shape[2:]))
    (tx,) = leaves(x)
    loss = functional.cross_entropy(tx, torch.from_numpy(labels))
    loss.backward()
    outputs = [((), dtype), (shape, dtype)]
    ours, p = run("softmax_cross_entropy", [x, labels], outputs)
    check(ours, loss, tolerance)
    inputs = [p, labels, np.ones((), dtype)]
    (dx,) = run("softmax_cross_entropy_grad", inputs, [(shape, dtype)])
    check(dx * labels.size, tx.grad * labels.size, tolerance)
    (tx,) = leaves(x)
    loss = functional.mse_loss(tx, torch.from_numpy(target))
    loss.backward()
    (ours,) = run("mean_squared_error", [x, target], [((), dtype)])
    check(ours, loss, tolerance)
    inputs = [x, target, np.ones((), dtype)]
    (dx,) = run("mean_squared_error_grad", inputs, [(shape, dtype)])
    check(dx * x.size, tx.grad * x.size, tolerance)


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
