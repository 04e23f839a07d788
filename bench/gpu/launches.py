"""What a micro-batch costs the host: raw calls, our plan, and one graph for it all."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.gpu.choice import Bound, first_choice, in_turn, plan_of, sampler
from bench.gpu.job import RULE, Job
from bench.table import render
from mucudnn.backends import Backend
from mucudnn.backends.cuda.conv import CudaConv, operands_of, step_operands
from mucudnn.errors import UnsupportedError
from mucudnn.ir.conv import ConvPlan, ConvProblem, Direction

_BATCH = 32
_ROUNDS = 200
_BAR_US = 3.0


def launches(
    job: Job, *, divided: Sequence[int] = (1, 8, 32), most_s: float = 2.0
) -> Mapping[str, Any]:
    """Host µs a call, and device ms, for each number of parts.

    The kernels are short and fewer than the driver's queue holds, so that the host
    never waits for the device.

    Args:
        job: What the work runs on.
        divided: Numbers of parts; those larger than the batch are left out.
        most_s: Seconds for timing the host, for each of them.

    Raises:
        UnsupportedError: Nothing runs.
    """
    batch = job.batch or _BATCH
    rows = [_one(job, parts, most_s) for parts in divided if parts <= batch]
    header = ("parts", "raw µs", "plan µs", "graph µs", "a part above raw µs")
    table = render(header, [[row[name] for name in _COLUMNS] for row in rows])
    return {"bar_us": _BAR_US, "rows": rows, "text": f"\n{table}"}


_COLUMNS = ("parts", "raw_us", "plan_us", "graph_us", "above_raw_us_a_part")


def _one(job: Job, parts: int, most_s: float) -> dict[str, Any]:
    backend = job.backend
    problem = ConvProblem(
        direction=Direction.FORWARD,
        x_shape=(job.batch or _BATCH, 192, 13, 13),
        w_shape=(384, 192, 3, 3),
        padding=1,
    )
    micro = Bound(backend, problem.with_batch(problem.batch // parts))
    choice = first_choice(micro)
    if choice is None:
        raise UnsupportedError(f"no algorithm runs {micro.problem}")
    plan = plan_of(problem, *choice, parts)
    whole, scratch = Bound(backend, problem), backend.device.allocate(choice[1])
    runs: dict[str, Callable[[], None]] = {"raw": _raw(backend, plan, whole, scratch)}
    for name, replay in (("plan", False), ("graph", True)):
        runs[name] = _compiled(backend, plan, whole, scratch, replay)
    for run in runs.values():  # the second run captures
        run()
        run()
    _settle(backend)
    host = _host_us(backend, runs, min(most_s, job.left_s / 4))
    samplers = {name: sampler(backend, run) for name, run in runs.items()}
    device = in_turn(samplers, RULE, job.deadline)
    return {
        "parts": parts,
        "algo": choice[0],
        **{f"{name}_us": us for name, us in host.items()},
        "above_raw_us_a_part": (host["plan"] - host["raw"]) / parts,
        "device_ms": {name: timing.time_ms for name, timing in device.items()},
    }


def _settle(backend: Backend) -> None:
    """Point the library's handle, which capturing moved, back at this stream."""
    if isinstance(backend.conv, CudaConv):
        backend.conv.session.handle()


def _host_us(
    backend: Backend, runs: Mapping[str, Callable[[], None]], seconds: float
) -> dict[str, float]:
    """Medians of single calls that take turns, the device idle before each."""
    device = backend.device
    taken: dict[str, list[float]] = {name: [] for name in runs}
    ends = time.monotonic() + seconds
    for done in range(_ROUNDS):
        if done and time.monotonic() >= ends:
            break
        for name, run in runs.items():
            before = device.record()
            begun = time.perf_counter_ns()
            run()
            taken[name].append((time.perf_counter_ns() - begun) / 1e3)
            device.elapsed_ms(before, device.record())
    return {name: statistics.median(us) for name, us in taken.items()}


def _compiled(
    backend: Backend, plan: ConvPlan, whole: Bound, scratch: Any, replay: bool
) -> Callable[[], None]:
    compiled = backend.bind(plan, replay=replay)
    return lambda: compiled.run(whole.a, whole.b, whole.out, scratch, False)


def _raw(
    backend: Backend, plan: ConvPlan, whole: Bound, scratch: Any
) -> Callable[[], None]:
    """The library's own calls, everything else made ahead."""
    conv = backend.conv
    if not isinstance(conv, CudaConv):
        return _kernels(backend, plan, whole, scratch)
    operands = operands_of(whole.a, whole.b, whole.out, scratch)
    handle = conv.session.handle()
    kept = [
        launch
        for window, step in plan.slices()
        for launch in conv.launches(
            plan.problem.with_batch(step.batch),
            step.algo,
            step_operands(plan, window.start, operands),
            first=True,
            accumulate=False,
        )
    ]

    def run() -> None:
        for launch in kept:
            status = launch.function(handle, *launch.arguments)
            if status:
                conv.session.calls.raise_for(launch.name, status)

    return run


def _kernels(
    backend: Backend, plan: ConvPlan, whole: Bound, scratch: Any
) -> Callable[[], None]:
    kernel = backend.conv.run
    calls = [
        (plan.problem.with_batch(step.batch), step.algo, whole.a[w], whole.out[w])
        for w, step in plan.slices()
    ]

    def run() -> None:
        for problem, algo, x, y in calls:
            kernel(problem, algo, x, whole.b, y, scratch)

    return run
