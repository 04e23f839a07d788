"""Divisions of one mini-batch: the cheapest within a limit, and the Pareto front.

Micro-batches run one after another in the same workspace, so a division costs the sum
of its parts (plus one launch for every part after the first) and needs the largest of
their workspaces. Over the sizes n = 1 … N,

    T(n) = min( t(n),  min over s <= n / 2 of  t(s) + T(n - s) )

where t(s) is the cheapest algorithm at size s within the limit: a division with more
than one part has a part of at most n / 2 ("Workspace Reuse" in Oyama, Ben-Nun, Hoefler
and Matsuoka, "Accelerating Deep Learning Frameworks with Micro-batches", CLUSTER 2018).

Every float is a fraction with a power of two as denominator, so costs are scaled to one
denominator and added as integers. Sums are exact, and the lowest bits count the parts:
of two divisions that cost the same, the one with fewer parts is smaller.
"""

from collections.abc import Iterable, Sequence
from math import gcd, isfinite
from typing import NamedTuple

from mucudnn.errors import PlanningError
from mucudnn.ir.conv import AlgoPerf, ConvPlan, PerfTable, problem_text

_MOST_SAMPLES = 1 << 17
_MOST_WORK = 1 << 24
"""Limit of samples times sizes, so that a division takes seconds."""


def check_divisible(batch: int, sizes: int) -> None:
    """Raise `PlanningError` for a batch whose division would take minutes to plan.

    `batch` is in units of the greatest common divisor of all sizes.
    """
    most = min(_MOST_SAMPLES, _MOST_WORK // max(1, sizes))
    if sizes > 1 and batch > most:
        raise PlanningError(
            f"a mini-batch of {batch} samples is too large to be divided into "
            f"micro-batches of {sizes} sizes: the maximum is {most}; the batch policy "
            "`undivided` has no maximum, and that of `powers_of_two` is larger than "
            "that of `all`"
        )


def division_cost_ms(steps: Sequence[AlgoPerf], launch_overhead_ms: float) -> float:
    """Return the planners' objective: times, their noise, and extra launches."""
    return sum(s.cost_ms for s in steps) + (len(steps) - 1) * launch_overhead_ms


def candidates(table: PerfTable) -> tuple[AlgoPerf, ...]:
    """Return rows a division may use: succeeded, finite, not above the mini-batch."""
    return tuple(
        perf
        for perf in table.usable
        if isfinite(perf.cost_ms) and 1 <= perf.batch <= table.problem.batch
    )


def whole_batch(table: PerfTable) -> tuple[AlgoPerf, ...]:
    """Return the candidates that run the mini-batch undivided."""
    return tuple(p for p in candidates(table) if p.batch == table.problem.batch)


def fastest_undivided(table: PerfTable, workspace_limit: int) -> AlgoPerf | None:
    """Return the cheapest algorithm for the whole mini-batch; None if none fits."""
    fits = (p for p in whole_batch(table) if p.workspace <= workspace_limit)
    return min(fits, key=lambda p: (p.cost_ms, p.workspace), default=None)


def fastest_division(table: PerfTable, workspace_limit: int) -> ConvPlan:
    """Return the cheapest division within the limit.

    Raises:
        PlanningError: Nothing fits; the message has the smallest feasible limit.
    """
    sweep = _Sweep(table.problem.batch, candidates(table), table.launch_overhead_ms)
    sweep.lower(workspace_limit)
    if not sweep.feasible:
        raise no_plan(table, workspace_limit, least_workspace(table))
    # Of equal costs, the total prefers fewer parts; lower the limit for less workspace.
    total = sweep.total
    while sweep.feasible and sweep.total == total:
        steps = sweep.steps()
        sweep.lower(max(step.workspace for step in steps) - 1)
    return ConvPlan(table.problem, steps, workspace_limit=workspace_limit)


def pareto_plans(table: PerfTable, workspace_limit: int) -> tuple[ConvPlan, ...]:
    """Return the Pareto front of plans within the limit, by ascending workspace.

    Costs strictly descend. Nothing is returned if nothing fits.
    """
    return tuple(
        ConvPlan(table.problem, found.steps, workspace_limit=workspace_limit)
        for found in pareto_front(table, workspace_limit)
    )


class Divided(NamedTuple):
    """A division on a Pareto front, cheaper to make than a `ConvPlan`.

    Attributes:
        workspace: Bytes of the largest part.
        cost_ms: Objective of the planners; see `division_cost_ms`.
        steps: Algorithm and size of every part.
    """

    workspace: int
    cost_ms: float
    steps: tuple[AlgoPerf, ...]


def pareto_front(table: PerfTable, workspace_limit: int) -> list[Divided]:
    """Return the Pareto front of divisions within the limit, workspaces ascending."""
    rows = [p for p in candidates(table) if p.workspace <= workspace_limit]
    launch = table.launch_overhead_ms
    front: list[Divided] = []
    for steps in pareto_divisions(table.problem.batch, rows, launch):
        cost_ms = division_cost_ms(steps, launch)
        # A gain below the rounding of the sum does not count.
        if not front or cost_ms < front[-1].cost_ms:
            front.append(Divided(max(step.workspace for step in steps), cost_ms, steps))
    return front


def pareto_divisions(
    batch: int, rows: Sequence[AlgoPerf], launch_overhead_ms: float
) -> list[tuple[AlgoPerf, ...]]:
    """Return the Pareto front of divisions of `batch` samples, workspaces ascending."""
    sweep = _Sweep(batch, rows, launch_overhead_ms)
    if (whole := sweep.undivided()) is not None:
        return whole
    # The limit is lowered to just below the workspace of each optimal division, so
    # there is one dynamic program per point on the front.
    falling: list[tuple[int, tuple[AlgoPerf, ...]]] = []
    while sweep.feasible:
        steps, cost = sweep.steps(), sweep.cost
        if falling and falling[-1][0] == cost:
            falling.pop()
        falling.append((cost, steps))
        sweep.lower(max(step.workspace for step in steps) - 1)
    return [steps for _, steps in reversed(falling)]


def least_workspace(table: PerfTable) -> int | None:
    """Return the bytes the smallest division needs; None if no sizes add up."""
    rows = candidates(table)
    unit = gcd(table.problem.batch, *(p.batch for p in rows))
    whole = table.problem.batch // unit
    smallest: dict[int, int] = {}
    for perf in sorted(rows, key=lambda p: -p.workspace):  # the smallest one wins
        smallest[perf.batch // unit] = perf.workspace
    check_divisible(whole, len(smallest))
    needs: list[int | None] = [0]
    for n in range(1, whole + 1):
        options = [
            max(nbytes, rest)
            for batch, nbytes in smallest.items()
            if batch <= n and (rest := needs[n - batch]) is not None
        ]
        needs.append(min(options, default=None))
    return needs[-1]


def no_plan(table: PerfTable, workspace_limit: int, least: int | None) -> PlanningError:
    """Return the error for a table without a plan within the limit."""
    what = problem_text(table.problem)
    if not candidates(table):
        failed = {(p.algo, p.error) for p in table.perfs if p.error}
        reason = by_reason(sorted(failed)) or "nothing was measured"
        return PlanningError(f"no algorithm is usable for {what} ({reason})")
    if least is None:
        sizes = ", ".join(map(str, table.batches()))
        return PlanningError(
            f"no plan for {what}: measured at micro-batch sizes {sizes}, which do "
            f"not make up its {table.problem.batch} samples"
        )
    return PlanningError(
        f"no algorithm for {what} fits in {workspace_limit} bytes of workspace (the "
        f"smallest needs {least})"
    )


def by_reason(failures: Iterable[tuple[str, str]]) -> str:
    """Return (algorithm, reason) pairs as text that states each reason once."""
    algos: dict[str, list[str]] = {}
    for algo, reason in failures:
        algos.setdefault(reason, []).append(algo)
    return "; ".join(f"{', '.join(names)}: {why}" for why, names in algos.items())


class _Stair(NamedTuple):
    """The cheapest algorithm of one size for limits of at least `workspace` bytes."""

    workspace: int
    cost: int
    perf: AlgoPerf


class _Sweep:
    """The cheapest division of one table under a falling workspace limit."""

    def __init__(
        self, batch: int, rows: Sequence[AlgoPerf], launch_overhead_ms: float
    ) -> None:
        # Count in the greatest common divisor: a whole batch alone is one unit.
        unit = gcd(batch, *(p.batch for p in rows))
        batch //= unit
        check_divisible(batch, len({p.batch for p in rows}))
        self._batch = batch
        times = [launch_overhead_ms, *(p.cost_ms for p in rows)]
        ratios = [float(ms).as_integer_ratio() for ms in times]
        scale = max(denominator for _, denominator in ratios)
        launch, *costs = (n * (scale // d) for n, d in ratios)
        self._part_bits = batch.bit_length()
        ordered = sorted(
            (p.batch // unit, p.workspace, (cost + launch << self._part_bits) + 1, i)
            for i, (p, cost) in enumerate(zip(rows, costs, strict=True))
        )
        self._stairs: dict[int, list[_Stair]] = {}
        for size, workspace, cost, i in ordered:
            stairs = self._stairs.setdefault(size, [])
            if not stairs or cost < stairs[-1].cost:
                stairs.append(_Stair(workspace, cost, rows[i]))
        dearest = max((cost for _, _, cost, _ in ordered), default=0)
        self._never = (dearest + 1) * (batch + 1)
        self._best = [0]
        self._parts: list[tuple[int, int]] = []
        self._solve(1)

    @property
    def feasible(self) -> bool:
        """True if a division fits."""
        return self.total < self._never

    @property
    def total(self) -> int:
        """Cost and, in the lowest bits, number of parts of the cheapest division."""
        return self._best[-1]

    @property
    def cost(self) -> int:
        """Cost of the cheapest division, on this sweep's integer scale."""
        return self.total >> self._part_bits

    def undivided(self) -> list[tuple[AlgoPerf, ...]] | None:
        """Return the front if all rows are of the whole batch, else None."""
        if self._batch > 1:
            return None
        return [(stair.perf,) for stair in self._stairs.get(1, [])]

    def lower(self, limit: int) -> None:
        """Drop algorithms that need more than `limit` bytes, and solve again."""
        first = None
        for size, stairs in self._stairs.items():
            if stairs and stairs[-1].workspace > limit:
                first = first or size
                while stairs and stairs[-1].workspace > limit:
                    stairs.pop()
        if first is not None:
            self._solve(first)

    def _solve(self, first: int) -> None:
        # Sizes below `first` are unchanged: only the tail is computed again.
        best = self._best
        del best[first:]
        parts = [(size, cost) for size, cost in self._parts if size < first]
        ready = 0
        for n in range(first, self._batch + 1):
            while ready < len(parts) and 2 * parts[ready][0] <= n:
                ready += 1
            divided = min(
                [cost + best[n - size] for size, cost in parts[:ready]],
                default=self._never,
            )
            stairs = self._stairs.get(n)
            if stairs and stairs[-1].cost < divided:
                # Only a size that is cheaper whole than divided is worth using.
                parts.append((n, stairs[-1].cost))
                divided = stairs[-1].cost
            best.append(min(divided, self._never))
        self._parts = parts

    def steps(self) -> tuple[AlgoPerf, ...]:
        """Return the cheapest division, largest parts first."""
        best, steps, n = self._best, list[AlgoPerf](), self._batch
        while n > 0:
            size = next(
                size
                for size, cost in self._parts
                if size <= n and cost + best[n - size] == best[n]
            )
            steps.append(self._stairs[size][-1].perf)
            n -= size
        return tuple(sorted(steps, key=lambda perf: -perf.batch))
