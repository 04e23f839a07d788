"""Workspaces in the free gaps that a layout leaves.

The bytes that are free at a convolution are not always in one piece. So tensors are
placed first, with convolutions that ask for least, and then each convolution gets the
fastest of its plans that fits the largest free gap at its time.
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import MappingProxyType

from mucudnn.ir.profile import Profile
from mucudnn.ir.schedule import Compute, Schedule
from mucudnn.passes.liveness import rounded
from mucudnn.passes.placement.layout import Layout, lives_of
from mucudnn.passes.scheduling.costs import (
    fastest_of,
    first_plans,
    profile_of,
    state_bytes,
    timed_by,
    workspaces_of,
)
from mucudnn.passes.scheduling.intervals import least_occupancy
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.passes.simulate import simulate

__all__ = ["grow_workspaces", "with_least_workspaces"]

Span = tuple[int, int]


def with_least_workspaces(plan: StepPlan, profile: Profile) -> StepPlan:
    """The step with convolutions that ask for least."""
    graph = plan.schedule.graph
    known = profile_of(graph, profile)
    least = first_plans(known, "least", None)
    workspaces = workspaces_of(known, least)
    scratch = [workspaces.get(node.name, 0) for node in graph.nodes]
    resident = state_bytes(graph, plan.schedule.resident)
    most, _ = least_occupancy(plan.intervals, scratch, resident, 0).peak()
    bare = replace(plan.schedule, workspaces=workspaces, peak_bytes=most)
    prediction = simulate(bare, timed_by(known, least))
    return replace(plan, schedule=bare, plans=least, prediction=prediction)


def grow_workspaces(
    plan: StepPlan, layout: Layout, profile: Profile, arena_bytes: int
) -> tuple[StepPlan, Layout]:
    """Give convolutions what a layout leaves in one piece.

    Args:
        plan: A step whose convolutions ask for least.
        layout: Where the step lies, within the arena.
        profile: Of the graph as it was before the step was planned.
        arena_bytes: Size that the arena may have.

    Returns:
        The step with these convolutions, and its layout.
    """
    bare = plan.schedule
    known = profile_of(bare.graph, profile)
    chosen, offsets = dict(plan.plans), dict(layout.workspace_offsets)
    most = 0
    for name, taken in _at_nodes(bare, layout):
        workspace = bare.workspaces.get(name, 0)
        live = sum(stop - start for start, stop in taken)
        if name in known.fronts:
            start, size = _largest_gap(taken, arena_bytes)
            fits = [p for p in known.fronts[name] if rounded(p.workspace) <= size]
            if fits:
                chosen[name] = best = fastest_of(fits)
                workspace = rounded(best.workspace)
                offsets[name] = start
        most = max(most, live + workspace)
    workspaces = workspaces_of(known, chosen)
    offsets = {name: offset for name, offset in offsets.items() if name in workspaces}
    ends = (offset + workspaces[name] for name, offset in offsets.items())
    nbytes = max(layout.nbytes, *ends, 0)
    peak_bytes = most + state_bytes(bare.graph, bare.resident)
    schedule = replace(bare, workspaces=workspaces, peak_bytes=peak_bytes)
    prediction = simulate(schedule, timed_by(known, chosen))
    return (
        replace(plan, schedule=schedule, plans=chosen, prediction=prediction),
        Layout(layout.offsets, MappingProxyType(offsets), nbytes, most),
    )


def _at_nodes(schedule: Schedule, layout: Layout) -> Iterator[tuple[str, list[Span]]]:
    """Every node, and the bytes of the arena that tensors take while it runs."""
    begins: dict[int, list[Span]] = {}
    ends: dict[int, list[Span]] = {}
    for name, lives in lives_of(schedule).items():
        nbytes = rounded(schedule.graph.tensors[name].nbytes)
        for offset, (first, last) in zip(layout.offsets[name], lives, strict=True):
            begins.setdefault(first, []).append((offset, offset + nbytes))
            ends.setdefault(last + 1, []).append((offset, offset + nbytes))
    taken: list[Span] = []
    for at in range(-1, len(schedule.instructions)):
        for span in ends.get(at, ()):
            taken.pop(bisect.bisect_left(taken, span))
        for span in begins.get(at, ()):
            bisect.insort(taken, span)
        instruction = schedule.instructions[at] if at >= 0 else None
        if isinstance(instruction, Compute):
            yield instruction.node, taken


def _largest_gap(taken: Sequence[Span], end: int) -> Span:
    """Offset and size of the longest run of bytes below `end` that nothing takes."""
    best, free_from = (0, 0), 0
    for start, stop in (*taken, (end, end)):
        if start - free_from > best[1]:
            best = free_from, start - free_from
        free_from = max(free_from, stop)
    return best
