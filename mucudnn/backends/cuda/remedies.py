"""Installation hints for errors in which CuPy only says what went wrong.

CuPy compiles its own kernels (copies with gaps, conversions, arithmetic) at their first
use, from sources that include CUDA's headers. Our sources include none, so missing
headers show late, in the middle of something else.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from mucudnn.errors import BackendError, MucudnnError, UnsupportedError

__all__ = ["refuse_bits", "with_install_hints", "with_remedy"]

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
_BITS = "uint16"  # type of bfloat16 arrays if NumPy has no name for bfloat16


def with_remedy(message: str) -> str:
    """Prefix a message about headers or libraries with what to install."""
    for pattern, lacking in ((_HEADERS, "headers"), (_LIBRARY, "library")):
        if pattern.search(message):
            return f"{_TOOLKIT.format(lacking=lacking)}. What failed: {message}"
    return message


@contextmanager
def with_install_hints(what: str) -> Iterator[None]:
    """Convert a failed compilation by CuPy to a BackendError with a hint."""
    try:
        yield
    except (MucudnnError, MemoryError):
        raise
    except Exception as e:  # CuPy raises many types, some of them builtin
        message = with_remedy(f"{what} failed: {e}")
        if message.startswith(what):
            raise
        raise BackendError(message) from e


def refuse_bits(name: str, what: str) -> None:
    """Refuse to interpret the bits of bfloat16 as whole numbers."""
    if name == _BITS:
        raise UnsupportedError(
            f"{what} of bfloat16 needs ml_dtypes, which is not installed: "
            "pip install ml_dtypes (it comes with mucudnn[cuda13] and mucudnn[cuda12])"
        )
