"""Speed against budget: every policy, six networks, two devices, as ratios.

Times are estimates from published figures of the devices, so only ratios are kept: the
speed under a budget over the speed without one.
"""

from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

from bench.table import render
from mucudnn.ir.sizes import format_bytes
from mucudnn.passes.residency import PLANNED
from mucudnn.studies.memory import study_memory
from mucudnn.studies.memory_results import MemoryStudy, StepSpec

__all__ = ["BATCHES", "DEVICES", "run", "table"]

BATCHES = {
    "alexnet": 256,
    "vgg16": 128,
    "resnet50": 256,
    "inception_v4": 64,
    "densenet121": 128,
    "unet2d": 16,
}
"""Network -> images in a step."""

DEVICES = ("h200", "p100")
POLICIES = (
    *(PLANNED, "keep_all", "vdnn_conv", "vdnn_all", "vdnn_dyn"),
    *("superneurons", "superneurons_memory", "lru", "cost_based", "paging"),
)
_PLENTY = 1 << 50


def run() -> dict[str, Any]:
    """Plan everything. Ready for JSON."""
    return {"steps": [_step(m, d) for m in BATCHES for d in DEVICES]}


def table(result: Mapping[str, Any]) -> str:
    """Our speed under each budget, beside that of the best other policy."""
    rows = []
    for step in result["steps"]:
        for point in step["budgets"]:
            speeds = {p: s for p, s in point["speed"].items() if s is not None}
            ours = speeds.pop(PLANNED, None)
            other = max(speeds, key=speeds.__getitem__, default=None)
            rows.append(
                (
                    step["model"],
                    step["device"],
                    format_bytes(point["budget_bytes"]),
                    f"{point['share']:.0%}",
                    _percent(ours),
                    _percent(None if other is None else speeds[other]),
                    other or "nothing fits",
                )
            )
    header = ("model", "device", "budget", "share", PLANNED, "best other", "which")
    return render(header, rows)


def _percent(speed: float | None) -> str:
    return "-" if speed is None else f"{speed:.1%}"


def _step(model: str, device: str) -> dict[str, Any]:
    spec = StepSpec(model=model, batch=BATCHES[model], device=device)
    start = perf_counter()
    study = study_memory(spec, policies=POLICIES, budget=_PLENTY, curve=True)
    return {
        "model": model,
        "batch": spec.batch,
        "image": list(study.image),
        "device": device,
        "figures": dict(study.figures),
        "unbounded_bytes": study.unbounded.peak_bytes,
        "minimum_bytes": study.minimum,
        "minimum_bytes_by_policy": _least(study),
        "budgets": _budgets(study),
        "all_plans_s": perf_counter() - start,
    }


def _least(study: MemoryStudy) -> dict[str, int]:
    """What the policies that do not fit every budget need at the least."""
    return {t.policy: t.peak_bytes for t in study.curve if not t.fits}


def _most_speed(study: MemoryStudy, budget: int) -> float | None:
    """The speed that no plan within a budget exceeds."""
    least = study.least_ms.get(budget)
    return None if least is None else study.unbounded_ms / least


def _budgets(study: MemoryStudy) -> Sequence[Mapping[str, Any]]:
    found: dict[int, dict[str, float | None]] = {}
    for technique in study.curve:
        ms = technique.step_ms
        speed = None if ms is None else study.unbounded_ms / ms
        found.setdefault(technique.budget, {})[technique.policy] = speed
    return [
        {
            "budget_bytes": budget,
            "share": budget / study.unbounded.peak_bytes,
            "most_speed": _most_speed(study, budget),
            "speed": speeds,
        }
        for budget, speeds in found.items()
    ]
