"""Stays: the times that a storage is in device memory, and how they become a program.

A storage that is never moved has one stay, from its first use to its last. One that is
offloaded has several, with copies between them. All positions are those of nodes; sums
over them are what a budget limits, so a schedule keeps its promise whatever the copies
take: a copy that is late is waited for.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mucudnn.errors import PlanningError
from mucudnn.ir.graph import Graph
from mucudnn.ir.schedule import (
    Alloc,
    Compute,
    Free,
    Instruction,
    Schedule,
    SwapIn,
    SwapOut,
    Wait,
)
from mucudnn.ir.sizes import format_bytes
from mucudnn.passes.occupancy import Occupancy, Use

__all__ = ["Stay", "Swaps", "check", "emit", "least_occupancy", "split"]

Swaps = Mapping[str, Sequence[tuple[int, int]]]
"""Storage -> gaps between two uses over which it leaves the device."""


@dataclass(frozen=True, slots=True)
class Stay:
    """One stay of a storage in device memory.

    Attributes:
        storage: Its name.
        nbytes: Its size.
        start: First node that it is there for.
        stop: Last node that it is there for; `last` or later, while it is copied out.
        needed: First node that uses it: by then a copy in has arrived.
        last: Last node that uses it.
        copied_in: Whether it comes back from the host.
        copied_out: Whether it is copied to the host after `last`.
        kept_on_host: Whether it leaves with a copy on the host, made now or earlier.
    """

    storage: str
    nbytes: int
    start: int
    stop: int
    needed: int
    last: int
    copied_in: bool = False
    copied_out: bool = False
    kept_on_host: bool = False


def split(use: Use, gaps: Sequence[tuple[int, int]], end: int) -> list[Stay]:
    """The shortest stays of a storage that leaves over some gaps.

    A copy out is left out where the host's copy is still good: nothing wrote the
    storage since it was made.

    Args:
        use: Of the storage; not persistent.
        gaps: Pairs of consecutive uses, ascending.
        end: Number of nodes.
    """
    stays = []
    start, came_back = use.positions[0], False
    host_since: int | None = None
    for i, j in gaps:
        dirty = host_since is None or any(host_since < w <= i for w in use.writes)
        stays.append(
            Stay(use.storage, use.nbytes, start, i, start, i, came_back, dirty, True)
        )
        if dirty:
            host_since = i
        start, came_back = j, True
    last = min(use.positions[-1], end)
    stays.append(Stay(use.storage, use.nbytes, start, last, start, last, came_back))
    return stays


def least_occupancy(
    stays: Iterable[Stay], workspaces: Sequence[int], resident: int, budget: float
) -> Occupancy:
    """The ledger of stays as they are, over what is always there."""
    n = len(workspaces)
    change = [0] * (n + 1)
    change[0] = resident
    for stay in stays:
        change[min(stay.start, n)] += stay.nbytes
        change[min(stay.stop + 1, n)] -= stay.nbytes
    used = itertools.accumulate(change)
    return Occupancy(
        [nbytes + rest for nbytes, rest in zip(workspaces, used, strict=False)], budget
    )


def check(graph: Graph, occupancy: Occupancy) -> None:
    """Refuse what cannot fit.

    Raises:
        PlanningError: Says how many bytes short, and at which node.
    """
    peak, position = occupancy.peak()
    if peak > occupancy.budget:
        short = peak - int(occupancy.budget)
        raise PlanningError(
            f"{format_bytes(short)} ({short} bytes) short: "
            f"node {graph.nodes[position].name!r} needs {format_bytes(peak)} "
            f"({peak} bytes), the budget is {format_bytes(int(occupancy.budget))}"
        )


def emit(
    graph: Graph,
    stays: Sequence[Stay],
    workspaces: Mapping[str, int],
    peak_bytes: int,
) -> Schedule:
    """Write stays down as a program.

    At each node: what arrives is allocated and its copy begun; what the node needs is
    waited for; after it, copies out begin, and what leaves is waited for and freed.
    What is there at the end stays: the caller takes it out.
    """
    n = len(graph.nodes)
    begins: list[list[Stay]] = [[] for _ in range(n + 1)]
    needs: list[list[Stay]] = [[] for _ in range(n + 1)]
    leaves: list[list[Stay]] = [[] for _ in range(n + 1)]
    ends: list[list[Stay]] = [[] for _ in range(n + 1)]
    for stay in stays:
        begins[stay.start].append(stay)
        if stay.copied_in:
            needs[stay.needed].append(stay)
        if stay.copied_out:
            leaves[stay.last].append(stay)
        ends[min(stay.stop, n)].append(stay)
    program: list[Instruction] = []
    for i, node in enumerate(graph.nodes):
        for stay in begins[i]:
            program.append(Alloc(stay.storage))
            if stay.copied_in:
                program.append(SwapIn(stay.storage))
        program += (Wait(stay.storage) for stay in needs[i])
        program.append(Compute(node.name))
        program += (SwapOut(stay.storage) for stay in leaves[i])
        for stay in ends[i]:
            if stay.copied_out:
                program.append(Wait(stay.storage))
            program.append(Free(stay.storage))
    return Schedule(graph, tuple(program), workspaces, peak_bytes)
