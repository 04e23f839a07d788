"""Decide which measurements cannot enter any Pareto-optimal division.

Workspaces are known exactly before any timing; times of unmeasured points are predicted
from measured ones. The Pareto front of divisions under the predictions estimates the
best plan at every limit; the front of the measured rows is what a planner can use.
Where the measured front is notably behind the predicted one, the predicted steps of the
latter are measured next, until the fronts meet.

A prediction has two factors. The first is an affine law of time against size,
`start + slope * size`, with the size rounded up to a wave: an accelerator (or a thread
pool) runs the samples of a wave together, so times rise in steps. Several wave lengths
may fit about equally well; the fastest prediction counts. The second factor is the
deviation of the nearest measured sizes from the law, less a part of its standard
deviation: algorithms with irregular times are explored more closely.

Sizes that divide the batch evenly and multiples of eight are preferred slightly, so
that plans that want about the same size share one measurement.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite, sqrt
from typing import NamedTuple

from mucudnn.ir.conv import AlgoPerf
from mucudnn.ir.measurement import ANY_LIMIT, LimitRange
from mucudnn.passes.convolution.pareto import division_cost_ms, pareto_divisions

Point = tuple[str, int]
"""(algorithm, micro-batch size)."""

_TOLERANCE = 0.006
"""Relative distance allowed between the measured and the predicted front."""

_ODD_SIZE = 0.006
"""Relative penalty of sizes that neither divide the batch nor are multiples of 8."""

_OPTIMISM = 0.5
"""Standard deviations by which predictions are optimistic."""

_NEIGHBOURS = 3
"""Measurements on either side of a size that correct its law."""

_AS_GOOD = 1.3
"""Factor on the least error within which other laws count as fitting."""

_MOST_LAWS = 8

_MOST_PLANS = 12

_DISTINCT = 1.08
"""Workspace ratio by which the plans measured in one round differ at least."""


def next_measurements(
    sizes: Sequence[int],
    workspaces: Mapping[Point, int],
    measured: Sequence[AlgoPerf],
    *,
    launch_overhead_ms: float = 0.0,
    limits: LimitRange = ANY_LIMIT,
) -> tuple[Point, ...]:
    """Return the points to measure next; call again until none is returned.

    The first rounds race the powers of two and the whole batch.

    Args:
        sizes: Candidate micro-batch sizes; the largest is the mini-batch.
        workspaces: Workspace in bytes of every point that may be measured.
        measured: Results so far, failures included.
        launch_overhead_ms: Cost of each micro-batch after the first.
        limits: Workspace limits that plans will be requested for.

    Returns:
        Unmeasured points, largest sizes first.
    """
    known = {(perf.algo, perf.batch) for perf in measured}
    # Anchors: the whole batch and, per power of two, the first size no smaller.
    ascending = sorted(sizes)
    powers = (1 << i for i in range(ascending[-1].bit_length()))
    anchors = {ascending[bisect_left(ascending, power)] for power in powers}
    anchors.add(ascending[-1])
    raced = race(tuple(anchors), workspaces, measured, limits=limits)
    wanted = {*raced.points[0]} if raced.points else set()
    # After the races, measure what brings the predicted front below the measured one.
    if not wanted:
        rows = [p for p in measured if p.error is None and isfinite(p.cost_ms)]
        inside = {point: n for point, n in workspaces.items() if n <= limits.most}
        predictions = _predicted_rows(sizes, inside, rows, known)
        batch = max(sizes)
        measured_front = pareto_divisions(batch, rows, launch_overhead_ms)
        predicted_front = pareto_divisions(
            batch, [*rows, *predictions], launch_overhead_ms
        )
        wanted = (
            _missing(measured_front, predicted_front, launch_overhead_ms)
            - known
            - {*raced.hopeless}
        )
    return tuple(sorted(wanted, key=lambda point: (-point[1], point[0])))


def _missing(
    measured_front: Sequence[tuple[AlgoPerf, ...]],
    predicted_front: Sequence[tuple[AlgoPerf, ...]],
    launch_overhead_ms: float,
) -> set[Point]:
    """Return the points of predicted divisions that beat measured ones the most."""
    limits = [_workspace(steps) for steps in measured_front]
    behind = []
    # Compare each predicted division with the best measured one of its workspace.
    for steps in predicted_front:
        at = bisect_right(limits, _workspace(steps)) - 1
        cost = (
            division_cost_ms(measured_front[at], launch_overhead_ms) if at >= 0 else inf
        )
        predicted = division_cost_ms(steps, launch_overhead_ms)
        if cost > predicted * (1 + _TOLERANCE):
            behind.append((cost / predicted if predicted > 0 else inf, steps))
    behind.sort(key=lambda entry: -entry[0])
    # Take those that gain the most, each of a clearly different workspace.
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


def _predicted_rows(
    sizes: Sequence[int],
    workspaces: Mapping[Point, int],
    rows: Iterable[AlgoPerf],
    known: set[Point],
) -> list[AlgoPerf]:
    """Return predicted rows for unmeasured points of algorithms with measurements."""
    # Preferred sizes divide the mini-batch into equal parts, up to one sample.
    batch = max(sizes)
    preferred = {-(-batch // k) for k in range(1, batch + 1)}
    preferred |= {batch // k for k in range(1, batch + 1)}
    by_algo: dict[str, list[AlgoPerf]] = {}
    for row in sorted(rows, key=lambda row: row.batch):
        by_algo.setdefault(row.algo, []).append(row)
    predictions = []
    for algo, own in by_algo.items():
        laws = _laws([(row.batch, row.cost_ms) for row in own], batch)
        for size in sizes:
            if (algo, size) in known or (algo, size) not in workspaces:
                continue
            time_ms = _predict_ms(laws, own, size)
            if size % 8 and size not in preferred:
                time_ms *= 1 + _ODD_SIZE
            predictions.append(
                replace(
                    own[0],
                    batch=size,
                    time_ms=time_ms,
                    noise_ms=0.0,
                    workspace=workspaces[algo, size],
                )
            )
    return predictions


class _Law(NamedTuple):
    """Time in terms of size: `start_ms`, and `slope_ms` per sample of each wave."""

    error: float
    wave: int
    start_ms: float
    slope_ms: float

    def time_ms(self, size: int) -> float:
        return self.start_ms + self.slope_ms * self.wave * -(-size // self.wave)


def _predict_ms(laws: Sequence[_Law], own: Sequence[AlgoPerf], size: int) -> float:
    at = bisect_left([row.batch for row in own], size)
    near = own[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS]
    predictions = []
    for law in laws:
        off = [row.cost_ms / law.time_ms(row.batch) for row in near]
        mean = sum(off) / len(off)
        spread = sqrt(sum((x - mean) ** 2 for x in off) / len(off))
        predictions.append(law.time_ms(size) * (mean - _OPTIMISM * spread))
    return max(0.0, min(predictions))


def _laws(points: Sequence[tuple[int, float]], batch: int) -> list[_Law]:
    """Return laws that fit the (size, time) points about equally well, best first."""
    laws = [_fit(points, wave) for wave in range(1, max(1, batch // 2) + 1)]
    laws.sort()
    most = laws[0].error * _AS_GOOD + 0.002
    return [law for law in laws[:_MOST_LAWS] if law.error <= most]


def _fit(points: Sequence[tuple[int, float]], wave: int) -> _Law:
    """Fit a law by least squares of relative errors, without negative coefficients."""
    xs = [1 / max(time_ms, 1e-9) for _, time_ms in points]
    ys = [wave * -(-n // wave) * x for (n, _), x in zip(points, xs, strict=True)]
    xx, yy = sum(x * x for x in xs), sum(y * y for y in ys)
    xy, x1, y1 = sum(x * y for x, y in zip(xs, ys, strict=True)), sum(xs), sum(ys)
    det = xx * yy - xy * xy
    # With one distinct wave count the slope is undetermined: assume no start-up time.
    start = (x1 * yy - y1 * xy) / det if det > 1e-12 * xx * yy else 0.0
    slope = (y1 - start * xy) / yy
    if start < 0:
        start, slope = 0.0, y1 / yy
    elif slope < 0:
        start, slope = x1 / xx, 0.0
    errors = ((start * x + slope * y - 1) ** 2 for x, y in zip(xs, ys, strict=True))
    return _Law(sqrt(sum(errors) / len(points)), wave, start, slope)


# Exclude algorithms from timing at sizes where smaller sizes show them to be slow.
#
# An algorithm is hopeless at a size if another algorithm takes a small part of its time
# and fits within every limit at which the first would be considered: no plan needs it.
# Its own time is bounded from below (beyond the largest measured size each sample takes
# the time per sample between the last two, so that a shared start-up such as a filter
# transform is not held against it), the other's from above. Failing algorithms exclude
# nobody. An algorithm that needs more than the largest limit is timed only if it may be
# faster than those that need no more.
#
# Sizes are raced in stages, so that cheap timings decide about expensive ones:
#
# 1. the smallest size; 2. sizes up to an eighth of the mini-batch. The second smallest
# is timed for every algorithm, as a start-up shows only in two times; 3. the mini-
# batch itself, the reference of all plans; 4. the sizes in between, where both
# neighbours are known.


_HOPELESS = 2.0
"""Factor on another algorithm's time from which an algorithm is hopeless."""

_FIRST_SHARE = 8
"""Sizes up to this fraction of the mini-batch are timed before it."""


@dataclass(frozen=True, slots=True)
class Race:
    """Points to time, and points that need not be timed.

    Attributes:
        points: Points to time, by stage; the first stage is next.
        hopeless: Excluded points, with the algorithm that is ahead.
    """

    points: tuple[tuple[Point, ...], ...]
    hopeless: Mapping[Point, str]


def race(
    sizes: Sequence[int],
    workspaces: Mapping[Point, int],
    measured: Iterable[AlgoPerf],
    *,
    limits: LimitRange = ANY_LIMIT,
) -> Race:
    """Return the points to time next; call again with results until none are left.

    For the arguments see `next_measurements`; `measured` may be at other sizes, too.
    """
    rows = list(measured)
    known = {(row.algo, row.batch) for row in rows}
    times = _Times(row for row in rows if row.error is None)
    first = sorted(sizes)[:2]
    largest = max(sizes, default=1)
    wanted: list[Point] = []
    uncertain: list[str] = []
    hopeless: dict[Point, str] = {}
    for batch in sorted(sizes, reverse=True):
        here = {algo: n for (algo, size), n in workspaces.items() if size == batch}
        running = [
            a for a in here if (a, batch) not in known or batch in times.rows_of(a)
        ]
        for algo, nbytes in here.items():
            if (algo, batch) in known:
                continue
            # The rival is the fastest that fits wherever this one is considered.
            fits = [b for b in running if here[b] <= max(nbytes, limits.least)]
            ahead = min(fits, key=lambda b: times.most_ms(b, batch), default=algo)
            least = times.least_ms(algo, batch) if ahead != algo else 0.0
            enough = _HOPELESS if nbytes <= limits.most else 1.0
            enough *= times.most_ms(ahead, batch)
            # The two smallest sizes show an algorithm's start-up: time them anyway.
            if least > enough and not (batch in first and batch < largest):
                hopeless[algo, batch] = ahead
                continue
            wanted.append((algo, batch))
            if (
                ahead != algo
                and batch == largest
                and times.most_ms(algo, batch) > enough
            ):
                uncertain.append(algo)
    # Where a start-up time is still unclear, time the size before the mini-batch, too.
    probe = max((n for n in sizes if n * _FIRST_SHARE <= largest), default=0)
    for algo in uncertain:
        own = times.rows_of(algo)
        unclear = len(own) > 1 and max(own) < probe
        if unclear and hopeless.pop((algo, probe), None) is not None:
            wanted.append((algo, probe))
    stages: dict[int, list[Point]] = {}
    for algo, batch in sorted(wanted, key=lambda point: -point[1]):
        stages.setdefault(_stage(batch, first, largest), []).append((algo, batch))
    ordered = tuple(tuple(stages[stage]) for stage in sorted(stages))
    return Race(ordered, hopeless)


def _stage(batch: int, first: Sequence[int], largest: int) -> int:
    if batch == first[0]:
        return 0
    if batch == largest:
        return 2
    return 1 if batch in first or batch * _FIRST_SHARE <= largest else 3


class _Times:
    """Measured times of each algorithm, by ascending size."""

    def __init__(self, rows: Iterable[AlgoPerf]) -> None:
        self._by_algo: dict[str, dict[int, float]] = {}
        for row in sorted(rows, key=lambda row: row.batch):
            self._by_algo.setdefault(row.algo, {})[row.batch] = row.time_ms

    def rows_of(self, algo: str) -> Mapping[int, float]:
        """Return the measured times of one algorithm, by size."""
        return self._by_algo.get(algo, {})

    def most_ms(self, algo: str, batch: int) -> float:
        """Return an upper bound: the time of a larger size, or of repeated smaller."""
        own = self.rows_of(algo)
        if batch in own:
            return own[batch]
        above = [time for size, time in own.items() if size > batch]
        below = [time * -(-batch // size) for size, time in own.items() if size < batch]
        return min((*above, *below[-1:]), default=inf)

    def least_ms(self, algo: str, batch: int) -> float:
        """Return a lower bound by extrapolation; 0 if no smaller size is measured."""
        own = self.rows_of(algo)
        below = [(size, time) for size, time in own.items() if size < batch]
        above = [(size, time) for size, time in own.items() if size > batch]
        if not below:
            return 0.0
        size, time = below[-1]
        # The line through the neighbours, or through the last two below.
        if above:
            others = above[0]
        elif len(below) > 1:
            others = below[-2]
        else:
            return time
        slope = max(0.0, (others[1] - time) / (others[0] - size))
        return time + slope * (batch - size)
