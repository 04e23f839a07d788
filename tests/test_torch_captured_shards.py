"""Steps of sharded models, captured without the other ranks."""

import pytest
import torch
from torch import nn

from mucudnn.ir.profile import Profile
from mucudnn.passes.planning.plan_step import minimum_budget, plan_step
from mucudnn.passes.planning.request import StepRequest
from mucudnn.passes.scheduling.collectives import under_way
from mucudnn.torch.capture.fake_tensors import DatalessStep
from mucudnn.torch.capture.step import capture_step
from mucudnn.torch.capture.step_tensors import StepParts, StepSettings
from mucudnn.torch.distributed.sharding import Part, Sharding, Unit, is_collective
from mucudnn.torch.plan_program import LoweredStep

pytestmark = pytest.mark.torch

RANKS, WIDTH, LAYERS = 4, 512, 6


@pytest.fixture(scope="module")
def graph():
    """A step of some layers, each of them a unit."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, False) for _ in range(LAYERS)))
        x = torch.empty(8, WIDTH)
        units, parts = [], {}
        for number, layer in enumerate(model):
            name = f"model.{number}.weight"
            units.append(Unit((name,)))
            parts[name] = Part((WIDTH, WIDTH), WIDTH // RANKS, torch.float32)
            layer.weight = nn.Parameter(torch.empty(WIDTH // RANKS, WIDTH))
    step = DatalessStep.of(
        *(model, lambda y: y.square().mean(), (x,)),
        torch.optim.SGD(model.parameters(), 0.1),
    )
    sharding = Sharding("fsdp", "0", RANKS, tuple(units), parts)
    captured = capture_step(
        *(step.model, step.loss_fn, step.optimizer, step.example), sharding=sharding
    )
    parts_of_step = StepParts.of(
        step.model, step.optimizer, step.loss_fn, StepSettings()
    )
    return LoweredStep.of_captured(captured, parts_of_step).lowered.graph


def test_parameters_are_gathered_layer_by_layer(graph):
    kinds = [
        "gather" if is_collective(node.op) else "product"
        for node in graph.nodes
        if node.phase.value == "forward"
        and (is_collective(node.op) or node.traits.expensive)
    ]
    assert kinds == ["gather", "product"] * LAYERS


def test_collectives_start_early_and_are_awaited_late_where_the_budget_has_room(graph):
    names = [node.name for node in graph.nodes]
    collectives = [node.name for node in graph.nodes if node.traits.collective]
    assert len(collectives) == 2 * LAYERS
    profile = Profile(
        node_ms=dict.fromkeys(names, 1.0),
        workspaces={},
        fronts={},
        out_bytes_per_ms=1e6,
        in_bytes_per_ms=1e6,
        network_ms=dict.fromkeys(collectives, 3.0),
    )
    request = StepRequest(graph, profile, hosted=frozenset())
    least, most = minimum_budget(request), plan_step(request).peak_bytes
    early, times = [], []
    for budget in (least, (least + most) // 2, most):
        plan = plan_step(request.within(budget))
        assert plan.peak_bytes <= budget
        planned = plan.schedule.graph
        made = {*planned.inputs}
        for node in planned.nodes:
            assert made.issuperset(node.inputs)
            made.update(node.outputs)
        order = [n.name for n in planned.nodes if n.traits.collective]
        assert [name for name in order if "~" not in name] == collectives
        spans = {pair for pairs in under_way(planned).values() for pair in pairs}
        assert len(spans) == len(order)
        early.append(
            sum(
                any(node.traits.expensive for node in planned.nodes[start:wait])
                for start, wait in spans
            )
        )
        times.append(plan.prediction.step_ms)
        assert plan.prediction.stalls_ms["network"] > 0
    # All but the first gathering and the last sum run beside products.
    assert early[-1] == 2 * LAYERS - 2
    assert early == sorted(early)
    assert times == sorted(times, reverse=True)
