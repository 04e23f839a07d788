"""Stays: the times that a storage is in device memory, and how they become a program.

A storage that is never moved has one stay, from its first use to its last. One that is
offloaded has several, with copies between them. Parameters and state that may leave are
at home on the host and visit the device in every step anew; a visit may begin in one
step and end in the next. All positions are those of nodes; sums over them are what a
budget limits, so a schedule keeps its promise whatever the copies take: a copy that is
late is waited for.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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
from mucudnn.ir.sizes import exact_bytes
from mucudnn.passes.scheduling.occupancy import Occupancy, Use

__all__ = [
    "Stay",
    "Swaps",
    "check",
    "emit",
    "join",
    "least_occupancy",
    "shifted",
    "short_of",
    "split",
]

Swaps = Mapping[str, Sequence[tuple[int, int]]]
"""Storage -> gaps between two uses over which it leaves the device."""


@dataclass(frozen=True, slots=True)
class Stay:
    """One stay of a storage in device memory.

    Positions of a visit that ends in the next step are counted on from this one's.

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
        visit: Whether the storage outlives the step and is at home on the host.
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
    visit: bool = False


def split(use: Use, gaps: Sequence[tuple[int, int]], end: int) -> list[Stay]:
    """The shortest stays of a storage that leaves over some gaps, in order.

    A copy out is left out where the host's copy is still good: nothing wrote the
    storage since it was made.

    Args:
        use: Of the storage.
        gaps: Pairs of consecutive uses, ascending; at least one for what outlives the
            step.
        end: Number of nodes.
    """
    if use.persistent:
        return sorted(_visits(use, gaps), key=lambda stay: stay.start)
    first, last = use.positions[0], min(use.positions[-1], end)
    if not gaps:
        return [Stay(use.storage, use.nbytes, first, last, first, last)]
    begins = (first, *(j for _, j in gaps))
    ends = (*(i for i, _ in gaps), last)
    return [
        Stay(
            use.storage,
            use.nbytes,
            start,
            stop,
            start,
            stop,
            copied_in=start != first,
            copied_out=leaves and _written(use, start, stop),
            kept_on_host=leaves,
        )
        for start, stop in zip(begins, ends, strict=True)
        for leaves in [stop != last]
    ]


def _visits(use: Use, gaps: Sequence[tuple[int, int]]) -> Iterator[Stay]:
    """From each gap to the next, the last to the first of the next step."""
    following = (*(i for i, _ in gaps[1:]), gaps[0][0] + use.period)
    for (_, start), stop in zip(gaps, following, strict=True):
        stay = Stay(
            use.storage,
            use.nbytes,
            start,
            stop,
            start,
            stop,
            copied_in=True,
            copied_out=_written(use, start, stop),
            kept_on_host=True,
            visit=True,
        )
        yield shifted(stay, -use.period) if start >= use.period else stay


def _written(use: Use, start: int, stop: int) -> bool:
    """Whether any use from one position to another writes."""
    return any(start <= at <= stop for w in use.writes for at in {w, w + use.period})


def shifted(stay: Stay, nodes: int) -> Stay:
    """The same stay, counted from another step."""
    return replace(
        stay,
        start=stay.start + nodes,
        stop=stay.stop + nodes,
        needed=stay.needed + nodes,
        last=stay.last + nodes,
    )


def join(before: Stay, after: Stay) -> Stay:
    """One stay out of two of a storage with nothing between them: no copies there."""
    return replace(
        before,
        stop=after.stop,
        last=after.last,
        copied_out=after.copied_out or (before.copied_out and after.kept_on_host),
        kept_on_host=after.kept_on_host,
    )


def least_occupancy(
    stays: Iterable[Stay], workspaces: Sequence[int], resident: int, budget: float
) -> Occupancy:
    """The ledger of stays as they are, over what is always there."""
    n = len(workspaces)
    change = [0] * (n + 1)
    change[0] = resident
    for stay in stays:
        change[min(stay.start, n)] += stay.nbytes
        if stay.visit and stay.stop >= n:
            change[0] += stay.nbytes
            change[stay.stop - n + 1] -= stay.nbytes
        else:
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
        raise short_of(graph.nodes[position].name, peak, occupancy.budget)


def short_of(node: str, nbytes: int, budget: float, remedy: str = "") -> PlanningError:
    """The error that says what is short.

    Args:
        node: That runs then.
        nbytes: In use at it.
        budget: Fewer bytes.
        remedy: What would work, in words.
    """
    short = nbytes - int(budget)
    return PlanningError(
        f"{exact_bytes(short)} short: node {node!r} needs {exact_bytes(nbytes)}, "
        f"the budget is {exact_bytes(int(budget))}" + (remedy and f"; {remedy}"),
        node=node,
        short_by=short,
        least_bytes=nbytes,
    )


def emit(
    graph: Graph,
    stays: Sequence[Stay],
    workspaces: Mapping[str, int],
    peak_bytes: int,
    away: Iterable[str] = (),
) -> Schedule:
    """Write stays down as a program.

    At each node: what arrives is allocated and its copy begun; what the node needs is
    waited for; after it, copies out begin, and what leaves is waited for and freed.
    Results that are there at the end stay: the caller takes them out. What is `away` is
    at home on the host, also if no node uses it.
    """
    n = len(graph.nodes)
    begins: list[list[Stay]] = [[] for _ in range(n + 1)]
    needs: list[list[Stay]] = [[] for _ in range(n + 1)]
    leaves: list[list[Stay]] = [[] for _ in range(n + 1)]
    ends: list[list[Stay]] = [[] for _ in range(n + 1)]
    for stay in stays:
        begins[stay.start].append(stay)
        if stay.copied_in:
            needs[stay.needed % n].append(stay)
        if stay.copied_out:
            leaves[stay.last % n].append(stay)
        ends[stay.stop % n if stay.visit else min(stay.stop, n)].append(stay)
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
    visits = [stay for stay in stays if stay.visit]
    return Schedule(
        graph,
        tuple(program),
        workspaces,
        peak_bytes,
        hosted=tuple(dict.fromkeys([*(stay.storage for stay in visits), *away])),
        carried=tuple(stay.storage for stay in visits if stay.stop >= n),
    )
