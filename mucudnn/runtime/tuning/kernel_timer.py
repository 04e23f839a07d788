"""Time the algorithms of one convolution at one micro-batch size on one device.

`measure_size` serves a `SizeRequest` with a timer of this process (`LocalTimer`) or of
a child process (`isolation.ChildTimer`). An executor's workers do the same on other
machines (`workers`). Requests travel as `SizeRequest.to_message`, rows as
`codecs.perf_to_dict`.
"""

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mucudnn.backends import Device
from mucudnn.backends.base import Backend
from mucudnn.backends.device import Buffer
from mucudnn.backends.recorded import recording_of
from mucudnn.codecs import decode_fields, encode_fields
from mucudnn.errors import MucudnnError, OutOfMemoryError, UnsupportedError
from mucudnn.ir.conv import AlgoPerf, ConvProblem
from mucudnn.ir.numerics import RowStatus, Traits
from mucudnn.ir.sizes import exact_bytes, format_bytes
from mucudnn.ir.tensor import TensorSpec
from mucudnn.runtime.tuning.result_check import ResultCheck
from mucudnn.runtime.tuning.timing import StoppingRule, Timing, measure

logger = logging.getLogger(__name__)

Message = dict[str, Any]

_ORDINARY = 1 << 30
"""Bytes below which free memory is not queried, as the query is slow."""

_LEAST_RUNS = 2
"""A warm-up and a sample; a row of a warm-up alone is not cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureLimits:
    """Limits of timing kernels.

    Attributes:
        rule: Decides when a kernel has been timed enough.
        memory_limit: Bytes for operands and workspace together.
        deadline: Time on `clock` (seconds) after which nothing is started.
        clock: Clock in seconds, for the deadline only.
    """

    rule: StoppingRule
    memory_limit: float = math.inf
    deadline: float = math.inf
    clock: Callable[[], float] = time.monotonic

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - self.clock()


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRequest:
    """Algorithms of a convolution to time in turn at one micro-batch size.

    Attributes:
        problem: Convolution at its largest batch size.
        batch: Micro-batch size to time.
        workspaces: Workspace bytes by algorithm, in the order of timing.
        best_ms: Fastest time known at this size.
        expected_ms: Estimated time of one run by algorithm; absent or 0 if unknown.
    """

    problem: ConvProblem
    batch: int
    workspaces: Mapping[str, int]
    limits: MeasureLimits
    best_ms: float = math.inf
    expected_ms: Mapping[str, float] = field(default_factory=dict)

    @property
    def micro_batch(self) -> ConvProblem:
        """The convolution at the size to time."""
        return self.problem.with_batch(self.batch)

    def to_message(self) -> Message:
        """Encode as plain values for another process, maybe of another machine."""
        return {
            "problem": encode_fields(self.problem),
            "batch": self.batch,
            "workspaces": dict(self.workspaces),
            "best_ms": self.best_ms,
            "expected_ms": dict(self.expected_ms),
            "rule": dataclasses.asdict(self.limits.rule),
            "memory_limit": self.limits.memory_limit,
            # Seconds since 1970: other clocks differ between processes.
            "until": time.time() + self.limits.left_s,
        }

    @classmethod
    def from_message(cls, message: Message) -> "SizeRequest":
        """Decode `to_message`, with a deadline on this process's clock."""
        return cls(
            problem=decode_fields("problem", ConvProblem, message["problem"]),
            batch=message["batch"],
            workspaces=message["workspaces"],
            limits=MeasureLimits(
                rule=StoppingRule(**message["rule"]),
                memory_limit=message["memory_limit"],
                deadline=time.monotonic() + message["until"] - time.time(),
            ),
            best_ms=message["best_ms"],
            expected_ms=message["expected_ms"],
        )


class KernelTimer(Protocol):
    """Times kernels on one device, in this process or in one that may crash."""

    @property
    def backend(self) -> Backend:
        """Backend that is measured."""

    def time(self, request: SizeRequest, algo: str, best_ms: float) -> AlgoPerf:
        """Return the row of one algorithm of a request; a failure is a row, too.

        `best_ms` is the fastest time known by now.
        """

    def release(self) -> None:
        """Free the buffers; the next kernel allocates them anew."""


def measure_size(
    timer: KernelTimer, request: SizeRequest, on_row: Callable[[AlgoPerf], None]
) -> None:
    """Time the algorithms of a request in turn; pass each row to `on_row`."""
    best_ms, limits = request.best_ms, request.limits
    for algo, nbytes in request.workspaces.items():
        needed_s = _LEAST_RUNS * request.expected_ms.get(algo, 0.0) / 1e3
        # Start nothing that is expected to miss the deadline.
        if (left_s := limits.left_s) > needed_s:
            perf = timer.time(request, algo, best_ms)
        else:
            reason = "the time limit was reached"
            if left_s > 0:
                reason = (
                    f"would take about {needed_s:.2g} s, the time limit leaves "
                    f"{left_s:.2g} s"
                )
            error = RowStatus.LIMITED.text(reason)
            perf = row_of(timer.backend, request.micro_batch, algo, nbytes, error)
        if perf.error is None:
            best_ms = min(best_ms, perf.time_ms)
        on_row(perf)


def row_of(
    backend: Backend,
    problem: ConvProblem,
    algo: str,
    nbytes: int,
    result: Timing | str,
    traits: Traits | None = None,
) -> AlgoPerf:
    """Return the row of an algorithm with its timing, or with an error."""
    timing = Timing(math.inf, 0.0, 0) if isinstance(result, str) else result
    traits = traits or backend.conv.traits(problem, algo)
    return AlgoPerf(
        algo=algo,
        batch=problem.batch,
        time_ms=timing.time_ms,
        workspace=nbytes,
        error=result if isinstance(result, str) else None,
        noise_ms=timing.noise_ms,
        samples=timing.samples,
        deterministic=traits.deterministic,
        math_mode=traits.math_mode,
        notes=traits.notes,
    )


class LocalTimer:
    """Times kernels in this process, and holds their operands and workspace.

    Buffers are allocated for the largest size timed so far, and smaller sizes use views
    of them, so that nothing is allocated between measurements unless memory is short.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self._problem: ConvProblem | None = None
        self._operands: tuple[Buffer, ...] = ()
        self._batch = 0
        self._scratch: Buffer = None
        self._scratch_bytes = -1  # none yet; an empty workspace has 0
        self._checks: dict[int, ResultCheck] = {}  # by micro-batch size

    def release(self) -> None:
        """Free the buffers; the next kernel allocates them anew."""
        self._operands, self._batch = (), 0
        self._checks.clear()
        self._scratch, self._scratch_bytes = None, -1
        self.backend.device.trim()

    def time(self, request: SizeRequest, algo: str, best_ms: float) -> AlgoPerf:
        """Return the row of one algorithm of a request; a failure is a row, too."""
        problem, nbytes = request.micro_batch, request.workspaces[algo]
        if request.problem != self._problem:
            self.release()
            self._problem = request.problem
        try:
            arrays = self._allocate(request, nbytes)
        except OutOfMemoryError as e:
            error = RowStatus.LIMITED.text(str(e))
            return row_of(self.backend, problem, algo, nbytes, error)
        if (recording := recording_of(self.backend)) is not None:
            return recording.row(problem, algo)
        conv, scratch = self.backend.conv, self._scratch

        def run() -> None:
            conv.run(problem, algo, *arrays, scratch)

        result: Timing | str
        traits: Traits | None = None
        try:
            if self.backend.plan_serializer is not None:
                run()  # builds the plan, which is not timed
                # The operands of a micro-batch size stay as they are.
                if (check := self._checks.get(problem.batch)) is None:
                    check = ResultCheck(self.backend, problem, arrays, self._operands)
                    self._checks[problem.batch] = check
                traits, wrong = check.judged(algo, scratch, self._scratch_bytes)
                if wrong:
                    return row_of(self.backend, problem, algo, nbytes, wrong)
            result = measure(
                run,
                self.backend.device,
                request.limits.rule,
                deadline=request.limits.deadline,
                best_ms=best_ms,
                clock=request.limits.clock,
            )
        except MemoryError as e:
            result = RowStatus.LIMITED.text(f"out of memory: {e}")
        except UnsupportedError as e:
            result = RowStatus.UNSUPPORTED.text(str(e))
        except Exception as e:
            # A broken algorithm, perhaps of a plug-in, must not stop the others.
            if not isinstance(e, MucudnnError):
                logger.warning("%s failed on %s", algo, problem, exc_info=True)
            result = f"{type(e).__name__}: {e}"
        return row_of(self.backend, problem, algo, nbytes, result, traits)

    def _allocate(self, request: SizeRequest, nbytes: int) -> tuple[Any, Any, Any]:
        """Return operands at the requested size; `_scratch` has `nbytes` at least."""
        specs, limit = request.micro_batch.operands(), request.limits.memory_limit
        check_memory(specs, nbytes, limit)
        try:
            most = max(request.batch, self._batch), max(nbytes, self._scratch_bytes)
            self._grow(request.problem.with_batch(most[0]), most[1], limit)
        except OutOfMemoryError:  # drop the larger buffers of earlier kernels
            self.release()
            self._grow(request.micro_batch, nbytes, limit)
        # Smaller sizes view the beginning of the buffers.
        view = self.backend.device.view
        pairs = zip(self._operands, specs, strict=True)
        a, b, out = (view(buffer, 0, spec) for buffer, spec in pairs)
        return a, b, out

    def _grow(self, problem: ConvProblem, nbytes: int, memory_limit: float) -> None:
        """Grow the buffers to a problem and `nbytes` of workspace."""
        device, specs, batch = self.backend.device, problem.operands(), problem.batch
        check_memory(specs, nbytes, memory_limit)
        if batch > self._batch:
            self._operands, self._batch = (), 0
            self._checks.clear()
            buffers = tuple(device.allocate(spec.nbytes) for spec in specs)
            for buffer, spec in zip(buffers[:2], specs[:2], strict=True):
                device.randomize(device.view(buffer, 0, spec))
            self._operands, self._batch = buffers, batch
        if nbytes > self._scratch_bytes:
            self._scratch, self._scratch_bytes = None, -1
            self._scratch = device.allocate(nbytes)
            self._scratch_bytes = nbytes


def operands(
    backend: Backend, problem: ConvProblem, workspace: int, memory_limit: float
) -> tuple[Any, Any, Any]:
    """Allocate random inputs and an output, if they fit with `workspace` bytes."""
    device, specs = backend.device, problem.operands()
    check_memory(specs, workspace, memory_limit)
    a, b, out = (device.view(device.allocate(s.nbytes), 0, s) for s in specs)
    device.randomize(a)
    device.randomize(b)
    return a, b, out


def check_memory(
    specs: Iterable[TensorSpec], workspace: int, memory_limit: float
) -> None:
    """Raise `OutOfMemoryError` where operands and workspace exceed the limit."""
    needed = sum(spec.nbytes for spec in specs) + workspace
    if needed > memory_limit:
        raise OutOfMemoryError(
            f"needs {format_bytes(needed, int(memory_limit))} with its operands, "
            f"the memory limit is {format_bytes(int(memory_limit), needed)}"
        )


def check_room(device: Device, what: str, specs: Iterable[TensorSpec]) -> None:
    """Raise `OutOfMemoryError` where tensors exceed the free memory.

    Devices that do not report their free memory are not checked.
    """
    needed = sum(spec.nbytes for spec in specs)
    if needed <= _ORDINARY:
        return
    try:
        free = device.available_bytes()
    except UnsupportedError:
        return
    if needed > free:
        raise OutOfMemoryError(
            f"{what} takes {exact_bytes(needed)}, and {exact_bytes(free)} of memory "
            "are free; check padding, stride and shapes, or give fewer samples at once"
        )
