"""Tables of measurements for planner tests, and planning by exhaustive search."""

import itertools
import math
import random

from hypothesis import strategies as st

from mucudnn.ir.conv import AlgoPerf, ConvProblem, Direction, PerfTable


def problem(batch):
    return ConvProblem(
        direction=Direction.FORWARD, x_shape=(batch, 1, 4, 4), w_shape=(1, 1, 3, 3)
    )


def perf(algo, batch, time_ms, workspace, **fields):
    return AlgoPerf(
        algo=algo, batch=batch, time_ms=time_ms, workspace=workspace, **fields
    )


@st.composite
def perf_tables(draw, max_batch=5, noisy=False, integers=True):
    """Integer times, so that sums are exact; `noisy` adds noise and launch cost."""
    batch = draw(st.integers(1, max_batch))
    times = st.integers(1, 20) if integers else st.floats(0.01, 20)
    extra = st.sampled_from([0.0, 0.25, 0.5, 2.0]) if noisy else st.just(0.0)
    rows = [
        perf(
            algo,
            b,
            draw(times),
            draw(st.integers(0, 8)) if algo != "GEMM" else 0,
            noise_ms=draw(extra),
        )
        for b in range(1, batch + 1)
        for algo in ("GEMM", "FFT", "WINOGRAD")
        if algo == "GEMM" or draw(st.booleans())
    ]
    failed = [
        perf("BROKEN", b, math.inf, 0, error="not supported")
        for b in range(1, batch + 1)
        if draw(st.booleans())
    ]
    rows = draw(st.permutations(rows + failed))
    return PerfTable(problem(batch), tuple(rows), draw(extra))


def cost(table, steps):
    launches = len(steps) - 1
    return sum(s.cost_ms for s in steps) + launches * table.launch_overhead_ms


def divisions(table, limit):
    """Every division within the limit, as (workspace, cost, steps)."""
    usable = [p for p in table.perfs if p.error is None and p.workspace <= limit]
    for k in range(1, table.problem.batch + 1):
        for steps in itertools.combinations_with_replacement(usable, k):
            if sum(s.batch for s in steps) == table.problem.batch:
                yield max(s.workspace for s in steps), cost(table, steps), steps


def pareto_front(points):
    """The definition: points no other point beats."""
    return {
        (w, t)
        for w, t in points
        if not any(w2 <= w and t2 <= t and (w2, t2) != (w, t) for w2, t2 in points)
    }


def realistic_table(seed, batch, algos, shape, noise=0.0):
    """Measurements as a GPU gives them: affine in the size, then distorted.

    Args:
        seed: Of the random parameters.
        batch: Mini-batch size; all sizes up to it are measured.
        algos: How many algorithms; more workspace tends to mean faster.
        shape: `affine`, `waves` (time is a staircase) or `sweet` (powers of two are a
            fifth faster).
        noise: Relative standard deviation of each time.

    Returns:
        The table, and the same without noise.
    """
    rng = random.Random(seed)
    noisy, clean = [], []
    for a in range(algos):
        level = a / max(1, algos - 1)
        start = rng.uniform(0.02, 0.3) * (1 + 2 * level)
        slope = 0.05 * rng.uniform(0.6, 1.0) * (1 - 0.8 * level)
        nbytes = 0 if a == 0 else int(10 ** (4 + 2 * level) * rng.uniform(0.5, 2))
        fixed = rng.choice([0, 1 << 16, 1 << 22]) if a else 0
        wave = rng.choice([4, 6, 8, 16, 20])
        for b in range(1, batch + 1):
            time_ms = start + slope * b
            if shape == "waves":
                time_ms = start + slope * wave * math.ceil(b / wave)
            if shape == "sweet" and b & (b - 1) == 0:
                time_ms *= 0.8
            name, workspace = f"algo{a}", fixed + nbytes * b
            clean.append(perf(name, b, time_ms, workspace))
            measured = time_ms * rng.lognormvariate(0, noise) if noise else time_ms
            noisy.append(perf(name, b, measured, workspace))
    return PerfTable(problem(batch), tuple(noisy)), PerfTable(
        problem(batch), tuple(clean)
    )


def step_times(table, most):
    """Return the times of 0, 1, … `most` samples: lines between measured steps."""
    found = [0.0] + [table.points[0].time_ms] * table.points[0].samples
    for before, after in itertools.pairwise(table.points):
        width = after.samples - before.samples
        slope = (after.time_ms - before.time_ms) / width
        found += [before.time_ms + slope * k for k in range(1, width)]
        found.append(after.time_ms)
    return found[: most + 1]
