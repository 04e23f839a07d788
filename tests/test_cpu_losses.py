"""Losses, accuracy, and the updates that follow from them."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.kernel_cases import ADAM, DECAYED, PLAIN, close, normal, run, stale


@pytest.mark.parametrize("shape", [(7, 5), (3, 4, 6), (2, 3, 50, 70), (2, 70000)])
def test_softmax_cross_entropy(shape):
    x = normal(*shape) * 5 + 1000
    labels = np.random.default_rng(1).integers(0, shape[1], (shape[0], *shape[2:]))
    loss, p = run("softmax_cross_entropy", [x, labels], [((),), (shape,)])
    weights = np.exp(x - x.max(axis=1, keepdims=True))
    expected = weights / weights.sum(axis=1, keepdims=True)
    close(np.exp(p), expected)
    right = np.take_along_axis(expected, labels[:, None], axis=1)
    close(loss, -np.log(right).mean())
    onehot = np.zeros(shape)
    np.put_along_axis(onehot, labels[:, None], 1, axis=1)
    for target in (stale(shape), p):
        inputs = [p, labels, np.array(3.0)]
        (dx,) = run("softmax_cross_entropy_grad", inputs, [target])
        close(dx, (expected - onehot) * 3 / labels.size)


def test_labels_that_are_no_classes():
    x = normal(3, 4)
    for wrong in (-1, 4):
        with pytest.raises(ValueError, match=f"label {wrong} is not a class"):
            run(
                "softmax_cross_entropy",
                [x, np.array([0, wrong, 1])],
                [((),), ((3, 4),)],
            )


def test_mean_squared_error():
    a, b = normal(3, 4, 50, 60), normal(3, 4, 50, 60, seed=1)
    (loss,) = run("mean_squared_error", [a, b], [((),)])
    close(loss, ((a - b) ** 2).mean())
    (da,) = run("mean_squared_error_grad", [a, b, np.array(0.5)], [(a.shape,)])
    close(da, (a - b) / a.size)


@given(st.integers(1, 6), st.integers(1, 5), st.integers(1, 5), st.data())
def test_accuracy(N, C, S, data):
    values = st.integers(0, 3)
    x = np.array(
        data.draw(st.lists(values, min_size=N * C * S, max_size=N * C * S)), float
    ).reshape(N, C, S)
    labels = np.array(
        data.draw(st.lists(st.integers(0, C - 1), min_size=N * S, max_size=N * S))
    ).reshape(N, S)
    k = data.draw(st.integers(1, C))
    (count,) = run("accuracy", [x, labels], [((), "i8")], {"k": k})
    expected = sum(
        sum(x[n, :, s] > x[n, labels[n, s], s]) < k for n in range(N) for s in range(S)
    )
    assert count == expected


# Updates.


def weights(seed=0):
    return normal(70, 11, seed=seed), normal(70, 11, seed=seed + 1)


@pytest.mark.parametrize("common", [PLAIN, DECAYED])
def test_updates(common):
    w, dw = weights()
    lr = np.array(0.1)
    g = dw * common["gradient_scale"] + w * common["weight_decay"]
    state = np.abs(normal(70, 11, seed=5))

    def after(op, *more, **attrs):
        changed = w.copy()
        arrays = [v.copy() if v.ndim else v for v in more]
        run(op, [changed, dw, lr, *arrays], [], common | attrs)
        return changed, *arrays

    close(after("sgd")[0], w - 0.1 * g)
    m = 0.9 * state + g
    for nesterov, step in ((False, m), (True, g + 0.9 * m)):
        new = after("momentum", state, momentum=0.9, nesterov=nesterov)
        close(new[0], w - 0.1 * step)
        close(new[1], m)
    new = after("adagrad", state, eps=1e-3)
    close(new[1], state + g * g)
    close(new[0], w - 0.1 * g / (np.sqrt(new[1]) + 1e-3))
    new = after("rmsprop", state, eps=1e-3, alpha=0.9)
    close(new[1], 0.9 * state + 0.1 * g * g)
    close(new[0], w - 0.1 * g / (np.sqrt(new[1]) + 1e-3))


@pytest.mark.parametrize("decoupled", [False, True])
def test_adam(decoupled):
    w, dw = weights()
    m, v = normal(70, 11, seed=4), np.abs(normal(70, 11, seed=5))
    attrs = ADAM | DECAYED | {"decoupled": decoupled}
    g = dw * 0.5 + (0 if decoupled else 0.01 * w)
    new_m, new_v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    base = w * (1 - 0.1 * 0.01) if decoupled else w
    unbiased = new_m / (1 - 0.9**4), new_v / (1 - 0.99**4)
    expected = base - 0.1 * unbiased[0] / (np.sqrt(unbiased[1]) + 1e-8)
    run("adam", [w, dw, np.array(0.1), np.array(3), m, v], [], attrs)
    close(w, expected)
    close(m, new_m)
    close(v, new_v)


def test_accumulate():
    total, part = weights()
    expected = total + 0.25 * part
    run("accumulate", [total, part], [], {"factor": 0.25})
    close(total, expected)
