"""Launching kernels by CuPy: at once, or prepared once and repeated every step.

A prepared launch holds its kernel, grid and arguments in CUDA's form: repeating it is
one call of CuPy. It goes to the current stream of the current device, which the caller
must set; immediate launches set it themselves.
"""

from collections.abc import Callable, Sequence
from typing import Any

from mucudnn.backends.cuda.kernels.program import Call, KernelLaunch
from mucudnn.backends.cuda.kernels.source import (
    THREADS,
    TYPES,
    Program,
    compiler_options,
)
from mucudnn.backends.cuda.remedies import refuse_bits, with_remedy
from mucudnn.errors import BackendError, UnsupportedError

__all__ = ["CupyLauncher"]

_NARROW = 1 << 30  # elements; below, a 32-bit index can overrun by a stride of the grid

_BLOCK = (THREADS,)


class CupyLauncher:
    """A launcher on CuPy's current stream; `stream` sets the thread's device before."""

    def __init__(self, stream: Callable[[], object]) -> None:
        self._stream = stream
        self._compiled: dict[tuple[Program, str, tuple[str, str], bool], Any] = {}

    def launch(self, launch: KernelLaunch) -> None:
        """Launch a kernel, compiled at its first launch."""
        if launch.empty:
            return
        self._run(self.prepared(launch))

    def prepared(self, launch: KernelLaunch) -> Call:
        """Return the launch as a function; its arrays must stay in place."""
        wide = any(getattr(a, "size", 1) >= _NARROW for a in launch.arguments)
        arguments, blocks = _cuda_arguments(launch.arguments, wide), launch.blocks

        try:
            function: Any = self._function(launch, wide)
        except UnsupportedError:
            raise
        except Exception as e:  # of CuPy
            raise _refused(launch, e) from e

        def call() -> None:
            try:
                function(blocks, _BLOCK, arguments)
            except Exception as e:  # of CuPy: to compile, to load or to launch
                raise _refused(launch, e) from e

        return call

    def matmul(self, a: Any, b: Any, out: Any) -> None:
        """Multiply matrices by cuBLAS, into `out`."""
        self._run(self.prepared_matmul(a, b, out))

    def prepared_matmul(self, a: Any, b: Any, out: Any) -> Call:
        """Return the product as a function; see `matmul`."""
        import cupy

        refuse_bits(out.dtype.name, "a product of matrices")
        if out.dtype.name not in TYPES:  # bfloat16's `kind` is that of bytes
            raise UnsupportedError(f"no product of matrices of {out.dtype.name}")

        def call() -> None:
            try:
                cupy.matmul(a, b, out=out)
            except Exception as e:  # of CuPy or cuBLAS
                raise BackendError(
                    with_remedy(f"the product of {a.shape} and {b.shape} failed: {e}")
                ) from e

        return call

    def copy(self, source: Any, target: Any) -> None:
        """Copy by CuPy, converting if the types differ."""
        self._run(self.prepared_copy(source, target))

    def prepared_copy(self, source: Any, target: Any) -> Call:
        """Return the copy as a function; see `copy`."""
        kinds = {name_of(source), target.dtype.name}
        if len(kinds) > 1 and target.size:
            for name in kinds:
                refuse_bits(name, "a conversion")

        def call() -> None:
            try:
                target[...] = source
            except Exception as e:  # of CuPy
                raise BackendError(
                    with_remedy(
                        f"a copy into {target.dtype.name} {target.shape} failed: {e}"
                    )
                ) from e

        return call if target.size else _nothing

    def table(self, rows: Sequence[Sequence[int]]) -> Any:
        """Return an int64 array on the device, row after row."""
        import cupy
        import numpy as np

        values = np.array(rows, np.int64)
        self._stream()
        try:
            made = cupy.empty(values.nbytes, "uint8").view("int64")
            made.set(values.reshape(-1))
        except Exception as e:  # of CuPy
            raise BackendError(
                with_remedy(f"a table of {values.nbytes} bytes failed: {e}")
            ) from e
        return made

    def address(self, array: Any) -> int:
        """Return the address of an array."""
        return int(array.data.ptr)

    def _run(self, call: Call) -> None:
        self._stream()
        call()

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


def name_of(source: Any) -> str:
    """Return the element type of an array, or "a number"."""
    return str(source.dtype.name) if hasattr(source, "dtype") else "a number"


def _cuda_arguments(arguments: Sequence[Any], wide: bool) -> tuple[Any, ...]:
    """Convert arguments to CUDA's types; a missing array is a null pointer."""
    import numpy as np

    index = np.int64 if wide else np.int32

    def one(argument: Any) -> Any:
        match argument:
            case None:
                return np.uint64(0)
            case int():
                return index(argument)
            case float():
                return np.float64(argument)
        return argument

    return tuple(map(one, arguments))


def _refused(launch: KernelLaunch, error: Exception) -> BackendError:
    name = f"{launch.kernel} ({launch.types[0]})"
    return BackendError(with_remedy(f"{name} cannot be launched: {error}"))


def _nothing() -> None:
    """Do nothing: there are no elements."""
