"""The devices of a fleet as they are named: figures, recordings, tables of steps.

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
    """Devices of one kind.

    Attributes:
        name: Of their figures; None where there is a table.
        file: A recording of that device, or a table of steps.
        count: How many there are.
    """

    name: str | None
    file: str | None = None
    count: int = 1

    @property
    def title(self) -> str:
        """What one is called."""
        if self.name is None:
            return Path(self.file or "").name.partition(".")[0]
        return self.name

    @property
    def source(self) -> str:
        """Where its times are from."""
        if self.name is None:
            return f"the step table {self.file}"
        figures = get_device(self.name).title
        estimated = f"estimated for {figures} from published figures"
        if self.file is None:
            return estimated
        return f"{estimated}, convolutions as recorded in {self.file}"


def parse_device(text: str) -> FleetDevice:
    """A device as it is written.

    Raises:
        ValueError: It is neither a device that is known nor a file.
    """
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
    """The ranks that devices of one kind are, with their table.

    Args:
        device: The kind.
        spec: The step.
        most: The largest share that there can be.
        graph: Batch -> the step; it is the same for all devices.
        limit: Bytes that a step may use at most, if less than the device has.
        planned: Whether an estimated step that needs more keeps to that by a plan.

    Raises:
        CacheError: A file is no table of steps.
        ValueError: A recording knows nothing of the step.
        BackendUnavailableError: A recording is missing, or is something else.
    """
    if device.name is None:
        table, memory = load_step_table(device.file or "")
        memory = memory if limit is None else min(memory or limit, limit)
    else:
        figures = get_device(device.name)
        memory = int(figures.memory.value)
        memory = memory if limit is None else min(memory, limit)
        within = memory if planned else None
        measure = functools.partial(_estimated, device, graph, within)
        table = measured_table(figures.title, 1, most, measure)
    return [
        Rank(f"{device.title} {i}" if device.count > 1 else device.title, table, memory)
        for i in range(device.count)
    ]


def _estimated(
    device: FleetDevice, graph: Callable[[int], Graph], within: int | None, batch: int
) -> StepPoint:
    """A step with all the memory it could use, or planned within some bytes.

    One that fits by no plan has the time of all the memory, and needs too much.
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
