"""How much larger a batch may be in slices: TSPLIT's measure against its own rival.

The largest batch that SuperNeurons' policy fits 12 GiB of a K40c with, and its speed;
then multiples of that batch, planned whole or in slices, as long as they keep most of
that speed. Both are estimates of one simulator; TSPLIT (Nie et al., ICDE 2022) reports
3.1 times SuperNeurons' model scale, measured on other machines.
"""

from typing import Any

from bench.papers.reach import batch_within
from bench.split_steps import GIB, step
from bench.table import render
from mucudnn.errors import PlanningError
from mucudnn.passes.planning.plan_step import plan_step
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.splitting import plan_splitting

__all__ = ["run", "table"]

DEVICE, BUDGET = "k40c", 12 * GIB
RIVAL = "superneurons"
MODELS = {"vgg16": 224, "resnet50": 224}
"""Network -> height and width of its images."""

TIMES = (1, 1.5, 2, 2.5, 3, 4, 5, 6)
"""Multiples of the rival's largest batch."""

KEPT = 0.8
"""Of the rival's speed, which a larger batch has to keep."""


def run(models: tuple[str, ...] = tuple(MODELS)) -> list[dict[str, Any]]:
    """Estimate it for each network. Ready for JSON."""
    return [_scale(model, MODELS[model]) for model in models]


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


def _scale(model: str, image: int) -> dict[str, Any]:
    most = batch_within(model, image, RIVAL, BUDGET)
    rival = _of_rival(model, most)
    found: dict[str, Any] = {
        "model": model,
        "rival_batch": most,
        "rival_images_per_s": rival,
        "batch": 0,
        "images_per_s": 0.0,
        "tried": [],
    }
    for times in TIMES:
        batch = int(times * most)
        try:
            chosen = plan_splitting(step(model, batch, BUDGET, DEVICE)).chosen
        except PlanningError:
            break
        speed = 1e3 * batch / chosen.step_ms
        found["tried"].append([batch, speed, chosen.parts])
        if speed < KEPT * rival:
            break
        found |= {"batch": batch, "images_per_s": speed}
    return found


def _of_rival(model: str, batch: int) -> float:
    """Images a second of the rival's policy, under our simulator."""
    whole = step(model, batch, BUDGET, DEVICE)
    graph = whole.finished(whole.graph)
    profile = whole.costs(graph)
    if profile is None:
        raise RuntimeError(f"{model} has no costs on {DEVICE}")
    plan = plan_step(StepRequest(graph, profile, budget=BUDGET, policy=RIVAL))
    return 1e3 * batch / plan.prediction.step_ms
