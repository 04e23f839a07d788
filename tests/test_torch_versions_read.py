"""A recomputation reads what was there the first time; if it does not, bits differ."""

from dataclasses import replace
from types import MappingProxyType

import pytest
import torch

from mucudnn.ir.schedule import Alloc, Free
from mucudnn.passes.planning.request import plan_residency
from mucudnn.passes.residency import Residency
from mucudnn.torch.capture.step import capture_step
from mucudnn.torch.capture.step_tensors import StepParts
from mucudnn.torch.execution.copies import ThreadCopies
from mucudnn.torch.execution.program import bind
from mucudnn.torch.plan_program import LoweredStep, PlanOptions
from tests.torch_marks import STEPS_RUN
from tests.torch_steps import build, train_eagerly
from tests.torch_zoo import sgd

pytestmark = STEPS_RUN


def overwriting(schedule, result, operand):
    """The same program with one result computed in the place of its operand."""
    tensors = dict(schedule.graph.tensors)
    tensors[result] = replace(tensors[result], alias=operand)
    graph = replace(schedule.graph, tensors=MappingProxyType(tensors))
    program = tuple(
        step
        for step in schedule.instructions
        if not (isinstance(step, Alloc | Free) and step.tensor == result)
    )
    return replace(schedule, graph=graph, instructions=program)


@pytest.mark.parametrize("right", [True, False])
def test_a_recomputation_reads_the_version_of_the_first_time(right):
    model, loss_fn, batch = build("mlp")
    losses = train_eagerly(model, loss_fn, batch, sgd(model), 2)
    model, loss_fn, batch = build("mlp")
    optimizer = sgd(model)
    parts = StepParts.of(model, optimizer)
    captured = capture_step(model, loss_fn, optimizer, batch)
    planner = LoweredStep.of_captured(captured, parts).planner(PlanOptions())
    plan = plan_residency(planner.request(), {"gelu": Residency.RECOMPUTE})
    again = [node for node in plan.schedule.graph.nodes if "gelu~" in node.name]
    assert [node.inputs for node in again] == [("addmm",)]
    schedule = plan.schedule
    if not right:
        schedule = overwriting(schedule, "gelu", "addmm")
    segment = bind(planner.lowered, schedule, ThreadCopies(reuse=True))
    with torch.no_grad():
        found = [segment.run([*parts.tensors(), *batch])[0].item() for _ in range(2)]
    assert found[0] == losses[0]  # nothing is read again before the first loss
    assert (found[1] == losses[1]) == right
