"""Matrix products added to part of a larger matrix, by the BLAS that NumPy brings.

`np.matmul` always overwrites its result, so a sum of products needs a buffer as large
as each of them and a second pass. BLAS itself takes leading dimensions and a factor for
what is there already: C = A B + beta C. NumPy does not offer that, so the library that
it has loaded is called by its C interface. While a product runs, other threads may.

Only OpenBLAS is looked for, which NumPy's own packages carry. With another library
(Accelerate, MKL) callers go by `np.matmul`, and are slower.
"""

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

__all__ = ["Product", "available", "numpy_blas", "product"]

_ROW_MAJOR, _AS_IT_IS, _TRANSPOSED = 101, 111, 112

_NAMES = (
    ("scipy_cblas_{}gemm64_", ctypes.c_int64),
    ("cblas_{}gemm64_", ctypes.c_int64),
    ("scipy_cblas_{}gemm", ctypes.c_int),
    ("cblas_{}gemm", ctypes.c_int),
)
"""How builds of OpenBLAS call it, and their integers."""

_LETTERS = {"float32": ("s", ctypes.c_float), "float64": ("d", ctypes.c_double)}


@dataclass(frozen=True, slots=True)
class Product:
    """C = A B + beta C, of matrices of fixed shapes and strides at any address."""

    gemm: Callable[..., None]
    layout: tuple[int, ...]
    lds: tuple[int, int, int]
    swapped: bool

    def __call__(self, a: int, b: int, c: int, beta: float) -> None:
        """Multiply what lies at these addresses; whoever calls keeps it alive."""
        one, two, three = self.lds
        if self.swapped:
            a, b = b, a
        self.gemm(*self.layout, 1.0, a, one, b, two, beta, c, three)


def numpy_blas() -> list[Any]:
    """What NumPy computes with, as `threadpoolctl` sees it.

    SciPy and others load a BLAS of their own beside it: where NumPy's package carries
    one, only that counts. Without such a folder all that are loaded do.
    """
    found = ThreadpoolController().select(user_api="blas").lib_controllers
    package = Path(np.__file__).parent
    folders = (package, package.parent / "numpy.libs")
    own = [
        library
        for library in found
        if any(Path(library.filepath).is_relative_to(folder) for folder in folders)
    ]
    return own or list(found)


def available(dtype: str) -> bool:
    """Whether there is a library for matrices of this type."""
    return _gemm(dtype) is not None


def product(a: Any, b: Any, c: Any) -> Product | None:
    """How to multiply matrices like these; None if there is no library to do it.

    Args:
        a: (m, k), contiguous along one axis, as `as_matrix` makes it.
        b: (k, n), too.
        c: (m, n), too.
    """
    if (gemm := _gemm(c.dtype.name)) is None:
        return None
    swapped = _order(c)[0] == _TRANSPOSED
    if swapped:  # its transpose is what lies row by row
        a, b, c = b.T, a.T, c.T
    (left, lda), (right, ldb), (_, ldc) = _order(a), _order(b), _order(c)
    layout = (_ROW_MAJOR, left, right, *c.shape, a.shape[1])
    return Product(gemm, layout, (lda, ldb, ldc), swapped)


def _order(matrix: Any) -> tuple[int, int]:
    """Whether a matrix lies column by column, and its leading dimension."""
    rows, columns = (stride // matrix.itemsize for stride in matrix.strides)
    if columns == 1 and rows >= matrix.shape[1]:
        return _AS_IT_IS, rows
    return _TRANSPOSED, columns


@functools.cache
def _gemm(dtype: str) -> Callable[..., None] | None:
    """The C function, tried once on numbers whose product is known."""
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
                gemm.argtypes = [
                    *[ctypes.c_int] * 3,
                    *[integer] * 3,
                    *(real, *matrix, *matrix, real, *matrix),
                ]
                if _works(gemm, dtype):
                    found: Callable[..., None] = gemm
                    return found
    return None


def _works(gemm: Callable[..., None], dtype: str) -> bool:
    a, b = np.arange(8, dtype=dtype).reshape(2, 4), np.arange(12, dtype=dtype)
    c = np.ones((2, 5), dtype)
    expected = c.copy()
    expected[:, :4] += a[:, :3] @ b.reshape(3, 4)
    sizes = (_ROW_MAJOR, _AS_IT_IS, _AS_IT_IS, 2, 4, 3, 1.0)
    gemm(*sizes, a.ctypes.data, 4, b.ctypes.data, 4, 1.0, c.ctypes.data, 5)
    return bool((c == expected).all())
