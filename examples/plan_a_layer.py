"""Measure one layer, list its plans by workspace, and explain the choice."""

from mucudnn import ConvProblem, Direction, Tuner, pareto_plans

problem = ConvProblem(
    direction=Direction.FORWARD,
    x_shape=(16, 16, 14, 14),
    w_shape=(32, 16, 5, 5),
    padding=2,
)
tuner = Tuner(workspace_limit="1MiB", time_limit_s=5)

print("Pareto-optimal divisions in time and workspace:")
table = tuner.measure(problem)
for plan in pareto_plans(table, workspace_limit=1 << 40):
    sizes = [step.batch for step in plan.steps]
    print(f"{plan.workspace:>12,} bytes  {plan.time_ms:8.2f} ms  micro-batches {sizes}")

(plan,) = tuner.plan([problem])
print(tuner.explain(plan))
