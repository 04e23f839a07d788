"""What a schedule will cost: discrete events over compute and the two copy engines.

Each engine works through its own queue. A copy begins when its engine is free and the
compute before it in the program is done; compute waits where the program says `Wait`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mucudnn.ir.graph import Phase
from mucudnn.ir.profile import Profile
from mucudnn.ir.schedule import Compute, Instruction, Schedule, SwapIn, SwapOut, Wait

__all__ = ["Lane", "Prediction", "bound_ms", "simulate"]


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


@dataclass(frozen=True, slots=True)
class Prediction:
    """A simulated step.

    Attributes:
        step_ms: Until compute and copies are done.
        compute_ms: Sum of the nodes.
        bound_ms: No schedule that moves these bytes is faster.
        stalls_ms: Time that compute waits, by cause: `operand` for what has not come
            back yet, `memory` for what has not left yet.
        out_bytes: Copied to the host.
        in_bytes: Copied back.
        lanes: Everything that happens, in program order.
    """

    step_ms: float
    compute_ms: float
    bound_ms: float
    stalls_ms: Mapping[str, float]
    out_bytes: int
    in_bytes: int
    lanes: tuple[Lane, ...] = field(repr=False)


def simulate(schedule: Schedule, profile: Profile) -> Prediction:
    """Predict one step.

    Args:
        schedule: What runs.
        profile: Node times of its graph (`rematerialize`d copies included) and links.
    """
    graph = schedule.graph
    now, out_free, in_free = 0.0, 0.0, 0.0
    left: dict[str, float] = {}  # when a storage's copy on the host is complete
    back: dict[str, float] = {}  # when a storage has come back
    moving: dict[str, str] = {}
    stalls = {"operand": 0.0, "memory": 0.0}
    lanes: list[Lane] = []
    moved = {"out": 0, "in": 0}
    for instruction in schedule.instructions:
        match instruction:
            case Compute(name):
                ms = profile.node_ms[name]
                lanes.append(Lane("compute", name, now, now + ms))
                now += ms
            case SwapOut(storage):
                nbytes = graph.tensors[storage].nbytes
                start = max(now, out_free)
                out_free = start + nbytes / profile.out_bytes_per_ms
                left[storage] = out_free
                moving[storage] = "memory"
                moved["out"] += nbytes
                lanes.append(Lane("out", storage, start, out_free))
            case SwapIn(storage):
                nbytes = graph.tensors[storage].nbytes
                start = max(now, in_free, left.get(storage, 0.0))
                in_free = start + nbytes / profile.in_bytes_per_ms
                back[storage] = in_free
                moving[storage] = "operand"
                moved["in"] += nbytes
                lanes.append(Lane("in", storage, start, in_free))
            case Wait(storage):
                cause = moving[storage]
                done = left[storage] if cause == "memory" else back[storage]
                stalls[cause] += max(0.0, done - now)
                now = max(now, done)
    compute = sum(
        lane.stop_ms - lane.start_ms for lane in lanes if lane.engine == "compute"
    )
    return Prediction(
        step_ms=max(now, out_free, in_free),
        compute_ms=compute,
        bound_ms=bound_ms(schedule, profile),
        stalls_ms=stalls,
        out_bytes=moved["out"],
        in_bytes=moved["in"],
        lanes=tuple(lanes),
    )


def bound_ms(schedule: Schedule, profile: Profile) -> float:
    """A time that the instructions of a schedule cannot be faster than.

    Between the forward and the backward pass lies a moment before which the forward
    nodes have run and the copies out that were waited for are done, and after which the
    backward nodes run and the copies in begun since then are made. What leaves in the
    forward pass and returns in the backward pass thus takes at least
    max(C_f, D / B_out) + max(C_b, D / B_in). Copies that straddle the moment count only
    towards what each link moves in all.
    """
    program = schedule.instructions
    turn = _turn(schedule)
    before = _busy(schedule, profile, program[:turn], awaited=True)
    after = _busy(schedule, profile, program[turn:], awaited=False)
    whole = _busy(schedule, profile, program, awaited=False)
    return max(max(before) + max(after), *whole)


def _turn(schedule: Schedule) -> int:
    """How many instructions come before the moment between the passes."""
    nodes = schedule.graph.by_name
    turn = 0
    leaving: set[str] = set()
    for i, instruction in enumerate(schedule.instructions):
        match instruction:
            case Compute(name):
                if nodes[name].phase is not Phase.FORWARD:
                    break
                turn = i + 1
            case SwapOut(storage):
                leaving.add(storage)
            case SwapIn(storage):
                leaving.discard(storage)
            case Wait(storage) if storage in leaving:
                turn = i + 1
    return turn


def _busy(
    schedule: Schedule,
    profile: Profile,
    program: Sequence[Instruction],
    *,
    awaited: bool,
) -> tuple[float, float, float]:
    """What compute and both links have to do for some instructions, in ms.

    Args:
        schedule: Of them.
        profile: Of its graph.
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
