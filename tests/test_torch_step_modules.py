"""Small modules of every kind: a planned step's bits are those of eager PyTorch."""

import copy
from dataclasses import replace
from types import MappingProxyType

import pytest
import torch
from torch import nn
from torch.nn import functional

import mucudnn.torch as mt
from mucudnn.ir.schedule import Alloc, Free
from mucudnn.passes.planning.request import plan_residency
from mucudnn.passes.residency import Residency, saved_tensors
from mucudnn.torch.capture.fake_tensors import KernelResults
from mucudnn.torch.capture.step import capture_step
from mucudnn.torch.capture.step_tensors import PLAIN, Batch, LiveParts, StepParts
from mucudnn.torch.execution.copies import ThreadCopies
from mucudnn.torch.execution.program import bind
from mucudnn.torch.plan_program import LoweredStep, PlanOptions
from tests.torch_marks import STEPS_RUN
from tests.torch_step_cases import CASES, QUICK, Whole
from tests.torch_steps import build, losses_of, planner_of, real_peak, train_eagerly
from tests.torch_zoo import sgd

pytestmark = [
    *STEPS_RUN,
    # Of PyTorch's own modules: a dropout within a layer that has one too, and so on.
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    # Forward derivatives: PyTorch scripts them where it imports them.
    pytest.mark.filterwarnings("ignore:.torch.jit.script.:DeprecationWarning"),
]

STEPS = 3

ROUNDED = frozenset({"narrow_gru"})
"""Whose gates change slices in place: here they lie otherwise, for other vectors."""


def built(name):
    torch.manual_seed(0)
    model, loss_fn, batch = CASES[name]()
    return model, loss_fn, batch, torch.optim.SGD(model.parameters(), 0.05, 0.9)


def eager(name):
    model, loss_fn, (x, y), optimizer = built(name)
    torch.manual_seed(1)
    losses = train_eagerly(model, loss_fn, (x, y), optimizer, STEPS)
    return losses, model.state_dict()


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES],
)
def test_three_steps_are_eager_ones_in_the_bytes_that_are_planned(name):
    wanted, tensors = eager(name)
    model, loss_fn, batch, optimizer = built(name)
    parts = StepParts.of(model, optimizer, loss_fn)
    results = KernelResults()
    planner = results.settled(
        lambda: capture_step(model, loss_fn, optimizer, batch, results=results),
        lambda captured: LoweredStep.of_captured(captured, parts).planner(
            PlanOptions()
        ),
    )
    least = planner.least_budget()
    for budget in (float("inf"), least):
        plan = planner.plan(budget)
        assert plan.peak_bytes <= budget
        schedule = plan.plan.schedule
        segment = bind(planner.lowered, schedule, ThreadCopies(reuse=True))
        model, loss_fn, batch, optimizer = built(name)
        live = LiveParts(model, optimizer, loss_fn, PLAIN)
        given = Batch.of(batch, {}).tensors
        torch.manual_seed(1)
        with torch.no_grad():
            losses = [
                segment.run([*live.tensors(), *given])[0].item() for _ in range(STEPS)
            ]
            assert losses == wanted
            for key, value in model.state_dict().items():
                if name in ROUNDED:
                    torch.testing.assert_close(value, tensors[key])
                else:
                    assert torch.equal(value, tensors[key]), key
            peak = real_peak(
                lambda run=segment.run, live=live, given=given: run(
                    [*live.tensors(), *given]
                )
            )
        assert peak <= plan.peak_bytes - plan.resident_bytes


def test_batch_normalisation_in_a_narrow_type_throughout():
    """Statistics have the weight's type, whatever PyTorch says without data."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(8 * 36, 4)).to(torch.bfloat16)
    batch = torch.randn(4, 3, 8, 8, dtype=torch.bfloat16), torch.randint(0, 4, (4,))
    eager = copy.deepcopy(model)
    step = mt.train_step(
        model,
        functional.cross_entropy,
        torch.optim.SGD(model.parameters(), 0.1),
        cache=None,
    )
    optimizer = torch.optim.SGD(eager.parameters(), 0.1)
    wanted = train_eagerly(eager, functional.cross_entropy, batch, optimizer, 2)
    assert [step(*batch).item() for _ in range(2)] == wanted
    assert torch.equal(model[1].running_var, eager[1].running_var)


def conjugated(s, x):
    z = torch.complex(s.m[0](x), s.m[1](x))
    return (z * z.conj()).real - z.conj().imag * x


def test_views_of_conjugates_are_such_when_they_are_back():
    """A lazily conjugated view of what has left and come back, or is its gradient's."""

    def of_ones_own():
        torch.manual_seed(0)
        model = Whole(conjugated, nn.Linear(8, 8), nn.Linear(8, 8))
        batch = torch.randn(4, 8), torch.randn(4, 8)
        return model, torch.optim.SGD(model.parameters(), 0.05), batch

    model, optimizer, batch = of_ones_own()
    wanted = train_eagerly(model, functional.mse_loss, batch, optimizer, STEPS)
    model, optimizer, batch = of_ones_own()
    planner, parts = planner_of(model, functional.mse_loss, optimizer, batch)
    layouts = planner.lowered.layouts.values()
    assert any(layout.conjugate or layout.negative for layout in layouts)
    saved = saved_tensors(planner.lowered.graph)
    leaving = {tensor.name: Residency.OFFLOAD for tensor in saved}
    plan = plan_residency(planner.request(), leaving)
    assert losses_of(planner, plan.schedule, parts, batch, STEPS) == wanted


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
    planner, parts = planner_of(model, loss_fn, optimizer, batch)
    plan = plan_residency(planner.request(), {"gelu": Residency.RECOMPUTE})
    again = [node for node in plan.schedule.graph.nodes if "gelu~" in node.name]
    assert [node.inputs for node in again] == [("addmm",)]
    schedule = plan.schedule
    if not right:
        schedule = overwriting(schedule, "gelu", "addmm")
    found = losses_of(planner, schedule, parts, batch, 2)
    assert found[0] == losses[0]  # nothing is read again before the first loss
    assert (found[1] == losses[1]) == right
