"""The copies of a step: numbered, started, waited for, and given up after an error.

A number stands for the last copy that was started under it, in this step or the one
before; until there is one, nothing has to be waited for.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mucudnn.backends.base import Array, Buffer, Copier

__all__ = ["Copies"]


class Copies:
    """A copier a tier, opened by its first copy, and the tickets of one step.

    Args:
        copiers: What opens the copier of each tier.
    """

    def __init__(self, copiers: Sequence[Callable[[], Copier]]) -> None:
        self._open = tuple(copiers)
        self._copiers: dict[int, Copier] = {}
        self._tickets: dict[int, tuple[Copier, Any]] = {}
        self._latest: dict[tuple[str, int], tuple[Copier, Any]] = {}

    def out(
        self,
        number: int,
        source: Array,
        target: Buffer,
        after: Sequence[int],
        link: int = 0,
    ) -> None:
        """Start a copy to a tier, as `number`, once the copies `after` are done."""
        tickets, copier = self._started(after), self._opened(link)
        found = copier, copier.out(source, target, tickets)
        self._tickets[number] = self._latest["out", link] = found

    def back(
        self,
        number: int,
        source: Buffer,
        target: Array,
        after: Sequence[int],
        link: int = 0,
    ) -> None:
        """Start a copy from a tier, as `number`, once the copies `after` are done."""
        tickets, copier = self._started(after), self._opened(link)
        found = copier, copier.back(source, target, tickets)
        self._tickets[number] = self._latest["back", link] = found

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
        """Make the compute queue wait for all copies: each way they go in order."""
        for copier, ticket in self._latest.values():
            copier.wait(ticket)
        self._latest.clear()

    def finish(self) -> None:
        """Wait on the host for all copies."""
        for copier in self._copiers.values():
            copier.finish()
        self._tickets.clear()
        self._latest.clear()

    def close(self) -> None:
        """Wait for what runs and drop the rest. The next step opens new copiers."""
        copiers, self._copiers = self._copiers, {}
        self._tickets.clear()
        self._latest.clear()
        for copier in copiers.values():
            copier.close()

    def _started(self, numbers: Sequence[int]) -> list[Any]:
        return [self._tickets[i][1] for i in numbers if i in self._tickets]

    def _opened(self, link: int) -> Copier:
        if link not in self._copiers:
            self._copiers[link] = self._open[link]()
        return self._copiers[link]
