"""Start and wait for the copies of a step, by number; abandon them after an error.

A number refers to the last copy started under it, in this step or the one before.
Waiting for a number without a copy returns at once.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mucudnn.backends.device import Array, Copier, Start, Way
from mucudnn.runtime.executor.tasks import Call


class Copies:
    """The copy engines of all tiers, opened on first use, and the tickets of a step."""

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
        """Return a call that starts copy `number` after the copies `after`.

        Everything that does not depend on the step is prepared once, and again for a
        new copier.
        """
        tickets, latest, stream = self._tickets, self._latest, (way, link)
        copiers = self._copiers
        made: list[tuple[Copier, Start]] = []

        def start() -> None:
            copier = copiers.get(link) or self._opened(link)
            if not made or made[0][0] is not copier:
                made[:] = [(copier, copier.prebind(way, source, target))]
            behind = [tickets[i][1] for i in after if i in tickets]
            tickets[number] = latest[stream] = copier, made[0][1](behind)

        return start

    def start(
        self, way: Way, number: int, source: Array, target: Array, link: int = 0
    ) -> None:
        """Start a single copy as `number`."""
        copier = self._opened(link)
        ticket = (copier.out if way == "out" else copier.back)(source, target)
        self._tickets[number] = self._latest[way, link] = copier, ticket

    def wait(self, number: int) -> None:
        """Make the compute stream wait for a copy."""
        if number in self._tickets:
            copier, ticket = self._tickets[number]
            copier.wait(ticket)

    @contextmanager
    def of_a_step(self, *, carries: bool = False, waits: bool = True) -> Iterator[None]:
        """Finish all copies started within the block, or abandon them on an error.

        After an error, Ctrl-C included, no copy touches the step's memory any more.

        Args:
            carries: Whether copies may continue into the next step.
            waits: Whether the host waits for the copies; otherwise the compute stream
                does.
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
        """Make the compute stream wait for all copies.

        The last copy of each stream is enough, as copies of one stream run in order.
        """
        for copier, ticket in self._latest.values():
            copier.wait(ticket)
        self._tickets.clear()
        self._latest.clear()

    def finish(self) -> None:
        """Wait on the host for all copies, those in captured graphs included.

        A captured graph still copies after the engine it was captured from was closed.
        """
        for link in self._used:
            self._opened(link).finish()
        self._tickets.clear()
        self._latest.clear()

    def close(self) -> None:
        """Wait for running copies, drop the rest; the next step opens new engines."""
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
