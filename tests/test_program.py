"""The linear program that plans a step: its plans fit, are fast, and reproduce."""

import itertools
from contextlib import suppress

import pytest
from hypothesis import given, strategies as st

from mucudnn.errors import PlanningError
from mucudnn.ir.optimizers import Momentum
from mucudnn.models import get_model
from mucudnn.passes import linear_program
from mucudnn.passes.estimate import estimate
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.rematerialize import Rematerializer
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.linear_program import LinearProgram
from mucudnn.passes.planning.climbing import SearchState
from mucudnn.passes.planning.plan_step import minimum_budget, plan_step, unbounded
from mucudnn.passes.planning.program import fill
from mucudnn.passes.planning.request import StepRequest, plan_residency
from mucudnn.passes.residency import Residency, saved_tensors
from tests.commands import run_code
from tests.examples import examples
from tests.random_graphs import foreign, profiles, training_graphs
from tests.schedule_oracle import verify
from tests.test_lower_bound import small

INFINITE = float("inf")


def request_of(model, batch, share, device="h200"):
    graph = with_updates(training_graph(get_model(model)(batch)), Momentum())
    free = StepRequest(graph, estimate(graph, device))
    most = unbounded(graph, free.profile).peak_bytes
    least = minimum_budget(free)
    return free.within(least + int(share * (most - least)))


def test_the_solver_finds_the_optimum_of_a_program_or_that_there_is_none():
    program = LinearProgram()
    x, y = program.variable(cost=-1.0), program.variable(cost=-2.0)
    z = program.variable(upper=INFINITE, lower=-INFINITE)
    program.limit([(x, 1.0), (y, 1.0), (y, 0.5)], 1.7)
    program.equal([(z, 1.0), (x, -1.0)], -3.0)
    found = program.solve()
    assert found.objective == pytest.approx(-2.2)
    assert found.values == pytest.approx([0.2, 1.0, -2.8])
    assert program.solve({y: 0.0}).values == pytest.approx([1.0, 0.0, -2.0])
    assert program.solve({x: 1.0, y: 1.0}).objective == INFINITE


@examples(40)
@given(data=st.data())
def test_its_plans_fit_and_run(data):
    graph = data.draw(training_graphs(updates=data.draw(st.booleans())))
    if data.draw(st.booleans()):
        graph = data.draw(foreign(graph))
    request = StepRequest(graph, data.draw(profiles(graph)))
    most = plan_residency(request, {}).peak_bytes
    least = minimum_budget(request)
    budget = least + int(data.draw(st.sampled_from([0.2, 0.6])) * (most - least))
    best = SearchState(request.within(budget))
    fill(request.within(budget), best)
    if best.found:
        assert best.plan.peak_bytes <= budget
        verify(best.plan.schedule, budget, granularity=512)
        made = {name for node in graph.nodes for name in node.outputs}
        assert best.residency.keys() <= made


@pytest.mark.parametrize("kind", ["chain", "residual"])
@pytest.mark.parametrize("share", [0.7, 0.95])
def test_no_residencies_of_the_largest_tensors_are_faster_than_the_plan(kind, share):
    graph = small(kind)
    profile = estimate(graph, "h200")
    free = StepRequest(graph, profile, hosted=frozenset())
    least, most = minimum_budget(free), unbounded(graph, profile).peak_bytes
    request = free.within(least + int(share * (most - least)))
    largest = sorted(saved_tensors(graph), key=lambda s: -s.nbytes)[:4]
    choices = (Residency.KEEP, Residency.OFFLOAD, Residency.RECOMPUTE)
    found = []
    for chosen in itertools.product(choices, repeat=len(largest)):
        residency = {s.name: c for s, c in zip(largest, chosen, strict=True)}
        with suppress(PlanningError):
            found.append(plan_residency(request, residency).prediction.step_ms)
    assert plan_step(request).prediction.step_ms <= min(found) * 1.003


@pytest.mark.parametrize(("model", "batch"), [("resnet20", 32), ("vgg16", 32)])
def test_its_plan_is_close_to_the_optimum(model, batch):
    request = request_of(model, batch, 0.5)
    best = SearchState(request)
    optimum, _ = fill(request, best)
    assert 0 < optimum <= best.step_ms <= 1.05 * optimum
    assert best.plan.peak_bytes <= request.budget


def test_a_result_that_only_the_forward_pass_reads_can_be_kept():
    graph = small("residual")
    names = {saved.name for saved in saved_tensors(graph)}
    rematerialize = Rematerializer(graph)
    everything = dict.fromkeys(names, Residency.RECOMPUTE)
    copied = {n.name for n in rematerialize(everything).nodes if "~" in n.name}
    single = [node for node in graph.nodes if len(node.outputs) == 1]
    unsaved = [t for n in single for t in n.outputs if t in rematerialize.unsaved]
    again = [t for t in unsaved if f"{graph.producers[t].name}~" in " ".join(copied)]
    assert again
    for name in again:
        kept = rematerialize(everything | {name: Residency.KEEP})
        maker = f"{graph.producers[name].name}~"
        assert not any(node.name.startswith(maker) for node in kept.nodes)


def planned():
    request = request_of("resnet20", 32, 0.3)
    best = SearchState(request)
    return f"{fill(request, best)} {best.step_ms} {best.residency}"


def test_the_plan_is_the_same_for_every_hash_seed():
    """In a process with another seed than this one, whose seed is random."""
    code = "from tests.test_program import planned; print(planned(), end='')"
    assert run_code(code, environment={"PYTHONHASHSEED": "1234"}) == planned()


def test_a_value_that_exceeds_its_bound_by_rounding_is_read(monkeypatch):
    """CBC marks such a line."""

    def marked(call, **_):
        call[-1].write_text("Optimal - objective value 2.5\n**  0 x0  1.0000001  0\n")

    monkeypatch.setattr(linear_program.subprocess, "run", marked)
    program = LinearProgram()
    program.variable()
    assert program.solve().values == [1.0000001]


def test_a_method_that_does_not_end_is_followed_by_another(monkeypatch):
    def run(call, **_):
        most, method = call[-4:-2]
        assert int(most) > 1000
        ends = method == "-dualSimplex" and dual_ends
        head = "Optimal - objective value 2.5" if ends else "Stopped on iterations"
        call[-1].write_text(f"{head}\n0 x0 1.0 0\n")

    monkeypatch.setattr(linear_program.subprocess, "run", run)
    program = LinearProgram()
    program.variable()
    dual_ends = True
    assert program.solve().values == [1.0]
    dual_ends = False
    assert program.solve() is None


def test_the_solver_stops_at_the_limit_of_iterations(monkeypatch):
    monkeypatch.setattr(linear_program, "_ITERATIONS", (1, 0))
    program = LinearProgram()
    many = [program.variable(cost=-1.0 - i % 7) for i in range(200)]
    for one, other in itertools.pairwise(many):
        program.limit([(one, 1.0), (other, 2.0)], 1.7)
    assert program.solve() is None
    monkeypatch.undo()
    assert program.solve() is not None
