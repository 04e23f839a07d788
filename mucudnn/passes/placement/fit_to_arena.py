"""A step's places in an arena of a given size: where places are short, stays give way.

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
from mucudnn.passes.placement.shrinkable import Elastic, Place, place_elastic
from mucudnn.passes.planning.evaluate import StepPlan, profile_of, state_bytes, timed_by
from mucudnn.passes.scheduling.intervals import Stay, emit, least_occupancy, shifted
from mucudnn.passes.scheduling.transfers import Clock, first_ends, latest_starts
from mucudnn.passes.simulate import simulate

__all__ = ["settle", "shortest"]

_TOLERATED = 0.005
"""What places may cost of a step's time before others are looked for."""

_HASTES = (0.5, 1.0)
"""Shares of its rate that a link is thought to have, where stays last no longer than
their copies take: with less of it they are wanted for longer."""


def settle(
    plan: StepPlan, profile: Profile, *, arena_bytes: int, resident: int
) -> tuple[StepPlan, Layout] | None:
    """The fastest of the places that are found, and the step that has them.

    Args:
        plan: Of a step.
        profile: Of the graph that the step was made of.
        arena_bytes: Size of the arena.
        resident: Bytes of what never leaves, beside the arena.

    Returns:
        Nothing, where no places were found.
    """
    graph = plan.schedule.graph
    known = timed_by(profile_of(graph, profile), plan.plans)
    clock = Clock([known.node_ms[node.name] for node in graph.nodes])
    for haste in _HASTES:
        wanted = _trimmed(plan.stays, known, clock, haste, len(graph.nodes))
        found = _settled(plan, known, clock, wanted, arena_bytes, resident)
        if found is not None:
            return found
    return None


def shortest(plan: StepPlan, profile: Profile) -> StepPlan:
    """The step with stays that last no longer than they are needed.

    Args:
        plan: Of a step.
        profile: Of the graph that the step was made of.
    """
    graph, n = plan.schedule.graph, len(plan.schedule.graph.nodes)
    stays = [_core(stay, n) for stay in plan.stays]
    scratch = [plan.schedule.workspaces.get(node.name, 0) for node in graph.nodes]
    resident = state_bytes(graph, plan.schedule.resident)
    most, _ = least_occupancy(stays, scratch, resident, 0).peak()
    new = emit(graph, stays, plan.schedule.workspaces, most, plan.schedule.hosted)
    prediction = simulate(new, timed_by(profile_of(graph, profile), plan.plans))
    return replace(plan, schedule=new, stays=stays, prediction=prediction)


def _core(stay: Stay, count: int) -> Stay:
    """From the first node that needs a stay to the last; no other was copied."""
    core = replace(
        stay,
        start=stay.needed if stay.copied_in else stay.start,
        stop=stay.last if stay.copied_out else stay.stop,
    )
    return shifted(core, -count) if core.start >= count else core


def _settled(
    plan: StepPlan,
    profile: Profile,
    clock: Clock,
    wanted: Sequence[Stay],
    arena_bytes: int,
    resident: int,
) -> tuple[StepPlan, Layout] | None:
    """The fastest of the places that are found for stays as they are wanted."""
    graph, n = plan.schedule.graph, len(plan.schedule.graph.nodes)
    scratch = [plan.schedule.workspaces.get(node.name, 0) for node in graph.nodes]
    blocks = [_elastic(stay, n) for stay in wanted]
    blocks += [
        Elastic(rounded(nbytes), at, at, at, at)
        for at, nbytes in enumerate(scratch)
        if nbytes
    ]
    good_enough = (1 + _TOLERATED) * simulate(plan.schedule, profile).step_ms
    best: tuple[StepPlan, Layout] | None = None
    for places in place_elastic(blocks, arena_bytes, clock, n):
        stays = [
            _cut(stay, block, place, n)
            for stay, block, place in zip(wanted, blocks, places, strict=False)
        ]
        most, _ = least_occupancy(stays, scratch, resident, 0).peak()
        new = emit(graph, stays, plan.schedule.workspaces, most, plan.schedule.hosted)
        prediction = simulate(new, profile)
        if best is None or prediction.step_ms < best[0].prediction.step_ms:
            found = replace(plan, schedule=new, stays=stays, prediction=prediction)
            best = found, _layout(found, blocks, places, most - resident)
        if prediction.step_ms <= good_enough:
            break
    return best


def _trimmed(
    stays: Sequence[Stay], profile: Profile, clock: Clock, haste: float, count: int
) -> list[Stay]:
    """Stays that last no longer than their copies take on links of some haste."""
    found = list(stays)
    coming = sorted(
        (i for i, stay in enumerate(stays) if stay.copied_in),
        key=lambda i: stays[i].needed,
    )
    starts = latest_starts(
        [stays[i] for i in coming], clock, haste * profile.in_bytes_per_ms
    )
    for i, start in zip(coming, starts, strict=True):
        begin = min(max(found[i].start, start), found[i].needed)
        found[i] = replace(found[i], start=begin)
    leaving = sorted(
        (i for i, stay in enumerate(stays) if stay.copied_out),
        key=lambda i: stays[i].last % count,
    )
    ends = first_ends(
        [stays[i] for i in leaving], clock, haste * profile.out_bytes_per_ms, count
    )
    for i, end in zip(leaving, ends, strict=True):
        done = max(min(found[i].stop, end), found[i].last)
        found[i] = replace(found[i], stop=done)
    return found


def _elastic(stay: Stay, count: int) -> Elastic:
    """What a stay needs and what it wants."""
    end = stay.stop if stay.visit else min(stay.stop, count - 1)
    return Elastic(
        stay.nbytes,
        stay.start,
        stay.needed if stay.copied_in else stay.start,
        min(end, stay.last) if stay.copied_out else end,
        end,
    )


def _cut(stay: Stay, block: Elastic, place: Place, count: int) -> Stay:
    """A stay that lasts as long as its place."""
    stop = stay.stop if place.stop == block.stop else place.stop
    cut = replace(stay, start=place.start, stop=stop)
    return shifted(cut, -count) if place.start >= count else cut


def _layout(
    plan: StepPlan,
    blocks: Sequence[Elastic],
    places: Sequence[Place],
    live_peak: int,
) -> Layout:
    """Offsets of stays in order; what is carried is at both ends of the step."""
    of_storage: dict[str, list[tuple[int, int]]] = {}
    for stay, place in zip(plan.stays, places, strict=False):
        of_storage.setdefault(stay.storage, []).append((stay.start, place.offset))
    carried = set(plan.schedule.carried)
    stays = {}
    for name, found in of_storage.items():
        offsets = tuple(offset for _, offset in sorted(found))
        stays[name] = (offsets[-1:] if name in carried else ()) + offsets
    with_scratch = (
        node.name
        for node in plan.schedule.graph.nodes
        if plan.schedule.workspaces.get(node.name, 0)
    )
    of_workspaces = places[len(plan.stays) :]
    ends = (p.offset + b.nbytes for b, p in zip(blocks, places, strict=True))
    return Layout(
        MappingProxyType(stays),
        MappingProxyType(
            {
                name: place.offset
                for name, place in zip(with_scratch, of_workspaces, strict=True)
            }
        ),
        max(ends, default=0),
        live_peak,
    )
