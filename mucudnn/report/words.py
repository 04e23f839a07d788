"""Formats of numbers, plans and problems, shared by all reports."""

from itertools import groupby

from mucudnn.ir.conv import ConvPlan, ConvProblem, Direction
from mucudnn.ir.sizes import format_bytes
from mucudnn.studies.outcome import Limit, LimitSummary

__all__ = [
    "DIRECTIONS",
    "NOTHING",
    "bytes_text",
    "compared_text",
    "limit_text",
    "ms_text",
    "plan_text",
    "problem_text",
    "runs",
    "speedup_text",
]

NOTHING = "–"

DIRECTIONS = {
    Direction.FORWARD: "forward",
    Direction.BACKWARD_DATA: "backward data",
    Direction.BACKWARD_FILTER: "backward filter",
}


def bytes_text(nbytes: int | None, *beside: int) -> str:
    """Format bytes such as `64 MiB`, whole numbers without decimals."""
    if nbytes is None:
        return NOTHING
    return format_bytes(nbytes, *beside).replace(".0 ", " ")


def limit_text(limit: Limit) -> str:
    """Format a limit such as `64 MiB`, or `64 MiB total`."""
    size = bytes_text(limit.nbytes)
    return f"{size} total" if limit.total else size


def ms_text(time_ms: float | None) -> str:
    """Format milliseconds with at least three significant digits."""
    if time_ms is None:
        return NOTHING
    if time_ms >= 100:
        return f"{time_ms:,.0f}"
    return f"{time_ms:#.3g}" if time_ms >= 0.001 else f"{time_ms:.1g}"


def compared_text(entry: LimitSummary) -> str:
    """Summarize as `1 of 15 layers compared; 14 not measured: time limit`."""
    missing = sum(n for _, n in entry.missing)
    text = f"{entry.layers} of {entry.layers + missing} layers compared"
    if not missing:
        return text
    what = "not measured" if entry.cut_short else "without a speed-up"
    several = len(entry.missing) > 1
    reasons = (f"{why} ({n})" if several else why for why, n in entry.missing)
    return f"{text}; {missing} {what}: {', '.join(reasons)}"


def speedup_text(speedup: float | None) -> str:
    """Format a speed-up such as `1.63×`."""
    return NOTHING if speedup is None else f"{speedup:.2f}×"


def runs(plan: ConvPlan) -> tuple[tuple[str, int, int], ...]:
    """Return runs of equal micro-batches: (algorithm, micro-batch, length)."""
    return tuple(
        (algo, batch, sum(1 for _ in same))
        for (algo, batch), same in groupby((s.algo, s.batch) for s in plan.steps)
    )


def plan_text(plan: ConvPlan | None) -> str:
    """Format a plan such as `8 × FFT(32)`: length of the run, micro-batch size."""
    if plan is None:
        return NOTHING
    parts = (
        f"{algo}({batch})" if times == 1 else f"{times} × {algo}({batch})"
        for algo, batch, times in runs(plan)
    )
    return " + ".join(parts)


def problem_text(problem: ConvProblem) -> str:
    """Format shapes and all parameters that differ from their defaults."""
    x = "×".join(map(str, problem.x_shape[1:]))
    w = "×".join(map(str, problem.w_shape[2:]))
    parts = [f"N = {problem.batch}", f"{x} → {problem.w_shape[0]}", f"{w} filters"]
    for word, values, usual in (
        ("padding", problem.padding, 0),
        ("stride", problem.stride, 1),
        ("dilation", problem.dilation, 1),
    ):
        if any(value != usual for value in values):
            same = len(set(values)) == 1
            text = str(values[0]) if same else "×".join(map(str, values))
            parts.append(f"{word} {text}")
    if problem.groups > 1:
        parts.append(f"{problem.groups} groups")
    return ", ".join([*parts, problem.dtype, problem.layout])
