"""Every rule of how a PyTorch operation is cut, on slices of numbers."""

import pytest
import torch
from torch.utils import _pytree as pytree

from mucudnn.ir.traits import Rows
from mucudnn.torch.costs.measure import evaluate
from mucudnn.torch.lowering.lowered import Call, Layout, Operand
from mucudnn.torch.splitting.axes import Axis, Cut, Site
from mucudnn.torch.splitting.batch_rules import RULES, cut_of
from mucudnn.torch.splitting.plan import slice_call

pytestmark = pytest.mark.torch

N = 6
aten = torch.ops.aten


def r(*sizes):
    return torch.randn(*sizes, dtype=torch.float64)


def whole_numbers(most, *sizes):
    return torch.randint(most, sizes)


def positive(*sizes):
    return torch.rand(*sizes, dtype=torch.float64) * 0.8 + 0.1


def pooled(dims):
    x = r(N, 2, *(6,) * dims)
    pool = {2: aten.max_pool2d_with_indices, 3: aten.max_pool3d_with_indices}[dims]
    y, at = pool(x, [2] * dims, [2] * dims)
    return x, y, at


CONV = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
ATTENTION = [r(N, 2, 5, 4) for _ in range(3)]
FLASH = aten._scaled_dot_product_flash_attention_for_cpu
OUT, LSE = FLASH(*ATTENTION, 0.0, True)
SCORES = r(N * 2, 5).log_softmax(1)
LABELS = whole_numbers(5, N * 2)
ONE = torch.ones((), dtype=torch.float64)
X, POOLED, AT = pooled(2)
NORM = aten.native_layer_norm(r(N, 3, 4), [4], r(4), r(4), 1e-5)
GROUPS = aten.native_group_norm(r(N, 4, 3, 3), r(4), r(4), N, 4, 9, 2, 1e-5)

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
    (aten.select_backward.default, (r(N, 2), [N, 3, 2], 1, 2)),
    (aten.slice_backward.default, (r(N, 3), [N, 5], 1, 1, 4, 1)),
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
    (aten._softmax_backward_data.default, (r(N, 3), r(N, 3), 1, torch.float64)),
    (aten._log_softmax_backward_data.default, (r(N, 3), r(N, 3), 1, torch.float64)),
    (aten.mm.default, (r(N * 2, 3), r(3, 4))),
    (aten.mm.default, (r(N * 2, 3).t(), r(N * 2, 4)), {}, {0: Axis(1, 2)}),
    (aten.addmm.default, (r(4), r(N, 3), r(3, 4)), {}, {1: Axis(0)}),
    (aten.addmm.default, (r(N, 4), r(N, 3), r(3, 4)), {}, {1: Axis(0)}),
    (aten.bmm.default, (r(N * 2, 3, 4), r(N * 2, 4, 5))),
    (aten.convolution.default, (r(N, 2, 5, 5), r(3, 2, 3, 3), r(3), *CONV)),
    (
        aten.convolution_backward.default,
        (r(N, 3, 5, 5), r(N, 2, 5, 5), r(3, 2, 3, 3), [3], *CONV, [True] * 3),
    ),
    (aten.avg_pool1d.default, (r(N, 2, 6), [2])),
    (aten.avg_pool2d.default, (r(N, 2, 6, 6), [2, 2])),
    (aten.avg_pool3d.default, (r(N, 2, 4, 4, 4), [2] * 3)),
    (aten.max_pool2d_with_indices.default, (X, [2, 2])),
    (aten.max_pool3d_with_indices.default, (pooled(3)[0], [2] * 3)),
    (aten._adaptive_avg_pool2d.default, (r(N, 2, 6, 6), [2, 3])),
    (aten._adaptive_avg_pool3d.default, (r(N, 2, 4, 4, 4), [2] * 3)),
    (aten.adaptive_max_pool2d.default, (r(N, 2, 6, 6), [2, 3])),
    (aten.adaptive_max_pool3d.default, (r(N, 2, 4, 4, 4), [2] * 3)),
    (
        aten.avg_pool2d_backward.default,
        (POOLED, X, [2, 2], [2, 2], [0, 0], False, True, None),
    ),
    (
        aten.avg_pool3d_backward.default,
        (
            *(r(N, 1, 2, 2, 2), r(N, 1, 4, 4, 4), [2] * 3, [2] * 3, [0] * 3),
            *(False, True, None),
        ),
    ),
    (aten._adaptive_avg_pool2d_backward.default, (r(N, 2, 3, 3), X)),
    (aten._adaptive_avg_pool3d_backward.default, (r(N, 1, 2, 2, 2), r(N, 1, 4, 4, 4))),
    (
        aten.adaptive_max_pool2d_backward.default,
        (r(N, 2, 3, 3), X, aten.adaptive_max_pool2d(X, [3, 3])[1]),
    ),
    (
        aten.max_pool2d_with_indices_backward.default,
        (POOLED, X, [2, 2], [2, 2], [0, 0], [1, 1], False, AT),
    ),
    (aten.upsample_nearest2d.default, (X, [12, 12])),
    (aten.upsample_nearest2d.vec, (X, [12, 12], None)),
    (aten.upsample_bilinear2d.default, (X, [12, 12], False)),
    (aten.upsample_bilinear2d.vec, (X, [12, 12], False, None)),
    (aten.upsample_bicubic2d.default, (X, [12, 12], False)),
    (aten.upsample_bicubic2d.vec, (X, [12, 12], False, None)),
    (
        aten.upsample_nearest2d_backward.default,
        (r(N, 2, 12, 12), [12, 12], [N, 2, 6, 6]),
    ),
    (
        aten.upsample_bilinear2d_backward.default,
        (r(N, 2, 12, 12), [12, 12], [N, 2, 6, 6], False),
    ),
    (
        aten.upsample_bicubic2d_backward.default,
        (r(N, 2, 12, 12), [12, 12], [N, 2, 6, 6], False),
    ),
    (aten.native_layer_norm.default, (r(N, 3, 4), [4], r(4), r(4), 1e-5)),
    (
        aten.native_layer_norm_backward.default,
        (r(N, 3, 4), r(N, 3, 4), [4], *NORM[1:], r(4), r(4), [True] * 3),
    ),
    (aten.native_group_norm.default, (r(N, 4, 3, 3), r(4), r(4), N, 4, 9, 2, 1e-5)),
    (
        aten.native_group_norm_backward.default,
        (r(N, 4, 3, 3), r(N, 4, 3, 3), *GROUPS[1:], r(4), N, 4, 9, 2, [True] * 3),
    ),
    (aten.embedding.default, (r(7, 3), whole_numbers(7, N, 4)), {}, {1: Axis(0)}),
    (
        aten.embedding_dense_backward.default,
        (r(N, 4, 3), whole_numbers(7, N, 4), 7, -1, False),
    ),
    (FLASH.default, (*ATTENTION, 0.0, True)),
    (
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        (r(N, 2, 5, 4), *ATTENTION, OUT, LSE, 0.0, True),
    ),
    (aten.mse_loss.default, (r(N, 3), r(N, 3))),
    (aten.mse_loss.default, (r(N, 3), r(N, 3), 2)),
    (aten.mse_loss.default, (r(N, 3), r(N, 3), 0)),
    (aten.mse_loss_backward.default, (ONE, r(N, 3), r(N, 3), 1), {}, {1: Axis(0)}),
    (aten.smooth_l1_loss.default, (r(N, 3), r(N, 3))),
    (
        aten.smooth_l1_loss_backward.default,
        (ONE, r(N, 3), r(N, 3), 1, 1.0),
        {},
        {1: Axis(0)},
    ),
    (aten.huber_loss.default, (r(N, 3), r(N, 3), 1, 0.5)),
    (
        aten.huber_loss_backward.default,
        (ONE, r(N, 3), r(N, 3), 2, 0.5),
        {},
        {1: Axis(0)},
    ),
    (aten.binary_cross_entropy.default, (positive(N, 3), positive(N, 3))),
    (
        aten.binary_cross_entropy_backward.default,
        (ONE, positive(N, 3), positive(N, 3), None, 1),
        {},
        {1: Axis(0)},
    ),
    (aten.nll_loss_forward.default, (SCORES, LABELS, None, 2, -100)),
    (
        aten.nll_loss_forward.default,
        (SCORES, LABELS, None, 0, -100),
        {},
        {0: Axis(0, 2)},
    ),
    (
        aten.nll_loss_backward.default,
        (ONE, SCORES, LABELS, None, 1, -100, ONE * 9),
        {},
        {1: Axis(0, 2)},
    ),
    (
        aten.nll_loss2d_forward.default,
        (r(N, 5, 2, 2), whole_numbers(5, N, 2, 2), None, 2, -100),
    ),
    (
        aten.nll_loss2d_backward.default,
        (ONE, r(N, 5, 2, 2), whole_numbers(5, N, 2, 2), None, 1, -100, ONE * 9),
        {},
        {1: Axis(0)},
    ),
]


def site_of(function, args, kwargs=None, axes=None):
    """A call of these tensors, of which the first has the batch unless it is said."""
    tensors = []

    def put(leaf):
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensors.append(leaf)
        return Operand(len(tensors) - 1)

    found = function(*args, **(kwargs or {}))
    several = isinstance(found, tuple | list)
    results = list(found) if several else [found]
    paths = tuple(range(len(results))) if several else (None,)
    args = tuple(pytree.tree_map(put, list(args)))
    known = axes or {0: Axis(0, tensors[0].shape[0] // N)}
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


def test_every_rule_has_a_case():
    assert {str(function) for function, *_ in CASES} >= RULES.keys()


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
