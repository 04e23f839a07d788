"""Mini-batches that nothing could hold are planned quickly, or refused early."""

import pytest
from hypothesis import given, strategies as st

from mucudnn.errors import PlanningError
from mucudnn.ir.conv import PerfTable
from mucudnn.passes.convolution.pareto import least_workspace, pareto_plans
from mucudnn.passes.microbatch import workspace_reuse
from mucudnn.runtime.tuning.tuner import Tuner
from mucudnn.studies.convolutions import compare
from mucudnn.suites import Layer
from tests.doubles import QUICK, problem, watched
from tests.examples import examples
from tests.tables import perf

HUGE = (10**6, 99_999_999, 10**8, 2**36)


@pytest.mark.parametrize("batch", HUGE)
@pytest.mark.parametrize("policy", ["powers_of_two", "all"])
def test_what_is_too_large_is_refused_before_anything_is_measured(batch, policy):
    backend = watched()
    one = Tuner(backend=backend, rule=QUICK, batch_policy=policy)
    with pytest.raises(PlanningError, match=rf"mini-batch of {batch} .* too large"):
        one.plan([problem(batch)])
    assert backend.conv.calls == []
    layers = [Layer("huge", problem(batch), 1), Layer("small", problem(4), 1)]
    huge, small = compare(one, layers, [1 << 20]).layers
    assert "too large to be divided" in huge.outcomes[0].reason
    assert small.outcomes[0].choice is not None


@pytest.mark.parametrize("batch", HUGE)
def test_undivided_takes_any_number(batch):
    one = Tuner(backend="null", rule=QUICK, batch_policy="undivided")
    (plan,) = one.plan([problem(batch)])
    assert [step.batch for step in plan.steps] == [batch]


@pytest.mark.parametrize(
    ("policy", "batch"), [("powers_of_two", 100_000), ("all", 1_000)]
)
def test_what_is_large_is_planned(policy, batch):
    one = Tuner(backend="null", rule=QUICK, batch_policy=policy, workspace_limit="1MiB")
    (plan,) = one.plan([problem(batch)])
    assert sum(step.batch for step in plan.steps) == batch


@pytest.mark.parametrize("batch", HUGE)
def test_a_table_of_a_huge_batch_is_refused_too(batch):
    rows = (perf("A", 1, 1.0, 0), perf("A", 3, 2.0, 8), perf("B", batch, 9.0, 1))
    table = PerfTable(problem(batch), rows)
    for ask in (
        lambda: workspace_reuse([table], 8),
        lambda: pareto_plans(table, 8),
        lambda: least_workspace(table),
    ):
        with pytest.raises(PlanningError, match="too large to be divided"):
            ask()


@given(st.integers(1, 40), st.integers(1, 10**9), st.data())
@examples(40)
def test_a_common_unit_changes_nothing_but_the_sizes(batch, unit, data):
    sizes = data.draw(st.sets(st.integers(1, batch), min_size=1, max_size=5)) | {batch}
    rows = [(n, data.draw(st.integers(1, 9)) * n, n % 3) for n in sorted(sizes)]

    def front(unit):
        perfs = tuple(perf("A", n * unit, float(ms), w) for n, ms, w in rows)
        table = PerfTable(problem(batch * unit), perfs)
        plans = pareto_plans(table, 9)
        return least_workspace(table), [
            [(s.batch // unit, s.workspace) for s in p.steps] for p in plans
        ]

    assert front(unit) == front(1)
