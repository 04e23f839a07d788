"""How long planning takes: the decisions alone, on synthetic measurements.

Workspace division is timed on as many kernels as a training step of ResNet-50 has
convolutions (53 layers, three directions), each with a Pareto front of 60 points. Whole
steps are planned by `step_planner`.
"""

import random
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any, TypeVar

from bench import step_planner
from mucudnn.ir.conv import AlgoPerf, ConvProblem, Direction, PerfTable
from mucudnn.passes.convolution.knapsack import divide
from mucudnn.passes.microbatch import pareto_plans, workspace_reuse

__all__ = ["run", "table"]

KERNELS = 159
POINTS = 60
SEEDS = (0, 1, 2)
LIMITS = {"tight": 0.02, "middle": 0.3, "loose": 0.8}
"""Totals, as fractions of what every kernel's fastest plan would need."""

BATCH = 256
ALGORITHMS = 8

R = TypeVar("R")


def run() -> dict[str, Any]:
    """Time the planners. Ready for JSON; times in seconds.

    Raises:
        RuntimeError: The two solvers disagree, or exceed the total.
    """
    divisions = [_divisions(seed, name) for seed in SEEDS for name in LIMITS]
    kernels = [_one_kernel(seed) for seed in SEEDS]
    return {
        "kernels": KERNELS,
        "points": POINTS,
        "batch": BATCH,
        "algorithms": ALGORITHMS,
        "divisions": divisions,
        "ilp_s": _summary([case["ilp_s"] for case in divisions]),
        "exact_s": _summary([case["exact_s"] for case in divisions]),
        "pareto_plans_s": _summary([case["pareto_plans_s"] for case in kernels]),
        "workspace_reuse_s": _summary([case["workspace_reuse_s"] for case in kernels]),
        "front_points": [case["front_points"] for case in kernels],
        "steps": step_planner.run(),
    }


def table(result: dict[str, Any]) -> str:
    """The result of `run` as text."""
    what = f"{result['kernels']} kernels x {result['points']} points"
    one = f"batch {result['batch']}, all sizes, {result['algorithms']} algorithms"
    rows = [
        (f"workspace division, ILP ({what})", result["ilp_s"]),
        (f"workspace division, exact ({what})", result["exact_s"]),
        (f"pareto_plans ({one})", result["pareto_plans_s"]),
        (f"workspace_reuse ({one})", result["workspace_reuse_s"]),
    ]
    lines = [f"{'planner':<66} {'median':>9} {'max':>9}"]
    for name, seconds in rows:
        low, high = 1e3 * seconds["median"], 1e3 * seconds["max"]
        lines.append(f"{name:<66} {low:>6.1f} ms {high:>6.1f} ms")
    return "\n".join([*lines, *step_planner.rows(result["steps"])])


def _divisions(seed: int, limit: str) -> dict[str, Any]:
    rng = random.Random(seed)
    tables = [_kernel_front(rng) for _ in range(KERNELS)]
    most = sum(max(p.workspace for p in t.perfs) for t in tables)
    total = int(LIMITS[limit] * most)
    ilp_s, by_ilp = _timed(partial(divide, tables, total, solver="ilp"))
    exact_s, by_merging = _timed(partial(divide, tables, total, solver="exact"))
    if max(by_ilp.workspace, by_merging.workspace) > total:
        raise RuntimeError(f"seed {seed}, {limit}: the total {total} is exceeded")
    difference = abs(by_ilp.cost_ms - by_merging.cost_ms)
    if difference > 1e-9 * by_merging.cost_ms:
        raise RuntimeError(f"seed {seed}, {limit}: the solvers differ by {difference}")
    return {
        "seed": seed,
        "limit": limit,
        "ilp_s": ilp_s,
        "exact_s": exact_s,
        "solver": by_ilp.solver,
        "status": by_ilp.status,
        "gap": by_ilp.gap,
    }


def _one_kernel(seed: int) -> dict[str, Any]:
    measured = _measured_kernel(random.Random(seed))
    everything = max(p.workspace for p in measured.perfs)
    front_s, front = _timed(partial(pareto_plans, measured, everything))
    middle = front[len(front) // 2].workspace
    reuse_s, (plan,) = _timed(partial(workspace_reuse, [measured], middle))
    if plan.time_ms != front[len(front) // 2].time_ms:
        raise RuntimeError(f"seed {seed}: workspace_reuse is not on the front")
    return {
        "pareto_plans_s": front_s,
        "workspace_reuse_s": reuse_s,
        "front_points": len(front),
    }


def _problem(batch: int) -> ConvProblem:
    return ConvProblem(
        direction=Direction.FORWARD, x_shape=(batch, 1, 4, 4), w_shape=(1, 1, 3, 3)
    )


def _kernel_front(rng: random.Random) -> PerfTable:
    """A kernel with a front of `POINTS` points, of random curvature."""
    scale = rng.lognormvariate(0, 1)
    workspaces = sorted({0, *rng.sample(range(1, 64 << 20), POINTS - 1)})
    gains = sorted((rng.random() ** 2 for _ in workspaces), reverse=True)
    rows = (
        AlgoPerf(
            algo=f"algo{i}", batch=8, time_ms=scale * (1 + 3 * gain), workspace=nbytes
        )
        for i, (nbytes, gain) in enumerate(zip(workspaces, gains, strict=True))
    )
    return PerfTable(_problem(8), tuple(rows))


def _measured_kernel(rng: random.Random) -> PerfTable:
    """Every size of every algorithm: affine in the size, with 2 % of noise."""
    rows = []
    for i in range(ALGORITHMS):
        start_ms, slope_ms = rng.uniform(0.02, 0.5), rng.uniform(0.005, 0.05)
        nbytes = 0 if i == 0 else rng.uniform(1e4, 4e6)
        rows += [
            AlgoPerf(
                algo=f"algo{i}",
                batch=size,
                time_ms=(start_ms + slope_ms * size) * rng.gauss(1, 0.02),
                workspace=int(nbytes * size),
            )
            for size in range(1, BATCH + 1)
        ]
    return PerfTable(_problem(BATCH), tuple(rows))


def _timed(call: Callable[[], R]) -> tuple[float, R]:
    start = perf_counter()
    result = call()
    return perf_counter() - start, result


def _summary(seconds: list[float]) -> dict[str, float]:
    return {"median": median(seconds), "max": max(seconds)}
