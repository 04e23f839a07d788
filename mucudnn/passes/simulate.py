"""Simulate a schedule: discrete events over compute and copy engines.

Each memory tier has two copy engines, one per direction, each with its own queue. A
copy starts when its engine is free and the compute before it in the program is done;
compute waits at `Wait` instructions. If a copy slows compute down, the slowdown is
added when the copy starts. If storages are live across steps, the third consecutive
step counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mucudnn.ir.graph import Node, Phase
from mucudnn.ir.profile import MemoryTier, Profile, TierPlacement
from mucudnn.ir.schedule import Compute, Instruction, Schedule, SwapIn, SwapOut, Wait

STEPS_BEFORE = 2
"""Warm-up steps before the measured one, if storages are live across steps."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One operation of an engine.

    Attributes:
        engine: `compute`, `network`, `out` or `in`.
        name: Name of the node or storage.
        start_ms: Start time.
        stop_ms: End time.
        tier: Number of the memory tier of a copy.
    """

    engine: str
    name: str
    start_ms: float
    stop_ms: float
    tier: int = 0

    def earlier(self, ms: float) -> "Lane":
        """Return the operation moved to an earlier time."""
        start_ms, stop_ms = self.start_ms - ms, self.stop_ms - ms
        return replace(self, start_ms=start_ms, stop_ms=stop_ms)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A simulated step.

    Attributes:
        step_ms: Time until compute and copies are done; if copies overlap with the next
            step, the period from one step's end of compute to the next.
        compute_ms: Sum of the nodes' times.
        stalls_ms: Stalls of compute by cause: `operand` (prefetches), `memory`
            (offloads), and, if there are any, `copies` (slowdown by copies) and
            `network` (collectives).
        out_bytes: Offloaded bytes.
        in_bytes: Prefetched bytes.
        lanes: All operations, in program order.
        schedule: The simulated schedule.
        profile: Times of nodes, and link rates.
        placement: Tier of each storage; None for a single tier with the profile's
            links.
    """

    step_ms: float
    compute_ms: float
    stalls_ms: Mapping[str, float]
    out_bytes: int
    in_bytes: int
    lanes: tuple[Lane, ...] = field(repr=False)
    schedule: Schedule = field(repr=False)
    profile: Profile = field(repr=False)
    placement: TierPlacement | None = field(default=None, repr=False)

    @property
    def bound_ms(self) -> float:
        """Lower bound of any schedule that moves these bytes; see `bound_ms`."""
        return bound_ms(self.schedule, self.profile, self.placement)


def simulate(
    schedule: Schedule, profile: Profile, placement: TierPlacement | None = None
) -> Prediction:
    """Simulate one step of a schedule.

    Args:
        schedule: The schedule to run.
        profile: Times of its nodes (recomputed ones included), and link rates.
        placement: Memory tiers with links of their own, and the tier of each storage.
    """
    engines = _Engines(schedule, profile, placement)
    for _ in range(STEPS_BEFORE if schedule.live_across else 0):
        engines.run()
    begin = engines.now
    lanes = engines.run()
    end = engines.now if schedule.live_across else engines.all_done
    return Prediction(
        step_ms=end - begin,
        compute_ms=sum(x.stop_ms - x.start_ms for x in lanes if x.engine == "compute"),
        stalls_ms=engines.stalls,
        out_bytes=engines.moved["out"],
        in_bytes=engines.moved["in"],
        lanes=tuple(lane.earlier(begin) for lane in lanes) if begin else tuple(lanes),
        schedule=schedule,
        profile=profile,
        placement=placement,
    )


Link = tuple[str, int]
"""Direction (`out` or `in`) and number of a tier."""


class _Links:
    """Links of copies, and their rates."""

    def __init__(self, profile: Profile, placement: TierPlacement | None) -> None:
        self._places = {} if placement is None else placement.places
        tiers: Sequence[Profile | MemoryTier] = (profile,)
        if placement is not None:
            tiers = placement.tiers
        self.rates = {("out", i): tier.out_bytes_per_ms for i, tier in enumerate(tiers)}
        self.rates |= {("in", i): tier.in_bytes_per_ms for i, tier in enumerate(tiers)}

    def of(self, engine: str, storage: str) -> Link:
        """Return the link of a copy."""
        return engine, self._places[storage][0] if storage in self._places else 0


class _Engines:
    """Clocks of compute and of all links over successive steps."""

    def __init__(
        self, schedule: Schedule, profile: Profile, placement: TierPlacement | None
    ) -> None:
        self.now = 0.0
        self.stalls: dict[str, float] = {}
        self.moved: dict[str, int] = {}
        self._program = schedule.instructions
        self._tensors = schedule.graph.tensors
        self._profile = profile
        self._links = _Links(profile, placement)
        self._free = dict.fromkeys(self._links.rates, 0.0)
        self._offloaded: dict[str, float] = {}  # end of the last copy to the host
        self._done: dict[str, tuple[str, float]] = {}  # last copy: cause of stall, end
        self._nodes = schedule.graph.by_name if profile.network_ms else {}
        self._network_free = 0.0
        self._arrived: dict[str, float] = {}  # result of a collective -> its end

    @property
    def all_done(self) -> float:
        """Time at which compute and all copies are done."""
        return max(self.now, self._network_free, *self._free.values())

    def run(self) -> list[Lane]:
        """Simulate one step; return its timeline."""
        self.stalls = {"operand": 0.0, "memory": 0.0}
        if self._profile.copy_slowdown_ms(1.0):
            self.stalls["copies"] = 0.0
        if self._nodes:
            self.stalls["network"] = 0.0
        self.moved = {"out": 0, "in": 0}
        lanes = []
        for instruction in self._program:
            match instruction:
                case Compute(name):
                    ms = self._profile.node_ms[name]
                    if self._nodes:
                        lanes += self._exchange(self._nodes[name])
                    lanes.append(Lane("compute", name, self.now, self.now + ms))
                    self.now += ms
                case SwapOut(name):
                    lane = self._copy("out", name, 0.0)
                    self._offloaded[name] = lane.stop_ms
                    self._done[name] = "memory", lane.stop_ms
                    lanes.append(lane)
                case SwapIn(name):
                    # A storage cannot be fetched before its offload is complete.
                    left = self._offloaded.get(name, 0.0)
                    lane = self._copy("in", name, left)
                    self._done[name] = "operand", lane.stop_ms
                    lanes.append(lane)
                case Wait(name) if name in self._done:
                    cause, done = self._done[name]
                    self.stalls[cause] += max(0.0, done - self.now)
                    self.now = max(self.now, done)
        return lanes

    def _exchange(self, node: Node) -> list[Lane]:
        """Start a node that is a collective; let another wait for those it reads."""
        ready = max((self._arrived.get(t, 0.0) for t in node.inputs), default=0.0)
        ms = self._profile.network_ms.get(node.name)
        if ms is None:
            self.stalls["network"] += max(0.0, ready - self.now)
            self.now = max(self.now, ready)
            return []
        start = max(self.now, ready, self._network_free)
        self._network_free = start + ms
        self._arrived.update(dict.fromkeys(node.outputs, start + ms))
        return [Lane("network", node.name, start, start + ms)]

    def _copy(self, engine: str, name: str, after: float) -> Lane:
        nbytes = self._tensors[name].nbytes
        link = self._links.of(engine, name)
        start = max(self.now, self._free[link], after)
        ms = nbytes / self._links.rates[link]
        stop = self._free[link] = start + ms
        self.moved[engine] += nbytes
        if slower := self._profile.copy_slowdown_ms(ms):
            self.stalls["copies"] += slower
            self.now += slower
        return Lane(engine, name, start, stop, link[1])


def bound_ms(
    schedule: Schedule, profile: Profile, placement: TierPlacement | None = None
) -> float:
    """Return a lower bound of the time of a schedule's instructions.

    Between the forward and the backward pass is a moment before which all forward nodes
    and all awaited offloads are done, and after which all backward nodes and later
    prefetches run. Offload in the forward pass and prefetch in the backward pass
    therefore take at least max(C_f, D / B_out) + max(C_b, D / B_in). Copies that
    straddle the moment count only towards the total of each link.

    If copies may also straddle the end of the step, the same holds for those that do
    not. Let the step begin at b, the moment be m and the next step begin at e. No copy
    starts before the compute that precedes its instruction is done, and `Wait` blocks
    compute until the copy is done. A copy that is started and awaited before the moment
    thus occupies its link within [b, m], and one that is started and awaited after it
    within [m, e], whatever the copies of other steps do. A link makes one copy at a
    time, so the sums of both parts are at most m - b and e - m. Copies awaited in the
    next step count for neither part.

    With several tiers, all this holds for each link, and the busiest one counts.
    """
    links = _Links(profile, placement)
    program = schedule.instructions
    cyclic = bool(schedule.live_across)
    whole = _busy(schedule, profile, links, program, awaited=False)
    boundary = _boundary(schedule)
    before = _busy(schedule, profile, links, program[:boundary], awaited=True)
    after = _busy(schedule, profile, links, program[boundary:], awaited=cyclic)
    return max(before + after, whole)


def _boundary(schedule: Schedule) -> int:
    """Return the number of instructions before the forward/backward boundary."""
    nodes = schedule.graph.by_name
    boundary = 0
    leaving: set[str] = set()
    for i, instruction in enumerate(schedule.instructions):
        match instruction:
            case Compute(name):
                if nodes[name].phase is not Phase.FORWARD:
                    break
                boundary = i + 1
            case SwapOut(storage):
                leaving.add(storage)
            case SwapIn(storage):
                leaving.discard(storage)
            case Wait(storage) if storage in leaving:
                boundary = i + 1
    return boundary


def _busy(
    schedule: Schedule,
    profile: Profile,
    links: _Links,
    program: Sequence[Instruction],
    *,
    awaited: bool,
) -> float:
    """Return the load in ms of the busiest of compute and links; see `bound_ms`."""
    compute, sums = 0.0, dict.fromkeys(links.rates, 0)
    pending: dict[str, tuple[Link, int]] = {}
    for instruction in program:
        match instruction:
            case Compute(name):
                compute += profile.node_ms[name]
            case SwapOut(storage) | SwapIn(storage):
                nbytes = schedule.graph.tensors[storage].nbytes
                engine = "out" if isinstance(instruction, SwapOut) else "in"
                link = links.of(engine, storage)
                pending[storage] = link, nbytes
                if not awaited:
                    sums[link] += nbytes
            case Wait(storage) if awaited and storage in pending:
                link, nbytes = pending.pop(storage)
                sums[link] += nbytes
    return max(compute, *(sums[link] / rate for link, rate in links.rates.items()))
