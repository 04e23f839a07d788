"""A launcher that runs CUDA kernels on the host: their source, compiled as C++.

Arrays are NumPy's. Arguments are checked against the kernel's parameters, which CUDA
would take unseen, barriers against each other, accesses and grids against what GPUs do.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
from functools import partial
from pathlib import Path

import numpy as np

from mucudnn.backends.cuda.kernels.launch import compiler_options

COMPILER = shutil.which("g++")
GOOD = 1
WRONG = {
    0: "some threads ended while others waited for them",
    2: "an access that is not aligned to its bytes",
    3: "a grid larger than CUDA takes",
}
_HEADER = Path(__file__).with_name("cuda_emulator.h")
_BUILT = Path(__file__).parent.parent / ".pytest_cache" / "emulated"
_ELEMENTS = {"F": "float32", "D": "float64", "L": "int64", "B": "uint8"}
_SCALARS = {
    "f": ctypes.c_float,
    "d": ctypes.c_double,
    "i": ctypes.c_int32,
    "l": ctypes.c_int64,
    "u": ctypes.c_uint64,
}


def compiled(source, kernels, options):
    """Load CUDA kernels as C++; what one process has compiled others find in a file."""
    text = f'#include "{_HEADER}"\n{source}\n'
    text += "".join(f"ENTRY({name})\n" for name in kernels)
    known = f"{options}{text}{_HEADER.read_text('utf-8')}"
    built = _BUILT / f"{hashlib.sha256(known.encode()).hexdigest()[:16]}.so"
    if not built.exists():
        _BUILT.mkdir(parents=True, exist_ok=True)
        own = built.with_suffix(f".{os.getpid()}")
        command = [COMPILER, "-shared", "-fPIC", *options, "-O0", "-w", "-x", "c++"]
        subprocess.run([*command, "-", "-o", own], input=text, text=True, check=True)
        own.replace(built)
    return ctypes.CDLL(str(built))


class Emulator:
    """Kernels on NumPy arrays.

    Args:
        wide: Whether indices have 64 bits.
        backwards: Whether the last thread of a block comes first: what lacks a barrier
            may be right in one order.
    """

    def __init__(self, wide=False, backwards=False):
        self._wide = wide
        self._backwards = backwards
        self.launched = set()

    def _launch(self, launch):
        if 0 in launch.blocks:
            return
        program, kernel, arguments = launch.program, launch.kernel, launch.arguments
        library = self._library(program, *launch.types)
        describe = library[f"kinds_{kernel}"]
        describe.restype = ctypes.c_char_p
        kinds = describe().decode()
        assert len(kinds) == len(arguments), (kernel, kinds)
        passed = [
            self._passed(kernel, kind, argument)
            for kind, argument in zip(kinds, arguments, strict=True)
        ]
        addresses = (ctypes.c_void_p * len(passed))(*map(ctypes.addressof, passed))
        fibers = "__syncthreads" in program.source
        x, y = (*launch.blocks, 1)[:2]
        outcome = library[f"run_{kernel}"](x, y, addresses, fibers, self._backwards)
        assert outcome == GOOD, f"{kernel}: {WRONG[outcome]}"
        self.launched.add((program, kernel))

    def enter(self):
        pass

    def table(self, rows):
        return np.array(rows, np.int64).reshape(-1)

    def address(self, array):
        return array.ctypes.data

    def prepared(self, launch):
        return partial(self._launch, launch)

    def prepared_matmul(self, a, b, out):
        return partial(np.matmul, a, b, out=out)

    def prepared_copy(self, source, target):
        return partial(target.__setitem__, ..., source)

    def _passed(self, kernel, kind, argument):
        if argument is None:
            assert kind in "FDLB", (kernel, kind)
            return ctypes.c_void_p(None)
        if isinstance(argument, np.ndarray):
            workspace = argument.dtype == np.uint8 and kind in "FD"
            assert workspace or argument.dtype == _ELEMENTS[kind], (kernel, kind)
            assert argument.flags.c_contiguous
            return ctypes.c_void_p(argument.ctypes.data)
        if isinstance(argument, int):
            assert kind == ("l" if self._wide else "i"), (kernel, kind, argument)
        elif isinstance(argument, float):
            assert kind == "d", (kernel, kind, argument)
        else:
            assert isinstance(argument, np.uint64), (kernel, argument)
            assert kind == "u", (kernel, kind, argument)
        return _SCALARS[kind](argument)

    def _library(self, program, dtype, parameters):
        options = compiler_options(dtype, wide=self._wide, parameters=parameters)
        return compiled(program.source, program.kernels, options)
