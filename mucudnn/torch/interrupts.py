"""Defer Ctrl-C during work that must not be left half done."""

import _signal  # type: ignore[import-not-found]  # `signal` makes enumerations: 25 us
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import currentframe
from typing import Any


class DeferredInterrupt:
    """A Ctrl-C (SIGINT) that is deferred; a second one is handled at once.

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
