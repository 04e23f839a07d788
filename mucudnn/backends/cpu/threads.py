"""Worker threads of the CPU backend, their BLAS setting and scratch memory.

Kernels split their own work and call single-threaded BLAS from each thread, so that
copies and transforms run in parallel too, not only the matrix products.
"""

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from threadpoolctl import ThreadpoolController

from mucudnn.processes import PerProcess, on_fork

T = TypeVar("T")
_UFUNC_BUFFER = 256
_FORK_S = 5.0


@contextmanager
def as_kernels() -> Iterator[None]:
    """Run the body with the NumPy settings of a library's kernels, on this thread."""
    # NumPy copies operands that are not contiguous through buffers of 8192 elements
    # each, which is unaccounted memory. With short buffers it also copies less, because
    # runs longer than a buffer are used directly.
    # Warnings are off: infinities and NaNs in a result are an answer, on which loss
    # scaling relies, and some algorithms produce them as intermediates.
    with np.errstate(all="ignore"):  # restores the size as well
        np.setbufsize(_UFUNC_BUFFER)
        yield


class _SerialBlas:
    """A limit of BLAS to one thread while any convolution runs; re-entrant, shared."""

    def __init__(self) -> None:
        self._libraries = ThreadpoolController().select(user_api="blas").lib_controllers
        self._changed = PerProcess(threading.Condition)
        self._users: list[int] = []  # threads inside `limited`, once per entry
        self._saved: list[int] = []
        self.num_threads = max((lib.num_threads for lib in self._libraries), default=1)
        on_fork(self)

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Limit BLAS to one thread until this and all other bodies have ended."""
        process, thread = os.getpid(), threading.get_ident()
        with self._changed.value:
            if not self._users:
                self._saved = [lib.num_threads for lib in self._libraries]
                for lib in self._libraries:
                    lib.set_num_threads(1)
            self._users.append(thread)
        try:
            yield
        finally:
            with self._changed.value:
                if process == os.getpid():  # otherwise `after_fork` has reset the users
                    self._users.remove(thread)
                    if not self._users:
                        self._restore()
                    self._changed.value.notify_all()

    def _restore(self) -> None:
        for lib, n in zip(self._libraries, self._saved, strict=False):
            lib.set_num_threads(n)
        self._saved = []

    def before_fork(self) -> None:
        """Wait, within `_FORK_S`, for other threads' convolutions, and start none."""
        # OpenBLAS ends its threads before a fork: a product in progress would never be
        # finished, not even in the parent.
        changed, me = self._changed.value, threading.get_ident()
        changed.acquire()
        changed.wait_for(lambda: {*self._users} <= {me}, timeout=_FORK_S)

    def after_fork(self, *, child: bool) -> None:
        """Reset the limit in a child, which lacks the threads that set the limit."""
        if child:
            self._users = []
            self._restore()
        else:
            self._changed.value.release()


class _Queue(Iterator[T]):
    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self._lock = threading.Lock()

    def __next__(self) -> T:
        with self._lock:
            return next(self._items)


class Workers:
    """A fixed crew of threads, the caller's included.

    By default as many as the BLAS library has, so that `OMP_NUM_THREADS` and
    `OPENBLAS_NUM_THREADS` are obeyed.
    """

    def __init__(self, count: int | None = None) -> None:
        self._blas = _SerialBlas()
        self.count = count or self._blas.num_threads
        self.scratch = Scratch()
        self._pool = PerProcess(self._start)

    def _start(self) -> ThreadPoolExecutor | None:
        if self.count == 1:
            return None
        return ThreadPoolExecutor(self.count - 1, thread_name_prefix="mucudnn")

    def each(
        self,
        items: Iterable[T],
        fn: Callable[[int, T], object],
        at_most: int | None = None,
    ) -> None:
        """Call `fn(worker, item)` once per item; idle workers take the next one.

        `worker` is below `at_most` (or `count`) and belongs to one thread at a time: it
        can index private buffers. The assignment of items to workers is not
        deterministic: results must not depend on it. The first exception is re-raised
        after all have stopped.
        """
        queue = _Queue(items)

        def drain(worker: int) -> None:
            with as_kernels():
                for item in queue:
                    fn(worker, item)

        with self._blas.limited():
            if (pool := self._pool.value) is None:
                drain(0)
                return
            crew = min(self.count, at_most or self.count)
            # The pool keeps a submitted task alive until a thread has taken it from
            # its queue, even if cancelled: the task must not reference the operands.
            shared = [drain]
            futures = [
                pool.submit(lambda own, i: own[0](i), shared, i) for i in range(1, crew)
            ]
            try:
                drain(0)
            finally:
                # Tasks that have not started have nothing left to do. Waiting for them
                # would deadlock if the caller is itself a thread of the pool.
                errors = [f.exception() for f in futures if not f.cancel()]
                shared.clear()
            for error in errors:
                if error is not None:
                    raise error

    def ranges(self, total: int, fn: Callable[[int, int, int], None]) -> None:
        """Call `fn(worker, start, stop)` once a worker, over equal, fixed shares."""
        step = max(1, -(-total // self.count))
        starts = range(0, total, step)
        self.each(starts, lambda _, i: fn(i // step, i, min(i + step, total)))


# Matrix products that accumulate into a submatrix, through NumPy's own BLAS library.
#
# `np.matmul` always overwrites its result, so a sum of products needs a temporary as
# large as each product and a second pass. BLAS itself takes leading dimensions and a
# factor beta: C = A B + beta C. NumPy does not expose this, so the C interface of the
# library that NumPy has loaded is called directly. A product releases the interpreter
# lock.
#
# Only OpenBLAS, which NumPy's packages carry, is supported. With another library
# (Accelerate, MKL) callers fall back to `np.matmul`, which is slower.


_ROW_MAJOR, _NOT_TRANSPOSED, _TRANSPOSED = 101, 111, 112

_NAMES = (
    ("scipy_cblas_{}gemm64_", ctypes.c_int64),
    ("cblas_{}gemm64_", ctypes.c_int64),
    ("scipy_cblas_{}gemm", ctypes.c_int),
    ("cblas_{}gemm", ctypes.c_int),
)
"""Symbol names of `gemm` in builds of OpenBLAS, and their integer types."""

_LETTERS = {"float32": ("s", ctypes.c_float), "float64": ("d", ctypes.c_double)}


Product = Callable[[int, int, int, float], None]
"""C = A B + beta C for matrices of fixed shapes and strides, by their addresses."""


def numpy_blas() -> list[Any]:
    """Return the BLAS libraries that NumPy uses, as `threadpoolctl` objects."""
    found = ThreadpoolController().select(user_api="blas").lib_controllers
    # SciPy and others load a BLAS of their own: where NumPy's package carries one, only
    # that counts.
    package = Path(np.__file__).parent
    folders = (package, package.parent / "numpy.libs")
    own = [
        library
        for library in found
        if any(Path(library.filepath).is_relative_to(at) for at in folders)
    ]
    return own or list(found)


def available(dtype: str) -> bool:
    """Return whether a library multiplies matrices of this type."""
    return _gemm(dtype) is not None


def product(a: Any, b: Any, c: Any) -> Product | None:
    """Prepare products of matrices (m, k) (k, n) of these strides; None if impossible.

    Each is contiguous along one axis, as made by `as_matrix`, and kept alive by the
    caller. None: no library multiplies this type.
    """
    if (gemm := _gemm(c.dtype.name)) is None:
        return None
    swapped = _storage_order(c)[0] == _TRANSPOSED
    if swapped:  # C is column-major: compute the row-major Cᵀ = Bᵀ Aᵀ
        a, b, c = b.T, a.T, c.T
    (left, lda), (right, ldb), (_, ldc) = map(_storage_order, (a, b, c))
    layout = (_ROW_MAJOR, left, right, *c.shape, a.shape[1], 1.0)

    def multiply(a: int, b: int, c: int, beta: float) -> None:
        gemm(*layout, a, lda, b, ldb, beta, c, ldc)

    return (lambda a, b, c, beta: multiply(b, a, c, beta)) if swapped else multiply


def _storage_order(matrix: Any) -> tuple[int, int]:
    """Return the CBLAS transposition flag and the leading dimension of a matrix."""
    rows, columns = (stride // matrix.itemsize for stride in matrix.strides)
    if columns == 1 and rows >= matrix.shape[1]:
        return _NOT_TRANSPOSED, rows
    return _TRANSPOSED, columns


@functools.cache
def _gemm(dtype: str) -> Callable[..., None] | None:
    letter, real = _LETTERS[dtype]
    for library in numpy_blas():
        if library.internal_api != "openblas":
            continue
        loaded = ctypes.CDLL(library.filepath)
        for name, integer in _NAMES:
            gemm: Any = getattr(loaded, name.format(letter), None)
            if gemm is not None:
                gemm.restype = None
                matrix = (ctypes.c_void_p, integer)
                numbers = (real, *matrix, *matrix, real, *matrix)
                gemm.argtypes = [*[ctypes.c_int] * 3, *[integer] * 3, *numbers]
                # Names alone do not tell the size of integers: try a product.
                if _works(gemm, dtype):
                    found: Callable[..., None] = gemm
                    return found
    return None


def _works(gemm: Callable[..., None], dtype: str) -> bool:
    a, b = np.arange(8, dtype=dtype).reshape(2, 4), np.arange(12, dtype=dtype)
    c = np.ones((2, 5), dtype)
    expected = c.copy()
    expected[:, :4] += a[:, :3] @ b.reshape(3, 4)
    sizes = (_ROW_MAJOR, _NOT_TRANSPOSED, _NOT_TRANSPOSED, 2, 4, 3, 1.0)
    gemm(*sizes, a.ctypes.data, 4, b.ctypes.data, 4, 1.0, c.ctypes.data, 5)
    return bool((c == expected).all())


# Per-thread scratch memory for intermediate results, kept from call to call.
#
# Fresh memory is mapped page by page as it is first written, which costs several times
# as much as a pass of a formula, and allocators return large freed blocks to the
# system.


_ALIGNMENT = 64  # bytes: a cache line


class Scratch(threading.local):
    """Per-thread memory as large as the largest piece of work so far."""

    def __init__(self) -> None:
        self._memory: Any = np.empty(0, np.uint8)
        self._taken = 0

    def restart(self) -> None:
        """Begin a piece of work: no array taken before is in use."""
        if self._taken > self._memory.size:
            self._memory = np.empty(0, np.uint8)  # free first, then allocate
            raw = np.empty(self._taken + _ALIGNMENT, np.uint8)
            start = -raw.ctypes.data % _ALIGNMENT
            self._memory = raw[start : start + self._taken]
        self._taken = 0

    def take(self, size: int, dtype: Any) -> Any:
        """Return an uninitialised flat array; newly allocated if memory is short."""
        nbytes = size * np.dtype(dtype).itemsize
        start = self._taken
        self._taken += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._taken > self._memory.size:
            return np.empty(size, dtype)
        return self._memory[start : start + nbytes].view(dtype)

    def like(self, array: Any) -> Any:
        """Return the only array of a piece of work: dense, of this shape and type."""
        self.restart()
        return self.take(array.size, array.dtype).reshape(array.shape)
