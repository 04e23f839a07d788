"""A backend that replays a measured table of another machine.

`recorded:FILE` reads a recording (see `mucudnn.recording_format`). Nothing is
computed, and each kernel takes exactly the recorded median on a virtual clock. Data
that such a clock cannot provide is returned directly: the uncertainty of a median
(`row`), and whether a whole plan took its predicted time (`verdict`). So the ordinary
tuner, measuring through it, reproduces the machine's measurements and plans anywhere.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from mucudnn.backends.base import Backend
from mucudnn.backends.plan_runner import Call, PlanRunner, per_step
from mucudnn.backends.virtual import VirtualDevice, run_kernel
from mucudnn.errors import BackendUnavailableError, UnsupportedError
from mucudnn.files import read_whole
from mucudnn.ir.conv import AlgoPerf, ConvProblem
from mucudnn.ir.measurement import Measurement, Recording, Verdict
from mucudnn.ir.numerics import NATIVE, Traits
from mucudnn.recording_format import MOST, read_recording, recorded_environments

T = TypeVar("T")
_ANYTHING = "*"  # stands for every algorithm if nothing at all was recorded


class RecordedConv:
    """The measured algorithms of one machine and their times, with verdicts on plans.

    An algorithm measured in several math modes is listed once for each, as `NAME[mode]`
    unless the mode is the default. Of two rows or verdicts for the same case the newer
    counts.
    """

    def __init__(
        self,
        device: VirtualDevice,
        measurements: Sequence[Measurement],
        verdicts: Iterable[Verdict] = (),
    ) -> None:
        self._device = device
        self._rows: dict[ConvProblem, dict[str, AlgoPerf]] = {}
        self._batches: dict[ConvProblem, set[int]] = {}
        modes: dict[tuple[ConvProblem, str], set[str]] = {}
        for m in measurements:
            modes.setdefault((m.problem, m.perf.algo), set()).add(m.perf.math_mode)
        # Oldest first, so that of two rows for the same case the newer stays.
        for m in sorted(measurements, key=lambda m: m.measured_at):
            name, mode = m.perf.algo, m.perf.math_mode
            if mode != NATIVE and len(modes[m.problem, name]) > 1:
                name = f"{name}[{mode}]"
            self._rows.setdefault(m.problem, {})[name] = m.perf
            layer = m.problem.with_batch(1)
            self._batches.setdefault(layer, set()).add(m.problem.batch)
        self._verdicts = {(v.problem, v.signature): v.ratio for v in verdicts}

    def algorithms(self, problem: ConvProblem) -> Sequence[tuple[str, int]]:
        """Return (name, workspace bytes) of every algorithm measured on `problem`."""
        rows = self._rows.get(problem, {})
        return [(n, perf.workspace) for n, perf in rows.items() if perf.error is None]

    def excluded(self, problem: ConvProblem) -> Sequence[tuple[str, str]]:
        """Return (name, reason) of every recorded failure, or a general reason."""
        rows = self._rows.get(problem)
        if rows is None:
            return [(_ANYTHING, self._missing(problem))]
        return [(n, perf.error) for n, perf in rows.items() if perf.error is not None]

    def traits(self, problem: ConvProblem, algo: str) -> Traits:
        """Return the recorded traits."""
        perf = self._rows[problem][algo]
        return Traits(perf.deterministic, perf.math_mode, perf.notes)

    def sizes(self, problem: ConvProblem) -> Sequence[int]:
        """Return the micro-batch sizes at which `problem` was measured, ascending."""
        return sorted(self._batches.get(problem.with_batch(1), ()))

    def row(self, problem: ConvProblem, algo: str) -> AlgoPerf:
        """Return the measurement of a listed algorithm, noise included."""
        return replace(self._rows[problem][algo], algo=algo)

    def verdict(self, problem: ConvProblem, signature: str) -> float | None:
        """See `Verdict.ratio`; None if the plans were not run whole."""
        return self._verdicts.get((problem, signature))

    run = run_kernel

    def kernel(self, problem: ConvProblem, algo: str) -> Call:
        """Return a prepared recorded kernel."""
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
        return self._device.kernel(problem, algo, perf.workspace, perf.time_ms)

    def _missing(self, problem: ConvProblem) -> str:
        sizes = ", ".join(map(str, self.sizes(problem)))
        if not sizes:
            return f"not recorded on {self._device.fingerprint} at any micro-batch"
        return f"not recorded at micro-batch {problem.batch}; recorded: {sizes}"


def recording_of(backend: Backend) -> RecordedConv | None:
    """Return the recording that a backend replays; None if the backend measures."""
    return backend.conv if isinstance(backend.conv, RecordedConv) else None


def device_count(argument: str) -> int:
    """Return the number of machines in the file."""
    count = len(_parsed(argument, recorded_environments))
    if count == 0:
        raise BackendUnavailableError(f"recording {argument} has no measurements")
    return count


def read_file(argument: str) -> Recording:
    """Read a whole recording; raise BackendUnavailableError if there is none."""
    return _parsed(argument, read_recording)


def _parsed(argument: str, parse: Callable[[bytes], T]) -> T:
    if not argument:
        raise BackendUnavailableError(
            "backend 'recorded' needs a file: recorded:FILE, where FILE was written "
            "by `mucudnn tune --record` or the export of a cache"
        )
    file = Path(argument).expanduser()
    try:
        return parse(read_whole(file, most=MOST))
    except OSError as e:
        raise BackendUnavailableError(
            f"recording {file} cannot be read: {e.strerror}"
        ) from e
    except ValueError as e:
        raise BackendUnavailableError(f"{file} is not a usable recording: {e}") from e


def load(argument: str, device: int) -> Backend:
    """Create a backend that replays one machine of a recording on a virtual clock."""
    recording = read_file(argument)
    fingerprint, known = list(recording.environments.items())[device]
    clock = VirtualDevice(fingerprint, known)
    conv = RecordedConv(
        clock,
        [m for m in recording.measurements if m.fingerprint == fingerprint],
        [v for v in recording.verdicts if v.fingerprint == fingerprint],
    )
    return Backend(
        f"recorded:{argument}",
        clock,
        conv,
        binder=lambda plan, replay: PlanRunner(plan, per_step(plan, conv.kernel)),
        index=device,
        split_alignment=recording.alignments.get(fingerprint, 1),
    )
