"""PyTorch's convolutions by our plans, judged by PyTorch's own samples and checks."""

import importlib
import re
import statistics
import threading
import time
import warnings
import weakref
from contextlib import nullcontext

import numpy as np
import pytest

import mucudnn
from mucudnn import Tuner
from mucudnn.errors import BackendError, PlanningError
from mucudnn.ir.conv import ConvPlan, Direction
from mucudnn.runtime.tuning.timing import StoppingRule, Timing

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402  (where there is PyTorch)
from torch.utils import flop_counter  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import mucudnn.torch as mt  # noqa: E402
from mucudnn.torch import conv_calls  # noqa: E402
from mucudnn.torch.conv_backend import TORCH  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:Using padding='same'"),  # what it costs PyTorch
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # gradcheck's
]

OPERATORS = [
    f"nn.functional.conv{kind}{rank}d"
    for kind in ("", "_transpose")
    for rank in (1, 2, 3)
]
ONCE = StoppingRule(min_samples=1, max_samples=1, hopeless=0.0)


def tuner(*, native=False, **options):
    """Ours alone, unless `native`, timed as briefly as can be."""
    options = {"batch_policy": "undivided", "validate": False, **options}
    backend = mt.cpu_backend(native=native)
    return Tuner(backend=backend, cache=None, rule=ONCE, **options)


@pytest.fixture(scope="module")
def ours():
    return mt.convolutions(tuner=tuner())


@pytest.fixture(scope="module")
def operators():
    pytest.importorskip("expecttest")  # which PyTorch's own tests need
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
        for one, other in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(one, other)
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


def operands(dtype=torch.float64, *, requires_grad=True):
    x = torch.randn(2, 4, 6, 6, dtype=dtype, requires_grad=requires_grad)
    w = torch.randn(6, 2, 3, 3, dtype=dtype, requires_grad=requires_grad)
    b = torch.randn(6, dtype=dtype, requires_grad=requires_grad)
    return x, w, b


def conv(x, w, b):
    return functional.conv2d(x, w, b, stride=2, padding=1, groups=2)


def conv_transpose(x, w, b):
    return functional.conv_transpose2d(
        x, w, b, stride=2, padding=1, output_padding=1, dilation=2, groups=2
    )


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


def test_vmap_and_gradients_a_sample(ours):
    x, w, b = operands(requires_grad=False)
    images = torch.randn(3, *x.shape, dtype=x.dtype)
    expected = torch.stack([conv(image, w, b) for image in images])

    def loss(w, image):
        return conv(image[None], w, b).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
    expected_grads = per_sample(w, x)
    before = ours.stats.forward.ours
    with ours:
        torch.testing.assert_close(
            torch.vmap(lambda i: conv(i, w, b))(images), expected
        )
        torch.testing.assert_close(per_sample(w, x), expected_grads)
    assert ours.stats.forward.ours > before


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


def test_other_threads_run_during_a_native_kernel():
    """As they do in PyTorch: the interpreter's lock is not held."""
    context = mt.convolutions(tuner=tuner(native=True, planner=only_torch))
    x = torch.randn(2, 32, 48, 48, requires_grad=True)
    w = torch.randn(32, 32, 3, 3, requires_grad=True)
    ticks, over = [], threading.Event()

    def tick():
        while not over.wait(0.001):
            ticks.append(time.perf_counter())

    with context:
        functional.conv2d(x, w).sum().backward()  # measured and planned
        other = threading.Thread(target=tick)
        other.start()
        start = time.perf_counter()
        while time.perf_counter() < start + 0.5:
            functional.conv2d(x, w).sum().backward()
        stop = time.perf_counter()
        over.set()
        other.join()
    assert ticks
    times = [start, *(t for t in ticks if start < t < stop), stop]
    assert statistics.median(np.diff(times)) < 0.005  # as the interpreter's interval


def test_nothing_is_kept_of_the_operands(ours):
    x, w, b = operands()
    with ours:
        y = conv(x, w, b)
        y.sum().backward()
    kept = [weakref.ref(t) for t in (x, w, b, y)]
    del x, w, b, y
    assert [ref() for ref in kept] == [None] * 4


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


class Residual(torch.nn.Module):
    """A small network with every usual convolution in it."""

    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 3, padding="same", bias=False)
        self.norm = torch.nn.BatchNorm2d(8)
        self.down = torch.nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.depthwise = torch.nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.shortcut = torch.nn.Conv2d(8, 16, 1, stride=2)
        self.up = torch.nn.ConvTranspose2d(16, 4, 3, stride=2, padding=1)
        self.head = torch.nn.Linear(4, 5)

    def forward(self, x):
        x = functional.relu(self.norm(self.stem(x)))
        inner = self.depthwise(functional.relu(self.down(x)))
        x = functional.relu(inner + self.shortcut(x))
        return self.head(self.up(x).mean((2, 3)))


def losses(model, steps=3):
    rng = np.random.default_rng(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for _ in range(steps):
        x = torch.from_numpy(rng.standard_normal((4, 3, 12, 12)))
        loss = functional.cross_entropy(model(x), torch.arange(4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def trained(context, wrap=lambda model: model):
    torch.manual_seed(5)
    model = Residual().double()
    with context:
        found = losses(wrap(model))
    return found, model.state_dict()


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
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    for stats in (context.stats.forward, context.stats.backward):
        assert (stats.calls, getattr(stats, winner)) == (1, 1)


def without_torch(tables, limit):
    return [
        ConvPlan(
            table.problem,
            (
                min(
                    (p for p in table.usable if p.algo != TORCH),
                    key=lambda p: p.time_ms,
                ),
            ),
        )
        for table in tables
    ]


def only_torch(tables, limit):
    return [
        ConvPlan(
            t.problem,
            tuple(
                p for p in t.usable if p.algo == TORCH and p.batch == t.problem.batch
            ),
        )
        for t in tables
    ]


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
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
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
        (ready,) = context._forward.values()

        def broken(*args):
            raise BackendError("no such luck")

        monkeypatch.setattr(ready.run._kernel, "_run", broken)
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
    failures = []

    def work():
        own = w.clone().requires_grad_()
        try:
            for _ in range(5):
                y = conv(x, own, b)
                (grad,) = torch.autograd.grad(y.sum(), own)
                torch.testing.assert_close(y, expected)
                torch.testing.assert_close(grad, expected_grads)
        except Exception as e:
            failures.append(e)

    with context:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
    assert context.stats.forward.ours == context.stats.backward.ours == 20


def test_frozen_parts_have_no_gradient_computed(ours):
    x, w, b = operands()
    for leaves in ((x,), (w,), (b,), (x, b)):
        expected = torch.autograd.grad(conv(x, w, b).sum(), leaves)
        frozen = [
            t if any(t is leaf for leaf in leaves) else t.detach() for t in (x, w, b)
        ]
        with ours:
            found = torch.autograd.grad(conv(*frozen).sum(), leaves)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


def test_mistakes_are_said():
    with pytest.raises(ValueError, match="sixty"):
        mt.convolutions("sixty")
    with pytest.raises(ValueError, match=re.escape("cpu_backend()")):
        mt.convolutions(tuner=Tuner(cache=None))
    with pytest.raises(ValueError, match="to the tuner"):
        mt.convolutions("1MiB", tuner=tuner())
    assert mt.convolutions().tuner.workspace_limit == 64 << 20
    assert mt.convolutions("8MiB").tuner.workspace_limit == 8 << 20
