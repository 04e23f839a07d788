"""Wrapped convolutions of unusual programs; contexts of PyTorch's: who serves."""

import copy
import functools
import re
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import mucudnn
import mucudnn.torch as mt
from mucudnn import AlgoPerf, ConvPlan, ConvProblem, Tuner
from mucudnn.errors import BackendError, PlanningError
from mucudnn.ir.conv import Direction
from mucudnn.runtime.tuning.timing import Timing
from mucudnn.torch.conv import kernels as conv_calls
from mucudnn.torch.conv.backend import TORCH
from tests.torch_calls import (
    ONCE,
    Residual,
    conv,
    conv_transpose,
    only_torch,
    operands,
    trained,
    tuner,
    without_torch,
)
from tests.torch_marks import CONVOLUTIONS

pytestmark = CONVOLUTIONS

close = torch.testing.assert_close


@pytest.fixture
def ours():
    return mt.convolutions(tuner=tuner())


def assert_same(found, wanted):
    torch.utils._pytree.tree_map(close, found, wanted)


def test_only_functions_whose_bodies_run_at_once_are_decorated(ours):
    def generator():
        yield

    async def coroutine():
        pass

    async def both():
        yield

    for function in (generator, coroutine, both):
        words = f"{function.__name__} returns before its body"
        with pytest.raises(TypeError, match=words):
            ours(function)
    for other in (nn.Conv2d, nn.Conv2d(1, 1, 1), "forward"):
        with pytest.raises(TypeError, match="only functions can be decorated, got"):
            ours(other)
    x, w, b = operands()
    close(ours(functools.partial(conv, x, w))(b), conv(x, w, b))
    assert ours.stats.forward.ours == 1
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
    with ours, ThreadPoolExecutor(1) as pool:
        loss = conv(x, w, b).sum()
        found = pool.submit(torch.autograd.grad, loss, (x, w, b)).result()
    assert_same(found, wanted)
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


def test_pytorchs_own_kernel_competes():
    timed = []
    context = mt.convolutions(tuner=tuner(native=True, progress=timed.append))
    found, _ = trained(context)
    expected, _ = trained(nullcontext())
    assert found == pytest.approx(expected, rel=1e-10)
    for stats in (context.stats.forward, context.stats.backward):
        assert stats.calls == 3 * 5
        assert stats.ours + stats.native == stats.calls
        assert stats.fell_back == {}
    problems = {progress.problem for progress in timed}
    raced = {progress.problem for progress in timed if progress.algo == TORCH}
    assert raced == problems


@pytest.mark.parametrize("winner", ["ours", "native"])
def test_a_plan_of_ours_has_to_win_as_a_whole(winner, monkeypatch):
    times = {"ours": 1.0, "native": 2.0} if winner == "ours" else {}

    def measured(runs, device, rule):
        assert all(run() is not None for run in runs)
        return [Timing(times.get(name, 1.0), 0.0, 1) for name in ("ours", "native")]

    monkeypatch.setattr(conv_calls, "measure_together", measured)
    context = mt.convolutions(tuner=tuner(native=True, planner=without_torch))
    x, w, b = operands()
    expected = torch.autograd.grad(conv(x, w, b).sum(), (x, w, b))
    with context:
        found = torch.autograd.grad(conv(x, w, b).sum(), (x, w, b))
    torch.testing.assert_close(found, expected)
    for stats in (context.stats.forward, context.stats.backward):
        assert (stats.calls, getattr(stats, winner)) == (1, 1)


def only_filters(tables, limit):
    """Filter gradients by ours, the rest by PyTorch."""
    if tables[0].problem.direction is Direction.BACKWARD_FILTER:
        return without_torch(tables, limit)
    return only_torch(tables, limit)


@pytest.mark.parametrize("function", [conv, conv_transpose])
def test_one_gradient_by_ours_and_the_others_by_pytorch(function, monkeypatch):
    slow = [Timing(1.0, 0.0, 1), Timing(2.0, 0.0, 1)]
    monkeypatch.setattr(conv_calls, "measure_together", lambda *args: slow)
    context = mt.convolutions(tuner=tuner(native=True, planner=only_filters))
    x, w, b = (t.detach()[:4].clone().requires_grad_() for t in operands())
    expected = torch.autograd.grad(function(x, w, b).sum(), (x, w, b))
    with context:
        found = torch.autograd.grad(function(x, w, b).sum(), (x, w, b))
    torch.testing.assert_close(found, expected)
    assert (context.stats.forward.native, context.stats.backward.ours) == (1, 1)


def test_the_native_algorithm_computes_what_ours_do():
    x = np.random.default_rng(0).standard_normal((4, 6, 9, 8))
    w = np.random.default_rng(1).standard_normal((8, 3, 3, 2))
    only = {"stride": (2, 1), "padding": 1, "dilation": (1, 2), "groups": 2}
    reference = Tuner(batch_policy="undivided", validate=False, cache=None, rule=ONCE)

    def halves(tables, limit):
        rows = [
            next(p for p in t.usable if p.algo == TORCH and p.batch == 2)
            for t in tables
        ]
        return [ConvPlan(t.problem, (p, p)) for t, p in zip(tables, rows, strict=True)]

    native = tuner(native=True, planner=halves, batch_policy="powers_of_two")
    for layout in ("NCHW", "NHWC"):
        last = layout == "NHWC"
        a = np.ascontiguousarray(np.moveaxis(x, 1, -1)) if last else x
        b = np.ascontiguousarray(np.moveaxis(w, 1, -1)) if last else w
        made = []
        for one in (reference, native):
            options = {**only, "layout": layout, "tuner": one}
            y = mucudnn.conv2d(a, b, **options)
            dw = np.ones_like(b)
            mucudnn.conv_backward_filter(
                a, y, b.shape, out=dw, accumulate=True, **options
            )
            made.append((y, mucudnn.conv_backward_data(y, b, a.shape, **options), dw))
        for one, other in zip(*made, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-10)


def test_lists_of_one_entry_are_told_from_others(ours):
    x = torch.randn(2, 3, 9, 9)
    w = torch.randn(4, 3, 3, 3)
    wide = {"stride": (2,), "padding": (1, 1)}
    narrow = {"stride": (2, 1), "padding": (1,)}
    expected = [functional.conv2d(x, w, **options) for options in (wide, narrow)]
    with ours:
        found = [functional.conv2d(x, w, **options) for options in (wide, narrow)]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert ours.stats.forward.ours == 2


@pytest.mark.parametrize("direction", list(Direction))
def test_a_plan_of_several_libraries_is_bound_as_one(direction):
    backend = mt.cpu_backend()
    problem = ConvProblem(
        direction=direction,
        x_shape=(4, 3, 6, 6),
        w_shape=(5, 3, 3, 3),
        dtype="float64",
        layout="NHWC",
    )
    offered = dict(backend.conv.algorithms(problem.with_batch(2)))
    assert backend.conv.traits(problem, TORCH).notes == ("workspace_not_counted",)
    steps = (
        AlgoPerf(algo=name, batch=2, time_ms=1.0, workspace=offered[name])
        for name in (TORCH, "GEMM")
    )
    plan = ConvPlan(problem, tuple(steps))
    device = backend.device
    a, b, out = (
        device.view(device.allocate(spec.nbytes), 0, spec)
        for spec in problem.operands()
    )
    device.randomize(a)
    device.randomize(b)
    workspace = device.allocate(plan.workspace)
    backend.bind(plan).run(a, b, out, workspace, False)
    expected = np.empty_like(out)
    mucudnn.get_backend("cpu").conv.run(
        problem, "IMPLICIT_GEMM", a, b, expected, workspace
    )
    np.testing.assert_allclose(out, expected, rtol=1e-10, atol=1e-12)


def test_fingerprints_name_pytorch_only_where_it_runs():
    plain = mucudnn.get_backend("cpu").device.fingerprint
    assert f"torch-{torch.__version__}" in mt.cpu_backend().device.fingerprint
    assert mt.cpu_backend(native=False).device.fingerprint == plain


def test_nesting_and_leaving_in_any_order():
    x, w, b = operands(requires_grad=False)
    outer, inner = (mt.convolutions(tuner=tuner()) for _ in range(2))

    def counts():
        return outer.stats.forward.calls, inner.stats.forward.calls

    outer.__enter__()
    conv(x, w, b)
    assert counts() == (1, 0)
    inner.__enter__()
    inner.__enter__()
    conv(x, w, b)
    assert counts() == (1, 1)
    outer.__exit__(None, None, None)
    conv(x, w, b)
    inner.__exit__(None, None, None)
    conv(x, w, b)
    assert counts() == (1, 3)
    inner.__exit__(None, None, None)
    conv(x, w, b)
    assert counts() == (1, 3)


def test_an_exception_restores_pytorchs_kernels(ours):
    x, w, b = operands(requires_grad=False)
    native = conv(x, w, b)

    @ours
    def broken():
        conv(x, w, b)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        broken()
    calls = ours.stats.forward.calls
    assert torch.equal(conv(x, w, b), native)
    assert ours.stats.forward.calls == calls


def test_a_kernel_that_fails_is_pytorchs_from_then_on(monkeypatch):
    x, w, b = operands()
    context = mt.convolutions(tuner=tuner())
    expected = conv(x, w, b)
    with context:
        conv(x, w, b)

        def broken(*args):
            raise BackendError("no such luck")

        monkeypatch.setattr(conv_calls.Kernel, "__call__", broken)
        for _ in range(2):
            assert torch.equal(conv(x, w, b), expected)
    stats = context.stats.forward
    assert (stats.calls, stats.ours) == (3, 1)
    assert stats.fell_back == {"BackendError: no such luck": 2}


def test_a_limit_too_small_for_ours_falls_back():
    x, w, b = operands()

    def nothing_fits(tables, limit):
        raise PlanningError("nothing fits")

    context = mt.convolutions(tuner=tuner(planner=nothing_fits))
    expected = conv(x, w, b)
    with context:
        assert torch.equal(conv(x, w, b), expected)
    assert context.stats.forward.fell_back == {"nothing fits": 1}


def test_threads_share_a_context():
    context = mt.convolutions(tuner=tuner())
    x, w, b = operands(requires_grad=False)
    expected = conv(x, w, b)
    expected_grads = torch.func.grad(lambda w: conv(x, w, b).sum())(w)

    def work(_):
        own = w.clone().requires_grad_()
        for _ in range(5):
            y = conv(x, own, b)
            (grad,) = torch.autograd.grad(y.sum(), own)
            torch.testing.assert_close(y, expected)
            torch.testing.assert_close(grad, expected_grads)

    with context, ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert context.stats.forward.ours == context.stats.backward.ours == 20


@pytest.mark.usefixtures("one_thread")
def test_other_threads_run_during_a_native_kernel():
    """As they do in PyTorch: the interpreter's lock is not held.

    If it were, another thread would run between two kernels, once or twice a call.
    """
    context = mt.convolutions(tuner=tuner(native=True, planner=only_torch))
    x = torch.randn(8, 32, 112, 112)
    w = torch.randn(32, 32, 3, 3)
    ticks, over = [], threading.Event()

    def tick():
        while not over.wait(0.0005):
            ticks.append(1)

    def ticked():
        before = len(ticks)
        functional.conv2d(x, w)
        return len(ticks) - before

    with context:
        functional.conv2d(x, w)  # measured and planned
        other = threading.Thread(target=tick)
        other.start()
        try:
            assert any(ticked() > 8 for _ in range(100))
        finally:
            over.set()
            other.join()


def test_modes_see_the_calls_that_the_user_wrote():
    class Recorder(TorchFunctionMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_function__(self, function, types, args=(), kwargs=None):
            self.seen.append(function)
            return function(*args, **(kwargs or {}))

    context = mt.convolutions(tuner=tuner(native=True, planner=only_torch))
    x, w, b = operands(requires_grad=False)
    with Recorder() as outside:
        expected = conv(x, w, b)
    with context:
        conv(x, w, b)
        with Recorder() as within:
            found = conv(x, w, b)
    assert torch.equal(found, expected)
    assert within.seen == outside.seen
    assert context.stats.forward.native == 2


def test_nothing_is_kept_of_the_operands(ours):
    x, w, b = operands()
    with ours:
        y = conv(x, w, b)
        y.sum().backward()
    kept = [weakref.ref(t) for t in (x, w, b, y)]
    del x, w, b, y
    assert [ref() for ref in kept] == [None] * 4


def test_mistakes_are_said():
    with pytest.raises(ValueError, match="sixty"):
        mt.convolutions("sixty")
    with pytest.raises(ValueError, match=re.escape("cpu_backend()")):
        mt.convolutions(tuner=Tuner(cache=None))
    with pytest.raises(ValueError, match="cannot both be given"):
        mt.convolutions("1MiB", tuner=tuner())
    assert mt.convolutions().tuner.workspace_limit == 64 << 20
    assert mt.convolutions("8MiB").tuner.workspace_limit == 8 << 20
