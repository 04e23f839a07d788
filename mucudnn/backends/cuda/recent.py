"""A bounded, thread-safe cache of recently used values."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from mucudnn.forks import Own

__all__ = ["Recent"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A cache of up to `most` values that evicts the least recently used one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = Own(threading.Lock)

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K) -> V | None:
        """Return the value of a key; None if there is none."""
        with self._lock.mine:
            value = self._values.get(key)
            if value is not None:
                self._values.move_to_end(key)
            return value

    def put(self, key: K, value: V) -> None:
        """Store a value, replacing the key's previous one."""
        with self._lock.mine:
            self._values[key] = value
            self._values.move_to_end(key)
            while len(self._values) > self._most:
                self._values.popitem(last=False)
