"""Compiled training steps in turns: `torch.compile`, its budgets, and ours.

Each rival is compiled from code of its own: one compilation a network and budget. Ours
is planned for the peaks that PyTorch's budgets really have, from one compilation. Times
are the process's own (all threads), since others may be at work beside.
"""

import copy
import os
import sys
from collections.abc import Callable, Mapping
from statistics import quantiles
from time import perf_counter, process_time
from typing import Any

import torch
from torch._functorch import config

from bench.table import render
from bench.torch import zoo
from bench.torch.peak import real_peak
from mucudnn.errors import PlanningError

__all__ = ["NETWORKS", "run", "table"]

KNOB = (1.0, 0.5, 0.2, 0.1, 0.0)
_RATE = 1e-3
_MIB = 1 << 20

_SIZES = zoo.GPTConfig(layers=4, width=128, heads=4, dropout=0.0)

NETWORKS: Mapping[str, Callable[[], zoo.Case]] = {
    "regnet_y_400mf": lambda: zoo.classifier("regnet_y_400mf", 8, 96),
    "unet": lambda: zoo.unet(4, 96, 16),
    "gpt": lambda: zoo.gpt(8, _SIZES),
    "llama": lambda: zoo.llama(8, _SIZES),
    "bert": lambda: zoo.bert(8, _SIZES),
    "vit": lambda: zoo.transformer(8, 64, 4, 128, 0.0),
    "resnet18": lambda: zoo.classifier("resnet18", 8, 64),
    "mobilenet_v3_small": lambda: zoo.classifier("mobilenet_v3_small", 16, 96),
}


def run(
    names: str = ",".join(NETWORKS), knob: tuple[float, ...] = KNOB, rounds: int = 15
) -> dict[str, Any]:
    """Measure networks one after another, in one thread. Ready for JSON."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows = [_network(name, knob, rounds) for name in names.split(",")]
    finally:
        torch.set_num_threads(before)
    return {"threads": 1, "rounds": rounds, "networks": rows}


def table(result: Mapping[str, Any]) -> str:
    """Print one table a network."""
    found = []
    for network in result["networks"]:
        rows = [
            (
                row["way"],
                f"{row['ms']:.1f}",
                f"{row['low_ms']:.1f}-{row['high_ms']:.1f}",
                f"{row['ratio']:.3f}",
                f"{row['peak_bytes'] / _MIB:.2f}",
                ""
                if row["planned_bytes"] is None
                else f"{row['planned_bytes'] / _MIB:.2f}",
                "" if row["again"] is None else f"{row['again']}/{row['leaving']}",
                "" if row["prepared_s"] is None else f"{row['prepared_s']:.1f}",
                "same" if row["same_bits"] else "differ",
            )
            for row in network["rows"]
        ]
        header = (
            *("way", "ms", "quartiles", "of compile"),
            *("MiB", "planned", "again/out", "s", "bits"),
        )
        load = " to ".join(f"{value:.1f}" for value in network["load"])
        found.append(f"{network['model']}, load {load}\n{render(header, rows)}")
    return "\n\n".join(found)


class _Rival:
    """A way to train, with a model of its own."""

    def __init__(self, way: str, case: zoo.Case) -> None:
        self.way = way
        self.model = copy.deepcopy(case.model)
        self.loss_fn, self.batch = case.loss_fn, case.batch
        self.optimizer = torch.optim.SGD(self.model.parameters(), _RATE)
        self.step: Callable[[], torch.Tensor]
        self.plan: Any = None
        self.prepared_s = 0.0
        self.same_bits = True
        self.peak_bytes = 0

    def compile(self, budget: float, *, update: bool = False) -> "_Rival":
        """Train by `torch.compile`, of code that no other rival shares.

        With `update`, the optimizer's step is compiled, too.
        """
        space = {"model": self.model, "loss_fn": self.loss_fn}
        exec("def loss_of(x, *y): return loss_fn(model(x), *y)", space)
        loss_of = torch.compile(space["loss_of"], fullgraph=True)
        stepped = self.optimizer.step
        if update:
            stepped = torch.compile(lambda: self.optimizer.step())

        def step() -> torch.Tensor:
            self.optimizer.zero_grad(set_to_none=True)
            loss = loss_of(*self.batch)
            loss.backward()
            stepped()
            found: torch.Tensor = loss.detach()
            return found

        self.step = step
        with config.patch(activation_memory_budget=budget):
            return self._prepared()

    def planned(self, budget: float | None, **options: Any) -> "_Rival":
        """Train by a planned step."""
        import mucudnn.torch as mt

        step = mt.train_step(
            self.model,
            self.loss_fn,
            self.optimizer,
            budget=budget,
            inductor=True,
            **options,
        )
        self.step = lambda: step(*self.batch)
        self._prepared()
        self.plan = step.plan
        return self

    def _prepared(self) -> "_Rival":
        start = perf_counter()
        self.losses = [self.step().item() for _ in range(3)]
        self.prepared_s = perf_counter() - start
        self.state = [
            t.detach().clone()
            for t in (*self.model.parameters(), *self.model.buffers())
        ]
        self.peak_bytes = real_peak(self.step)
        print(
            f"  {self.way}: {self.peak_bytes / _MIB:.2f} MiB, {self.prepared_s:.1f} s",
            file=sys.stderr,
            flush=True,
        )
        return self

    def compare(self, other: "_Rival") -> None:
        """Note whether results have the bits of another rival's."""
        self.same_bits = self.losses == other.losses and all(
            map(torch.equal, self.state, other.state)
        )


def _network(name: str, knob: tuple[float, ...], rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    case = NETWORKS[name]()
    load = os.getloadavg()[0]
    rivals = [
        _Rival(f"torch.compile, budget {budget:g}", case).compile(budget)
        for budget in knob
    ]
    first = rivals[0]
    both = "torch.compile of the update, too"
    rivals.append(_Rival(both, case).compile(1.0, update=True))
    free = _Rival("ours, no limit", case).planned(None)
    resident = free.plan.resident_bytes
    ours = [free]
    asked = sorted({rival.peak_bytes for rival in rivals}, reverse=True)
    least = _least(case)
    asked += [int(least - resident + 0.25 * (asked[-1] - least + resident))]
    for beyond in asked:
        try:
            way = f"ours, at most {beyond / _MIB:.2f} MiB"
            ours.append(_Rival(way, case).planned(resident + beyond))
        except PlanningError as e:
            print(f"  {beyond / _MIB:.2f} MiB: {e}", file=sys.stderr)
    for rival in (*rivals, *ours):
        rival.compare(first)
    times: dict[str, list[float]] = {r.way: [] for r in (*rivals, *ours)}
    for _ in range(rounds):
        for rival in (*rivals, *ours):
            start = process_time()
            rival.step()
            times[rival.way].append(1e3 * (process_time() - start))
    spread = {way: quantiles(found, n=4) for way, found in times.items()}
    return {
        "model": name,
        "load": [load, os.getloadavg()[0]],
        "least_bytes": least - resident,
        "rows": [
            {
                "way": r.way,
                "ms": spread[r.way][1],
                "low_ms": spread[r.way][0],
                "high_ms": spread[r.way][2],
                "ratio": spread[r.way][1] / spread[first.way][1],
                "peak_bytes": r.peak_bytes,
                "planned_bytes": r.plan and r.plan.peak_bytes - resident,
                "kernels": r.plan and r.plan.kernels,
                "again": r.plan and sum(r.plan.recomputed.values()),
                "leaving": r.plan and len(r.plan.leaving),
                "predicted_ms": r.plan and r.plan.plan.prediction.step_ms,
                "prepared_s": r.prepared_s,
                "same_bits": r.same_bits,
            }
            for r in (*rivals, *ours)
        ],
    }


def _least(case: zoo.Case) -> int:
    """Return the least budget of ours in bytes."""
    try:
        _Rival("", case).planned(1024)
    except PlanningError as e:
        return e.least_bytes or 0
    raise RuntimeError("a step fits into a kilobyte")
