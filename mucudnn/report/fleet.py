"""A fleet study, as tables and as an HTML page."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from mucudnn.ir.sizes import format_count
from mucudnn.passes.load_balancing import FleetPlan
from mucudnn.report.page import SHEETS, header, page, rendered
from mucudnn.report.svg import Frame, Markup, Scale, box, drawing, linear_scale, tag
from mucudnn.report.text import NOTHING, Table, ms_text, speedup_text
from mucudnn.studies.fleet import FleetStudy

_KINDS = {
    "heavy": "compute",
    "stall": "wait for the slowest device",
    "copy-out": "all-reduce of gradients",
}
_WIDTH, _LEFT, _RIGHT = 1000.0, 190.0, 985.0
_LANE, _GAP, _TOP, _HEAD = 22.0, 8.0, 8.0, 24.0
_MOST_LANES = 24


def fleet_heading(study: FleetStudy) -> str:
    """Return model, batch and number of devices."""
    devices = format_count(len(study.fleet.ranks), "device")
    return f"{study.title}, {format_count(study.plan.batch, 'sample')} on {devices}"


def fleet_facts(study: FleetStudy) -> str:
    """Return the sources of times."""
    return "; ".join(_sources(study))


def _sources(study: FleetStudy) -> list[str]:
    sources = [f"{name}: {source}" for name, source in study.sources.items()]
    return [*sources, f"all-reduce: {study.link}"]


def _group_ranks(study: FleetStudy, plan: FleetPlan) -> Iterator[tuple[str, int]]:
    """Yield (names of the first and the last rank, first index) of equal neighbours."""
    ranks = study.fleet.ranks

    def kind(i: int) -> object:
        return ranks[i].table, ranks[i].memory, plan.shares[i]

    for _, same in groupby(range(len(ranks)), key=kind):
        first, *others = same
        last = f" … {ranks[others[-1]].name}" if others else ""
        yield f"{ranks[first].name}{last}", first


def _step_ms(plan: FleetPlan | None) -> float | None:
    return None if plan is None else plan.step_ms


def fleet_tables(study: FleetStudy) -> tuple[Table, ...]:
    """Return the tables of ranks and of splits."""
    plan, notes = study.plan, _sources(study)
    if any(share.passes > 1 for share in plan.shares):
        text = "a share that does not fit runs as passes whose gradients are summed"
        # The note on the all-reduce stays the last one.
        notes.insert(-1, text)
    ranks = []
    for names, i in _group_ranks(study, plan):
        share, idle = plan.shares[i], plan.idle_ms[i]
        ranks.append(
            (
                names,
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
    heading = fleet_heading(study)
    splits = []
    for name, step_ms in (
        ("planned", plan.step_ms),
        ("proportional to speed", _step_ms(study.proportional)),
        ("equal shares", _step_ms(study.equal)),
        ("fastest device alone", study.fastest_alone_ms),
        ("lower bound of any split", study.bound_ms),
    ):
        if step_ms is None:
            splits.append((name, *(NOTHING,) * 3, "does not fit"))
        else:
            rate = f"{1e3 * plan.batch / step_ms:,.0f}"
            speedup = speedup_text(step_ms / plan.step_ms)
            wins = name == "fastest device alone" and step_ms < study.bound_ms
            remark = "beats any split" if wins else ""
            splits.append((name, ms_text(step_ms), rate, speedup, remark))
    of_splits = ("split", ">step ms", ">samples/s", ">speed-up of planned", "remark")
    return (
        Table(
            *(heading, columns, tuple(ranks)),
            notes=tuple(notes),
            spare=("of the step", "passes", "whole batch alone ms", "waits ms"),
        ),
        Table(
            *("", of_splits, tuple(splits), frozenset({0})),
            spare=("samples/s", "remark", "speed-up of planned"),
        ),
    )


def fleet_report(study: FleetStudy) -> str:
    """Return the file as text."""
    warnings = []
    if any("estimated" in source for source in study.sources.values()):
        warnings.append(
            "Times of devices that were not measured are estimates from published "
            "figures: use them to compare splits, not to predict a speed."
        )
    heading = fleet_heading(study)
    return page(
        heading,
        SHEETS,
        header(heading, fleet_facts(study), warnings),
        fleet_body(study),
    )


def fleet_body(study: FleetStudy) -> Markup:
    """Return cards, the chart of waiting times, and tables."""
    plan = study.plan
    waits = sum(plan.idle_ms) / (len(plan.shares) * plan.step_ms)
    rivals = [
        ("Over equal shares", _step_ms(study.equal), "equal shares"),
        (
            "Over shares by speed",
            _step_ms(study.proportional),
            "shares in proportion to speed",
        ),
    ]
    if len(plan.shares) > 1:
        what = "the whole batch on one device"
        rivals.append(("Over the fastest alone", study.fastest_alone_ms, what))
    ranks, splits = fleet_tables(study)
    return rendered(
        "fleet",
        study=study,
        waits=f"{waits:.1%}",
        rivals=rivals,
        kinds=_KINDS,
        chart=waiting_chart(study),
        ranks=ranks,
        splits=splits,
    )


def waiting_chart(study: FleetStudy) -> Markup:
    """Draw each device's step as a bar: computing, waiting, summing gradients."""
    shown: Sequence[tuple[str, FleetPlan]] = [
        (name, plan)
        for name, plan in (("equal", study.equal), ("planned", study.plan))
        if plan is not None
    ]
    x = linear_scale(max(plan.step_ms for _, plan in shown), _LEFT, _RIGHT)
    marks: list[Markup] = []
    y = _TOP
    for name, plan in shown:
        words = f"{name} shares: {ms_text(plan.step_ms)} ms"
        marks.append(tag("text", words, class_="lane-name", x=4, y=y + 14))
        y += _HEAD
        for names, i in list(_group_ranks(study, plan))[:_MOST_LANES]:
            marks += _lane(plan, names, i, x, y)
            y += _LANE + _GAP
    frame = Frame(left=_LEFT, right=_RIGHT, top=_TOP, bottom=y)
    label = "; ".join(
        f"{name} shares: {ms_text(plan.step_ms)} ms, the longest wait "
        f"{ms_text(max(plan.idle_ms))} ms"
        for name, plan in shown
    )
    axis = frame.horizontal(x, "milliseconds")
    return drawing(_WIDTH, y + 34, f"Waiting times. {label}.", marks, axis)


def _lane(plan: FleetPlan, names: str, i: int, x: Scale, y: float) -> Iterator[Markup]:
    share = plan.shares[i]
    text = f"{names}: {share.samples}"
    yield tag("text", text, class_="tick end", x=_LEFT - 8, y=y + 15)
    for kind, start, stop, what in (
        ("heavy", 0.0, share.time_ms, format_count(share.samples, "sample")),
        ("stall", share.time_ms, plan.compute_ms, "waits"),
        ("copy-out", plan.compute_ms, plan.step_ms, "all-reduce"),
    ):
        if stop > start:
            size = x(stop) - x(start), _LANE
            title = f"{names}, {what}: {ms_text(stop - start)} ms"
            yield box(f"box {kind}", x(start), y, size, title=title)
