"""Residency intervals: when a storage is in device memory, and the program of it.

A storage that is never moved has one interval, from its first use to its last. One that
is offloaded has several, with copies between them. Parameters and state that may leave
are host-resident: they are swapped in and out in every step anew, and an interval of
theirs may begin in one step and end in the next. All positions are those of nodes; sums
over them are what a budget limits, so a schedule keeps its promise whatever the copies
take: a copy that is late is waited for.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

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
    "ResidencyInterval",
    "Swaps",
    "emit",
    "join",
    "least_occupancy",
    "refuse_more",
    "shifted",
    "short_of",
    "split",
    "unsplit",
]

Swaps = Mapping[str, Sequence[tuple[int, int]]]
"""Storage -> gaps between two uses over which it leaves the device."""


class ResidencyInterval(NamedTuple):
    """One interval of a storage in device memory.

    Positions in the next step are counted on from this one's. It is a tuple, which is
    made in a quarter of the time: every trial of a search makes thousands.

    Attributes:
        storage: Its name.
        nbytes: Its size.
        start: First node that it is there for.
        stop: Last node that it is there for; `last` or later, while it is copied out.
        needed: First node that uses it: by then a copy in has arrived.
        last: Last node that uses it.
        copied_in: Whether it is swapped in from the host.
        copied_out: Whether it is copied to the host after `last`.
        kept_on_host: Whether it leaves with a copy on the host, made now or earlier.
        host_resident: Whether the storage outlives the step and is host-resident.
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
    host_resident: bool = False


def split(
    use: Use, gaps: Sequence[tuple[int, int]], end: int
) -> list[ResidencyInterval]:
    """The shortest intervals of a storage that leaves over some gaps, in order.

    A copy out is left out where the host's copy is still good: nothing wrote the
    storage since it was made.

    Args:
        use: Of the storage.
        gaps: Pairs of consecutive uses, ascending; at least one for what outlives the
            step.
        end: Number of nodes.
    """
    if use.persistent:
        return sorted(_swapped(use, gaps), key=lambda interval: interval.start)
    if not gaps:
        return [unsplit(use, end)]
    first, last = use.positions[0], min(use.positions[-1], end)
    begins = (first, *(j for _, j in gaps))
    ends = (*(i for i, _ in gaps), last)
    return [
        ResidencyInterval(
            use.storage,
            use.nbytes,
            start,
            stop,
            start,
            stop,
            start != first,
            leaves and _written(use, start, stop),
            leaves,
        )
        for start, stop in zip(begins, ends, strict=True)
        for leaves in [stop != last]
    ]


def unsplit(use: Use, end: int) -> ResidencyInterval:
    """The interval of a storage of the step that never leaves.

    Args:
        use: Of the storage.
        end: Number of nodes.
    """
    storage, nbytes, positions, _, _ = use
    first, last = positions[0], min(positions[-1], end)
    return ResidencyInterval(storage, nbytes, first, last, first, last)


def _swapped(use: Use, gaps: Sequence[tuple[int, int]]) -> Iterator[ResidencyInterval]:
    """From each gap to the next, the last to the first of the next step."""
    following = (*(i for i, _ in gaps[1:]), gaps[0][0] + use.period)
    for (_, start), stop in zip(gaps, following, strict=True):
        interval = ResidencyInterval(
            use.storage,
            use.nbytes,
            start,
            stop,
            start,
            stop,
            copied_in=True,
            copied_out=_written(use, start, stop),
            kept_on_host=True,
            host_resident=True,
        )
        yield shifted(interval, -use.period) if start >= use.period else interval


def _written(use: Use, start: int, stop: int) -> bool:
    """Whether any use from one position to another writes."""
    period = use.period
    for write in use.writes:
        if start <= write <= stop or (period and start <= write + period <= stop):
            return True
    return False


def shifted(interval: ResidencyInterval, nodes: int) -> ResidencyInterval:
    """The same interval, counted from another step."""
    return interval._replace(
        start=interval.start + nodes,
        stop=interval.stop + nodes,
        needed=interval.needed + nodes,
        last=interval.last + nodes,
    )


def join(before: ResidencyInterval, after: ResidencyInterval) -> ResidencyInterval:
    """One interval of two of a storage with nothing between them: no copies there."""
    return before._replace(
        stop=after.stop,
        last=after.last,
        copied_out=after.copied_out or (before.copied_out and after.kept_on_host),
        kept_on_host=after.kept_on_host,
    )


def least_occupancy(
    intervals: Iterable[ResidencyInterval],
    workspaces: Sequence[int],
    resident: int,
    budget: float,
) -> Occupancy:
    """The ledger of intervals as they are, over what is always there."""
    n = len(workspaces)
    change = [0] * (n + 1)
    change[0] = resident
    for interval in intervals:
        nbytes, stop = interval.nbytes, interval.stop
        change[min(interval.start, n)] += nbytes
        if stop < n:
            change[stop + 1] -= nbytes
        elif interval.host_resident:
            change[0] += nbytes
            change[stop - n + 1] -= nbytes
        else:
            change[n] -= nbytes
    used = itertools.accumulate(change)
    return Occupancy(
        [nbytes + rest for nbytes, rest in zip(workspaces, used, strict=False)], budget
    )


def refuse_more(nbytes: int, node: str, budget: float) -> None:
    """Refuse what does not fit.

    Args:
        nbytes: In use at a node, the most of all.
        node: That runs then.
        budget: What there is.

    Raises:
        PlanningError: It is fewer; says how many bytes short, and where.
    """
    if nbytes > budget:
        raise short_of(node, nbytes, budget)


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
    intervals: Sequence[ResidencyInterval],
    workspaces: Mapping[str, int],
    peak_bytes: int,
    away: Iterable[str] = (),
) -> Schedule:
    """Write intervals down as a program.

    At each node: what arrives is allocated and its copy begun; what the node needs is
    waited for; after it, copies out begin, and what leaves is waited for and freed.
    Results that are there at the end stay: the caller takes them out. What is `away` is
    host-resident, also if no node uses it.
    """
    n = len(graph.nodes)
    arrivals: list[list[Instruction]] = [[] for _ in range(n + 1)]
    waits: list[list[Instruction]] = [[] for _ in range(n + 1)]
    copies: list[list[Instruction]] = [[] for _ in range(n + 1)]
    departures: list[list[Instruction]] = [[] for _ in range(n + 1)]
    for interval in intervals:
        name, stop = interval.storage, min(interval.stop, n)
        end = departures[interval.stop % n if interval.host_resident else stop]
        arrivals[interval.start].append(Alloc(name))
        if interval.copied_in:
            arrivals[interval.start].append(SwapIn(name))
            waits[interval.needed % n].append(Wait(name))
        if interval.copied_out:
            copies[interval.last % n].append(SwapOut(name))
            end.append(Wait(name))
        end.append(Free(name))
    program: list[Instruction] = []
    for i, node in enumerate(graph.nodes):
        program += [*arrivals[i], *waits[i], Compute(node.name)]
        program += [*copies[i], *departures[i]]
    swapped = [interval for interval in intervals if interval.host_resident]
    return Schedule(
        graph,
        tuple(program),
        workspaces,
        peak_bytes,
        hosted=tuple(dict.fromkeys([*(i.storage for i in swapped), *away])),
        live_across=tuple(i.storage for i in swapped if i.stop >= n),
    )
