"""A training step's convolutions of whole networks, within one workspace limit."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.gpu.deepbench import record
from bench.gpu.job import RULE, Job, Report, read_json
from bench.gpu.work import network_layers
from bench.table import render
from mucudnn.ir.numerics import RowStatus
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.studies.convolutions import Comparison, compare
from mucudnn.suites import Layer

_RESULT = "models.json"
FILES = (_RESULT,)

_NETWORKS = ("alexnet", "resnet18")
_LIMIT = 64 << 20
_CHECKING_S = 10.0
"""For comparing the plans of one network, once all is measured."""


def run(job: Job) -> Report:
    """Measure what is missing; compare each network of which nothing is."""
    known: dict[str, Any] = read_json(job.out / _RESULT).get("networks", {})
    networks = {name: row for name, row in known.items() if row.get("complete")}
    with job.open_cache() as cache:
        tuner = Tuner(
            backend=job.backend, cache=cache, batch_policy="powers_of_two", rule=RULE
        )
        try:
            for name in _NETWORKS:
                if name not in networks:
                    networks[name] = _one(job, tuner, network_layers(job, name))
                    job.write(_RESULT, {"limit": _LIMIT, "networks": networks})
                    job.keep(lambda: record(job, cache))
        finally:
            tuner.close()
            job.keep(lambda: record(job, cache), now=True)
    complete = all(row["complete"] for row in networks.values())
    return Report(complete, (), _text(networks))


def _one(job: Job, tuner: Tuner, layers: Sequence[Layer]) -> dict[str, Any]:
    measured = 0
    for layer in layers:
        left = job.left_s - min(_CHECKING_S, job.left_s / 3)
        if left <= 0:
            break
        table = tuner.measure(layer.problem, time_limit_s=left)
        measured += not any(perf.status is RowStatus.LIMITED for perf in table.perfs)
    if measured < len(layers):
        return {"complete": False, "kernels": len(layers), "measured": measured}
    found = compare(
        tuner,
        layers,
        [_LIMIT],
        total_workspace=_LIMIT * len(layers),
        time_limit_s=max(1.0, job.left_s),
    )
    compared = all(o.choice is not None for r in found.layers for o in r.outcomes)
    return {
        "complete": compared,
        "kernels": len(layers),
        "measured": measured,
        **_sums(found),
        "comparison": found.to_json(),
    }


def _sums(found: Comparison) -> dict[str, Any]:
    """Sums over a step, a layer counted as often as the network has it.

    Only layers that all three ways can run are summed.
    """
    sums = {"undivided_ms": 0.0, "divided_ms": 0.0, "total_ms": 0.0}
    used, summed = 0, 0
    for layer in found.layers:
        per_kernel, shared = (outcome.choice for outcome in layer.outcomes)
        if per_kernel is None or shared is None or per_kernel.undivided_ms is None:
            continue
        summed += 1
        used += shared.plan.workspace
        sums["undivided_ms"] += layer.count * per_kernel.undivided_ms
        sums["divided_ms"] += layer.count * per_kernel.planned_ms
        sums["total_ms"] += layer.count * shared.planned_ms
    return {**sums, "summed": summed, "total_workspace_used": used}


def _text(networks: Mapping[str, Mapping[str, Any]]) -> str:
    names = ("kernels", "measured", "undivided_ms", "divided_ms", "total_ms")
    rows = [
        (name, *(row.get(column) for column in names)) for name, row in networks.items()
    ]
    header = ("network", "kernels", "measured", "undivided ms", "divided ms", "ILP ms")
    return render(header, rows)
