"""Export a planned step as a trace for Perfetto or chrome://tracing.

Chrome's trace event format: complete events (`X`) on three lanes, counters (`C`) for
memory, times in microseconds.
"""

import json
from collections.abc import Iterator
from typing import Any

from mucudnn.ir.operations import LIBRARY
from mucudnn.passes.memory_timeline import memory_intervals, memory_points
from mucudnn.passes.scheduling.costs import origin
from mucudnn.passes.scheduling.step_plan import StepPlan

__all__ = ["LANES", "trace_json"]

LANES = {"compute": "compute", "out": "copies to the host", "in": "copies back"}
"""Engine -> name of its lane, in order."""

_PROCESS = 1
_US = 1e3


def trace_json(plan: StepPlan) -> str:
    """Return the trace as JSON text."""
    title = f"a training step, {plan.policy} with {plan.scheduler}"
    events = [
        _metadata_event("process_name", 0, title),
        *(
            _metadata_event("thread_name", i, n)
            for i, n in enumerate(LANES.values(), 1)
        ),
        *_lanes(plan),
        *_memory(plan),
    ]
    data = {"displayTimeUnit": "ms", "traceEvents": events}
    return json.dumps(data, ensure_ascii=False, allow_nan=False)


def _metadata_event(what: str, thread: int, name: str) -> dict[str, Any]:
    about = {"name": what, "args": {"name": name}}
    return {"ph": "M", "pid": _PROCESS, "tid": thread, **about}


def _lanes(plan: StepPlan) -> Iterator[dict[str, Any]]:
    graph = plan.schedule.graph
    threads = {engine: i for i, engine in enumerate(LANES, start=1)}
    for lane in plan.prediction.lanes:
        args: dict[str, Any]
        if lane.engine == "compute":
            node = graph.by_name[lane.name]
            again = origin(lane.name) != lane.name
            category = "recompute" if again else node.phase.value
            args = {"operation": node.op, "phase": node.phase.value}
            scratch = plan.schedule.workspaces.get(lane.name, 0)
            if scratch:
                args["workspace_bytes"] = scratch
            if LIBRARY in node.attrs:
                args["library"] = node.attrs[LIBRARY]
            if lane.name in plan.plans:
                steps = plan.plans[lane.name].steps
                args["plan"] = " + ".join(f"{s.algo}({s.batch})" for s in steps)
        else:
            category = "copy"
            args = {"bytes": graph.tensors[lane.name].nbytes}
        yield {
            "ph": "X",
            "pid": _PROCESS,
            "tid": threads[lane.engine],
            "name": lane.name,
            "cat": category,
            "ts": lane.start_ms * _US,
            "dur": (lane.stop_ms - lane.start_ms) * _US,
            "args": args,
        }


def _memory(plan: StepPlan) -> Iterator[dict[str, Any]]:
    """Yield the counter: maximum and last total of changes at the same time."""
    most: dict[float, int] = {}
    last: dict[float, int] = {}
    for ms, nbytes in memory_points(memory_intervals(plan)):
        most[ms] = max(most.get(ms, 0), nbytes)
        last[ms] = nbytes
    for ms in most:
        for nbytes in dict.fromkeys((most[ms], last[ms])):
            yield {
                "ph": "C",
                "pid": _PROCESS,
                "name": "device memory",
                "ts": ms * _US,
                "args": {"bytes": nbytes},
            }
