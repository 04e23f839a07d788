"""Simulated time of a step directly from its residency intervals.

A search evaluates hundreds of residencies and keeps one. Emitting and simulating every
program would be slow, so this module makes the same additions in the same order from
nodes' times and intervals' copies, and stops once the remaining compute alone exceeds
the best known time.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from mucudnn.passes.scheduling.intervals import ResidencyInterval

__all__ = ["step_ms"]

_ROUNDED = 1 - 1e-9
"""Margin for the rounding of sums in another order."""

_STEPS_BEFORE = 2
"""Warm-up steps before the measured one, if storages are live across steps."""

_IN, _OUT, _WAIT = range(3)

_Event = tuple[int, str, float, float]
"""Kind, storage, time of the copy, and slowdown of compute by the copy (ms)."""

_Events = Mapping[int, Sequence[_Event]]
"""Copies started or awaited at each node."""


def step_ms(
    intervals: Sequence[ResidencyInterval],
    node_ms: Sequence[float],
    nbytes: Mapping[str, int],
    rates: tuple[float, float],
    lost_ms: Callable[[float], float],
    below: float = math.inf,
) -> float:
    """Return the time that `simulate` predicts for the emitted program, bit by bit.

    Args:
        intervals: Residency intervals of a step.
        node_ms: Times of its nodes, in order.
        nbytes: Bytes of a copy of each storage.
        rates: Bytes per ms of the links out and in.
        lost_ms: Function from the time of a copy to the slowdown of compute.
        below: Limit from which on the exact time does not matter.

    Returns:
        The step's time, or infinity if it is not below the limit.
    """
    count = len(node_ms)
    before, behind = _events(intervals, count, nbytes, rates, lost_ms)
    cyclic = any(i.host_resident and i.stop >= count for i in intervals)
    left = sum(node_ms) * _ROUNDED
    clock = _Clock(node_ms, before, behind)
    for _ in range(_STEPS_BEFORE if cyclic else 0):
        clock.run(math.inf, 0.0)
    begin = clock.now
    if not clock.run(begin + below / _ROUNDED, left):
        return math.inf
    found = (clock.now if cyclic else clock.all_done) - begin
    return found if found < below else math.inf


class _Clock:
    """Clocks of compute and of both links over successive steps."""

    def __init__(
        self,
        node_ms: Sequence[float],
        before: _Events,
        behind: _Events,
    ) -> None:
        self.now = 0.0
        self._node_ms = node_ms
        self._before, self._behind = before, behind
        self._out = self._in = 0.0
        self._left: dict[str, float] = {}
        self._done: dict[str, float] = {}

    @property
    def all_done(self) -> float:
        """Time at which compute and all copies are done."""
        return max(self.now, self._out, self._in)

    def run(self, limit: float, left: float) -> bool:
        """Simulate one step; stop early if it cannot end before a limit.

        Returns:
            Whether the step was simulated to its end.
        """
        before, behind = self._before, self._behind
        for i, ms in enumerate(self._node_ms):
            if i in before:
                self._process(before[i])
                if self.now + left > limit:
                    return False
            self.now += ms
            left -= ms
            if i in behind:
                self._process(behind[i])
        return True

    def _process(self, events: Sequence[_Event]) -> None:
        done = self._done
        for kind, name, ms, lost in events:
            if kind == _WAIT:
                if name in done and done[name] > self.now:
                    self.now = done[name]
            elif kind == _IN:
                start = max(self.now, self._in, self._left.get(name, 0.0))
                done[name] = self._in = start + ms
                self.now += lost
            else:
                start = max(self.now, self._out, 0.0)
                done[name] = self._left[name] = self._out = start + ms
                self.now += lost


def _events(
    intervals: Sequence[ResidencyInterval],
    count: int,
    nbytes: Mapping[str, int],
    rates: tuple[float, float],
    lost_ms: Callable[[float], float],
) -> tuple[_Events, _Events]:
    """Return the events before and after each node, in the program's order."""
    arrivals: dict[int, list[_Event]] = {}
    waits: dict[int, list[_Event]] = {}
    copies: dict[int, list[_Event]] = {}
    departures: dict[int, list[_Event]] = {}
    for i in intervals:
        name = i.storage
        if i.copied_in:
            ms = nbytes[name] / rates[1]
            event = (_IN, name, ms, lost_ms(ms))
            arrivals.setdefault(i.start, []).append(event)
            waits.setdefault(i.needed % count, []).append((_WAIT, name, 0.0, 0.0))
        if i.copied_out:
            ms = nbytes[name] / rates[0]
            event = (_OUT, name, ms, lost_ms(ms))
            copies.setdefault(i.last % count, []).append(event)
            end = i.stop % count if i.host_resident else i.stop
            departures.setdefault(end, []).append((_WAIT, name, 0.0, 0.0))
    for first, second in ((arrivals, waits), (copies, departures)):
        for at, events in second.items():
            first.setdefault(at, []).extend(events)
    return arrivals, copies
