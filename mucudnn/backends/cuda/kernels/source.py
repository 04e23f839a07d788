"""CUDA C sources, read from `.cu` files beside this module, and their compiler options.

A source is compiled for one element type and one index type. `T` is the type of
tensors, `P` that of parameters and statistics, which may be wider, `A` the type of
arithmetic, `I` an index: 32 bits wide if that is enough, because GPUs divide 64-bit
numbers slowly.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from mucudnn.errors import UnsupportedError

THREADS = 256
"""Threads of every block."""

TYPES: Mapping[str, tuple[str, str]] = {
    "float32": ("float", "float"),
    "float64": ("double", "double"),
    "float16": ("Half", "float"),
    "bfloat16": ("BFloat", "float"),
    "uint16": ("BFloat", "float"),  # bfloat16's bits, where ml_dtypes is missing
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
