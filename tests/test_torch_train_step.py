"""Planned PyTorch steps are eager ones in the bytes promised, whatever is around."""

import logging
import re
import threading
from dataclasses import make_dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import mucudnn.torch as mt
from mucudnn.errors import PlanningError, UnsupportedError
from mucudnn.ir.sizes import format_bytes
from mucudnn.passes.planning.request import plan_residency
from mucudnn.passes.residency import Residency, saved_tensors
from mucudnn.torch.execution import copies, program
from tests.torch_marks import STEPS_RUN
from tests.torch_steps import (
    build,
    least_bytes,
    losses_of,
    planner_of,
    real_peak,
    train_eagerly,
)

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
    planner, parts = planner_of(model, loss_fn, optimizer, batch)
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
    run = partial(losses_of, planner, plan.schedule, parts, batch)
    torch.manual_seed(1)
    losses = run(STEPS)
    beyond = real_peak(lambda: run(1))
    assert (losses == wanted[0]) == replayed
    assert beyond <= plan.peak_bytes - planner.resident_bytes - planner.caller_bytes


@pytest.mark.usefixtures("free_copies")
@pytest.mark.parametrize("waited", [True, False])
def test_copies_are_waited_for(waited, monkeypatch):
    wanted = eager("mlp", sgd)
    least = least_budget("mlp", sgd)
    moved, over = copies.move, threading.Event()

    def late(source, target):
        over.wait(0.01 if waited else 300)
        moved(source, target)

    monkeypatch.setattr(copies, "MANY", 1)  # nothing is copied where it is asked for
    monkeypatch.setattr(copies, "move", late)
    if not waited:  # which must be noticed
        monkeypatch.setattr(copies.OffloadedStorage, "wait", lambda stored: None)
    try:
        step, _, found = planned("mlp", sgd, least)
    finally:
        over.set()
    assert step.plan.leaving
    assert (found[0] == wanted[0]) == waited


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


def test_a_step_has_a_summary():
    model, loss_fn, batch = build("mlp")
    step = mt.train_step(model, loss_fn, sgd(model), budget="64MiB")
    start = "<TrainStep of Sequential, SGD, budget 64.0 MiB: "
    assert repr(step) == f"{start}0 steps, not planned>"
    step(*batch)
    assert repr(step) == f"{start}1 step, peak {format_bytes(step.plan.peak_bytes)}>"
    assert "SGD, budget 50%: " in repr(
        mt.train_step(model, loss_fn, sgd(model), budget="50%")
    )
    assert "SGD, no budget: " in repr(mt.train_step(model, loss_fn, sgd(model)))


def test_bad_input_is_said():
    model, loss_fn, (x, y) = build("mlp")
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
    with pytest.raises(TypeError, match="would be the same"):
        mt.train_step(model, lambda out, y: (out.sum(), 3.0), sgd(model))(x, y)
    with pytest.raises(UnsupportedError, match="on the CPU and on"):
        mt.train_step(model, loss_fn, sgd(model))(x.to("meta"), y)


def test_planning_draws_no_random_numbers_and_results_hold_no_memory_of_the_step():
    """Whoever seeds before the first step gets the eager step's dropout."""
    model, loss_fn, batch = build("gpt")
    before = torch.get_rng_state()
    step = mt.train_step(model, loss_fn, sgd(model), cache=None)
    step.prepare(*batch)
    assert torch.equal(torch.get_rng_state(), before)
    losses = [step(*batch) for _ in range(3)]
    assert {loss.untyped_storage().nbytes() for loss in losses} == {4}
    assert all(p.grad is None for p in model.parameters())


def built(*, norm=False):
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8) if norm else nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return model, optimizer, torch.randn(6, 6), torch.randn(6, 3)


def same(one, other):
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize(("size", "parts"), [(6, 3), (5, 2)])
def test_parts_of_a_batch_are_accumulated(size, parts):
    model, optimizer, x, y = built(norm=True)
    x, y = x[:size], y[:size]
    wanted = []
    for _ in range(3):
        optimizer.zero_grad()
        losses = []
        for part in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
            rows = len(part[0])
            divisor = parts if size % parts == 0 else size / rows
            loss = functional.mse_loss(model(part[0]), part[1]) / divisor
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        wanted.append(sum(losses[1:], losses[0]).item())
    mine, optimizer, x, y = built(norm=True)
    step = mt.train_step(mine, functional.mse_loss, optimizer, accumulate=parts)
    assert [step(x[:size], y[:size]).item() for _ in range(3)] == wanted
    assert same(model, mine)
    assert mine[1].num_batches_tracked == 3 * parts


def test_saved_tensors_may_have_no_elements():
    def step_of(budget):
        torch.manual_seed(0)
        layers = nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()
        bag = nn.EmbeddingBag(20, 8, mode="sum")
        model = nn.Sequential(bag, *layers, nn.Linear(64, 3))
        loss_fn = functional.cross_entropy
        return mt.train_step(model, loss_fn, sgd(model), budget=budget, cache=None)

    batch = torch.arange(128).view(64, 2) % 20, torch.arange(64) % 3
    free, least = step_of(None), least_bytes(step_of(1024).prepare, *batch)
    wanted = free(*batch)
    between = step_of((least + free.plan.peak_bytes) // 2)
    assert between(*batch) == wanted
    assert between.plan.peak_bytes < free.plan.peak_bytes


def test_parts_of_a_batch_leave_and_come_back():
    def step_of(budget):
        torch.manual_seed(0)
        layers = [nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.5)]
        model = nn.Sequential(*layers, nn.Linear(64, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
        step = mt.train_step(
            model, functional.mse_loss, optimizer, budget=budget, accumulate=2
        )
        return model, step

    batch = torch.randn(256, 8), torch.randn(256, 1)
    outcomes = []
    for budget in (None, least_bytes(step_of(0)[1].prepare, *batch)):
        model, step = step_of(budget)
        step.prepare(*batch)
        torch.manual_seed(1)
        losses = [step(*batch).item() for _ in range(3)]
        outcomes.append((losses, model, step.plan))
    assert outcomes[0][0] == outcomes[1][0]
    assert same(outcomes[0][1], outcomes[1][1])
    plan = outcomes[1][2]
    assert plan.leaving or plan.recomputed
    peak = real_peak(lambda: step(*batch))
    assert peak <= plan.peak_bytes - plan.resident_bytes


def test_accumulation_takes_less_memory_and_wants_a_batch():
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randn(256, 8), torch.randn(256, 1)
    peaks = [
        mt.train_step(model, functional.mse_loss, optimizer, accumulate=k)
        .prepare(*batch)
        .peak_bytes
        for k in (1, 8)
    ]
    assert peaks[1] < 0.5 * peaks[0]
    step = mt.train_step(model, functional.mse_loss, optimizer, accumulate=2)
    with pytest.raises(ValueError, match="first axis"):
        step(batch[0], batch[1][:3])


class Two(nn.Module):
    """A model with several inputs, one of them by name, and a dictionary as result."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x, other, labels=None, flag=True):
        out = self.a(x) + self.b(other) if flag else self.a(x)
        found = {"out": out}
        if labels is not None:
            found["loss"] = functional.mse_loss(out, labels)
        return found


class Both(nn.Module):
    """A module that takes all inputs of another one as one argument."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, several):
        return self.model(*several)


def test_a_batch_has_many_forms():
    def fresh():
        torch.manual_seed(0)
        model = Two()
        return model, torch.optim.SGD(model.parameters(), 0.1)

    model, optimizer = fresh()
    x, other, y = torch.randn(4, 6), torch.randn(4, 6), torch.randn(4, 3)
    optimizer.zero_grad()
    first = model(x, other, y)["loss"]
    first.backward()
    optimizer.step()
    second = model(x, other, y)["loss"].item()

    def of_labels(out):
        return out["loss"]

    def of_target(out, target):
        return functional.mse_loss(out["out"], target)

    forms = (
        (of_target, ((x, other), y), {}),
        (of_target, (x, y), {"other": other}),
        (of_labels, ({"x": x, "other": other, "labels": y},), {}),
        (of_labels, (), {"x": x, "other": other, "labels": y, "flag": True}),
    )
    for loss_fn, args, kwargs in forms:
        model, optimizer = fresh()
        step = mt.train_step(model, loss_fn, optimizer)
        assert step(*args, **kwargs).item() == first.item()
        assert step(*args, **kwargs).item() == second
    without = step(x=x, other=other, labels=y, flag=False)
    assert without.item() != second  # what is no tensor has a plan for each value
    with pytest.raises(TypeError, match=r"torch\.tensor\(number\)"):
        step(x=x, other=other, labels=3.0)
    with pytest.raises(TypeError, match="without a batch"):
        step()
    model, optimizer = fresh()
    step = mt.train_step(Both(model), of_labels, optimizer, cache=None)
    with pytest.raises(TypeError) as caught:
        step((x, other, y))
    assert "step(((x, y),))" in caught.value.__notes__[0]
    assert step(((x, other, y),)).item() == first.item()
    Target = make_dataclass("Target", [("values", torch.Tensor)])
    model, optimizer = fresh()
    step = mt.train_step(
        model, lambda out, y: of_target(out, y.values), optimizer, cache=None
    )
    with pytest.raises(TypeError, match=r"torch\.export\.register_dataclass\(cls\)"):
        step((x, other), Target(y))
    torch.export.register_dataclass(Target)
    assert step((x, other), Target(y)).item() == first.item()


def test_a_compiled_loop_calls_a_step_as_it_is():
    (model, optimizer, x, y), (other, rival, *_) = built(), built()
    step = mt.train_step(model, functional.mse_loss, optimizer)
    called = mt.train_step(other, functional.mse_loss, rival)
    doubled = torch.compile(lambda: called(x, y) * 2, backend="eager")
    for _ in range(2):
        assert torch.equal(doubled(), step(x, y) * 2)


def test_an_empty_batch_has_no_parts():
    model, optimizer, x, y = built()
    step = mt.train_step(model, functional.mse_loss, optimizer, accumulate=2)
    with pytest.raises(ValueError, match=r"not 0; the shapes are \(0, 6\)"):
        step(x[:0], y[:0])


def test_hooks_when_a_gradient_is_accumulated_need_eager_mode():
    model, optimizer, x, y = built()
    model[0].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.warns(UserWarning, match="when its gradient is accumulated"):
        mt.train_step(model, functional.mse_loss, optimizer)(x, y)
    step = mt.train_step(model, functional.mse_loss, optimizer, budget="1GiB")
    with pytest.raises(UnsupportedError, match="when its gradient is accumulated"):
        step(x, y)


def test_every_kind_of_batch_has_a_plan_up_to_a_limit():
    model, optimizer, x, y = built()
    step = mt.train_step(model, functional.mse_loss, optimizer, max_plans=2)
    first = step.prepare(x, y)
    second = step.prepare(x[:4], y[:4])
    assert second is not first
    assert step.prepare(x, y) is first
    with pytest.warns(UserWarning, match=r"max_plans=2.*Pad batches"):
        step.prepare(x[:3], y[:3])
    assert step.prepare(x, y) is first
    assert step.prepare(x[:4], y[:4]) is not second
    # What changes with every step is named once plans are dropped.
    model = Tempered(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = mt.train_step(model, functional.mse_loss, optimizer, cache=None, max_plans=2)
    for model.heat in (1.0, 2.0):
        step(x, y)
    model.heat = 3.0
    changed = r"max_plans=2.*Tempered\.heat changed.*tensor"
    with pytest.warns(UserWarning, match=changed):
        step(x, y)
    assert step(x, y).isfinite()


class Tempered(nn.Linear):
    heat = 1.0

    def forward(self, x):
        return super().forward(x) / self.heat


schedules = torch.optim.lr_scheduler
SCHEDULERS = {
    "one_cycle": lambda o: schedules.OneCycleLR(o, 0.05, total_steps=20),
    "cyclic": lambda o: schedules.CyclicLR(o, 1e-3, 1e-1, step_size_up=3),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 9),
    "sequence": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o), schedules.ExponentialLR(o, 0.9)], [3]
    ),
}
OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, 1e-3),
    "sgd": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, weight_decay=1e-3),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-3),
}
LOSS = torch.nn.functional.cross_entropy


def parts(optimizer, scheduler=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 64, 10),
    )
    # Two groups: a scheduler changes the numbers of each.
    groups = [{"params": model[0].parameters()}, {"params": model[3].parameters()}]
    made = OPTIMIZERS[optimizer](groups)
    return model, made, scheduler and SCHEDULERS[scheduler](made)


BATCH = torch.randn(16, 3, 8, 8), torch.arange(16) % 10


@pytest.mark.parametrize(
    ("optimizer", "scheduler"), [("adamw", "one_cycle"), ("sgd", "sequence")]
)
def test_a_study_sees_what_a_step_keeps_and_changes_nothing(optimizer, scheduler):
    model, made, _ = parts(optimizer, scheduler)
    before, groups = dict(vars(made)), repr(made)
    study = mt.memory(model, LOSS, BATCH, made)
    found = study.unlimited_bytes
    unchanged = [vars(made)[name] is value for name, value in before.items()]
    assert all(unchanged)
    assert len(vars(made)) == len(before)
    assert (repr(made), dict(made.state)) == (groups, {})
    step = mt.train_step(model, LOSS, made, cache=None)
    # Scratch memory of kernels is not known for the device; more threads take more.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert 0 <= step.prepare(*BATCH).peak_bytes - found <= 4096
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [("adamw", "one_cycle"), ("sgd", "cyclic"), ("nadam", "cosine")],
)
def test_a_schedule_needs_one_plan_and_equals_eager_mode(optimizer, scheduler, caplog):
    caplog.set_level(logging.WARNING, "mucudnn.torch.step")
    results = []
    for planned in (True, False):
        model, made, schedule = parts(optimizer, scheduler)
        step = mt.train_step(model, LOSS, made, cache=None)
        for _ in range(8):
            if planned:
                step(*BATCH)
            else:
                made.zero_grad()
                LOSS(model(BATCH[0]), BATCH[1]).backward()
                made.step()
            schedule.step()
        if planned:
            assert step._captures == 1
        results.append(model.state_dict())
    assert all(map(torch.equal, results[0].values(), results[1].values()))
    assert "mucudnn.torch.step" not in {record.name for record in caplog.records}


def test_a_hyperparameter_is_an_input_once_it_has_changed(caplog):
    model, made, _ = parts("adamw")
    step = mt.train_step(model, LOSS, made, cache=None)
    for i in range(6):
        for group in made.param_groups:
            group["weight_decay"] = 0.01 * (1 + i)
        step(*BATCH)
    assert step._captures == 2


def test_the_third_plan_made_again_is_logged_with_its_reason(caplog):
    model, made, _ = parts("sgd")
    step = mt.train_step(model, LOSS, made, cache=None)
    for size in range(2, 8):
        step(BATCH[0][:size], BATCH[1][:size])
    (record,) = [r for r in caplog.records if r.name == "mucudnn.torch.step"]
    assert "for the 3rd time, because of tensors of another shape" in record.message


@pytest.mark.parametrize(
    ("width", "share", "named"),
    [
        (4, 0.6, "it may fit with split='auto'"),
        (512, 0.9, "it fits with offload_state=True"),
    ],
)
def test_a_refusal_names_the_option_that_fits(width, share, named):
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(8 * 256, width),
        torch.nn.Linear(width, 10),
    )
    batch = torch.randn(32, 3, 16, 16), torch.arange(32) % 10
    made = torch.optim.AdamW(model.parameters())
    least = mt.memory(model, LOSS, batch, made).least_budget
    step = mt.train_step(model, LOSS, made, budget=int(share * least), cache=None)
    with pytest.raises(PlanningError, match=named):
        step.prepare(*batch)


@pytest.mark.parametrize("budget", [0.5, 8, "0.5", "12"])
def test_a_fraction_is_no_budget(budget):
    model, made, _ = parts("sgd")
    with pytest.raises(ValueError, match="bytes, not a fraction"):
        mt.train_step(model, LOSS, made, budget=budget)
