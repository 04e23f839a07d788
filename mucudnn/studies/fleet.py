"""Divide a mini-batch among heterogeneous devices, and compare with simpler splits.

Step times are from tables, recordings, or estimates; no device is needed. The planner's
split is compared with equal shares, shares in proportion to speed, each device alone,
and a lower bound on the step time.
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mucudnn.arguments import check_integer
from mucudnn.errors import PlanningError
from mucudnn.ir.devices import DEVICES, device_name, get_device
from mucudnn.ir.fleet import AllReduce, Fleet, Rank, StepPoint
from mucudnn.ir.graph import Graph
from mucudnn.notebook import html_of
from mucudnn.passes.load_balancing import (
    FleetPlan,
    best_batch,
    equal_shares,
    measured_table,
    proportional_shares,
    split_batch,
    step_bound_ms,
)
from mucudnn.passes.planning.plan_step import fastest_form, plan_step, unbounded
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.scheduling.step_plan import StepPlan
from mucudnn.runtime.store.recordings import is_step_table, load_step_table
from mucudnn.studies.memory_results import CostedStep, StepSpec


@dataclass(frozen=True, slots=True)
class FleetDevice:
    """Devices of one kind: a name in `DEVICES` or a recording, or a step table."""

    name: str | None
    file: str | None = None
    count: int = 1

    @property
    def title(self) -> str:
        """Name of one device."""
        if self.name is None:
            return Path(self.file or "").name.partition(".")[0]
        return self.name

    @property
    def source(self) -> str:
        """Source of its times, in words."""
        if self.name is None:
            return f"the step table {self.file}"
        figures = get_device(self.name).title
        estimated = f"estimated for {figures} from published figures"
        if self.file is None:
            return estimated
        return f"{estimated}, convolutions as recorded in {self.file}"


_LATENCY_MS = 0.02
"""Assumed latency of a message between devices."""

_ELEMENT = 4


@dataclass(frozen=True, slots=True)
class Link:
    """The interconnect of a fleet.

    Attributes:
        bytes_per_s: One-way rate of the slowest link; None selects the slowest device's
            link to its host.
        all_reduce_ms: Measured time of one all-reduce.
    """

    bytes_per_s: float | None = None
    all_reduce_ms: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStudy:
    """Result of `study_fleet`.

    Attributes:
        title: Name of the network.
        fleet: Ranks with their step times.
        sources: Device -> source of its times.
        link: Source of the all-reduce's time.
        plan: The planner's split.
        equal: Equal shares; None if a share does not fit.
        proportional: Shares in proportion to speed; None if a share does not fit.
        alone: Time of the whole batch on each rank alone; None if it does not fit.
        bound_ms: Lower bound on the time of any split.
    """

    title: str
    fleet: Fleet
    sources: Mapping[str, str]
    link: str
    plan: FleetPlan
    equal: FleetPlan | None
    proportional: FleetPlan | None
    alone: tuple[float | None, ...]
    bound_ms: float

    @property
    def fastest_alone_ms(self) -> float | None:
        """Time of the batch on the fastest device alone, if it fits."""
        return min((ms for ms in self.alone if ms is not None), default=None)

    def speedup(self, other: FleetPlan | None) -> float | None:
        """Return the speed-up of the planner's split over another."""
        return None if other is None else other.step_ms / self.plan.step_ms

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        plan, fastest = self.plan, self.fastest_alone_ms
        return {
            "schema": 1,
            "model": self.title,
            "batch": self.plan.batch,
            "sources": dict(self.sources),
            "all_reduce": self.link,
            "all_reduce_ms": self.plan.all_reduce_ms,
            "ranks": [
                {
                    "name": rank.name,
                    "samples": share.samples,
                    "passes": share.passes,
                    "time_ms": share.time_ms,
                    "idle_ms": idle,
                    "alone_ms": alone,
                }
                for rank, share, idle, alone in zip(
                    self.fleet.ranks, plan.shares, plan.idle_ms, self.alone, strict=True
                )
            ],
            "planned_ms": self.plan.step_ms,
            "equal_ms": self.equal and self.equal.step_ms,
            "proportional_ms": self.proportional and self.proportional.step_ms,
            "bound_ms": self.bound_ms,
            "samples_per_s": self.plan.samples_per_s,
            "speedup_over_equal": self.speedup(self.equal),
            "speedup_over_proportional": self.speedup(self.proportional),
            "speedup_over_fastest": fastest and fastest / self.plan.step_ms,
        }

    _repr_html_ = html_of


def study_fleet(
    step: StepSpec,
    devices: Sequence[str],
    *,
    most: int | None = None,
    link: Link = Link(),
    at_least: int = 0,
    memory: int | None = None,
    planned: bool = False,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> FleetStudy:
    """Divide a step's mini-batch among devices.

    What does an old GPU beside a new one bring?::

        step = StepSpec(model="resnet18", batch=256)
        study_fleet(step, ["k80", "p100"]).plan.samples

    Args:
        step: The step; its batch is that of all devices together.
        devices: Devices as `fleet_devices` reads them.
        most: Largest batch; if given, the batch from the step's own up to this with the
            most samples per second is chosen.
        link: Interconnect of the devices.
        at_least: Least samples of every rank; with 0 a slow one may be left out.
        memory: Bytes that a step may use on each device, if less than it has.
        planned: Whether steps that need more memory may also be planned within it, by
            offload and recomputation, if that is faster than gradient accumulation. For
            estimated devices only.
        progress: Called with the current activity, the work done, and its total.

    Raises:
        ValueError: A device is unknown, there is none, or a size is out of range.
        PlanningError: The batch does not fit.
        CacheError: A file is not a table of steps.
        BackendUnavailableError: A recording is missing or invalid.
    """
    kinds = [parse_device(text) for text in devices]
    largest = step.batch if most is None else most
    reduce, words = _all_reduce(kinds, link, step.graph(1))
    found: list[tuple[Fleet, FleetPlan]] = []
    # First with gradient accumulation only, then with planned steps, too.
    for by_plan in (False, True)[: 1 + planned]:
        ranks = []
        for i, kind in enumerate(kinds):
            progress(f"what a step takes on {kind.title}", i, len(kinds))
            ranks += ranks_of(kind, step, largest, limit=memory, planned=by_plan)
        fleet = Fleet(tuple(ranks), reduce)
        progress("shares", 0, 1)
        try:
            if most is None:
                plan = split_batch(fleet, step.batch, at_least=at_least)
            else:
                plan = best_batch(fleet, step.batch, most, at_least=at_least)
            found.append((fleet, plan))
        except PlanningError as e:
            error = e
    if not found:
        raise error
    fleet, plan = max(found, key=lambda one: one[1].samples_per_s)
    return FleetStudy(
        title=step.title,
        fleet=fleet,
        sources={kind.title: kind.source for kind in kinds},
        link=words,
        plan=plan,
        equal=_split_or_none(equal_shares, fleet, plan.batch),
        proportional=_split_or_none(proportional_shares, fleet, plan.batch),
        alone=_times_alone(fleet, plan.batch),
        bound_ms=step_bound_ms(fleet, plan.batch),
    )


def _split_or_none(
    shares: Callable[[Fleet, int], FleetPlan], fleet: Fleet, batch: int
) -> FleetPlan | None:
    try:
        return shares(fleet, batch)
    except PlanningError:
        return None


def _times_alone(fleet: Fleet, batch: int) -> tuple[float | None, ...]:
    """Return the time of the whole batch on each rank; equal ranks share it."""
    kinds = [(rank.table, rank.memory, rank.accumulates) for rank in fleet.ranks]
    known: dict[Any, float | None] = {}
    for i, kind in enumerate(kinds):
        if kind not in known:
            found = _split_or_none(split_batch, fleet.alone(i), batch)
            known[kind] = None if found is None else found.step_ms
    return tuple(known[kind] for kind in kinds)


def _all_reduce(
    kinds: Sequence[FleetDevice], link: Link, graph: Graph
) -> tuple[AllReduce, str]:
    """Return the cost of the all-reduce, and its source in words."""
    if link.all_reduce_ms is not None:
        return AllReduce(measured_ms=link.all_reduce_ms), "as given"
    rates = {kind.name: get_device(kind.name).d2h.value for kind in kinds if kind.name}
    rate = link.bytes_per_s or min(rates.values(), default=None)
    if rate is None:
        return AllReduce(), "not counted: no link is known"
    reduce = AllReduce(
        nbytes=_ELEMENT * graph.parameter_count,
        bytes_per_ms=rate / 1e3,
        latency_ms=_LATENCY_MS,
    )
    whose = "as given" if link.bytes_per_s else "the slowest device's to its host"
    return reduce, (
        f"a ring over {rate / 1e9:g} GB/s ({whose}), {1e3 * _LATENCY_MS:g} µs a "
        "message (assumed), after the backward pass"
    )


# Parse the devices of a fleet: published figures, recordings, tables of steps.
#
# h100             estimated from published figures
# 4xh100           four of them
# p100=k.json.gz   estimated, with convolutions from a recording
# p100.json.gz     the same, for a recording named after its device
# table.json       a table of step times, written by `save_step_table`


_COUNT = re.compile(r"([0-9]{1,6})[x×](.+)")
_MOST = 65_536


def parse_device(text: str) -> FleetDevice:
    """Parse a device of a fleet."""
    counted = _COUNT.fullmatch(text.strip())
    number, word = (int(counted[1]), counted[2]) if counted else (1, text.strip())
    count = check_integer(f"the number of {word}", number, 1, _MOST)
    name, equals, file = word.partition("=")
    with contextlib.suppress(ValueError):
        name = device_name(name)
    if name in DEVICES:
        if equals and not file:
            raise ValueError(f"{text!r} has no recording after the =")
        return FleetDevice(name, file or None, count)
    if not equals and Path(word).is_file():
        stem = Path(word).name.partition(".")[0]
        recorded = stem in DEVICES and not is_step_table(word)
        return FleetDevice(stem if recorded else None, word, count)
    if name.endswith(".json") or "/" in name:
        raise ValueError(f"{name} does not exist; name a file with a table of steps")
    raise ValueError(
        f"unknown device {name!r}; choose one of: {', '.join(DEVICES)}; or write "
        "NAME=RECORDING, or a file with a table of steps"
    )


def ranks_of(
    device: FleetDevice,
    spec: StepSpec,
    most: int,
    *,
    limit: int | None = None,
    planned: bool = False,
) -> list[Rank]:
    """Return the ranks of the devices of one kind, with their step table.

    `limit` bounds a step's memory below that of the device; with `planned`, an
    estimated step that needs more is planned within it.
    """
    if device.name is None:
        table, memory = load_step_table(device.file or "")
        memory = memory if limit is None else min(memory or limit, limit)
    else:
        figures = get_device(device.name)
        memory = int(figures.memory.value)
        memory = memory if limit is None else min(memory, limit)
        within = memory if planned else None
        measure = functools.partial(_estimate_step, device, spec, within)
        table = measured_table(figures.title, 1, most, measure)
    return [
        Rank(f"{device.title} {i}" if device.count > 1 else device.title, table, memory)
        for i in range(device.count)
    ]


def _estimate_step(
    device: FleetDevice, spec: StepSpec, within: int | None, batch: int
) -> StepPoint:
    """Estimate a step without a budget, or planned within one.

    If no plan fits, the result is the step without a budget, which needs too much
    memory.
    """
    files = () if device.file is None else (device.file,)
    spec = replace(spec, batch=batch, device=device.name or "")
    step = CostedStep(spec, recordings=files)
    whole, *_ = step.forms(math.inf)
    plan = unbounded(whole.graph, whole.profile)
    if within is not None and plan.peak_bytes > within:
        plan = fastest_form(_plans_of(step.forms(within)), lambda plan: plan) or plan
    return StepPoint(batch, plan.prediction.step_ms, plan.peak_bytes)


def _plans_of(forms: Sequence[StepRequest]) -> Iterator[StepPlan]:
    for request in forms:
        with contextlib.suppress(PlanningError):
            yield plan_step(request)
