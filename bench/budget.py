"""Real steps within budgets on this machine's CPU: predicted beside measured.

A network is profiled once. For every policy and budget the step is planned, placed and
run in turns with the step without a budget, so that both see the same machine; what
leaves is copied by threads to memory that plays the host. A share is of what the
unbounded step needs beside parameters and state.
"""

import statistics
import time
from typing import Any

import numpy as np

from bench.table import render
from mucudnn.errors import PlanningError
from mucudnn.ir.optimizers import Momentum
from mucudnn.models import get_model
from mucudnn.passes.graph.inplace import in_place
from mucudnn.passes.graph.training_step import StepRecipe, build_step
from mucudnn.passes.microbatch import BatchPolicy
from mucudnn.runtime.profiling.profiler import profile
from mucudnn.runtime.training.budget import MemoryBudget
from mucudnn.runtime.training.trainer import Trainer
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["run", "table"]

_CASES: tuple[tuple[str, int, int, BatchPolicy, tuple[float, ...]], ...] = (
    ("alexnet_owt", 16, 224, "powers_of_two", (0.9, 0.75)),
    ("resnet18", 16, 112, "powers_of_two", (0.5, 0.25)),
    ("resnet50", 8, 224, "undivided", (0.5, 1 / 7.5)),
)
"""Network, batch, image, micro-batch sizes to measure, shares."""

_POLICIES = ("planned", "superneurons", "lru")
_ROUNDS = 5


def run() -> dict[str, Any]:
    """One row a network, policy and share."""
    rows = []
    for name, batch, image, sizes, shares in _CASES:
        print(f"  {name}", flush=True)
        rows += _network(name, batch, image, sizes, shares)
    return {"rows": rows}


def table(result: dict[str, Any]) -> str:
    """Predicted and measured, in ms; speed as a share of the unbounded one."""
    header = (
        *("network", "policy", "share", "budget MiB", "peak MiB", "out MiB", "again"),
        *("predicted", "measured", "error %", "speed %"),
    )
    rows = [
        (
            f"{row['network']} {row['batch']}x{row['image']}",
            row["policy"],
            f"{row['share']:.2f}",
            f"{row['budget_bytes'] / 2**20:.0f}",
            *(
                (
                    f"{row['peak_bytes'] / 2**20:.0f}",
                    f"{row['offloaded_bytes'] / 2**20:.0f}",
                    row["recomputed_nodes"],
                    f"{row['predicted_ms']:.0f}",
                    f"{row['measured_ms']:.0f}",
                    f"{100 * (row['predicted_ms'] / row['measured_ms'] - 1):+.0f}",
                    f"{100 * row['unbounded_ms'] / row['measured_ms']:.0f}",
                )
                if row["fits"]
                else ("does not fit", *[""] * 6)
            ),
        )
        for row in result["rows"]
    ]
    return render(header, rows)


def _network(
    name: str, batch: int, image: int, sizes: BatchPolicy, shares: tuple[float, ...]
) -> list[dict[str, Any]]:
    tuner = Tuner(batch_policy=sizes, validate=False, cache=None)
    optimizer = Momentum(learning_rate=0.01)
    forward = get_model(name)(batch, image=image)
    (step,) = build_step(forward, StepRecipe(optimizer=optimizer)).steps
    measured = profile(tuner, in_place(step))
    unbounded = Trainer(forward, tuner=tuner, optimizer=optimizer)
    rng = np.random.default_rng(0)
    images = rng.standard_normal((batch, 3, image, image)).astype("f4")
    labels = rng.integers(0, 1000, batch)
    rows = []
    for share in shares:
        state = unbounded.state.nbytes
        nbytes = state + int(share * (unbounded.peak_bytes - state))
        for policy in _POLICIES:
            row = {
                "network": name,
                "batch": batch,
                "image": image,
                "policy": policy,
                "share": share,
                "budget_bytes": nbytes,
                "fits": True,
            }
            start = time.monotonic()
            try:
                bounded = Trainer(
                    forward,
                    tuner=tuner,
                    optimizer=optimizer,
                    budget=MemoryBudget(
                        nbytes=nbytes, policy=policy, measured=measured
                    ),
                )
            except PlanningError as e:
                rows.append(row | {"fits": False, "reason": str(e)})
                continue
            row["planning_s"] = time.monotonic() - start
            rows.append(row | _timed(bounded, unbounded, images, labels))
            bounded.close()
            print(f"    {policy} {share:.2f}", flush=True)
    return rows


def _timed(
    bounded: Trainer, unbounded: Trainer, images: Any, labels: Any
) -> dict[str, Any]:
    """Steps of both in turn; the first of each warms up."""
    samples: dict[Trainer, list[float]] = {bounded: [], unbounded: []}
    for _ in range(_ROUNDS + 1):
        for trainer, taken in samples.items():
            start = time.perf_counter()
            trainer.step(images, labels)
            taken.append(1e3 * (time.perf_counter() - start))
    if bounded.placed is None:
        raise TypeError("the step has no budget")
    plan = bounded.placed.plan
    return {
        "peak_bytes": bounded.peak_bytes,
        "offloaded_bytes": plan.prediction.out_bytes,
        "recomputed_nodes": plan.recomputed,
        "predicted_ms": plan.prediction.step_ms,
        "bound_ms": plan.prediction.bound_ms,
        "measured_ms": statistics.median(samples[bounded][1:]),
        "unbounded_ms": statistics.median(samples[unbounded][1:]),
    }
