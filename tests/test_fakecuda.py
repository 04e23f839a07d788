"""PyTorch steps on CUDA, over a stand-in for the CUDA runtime: no GPU.

PyTorch's own dispatcher, caching allocator, streams, events and sanitizer run. Kernels
compute nothing, or where results are compared run on the CPU in the same memory.
"""

import contextlib
import copy
import ctypes
import dataclasses
import functools
import gc
import json
import math
import random
import re
import subprocess
import sys
import time
import warnings
import weakref
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from tests.fakecuda import device as fakecuda, triton_kernels  # noqa: E402

if fakecuda.library() is None:
    pytest.skip(fakecuda.NEEDED, allow_module_level=True)

from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import mucudnn.torch as mt  # noqa: E402
from bench.gpu import pytorch_steps  # noqa: E402
from mucudnn.errors import PlanningError, UnsupportedError  # noqa: E402
from mucudnn.ir.graph import Phase  # noqa: E402
from mucudnn.ir.sizes import format_bytes  # noqa: E402
from mucudnn.torch import internals, plan_program  # noqa: E402
from mucudnn.torch.capture.optimizers import make_state  # noqa: E402
from mucudnn.torch.capture.undeclared_writes import UNDECLARED_WRITES  # noqa: E402
from mucudnn.torch.costs.meters import CudaMeter, Links  # noqa: E402
from mucudnn.torch.distributed import collectives  # noqa: E402
from mucudnn.torch.distributed.collectives import TorchCollectives  # noqa: E402
from mucudnn.torch.distributed.step_times import (  # noqa: E402
    StepClock,
    measure_steps,
    memory_of,
)
from mucudnn.torch.execution import cuda_memory, program, segments  # noqa: E402
from mucudnn.torch.execution.copies import OffloadedStorage  # noqa: E402
from mucudnn.torch.execution.cuda_copies import StreamCopies  # noqa: E402
from mucudnn.torch.execution.cuda_memory import PROGRAM, live_tensors  # noqa: E402
from mucudnn.torch.execution.segments import Pool, best_segments  # noqa: E402
from mucudnn.torch.inductor import compiling  # noqa: E402
from mucudnn.torch.plan import TorchPlan  # noqa: E402

CROSS_ENTROPY = nn.functional.cross_entropy
CUDA_0 = torch.device("cuda", 0)

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    # Segments of 20 MiB are more than the budget of a network of a few KiB.
    "ignore:PyTorch's allocator reserves",
)


@pytest.fixture(autouse=True)
def without_engines():
    """The stand-in has no engines of cuDNN, which attention would be given first."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    yield
    torch.backends.cuda.enable_cudnn_sdp(True)


class Attention(nn.Module):
    def __init__(self, width=32, heads=2, dropout=0.0):
        super().__init__()
        self.qkv, self.heads, self.dropout = nn.Linear(width, 3 * width), heads, dropout

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout, is_causal=True
        )
        return x + y.transpose(1, 2).flatten(2)


class Float32Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        with torch.autocast("cuda", enabled=False):
            return self.head(x.float())


def classes(n):
    return torch.randint(0, 10, (n,), device="cuda")


def images(n=8, channels=8):
    return torch.rand(n, channels, 8, 8, device="cuda")


def norms(depth=2):
    inside = (layer for _ in range(depth) for layer in (nn.BatchNorm2d(8), nn.ReLU()))
    return nn.Sequential(*inside, nn.Flatten(), nn.Linear(512, 10))


def dense(*last):
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), *last or (nn.Linear(64, 10),))


def attended(dropout=0.0):
    return nn.Sequential(
        nn.Embedding(50, 32), Attention(dropout=dropout), nn.LayerNorm(32),
        nn.Dropout(dropout), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def tokens(n=8):
    return torch.randint(0, 50, (n, 16), device="cuda")


def pooled():
    return nn.Sequential(
        nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.BatchNorm2d(8),
        nn.GELU(), nn.Flatten(), nn.Linear(128, 10),
    )  # fmt: skip


MODELS = {
    "norms": (norms, images),
    "pooled": (pooled, images),
    "dropout": (
        lambda: dense(nn.Dropout(0.3), nn.Linear(64, 10)),
        lambda: torch.rand(8, 64, device="cuda"),
    ),
    "dense": (dense, lambda: torch.rand(8, 64, device="cuda")),
    "attention": (attended, tokens),
    "attention, dropout": (functools.partial(attended, 0.1), tokens),
    "float32 head": (lambda: dense(Float32Head()), lambda: torch.rand(8, 64).cuda()),
    "group norm": (
        lambda: nn.Sequential(nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(512, 10)),
        images,
    ),
    "1-d norm": (
        lambda: dense(nn.BatchNorm1d(64), nn.Linear(64, 10)),
        lambda: torch.rand(8, 64, device="cuda"),
    ),
}

OPTIMIZERS = {
    f"{kind.__name__} {form}".strip(): functools.partial(
        kind, lr=0.01, **({form: True} if form else {"foreach": False}), **more
    )
    for kind, more in (
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, {}),
    )
    for form in ("", "foreach", "fused")
}
# Its two averages are updated by equal operations, one of which needs the other's.
OPTIMIZERS["Adadelta foreach"] = functools.partial(
    torch.optim.Adadelta, lr=0.01, foreach=True
)


def case(name, dtype=torch.float32):
    make, batch = MODELS[name]
    torch.manual_seed(0)
    model, x = make().cuda().to(dtype), batch()
    return model, (x.to(dtype) if x.is_floating_point() else x), classes(8)


def sgd(model, momentum=0.0):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=momentum)


def step_of(model, optimizer, budget=None, cache=None, **options):
    return mt.train_step(
        model, CROSS_ENTROPY, optimizer, budget=budget, cache=cache, **options
    )


def step_of_case(name, **options):
    """A case's model, its batch and its step by plain SGD."""
    model, *batch = case(name)
    return model, batch, step_of(model, sgd(model), **options)


def trained_eagerly(model, optimizer, batch, steps=3):
    for _ in range(steps):
        CROSS_ENTROPY(model(batch[0]), batch[1]).backward()
        optimizer.step()
        optimizer.zero_grad()


def wide(depth=4, width=256):
    hidden = nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width)
    layers = (layer for _ in range(depth) for layer in copy.deepcopy(hidden))
    return nn.Sequential(*layers, nn.Linear(width, 10)).cuda()


def wide_batch(rows=4096):
    y = torch.zeros(rows, dtype=torch.long, device="cuda")
    return torch.rand(rows, 256, device="cuda"), y


def least_budget(model, optimizer, batch, **options):
    step = step_of(model, optimizer, "1KiB", **options)
    with pytest.MonkeyPatch.context() as patch:
        # The budget in reserved bytes, which a refusal names too, takes several plans.
        patch.setattr(plan_program.LoweredStep, "_advise_reserved", lambda *_: "")
        with pytest.raises(PlanningError) as found:
            step.prepare(*batch)
    return found.value.least_bytes


def have_links(monkeypatch, bytes_per_ms):
    links = Links(bytes_per_ms, bytes_per_ms)
    monkeypatch.setattr(CudaMeter, "links", lambda meter, step: links)
    monkeypatch.setattr(CudaMeter, "time_ms", lambda meter, call: 1.0)


@pytest.fixture
def recomputing(monkeypatch):
    """Copies so slow that what does not fit is computed again."""
    have_links(monkeypatch, 1e-3)


@pytest.fixture
def offloading(monkeypatch):
    """Copies that take no time."""
    have_links(monkeypatch, 1e12)


# -- results


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [("norms", "SGD"), *(("dense", name) for name in OPTIMIZERS)],
)
def test_parameters_and_buffers_are_eagers(model, optimizer, recomputing):
    with fakecuda.KernelsOnHost():
        model, *batch = case(model)
        eager = copy.deepcopy(model)
        trained_eagerly(eager, OPTIMIZERS[optimizer](eager.parameters()), batch)
        mine = copy.deepcopy(model)
        budgets = [None]
        if optimizer in ("SGD", "AdamW foreach", "AdamW fused"):
            own = OPTIMIZERS[optimizer](mine.parameters())
            budgets.append(least_budget(mine, own, batch))
        for budget in budgets:
            mine = copy.deepcopy(model)
            own = OPTIMIZERS[optimizer](mine.parameters())
            step = step_of(mine, own, budget)
            for _ in range(3):
                step(*batch)
            # No assertion shows a tensor: its digits would be those of empty kernels.
            state = mine.state_dict()
            pairs = [
                (n, v.cpu(), state[n].cpu()) for n, v in eager.state_dict().items()
            ]
            assert not [
                name for name, one, other in pairs if not torch.equal(one, other)
            ]
    again = step.plan.recomputed
    assert "Norm" not in str(model) or any("norm" in name for name in again)


# -- settings


@contextlib.contextmanager
def setting(name):
    """Set something that decides where tensors are made or how kernels compute."""
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    match name:
        case "default device":
            with torch.device("cuda"):
                yield
        case "TF32":
            torch.backends.cuda.matmul.allow_tf32 = True
            yield
            torch.backends.cuda.matmul.allow_tf32 = False
        case "TF32, by the newer switch":
            before = matmul.fp32_precision, conv.fp32_precision
            matmul.fp32_precision = conv.fp32_precision = "tf32"
            try:
                yield
            finally:
                matmul.fp32_precision, conv.fp32_precision = before
        case "another stream":
            with torch.cuda.stream(torch.cuda.Stream()):
                yield
        case "bfloat16 autocast" | "float16 autocast":
            with torch.autocast("cuda", dtype=getattr(torch, name.split()[0])):
                yield
        case _:
            yield


SETTINGS = (
    *("plain", "default device", "TF32", "TF32, by the newer switch"),
    *("another stream", "bfloat16 autocast", "float16 autocast"),
)


@pytest.mark.parametrize(
    ("face", "model", "name"),
    [
        *(("train_step", model, "bfloat16 autocast") for model in MODELS),
        *(("train_step", "norms", name) for name in SETTINGS if "bfloat16" not in name),
        *(("backend", "norms", name) for name in SETTINGS),
        ("backend", "attention, dropout", "plain"),
        ("backend", "float32 head", "bfloat16 autocast"),
    ],
)
def test_steps_run_under_every_setting(face, model, name, tmp_path, fresh_compiler):
    """The plan is stored, which describes the settings, and found again."""
    with setting(name):
        model, *batch = case(model)
        store = str(tmp_path / "plans.sqlite")
        if face == "train_step":
            step = step_of(model, sgd(model, 0.9), cache=store)
            assert step(*batch).is_cuda
            return
        compiled = torch.compile(model, backend=mt.backend(cache=store), fullgraph=True)
        loss = CROSS_ENTROPY(compiled(batch[0]), batch[1])
    loss.backward()
    assert next(model.parameters()).grad.is_cuda


@pytest.mark.parametrize("name", ["TF32", "TF32, by the newer switch"])
def test_a_step_is_planned_anew_where_products_are_computed_otherwise(name):
    """Other kernels have other scratch memory."""
    _, batch, step = step_of_case("dense")
    step(*batch)
    before = step.plan.plan
    with setting(name):
        step(*batch)
    assert step.plan.plan is not before


@pytest.mark.parametrize("face", ["train_step", "backend"])
@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("norms", torch.bfloat16),
        ("norms", torch.float16),
        ("1-d norm", torch.bfloat16),
        ("group norm", torch.bfloat16),
        ("attention", torch.float16),
    ],
)
def test_models_of_low_precision(face, model, dtype, fresh_compiler):
    model, *batch = case(model, dtype)
    if face == "train_step":
        step = step_of(model, sgd(model))
        assert step(*batch).dtype == dtype
    else:
        compiled = torch.compile(model, backend=mt.backend(cache=None), fullgraph=True)
        CROSS_ENTROPY(compiled(batch[0]), batch[1]).backward()
        assert next(model.parameters()).grad.dtype == dtype


def test_a_second_device_and_channels_last():
    model, *batch = case("norms")
    model, batch = model.to("cuda:1"), [tensor.to("cuda:1") for tensor in batch]
    model = model.to(memory_format=torch.channels_last)
    batch[0] = batch[0].to(memory_format=torch.channels_last)
    optimizer = sgd(model, 0.9)
    least = least_budget(model, optimizer, batch)
    torch.cuda.empty_cache()
    first, foreign = torch.cuda.memory_reserved(0), torch.cuda.memory_stats(1)
    step = step_of(model, optimizer, least)
    assert step(*batch).device == torch.device("cuda", 1)
    assert step.plan.peak_bytes <= least
    # All is planned and reserved where the step runs.
    assert torch.cuda.memory_reserved(0) == first
    own = torch.cuda.max_memory_reserved(1) - foreign["requested_bytes.all.current"]
    assert own <= step.plan.reserved_bytes


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("dense", {"offload_state": True}, "works on the CPU only, and"),
        ("synchronized", {}, "use mt.distribute"),
    ],
)
def test_what_cuda_cannot_is_refused_when_it_is_planned(
    model, options, message, monkeypatch
):
    monkeypatch.setitem(MODELS, "synchronized", (Synchronized, MODELS["dense"][1]))
    _, batch, step = step_of_case(model, budget="1GiB", **options)
    with pytest.raises(UnsupportedError, match=message):
        step.prepare(*batch)


class Synchronized(nn.Module):
    """What SyncBatchNorm computes behind its collective."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(64), nn.Linear(64, 10)

    def forward(self, x):
        mean, inverse = torch.batch_norm_stats(x, 1e-5)
        mean, inverse = torch.batch_norm_gather_stats_with_counts(
            x, mean[None], inverse[None], self.norm.running_mean, self.norm.running_var,
            0.1, 1e-5, torch.full((1,), 8.0, device=x.device),
        )  # fmt: skip
        return self.head((x - mean) * inverse)


# -- operators

ASK_WITHOUT_WRITING = {
    "aten::_chunk_cat": "passes all addresses to its kernel in one array of pointers",
    "aten::nll_loss_forward": "its kernel takes a pointer that is not const",
    "aten::batch_norm_backward": "cuDNN's pointer to the reserve space is not const",
    "aten::cudnn_batch_norm_backward": "the same",
}
"""Operators that ask for an operand to write but only read it, and why they ask."""


def test_no_operator_recorded_as_pure_writes_an_operand():
    """Of all operators that PyTorch's own tests call on CUDA, forward and backward."""
    command = sys.executable, "-m", "tests.fakecuda.operators"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["ran"] > 500
    assert len(found["called"]) > 350
    known = {name for name, writes in UNDECLARED_WRITES.items() if writes.operands}
    assert found["written"].keys() - known == ASK_WITHOUT_WRITING.keys()
    assert not set(found["counted"]) - known
    norm = UNDECLARED_WRITES["aten::cudnn_batch_norm"]
    assert found["written"]["aten::cudnn_batch_norm"] == sorted(norm.operands)


# -- the other faces


def test_memory_studies_what_a_step_on_the_device_needs():
    """A study captures the CPU's operations, so bytes agree up to scratch memory."""
    model, *batch = case("dense")
    own = sgd(model, 0.9)
    study = mt.memory(model, CROSS_ENTROPY, batch, own, device="h100")
    plan = step_of(model, own).prepare(*batch)
    planned = plan.peak_bytes - plan.library_bytes
    assert study.least_budget <= study.unlimited_bytes <= planned
    assert next(model.parameters()).is_cuda


def test_inductor_says_what_it_lacks_and_the_step_runs_operation_by_operation(
    monkeypatch,
):
    monkeypatch.setattr(compiling, "has_triton", lambda: False)
    _, batch, step = step_of_case("dense", inductor=True)
    with pytest.warns(UserWarning, match="operation by operation.*pip install triton"):
        assert step(*batch).is_cuda


def test_a_parameter_that_kernels_cannot_read_is_named(empty_kernels):
    model, *batch = case("dense")
    first = model[0].bias
    flat = torch.zeros(len(first) + 1, device="cuda")
    model[0].bias = nn.Parameter(flat[1:])
    step = step_of(model, sgd(model), inductor=True)
    with pytest.warns(UserWarning, match=r"begins 4 bytes into its storage.*clone"):
        step(*batch)
    assert not step.plan.kernels


def test_compiled_steps_are_eagers_at_every_budget(recomputing):
    """Triton's kernels: batch norm with its statistics, pooling, reductions."""
    with fakecuda.KernelsOnHost(), triton_kernels.on_host() as ran:
        model, *batch = case("pooled")
        eager = copy.deepcopy(model)
        trained_eagerly(eager, sgd(eager), batch)
        found, budget = [], None
        for _ in range(2):
            mine = copy.deepcopy(model)
            own = sgd(mine)
            step = step_of(mine, own, budget, inductor=True)
            for _ in range(3):
                step(*batch)
            found.append([v.cpu() for v in mine.state_dict().values()])
            budget = least_budget(mine, own, batch, inductor=True)
        assert step.plan.kernels
        assert step.plan.leaving or step.plan.recomputed
        assert any("triton_poi" in name for name in ran)
        expected = [v.cpu() for v in eager.state_dict().values()]
    assert all(map(torch.equal, *found))
    pairs = zip(expected, found[0], strict=True)
    assert all(torch.allclose(a, b, 1e-4, 1e-6) for a, b in pairs)


def test_compiled_steps_draw_the_same_numbers_at_every_budget(recomputing):
    losses = []
    with fakecuda.KernelsOnHost(), triton_kernels.on_host():
        model, *batch = case("dropout")
        budget = None
        for _ in range(2):
            mine = copy.deepcopy(model)
            own = sgd(mine)
            step = step_of(mine, own, budget, inductor=True)
            step.prepare(*batch)
            torch.manual_seed(1)
            losses.append([step(*batch).item() for _ in range(3)])
            budget = least_budget(mine, own, batch, inductor=True)
    assert losses[0] == losses[1]
    assert len({*losses[0]}) == 3


def test_compiled_steps_run_on_their_device_in_its_current_stream(empty_kernels):
    """The stand-in's kernels compare both with what they are given."""
    other = torch.device("cuda", 1)
    model, *batch = case("dense")
    model, batch = model.to(other), [tensor.to(other) for tensor in batch]
    step = step_of(model, sgd(model), inductor=True)
    with torch.cuda.stream(torch.cuda.Stream(other)), torch.cuda.device(0):
        assert step(*batch).device == other
        assert torch.cuda.current_device() == 0
    assert step.plan.kernels
    assert {t.device for t in model.state_dict().values()} == {other}


@pytest.fixture
def one_rank():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    torch.distributed.destroy_process_group()


def test_distribute_measures_steps_on_the_device(one_rank):
    model, *batch = case("norms")
    found = mt.distribute(model, CROSS_ENTROPY, batch, batch=8)
    assert found.plan.samples == (8,)


def test_measured_steps_end_on_the_device_and_their_bytes_are_their_own(one_rank):
    model, *batch = case("norms")
    torch.empty(1 << 30, dtype=torch.uint8, device="cuda")  # a peak of someone else's
    with fakecuda.counted() as found:
        table = measure_steps(model, CROSS_ENTROPY, batch, least=2, most=2)
    assert found["device_sync"] >= 2
    assert all(0 < point.nbytes < 1 << 30 for point in table.points)
    assert memory_of(CUDA_0) == torch.cuda.get_device_properties(0).total_memory


def test_sums_over_ranks_are_launched_and_timed_on_the_device(one_rank):
    together = TorchCollectives(device=CUDA_0)
    with fakecuda.counted() as found:
        assert together.time_all_reduce(1 << 20) > 0
    assert found["device_sync"] >= 2
    # The host does not wait until others have released a tensor on a device.
    held = torch.ones(8, device="cuda")
    done = SimpleNamespace(wait=lambda: None)
    began = time.monotonic()
    collectives._Work(done, held, 0).wait()
    assert time.monotonic() - began < 1


def test_ranks_wait_for_sums_where_they_measure_them_and_not_in_a_step(tmp_path):
    command = sys.executable, "-m", "tests.fakecuda.ranks"
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        printed, _ = rank.communicate(timeout=200)
        measured, steady = map(json.loads, printed.splitlines()[-2:])
        assert rank.returncode == 0
        assert measured["device_sync"] >= steady["sums"] > 0
        never = "device_sync", "copy_sync", "malloc", "free", "host_alloc"
        assert not any(steady[call] for call in never)


def test_a_clock_of_steps_reads_events_and_waits_only_when_it_is_read():
    clock = StepClock(CUDA_0)
    with fakecuda.counted() as found:
        clock.begin(8)
        fakecuda.library().fake_work(None, ctypes.c_double(50e3))
        clock.end()
    assert not any(found[call] for call in NEVER if "sync" in call)
    with fakecuda.counted() as found:
        assert clock.factor(lambda samples: 50.0) >= 0.99
    assert (found["event_sync"], found["device_sync"]) == (1, 0)


# -- what the processor does

NEVER = (
    *("stream_sync", "event_sync", "device_sync", "copy_sync"),
    *("malloc", "free", "host_alloc", "event_create"),
)
"""Calls of CUDA's that a step does not make after its first two runs."""


def test_a_scaler_is_where_the_loss_is():
    scaler = torch.amp.GradScaler("cuda")
    _, batch, step = step_of_case("dense", scaler=scaler)
    with torch.autocast("cuda", dtype=torch.float16):
        step(*batch)
        with fakecuda.counted() as found:
            step(*batch)
    assert scaler._scale.is_cuda
    assert found["stream_sync"] == found["copy_sync"] == found["device_sync"] == 0


@pytest.mark.parametrize(
    "optimizer", [name for name in OPTIMIZERS if "foreach" in name or "fused" in name]
)
def test_a_step_launches_no_more_than_eagers(optimizer):
    model, *batch = case("attention")
    eager = copy.deepcopy(model)
    of_eager = OPTIMIZERS[optimizer](eager.parameters())
    step = step_of(model, OPTIMIZERS[optimizer](model.parameters()))
    launches = []
    for run in (
        functools.partial(trained_eagerly, eager, of_eager, batch, 1),
        functools.partial(step, *batch),
    ):
        run(), run()
        with fakecuda.counted() as found:
            run()
        launches.append(found["launch"] + found["product"])
    assert launches[1] <= launches[0]


@pytest.mark.parametrize("parts", [1.0, 0.25, 0.0])
def test_updates_in_groups_call_what_eager_calls(parts, monkeypatch):
    """CUDA divides by a number and by a list of numbers in different ways."""
    monkeypatch.setattr(plan_program, "_SHARES", (parts,))
    model, *batch = case("dense")
    eager = copy.deepcopy(model)
    of_eager = torch.optim.AdamW(eager.parameters(), 0.01)
    step = step_of(model, torch.optim.AdamW(model.parameters(), 0.01))
    called = []
    for run in (
        functools.partial(trained_eagerly, eager, of_eager, batch, 1),
        functools.partial(step, *batch),
    ):
        run(), run()
        with Calls() as calls:
            run()
        called.append({name for name in calls.names if "_foreach_" in name})
    of_division = [
        {n for n in names if "_div_" in n or "cdiv" in n} for names in called
    ]
    assert of_division[0] == of_division[1] != set()


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_updates_together_are_the_planners_choice(recomputing):
    """Where all gradients do not fit at once, they are updated in groups or alone."""
    model, *batch = case("dense")
    own = OPTIMIZERS["AdamW foreach"](model.parameters())
    least = least_budget(model, own, batch)
    calls = []
    for budget in (least, None):
        graph = step_of(model, own, budget).prepare(*batch).plan.schedule.graph
        calls.append(sum(node.phase is Phase.UPDATE for node in graph.nodes))
    assert calls[0] > calls[1]


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "AdamW foreach", "AdamW fused"])
def test_a_steady_step_waits_for_nothing_and_allocates_nothing(optimizer, recomputing):
    model, *batch = case("attention")
    step = step_of(model, OPTIMIZERS[optimizer](model.parameters()))
    for _ in range(2):
        step(*batch)
    with fakecuda.counted() as found:
        step(*batch)
    assert {key: found[key] for key in NEVER} == dict.fromkeys(NEVER, 0)


@pytest.mark.parametrize("name", ["plain", "default device"])
def test_a_step_that_offloads_reuses_its_events_and_memory(name, offloading):
    """The rate changes from step to step, and is a number on the host."""
    model, (x, y) = wide(), wide_batch(1024)
    own = sgd(model, 0.9)
    step = step_of(model, own, least_budget(model, own, (x, y)))
    with setting(name):
        for rate in (0.3, 0.2, 0.1, 0.05):
            own.param_groups[0]["lr"] = rate
            step(x, y)
        own.param_groups[0]["lr"] = 0.01
        with fakecuda.counted() as found:
            step(x, y)
    assert step.plan.leaving
    assert found["copy_async"] >= 2 * len(step.plan.leaving)
    assert {key: found[key] for key in NEVER} == dict.fromkeys(NEVER, 0)


# -- the order of copies


def without_wait(monkeypatch):
    monkeypatch.setattr(OffloadedStorage, "wait", lambda stored: None)


def without_fork(monkeypatch):
    def copy_at_once(copies, stream, target, source, after):
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        return stream.record_event()

    monkeypatch.setattr(StreamCopies, "_copy", copy_at_once)


@pytest.mark.parametrize("mutate", [None, without_wait, without_fork])
def test_the_sanitizer_sees_a_race_only_where_an_order_is_missing(
    mutate, monkeypatch, offloading
):
    model, (x, y) = wide(), wide_batch(1024)
    own = sgd(model, 0.9)
    least = least_budget(model, own, (x, y))
    if mutate is not None:
        mutate(monkeypatch)
    step = step_of(model, own, least)
    assert step.prepare(x, y).leaving
    with (
        pytorch_steps.sanitizer() as error,
        pytest.raises(error) if mutate else contextlib.nullcontext(),
    ):
        step(x, y), step(x, y), step(x, y)


# -- bytes


@pytest.mark.parametrize(
    ("parts", "spare"),
    [
        # Two small holes are freed where one large tensor has to go.
        ("a3 b3 c8 a b d8", 0),
        # A block is not split for less than 1 MiB, so half of one is lost at first.
        ("a5 b5 c5 d5 a a4.975 c d e10.025", 0.02),
    ],
)
def test_segments_are_found_where_one_leaves_gaps(parts, spare):
    unit = 20 << 20
    allocations = [(p[0], int(float(p[1:] or 0) * unit)) for p in parts.split()]
    live, most = {}, 0
    for name, size in allocations:
        live[name] = size
        most = max(most, sum(live.values()))
    alone = cuda_memory._gaps(CUDA_0, allocations, [most], most)
    found = best_segments(allocations, most, (), 0.005 * most)
    assert cuda_memory._gaps(CUDA_0, allocations, found, most) <= spare * most
    assert alone > (0.1 + spare) * most


@pytest.mark.parametrize("seed", range(8))
def test_the_model_of_the_allocator_reserves_what_the_allocator_does(seed):
    """In segments of a few sizes, and beside free blocks in segments of tensors."""
    draw, unit = random.Random(seed), 1 << 20
    gc.collect()
    torch.cuda.empty_cache()
    others = [torch.empty(unit, device="cuda") for _ in range(9)]
    del others[::2]  # free blocks of 4 MiB
    torch.cuda.empty_cache()
    holes = cuda_memory._holes(CUDA_0)
    allocations, live = [], []
    for number in range(200):
        if live and draw.random() < 0.45:
            allocations.append((live.pop(draw.randrange(len(live))), 0))
        else:
            live.append(str(number))
            size = draw.choice((2, 3, 4, 9, 20, 50)) * unit
            allocations.append((live[-1], size - draw.randrange(2048) * 512))
    segments = [draw.randint(1, 100) * unit for _ in range(draw.randint(1, 6))]
    modelled = Pool(allocations, holes).run(segments, math.inf)
    in_segments = [*holes, *sorted(segments, reverse=True)]
    assert cuda_memory._gaps(CUDA_0, allocations, in_segments, 0) == sum(modelled)


def test_the_model_of_the_allocator_splits_no_block_for_less_than_1_mib():
    part = 1 << 18
    sizes = [("a", 84), ("b", 84), ("a", 0), ("c", 82), ("b", 0), ("d", 85)]
    allocations = [(name, size * part) for name, size in sizes]
    modelled = Pool(allocations, ()).run([168 * part], math.inf)
    gc.collect()
    torch.cuda.empty_cache()
    assert len(modelled) == 2
    assert cuda_memory._gaps(CUDA_0, allocations, [168 * part], 0) == sum(modelled)


@pytest.mark.parametrize("offloads", [False, True])
def test_a_rehearsal_allocates_in_the_order_of_a_step(offloads, monkeypatch):
    """Of pooling, which has two results, and convolutions with pieces of scratch."""
    have_links(monkeypatch, 1e12 if offloads else 1e-3)
    rehearsed, allocations = [], cuda_memory._allocations
    monkeypatch.setattr(
        cuda_memory,
        "_allocations",
        lambda *args: rehearsed.append(allocations(*args)) or rehearsed[-1],
    )
    model = nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 16, 3, padding=1),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16384, 10),
    ).cuda()  # fmt: skip
    batch = torch.rand(16, 8, 128, 128, device="cuda"), classes(16)
    own = torch.optim.AdamW(model.parameters(), foreach=True)
    with torch.backends.cudnn.flags(enabled=False):
        least = least_budget(model, own, batch)
        step = step_of(model, own, least)
        plan = step.prepare(*batch)
        run = functools.partial(step, *batch)
        real = internals.allocations_of(run, CUDA_0)

    def changes(events):
        """Bytes of what is allocated and, negative, freed; above 1 MiB."""
        live, found = {}, []
        for name, size in events:
            found.append(size or -live.pop(name, 0))
            live[name] = size
        return [nbytes for nbytes in found if abs(nbytes) > 1 << 20]

    assert plan.leaving if offloads else plan.recomputed
    assert changes(rehearsed[-1]) == changes(real)
    pieces = [n.split()[-1] for n, size in rehearsed[-1] if " of " in n and size]
    assert len(pieces) > len({*pieces})  # some node has several pieces


@pytest.fixture
def empty_kernels():
    """Triton's kernels compute nothing."""
    with triton_kernels.on_host(values=False):
        yield


@pytest.mark.parametrize(
    ("share", "inductor"),
    [(0.0, False), (0.5, False), (1.0, False), (0.0, True), (1.0, True)],
)
def test_requested_and_reserved_bytes_are_within_the_plan(
    share, inductor, empty_kernels
):
    """Of a step whose activations are 40 MiB, between its least budget and its most."""
    gc.collect()
    torch.cuda.init()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats().get("requested_bytes.all.current", 0)
    model, (x, y) = wide(), wide_batch()
    own = sgd(model, 0.9)
    least = least_budget(model, own, (x, y), inductor=inductor)
    most = step_of(model, own, inductor=inductor).prepare(x, y).peak_bytes
    budget = int(least + share * (most - least))
    gc.collect()  # optimizer state that was made for these two plans
    step = step_of(model, own, budget, inductor=inductor)
    for _ in range(3):
        step(x, y)
    stats, plan = torch.cuda.memory_stats(), step.plan
    planned = plan.peak_bytes + plan.given_bytes
    assert plan.library_bytes > 0
    assert plan.peak_bytes <= budget
    assert stats["requested_bytes.all.peak"] - before <= planned
    # All that is reserved but the bytes of other tensors, as far as they are known.
    reserved = stats["reserved_bytes.all.peak"] - before
    assert reserved <= plan.reserved_bytes + plan.given_bytes
    printed = str(plan)
    assert f"peak memory: {format_bytes(plan.peak_bytes, budget)}" in printed
    assert f"{format_bytes(plan.reserved_bytes)} are reserved for it" in printed
    assert f"was asked for {format_bytes(stats['requested_bytes.all.peak'])}" in printed
    assert f"reserved {format_bytes(stats['reserved_bytes.all.peak'])} at" in printed
    assert bool(plan.kernels) == inductor


@pytest.mark.filterwarnings("ignore:dynamo_pgo")
@pytest.mark.parametrize("face", ["train_step", "backend"])
def test_more_than_was_foreseen_is_warned_of(
    face, monkeypatch, empty_kernels, fresh_compiler
):
    """Of a step that keeps a tensor which its plan does not know."""
    model, (x, y) = wide(), wide_batch()
    options = {"budget": "140MiB", "cache": None}
    if face == "train_step":
        step = step_of(model, sgd(model), **options)
    else:
        compiled = torch.compile(model, backend=mt.backend(**options), fullgraph=True)

        def step(x, y):
            CROSS_ENTROPY(compiled(x), y).backward()

    run, kept = program.Program.end_segment, []

    def keeping(*args):
        segment = run(*args)

        def watched(given):
            kept.append(torch.empty(100 << 20, dtype=torch.uint8, device="cuda"))
            return segment.run(given)

        return dataclasses.replace(segment, run=watched)

    monkeypatch.setattr(program.Program, "end_segment", keeping)
    with pytest.warns(UserWarning, match="MiB were not foreseen.*memory within one of"):
        step(x, y)


def test_the_bench_for_a_gpu_is_rehearsed():
    found = pytorch_steps.memory("gpt2", "cuda", small=True)
    assert {*found["budgets"]} == {"90%", "60%", "30%"}
    for row in found["budgets"].values():
        assert 0 < row["requested_bytes"] <= row["allocated_bytes"]
        assert row["allocated_bytes"] <= row["reserved_bytes"]
        assert row["retries"] == 0
    assert set(pytorch_steps.trace("gpt2", "cuda", small=True)) >= {
        "host_ms",
        "busy_ms",
    }


def test_the_budget_that_a_refusal_or_a_warning_names_holds_what_is_reserved(
    recomputing, monkeypatch
):
    monkeypatch.setattr(segments, "_EVENTS", 0)
    gc.collect()
    torch.cuda.empty_cache()
    # Half a segment is left, which nothing gives back.
    others = [torch.empty(size << 20, device="cuda") for size in (2, 2)]
    del others[0]
    foreign = torch.cuda.memory_stats()["requested_bytes.all.current"]
    model, (x, y) = wide(), wide_batch()
    own = sgd(model, 0.9)

    def planned(budget):
        step = step_of(model, own, budget)
        step.prepare(x, y)
        return step

    with pytest.raises(PlanningError) as found:
        planned("1KiB")
    least, named = map(int, re.findall(r"\((\d+) bytes\)", str(found.value))[2:])
    assert least == found.value.least_bytes < named
    with pytest.warns(UserWarning, match="reserved memory within one of") as warned:
        plan = planned(least).plan
    (warning,) = warned
    assert plan.peak_bytes <= least < plan.reserved_bytes <= plan.reservable_budget
    assert f"{plan.reservable_budget} bytes" in str(warning.message)
    most = planned(None).plan
    assert least < max(named, plan.reservable_budget) < most.reserved_bytes
    slowdowns = []
    for budget in (named, plan.reservable_budget, most.peak_bytes):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step = planned(budget)
        for _ in range(3):
            step(x, y)
        reserved = torch.cuda.memory_stats()["reserved_bytes.all.peak"] - foreign
        assert reserved <= step.plan.reserved_bytes + step.plan.given_bytes
        assert step.plan.reserved_bytes <= budget
        slowdowns.append(step.plan.slowdown)
    assert slowdowns[-1] < min(slowdowns[:-1])


@pytest.mark.parametrize(
    ("gaps", "least", "slower", "peaks", "found", "enough"),
    [
        (lambda peak: 10, 60, 0, [100, 90], 90, 0),
        (lambda peak: 10 + (100 - peak) // 2, 60, 0, [100, 90, 85, 83, 82, 60], 60, 0),
        (lambda peak: 50, 60, 0, [100, 60], 60, 110 + (20 << 20)),
        (lambda peak: 40 if peak > 85 else 10, 60, 1, [100, 60, 80, 90], 80, 0),
        (lambda peak: 120 - peak, 60, 0, [100, 80, 60], 100, 120 + (20 << 20)),
    ],
)
def test_plans_are_made_until_one_fits_in_reserved_bytes(
    gaps, least, slower, peaks, found, enough, monkeypatch
):
    """Of plans whose peaks are all they were allowed, 3 bytes of them workspaces."""
    made = []

    def plan(budget):
        if budget < least - 3:
            raise PlanningError("too little", least_bytes=least - 3)
        prediction = SimpleNamespace(step_ms=1000 - slower * budget)
        step = SimpleNamespace(peak_bytes=int(budget), prediction=prediction)
        return TorchPlan(step, 0, budget, 0)

    def reserved(planner, plan, allowed, known):
        made.append(plan.peak_bytes)
        assert allowed == 100 - plan.peak_bytes
        return gaps(plan.peak_bytes)

    monkeypatch.setattr(plan_program, "_reserve", reserved)
    step = SimpleNamespace(
        pieces={}, _plan_grouped=lambda options, rest: (None, plan(rest))
    )
    first = None, dataclasses.replace(plan(97), budget=100, library_bytes=3)
    options = plan_program.PlanOptions(together=64.0)
    _, chosen = plan_program.LoweredStep._plan_reserved(step, options, first)
    again = [] if made[-1] == found == peaks[-1] else [found]
    assert made == [*peaks, *again]
    assert chosen.peak_bytes == found
    assert chosen.reservable_budget == enough
    assert bool(chosen.reserved_warning) == bool(enough)


def test_garbage_is_collected_before_a_rehearsal(monkeypatch):
    """What is freed later leaves holes that a rehearsal does not see."""
    _, batch, step = step_of_case("dense")
    reserve, alive = cuda_memory.reserve, []

    def watched(*args):
        alive.append(garbage())
        return reserve(*args)

    monkeypatch.setattr(plan_program, "reserve", watched)
    ring = [torch.empty(64 << 20, device="cuda")]
    ring.append(ring)
    garbage = weakref.ref(ring[0])
    gc.disable()
    try:
        del ring
        step.prepare(*batch)
    finally:
        gc.enable()
    assert alive == [None]


@pytest.mark.parametrize("budget", ["1KiB", "16MiB", 0])
def test_less_than_the_workspaces_need_is_refused_with_the_least_budget(budget):
    model, batch, step = step_of_case("dense", budget=budget)
    with pytest.raises(PlanningError, match="are cuBLAS's workspaces") as found:
        step(*batch)
    least = found.value.least_bytes
    assert f"({least} bytes)" in str(found.value)
    step = step_of(model, sgd(model), least)
    step(*batch)
    assert step.plan.library_bytes < step.plan.peak_bytes <= least


def test_the_workspace_of_autograds_thread_is_counted(fresh_compiler):
    model, batch, step = step_of_case("dense")
    planned = mt.backend(cache=None)
    compiled = torch.compile(model, backend=planned, fullgraph=True)
    CROSS_ENTROPY(compiled(batch[0]), batch[1]).backward()
    one = step.prepare(*batch).library_bytes
    assert planned.plans[0].library_bytes == 2 * one > 0


def test_a_share_of_memory_leaves_the_state_on_the_device():
    """No plan moves it there, so the least budget is none with `offload_state`."""
    model, *batch = case("dense")
    step = step_of(model, sgd(model, 0.9), "1%", exact=True)
    with pytest.raises(PlanningError, match="does not fit the budget '1%'") as found:
        step.prepare(*batch)
    assert "offload_state" not in str(found.value)


def test_state_is_cut_from_one_block():
    """48 tensors of 9 MiB and their state; segments of 20 MiB hold two of them."""
    gc.collect()
    torch.cuda.empty_cache()
    model = nn.ParameterList(torch.empty(9 << 18, device="cuda") for _ in range(48))
    held = torch.cuda.memory_reserved()
    optimizer = torch.optim.AdamW(model.parameters())
    make_state(optimizer)
    state = sum(v.nbytes for s in optimizer.state.values() for v in s.values())
    assert torch.cuda.memory_reserved() - held < 1.03 * state


def test_a_step_without_memory_lists_what_is_alive_and_can_run_again():
    gc.collect()
    model, (x, y) = wide(), wide_batch()
    step = step_of(model, sgd(model, 0.9))
    step(x, y)
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + (30 << 20)
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    try:
        with pytest.raises(torch.OutOfMemoryError) as found:
            step(x, y)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    (note,) = found.value.__notes__
    assert re.match(r"alive in the step were \d+\.\d MiB: t\d+ float32 \[", note)
    step(x, y)


def test_an_error_lists_what_was_alive_in_the_program():
    def fail():
        raise torch.OutOfMemoryError

    source = "def run(given):\n x = given * 2\n fail()"
    space = {"fail": fail}
    exec(compile(source, PROGRAM, "exec"), space)
    with pytest.raises(torch.OutOfMemoryError) as found:
        space["run"](torch.zeros(1 << 18, device="cuda"))
    listed = live_tensors(found.value)
    assert "alive in the step were 2.0 MiB" in listed
    assert "x float32 [262144] 1.0 MiB" in listed
