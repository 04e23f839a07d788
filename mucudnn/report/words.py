"""How numbers, plans and problems are written, the same in every report."""

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
    """`64 MiB`: whole numbers without a decimal; `format_bytes` tells of the rest."""
    if nbytes is None:
        return NOTHING
    return format_bytes(nbytes, *beside).replace(".0 ", " ")


def limit_text(limit: Limit) -> str:
    """`64 MiB`, or `64 MiB total`."""
    size = bytes_text(limit.nbytes)
    return f"{size} total" if limit.total else size


def ms_text(time_ms: float | None) -> str:
    """Three significant digits, as many whole ones as there are."""
    if time_ms is None:
        return NOTHING
    if time_ms >= 100:
        return f"{time_ms:,.0f}"
    return f"{time_ms:#.3g}" if time_ms >= 0.001 else f"{time_ms:.1g}"


def compared_text(entry: LimitSummary) -> str:
    """`1 of 15 layers compared; 14 not measured: time limit`."""
    missing = sum(n for _, n in entry.missing)
    text = f"{entry.layers} of {entry.layers + missing} layers compared"
    if not missing:
        return text
    what = "not measured" if entry.cut_short else "without a speed-up"
    several = len(entry.missing) > 1
    reasons = (f"{why} ({n})" if several else why for why, n in entry.missing)
    return f"{text}; {missing} {what}: {', '.join(reasons)}"


def speedup_text(speedup: float | None) -> str:
    """`1.63×`."""
    return NOTHING if speedup is None else f"{speedup:.2f}×"


def runs(plan: ConvPlan) -> tuple[tuple[str, int, int], ...]:
    """(algorithm, micro-batch, how many in a row)."""
    return tuple(
        (algo, batch, sum(1 for _ in same))
        for (algo, batch), same in groupby((s.algo, s.batch) for s in plan.steps)
    )


def plan_text(plan: ConvPlan | None) -> str:
    """`8 × FFT(32)`: the micro-batch in brackets, how many of them before."""
    if plan is None:
        return NOTHING
    parts = (
        f"{algo}({batch})" if times == 1 else f"{times} × {algo}({batch})"
        for algo, batch, times in runs(plan)
    )
    return " + ".join(parts)


def problem_text(problem: ConvProblem) -> str:
    """Shapes, and of the rest what is out of the ordinary."""
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
