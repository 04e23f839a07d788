"""How long a whole training step takes to plan, offsets included.

Costs are the estimates for an H200; the budgets lie between the least that works and
what the step takes with all the memory it could use.
"""

from time import perf_counter
from typing import Any

from mucudnn.ir.optimizers import Momentum
from mucudnn.models import get_model
from mucudnn.passes.estimate import estimate
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.planning.place_step import place_step
from mucudnn.passes.planning.plan_step import minimum_budget, unbounded
from mucudnn.passes.planning.request import StepRequest

__all__ = ["rows", "run"]

STEPS = {"resnet50": 32, "inception_v4": 32, "resnet:6,32,289,6": 8}
"""Model -> mini-batch; the last has 1001 layers."""

SHARES = (0.5, 0.2)


def run() -> list[dict[str, Any]]:
    """Plan each step within each budget, once: the planner has no chance in it."""
    found = []
    for model, batch in STEPS.items():
        graph = with_updates(training_graph(get_model(model)(batch)), Momentum())
        profile = estimate(graph, "h200")
        most = unbounded(graph, profile)
        least = minimum_budget(StepRequest(graph, profile))
        for share in SHARES:
            budget = least + int(share * (most.peak_bytes - least))
            start = perf_counter()
            placed = place_step(StepRequest(graph, profile, budget=budget))
            found.append(
                {
                    "model": model,
                    "batch": batch,
                    "nodes": len(graph.nodes),
                    "budget_share": budget / most.peak_bytes,
                    "seconds": perf_counter() - start,
                    "slowdown": placed.plan.prediction.step_ms
                    / most.prediction.step_ms,
                    "gap": placed.plan.gap,
                    "fragmentation": placed.layout.fragmentation,
                }
            )
    return found


def rows(steps: list[dict[str, Any]]) -> list[str]:
    """A line a step."""
    return [
        f"{step['model']}, batch {step['batch']}, {step['nodes']} nodes, "
        f"{step['budget_share']:.0%} of its memory".ljust(66)
        + f" {step['seconds']:>6.1f} s"
        for step in steps
    ]
