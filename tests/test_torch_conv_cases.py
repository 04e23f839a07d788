"""Wrapped convolutions where programs are written otherwise than in the guide."""

import copy
import functools
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

import mucudnn.torch as mt
from tests.torch_calls import Residual, conv, operands, tuner
from tests.torch_marks import CONVOLUTIONS

pytestmark = CONVOLUTIONS

close = torch.testing.assert_close


@pytest.fixture
def ours():
    return mt.convolutions(tuner=tuner())


def assert_same(found, wanted):
    torch.utils._pytree.tree_map(close, found, wanted)


def bodies_that_run_later():
    def generator():
        yield

    async def coroutine():
        pass

    async def both():
        yield

    return generator, coroutine, both


@pytest.mark.parametrize("function", bodies_that_run_later())
def test_functions_whose_bodies_run_later_are_not_decorated(function, ours):
    with pytest.raises(TypeError, match=f"{function.__name__} returns before its body"):
        ours(function)


@pytest.mark.parametrize("other", [nn.Conv2d, nn.Conv2d(1, 1, 1), "forward"])
def test_only_functions_are_decorated(other, ours):
    with pytest.raises(TypeError, match="only functions can be decorated, got"):
        ours(other)


def test_partial_functions_are_decorated(ours):
    x, w, b = operands()
    close(ours(functools.partial(conv, x, w))(b), conv(x, w, b))
    assert ours.stats.forward.ours == 1


def test_leaving_what_was_not_entered(ours):
    with pytest.raises(RuntimeError, match="without having been entered"):
        ours.__exit__(None, None, None)


@pytest.mark.parametrize("entered", ["with", "decorated"])
def test_entering_within_compiled_code(entered, ours):
    """Dynamo compiles the user's functions and none of ours."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 3)).double()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)

    def within(x):
        with ours:
            return model(x) * 2

    function = within if entered == "with" else ours(lambda x: model(x) * 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(function, backend="aot_eager")
        for _ in range(2):
            close(compiled(x), model(x) * 2)
    counts = ours.stats.forward
    assert (counts.calls, counts.ours) == (4, 4)
    assert torch._dynamo.utils.counters["frames"]["total"] < 6


@pytest.mark.filterwarnings("ignore:.torch.jit")  # PyTorch's, of forward mode
def test_functional_calls_and_their_derivatives(ours):
    model = Residual().double().eval()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    buffers = dict(model.named_buffers())
    images = torch.randn(3, 2, 3, 8, 8, dtype=torch.float64)
    cotangent = torch.ones(2, 5, dtype=torch.float64)

    def call(p, x):
        return torch.func.functional_call(model, (p, buffers), (x,))

    def results():
        x = images[0]
        _, pull = torch.func.vjp(call, parameters, x)
        per_sample = torch.func.grad(lambda p, x: call(p, x).sum())
        return (
            torch.vmap(call, (None, 0))(parameters, images),
            torch.func.jvp(functools.partial(call, parameters), (x,), (images[1],)),
            pull(cotangent),
            torch.vmap(per_sample, (None, 0))(parameters, images),
        )

    wanted = results()
    with ours:
        found = results()
    assert_same(found, wanted)
    assert ours.stats.forward.fell_back == ours.stats.backward.fell_back == {}
    assert ours.stats.forward.ours > 0 < ours.stats.backward.ours


def test_models_stacked_by_vmap(ours):
    models = [nn.Conv2d(3, 4, 3).double() for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)

    def call(p, b):
        return torch.func.functional_call(base, (p, b), (x,))

    with ours:
        found = torch.vmap(call)(parameters, buffers)
    close(found, torch.stack([model(x) for model in models]))
    assert ours.stats.forward.ours == 1


def test_batches_without_images(ours):
    x, (_, w, b) = torch.zeros(0, 4, 6, 6).double().requires_grad_(), operands()
    with ours:
        y = conv(x, w, b)
        y.sum().backward()
    assert y.shape == (0, 6, 3, 3)
    assert x.grad.shape == x.shape
    assert not w.grad.any()
    assert not b.grad.any()
    assert ours.stats.forward.fell_back == {"no elements": 1}


def test_operands_that_lie_otherwise(ours):
    x = torch.randn(4, 4, 12, 13, dtype=torch.float64)[::2, :, ::2, 1::2]
    w = torch.randn(3, 3, 2, 6, dtype=torch.float64).permute(3, 2, 0, 1)
    b = torch.randn(12, dtype=torch.float64)[::2]
    leaves = [t.requires_grad_() for t in (x, w, b)]
    negative = torch.complex(x, x).conj().imag

    def results():
        y = conv(*leaves)
        gy = torch.ones((), dtype=y.dtype).expand_as(y)
        spread = conv(x[:1, :, :1, :1].expand(2, 4, 6, 6), w, b)
        return y, *torch.autograd.grad(y, leaves, gy), spread, conv(negative, w, b)

    wanted = results()
    with ours:
        found = results()
    assert_same(found, wanted)
    assert ours.stats.forward.ours == 3


@pytest.mark.parametrize(
    ("dtype", "fell_back"),
    [(torch.complex128, {}), (torch.int64, {"data type int64": 1})],
)
def test_other_data_types(dtype, fell_back, ours):
    """PyTorch composes complex convolutions of real ones, which are ours."""
    x, w, b = (t.to(dtype) for t in operands(requires_grad=False))
    wanted = conv(x, w, b)
    with ours:
        found = conv(x, w, b)
    assert_same(found, wanted)
    assert ours.stats.forward.fell_back == fell_back


def test_gradients_by_another_thread(ours):
    x, w, b = operands()
    wanted = torch.autograd.grad(conv(x, w, b).sum(), (x, w, b))
    found = []
    with ours:
        loss = conv(x, w, b).sum()
        other = threading.Thread(
            target=lambda: found.extend(torch.autograd.grad(loss, (x, w, b)))
        )
        other.start()
        other.join()
    assert_same(tuple(found), wanted)
    assert ours.stats.backward.ours == 1


def test_gradients_that_contradict_are_refused_as_pytorch_does(ours):
    x, w, _ = operands(requires_grad=False)
    options = ([2, 2], [1, 1], [1, 1], False, [0, 0], 2)
    backward = torch.ops.aten.convolution_backward.default
    good = torch.randn(2, 6, 3, 3, dtype=torch.float64)
    mask = [True] * 3
    wanted = backward(good, x, w, [6], *options, mask)
    with ours:
        for wrong in (good[:, :5], good.float(), good[..., :2]):
            with pytest.raises(RuntimeError):
                backward(wrong, x, w, [6], *options, mask)
        assert_same(backward(good, x, w, [6], *options, mask), wanted)
        assert backward(good, x, w, [6], *options, [False] * 3) == (None,) * 3
    assert ours.stats.backward.ours == 1


def test_results_lie_as_pytorchs_where_memory_formats_are_alike(ours):
    form = torch.channels_last
    cases = [
        (torch.randn(2, 1, 6, 6).to(memory_format=form), torch.randn(4, 1, 3, 3)),
        (torch.randn(2, 4, 1, 1).to(memory_format=form), torch.randn(4, 4, 1, 1)),
        (torch.randn(1, 4, 6, 6), torch.randn(4, 4, 3, 3).to(memory_format=form)),
    ]
    for x, w in cases:
        wanted = functional.conv2d(x, w)
        with ours:
            found = functional.conv2d(x, w)
        close(found, wanted, rtol=1e-4, atol=1e-4)
        assert found.stride() == wanted.stride()
    assert ours.stats.forward.ours == 3
