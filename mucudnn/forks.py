"""Keep locks, pools and files valid in forked processes.

A fork copies only the calling thread. A lock held by another thread is never released
in the child, a pool has no threads, and a library active in another thread is stopped
midway. So locks and pools belong to one process (`Own`), and objects that must not be
interrupted are brought to rest before a fork (`attend`).
"""

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["Attendant", "Own", "attend"]

T = TypeVar("T")


class Own(Generic[T]):
    """A value per process, created on first use.

    Args:
        make: Creates the value; concurrent threads get the same one.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values = {os.getpid(): make()}

    @property
    def mine(self) -> T:
        """Value of the current process."""
        pid = os.getpid()
        try:
            return self._values[pid]
        except KeyError:
            value = self._values.setdefault(pid, self._make())
            for other in [key for key in list(self._values) if key != pid]:
                self._values.pop(other, None)  # process numbers are reused
            return value

    def __reduce__(self) -> Any:
        raise TypeError("what belongs to one process cannot be copied or pickled")


class Attendant(Protocol):
    """An object that has to act when its process forks."""

    def before_fork(self) -> None:
        """Come to rest. Exceptions are printed and do not stop the fork."""
        ...

    def after_fork(self, *, child: bool) -> None:
        """Continue, in the parent and in the child."""
        ...


_attendants: dict[int, weakref.ref[Attendant]] = {}
"""Registered attendants. The interpreter's list of fork hooks is append-only, so a
single hook is registered there, which calls the attendants in this table."""


def attend(one: Attendant) -> None:
    """Notify `one` of every fork as long as it is alive."""
    _register()
    key = id(one)

    def forget(_: object) -> None:
        _attendants.pop(key, None)

    _attendants[key] = weakref.ref(one, forget)


@functools.cache
def _register() -> None:
    if hasattr(os, "register_at_fork"):  # Windows has no forks
        os.register_at_fork(
            before=lambda: _tell(lambda one: one.before_fork()),
            after_in_parent=lambda: _tell(lambda one: one.after_fork(child=False)),
            after_in_child=lambda: _tell(lambda one: one.after_fork(child=True)),
        )


def _tell(act: Callable[[Attendant], None]) -> None:
    for ref in tuple(_attendants.values()):
        if (one := ref()) is not None:
            act(one)
