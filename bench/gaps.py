"""How far plans are from a bound that no plan beats: ten networks, five budgets each.

Beside our plan are those of five rivals under the same budget: checkpointing every
block, some blocks or all but expensive operations, offloaded checkpoints, and PyTorch's
knapsack. Whole steps, estimated for an H200. The bound is a relaxation's: where it is
not reached, either the plan could be faster or the bound is too low.

`python -m bench.gaps MODEL … --out FILE` plans some of the networks, and adds their
rows to those that a file has, after each.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

from bench.machine import describe
from bench.table import render
from mucudnn.ir.optimizers import Momentum
from mucudnn.models import get_model
from mucudnn.passes.estimate import estimate
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.planning.plan_step import (
    minimum_budget,
    plan_step,
    try_technique,
    unbounded,
)
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.scheduling.step_plan import StepPlan

DEVICE = "h200"
MODELS = {
    "alexnet": 512,
    "densenet40": 256,
    "googlenet": 256,
    "inception_v4": 64,
    "resnet18": 256,
    "resnet50": 256,
    "resnet101": 128,
    "unet2d": 16,
    "unet2d_bn": 16,
    "vgg16": 256,
}
"""Network -> batch."""

RIVALS = (
    "checkpoint_blocks",
    "checkpoint_some_blocks",
    "selective_checkpointing",
    "offload_checkpoints",
    "knapsack",
)
"""Policies of which the slowdown is given, too; null where they do not fit."""

SHARES = (0.05, 0.15, 0.3, 0.5, 0.7)
"""Of the bytes between the least budget and what a step takes without any."""


def run(models: tuple[str, ...] = tuple(MODELS)) -> dict[str, Any]:
    """Plan every step under every budget. Ready for JSON."""
    return _result([row for model in models for row in _rows(model, MODELS[model])])


def _result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"device": DEVICE, "median": median(r["gap"] for r in rows), "rows": rows}


def table(result: dict[str, Any]) -> str:
    """The result of `run` as text."""
    head = ("model", "batch", "budget_share", "slowdown", "gap", "planning_cpu_s")
    rows = [tuple(row[key] for key in head) for row in result["rows"]]
    return f"{render(head, rows)}\ngap, median: {result['median']:.1%}"


def page_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of `docs/results.md`."""
    shares = " | ".join(f"{share:.0%}".replace("%", " %") for share in SHARES)
    yield f"| network, batch | {shares} | best rival at 30, 50 % |"
    yield f"|{'---|' * (2 + len(SHARES))}"
    for model, batch in MODELS.items():
        rows = [row for row in result["rows"] if row["model"] == model]
        if not rows:
            continue
        cells = [f"{row['slowdown']:.2f} ({100 * row['gap']:.0f} %)" for row in rows]
        best = (
            min((time for time in row["rivals"].values() if time), default=None)
            for row in rows
            if row["budget_share"] in (0.3, 0.5)
        )
        rivals = ", ".join("–" if time is None else f"{time:.2f}" for time in best)
        yield f"| {model}, {batch} | {' | '.join(cells)} | {rivals} |"
    yield ""
    gaps = [row["gap"] for row in result["rows"]]
    seconds = [row["planning_cpu_s"] for row in result["rows"]]
    yield (
        f"The distance from the bound is {100 * median(gaps):.1f} % in the median and "
        f"{100 * max(gaps):.0f} % at most."
    )
    yield (
        f"Planning a step took {median(seconds):.0f} s of CPU time in the median and "
        f"{max(seconds):.0f} s at most."
    )
    made = result["machine"]["measured_at"][:10]
    yield f"`python -m bench.gaps`, {made}."


def _rows(model: str, batch: int) -> list[dict[str, Any]]:
    graph = with_updates(training_graph(get_model(model)(batch)), Momentum())
    profile = estimate(graph, DEVICE)
    free, request = unbounded(graph, profile), StepRequest(graph, profile)
    least = minimum_budget(request)
    found = []
    for share in SHARES:
        budget = least + int(share * (free.peak_bytes - least))
        begun = process_time()
        plan = plan_step(request.within(budget))
        seconds = process_time() - begun
        found.append(
            {
                "model": model,
                "batch": batch,
                "budget_share": share,
                "budget": budget,
                "slowdown": plan.prediction.step_ms / free.prediction.step_ms,
                "gap": plan.gap or 0.0,
                "scheduler": plan.scheduler,
                "planning_cpu_s": seconds,
                "rivals": {
                    policy: _slowdown(
                        replace(request, policy=policy, budget=budget), free
                    )
                    for policy in RIVALS
                },
            }
        )
    return found


def _slowdown(request: StepRequest, free: StepPlan) -> float | None:
    """Return the slowdown of a policy under a budget; None if it does not fit."""
    step_ms = try_technique(request).step_ms
    return None if step_ms is None else step_ms / free.prediction.step_ms


def main(arguments: list[str]) -> int:
    """Plan some networks, one after the other, into a file; 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.gaps", description=__doc__)
    parser.add_argument("models", nargs="+", metavar="MODEL", choices=MODELS)
    parser.add_argument("--out", type=Path, required=True, help="JSON, added to")
    asked = parser.parse_args(arguments)
    command = " ".join(["python -m bench.gaps", *asked.models])
    rows = json.loads(asked.out.read_text())["rows"] if asked.out.exists() else []
    for model in dict.fromkeys(asked.models):
        others = [row for row in rows if row["model"] != model]
        rows = [*others, *_rows(model, MODELS[model])]
        result = {"machine": {**describe(), "command": command}, **_result(rows)}
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
        print(table(_result([row for row in rows if row["model"] == model])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
