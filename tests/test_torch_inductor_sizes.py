"""Steps of Inductor's kernels at many sizes: one compilation, and a plan for each."""

import math
import warnings

import pytest

torch = pytest.importorskip("torch")
with warnings.catch_warnings():  # PyTorch's own, as its modules are imported
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch._inductor.codecache import FxGraphCache

from torch import nn  # noqa: E402  (where there is PyTorch)
from torch.nn import functional  # noqa: E402

import mucudnn.torch as mt  # noqa: E402
from mucudnn.torch.inductor.sizes import Sizes, find_term  # noqa: E402
from mucudnn.torch.lowering.lowered import NotCompiledError  # noqa: E402
from tests.test_torch_inductor import (  # noqa: E402, F401  (fixtures)
    compilations,
    mlp,
    one_thread_and_a_folder_of_its_own,
    pytestmark as marks,
    sgd,
)
from tests.torch_steps import real_peak  # noqa: E402

pytestmark = [*marks, pytest.mark.torch]


class Reader(nn.Module):
    """Attention over a sequence, with positions and pairs of neighbours."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(40, 32), nn.Embedding(64, 32)
        self.heads, self.pairs = nn.Linear(32, 96), nn.Linear(64, 40)
        self.norm, self.drop = nn.LayerNorm(32), nn.Dropout(0.1)

    def forward(self, x):
        rows, length = x.shape
        y = self.words(x) + self.places(torch.arange(length))
        q, k, v = self.heads(self.norm(y)).view(rows, length, 3, 2, 16).unbind(2)
        scores = torch.einsum("bthd,bshd->bhts", q, k) / 4
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -1e9).softmax(-1)
        y = y + torch.einsum("bhts,bshd->bthd", self.drop(weights), v).flatten(2)
        return self.pairs(y.reshape(rows, length // 2, 64))


def reader_loss(scores, y):
    flat = functional.cross_entropy(scores.flatten(0, 1), y.flatten(), reduction="sum")
    return flat / y.numel()


def words(rows, length):
    drawn = torch.Generator().manual_seed(rows * length)
    x = torch.randint(40, (rows, length), generator=drawn)
    return x, torch.randint(40, (rows, length // 2), generator=drawn)


def reader():
    torch.manual_seed(0)
    model = Reader()
    return model, sgd(model)


SIZES = [(4, 16), (4, 24), (4, 40), (4, 10), (4, 16), (4, 32)]


def looped(step, sizes=SIZES):
    torch.manual_seed(1)
    return [step(*words(*size)).item() for size in sizes]


def loop_of(optimizer, loss_of):
    def step(x, y):
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.slow
def test_lengths_share_one_compilation_and_each_keeps_the_budget(compilations):  # noqa: F811
    model, optimizer = reader()
    loss_of = torch.compile(lambda x, y: reader_loss(model(x), y), dynamic=True)
    expected = looped(loop_of(optimizer, loss_of))
    state = [p.detach().clone() for p in model.parameters()]
    FxGraphCache.clear()
    compilations.clear()
    free_model, free_optimizer = reader()
    options = {"cache": None, "inductor": True}
    free = mt.train_step(free_model, reader_loss, free_optimizer, **options)
    assert looped(free) == expected
    assert all(map(torch.equal, free_model.parameters(), state))
    # Both passes, for one size and for all; the update.
    assert len(compilations) == 5
    free.prepare(*words(4, 40))
    most = free.plan.peak_bytes
    tight_model, tight_optimizer = reader()
    budget = int(0.8 * most)
    tight = mt.train_step(
        tight_model, reader_loss, tight_optimizer, budget=budget, **options
    )
    assert looped(tight) == expected
    peaks = {}
    for size in SIZES:
        batch = words(*size)
        real = real_peak(lambda batch=batch: tight(*batch)) + tight.plan.resident_bytes
        peaks[size[1]] = tight.plan.peak_bytes
        slack = 0.01 * tight.plan.peak_bytes + (1 << 15)
        assert tight.plan.peak_bytes - slack <= real <= tight.plan.peak_bytes <= budget
    assert peaks[10] < peaks[16] < peaks[24] < peaks[40]
    assert peaks[40] < most


@pytest.mark.slow
def test_a_compiled_model_has_one_compilation_for_rows_and_lengths(compilations):  # noqa: F811
    sizes = [(4, 16), (6, 40), (5, 24), (8, 10)]
    model, optimizer = reader()
    plain = torch.compile(model, dynamic=True, fullgraph=True)
    expected = looped(loop_of(optimizer, lambda x, y: reader_loss(plain(x), y)), sizes)
    torch._dynamo.reset()
    FxGraphCache.clear()
    compilations.clear()
    model, optimizer = reader()
    backend = mt.backend(inductor=True, cache=None)
    forward = torch.compile(model, backend=backend, fullgraph=True)
    loop = loop_of(optimizer, lambda x, y: reader_loss(forward(x), y))
    assert looped(loop, sizes) == expected
    assert len(compilations) == 4
    assert len(backend.plans) == len(sizes)
    assert all(plan.kernels > 4 for plan in backend.plans)


def test_a_batch_may_have_other_strides_at_every_call():
    model = nn.Linear(12, 5)
    forward = torch.compile(model, backend=mt.backend(inductor=True, cache=None))
    columns, parts, row = torch.randn(12, 8), torch.randn(8, 24), torch.randn(1, 12)
    for x in (columns.t(), parts[:, ::2], row.expand(8, 12)):
        torch.testing.assert_close(forward(x), model(x))


def test_a_batch_of_one_is_compiled_for_itself(compilations):  # noqa: F811
    FxGraphCache.clear()
    model, loss_fn, (x, y) = mlp()
    step = mt.train_step(model, loss_fn, sgd(model), cache=None, inductor=True)
    counts = []
    for rows in (64, 32, 48, 1, 7, 64):
        step(x[:rows], y[:rows])
        counts.append(len(compilations))
    assert counts == [3, 5, 5, 7, 7, 7]  # the update is compiled once


KEPT = {8: 3, 12: 5, 16: 4, 20: 11, 24: 2}


class Table(nn.Module):
    """Keeps as many values as a table says for a length."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)[: KEPT[len(x)]]


class Scaled(nn.Module):
    """Divides by a root of the length, a number that differs with the size."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * math.sqrt(len(x))


@pytest.mark.parametrize(("made", "says"), [(Table, "no simple term"), (Scaled, "")])
def test_sizes_that_python_computes_with_are_compiled_for_themselves(made, says):
    torch.manual_seed(0)
    model = made()
    loss_fn = lambda y: y.square().mean()  # noqa: E731
    step = mt.train_step(model, loss_fn, sgd(model), cache=None, inductor=True)
    eager = made()
    eager.load_state_dict(model.state_dict())
    optimizer = sgd(eager)

    def run(length):
        x = torch.linspace(-1, 1, 4 * length).view(length, 4)
        optimizer.zero_grad()
        expected = loss_fn(eager(x))
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(step(x), expected)
        assert step.plan.kernels

    *first, fourth, last = KEPT
    for length in first:
        run(length)
    with pytest.warns(UserWarning, match=f"4th time, .*{says}.*pad batches"):
        run(fourth)
    run(last)


@pytest.mark.parametrize(
    ("numbers", "value"),
    [
        ((7, 7), 7),
        ((16, 24), 40),
        ((8, 12), 20),  # half
        ((256, 576), 1600),  # the square
        ((48, 120), 320),  # of both symbols
        ((3, 5), 8),  # the other one
    ],
)
def test_terms_follow_from_two_sizes(numbers, value):
    term = find_term(numbers, [(16, 3), (24, 5)])
    assert [term((16, 3)), term((24, 5))] == list(numbers)
    assert term((40, 8)) == value


def test_sizes_are_symbols_where_inputs_differ():
    seen = [(4, 16, 64, 15), (4, 24, 96, 23)]
    found = Sizes.of(seen, 2)
    assert found.places == (1,)
    assert found.example == (24,)
    assert found.found_in((4, 10, 40, 9)) == [10]
    assert found.found_in((4, 10, 40, 8)) is None
    assert found.found_in((5, 10, 40, 9)) is None
    assert Sizes.of([*seen, (4, 1, 4, 0)], 2) is None
    assert Sizes.of([(4, 16, 64, 1), (4, 16, 1, 4)], 2) is None
    with pytest.raises(NotCompiledError, match="no simple term"):
        Sizes.of([*seen, (4, 32, 100, 31)], 2)
