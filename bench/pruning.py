"""What pruned measurement saves under policy `all`, and what its plans lose.

Real layers are measured exhaustively on the CPU once; pruning then asks for its points
and is answered from that table. At limits of the exhaustive Pareto front the plans of
both tables are then run in turn: by the table's own times the exhaustive plan, which
picks the luckiest of many readings, would look better than it is.
"""

import statistics
from collections.abc import Callable
from typing import Any

from bench.table import render
from mucudnn.ir.conv import AlgoPerf, ConvProblem, Direction, PerfTable
from mucudnn.passes.convolution.pruning import next_measurements
from mucudnn.passes.microbatch import pareto_plans, workspace_reuse
from mucudnn.runtime.tuning.timing import StoppingRule
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["run", "table"]

_BATCH = 128
_LIMITS = 12
_LAYERS = {
    "14x14, 16->32, 3x3": ((16, 14, 14), (32, 16, 3, 3), 1),
    "28x28, 8->16, 5x5": ((8, 28, 28), (16, 8, 5, 5), 2),
    "7x7, 64->64, 3x3": ((64, 7, 7), (64, 64, 3, 3), 1),
}
_RULE = StoppingRule(min_samples=3, max_samples=5, budget_ms=20)


def run() -> dict[str, Any]:
    """Measure, prune by replay, compare."""
    tuner = Tuner(batch_policy="all", prune=False, rule=_RULE, cache=None)
    rows = []
    for name, (image, filters, padding) in _LAYERS.items():
        problem = ConvProblem(
            direction=Direction.FORWARD,
            x_shape=(_BATCH, *image),
            w_shape=filters,
            padding=padding,
        )
        rows.append({"layer": name, **_compare(tuner, tuner.measure(problem))})
    return {
        "batch": _BATCH,
        "rows": rows,
        "saved_median": statistics.median(row["saved"] for row in rows),
        "loss_mean": statistics.fmean(row["loss_mean"] for row in rows),
    }


def table(result: dict[str, Any]) -> str:
    """Shares in percent."""
    header = ("layer", "N", "all", "measured", "saved %", "limits")
    loss = ("mean loss %", "worst loss %")
    rows = [
        (
            row["layer"],
            result["batch"],
            row["points"],
            row["measured"],
            100 * row["saved"],
            row["limits"],
            100 * row["loss_mean"],
            100 * row["loss_worst"],
        )
        for row in result["rows"]
    ]
    return (
        render((*header, *loss), rows)
        + f"\nmedian saved {100 * result['saved_median']:.1f} %, bar 80; "
        f"mean loss {100 * result['loss_mean']:.2f} %, bar 2"
    )


def _compare(tuner: Tuner, full: PerfTable) -> dict[str, Any]:
    known = {(p.algo, p.batch): p for p in full.usable}
    chosen = _pruned(full, known.__getitem__)
    pruned = PerfTable(full.problem, tuple(chosen), full.launch_overhead_ms)
    front = pareto_plans(full, max(p.workspace for p in full.usable))
    losses = []
    for best in front[:: max(1, len(front) // _LIMITS)]:
        (plan,) = workspace_reuse([pruned], best.workspace)
        ours, theirs = tuner.time_plans([plan, best])
        losses.append(ours.time_ms / theirs.time_ms - 1)
    return {
        "points": len(known),
        "measured": len(chosen),
        "saved": 1 - len(chosen) / len(known),
        "limits": len(losses),
        "loss_mean": statistics.fmean(losses),
        "loss_worst": max(losses),
    }


def _pruned(
    full: PerfTable, answer: Callable[[tuple[str, int]], AlgoPerf]
) -> list[AlgoPerf]:
    workspaces = {(p.algo, p.batch): p.workspace for p in full.usable}
    sizes = sorted({size for _, size in workspaces})
    measured: dict[tuple[str, int], AlgoPerf] = {}
    while points := [
        point
        for point in next_measurements(
            sizes,
            workspaces,
            tuple(measured.values()),
            launch_overhead_ms=full.launch_overhead_ms,
        )
        if point not in measured
    ]:
        measured |= {point: answer(point) for point in points}
    return list(measured.values())
