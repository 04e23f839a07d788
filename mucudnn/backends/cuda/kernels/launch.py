"""CUDA C sources, launches by CuPy, and tables of tensors.

A prepared launch holds its kernel, grid and arguments in CUDA's form: repeating it is
one call of CuPy. It goes to the current stream of the current device, which the caller
must set.

Scalars reach a kernel as `I` (a Python int), `double` (a float) or unsigned 64 bits
(a NumPy scalar); None is a missing array. Rates, step numbers and loss scales are
read on the device: a launch never waits for one, so a whole step can be captured as a
graph.
"""

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any

from mucudnn.backends.cuda.loading import with_remedy
from mucudnn.errors import BackendError, UnsupportedError
from mucudnn.ir.tensor import TensorSpec

# CUDA C sources, read from `.cu` files beside this module, and their compiler options.
#
# A source is compiled for one element type and one index type. `T` is the type of
# tensors, `P` that of parameters and statistics, which may be wider, `A` the type of
# arithmetic, `I` an index: 32 bits wide if that is enough, because GPUs divide 64-bit
# numbers slowly.


THREADS = 256
"""Threads of every block."""

TYPES: Mapping[str, tuple[str, str]] = {
    "float32": ("float", "float"),
    "float64": ("double", "double"),
    "float16": ("Half", "float"),
    "bfloat16": ("BFloat", "float"),
}
"""Type name to the C types of elements and of arithmetic."""

_CUDA = files("mucudnn.backends.cuda")


@dataclass(frozen=True)
class Program:
    """The kernels of one source; each definition begins with KERNEL."""

    text: str

    @classmethod
    def load(cls, path: str) -> "Program":
        """Read a source; its path is relative to `mucudnn/backends/cuda`."""
        return cls((_CUDA / path).read_text("utf-8"))

    @functools.cached_property
    def source(self) -> str:
        """The text for the compiler, which finds no headers: each is inserted."""
        return _insert_headers(self.text)

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels, in order."""
        return tuple(re.findall(r"^KERNEL (\w+)\(", self.source, re.MULTILINE))


def _insert_headers(text: str) -> str:
    def header(match: re.Match[str]) -> str:
        return "\n" + _insert_headers((_CUDA / "kernels" / match[1]).read_text("utf-8"))

    return re.sub(r'^#include "(\w+\.cuh)"\n', header, text, flags=re.MULTILINE)


def read_constant(header: str, name: str) -> int:
    """Return the whole number that a header defines, for the host's use."""
    text = (_CUDA / "kernels" / header).read_text("utf-8")
    (value,) = re.findall(rf"^#define {name} (\d+)\b", text, re.MULTILINE)
    return int(value)


def compiler_options(
    dtype: str, *, wide: bool, parameters: str | None = None
) -> tuple[str, ...]:
    """Return the compiler options for these types; `wide` indices have 64 bits.

    `parameters` is the type of parameters and statistics, by default that of tensors.
    """
    for name in (dtype, parameters):
        if name is not None and name not in TYPES:
            raise UnsupportedError(
                f"no kernel computes in {name}; supported: {', '.join(TYPES)}"
            )
    element, computed = TYPES[dtype]
    beside, _ = TYPES[parameters or dtype]
    halves = ("-DHALVES",) if {element, beside} & {"Half", "BFloat"} else ()
    return (
        "-std=c++17",
        f"-DELEMENT={element}",
        f"-DPARAMETER={beside}",
        f"-DCOMPUTED={computed}",
        f"-DINDEX={'long long' if wide else 'int'}",
        f"-DTHREADS={THREADS}",
        *halves,
    )


# Launches, recorded and repeated.


Call = Callable[[], None]
"""Launches prepared work."""

Attrs = Mapping[str, Any]
Specs = Sequence[TensorSpec]
_NARROW = 1 << 30  # elements; below, a 32-bit index can overrun by a stride of the grid
_MOST_BLOCKS = 1 << 16
_MOST_WALKING = 1 << 11  # enough to fill any GPU


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """A kernel of a program, its grid and its arguments.

    `blocks`, of `THREADS`, are along one or two axes; with none, nothing runs.
    Arguments are arrays, ints, floats, NumPy scalars; None is a missing array. `types`
    are those of elements, and of parameters and statistics.
    """

    program: Program
    kernel: str
    blocks: tuple[int, ...]
    arguments: tuple[Any, ...]
    types: tuple[str, str]


class Recorder:
    """A GPU as a kernel sees it: records launches, which can be repeated."""

    def __init__(self, gpu: "CupyLauncher") -> None:
        self._gpu = gpu
        self._calls: list[Call] = []
        self.table = gpu.table
        self.address = gpu.address

    def launch(self, launch: KernelLaunch) -> None:
        """Record a launch."""
        if 0 not in launch.blocks:  # otherwise nothing runs
            self._calls.append(self._gpu.prepared(launch))

    def matmul(self, a: Any, b: Any, out: Any) -> None:
        """Record a product of two matrices, which may be transposed views."""
        self._calls.append(self._gpu.prepared_matmul(a, b, out))

    def copy(self, source: Any, target: Any) -> None:
        """Record a copy of an array or a number into an array; either may have gaps."""
        if target.size:
            self._calls.append(self._gpu.prepared_copy(source, target))

    def recorded(self) -> Call:
        """Return all recorded launches as one function."""
        calls = tuple(self._calls)
        if len(calls) == 1:
            return calls[0]

        def call() -> None:
            for each in calls:
                each()

        return call


class CupyLauncher:
    """Launches on CuPy's current stream; `enter` sets device and stream."""

    def __init__(self, enter: Callable[[], object]) -> None:
        self.enter = enter
        self._compiled: dict[tuple[Program, str, tuple[str, str], bool], Any] = {}

    def prepared(self, launch: KernelLaunch) -> Call:
        """Return the launch as a function; the kernel is compiled at its first call."""
        wide = any(getattr(a, "size", 1) >= _NARROW for a in launch.arguments)
        arguments, blocks = _cuda_arguments(launch.arguments, wide), launch.blocks
        what = f"{launch.kernel} ({launch.types[0]}) cannot be launched"
        try:
            function: Any = self._function(launch, wide)
        except UnsupportedError:
            raise
        except Exception as e:  # of CuPy
            raise BackendError(with_remedy(f"{what}: {e}")) from e
        # The call compiles, loads and launches.
        return _guarded(partial(function, blocks, (THREADS,), arguments), what)

    def prepared_matmul(self, a: Any, b: Any, out: Any) -> Call:
        """Return a product by cuBLAS as a function."""
        import cupy

        if out.dtype.name not in TYPES:  # bfloat16's `kind` is that of bytes
            raise UnsupportedError(f"no product of matrices of {out.dtype.name}")
        what = f"the product of {a.shape} and {b.shape} failed"
        return _guarded(partial(cupy.matmul, a, b, out=out), what)

    def prepared_copy(self, source: Any, target: Any) -> Call:
        """Return a copy by CuPy as a function; it converts if the types differ."""
        what = f"a copy into {target.dtype.name} {target.shape} failed"
        return _guarded(partial(target.__setitem__, ..., source), what)

    def table(self, rows: Sequence[Sequence[int]]) -> Any:
        """Return an int64 array on the device, row after row."""
        import cupy
        import numpy as np

        values = np.array(rows, np.int64)
        self.enter()
        try:
            made = cupy.empty(values.nbytes, "uint8").view("int64")
            made.set(values.reshape(-1))
        except Exception as e:  # of CuPy
            message = f"a table of {values.nbytes} bytes failed: {e}"
            raise BackendError(with_remedy(message)) from e
        return made

    def address(self, array: Any) -> int:
        """Return the address of an array."""
        return int(array.data.ptr)

    def _function(self, launch: KernelLaunch, wide: bool) -> Any:
        key = launch.program, launch.kernel, launch.types, wide
        if key not in self._compiled:
            import cupy

            dtype, parameters = launch.types
            options = compiler_options(dtype, wide=wide, parameters=parameters)
            self._compiled[key] = cupy.RawKernel(
                launch.program.source, launch.kernel, options
            )
        return self._compiled[key]


def _cuda_arguments(arguments: Sequence[Any], wide: bool) -> tuple[Any, ...]:
    """Convert arguments to CUDA's types; a missing array is a null pointer."""
    import numpy as np

    index = np.int64 if wide else np.int32

    def convert(argument: Any) -> Any:
        match argument:
            case None:
                return np.uint64(0)
            case int():
                return index(argument)
            case float():
                return np.float64(argument)
        return argument

    return tuple(map(convert, arguments))


def _guarded(run: Callable[[], object], what: str) -> Call:
    """Return a call whose failure in CuPy, CUDA or cuBLAS is a BackendError."""

    def call() -> None:
        try:
            run()
        except Exception as e:
            raise BackendError(with_remedy(f"{what}: {e}")) from e

    return call


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One call of an operation: dense arrays, and the GPU to launch kernels on."""

    gpu: Recorder
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
    """A kernel without its launcher; see `Kernel` for `workspace` and `flags`.

    `run_batched` launches several consecutive calls, in fewer launches.
    """

    run: Callable[[KernelCall], None]
    workspace: Callable[[Specs, Specs, Attrs], int] = lambda *_: 0
    run_batched: Callable[[Sequence[KernelCall]], None] | None = None
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


# Tables on the device let one launch process many tensors. A block has a part of one
# tensor, at most `_CHUNK` elements, and finds it by its index (`table.cuh`). A row has
# the first block of its tensor, the number of elements, a flag, the channels and taps
# of a transposed filter, and the addresses of the arrays that belong together, such as
# a weight, its gradient and its state; a missing array is 0. Addresses are the same in
# every step, so a table is written once.

_CHUNK = read_constant("table.cuh", "CHUNK")
_ARRAYS = read_constant("table.cuh", "ARRAYS")


@dataclass(frozen=True, slots=True)
class Row:
    """A tensor's row of a table: arrays of one size (None is missing) and a flag.

    `turned` is (channels, taps) of a filter that is (K, C, taps) in some of its arrays
    and (K, taps, C) in others; (0, 0) if all have the same layout.
    """

    arrays: Sequence[Any]
    flag: bool = False
    turned: tuple[int, int] = (0, 0)


def table_of(gpu: Recorder, rows: Sequence[Row]) -> tuple[Any, int, int]:
    """Write a table of these rows; return it, its number of rows, and of blocks."""
    table, blocks = [], 0
    for row in rows:
        if (count := row.arrays[0].size) == 0:
            continue
        addresses = [0 if a is None else gpu.address(a) for a in row.arrays]
        padding = [0] * (_ARRAYS - len(addresses))
        numbers = blocks, count, int(row.flag), *row.turned
        table.append((*numbers, *addresses, *padding))
        blocks += -(-count // _CHUNK)
    return (gpu.table(table) if table else None), len(table), blocks
