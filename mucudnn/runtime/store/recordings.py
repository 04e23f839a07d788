"""Write and read recordings and step tables on disk.

`mucudnn.recording_format` defines the format. A file appears complete or not at all.
The rows of a run come from the cache: those that the run measured, and older ones that
it used instead. Rows that a limit prevented or cut short are no measurements and are
not recorded. Verdicts, races and the alignment of micro-batches go along, as plans
depend on them.

A recording has kernels at some micro-batch sizes. Every mini-batch size that is a sum
of those has a Pareto front of divisions, computed as on the recorded machine.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mucudnn.backends.recorded import RecordedConv, read_file
from mucudnn.backends.virtual import VirtualDevice
from mucudnn.errors import CacheError
from mucudnn.files import read_whole, write_whole
from mucudnn.ir.conv import ConvPlan, ConvProblem, PerfTable
from mucudnn.ir.fleet import StepTable
from mucudnn.ir.measurement import Recording
from mucudnn.ir.numerics import Numerics
from mucudnn.passes.microbatch import aligned_batches, pareto_plans
from mucudnn.recording_format import (
    KIND,
    MOST,
    SCHEMA,
    format_recording,
    format_step_table,
    kind_of,
    read_step_table,
    recorded_schema,
)
from mucudnn.runtime.tuning.timing import LAUNCH_OVERHEAD_MS

if TYPE_CHECKING:
    from mucudnn.runtime.tuning.tuner import Tuner

_NO_LIMIT = 1 << 62


def write_recording(file: Path | str, recording: Recording) -> None:
    """Write a recording; a file name in `.gz` is compressed.

    An existing file is replaced, unless a newer version wrote it.
    """
    target = Path(file)
    data = format_recording(recording, compress=target.suffix == ".gz")
    try:
        spare_newer(target)
        write_whole(target, data)
    except OSError as e:
        raise CacheError(f"cannot write {target}: {e.strerror or e}") from e


def spare_newer(target: Path) -> None:
    """Raise `CacheError` instead of overwriting a newer version's recording."""
    if not target.is_file():
        return
    with target.open("rb") as file:
        schema = recorded_schema(file.read(MOST + 1))
    if schema is not None and schema > SCHEMA:
        raise CacheError(
            f"{target} is a recording of a newer version of mucudnn (schema {schema}, "
            f"this one writes {SCHEMA}) and is not overwritten; name another file"
        )


def record_run(
    file: Path | str,
    tuner: "Tuner",
    problems: Iterable[ConvProblem],
    tables: Iterable[PerfTable],
    since: float,
) -> int:
    """Record the measurements of a run and the device's description; count the rows.

    These are all rows of `problems`, at any micro-batch size, that were measured since
    a time in seconds since 1970, and all rows in `tables`, which may be incomplete
    after an interruption.
    """
    # Rows of the tables count even if they are older, out of the cache.
    used = {(t.problem.with_batch(p.batch), p) for t in tables for p in t.perfs}
    rows = [
        m
        for layer in dict.fromkeys(problem.with_batch(1) for problem in problems)
        for m in tuner.cache.rows(tuner.backend.device.fingerprint, layer)
        if m.measured_at >= since or (m.problem, m.perf) in used
    ]
    if not rows:
        raise CacheError(f"nothing was measured, so {file} was not written")
    device, layers = tuner.backend.device, {m.problem.with_batch(1) for m in rows}
    verdicts = (v for v in tuner.verdicts if v.problem.with_batch(1) in layers)
    recording = Recording(
        environments={device.fingerprint: device.description()},
        alignments={device.fingerprint: tuner.backend.split_alignment},
        measurements=tuple(rows),
        verdicts=tuple(verdicts),
        races=tuner.cache.races(device.fingerprint),
    )
    write_recording(file, recording)
    return len(rows)


@dataclass(frozen=True, slots=True)
class RecordedFronts:
    """Pareto fronts of convolutions from one device's recorded measurements."""

    device: str
    conv: RecordedConv
    split_alignment: int = 1
    numerics: Numerics | None = None

    def table(self, problem: ConvProblem) -> PerfTable:
        """Return the rows at all sizes that can be part of the mini-batch."""
        known = [n for n in self.conv.sizes(problem) if n <= problem.batch]
        rows, accepted = [], self.numerics or Numerics()
        for size in aligned_batches(problem, known, self.split_alignment):
            micro, whole = problem.with_batch(size), size == problem.batch
            for algo, _ in self.conv.algorithms(micro):
                if accepted.refusal(self.conv.traits(micro, algo), whole=whole) is None:
                    rows.append(self.conv.row(micro, algo))
        rows.sort(key=lambda row: (-row.batch, row.algo))
        return PerfTable(problem, tuple(rows), LAUNCH_OVERHEAD_MS)

    def fronts(
        self, problems: Iterable[ConvProblem]
    ) -> dict[ConvProblem, tuple[ConvPlan, ...]]:
        """Return the Pareto front of every problem that the sizes can make up."""
        found = {
            problem: pareto_plans(self.table(problem), _NO_LIMIT)
            for problem in dict.fromkeys(problems)
        }
        return {problem: front for problem, front in found.items() if front}


def read_fronts(
    files: Sequence[str], problems: Iterable[ConvProblem]
) -> RecordedFronts:
    """Read the recorded Pareto fronts of some convolutions.

    All rows of these convolutions must come from one device. Of two measurements of the
    same kernel the newer one counts.
    """
    wanted = tuple(dict.fromkeys(problems))
    recordings = [read_file(file) for file in files]
    names = dict.fromkeys(name for r in recordings for name in r.environments)
    all_of = []
    # Files of the same device complement each other.
    for name in names:
        alignments: dict[str, int] = {}
        measurements = []
        for recording in recordings:
            alignments |= recording.alignments
            measurements += [m for m in recording.measurements if m.fingerprint == name]
        conv = RecordedConv(VirtualDevice(name), measurements)
        alignment = alignments.get(name, 1)
        all_of.append(RecordedFronts(name, conv, split_alignment=alignment))
    useful = [one for one in all_of if one.fronts(wanted)]
    where = ", ".join(map(str, files))
    if not useful:
        found = {m.problem.with_batch(1) for r in recordings for m in r.measurements}
        raise ValueError(
            f"{where}: none of this step's {len(wanted)} different convolutions are "
            f"covered by its {len(found)} measured ones; record the layers at their "
            "mini-batch size with `mucudnn tune --record FILE`"
        )
    if len(useful) > 1:
        devices = " and ".join(repr(one.device) for one in useful)
        raise ValueError(
            f"{where}: measured on {devices}, but a step runs on one device"
        )
    return useful[0]


_MOST_BYTES = 1 << 24


def save_step_table(
    file: Path | str, table: StepTable, memory: int | None = None
) -> None:
    """Write a step-time table to a file, completely or not at all.

    `memory` is the bytes of the device's memory, if known.
    """
    try:
        write_whole(file, format_step_table(table, memory).encode())
    except OSError as e:
        raise CacheError(f"cannot write {file}: {e.strerror or e}") from e


def is_step_table(file: Path | str) -> bool:
    """Return whether a file declares itself a step-time table."""
    try:
        return kind_of(read_whole(file, most=_MOST_BYTES).decode()) == KIND
    except (OSError, ValueError):
        return False


def load_step_table(file: Path | str) -> tuple[StepTable, int | None]:
    """Return a table, and the bytes of its device's memory if known."""
    try:
        return read_step_table(read_whole(file, most=_MOST_BYTES).decode())
    except OSError as e:
        raise CacheError(f"cannot read {file}: {e.strerror or e}") from e
    except ValueError as e:
        raise CacheError(f"{file}: {e}") from e
