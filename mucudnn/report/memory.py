"""A memory study, as tables and as an HTML page."""

from collections.abc import Iterable, Iterator

from mucudnn.ir.sizes import format_count
from mucudnn.passes.planning.plan_step import PolicyResult, best_technique
from mucudnn.passes.registry import name_of
from mucudnn.passes.residency import PLANNED
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.report.memory_charts import (
    KINDS,
    Series,
    lanes_chart,
    memory_chart,
    speed_chart,
    stack_chart,
)
from mucudnn.report.page import SHEETS, header, page, rendered
from mucudnn.report.svg import Markup
from mucudnn.report.text import NOTHING, Table, bytes_text, ms_text, speedup_text
from mucudnn.report.trace import lanes_of
from mucudnn.studies.memory_results import MemoryStudy

_COLUMNS = (
    *("policy", "scheduler", "fits", ">peak", ">offloaded", ">recomputed"),
    *(">step ms", ">slowdown", ">bound ms", ">gap", "remark"),
)
"""Columns of techniques; `gap` bounds the distance to the best possible plan."""

_SPARE = (
    *("bound ms", "recomputed", "scheduler", "gap", "offloaded"),
    *("fits", "step ms", "remark", "peak"),
)

_QUEUES = {
    "heavy": "convolutions and matrix products",
    "light": "all other nodes",
    "again": "recomputed nodes",
    "update": "updates",
    "stall": "compute waits",
    "copy-out": "copies to the host",
    "copy-in": "copies from the host",
}


def queues_of(plan: StepPlan) -> dict[str, str]:
    """Return the classes of boxes in a plan's lanes, and what they mean."""
    used = "network" in lanes_of(plan)
    return _QUEUES | ({"collective": "collectives"} if used else {})


def heading(study: MemoryStudy) -> str:
    """Return the step and the device in a line."""
    image = "×".join(map(str, study.image)) or "1"
    return (
        f"{study.spec.title}, batch {study.spec.batch}, {image}, "
        f"{study.kind}; {study.device}"
    )


def memory_tables(study: MemoryStudy) -> tuple[Table, ...]:
    """Return the table of techniques, and others if requested."""
    tables = [technique_table(study)]
    if study.curve:
        tables.append(_curve(study))
    if study.by_batch:
        tables.append(_throughput(study))
    if study.min_budget or study.max_batch:
        tables.append(_limits(study))
    if study.scaling:
        tables.append(_scaling(study))
    return tuple(tables)


def _cells(study: MemoryStudy, technique: PolicyResult) -> tuple[str, ...]:
    plan = technique.plan
    head = (technique.policy, technique.scheduler)
    if plan is None:
        short = f"{bytes_text(technique.short_bytes)} short"
        needs = bytes_text(technique.peak_bytes, study.budget)
        return (*head, "no", needs, *(NOTHING,) * 6, short)
    gap = study.gap(technique)
    return (
        *head,
        "yes",
        bytes_text(plan.peak_bytes),
        bytes_text(plan.prediction.out_bytes),
        str(plan.recomputed),
        ms_text(plan.prediction.step_ms),
        speedup_text(study.slowdown(technique)),
        ms_text(plan.prediction.bound_ms),
        NOTHING if gap is None else f"{gap:.1%}",
        "best" if technique is study.best else "",
    )


def least_words(study: MemoryStudy) -> str:
    """Return the lower bound on the step time as a sentence, if known."""
    least = study.least_ms.get(study.budget)
    if least is None:
        return ""
    why = study.bound_note.get(study.budget, "")
    reason = f" (compute alone: {why})" if why else ""
    return f"no plan within the budget takes less than {ms_text(least)} ms{reason}"


def placed_words(study: MemoryStudy) -> str:
    """Return the best technique with fixed offsets as a sentence, if placed."""
    if study.placed is None:
        return ""
    layout, plan = study.placed.layout, study.placed.plan
    beside = ""
    if study.placed.state_bytes:
        beside = f" and {bytes_text(study.placed.state_bytes)} that stay resident"
    tiers = plan.prediction.placement
    away = "" if tiers is None else f"; {tiers}"
    how = "with fixed offsets"
    if layout.mapped_chunks:
        how = f"in mapped memory ({ms_text(study.placed.map_ms)} ms, once)"
    return (
        f"{plan.policy} {how}: an arena of {bytes_text(layout.nbytes)}{beside}, "
        f"{layout.fragmentation:.1%} fragmentation; "
        f"{ms_text(plan.prediction.step_ms)} ms a step{away}"
    )


def slowdown_words(study: MemoryStudy) -> str:
    """Return the budget that keeps a slowdown as a sentence, if requested."""
    if (kept := study.for_slowdown) is None:
        return ""
    if (found := kept.technique) is None:
        return kept.reason
    words = f"{bytes_text(found.budget)} ({found.budget} bytes)"
    if found.budget >= study.unbounded.peak_bytes:
        words += ", as much as without a budget"
    else:
        words += (
            f", where {found.policy} takes {study.slowdown(found):.3f} times as long"
        )
    return f"within a slowdown of {kept.slowdown:g}: {words}"


def technique_table(study: MemoryStudy) -> Table:
    """Return all techniques, with sources of the figures as notes."""
    rows = tuple(_cells(study, t) for t in study.techniques)
    strong = {i for i, t in enumerate(study.techniques) if t is study.best}
    unbounded = (
        f"without a budget: {bytes_text(study.unbounded.peak_bytes)}, "
        f"{ms_text(study.unbounded_ms)} ms a step"
    )
    notes = [unbounded, *filter(None, [least_words(study), placed_words(study)])]
    if study.minimum is not None:
        least = f"{bytes_text(study.minimum)} ({study.minimum} bytes)"
        notes.append(f"minimum feasible budget: {least}")
    if words := slowdown_words(study):
        notes.append(words)
    if study.splitting is not None:
        notes += [f"in micro-batches: {line}" for line in study.splitting.lines]
    notes += [f"{name}: {text}" for name, text in study.figures.items()]
    if study.interrupted:
        notes.append("interrupted: only the finished part is shown")
    title = f"{heading(study)}; budget {budget_text(study)}"
    return Table(title, _COLUMNS, rows, frozenset(strong), tuple(notes), _SPARE)


def budget_text(study: MemoryStudy) -> str:
    """Return the budget, with enough digits to differ from what does not fit."""
    needs = (t.peak_bytes for t in study.techniques if t.plan is None)
    return bytes_text(study.budget, *needs)


def _curve(study: MemoryStudy) -> Table:
    """Return slowdowns by policy (rows) and budget (columns)."""
    budgets = sorted({t.budget for t in study.curve}, reverse=True)
    by_policy: dict[str, dict[int, PolicyResult]] = {}
    for technique in study.curve:
        by_policy.setdefault(technique.policy, {})[technique.budget] = technique

    def slowdown(technique: PolicyResult | None) -> str:
        return NOTHING if technique is None else speedup_text(study.slowdown(technique))

    rows = tuple(
        (policy, *(slowdown(found.get(budget)) for budget in budgets))
        for policy, found in by_policy.items()
    )
    least = (study.least_ms.get(budget) for budget in budgets)
    bounds = (None if ms is None else ms / study.unbounded_ms for ms in least)
    rows += (("(lower bound)", *map(speedup_text, bounds)),)
    whole = study.unbounded.peak_bytes
    columns = ("policy", *(f">{bytes_text(b)} ({b / whole:.0%})" for b in budgets))
    return Table("slowdown under smaller budgets", columns, rows)


def _scaling(study: MemoryStudy) -> Table:
    """Return the fastest way that fits, by number of devices."""
    rows = tuple(
        (
            str(row.gpus),
            row.way,
            bytes_text(row.peak_bytes),
            ms_text(row.step_ms) if row.samples_per_s else NOTHING,
            _rate_text(row.samples_per_s) if row.samples_per_s else NOTHING,
            ms_text(row.waits_ms) if row.samples_per_s else NOTHING,
        )
        for row in study.scaling
    )
    columns = ("GPUs", "best", ">peak of each", ">step ms", ">samples/s", ">waits ms")
    title = (
        f"the fastest way within {budget_text(study)} of each GPU, "
        f"{format_count(study.spec.batch, 'sample')} on each"
    )
    return Table(title, columns, rows)


def _rate_text(samples_per_s: float) -> str:
    rounded = f"{samples_per_s:.4g}"
    return f"{samples_per_s:,.0f}" if samples_per_s >= 1000 else rounded


def _limits(study: MemoryStudy) -> Table:
    policies = tuple(dict.fromkeys([*study.min_budget, *study.max_batch]))
    columns = ["policy"]
    cells: list[Iterable[str]] = [policies]
    if study.min_budget:
        columns += [">minimum budget", ">bytes"]
        sizes = [study.min_budget.get(policy) for policy in policies]
        cells.append(map(bytes_text, sizes))
        cells.append(NOTHING if s is None else str(s) for s in sizes)
    if study.max_batch:
        columns.append(">largest batch")
        cells.append(str(study.max_batch.get(policy, NOTHING)) for policy in policies)
    title = f"limits of each policy; batches within {bytes_text(study.budget)}"
    return Table(title, tuple(columns), tuple(zip(*cells, strict=True)))


def _throughput(study: MemoryStudy) -> Table:
    """Return the predicted throughput by batch, up to the largest one."""
    rates = study.samples_per_s
    rows = tuple(
        (
            str(batch),
            study.by_batch[batch].policy,
            ms_text(study.by_batch[batch].step_ms),
            _rate_text(rate),
            "best" if batch == study.best_batch else "",
        )
        for batch, rate in rates.items()
    )
    strong = {i for i, batch in enumerate(rates) if batch == study.best_batch}
    return Table(
        f"throughput of smaller batches within {bytes_text(study.budget)}",
        (">batch", "policy", ">step ms", ">samples/s", "remark"),
        rows,
        frozenset(strong),
    )


# Report of a memory study as one HTML file: needs and costs of a step.


def memory_report(study: MemoryStudy) -> str:
    """Return the file as text."""
    title = f"{study.spec.title} within {budget_text(study)}"
    image = "×".join(map(str, study.image)) or "1"
    facts = (
        f"Batch {study.spec.batch}, inputs of {image}, "
        f"{study.parameters:,} parameters, "
        f"{study.kind}; node order: "
        f"{name_of(study.spec.order)}; {study.device}"
    )
    what = "Inference" if study.inference else "A training step"
    return page(
        title,
        SHEETS,
        header(f"{what} of {title}", facts, _warnings(study)),
        memory_body(study),
    )


def memory_body(study: MemoryStudy) -> Markup:
    """Return cards, charts, the table of techniques, and sources."""
    best, rival = study.best, ""
    if best is not None:  # name the best of the other policies
        others = [t for t in study.techniques if t.policy != best.policy]
        rival = "; nothing else fits" if others else ""
        if (second := best_technique(others)) is not None:
            slowdown = speedup_text(study.slowdown(second))
            rival = f", instead of {slowdown} by {second.policy}"
    several = len({t.budget for t in study.curve}) > 1
    techniques, *tables = memory_tables(study)
    return rendered(
        "memory",
        study=study,
        plan=None if best is None else best.plan,
        budget=budget_text(study),
        least_ms=study.least_ms.get(study.budget),
        rival=rival,
        placed=placed_words(study),
        techniques=techniques,
        tables=tables,
        faint={i for i, t in enumerate(study.techniques) if not t.fits},
        speeds=speed_chart(speed_series(study)) if several else None,
        kinds=KINDS,
        queues=queues_of,
        memory_chart=memory_chart,
        stack_chart=stack_chart,
        lanes_chart=lanes_chart,
    )


def _warnings(study: MemoryStudy) -> Iterator[str]:
    if not study.measured:
        which = "All times"
        if study.convolutions.measured:
            which = "Times other than those of recorded convolutions"
        yield (
            f"{which} are estimates from published figures of the device: use them to "
            "compare techniques, not to predict a speed."
        )
    if study.interrupted:
        yield "Interrupted: only the finished part is shown."


def speed_series(study: MemoryStudy) -> tuple[Series, ...]:
    """Return the speed under each budget by policy, without empty ones."""
    points: dict[str, list[tuple[int, float]]] = {}
    for technique in study.curve:
        if technique.step_ms is not None:
            speed = study.unbounded_ms / technique.step_ms
            points.setdefault(technique.policy, []).append((technique.budget, speed))
    ours_first = sorted(points, key=lambda policy: policy != PLANNED)
    return tuple(Series(p, tuple(points[p]), p == PLANNED) for p in ours_first)
