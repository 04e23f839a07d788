"""Studies and steps beside learning-rate schedulers: neither disturbs the other."""

import logging

import pytest
import torch

import mucudnn.torch as mt
from mucudnn.errors import PlanningError
from tests.torch_marks import STEPS_RUN

pytestmark = STEPS_RUN

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
