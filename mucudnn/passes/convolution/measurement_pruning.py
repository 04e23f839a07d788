"""Measure only what could enter a good division, at whatever workspace limit.

Workspaces are known exactly before anything is timed; times are guessed from those
already measured. The Pareto front of divisions under the guesses is an estimate of the
best there is at every limit at once, and the front of what was measured is what a
planner can have. Where the second is notably behind the first, the guessed steps of
the first are measured next, until the fronts meet.

A guess has two factors. One is a law of time against size, `start + slope * size` with
the size rounded up to a wave: an accelerator (or a pool of threads) takes the samples
of a wave together, so times rise in steps; a wave of one sample is a plain affine law.
Several wave lengths may fit equally well, and the guess is the most hopeful. The other
is how far the nearest measured sizes are off that law, less a part of their spread: an
algorithm with surprising sizes is looked at more closely than one without.

Fewer distinct sizes do if plans that want "about that size" agree on one. So sizes that
make up the batch evenly, and multiples of eight, are preferred by a little.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf, isfinite, sqrt
from typing import NamedTuple

from mucudnn.ir.conv import AlgoPerf
from mucudnn.ir.limits import ANY_LIMIT, LimitRange
from mucudnn.passes.convolution.pareto import division_cost_ms, pareto_divisions
from mucudnn.passes.convolution.race import Point, race

__all__ = ["next_measurements"]

_TOLERANCE = 0.006
"""How far behind the guessed front the measured one may stay, as a fraction."""

_ODD_SIZE = 0.006
"""How much more a size that fits no pattern is taken to cost."""

_HOPE = 0.5
"""Standard deviations by which guesses are better than the nearest measurements."""

_NEIGHBOURS = 3
"""Measurements on either side that tell how far off the law a size is."""

_AS_GOOD = 1.3
"""Laws whose error is at most this much larger than the best one's are as good."""

_MOST_LAWS = 8
_MOST_PLANS = 12
_DISTINCT = 1.08
"""Plans wanted in one round differ by at least this factor in workspace."""


def next_measurements(
    sizes: Sequence[int],
    workspaces: Mapping[Point, int],
    measured: Sequence[AlgoPerf],
    *,
    launch_overhead_ms: float = 0.0,
    limits: LimitRange = ANY_LIMIT,
) -> tuple[Point, ...]:
    """What to measure next; call again with the results until nothing is returned.

    At first powers of two and the whole batch are raced. What is returned is as good
    for any of the limits.

    Args:
        sizes: Candidate micro-batch sizes; the largest is the mini-batch.
        workspaces: Bytes for every algorithm and size that may be measured.
        measured: Results so far; failures count as measured.
        launch_overhead_ms: What each micro-batch after the first costs.
        limits: Of workspace, that plans will be asked for under.

    Returns:
        Points not measured yet, largest sizes first.
    """
    known = {(perf.algo, perf.batch) for perf in measured}
    anchors = _anchors(sizes)
    raced = race(tuple(anchors), workspaces, measured, limits=limits)
    wanted = {*raced.points[0]} if raced.points else set()
    if not wanted:
        rows = [p for p in measured if p.error is None and isfinite(p.cost_ms)]
        inside = {point: n for point, n in workspaces.items() if n <= limits.most}
        guesses = _guesses(sizes, inside, rows, known)
        batch = max(sizes)
        have = pareto_divisions(batch, rows, launch_overhead_ms)
        hope = pareto_divisions(batch, [*rows, *guesses], launch_overhead_ms)
        wanted = _missing(have, hope, launch_overhead_ms) - known - {*raced.hopeless}
    return tuple(sorted(wanted, key=lambda point: (-point[1], point[0])))


def _anchors(sizes: Sequence[int]) -> set[int]:
    """The whole batch, and for each power of two the first size that is no smaller."""
    ascending = sorted(sizes)
    powers = (1 << i for i in range(ascending[-1].bit_length()))
    return {ascending[bisect_left(ascending, power)] for power in powers} | {
        ascending[-1]
    }


def _missing(
    have: Sequence[tuple[AlgoPerf, ...]],
    hope: Sequence[tuple[AlgoPerf, ...]],
    launch_overhead_ms: float,
) -> set[Point]:
    """Steps of the hoped-for divisions that the ones at hand are furthest behind."""
    limits = [_workspace(steps) for steps in have]
    behind = []
    for steps in hope:
        at = bisect_right(limits, _workspace(steps)) - 1
        cost = division_cost_ms(have[at], launch_overhead_ms) if at >= 0 else inf
        hoped = division_cost_ms(steps, launch_overhead_ms)
        if cost > hoped * (1 + _TOLERANCE):
            behind.append((cost / hoped if hoped > 0 else inf, steps))
    behind.sort(key=lambda entry: -entry[0])
    chosen: list[int] = []
    points: set[Point] = set()
    for _, steps in behind:
        nbytes = 1 + _workspace(steps)
        if all(max(nbytes, n) >= _DISTINCT * min(nbytes, n) for n in chosen):
            chosen.append(nbytes)
            points |= {(step.algo, step.batch) for step in steps}
        if len(chosen) == _MOST_PLANS:
            break
    return points


def _workspace(steps: Sequence[AlgoPerf]) -> int:
    return max(step.workspace for step in steps)


def _guesses(
    sizes: Sequence[int],
    workspaces: Mapping[Point, int],
    rows: Iterable[AlgoPerf],
    known: set[Point],
) -> list[AlgoPerf]:
    """A row for everything not measured, of algorithms that ran at some size."""
    batch = max(sizes)
    preferred = {-(-batch // k) for k in range(1, batch + 1)}
    preferred |= {batch // k for k in range(1, batch + 1)}
    by_algo: dict[str, list[AlgoPerf]] = {}
    for row in sorted(rows, key=lambda row: row.batch):
        by_algo.setdefault(row.algo, []).append(row)
    guesses = []
    for algo, own in by_algo.items():
        laws = _laws([(row.batch, row.cost_ms) for row in own], batch)
        for size in sizes:
            if (algo, size) in known or (algo, size) not in workspaces:
                continue
            time_ms = _guess(laws, own, size)
            if size % 8 and size not in preferred:
                time_ms *= 1 + _ODD_SIZE
            guesses.append(
                replace(
                    own[0],
                    batch=size,
                    time_ms=time_ms,
                    noise_ms=0.0,
                    workspace=workspaces[algo, size],
                )
            )
    return guesses


class _Law(NamedTuple):
    """Time against size: `start_ms`, and `slope_ms` for each sample of each wave."""

    error: float
    wave: int
    start_ms: float
    slope_ms: float

    def time_ms(self, size: int) -> float:
        return self.start_ms + self.slope_ms * self.wave * -(-size // self.wave)


def _guess(laws: Sequence[_Law], own: Sequence[AlgoPerf], size: int) -> float:
    at = bisect_left([row.batch for row in own], size)
    near = own[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS]
    guesses = []
    for law in laws:
        off = [row.cost_ms / law.time_ms(row.batch) for row in near]
        mean = sum(off) / len(off)
        spread = sqrt(sum((x - mean) ** 2 for x in off) / len(off))
        guesses.append(law.time_ms(size) * (mean - _HOPE * spread))
    return max(0.0, min(guesses))


def _laws(points: Sequence[tuple[int, float]], batch: int) -> list[_Law]:
    """Laws that fit the (size, time) points about equally well, best first."""
    laws = [_fit(points, wave) for wave in range(1, max(1, batch // 2) + 1)]
    laws.sort()
    most = laws[0].error * _AS_GOOD + 0.002
    return [law for law in laws[:_MOST_LAWS] if law.error <= most]


def _fit(points: Sequence[tuple[int, float]], wave: int) -> _Law:
    """Least squares in relative error; neither coefficient may be negative."""
    xs = [1 / max(time_ms, 1e-9) for _, time_ms in points]
    ys = [wave * -(-n // wave) * x for (n, _), x in zip(points, xs, strict=True)]
    xx, yy = sum(x * x for x in xs), sum(y * y for y in ys)
    xy, x1, y1 = sum(x * y for x, y in zip(xs, ys, strict=True)), sum(xs), sum(ys)
    det = xx * yy - xy * xy
    # One distinct wave count leaves no slope to tell: time in proportion to the size.
    start = (x1 * yy - y1 * xy) / det if det > 1e-12 * xx * yy else 0.0
    slope = (y1 - start * xy) / yy
    if start < 0:
        start, slope = 0.0, y1 / yy
    elif slope < 0:
        start, slope = x1 / xx, 0.0
    errors = ((start * x + slope * y - 1) ** 2 for x, y in zip(xs, ys, strict=True))
    return _Law(sqrt(sum(errors) / len(points)), wave, start, slope)
