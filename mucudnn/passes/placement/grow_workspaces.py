"""Assign workspaces to the free gaps of a layout.

The free bytes at a convolution are not always contiguous. Tensors are therefore placed
first, with the smallest workspaces; then each convolution gets the fastest of its plans
that fits the largest gap at its time.
"""

import bisect
from collections.abc import Iterator, Sequence
from types import MappingProxyType

from mucudnn.ir.schedule import Compute, Schedule
from mucudnn.passes.liveness import rounded
from mucudnn.passes.placement.layout import Layout, PlacedStep, lives_of
from mucudnn.passes.scheduling.costs import fastest_of, first_plans
from mucudnn.passes.scheduling.step_plan import StepPlan

__all__ = ["grow_workspaces", "with_least_workspaces"]

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
