"""What kernels take of a GPU, read from what CUDA's compiler made: no GPU, no tool.

Registers and frames are attributes in the section `.nv.info` of a cubin, an ELF file;
shared memory is a section's size. Loops are read from PTX, by its labels.
"""

import re
import struct
from dataclasses import dataclass

_REGISTERS, _FRAME = 0x2F, 0x11  # attributes: (symbol, value) of 4 bytes each
_SIZED = 0x04  # the format of an attribute that says how long it is
_NO_BITS = 8  # the type of a section without contents
_FILE = 65536  # registers of a multiprocessor, sm_70 to sm_100
_THREADS = 2048
_SHARED = 228 << 10  # bytes of a multiprocessor of sm_90
_SYSTEM = 1 << 10  # of which each block takes so many, counted where it takes others


@dataclass(frozen=True)
class Resources:
    """Of a kernel: registers of a thread, bytes of a thread, bytes of a block."""

    registers: int
    local: int
    shared: int

    def blocks(self, threads):
        """How many are on a multiprocessor of sm_90 at once."""
        each = -(-max(self.registers, 16) // 8) * 8 * threads
        shared = max(self.shared, _SYSTEM)
        return min(_FILE // each, _THREADS // threads, _SHARED // shared)


def resources(code):
    """Kernel -> what it takes, of a cubin."""
    sections = _sections(code)
    names = sections[".strtab"][0]
    symbols = sections[".symtab"][0]
    found = {}
    for attribute, symbol, value in _attributes(sections[".nv.info"][0]):
        (at,) = struct.unpack_from("<I", symbols, 24 * symbol)
        name = names[at : names.index(b"\0", at)].decode()
        found.setdefault(name, {})[attribute] = value
    shared = {name: sections.get(f".nv.shared.{name}", (b"", 0))[1] for name in found}
    return {
        name: Resources(given[_REGISTERS], given.get(_FRAME, 0), shared[name])
        for name, given in found.items()
        if f".text.{name}" in sections
    }


def _sections(code):
    """Name -> (bytes, size) of an ELF file of 64 bits."""
    (start,) = struct.unpack_from("<Q", code, 40)
    each, count, strings = struct.unpack_from("<HHH", code, 58)
    headers = [
        struct.unpack_from("<IIQQQQ", code, start + i * each) for i in range(count)
    ]
    base, found = headers[strings][4], {}
    for name, kind, _, _, offset, size in headers:
        label = code[base + name : code.index(b"\0", base + name)].decode()
        found[label] = (b"" if kind == _NO_BITS else code[offset : offset + size], size)
    return found


def _attributes(info):
    """(attribute, symbol, value) of those that are a number of a symbol."""
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != _SIZED:
            continue
        if size == 8 and attribute in (_REGISTERS, _FRAME):
            yield attribute, *struct.unpack_from("<II", info, at)
        at += size


def loads_in_a_row(text):
    """Most loads of 16 bytes in PTX before one is computed with, or stored."""
    most = here = 0
    for line in text.splitlines():
        if re.search(r"\bld\.global\.v4\.[fu]32", line):
            here += 1
        elif re.search(r"\b(?:(?:add|sub|mul|fma|cvt)\S*\.f\d\d|st\.global)", line):
            here = 0
        most = max(most, here)
    return most


def divisions_in_loops(text):
    """Divisions of whole numbers by others than constants, in loops of PTX."""
    blocks = _blocks(text)
    division = re.compile(r"\b(?:div|rem)\.[su](?:32|64)\s+%\w+, %\w+, %\w+;")
    return [
        line.strip()
        for start, (lines, _) in blocks.items()
        for line in lines
        if division.search(line) and _comes_back(blocks, start)
    ]


def _blocks(text):
    """Label -> (lines, labels that may come next) of each basic block."""
    blocks, label = {}, "entry"
    lines, targets = blocks[label] = ([], [])
    for line in text.splitlines():
        if found := re.match(r"(\$\w+):", line):
            after = found[1]
        elif found := re.search(r"(@!?%p\d+ )?bra(?:\.uni)?\s+(\$\w+);", line):
            targets.append(found[2])
            after = f"after {found[2]} {len(blocks)}" if found[1] else None
        elif re.search(r"^\s*(?:ret|exit);", line):
            after = None
        else:
            lines.append(line)
            continue
        if after:
            targets.append(after)
        lines, targets = blocks.setdefault(after or f"nowhere {len(blocks)}", ([], []))
    return blocks


def _comes_back(blocks, start):
    """Whether a basic block may run again after itself."""
    seen, waiting = set(), list(blocks[start][1])
    while waiting:
        label = waiting.pop()
        if label == start:
            return True
        if label not in seen:
            seen.add(label)
            waiting += blocks[label][1]
    return False
