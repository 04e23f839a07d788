"""Measured rows, validation verdicts, races and the limits they were taken under.

A `Measurement` is of one kernel. A `Verdict` is of a whole plan: kernels that run in
sequence are not always as fast as each alone, so a division is run before it is used.
A `Race` compares two ways to compute the same outside of plans.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from types import MappingProxyType

from mucudnn.ir.conv import AlgoPerf, ConvPlan, ConvProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A row of a recording: device, result, time and library version of a measurement.

    `problem` has the micro-batch size of `perf`; `measured_at` is in seconds since
    1970.
    """

    fingerprint: str
    problem: ConvProblem
    perf: AlgoPerf
    measured_at: float
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of running a whole plan alternately with its undivided baseline.

    Attributes:
        fingerprint: Identifier of the device and its libraries.
        problem: The convolution, at its whole mini-batch.
        signature: Key of the plan and its baseline.
        ratio: The plan's time over its baseline's; 1 if the plan was rejected because
            it did not win by more than the noise.
    """

    fingerprint: str
    problem: ConvProblem
    signature: str
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Times of two ways to compute the same, measured alternately.

    `raced` is a JSON key of the two ways and everything that influences their times.
    """

    fingerprint: str
    raced: str
    times_ms: tuple[float, float]
    measured_at: float


def signature(plan: ConvPlan, baseline: ConvPlan) -> str:
    """Return a key for a plan and its baseline: algorithms and sizes in order."""
    return " / ".join(
        "+".join(f"{step.algo}@{step.batch}" for step in one.steps)
        for one in (plan, baseline)
    )


@dataclass(frozen=True, slots=True)
class DeviceSummary:
    """Size and age of a cache for one device; times are seconds since 1970."""

    fingerprint: str
    problems: int
    rows: int
    oldest: float
    newest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """The contents of a recording file, with properties of devices by fingerprint.

    `alignments` are in bytes, for micro-batch operands. Later verdicts replace earlier
    ones.
    """

    environments: Mapping[str, Mapping[str, str]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    alignments: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    measurements: tuple[Measurement, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    races: tuple[Race, ...] = ()


@dataclass(frozen=True, slots=True)
class LimitRange:
    """A range of workspace limits in bytes.

    Attributes:
        least: Smallest limit of any plan. An algorithm need not be timed if another one
            that fits into this limit is far ahead.
        most: Largest limit of any plan. Of algorithms that need more workspace, only
            those that may be faster are timed, to show what more workspace would gain.
    """

    least: float = 0.0
    most: float = inf

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most:
            raise ValueError(
                f"limits from {self.least} to {self.most} bytes are not a range"
            )

    def covers(self, other: "LimitRange") -> bool:
        """Return whether a table for these limits serves all of `other`."""
        return self.least <= other.least and other.most <= self.most

    def including(self, limit: float) -> "LimitRange":
        """Extend the range to include a limit."""
        return LimitRange(min(self.least, limit), max(self.most, limit))


ANY_LIMIT = LimitRange()
"""Range of unknown limits."""
