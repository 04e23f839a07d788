"""Fit a step into an arena of a given size, and grow workspaces into its gaps.

The bytes of a schedule fit its budget at every node, but fragmentation can leave no
contiguous gap. A prefetch that begins a few nodes later, or an offload that is awaited
a few nodes earlier, makes room for other tensors.
"""

import bisect
import math
from collections.abc import Iterator, Sequence
from types import MappingProxyType

from mucudnn.ir.schedule import Compute, Schedule
from mucudnn.passes.liveness import rounded
from mucudnn.passes.placement.layout import Layout, PlacedStep, lives_of
from mucudnn.passes.placement.packing import (
    Place,
    Shrinkable,
    improve_places,
    place_shrinkable,
)
from mucudnn.passes.scheduling.intervals import ResidencyInterval, shifted
from mucudnn.passes.scheduling.problem import fastest_of, first_plans
from mucudnn.passes.scheduling.schedulers import Clock, earliest_ends, latest_starts
from mucudnn.passes.scheduling.step_plan import StepPlan

_TOLERATED = 0.005
"""Relative slowdown of a placement at which the search stops."""


_LINK_SHARES = (0.5, 1.0)
"""Assumed shares of the link rate when intervals are trimmed to the time of their
copies: a lower rate leaves longer intervals."""


def fit_to_arena(plan: StepPlan, arena_bytes: int) -> PlacedStep | None:
    """Return the step in the fastest layout found; None if there is none.

    Resident parameters and state are not part of the arena.
    """
    times = plan.profile.node_ms
    clock = Clock([times[node.name] for node in plan.schedule.graph.nodes])
    for share in _LINK_SHARES:
        wanted = _trimmed(plan, clock, share)
        found = _fastest(plan, clock, wanted, arena_bytes)
        if found is not None:
            return found
    return None


def shortest(plan: StepPlan) -> StepPlan:
    """Return the step with each residency interval shortened to its required part."""
    count = len(plan.schedule.graph.nodes)
    found = []
    for interval in plan.intervals:
        # Ends with copies are cut to the first and the last use.
        uses_only = interval._replace(
            start=interval.needed if interval.copied_in else interval.start,
            stop=interval.last if interval.copied_out else interval.stop,
        )
        later = uses_only.start >= count
        found.append(shifted(uses_only, -count) if later else uses_only)
    return plan.with_intervals(found)


def _fastest(
    plan: StepPlan,
    clock: Clock,
    wanted: Sequence[ResidencyInterval],
    arena_bytes: int,
) -> PlacedStep | None:
    """Return the fastest layout found for the wanted intervals."""
    n = clock.count
    shrinkables = [_shrinkable(interval, n) for interval in wanted]
    shrinkables += [
        Shrinkable(rounded(plan.schedule.workspaces[node.name]), at, at, at, at)
        for at, node in enumerate(plan.schedule.graph.nodes)
        if plan.schedule.workspaces.get(node.name, 0)
    ]
    good_enough = (1 + _TOLERATED) * plan.prediction.step_ms

    def placed_at(places: Sequence[Place]) -> StepPlan:
        pairs = zip(wanted, shrinkables, places, strict=False)
        return plan.with_intervals([_shortened_to(*pair, n) for pair in pairs])

    def step_ms(places: Sequence[Place]) -> float:
        return placed_at(places).prediction.step_ms

    best: Sequence[Place] = ()
    least = math.inf
    for places in place_shrinkable(shrinkables, arena_bytes, clock):
        if (now := step_ms(places)) < least:
            best, least = places, now
        if now <= good_enough:
            break
    if not best:
        return None
    if least > good_enough:
        # Copies wait for shortened intervals: place these earlier, and others after.
        more = improve_places(shrinkables, arena_bytes, clock, best, step_ms)
        for best in more:
            if step_ms(best) <= good_enough:
                break
    found = placed_at(best)
    return PlacedStep(found, _layout(found, shrinkables, best))


def _trimmed(plan: StepPlan, clock: Clock, share: float) -> list[ResidencyInterval]:
    """Trim intervals to the time of their copies at a share of the link rate."""
    found, links = list(plan.intervals), plan.profile
    starts = latest_starts(found, clock, share * links.in_bytes_per_ms)
    ends = earliest_ends(found, clock, share * links.out_bytes_per_ms)
    for i, start in starts.items():
        begin = min(max(found[i].start, start), found[i].needed)
        found[i] = found[i]._replace(start=begin)
    for i, end in ends.items():
        done = max(min(found[i].stop, end), found[i].last)
        found[i] = found[i]._replace(stop=done)
    return found


def _shrinkable(interval: ResidencyInterval, count: int) -> Shrinkable:
    """Return the required and the wanted positions of an interval."""
    end = interval.stop if interval.host_resident else min(interval.stop, count - 1)
    return Shrinkable(
        interval.nbytes,
        interval.start,
        interval.needed if interval.copied_in else interval.start,
        min(end, interval.last) if interval.copied_out else end,
        end,
    )


def _shortened_to(
    interval: ResidencyInterval, whole: Shrinkable, place: Place, count: int
) -> ResidencyInterval:
    """Shorten a residency interval to its place."""
    stop = interval.stop if place.stop == whole.stop else place.stop
    shortened = interval._replace(start=place.start, stop=stop)
    return shifted(shortened, -count) if place.start >= count else shortened


def _layout(
    plan: StepPlan, shrinkables: Sequence[Shrinkable], places: Sequence[Place]
) -> Layout:
    """Return the layout; tensors live across steps are at both ends of the step."""
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
    ends = (p.offset + s.nbytes for s, p in zip(shrinkables, places, strict=True))
    return Layout(
        MappingProxyType(offsets),
        MappingProxyType(dict(zip(nodes, scratch, strict=True))),
        max(ends, default=0),
        plan.peak_bytes - plan.state_bytes,
    )


# Assign workspaces to the free gaps of a layout.
#
# The free bytes at a convolution are not always contiguous. Tensors are therefore
# placed first, with the smallest workspaces; then each convolution gets the fastest of
# its plans that fits the largest gap at its time.


Extent = tuple[int, int]
"""Start and end offset of a range of bytes."""


def with_least_workspaces(plan: StepPlan) -> StepPlan:
    """Return the step with the plan of the smallest workspace for every convolution."""
    return plan.with_plans(first_plans(plan.profile, "least"))


def grow_workspaces(placed: PlacedStep, arena_bytes: int) -> PlacedStep:
    """Give each convolution the fastest plan that fits the layout's largest gap."""
    layout, fronts = placed.layout, placed.plan.profile.fronts
    chosen, offsets = dict(placed.plans), dict(layout.workspace_offsets)
    for name, taken in _occupied_at_nodes(placed.schedule, layout):
        start, size = _largest_gap(taken, arena_bytes) if name in fronts else (0, 0)
        fits = [p for p in fronts.get(name, ()) if rounded(p.workspace) <= size]
        if fits:
            chosen[name] = fastest_of(fits)
            offsets[name] = start
    plan = placed.plan.with_plans(chosen)
    workspaces = plan.schedule.workspaces
    offsets = {name: offset for name, offset in offsets.items() if name in workspaces}
    ends = (offset + workspaces[name] for name, offset in offsets.items())
    return PlacedStep(
        plan,
        Layout(
            layout.offsets,
            MappingProxyType(offsets),
            max(layout.nbytes, *ends, 0),
            plan.peak_bytes - plan.state_bytes,
        ),
    )


def _occupied_at_nodes(
    schedule: Schedule, layout: Layout
) -> Iterator[tuple[str, list[Extent]]]:
    """Yield every node with the occupied extents of the arena while it runs."""
    begins: dict[int, list[Extent]] = {}
    ends: dict[int, list[Extent]] = {}
    for name, lives in lives_of(schedule).items():
        nbytes = rounded(schedule.graph.tensors[name].nbytes)
        for offset, (first, last) in zip(layout.offsets[name], lives, strict=True):
            begins.setdefault(first, []).append((offset, offset + nbytes))
            ends.setdefault(last + 1, []).append((offset, offset + nbytes))
    taken: list[Extent] = []
    for at in range(-1, len(schedule.instructions)):
        for extent in ends.get(at, ()):
            taken.pop(bisect.bisect_left(taken, extent))
        for extent in begins.get(at, ()):
            bisect.insort(taken, extent)
        instruction = schedule.instructions[at] if at >= 0 else None
        if isinstance(instruction, Compute):
            yield instruction.node, taken


def _largest_gap(taken: Sequence[Extent], end: int) -> tuple[int, int]:
    """Return the offset and size of the largest gap below `end`."""
    best, free_from = (0, 0), 0
    for start, stop in (*taken, (end, end)):
        if start - free_from > best[1]:
            best = free_from, start - free_from
        free_from = max(free_from, stop)
    return best
