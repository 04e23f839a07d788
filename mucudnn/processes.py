"""State that is safe in forked processes; Ctrl-C and SIGTERM; garbage collection.

A fork copies only the calling thread. A lock held by another thread is never released
in the child, a pool has no threads, and a library active in another thread is stopped
midway. So locks and pools belong to one process (`PerProcess`), and objects that must
not be interrupted are brought to rest before a fork (`on_fork`).
"""

import _signal  # type: ignore[import-not-found]  # `signal` makes enumerations: 25 us
import functools
import gc
import os
import signal
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from inspect import currentframe
from pathlib import Path
from types import FrameType
from typing import Any, Generic, Protocol, Self, TypeVar

T = TypeVar("T")


class PerProcess(Generic[T]):
    """A value per process, created on first use.

    Args:
        make: Creates the value; concurrent threads get the same one.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values = {os.getpid(): make()}

    @property
    def value(self) -> T:
        """Value of the current process."""
        pid = os.getpid()
        try:
            return self._values[pid]
        except KeyError:
            mine = self._values.setdefault(pid, self._make())
            for other in [key for key in list(self._values) if key != pid]:
                self._values.pop(other, None)  # process numbers are reused
            return mine

    def __reduce__(self) -> Any:
        raise TypeError(
            "objects that belong to one process cannot be copied or pickled"
        )


class ForkListener(Protocol):
    """An object that has to act when its process forks."""

    def before_fork(self) -> None:
        """Come to rest. Exceptions are printed and do not stop the fork."""
        ...

    def after_fork(self, *, child: bool) -> None:
        """Continue, in the parent and in the child."""
        ...


_listeners: dict[int, weakref.ref[ForkListener]] = {}
"""Registered listeners. The interpreter's list of fork hooks is append-only, so a
single hook is registered there, which calls the listeners in this table."""


def on_fork(one: ForkListener) -> None:
    """Notify `one` of every fork as long as it is alive."""
    _register()
    # By identity: listeners need not be hashable, and are not kept alive.
    key = id(one)

    def forget(_: object) -> None:
        _listeners.pop(key, None)

    _listeners[key] = weakref.ref(one, forget)


@functools.cache
def _register() -> None:
    if hasattr(os, "register_at_fork"):  # Windows has no forks
        os.register_at_fork(
            before=lambda: _tell(lambda one: one.before_fork()),
            after_in_parent=lambda: _tell(lambda one: one.after_fork(child=False)),
            after_in_child=lambda: _tell(lambda one: one.after_fork(child=True)),
        )


def _tell(act: Callable[[ForkListener], None]) -> None:
    for ref in tuple(_listeners.values()):
        if (one := ref()) is not None:
            act(one)


# Handle requests to end the program: Ctrl-C, SIGTERM and SIGHUP.
#
# All of them raise `KeyboardInterrupt`, so whatever saves its state at Ctrl-C does so
# for the others as well. A batch system sends SIGTERM some seconds before it kills.


SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP")
    if hasattr(signal, name)
)
"""Signals that ask a program to end; not every system has SIGHUP."""

_HANG_UP = getattr(signal, "SIGHUP", None)

_ONE_S = 0.1
"""Seconds within which several signals are one request: `timeout` signals a process
and then its group, and at a closing terminal both kernel and shell send SIGHUP."""

Handler = Any  # type of `signal.getsignal`: a function, a number or None


class Interrupts:
    """Context in which SIGTERM and SIGHUP raise `KeyboardInterrupt`, like Ctrl-C.

    The first signal raises; a later one ends the program at once. A signal that is
    ignored (`nohup`, the background of some shells) or has a handler of the caller's
    keeps its handler. Entering the context again, or in a thread other than the main
    one, has no effect.

    Args:
        end: Ends the program, given the signal's number; by default the signal's usual
            effect.
        clock: Clock in seconds, to tell one request from two.

    Attributes:
        number: Number of the signal that arrived; None if none did.
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
        """Handle a signal."""
        if self.note(number):
            raise KeyboardInterrupt

    def note(self, number: int) -> bool:
        """Note a signal; return whether it is the first, as a later one ends all."""
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
    """Defer the first Ctrl-C within a block; yield a function that reports it.

    For work that must not be left half done, such as a step or a file. A second Ctrl-C
    raises. All signals that would raise `KeyboardInterrupt` are deferred. In threads
    other than the main one, and under a handler of the caller's own, nothing is.
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


class DeferredInterrupt:
    """A Ctrl-C (SIGINT) that is deferred, in microseconds; a second one is handled.

    Python handles signals in the main thread: in others there is nothing to do.
    """

    def __init__(self) -> None:
        self._handler: Any = None
        self._came = False

    def begin(self) -> None:
        """Defer Ctrl-C from here on."""
        if threading.current_thread() is threading.main_thread():
            handler = _signal.getsignal(_signal.SIGINT)
            if callable(handler):  # else the process ends, or ignores it
                self._handler = handler
                _signal.signal(_signal.SIGINT, self._defer)

    def end(self, note: str = "") -> None:
        """Restore the handler, and call it for a deferred Ctrl-C, with a note."""
        handler, self._handler = self._handler, None
        if handler is None:
            return
        _signal.signal(_signal.SIGINT, handler)
        came, self._came = self._came, False
        if came:
            try:
                handler(_signal.SIGINT, currentframe())
            except BaseException as e:
                if note:
                    e.add_note(note)
                raise

    def _defer(self, number: int, frame: Any) -> None:
        if self._came:
            self._came = False
            self._handler(number, frame)
        else:
            self._came = True


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C until the block ends."""
    deferred = DeferredInterrupt()
    try:
        deferred.begin()
        yield
    finally:
        deferred.end()


def _leave_terminal() -> None:
    """Redirect output to a closed terminal to nowhere, as it would raise errors."""
    for number in (1, 2):
        with suppress(OSError):
            if stat.S_ISCHR(os.fstat(number).st_mode) and not os.isatty(number):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, number)
                os.close(nowhere)


def end_children() -> None:
    """Kill the child processes that still run."""
    # A signal may have reached this process alone, without its solvers. Without
    # `/proc`, children end by themselves later.
    tasks = Path("/proc/self/task")
    with suppress(OSError):
        for task in tasks.iterdir():
            for child in (task / "children").read_text().split():
                with suppress(OSError):
                    os.kill(int(child), signal.SIGKILL)


# Less frequent garbage collection during a search.
#
# A search makes and drops thousands of small objects per trial, hardly any of them in
# cycles; collecting cycles over the whole process takes a fifth of its time.


_YOUNG = 100_000
"""Net allocations before a collection of the youngest generation."""

_RELAXED = threading.Lock()
"""Lock of the thread that changed the process-wide thresholds."""


@contextmanager
def gc_relaxed() -> Iterator[None]:
    """Collect garbage less often within the context, and restore the thresholds.

    The context has no effect inside another one, beside another thread's, or if
    collection is off or less frequent already.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < _YOUNG or not _RELAXED.acquire(blocking=False):
        yield
        return
    try:
        gc.set_threshold(_YOUNG, *before[1:])
        yield
    finally:
        gc.set_threshold(*before)
        _RELAXED.release()
