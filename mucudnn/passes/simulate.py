"""What a schedule will cost: discrete events over compute and the copy engines.

Of those there are two, one a direction, for each tier that storages leave to. Each
works through its own queue. A copy begins when its engine is free and the compute
before it in the program is done; compute waits where the program says `Wait`.
Where a copy slows computation down, what it takes is taken when it is begun.
Where storages are live across iterations, the third step in a row is what counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mucudnn.ir.graph import Phase
from mucudnn.ir.profile import Profile
from mucudnn.ir.schedule import Compute, Instruction, Schedule, SwapIn, SwapOut, Wait
from mucudnn.ir.tiers import MemoryTier, TierPlacement

__all__ = ["Lane", "Prediction", "bound_ms", "simulate"]

_STEPS_BEFORE = 2


@dataclass(frozen=True, slots=True)
class Lane:
    """One thing that an engine does.

    Attributes:
        engine: `compute`, `out` or `in`.
        name: Node or storage.
        start_ms: When it begins.
        stop_ms: When it ends.
        tier: Number of the tier that a copy goes to or comes from.
    """

    engine: str
    name: str
    start_ms: float
    stop_ms: float
    tier: int = 0

    def earlier(self, ms: float) -> "Lane":
        """The same, by a clock that started that much later."""
        start_ms, stop_ms = self.start_ms - ms, self.stop_ms - ms
        return replace(self, start_ms=start_ms, stop_ms=stop_ms)


@dataclass(frozen=True, slots=True)
class Prediction:
    """A simulated step.

    Attributes:
        step_ms: Until compute and copies are done; where copies reach into the next
            step, from the end of one step's compute to the end of the next one's.
        compute_ms: Sum of the nodes.
        stalls_ms: Time that compute waits, by cause: `operand` for what has not come
            back yet, `memory` for what has not left yet; and, where copies slow it
            down, `copies` for what it takes longer.
        out_bytes: Copied to the host.
        in_bytes: Copied back.
        lanes: Everything that happens, in program order.
        schedule: What was simulated.
        profile: With which times.
        placement: Which tier each storage goes to; None if there is one only, with the
            links of the profile.
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
        """No schedule that moves these bytes is faster; see the function."""
        return bound_ms(self.schedule, self.profile, self.placement)


def simulate(
    schedule: Schedule, profile: Profile, placement: TierPlacement | None = None
) -> Prediction:
    """Predict one step.

    Args:
        schedule: What runs.
        profile: Node times of its graph (`rematerialize`d copies included) and links.
        placement: Tiers, each with links of its own, and which storage goes where.
    """
    engines = _Engines(schedule, profile, placement)
    for _ in range(_STEPS_BEFORE if schedule.live_across else 0):
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
"""`out` or `in`, and the number of a tier."""


class _Links:
    """Which link a copy takes, and how fast it is."""

    def __init__(self, profile: Profile, placement: TierPlacement | None) -> None:
        self._places = {} if placement is None else placement.places
        tiers: Sequence[Profile | MemoryTier] = (profile,)
        if placement is not None:
            tiers = placement.tiers
        self.rates = {("out", i): tier.out_bytes_per_ms for i, tier in enumerate(tiers)}
        self.rates |= {("in", i): tier.in_bytes_per_ms for i, tier in enumerate(tiers)}

    def of(self, engine: str, storage: str) -> Link:
        """The link of a copy."""
        return engine, self._places[storage][0] if storage in self._places else 0


class _Engines:
    """The clocks of compute and of all links, from step to step."""

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
        self._left: dict[str, float] = {}  # when the copy on the host is complete
        self._done: dict[str, tuple[str, float]] = {}  # last copy: what waits, until

    @property
    def all_done(self) -> float:
        """When compute and all copies are done."""
        return max(self.now, *self._free.values())

    def run(self) -> list[Lane]:
        """One step; what it did."""
        self.stalls = {"operand": 0.0, "memory": 0.0}
        if self._profile.lost_ms(1.0):
            self.stalls["copies"] = 0.0
        self.moved = {"out": 0, "in": 0}
        lanes = []
        for instruction in self._program:
            match instruction:
                case Compute(name):
                    ms = self._profile.node_ms[name]
                    lanes.append(Lane("compute", name, self.now, self.now + ms))
                    self.now += ms
                case SwapOut(name):
                    lane = self._copy("out", name, 0.0)
                    self._left[name] = lane.stop_ms
                    self._done[name] = "memory", lane.stop_ms
                    lanes.append(lane)
                case SwapIn(name):
                    left = self._left.get(name, 0.0)
                    lane = self._copy("in", name, left)
                    self._done[name] = "operand", lane.stop_ms
                    lanes.append(lane)
                case Wait(name) if name in self._done:
                    cause, done = self._done[name]
                    self.stalls[cause] += max(0.0, done - self.now)
                    self.now = max(self.now, done)
        return lanes

    def _copy(self, engine: str, name: str, after: float) -> Lane:
        nbytes = self._tensors[name].nbytes
        link = self._links.of(engine, name)
        start = max(self.now, self._free[link], after)
        ms = nbytes / self._links.rates[link]
        stop = self._free[link] = start + ms
        self.moved[engine] += nbytes
        if slower := self._profile.lost_ms(ms):
            self.stalls["copies"] += slower
            self.now += slower
        return Lane(engine, name, start, stop, link[1])


def bound_ms(
    schedule: Schedule, profile: Profile, placement: TierPlacement | None = None
) -> float:
    """A time that the instructions of a schedule cannot be faster than.

    Between the forward and the backward pass lies a moment before which the forward
    nodes have run and the copies out that were waited for are done, and after which the
    backward nodes run and the copies in begun since then are made. What leaves in the
    forward pass and returns in the backward pass thus takes at least
    max(C_f, D / B_out) + max(C_b, D / B_in). Copies that straddle the moment count only
    towards what each link moves in all.

    Where copies may straddle the end of the step as well, the same holds of those that
    do not. Let the step begin at b, the moment be m and the next step begin at e. No
    copy starts before the compute that precedes its instruction is done, and `Wait`
    holds compute up until it is done. So a copy begun and waited for by the
    instructions before the moment occupies its link within [b, m], and one begun and
    waited for by those after it within [m, e], whatever the copies of other steps do; a
    link makes one copy at a time, and the sums of both parts are no longer than m - b
    and e - m. What is waited for in the next step counts for neither.

    All this holds of each link, where there are several tiers: the busiest one counts.
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
    """How many instructions come before the forward/backward boundary."""
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
    """What the busiest of compute and links has to do for some instructions, in ms.

    Args:
        schedule: What the instructions are of.
        profile: Times of its graph's nodes.
        links: Which copies take how long.
        program: The instructions.
        awaited: Whether only copies count that are waited for among them.
    """
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
