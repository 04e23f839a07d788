"""One launch for many tensors: a table on the device says where they are.

A block has a part of one tensor, `CHUNK` elements at most, and finds it by its number:
a row holds the first block of its tensor, how many elements there are, a flag, how a
filter is turned, and the addresses of the arrays that belong together, such as a
weight, its gradient and its state; one that is missing is 0. Addresses stay what they
are from step to step, so a table is written once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mucudnn.backends.cuda.kernels.program import Launcher

__all__ = ["CHUNK", "TABLE", "Row", "table_of"]

CHUNK = 4096
"""Elements of a block: 16 for each thread, so that finding them costs little."""

_ARRAYS = 5
"""Most arrays of a row."""

_BEFORE = 5
"""Numbers of a row before its arrays."""

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
    """What is known of a tensor.

    Attributes:
        arrays: Of one size; None for one that is missing.
        flag: What the kernel makes of it.
        turned: (channels, taps) of a filter that is (K, C, taps) in some of its arrays
            and (K, taps, C) in others; (0, 0) of what is the same in all.
    """

    arrays: Sequence[Any]
    flag: bool = False
    turned: tuple[int, int] = (0, 0)


def table_of(gpu: Launcher, rows: Sequence[Row]) -> tuple[Any, int, int]:
    """The table of these rows.

    Returns:
        The table, how many rows it has, and how many blocks they take.
    """
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
