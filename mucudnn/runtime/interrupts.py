"""Ctrl-C and what else asks a program to end: SIGTERM and SIGHUP.

All of them raise `KeyboardInterrupt`, so that what keeps something at Ctrl-C keeps it
whoever asks. A batch system sends SIGTERM and leaves some seconds before it kills.
"""

import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

__all__ = ["SIGNALS", "Interrupts", "deferred_interrupt", "end_children"]

SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP")
    if hasattr(signal, name)
)
"""Those that ask a program to end; not every system has the last."""

_HANG_UP = getattr(signal, "SIGHUP", None)

_ONE_S = 0.1
"""Seconds within which several signals are one request. `timeout` signals a process and
then its group, a closing terminal is told by the kernel and by the shell."""

Handler = Any  # what `signal.getsignal` gives: a function, a number or nothing


class Interrupts:
    """Within it SIGTERM and SIGHUP raise `KeyboardInterrupt`, as Ctrl-C does.

    The first one raises; one after it ends the program at once. A signal that is
    ignored (`nohup`, the background of some shells) or has a handler of the caller's
    stays as it is. Entering it again within itself, or in another thread than the main
    one, changes nothing.

    Args:
        end: Ends the program, given the signal's number; by default the signal does
            what it would have done without this.
        clock: Seconds, for telling one request from two.

    Attributes:
        number: The signal that came; None if none did.
    """

    def __init__(
        self,
        end: Callable[[int], None] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.number: int | None = None
        self._end = end
        self._clock = clock
        self._since = 0.0
        self._depth = 0
        self._usual: dict[int, Handler] = {}

    def __enter__(self) -> Self:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                usual = signal.getsignal(number)
                if usual in (signal.SIG_DFL, signal.default_int_handler):
                    self._usual[number] = usual
                    signal.signal(number, self)
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        while not self._depth and self._usual:
            number, usual = self._usual.popitem()
            if signal.getsignal(number) is self:
                signal.signal(number, usual)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """What the signals call."""
        if self.note(number):
            raise KeyboardInterrupt

    def note(self, number: int) -> bool:
        """Remember a signal; whether it is the first, else it has ended the program."""
        now = self._clock()
        if number == _HANG_UP:
            _leave_terminal()
        if self.number is None:
            self.number, self._since = number, now
            return True
        if now - self._since > _ONE_S:
            if self._end is not None:
                self._end(number)
            signal.signal(number, self._usual.get(number, signal.SIG_DFL))
            signal.raise_signal(number)
        return False


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Within it the first Ctrl-C only makes what is yielded true; a second one raises.

    For what must not be left half done: a step, a file. It holds for all signals that
    would raise `KeyboardInterrupt`. In other threads than the main one, and under a
    handler of the caller's own, nothing is deferred.
    """
    seen = threading.Event()
    usual: dict[int, Handler] = {}

    def note(number: int, frame: FrameType | None) -> None:
        handler = usual[number]
        if isinstance(handler, Interrupts):
            handler.note(number)
        elif seen.is_set():
            handler(number, frame)
        seen.set()

    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if handler is signal.default_int_handler or isinstance(handler, Interrupts):
                usual[number] = handler
                signal.signal(number, note)
    try:
        yield seen.is_set
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def _leave_terminal() -> None:
    """What is written to a terminal that is gone goes nowhere: it would be an error."""
    for number in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(number).st_mode) and not os.isatty(number):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, number)
                os.close(nowhere)


def end_children() -> None:
    """Kill the processes that this one has started and that still run.

    A signal may have reached this process alone, and what waits for a solver does not
    end it. Where the system has no `/proc` they end by themselves, later.
    """
    tasks = Path("/proc/self/task")
    with suppress(OSError):
        for task in tasks.iterdir():
            for child in (task / "children").read_text().split():
                with suppress(OSError):
                    os.kill(int(child), signal.SIGKILL)
