"""Small cases of every operation, on which backends should agree."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mucudnn.ir.operations import traits_of
from mucudnn.ir.tensor import TensorSpec
from tests.kernel_cases import ADAM, DECAYED, PLAIN, normal, run

GUARD = 64  # elements around an array that nobody should touch


@dataclass
class Case:
    op: str
    inputs: list[Any]
    outputs: list[Any]  # (shape, dtype)
    attrs: dict[str, Any] = field(default_factory=dict)

    @property
    def traits(self):
        made = [TensorSpec("y", *output) for output in self.outputs]
        return traits_of(self.op, _specs(self.inputs), made, self.attrs)


def compute(kernel, case, to=lambda a: a, back=lambda a: a, place=None):
    """What a kernel leaves in outputs and inputs.

    Args:
        kernel: Of any backend.
        case: What to compute.
        to: Takes an array to the backend.
        back: And from it.
        place: Which input the first output overwrites.
    """
    rooms = [_room(a.shape, a.dtype) for a in case.inputs]
    rooms += [_room(*output) for output in case.outputs]
    rooms = [to(room) for room in rooms]
    untouched = [back(room).copy() for room in rooms]
    arrays = [
        _inside(room, shape)
        for room, shape in zip(
            rooms,
            [a.shape for a in case.inputs] + [shape for shape, _ in case.outputs],
            strict=True,
        )
    ]
    count = len(case.inputs)
    inputs, outputs = arrays[:count], arrays[count:]
    for array, values in zip(inputs, case.inputs, strict=True):
        array[...] = to(values)
    if place is not None:
        outputs[0] = inputs[place]
    nbytes = kernel.workspace(_specs(inputs), _specs(outputs), case.attrs)
    scratch = to(np.full(nbytes + GUARD, 0xFF, np.uint8))
    kernel.run(inputs, outputs, case.attrs, scratch[:nbytes] if nbytes else None)
    assert (back(scratch[nbytes:]) == 0xFF).all(), f"{case.op}: workspace overrun"
    for room, before in zip(rooms, untouched, strict=True):
        for edge in (slice(None, GUARD), slice(-GUARD, None)):
            assert back(room[edge]).tobytes() == before[edge].tobytes(), case.op
    changed = [a for i, a in enumerate(inputs) if i != place]
    return [back(a).copy() for a in (*outputs, *changed)]


def _room(shape, dtype):
    """Bits that are NaN in any float, with margins."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) + 2 * GUARD
    return np.full(size * dtype.itemsize, 0xFF, np.uint8).view(dtype)


def _inside(room, shape):
    return room[GUARD : room.size - GUARD].reshape(shape)


def _specs(arrays):
    return [TensorSpec(f"t{i}", a.shape, a.dtype.name) for i, a in enumerate(arrays)]


def cases(dtype):
    """All of them, in one precision."""
    yield from _activations(dtype)
    yield from _copies(dtype)
    yield from _norms(dtype)
    yield from _pools(dtype)
    yield from _losses(dtype)
    yield from _updates(dtype)


def _activations(dtype):
    x, dy = normal(3, 7, 41, dtype=dtype) * 2, normal(3, 7, 41, seed=1, dtype=dtype)
    x[0, 0, :3] = 0, -0.0, 100
    same = [(x.shape, dtype)]
    slope = {"slope": 0.1}
    for op in ("relu", "gelu", "sigmoid", "tanh"):
        yield Case(op, [x], same)
        yield Case(f"{op}_grad", [x, dy], same)
    yield Case("leaky_relu", [x], same, slope)
    yield Case("leaky_relu_grad", [x, dy], same, slope)
    yield Case("add", [x, dy], same)
    yield Case("add_relu", [x, dy], same)
    yield Case("multiply", [x, dy], same)
    yield Case("scale", [x], same, {"factor": -1.5})
    for shape in ((5, 3), (2, 5, 7, 3), (9, 70, 2), (3000, 40), (5000, 16)):
        x = normal(*shape, dtype=dtype)
        yield Case("bias", [x, normal(shape[1], dtype=dtype)], [(shape, dtype)])
        yield Case("bias_grad", [x], [(shape[1:2], dtype)])
        yield Case("bias_relu", [x, normal(shape[1], dtype=dtype)], [(shape, dtype)])
        y = np.maximum(normal(*shape, seed=1, dtype=dtype), 0)
        both = [(shape, dtype), (shape[1:2], dtype)]
        yield Case("bias_relu_grad", [y, x], both)
    for turn_a, turn_b in np.ndindex(2, 2):
        a = normal(*((5, 4) if turn_a else (4, 5)), dtype=dtype)
        b = normal(*((3, 5) if turn_b else (5, 3)), dtype=dtype)
        attrs = {"transpose_a": bool(turn_a), "transpose_b": bool(turn_b)}
        yield Case("matmul", [a, b], [((4, 3), dtype)], attrs)
    for size, p, seed, step in (
        (100, 0.5, 7, 2),
        (5000, 0.1, -3, 0),
        (131072 + 4099, 0.3, 1 << 63, 1 << 40),
        (70, 0.0, 0, 0),
        (70, 1.0, 0, 0),
        (70, 0.999999, 0, 5),
    ):
        x = normal(size, dtype=dtype)
        for start in ({}, {"offset": 65536 * 3 + 37}):
            attrs = {"p": p, "seed": seed} | start
            yield Case("dropout", [x, np.array(step)], [(x.shape, dtype)], attrs)

    x = normal(2, 3, 4, 50, dtype=dtype)
    for places in ((0, 200, 200), (700, 200, 900), (65536 * 2 - 77, 200, 65500)):
        names = dict(zip(("offset", "run", "apart"), places, strict=True))
        attrs = {"p": 0.4, "seed": 3} | names
        yield Case("dropout", [x, np.array(1)], [(x.shape, dtype)], attrs)


def _copies(dtype):
    x = normal(2, 3, 5, 4, dtype=dtype)
    yield Case("identity", [x], [(x.shape, dtype)])
    for other in ("f4", "f8"):
        yield Case("cast", [x], [(x.shape, other)])
    for n, c, *sides in ((2, 3, 5, 4), (3, 40, 33), (1, 70, 2, 9, 7), (2, 1, 5)):
        first, last = (n, c, *sides), (n, *sides, c)
        yield Case("to_channels_last", [normal(*first, dtype=dtype)], [(last, dtype)])
        yield Case("to_channels_first", [normal(*last, dtype=dtype)], [(first, dtype)])
    yield Case("fill", [], [((3, 4), dtype)], {"value": 2.5})
    yield Case("fill", [], [((), dtype)], {"value": 1})
    for axis in range(4):
        shape = np.concatenate([x, x], axis).shape
        yield Case("concat", [x, x * 2], [(shape, dtype)], {"axis": axis})
        rows = {"axis": axis, "parts": ((1, x.shape[axis]), (0, 1)), "before": 2}
        sizes = list(x.shape)
        sizes[axis] += 4
        yield Case("concat", [x, x * 2], [(tuple(sizes), dtype)], rows)
    corner = {"starts": (0, 1, 2, 0), "stops": (2, 3, 4, 4)}
    yield Case("slice", [x], [((2, 2, 2, 4), dtype)], corner)
    margins = {"before": (0, 1, 2, 0), "after": (1, 0, 2, 3)}
    yield Case("pad", [x], [((3, 4, 9, 7), dtype)], margins)
    for spatial, scale in (
        ((5,), (2,)),
        ((1,), (3,)),
        ((4, 3), (2, 3)),
        ((1, 6), (4, 1)),
        ((2, 3, 2), (2, 2, 3)),
        ((3, 16), (2, 2)),
        ((2, 8), (3, 1)),
    ):
        x = normal(2, 3, *spatial, dtype=dtype)
        large = (2, 3, *(n * s for n, s in zip(spatial, scale, strict=True)))
        for kind in ("nearest", "bilinear"):
            attrs = {"scale": scale}
            yield Case(f"upsample_{kind}", [x], [(large, dtype)], attrs)
            dy = normal(*large, seed=1, dtype=dtype)
            yield Case(f"upsample_{kind}_grad", [dy], [(x.shape, dtype)], attrs)


def _norms(dtype):
    for shape in (
        (6, 40),
        (300, 3, 2),
        (4, 3, 7),
        (3, 19, 5, 4),
        (2, 4, 3, 2, 5),
        (9, 2, 40, 30),
        (5000, 16),
    ):
        x, dy = normal(*shape, dtype=dtype) * 3 + 2, normal(*shape, seed=1, dtype=dtype)
        C = shape[1:2]
        gamma, beta, mean, var = (
            normal(*C, seed=i, dtype=dtype) ** 2 + 0.5 for i in range(4)
        )
        inputs, outputs = [x, gamma, beta, mean, var], [(shape, dtype)]
        both = [*outputs, (C, dtype), (C, dtype)]
        for update in (False, True):
            attrs = {"eps": 1e-3, "momentum": 0.2, "update": update}
            yield Case("batch_norm", inputs, both, attrs)
            yield Case("batch_norm_relu", inputs, both, attrs)
            yield Case("batch_norm_add_relu", [*inputs, dy], both, attrs)
        yield Case("batch_norm_eval", inputs, outputs, {"eps": 1e-3})
        yield Case("batch_norm_grad", [x, dy, gamma, mean, var], both)
        inputs = [x, dy, gamma, beta - 3, mean, var]
        yield Case("batch_norm_relu_grad", inputs, both)
        y = np.maximum(normal(*shape, seed=4, dtype=dtype), 0)
        inputs = [x, dy, y, gamma, mean, var]
        yield Case("batch_norm_add_relu_grad", inputs, [*outputs, *both])
        yield from _norm_pieces(x, dy, (gamma, beta, mean, var), dtype)
    yield from _group_norms(dtype)
    for shape in ((3, 6, 5, 4), (2, 9), (2, 3, 7), (2, 17, 9)):
        x, y, dy = (normal(*shape, seed=i, dtype=dtype) for i in range(3))
        for size, beta in ((5, 0.75), (4, 0.5), (3, 0.6), (1, 1.0), (11, 0.75)):
            attrs = {"size": size, "alpha": 0.2, "beta": beta, "k": 1.5}
            yield Case("lrn", [x], [(shape, dtype)], attrs)
            yield Case("lrn_grad", [x, y, dy], [(shape, dtype)], attrs)


def _norm_pieces(x, dy, channels, dtype):
    """Batch normalisation on slices."""
    gamma, beta, mean, var = channels
    small, image = (gamma.shape, dtype), (x.shape, dtype)
    stats = ((3, gamma.size), "f8")
    yield Case("batch_norm_sums", [x], [stats])
    slices = [
        np.stack([np.full(gamma.size, n), mean * n, var * n]).astype("f8")
        for n in (1.0, 5.0, 6.0)
    ]
    for count, update in ((1, False), (3, True)):
        attrs = {"eps": 1e-3, "momentum": 0.2, "update": update}
        inputs = [*slices[:count], mean, var]
        yield Case("batch_norm_merge", inputs, [small, small], attrs)
    yield Case("batch_norm_apply", [x, gamma, beta, mean, var], [image])
    yield Case("batch_norm_grad_sums", [x, dy, mean, var], [small, small])
    inputs = [x, dy, gamma, mean, var, beta, gamma]
    yield Case("batch_norm_grad_apply", inputs, [image], {"count": 3 * x[:, 0].size})


def _group_norms(dtype):
    for shape, groups, per_element in (
        ((3, 8), 4, False),
        ((3, 8, 5, 7), 2, False),
        ((2, 6, 3), 6, False),
        ((5, 30), 1, True),
        ((2, 3, 20, 11), 1, True),
        ((130, 2, 6, 6), 1, False),
        ((200, 3, 2), 1, True),
        ((2, 4, 9, 8), 2, False),
        ((4000, 16), 1, True),
    ):
        x, dy = normal(*shape, dtype=dtype) + 3, normal(*shape, seed=1, dtype=dtype)
        wide = shape[1:] if per_element else shape[1:2]
        gamma, beta = (normal(*wide, seed=i, dtype=dtype) for i in (2, 3))
        attrs = {"groups": groups, "eps": 1e-4, "per_element": per_element}
        small = (shape[0], groups)
        outputs = [(shape, dtype), (small, dtype), (small, dtype)]
        yield Case("group_norm", [x, gamma, beta], outputs, attrs)
        mean, inv = normal(*small, dtype=dtype), normal(*small, dtype=dtype) ** 2
        outputs = [(shape, dtype), (wide, dtype), (wide, dtype)]
        yield Case("group_norm_grad", [x, dy, gamma, mean, inv], outputs, attrs)
        yield Case("group_norm_sums", [x], [((3, *small), "f8")], attrs)
        strips = [
            np.stack([np.full(small, n), mean * n, inv * n]).astype("f8")
            for n in (1.0, 5.0, 6.0)
        ]
        both = [(small, dtype), (small, dtype)]
        yield Case("group_norm_merge", strips[:1], both, attrs)
        yield Case("group_norm_merge", strips, both, attrs)
        yield Case("group_norm_apply", [x, gamma, beta, mean, inv], outputs[:1], attrs)
        sums = [*outputs[1:], ((2, *small), dtype)]
        yield Case("group_norm_grad_sums", [x, dy, gamma, mean, inv], sums, attrs)
        inputs = [x, dy, gamma, mean, inv, np.stack([mean, inv])]
        attrs = {**attrs, "count": 3 * x[0].size // groups}
        yield Case("group_norm_grad_apply", inputs, outputs[:1], attrs)


def _pools(dtype):
    for spatial, kernel, stride, padding, extra in (
        ((9,), (3,), (2,), (1,), (0,)),
        ((7, 8), (3, 2), (2, 2), (1, 0), (0, 0)),
        ((8, 8), (3, 3), (2, 2), (0, 0), (1, 1)),
        ((5, 6), (2, 2), (3, 4), (0, 0), (0, 0)),
        ((3, 5, 4), (2, 3, 2), (1, 2, 2), (1, 1, 0), (0, 0, 0)),
        ((6, 5), (6, 5), (1, 1), (0, 0), (0, 0)),
        ((20, 30), (20, 30), (20, 30), (0, 0), (0, 0)),
    ):
        sizes = zip(spatial, kernel, stride, padding, extra, strict=True)
        out = tuple((n + 2 * p + e - k) // s + 1 for n, k, s, p, e in sizes)
        x = normal(2, 5, *spatial, dtype=dtype)
        dy = normal(2, 5, *out, seed=1, dtype=dtype)
        attrs = {"kernel": kernel, "stride": stride, "padding": padding, "extra": extra}
        image, result = (x.shape, dtype), (dy.shape, dtype)
        if np.prod(kernel) < 256:
            outputs = [result, (dy.shape, "u1")]
            holes = np.where(x > 1, np.nan, np.where(x < 0.5, -np.inf, x))
            for values in (x, np.sign(x), holes):
                yield Case("max_pool", [values.astype(dtype)], outputs, attrs)
            _, chosen = run("max_pool", [np.sign(x)], outputs, attrs)
            yield Case("max_pool_grad", [dy, chosen], [image], attrs)
        for padded in (False, True):
            counted = attrs | {"count_include_pad": padded}
            yield Case("avg_pool", [x], [result], counted)
            yield Case("avg_pool_grad", [dy], [image], counted)


def _losses(dtype):
    rng = np.random.default_rng(0)
    scalar = ((), dtype)
    for shape in (
        *((7, 5), (3, 300), (700, 3), (3, 4, 6), (2, 3, 9, 11)),
        *((3, 2, 7, 13), (2, 1, 40)),
    ):
        x = normal(*shape, dtype=dtype) * 5 + 100
        labels = rng.integers(0, shape[1], (shape[0], *shape[2:]))
        p = np.abs(normal(*shape, dtype=dtype))
        like = (shape, dtype)
        yield Case("softmax_cross_entropy", [x, labels], [scalar, like])
        inputs = [p, labels, np.array(3, dtype)]
        yield Case("softmax_cross_entropy_grad", inputs, [like])
        coarse = np.round(x / 4)
        coarse[0, 0] = np.nan
        for k in (1, 3):
            yield Case("accuracy", [coarse, labels], [((), "i8")], {"k": k})
            yield Case("accuracy", [coarse, labels], [((), dtype)], {"k": k})
        yield Case("mean_squared_error", [x, p], [scalar])
        inputs = [x, p, np.array(0.5, dtype)]
        yield Case("mean_squared_error_grad", inputs, [like])


def _updates(dtype):
    w, dw = normal(70, 11, dtype=dtype), normal(70, 11, seed=1, dtype=dtype)
    lr, step = np.array(0.1, dtype), np.array(3)
    m, v = normal(70, 11, seed=2, dtype=dtype), normal(70, 11, seed=3, dtype=dtype) ** 2
    for common in (PLAIN, DECAYED):
        yield Case("sgd", [w, dw, lr], [], common)
        for nesterov in (False, True):
            attrs = common | {"momentum": 0.9, "nesterov": nesterov}
            yield Case("momentum", [w, dw, lr, m], [], attrs)
        for decoupled in (False, True):
            attrs = ADAM | common | {"decoupled": decoupled}
            yield Case("adam", [w, dw, lr, step, m, v], [], attrs)
        yield Case("adagrad", [w, dw, lr, v], [], common | {"eps": 1e-3})
        attrs = common | {"eps": 1e-3, "alpha": 0.9}
        yield Case("rmsprop", [w, dw, lr, v], [], attrs)
    yield Case("accumulate", [w, dw], [], {"factor": 0.25})
    yield from _scaled_updates(dtype)


def _scaled_updates(dtype):
    """With a loss scale that is state: nothing overflowed, or something did."""
    w, dw, m, v = (normal(70, 11, seed=i, dtype=dtype) for i in range(4))
    lr, scale, step = np.array(0.1, dtype), np.array(8, dtype), np.array(9)
    nesterov = {"momentum": 0.9, "nesterov": True, "scaled": True}
    adam = ADAM | DECAYED | {"scaled": True}
    for overflowed in (0, 1):
        counts = np.array([overflowed, 4, 3])
        inputs = [w, dw, lr, m, scale, counts]
        yield Case("momentum", inputs, [], DECAYED | nesterov)
        inputs = [w, dw, lr, step, m, v**2, scale, counts]
        yield Case("adam", inputs, [], adam)
    for bad in (0, np.inf, -np.inf, np.nan):
        odd = dw.copy()
        odd[-1, -1] = bad
        for before in (0, 1):
            yield Case("find_overflow", [odd, np.array([before, 2, 1])], [])
    limits = {"least": 0.25, "most": 1024.0, "interval": 5}
    attrs = {"growth": 2.0, "backoff": 0.5} | limits
    for counts in ([0, 2, 1], [0, 4, 1], [1, 4, 1]):
        for value in (0.25, 3.0, 1024.0):
            inputs = [np.array(value, dtype), np.array(counts)]
            yield Case("adjust_loss_scale", inputs, [], attrs)


def channels_last_cases(dtype):
    """Groups of channels that are last, (N, pixels, C): their kernels are told."""
    for (n, pixels, c), groups in (((3, 40, 8), 4), ((2, 70, 48), 2), ((2, 5, 9), 3)):
        x, dy = (normal(n, pixels, c, seed=i, dtype=dtype) + i for i in (0, 1))
        gamma, beta = (normal(c, seed=i, dtype=dtype) for i in (2, 3))
        attrs = {"groups": groups, "eps": 1e-4, "per_element": False}
        attrs["channels_last"] = True
        image, small, wide = ((a, dtype) for a in (x.shape, (n, groups), (c,)))
        yield Case("group_norm", [x, gamma, beta], [image, small, small], attrs)
        mean = normal(n, groups, dtype=dtype)
        inputs = [x, dy, gamma, mean, mean**2]
        yield Case("group_norm_grad", inputs, [image, wide, wide], attrs)
