"""A planned step: schedule, predicted time, and memory over time."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from types import MappingProxyType

from mucudnn.ir.conv import ConvPlan
from mucudnn.ir.graph import Graph
from mucudnn.ir.profile import Profile
from mucudnn.ir.schedule import (
    Alloc,
    Compute,
    Free,
    Residency,
    Schedule,
    SwapIn,
    SwapOut,
    Wait,
)
from mucudnn.ir.sizes import format_bytes, format_count
from mucudnn.notebook import html_of
from mucudnn.passes.liveness import rounded
from mucudnn.passes.scheduling.intervals import ResidencyInterval, emit, least_occupancy
from mucudnn.passes.scheduling.problem import (
    fastest_of,
    state_bytes,
    timed_by,
    workspaces_of,
)
from mucudnn.passes.simulate import STEPS_BEFORE, Lane, Prediction, simulate


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A planned training step under a budget.

    Attributes:
        schedule: The instructions to run.
        intervals: Residency intervals of the schedule.
        plans: Plan of each convolution node.
        residency: Residencies of tensors.
        prediction: The simulated step.
        policy: Name of the policy.
        scheduler: Name of the scheduler.
        budget: Budget in bytes.
        least_ms: Lower bound of any plan within the budget; None if not computed.
    """

    schedule: Schedule
    intervals: Sequence[ResidencyInterval]
    plans: Mapping[str, ConvPlan]
    residency: Mapping[str, Residency]
    prediction: Prediction
    policy: str
    scheduler: str
    budget: float
    least_ms: float | None = None

    @property
    def gap(self) -> float | None:
        """Relative gap between the predicted time and the lower bound."""
        if not self.least_ms:
            return None
        return max(0.0, self.prediction.step_ms / self.least_ms - 1)

    @property
    def peak_bytes(self) -> int:
        """Peak of device memory in bytes, parameters and state included."""
        return self.schedule.peak_bytes

    @property
    def profile(self) -> Profile:
        """Profile of the schedule's graph, with the times of the convolution plans."""
        return self.prediction.profile

    @property
    def unbounded_ms(self) -> float:
        """Time of every node once, at its fastest: no copies and no recomputation."""
        fronts = self.profile.fronts.items()
        fastest = {name: fastest_of(front).time_ms for name, front in fronts}
        times = {**self.profile.node_ms, **fastest}
        nodes = self.schedule.graph.nodes
        return sum(times[node.name] for node in nodes if "~" not in node.name)

    @property
    def state_bytes(self) -> int:
        """Bytes of resident parameters and state."""
        return state_bytes(self.schedule.graph, self.schedule.resident)

    def with_intervals(self, intervals: Sequence[ResidencyInterval]) -> "StepPlan":
        """Return the step with other residency intervals, simulated again."""
        old = self.schedule
        peak = self._peak(intervals, old.workspaces)
        schedule = emit(old.graph, intervals, old.workspaces, peak, old.hosted)
        prediction = simulate(schedule, self.profile)
        return replace(
            self, schedule=schedule, intervals=intervals, prediction=prediction
        )

    def with_plans(self, plans: Mapping[str, ConvPlan]) -> "StepPlan":
        """Return the step with other convolution plans, simulated again."""
        profile = timed_by(self.profile, plans)
        workspaces = workspaces_of(profile, plans)
        peak = self._peak(self.intervals, workspaces)
        schedule = replace(self.schedule, workspaces=workspaces, peak_bytes=peak)
        prediction = simulate(schedule, profile)
        return replace(self, schedule=schedule, plans=plans, prediction=prediction)

    def _peak(
        self, intervals: Sequence[ResidencyInterval], workspaces: Mapping[str, int]
    ) -> int:
        scratch = [workspaces.get(n.name, 0) for n in self.schedule.graph.nodes]
        return least_occupancy(intervals, scratch, self.state_bytes, 0).peak()[0]

    def __repr__(self) -> str:
        """Return a summary such as `StepPlan(planned, timed: 2.0 GiB at most, …)`."""
        return (
            f"StepPlan({self.policy}, {self.scheduler}: "
            f"{format_bytes(self.peak_bytes)} at most, "
            f"{self.prediction.step_ms:.3g} ms, "
            f"{format_bytes(self.prediction.out_bytes)} out, "
            f"{format_count(self.recomputed, 'node')} again"
            + ("" if self.gap is None else f", at most {self.gap:.1%} above the best")
            + ")"
        )

    _repr_html_ = html_of

    @property
    def recomputed(self) -> int:
        """Number of recomputed nodes that take time: views do not count."""
        times = self.profile.node_ms
        return sum(
            "~" in n.name and times[n.name] > 0 for n in self.schedule.graph.nodes
        )


# Simulated time of a step directly from its residency intervals.
#
# A search evaluates hundreds of residencies and keeps one. Emitting and simulating
# every program would be slow, so this module makes the same additions in the same order
# from nodes' times and intervals' copies, and stops once the remaining compute alone
# exceeds the best known time.


_ROUNDED = 1 - 1e-9
"""Margin for the rounding of sums in another order."""


@dataclass(frozen=True, slots=True)
class CountedPlan:
    """A plan with the bytes and the time that its user counts, as pages show it.

    Attributes:
        plan: The plan, whose bytes include those of the caller.
        peak_bytes: Peak memory, of what the user's budget counts.
        unplanned_bytes: The same with every tensor kept; 0 if it is unknown.
        given_bytes: Bytes that the caller holds and the budget does not count.
        budget: The user's budget in bytes; infinity without one.
        slowdown: Predicted time over that of the step without a budget.
        remarks: How budget and options were chosen.
    """

    plan: StepPlan
    peak_bytes: int
    unplanned_bytes: int
    given_bytes: int
    budget: float
    slowdown: float
    remarks: tuple[str, ...] = ()


Exchanges = Mapping[int, tuple[float | None, tuple[int, ...]]]
"""Position of a node -> its time on the network, None for a node that computes, and
the positions of the collectives whose results it reads."""


_NO_EXCHANGES: Exchanges = MappingProxyType({})


def exchanges_of(graph: Graph, profile: Profile) -> Exchanges:
    """Return the collectives of a graph, and the nodes that read their results."""
    if not profile.network_ms:
        return _NO_EXCHANGES
    found: dict[int, tuple[float | None, tuple[int, ...]]] = {}
    made: dict[str, int] = {}
    for position, node in enumerate(graph.nodes):
        ms = profile.network_ms.get(node.name)
        awaited = tuple(made[name] for name in node.inputs if name in made)
        if ms is not None:
            made.update(dict.fromkeys(node.outputs, position))
        if ms is not None or awaited:
            found[position] = ms, awaited
    return found


def step_ms(
    graph: Graph,
    profile: Profile,
    intervals: Sequence[ResidencyInterval],
    plans: Mapping[str, ConvPlan],
    below: float = math.inf,
) -> float:
    """Return the time that `simulate` predicts for the emitted program, bit by bit.

    Args:
        graph: The graph of a step.
        profile: Costs of its nodes, and link rates.
        intervals: Residency intervals of its storages.
        plans: Plans of its convolutions.
        below: Limit from which on the exact time does not matter.

    Returns:
        The step's time, or infinity if it is not below the limit.
    """
    times, count = profile.node_ms, len(graph.nodes)
    planned = {**times, **{name: plan.time_ms for name, plan in plans.items()}}
    node_ms = [planned[node.name] for node in graph.nodes]
    # Even without further waits, the rest takes at least its computation.
    rest = [*itertools.accumulate(reversed(node_ms), initial=0.0)][::-1]
    exchanges = exchanges_of(graph, profile)
    events = _events(intervals, graph, profile, exchanges)
    cyclic = any(i.host_resident and i.stop >= count for i in intervals)
    begin = now = out_free = in_free = network_free = 0.0
    arrived: dict[int, float] = {}  # position of a collective -> end of its transfer
    left: dict[str, float] = {}  # storage -> end of its last copy to the host
    done: dict[str, float] = {}  # storage -> end of its last copy
    # Copies of one step delay the next: measure when this has settled.
    for steps_left in reversed(range(STEPS_BEFORE + 1 if cyclic else 1)):
        begin, at = now, 0
        # The limit has a margin, as sums in another order round differently.
        limit = math.inf if steps_left else begin + below / _ROUNDED
        for position, kind, name, ms, lost in events:
            if position > at:
                for own_ms in node_ms[at:position]:
                    now += own_ms
                at = position
                if now + rest[at] * _ROUNDED > limit:
                    return math.inf
            if kind == _WAIT:
                end = done.get(name, 0.0)
                if end > now:
                    now = end
            elif kind == _IN:
                done[name] = in_free = max(now, in_free, left.get(name, 0.0)) + ms
                now += lost
            elif kind == _OUT:
                out_free = (now if now > out_free else out_free) + ms
                done[name] = left[name] = out_free
                now += lost
            else:
                own, awaited = exchanges[position]
                ready = max((arrived.get(a, 0.0) for a in awaited), default=0.0)
                if own is None:
                    now = max(now, ready)
                else:
                    network_free = max(now, ready, network_free) + own
                    arrived[position] = network_free
        for own_ms in node_ms[at:]:
            now += own_ms
    end = now if cyclic else max(now, out_free, in_free, network_free)
    return end - begin if end - begin < below else math.inf


_IN, _OUT, _WAIT, _EXCHANGE = range(4)


_Event = tuple[int, int, str, float, float]
"""Number of nodes before, kind, storage, time of the copy, and slowdown of compute by
the copy (ms)."""


def _events(
    intervals: Sequence[ResidencyInterval],
    graph: Graph,
    profile: Profile,
    exchanges: Exchanges,
) -> list[_Event]:
    """Return the events between nodes, in the program's order."""
    arrivals: list[_Event] = []
    waits: list[_Event] = []
    copies: list[_Event] = []
    departures: list[_Event] = []
    count, tensors, slowdown = len(graph.nodes), graph.tensors, profile.copy_slowdown_ms
    for name, _, start, stop, needed, last, comes, leaves, _, hosted in intervals:
        if comes:
            ms = tensors[name].nbytes / profile.in_bytes_per_ms
            arrivals.append((start, _IN, name, ms, slowdown(ms)))
            waits.append((needed % count, _WAIT, name, 0.0, 0.0))
        if leaves:
            ms = tensors[name].nbytes / profile.out_bytes_per_ms
            copies.append((last % count + 1, _OUT, name, ms, slowdown(ms)))
            end = stop % count if hosted else stop
            departures.append((end + 1, _WAIT, name, 0.0, 0.0))
    network = ((position, _EXCHANGE, "", 0.0, 0.0) for position in exchanges)
    # As in `emit`: offloads before waits, and both before the next node's prefetches.
    order = [*copies, *departures, *arrivals, *waits, *network]
    return sorted(order, key=itemgetter(0))


# Timeline of device memory over a simulated step.
#
# The simulator gives the times of nodes and copies, the schedule the order of
# allocations and frees. Together they give every storage's intervals and a memory curve
# whose maximum is the schedule's peak.


WORKSPACE = "workspace of "
"""Prefix of the names of nodes' workspaces."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Bytes in device memory during a time interval.

    Attributes:
        name: Storage, or `WORKSPACE` and a node.
        nbytes: Aligned size in bytes.
        start_ms: Time of the allocation.
        stop_ms: Time of the free.
        first: Position of the allocation among all allocations and frees.
        last: Position of the free among all allocations and frees.
        persistent: Whether the bytes belong to resident parameters or state.
        kept: Whether the bytes are still in use at the end of the step.
    """

    name: str
    nbytes: int
    start_ms: float
    stop_ms: float
    first: int
    last: int
    persistent: bool = False
    kept: bool = False


def memory_intervals(plan: StepPlan) -> tuple[Interval, ...]:
    """Return all intervals of a step, in order of allocation."""
    resident = set(plan.schedule.resident)
    counter = itertools.count()
    allocated: dict[str, Interval] = {}
    found: list[Interval] = []

    def free(name: str, now: float, *, kept: bool = False) -> None:
        last = next(counter)
        found.append(replace(allocated.pop(name), stop_ms=now, last=last, kept=kept))

    for name, nbytes, now in _changes(plan):
        if nbytes is None:
            free(name, now)
        else:
            first, persistent = next(counter), name in resident
            allocated[name] = Interval(name, nbytes, now, now, first, first, persistent)
    for name in tuple(allocated):
        free(name, plan.prediction.step_ms, kept=True)
    return tuple(sorted(found, key=lambda interval: interval.first))


def _changes(plan: StepPlan) -> Iterator[tuple[str, int | None, float]]:
    """Yield allocations (name, bytes, time) and frees (name, None, time)."""
    schedule, lanes = plan.schedule, plan.prediction.lanes
    # Lanes are in the order of the instructions, those of collectives aside.
    own = iter([lane for lane in lanes if lane.engine != "network"])
    tensors = schedule.graph.tensors
    resident = set(schedule.resident)
    now = 0.0
    copied: dict[str, float] = {}
    for name in (*schedule.resident, *schedule.live_across):
        yield name, rounded(tensors[name].nbytes), now
    for instruction in schedule.instructions:
        match instruction:
            case Alloc(name) if name not in resident:
                yield name, rounded(tensors[name].nbytes), now
            case Free(name) if name not in resident:
                yield name, None, now
            case Compute(name):
                scratch = rounded(schedule.workspaces.get(name, 0))
                if scratch:
                    yield WORKSPACE + name, scratch, now
                now = next(own).stop_ms
                if scratch:
                    yield WORKSPACE + name, None, now
            case SwapOut(name) | SwapIn(name):
                copied[name] = next(own).stop_ms
            case Wait(name):
                now = max(now, copied.get(name, now))


def memory_points(intervals: Sequence[Interval]) -> tuple[tuple[float, int], ...]:
    """Return (time in ms, bytes from then on) at every change, in order."""
    changes = sorted(
        [(i.first, i.start_ms, i.nbytes) for i in intervals]
        + [(i.last, i.stop_ms, -i.nbytes) for i in intervals if not i.kept]
    )
    totals = itertools.accumulate(nbytes for _, _, nbytes in changes)
    return tuple((ms, total) for (_, ms, _), total in zip(changes, totals, strict=True))


def stalls(lanes: Sequence[Lane]) -> tuple[tuple[float, float], ...]:
    """Return (start, stop) in ms of every gap between consecutive nodes."""
    compute = [lane for lane in lanes if lane.engine == "compute"]
    pauses = zip([0.0, *(lane.stop_ms for lane in compute)], compute, strict=False)
    return tuple(
        (stop, lane.start_ms) for stop, lane in pauses if lane.start_ms - stop > 1e-9
    )
