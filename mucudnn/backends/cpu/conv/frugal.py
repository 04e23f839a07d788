"""Next to no memory beside the workspace, whatever the size of the problem.

Two things would otherwise grow: `Workers.each` keeps a list of its items, and a large
problem can have a hundred thousand blocks; and NumPy copies operands that are not
contiguous through buffers of 8192 elements each, on every thread. With short buffers it
also copies less: runs that are longer than a buffer are used as they are.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from mucudnn.backends.cpu.threads import Workers

__all__ = ["each", "short_buffers"]

_PORTIONS = 16  # a worker
_BUFFER = 256  # elements


@contextmanager
def short_buffers() -> Iterator[None]:
    """Within it, and on this thread only, NumPy's operations buffer little."""
    with np.errstate():  # restores the size as well
        np.setbufsize(_BUFFER)
        yield


def each(workers: Workers, items: range, fn: Callable[[int, int], None]) -> None:
    """`workers.each`, for any number of items and with short buffers."""
    step = -(-len(items) // (_PORTIONS * workers.count)) or 1
    portions = [items[i : i + step] for i in range(0, len(items), step)]

    def work(worker: int, portion: range) -> None:
        with short_buffers():
            for item in portion:
                fn(worker, item)

    workers.each(portions, work)
