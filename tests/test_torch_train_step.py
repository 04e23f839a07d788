"""A planned PyTorch step computes what eager PyTorch does, in the bytes it promises."""

import re
import threading

import pytest
import torch
from torch import nn

import mucudnn.torch as mt
from mucudnn.errors import PlanningError, UnsupportedError
from mucudnn.passes.planning.request import plan_residency
from mucudnn.passes.residency import Residency, saved_tensors
from mucudnn.torch.capture.step import capture_step
from mucudnn.torch.capture.step_tensors import StepParts
from mucudnn.torch.execution import copies, program
from mucudnn.torch.execution.copies import ThreadCopies
from mucudnn.torch.execution.program import bind
from mucudnn.torch.plan_program import LoweredStep, PlanOptions
from tests.torch_marks import STEPS_RUN
from tests.torch_steps import build, real_peak, train_eagerly

pytestmark = STEPS_RUN

STEPS = 10


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), 1e-3)


def eager(name, optimizer_of):
    """Ten steps' losses, and the model after them."""
    model, loss_fn, batch = build(name)
    optimizer = optimizer_of(model)
    torch.manual_seed(1)
    losses = train_eagerly(model, loss_fn, batch, optimizer, STEPS)
    return losses, model.state_dict(), optimizer.state_dict()["state"]


def planned(name, optimizer_of, budget):
    model, loss_fn, batch = build(name)
    optimizer = optimizer_of(model)
    step = mt.train_step(model, loss_fn, optimizer, budget=budget)
    step.prepare(*batch)
    torch.manual_seed(1)
    losses = [step(*batch).item() for _ in range(STEPS)]
    state = optimizer.state_dict()["state"]
    return step, batch, (losses, model.state_dict(), state)


def assert_same(found, wanted):
    assert found[0] == wanted[0]
    assert found[1].keys() == wanted[1].keys()
    for key, value in wanted[1].items():
        assert torch.equal(found[1][key], value), key
    for number, state in wanted[2].items():
        for key, value in state.items():
            assert torch.equal(found[2][number][key], value), (number, key)


def least_budget(name, optimizer_of):
    model, loss_fn, batch = build(name)
    step = mt.train_step(model, loss_fn, optimizer_of(model), budget=0)
    with pytest.raises(PlanningError, match="least budget") as caught:
        step(*batch)
    assert caught.value.short_by == caught.value.least_bytes
    return caught.value.least_bytes


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize(
    ("name", "optimizer_of"), [("mlp", adamw), ("cnn", sgd), ("gpt", sgd)]
)
def test_ten_steps_are_eager_ones_within_every_budget(name, optimizer_of):
    wanted = eager(name, optimizer_of)
    step, batch, found = planned(name, optimizer_of, float("inf"))
    assert_same(found, wanted)
    most, least = step.plan.peak_bytes, least_budget(name, optimizer_of)
    assert least < most
    for budget in (least, most - 1):
        step, batch, found = planned(name, optimizer_of, budget)
        assert_same(found, wanted)
        plan = step.plan
        assert plan.peak_bytes <= budget
        beyond = real_peak(lambda step=step, batch=batch: step(*batch))
        assert 0 < beyond <= plan.peak_bytes - plan.resident_bytes
        assert beyond >= 0.9 * (plan.peak_bytes - plan.resident_bytes)  # no slack


@pytest.mark.parametrize("replayed", [True, False])
def test_random_numbers_are_drawn_again_as_they_were(replayed, monkeypatch):
    wanted = eager("gpt", sgd)
    model, loss_fn, batch = build("gpt")
    optimizer = sgd(model)
    parts = StepParts.of(model, optimizer)
    captured = capture_step(model, loss_fn, optimizer, batch)
    planner = LoweredStep.of_captured(captured, parts).planner(PlanOptions())
    cheap = {
        saved.name: Residency.RECOMPUTE
        for saved in saved_tensors(planner.lowered.graph)
        if saved.producer.op != "matmul"
    }
    plan = plan_residency(planner.request(), cheap)
    assert any(
        "~" in n.name and "bernoulli" in n.name for n in plan.schedule.graph.nodes
    )
    if not replayed:  # which must be noticed
        monkeypatch.setattr(program, "set_state", lambda state: None)
    segment = bind(planner.lowered, plan.schedule, ThreadCopies(reuse=True))
    torch.manual_seed(1)
    losses = []
    with torch.no_grad():
        for _ in range(STEPS):
            [loss] = segment.run([*parts.tensors(), *batch])
            losses.append(loss.item())
        beyond = real_peak(lambda: segment.run([*parts.tensors(), *batch]))
    assert (losses == wanted[0]) == replayed
    assert beyond <= plan.peak_bytes - planner.resident_bytes - planner.caller_bytes


@pytest.mark.usefixtures("free_copies")
@pytest.mark.parametrize("waited", [True, False])
def test_copies_are_waited_for(waited, monkeypatch):
    wanted = eager("mlp", sgd)
    least = least_budget("mlp", sgd)
    copied, over = copies._Job.__call__, threading.Event()

    def late(job):
        over.wait(0.01 if waited else 300)
        copied(job)

    monkeypatch.setattr(copies, "MANY", 1)  # nothing is copied where it is asked for
    monkeypatch.setattr(copies._Job, "__call__", late)
    if not waited:  # which must be noticed
        monkeypatch.setattr(copies.OffloadedStorage, "wait", lambda stored: None)
    try:
        step, _, found = planned("mlp", sgd, least)
    finally:
        over.set()
    assert step.plan.leaving
    assert (found[0] == wanted[0]) == waited


def test_results_do_not_hold_memory_of_the_step():
    model, loss_fn, batch = build("mlp")
    step = mt.train_step(model, loss_fn, sgd(model))
    losses = [step(*batch) for _ in range(3)]
    assert {loss.untyped_storage().nbytes() for loss in losses} == {4}
    assert all(p.grad is None for p in model.parameters())


def test_training_goes_on_from_a_checkpoint():
    wanted, _, _ = eager("cnn", adamw)
    model, loss_fn, (x, y) = build("cnn")
    optimizer = adamw(model)
    step = mt.train_step(model, loss_fn, optimizer)
    step(x, y)
    torch.manual_seed(5)
    other, _, _ = build("cnn")
    its = adamw(other)
    for _ in range(4):
        its.zero_grad()
        loss_fn(other(x), y).backward()
        its.step()
    model.load_state_dict(other.state_dict())
    optimizer.load_state_dict(its.state_dict())
    assert [step(x, y).item() for _ in range(6)] == wanted[4:]


def test_a_change_of_mode_or_of_a_hyperparameter_is_seen():
    model, loss_fn, batch = build("gpt")
    optimizer = sgd(model)
    step = mt.train_step(model, loss_fn, optimizer)
    first = step.prepare(*batch)
    assert step.prepare(*batch) is first
    model.eval()
    second = step.prepare(*batch)
    assert second is not first
    assert "bernoulli" in str(first.plan.schedule.graph.nodes)
    assert "bernoulli" not in str(second.plan.schedule.graph.nodes)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    assert step.prepare(*batch) is not second


@pytest.mark.usefixtures("free_copies")
def test_the_plan_says_what_it_does():
    model, loss_fn, batch = build("mlp")
    optimizer = sgd(model)
    least = least_budget("mlp", sgd)
    step = mt.train_step(model, loss_fn, optimizer, budget=least)
    with pytest.raises(RuntimeError, match="prepare"):
        _ = step.plan
    plan = step.prepare(*batch)
    text = str(plan)
    assert re.search(r"^offloaded: \d+ tensor", text, re.M)
    assert re.search(r"^recomputed: \d+ operation", text, re.M)
    assert re.search(r"^ +memory \|.{60}\|$", text, re.M)
    assert "with everything kept" in text
    assert "<svg" in plan._repr_html_()
    assert plan.leaving
    assert plan.slowdown >= 1.0
    assert "copy_out" in plan.source


def test_bad_input_is_said():
    model, loss_fn, (x, y) = build("mlp")
    with pytest.raises(ValueError, match="not a size"):
        mt.train_step(model, loss_fn, sgd(model), budget="much")
    with pytest.raises(ValueError, match="one element"):
        mt.train_step(model, lambda out, target: out, sgd(model))(x, y)
    with pytest.raises(ValueError, match="does not depend"):
        mt.train_step(model, lambda out, target: out.detach().sum(), sgd(model))(x, y)
    other = nn.Linear(3, 3)
    with pytest.raises(ValueError, match="has no parameter of the model"):
        mt.train_step(model, loss_fn, sgd(other))
    both = torch.optim.SGD([*model.parameters(), *other.parameters()], 0.1)
    step = mt.train_step(model, loss_fn, both)
    other.weight.grad = torch.ones(3, 3)
    with pytest.raises(UnsupportedError, match="has a gradient but does not belong"):
        step(x, y)

    with pytest.raises(TypeError, match="it must contain tensors only"):
        mt.train_step(model, loss_fn, sgd(model))(x, 3)
    with pytest.raises(UnsupportedError, match="on the CPU and on"):
        mt.train_step(model, loss_fn, sgd(model))(x.to("meta"), y)


def test_planning_draws_no_random_numbers():
    """Whoever seeds before the first step gets the eager step's dropout."""
    model, loss_fn, batch = build("gpt")
    before = torch.get_rng_state()
    step = mt.train_step(model, loss_fn, sgd(model), cache=None)
    step.prepare(*batch)
    assert torch.equal(torch.get_rng_state(), before)
