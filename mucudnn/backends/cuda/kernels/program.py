"""The interface between kernels and launchers: calls, launches, recorded launches.

Scalars reach a kernel as `I` (a Python int), `double` (a float) or unsigned 64 bits (a
NumPy scalar); None is a missing array. Rates, step numbers and loss scales are read on
the device: a launch never waits for one, so a whole step can be captured as a graph.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mucudnn.backends.cuda.kernels.source import THREADS, Program
from mucudnn.backends.kernel import no_workspace
from mucudnn.ir.tensor import TensorSpec

__all__ = [
    "THREADS",
    "Attrs",
    "Call",
    "KernelCall",
    "KernelLaunch",
    "Launcher",
    "Operation",
    "Preparer",
    "Program",
    "Recorder",
    "Specs",
    "as_ncs",
    "flat",
    "walking",
]

Attrs = Mapping[str, Any]
Specs = Sequence[TensorSpec]

Call = Callable[[], None]
"""Launches prepared work."""

_MOST_BLOCKS = 1 << 16
_MOST_WALKING = 1 << 11  # enough to fill any GPU


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """A kernel, its grid and its arguments.

    Attributes:
        program: Program that contains the kernel.
        kernel: Name of the kernel.
        blocks: Blocks of `THREADS` along one or two axes; with none, nothing runs.
        arguments: Arrays, ints, floats, NumPy scalars; None is a missing array.
        types: Names of the types of elements, and of parameters and statistics.
    """

    program: Program
    kernel: str
    blocks: tuple[int, ...]
    arguments: tuple[Any, ...]
    types: tuple[str, str]

    @property
    def empty(self) -> bool:
        """Whether nothing runs."""
        return 0 in self.blocks


class Launcher(Protocol):
    """The operations that kernels need of a GPU."""

    def launch(self, launch: KernelLaunch) -> None:
        """Start a kernel."""

    def matmul(self, a: Any, b: Any, out: Any) -> None:
        """Multiply two matrices, which may be transposed views."""

    def copy(self, source: Any, target: Any) -> None:
        """Write an array or a number into an array; either may have gaps."""

    def table(self, rows: Sequence[Sequence[int]]) -> Any:
        """Return an int64 array on the device, row after row."""

    def address(self, array: Any) -> int:
        """Return the address of an array, for a table."""


class Preparer(Launcher, Protocol):
    """A launcher that also prepares launches, for arrays that stay in place."""

    def prepared(self, launch: KernelLaunch) -> Call:
        """Return the launch as a function."""

    def prepared_matmul(self, a: Any, b: Any, out: Any) -> Call:
        """Return the product as a function."""

    def prepared_copy(self, source: Any, target: Any) -> Call:
        """Return the copy as a function."""


class Recorder:
    """A launcher that records launches; they depend on shapes and can be repeated."""

    def __init__(self, gpu: Preparer) -> None:
        self._gpu = gpu
        self._calls: list[Call] = []

    def launch(self, launch: KernelLaunch) -> None:
        """Record a launch."""
        if not launch.empty:
            self._calls.append(self._gpu.prepared(launch))

    def matmul(self, a: Any, b: Any, out: Any) -> None:
        """Record a product."""
        self._calls.append(self._gpu.prepared_matmul(a, b, out))

    def copy(self, source: Any, target: Any) -> None:
        """Record a copy."""
        self._calls.append(self._gpu.prepared_copy(source, target))

    def table(self, rows: Sequence[Sequence[int]]) -> Any:
        """Write a table immediately."""
        return self._gpu.table(rows)

    def address(self, array: Any) -> int:
        """See `Launcher.address`."""
        return self._gpu.address(array)

    def recorded(self) -> Call:
        """Return all recorded launches as one function."""
        calls = tuple(self._calls)
        if len(calls) == 1:
            return calls[0]

        def call() -> None:
            for each in calls:
                each()

        return call


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One call of an operation: dense arrays, and the GPU to launch kernels on."""

    gpu: Launcher
    inputs: Sequence[Any]
    outputs: Sequence[Any]
    attrs: Attrs
    workspace: Any

    def launch(
        self,
        program: Program,
        kernel: str,
        blocks: tuple[int, ...],
        *arguments: Any,
        like: Any = None,
        beside: Any = None,
    ) -> None:
        """Start a kernel for elements of the type of `like`, or the first argument's.

        `beside` is a parameter or a statistic, whose type may differ.
        """
        element = (arguments[0] if like is None else like).dtype
        other = element if beside is None else beside.dtype
        types = element.name, other.name
        self.gpu.launch(KernelLaunch(program, kernel, blocks, arguments, types))

    def numbers(self, *names: str) -> tuple[float, ...]:
        """Return the named attributes as floats, which kernels take as `double`."""
        return tuple(float(self.attrs[name]) for name in names)


@dataclass(frozen=True, slots=True)
class Operation:
    """A kernel without its launcher.

    Attributes:
        run: Launches one call.
        workspace: See `Kernel.workspace`.
        together: Launches several consecutive calls, in fewer launches.
        flags: See `Kernel.flags`.
    """

    run: Callable[[KernelCall], None]
    workspace: Callable[[Specs, Specs, Attrs], int] = no_workspace
    together: Callable[[Sequence[KernelCall]], None] | None = None
    flags: tuple[int, ...] = ()


def flat(count: int) -> tuple[int]:
    """Return the blocks of a kernel that loops over elements with EACH."""
    return (min(_MOST_BLOCKS, -(-count // THREADS)),)


def walking(count: int) -> tuple[int]:
    """Return the blocks of a kernel whose threads take many elements with a `Walk`."""
    return (min(_MOST_WALKING, -(-count // THREADS)),)


def as_ncs(shape: Sequence[int]) -> tuple[int, int, int]:
    """Return (N, C, S) of (N, C, *spatial); S is 1 without spatial axes."""
    N, C, *spatial = shape
    return N, C, math.prod(spatial)
