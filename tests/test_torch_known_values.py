"""Steps whose shapes and branches depend on values of the batch."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional

import mucudnn.torch as mt
from mucudnn.errors import PlanningError, UnsupportedError
from mucudnn.passes.liveness import rounded
from tests.torch_own_updates import OfValues
from tests.torch_programs_counting import Queue
from tests.torch_steps import least_bytes, real_peak

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]


def by_mask(y, t):
    return functional.cross_entropy(y[t >= 0], t[t >= 0])


def selected(y, t):
    return y.masked_select((t > 0).unsqueeze(1)).square().mean()


def by_places(y, t):
    rows, (other,) = (t > 0).nonzero().squeeze(1), torch.where(t < 2)
    return y[rows].sum() + y[other].square().sum()


def written_by_rows(y, t):
    found = torch.zeros_like(y)
    found[t > 0] = y[t > 0] * 2
    return (found + y).square().mean()


def written_at_classes(y, t):
    wanted = torch.zeros_like(y)
    wanted[t > 0, t[t > 0]] = 1.0
    return functional.binary_cross_entropy_with_logits(y, wanted)


def by_classes(y, t):
    classes, inverse, counts = t.unique(return_inverse=True, return_counts=True)
    sums = y.new_zeros(len(classes), 3).index_add(0, inverse, y)
    return (sums / counts.unsqueeze(1)).square().sum()


def in_parts(y, t):
    sizes = [int(n) for n in (t + 1).clamp(min=0)]
    return sum((part**2).sum() for part in y.repeat(4, 1)[: sum(sizes)].split(sizes))


def up_to_a_number(y, t):
    n = int((t > 0).sum())
    mask = torch.arange(n)[None] < t[:, None]
    return y[:n].sum() + y.new_full((n + 1,), 2.0).sum() * (y[:, :1] * mask).mean()


def repeated(y, t):
    return y.repeat_interleave(t.clamp(min=0), 0).square().sum()


def one_by_one(y, t):
    return torch.stack([y[i, k] for i, k in enumerate(t.clamp(min=0).tolist())]).mean()


def of_what_was_found(y, t):
    rows = (t >= 0).nonzero().squeeze(1)
    return y[rows[(rows > 1) & (t[rows] > 0)]].square().sum() + y.mean()


def over_pairs(y, t):
    a, b = (t.unsqueeze(0) == t.unsqueeze(1)).triu(1).nonzero(as_tuple=True)
    return (y[a] - y[b]).square().sum() + y.square().mean()


def guarded(y, t):
    if t.max() >= 3:
        raise ValueError("a class that there is not")
    axes = torch.arange(1, y.dim()).tolist()
    is_low = torch.equal(t, t.clamp(max=0)) or not bool((t > 0).any())
    return y.mean() if is_low else y.square().sum(dim=axes).mean()


KEPT = torch.tensor([True, False, True, True, False, True])


def by_a_mask_from_outside(y, t):
    return y[KEPT].square().sum() + functional.cross_entropy(y[KEPT], t[KEPT].relu())


def by_one_mask_often(y, t):
    mask = t > 1
    places = mask.nonzero()
    places += 1  # which writes no other indices of this mask
    return (y[mask] ** 2).sum() + (y[mask].exp() * 2).sum() + (y * 0.1).mean()


PROGRAMS = (
    by_a_mask_from_outside, by_one_mask_often,
    by_mask, selected, by_places, written_by_rows, written_at_classes,
    by_classes, in_parts, up_to_a_number, repeated, one_by_one, of_what_was_found,
    over_pairs, guarded,
)  # fmt: skip

TARGETS = ((0, 1, 2, -1, 2, 1), (2, 1, 0, 1, -1, 2), (1, 1, -1, -1, 1, 0))
"""Of three batches; the first two have equally many of each."""


def parts(options=()):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.Adam(model.parameters(), **dict(options))


def batch(targets):
    generator = torch.Generator().manual_seed(sum(targets))
    return torch.randn(len(targets), 4, generator=generator), torch.tensor(targets)


def in_turn(loss, order, **options):
    """Train in eager mode and planned; compare; return the planned step."""
    model, optimizer = parts()
    other = copy.deepcopy(model)
    step = mt.train_step(
        other, loss, torch.optim.Adam(other.parameters()), cache=None, **options
    )
    for i in order:
        x, t = batch(TARGETS[i])
        optimizer.zero_grad()
        expected = loss(model(x), t)
        expected.backward()
        optimizer.step()
        assert torch.equal(step(x, t), expected), i
        for mine, true in zip(other.parameters(), model.parameters(), strict=True):
            assert torch.equal(mine, true), i
    return step


@pytest.mark.parametrize("budget", [None, "100%"])
@pytest.mark.parametrize("loss", PROGRAMS, ids=lambda f: f.__name__)
def test_values_of_the_batch_may_decide_shapes(loss, budget):
    in_turn(loss, (0, 1, 2, 0, 1, 2), budget=budget, exact=True)


def checked_by_values(y, t):
    rows = torch.linspace(-1, 1, 4096) * t.unsqueeze(1)
    if bool(((rows.cos() - 3).abs() > 1).all()):
        y = y * 2
    return y[t >= 0].square().mean()


@pytest.mark.parametrize(
    ("make", "reason"),
    [(torch.optim.Adam, "values .* before it take"), (OfValues, "updates eagerly")],
)
@pytest.mark.parametrize("offload_state", [False, True])
def test_a_promised_peak_includes_known_values(make, reason, offload_state):
    model, given = parts()[0], batch(TARGETS[0])
    step = functools.partial(
        *(mt.train_step, model, checked_by_values, make(model.parameters())),
        cache=None,
        offload_state=offload_state,
    )
    for budget in (None, least := least_bytes(step(budget=1024).prepare, *given)):
        planned = step(budget=budget)
        planned(*given)
        peak, resident = planned.plan.peak_bytes, planned.plan.resident_bytes
        # Indices of the mask are resident, and made by each run.
        real = real_peak(lambda run=planned: run(*given)) + resident - rounded(8 * 5)
        assert real <= peak < real + 512
    assert 2 * 6 * 4096 * 4 < peak <= least < 3 * 6 * 4096 * 4
    with pytest.raises(PlanningError, match=reason):
        step(budget=least - 1).prepare(*given)


@pytest.mark.parametrize("loss", [by_mask, by_classes, written_by_rows, selected])
def test_a_capture_serves_all_batches_with_equal_counts(loss):
    step = in_turn(loss, (0, 1, 0, 2, 1, 2))
    assert step._captures == 2


def test_shapes_known_before_the_step_serve_parts_of_the_batch_too():
    model, _ = parts()
    step = mt.train_step(
        model, by_mask, torch.optim.SGD(model.parameters(), 0.1), accumulate=2
    )
    x, t = batch(TARGETS[0])
    expected = sum(by_mask(model(x[k]), t[k]) for k in (slice(3), slice(3, 6))) / 2
    torch.testing.assert_close(step(x, t), expected.detach())


def test_what_users_raise_for_a_batch_is_raised_for_each():
    model, optimizer = parts()
    step = mt.train_step(model, guarded, optimizer)
    for targets in (TARGETS[0], (0, 1, 2, 3, 0, 0), TARGETS[1], (3, 1, 2, 3, 0, 0)):
        if max(targets) < 3:
            step(*batch(targets))
            continue
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match="a class that there is not"):
            step(*batch(targets))
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def test_a_mask_from_outside_may_change():
    mask = KEPT.clone()
    model, _ = parts()
    step = mt.train_step(
        model, lambda y, _: y[mask].sum(), torch.optim.SGD(model.parameters(), 0.0)
    )
    x, t = batch(TARGETS[0])
    for changed in (0, 1, 2):
        mask[changed] ^= True
        assert torch.equal(step(x, t), model(x)[mask].sum())


def test_writing_one_value_by_a_mask_needs_one_capture():
    def loss(y, t):
        y = y.clone()
        y[t > 0] = 0.0
        return y.square().sum()

    assert in_turn(loss, (0, 1, 2))._captures == 1


def test_steps_whose_batches_all_differ_run_in_eager_mode_without_a_budget():
    model, optimizer = parts()
    step = mt.train_step(model, by_mask, optimizer, cache=None)

    def run(n):
        targets = torch.arange(20) % 3
        step(torch.randn(20, 4), torch.where(torch.arange(20) < n, targets, -1))

    for n in range(1, 10):
        run(n)
    with pytest.warns(UserWarning, match="each batch needs a plan of its own"):
        run(10)
    for n in range(11, 15):
        run(n)
    assert (step._captures, step._eager_steps) == (9, 5)
    run(5)  # its plan is kept
    assert step._eager_steps == 5


def test_masks_of_the_models_own_values_are_refused():
    model, optimizer = parts()
    step = mt.train_step(model, lambda y, _: y[y > 0].sum(), optimizer)
    with pytest.raises(UnsupportedError, match="from the batch and buffers"):
        step(*batch(TARGETS[0]))


def test_compiled_steps_take_indices_of_the_batch():
    model, optimizer = parts()
    step = mt.train_step(model, by_mask, optimizer, inductor=True, verify=1, cache=None)
    for targets in TARGETS:
        step(*batch(targets))
        assert step.plan.kernels


def test_functions_of_pytorch_imported_by_name_are_captured_once():
    pool, resize = functional.max_pool1d_with_indices, functional.interpolate

    def loss(y, t):
        wide = resize(y.unsqueeze(0), scale_factor=2.0)
        return pool(wide, 2)[0].square().mean()

    assert in_turn(loss, (0, 1, 2), budget="100%", exact=True)._captures == 1


def test_a_study_knows_the_values_of_its_example():
    model, optimizer = parts()
    few, many = (
        mt.memory(model, by_mask, batch(targets), optimizer).least_budget
        for targets in ((1, *[-1] * 99), (1,) * 100)
    )
    assert few < many
    with pytest.raises(UnsupportedError, match="its output shape depends"):
        mt.memory(model, by_mask, batch(TARGETS[0]), optimizer).max_batch("1MiB")


def test_a_study_knows_the_values_of_buffers():
    model = Queue()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    example = torch.randn(8, 6), torch.randint(0, 4, (8,))
    study = mt.memory(model, functional.cross_entropy, example, optimizer)
    assert study.least_budget > 0
