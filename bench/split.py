"""What running a step in slices of its batch buys: estimated, and really run.

Estimates are of the `estimate` pass, nothing of them was measured on a GPU: the least
budget by parts of the largest layers, and slowdowns under budgets, whole and in parts.
The step that is really run is small, on this machine's CPU: what was predicted is
beside what was measured.
"""

import math
import os
from collections.abc import Mapping
from time import perf_counter, process_time
from typing import Any

import numpy as np

from bench.papers import tsplit
from bench.split_steps import GIB, step
from bench.table import render
from mucudnn.errors import OutOfMemoryError, PlanningError
from mucudnn.ir.optimizers import Momentum
from mucudnn.ir.sizes import format_bytes
from mucudnn.models import get_model
from mucudnn.passes.estimate import estimate
from mucudnn.passes.planning.bound import lower_bound
from mucudnn.passes.planning.cutting import SplitCandidate
from mucudnn.passes.planning.plan_step import minimum_budget, unbounded
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.planning.split_search import plan_splitting
from mucudnn.runtime.training.trainer import Trainer

__all__ = ["run", "table"]

DEVICE = "h200"
ESTIMATES: Mapping[str, tuple[int, tuple[float, ...]]] = {
    "resnet50": (256, (10.7, 8, 5.3, 4, 2.7, 1.5)),
    "vgg16": (256, (4,)),
    "unet2d": (16, (4,)),
}
"""Network -> batch and budgets in GiB."""

SLOWDOWN = ("bound_of_whole", "whole", "best", "parts", "waits", "planning_cpu_s")
PARTS = (1, 2, 4, 8)
REAL = ("resnet20", 64, 32, 8)
"""Network, batch, size of an image and parts of what is really run."""

SHARES = (0.25, 0.08)
"""Budgets, as shares of what the whole step takes unbounded."""

STEPS = 4


def run() -> dict[str, Any]:
    """Estimate, and run. Ready for JSON."""
    return {
        "device": DEVICE,
        "estimated": "times and sizes of published figures; none was measured",
        "least": [_least(model, batch) for model, (batch, _) in ESTIMATES.items()],
        "slowdowns": [
            _slowdown(model, batch, budget)
            for model, (batch, budgets) in ESTIMATES.items()
            for budget in budgets
        ],
        "scale": tsplit.run(),
        "run": _really(*REAL),
        "load": os.getloadavg()[0],
    }


def table(result: dict[str, Any]) -> str:
    """The result of `run` as text."""
    lines = [f"estimated for an {result['device']}: {result['estimated']}"]
    least = [
        (row["model"], row["batch"], *(row["least_bytes"][str(k)] / GIB for k in PARTS))
        for row in result["least"]
    ]
    head = ("least budget, GiB", "batch", *(f"{k} parts" for k in PARTS))
    lines += [render(head, least), ""]
    slow = [
        tuple(row[key] for key in ("model", "budget_gib", *SLOWDOWN))
        for row in result["slowdowns"]
    ]
    lines += [render(("slowdown", "GiB", *SLOWDOWN), slow), ""]
    lines += [tsplit.table(result["scale"]), ""]
    real = result["run"]
    lines.append(
        f"really run: {real['model']}, {real['batch']} images, this CPU at a load of "
        f"{result['load']:.1f}"
    )
    rows = [
        (
            "none" if row["budget"] is None else format_bytes(row["budget"]),
            row["parts"],
            format_bytes(row["peak_bytes"]),
            row["predicted_ms"],
            row["measured_ms"],
            row["loss"],
        )
        for row in real["rows"]
    ]
    head = ("budget", "parts", "taken", "predicted ms", "measured ms", "loss")
    return "\n".join([*lines, render(head, rows)])


def _least(model: str, batch: int) -> dict[str, Any]:
    asked, found = step(model, batch, math.inf, DEVICE), {}
    for parts in PARTS:
        graph = asked.in_parts(parts)
        request = StepRequest(graph, estimate(graph, DEVICE))
        found[str(parts)] = minimum_budget(request)
    return {"model": model, "batch": batch, "least_bytes": found}


def _slowdown(model: str, batch: int, budget: float) -> dict[str, Any]:
    """What is chosen within a budget, and what the planner took for it."""
    begun, cpu = perf_counter(), process_time()
    row: dict[str, Any] = {"model": model, "batch": batch, "budget_gib": budget}
    asked = step(model, batch, budget * GIB, DEVICE)
    whole = asked.complete(asked.graph)
    profile = estimate(whole, DEVICE)
    unbounded_ms = unbounded(whole, profile).prediction.step_ms
    found = plan_splitting(asked)
    seconds = perf_counter() - begun, process_time() - cpu
    bound = lower_bound(StepRequest(whole, profile, budget=budget * GIB))
    times = {
        str(c.cutting): c.step_ms / unbounded_ms
        for c in found.tried
        if c.plan is not None
    }
    return row | {
        "whole": times.get("whole"),
        "bound_of_whole": (
            None if math.isinf(bound.step_ms) else bound.step_ms / unbounded_ms
        ),
        "best": found.chosen.step_ms / unbounded_ms,
        "parts": found.chosen.parts,
        "waits": _waits(found.chosen),
        "tried": times,
        "planning_s": seconds[0],
        "planning_cpu_s": seconds[1],
    }


def _waits(chosen: SplitCandidate) -> float | None:
    """Share of a step in which compute waits for copies, of whole tensors."""
    if chosen.plan is None:
        return None
    prediction = chosen.plan.prediction
    return sum(prediction.stalls_ms.values()) / prediction.step_ms


def _really(model: str, batch: int, image: int, parts: int) -> dict[str, Any]:
    whole = _trained(model, batch, image, None, "none")
    rows = [whole | {"parts": 1}]
    for share in SHARES:
        budget = int(share * whole["peak_bytes"])
        for number in (1, parts):
            try:
                row = _trained(model, batch, image, budget, number)
            except (OutOfMemoryError, PlanningError):
                continue
            rows.append(row | {"parts": number})
    return {"model": model, "batch": batch, "image": image, "rows": rows}


def _trained(
    model: str, batch: int, image: int, budget: int | None, split: Any
) -> dict[str, Any]:
    """A few steps: the median of their times, and the last loss."""
    rng = np.random.default_rng(0)
    network = get_model(model)(batch, image=image, classes=10)
    shape = network.tensors["image"].shape
    with Trainer(network, optimizer=Momentum(0.01), budget=budget, split=split) as t:
        loss = [
            t.step(rng.standard_normal(shape, dtype="f4"), rng.integers(0, 10, batch))
            for _ in range(STEPS)
        ][-1].loss
        predicted = 0.0 if t.placed is None else t.placed.plan.prediction.step_ms
        return {
            "budget": budget,
            "peak_bytes": t.peak_bytes,
            "predicted_ms": predicted,
            "measured_ms": t.step_ms,
            "loss": loss,
        }
