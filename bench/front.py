"""Every technique's slowdown against its budget, on one device, and a bound.

ResNet-50 with 256 images in bfloat16, channels last, and in float32, and GPT-2 and a
Llama in bfloat16, on an H200 as its published figures describe it: estimates of steps
as they run, those of ResNet-50 with fixed offsets. Beside our planner are checkpointing
as it is written by hand, PyTorch's knapsack, SuperNeurons and vDNN.

`python -m bench.front --networks NAME … --out FILE` adds to what the file has,
after each budget, and `python -m bench.pages` writes the page's tables and picture.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import Any

from bench.machine import describe
from bench.memory_picture import framed, placed
from bench.table import render
from mucudnn.ir.sizes import format_bytes
from mucudnn.passes.planning.plan_step import DescribedStep
from mucudnn.report.memory_charts import Series, speed_chart
from mucudnn.studies.memory import IN_PARTS, study_memory
from mucudnn.studies.memory_results import StepSpec

DEVICE = "h200"
GIB = 1 << 30

POLICIES = {
    "planned": "planned",
    IN_PARTS: "planned, in parts",
    "checkpoint_blocks": "every block checkpointed",
    "checkpoint_some_blocks": "some blocks",
    "selective_checkpointing": "all but expensive operations",
    "offload_checkpoints": "checkpoints offloaded",
    "knapsack": "PyTorch's knapsack",
    "superneurons": "SuperNeurons",
    "vdnn_all": "vDNN",
}
"""Technique -> what the page calls it."""

BOUND = "lower bound"


@dataclass(frozen=True)
class Network:
    """A training step and its budgets."""

    title: str
    step: Callable[[], StepSpec | DescribedStep]
    budgets_gib: tuple[float, ...]


def resnet50() -> StepSpec:
    """Return ResNet-50's step with momentum."""
    return StepSpec(
        model="resnet50", batch=256, device=DEVICE, precision="bfloat16", layout="NHWC"
    )


def resnet50_float32() -> StepSpec:
    """Return the same step in float32 and PyTorch's default layout."""
    return StepSpec(model="resnet50", batch=256, device=DEVICE)


def gpt2() -> DescribedStep:
    """Return GPT-2's step with AdamW."""
    from bench.torch.zoo import GPTConfig, gpt

    return _captured(gpt, 8, GPTConfig(12, 768, 12, 1024, 50257, dropout=0.0))


def llama() -> DescribedStep:
    """Return the step of a Llama with AdamW."""
    from bench.torch.zoo import GPTConfig, llama

    return _captured(llama, 4, GPTConfig(18, 2048, 32, 2048, 32000, dropout=0.0))


def _captured(case: Callable[..., Any], batch: int, config: Any) -> DescribedStep:
    """Return a bfloat16 step as `mucudnn.torch.memory` captures it."""
    import torch

    import mucudnn.torch as mt

    with torch.device("meta"):
        made = case(batch, config)
    model = made.model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    return mt.memory(
        model, made.loss_fn, made.batch, optimizer, device=DEVICE
    ).described()


NETWORKS = {
    "resnet50": Network(
        "ResNet-50, 256 images, bfloat16, channels last",
        resnet50,
        (11, 8, 6, 5, 4, 3, 2),
    ),
    "gpt2": Network(
        "GPT-2 124M, 8 × 1,024 tokens, bfloat16", gpt2, (5, 4.5, 4, 3.5, 3.1)
    ),
    "llama": Network(
        "Llama, 1 billion parameters, 4 × 2,048 tokens, bfloat16",
        llama,
        (18, 14, 11, 9, 8),
    ),
    "resnet50_float32": Network(
        "ResNet-50, 256 images, float32",
        resnet50_float32,
        (16, 10.7, 8, 5.3, 4, 2.7),
    ),
}


def run(names: Sequence[str] = tuple(NETWORKS)) -> dict[str, Any]:
    """Plan everything. Ready for JSON."""
    networks = {name: list(_planned(name))[-1] for name in names}
    return {"device": DEVICE, "networks": networks}


def _planned(name: str) -> Iterator[dict[str, Any]]:
    """Yield what is known of a network after each of its budgets."""
    network, begun, points = NETWORKS[name], process_time(), []
    step = network.step()
    policies = [policy for policy in POLICIES if policy != IN_PARTS]
    for gib in network.budgets_gib:
        nbytes = int(gib * GIB)
        study = study_memory(step, policies=policies, budget=nbytes, split="auto")
        slowdowns = {t.policy: study.slowdown(t) for t in study.techniques}
        least_ms = study.least_ms.get(nbytes)
        slowdowns[BOUND] = None if least_ms is None else least_ms / study.unbounded_ms
        points.append({"budget_bytes": nbytes, "slowdown": slowdowns})
        yield {
            "title": network.title,
            "unbounded_bytes": study.unbounded.peak_bytes,
            "unbounded_ms": study.unbounded_ms,
            "planning_cpu_s": process_time() - begun,
            "points": points,
        }


def table(result: Mapping[str, Any]) -> str:
    """Return a line for each budget and technique."""
    rows = [
        (
            network["title"],
            format_bytes(point["budget_bytes"]),
            technique,
            "-" if slowdown is None else f"{slowdown:.3f}",
        )
        for network in result["networks"].values()
        for point in network["points"]
        for technique, slowdown in point["slowdown"].items()
    ]
    return render(("network", "budget", "technique", "slowdown"), rows)


def page_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tables of `docs/results.md`."""
    columns = {"planned": "planned", IN_PARTS: POLICIES[IN_PARTS], BOUND: BOUND}
    columns |= POLICIES
    for network in result["networks"].values():
        whole = network["unbounded_bytes"] / GIB
        yield f"**{network['title']}**, {whole:.1f} GiB without a budget:"
        yield ""
        yield f"| budget, GiB | {' | '.join(columns.values())} |"
        yield f"|{'---|' * (1 + len(columns))}"
        for point in network["points"]:
            times = (point["slowdown"][technique] for technique in columns)
            words = ("–" if time is None else f"{time:.2f}" for time in times)
            budget = point["budget_bytes"] / GIB
            yield f"| {budget:g} | {' | '.join(words)} |"
        yield ""
    made = result["machine"]["measured_at"][:10]
    yield f"`python -m bench.front`, {made}; –: the step does not fit."
    yield ""
    yield "![speed against budget, a curve for each technique](img/front.svg)"


_WIDTH, _HEIGHT, _HEAD = 1000.0, 380.0, 24.0


def picture(result: Mapping[str, Any]) -> str:
    """Draw speed against budget, network below network."""
    charts = []
    for i, network in enumerate(result["networks"].values()):
        chart = speed_chart(list(_series(network)), width=_WIDTH, height=_HEIGHT)
        top = i * (_HEAD + _HEIGHT)
        charts.append(placed(network["title"], chart, 0, top, (_WIDTH, _HEIGHT)))
    height = len(charts) * (_HEAD + _HEIGHT)
    return framed(f"Speed against budget on an {DEVICE}", charts, _WIDTH, height)


def _series(network: Mapping[str, Any]) -> Iterator[Series]:
    for technique, name in {BOUND: BOUND, **POLICIES}.items():
        points = tuple(
            (point["budget_bytes"], 1 / slowdown)
            for point in network["points"]
            if (slowdown := point["slowdown"][technique]) is not None
        )
        yield Series(name, points, strong=name.startswith("planned"))


def main() -> int:
    """Plan networks, one after the other, into a file; 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--networks", nargs="+", default=[*NETWORKS], choices=NETWORKS)
    parser.add_argument("--out", type=Path, help="JSON, added to")
    options = parser.parse_args()
    old = options.out and options.out.exists() and json.loads(options.out.read_text())
    networks = old["networks"] if old else {}
    for name in options.networks:
        for network in _planned(name):
            networks[name] = network
            ordered = {n: networks[n] for n in NETWORKS if n in networks}
            machine = {**describe(), "command": "python -m bench.front"}
            result = {"machine": machine, "device": DEVICE, "networks": ordered}
            if options.out is not None:
                options.out.write_text(json.dumps(result, indent=1) + "\n")
        print(table(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
