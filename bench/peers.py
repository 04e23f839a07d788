"""The CPU algorithms beside PyTorch's convolution, layer by layer, in one run.

PyTorch and the six algorithms take turns in short bursts, with a pause before each so
that the other's threads have gone to sleep. OpenBLAS may be pinned to kernels narrower
than the processor by `OPENBLAS_CORETYPE`, which PyTorch does not obey; where that is
set, everything is measured twice, as it is and with the variable removed.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.table import render
from mucudnn.ir.conv import ConvProblem, Direction
from mucudnn.suites import load_suite

__all__ = ["run", "table"]

_SUITES = (("alexnet", 32), ("resnet18", 16))
_ROUNDS, _BURST = 3, 3
_PAUSE_S = 0.02
_HOPELESS = 4.0
_PIN = "OPENBLAS_CORETYPE"


def run() -> dict[str, Any]:
    """One run in a child process, or two where BLAS is pinned."""
    environments = [dict(os.environ)]
    if _PIN in os.environ:
        free = dict(os.environ)
        del free[_PIN]
        environments.append(free)
    runs = []
    for environment in environments:
        child = subprocess.run(
            [sys.executable, "-m", "bench.peers"],
            env=environment,
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        runs.append(json.loads(child.stdout.splitlines()[-1]))
    return {"runs": runs}


def table(result: dict[str, Any]) -> str:
    """Times in ms, and the ratio of the best of six to PyTorch."""
    parts = []
    for one in result["runs"]:
        rows = [
            (
                row["layer"],
                row["direction"],
                row["torch_ms"],
                row["best_ms"],
                row["best"],
                row["ratio"],
            )
            for row in one["rows"]
        ]
        header = ("layer", "direction", "torch ms", "best ms", "algorithm", "ratio")
        parts.append(
            f"BLAS kernels: {one['blas']}\n{render(header, rows)}\n"
            f"geometric mean {one['geomean']:.2f}, bar 2.00; "
            f"worst {one['worst']:.2f}; {one['threads']} threads each"
        )
    return "\n\n".join(parts)


def _measure() -> dict[str, Any]:
    import torch
    from threadpoolctl import threadpool_info

    from mucudnn.backends.cpu.threads import Workers

    workers = Workers()
    torch.set_num_threads(workers.count)
    rows = []
    for suite, batch in _SUITES:
        for layer in load_suite(suite):
            for direction in Direction:
                problem = layer.problem.with_batch(batch).with_direction(direction)
                row = _one(f"{suite}/{layer.name}", problem, workers)
                print(
                    f"  {row['layer']} {direction.value} {row['ratio']:.2f}",
                    file=sys.stderr,
                )
                rows += [row]
    ratios = [row["ratio"] for row in rows]
    blas = next(i for i in threadpool_info() if i["user_api"] == "blas")
    kernels = f"{blas['internal_api']} {blas['version']} {blas['architecture']}"
    return {
        "blas": kernels + (f" (pinned by {_PIN})" if _PIN in os.environ else ""),
        "threads": workers.count,
        "geomean": math.exp(statistics.fmean(map(math.log, ratios))),
        "worst": max(ratios),
        "rows": rows,
    }


def _one(name: str, problem: ConvProblem, workers: Any) -> dict[str, Any]:
    rivals: dict[str, Callable[[], object]] = {"torch": _torch(problem)}
    rivals |= _ours(problem, workers)
    samples: dict[str, list[float]] = {rival: [] for rival in rivals}
    best = math.inf
    for _ in range(_ROUNDS):
        for rival, fn in rivals.items():
            if samples[rival] and min(samples[rival]) > _HOPELESS * best:
                continue
            time.sleep(_PAUSE_S)
            warm = _time(fn)
            if warm > 2 * _HOPELESS * best:
                samples[rival].append(warm)
                continue
            samples[rival] += [_time(fn) for _ in range(_BURST)]
            best = min(best, *samples[rival])
    medians = {rival: statistics.median(s) for rival, s in samples.items()}
    spread = {rival: (min(s), max(s)) for rival, s in samples.items()}
    best_algo = min((a for a in medians if a != "torch"), key=medians.__getitem__)
    return {
        "layer": name,
        "direction": problem.direction.value,
        "torch_ms": medians["torch"],
        "best": best_algo,
        "best_ms": medians[best_algo],
        "ratio": medians[best_algo] / medians["torch"],
        "gflops": problem.flops / medians[best_algo] / 1e6,
        "medians_ms": medians,
        "spread_ms": spread,
    }


def _time(fn: Callable[[], object]) -> float:
    start = time.perf_counter()
    fn()
    return (time.perf_counter() - start) * 1e3


def _ours(problem: ConvProblem, workers: Any) -> dict[str, Callable[[], object]]:
    from mucudnn.backends.cpu.conv import CpuConv
    from mucudnn.backends.cpu.device import CpuDevice

    device, conv = CpuDevice(), CpuConv(workers)
    a, b, out = (
        device.view(device.allocate(spec.nbytes), 0, spec)
        for spec in problem.operands()
    )
    device.randomize(a)
    device.randomize(b)

    def runner(algo: str, nbytes: int) -> Callable[[], object]:
        workspace = device.allocate(nbytes)
        return lambda: conv.run(problem, algo, a, b, out, workspace)

    return {algo: runner(algo, nbytes) for algo, nbytes in conv.algorithms(problem)}


def _torch(problem: ConvProblem) -> Callable[[], object]:
    import torch

    x, w, dy = (
        torch.rand(shape) - 0.5
        for shape in (problem.x_shape, problem.w_shape, problem.y_shape)
    )
    stride, padding = list(problem.stride), list(problem.padding)
    if problem.direction is Direction.FORWARD:

        def forward() -> object:
            with torch.no_grad():
                return torch.conv2d(x, w, stride=stride, padding=padding)

        return forward
    wanted = [
        problem.direction is Direction.BACKWARD_DATA,
        problem.direction is Direction.BACKWARD_FILTER,
        False,
    ]

    def backward() -> object:
        return torch.ops.aten.convolution_backward(
            dy, x, w, None, stride, padding, [1, 1], False, [0, 0], 1, wanted
        )

    return backward


if __name__ == "__main__":
    print(json.dumps(_measure()))
