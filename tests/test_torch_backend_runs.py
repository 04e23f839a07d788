"""Compiled graphs in any order and thread: one budget, no leak, errors as eager's."""

import contextlib
import copy
import functools
import gc
import math
import mmap
import random
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import mucudnn.torch as mt
from mucudnn.errors import PlanningError, UnsupportedError
from mucudnn.ir.devices import get_device
from mucudnn.torch.compile_backend import GraphSource, SharedBudget
from mucudnn.torch.costs.measure import estimated, measured
from mucudnn.torch.execution import copies
from mucudnn.torch.execution.bound_step import Half
from mucudnn.torch.plan_program import PlanOptions
from tests.torch_backends import WithLoss, differing, observed, one_backward
from tests.torch_marks import COMPILED
from tests.torch_steps import build, least_bytes, real_peak

pytestmark = COMPILED


def made(name, budget=None, **options):
    """A model with its loss, compiled; its backend; a batch."""
    model, loss_fn, batch = build(name)
    torch._dynamo.reset()
    backend = mt.backend(budget=budget)
    both = WithLoss(model, loss_fn)
    return both, torch.compile(both, backend=backend, **options), backend, batch


def least_budget(name):
    _, call, _, batch = made(name, 0)
    return least_bytes(call, *batch)


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_a_ragged_last_batch_has_a_plan_of_its_own(dynamic):
    model, loss_fn, (x, y) = build("mlp")
    both = WithLoss(model, loss_fn)
    sizes = [128, 96, 128, 96, 1, 128, 1]
    wanted = {
        n: observed(both, one_backward, both, (x[-n:], y[-n:])) for n in set(sizes)
    }
    both, call, backend, _ = made("mlp", "2MiB", dynamic=dynamic)
    for n in sizes:
        found = observed(both, one_backward, call, (x[-n:], y[-n:]))
        assert not differing(found, wanted[n])
    assert len(backend.plans) == len(wanted)
    peaks = [plan.peak_bytes for plan in backend.plans]
    assert peaks == sorted(peaks, reverse=True)
    if not dynamic:
        assert "graph 0/0" in backend.plans[0].name
    if dynamic is not False:
        assert "at 96" in backend.plans[1].name
    assert "test_torch_backend_runs" not in backend.plans[0].name  # the model's line
    assert "torch_backends.py" in str(backend.plans[0])


def test_more_sizes_than_recompilations_and_an_end_to_numbers(monkeypatch):
    _, call, backend, (x, y) = made("mlp")
    sizes = range(20, 20 + torch._dynamo.config.recompile_limit + 2)
    for n in sizes:
        one_backward(call, x[:n], y[:n])
    assert len(backend.plans) == len(sizes)
    monkeypatch.setattr("mucudnn.torch.capture.joint._MOST", len(sizes) - 1)
    with pytest.raises(UnsupportedError, match=r"now there are 64.*pad batches"):
        call(x[:64], y[:64])
    one_backward(call, x[:21], y[:21])


def test_rates_and_momenta_that_dynamo_makes_symbolic():
    """Operations need their values, so each value has a plan of its own."""

    def losses(model):
        return lambda x: model(x).square().mean()

    eager = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.1))
    model = copy.deepcopy(eager)
    backend = mt.backend(budget="1MiB")
    call = torch.compile(losses(model), backend=backend, dynamic=True)
    for n, rate in ((8, 0.1), (6, 0.1), (8, 0.5), (8, 0.1)):
        eager[2].p = model[2].p = rate
        batch = [torch.randn(n, 16)]
        wanted = observed(eager, one_backward, losses(eager), batch)
        assert not differing(observed(model, one_backward, call, batch), wanted)
    assert len(backend.plans) == 3
    assert backend.plans[2].name.endswith(", 0.5")


class Scaled(nn.Linear):
    """With numbers: one from the caller, one that depends on data."""

    def forward(self, x, number):
        y = super().forward(x) * number
        return (y * x.sum().item()).square().mean(), x.shape[0]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own look at it
@pytest.mark.parametrize(("numbers", "plans"), [((0.5, 2.5, 3.5), 4), ((2, 3, 2), 4)])
def test_numbers_that_change(numbers, plans):
    torch.manual_seed(0)
    model, x = Scaled(16, 16), torch.randn(8, 16)
    backend = mt.backend(budget="1MiB")
    call = torch.compile(model, backend=backend)
    for number in (*numbers, *numbers):
        found = []
        for function in (model, call):
            model.zero_grad()
            loss, size = function(x, number)
            loss.backward()
            assert size == 8
            found.append([loss, model.weight.grad, model.bias.grad])
        assert all(map(torch.equal, *found))
    assert len(backend.plans) <= plans


@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        pytest.param("cnn", marks=pytest.mark.slow),
        pytest.param("gpt", marks=pytest.mark.slow),
    ],
)
def test_a_graph_that_is_retained_may_be_gone_through_again(name):
    for budget in (None, least_budget(name)):
        both, call, _, batch = made(name, budget)
        torch.manual_seed(1)
        one_backward(both, *batch)
        wanted = [p.grad.clone() for p in both.parameters()]
        torch.manual_seed(1)
        loss = call(*batch)
        for again in (True, True, False):
            both.zero_grad()
            loss.backward(retain_graph=again)
            found = [p.grad for p in both.parameters()]
            assert all(map(torch.equal, found, wanted))
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()


def tensors():
    """How many are alive, and their bytes."""
    gc.collect()
    alive = [o for o in gc.get_objects() if type(o) is torch.Tensor]
    return len(alive), sum(o.untyped_storage().nbytes() for o in alive)


def resident_pages():
    return int(Path("/proc/self/statm").read_text().split()[1])


@pytest.mark.filterwarnings("ignore:saved tensors of")
@pytest.mark.usefixtures("free_copies")
def test_a_thousand_forward_passes_leave_nothing(monkeypatch):
    budget = least_budget("mlp")
    hosts = weakref.WeakSet()

    class Counted(mmap.mmap):
        def __init__(self, *_, **__):
            hosts.add(self)

    monkeypatch.setattr(copies.mmap, "mmap", Counted)
    both, call, backend, batch = made("mlp", budget)
    one_backward(call, *batch)
    assert backend.plans[0].leaving
    for _ in range(20):  # allocators keep some pages
        call(*batch)
    before, pages = tensors(), resident_pages()
    for _ in range(1000):
        call(*batch)
    assert tensors() == before
    assert resident_pages() - pages < 2 << 20 >> 12
    leaving = len(backend.plans[0].leaving)
    assert len(hosts) == leaving  # all used the same
    for _ in range(2):
        pending = [call(*batch) for _ in range(3)]
        assert len(hosts) == 3 * leaving
        del pending
    both.eval()
    with torch.no_grad():
        assert not call(*batch).requires_grad
    both.train()
    one_backward(call, *batch)


@pytest.mark.filterwarnings("ignore:saved tensors of")
def test_three_steps_under_way_end_in_any_order():
    budget = least_budget("gpt")
    both, call, _, batch = made("gpt", budget)
    batches = [(batch[0].roll(k, 0), batch[1]) for k in range(3)]

    def gradients(function, order):
        torch.manual_seed(1)
        losses = [function(*b) for b in batches]
        found = []
        for k in order:
            both.zero_grad()
            losses[k].backward()
            found.append([p.grad for p in both.parameters()])
        return [g for k in range(3) for g in found[order.index(k)]]

    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        wanted = gradients(both, order)
        assert all(map(torch.equal, gradients(call, order), wanted))


def test_copies_and_compiling_twice():
    both, call, backend, batch = made("mlp", "2MiB")
    wanted = observed(both, one_backward, both, batch)
    assert not differing(observed(both, one_backward, call, batch), wanted)
    copied = copy.deepcopy(call)
    found = observed(copied._orig_mod, one_backward, copied, batch)
    assert not differing(found, wanted)
    twice = torch.compile(call, backend=backend)
    assert not differing(observed(both, one_backward, twice, batch), wanted)
    assert copy.copy(backend).plans == []


def test_runs_in_memory_at_once_are_announced():
    model, loss_fn, (x, y) = build("mlp")
    call = torch.compile(model, backend=mt.backend(budget="2MiB"))
    results = []
    for _ in range(3):  # what a graph returns is no saved tensor
        results.append(call(x))
        loss_fn(results[-1], y).backward()
    with pytest.warns(UserWarning, match="saved tensors of 2 runs of graph 0/0"):
        loss_fn(call(x) + call(x), y).backward()


def in_threads(*functions):
    """Run functions at once; their results in order."""
    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(lambda run: run(), functions, timeout=300))


# Both threads are between the passes of one graph.
@pytest.mark.filterwarnings("ignore:saved tensors of")
@pytest.mark.parametrize("dynamic", [False, True])
def test_two_threads_at_once(dynamic):
    budget = least_budget("mlp")
    both, call, _, (x, y) = made("mlp", budget, dynamic=dynamic)
    replicas = [copy.deepcopy(both) for _ in range(2)]

    def work(function, k):
        def run():
            found = []
            for _ in range(10):
                both = replicas[k]
                both.zero_grad()
                loss = function(both, x[k::2], y[k::2])
                loss.backward()
                found = [loss.detach(), *(p.grad.clone() for p in both.parameters())]
            return found

        return run

    def plain(model, *batch):
        return model(*batch)

    planned = torch.compile(plain, backend=mt.backend(budget=budget), dynamic=dynamic)
    wanted = in_threads(work(plain, 0), work(plain, 1))
    found = in_threads(work(planned, 0), work(planned, 1))
    for some, others in zip(found, wanted, strict=True):
        assert all(map(torch.equal, some, others))
    loss = call(x, y)  # and a backward pass in another thread than its forward pass
    in_threads(loss.backward)
    found = [p.grad.clone() for p in both.parameters()]
    both.zero_grad()
    both(x, y).backward()
    assert all(map(torch.equal, found, [p.grad for p in both.parameters()]))


@pytest.mark.usefixtures("fresh_compiler")
def test_a_size_is_planned_while_another_thread_runs():
    """What is traced for a new size does not keep others from their compiled calls."""
    found = []

    @torch.library.custom_op("mucudnn_tests::tripled", mutates_args=())
    def tripled(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @tripled.register_fake
    def _(x):
        if len(x) == 7:  # more than once: the last time it is traced
            found.extend(in_threads(lambda: call(torch.ones(4, 3)).sum().item()))
        return torch.empty_like(x)

    tripled.register_autograd(lambda ctx, g: g * 3)
    weight = torch.ones(3, requires_grad=True)

    def plain(x):
        return tripled(x * weight)

    call = torch.compile(plain, backend=mt.backend(budget="1MiB"), dynamic=True)
    call(torch.ones(4, 3)).sum().backward()
    call(torch.ones(7, 3)).sum().backward()
    assert len(found) > 1
    assert set(found) == {36.0}


class Failing(torch.utils._python_dispatch.TorchDispatchMode):
    """Lets so many operations run, then raises."""

    def __init__(self, after, error):
        super().__init__()
        self.left, self.error = after, error

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not self.left:
            raise self.error
        self.left -= 1
        return function(*args, **(kwargs or {}))


class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = functional.dropout(functional.gelu(layer(x)), 0.5)
        return x.square().mean()


def by_a_slow_link(lowered):
    """Costs with which it is better to compute again."""
    times = {n.name: 1.0 if n.traits.expensive else 0.01 for n in lowered.graph.nodes}
    return replace(
        measured(lowered), node_ms=times, out_bytes_per_ms=1e3, in_bytes_per_ms=1e3
    )


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("full"),
        pytest.param(KeyboardInterrupt(), marks=pytest.mark.slow),
    ],
)
def test_an_error_in_the_middle_of_a_step_leaves_nothing(error, monkeypatch):
    torch.manual_seed(0)
    model, batch = Drops(), [torch.randn(256, 64)]
    wanted = observed(model, one_backward, model, batch)
    free = mt.CompileBackend(math.inf)
    one_backward(torch.compile(model, backend=free), *batch)
    torch._dynamo.reset()
    backend = mt.CompileBackend(0.75 * free.peak_bytes, PlanOptions(by_a_slow_link))
    call = torch.compile(model, backend=backend)
    assert not differing(observed(model, one_backward, call, batch), wanted)
    assert any("dropout" in name for name in backend.plans[0].recomputed)
    model.zero_grad()
    before = tensors()
    torch.manual_seed(3)
    call(*batch)
    state = torch.get_rng_state().numpy().copy()
    mode, run = contextlib.nullcontext(), Half.run

    def failing_run(half, args):
        with mode:
            return run(half, args)

    monkeypatch.setattr(Half, "run", failing_run)
    reached = 0
    for after in range(1000):
        torch.manual_seed(3)
        loss = None
        mode = Failing(after, error)
        try:
            loss = call(*batch)
            loss.backward()
        except type(error) as e:
            e.__traceback__ = None
            reached += 1
        if loss is not None:  # in the backward pass: what is drawn again is undone
            assert np.array_equal(torch.get_rng_state().numpy(), state)
        model.zero_grad()
        if mode.left:
            break
    del loss
    mode = contextlib.nullcontext()
    assert reached > 40
    assert tensors() == before
    assert not differing(observed(model, one_backward, call, batch), wanted)


def test_errors_name_the_operation_and_the_users_line():
    @torch.library.custom_op("mucudnn_tests::doubled", mutates_args=("x",))
    def doubled(x: torch.Tensor) -> None:
        x.mul_(2)

    class Changing(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            with torch.no_grad():
                z = y.detach().clone()
                torch.ops.mucudnn_tests.doubled(z)
            return (y * z).sum()

    model = Changing(4, 4)
    call = torch.compile(model, backend=mt.backend(budget="1MiB"), fullgraph=True)
    for _ in range(2):
        with pytest.raises(UnsupportedError) as caught:
            call(torch.ones(2, 4))
        assert "auto_functionalized" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert f"({__file__}:" in str(caught.value)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_sparse_gradients_are_refused_but_outside_of_what_is_compiled():
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
    call = torch.compile(model, backend=mt.backend(budget="1MiB"))
    with pytest.raises(UnsupportedError, match=r"sparse_coo; only dense.*after"):
        call(torch.tensor([1, 2]))

    def trained(compiled):
        torch.manual_seed(0)
        table, rest = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4)
        run = torch.compile(rest, backend=mt.backend(cache=None)) if compiled else rest
        optimizers = (
            torch.optim.SparseAdam(table.parameters(), 0.1),
            torch.optim.Adam(rest.parameters(), 0.1),
        )
        for _ in range(2):
            run(table(torch.tensor([1, 2, 2]))).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [table.weight, *rest.parameters()]

    assert all(map(torch.equal, trained(compiled=True), trained(compiled=False)))


def test_no_setting_hides_a_budget_that_is_too_small():
    _, call, _, batch = made("mlp", 1024)
    with torch._dynamo.config.patch(suppress_errors=True):
        for _ in range(2):
            with pytest.raises(PlanningError, match="the least budget that works is"):
                call(*batch)
    with torch.no_grad():
        call(*batch)


class Broken(nn.Module):
    """Three graphs: Python looks at values between them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        first, second, third = self.layers
        x = self.drop(torch.relu(first(x)))
        torch._dynamo.graph_break()
        x = self.drop(torch.relu(second(x)))
        torch._dynamo.graph_break()
        return third(x).square().mean()


def broken(budget):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, batch = Broken(), (torch.randn(128, 64),)
    backend = mt.backend(budget=budget, cache=None)
    return model, batch, backend, torch.compile(model, backend=backend)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own look at it
def test_graphs_of_one_model_share_the_budget():
    model, batch, _, _ = broken(None)
    wanted = observed(model, one_backward, model, batch)
    model, batch, backend, call = broken(None)
    assert not differing(observed(model, one_backward, call, batch), wanted)
    first, second, third = (plan.peak_bytes for plan in backend.plans)
    assert backend.peak_bytes == first + second + third
    words = r"graph \d/0.* share the budget .*breaks at .*runs.py:\d+.*fullgraph"
    said = []
    budget = second
    while True:  # every graph that does not fit names a budget for those so far
        model, batch, backend, call = broken(budget)
        try:
            found = observed(model, one_backward, call, batch)
        except PlanningError as e:
            said.append(str(e))
            budget = e.least_bytes
        else:
            break
    assert 1 <= len(said) <= 3
    assert re.search(words, said[-1], re.S)
    assert budget < first + second + third
    assert not differing(found, wanted)
    assert not differing(observed(model, one_backward, call, batch), wanted)
    assert len(backend.plans) == len({plan.name for plan in backend.plans}) == 3
    assert backend.peak_bytes <= budget
    model.zero_grad()
    resident = sum(t.untyped_storage().nbytes() for t in model.parameters())
    assert real_peak(lambda: one_backward(call, *batch)) + resident <= budget


def test_models_with_a_backend_in_common_keep_the_budget_each_and_say_so():
    torch._dynamo.reset()
    backend = mt.backend(budget="600KiB", cache=None)
    layers = [nn.Linear(256, 256) for _ in range(2)]

    def one(x):
        return layers[0](x).square().mean()

    def other(x):
        return layers[1](x).relu().mean()

    torch.compile(one, backend=backend)(torch.randn(4, 256)).backward()
    with pytest.warns(UserWarning, match=r"several models.*budget of 600.0 KiB"):
        torch.compile(other, backend=backend)(torch.randn(4, 256)).backward()
    assert len(backend.plans) == 2


def test_what_a_budget_is_said_to_be_enough_is_enough():
    """Whatever the graphs need, down to their least."""

    def planned(least, most):
        def plan(budget):
            if budget < least:
                raise PlanningError("too small", least_bytes=least)
            return min(int(budget), most)

        return plan

    draws = random.Random(0)
    for _ in range(300):
        count = draws.randint(2, 6)
        sizes = [draws.randint(1, 1000) for _ in range(count)]
        graphs = [(least, least + draws.randint(0, 3000)) for least in sizes]
        budget, tries = sum(sizes) // 2, 0
        while True:
            shared = SharedBudget(budget)
            try:
                for i, (least, most) in enumerate(graphs):
                    ends = f"line {i}" if i + 1 < count else None
                    source = GraphSource(f"graph {i}", f"{i}", ends, i > 0)
                    shared.note(source, shared.plan(source, planned(least, most)))
            except PlanningError as e:
                budget, tries = e.least_bytes, tries + 1
            else:
                break
        assert tries <= count
        assert sum(sizes) <= shared.peak_bytes <= budget


class Laplacian(nn.Module):
    """Second derivatives by forward mode over reverse mode, of every sample."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x):
        def value(v):
            return self.net(v).squeeze()

        def laplacian(v):
            return torch.func.hessian(value)(v).diagonal().sum()

        return torch.vmap(laplacian)(x), torch.vmap(value)(x)


def of_a_laplacian(budget=None):
    """Gradients within a budget, planned by published figures; eager ones without."""
    model = Laplacian()
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    torch._dynamo.reset()
    options = PlanOptions(functools.partial(estimated, device=get_device("h200")))
    backend = mt.CompileBackend(budget or math.inf, options)
    run = torch.compile(model, backend=backend) if budget else model
    second, first = run(x)
    (second.square().mean() + first.square().mean()).backward()
    return [p.grad for p in model.parameters()]


# PyTorch's Dynamo hides it, unless warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_copies_of_both_halves_have_names_of_their_own():
    wanted = of_a_laplacian()
    found = of_a_laplacian(least_bytes(of_a_laplacian, 1))
    assert all(map(torch.equal, wanted, found))
