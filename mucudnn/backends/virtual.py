"""A device without memory whose clock is advanced by hand, and its copies.

Backends that compute nothing share it; they differ in the source of their times.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

from mucudnn.backends.device import Slab, Start, Way
from mucudnn.backends.plan_runner import Call
from mucudnn.errors import BackendError, UnsupportedError
from mucudnn.ir.conv import ConvProblem
from mucudnn.ir.tensor import TensorSpec, itemsize

LINK_BYTES_PER_MS = 1 << 24
"""16.8 GB/s each way: about what eight lanes of PCI Express 4.0 can reach."""


@dataclass(frozen=True, slots=True)
class VirtualArray:
    """A shape without contents; slices of the first axis cost nothing."""

    shape: tuple[int, ...]
    dtype: str = "uint8"

    @property
    def nbytes(self) -> int:
        """Bytes that a real array would take."""
        return math.prod(self.shape) * itemsize(self.dtype)

    def __getitem__(self, window: slice) -> "VirtualArray":
        start, stop, step = window.indices(self.shape[0])
        length = max(0, stop - start) if step == 1 else len(range(start, stop, step))
        return VirtualArray((length, *self.shape[1:]), self.dtype)

    def reshape(self, shape: tuple[int, ...]) -> "VirtualArray":
        """Return an array of this shape and as many elements."""
        return VirtualArray(shape, self.dtype)


class VirtualDevice:
    """A device whose clock moves only when a kernel runs or waits for a copy.

    Fingerprint and description are those of the machine it represents. `now` is the
    virtual time in ms, `rates` those of copies in bytes per ms.
    """

    def __init__(
        self, fingerprint: str = "null", description: Mapping[str, str] | None = None
    ) -> None:
        self.fingerprint = fingerprint
        self._description = dict(description or {})
        # Exact fractions: rounded sums would depend on the order in which times are
        # added.
        self.now = Fraction(0)
        self.rates: Mapping[Way, Fraction]
        self.rates = dict.fromkeys(("out", "back"), Fraction(LINK_BYTES_PER_MS))

    def description(self) -> Mapping[str, str]:
        """Return the description of the represented machine."""
        return self._description

    @property
    def now_ms(self) -> float:
        """Virtual time in ms."""
        return float(self.now)

    def advance(self, ms: float | Fraction) -> None:
        """Advance the clock."""
        self.now += ms if isinstance(ms, Fraction) else Fraction(ms)

    def kernel(self, problem: ConvProblem, algo: str, nbytes: int, ms: float) -> Call:
        """Return a kernel that takes `ms`, and `nbytes` of workspace or BackendError.

        It takes the operands of any batch: they need not be cut into slices.
        """
        advance, exactly = self.advance, Fraction(ms)

        def call(a: Any, b: Any, out: Any, workspace: Any, accumulate: bool) -> None:
            if nbytes and (workspace is None or workspace.shape[0] < nbytes):
                given = 0 if workspace is None else workspace.shape[0]
                raise BackendError(
                    f"{algo} needs {nbytes} bytes of workspace for {problem}, "
                    f"got {given}"
                )
            advance(exactly)

        return call

    def allocate(self, nbytes: int) -> VirtualArray:
        """Return an array of this size."""
        return VirtualArray((nbytes,))

    def trim(self) -> None:
        """Do nothing: no memory is held."""

    def available_bytes(self) -> int:
        """Raise UnsupportedError: the free memory is unknown."""
        raise UnsupportedError(
            f"{self.fingerprint} is not a real device, so its free memory is unknown; "
            "give a size, such as 8GiB"
        )

    def view(self, buffer: VirtualArray, offset: int, spec: TensorSpec) -> VirtualArray:
        """Return an array of the given shape."""
        return VirtualArray(spec.shape, spec.dtype)

    def dense(self, array: VirtualArray, *, copy: bool = False) -> VirtualArray:
        """Return the array."""
        return array

    def overlap(self, one: Any, other: Any) -> bool:
        """Return False: there are no bytes."""
        return False

    def randomize(self, array: VirtualArray) -> None:
        """Do nothing: there is no content."""

    def upload(self, source: Any, target: VirtualArray) -> None:
        """Do nothing: there is no content."""

    def download(self, source: VirtualArray) -> Any:
        """Return zeros of the array's shape."""
        # The command line starts without NumPy.
        import numpy as np

        return np.zeros(source.shape, source.dtype)

    def queue(self) -> threading.Thread:
        """Return the calling thread."""
        return threading.current_thread()

    def begin(self, launches: int = 1) -> Fraction:
        """Return the virtual time; launches take none."""
        return self.now

    def record(self) -> Fraction:
        """Return the virtual time."""
        return self.now

    def elapsed_ms(self, start: Fraction, stop: Fraction) -> float:
        """Return the virtual time between two marks."""
        return float(stop - start)

    def host(self, nbytes: int) -> VirtualArray:
        """Return an array of this size."""
        return VirtualArray((nbytes,))

    def copier(self) -> "VirtualCopier":
        """Return two copy engines on this device's clock."""
        return VirtualCopier(self)

    def peer(self, index: int, nbytes: int) -> Slab:
        """Return virtual memory of another device, as far away as the host's."""
        return Slab(f"peer:{index}", VirtualArray((nbytes,)), nbytes)


def run_kernel(
    self: Any,
    problem: ConvProblem,
    algo: str,
    a: Any,
    b: Any,
    out: Any,
    workspace: Any,
    *,
    accumulate: bool = False,
) -> None:
    """Advance the clock by a kernel's time: the method `ConvLibrary.run` of a library.

    The library's method `kernel` prepares the kernel.
    """
    self.kernel(problem, algo)(a, b, out, workspace, accumulate)


class VirtualCopier:
    """Two copy engines with a queue each; a ticket is the end time of its copy."""

    def __init__(self, device: VirtualDevice) -> None:
        self._device = device
        self._free: dict[Way, Fraction] = dict.fromkeys(device.rates, Fraction(0))
        self._closed = False

    def prebind(self, way: Way, source: Any, target: Any) -> Start:
        """Return a function that simulates this copy."""
        return partial(self._start, way, source, target)

    def wait(self, ticket: Fraction) -> None:
        """Advance the clock to the end of the copy."""
        self._device.now = max(self._device.now, ticket)

    def finish(self) -> None:
        """Advance the clock to the end of both queues."""
        self._device.now = max(self._device.now, *self._free.values())

    def close(self) -> None:
        """Refuse further copies."""
        self._closed = True

    def _start(
        self, way: Way, source: Any, target: Any, after: Sequence[Fraction] = ()
    ) -> Fraction:
        if self._closed:
            raise BackendError("a copy was requested from a closed copier")
        if source.nbytes != target.nbytes:
            raise BackendError(
                f"a copy of {source.nbytes} bytes was given {target.nbytes}"
            )
        start = max(self._device.now, self._free[way], *after)
        self._free[way] = start + source.nbytes / self._device.rates[way]
        return self._free[way]
