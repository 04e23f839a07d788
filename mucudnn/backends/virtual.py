"""A device without memory whose clock is moved by hand.

Backends that compute nothing share it: what differs is who says how long things take.
"""

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from mucudnn.backends.base import Copier, Device
from mucudnn.backends.runner import Call
from mucudnn.backends.virtual_copies import Clock, VirtualCopier
from mucudnn.errors import BackendError, UnsupportedError
from mucudnn.ir.conv import ConvProblem
from mucudnn.ir.tensor import TensorSpec, itemsize

__all__ = ["LINK_BYTES_PER_MS", "VirtualArray", "VirtualDevice"]

LINK_BYTES_PER_MS = 1 << 24
"""16.8 GB/s each way: what a PCI Express 4.0 slot of eight lanes can reach, roughly."""


@dataclass(frozen=True, slots=True)
class VirtualArray:
    """A shape without contents; slices of the first axis are taken for free."""

    shape: tuple[int, ...]
    dtype: str = "uint8"

    @property
    def nbytes(self) -> int:
        """Bytes it would take."""
        return math.prod(self.shape) * itemsize(self.dtype)

    def __getitem__(self, window: slice) -> "VirtualArray":
        start, stop, step = window.indices(self.shape[0])
        length = max(0, stop - start) if step == 1 else len(range(start, stop, step))
        return VirtualArray((length, *self.shape[1:]), self.dtype)

    def reshape(self, shape: tuple[int, ...]) -> "VirtualArray":
        """The same bytes, of as many elements."""
        return VirtualArray(shape, self.dtype)


class VirtualDevice:
    """Counts bytes; its clock moves only when a kernel runs or waits for a copy.

    Args:
        fingerprint: Of the machine it stands for.
        description: What is known of that machine.
        out_bytes_per_ms: Rate of its copies to the host.
        in_bytes_per_ms: Rate of its copies from the host.
    """

    def __init__(
        self,
        fingerprint: str = "null",
        description: Mapping[str, str] | None = None,
        *,
        out_bytes_per_ms: float = LINK_BYTES_PER_MS,
        in_bytes_per_ms: float = LINK_BYTES_PER_MS,
    ) -> None:
        self.fingerprint = fingerprint
        self._description = dict(description or {})
        self._clock = Clock()
        self._rates = Fraction(out_bytes_per_ms), Fraction(in_bytes_per_ms)

    def description(self) -> Mapping[str, str]:
        """What it was told of the machine it stands for."""
        return self._description

    @property
    def now_ms(self) -> float:
        """The virtual time."""
        return float(self._clock.now)

    def advance(self, ms: float | Fraction) -> None:
        """Let time pass."""
        self._clock.now += ms if isinstance(ms, Fraction) else Fraction(ms)

    def kernel(self, problem: ConvProblem, algo: str, nbytes: int, ms: float) -> Call:
        """A kernel that needs workspace and takes time, and does nothing else.

        It takes the operands of any batch: they need not be cut into slices.

        Args:
            problem: What it is for, to be named in errors.
            algo: Likewise.
            nbytes: Of workspace; a `BackendError` if it is given less.
            ms: Exactly.
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
        """No memory, of the right size."""
        return VirtualArray((nbytes,))

    def trim(self) -> None:
        """Nothing is held."""

    def available_bytes(self) -> int:
        """Nobody knows.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            f"{self.fingerprint} is no real device: how much memory it has free is not "
            "known; give a size, such as 8GiB"
        )

    def view(self, buffer: VirtualArray, offset: int, spec: TensorSpec) -> VirtualArray:
        """Part of nothing."""
        return VirtualArray(spec.shape, spec.dtype)

    def dense(self, array: VirtualArray, *, copy: bool = False) -> VirtualArray:
        """Nothing is always densely packed."""
        return array

    def overlap(self, one: Any, other: Any) -> bool:
        """Nothing has no bytes."""
        return False

    def randomize(self, array: VirtualArray) -> None:
        """Nothing to fill."""

    def upload(self, source: Any, target: VirtualArray) -> None:
        """Nothing to copy."""

    def download(self, source: VirtualArray) -> Any:
        """Zeros of its shape."""
        import numpy as np

        return np.zeros(source.shape, source.dtype)

    def queue(self) -> threading.Thread:
        """The calling thread."""
        return threading.current_thread()

    def begin(self, launches: int = 1) -> Fraction:
        """This point in virtual time; launching costs none."""
        return self._clock.now

    def record(self) -> Fraction:
        """This point in virtual time."""
        return self._clock.now

    def elapsed_ms(self, start: Fraction, stop: Fraction) -> float:
        """Virtual difference."""
        return float(stop - start)

    def host(self, nbytes: int) -> VirtualArray:
        """No memory, of the right size."""
        return VirtualArray((nbytes,))

    def copier(self) -> VirtualCopier:
        """Two engines on this device's clock."""
        return VirtualCopier(self._clock, *self._rates)

    def peer(self, index: int, nbytes: int) -> "VirtualPeer":
        """No memory of a device that is not there either."""
        return VirtualPeer(f"peer:{index}", nbytes)


@dataclass(frozen=True, slots=True)
class VirtualPeer:
    """Bytes that there are not, behind links as fast as those to the host."""

    name: str
    nbytes: int

    def view(self, offset: int, nbytes: int) -> VirtualArray:
        """Part of nothing."""
        return VirtualArray((nbytes,))

    def copier(self, device: Device) -> Copier:
        """Two engines of its own."""
        return device.copier()

    def close(self) -> None:
        """Nothing is held."""
