"""One network, one device: every technique's speed against its budget, and the bound.

ResNet-50 with 256 images in bfloat16, channels last, on an H200 as its published
figures describe it: estimates of placed steps, to compare techniques. `python -m bench
front --out DIR` writes `front.json`; `python -m bench.front front.json front.svg` draws
it.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import process_time
from typing import Any

from bench.memory_picture import framed
from bench.table import render
from mucudnn.ir.sizes import format_bytes
from mucudnn.report.memory_charts import Series, speed_chart
from mucudnn.studies.memory import study_memory
from mucudnn.studies.memory_results import StepSpec

__all__ = ["run", "table"]

_SPEC = StepSpec(
    model="resnet50", batch=256, device="h200", precision="bfloat16", layout="NHWC"
)
_BUDGETS_GIB = (11.0, 8.0, 6.0, 5.0, 4.0, 3.0, 2.0)
_POLICIES = ("planned", "superneurons", "superneurons_memory", "vdnn_all", "vdnn_dyn")
_BOUND = "no plan is faster"
_WIDTH, _HEIGHT = 1000.0, 380.0


def run() -> dict[str, Any]:
    """Plan everything. Ready for JSON."""
    start = process_time()
    points = []
    for gib in _BUDGETS_GIB:
        nbytes = int(gib * (1 << 30))
        study = study_memory(_SPEC, policies=_POLICIES, budget=nbytes, split="auto")
        found = {t.policy: study.slowdown(t) for t in study.techniques}
        found[_BOUND] = study.least_ms[nbytes] / study.unbounded_ms
        points += [
            {"policy": policy, "budget_bytes": nbytes, "slowdown": slowdown}
            for policy, slowdown in found.items()
        ]
    return {
        "model": _SPEC.title,
        "batch": _SPEC.batch,
        "device": _SPEC.device,
        "precision": _SPEC.precision,
        "layout": _SPEC.layout,
        "unbounded_bytes": study.unbounded.peak_bytes,
        "planning_cpu_s": process_time() - start,
        "points": points,
    }


def table(result: Mapping[str, Any]) -> str:
    """A line a budget and technique."""
    rows = [
        (
            format_bytes(point["budget_bytes"]),
            point["policy"],
            "-" if point["slowdown"] is None else f"{point['slowdown']:.3f}",
        )
        for point in sorted(result["points"], key=lambda p: -p["budget_bytes"])
    ]
    return render(("budget", "technique", "slowdown"), rows)


def picture(result: Mapping[str, Any]) -> str:
    """The same as a drawing of its own."""
    chart = speed_chart(list(_series(result)), width=_WIDTH, height=_HEIGHT)
    kind = f", {result['precision']}" if result.get("precision") else ""
    title = f"{result['model']}, batch {result['batch']}{kind}, {result['device']}"
    return framed(title, chart, _WIDTH, _HEIGHT)


def _series(result: Mapping[str, Any]) -> Iterator[Series]:
    points: dict[str, list[tuple[int, float]]] = {}
    for point in result["points"]:
        if point["slowdown"]:
            one = (point["budget_bytes"], 1 / point["slowdown"])
            points.setdefault(point["policy"], []).append(one)
    for policy, found in points.items():
        yield Series(policy, tuple(found), strong=policy.startswith("planned"))


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(picture(json.loads(source.read_text())), encoding="utf-8")
