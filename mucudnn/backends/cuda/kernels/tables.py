"""One launch for many tensors: a table on the device says where they are.

A block has a part of one tensor, `CHUNK` elements at most, and finds it by its number:
a row holds the first block of its tensor, how many elements there are, a flag, and the
addresses of the arrays that belong together, such as a weight, its gradient and its
state; one that is missing is 0. Addresses stay what they are from step to step, so a
table is written once.
"""

from collections.abc import Sequence
from typing import Any

from mucudnn.backends.cuda.kernels.program import Launcher

__all__ = ["CHUNK", "TABLE", "table_of"]

CHUNK = 4096
"""Elements of a block: 16 for each thread, so that finding them costs little."""

_ARRAYS = 5
"""Most arrays of a row."""

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
            if (table[middle * {_ARRAYS + 3}] <= (long long)blockIdx.x) low = middle;
            else high = middle;
        }}
        row = table + low * {_ARRAYS + 3};
        start = ((long long)blockIdx.x - row[0]) * {CHUNK};
        count = (I)(row[1] - start < {CHUNK} ? row[1] - start : {CHUNK});
    }}
    __device__ bool flag() const {{ return row[2] != 0; }}
    template <class E> __device__ E* array(int i) const {{
        return row[3 + i] ? (E*)row[3 + i] + start : 0;
    }}
}};
"""


def table_of(
    gpu: Launcher, rows: Sequence[tuple[Sequence[Any], bool]]
) -> tuple[Any, int, int]:
    """The table of arrays of one size a row, or None for one missing, and a flag.

    Returns:
        The table, how many rows it has, and how many blocks they take.
    """
    table, blocks = [], 0
    for arrays, flag in rows:
        if (count := arrays[0].size) == 0:
            continue
        addresses = [0 if a is None else gpu.address(a) for a in arrays]
        padding = [0] * (_ARRAYS - len(addresses))
        table.append((blocks, count, int(flag), *addresses, *padding))
        blocks += -(-count // CHUNK)
    return (gpu.table(table) if table else None), len(table), blocks
