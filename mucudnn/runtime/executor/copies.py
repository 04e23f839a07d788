"""The copies of a step: numbered, started, waited for, and given up after an error.

A number stands for the last copy that was started under it, in this step or the one
before; until there is one, nothing has to be waited for.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mucudnn.backends.base import Array, Copier
from mucudnn.backends.device import Start, Way
from mucudnn.runtime.executor.tasks import Call

__all__ = ["Copies"]


class Copies:
    """A copier a tier, opened by its first copy, and the tickets of one step.

    Args:
        copiers: What opens the copier of each tier.
    """

    def __init__(self, copiers: Sequence[Callable[[], Copier]]) -> None:
        self._open = tuple(copiers)
        self._copiers: dict[int, Copier] = {}
        self._used: set[int] = set()
        self._tickets: dict[int, tuple[Copier, Any]] = {}
        self._latest: dict[tuple[str, int], tuple[Copier, Any]] = {}

    def bound(
        self,
        way: Way,
        number: int,
        source: Array,
        target: Array,
        after: Sequence[int],
        link: int = 0,
    ) -> Call:
        """What starts a copy of every step, as `number`, behind the copies `after`.

        All that can be made ahead is made once, and anew for another copier.
        """
        tickets, latest, lane = self._tickets, self._latest, (way, link)
        copiers = self._copiers
        made: list[tuple[Copier, Start]] = []

        def start() -> None:
            copier = copiers.get(link) or self._opened(link)
            if not made or made[0][0] is not copier:
                made[:] = [(copier, copier.bound(way, source, target))]
            behind = [tickets[i][1] for i in after if i in tickets]
            tickets[number] = latest[lane] = copier, made[0][1](behind)

        return start

    def start(
        self, way: Way, number: int, source: Array, target: Array, link: int = 0
    ) -> None:
        """Start a copy that is made now and then, as `number`."""
        copier = self._opened(link)
        ticket = (copier.out if way == "out" else copier.back)(source, target)
        self._tickets[number] = self._latest[way, link] = copier, ticket

    def wait(self, number: int) -> None:
        """Make the compute queue wait for a copy."""
        if number in self._tickets:
            copier, ticket = self._tickets[number]
            copier.wait(ticket)

    @contextmanager
    def of_a_step(self, *, carries: bool = False, waits: bool = True) -> Iterator[None]:
        """All copies started within are finished at the end, or given up.

        After an error, Ctrl-C included, nothing touches the step's memory any more.

        Args:
            carries: Whether copies may go on in the next step.
            waits: Whether the host waits for the end, or what computes next does.
        """
        try:
            yield
            if not carries and waits:
                self.finish()
            elif not carries:
                self.settle()
        except BaseException:
            self.close()
            raise

    def settle(self) -> None:
        """Make the compute queue wait for all copies: each way they go in order.

        After that nothing has to be waited for.
        """
        for copier, ticket in self._latest.values():
            copier.wait(ticket)
        self._tickets.clear()
        self._latest.clear()

    def finish(self) -> None:
        """Wait on the host for all copies, those of graphs included.

        A graph goes on to copy when what it was captured from is closed.
        """
        for link in self._used:
            self._opened(link).finish()
        self._tickets.clear()
        self._latest.clear()

    def close(self) -> None:
        """Wait for what runs and drop the rest. The next step opens new copiers."""
        copiers = list(self._copiers.values())
        self._copiers.clear()
        self._tickets.clear()
        self._latest.clear()
        for copier in copiers:
            copier.close()

    def _opened(self, link: int) -> Copier:
        if link not in self._copiers:
            self._used.add(link)
            self._copiers[link] = self._open[link]()
        return self._copiers[link]
