"""What one run learnt of its device, as a recording that others replay.

The rows come from the cache, which holds every measurement with its time: those that
the run made, and older ones that it used instead of measuring again. What a limit kept
from being measured, or cut short, is no measurement and not recorded. What decides a
plan beside them goes along: what became of plans that were run whole, and how
micro-batches are aligned.
"""

from collections.abc import Iterable
from pathlib import Path

from mucudnn.errors import CacheError
from mucudnn.ir.conv import ConvProblem, PerfTable
from mucudnn.ir.measurement import Measurement
from mucudnn.runtime.database.export import write_recording
from mucudnn.runtime.tuning.tuner import Tuner

__all__ = ["record_run", "run_measurements"]


def run_measurements(
    tuner: Tuner,
    problems: Iterable[ConvProblem],
    tables: Iterable[PerfTable],
    since: float,
) -> tuple[Measurement, ...]:
    """Everything measured of `problems` since a time, and all that `tables` hold.

    Args:
        tuner: Whose cache and device.
        problems: What was to be measured; micro-batches of them count.
        tables: What was used; they may lack what an interruption left unfinished.
        since: Seconds since 1970 at which the run began.
    """
    used = {(t.problem.with_batch(p.batch), p) for t in tables for p in t.perfs}
    fingerprint = tuner.backend.device.fingerprint
    layers = dict.fromkeys(problem.with_batch(1) for problem in problems)
    return tuple(
        m
        for layer in layers
        for m in tuner.cache.rows(fingerprint, layer)
        if m.measured_at >= since or (m.problem, m.perf) in used
    )


def record_run(
    file: Path | str,
    tuner: Tuner,
    problems: Iterable[ConvProblem],
    tables: Iterable[PerfTable],
    since: float,
) -> int:
    """Write `run_measurements` and what the device says of itself; returns the rows.

    Raises:
        CacheError: There is nothing to record, or the file cannot be written.
    """
    rows = run_measurements(tuner, problems, tables, since)
    if not rows:
        raise CacheError(f"nothing was measured, so {file} was not written")
    device, layers = tuner.backend.device, {m.problem.with_batch(1) for m in rows}
    write_recording(
        file,
        rows,
        {device.fingerprint: device.description()},
        alignments={device.fingerprint: tuner.backend.split_alignment},
        verdicts=[v for v in tuner.verdicts if v.problem.with_batch(1) in layers],
    )
    return len(rows)
