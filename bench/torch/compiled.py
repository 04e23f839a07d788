"""Compiled training steps in turns: `torch.compile`, its budgets, and ours.

Each rival is compiled from code of its own: one compilation a network and budget. Ours
is planned for the peaks that PyTorch's budgets really have, from one compilation. Two
of PyTorch's settings, under which most networks need less memory or time on a CPU, are
compared as ways of their own, `tuned`. Times are the process's own (all threads), since
others may be at work beside.
"""

import copy
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

import torch
from torch._functorch import config
from torch._inductor import config as inductor_config

import mucudnn.torch as mt
from bench.torch import zoo
from bench.torch.peak import real_peak
from mucudnn.errors import PlanningError

__all__ = ["NETWORKS", "measure", "prepare"]

_KNOB = (1.0, 0.5, 0.2, 0.1, 0.0)
_RATE = 1e-3
_MIB = 1 << 20
_FEWEST_ROUNDS = 5

_SIZES = zoo.GPTConfig(layers=4, width=128, heads=4, dropout=0.0)
_TINY = zoo.GPTConfig(layers=1, width=32, heads=2, length=16, dropout=0.0)

NETWORKS: Mapping[str, Callable[[], zoo.Case]] = {
    "gpt": lambda: zoo.gpt(8, _SIZES),
    "regnet_y_400mf": lambda: zoo.classifier("regnet_y_400mf", 8, 96),
    "unet": lambda: zoo.unet(4, 96, 16),
    "llama": lambda: zoo.llama(8, _SIZES),
    "resnet18": lambda: zoo.classifier("resnet18", 8, 64),
    "bert": lambda: zoo.bert(8, _SIZES),
    "vit": lambda: zoo.transformer(8, 64, 4, 128, 0.0),
    "mobilenet_v3_small": lambda: zoo.classifier("mobilenet_v3_small", 16, 96),
    "tiny": lambda: zoo.llama(2, _TINY),
}
"""Networks; `tiny` shows whether everything works."""


class _Rival:
    """A way to train, with a model of its own.

    Args:
        way: The method.
        setting: Its budget; empty if it has none.
        case: The network, which is copied.
    """

    def __init__(self, way: str, setting: str, case: zoo.Case) -> None:
        self.way, self.setting = way, setting
        self.model = copy.deepcopy(case.model)
        self.loss_fn, self.batch = case.loss_fn, case.batch
        self.optimizer = torch.optim.SGD(self.model.parameters(), _RATE)
        self.step: Callable[[], torch.Tensor]
        self.plan: Any = None
        self.prepared_s = 0.0
        self.same_bits = True
        self.peak_bytes = 0
        self.times: list[float] = []

    def compile(self, budget: float = 1.0, *, update: bool = False) -> "_Rival":
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

    def planned(self, budget: float | None, cache: Path | None) -> "_Rival":
        """Train by a planned step."""
        step = mt.train_step(
            self.model,
            self.loss_fn,
            self.optimizer,
            budget=budget,
            inductor=True,
            cache=cache,
        )
        self.step = lambda: step(*self.batch)
        self._prepared()
        self.plan = step.plan
        return self

    def _prepared(self) -> "_Rival":
        torch.manual_seed(1)  # dropout draws the same numbers in every way
        start = perf_counter()
        self.losses = [self.step().item() for _ in range(3)]
        self.prepared_s = perf_counter() - start
        self.state = [
            t.detach().clone()
            for t in (*self.model.parameters(), *self.model.buffers())
        ]
        self.peak_bytes = real_peak(self.step)
        print(
            f"  {self.way} {self.setting}: {self.peak_bytes / _MIB:.2f} MiB, "
            f"{self.prepared_s:.1f} s",
            file=sys.stderr,
            flush=True,
        )
        return self

    def compare(self, other: "_Rival") -> None:
        """Note whether results have the bits of another rival's."""
        self.same_bits = self.losses == other.losses and all(
            map(torch.equal, self.state, other.state)
        )

    def row(self, first: "_Rival", resident: int) -> dict[str, Any]:
        """Return what was measured; bytes are those beyond parameters and buffers."""
        low, middle, high = quantiles(self.times, n=4)
        found = {
            "way": self.way,
            "setting": self.setting,
            "ms": middle,
            "low_ms": low,
            "high_ms": high,
            "cost": middle / quantiles(first.times, n=4)[1],
            "peak_bytes": self.peak_bytes,
            "planned_bytes": None,
            "prepared_s": self.prepared_s,
            "same_bits": self.same_bits,
        }
        if self.plan is not None:
            found |= {
                "planned_bytes": self.plan.peak_bytes - resident,
                "kernels": self.plan.kernels,
                "again": sum(self.plan.recomputed.values()),
                "leaving": len(self.plan.leaving),
                "predicted_ms": self.plan.plan.prediction.step_ms,
            }
        return found


def _compiled(case: zoo.Case) -> list[_Rival]:
    """Return PyTorch's ways, `torch.compile` first."""
    rivals = [_Rival("torch.compile", "", case).compile()]
    rivals += [
        _Rival("activation_memory_budget", f"{budget:g}", case).compile(budget)
        for budget in _KNOB[1:]
    ]
    rivals.append(_Rival("torch.compile of the update", "", case).compile(update=True))
    return rivals


@contextmanager
def _tuned() -> Iterator[None]:
    """Set what makes compiled steps faster or smaller on a CPU, with other bits.

    Inductor stores images channels last only in a graph with a forward convolution,
    which the backward half lacks. Its partitioner saves what a matrix product or a
    convolution reads in the backward pass, even where it is cheap to recompute.
    """
    with (
        inductor_config.patch(force_layout_optimization=True),
        config.patch(ban_recompute_materialized_backward=False),
    ):
        yield


def _case(name: str) -> zoo.Case:
    torch.manual_seed(0)
    return NETWORKS[name]()


def prepare(name: str) -> None:
    """Compile all that a network's comparison needs into Inductor's cache on disk.

    No times are taken or remembered: other processes may be at work.
    """
    case = _case(name)
    _compiled(case)
    _Rival("ours", "no limit", case).planned(None, None)
    with _tuned():
        _Rival("torch.compile, tuned", "", case).compile()
        _Rival("ours, tuned", "no limit", case).planned(None, None)


def measure(name: str, rounds: int, seconds: float) -> dict[str, Any]:
    """Compare all ways to train a network. Ready for JSON.

    Args:
        name: The network.
        rounds: Most steps that are timed of each way, in turns.
        seconds: About how long these may take; five rounds are always run.
    """
    case, load, start = _case(name), os.getloadavg()[0], perf_counter()
    with TemporaryDirectory() as folder:
        cache = Path(folder)
        rivals = _compiled(case)
        free = _Rival("ours", "no limit", case).planned(None, cache)
        resident = free.plan.resident_bytes
        least = _least(case, cache) - resident
        asked = {rival.peak_bytes for rival in rivals}
        lowest = min(asked)
        ours = [free]
        # A curve below what PyTorch reaches, through half of it, to near the least.
        below = 3 * lowest // 4, lowest // 2, least + (lowest - least) // 20
        asked |= {beyond for beyond in below if beyond >= least}
        for beyond in sorted(asked, reverse=True):
            if beyond >= least:
                rival = _Rival("ours", str(beyond), case)
                ours.append(rival.planned(resident + beyond, cache))
        with _tuned():
            tuned = [_Rival("torch.compile, tuned", "", case).compile()]
            for limit in (None, lowest, lowest // 2):
                rival = _Rival("ours, tuned", str(limit or "no limit"), case)
                with suppress(PlanningError):
                    budget = None if limit is None else resident + limit
                    tuned.append(rival.planned(budget, cache))
    for equal in ([*rivals, *ours], tuned):
        for rival in equal:
            rival.compare(equal[0])
    every = (*rivals, *ours, *tuned)
    prepared_s = perf_counter() - start
    _take_turns(every, rounds, seconds)
    return {
        "model": name,
        "batch": [list(t.shape) for t in case.batch],
        "load": [load, os.getloadavg()[0]],
        "rounds": len(every[0].times),
        "least_bytes": least,
        "prepared_s": prepared_s,
        "rows": [rival.row(rivals[0], resident) for rival in every],
    }


def _take_turns(rivals: Sequence[_Rival], rounds: int, seconds: float) -> None:
    """Time a step of each, again and again; another one begins every round."""
    end = perf_counter() + seconds
    for i in range(rounds):
        if i >= _FEWEST_ROUNDS and perf_counter() > end:
            return
        at = i % len(rivals)
        for rival in (*rivals[at:], *rivals[:at]):
            start = process_time()
            rival.step()
            rival.times.append(1e3 * (process_time() - start))


def _least(case: zoo.Case, cache: Path) -> int:
    """Return the least budget of ours in bytes."""
    try:
        _Rival("ours", "least", case).planned(1024, cache)
    except PlanningError as e:
        return e.least_bytes or 0
    raise RuntimeError("a step fits into a kilobyte")
