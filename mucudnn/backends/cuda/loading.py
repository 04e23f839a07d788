"""Find and load libcudnn 9; install hints, and a stub where there is no driver.

NVIDIA's `cuda.pathfinder` searches. A process can hold one cuDNN only, as its parts
find each other by name, so a copy that is already loaded (by PyTorch) comes first.
"""

import ctypes
import logging
import platform
import re
import struct
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mucudnn.errors import BackendError, BackendUnavailableError, MucudnnError

_LOGGER = logging.getLogger(__name__)
OLDEST = 91300
"""First release whose engines, workspaces and device descriptions were checked."""

TRIED = 92899
"""Last tested release, with any patch; newer ones are accepted and logged."""

_CUDNN = "libcudnn.so.9"

_INSTALL = (
    "install it with: pip install '.[cuda12]' (or '.[cuda13]', by the "
    "CUDA version that the driver supports)"
)


@dataclass(frozen=True, slots=True)
class LoadedLibrary:
    """A loaded cuDNN, without prototypes.

    `path` is its file; `version` its release as one number: 91900 is 9.19.0.
    """

    cdll: ctypes.CDLL
    path: str
    version: int


def load_library(*, without_driver: bool) -> LoadedLibrary:
    """Load cuDNN, after checking for cuBLAS, without which it would abort the process.

    `without_driver` works without an NVIDIA driver, for described devices; see
    `load_stub_driver`.
    """
    if sys.platform != "linux":
        raise BackendUnavailableError(
            f"the cuda backend runs on Linux; this system is {sys.platform!r}"
        )
    path = _find_cudnn()
    cdll = ctypes.CDLL(path)
    version = _number(cdll, path, "cudnnGetVersion")
    if version // 10000 != 9 or version < OLDEST:
        raise BackendUnavailableError(
            f"cuDNN {release_text(version)} was found ({path}), but "
            f"{release_text(OLDEST)} or a later release of 9 is needed; {_INSTALL}"
        )
    if version > TRIED:
        _LOGGER.warning(
            "cuDNN %s is newer than any release tried (%s)",
            release_text(version),
            release_text(TRIED // 100 * 100),
        )
    _require_cublaslt(cdll, path)
    if without_driver:
        load_stub_driver()
    _LOGGER.info("cuDNN %s: %s", release_text(version), path)
    return LoadedLibrary(cdll=cdll, path=path, version=version)


def release_text(version: int) -> str:
    """Return a readable release: 91900 is `9.19.0`."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _find_cudnn() -> str:
    """Load the first library found; return its path."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return str(load_nvidia_dynamic_lib("cudnn").abs_path or _CUDNN)
    except (ImportError, RuntimeError, OSError) as e:
        raise BackendUnavailableError(
            f"cuDNN 9 ({_CUDNN}) was not found; {_INSTALL}. {type(e).__name__}: {e}"
        ) from e


def _number(cdll: ctypes.CDLL, path: str, name: str) -> int:
    try:
        function = getattr(cdll, name)
    except AttributeError as e:
        raise BackendUnavailableError(
            f"{path} is not cuDNN: it has no function {name}"
        ) from e
    function.restype, function.argtypes = ctypes.c_size_t, ()
    return int(function())


def _require_cublaslt(cdll: ctypes.CDLL, path: str) -> None:
    """Load the cuBLASLt that cuDNN needs, as cuDNN aborts without it.

    cuDNN loads it by a name with CUDA's major version, so any library loaded under that
    name is used.
    """
    cuda = _number(cdll, path, "cudnnGetCudartVersion") // 1000
    name = f"libcublasLt.so.{cuda}"
    here = Path(path).parent
    wheels = here, here / "../../cublas/lib", here / "../../cu13/lib"
    # Loaded already, known to the system's loader, or beside the wheel of cuDNN.
    for candidate in (name, *(str(folder / name) for folder in wheels)):
        with suppress(OSError):
            ctypes.CDLL(candidate)
            return
    package = "nvidia-cublas-cu12" if cuda == 12 else "nvidia-cublas"
    raise BackendUnavailableError(
        f"cuDNN was found ({path}), but not {name}, which it needs; install it with: "
        f"pip install {package}"
    )


# A `libcuda.so.1` that answers "no device", for machines without a driver.
#
# cuDNN lists engines and their workspaces for a described device, but some of its
# libraries load only if the driver's symbols exist. Without a driver, a shared object
# with those symbols is generated here, byte by byte. It needs no compiler, and it is so
# small that ELF's specification is its documentation (System V ABI, "Object Files" and
# "Program Loading and Dynamic Linking").
#
# The object has two segments: one that is read and executed (headers, symbols, strings,
# code), and one that is writable (the dynamic section, in which older loaders write
# addresses). Its hash table has a single bucket, so no name is hashed.


_SONAME = "libcuda.so.1"
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE
_DRIVER_VERSION = 13000
_VERSION_SYMBOL = "cuDriverGetVersion"

_NAMES = """
cuCtxGetCurrent cuCtxGetLimit cuCtxPopCurrent cuCtxPushCurrent cuDeviceGet
cuDeviceGetCount cuGetErrorName cuGetErrorString cuInit cuKernelGetAttribute
cuKernelGetFunction cuKernelSetAttribute cuLaunchCooperativeKernel cuLaunchKernel
cuLaunchKernelEx cuLibraryGetKernel cuLibraryLoadData cuLibraryLoadFromFile
cuLibraryUnload cuLinkAddData cuLinkComplete cuLinkCreate cuLinkDestroy
cuModuleGetFunction cuModuleLoadData cuModuleUnload
cuOccupancyMaxPotentialClusterSize cuStreamGetCtx cuTensorMapEncodeIm2col
cuTensorMapEncodeTiled
"""

SYMBOLS = (*_NAMES.split(), _VERSION_SYMBOL)
"""Driver functions that cuDNN, in the tested releases, is linked against."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Properties of a processor architecture: its number in ELF, `e_machine`, and code.

    `refuse` is `int f() { return 100; }`, `version` is `int f(int *v) { *v = 13000;
    return 0; }`.
    """

    elf: int
    refuse: bytes
    version: bytes


def _words(*instructions: int) -> bytes:
    return struct.pack(f"<{len(instructions)}I", *instructions)


MACHINES: Mapping[str, Machine] = {
    "x86_64": Machine(
        elf=62,
        # mov eax, 100; ret
        refuse=b"\xb8" + struct.pack("<I", _NO_DEVICE) + b"\xc3",
        # mov dword ptr [rdi], 13000; xor eax, eax; ret
        version=b"\xc7\x07" + struct.pack("<I", _DRIVER_VERSION) + b"\x31\xc0\xc3",
    ),
    "aarch64": Machine(
        elf=183,
        # mov w0, #100; ret
        refuse=_words(0x52800000 | _NO_DEVICE << 5, 0xD65F03C0),
        # mov w1, #13000; str w1, [x0]; mov w0, #0; ret
        version=_words(
            0x52800001 | _DRIVER_VERSION << 5, 0xB9000001, 0x52800000, 0xD65F03C0
        ),
    ),
}
"""`platform.machine()` to the architecture's properties."""


def load_stub_driver() -> None:
    """Make `libcuda.so.1` resolvable in this process, by a stub if necessary."""
    with suppress(OSError):
        ctypes.CDLL(_SONAME, ctypes.RTLD_GLOBAL)
        return
    name = platform.machine()
    if name not in MACHINES:
        raise BackendUnavailableError(
            f"there is no NVIDIA driver ({_SONAME}) on this machine, and no stub of it "
            f"for processors called {name!r}: only for {', '.join(MACHINES)}"
        )
    with tempfile.TemporaryDirectory(prefix="mucudnn-") as folder:
        path = Path(folder) / _SONAME
        path.write_bytes(stub_image(MACHINES[name]))
        try:
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        except OSError as e:
            raise BackendUnavailableError(
                f"the stub of {_SONAME} does not load ({e}); if that folder forbids "
                "execution, set TMPDIR to one that does not"
            ) from e
    _LOGGER.info("no driver: %s is a stub without devices", _SONAME)


_PAGE = 0x10000  # the largest page of either processor
_FILE_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_DYNAMIC = struct.Struct("<qQ")
_EXECUTE, _WRITE, _READ = 1, 2, 4
_LOAD_SEGMENT, _DYNAMIC_SEGMENT, _STACK_SEGMENT = 1, 2, 0x6474E551
_DT_HASH, _DT_STRTAB, _DT_SYMTAB = 4, 5, 6
_DT_STRSZ, _DT_SYMENT, _DT_SONAME = 10, 11, 14
_GLOBAL_FUNCTION = 1 << 4 | 2
_SOME_SECTION = 1  # no sections exist; any number but 0 means "defined here"


def stub_image(
    machine: Machine, symbols: Sequence[str] = SYMBOLS, soname: str = _SONAME
) -> bytes:
    """Return the bytes of the shared object."""
    # Zero-terminated strings, and the offset of each.
    strings, names = b"\0", {}
    for text in (soname, *symbols):
        names[text] = len(strings)
        strings += text.encode("ascii") + b"\0"
    # One bucket, whose chain visits symbols 1, 2 … in turn.
    count = len(symbols) + 1
    chain = (0, *range(2, count), 0)
    hash_table = struct.pack(f"<{3 + count}I", 1, count, 1, *chain)
    code = machine.refuse.ljust(16, b"\0") + machine.version

    # Offsets of the parts, each aligned to 16 bytes.
    hash_at = _aligned(_FILE_HEADER.size + 4 * _SEGMENT.size)
    symbols_at = _aligned(hash_at + len(hash_table))
    strings_at = symbols_at + count * _SYMBOL.size
    code_at = _aligned(strings_at + len(strings))
    dynamic_at = _aligned(code_at + len(code))

    # Their contents: the first symbol is always empty.
    table = _SYMBOL.pack(0, 0, 0, 0, 0, 0)
    for name in symbols:
        at = code_at + (16 if name == _VERSION_SYMBOL else 0)
        table += _SYMBOL.pack(names[name], _GLOBAL_FUNCTION, 0, _SOME_SECTION, at, 0)
    dynamic = b"".join(
        _DYNAMIC.pack(tag, value)
        for tag, value in (
            (_DT_SONAME, names[soname]),
            (_DT_HASH, hash_at),
            (_DT_STRTAB, strings_at),
            (_DT_STRSZ, len(strings)),
            (_DT_SYMTAB, symbols_at),
            (_DT_SYMENT, _SYMBOL.size),
            (0, 0),
        )
    )
    image = bytearray(dynamic_at)
    headers = _headers(machine, dynamic_at, len(dynamic))
    for at, part in (
        (0, headers),
        (hash_at, hash_table),
        (symbols_at, table),
        (strings_at, strings),
        (code_at, code),
    ):
        image[at : at + len(part)] = part
    return bytes(image + dynamic)


def _headers(machine: Machine, dynamic_at: int, dynamic_size: int) -> bytes:
    """Return the file header and the segments: code, dynamic (twice) and stack."""
    identity = b"\x7fELF\x02\x01\x01"  # 64 bits, little-endian, version 1
    shared_object, version = 3, 1
    size, segments, sections = _FILE_HEADER.size, (_SEGMENT.size, 4), (0, 0, 0)
    fields = (shared_object, machine.elf, version, 0, size, 0, 0, size)
    file_header = _FILE_HEADER.pack(identity, *fields, *segments, *sections)
    # One page further in memory than in the file, so no page has code and data.
    address = dynamic_at + _PAGE
    return file_header + b"".join(
        _SEGMENT.pack(kind, flags, at, where, where, size, size, align)
        for kind, flags, at, where, size, align in (
            (_LOAD_SEGMENT, _READ | _EXECUTE, 0, 0, dynamic_at, _PAGE),
            (_LOAD_SEGMENT, _READ | _WRITE, dynamic_at, address, dynamic_size, _PAGE),
            (_DYNAMIC_SEGMENT, _READ | _WRITE, dynamic_at, address, dynamic_size, 8),
            # Without this segment loaders make stacks executable, or refuse.
            (_STACK_SEGMENT, _READ | _WRITE, 0, 0, 0, 16),
        )
    )


def _aligned(offset: int) -> int:
    return -(-offset // 16) * 16


# Installation hints for errors in which CuPy only says what went wrong.
#
# CuPy compiles its own kernels (copies with gaps, conversions, arithmetic) at their
# first use, from sources that include CUDA's headers. Our sources include none, so
# missing headers show late, in the middle of something else.


_HEADERS = re.compile(
    r"(cannot|could not) open source file|\.(h|hpp|cuh)\b.*not found|cuda headers",
    re.IGNORECASE,
)

_LIBRARY = re.compile(r"\blib(nvrtc|cublas|cublaslt|curand|cudart)\b", re.IGNORECASE)

_TOOLKIT = (
    "CuPy finds no {lacking} of CUDA here; install what it compiles with: "
    "pip install '.[cuda13]' (or [cuda12] for a CUDA 12 driver), or set "
    "CUDA_PATH to an installed toolkit"
)


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
