"""Report of a fleet as one HTML file: waiting times with equal and planned shares."""

from collections.abc import Iterator

from mucudnn.passes.fleet import FleetPlan
from mucudnn.report.axes import Frame, Scale, linear_scale
from mucudnn.report.fleet_text import (
    RankGroup,
    fleet_facts,
    fleet_heading,
    fleet_tables,
    group_ranks,
)
from mucudnn.report.markup import Markup, tag
from mucudnn.report.pages.page import big_card, header, page, swatches, table
from mucudnn.report.svg import box, drawing
from mucudnn.report.words import ms_text, speedup_text
from mucudnn.studies.fleet import FleetStudy

__all__ = ["SHEETS", "fleet_body", "fleet_report", "waiting_chart"]

SHEETS = ("style.css", "memory.css")
"""Style sheets of the charts."""

_KINDS = {
    "heavy": "computes",
    "stall": "waits for the slowest",
    "copy-out": "gradients are summed",
}
_WIDTH, _LEFT, _RIGHT = 1000.0, 190.0, 985.0
_LANE, _GAP, _TOP, _HEAD = 22.0, 8.0, 8.0, 24.0
_MOST_LANES = 24


def fleet_report(study: FleetStudy) -> str:
    """Return the file as text."""
    warnings = []
    if any("estimated" in source for source in study.sources.values()):
        warnings.append(
            "Times of devices that were not measured are estimates from published "
            "figures: they compare splits, they do not promise a speed."
        )
    return page(
        fleet_heading(study),
        SHEETS,
        header(fleet_heading(study), fleet_facts(study), warnings),
        fleet_body(study),
    )


def fleet_body(study: FleetStudy) -> Markup:
    """Return cards, the chart and the tables."""
    chart = tag(
        "section",
        tag("h2", "Who waits for whom"),
        tag("p", "One step of each device, equal shares and planned ones."),
        swatches(_KINDS),
        tag("div", waiting_chart(study), class_="wide"),
        class_="panel",
    )
    ranks, splits = fleet_tables(study)
    tables = [
        tag("section", tag("h2", name), table(rows), class_="panel")
        for name, rows in (("The shares", ranks), ("Beside other splits", splits))
    ]
    return tag("main", _cards(study), chart, tables)


def _cards(study: FleetStudy) -> Markup:
    plan = study.plan
    waits = sum(plan.idle_ms) / (len(plan.shares) * plan.step_ms)
    cards = [
        big_card(
            "Planned shares",
            f"{plan.samples_per_s:,.0f}",
            "samples a second",
            f"{ms_text(plan.step_ms)} ms a step, {waits:.1%} of it spent waiting; no "
            f"split takes less than {ms_text(study.bound_ms)} ms",
        )
    ]
    for other, name in ((study.equal, "equal shares"), (study.proportional, "speeds")):
        speedup = study.speedup(other)
        if other is not None and speedup is not None:
            title = (
                "Over equal shares" if other is study.equal else "Over shares by speed"
            )
            cards.append(
                big_card(
                    title,
                    speedup_text(speedup),
                    "as fast",
                    f"{ms_text(other.step_ms)} ms a step with {name} deciding",
                )
            )
    fastest = study.fastest_alone_ms
    if fastest is not None and len(plan.shares) > 1:
        cards.append(
            big_card(
                "Over the fastest alone",
                speedup_text(fastest / plan.step_ms),
                "as fast",
                f"{ms_text(fastest)} ms for the whole batch on one device",
            )
        )
    return tag("div", cards, class_="cards")


def waiting_chart(study: FleetStudy) -> Markup:
    """Draw each device's step as a bar: computing, waiting, summing gradients."""
    plans = [("equal shares", study.equal), ("planned shares", study.plan)]
    shown = [
        (name, plan, list(group_ranks(study, plan))[:_MOST_LANES])
        for name, plan in plans
        if plan is not None
    ]
    x = linear_scale(max(plan.step_ms for _, plan, _ in shown), _LEFT, _RIGHT)
    marks: list[Markup] = []
    y = _TOP
    for name, plan, groups in shown:
        words = f"{name}: {ms_text(plan.step_ms)} ms"
        marks.append(tag("text", words, class_="lane-name", x=4, y=y + 14))
        y += _HEAD
        for group in groups:
            marks += _lane(plan, group, x, y)
            y += _LANE + _GAP
    frame = Frame(left=_LEFT, right=_RIGHT, top=_TOP, bottom=y)
    label = "; ".join(
        f"{name}: {ms_text(plan.step_ms)} ms, the longest wait "
        f"{ms_text(max(plan.idle_ms))} ms"
        for name, plan, _ in shown
    )
    axis = frame.horizontal(x, "milliseconds")
    return drawing(_WIDTH, y + 34, f"Who waits for whom. {label}.", marks, axis)


def _lane(plan: FleetPlan, group: RankGroup, x: Scale, y: float) -> Iterator[Markup]:
    i = group.ranks[0]
    share = plan.shares[i]
    name = f"{group.names}: {share.samples}"
    yield tag("text", name, class_="tick end", x=_LEFT - 8, y=y + 15)
    spans = (
        ("heavy", 0.0, share.time_ms, f"{share.samples} samples"),
        ("stall", share.time_ms, plan.compute_ms, "waits"),
        ("copy-out", plan.compute_ms, plan.step_ms, "all-reduce"),
    )
    for kind, start, stop, what in spans:
        if stop > start:
            size = x(stop) - x(start), _LANE
            title = f"{group.names}, {what}: {ms_text(stop - start)} ms"
            yield box(f"box {kind}", x(start), y, size, title=title)
