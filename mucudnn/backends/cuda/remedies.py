"""What to install, where CuPy says only what went wrong.

CuPy compiles its own kernels (copies with gaps, conversions, arithmetic) when they are
first used, from sources that include CUDA's headers. Ours include none, so that such a
lack shows late, in the middle of something else.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from mucudnn.errors import BackendError, MucudnnError, UnsupportedError

__all__ = ["refuse_bits", "told", "with_remedy"]

_HEADERS = re.compile(
    r"(cannot|could not) open source file|\.(h|hpp|cuh)\b.*not found|cuda headers",
    re.IGNORECASE,
)
_LIBRARY = re.compile(r"\blib(nvrtc|cublas|cublaslt|curand|cudart)\b", re.IGNORECASE)
_TOOLKIT = (
    "CuPy finds no {lacking} of CUDA here; install what it compiles with: "
    "pip install 'mucudnn[cuda13]' (or [cuda12] for a CUDA 12 driver), or set "
    "CUDA_PATH to an installed toolkit"
)
_BITS = "uint16"
"""How bfloat16 is held where NumPy has no name for it."""


def with_remedy(message: str) -> str:
    """The message, begun by what to install where it tells of headers or libraries."""
    for pattern, lacking in ((_HEADERS, "headers"), (_LIBRARY, "library")):
        if pattern.search(message):
            return f"{_TOOLKIT.format(lacking=lacking)}. What failed: {message}"
    return message


@contextmanager
def told(what: str) -> Iterator[None]:
    """Tell of a compilation by CuPy that fails in our words; all else passes.

    Raises:
        BackendError: CuPy lacks headers or a library.
    """
    try:
        yield
    except (MucudnnError, MemoryError):
        raise
    except Exception as e:  # CuPy has many kinds, and some of the Python's own
        message = with_remedy(f"{what} failed: {e}")
        if message.startswith(what):
            raise
        raise BackendError(message) from e


def refuse_bits(name: str, what: str) -> None:
    """Refuse to read bfloat16 as whole numbers.

    Raises:
        UnsupportedError: The elements are bfloat16's bits.
    """
    if name == _BITS:
        raise UnsupportedError(
            f"{what} of bfloat16 needs ml_dtypes, which is not installed: "
            "pip install ml_dtypes (it comes with mucudnn[cuda13] and mucudnn[cuda12])"
        )
