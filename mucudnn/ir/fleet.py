"""Several devices that train one model in step: what a step takes on each of them.

Data-parallel ranks wait for the slowest once a step. So a fleet is described by what a
step takes on each rank at any share of the mini-batch, and by what it takes to sum the
gradients afterwards.
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

from mucudnn.arguments import a_number, an_integer

__all__ = ["AllReduce", "Fleet", "Rank", "StepPoint", "StepTable"]


@dataclass(frozen=True, slots=True, order=True)
class StepPoint:
    """A measured step.

    Attributes:
        samples: In the step's batch.
        time_ms: Forward and backward, without waiting for others.
        nbytes: In use at the most; 0 if not known.

    Raises:
        ValueError: A number is out of range.
    """

    samples: int
    time_ms: float
    nbytes: int = 0

    def __post_init__(self) -> None:
        an_integer("samples", self.samples, 1)
        a_number("time_ms", self.time_ms, 0.0, above=True)
        an_integer("nbytes", self.nbytes, 0)


@dataclass(frozen=True, slots=True)
class StepTable:
    """Steps of one device at a few sizes, ascending.

    Between two sizes time and bytes are on the line through them; below the smallest
    they are as there. Beyond the largest nothing is known, so no step is larger.

    Attributes:
        device: What was measured.
        points: At least one.

    Raises:
        ValueError: There are none, or two of one size.
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
        """Samples of its largest step."""
        return self.points[-1].samples

    def most_within(self, memory: int | None) -> int:
        """Samples of the largest step that needs no more bytes; 0 if none is known."""
        if memory is None:
            return self.most
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

    def times(self, most: int) -> list[float]:
        """The time of a step of 0, 1, … `most` samples; that of 0 is 0.

        Raises:
            ValueError: That is beyond the table.
        """
        if most > self.most:
            raise ValueError(
                f"the table of {self.device} ends at {self.most} samples, not {most}"
            )
        found = [0.0] + [self.points[0].time_ms] * self.points[0].samples
        for before, after in pairwise(self.points):
            width = after.samples - before.samples
            slope = (after.time_ms - before.time_ms) / width
            found += [before.time_ms + slope * k for k in range(1, width)]
            found.append(after.time_ms)
            if len(found) > most:
                break
        return found[: most + 1]

    def scaled(self, factor: float) -> "StepTable":
        """The table of a device that takes that many times as long."""
        return StepTable(
            self.device,
            tuple(replace(p, time_ms=p.time_ms * factor) for p in self.points),
        )


@dataclass(frozen=True, slots=True)
class Rank:
    """One process with a device of its own.

    Attributes:
        name: What it is called.
        table: What a step takes on it.
        memory: Bytes that a step may use; None without a limit.
        accumulates: Whether a share that does not fit runs as several smaller steps
            whose gradients are summed.
    """

    name: str
    table: StepTable
    memory: int | None = None
    accumulates: bool = True

    @property
    def most_at_once(self) -> int:
        """Samples of the largest step that fits."""
        return self.table.most_within(self.memory)


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduce:
    """What it takes to sum gradients over all ranks.

    A ring passes 2 (p - 1) messages of an p-th of the bytes each (Patarasuk and Yuan,
    2009): bandwidth counts nearly the same for any number of ranks, latency does not.

    Attributes:
        nbytes: Of all gradients.
        bytes_per_ms: Rate of the slowest link, one direction.
        latency_ms: Of a message.
        measured_ms: What one took, if it was measured: then nothing else counts.

    Raises:
        ValueError: A number is out of range.
    """

    nbytes: int = 0
    bytes_per_ms: float = math.inf
    latency_ms: float = 0.0
    measured_ms: float | None = None

    def __post_init__(self) -> None:
        an_integer("nbytes", self.nbytes, 0)
        if not self.bytes_per_ms > 0:
            raise ValueError(f"bytes_per_ms must be above 0, got {self.bytes_per_ms}")
        a_number("latency_ms", self.latency_ms, 0.0)
        if self.measured_ms is not None:
            a_number("measured_ms", self.measured_ms, 0.0)

    def time_ms(self, ranks: int) -> float:
        """Of one sum over that many ranks."""
        if ranks < 2:
            return 0.0
        if self.measured_ms is not None:
            return self.measured_ms
        messages = 2 * (ranks - 1)
        return messages * (self.latency_ms + self.nbytes / ranks / self.bytes_per_ms)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Ranks that train one model in step.

    Attributes:
        ranks: In the order of their numbers.
        all_reduce: What they do together after a step.

    Raises:
        ValueError: There is none.
    """

    ranks: tuple[Rank, ...]
    all_reduce: AllReduce = AllReduce()

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ValueError("a fleet has at least one rank")

    @property
    def all_reduce_ms(self) -> float:
        """Of one step."""
        return self.all_reduce.time_ms(len(self.ranks))

    def alone(self, rank: int) -> "Fleet":
        """One of the ranks by itself, with nobody to wait for."""
        return Fleet((self.ranks[rank],))
