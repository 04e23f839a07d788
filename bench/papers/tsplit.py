"""How much larger a batch may be in slices: TSPLIT's measure against its own rival.

The largest batch that SuperNeurons' policy fits 12 GiB of a K40c with, and its speed;
then the largest multiple of that batch which, planned whole or in slices, keeps most of
that speed. Both are estimates of one simulator; TSPLIT (Nie et al., ICDE 2022) reports
3.1 times SuperNeurons' model scale, measured on other machines. What keeps its speed is
taken to do so at every smaller multiple as well: few are planned.
"""

from collections.abc import Callable
from time import process_time
from typing import Any

from bench.papers.capacity import GIB
from bench.papers.reach import batch_within
from bench.table import render
from mucudnn.errors import PlanningError
from mucudnn.ir.optimizers import Momentum
from mucudnn.models import get_model
from mucudnn.passes.estimate import estimate
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.planning.cutting import SplitStep
from mucudnn.passes.planning.plan_step import plan_step
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.split_search import plan_splitting

DEVICE, BUDGET = "k40c", 12 * GIB
RIVAL = "superneurons"
MODELS = {"vgg16": (224, 4.0), "resnet50": (224, 2.5)}
"""Network -> height and width of its images, and the multiple that is tried first."""

TIMES = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0)
"""Multiples of the rival's largest batch."""

KEPT = 0.8
"""Of the rival's speed, which a larger batch has to keep."""


def run(models: tuple[str, ...] = tuple(MODELS)) -> list[dict[str, Any]]:
    """Estimate it for each network. Ready for JSON."""
    return [_scale(model, *MODELS[model]) for model in models]


def table(rows: list[dict[str, Any]]) -> str:
    """The result of `run` as text."""
    lines = [
        (
            row["model"],
            row["rival_batch"],
            row["rival_images_per_s"],
            row["batch"],
            row["images_per_s"],
            row["batch"] / row["rival_batch"],
        )
        for row in rows
    ]
    head = (f"12 GiB, {DEVICE}", RIVAL, "images/s", "in slices", "images/s", "times")
    return render(head, lines)


def _scale(model: str, image: int, first: float) -> dict[str, Any]:
    most = batch_within(model, image, RIVAL, BUDGET)
    rival = _of_rival(model, most)
    tried = []

    def kept(times: float) -> bool:
        begun, batch = process_time(), int(times * most)
        row: dict[str, Any] = {"times": times, "batch": batch}
        try:
            chosen = plan_splitting(_step(model, batch)).chosen
        except PlanningError as error:
            tried.append(row | {"images_per_s": 0.0, "error": str(error)})
            return False
        speed = 1e3 * batch / chosen.step_ms
        row |= {"images_per_s": speed, "share": speed / rival, "parts": chosen.parts}
        tried.append(row | {"planning_cpu_s": process_time() - begun})
        return speed >= KEPT * rival

    times = _largest(kept, TIMES.index(first))
    best = [row for row in tried if row["times"] == times]
    return {
        "model": model,
        "rival_batch": most,
        "rival_images_per_s": rival,
        "batch": best[0]["batch"] if best else 0,
        "images_per_s": best[0]["images_per_s"] if best else 0.0,
        "tried": sorted(tried, key=lambda row: row["times"]),
    }


def _largest(kept: Callable[[float], bool], first: int) -> float:
    """The largest of `TIMES` that is kept, 0 if none is; halving, from the first."""
    low, high, middle = -1, len(TIMES), first
    while high - low > 1:
        if kept(TIMES[middle]):
            low = middle
        else:
            high = middle
        middle = (low + high) // 2
    return TIMES[low] if low >= 0 else 0.0


def _of_rival(model: str, batch: int) -> float:
    """Images a second of the rival's policy, under our simulator."""
    whole = _step(model, batch)
    graph = whole.complete(whole.graph)
    profile = whole.costs(graph)
    if profile is None:
        raise RuntimeError(f"{model} has no costs on {DEVICE}")
    plan = plan_step(StepRequest(graph, profile, budget=BUDGET, policy=RIVAL))
    return 1e3 * batch / plan.prediction.step_ms


def _step(model: str, batch: int) -> SplitStep:
    """Return a step with momentum under the budget, estimated for the device."""
    return SplitStep(
        training_graph(get_model(model)(batch)),
        lambda graph: with_updates(graph, Momentum()),
        lambda graph: estimate(graph, DEVICE),
        lambda graph, profile: StepRequest(graph, profile, budget=BUDGET),
    )
