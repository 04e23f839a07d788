"""What a convolution of PyTorch's costs more where `mucudnn.torch.convolutions` serves.

Every plan is PyTorch's own kernel, so what is left is the way to it: Python in place of
the dispatcher, finding what is ready for the call, and the dispatcher again. Bursts of
calls with and without it take turns in one process, on one thread.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.table import render
from mucudnn.ir.conv import ConvPlan, PerfTable

__all__ = ["run", "table"]

_CASES = (
    ((1, 1, 1, 1), (1, 1, 1, 1), 0),
    ((4, 16, 14, 14), (16, 16, 3, 3), 1),
    ((2, 32, 28, 28), (32, 32, 3, 3), 1),
)
"""Shapes of x and w, and the padding."""

_CALLS = 3000
_BURST = 20
_BAR_US = 10.0


def run() -> dict[str, Any]:
    """One row a size and direction."""
    import torch

    threads, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.disable()
    try:
        rows = [row for case in _CASES for row in _rows(*case)]
    finally:
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()
    return {"calls": _CALLS, "burst": _BURST, "bar_us": _BAR_US, "rows": rows}


def table(result: dict[str, Any]) -> str:
    """µs a call; the spread is between the quartiles of bursts."""
    rows = [
        (
            "x".join(map(str, row["x_shape"])),
            row["call"],
            row["native_us"],
            row["wrapped_us"],
            row["overhead_us"],
            "{:.2f} to {:.2f}".format(*row["quartiles_us"]),
        )
        for row in result["rows"]
    ]
    header = ("x", "call", "native µs", "wrapped µs", "above µs", "quartiles")
    return (
        f"{render(header, rows)}\n"
        f"medians of {result['calls']} calls each, in bursts of {result['burst']}; "
        f"bar {result['bar_us']:.1f} µs"
    )


def _rows(
    x_shape: Sequence[int], w_shape: Sequence[int], padding: int
) -> Iterator[dict[str, Any]]:
    import torch

    import mucudnn.torch as mt
    from mucudnn import Tuner

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
        yield {"x_shape": x_shape, "call": name, **_compared(call, context)}


def _only_native(
    tables: Sequence[PerfTable], workspace_limit: int
) -> tuple[ConvPlan, ...]:
    """PyTorch's kernel for the whole batch, whatever it takes."""
    from mucudnn.torch.conv.backend import TORCH

    whole = (next(p for p in table.usable if p.algo == TORCH) for table in tables)
    pairs = zip(tables, whole, strict=True)
    return tuple(ConvPlan(table.problem, (row,)) for table, row in pairs)


def _compared(call: Callable[[], object], context: Any) -> dict[str, Any]:
    with context:
        call()  # planned
    native, wrapped, differences = [], [], []
    for _ in range(_CALLS // _BURST):
        one = _burst_us(call)
        with context:
            other = _burst_us(call)
        native += one
        wrapped += other
        differences.append(statistics.median(other) - statistics.median(one))
    low, median, high = statistics.quantiles(differences, n=4)
    return {
        "native_us": statistics.median(native),
        "wrapped_us": statistics.median(wrapped),
        "overhead_us": median,
        "quartiles_us": (low, high),
    }


def _burst_us(call: Callable[[], object]) -> list[float]:
    """Every call of a burst by itself, after one that is not counted."""
    call()
    times = []
    for _ in range(_BURST):
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return times
