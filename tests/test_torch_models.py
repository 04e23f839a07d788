"""Networks that people train, planned: eager mode's bits, and a peak that is kept."""

from importlib.util import find_spec

import pytest
import torch

import mucudnn.torch as mt
from bench.torch.nodes import NodeTable
from bench.torch.rivals import WithLoss
from bench.torch.zoo import ZOO
from mucudnn.torch import CompileBackend
from mucudnn.torch.plan_program import PlanOptions
from tests.torch_marks import STEPS_RUN
from tests.torch_steps import least_bytes, real_peak
from tests.torch_zoo import SHORT, SMALL, Steps, adamw, build, different, eager, sgd

pytestmark = [
    *STEPS_RUN,
    # Of PyTorch's own modules and timm's, as they are imported and traced.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

SHARES = (0.3, 0.0)
"""Of what there is between the least budget and what is needed without one.

What is needed without one is the peak of a step without a limit: all of it.
"""

WHOLE = ["vit", "gpt", "unet"]
"""Networks of the zoo that are small as they are."""

DEEP = "resnet18"
"""A network of which no block is left out."""

STEPS = 3


def slow(*names):
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def needs_packages(name):
    if (name in ZOO or name in SHORT) and not all(
        map(find_spec, ("torchvision", "timm"))
    ):
        pytest.skip("needs torchvision and timm: the extra zoo")


def gradients(case, call):
    """Of one step, with buffers after it."""
    torch.manual_seed(1)
    call(*case.batch).backward()
    found = {name: p.grad for name, p in case.model.named_parameters()}
    return found | dict(case.model.named_buffers())


def compiled(name, budget, table):
    """A case, it with its loss as one function, and the backend that plans it."""
    torch._dynamo.reset()
    case = build(name)
    backend = CompileBackend(budget, PlanOptions(table))
    call = torch.compile(WithLoss(case), backend=backend, fullgraph=True)
    return case, call, backend


def kept(steps, wanted, budget):
    """A step that trains as eager PyTorch does, in bytes that were promised."""
    found, step, batch = steps.trained(budget, STEPS)
    assert different(found, wanted) == []
    plan = step.plan
    assert plan.peak_bytes <= budget
    beyond = real_peak(lambda: step(*batch))
    assert 0 < beyond <= plan.peak_bytes - plan.resident_bytes
    return plan


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("name", [*SMALL, *slow(*SHORT, *WHOLE, DEEP)])
def test_steps_are_eager_ones_within_every_budget(name):
    optimizer_of = adamw if name in ("vit", "small gpt") else sgd
    needs_packages(name)
    wanted = eager(name, optimizer_of, STEPS)
    steps = Steps(name, optimizer_of)
    most = kept(steps, wanted, float("inf")).peak_bytes
    least = steps.least_budget()
    assert least < most
    for share in SHARES:
        kept(steps, wanted, int(least + share * (most - least)))


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("name", slow(*SMALL, *SHORT, "vit"))
def test_compiled_steps_are_those_of_torch_compile_at_the_least_budget(name):
    needs_packages(name)
    torch._dynamo.reset()
    wanted = eager(name, sgd, STEPS, compiled=True)
    steps = Steps(name, sgd, inductor=True)
    free = kept(steps, wanted, float("inf"))
    assert free.kernels
    least = steps.least_budget()
    assert least < free.peak_bytes
    kept(steps, wanted, least)


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("name", ["small unet", *slow(*SHORT, *WHOLE)])
def test_compiled_gradients_are_eager_ones_within_a_budget(name):
    needs_packages(name)
    case = build(name)
    wanted = gradients(case, WithLoss(case))
    table = NodeTable()
    case, call, _ = compiled(name, 0, table)
    least = least_bytes(call, *case.batch)
    for budget in (float("inf"), least):
        case, call, backend = compiled(name, budget, table)
        assert different(gradients(case, call), wanted) == []
        case.model.zero_grad()
        beyond = real_peak(lambda c=call, b=case.batch: c(*b).backward())
        [plan] = backend.plans
        assert 0 < beyond <= plan.peak_bytes - plan.resident_bytes
        assert plan.peak_bytes <= budget


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small unet", "small gpt", "vit"])
def test_more_bytes_are_never_slower_by_prediction(name):
    needs_packages(name)
    case = build(name)
    study = mt.memory(case.model, case.loss_fn, case.batch, sgd(case.model))
    least, most = study.least_budget, study.unlimited_bytes
    budgets = [least + i * (most - least) // 5 for i in range(6)]
    times = [study.plan(budget).plan.prediction.step_ms for budget in budgets]
    assert times == sorted(times, reverse=True)
