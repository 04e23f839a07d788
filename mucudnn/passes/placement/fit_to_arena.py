"""Fit a step into an arena of a given size, and grow workspaces into its gaps.

The bytes of a schedule fit its budget at every node, but fragmentation can leave no
contiguous gap. A prefetch that begins a few nodes later, or an offload that is awaited
a few nodes earlier, makes room for other tensors.
"""

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from types import MappingProxyType

from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.schedule import Compute, Schedule
from mucudnn.passes.liveness import rounded
from mucudnn.passes.placement.layout import Layout, PlacedStep, lives_of
from mucudnn.passes.placement.packing import (
    Place,
    Shrinkable,
    improve_places,
    place_shrinkable,
)
from mucudnn.passes.scheduling.intervals import ResidencyInterval, in_period, shifted
from mucudnn.passes.scheduling.problem import fastest_of, first_plans
from mucudnn.passes.scheduling.schedulers import Clock, trim_to_copies
from mucudnn.passes.scheduling.step_plan import StepPlan, step_ms

_TOLERATED = 0.005
"""Relative slowdown of a placement at which the search stops."""

_LINK_SHARES = (0.5, 1.0, 0.25)
"""Assumed shares of the link rate when intervals are trimmed to the time of their
copies: a lower rate leaves longer intervals, which hide copies better and are harder to
place."""


def fit_to_arena(
    plan: StepPlan, arena_bytes: int, *, grows: bool = False
) -> PlacedStep | None:
    """Return the step in the fastest layout found; None if there is none.

    Resident parameters and state are not part of the arena.

    Args:
        plan: The planned step.
        arena_bytes: Size of the arena.
        grows: Whether to reserve the least workspaces only and to grow them into the
            gaps that tensors leave.
    """
    times = plan.profile.node_ms
    clock = Clock([times[node.name] for node in plan.schedule.graph.nodes])
    good_enough = (1 + _TOLERATED) * plan.prediction.step_ms
    best: tuple[float, _Arena, Sequence[Place]] | None = None
    # 1. The first placements of intervals trimmed to each share of the link rate.
    tried: list[list[ResidencyInterval]] = []
    for share in _LINK_SHARES:
        # Copies are trimmed to the planned times of convolutions, even if smaller
        # workspaces are reserved: otherwise they would be late for grown ones.
        trimmed = trim_to_copies(plan.intervals, clock, plan.profile, share)
        if trimmed in tried:  # few copies, or none: the search would be the same
            continue
        tried.append(trimmed)
        arena = _Arena(plan, trimmed, arena_bytes, grows=grows)
        for places in place_shrinkable(arena.shrinkables, arena_bytes, clock):
            now = arena.step_ms(places)
            if best is None or now < best[0]:
                best = now, arena, places
            if now <= good_enough:
                return arena.placed(places)
    if best is None:
        return None
    # 2. Copies wait for shortened intervals: place these earlier, and others after.
    _, arena, fastest = best
    better = improve_places(
        arena.shrinkables, arena_bytes, clock, fastest, arena.step_ms
    )
    for fastest in better:
        if arena.step_ms(fastest) <= good_enough:
            break
    return arena.placed(fastest)


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


class _Arena:
    """The intervals and workspaces of a step that are to be placed in an arena.

    Attributes:
        shrinkables: What is placed: the intervals, then the workspaces.
    """

    def __init__(
        self,
        plan: StepPlan,
        wanted: Sequence[ResidencyInterval],
        nbytes: int,
        *,
        grows: bool,
    ) -> None:
        self._plan, self._wanted, self._nbytes = plan, wanted, nbytes
        self._grows = grows
        self._reserved = with_least_workspaces(plan) if grows else plan
        self._nodes = plan.schedule.graph.nodes
        workspaces = self._reserved.schedule.workspaces
        self.shrinkables = [_shrinkable(i, len(self._nodes)) for i in wanted]
        self.shrinkables += [
            Shrinkable(rounded(workspaces[node.name]), at, at, at, at)
            for at, node in enumerate(self._nodes)
            if workspaces.get(node.name, 0)
        ]

    def step_ms(self, places: Sequence[Place]) -> float:
        """Return the predicted time of a placement, with grown workspaces."""
        plans = self._grown_plans(places) if self._grows else self._plan.plans
        graph, profile = self._plan.schedule.graph, self._plan.profile
        return step_ms(graph, profile, self._intervals(places), plans)

    def placed(self, places: Sequence[Place]) -> PlacedStep:
        """Return the step of a placement."""
        found = self._reserved.with_intervals(self._intervals(places))
        placed = PlacedStep(found, _layout(found, self.shrinkables, places))
        return grow_workspaces(placed, self._nbytes) if self._grows else placed

    def _intervals(self, places: Sequence[Place]) -> list[ResidencyInterval]:
        """Return the intervals, shortened to their places."""
        count, found = len(self._nodes), list[ResidencyInterval]()
        for interval, place in zip(self._wanted, places, strict=False):
            whole = self.shrinkables[len(found)]
            stop = interval.stop if place.stop == whole.stop else place.stop
            short = interval._replace(start=place.start, stop=stop)
            found.append(shifted(short, -count) if place.start >= count else short)
        return found

    def _grown_plans(self, places: Sequence[Place]) -> dict[str, ConvPlan]:
        """Return the convolution plans that `grow_workspaces` would choose."""
        fronts = self._plan.profile.fronts
        spans = (
            (span, (place.offset, place.offset + interval.nbytes))
            for interval, place in zip(self._wanted, places, strict=False)
            if interval.nbytes
            for span in in_period(place.start, place.stop, len(self._nodes))
        )
        found = dict(self._plan.plans)
        occupied = _occupied(spans, range(len(self._nodes)))
        for node, taken in zip(self._nodes, occupied, strict=True):
            if node.name in fronts:
                _, size = _largest_gap(taken, self._nbytes)
                fits = [p for p in fronts[node.name] if rounded(p.workspace) <= size]
                if fits:
                    found[node.name] = fastest_of(fits)
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
        # A storage that is live across steps begins where the last step left it.
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
    spans = (
        (life, (offset, offset + rounded(schedule.graph.tensors[name].nbytes)))
        for name, lives in lives_of(schedule).items()
        for offset, life in zip(layout.offsets[name], lives, strict=True)
    )
    moments = range(-1, len(schedule.instructions))
    for at, taken in zip(moments, _occupied(spans, moments), strict=True):
        instruction = schedule.instructions[at] if at >= 0 else None
        if isinstance(instruction, Compute):
            yield instruction.node, taken


def _occupied(
    spans: Iterable[tuple[tuple[int, int], Extent]], moments: Iterable[int]
) -> Iterator[list[Extent]]:
    """Yield the occupied extents at every moment, by ascending offset.

    Args:
        spans: First and last moment of each extent.
        moments: Consecutive moments.
    """
    begins: dict[int, list[Extent]] = defaultdict(list)
    ends: dict[int, list[Extent]] = defaultdict(list)
    for (first, last), extent in spans:
        begins[first].append(extent)
        ends[last + 1].append(extent)
    taken: list[Extent] = []
    for at in moments:
        for extent in ends[at]:
            taken.pop(bisect.bisect_left(taken, extent))
        for extent in begins[at]:
            bisect.insort(taken, extent)
        yield taken


def _largest_gap(taken: Sequence[Extent], end: int) -> tuple[int, int]:
    """Return the offset and size of the largest gap below `end`."""
    best, free_from = (0, 0), 0
    for start, stop in (*taken, (end, end)):
        if start - free_from > best[1]:
            best = free_from, start - free_from
        free_from = max(free_from, stop)
    return best
