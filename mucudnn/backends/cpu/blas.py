"""Matrix products that accumulate into a submatrix, through NumPy's own BLAS library.

`np.matmul` always overwrites its result, so a sum of products needs a temporary as
large as each product and a second pass. BLAS itself takes leading dimensions and a
factor beta: C = A B + beta C. NumPy does not expose this, so the C interface of the
library that NumPy has loaded is called directly. A product releases the interpreter
lock.

Only OpenBLAS, which NumPy's packages carry, is supported. With another library
(Accelerate, MKL) callers fall back to `np.matmul`, which is slower.
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

_ROW_MAJOR, _NOT_TRANSPOSED, _TRANSPOSED = 101, 111, 112

_NAMES = (
    ("scipy_cblas_{}gemm64_", ctypes.c_int64),
    ("cblas_{}gemm64_", ctypes.c_int64),
    ("scipy_cblas_{}gemm", ctypes.c_int),
    ("cblas_{}gemm", ctypes.c_int),
)
"""Symbol names of `gemm` in builds of OpenBLAS, and their integer types."""

_LETTERS = {"float32": ("s", ctypes.c_float), "float64": ("d", ctypes.c_double)}


@dataclass(frozen=True, slots=True)
class Product:
    """C = A B + beta C for matrices of fixed shapes and strides at any address."""

    gemm: Callable[..., None]
    layout: tuple[int, ...]
    lds: tuple[int, int, int]
    swapped: bool

    def __call__(self, a: int, b: int, c: int, beta: float) -> None:
        """Multiply the matrices at these addresses; the caller keeps them alive."""
        one, two, three = self.lds
        if self.swapped:
            a, b = b, a
        self.gemm(*self.layout, 1.0, a, one, b, two, beta, c, three)


def numpy_blas() -> list[Any]:
    """Return the BLAS libraries that NumPy computes with, as `threadpoolctl` objects.

    SciPy and others load a BLAS of their own. If NumPy's package carries a library,
    only that one is returned, otherwise all that are loaded.
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
    """Return whether a library multiplies matrices of this type."""
    return _gemm(dtype) is not None


def product(a: Any, b: Any, c: Any) -> Product | None:
    """Prepare products of matrices with these shapes and strides.

    Args:
        a: (m, k), contiguous along one axis, as made by `as_matrix`.
        b: (k, n), likewise.
        c: (m, n), likewise.

    Returns:
        None if no library multiplies this type.
    """
    if (gemm := _gemm(c.dtype.name)) is None:
        return None
    swapped = _storage_order(c)[0] == _TRANSPOSED
    if swapped:  # C is column-major: compute the row-major Cᵀ = Bᵀ Aᵀ
        a, b, c = b.T, a.T, c.T
    (left, lda), (right, ldb), (_, ldc) = (
        _storage_order(a),
        _storage_order(b),
        _storage_order(c),
    )
    layout = (_ROW_MAJOR, left, right, *c.shape, a.shape[1])
    return Product(gemm, layout, (lda, ldb, ldc), swapped)


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
    sizes = (_ROW_MAJOR, _NOT_TRANSPOSED, _NOT_TRANSPOSED, 2, 4, 3, 1.0)
    gemm(*sizes, a.ctypes.data, 4, b.ctypes.data, 4, 1.0, c.ctypes.data, 5)
    return bool((c == expected).all())
