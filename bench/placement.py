"""What mapped memory buys over static offsets, and what it costs.

Steps of three networks are placed within budgets between the least that works and all
that they could use, by estimates for an H200 with chunks of 2 MiB: predicted times, and
bytes, beside those of the plan, for which the bytes of a tensor may lie anywhere.
Then, measured on the CPU: mapping chunks, and a step in memory whose chunks are all out
of order beside the same step in an arena.
"""

import random
import statistics
from dataclasses import replace
from time import perf_counter, process_time
from typing import Any

import numpy as np

from mucudnn.backends import get_backend
from mucudnn.ir.optimizers import Momentum
from mucudnn.ir.schedule import PLACEMENTS
from mucudnn.ir.tensor import Role
from mucudnn.models import get_model
from mucudnn.passes.estimate import estimate
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.placement.layout import PageTable, PlacedStep
from mucudnn.passes.planning.place_step import place_step
from mucudnn.passes.planning.plan_step import minimum_budget, plan_step, unbounded
from mucudnn.passes.planning.request import StepRequest
from mucudnn.runtime.executor import Executor
from mucudnn.runtime.profiling.links import mapping_costs
from mucudnn.runtime.training.parameters import StateStore
from mucudnn.runtime.training.planned_steps import place_steps
from mucudnn.runtime.tuning.tuner import Tuner

STEPS = {"alexnet": 256, "vgg16": 32, "densenet121": 32}
SHARES = (0.5, 0.2, 0.1, 0.05)
SAMPLES = 15


def run() -> dict[str, Any]:
    """Place every step within every budget, and measure the CPU."""
    return {"estimated": _estimated(), "measured": _measured()}


def table(result: dict[str, Any]) -> str:
    """A line a step and budget, and the CPU."""
    lines = [
        f"{row['model']} of {row['batch']}, {row['budget_bytes'] / 2**20:,.0f} MiB: "
        f"planned {row['planned_ms']:.2f} ms, static {row['static']['step_ms']:.2f}, "
        f"virtual {row['virtual']['step_ms']:.2f}; above what is in use at once "
        f"{row['static']['fragmentation']:.1%}, {row['virtual']['fragmentation']:.1%}; "
        f"as planned in one piece {row['as_planned_fragmentation']:.1%}; "
        f"{row['virtual']['mapped_chunks']} chunks mapped in "
        f"{row['virtual']['map_ms']:.0f} ms"
        for row in result["estimated"]
    ]
    cpu = result["measured"]
    lines.append(
        f"CPU: {1e3 * cpu['map_ms']:.1f} µs to map {cpu['chunk_bytes'] >> 10} KiB, "
        f"{1e3 * cpu['unmap_ms']:.1f} µs to take it away; a step in chunks out of "
        f"order takes {cpu['ratio']:.3f} of one in an arena ({cpu['static_ms']:.1f} ms)"
    )
    return "\n".join(lines)


def _estimated() -> list[dict[str, Any]]:
    found = []
    for model, batch in STEPS.items():
        graph = with_updates(training_graph(get_model(model)(batch)), Momentum())
        request = StepRequest(graph, estimate(graph, "h200"))
        most = unbounded(graph, request.profile)
        least = minimum_budget(request)
        for share in SHARES:
            budget = least + int(share * (most.peak_bytes - least))
            found.append(
                {
                    "model": model,
                    "batch": batch,
                    "share": share,
                    "unbounded_ms": most.prediction.step_ms,
                    **_within(request.within(budget)),
                }
            )
    return found


def _within(request: StepRequest) -> dict[str, Any]:
    plan = plan_step(request)
    kept = place_step(replace(request, budget=float("inf")), plan).layout
    row: dict[str, Any] = {
        "budget_bytes": request.budget,
        "planned_ms": plan.prediction.step_ms,
        "as_planned_fragmentation": kept.fragmentation,
    }
    for placement in PLACEMENTS:
        start = process_time()
        placed = place_step(replace(request, placement=placement), plan)
        row[placement] = {
            "nbytes": placed.nbytes,
            "step_ms": placed.plan.prediction.step_ms,
            "fragmentation": placed.layout.fragmentation,
            "mapped_chunks": placed.layout.mapped_chunks,
            "map_ms": placed.map_ms,
            "placing_seconds": process_time() - start,
        }
    return row


def _measured() -> dict[str, Any]:
    """Mapping, and a training step of ResNet-18 both ways, in turns."""
    backend = get_backend("cpu")
    costs = mapping_costs(backend)
    graph = with_updates(
        training_graph(get_model("resnet18")(2, image=64, classes=10)), Momentum()
    )
    with Tuner(backend=backend) as tuner:
        (static,) = place_steps(tuner, [graph])
    runs = [_Timed(static), _Timed(_out_of_order(static, costs.nbytes))]
    times = [[run.step() for run in runs] for _ in range(SAMPLES + 1)][1:]
    return {
        "chunk_bytes": costs.nbytes,
        "map_ms": costs.map_ms,
        "unmap_ms": costs.unmap_ms,
        "chunks": runs[1].placed.layout.mapped_chunks,
        "static_ms": statistics.median(t[0] for t in times),
        "mapped_ms": statistics.median(t[1] for t in times),
        "ratio": statistics.median(t[1] / t[0] for t in times),
    }


def _out_of_order(placed: PlacedStep, chunk_bytes: int) -> PlacedStep:
    count = -(-placed.layout.nbytes // chunk_bytes)
    chunks = list(range(count))
    random.Random(0).shuffle(chunks)
    pages = PageTable(chunk_bytes, tuple(chunks))
    layout = replace(placed.layout, nbytes=count * chunk_bytes, pages=pages)
    return replace(placed, layout=layout)


class _Timed:
    """A step, on random numbers."""

    def __init__(self, placed: PlacedStep) -> None:
        backend, schedule = get_backend("cpu"), placed.schedule
        self.placed = placed
        state = StateStore(backend.device, schedule.graph, seed=1)
        self._executor = Executor(backend, schedule, placed.layout, placed.plans, state)
        rng = np.random.default_rng(0)
        inputs = schedule.graph.with_role(Role.INPUT)
        self._feeds = {
            spec.name: rng.random(spec.shape).astype(spec.dtype) for spec in inputs
        }

    def step(self) -> float:
        """Milliseconds."""
        start = perf_counter()
        self._executor.run(self._feeds)
        return 1e3 * (perf_counter() - start)
