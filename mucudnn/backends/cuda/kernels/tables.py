"""Tables on the device that let one launch process many tensors.

A block has a part of one tensor, at most `CHUNK` elements, and finds it by its index. A
row of the table holds the first block of its tensor, the number of elements, a flag,
the channels and taps of a transposed filter, and the addresses of the arrays that
belong together, such as a weight, its gradient and its state; a missing array is 0.
Addresses are the same in every step, so a table is written once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mucudnn.backends.cuda.kernels.program import Launcher

__all__ = ["CHUNK", "TABLE", "Row", "table_of"]

CHUNK = 4096
"""Elements of a block: 16 per thread, so that locating them costs little."""

_ARRAYS = 5  # most arrays of a row
_BEFORE = 5  # numbers of a row before its arrays

TABLE = f"""
// The part of a tensor that a block has.
struct Part {{
    const long long* row;
    long long start;
    I count;
    __device__ Part(const long long* table, I rows) {{
        I low = 0, high = rows;
        while (high - low > 1) {{
            I middle = (low + high) / 2;
            long long before = table[middle * {_BEFORE + _ARRAYS}];
            (before <= (long long)blockIdx.x ? low : high) = middle;
        }}
        row = table + low * {_BEFORE + _ARRAYS};
        start = ((long long)blockIdx.x - row[0]) * {CHUNK};
        count = (I)(row[1] - start < {CHUNK} ? row[1] - start : {CHUNK});
    }}
    __device__ bool flag() const {{ return row[2] != 0; }}
    __device__ I channels() const {{ return (I)row[3]; }}
    __device__ I taps() const {{ return (I)row[4]; }}
    // The block's part of an array, or all of one.
    template <class E> __device__ E* array(int i, bool whole = false) const {{
        return row[{_BEFORE} + i] ? (E*)row[{_BEFORE} + i] + (whole ? 0 : start) : 0;
    }}
}};
"""


@dataclass(frozen=True, slots=True)
class Row:
    """A tensor's row of a table.

    Attributes:
        arrays: Arrays of one size; None for a missing one.
        flag: Kernel-specific flag.
        turned: (channels, taps) of a filter that is (K, C, taps) in some of its arrays
            and (K, taps, C) in others; (0, 0) if all have the same layout.
    """

    arrays: Sequence[Any]
    flag: bool = False
    turned: tuple[int, int] = (0, 0)


def table_of(gpu: Launcher, rows: Sequence[Row]) -> tuple[Any, int, int]:
    """Write a table of these rows; return it, its number of rows, and of blocks."""
    table, blocks = [], 0
    for row in rows:
        if (count := row.arrays[0].size) == 0:
            continue
        addresses = [0 if a is None else gpu.address(a) for a in row.arrays]
        padding = [0] * (_ARRAYS - len(addresses))
        numbers = blocks, count, int(row.flag), *row.turned
        table.append((*numbers, *addresses, *padding))
        blocks += -(-count // CHUNK)
    return (gpu.table(table) if table else None), len(table), blocks
