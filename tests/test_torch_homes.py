"""Parameters and state that live on the host: less memory, the same numbers."""

import copy

import pytest
import torch

import mucudnn.torch as mt
from mucudnn.torch.execution.bound_step import is_outside_allocator
from tests.torch_steps import build, least_bytes, real_peak, train_eagerly

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.*profiling.*")]


@pytest.fixture(autouse=True)
def quick(short_search):
    """Sums in a fixed order, and searches that end soon."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), 1e-3)


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def least(name, optimizer_of, **options):
    model, loss_fn, batch = build(name)
    step = mt.train_step(model, loss_fn, optimizer_of(model), budget=0, **options)
    return least_bytes(step.prepare, *batch)


def tensors_of(model, optimizer):
    state = (t for s in optimizer.state.values() for t in s.values())
    kept = [*model.parameters(), *model.buffers(), *state]
    return [t for t in kept if isinstance(t, torch.Tensor)]


def eager(name, optimizer_of, count):
    model, loss_fn, batch = build(name)
    optimizer = optimizer_of(model)
    torch.manual_seed(1)
    losses = train_eagerly(model, loss_fn, batch, optimizer, count)
    return losses, [t.detach().clone() for t in tensors_of(model, optimizer)]


@pytest.mark.parametrize(("name", "optimizer_of"), [("mlp", adamw), ("gpt", sgd)])
@pytest.mark.parametrize("share", [0.0, 0.6])
def test_state_that_lives_on_the_host(name, optimizer_of, share):
    wanted, state = eager(name, optimizer_of, 5)
    resident = least(name, optimizer_of)
    lowest = least(name, optimizer_of, offload_state=True)
    assert lowest < resident
    model, loss_fn, batch = build(name)
    optimizer = optimizer_of(model)
    parameters = list(model.parameters())
    budget = lowest + round(share * (resident - lowest))
    step = mt.train_step(
        model, loss_fn, optimizer, budget=budget, offload_state=True, cache=None
    )
    plan = step.prepare(*batch)
    assert plan.plan.schedule.hosted
    assert plan.peak_bytes <= budget
    torch.manual_seed(1)
    losses = [step(*batch).item() for _ in range(5)]
    assert losses == wanted
    found = tensors_of(model, optimizer)
    assert all(map(torch.equal, found, state))
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    homes = [t for t in found if is_outside_allocator(t)]
    assert len(homes) >= len(plan.plan.schedule.hosted)
    here = sum(
        t.untyped_storage().nbytes() for t in found if not is_outside_allocator(t)
    )
    beyond = real_peak(lambda: step(*batch))
    assert here <= plan.resident_bytes
    assert here + beyond <= plan.peak_bytes <= budget


def test_what_lives_on_the_host_is_read_saved_and_loaded_as_ever():
    wanted, _ = eager("mlp", adamw, 5)
    model, loss_fn, batch = build("mlp")
    optimizer = adamw(model)
    budget = least("mlp", adamw, offload_state=True)
    step = mt.train_step(
        model, loss_fn, optimizer, budget=budget, offload_state=True, cache=None
    )
    torch.manual_seed(1)
    losses = [step(*batch).item() for _ in range(2)]
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    with torch.no_grad():
        assert loss_fn(model(batch[0]), batch[1]).item() == wanted[2]
    step(*batch)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    losses += [step(*batch).item() for _ in range(3)]
    assert losses == wanted
    hosted = len(step.plan.plan.schedule.hosted)
    assert sum(map(is_outside_allocator, tensors_of(model, optimizer))) == hosted


def test_a_copy_home_that_is_left_out_is_noticed(monkeypatch):
    wanted, _ = eager("mlp", adamw, 3)
    budget = least("mlp", adamw, offload_state=True)
    monkeypatch.setattr(
        "mucudnn.torch.execution.copies.ThreadCopies.write_back", lambda *_: None
    )
    model, loss_fn, batch = build("mlp")
    step = mt.train_step(
        model, loss_fn, adamw(model), budget=budget, offload_state=True, cache=None
    )
    assert [step(*batch).item() for _ in range(3)] != wanted
