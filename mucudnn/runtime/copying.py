"""The copies of a step: numbered, started, waited for, and given up after an error."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mucudnn.backends.base import Array, Buffer, Copier, Device

__all__ = ["Copies"]


class Copies:
    """A device's copier, opened by the first copy, and the tickets of one step.

    Args:
        device: Between which and its host is copied.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._copier: Copier | None = None
        self._tickets: dict[int, Any] = {}

    def out(
        self, number: int, source: Array, target: Buffer, after: Sequence[int]
    ) -> None:
        """Start a copy to the host.

        Args:
            number: What to call it.
            source: On the device.
            target: On the host.
            after: Copies of this step that it waits for.
        """
        tickets = [self._tickets[i] for i in after]
        self._tickets[number] = self._opened().out(source, target, tickets)

    def back(
        self, number: int, source: Buffer, target: Array, after: Sequence[int]
    ) -> None:
        """Start a copy from the host."""
        tickets = [self._tickets[i] for i in after]
        self._tickets[number] = self._opened().back(source, target, tickets)

    def wait(self, number: int) -> None:
        """Make the compute queue wait for a copy."""
        self._opened().wait(self._tickets[number])

    @contextmanager
    def of_a_step(self) -> Iterator[None]:
        """All copies started within are finished at the end, or given up.

        After an error, Ctrl-C included, nothing touches the step's memory any more.
        """
        try:
            yield
            if self._copier is not None:
                self._copier.finish()
                self._tickets.clear()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Wait for what runs and drop the rest. The next step opens a new copier."""
        copier, self._copier = self._copier, None
        self._tickets.clear()
        if copier is not None:
            copier.close()

    def _opened(self) -> Copier:
        if self._copier is None:
            self._copier = self._device.copier()
        return self._copier
