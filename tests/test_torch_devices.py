"""What would go wrong on a GPU and can be seen without one: schemas, devices, casts."""

import ast
import contextlib
import gc
import weakref
from pathlib import Path

import pytest
import torch

import mucudnn.torch as mt
from mucudnn.errors import PlanningError, UnsupportedError
from mucudnn.torch.capture import step as capture_module
from mucudnn.torch.capture.known_values import KnownShapes
from mucudnn.torch.capture.undeclared_writes import (
    UNDECLARED_WRITES,
    functional_variant,
    writes_of,
)

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*profiling.*"),
]

CROSS_ENTROPY = torch.nn.functional.cross_entropy

WRITTEN_NAMES = frozenset(
    {"running_mean", "running_var", "running_min", "running_max", "dropout_state"}
    | {"reserve", "reserveSpace", "workspace", "noise"}
)
"""Arguments that kernels may write: statistics, states of generators, scratch."""

PURE = {
    "aten::_batch_norm_no_update": "its name",
    "aten::_batch_norm_with_update_functional": "returns the new statistics",
    "aten::_fused_moving_avg_obs_fq_helper_functional": "returns the new extremes",
    "aten::_native_batch_norm_legit_functional": "returns the new statistics",
    "aten::_native_batch_norm_legit_no_training": "reads the statistics",
    "aten::_thnn_fused_gru_cell_backward": "reads what the forward pass has saved",
    "aten::_thnn_fused_lstm_cell_backward_impl": "reads what forward has saved",
    "aten::batch_norm_backward": "reads statistics and what forward has saved",
    "aten::cudnn_batch_norm_backward": "reads statistics and what forward has saved",
    "aten::mkldnn_rnn_layer_backward": "reads what forward has saved",
    "aten::miopen_batch_norm_backward": "reads the statistics",
    "aten::native_batch_norm_backward": "reads the statistics",
    "aten::rrelu_with_noise_backward": "reads the noise",
    "aten::rrelu_with_noise_functional": "returns the noise",
}
"""Operators that only read such an argument -> why."""


def test_every_operator_with_a_writable_argument_is_classified():
    """A new version of PyTorch may add one: it belongs in one of the two tables."""
    found = set()
    for name in torch._C._dispatch_get_all_op_names():
        base, _, overload = name.partition(".")
        composed = torch._C._dispatch_has_kernel_for_dispatch_key(
            name, "CompositeImplicitAutograd"
        )
        if base.startswith("aten::") and "out" not in overload and not composed:
            arguments = torch._C._get_schema(base, overload).arguments
            if any(a.name in WRITTEN_NAMES and not a.alias_info for a in arguments):
                found.add(base)
    known = UNDECLARED_WRITES.keys() | PURE.keys()
    assert found <= known, found - known
    assert not UNDECLARED_WRITES.keys() & PURE.keys()


def test_a_functional_form_leaves_its_operands_and_returns_what_they_become():
    function = torch.ops.aten.native_batch_norm.default
    x, weight, bias = torch.rand(6, 4, 3, 3), torch.rand(4), torch.rand(4)
    mean, var = torch.rand(4), torch.rand(4)
    before = mean.clone(), var.clone()
    given = x, weight, bias, mean, var, True, 0.1, 1e-5
    *results, new_mean, new_var = functional_variant(function)(*given)
    assert torch.equal(mean, before[0])
    assert torch.equal(var, before[1])
    for mine, theirs in zip(results, function(*given), strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(mean, new_mean)
    assert torch.equal(var, new_var)
    assert writes_of(function, given, {})
    assert not writes_of(function, (*given[:5], False, *given[6:]), {})


def test_an_operator_that_fails_for_made_up_numbers_is_refused():
    @torch.library.custom_op("mucudnn_tests::root", mutates_args=())
    def root(x: torch.Tensor) -> torch.Tensor:
        if x.max() < 1:
            raise RuntimeError("too small")
        return x.sqrt()

    root.register_fake(torch.empty_like)
    root.register_autograd(lambda ctx, grad: grad)
    layer = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    loss_fn = lambda out: root(out + 2).sum()  # noqa: E731
    step = mt.train_step(layer, loss_fn, optimizer, budget="1GiB", cache=None)
    with pytest.raises(UnsupportedError, match=r"is measured with: .*: too small"):
        step(torch.ones(3, 4))


@pytest.mark.parametrize("counted", [True, False])
def test_an_operator_whose_schema_hides_a_write_is_refused(counted):
    """By version counters; and where a kernel does not count its write, by bytes."""

    @torch.library.custom_op(f"mucudnn_tests::averaged_{counted}", mutates_args=())
    def averaged(x: torch.Tensor, average: torch.Tensor) -> torch.Tensor:
        target = average if counted else torch.from_numpy(average.numpy())
        target.mul_(0.9).add_(0.1)
        return x * 2

    averaged.register_fake(lambda x, average: torch.empty_like(x))
    averaged.register_autograd(lambda ctx, grad: (grad * 2, None))

    class Averaging(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 4)
            self.register_buffer("average", torch.ones(3))

        def forward(self, x):
            return averaged(self.linear(x), self.average)

    model = Averaging()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = mt.train_step(model, CROSS_ENTROPY, optimizer, budget="1GiB", cache=None)
    with pytest.raises(UnsupportedError, match="modifies an operand"):
        step(torch.rand(5, 8), torch.zeros(5, dtype=torch.long))


class Float32Head(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.head(x.float())


@pytest.mark.parametrize("precision", ["none", "tf32"])
def test_a_float32_part_under_autocast_with_a_plan_cache(precision, tmp_path):
    """Measuring is outside of the user's autocast, whichever device's; and the plan
    cache describes the precision of products by either of PyTorch's interfaces."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), Float32Head())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    store = str(tmp_path / "plans.sqlite")
    step = mt.train_step(model, CROSS_ENTROPY, optimizer, cache=store)
    matmul = torch.backends.cuda.matmul
    matmul.fp32_precision = precision
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = step(torch.rand(5, 8), torch.zeros(5, dtype=torch.long))
    finally:
        matmul.fp32_precision = "none"
    assert loss.dtype == torch.float32
    assert step.plan.peak_bytes > 0


def test_a_study_reads_the_newer_interface_of_precisions():
    """Reading the older one raises where operators were set apart."""
    model = torch.nn.Sequential(torch.nn.Conv2d(64, 256, 3), torch.nn.Flatten())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.rand(8, 64, 16, 16), torch.zeros(8, dtype=torch.long)
    conv, found = torch.backends.cudnn.conv, {}
    before = conv.fp32_precision
    try:
        for conv.fp32_precision in ("ieee", "tf32"):
            study = mt.memory(model, CROSS_ENTROPY, batch, optimizer, device="h200")
            found[conv.fp32_precision] = study.plan().plan.prediction.step_ms
    finally:
        conv.fp32_precision = before
    assert found["tf32"] < found["ieee"]


CONSTRUCTORS = frozenset(
    {"arange", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "ones"}
    | {"rand", "randint", "randn", "randperm", "tensor", "zeros"}
)


def test_every_new_tensor_names_its_device():
    """`torch.set_default_device` changes where all others are made."""
    source = Path(mt.__file__).parent
    found = []
    for path in sorted(source.rglob("*.py")):
        if path.name == "demo.py":  # a model of its own, on the CPU
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(ast.Name("torch"), attr=name)):
                    named = {keyword.arg for keyword in node.keywords}
                    if name in CONSTRUCTORS and not named & {"device", "generator"}:
                        found.append(f"{path.relative_to(source)}:{node.lineno}")
    assert not found


@pytest.mark.parametrize("budget", [None, "1KiB"])
def test_a_dropped_step_leaves_no_tensor_behind(budget, monkeypatch):
    """PyTorch's caches keep a capture's symbols, which must not keep its inputs."""
    kept = []

    class Kept(KnownShapes):
        def __init__(self, *args):
            super().__init__(*args)
            kept.append(self)

    monkeypatch.setattr(capture_module, "KnownShapes", Kept)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    step = mt.train_step(model, CROSS_ENTROPY, optimizer, budget=budget, cache=None)
    with contextlib.suppress(PlanningError):
        step.prepare(torch.rand(5, 8), torch.zeros(5, dtype=torch.long))
    left = weakref.ref(model[0].weight)
    del step, optimizer, model
    gc.collect()
    assert kept
    assert left() is None
    assert not any(isinstance(v, torch.Tensor) for s in kept for v in s._given)
