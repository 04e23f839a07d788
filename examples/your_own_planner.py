"""Write a planner: a function that returns the plans with the least workspace."""

from collections.abc import Sequence

from mucudnn import ConvPlan, ConvProblem, Direction, PerfTable, Tuner, pareto_plans


def frugal(tables: Sequence[PerfTable], workspace_limit: int) -> tuple[ConvPlan, ...]:
    return tuple(pareto_plans(table, workspace_limit)[0] for table in tables)


problem = ConvProblem(
    direction=Direction.FORWARD, x_shape=(64, 3, 32, 32), w_shape=(8, 3, 3, 3)
)
for planner in ("workspace_reuse", frugal):
    tuner = Tuner(backend="null", workspace_limit="16KiB", planner=planner)
    (plan,) = tuner.plan([problem])
    parts = [(step.algo, step.batch) for step in plan.steps]
    print(f"{plan.workspace:>6} bytes, {plan.time_ms:6.1f} ms: {parts}")
