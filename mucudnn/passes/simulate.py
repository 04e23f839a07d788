"""What a schedule will cost: discrete events over compute and the two copy engines.

Each engine works through its own queue. A copy begins when its engine is free and the
compute before it in the program is done; compute waits where the program says `Wait`.
Where a copy slows computation down, what it takes is taken when it is begun.
Where storages are live across iterations, the third step in a row is what counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mucudnn.ir.graph import Phase
from mucudnn.ir.profile import Profile
from mucudnn.ir.schedule import Compute, Instruction, Schedule, SwapIn, SwapOut, Wait

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
    """

    engine: str
    name: str
    start_ms: float
    stop_ms: float

    def earlier(self, ms: float) -> "Lane":
        """The same, by a clock that started that much later."""
        return Lane(self.engine, self.name, self.start_ms - ms, self.stop_ms - ms)


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
    """

    step_ms: float
    compute_ms: float
    stalls_ms: Mapping[str, float]
    out_bytes: int
    in_bytes: int
    lanes: tuple[Lane, ...] = field(repr=False)
    schedule: Schedule = field(repr=False)
    profile: Profile = field(repr=False)

    @property
    def bound_ms(self) -> float:
        """No schedule that moves these bytes is faster; see the function."""
        return bound_ms(self.schedule, self.profile)


def simulate(schedule: Schedule, profile: Profile) -> Prediction:
    """Predict one step.

    Args:
        schedule: What runs.
        profile: Node times of its graph (`rematerialize`d copies included) and links.
    """
    engines = _Engines(schedule, profile)
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
    )


class _Engines:
    """The clocks of compute and of both links, from step to step."""

    def __init__(self, schedule: Schedule, profile: Profile) -> None:
        self.now = 0.0
        self.stalls: dict[str, float] = {}
        self.moved: dict[str, int] = {}
        self._program = schedule.instructions
        self._tensors = schedule.graph.tensors
        self._profile = profile
        self._free = {"out": 0.0, "in": 0.0}
        self._left: dict[str, float] = {}  # when the copy on the host is complete
        self._done: dict[str, tuple[str, float]] = {}  # last copy: what waits, until

    @property
    def all_done(self) -> float:
        """When compute and all copies are done."""
        return max(self.now, *self._free.values())

    def run(self) -> list[Lane]:
        """One step; what it did."""
        self.stalls = {"operand": 0.0, "memory": 0.0}
        if self._profile.copy_share:
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
                    lane = self._copy("out", name, self._profile.out_bytes_per_ms, 0.0)
                    self._left[name] = lane.stop_ms
                    self._done[name] = "memory", lane.stop_ms
                    lanes.append(lane)
                case SwapIn(name):
                    left = self._left.get(name, 0.0)
                    lane = self._copy("in", name, self._profile.in_bytes_per_ms, left)
                    self._done[name] = "operand", lane.stop_ms
                    lanes.append(lane)
                case Wait(name) if name in self._done:
                    cause, done = self._done[name]
                    self.stalls[cause] += max(0.0, done - self.now)
                    self.now = max(self.now, done)
        return lanes

    def _copy(self, engine: str, name: str, bytes_per_ms: float, after: float) -> Lane:
        nbytes = self._tensors[name].nbytes
        start = max(self.now, self._free[engine], after)
        ms = nbytes / bytes_per_ms
        stop = self._free[engine] = start + ms
        self.moved[engine] += nbytes
        if self._profile.copy_share:
            slower = self._profile.copy_share * ms
            self.stalls["copies"] += slower
            self.now += slower
        return Lane(engine, name, start, stop)


def bound_ms(schedule: Schedule, profile: Profile) -> float:
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
    """
    program = schedule.instructions
    cyclic = bool(schedule.live_across)
    whole = max(_busy(schedule, profile, program, awaited=False))
    boundary = _boundary(schedule)
    before = _busy(schedule, profile, program[:boundary], awaited=True)
    after = _busy(schedule, profile, program[boundary:], awaited=cyclic)
    return max(max(before) + max(after), whole)


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
    program: Sequence[Instruction],
    *,
    awaited: bool,
) -> tuple[float, float, float]:
    """What compute and both links have to do for some instructions, in ms.

    Args:
        schedule: What the instructions are of.
        profile: Times of its graph's nodes.
        program: The instructions.
        awaited: Whether only copies count that are waited for among them.
    """
    compute, sums = 0.0, {SwapOut: 0, SwapIn: 0}
    pending: dict[str, tuple[type[SwapOut] | type[SwapIn], int]] = {}
    for instruction in program:
        match instruction:
            case Compute(name):
                compute += profile.node_ms[name]
            case SwapOut(storage) | SwapIn(storage):
                nbytes = schedule.graph.tensors[storage].nbytes
                pending[storage] = (type(instruction), nbytes)
                if not awaited:
                    sums[type(instruction)] += nbytes
            case Wait(storage) if awaited and storage in pending:
                kind, nbytes = pending.pop(storage)
                sums[kind] += nbytes
    return (
        compute,
        sums[SwapOut] / profile.out_bytes_per_ms,
        sums[SwapIn] / profile.in_bytes_per_ms,
    )
