"""The copies of a step: numbered, started, waited for, and given up after an error.

A number stands for the last copy that was started under it, in this step or the one
before; until there is one, nothing has to be waited for.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mucudnn.backends.base import Array, Buffer, Copier, Device

__all__ = ["Copies"]


class Copies:
    """A device's copier, opened by the first copy, and the tickets of one step."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._copier: Copier | None = None
        self._tickets: dict[int, Any] = {}

    def out(
        self, number: int, source: Array, target: Buffer, after: Sequence[int]
    ) -> None:
        """Start a copy to the host, as `number`, once the copies `after` are done."""
        tickets = self._started(after)
        self._tickets[number] = self._opened().out(source, target, tickets)

    def back(
        self, number: int, source: Buffer, target: Array, after: Sequence[int]
    ) -> None:
        """Start a copy from the host, as `number`, once the copies `after` are done."""
        tickets = self._started(after)
        self._tickets[number] = self._opened().back(source, target, tickets)

    def wait(self, number: int) -> None:
        """Make the compute queue wait for a copy."""
        for ticket in self._started((number,)):
            self._opened().wait(ticket)

    @contextmanager
    def of_a_step(self, *, carries: bool = False) -> Iterator[None]:
        """All copies started within are finished at the end, or given up.

        After an error, Ctrl-C included, nothing touches the step's memory any more.

        Args:
            carries: Whether copies may go on in the next step.
        """
        try:
            yield
            if not carries:
                self.finish()
        except BaseException:
            self.close()
            raise

    def finish(self) -> None:
        """Wait on the host for all copies."""
        if self._copier is not None:
            self._copier.finish()
            self._tickets.clear()

    def close(self) -> None:
        """Wait for what runs and drop the rest. The next step opens a new copier."""
        copier, self._copier = self._copier, None
        self._tickets.clear()
        if copier is not None:
            copier.close()

    def _started(self, numbers: Sequence[int]) -> list[Any]:
        return [self._tickets[i] for i in numbers if i in self._tickets]

    def _opened(self) -> Copier:
        if self._copier is None:
            self._copier = self._device.copier()
        return self._copier
