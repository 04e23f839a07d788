"""Launching kernels by CuPy: at once, or prepared once and called step after step.

What is prepared has its kernel, its grid and its arguments as CUDA takes them: calling
it is one call of CuPy. It goes to the current stream of the current device, which who
calls it has to see to; what is launched at once sees to that itself.
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

_NARROW = 1 << 30
"""Below so many elements a 32-bit index may go one stride of the grid too far."""

_BLOCK = (THREADS,)


class CupyLauncher:
    """Kernels on CuPy's current stream.

    Args:
        stream: Called before every launch; makes the backend's GPU the thread's own.
    """

    def __init__(self, stream: Callable[[], object]) -> None:
        self._stream = stream
        self._compiled: dict[tuple[Program, str, tuple[str, str], bool], Any] = {}

    def launch(self, launch: KernelLaunch) -> None:
        """Compile it if this is the first time, and launch it.

        Raises:
            BackendError: CUDA refuses to compile, to load or to launch it.
        """
        if launch.empty:
            return
        call = self.prepared(launch)
        self._stream()
        call()

    def prepared(self, launch: KernelLaunch) -> Call:
        """The launch, to be called; its arrays must stay where they are.

        Raises:
            UnsupportedError: No kernel computes with these types.
        """
        wide = any(getattr(a, "size", 1) >= _NARROW for a in launch.arguments)
        passed, blocks = _passed(launch.arguments, wide), launch.blocks

        try:
            function: Any = self._function(launch, wide)
        except UnsupportedError:
            raise
        except Exception as e:  # of CuPy
            raise _refused(launch, e) from e

        def call() -> None:
            try:
                function(blocks, _BLOCK, passed)
            except Exception as e:  # of CuPy: to compile, to load or to launch
                raise _refused(launch, e) from e

        return call

    def matmul(self, a: Any, b: Any, out: Any) -> None:
        """By cuBLAS, into `out`.

        Raises:
            UnsupportedError: The elements are no floats that CuPy knows by name.
            BackendError: cuBLAS fails.
        """
        call = self.prepared_matmul(a, b, out)
        self._stream()
        call()

    def prepared_matmul(self, a: Any, b: Any, out: Any) -> Call:
        """The product, to be called; see `matmul`."""
        import cupy

        refuse_bits(out.dtype.name, "a product of matrices")
        if out.dtype.name not in TYPES:  # not by `kind`: bfloat16's is that of bytes
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
        """By CuPy, converting if the types differ.

        Raises:
            UnsupportedError: It would convert bfloat16 and `ml_dtypes` is missing.
            BackendError: CUDA fails.
        """
        call = self.prepared_copy(source, target)
        self._stream()
        call()

    def prepared_copy(self, source: Any, target: Any) -> Call:
        """The copy, to be called; see `copy`."""
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
        """Whole numbers on the device, row after row.

        Raises:
            BackendError: CUDA has no room, or fails.
        """
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
        """Where an array begins."""
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


def name_of(source: Any) -> str:
    """The type of an array's elements; of a number that it is one."""
    return str(source.dtype.name) if hasattr(source, "dtype") else "a number"


def _passed(arguments: Sequence[Any], wide: bool) -> tuple[Any, ...]:
    """Arguments as CUDA takes them; an array that is missing is a null pointer."""
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
    """What there is to do for no elements."""
