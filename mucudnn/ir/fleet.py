"""Describe heterogeneous devices that train one model data-parallel.

Data-parallel ranks wait for the slowest one at every step. A fleet is described by the
step time of each rank as a function of its share of the mini-batch, and by the time of
the all-reduce of gradients that follows.
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

from mucudnn.arguments import check_integer, check_number


@dataclass(frozen=True, slots=True, order=True)
class StepPoint:
    """A measured step: batch size, time without waiting for other ranks, peak memory.

    `nbytes` is 0 if unknown. Numbers out of range raise a `ValueError`.
    """

    samples: int
    time_ms: float
    nbytes: int = 0

    def __post_init__(self) -> None:
        check_integer("samples", self.samples, 1)
        check_number("time_ms", self.time_ms, 0.0, above=True)
        check_integer("nbytes", self.nbytes, 0)


@dataclass(frozen=True, slots=True)
class StepTable:
    """Step times of one device at a few batch sizes, ascending.

    Time and bytes are interpolated linearly between two sizes, and constant below the
    smallest. Sizes beyond the largest are not allowed.

    Raises:
        ValueError: There is no point, or two have the same size.
    """

    device: str
    points: tuple[StepPoint, ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ValueError(f"the table of {self.device} has no step")
        ordered = tuple(sorted(self.points))
        for before, after in pairwise(ordered):
            if before.samples == after.samples:
                raise ValueError(
                    f"the table of {self.device} has two steps of {after.samples} "
                    "samples"
                )
        object.__setattr__(self, "points", ordered)

    @property
    def most(self) -> int:
        """Batch size of the largest measured step."""
        return self.points[-1].samples

    def most_within(self, memory: int | None) -> int:
        """Return the largest batch size that fits into `memory`; 0 if unknown."""
        if memory is None:
            return self.most
        # 0 bytes: nothing is known to fit below the smallest measured step.
        fitting = StepPoint(1, self.points[0].time_ms)
        for point in self.points:
            if point.nbytes > memory:
                if fitting.nbytes == 0:
                    return 0
                share = (memory - fitting.nbytes) / (point.nbytes - fitting.nbytes)
                width = point.samples - fitting.samples
                return fitting.samples + int(share * width)
            fitting = point
        return fitting.samples

    def scaled(self, factor: float) -> "StepTable":
        """Return the table of a device that is slower by a factor."""
        return StepTable(
            self.device,
            tuple(replace(p, time_ms=p.time_ms * factor) for p in self.points),
        )


@dataclass(frozen=True, slots=True)
class Rank:
    """A process with its own device and an optional memory budget in bytes.

    If it `accumulates`, a share that does not fit runs as several smaller steps with
    accumulated gradients.
    """

    name: str
    table: StepTable
    memory: int | None = None
    accumulates: bool = True

    @property
    def most_at_once(self) -> int:
        """Batch size of the largest step that fits."""
        return self.table.most_within(self.memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """A cost model of summing gradients over all ranks.

    A ring passes 2 (p - 1) messages of 1 / p of the bytes each (Patarasuk and Yuan,
    2009): the bandwidth term hardly depends on the number of ranks, the latency term
    does.

    Attributes:
        nbytes: Bytes of all gradients.
        bytes_per_ms: One-way rate of the slowest link.
        latency_ms: Latency of one message.
        measured_ms: Measured time of one all-reduce; overrides the model.
    """

    nbytes: int = 0
    bytes_per_ms: float = math.inf
    latency_ms: float = 0.0
    measured_ms: float | None = None

    def __post_init__(self) -> None:
        check_integer("nbytes", self.nbytes, 0)
        check_number("bytes_per_ms", self.bytes_per_ms, 0, above=True, finite=False)
        check_number("latency_ms", self.latency_ms, 0.0)
        if self.measured_ms is not None:
            check_number("measured_ms", self.measured_ms, 0.0)

    def time_ms(self, ranks: int) -> float:
        """Return the time of one all-reduce over `ranks` ranks."""
        if ranks < 2:
            return 0.0
        if self.measured_ms is not None:
            return self.measured_ms
        messages = 2 * (ranks - 1)
        return messages * (self.latency_ms + self.nbytes / ranks / self.bytes_per_ms)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Ranks that train one model data-parallel, and the cost of their all-reduce."""

    ranks: tuple[Rank, ...]
    all_reduce: AllReduce = AllReduce()

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ValueError("a fleet must have at least one rank")

    @property
    def all_reduce_ms(self) -> float:
        """Time of the all-reduce of one step."""
        return self.all_reduce.time_ms(len(self.ranks))

    def alone(self, rank: int) -> "Fleet":
        """Return the fleet of a single rank."""
        return Fleet((self.ranks[rank],))


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """A way of training one model on equal devices, as estimated.

    Attributes:
        gpus: Number of devices.
        way: `ddp` or `fsdp2`, or `one` device; with ` + plan` for offload and
            recomputation within a device's memory, or `none fits`.
        peak_bytes: Peak memory of a device; the least possible if none fits.
        step_ms: Time of a step; 0 if none fits.
        samples_per_s: Samples of all devices in a second.
        waits_ms: Time of a step in which computation waits for collectives.
    """

    gpus: int
    way: str
    peak_bytes: int
    step_ms: float = 0.0
    samples_per_s: float = 0.0
    waits_ms: float = 0.0
