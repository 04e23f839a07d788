"""One network: PyTorch's ways to save memory beside ours, in one run.

All are the same forward and backward pass of the same parameters. What each has in use
at most is told by the allocator's events; what it costs is predicted from one table of
node times, and measured: all take turns, one thread each.
"""

import math
import os
import statistics
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch._dynamo import config as dynamo_config

from bench.torch.nodes import EagerTimes, NodeTable
from bench.torch.peak import real_peak
from bench.torch.rivals import HostSaved, Partitioned, WithLoss, checkpointed
from bench.torch.zoo import Case
from mucudnn.errors import PlanningError
from mucudnn.torch import CompileBackend
from mucudnn.torch.plan_program import PlanOptions

KNOB = (1.0, 0.5, 0.2, 0.1, 0.0)
_SHARES = (0.5, 0.0)
"""Of ours: between the least budget and what is needed without one."""

_ROUNDS = 3


@dataclass
class _Way:
    """A way to compute gradients; `cost` is of every node once."""

    way: str
    setting: str
    loss: Callable[[], torch.Tensor]
    cost: float
    planned_bytes: int | None = None
    budget_bytes: int | None = None
    planning_s: float | None = None


class _Bench:
    """A case with all that is the same for everyone."""

    def __init__(self, name: str, case: Case) -> None:
        self.name, self.case = name, case
        self.module = WithLoss(case)
        self.table, self.eager = NodeTable(), EagerTimes()
        self._before = _copied(case.model.state_dict())
        self.wanted: dict[str, torch.Tensor] = {}

    def step(self, loss: Callable[[], torch.Tensor]) -> None:
        """Gradients, from none and from the same random numbers."""
        torch.manual_seed(1)
        self.case.model.zero_grad()
        loss().backward()

    def plain(self) -> torch.Tensor:
        """The loss in eager mode."""
        found: torch.Tensor = self.module(*self.case.batch)
        return found

    def outcome(self, loss: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gradients, and buffers, after one step from where all begin."""
        self.case.model.load_state_dict(self._before)
        self.step(loss)
        model = self.case.model
        found = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
        return _copied(found | dict(model.named_buffers()))

    def say(self, text: str) -> None:
        """Tell how far it is."""
        print(f"  {self.name}: {text}", file=sys.stderr, flush=True)


def compare(name: str, case: Case) -> dict[str, Any]:
    """All ways, measured. Ready for JSON."""
    bench = _Bench(name, case)
    load = os.getloadavg()[0]
    with dynamo_config.patch(recompile_limit=100, accumulated_recompile_limit=1000):
        torch._dynamo.reset()
        bench.wanted = bench.outcome(bench.plain)
        theirs = [_Way("eager", "", bench.plain, 1.0), *_knob(bench), *_eager(bench)]
        rows = [_row(bench, way) for way in theirs]
        ours = list(_ours(bench, {row["peak_bytes"] for row in rows}))
        rows += [_row(bench, way) for way in ours]
        measured = _turns(bench, [*theirs, *ours])
    eager_ms = measured["eager", ""]
    for row in rows:
        row["measured"] = measured[row["way"], row["setting"]] / eager_ms
    return {
        "model": name,
        "parameters": sum(p.numel() for p in case.model.parameters()),
        "batch": [list(t.shape) for t in case.batch],
        "eager_ms": eager_ms,
        "rounds": _ROUNDS,
        "load": [load, os.getloadavg()[0]],
        "rows": rows,
    }


def _copied(tensors: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _knob(bench: _Bench) -> list[_Way]:
    modules = bench.case.model.modules()
    norms = any(isinstance(m, torch.nn.BatchNorm2d) for m in modules)
    found = []
    for budget in KNOB:
        backend = Partitioned(budget, bench.table, norms)
        call = torch.compile(bench.module, backend=backend, fullgraph=True)
        way = _Way("activation_memory_budget", f"{budget:g}", _of(bench, call), 1.0)
        bench.step(way.loss)  # compiles
        way.cost = backend.cost
        bench.say(f"activation_memory_budget {budget:g}: {way.cost:.3f}")
        found.append(way)
    return found


def _of(bench: _Bench, call: Callable[..., Any]) -> Callable[[], torch.Tensor]:
    batch = bench.case.batch
    return lambda: call(*batch)


def _eager(bench: _Bench) -> list[_Way]:
    case, times = bench.case, bench.eager
    host = HostSaved(case)
    found = [_Way("save_on_cpu", "", host, 1.0)]
    parts = len(case.parts)
    for segments in sorted({2, math.isqrt(parts)} if parts else ()):
        loss = checkpointed(case, segments)
        found.append(_Way("checkpoint_sequential", f"{segments}", loss, 1.0))
    every = {"": bench.plain, **{w.way + w.setting: w.loss for w in found}}
    for name, loss in every.items():
        bench.case.model.load_state_dict(bench._before)
        times.watch(name, lambda loss=loss: bench.step(loss))  # type: ignore[misc]
    once = times.total_ms("")
    for way in found:
        way.cost = times.total_ms(way.way + way.setting) / once
        bench.say(f"{way.way} {way.setting}: {way.cost:.3f}")
    return found


def _ours(bench: _Bench, peaks: Collection[int]) -> Iterator[_Way]:
    """Within each of their peaks, and a curve of our own."""
    free, full = _planned(bench, math.inf)
    try:
        _planned(bench, 0)
    except PlanningError as e:
        least = e.least_bytes or 0
    else:
        raise RuntimeError(f"{bench.name} fits into no bytes at all")
    resident = full.resident_bytes
    yield _Way("ours", "no limit", free, full.slowdown, full.peak_bytes - resident)
    range_ = full.peak_bytes - least
    budgets = {max(least, resident + peak) for peak in peaks}
    budgets |= {int(least + share * range_) for share in _SHARES}
    for budget in sorted(budgets, reverse=True):
        start = perf_counter()
        loss, plan = _planned(bench, budget)
        took = perf_counter() - start
        bench.say(f"ours in {(budget - resident) / 2**20:.1f} MiB: {plan.slowdown:.3f}")
        beyond = plan.peak_bytes - resident
        yield _Way(
            "ours",
            str(budget - resident),
            loss,
            plan.slowdown,
            beyond,
            budget - resident,
            took,
        )


def _planned(bench: _Bench, budget: float) -> tuple[Callable[[], torch.Tensor], Any]:
    backend = CompileBackend(budget, PlanOptions(costs=bench.table))
    call = torch.compile(bench.module, backend=backend, fullgraph=True)
    loss = _of(bench, call)
    bench.step(loss)
    [plan] = backend.plans
    return loss, plan


def _row(bench: _Bench, way: _Way) -> dict[str, Any]:
    """What a way has in use at most, and whether it computes what eager mode does."""
    found = bench.outcome(way.loss)
    gradients = {name for name, _ in bench.case.model.named_parameters()}
    off = [k for k, v in bench.wanted.items() if not torch.equal(found[k], v)]
    bench.case.model.zero_grad()
    peak = real_peak(lambda: bench.step(way.loss))
    bench.say(f"{way.way} {way.setting}: {peak / 2**20:.1f} MiB really")
    return {
        "way": way.way,
        "setting": way.setting,
        "peak_bytes": peak,
        "planned_bytes": way.planned_bytes,
        "budget_bytes": way.budget_bytes,
        "cost": way.cost,
        "same_gradients": gradients.isdisjoint(off),
        "same_buffers": set(off) <= gradients,
        "planning_s": way.planning_s,
    }


def _turns(bench: _Bench, ways: Sequence[_Way]) -> dict[tuple[str, str], float]:
    """Median ms of each."""
    times: dict[tuple[str, str], list[float]] = {}
    for turn in range(_ROUNDS + 1):
        for way in ways:
            start = perf_counter()
            bench.step(way.loss)
            if turn:
                took = 1e3 * (perf_counter() - start)
                times.setdefault((way.way, way.setting), []).append(took)
    return {key: statistics.median(ms) for key, ms in times.items()}
