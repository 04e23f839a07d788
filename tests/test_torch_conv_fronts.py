"""Convolutions of planned PyTorch steps: other ways to run them, in promised bytes."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

import mucudnn.torch as mt
from mucudnn import AlgoPerf, ConvPlan, Tuner
from mucudnn.errors import UnsupportedError
from mucudnn.runtime.tuning.timing import Timing
from mucudnn.torch.compile_backend import compile_graph
from mucudnn.torch.conv import fronts as conv_fronts
from mucudnn.torch.conv.backend import TORCH
from mucudnn.torch.conv.fronts import ConvolutionNode, with_plans
from mucudnn.torch.conv.kernels import is_native
from mucudnn.torch.costs.measure import evaluate
from mucudnn.torch.costs.meters import CpuMeter
from tests.torch_calls import tuner
from tests.torch_marks import STEPS_RUN
from tests.torch_steps import least_bytes, planner_of, real_peak, train_eagerly

pytestmark = STEPS_RUN

CASES = [
    (torch.float32, torch.channels_last),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            (torch.float64, torch.contiguous_format),
            (torch.float32, torch.contiguous_format),
            (torch.float64, torch.channels_last),
        )
    ),
]

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


@pytest.fixture
def gain_by_memory(monkeypatch):
    """Whatever takes more memory is faster, and PyTorch's own kernel the slowest."""

    def timed(runs, device, rule):
        assert all(run() is None for run in runs)
        return [Timing(100.0 - i if i else 200.0, 0.0, 1) for i in range(len(runs))]

    monkeypatch.setattr(conv_fronts, "measure_together", timed)
    rule = replace(conv_fronts._RULE, hopeless=float("inf"))
    monkeypatch.setattr(conv_fronts, "_RULE", rule)


def dividing():
    return tuner(native=True, batch_policy="powers_of_two")


def network(dtype, form=torch.contiguous_format):
    """Its first convolution needs no gradient of its input, its last has two axes."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 5, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=2, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 3, stride=2),
        nn.Flatten(),
        nn.Linear(4 * 9 * 9, 5),
    )
    x = torch.randn(4, 3, 8, 8, dtype=dtype)
    return model.to(dtype).to(memory_format=form), (
        x.to(memory_format=form),
        torch.arange(4),
    )


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def eager(dtype, form, steps=3):
    model, batch = network(dtype, form)
    loss_fn = functional.cross_entropy
    losses = train_eagerly(model, loss_fn, batch, sgd(model), steps)
    return losses, model.state_dict()


def planned_step(dtype, form, budget, one):
    model, batch = network(dtype, form)
    step = mt.train_step(
        model,
        functional.cross_entropy,
        sgd(model),
        budget=budget,
        tuner=one,
        cache=None,
    )
    return model, batch, step


def least_budget(dtype, form, one):
    _, batch, step = planned_step(dtype, form, 0, one)
    return least_bytes(step.prepare, *batch)


def assert_close(found, wanted, dtype):
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("gain_by_memory")
@pytest.mark.parametrize(("dtype", "form"), CASES)
def test_steps_are_eager_ones_in_the_bytes_that_are_promised(dtype, form):
    losses, state = eager(dtype, form)
    one = dividing()
    chosen = []
    for budget in (None, least_budget(dtype, form, one)):
        model, batch, step = planned_step(dtype, form, budget, one)
        for wanted in losses:
            assert_close(step(*batch).item(), wanted, dtype)
        assert_close(dict(model.state_dict()), dict(state), dtype)
        plan = step.plan
        beyond = real_peak(lambda s=step, b=batch: s(*b))
        assert budget is None or plan.peak_bytes <= budget
        assert 0 < beyond <= plan.peak_bytes - plan.resident_bytes
        assert f"{len(plan.convolutions)} convolutions: " in str(plan)
        chosen.append(plan.convolutions)
    free, tight = chosen
    assert len(free) == 3 + 5  # without the gradient of the batch
    assert not any(map(is_native, free.values()))
    assert any(plan.divided for plan in tight.values())
    wide = {name: plan.workspace for name, plan in free.items()}
    narrow = {name: plan.workspace for name, plan in tight.items()}
    assert sum(narrow.values()) <= sum(wide.values())  # the same where others decide


def test_what_native_kernels_do_not_fit_is_planned():
    case = torch.float64, torch.contiguous_format  # which PyTorch lowers whole
    assert least_budget(*case, dividing()) < least_budget(*case, None)


def lowered_network(dtype=torch.float64, form=torch.contiguous_format):
    model, batch = network(dtype, form)
    return planner_of(model, functional.cross_entropy, sgd(model), batch)[0]


def test_fronts_have_what_is_really_allocated():
    planner = lowered_network()
    one = dividing()
    profile = conv_fronts.with_fronts(planner.lowered, planner.profile, one)
    assert profile.fronts.keys().isdisjoint(profile.workspaces)
    for name, front in profile.fronts.items():
        site = ConvolutionNode.of(planner.lowered, planner.lowered.graph.by_name[name])
        sizes = [plan.workspace for plan in front]
        times = [plan.time_ms for plan in front]
        assert sizes == sorted(set(sizes))
        assert times == sorted(set(times), reverse=True)
        assert profile.node_ms[name] == times[-1]
        for plan in front:
            call = site.bound(one.backend, plan)
            operands = [conv_fronts._random_tensor(layout) for layout in site.operands]
            run = partial(evaluate, call, operands)
            (most,) = CpuMeter().most_bytes([lambda run=run: run])
            assert most - site.result_bytes == plan.workspace
            for found, wanted in zip(
                evaluate(call, operands), evaluate(site.call, operands), strict=True
            ):
                assert_close(found, wanted, torch.float64)


def test_what_is_not_ours_or_cannot_be_measured_stays_pytorchs(monkeypatch):
    planner = lowered_network()
    lowered = planner.lowered
    turned = {
        name: replace(layout, stride=(1, *layout.stride[1:]))
        for name, layout in lowered.layouts.items()
        if name.startswith("convolution")
    }
    other = replace(lowered, layouts={**lowered.layouts, **turned})
    narrow = lowered_network(torch.bfloat16)
    for graph, known in ((other, planner.profile), (narrow.lowered, narrow.profile)):
        assert conv_fronts.with_fronts(graph, known, dividing()) is known
    one = dividing()

    def refuses(self, problem):
        raise UnsupportedError("not today")

    monkeypatch.setattr(Tuner, "measure", refuses)
    profile = conv_fronts.with_fronts(lowered, planner.profile, one)
    assert all(
        len(front) == 1 and is_native(front[0]) for front in profile.fronts.values()
    )


def test_a_second_run_of_a_node_has_a_plan_of_its_own():
    lowered = lowered_network().lowered
    backend = mt.cpu_backend()
    problem = ConvolutionNode.of(lowered, lowered.graph.by_name["convolution"]).problem

    def plan(algo, *batches):
        perf = AlgoPerf(algo=algo, batch=1, time_ms=1.0, workspace=0)
        return ConvPlan(problem, tuple(replace(perf, batch=b) for b in batches))

    plans = {"convolution": plan(TORCH, 4), "convolution~1": plan("GEMM", 1, 3)}
    calls = with_plans(lowered, plans, backend).planned
    assert calls["convolution"] is lowered.calls["convolution"]
    assert calls["convolution~1"].function is not lowered.calls["convolution"].function


def test_plans_run_where_the_tensors_are_whatever_the_default_device():
    lowered = lowered_network().lowered
    with torch.device("meta"):
        site = ConvolutionNode.of(lowered, lowered.graph.by_name["convolution"])
        perf = AlgoPerf(algo="GEMM", batch=2, time_ms=1.0, workspace=0)
        call = site.bound(mt.cpu_backend(), ConvPlan(site.problem, (perf, perf)))
        operands = [conv_fronts._random_tensor(layout) for layout in site.operands]
        (found,) = evaluate(call, operands)
        (wanted,) = evaluate(site.call, operands)
    assert_close(found, wanted, torch.float64)


@pytest.mark.usefixtures("gain_by_memory")
@pytest.mark.parametrize("by_options", [True, False])
def test_compiled_models_choose_too(by_options):
    dtype = torch.float64
    model, (x, y) = network(dtype)
    loss = functional.cross_entropy(model(x), y)
    wanted = torch.autograd.grad(loss, list(model.parameters()))
    one = dividing()
    backend = mt.backend(tuner=one, cache=None)
    torch._dynamo.reset()
    given = partial(compile_graph, options={"tuner": one}) if by_options else backend
    compiled = torch.compile(model, backend=given)
    found = functional.cross_entropy(compiled(x), y)
    grads = torch.autograd.grad(found, list(model.parameters()))
    assert_close(found, loss, dtype)
    assert_close(grads, wanted, dtype)
    if not by_options:
        (plan,) = backend.plans
        assert not any(map(is_native, plan.plan.plans.values()))


@pytest.mark.usefixtures("gain_by_memory")
def test_ways_to_run_convolutions_are_remembered(tmp_path, monkeypatch):
    asked = []
    measure = Tuner.measure
    monkeypatch.setattr(
        Tuner, "measure", lambda self, p: asked.append(p) or measure(self, p)
    )

    def planned(**options):
        """How convolutions run, the loss of a step, and how much was measured."""
        asked.clear()
        model, batch = network(torch.float64)
        one = tuner(native=True, **options)
        step = mt.train_step(
            model, functional.cross_entropy, sgd(model), tuner=one, cache=tmp_path
        )
        loss = step(*batch)
        return dict(step.plan.convolutions), loss, len(asked)

    plans, loss, count = planned(batch_policy="powers_of_two")
    again, same, none = planned(batch_policy="powers_of_two")
    assert count > none == 0
    assert plans == again
    assert loss == same
    assert planned()[2] > 0  # another policy
    assert planned(batch_policy=lambda n: [n])[2] > 0  # nobody knows what it does
    assert planned(batch_policy=lambda n: [n])[2] > 0


def test_mistakes_are_said():
    model, _ = network(torch.float32)
    given = model, functional.cross_entropy, sgd(model)
    for refuse in (
        lambda one: mt.train_step(*given, tuner=one),
        lambda one: mt.backend(tuner=one),
        lambda one: compile_graph(None, [], options={"tuner": one})(),
    ):
        with pytest.raises(ValueError, match="cpu_backend"):
            refuse(Tuner(cache=None))
        with pytest.raises(TypeError, match="must be a Tuner, got str"):
            refuse("64MiB")
