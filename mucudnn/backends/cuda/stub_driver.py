"""A `libcuda.so.1` that answers "no device", for machines without a driver.

cuDNN lists engines and their workspaces for a described device, but some of its
libraries load only if the driver's symbols exist. Without a driver, a shared object
with those symbols is generated here, byte by byte. It needs no compiler, and it is so
small that ELF's specification is its documentation (System V ABI, "Object Files" and
"Program Loading and Dynamic Linking").

The object has two segments: one that is read and executed (headers, symbols, strings,
code), and one that is writable (the dynamic section, in which older loaders write
addresses). Its hash table has a single bucket, so no name is hashed.
"""

import ctypes
import logging
import platform
import struct
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from mucudnn.errors import BackendUnavailableError

__all__ = ["MACHINES", "SYMBOLS", "Machine", "load_stub_driver", "stub_image"]

_LOGGER = logging.getLogger(__name__)

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
    """Properties of a processor architecture.

    Attributes:
        elf: Number of the architecture in ELF (`e_machine`).
        refuse: Machine code of `int f() { return 100; }`.
        version: Machine code of `int f(int *v) { *v = 13000; return 0; }`.
    """

    elf: int
    refuse: bytes
    version: bytes


def _words(*instructions: int) -> bytes:
    return struct.pack(f"<{len(instructions)}I", *instructions)


MACHINES: Mapping[str, Machine] = MappingProxyType(
    {
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
)
"""`platform.machine()` to the architecture's properties."""


def load_stub_driver() -> None:
    """Make `libcuda.so.1` resolvable in this process, by a stub if necessary."""
    try:
        ctypes.CDLL(_SONAME, ctypes.RTLD_GLOBAL)
    except OSError:
        _load(stub_image(_machine(platform.machine())))
        _LOGGER.info("no driver: %s is a stub without devices", _SONAME)


def _machine(name: str) -> Machine:
    try:
        return MACHINES[name]
    except KeyError:
        raise BackendUnavailableError(
            f"there is no NVIDIA driver ({_SONAME}) on this machine, and no stub of it "
            f"for processors called {name!r}: only for {', '.join(MACHINES)}"
        ) from None


def _load(image: bytes) -> None:
    with tempfile.TemporaryDirectory(prefix="mucudnn-") as folder:
        path = Path(folder) / _SONAME
        path.write_bytes(image)
        try:
            ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        except OSError as e:
            raise BackendUnavailableError(
                f"the stub of {_SONAME} does not load ({e}); if that folder forbids "
                "execution, set TMPDIR to one that does not"
            ) from e


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
    strings, names = _strings((soname, *symbols))
    hash_table = _single_bucket(len(symbols) + 1)
    code = machine.refuse.ljust(16, b"\0") + machine.version

    # Offsets of the parts, each aligned to 16 bytes.
    hash_at = _aligned(_FILE_HEADER.size + 4 * _SEGMENT.size)
    symbols_at = _aligned(hash_at + len(hash_table))
    strings_at = symbols_at + (len(symbols) + 1) * _SYMBOL.size
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


def _strings(texts: Sequence[str]) -> tuple[bytes, dict[str, int]]:
    """Return a table of zero-terminated strings, and the offset of each."""
    table, offsets = b"\0", {}
    for text in texts:
        offsets[text] = len(table)
        table += text.encode("ascii") + b"\0"
    return table, offsets


def _single_bucket(count: int) -> bytes:
    """Return a hash table of one bucket, whose chain visits symbols 1, 2 … in turn."""
    chain = [0, *range(2, count), 0]
    return struct.pack(f"<{3 + count}I", 1, count, 1, *chain)


def _aligned(offset: int) -> int:
    return -(-offset // 16) * 16
