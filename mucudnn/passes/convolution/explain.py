"""Explain in words why a convolution plan was chosen and algorithms were excluded.

Speed-ups are relative to the fastest undivided algorithm within the limit, which a
library without micro-batches would run. A library may have dozens of algorithms for one
convolution, excluded for a few reasons, so reasons are counted rather than repeated.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from math import inf

from mucudnn.ir.conv import AlgoPerf, ConvPlan, PerfTable, problem_text
from mucudnn.ir.numerics import RowStatus
from mucudnn.ir.sizes import format_bytes, format_count
from mucudnn.passes.convolution.pareto import (
    candidates,
    fastest_undivided,
    pareto_plans,
    whole_batch,
)

_LEAST_GAIN = 1.05
"""Speed-up over the previous limit that makes a larger limit worth listing."""

_MOST_LINES = 6
"""Algorithms, limits or reasons listed at most; the rest are counted."""

_MOST_TEXT = 100
_MOST_FAILURES = 12


@dataclass(frozen=True, slots=True)
class Trial:
    """A division and its time relative to the undivided call, measured side by side.

    Attributes:
        plan: The division.
        ratio: Time of the division over time of the undivided call, 1 if the division
            did not win (`Verdict.ratio`); None if the two were not run together.
    """

    plan: ConvPlan
    ratio: float | None = None


def explain(
    table: PerfTable,
    plan: ConvPlan,
    workspace_limit: int | None = None,
    trial: Trial | None = None,
) -> str:
    """Explain a plan, its alternatives, and the gain of larger workspace limits.

    The limit is the plan's own by default. `trial` is the validation of the plan, or of
    the division that lost against the plan.
    """
    problem = table.problem
    if workspace_limit is None:
        known = plan.workspace_limit
        workspace_limit = plan.workspace if known is None else known
    lines = [
        f"{problem_text(problem)}, with at most {format_bytes(workspace_limit)} of "
        "workspace:"
    ]
    whole = fastest_undivided(table, workspace_limit)
    lines.append(_undivided_line(table, whole))
    lines += _plan_lines(table, plan, whole, trial)
    lines += _excluded_lines(table, whole, workspace_limit)
    lines += _further_limit_lines(table, plan, whole, workspace_limit)
    lines += _failure_lines(table)
    return "\n".join(lines)


def _undivided_line(table: PerfTable, whole: AlgoPerf | None) -> str:
    if whole is not None:
        return f"- Undivided, {_needs(whole)}, the fastest that fits."
    least = min((p.workspace for p in whole_batch(table)), default=None)
    if least is None:
        return "- Undivided, no algorithm was measured."
    return f"- Undivided, no algorithm fits: the smallest needs {_size(least)}."


def _plan_lines(
    table: PerfTable, plan: ConvPlan, whole: AlgoPerf | None, trial: Trial | None
) -> Iterator[str]:
    known = {(perf.algo, perf.batch) for perf in table.perfs}
    if any((step.algo, step.batch) not in known for step in plan.steps):
        yield "- The plan is based on other measurements than those shown here."
    if not plan.divided:
        yield f"- The plan does not divide: {_needs(plan.steps[0])}."
        if trial is not None and trial.ratio is not None and whole is not None:
            parts = " + ".join(
                f"{len(list(same))} × {step.batch} by {step.algo}"
                for step, same in groupby(trial.plan.steps)
            )
            yield f"- A division into {parts} was{_gain(whole, trial)}."
        return
    gain = ""
    if whole is not None:
        mine = trial is not None and trial.plan == plan
        gain = "," + _gain(whole, trial if trial and mine else Trial(plan))
    parts = format_count(len(plan.steps), "micro-batch", "micro-batches")
    yield (
        f"- The plan runs {parts} in {plan.time_ms:.4g} ms "
        f"and {_size(plan.workspace)}{gain}:"
    )
    for step, same in groupby(plan.steps):
        yield (
            f"    {len(list(same))} × {format_count(step.batch, 'sample')} by "
            f"{step.algo}, {step.time_ms:.4g} ms each, {_size(step.workspace)}"
        )


def _gain(whole: AlgoPerf, trial: Trial) -> str:
    alone = f"{_ratio(whole.time_ms, trial.plan.time_ms):.2f}×"
    if trial.ratio is None:
        return (
            f" {alone} as fast as undivided from per-kernel timings; the two were not "
            "run together"
        )
    together = f"{_ratio(1.0, trial.ratio):.2f}× as fast as undivided"
    if trial.ratio >= 1:
        together = "not faster than undivided"
    return f" {together} when run together, {alone} from per-kernel timings"


def _excluded_lines(
    table: PerfTable, whole: AlgoPerf | None, workspace_limit: int
) -> Iterator[str]:
    """Yield a line for each faster undivided algorithm that exceeds the limit."""
    faster = sorted(
        (
            perf
            for perf in whole_batch(table)
            if perf.workspace > workspace_limit
            and (whole is None or perf.time_ms < whole.time_ms)
        ),
        key=lambda perf: perf.time_ms,
    )
    for perf in faster[:_MOST_LINES]:
        over = perf.workspace - workspace_limit
        yield (
            f"- {perf.algo} would take {perf.time_ms:.4g} ms undivided but needs "
            f"{_size(perf.workspace, workspace_limit)}, {_size(over)} over the limit "
            f"of {format_bytes(workspace_limit, perf.workspace)}."
        )
    if len(faster) > _MOST_LINES:
        yield (
            f"- {len(faster) - _MOST_LINES} more would be faster, but also exceed "
            "the limit."
        )


def _further_limit_lines(
    table: PerfTable, plan: ConvPlan, whole: AlgoPerf | None, workspace_limit: int
) -> Iterator[str]:
    """Yield a line on the speed-ups at larger limits, from the Pareto front."""
    most = max((p.workspace for p in candidates(table)), default=0)
    worth: list[ConvPlan] = []
    best = plan.time_ms
    for better in pareto_plans(table, most):
        if better.workspace > workspace_limit and better.time_ms * _LEAST_GAIN <= best:
            worth.append(better)
            best = better.time_ms
    if not worth:
        yield "- Larger limits would not make it notably faster."
        return
    shown = (
        worth if len(worth) <= _MOST_LINES else [*worth[: _MOST_LINES - 1], worth[-1]]
    )
    reference = plan.time_ms if whole is None else whole.time_ms
    offers = ", ".join(
        f"{_size(better.workspace)} → {better.time_ms:.4g} ms "
        f"({_ratio(reference, better.time_ms):.2f}×)"
        for better in shown
    )
    yield f"- Larger limits would allow: {offers}, from per-kernel timings."


def _failure_lines(table: PerfTable) -> Iterator[str]:
    """Yield lines on refused and failing algorithms; many failures share one line."""
    kept_out = [
        (p.algo, p.error or "") for p in table.perfs if p.status is RowStatus.REFUSED
    ]
    if kept_out:
        yield f"- {_number(kept_out)} not accepted: {counted(kept_out)}."
    failed = sorted(
        (p.algo, " ".join(p.error.split()), p.batch)
        for p in table.perfs
        if p.error is not None
        and p.status not in (RowStatus.REFUSED, RowStatus.HOPELESS)
    )
    reasons = {(algo, error) for algo, error, _ in failed}
    if len(reasons) > _MOST_FAILURES:
        yield f"- {_number(reasons)} cannot run at some sizes: {counted(reasons)}."
        return
    for (algo, error), rows in groupby(failed, key=lambda row: row[:2]):
        sizes = sorted(batch for *_, batch in rows)
        where = (
            f"at {format_count(sizes[0], 'sample')}"
            if len(sizes) == 1
            else f"at {len(sizes)} sizes from {sizes[0]} to {sizes[-1]}"
        )
        yield f"- {algo} cannot run {where}: {_shortened(error)}"


def counted(failures: Iterable[tuple[str, str]]) -> str:
    """Count the algorithms of each reason: `it rounds float32 to TF32 (9), …`."""
    algos: dict[str, set[str]] = {}
    for algo, reason in failures:
        algos.setdefault(_shortened(RowStatus.REFUSED.reason(reason)), set()).add(algo)
    often = sorted(algos.items(), key=lambda item: -len(item[1]))
    shown = [f"{reason} ({len(names)})" for reason, names in often[:_MOST_LINES]]
    if len(often) > _MOST_LINES:
        shown.append(f"{len(often) - _MOST_LINES} more reasons")
    return ", ".join(shown)


def left_out(perfs: Iterable[AlgoPerf]) -> tuple[tuple[str, str], ...]:
    """Return (algorithms, reason) of all failed rows; many algorithms are counted.

    Refused algorithms always share one entry.
    """
    kept_out: list[tuple[str, str]] = []
    failed: dict[tuple[str, str], None] = {}
    for perf in perfs:
        if perf.error is not None and perf.status is RowStatus.REFUSED:
            kept_out.append((perf.algo, perf.error))
        elif perf.error is not None and perf.status is not RowStatus.HOPELESS:
            failed[perf.algo, perf.error] = None
    entries: list[tuple[str, str]] = []
    if kept_out:
        entries.append((_number(kept_out), RowStatus.REFUSED.text(counted(kept_out))))
    if len(failed) > _MOST_LINES:
        entries.append((_number(failed), counted(failed)))
    else:
        entries.extend(failed)
    return tuple(entries)


def _number(failures: Iterable[tuple[str, str]]) -> str:
    """Return a count of distinct algorithms: `12 algorithms`."""
    return format_count(len({algo for algo, _ in failures}), "algorithm")


def _shortened(reason: str) -> str:
    text = " ".join(reason.split())
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 1] + "…"


def _needs(perf: AlgoPerf) -> str:
    return f"{perf.algo} takes {perf.time_ms:.4g} ms with {_size(perf.workspace)}"


def _size(nbytes: int, *beside: int) -> str:
    return "no workspace" if nbytes == 0 else format_bytes(nbytes, *beside)


def _ratio(reference_ms: float, time_ms: float) -> float:
    return reference_ms / time_ms if time_ms > 0 else inf
