"""CUDA's own compiler from its wheel, by ctypes: no GPU, driver or CuPy is needed."""

import ctypes
import functools
import importlib.util
import re
from pathlib import Path

import pytest

ARCHITECTURES = (70, 75, 80, 90, 100)
"""Volta, Turing, Ampere, Hopper, Blackwell; an NVRTC knows some of them."""


@functools.cache
def library():
    """The library of an installed wheel; None where there is none."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec and spec.submodule_search_locations) or ()
    found = [path for at in folders for path in Path(at).rglob("libnvrtc.so.*")]
    found = [path for path in found if re.fullmatch(r"libnvrtc\.so\.\d+", path.name)]
    for path in found[:1]:  # release 13 does not look for its other part beside itself
        for beside in path.parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(beside))
    return ctypes.CDLL(str(found[0])) if found else None


def architectures():
    """Those of `ARCHITECTURES` that this NVRTC compiles for."""
    nvrtc = library()
    if nvrtc is None:
        pytest.skip("needs NVRTC: pip install nvidia-cuda-nvrtc-cu12")
    count = ctypes.c_int()
    assert nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count)) == 0
    known = (ctypes.c_int * count.value)()
    assert nvrtc.nvrtcGetSupportedArchs(known) == 0
    return [arch for arch in ARCHITECTURES if arch in known[:]]


def compiled(source, name, options=()):
    """Machine code for the oldest and the newest architecture.

    What does not compile fails the test. Hopper between them is `hopper`'s.
    """
    known = architectures()
    ends = sorted({known[0], known[-1]})
    return [_compile(source, name, arch, options)[0] for arch in ends]


@functools.cache
def hopper(source, name, options):
    """(machine code, kernel -> its text in PTX) of one compilation for sm_90."""
    if 90 not in architectures():
        pytest.skip("needs an NVRTC that compiles for sm_90")
    code, text = _compile(source, name, 90, options, ["CUBIN", "PTX"])
    entries = text.decode().split(".entry ")[1:]
    return code, {entry.partition("(")[0]: entry for entry in entries}


def _compile(source, name, arch, options, what=("CUBIN",)):
    nvrtc = library()
    program = ctypes.c_void_p()
    text = source.encode()
    made = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), text, f"{name}.cu".encode(), 0, None, None
    )
    assert made == 0
    try:
        given = [f"--gpu-architecture=sm_{arch}", *options]
        values = (ctypes.c_char_p * len(given))(*(option.encode() for option in given))
        if nvrtc.nvrtcCompileProgram(program, len(given), values):
            pytest.fail(f"sm_{arch}: {_text(nvrtc, program, 'ProgramLog').decode()}")
        return [_text(nvrtc, program, one) for one in what]
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(nvrtc, program, what):
    size = ctypes.c_size_t()
    assert nvrtc[f"nvrtcGet{what}Size"](program, ctypes.byref(size)) == 0
    room = ctypes.create_string_buffer(size.value)
    assert nvrtc[f"nvrtcGet{what}"](program, room) == 0
    return room.raw
