"""Every rule of how a PyTorch operation is cut into strips, on rows of numbers."""

import pytest
import torch

from mucudnn.ir.traits import Rows
from mucudnn.torch.costs.measure import evaluate
from mucudnn.torch.lowering.lowered import Call, Layout, Operand
from mucudnn.torch.splitting.axes import Axis, Site
from mucudnn.torch.splitting.prepare import ShapedGradient
from mucudnn.torch.splitting.strip_rules import IMAGE_RULES, strip_of

pytestmark = pytest.mark.torch

aten = torch.ops.aten
HEIGHT = Axis(2)


class Sizes(tuple):
    """Of images that a gradient is not given."""


def r(*sizes):
    return torch.randn(*sizes, dtype=torch.float64)


WINDOWS = [  # kernel, stride, padding, dilation, groups, transposed, dimensions
    (3, 1, 1, 1, 1, False, 2),
    (3, 2, 1, 1, 2, False, 2),
    (4, 1, 2, 1, 1, False, 2),
    (2, 3, 0, 1, 1, False, 2),
    (1, 2, 0, 1, 4, False, 2),
    (7, 1, 6, 3, 1, False, 2),
    (3, 2, 3, 2, 1, False, 3),
    (2, 2, 0, 1, 1, True, 2),
    (3, 2, 1, 1, 2, True, 2),
    (3, 1, 1, 2, 1, True, 2),
    (4, 3, 2, 1, 1, True, 3),
]


def convolutions():
    for kernel, stride, padding, dilation, groups, transposed, dims in WINDOWS:
        w = r(4, 4 // groups, *(kernel,) * dims)
        options = [stride] * dims, [padding] * dims, [dilation] * dims, transposed
        options = *options, [(stride - 1) * transposed] * dims, groups
        x = r(2, 4, 23, *(9,) * (dims - 1))
        yield aten.convolution.default, (x, w, r(4), *options)
        grad = torch.randn_like(aten.convolution(x, w, None, *options))
        rest = (w, [4], *options)
        by_images, by_filters = [True, False, False], [False, True, not transposed]
        function = aten.convolution_backward.default
        yield function, (Sizes(x.shape), grad, *rest, by_images)
        yield function, (grad, x, *rest, by_filters)


def pools():
    for dims in (2, 3):
        for kernel, stride, padding, dilation, ceil, size in [
            (2, 2, 0, 1, False, 22),
            (2, 2, 0, 1, True, 23),
            (3, 2, 1, 1, False, 23),
            (3, 2, 1, 2, True, 22),
            (2, 3, 0, 1, False, 22),
            (4, 1, 2, 1, False, 17),
        ]:
            x = r(1, 2, size, *(9,) * (dims - 1))
            window = [kernel] * dims, [stride] * dims, [padding] * dims
            name = f"max_pool{dims}d_with_indices"
            largest = getattr(aten, name)
            args = *window, [dilation] * dims, ceil
            y, places = largest(x, *args)
            yield largest.default, (x, *args)
            back = getattr(aten, f"{name}_backward").default
            yield back, (Sizes(x.shape), torch.randn_like(y), *args, places)
            if ceil or dilation > 1:
                continue
            average = getattr(aten, f"avg_pool{dims}d")
            args = *window, False, True, None
            y = average(x, *args)
            yield average.default, (x, *args)
            back = getattr(aten, f"avg_pool{dims}d_backward").default
            yield back, (Sizes(x.shape), torch.randn_like(y), *args)


def resized():
    x, volume = r(2, 3, 11, 4), r(1, 2, 7, 3, 4)
    for times in (2, 3, 4):
        sizes = [11 * times, 8]
        grown = r(2, 3, *sizes)
        yield aten.upsample_nearest2d.default, (x, sizes)
        yield (
            aten.upsample_nearest2d_backward.default,
            (grown, sizes, list(x.shape), float(times), 2.0),
        )
        yield (
            aten.upsample_nearest3d_backward.default,
            (r(1, 2, 7 * times, 6, 4), [7 * times, 6, 4], [1, 2, 7, 3, 4]),
        )
        yield aten.upsample_nearest3d.default, (volume, [7 * times, 6, 4])
        yield aten.upsample_nearest3d.vec, (volume, None, [float(times), 2.0, 1.0])
        yield aten.upsample_nearest2d.vec, (x, None, [float(times), 2.0])
        if times == 3:
            continue
        yield aten.upsample_bilinear2d.default, (x, sizes, False)
        yield aten.upsample_bilinear2d.vec, (x, None, False, [float(times), 2.0])
        yield (
            aten.upsample_bilinear2d_backward.default,
            (grown, sizes, list(x.shape), False, float(times), 2.0),
        )


def padded():
    x = r(2, 3, 11, 4)
    yield aten.constant_pad_nd.default, (x, [1, 2, 3, 1], 0.0)
    yield aten.constant_pad_nd.default, (x, [1, 2, 9, -2])
    yield aten.constant_pad_nd.default, (x, [0, 1, -3, 5], 0)
    yield aten.slice_backward.default, (x, [2, 3, 19, 4], 2, 5, 16, 1)
    yield aten.slice_backward.default, (x, [2, 3, 13, 4], -2, -11, 2**63 - 1, 1)


CASES = [*convolutions(), *pools(), *resized(), *padded()]


def case_of(function, args):
    """A call of these tensors, its site, and what it computes."""
    tensors = []

    def put(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return Operand(len(tensors) - 1)

    asked = args[-1] if function is aten.convolution_backward.default else [True]
    if isinstance(args[0], Sizes):
        sizes, *args = args
        paths = (0,) if len(asked) == 3 else (None,)
        leaves = tuple(map(put, args))
        plain = Call(function, (), {}, paths)
        call = ShapedGradient(function, tuple(sizes), leaves).call(plain)
    else:
        several = "convolution_backward" in str(function) or "indices" in str(function)
        paths = tuple(k for k, on in enumerate(asked) if on) if several else (None,)
        if "with_indices.default" in str(function):
            paths = 0, 1
        call = Call(function, tuple(map(put, args)), {}, paths)
    whole = evaluate(call, tensors)
    images = 2 if "backward" in str(function) else 1  # those behind are filters
    site = Site(
        str(function),
        call.args,
        {},
        paths,
        tuple(map(Layout.of, tensors)),
        tuple(map(Layout.of, whole)),
        tuple(HEIGHT if i < images else None for i in range(len(tensors))),
        tensors[0].shape[2],
    )
    return site, call, tensors, whole


def read(tensor, interval):
    """Rows of a tensor, zeros where it has none."""
    if interval is None:
        return tensor
    start, stop = interval
    size = tensor.shape[2]
    inside = tensor[:, :, max(start, 0) : min(stop, size)]
    around = [0, 0] * (tensor.dim() - 3) + [max(0, -start), max(0, stop - size)]
    return torch.constant_pad_nd(inside, around)


@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_strips_make_up_the_whole(number, parts):
    site, call, tensors, whole = case_of(*CASES[number])
    cut = strip_of(site, call)
    assert cut is not None
    assert cut.stripped is not None
    sums = [torch.zeros_like(result) for result in whole]
    for index in range(parts):
        rows = Rows(index, index + 1, parts)
        strip = cut.stripped(rows)
        assert strip.reads.keys() == cut.inputs.keys()
        given = [read(t, strip.reads.get(i)) for i, t in enumerate(tensors)]
        for i, found in enumerate(evaluate(strip.call, given)):
            if cut.outputs[i] is None:
                sums[i] += found
                continue
            wanted, (start, stop) = rows.of(whole[i].shape[2]), strip.made
            assert start <= wanted.start < wanted.stop <= stop
            assert found.shape[2] == stop - start
            mine = found[:, :, wanted.start - start : wanted.stop - start]
            expected = whole[i][:, :, wanted.start : wanted.stop]
            torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)
    for total, result, axis in zip(sums, whole, cut.outputs, strict=True):
        if axis is None:
            torch.testing.assert_close(total, result, rtol=1e-10, atol=1e-12)


def test_every_rule_has_a_case():
    assert {str(function) for function, _ in CASES} == IMAGE_RULES.keys()


X = r(1, 2, 12, 6)
WHOLE = [
    (aten.avg_pool2d.default, (X, [3, 3], [2, 2], [1, 1], False, False)),
    (aten.avg_pool2d.default, (X, [3, 3], [2, 2], [0, 0], True)),
    (aten.constant_pad_nd.default, (X, [0, 0, 1, 1], 2.0)),
    (aten.upsample_bilinear2d.default, (X, [24, 12], True)),
    (aten.upsample_bilinear2d.default, (X, [36, 12], False)),
    (aten.upsample_nearest2d.default, (X, [18, 12])),
    (aten.upsample_nearest2d.vec, (X, None, [2.1, 2.0])),
    (aten.upsample_bicubic2d.default, (X, [24, 12], False)),
    (aten.cumsum.default, (X, 2)),
    (aten.slice.Tensor, (X, 2, 1, 9)),
    (aten.slice_backward.default, (X, [1, 2, 30, 6], 2, 1, 25, 2)),
]


@pytest.mark.parametrize("number", range(len(WHOLE)))
def test_what_sees_more_than_windows_stays_whole(number):
    site, call, *_ = case_of(*WHOLE[number])
    assert strip_of(site, call) is None
