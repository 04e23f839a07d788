"""What calls cost the host, above the kernels that they consist of.

The null backend's kernels take no time, so what is left of `conv2d` is ours: finding
the plan, an output, the workspace, and one slice of the operands a micro-batch. The
public call and the same kernels called directly, with everything made ahead, take turns
in one run.

Where there is PyTorch, two more are timed. A convolution of PyTorch's costs more where
`mucudnn.torch.convolutions` serves it, even if its plan is PyTorch's own kernel. And a
step checks that its plan still holds: which tensors there are, their layouts and
memory, and all Python state that the capture has read.
"""

import gc
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bench.table import render
from mucudnn.backends import get_backend
from mucudnn.backends.virtual import VirtualArray
from mucudnn.ir.conv import AlgoPerf, ConvPlan, ConvProblem, Direction, PerfTable
from mucudnn.runtime.functional import conv2d
from mucudnn.runtime.tuning.tuner import Tuner

_BATCH = 32
_PARTS = (1, 2, 4, 8)
_ROUNDS = 300
_BURST = 20
_BAR_US, _BAR_PART_US, _BAR_TORCH_US = 1.0, 0.8, 10.0
_CHECKS = 1000
_BARS_CHECK_US = {"resnet18": 60.0, "gpt, 12 layers": 150.0}
_TORCH_CASES = (
    ((1, 1, 1, 1), (1, 1, 1, 1), 0),
    ((4, 16, 14, 14), (16, 16, 3, 3), 1),
    ((2, 32, 28, 28), (32, 32, 3, 3), 1),
)
"""Shapes of x and w, and the padding."""


def run() -> dict[str, Any]:
    """Time everything. Ready for JSON."""
    torch_rows: list[dict[str, Any]] = []
    guards: list[dict[str, Any]] = []
    with no_collection():
        rows = [_conv2d(parts) for parts in _PARTS]
        if importlib.util.find_spec("torch") is not None:
            import torch

            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                torch_rows = [row for case in _TORCH_CASES for row in _of_torch(*case)]
                guards = list(_guards())
            finally:
                torch.set_num_threads(threads)
    return {
        "batch": _BATCH,
        "rounds": _ROUNDS,
        "burst": _BURST,
        "bar_us": _BAR_US,
        "bar_part_us": _BAR_PART_US,
        "bar_torch_us": _BAR_TORCH_US,
        "worst_undivided_us": rows[0]["overhead_us"],
        "rows": rows,
        "torch": torch_rows,
        "guards": guards,
    }


def table(result: dict[str, Any]) -> str:
    """Return µs a call; the spread is between the quartiles."""

    def cells(row: dict[str, Any], *names: str) -> tuple[Any, ...]:
        spread = "{:.2f} to {:.2f}".format(*row["quartiles_us"])
        times = (row["direct_us"], row["call_us"], row["overhead_us"])
        return (*(row[name] for name in names), *times, spread)

    times = ("direct µs", "call µs", "above µs", "quartiles")
    rows = [cells(row, "parts", "per_part_us") for row in result["rows"]]
    parts = [
        f"{render(('parts', 'a part µs', *times), rows)}\n"
        f"medians of {result['rounds']} bursts of {result['burst']} calls; "
        f"bar {result['bar_us']:.1f} µs a call, {result['bar_part_us']:.1f} µs a part"
    ]
    if result["torch"]:
        rows = [cells(row, "x", "call") for row in result["torch"]]
        parts.append(
            f"{render(('x of PyTorch', 'call', *times), rows)}\n"
            f"bar {result['bar_torch_us']:.1f} µs a call"
        )
        header = ("guards of a step of", "modules", "check µs", "bar µs")
        checks = [tuple(row.values()) for row in result["guards"]]
        parts.append(f"{render(header, checks)}\nthe least of {_CHECKS} checks")
    return "\n\n".join(parts)


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep the garbage collector from running within."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _conv2d(parts: int) -> dict[str, Any]:
    """Compare `conv2d` with its kernels."""
    problem = ConvProblem(
        direction=Direction.FORWARD,
        x_shape=(_BATCH, 64, 56, 56),
        w_shape=(64, 64, 3, 3),
        padding=1,
    )
    backend = get_backend("null")
    x, w, y = (VirtualArray(s.shape, s.dtype) for s in problem.operands())
    micro = problem.with_batch(_BATCH // parts)
    nbytes = dict(backend.conv.algorithms(micro))["FAST"]
    step = AlgoPerf(algo="FAST", batch=micro.batch, time_ms=1.0, workspace=nbytes)
    plan = ConvPlan(problem, (step,) * parts)
    tuner = Tuner(backend=backend, cache=None)
    tuner.adopt(plan)
    workspace = backend.device.allocate(nbytes)
    slices = [(x[window], y[window]) for window, _ in plan.slices()]
    kernel = backend.bind(ConvPlan(micro, (step,))).run

    def direct() -> None:
        for part, out in slices:
            kernel(part, w, out, workspace, False)

    def call() -> None:
        conv2d(x, w, padding=1, tuner=tuner)

    row = _in_bursts(direct, call)
    return {"parts": parts, **row, "per_part_us": row["overhead_us"] / parts}


def _of_torch(
    x_shape: Sequence[int], w_shape: Sequence[int], padding: int
) -> Iterator[dict[str, Any]]:
    """Compare PyTorch's convolution with and without `convolutions` around it."""
    import torch

    import mucudnn.torch as mt

    x, w, b = torch.randn(x_shape), torch.randn(w_shape), torch.randn(w_shape[0])
    options = ([1, 1], [padding, padding], [1, 1], False, [0, 0], 1)
    forward = torch.ops.aten.convolution.default
    backward = torch.ops.aten.convolution_backward.default
    gy = torch.randn_like(forward(x, w, b, *options))
    mask = [True, True, True]
    calls: dict[str, Callable[[], object]] = {
        "forward": lambda: forward(x, w, b, *options),
        "backward": lambda: backward(gy, x, w, [len(b)], *options, mask),
    }
    context = mt.convolutions(
        tuner=Tuner(
            backend=mt.cpu_backend(),
            planner=_only_native,
            batch_policy="undivided",
            cache=None,
        )
    )
    for name, call in calls.items():
        with context:
            call()  # planned
        row = _in_bursts(call, call, context)
        yield {"x": "x".join(map(str, x_shape)), "call": name, **row}


def _only_native(
    tables: Sequence[PerfTable], workspace_limit: int
) -> tuple[ConvPlan, ...]:
    """Plan PyTorch's kernel for the whole batch, whatever it takes."""
    from mucudnn.torch.conv.backend import TORCH

    whole = (next(p for p in table.usable if p.algo == TORCH) for table in tables)
    pairs = zip(tables, whole, strict=True)
    return tuple(ConvPlan(table.problem, (row,)) for table, row in pairs)


def _in_bursts(
    direct: Callable[[], object], call: Callable[[], object], context: Any = None
) -> dict[str, Any]:
    """Return µs of two calls that take turns, the second within a context."""
    directs, calls = [], []
    for _ in range(_ROUNDS):
        directs.append(_burst_us(direct))
        if context is None:
            calls.append(_burst_us(call))
        else:
            with context:
                calls.append(_burst_us(call))
    differences = [one - other for one, other in zip(calls, directs, strict=True)]
    low, median, high = statistics.quantiles(differences, n=4)
    return {
        "call_us": statistics.median(calls),
        "direct_us": statistics.median(directs),
        "overhead_us": median,
        "quartiles_us": (low, high),
    }


def _burst_us(fn: Callable[[], object]) -> float:
    fn()
    start = time.perf_counter_ns()
    for _ in range(_BURST):
        fn()
    return (time.perf_counter_ns() - start) / _BURST / 1e3


def _guards() -> Iterator[dict[str, Any]]:
    """Time the checks of two networks' steps."""
    import torch

    import mucudnn.torch as mt
    from bench.torch import zoo

    config = zoo.GPTConfig(layers=12, width=64, heads=4, length=32)
    cases = {"resnet18": zoo.build("resnet18"), "gpt, 12 layers": zoo.gpt(2, config)}
    for name, case in cases.items():
        optimizer: torch.optim.Optimizer
        if name == "resnet18":
            optimizer = torch.optim.SGD(case.model.parameters(), 0.1, momentum=0.9)
        else:
            optimizer = torch.optim.AdamW(case.model.parameters(), 1e-3)
        step = mt.train_step(case.model, case.loss_fn, optimizer, cache=None)
        step(*case.batch)  # which makes the state of the optimizer
        yield {
            "model": name,
            "modules": sum(1 for _ in case.model.modules()),
            "check_us": round(_check_us(step, case.batch), 1),
            "bar_us": _BARS_CHECK_US[name],
        }


def _check_us(step: Any, batch: tuple[Any, ...]) -> float:
    """Return the least µs in which a step finds the plan that it has for a batch."""
    from mucudnn.torch.capture.step_tensors import Batch

    arguments = Batch.of(batch, {})
    if step._planned.find(arguments)[0] is None:
        raise ValueError("the step has no plan for this batch; run it before")
    least = float("inf")
    for _ in range(_CHECKS):  # one by one: a burst is interrupted on a busy machine
        start = time.perf_counter_ns()
        step._planned.find(arguments)
        least = min(least, (time.perf_counter_ns() - start) / 1e3)
    return least
