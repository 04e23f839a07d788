"""A mini-batch on unequal devices: what planned shares bring, and what planning takes.

Times of devices are estimates from published figures; how long anybody waits is counted
from them and from the shares, by no clock. The paper that trains ResNet-18 on unequal
GPUs (Oyama et al., CLUSTER 2018) publishes one figure in its abstract, 2.20 times one
GPU, without the GPUs' own times: it stands beside forecasts for pairs of its GPUs.
"""

import random
import time
from typing import Any

from bench import fleet_ranks
from bench.table import render
from bench.torch import ranks
from mucudnn.ir.fleet import AllReduce, Fleet, Rank, StepPoint, StepTable
from mucudnn.passes.load_balancing import equal_shares, split_batch
from mucudnn.studies.fleet import study_fleet
from mucudnn.studies.memory_results import StepSpec

__all__ = ["run", "table"]

PUBLISHED = 2.20
NOTE = (
    "of the paper's abstract, for ResNet-18; the GPUs' own times are not published, so "
    "the figure cannot be derived, and forecasts beside it are from published figures "
    "of the GPUs"
)
BATCH = 256
FLEETS = (
    ("resnet18", ("k80", "p100")),
    ("resnet18", ("2xk80", "p100")),
    ("resnet18", ("p100", "v100_nvlink")),
    ("resnet18", ("k80", "v100_nvlink")),
    ("resnet18", ("k80", "p100", "v100_nvlink")),
    ("resnet18", ("a100", "2xh100", "rtx4090")),
    ("unet2d_bn", ("k80", "p100")),
)
RANKS, KINDS, LARGE_BATCH = 1024, (4, 1024), 65_536
LEAST_FALL = 0.8
TRAINED = (("resnet18", 2.0), ("unet", 3.0))
CLOSE = 1e-9
"""Of losses in double precision: the order of sums, no more."""


def run() -> dict[str, Any]:
    """Forecast, count and time. Ready for JSON."""
    fleets = [_forecast(model, devices) for model, devices in FLEETS]
    trained = []
    if fleet_ranks.mpiexec() is not None:
        trained = [fleet_ranks.run(name, slow) for name, slow in TRAINED]
    if ranks.available():
        trained += [ranks.run(name, slow) for name, slow in TRAINED]
    return {
        "batch": BATCH,
        "published_over_one_gpu": PUBLISHED,
        "published_note": NOTE,
        "fleets": fleets,
        "planning": [_planning(kinds) for kinds in KINDS],
        "trained": trained,
        "failures": [
            *(
                f"{found['model']} over {found['over']}: losses are "
                f"{found['losses_apart']:.1e} apart, idle time falls by "
                f"{found['idle_fall']:.1%}"
                for found in trained
                if found["losses_apart"] > CLOSE or found["idle_fall"] < LEAST_FALL
            ),
        ]
        + [
            f"{fleet['model']} on {fleet['devices']}: idle time falls by "
            f"{fleet['idle_fall']:.1%} only"
            for fleet in fleets
            if fleet["idle_fall"] < LEAST_FALL
        ],
    }


def table(result: dict[str, Any]) -> str:
    """The result of `run` as text."""
    header = (
        *("network", "devices", "samples", "step ms", "x equal", "x by speed"),
        *("x fastest", "x slowest", "to bound", "idle equal ms", "idle planned ms"),
    )
    rows = [
        (
            *(f["model"], f["devices"], "+".join(map(str, f["samples"]))),
            *(f["planned_ms"], f["over_equal"], f["over_proportional"]),
            *(f["over_fastest"], f["over_slowest"], f["to_bound"]),
            *(f["idle_equal_ms"], f["idle_planned_ms"]),
        )
        for f in result["fleets"]
    ]
    return "\n".join(
        (
            render(header, rows),
            f"published for ResNet-18 on a heterogeneous cluster, over a single GPU: "
            f"{result['published_over_one_gpu']:.2f}",
            *(
                f"{planning['ranks']} ranks of {planning['kinds']} kinds, batch "
                f"{planning['batch']:,}: {planning['cpu_s']:.2f} s of CPU time"
                for planning in result["planning"]
            ),
            *map(_trained_line, result["trained"]),
        )
    )


def _trained_line(found: dict[str, Any]) -> str:
    return (
        f"{found['model']} trained over {found['over']}, one rank "
        f"{found['slow']:g} times as slow: "
        f"{'+'.join(map(str, found['samples']))} samples, losses "
        f"{found['losses_apart']:.1e} from one process's; the fast rank waits "
        f"{found['idle_planned_ms']:.3g} instead of {found['idle_equal_ms']:.3g} ms"
    )


def _forecast(model: str, devices: tuple[str, ...]) -> dict[str, Any]:
    """One fleet; idle time is that of all devices but the slowest with equal shares."""
    study = study_fleet(StepSpec(model=model, batch=BATCH), devices)
    plan, equal = study.plan, equal_shares(study.fleet, BATCH)
    alone = [ms for ms in study.alone if ms is not None]
    slowest = max(range(len(equal.shares)), key=lambda i: equal.shares[i].time_ms)
    fast = [i for i in range(len(equal.shares)) if i != slowest]
    before = sum(equal.idle_ms[i] for i in fast)
    after = sum(plan.idle_ms[i] for i in fast)
    return {
        "model": model,
        "devices": ",".join(devices),
        "samples": list(plan.samples),
        "planned_ms": plan.step_ms,
        "over_equal": study.speedup(study.equal),
        "over_proportional": study.speedup(study.proportional),
        "over_fastest": min(alone) / plan.step_ms,
        "over_slowest": max(alone) / plan.step_ms,
        "to_bound": plan.step_ms / study.bound_ms,
        "idle_equal_ms": before,
        "idle_planned_ms": after,
        "idle_fall": 1 - after / before,
        "all_reduce_ms": plan.all_reduce_ms,
        "sources": dict(study.sources),
    }


def _planning(number: int) -> dict[str, Any]:
    rng = random.Random(0)
    kinds = [(rng.uniform(0.3, 3), rng.uniform(0.1, 2)) for _ in range(number)]
    members = []
    for i in range(RANKS):
        fixed, each = kinds[i % number]
        points = tuple(StepPoint(n, fixed + each * n) for n in (1, 64, 512))
        members.append(Rank(f"rank {i}", StepTable(f"kind {i % number}", points)))
    fleet = Fleet(tuple(members), AllReduce(measured_ms=3.0))
    began = time.process_time()
    plan = split_batch(fleet, LARGE_BATCH)
    return {
        "ranks": RANKS,
        "kinds": number,
        "batch": LARGE_BATCH,
        "cpu_s": time.process_time() - began,
        "step_ms": plan.step_ms,
    }
