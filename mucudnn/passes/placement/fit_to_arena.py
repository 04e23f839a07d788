"""A step within an arena of a given size: where room is short, intervals shrink.

The bytes of a schedule fit its budget at every node, but not always in whole pieces. A
copy back that begins a few nodes later, or a copy out that is waited for a few nodes
sooner, makes room for the others.
"""

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

from mucudnn.ir.profile import Profile
from mucudnn.passes.liveness import rounded
from mucudnn.passes.placement.layout import Layout
from mucudnn.passes.placement.shrinkable import Place, Shrinkable, place_shrinkable
from mucudnn.passes.scheduling.costs import profile_of, state_bytes, timed_by
from mucudnn.passes.scheduling.intervals import (
    ResidencyInterval,
    emit,
    least_occupancy,
    shifted,
)
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.passes.scheduling.transfers import Clock, first_ends, latest_starts
from mucudnn.passes.simulate import simulate

__all__ = ["fit_to_arena", "shortest"]

_TOLERATED = 0.005
"""What places may cost of a step's time before others are looked for."""

_LINK_SHARES = (0.5, 1.0)
"""Shares of its rate that a link is thought to have, where intervals last no longer
than their copies take: with less of it they are wanted for longer."""


def fit_to_arena(
    plan: StepPlan, profile: Profile, arena_bytes: int
) -> tuple[StepPlan, Layout] | None:
    """The fastest of the layouts that are found, and the step that has it.

    Args:
        plan: What is to be placed.
        profile: Of the graph as it was before the step was planned.
        arena_bytes: Size of the arena; parameters and state that never leave are
            beside it.

    Returns:
        None where no places were found.
    """
    graph = plan.schedule.graph
    known = timed_by(profile_of(graph, profile), plan.plans)
    clock = Clock([known.node_ms[node.name] for node in graph.nodes])
    for share in _LINK_SHARES:
        wanted = _trimmed(plan.intervals, known, clock, share, len(graph.nodes))
        found = _fastest(plan, known, clock, wanted, arena_bytes)
        if found is not None:
            return found
    return None


def shortest(plan: StepPlan, profile: Profile) -> StepPlan:
    """The step with residency intervals that last no longer than they are needed."""
    graph = plan.schedule.graph
    cores = [_core(interval, len(graph.nodes)) for interval in plan.intervals]
    return _emitted(plan, cores, timed_by(profile_of(graph, profile), plan.plans))


def _core(interval: ResidencyInterval, count: int) -> ResidencyInterval:
    """From the first node that needs it to the last; without copies, as it was."""
    core = replace(
        interval,
        start=interval.needed if interval.copied_in else interval.start,
        stop=interval.last if interval.copied_out else interval.stop,
    )
    return shifted(core, -count) if core.start >= count else core


def _emitted(
    plan: StepPlan, intervals: list[ResidencyInterval], profile: Profile
) -> StepPlan:
    """The step with other residency intervals, and what it costs then."""
    graph, workspaces = plan.schedule.graph, plan.schedule.workspaces
    scratch = [workspaces.get(node.name, 0) for node in graph.nodes]
    resident = state_bytes(graph, plan.schedule.resident)
    most, _ = least_occupancy(intervals, scratch, resident, 0).peak()
    new = emit(graph, intervals, workspaces, most, plan.schedule.hosted)
    return replace(
        plan, schedule=new, intervals=intervals, prediction=simulate(new, profile)
    )


def _fastest(
    plan: StepPlan,
    profile: Profile,
    clock: Clock,
    wanted: Sequence[ResidencyInterval],
    arena_bytes: int,
) -> tuple[StepPlan, Layout] | None:
    """The fastest of the layouts that are found for intervals as they are wanted."""
    n = len(plan.schedule.graph.nodes)
    blocks = [_shrinkable(interval, n) for interval in wanted]
    blocks += [
        Shrinkable(rounded(plan.schedule.workspaces[node.name]), at, at, at, at)
        for at, node in enumerate(plan.schedule.graph.nodes)
        if plan.schedule.workspaces.get(node.name, 0)
    ]
    good_enough = (1 + _TOLERATED) * simulate(plan.schedule, profile).step_ms
    best: tuple[StepPlan, Layout] | None = None
    for places in place_shrinkable(blocks, arena_bytes, clock, n):
        intervals = [
            _cut(interval, block, place, n)
            for interval, block, place in zip(wanted, blocks, places, strict=False)
        ]
        found = _emitted(plan, intervals, profile)
        if best is None or found.prediction.step_ms < best[0].prediction.step_ms:
            best = found, _layout(found, blocks, places)
        if found.prediction.step_ms <= good_enough:
            break
    return best


def _trimmed(
    intervals: Sequence[ResidencyInterval],
    profile: Profile,
    clock: Clock,
    share: float,
    count: int,
) -> list[ResidencyInterval]:
    """Intervals that last no longer than copies take with a share of the links."""
    found = list(intervals)
    coming = sorted(
        (i for i, interval in enumerate(intervals) if interval.copied_in),
        key=lambda i: intervals[i].needed,
    )
    starts = latest_starts(
        [intervals[i] for i in coming], clock, share * profile.in_bytes_per_ms
    )
    for i, start in zip(coming, starts, strict=True):
        begin = min(max(found[i].start, start), found[i].needed)
        found[i] = replace(found[i], start=begin)
    leaving = sorted(
        (i for i, interval in enumerate(intervals) if interval.copied_out),
        key=lambda i: intervals[i].last % count,
    )
    ends = first_ends(
        [intervals[i] for i in leaving], clock, share * profile.out_bytes_per_ms, count
    )
    for i, end in zip(leaving, ends, strict=True):
        done = max(min(found[i].stop, end), found[i].last)
        found[i] = replace(found[i], stop=done)
    return found


def _shrinkable(interval: ResidencyInterval, count: int) -> Shrinkable:
    """When an interval is needed, and when it is wanted."""
    end = interval.stop if interval.host_resident else min(interval.stop, count - 1)
    return Shrinkable(
        interval.nbytes,
        interval.start,
        interval.needed if interval.copied_in else interval.start,
        min(end, interval.last) if interval.copied_out else end,
        end,
    )


def _cut(
    interval: ResidencyInterval, block: Shrinkable, place: Place, count: int
) -> ResidencyInterval:
    """A residency interval that lasts as long as its place."""
    stop = interval.stop if place.stop == block.stop else place.stop
    cut = replace(interval, start=place.start, stop=stop)
    return shifted(cut, -count) if place.start >= count else cut


def _layout(
    plan: StepPlan, blocks: Sequence[Shrinkable], places: Sequence[Place]
) -> Layout:
    """Offsets in order; what is live across iterations is at both ends of the step."""
    schedule = plan.schedule
    of_storage: dict[str, list[tuple[int, int]]] = {}
    for interval, place in zip(plan.intervals, places, strict=False):
        of_storage.setdefault(interval.storage, []).append(
            (interval.start, place.offset)
        )
    offsets: dict[str, tuple[int, ...]] = {}
    for name, found in of_storage.items():
        ordered = tuple(offset for _, offset in sorted(found))
        across = ordered[-1:] if name in schedule.live_across else ()
        offsets[name] = across + ordered
    nodes = (n.name for n in schedule.graph.nodes if schedule.workspaces.get(n.name, 0))
    scratch = (place.offset for place in places[len(plan.intervals) :])
    ends = (p.offset + b.nbytes for b, p in zip(blocks, places, strict=True))
    return Layout(
        MappingProxyType(offsets),
        MappingProxyType(dict(zip(nodes, scratch, strict=True))),
        max(ends, default=0),
        plan.peak_bytes - state_bytes(schedule.graph, schedule.resident),
    )
