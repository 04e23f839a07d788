"""A measured table of another machine answers as if that machine were here.

`recorded:FILE` reads a recording (see `mucudnn.ir.recording`). Nothing is computed;
each kernel takes exactly the recorded median on a virtual clock, so the ordinary tuner,
measuring through it, finds what the machine found, and can plan for it anywhere.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mucudnn.backends.base import Backend
from mucudnn.backends.virtual import VirtualDevice
from mucudnn.errors import BackendError, BackendUnavailableError, UnsupportedError
from mucudnn.ir.conv import AlgoPerf, ConvProblem
from mucudnn.ir.numerics import NATIVE, Traits
from mucudnn.ir.recording import (
    Measurement,
    parse_recording,
    recorded_environments,
    recorded_fingerprints,
)

__all__ = ["RecordedConv", "device_count", "load"]

_ANYTHING = "*"
"""Stands for every algorithm where nothing at all was recorded."""


class RecordedConv:
    """Knows the algorithms that were measured, and how long they took.

    An algorithm that was measured in several math modes is listed once for each, as
    `NAME[mode]` where the mode is not the default. Of two rows for the same thing the
    newer counts.

    Args:
        device: Whose clock to move.
        measurements: Of one machine.
    """

    def __init__(
        self, device: VirtualDevice, measurements: Sequence[Measurement]
    ) -> None:
        self._device = device
        self._rows: dict[ConvProblem, dict[str, AlgoPerf]] = {}
        self._batches: dict[ConvProblem, set[int]] = {}
        modes = _modes(measurements)
        for m in sorted(measurements, key=lambda m: m.measured_at):
            name = _name(m.perf, modes[m.problem, m.perf.algo])
            self._rows.setdefault(m.problem, {})[name] = m.perf
            layer = m.problem.with_batch(1)
            self._batches.setdefault(layer, set()).add(m.problem.batch)

    def algorithms(self, problem: ConvProblem) -> Sequence[tuple[str, int]]:
        """(name, workspace bytes) of every algorithm measured on `problem`."""
        rows = self._rows.get(problem, {})
        return [(n, perf.workspace) for n, perf in rows.items() if perf.error is None]

    def excluded(self, problem: ConvProblem) -> Sequence[tuple[str, str]]:
        """(name, reason) of every recorded failure, or why there is nothing."""
        rows = self._rows.get(problem)
        if rows is None:
            return [(_ANYTHING, self._missing(problem))]
        return [(n, perf.error) for n, perf in rows.items() if perf.error is not None]

    def traits(self, problem: ConvProblem, algo: str) -> Traits:
        """What was recorded of it."""
        perf = self._rows[problem][algo]
        return Traits(perf.deterministic, perf.math_mode, perf.notes)

    def run(
        self,
        problem: ConvProblem,
        algo: str,
        a: Any,
        b: Any,
        out: Any,
        workspace: Any,
        *,
        accumulate: bool = False,
    ) -> None:
        """Let the recorded time pass; see `ConvLibrary.run` for the errors."""
        rows = self._rows.get(problem)
        if rows is None:
            raise UnsupportedError(f"{problem} was {self._missing(problem)}")
        perf = rows.get(algo)
        if perf is None:
            valid = ", ".join(rows)
            raise UnsupportedError(
                f"{algo!r} was not recorded for {problem}; recorded: {valid}"
            )
        if perf.error is not None:
            raise UnsupportedError(f"{algo} failed on {problem}: {perf.error}")
        given = 0 if workspace is None else workspace.nbytes
        if given < perf.workspace:
            raise BackendError(
                f"{algo} needs {perf.workspace} bytes of workspace for {problem}, "
                f"got {given}"
            )
        self._device.advance(perf.time_ms)

    def _missing(self, problem: ConvProblem) -> str:
        batches = self._batches.get(problem.with_batch(1))
        if batches is None:
            return f"not recorded on {self._device.fingerprint} at any micro-batch"
        sizes = ", ".join(map(str, sorted(batches)))
        return f"not recorded at micro-batch {problem.batch}; recorded: {sizes}"


def device_count(argument: str) -> int:
    """How many machines the file has measurements of."""
    file = _file(argument)
    try:
        count = len(recorded_fingerprints(_contents(file)))
    except ValueError as e:
        raise _unreadable(file, e) from e
    if count == 0:
        raise BackendUnavailableError(f"recording {file} has no measurements")
    return count


def load(argument: str, device: int) -> Backend:
    """One machine of a recording, with a clock of its own."""
    file = _file(argument)
    data = _contents(file)
    try:
        fingerprint, known = list(recorded_environments(data).items())[device]
        measurements = parse_recording(data)
    except ValueError as e:
        raise _unreadable(file, e) from e
    clock = VirtualDevice(fingerprint, known)
    mine = [m for m in measurements if m.fingerprint == fingerprint]
    conv = RecordedConv(clock, mine)
    return Backend(f"recorded:{argument}", clock, conv, index=device)


def _modes(
    measurements: Sequence[Measurement],
) -> dict[tuple[ConvProblem, str], set[str]]:
    modes: dict[tuple[ConvProblem, str], set[str]] = {}
    for m in measurements:
        modes.setdefault((m.problem, m.perf.algo), set()).add(m.perf.math_mode)
    return modes


def _name(perf: AlgoPerf, modes: set[str]) -> str:
    if perf.math_mode == NATIVE or len(modes) == 1:
        return perf.algo
    return f"{perf.algo}[{perf.math_mode}]"


def _file(argument: str) -> Path:
    if not argument:
        raise BackendUnavailableError(
            "backend 'recorded' needs a file: recorded:FILE, where FILE was written "
            "by `mucudnn tune --record` or the export of a cache"
        )
    return Path(argument).expanduser()


def _contents(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as e:
        raise BackendUnavailableError(
            f"recording {file} cannot be read: {e.strerror}"
        ) from e


def _unreadable(file: Path, error: ValueError) -> BackendUnavailableError:
    return BackendUnavailableError(f"{file} is not a usable recording: {error}")
