"""A memory study, as tables and as an HTML page."""

from collections.abc import Iterable, Iterator

from mucudnn.passes.planning.plan_step import Technique, best_technique
from mucudnn.passes.registry import name_of
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.report.memory_charts import (
    KINDS,
    Series,
    lanes_chart,
    memory_chart,
    speed_chart,
    stack_chart,
)
from mucudnn.report.page import big_card, header, page, swatches, table
from mucudnn.report.svg import Child, Markup, tag
from mucudnn.report.text import NOTHING, Table, bytes_text, ms_text, speedup_text
from mucudnn.studies.memory_results import MemoryStudy

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
    why = study.bound_note.get(study.budget, "")
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


# Report of a memory study as one HTML file: needs and costs of a step.


SHEETS = ("style.css", "memory.css")
"""Style sheets of the charts of a step."""


_OURS = "planned"

_QUEUES = {
    "heavy": "convolutions and matrix products",
    "light": "all other nodes",
    "again": "computed again",
    "update": "updates",
    "stall": "compute waits",
    "copy-out": "copies to the host",
    "copy-in": "copies back",
}


def memory_report(study: MemoryStudy) -> str:
    """Return the file as text."""
    title = f"{study.spec.title} within {budget_text(study)}"
    image = "×".join(map(str, study.image))
    facts = (
        f"Batch {study.spec.batch}, images of {image}, "
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
    return tag("main", _cards(study), _pictures(study), _table(study), _sources(study))


def _warnings(study: MemoryStudy) -> Iterator[str]:
    if not study.measured:
        which = (
            "Times other than those of recorded convolutions"
            if study.convolutions.measured
            else "All times"
        )
        yield (
            f"{which} are estimates from published figures of the device: they "
            "compare techniques, they do not promise a speed."
        )
    if study.interrupted:
        yield "Interrupted: this is what was done by then."


def _cards(study: MemoryStudy) -> Markup:
    best, whole = study.best, study.unbounded
    least = study.least_ms.get(study.budget)
    bound = (
        "" if least is None else f", and no plan at all less than {ms_text(least)} ms"
    )
    cards = [
        big_card(
            "Without a budget",
            bytes_text(whole.peak_bytes),
            "at most in use",
            f"{ms_text(study.unbounded_ms)} ms a step, everything kept",
        )
    ]
    if best is not None and best.plan is not None:
        prediction = best.plan.prediction
        cards += [
            big_card(
                f"{best.policy} within {budget_text(study)}",
                speedup_text(study.slowdown(best)),
                f"the time of a step without a budget{_rival(study)}",
                f"{ms_text(prediction.step_ms)} ms; no order of the same work takes "
                f"less than {ms_text(prediction.bound_ms)} ms{bound}",
            ),
            big_card(
                "What it does for that",
                bytes_text(prediction.out_bytes),
                "offloaded in a step",
                f"{best.plan.recomputed} nodes run again; compute waits "
                f"{ms_text(sum(prediction.stalls_ms.values()))} ms",
            ),
        ]
    else:
        cards.append(
            big_card(
                f"Within {budget_text(study)}",
                "nothing fits",
                "of what was tried",
                "see the table for how many bytes each is short",
            )
        )
    if study.minimum is not None:
        cards.append(
            big_card(
                "The least budget",
                bytes_text(study.minimum, study.budget),
                "that any policy can run the step in",
                f"{study.minimum / whole.peak_bytes:.0%} of what it takes without one",
            )
        )
    return tag("div", cards, class_="cards")


def _rival(study: MemoryStudy) -> str:
    """Return the best of the other policies, as the end of a sentence."""
    best = study.best
    others = [t for t in study.techniques if best and t.policy != best.policy]
    second = best_technique(others)
    if second is not None:
        slowdown = speedup_text(study.slowdown(second))
        return f", instead of {slowdown} by {second.policy}"
    return "; nothing else fits" if others else ""


def _pictures(study: MemoryStudy) -> Iterable[Markup]:
    best = study.best
    if best is not None and best.plan is not None:
        yield from _plan_panels(study, best.plan)
    if len({t.budget for t in study.curve}) > 1:
        series = speed_series(study)
        yield _panel(
            "Speed against budget",
            "How fast the step is under each budget, against its speed without one. A "
            "line ends where its policy no longer fits.",
            speed_chart(series),
        )


def _plan_panels(study: MemoryStudy, plan: StepPlan) -> Iterable[Markup]:
    yield _panel(
        "Memory over the step",
        "All bytes on the device, parameters, workspaces and rounding included. "
        "Dashed: without a budget.",
        memory_chart(plan, study.unbounded, study.budget),
    )
    yield _panel(
        "Who holds it",
        "Tensors that hold much for long, from arrival to departure; one that is "
        "offloaded and comes back is here twice. Point at one for its name and size.",
        swatches(KINDS),
        stack_chart(plan),
    )
    yield _panel(
        "The three queues",
        "Compute, and the link in each direction. They work at the same time; where "
        "compute has to wait, its lane says so.",
        swatches(_QUEUES),
        lanes_chart(plan),
    )


def _panel(name: str, text: str, *content: Child) -> Markup:
    *above, picture = content
    return tag(
        "section",
        tag("h2", name),
        tag("p", text),
        above,
        tag("div", picture, class_="wide"),
        class_="panel",
    )


def _table(study: MemoryStudy) -> Markup:
    faint = {i for i, technique in enumerate(study.techniques) if not technique.fits}
    return _panel(
        "Every technique",
        f"Within {budget_text(study)}. The peak of one that does not fit is what "
        "it needs at the least. Bound: no order of the same computations and copies "
        "takes less.",
        tag("p", placed_words(study), class_="soft"),
        table(technique_table(study), faint=faint),
    )


def _sources(study: MemoryStudy) -> Markup:
    items = (tag("li", f"{name}: {text}") for name, text in study.figures.items())
    return tag(
        "section",
        tag("h2", "Where the figures are from"),
        tag("ul", items, class_="sources"),
        class_="panel",
    )


def speed_series(study: MemoryStudy) -> tuple[Series, ...]:
    """Return the speed under each budget by policy, without empty ones."""
    points: dict[str, list[tuple[int, float]]] = {}
    for technique in study.curve:
        if technique.step_ms is not None:
            speed = study.unbounded_ms / technique.step_ms
            points.setdefault(technique.policy, []).append((technique.budget, speed))
    ours_first = sorted(points, key=lambda policy: policy != _OURS)
    return tuple(Series(p, tuple(points[p]), p == _OURS) for p in ours_first)
