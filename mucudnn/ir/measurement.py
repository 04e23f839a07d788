"""What one machine learnt and others may use: rows, verdicts, races, and a whole file.

A row is of one kernel. A verdict is of a whole plan: kernels that run one after another
are not always as fast as each by itself, so a division is run before it is trusted. A
race is between two ways to compute the same outside of plans.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from mucudnn.ir.conv import AlgoPerf, ConvPlan, ConvProblem

__all__ = ["DeviceSummary", "Measurement", "Race", "Recording", "Verdict", "signature"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One row of a recording: what was measured, where and when.

    Attributes:
        fingerprint: The device and its libraries.
        problem: The convolution, at the micro-batch size of `perf`.
        perf: The outcome.
        measured_at: Seconds since 1970.
        version: Version of mucudnn that measured.
    """

    fingerprint: str
    problem: ConvProblem
    perf: AlgoPerf
    measured_at: float
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a plan that was run whole, in turn with its undivided baseline.

    Attributes:
        fingerprint: The device and its libraries.
        problem: The convolution, at its whole mini-batch.
        signature: Of the plan and its baseline.
        ratio: The plan's time over its baseline's; 1 where the plan was rejected, as it
            did not win by more than the noise.
    """

    fingerprint: str
    problem: ConvProblem
    signature: str
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """What two ways to compute the same took, timed beside each other.

    Attributes:
        fingerprint: The device and its libraries.
        raced: All that decided the times, and which ways they are, as JSON.
        times_ms: Of the first way and of the second.
        measured_at: Seconds since 1970.
    """

    fingerprint: str
    raced: str
    times_ms: tuple[float, float]
    measured_at: float


def signature(plan: ConvPlan, baseline: ConvPlan) -> str:
    """Two plans of one problem as a key: algorithms and sizes of both, in order."""
    return " / ".join(
        "+".join(f"{step.algo}@{step.batch}" for step in one.steps)
        for one in (plan, baseline)
    )


@dataclass(frozen=True, slots=True)
class DeviceSummary:
    """What a cache knows of one device; times are seconds since 1970."""

    fingerprint: str
    problems: int
    rows: int
    oldest: float
    newest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A whole file.

    Attributes:
        environments: By fingerprint, in order, what else is known of a device.
        alignments: By fingerprint, bytes that operands of micro-batches are aligned
            to, where that is known.
        measurements: Of all devices.
        verdicts: Of all devices; of two of the same plans the later one counts.
        races: Of all devices.
    """

    environments: Mapping[str, Mapping[str, str]] = field(
        default_factory=lambda: MappingProxyType({})
    )
    alignments: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    measurements: tuple[Measurement, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    races: tuple[Race, ...] = ()
