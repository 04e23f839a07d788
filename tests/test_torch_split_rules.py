"""Every rule of how a PyTorch operation is cut, on slices and strips of numbers."""

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from mucudnn.ir.traits import Rows
from mucudnn.torch.costs.measure import evaluate
from mucudnn.torch.lowering.lowered import Call, Layout, Operand
from mucudnn.torch.splitting.axes import Axis, Cut, Site
from mucudnn.torch.splitting.batch_rules import RULES, cut_of
from mucudnn.torch.splitting.plan import slice_call
from mucudnn.torch.splitting.prepare import ShapedGradient
from mucudnn.torch.splitting.strip_rules import IMAGE_RULES, strip_of

pytestmark = pytest.mark.torch

N = 6
aten = torch.ops.aten


def r(*sizes):
    return torch.randn(*sizes, dtype=torch.float64)


def whole_numbers(most, *sizes):
    return torch.randint(most, sizes)


def positive(*sizes):
    return torch.rand(*sizes, dtype=torch.float64) * 0.8 + 0.1


CONV = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
ATTENTION = [r(N, 2, 5, 4) for _ in range(3)]
FLASH = aten._scaled_dot_product_flash_attention_for_cpu
SCORES = r(N * 2, 5).log_softmax(1)
LABELS = whole_numbers(5, N * 2)
X = r(N, 2, 6, 6)

CASES = [
    (aten.relu.default, (r(N, 3),)),
    (aten.add.Tensor, (r(N, 3, 4), r(3, 4))),
    (aten.add.Tensor, (r(N, 3, 4), r(N, 1, 1))),
    (aten.where.self, (r(N, 3) > 0, r(N, 3), r(3))),
    (aten.threshold_backward.default, (r(N, 3), r(N, 3), 0)),
    (aten.gelu_backward.default, (r(N, 3), r(N, 3))),
    (aten.clone.default, (r(N, 3),)),
    (aten._to_copy.default, (r(N, 3),), {"dtype": torch.float32}),
    (aten.view.default, (r(N, 2, 3), [2 * N, 3])),
    (aten.view.default, (r(N * 2, 3), [N, 2, 3])),
    (aten.view.default, (r(N, 2, 3), [N, 6])),
    (aten._unsafe_view.default, (r(N * 2, 3), [N, 6])),
    (aten.permute.default, (r(N, 2, 3), [2, 0, 1])),
    (aten.transpose.int, (r(N, 2, 3), 0, -1)),
    (aten.t.default, (r(N, 2),)),
    (aten.unsqueeze.default, (r(N, 2), 0)),
    (aten.unsqueeze.default, (r(N, 2), -1)),
    (aten.squeeze.dim, (r(N, 1, 2), 1)),
    (aten.squeeze.dims, (r(N, 1, 2, 1), [1, 3])),
    (aten.expand.default, (r(N, 1, 2), [4, N, 3, 2])),
    (aten.select.int, (r(N, 3, 2), 1, 2)),
    (aten.unbind.int, (r(N, 3), 1)),
    (aten.slice.Tensor, (r(N, 5), 1, 1, 4)),
    (aten.split.Tensor, (r(N, 6), 2, 1)),
    (aten.split_with_sizes.default, (r(N, 6), [2, 4], -1)),
    (aten.cumsum.default, (r(N, 3), 1)),
    (aten.cat.default, ([r(N, 2), r(N, 3)], 1)),
    (aten.stack.default, ([r(N, 2), r(N, 2)], 0)),
    (aten.constant_pad_nd.default, (r(N, 2, 3), [1, 2], 0.0)),
    (aten.gather.default, (r(N, 5), 1, whole_numbers(5, N, 3))),
    (aten.sum.default, (r(N, 3),)),
    (aten.sum.dim_IntList, (r(N, 3), [0], True)),
    (aten.sum.dim_IntList, (r(N, 3, 2), [1])),
    (aten.mean.default, (r(N, 3),)),
    (aten.mean.dim, (r(N, 3, 2), [0, 2])),
    (aten.mean.dim, (r(N, 3, 2), [-1], True)),
    (aten.amax.default, (r(N, 3), [1])),
    (aten.amin.default, (r(N, 3), [1], True)),
    (aten.argmax.default, (r(N, 3), 1)),
    (aten.argmin.default, (r(N, 3), 1)),
    (aten.max.dim, (r(N, 3), 1)),
    (aten.min.dim, (r(N, 3), 1)),
    (aten.var.correction, (r(N, 3), [1]), {"correction": 1}),
    (aten.var_mean.correction, (r(N, 3), [1]), {"correction": 0}),
    (aten.logsumexp.default, (r(N, 3), [1])),
    (aten.prod.dim_int, (r(N, 3), 1)),
    (aten.any.dim, (r(N, 3) > 0, 1)),
    (aten.all.dim, (r(N, 3) > 0, 1)),
    (aten._softmax.default, (r(N, 3), 1, False)),
    (aten._log_softmax.default, (r(N, 3), -1, False)),
    (aten.mm.default, (r(N * 2, 3), r(3, 4))),
    (aten.mm.default, (r(N * 2, 3).t(), r(N * 2, 4)), {}, {0: Axis(1, 2)}),
    (aten.addmm.default, (r(4), r(N, 3), r(3, 4))),
    (aten.addmm.default, (r(N, 4), r(N, 3), r(3, 4)), {}, {1: Axis(0)}),
    (aten.bmm.default, (r(N * 2, 3, 4), r(N * 2, 4, 5))),
    (aten.convolution.default, (r(N, 2, 5, 5), r(3, 2, 3, 3), r(3), *CONV)),
    (aten.avg_pool1d.default, (r(N, 2, 6), [2])),
    (aten.avg_pool2d.default, (r(N, 2, 6, 6), [2, 2])),
    (aten.avg_pool3d.default, (r(N, 2, 4, 4, 4), [2] * 3)),
    (aten.max_pool2d_with_indices.default, (X, [2, 2])),
    (aten.max_pool3d_with_indices.default, (r(N, 2, 6, 6, 6), [2] * 3)),
    (aten._adaptive_avg_pool2d.default, (r(N, 2, 6, 6), [2, 3])),
    (aten._adaptive_avg_pool3d.default, (r(N, 2, 4, 4, 4), [2] * 3)),
    (aten.adaptive_max_pool2d.default, (r(N, 2, 6, 6), [2, 3])),
    (aten.adaptive_max_pool3d.default, (r(N, 2, 4, 4, 4), [2] * 3)),
    (aten.upsample_nearest2d.default, (X, [12, 12])),
    (aten.upsample_nearest2d.vec, (X, [12, 12], None)),
    (aten.upsample_bilinear2d.default, (X, [12, 12], False)),
    (aten.upsample_bilinear2d.vec, (X, [12, 12], False, None)),
    (aten.upsample_bicubic2d.default, (X, [12, 12], False)),
    (aten.upsample_bicubic2d.vec, (X, [12, 12], False, None)),
    (aten.native_layer_norm.default, (r(N, 3, 4), [4], r(4), r(4), 1e-5)),
    (aten.native_group_norm.default, (r(N, 4, 3, 3), r(4), r(4), N, 4, 9, 2, 1e-5)),
    (aten.embedding.default, (r(7, 3), whole_numbers(7, N, 4))),
    (FLASH.default, (*ATTENTION, 0.0, True)),
    (aten.mse_loss.default, (r(N, 3), r(N, 3))),
    (aten.mse_loss.default, (r(N, 3), r(N, 3), 2)),
    (aten.mse_loss.default, (r(N, 3), r(N, 3), 0)),
    (aten.smooth_l1_loss.default, (r(N, 3), r(N, 3))),
    (aten.huber_loss.default, (r(N, 3), r(N, 3), 1, 0.5)),
    (aten.binary_cross_entropy.default, (positive(N, 3), positive(N, 3))),
    (aten.nll_loss_forward.default, (SCORES, LABELS, None, 2, -100)),
    (aten.nll_loss_forward.default, (SCORES, LABELS, None, 0, -100)),
    (
        aten.nll_loss2d_forward.default,
        (r(N, 5, 2, 2), whole_numbers(5, N, 2, 2), None, 2, -100),
    ),
]

MEANS = [
    (aten.huber_loss.default, (r(N, 3), r(N, 3), 2, 0.5)),
    (aten.nll_loss_forward.default, (SCORES, LABELS, None, 1, -100)),
    (
        aten.nll_loss2d_forward.default,
        (r(N, 5, 2, 2), whole_numbers(5, N, 2, 2), None, 1, -100),
    ),
]
"""Differentiated, too, though some are not cut themselves."""


def operands(args):
    """Arguments with numbers in place of tensors, and the tensors."""
    tensors = []

    def put(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return Operand(len(tensors) - 1)

    return tuple(pytree.tree_map(put, list(args))), tensors


def axes_of(tensors):
    """Axes of the batch, where tensors may have it."""
    sizes = {i: t.shape[0] for i, t in enumerate(tensors) if t.dim()}
    return {i: Axis(0, n // N) for i, n in sizes.items() if n % N == 0}


class Recorder(TorchDispatchMode):
    """Records the calls of functions that have a rule."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if str(function) in RULES and "backward" in str(function):
            self.calls[function] = args
        return function(*args, **(kwargs or {}))


def differentiated(cases):
    """Yield the calls by which autograd computes gradients of the first results."""
    for function, args, *kwargs in cases:
        leaves, form = pytree.tree_flatten(args)
        leaves = [
            x.detach().requires_grad_()
            if torch.is_tensor(x) and x.is_floating_point()
            else x
            for x in leaves
        ]
        found = function(*pytree.tree_unflatten(leaves, form), **(*kwargs, {})[0])
        result = pytree.tree_leaves(found)[0]
        wrt = [x for x in leaves if torch.is_tensor(x) and x.requires_grad]
        if not result.requires_grad:
            continue
        with Recorder() as recorder:
            cotangent = torch.randn_like(result)
            torch.autograd.grad(result, wrt, cotangent, allow_unused=True)
        for backward, given in recorder.calls.items():
            yield backward, given, {}, axes_of(operands(given)[1])


CASES += differentiated([*CASES, *MEANS])


def site_of(function, args, kwargs=None, axes=None):
    """A call of tensors, of which the first that may have the batch has it."""
    found = function(*args, **(kwargs or {}))
    several = isinstance(found, tuple | list)
    results = list(found) if several else [found]
    paths = tuple(range(len(results))) if several else (None,)
    args, tensors = operands(args)
    known = axes or dict([*axes_of(tensors).items()][:1])
    site = Site(
        str(function),
        args,
        kwargs or {},
        paths,
        tuple(map(Layout.of, tensors)),
        tuple(map(Layout.of, results)),
        tuple(known.get(i) for i in range(len(tensors))),
        N,
    )
    return site, Call(function, args, kwargs or {}, paths), tensors, results


def part(tensor, axis, rows):
    if axis is None:
        return tensor
    return tensor.narrow(axis.index, rows.start * axis.each, rows.count * axis.each)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_slices_make_up_the_whole(number):
    site, call, tensors, whole = site_of(*CASES[number])
    cut = cut_of(site, call)
    assert isinstance(cut, Cut), site.op
    slices = [Rows(0, 2, N), Rows(2, 3, N), Rows(3, N, N)]
    sums = [torch.zeros_like(result) for result in whole]
    for rows in slices:
        shape = part(whole[0], cut.outputs[0], rows).shape
        one = slice_call(call, cut, rows, shape, cut.inputs)
        for i, found in enumerate(evaluate(one, tensors)):
            if cut.outputs[i] is None:
                sums[i] += found
            else:
                expected = part(whole[i], cut.outputs[i], rows)
                torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    for total, result, axis in zip(sums, whole, cut.outputs, strict=True):
        if axis is None:
            torch.testing.assert_close(total, result, rtol=1e-10, atol=1e-12)


WHOLE = [
    (aten.squeeze.default, (r(N, 1, 2),)),  # of one sample it would take the batch
    (aten.squeeze.dims, (r(N, 1, 2), [0, 1])),
    (aten.cumsum.default, (r(N, 3), 0)),
    (aten.cat.default, ([r(N, 2), r(N, 2)], 0)),
    (aten.select.int, (r(N, 3), 0, 1)),
    (aten.slice.Tensor, (r(N, 3), 0, 1, 4)),
    (aten.split.Tensor, (r(N, 3), 2)),
    (aten._softmax.default, (r(N, 3), 0, False)),
    (aten.amax.default, (r(N, 3), [0])),
    (aten.var.correction, (r(N, 3), [0]), {"correction": 1}),
    (aten.native_layer_norm.default, (r(N, 3), [N, 3], None, None, 1e-5)),
    (aten.addmm.default, (r(4), r(N, 3).t(), r(N, 4)), {}, {1: Axis(1), 2: Axis(0)}),
    (aten.view.default, (r(N, 4), [4, N])),
    (aten.nll_loss_forward.default, (SCORES, LABELS, None, 1, -100)),
    (aten.sort.default, (r(N, 3), 0)),
    (aten.flip.default, (r(N, 3), [0])),
]


@pytest.mark.parametrize("number", range(len(WHOLE)))
def test_what_sees_all_of_the_batch_stays_whole(number):
    site, call, *_ = site_of(*WHOLE[number])
    assert cut_of(site, call) is None


HEIGHT = Axis(2)


class Sizes(tuple):
    """Of images that a gradient is not given."""


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


STRIP_CASES = [*convolutions(), *pools(), *resized(), *padded()]


def case_of(function, args):
    """A call of these tensors, its site, and what it computes."""
    asked = args[-1] if function is aten.convolution_backward.default else [True]
    if isinstance(args[0], Sizes):
        sizes, *args = args
        paths = (0,) if len(asked) == 3 else (None,)
        leaves, tensors = operands(args)
        plain = Call(function, (), {}, paths)
        call = ShapedGradient(function, tuple(sizes), leaves).call(plain)
    else:
        several = "convolution_backward" in str(function) or "indices" in str(function)
        paths = tuple(k for k, on in enumerate(asked) if on) if several else (None,)
        if "with_indices.default" in str(function):
            paths = 0, 1
        leaves, tensors = operands(args)
        call = Call(function, leaves, {}, paths)
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


@pytest.mark.parametrize("number", range(len(STRIP_CASES)))
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_strips_make_up_the_whole(number, parts):
    site, call, tensors, whole = case_of(*STRIP_CASES[number])
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
    assert {str(function) for function, *_ in CASES} >= RULES.keys()
    assert {str(function) for function, _ in STRIP_CASES} == IMAGE_RULES.keys()


ROWS = r(1, 2, 12, 6)
WHOLE_STRIPS = [
    (aten.avg_pool2d.default, (ROWS, [3, 3], [2, 2], [1, 1], False, False)),
    (aten.avg_pool2d.default, (ROWS, [3, 3], [2, 2], [0, 0], True)),
    (aten.constant_pad_nd.default, (ROWS, [0, 0, 1, 1], 2.0)),
    (aten.upsample_bilinear2d.default, (ROWS, [24, 12], True)),
    (aten.upsample_bilinear2d.default, (ROWS, [36, 12], False)),
    (aten.upsample_nearest2d.default, (ROWS, [18, 12])),
    (aten.upsample_nearest2d.vec, (ROWS, None, [2.1, 2.0])),
    (aten.upsample_bicubic2d.default, (ROWS, [24, 12], False)),
    (aten.cumsum.default, (ROWS, 2)),
    (aten.slice.Tensor, (ROWS, 2, 1, 9)),
    (aten.slice_backward.default, (ROWS, [1, 2, 30, 6], 2, 1, 25, 2)),
]


@pytest.mark.parametrize("number", range(len(WHOLE_STRIPS)))
def test_what_sees_more_than_windows_stays_whole(number):
    site, call, *_ = case_of(*WHOLE_STRIPS[number])
    assert strip_of(site, call) is None
