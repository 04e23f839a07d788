"""Parse the devices of a fleet: published figures, recordings, tables of steps.

h100             estimated from published figures
4xh100           four of them
p100=k.json.gz   the same, its convolutions as that recording has them
    p100.json.gz     the same, of a recording that is called as its device
table.json       a table of step times, as `save_step_table` writes it
"""

import contextlib
import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from mucudnn.arguments import an_integer
from mucudnn.errors import PlanningError
from mucudnn.ir.devices import DEVICES, get_device
from mucudnn.ir.fleet import Rank, StepPoint
from mucudnn.ir.graph import Graph
from mucudnn.passes.fleet.sizes import measured_table
from mucudnn.passes.planning.comparison import unbounded
from mucudnn.passes.planning.plan_step import plan_step
from mucudnn.passes.planning.request import StepRequest
from mucudnn.runtime.database.step_tables import is_step_table, load_step_table
from mucudnn.studies.memory_findings import StepSpec
from mucudnn.studies.step_costs import StepCosts

__all__ = ["FleetDevice", "parse_device", "ranks_of"]

_COUNT = re.compile(r"([0-9]{1,6})[x×](.+)")
_MOST = 65_536


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


def parse_device(text: str) -> FleetDevice:
    """Parse a device of a fleet."""
    counted = _COUNT.fullmatch(text.strip())
    number, word = (int(counted[1]), counted[2]) if counted else (1, text.strip())
    count = an_integer(f"the number of {word}", number, 1, _MOST)
    name, equals, file = word.partition("=")
    if name in DEVICES:
        if equals and not file:
            raise ValueError(f"{text!r} names no recording behind the =")
        return FleetDevice(name, file or None, count)
    if not equals and Path(word).is_file():
        stem = Path(word).name.partition(".")[0]
        recorded = stem in DEVICES and not is_step_table(word)
        return FleetDevice(stem if recorded else None, word, count)
    if name.endswith(".json") or "/" in name:
        raise ValueError(f"{name} is not there; a table of steps is wanted")
    raise ValueError(
        f"unknown device {name!r}; choose one of: {', '.join(DEVICES)}: or write "
        "NAME=RECORDING, or a file with a table of steps"
    )


def ranks_of(
    device: FleetDevice,
    spec: StepSpec,
    most: int,
    graph: Callable[[int], Graph],
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
        measure = functools.partial(_estimate_step, device, graph, within)
        table = measured_table(figures.title, 1, most, measure)
    return [
        Rank(f"{device.title} {i}" if device.count > 1 else device.title, table, memory)
        for i in range(device.count)
    ]


def _estimate_step(
    device: FleetDevice, graph: Callable[[int], Graph], within: int | None, batch: int
) -> StepPoint:
    """Estimate a step without a budget, or planned within one.

    If no plan fits, the result is the step without a budget, which needs too much
    memory.
    """
    step = graph(batch)
    files = () if device.file is None else (device.file,)
    costs = StepCosts(step, device.name or "", recordings=files)
    plan = unbounded(step, costs.profile)
    if within is not None and plan.peak_bytes > within:
        request = StepRequest(step, costs.profile, budget=within)
        with contextlib.suppress(PlanningError):
            plan = plan_step(request)
    return StepPoint(batch, plan.prediction.step_ms, plan.peak_bytes)
