"""What a forked process can rely on: things of its own, and files that are at rest.

Of all threads only the one that forks lives on in the child. A lock that another one
held is never released there, a pool has no threads, and a library that was at work in
another thread is stopped in the middle. So locks and pools belong to a process (`Own`),
and what must not be cut in two is put to rest before (`attend`).
"""

import functools
import os
import weakref
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

__all__ = ["Attendant", "Own", "attend"]

T = TypeVar("T")


class Own(Generic[T]):
    """One value a process, made where it is first asked for.

    Args:
        make: Makes it; of two threads that ask at once, both get the same one.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._values = {os.getpid(): make()}

    @property
    def mine(self) -> T:
        """This process's value."""
        pid = os.getpid()
        try:
            return self._values[pid]
        except KeyError:
            value = self._values.setdefault(pid, self._make())
            for other in [key for key in list(self._values) if key != pid]:
                self._values.pop(other, None)  # a later process may have its number
            return value

    def __reduce__(self) -> Any:
        raise TypeError("what belongs to one process cannot be copied or pickled")


class Attendant(Protocol):
    """What has to do something when its process forks."""

    def before_fork(self) -> None:
        """Come to rest. What it raises is printed and does not stop the fork."""
        ...

    def after_fork(self, *, child: bool) -> None:
        """Go on, in the process that forked and in its child."""
        ...


_attendants: dict[int, weakref.ref[Attendant]] = {}
"""The interpreter's list of what to call at a fork is global, and nothing can be taken
from it: so one call is on it, from the first attendant on, and this table is ours."""


def attend(one: Attendant) -> None:
    """Tell `one` of every fork for as long as it lives."""
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
