"""Tables of a memory study: techniques, budgets, and requirements of policies."""

from collections.abc import Iterable

from mucudnn.passes.planning.comparison import Technique
from mucudnn.report.text import Table
from mucudnn.report.words import NOTHING, bytes_text, ms_text, speedup_text
from mucudnn.studies.memory_study import MemoryStudy

__all__ = ["budget_text", "heading", "memory_tables", "placed_words", "technique_table"]

_COLUMNS = (
    *("policy", "scheduler", "fits", ">peak", ">offloaded", ">extra nodes"),
    *(">step ms", ">slowdown", ">bound ms", ">gap", "remark"),
)
"""Columns of techniques: `extra nodes` are recomputed; `gap` bounds the distance to
the best possible plan."""

_SPARE = ("bound ms", "extra nodes", "scheduler", "gap", "offloaded")


def heading(study: MemoryStudy) -> str:
    """Return the step and the device in a line."""
    image = "×".join(map(str, study.image))
    return (
        f"{study.spec.title}, batch {study.spec.batch}, {image}, "
        f"{study.kind}; {study.device}"
    )


def memory_tables(study: MemoryStudy) -> tuple[Table, ...]:
    """Return the table of techniques, and others if requested."""
    tables = [technique_table(study)]
    if study.curve:
        tables.append(_curve(study))
    if study.min_budget or study.max_batch:
        tables.append(_limits(study))
    return tuple(tables)


def _cells(study: MemoryStudy, technique: Technique) -> tuple[str, ...]:
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
    why = study.loose.get(study.budget, "")
    return f"no plan within the budget takes less than {ms_text(least)} ms a step" + (
        f" (compute alone: {why})" if why else ""
    )


def placed_words(study: MemoryStudy) -> str:
    """Return the best technique with fixed offsets as a sentence, if placed."""
    if study.placed is None:
        return ""
    layout, plan = study.placed.layout, study.placed.plan
    beside = ""
    if study.placed.state_bytes:
        beside = f" beside {bytes_text(study.placed.state_bytes)} that never leave"
    tiers = plan.prediction.placement
    away = "" if tiers is None else f"; {tiers}"
    how = "with fixed offsets"
    if layout.mapped_chunks:
        how = f"in mapped memory ({ms_text(study.placed.map_ms)} ms, once)"
    return (
        f"{plan.policy} {how}: an arena of {bytes_text(layout.nbytes)}"
        f"{beside}, {layout.fragmentation:.1%} above what is in use at once; "
        f"{ms_text(plan.prediction.step_ms)} ms a step{away}"
    )


def technique_table(study: MemoryStudy) -> Table:
    """Return all techniques, with sources of the figures as notes."""
    rows = tuple(_cells(study, t) for t in study.techniques)
    strong = {i for i, t in enumerate(study.techniques) if t is study.best}
    unbounded = (
        f"with all the memory it could use: {bytes_text(study.unbounded.peak_bytes)}, "
        f"{ms_text(study.unbounded_ms)} ms a step"
    )
    notes = [unbounded, *filter(None, [least_words(study), placed_words(study)])]
    if study.minimum is not None:
        least = f"{bytes_text(study.minimum)} ({study.minimum} bytes)"
        notes.append(f"the least budget that works: {least}")
    if study.splitting is not None:
        notes += [f"in parts: {line}" for line in study.splitting.lines]
    notes += [f"{name}: {text}" for name, text in study.figures.items()]
    if study.interrupted:
        notes.append("interrupted: this is what was done by then")
    title = f"{heading(study)}; budget {budget_text(study)}"
    return Table(title, _COLUMNS, rows, frozenset(strong), tuple(notes), _SPARE)


def budget_text(study: MemoryStudy) -> str:
    """Return the budget, with enough digits to differ from what does not fit."""
    needs = (t.peak_bytes for t in study.techniques if t.plan is None)
    return bytes_text(study.budget, *needs)


def _curve(study: MemoryStudy) -> Table:
    """Return slowdowns by policy (rows) and budget (columns)."""
    budgets = sorted({t.budget for t in study.curve}, reverse=True)
    by_policy: dict[str, dict[int, Technique]] = {}
    for technique in study.curve:
        by_policy.setdefault(technique.policy, {})[technique.budget] = technique
    rows = tuple(
        (policy, *(_slowdown(study, found.get(budget)) for budget in budgets))
        for policy, found in by_policy.items()
    )
    least = (study.least_ms.get(budget) for budget in budgets)
    bounds = (None if ms is None else ms / study.unbounded_ms for ms in least)
    rows += (("(no plan below)", *map(speedup_text, bounds)),)
    whole = study.unbounded.peak_bytes
    columns = ("policy", *(f">{bytes_text(b)} ({b / whole:.0%})" for b in budgets))
    return Table("slowdown under smaller budgets", columns, rows)


def _slowdown(study: MemoryStudy, technique: Technique | None) -> str:
    return NOTHING if technique is None else speedup_text(study.slowdown(technique))


def _limits(study: MemoryStudy) -> Table:
    policies = tuple(dict.fromkeys([*study.min_budget, *study.max_batch]))
    columns = ["policy"]
    cells: list[Iterable[str]] = [policies]
    if study.min_budget:
        columns += [">least budget", ">bytes"]
        sizes = [study.min_budget.get(policy) for policy in policies]
        cells.append(map(bytes_text, sizes))
        cells.append(NOTHING if s is None else str(s) for s in sizes)
    if study.max_batch:
        columns.append(">largest batch")
        cells.append(str(study.max_batch.get(policy, NOTHING)) for policy in policies)
    title = f"what fits, and what within {bytes_text(study.budget)}"
    return Table(title, tuple(columns), tuple(zip(*cells, strict=True)))
