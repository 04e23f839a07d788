"""The road from graphs to what an executor runs, where there is no budget."""

import pytest
from hypothesis import given, strategies as st

from mucudnn.ir.optimizers import Momentum
from mucudnn.ir.schedule import Alloc, Compute, Free
from mucudnn.models import get_model
from mucudnn.passes.graph.autodiff import training_graph
from mucudnn.passes.graph.inplace import in_place
from mucudnn.passes.graph.updates import with_updates
from mucudnn.passes.liveness import ALIGNMENT
from mucudnn.passes.placement.layout import lay_out
from mucudnn.passes.planning.place_step import place_step
from mucudnn.passes.planning.request import StepRequest
from mucudnn.runtime.training import planned_steps
from mucudnn.runtime.training.planned_steps import place_steps
from mucudnn.runtime.tuning.tuner import Tuner
from tests.doubles import QUICK
from tests.examples import examples
from tests.plain_schedule import keep_all
from tests.random_graphs import profiles, training_graphs
from tests.schedule_oracle import verify


def at_nodes(schedule):
    """What is allocated before every node and freed after it, and what never is."""
    found, waiting = [], set()
    for instruction in schedule.instructions:
        match instruction:
            case Compute(node):
                found.append((node, frozenset(waiting), set()))
                waiting = set()
            case Alloc(name):
                waiting.add(name)
            case Free(name):
                found[-1][2].add(name)
    return found, waiting


@examples(60)
@given(data=st.data())
def test_without_a_budget_everything_stays_until_its_last_use(data):
    graph = data.draw(training_graphs(updates=data.draw(st.booleans())))
    profile = data.draw(profiles(graph))
    placed = place_step(StepRequest(graph, profile, policy="keep_all"))
    plain = keep_all(in_place(graph), placed.schedule.workspaces)
    assert placed.schedule.graph == plain.graph
    assert at_nodes(placed.schedule) == at_nodes(plain)
    assert verify(placed.schedule, granularity=ALIGNMENT) == placed.plan.peak_bytes
    assert placed.schedule.hosted == ()


@pytest.mark.parametrize("name", ["lenet", "resnet20", "densenet40"])
def test_training_without_a_budget_measures_nothing(name, monkeypatch):
    def measured(*args, **options):
        raise AssertionError("nothing needs to be measured")

    monkeypatch.setattr(planned_steps, "profile", measured)
    graph = with_updates(training_graph(get_model(name)(2)), Momentum())
    tuner = Tuner(backend="null", rule=QUICK)
    (placed,) = place_steps(tuner, [graph])
    plain = keep_all(in_place(graph), placed.schedule.workspaces)
    assert at_nodes(placed.schedule) == at_nodes(plain)
    assert placed.layout.nbytes == lay_out(plain).nbytes
    convolutions = {node.name for node in graph.nodes if node.op == "conv"}
    assert placed.plans.keys() == convolutions
