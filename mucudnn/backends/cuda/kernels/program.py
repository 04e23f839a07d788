"""CUDA C of the kernels: what every source begins with, and how one is launched.

A source is compiled at its first launch, for one type of elements and one of indices.
`T` is what tensors hold, `P` what parameters and statistics beside them do, which may
be wider, `A` what is computed with, `I` an index: 32 bits wide where that is enough,
because GPUs divide 64-bit numbers slowly. The sources need no header.

Scalars reach a kernel as `I` (a Python int), `double` (a float) or 64 bits without sign
(a NumPy scalar). Rates, step numbers and loss scales are read on the device: a launch
never waits for one, so a whole step can be captured as a graph.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from mucudnn.backends.base import no_workspace
from mucudnn.backends.cuda.remedies import refuse_bits, with_remedy
from mucudnn.errors import BackendError, UnsupportedError
from mucudnn.ir.tensor import TensorSpec

__all__ = [
    "PRELUDE",
    "THREADS",
    "Attrs",
    "CupyLauncher",
    "KernelCall",
    "Launcher",
    "Operation",
    "Program",
    "Specs",
    "as_ncs",
    "compiler_options",
    "flat",
]

Attrs = Mapping[str, Any]
Specs = Sequence[TensorSpec]

THREADS = 256
"""Threads of every block."""

_MOST_BLOCKS = 1 << 16
_NARROW = 1 << 30
"""Below so many elements a 32-bit index may go one stride of the grid too far."""

_TYPES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "float32": ("float", "float"),
        "float64": ("double", "double"),
        "float16": ("Half", "float"),
        "bfloat16": ("BFloat", "float"),
        "uint16": ("BFloat", "float"),  # bfloat16's bits, where ml_dtypes is missing
    }
)

PRELUDE = r"""
#define KERNEL extern "C" __global__ void
#define EACH(i, count)                                                            \
    for (I i = (I)blockIdx.x * THREADS + threadIdx.x; i < (count);                \
         i += (I)gridDim.x * THREADS)

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fc00000)
#endif

#ifdef HALVES
struct Half {
    unsigned short bits;
    Half() = default;
    __device__ explicit Half(float value) {
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    }
    __device__ operator float() const {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
        return value;
    }
};
struct BFloat {
    unsigned short bits;
    BFloat() = default;
    __device__ explicit BFloat(float value) {
        unsigned int wide = __float_as_uint(value);
        bits = (wide & 0x7fffffffu) > 0x7f800000u
                   ? 0x7fff
                   : (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
    }
    __device__ operator float() const {
        return __uint_as_float((unsigned int)bits << 16);
    }
};
#endif
typedef ELEMENT T;
typedef PARAMETER P;
typedef COMPUTED A;
typedef INDEX I;
"""


@dataclass(frozen=True)
class Program:
    """The kernels of one file, in CUDA C: each begins with the word KERNEL."""

    body: str

    @property
    def source(self) -> str:
        """The text that the compiler is given."""
        return PRELUDE + self.body

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names, as they come."""
        return tuple(re.findall(r"^KERNEL (\w+)\(", self.body, re.MULTILINE))


def compiler_options(
    dtype: str, *, wide: bool, parameters: str | None = None
) -> tuple[str, ...]:
    """What makes a source one for these elements.

    Args:
        dtype: Of tensors.
        wide: Whether indices need 64 bits.
        parameters: Of parameters and statistics; None is that of tensors.

    Raises:
        UnsupportedError: There is no arithmetic in this type.
    """
    for name in (dtype, parameters):
        if name is not None and name not in _TYPES:
            raise UnsupportedError(
                f"no kernel computes in {name}; they do in {', '.join(_TYPES)}"
            )
    element, computed = _TYPES[dtype]
    beside, _ = _TYPES[parameters or dtype]
    index = "long long" if wide else "int"
    narrow = {element, beside} & {"Half", "BFloat"}
    halves = ("-DHALVES",) if narrow else ()
    return (
        "-std=c++17",
        f"-DELEMENT={element}",
        f"-DPARAMETER={beside}",
        f"-DCOMPUTED={computed}",
        f"-DINDEX={index}",
        f"-DTHREADS={THREADS}",
        *halves,
    )


class Launcher(Protocol):
    """What kernels need of a GPU."""

    def launch(
        self,
        program: Program,
        kernel: str,
        blocks: tuple[int, ...],
        *arguments: Any,
        dtype: Any = None,
        parameters: Any = None,
    ) -> None:
        """Start a kernel in blocks of `THREADS`; nothing if there are no blocks.

        Args:
            program: Where the kernel is.
            kernel: Its name.
            blocks: Along one or two axes.
            arguments: Arrays, ints, floats, NumPy scalars.
            dtype: Of the elements; if None that of the first argument.
            parameters: Of parameters and statistics; if None that of the elements.
        """
        ...

    def matmul(self, a: Any, b: Any, out: Any) -> None:
        """Multiply two matrices, which may be transposed views."""
        ...

    def copy(self, source: Any, target: Any) -> None:
        """Write an array or a number into an array; either may have gaps."""
        ...


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
        beside: Any = None,
    ) -> None:
        """Start a kernel for elements of the first argument's type.

        `beside` is a parameter, or a statistic, whose type may be another.
        """
        parameters = None if beside is None else beside.dtype
        self.gpu.launch(program, kernel, blocks, *arguments, parameters=parameters)

    def numbers(self, *names: str) -> tuple[float, ...]:
        """The attributes of these names as what a kernel takes as `double`."""
        return tuple(float(self.attrs[name]) for name in names)


@dataclass(frozen=True, slots=True)
class Operation:
    """A kernel of the contract before it is given its launcher.

    Attributes:
        run: Launches what the operation takes.
        workspace: As `Kernel.workspace`.
    """

    run: Callable[[KernelCall], None]
    workspace: Callable[[Specs, Specs, Attrs], int] = no_workspace


class CupyLauncher:
    """Kernels on CuPy's current stream.

    Args:
        stream: Called before every launch; makes the backend's GPU the thread's own.
    """

    def __init__(self, stream: Callable[[], object]) -> None:
        self._stream = stream
        self._compiled: dict[tuple[Program, str, tuple[str, str], bool], Any] = {}

    def launch(
        self,
        program: Program,
        kernel: str,
        blocks: tuple[int, ...],
        *arguments: Any,
        dtype: Any = None,
        parameters: Any = None,
    ) -> None:
        """Compile it if this is the first time, and launch it.

        Raises:
            BackendError: CUDA refuses to compile, to load or to launch it.
        """
        if 0 in blocks:
            return
        import numpy as np

        wide = any(getattr(a, "size", 1) >= _NARROW for a in arguments)
        element = arguments[0].dtype if dtype is None else dtype
        types = element.name, (element if parameters is None else parameters).name
        index = np.int64 if wide else np.int32
        passed = tuple(_scalar(a, index, np.float64) for a in arguments)
        self._stream()
        try:
            self._function(program, kernel, types, wide)(blocks, (THREADS,), passed)
        except UnsupportedError:
            raise
        except Exception as e:  # of CuPy: to compile, to load or to launch
            raise BackendError(
                with_remedy(f"{kernel} ({types[0]}) cannot be launched: {e}")
            ) from e

    def matmul(self, a: Any, b: Any, out: Any) -> None:
        """By cuBLAS, into `out`.

        Raises:
            UnsupportedError: The elements are no floats that CuPy knows by name.
            BackendError: cuBLAS fails.
        """
        import cupy

        refuse_bits(out.dtype.name, "a product of matrices")
        if out.dtype.name not in _TYPES:  # not by `kind`: bfloat16's is that of bytes
            raise UnsupportedError(f"no product of matrices of {out.dtype.name}")
        self._stream()
        try:
            cupy.matmul(a, b, out=out)
        except Exception as e:  # of CuPy or cuBLAS
            raise BackendError(
                with_remedy(f"the product of {a.shape} and {b.shape} failed: {e}")
            ) from e

    def copy(self, source: Any, target: Any) -> None:
        """By CuPy, converting if the types differ.

        Raises:
            UnsupportedError: It would convert bfloat16 and `ml_dtypes` is missing.
            BackendError: CUDA fails.
        """
        if target.size == 0:
            return
        kinds = {name_of(source), target.dtype.name}
        if len(kinds) > 1:
            for name in kinds:
                refuse_bits(name, "a conversion")
        self._stream()
        try:
            target[...] = source
        except Exception as e:  # of CuPy
            raise BackendError(
                with_remedy(
                    f"a copy into {target.dtype.name} {target.shape} failed: {e}"
                )
            ) from e

    def _function(
        self, program: Program, kernel: str, types: tuple[str, str], wide: bool
    ) -> Any:
        key = program, kernel, types, wide
        if key not in self._compiled:
            import cupy

            dtype, parameters = types
            options = compiler_options(dtype, wide=wide, parameters=parameters)
            self._compiled[key] = cupy.RawKernel(program.source, kernel, options)
        return self._compiled[key]


def name_of(source: Any) -> str:
    """The type of an array's elements; of a number that it is one."""
    return str(source.dtype.name) if hasattr(source, "dtype") else "a number"


def _scalar(argument: Any, index: Any, real: Any) -> Any:
    if isinstance(argument, int):
        return index(argument)
    return real(argument) if isinstance(argument, float) else argument


def flat(count: int) -> tuple[int]:
    """Blocks for a kernel that takes elements one by one, with EACH."""
    return (min(_MOST_BLOCKS, -(-count // THREADS)),)


def as_ncs(shape: Sequence[int]) -> tuple[int, int, int]:
    """(N, C, S) of (N, C, *spatial); S is 1 without spatial axes."""
    N, C, *spatial = shape
    return N, C, math.prod(spatial)
