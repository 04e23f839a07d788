"""Measured results of one machine, as stored in its cache or a recording.

A `Measurement` is of one kernel. A `Verdict` is of a whole plan: kernels that run in
sequence are not always as fast as each alone, so a division is run before it is used.
A `Race` compares two ways to compute the same outside of plans.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from mucudnn.ir.conv import AlgoPerf, ConvPlan, ConvProblem

__all__ = ["DeviceSummary", "Measurement", "Race", "Recording", "Verdict", "signature"]


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
