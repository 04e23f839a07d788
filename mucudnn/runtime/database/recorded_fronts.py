"""Convolutions of a step out of recordings: what was measured needs no estimate.

A recording knows kernels at some micro-batch sizes. Whatever mini-batch these make up
has a Pareto front of divisions, found as if the machine were here. All measurements
must be of one device: times of two do not add up to a step.
"""

from collections.abc import Iterable, Sequence

from mucudnn.backends.recorded import RecordedConv, read_file
from mucudnn.backends.virtual import VirtualDevice
from mucudnn.ir.conv import AlgoPerf, ConvPlan, ConvProblem, PerfTable
from mucudnn.ir.measurement import Recording
from mucudnn.ir.numerics import Numerics
from mucudnn.passes.microbatch import aligned_batches, pareto_plans
from mucudnn.runtime.tuning.measurer import LAUNCH_OVERHEAD_MS

__all__ = ["RecordedFronts", "read_fronts"]

_NO_LIMIT = 1 << 62


class RecordedFronts:
    """What was recorded of one device, as Pareto fronts.

    Args:
        device: Its fingerprint.
        conv: Its measurements.
        split_alignment: See `Backend`.
        numerics: Which ways of computing are accepted.
    """

    def __init__(
        self,
        device: str,
        conv: RecordedConv,
        *,
        split_alignment: int = 1,
        numerics: Numerics | None = None,
    ) -> None:
        self.device = device
        self._conv = conv
        self._split_alignment = split_alignment
        self._numerics = numerics or Numerics()

    def table(self, problem: ConvProblem) -> PerfTable:
        """All that was measured at sizes that are candidates for a mini-batch."""
        known = [n for n in self._conv.sizes(problem) if n <= problem.batch]
        sizes = aligned_batches(problem, known, self._split_alignment)
        rows = [row for n in sizes for row in self._accepted(problem, n)]
        rows.sort(key=lambda row: (-row.batch, row.algo))
        return PerfTable(problem, tuple(rows), LAUNCH_OVERHEAD_MS)

    def fronts(
        self, problems: Iterable[ConvProblem]
    ) -> dict[ConvProblem, tuple[ConvPlan, ...]]:
        """The front of every problem that the measured sizes make up."""
        found = {
            problem: pareto_plans(self.table(problem), _NO_LIMIT)
            for problem in dict.fromkeys(problems)
        }
        return {problem: front for problem, front in found.items() if front}

    def _accepted(self, problem: ConvProblem, batch: int) -> list[AlgoPerf]:
        micro, whole = problem.with_batch(batch), batch == problem.batch
        refusal = self._numerics.refusal
        return [
            self._conv.row(micro, algo)
            for algo, _ in self._conv.algorithms(micro)
            if refusal(self._conv.traits(micro, algo), whole=whole) is None
        ]


def read_fronts(
    files: Sequence[str], problems: Iterable[ConvProblem]
) -> RecordedFronts:
    """What recordings know of some convolutions.

    Args:
        files: Of one device, as far as they are about these convolutions; of two
            measurements of the same thing the newer one counts.
        problems: The convolutions of a step.

    Raises:
        BackendUnavailableError: A file is missing or no recording.
        ValueError: None of the convolutions was measured, or on several devices.
    """
    wanted = tuple(dict.fromkeys(problems))
    recordings = [read_file(file) for file in files]
    names = dict.fromkeys(name for r in recordings for name in r.environments)
    all_of = [_of_device(name, recordings) for name in names]
    useful = [one for one in all_of if one.fronts(wanted)]
    where = ", ".join(map(str, files))
    if not useful:
        found = {m.problem.with_batch(1) for r in recordings for m in r.measurements}
        raise ValueError(
            f"{where}: none of this step's {len(wanted)} different convolutions can be "
            f"made up of the {len(found)} that were measured there; record its layers "
            "at its mini-batch size with `mucudnn tune --record FILE`"
        )
    if len(useful) > 1:
        devices = " and ".join(repr(one.device) for one in useful)
        raise ValueError(
            f"{where}: measured on {devices}, but a step runs on one device"
        )
    return useful[0]


def _of_device(name: str, recordings: Iterable[Recording]) -> RecordedFronts:
    alignments: dict[str, int] = {}
    measurements = []
    for recording in recordings:
        alignments |= recording.alignments
        measurements += [m for m in recording.measurements if m.fingerprint == name]
    conv = RecordedConv(VirtualDevice(name), measurements)
    return RecordedFronts(name, conv, split_alignment=alignments.get(name, 1))
