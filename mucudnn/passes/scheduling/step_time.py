"""How long a step takes, straight from its residency intervals.

A search weighs hundreds of residencies and keeps one. So it does not write the program
of each and simulate it instruction by instruction: it makes the same additions in the
same order from nodes' times and from what intervals begin and wait for, and gives up
once what is left of compute alone would take longer than the best that is known.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from mucudnn.passes.scheduling.intervals import ResidencyInterval

__all__ = ["step_ms"]

_ROUNDED = 1 - 1e-9
"""Sums in another order differ by less; nothing is given up for that."""

_STEPS_BEFORE = 2
"""Steps before the one that counts, where storages are live across iterations."""

_IN, _OUT, _WAIT = range(3)

_Event = tuple[int, str, float, float]
"""Kind, storage, time of the copy, what the computation takes longer for it."""

_Events = Mapping[int, Sequence[_Event]]
"""Node -> what is begun or waited for there."""


def step_ms(
    intervals: Sequence[ResidencyInterval],
    node_ms: Sequence[float],
    nbytes: Mapping[str, int],
    rates: tuple[float, float],
    lost_ms: Callable[[float], float],
    below: float = math.inf,
) -> float:
    """What `simulate` predicts for the program that `emit` writes, to the last bit.

    Args:
        intervals: Of a step.
        node_ms: Times of its nodes, in order.
        nbytes: Storage -> bytes that a copy of it moves.
        rates: Bytes per ms of the links out and in.
        lost_ms: Time of a copy -> what the computation beside it takes longer.
        below: What is not faster than this need not be known exactly.

    Returns:
        The step's time, or infinity where it is not below the limit.
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
    """The clocks of compute and of both links, from step to step."""

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
        """When compute and all copies are done."""
        return max(self.now, self._out, self._in)

    def run(self, limit: float, left: float) -> bool:
        """Go on by one step, or until it is known that it ends no sooner than a limit.

        Args:
            limit: When it is too late.
            left: What its nodes take together, or less.

        Returns:
            Whether the step was run to its end.
        """
        before, behind = self._before, self._behind
        for i, ms in enumerate(self._node_ms):
            if i in before:
                self._happen(before[i])
                if self.now + left > limit:
                    return False
            self.now += ms
            left -= ms
            if i in behind:
                self._happen(behind[i])
        return True

    def _happen(self, events: Sequence[_Event]) -> None:
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
    """What happens right before and right behind nodes, in the order of a program."""
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
    return _merged(arrivals, waits), _merged(copies, departures)


def _merged(
    first: dict[int, list[_Event]],
    second: dict[int, list[_Event]],
) -> _Events:
    for at, events in second.items():
        first.setdefault(at, []).extend(events)
    return first
