"""PyTorch's convolutions by our plans, judged by PyTorch's own samples and checks."""

import importlib
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils import flop_counter
from torch.utils.checkpoint import checkpoint

import mucudnn.torch as mt
from tests.torch_calls import conv, conv_transpose, operands, trained, tuner
from tests.torch_marks import CONVOLUTIONS

pytestmark = [
    *CONVOLUTIONS,
    pytest.mark.filterwarnings("ignore:.torch.jit"),  # gradcheck's
]

OPERATORS = [
    f"nn.functional.conv{kind}{rank}d"
    for kind in ("", "_transpose")
    for rank in (1, 2, 3)
]


@pytest.fixture(scope="module")
def ours():
    return mt.convolutions(tuner=tuner())


@pytest.fixture(scope="module")
def operators():
    pytest.importorskip("expecttest")  # which PyTorch's own tests need
    pytest.importorskip("setuptools")  # likewise
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        methods = importlib.import_module(
            "torch.testing._internal.common_methods_invocations"
        )
    return {op.name: op for op in methods.op_db if op.name in OPERATORS}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def gradients(op, sample, context, dtype=None):
    """Output and gradients of a sample, in a context; the same cotangent every time."""

    def own(value):
        if not isinstance(value, torch.Tensor):
            return value
        copy = value.detach().to(dtype or value.dtype)
        return copy.requires_grad_(value.requires_grad)

    args = [own(value) for value in (sample.input, *sample.args)]
    kwargs = {name: own(value) for name, value in sample.kwargs.items()}
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
    with context:
        y = op(*args, **kwargs)
        rng = np.random.default_rng(1)
        gy = torch.from_numpy(rng.standard_normal(y.shape)).to(y.dtype)
        return y, torch.autograd.grad(y, tensors, gy)


@pytest.mark.parametrize("name", OPERATORS)
def test_samples_in_float64(name, operators, ours):
    op = operators[name]
    before = ours.stats
    for sample in op.sample_inputs("cpu", torch.float64, requires_grad=True):
        expected, expected_grads = gradients(op, sample, nullcontext())
        found, grads = gradients(op, sample, ours)
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()
        torch.testing.assert_close(grads, expected_grads)
    after = ours.stats
    assert after.forward.ours > before.forward.ours
    assert after.backward.ours > before.backward.ours


@pytest.mark.parametrize("name", OPERATORS)
def test_samples_in_float32_are_as_near_to_float64_as_pytorchs(name, operators, ours):
    op = operators[name]
    eps = torch.finfo(torch.float32).eps
    for sample in op.sample_inputs("cpu", torch.float32, requires_grad=True):
        truth, true_grads = gradients(op, sample, nullcontext(), torch.float64)
        native, native_grads = gradients(op, sample, nullcontext())
        found, grads = gradients(op, sample, ours)
        for exact, theirs, own in zip(
            (truth, *true_grads), (native, *native_grads), (found, *grads), strict=True
        ):
            if exact.numel():
                allowed = (
                    4 * (theirs - exact).abs().max() + 16 * eps * exact.abs().max()
                )
                assert (own - exact).abs().max() <= allowed, sample


@pytest.mark.parametrize("name", OPERATORS)
def test_error_inputs_raise_what_pytorch_says(name, operators, ours):
    op = operators[name]
    if op.error_inputs_func is None:
        pytest.skip("PyTorch has no error inputs for it")
    for case in op.error_inputs("cpu"):
        sample = case.sample_input
        with ours, pytest.raises(case.error_type, match=case.error_regex):
            op(sample.input, *sample.args, **sample.kwargs)


@pytest.mark.parametrize("function", [conv, conv_transpose])
def test_derivatives(function, ours):
    x = torch.randn(2, 4, 4, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 2, 3, 2, dtype=torch.float64, requires_grad=True)
    b = torch.randn(4, dtype=torch.float64, requires_grad=True)
    before = ours.stats
    with ours:
        assert torch.autograd.gradcheck(function, (x, w, b))
        assert torch.autograd.gradgradcheck(function, (x, w, b), fast_mode=True)
        assert torch.autograd.gradcheck(
            function, (x, w, b), check_forward_ad=True, check_backward_ad=False
        )
    assert ours.stats.forward.ours > before.forward.ours
    assert ours.stats.forward.fell_back == before.forward.fell_back
    assert ours.stats.backward.fell_back == before.backward.fell_back


@pytest.mark.parametrize("native", [False, True])
def test_what_looks_into_kernels_or_stands_around_them(native):
    context = mt.convolutions(tuner=tuner(native=native))
    x, w, b = operands(torch.float64)
    expected = conv(x, w, b)
    images = torch.randn(3, *x.shape, dtype=x.dtype)
    with context:
        with flop_counter.FlopCounterMode(display=False) as counted:
            conv(x, w, b).sum().backward()
        with torch.inference_mode():
            torch.testing.assert_close(conv(x, w, b), expected)
        again = checkpoint(lambda x: conv(x, w, b), x, use_reentrant=False)
        torch.testing.assert_close(
            torch.vmap(lambda i: conv(i, w, b))(images)[0], conv(images[0], w, b)
        )
        torch.autograd.backward(again.sum())
        with torch.device("meta"):
            y = conv(x, w, b)
            torch.autograd.grad(y, w, torch.ones_like(y, device="cpu"))
        image, *rest = (t.detach() for t in (x, w, b))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            traced = torch.jit.trace(lambda image: conv(image, *rest), (image,))
    assert counted.get_total_flops() > 0
    assert "_convolution" in str(traced.graph)
    torch.testing.assert_close(traced(2 * image), conv(2 * image, *rest))


def test_autocast_is_left_to_pytorch():
    x, w, b = operands(torch.float32)
    context = mt.convolutions(tuner=tuner())
    with torch.autocast("cpu", torch.bfloat16):
        expected = conv(x, w, b)
        with context:
            found = conv(x, w, b)
            found.sum().backward()
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    assert context.stats.forward.fell_back == {"data type bfloat16": 1}
    assert context.stats.backward.fell_back == {"data type bfloat16": 1}
    assert context.stats.forward.ours == 0


@pytest.mark.parametrize("rank", [2, 3])
def test_channels_last_is_used_where_it_lies(rank):
    form = torch.channels_last if rank == 2 else torch.channels_last_3d
    x = torch.randn(2, 4, *[6] * rank).to(memory_format=form).requires_grad_()
    w = torch.randn(6, 4, *[3] * rank).to(memory_format=form).requires_grad_()
    function = functional.conv2d if rank == 2 else functional.conv3d
    expected = function(x, w)
    gy = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, (x, w), gy)
    asked = []
    context = mt.convolutions(tuner=tuner(progress=asked.append))
    with context:
        found = function(x, w)
        grads = torch.autograd.grad(found, (x, w), gy)
    assert found.is_contiguous(memory_format=form)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for one, other in zip(grads, expected_grads, strict=True):
        assert one.is_contiguous(memory_format=form)
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert {progress.problem.layout for progress in asked} == {"NHWC"}


def test_training_within_equals_training_without(ours):
    expected, weights = trained(nullcontext())
    found, own = trained(ours)
    assert found == pytest.approx(expected, rel=1e-10)
    for name, value in weights.items():
        torch.testing.assert_close(own[name], value, rtol=1e-9, atol=1e-10)


def test_a_compiled_model_is_served(ours):
    expected, _ = trained(nullcontext())
    before = ours.stats
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, _ = trained(ours, lambda m: torch.compile(m, backend="aot_eager"))
    assert found == pytest.approx(expected, rel=1e-10)
    assert ours.stats.forward.ours > before.forward.ours
    assert ours.stats.backward.ours > before.backward.ours


def test_frozen_parts_have_no_gradient_computed(ours):
    x, w, b = operands()
    for leaves in ((x,), (w,), (b,), (x, b)):
        expected = torch.autograd.grad(conv(x, w, b).sum(), leaves)
        frozen = [
            t if any(t is leaf for leaf in leaves) else t.detach() for t in (x, w, b)
        ]
        with ours:
            found = torch.autograd.grad(conv(*frozen).sum(), leaves)
        torch.testing.assert_close(found, expected)
