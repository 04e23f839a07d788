"""Tables of a fleet: shares of the devices, and times of other splits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from mucudnn.passes.fleet import FleetPlan
from mucudnn.report.text import Table
from mucudnn.report.words import NOTHING, ms_text, speedup_text
from mucudnn.studies.fleet import FleetStudy

__all__ = ["RankGroup", "fleet_facts", "fleet_heading", "fleet_tables", "group_ranks"]


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
