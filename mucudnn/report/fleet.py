"""A fleet study, as tables and as an HTML page."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from mucudnn.passes.load_balancing import FleetPlan
from mucudnn.report.page import big_card, header, page, swatches, table
from mucudnn.report.svg import Frame, Markup, Scale, box, drawing, linear_scale, tag
from mucudnn.report.text import NOTHING, Table, ms_text, speedup_text
from mucudnn.studies.fleet import FleetStudy


@dataclass(frozen=True, slots=True)
class RankGroup:
    """Consecutive equal ranks with equal shares; `names` are the first and the last."""

    names: str
    ranks: Sequence[int]


def group_ranks(study: FleetStudy, plan: FleetPlan) -> Iterator[RankGroup]:
    """Group the ranks of a plan by device and share."""
    ranks = study.fleet.ranks

    def kind(i: int) -> object:
        return ranks[i].table, ranks[i].memory, plan.shares[i]

    for _, same in groupby(range(len(ranks)), key=kind):
        members = list(same)
        first, last = ranks[members[0]].name, ranks[members[-1]].name
        names = first if len(members) == 1 else f"{first} … {last}"
        yield RankGroup(names, members)


def fleet_heading(study: FleetStudy) -> str:
    """Return model, batch and number of devices."""
    count = len(study.fleet.ranks)
    return f"{study.title}, {study.plan.batch} samples on {count} devices"


def fleet_facts(study: FleetStudy) -> str:
    """Return the sources of times."""
    sources = "; ".join(f"{name}: {source}" for name, source in study.sources.items())
    return f"{sources}; all-reduce: {study.link}"


def fleet_tables(study: FleetStudy) -> tuple[Table, ...]:
    """Return the tables of ranks and of splits."""
    return _ranks(study), _splits(study)


def _ranks(study: FleetStudy) -> Table:
    plan = study.plan
    rows = []
    for group in group_ranks(study, plan):
        i = group.ranks[0]
        share, idle = plan.shares[i], plan.idle_ms[i]
        rows.append(
            (
                group.names,
                str(share.samples),
                str(share.passes),
                ms_text(share.time_ms) if share.samples else NOTHING,
                ms_text(idle) if idle else "0",
                f"{idle / plan.step_ms:.1%}",
                ms_text(study.alone[i]),
            )
        )
    columns = (
        *("device", ">samples", ">passes", ">step ms", ">waits ms", ">of the step"),
        ">whole batch alone ms",
    )
    return Table(fleet_heading(study), columns, tuple(rows), notes=_notes(study))


def _notes(study: FleetStudy) -> tuple[str, ...]:
    notes = [f"{name}: {source}" for name, source in study.sources.items()]
    if any(share.passes > 1 for share in study.plan.shares):
        notes.append(
            "a share that does not fit runs as passes whose gradients are summed"
        )
    return (*notes, f"all-reduce: {study.link}")


def _splits(study: FleetStudy) -> Table:
    def row(name: str, step_ms: float | None) -> tuple[str, ...]:
        if step_ms is None:
            return (name, *(NOTHING,) * 3, "does not fit")
        rate = 1e3 * study.plan.batch / step_ms
        speedup = speedup_text(step_ms / study.plan.step_ms)
        return (name, ms_text(step_ms), f"{rate:,.0f}", speedup, "")

    def of(plan: FleetPlan | None) -> float | None:
        return None if plan is None else plan.step_ms

    rows = (
        row("planned", study.plan.step_ms),
        row("proportional to speed", of(study.proportional)),
        row("equal shares", of(study.equal)),
        row("fastest device alone", study.fastest_alone_ms),
        row("bound of any split", study.bound_ms),
    )
    columns = ("split", ">step ms", ">samples/s", ">speed-up of planned", "remark")
    return Table("", columns, rows, frozenset({0}))


# Report of a fleet as one HTML file: waiting times with equal and planned shares.


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
