"""What a schedule will cost: discrete events over compute and the two copy engines.

Each engine works through its own queue. A copy begins when its engine is free and the
compute before it in the program is done; compute waits where the program says `Wait`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mucudnn.ir.graph import Phase
from mucudnn.ir.profile import Profile
from mucudnn.ir.schedule import Compute, Schedule, SwapIn, SwapOut, Wait

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
    """A time that no order of the same computations and copies can beat.

    What leaves in forward and returns in backward takes at least
    max(C_f, D / B_out) + max(C_b, D / B_in); copies on top of those at least their own
    time on their link.
    """
    graph = schedule.graph
    forward = backward = 0.0
    out_forward = in_backward = out_all = in_all = 0
    in_forward_phase = True
    nodes = graph.by_name
    for instruction in schedule.instructions:
        match instruction:
            case Compute(name):
                if nodes[name].phase is Phase.FORWARD and in_forward_phase:
                    forward += profile.node_ms[name]
                else:
                    in_forward_phase = False
                    backward += profile.node_ms[name]
            case SwapOut(storage):
                nbytes = graph.tensors[storage].nbytes
                out_all += nbytes
                out_forward += nbytes if in_forward_phase else 0
            case SwapIn(storage):
                nbytes = graph.tensors[storage].nbytes
                in_all += nbytes
                in_backward += 0 if in_forward_phase else nbytes
    through = min(out_forward, in_backward)
    phases = max(forward, through / profile.out_bytes_per_ms) + max(
        backward, through / profile.in_bytes_per_ms
    )
    return max(
        phases,
        forward + backward,
        out_all / profile.out_bytes_per_ms,
        in_all / profile.in_bytes_per_ms,
    )
