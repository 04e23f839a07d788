"""How far a long command has got, where nobody sees a bar: a line every ten seconds.

Whoever reads a log later, or follows it, sees that the work goes on and at what. Work
that takes less than ten seconds writes nothing.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TextIO

__all__ = ["ProgressLines", "Repeat", "every_ten_seconds"]

_EVERY_S = 10.0
_END_S = 1.0  # whoever reads the error stream may have stopped

Repeat = Callable[[Callable[[], None]], AbstractContextManager[None]]
"""Calls a function again and again within its context."""


@contextmanager
def every_ten_seconds(tick: Callable[[], None]) -> Iterator[None]:
    """Call a function every ten seconds, from a thread: the work may be one long call.

    A first call comes after ten seconds.
    """
    over = threading.Event()

    def run() -> None:
        while not over.wait(_EVERY_S):
            tick()

    thread = threading.Thread(target=run, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_END_S)


class ProgressLines:
    """What is known of the work, as lines.

    Args:
        stream: Where to.
        results: Whether every result is a line, too.
        clock: Seconds.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        results: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._results = results
        self._clock = clock
        self._start = clock()
        self._at = "starting"
        self._told = False

    def show(
        self, text: str, done: int, total: int, *, title: str = "", result: str = ""
    ) -> None:
        """See `Show`."""
        self._at = f"{title + ', ' if title else ''}{text}, {done} of {total}"
        if self._results and result:
            self._told = True
            self._write(f"[{done}/{total}] {text}: {result}")

    def tick(self) -> None:
        """Say where the work is, unless a result has said so since the last time."""
        if not self._told:
            seconds = round(self._clock() - self._start)
            minutes, seconds = divmod(seconds, 60)
            self._write(f"mucudnn: {minutes}:{seconds:02d} {self._at}")
        self._told = False

    def _write(self, line: str) -> None:
        with suppress(OSError, ValueError):  # nobody reads it, or it is closed
            self._stream.write(f"{line}\n")
            self._stream.flush()
