"""What a planned call costs the host, above the kernel calls it consists of.

The null backend's kernels take no time, so what is left is ours: finding the plan, an
output, the workspace, and one slice of the operands a micro-batch. The public call and
the same kernels called directly, with everything made ahead, take turns in one run.

Where there is PyTorch, the check that a training step's plan still holds is timed, too.
"""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

from bench import torch_guards
from bench.table import render
from mucudnn.backends import get_backend
from mucudnn.backends.virtual import VirtualArray
from mucudnn.ir.conv import AlgoPerf, ConvPlan, ConvProblem, Direction
from mucudnn.runtime.functional import conv2d
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["run", "table"]

_BATCH = 32
_PARTS = (1, 2, 4, 8)
_ROUNDS = 300
_BURST = 20
_BAR_US = 1.0
_BAR_PART_US = 0.8


def run() -> dict[str, Any]:
    """One row for undivided and for each division."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        rows = [_one(parts) for parts in _PARTS]
    finally:
        if collecting:
            gc.enable()
    return {
        "batch": _BATCH,
        "rounds": _ROUNDS,
        "burst": _BURST,
        "bar_us": _BAR_US,
        "bar_part_us": _BAR_PART_US,
        "worst_undivided_us": rows[0]["overhead_us"],
        "rows": rows,
        "guards": torch_guards.rows(),
    }


def table(result: dict[str, Any]) -> str:
    """µs a call; the spread is between the quartiles."""
    rows = [
        (
            row["parts"],
            row["call_us"],
            row["direct_us"],
            row["overhead_us"],
            "{:.2f} to {:.2f}".format(*row["quartiles_us"]),
            row["per_part_us"],
        )
        for row in result["rows"]
    ]
    header = ("parts", "call µs", "direct µs", "above µs", "quartiles", "a part µs")
    text = (
        f"{render(header, rows)}\n"
        f"medians of {result['rounds']} bursts of {result['burst']} calls; "
        f"bar {result['bar_us']:.1f} µs a call, {result['bar_part_us']:.1f} µs a part"
    )
    if guards := result.get("guards"):
        checks = render(
            ("guards of a step of", "modules", "check µs", "bar µs"),
            [tuple(row.values()) for row in guards],
        )
        text += f"\n\n{checks}\nthe least of several bursts"
    return text


def _one(parts: int) -> dict[str, Any]:
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

    differences, calls, directs = [], [], []
    for _ in range(_ROUNDS):
        directs.append(_burst_us(direct))
        calls.append(_burst_us(call))
        differences.append(calls[-1] - directs[-1])
    low, median, high = statistics.quantiles(differences, n=4)
    return {
        "parts": parts,
        "call_us": statistics.median(calls),
        "direct_us": statistics.median(directs),
        "overhead_us": median,
        "quartiles_us": (low, high),
        "per_part_us": median / parts,
    }


def _burst_us(fn: Callable[[], None]) -> float:
    start = time.perf_counter_ns()
    for _ in range(_BURST):
        fn()
    return (time.perf_counter_ns() - start) / _BURST / 1e3
