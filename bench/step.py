"""Training steps beside PyTorch's, network by network, in one run.

Forward, backward and momentum update of the same layers, batch 16. The two take turns,
with a pause before each so that the other's threads have gone to sleep. Convolutions
are planned under 64 MiB before anything is timed. Where OpenBLAS is pinned to kernels
narrower than the processor by `OPENBLAS_CORETYPE`, which PyTorch does not obey, the
variable is removed. Beside the ratio of medians stand that of the fastest steps and of
the processor's time, which other work on the machine disturbs less; a load far above
the threads means that there was some.
"""

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from bench.table import render
from mucudnn.runtime.tuning.timing import StoppingRule

__all__ = ["run", "table"]

_NETWORKS = (("alexnet_owt", 224), ("resnet18", 224), ("unet2d", 64))
_BATCH, _ROUNDS = 16, 5
_PAUSE_S = 0.05
_BAR = 1.0
_PIN = "OPENBLAS_CORETYPE"
_RULE = StoppingRule(min_samples=2, max_samples=7, budget_ms=60.0)


def run() -> dict[str, Any]:
    """One row a network, measured in a child process."""
    environment = {k: v for k, v in os.environ.items() if k != _PIN}
    child = subprocess.run(
        [sys.executable, "-m", "bench.step"],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return json.loads(child.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def table(result: dict[str, Any]) -> str:
    """Medians in ms, and where our time goes."""
    header = (
        *("network", "image", "ours ms", "torch ms", "ratio", "of the fastest"),
        *("of CPU time", "overhead %", "load"),
    )
    rows = [
        (
            row["network"],
            row["image"],
            row["ours_ms"],
            row["torch_ms"],
            row["ratio"],
            row["best_ratio"],
            row["cpu_ratio"],
            row["overhead_percent"],
            row["load"],
        )
        for row in result["rows"]
    ]
    parts = [
        f"{render(header, rows)}\nmedians of {result['rounds']} steps of batch "
        f"{result['batch']}, {result['threads']} threads each; ratios' geometric mean "
        f"{result['geomean']:.2f}, bar {result['bar']:.1f}"
    ]
    for row in result["rows"]:
        ops = [(op["op"], op["nodes"], op["ms"], op["share"]) for op in row["ops"]]
        slowest = ", ".join(op["op"] for op in row["ops"][:3])
        columns = ("operation", "nodes", "ms", "share %")
        parts.append(f"{row['network']}: most in {slowest}\n{render(columns, ops)}")
    return "\n\n".join(parts)


def _measure() -> dict[str, Any]:
    import torch
    from threadpoolctl import threadpool_info

    from mucudnn.backends.cpu.threads import Workers

    threads = Workers().count
    torch.set_num_threads(threads)
    rows = []
    for name, image in _NETWORKS:
        rows.append(_one(name, image))
        print(f"  {name} {rows[-1]['ratio']:.2f}", file=sys.stderr, flush=True)
    ratios = [row["ratio"] for row in rows]
    blas = next(i for i in threadpool_info() if i["user_api"] == "blas")
    return {
        "blas": f"{blas['internal_api']} {blas['version']} {blas['architecture']}",
        "bar": _BAR,
        "batch": _BATCH,
        "rounds": _ROUNDS,
        "threads": threads,
        "geomean": math.exp(statistics.fmean(map(math.log, ratios))),
        "worst": max(ratios),
        "rows": rows,
    }


def _one(name: str, image: int) -> dict[str, Any]:
    import numpy as np

    from bench.step_torch import step
    from mucudnn.ir.optimizers import Momentum
    from mucudnn.models import get_model
    from mucudnn.runtime.training.trainer import Trainer
    from mucudnn.runtime.tuning.tuner import Tuner

    graph = get_model(name)(_BATCH, image=image)
    rng = np.random.default_rng(0)
    images = rng.standard_normal(graph.tensors["image"].shape, np.float32)
    label = graph.tensors["label"].shape
    labels = rng.integers(0, 2, label)
    began = time.perf_counter()
    trainer = Trainer(
        graph,
        tuner=Tuner(backend="cpu", rule=_RULE, cache=None),
        optimizer=Momentum(),
        learning_rate=lambda step: 1e-3,
    )
    planning_s = time.perf_counter() - began
    rivals: dict[str, Callable[[], object]] = {
        "ours": lambda: trainer.step(images, labels),
        "torch": step(name, images, labels),
    }
    samples: dict[str, list[float]] = {rival: [] for rival in rivals}
    busy: dict[str, list[float]] = {rival: [] for rival in rivals}
    for turn in range(_ROUNDS + 1):
        for rival, fn in rivals.items():
            time.sleep(_PAUSE_S)
            ms, cpu_ms = _time(fn)
            if turn:
                samples[rival].append(ms)
                busy[rival].append(cpu_ms)
    medians = {rival: statistics.median(times) for rival, times in samples.items()}
    cpus = {rival: statistics.median(times) for rival, times in busy.items()}
    nodes, whole_ms = trainer.profile(images, labels)
    kernels_ms = sum(nodes.values())
    return {
        "network": name,
        "image": image,
        "planning_s": planning_s,
        "ours_ms": medians["ours"],
        "torch_ms": medians["torch"],
        "ratio": medians["ours"] / medians["torch"],
        "best_ratio": min(samples["ours"]) / min(samples["torch"]),
        "cpu_ms": cpus,
        "cpu_ratio": cpus["ours"] / cpus["torch"],
        "load": os.getloadavg()[0],
        "spread_ms": {rival: (min(s), max(s)) for rival, s in samples.items()},
        "peak_bytes": trainer.peak_bytes,
        "overhead_percent": 100 * (whole_ms - kernels_ms) / kernels_ms,
        "ops": _by_operation(trainer.graph, nodes),
    }


def _by_operation(graph: Any, nodes: dict[str, float]) -> list[dict[str, Any]]:
    """Where the time goes, most first; convolutions by direction."""
    times: dict[str, list[float]] = defaultdict(list)
    for node in graph.nodes:
        if node.name in nodes:
            op = node.op
            if op == "conv":
                op = f"conv {node.attrs['problem'].direction.value}"
            times[op].append(nodes[node.name])
    total = sum(map(sum, times.values()))
    rows = [
        {"op": op, "nodes": len(ms), "ms": sum(ms), "share": 100 * sum(ms) / total}
        for op, ms in times.items()
    ]
    return sorted(rows, key=lambda row: -row["ms"])


def _time(fn: Callable[[], object]) -> tuple[float, float]:
    """Its ms, and those of the processor in all threads."""
    start, begun = time.perf_counter(), time.process_time()
    fn()
    return (time.perf_counter() - start) * 1e3, (time.process_time() - begun) * 1e3


if __name__ == "__main__":
    print(json.dumps(_measure()))
