"""Operations that raise by values, in planned steps; means that count their batches."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import mucudnn.torch as mt
from tests.torch_marks import STEPS_RUN

pytestmark = STEPS_RUN


class Solving(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, matrix):
        return torch.linalg.solve(matrix, self.linear(matrix)).sum()


def test_a_singular_matrix_raises_as_in_eager_mode_and_changes_nothing():
    model, singular = Solving(), torch.zeros(4, 4)
    with pytest.raises(torch.linalg.LinAlgError) as eager:
        model(singular)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = mt.train_step(model, lambda loss: loss, optimizer, cache=None)
    step(torch.eye(4))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(torch.linalg.LinAlgError) as planned:
        step(singular)
    assert str(planned.value) == str(eager.value)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert step(torch.eye(4)).isfinite()


def test_compiled_models_solve_and_raise_too():
    torch._dynamo.reset()
    model = Solving()
    backend = mt.backend(cache=None)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    matrix = torch.eye(4) + 0.1 * torch.rand(4, 4)
    loss = compiled(matrix)
    assert torch.equal(loss, model(matrix))
    grads = [
        torch.autograd.grad(m(matrix), [*m.parameters()]) for m in (compiled, model)
    ]
    assert all(map(torch.equal, *grads))
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        compiled(torch.zeros(4, 4))
    assert len(backend.plans) == 1


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_mean_of_all_batches_goes_on_from_step_to_step(accumulate):
    torch.manual_seed(0)
    layers = nn.Linear(6, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2)
    planned = nn.Sequential(*layers)
    eager = copy.deepcopy(planned)
    ours, theirs = (
        torch.optim.SGD(model.parameters(), 0.1) for model in (planned, eager)
    )
    step = mt.train_step(
        planned, functional.mse_loss, ours, accumulate=accumulate, cache=None
    )
    for i in range(6):
        x, y = torch.randn(8, 6), torch.randn(8, 2)
        if i == 3:  # a mode of its own, which does not count
            planned.eval(), eager.eval()
        if i == 4:
            planned.train(), eager.train()
        theirs.zero_grad()
        for a, b in zip(x.chunk(accumulate), y.chunk(accumulate), strict=True):
            (functional.mse_loss(eager(a), b) / accumulate).backward()
        theirs.step()
        step(x, y)
        for key, value in eager.state_dict().items():
            assert torch.equal(value, planned.state_dict()[key]), key
    assert int(planned[1].num_batches_tracked) == 5 * accumulate
    assert planned[1].momentum is None


@pytest.mark.parametrize(
    ("var", "options"),
    [
        (torch.rand(4, 4) + 0.1, {}),
        (torch.rand(4) + 0.1, {"full": True, "reduction": "sum"}),
        (torch.zeros(4, 1), {"eps": 0.5}),
        (0.5, {"full": True}),
    ],
)
def test_variances_are_checked_in_the_step(var, options):
    def trained(ours):
        torch.manual_seed(0)
        model, x = nn.Linear(4, 4), torch.rand(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def loss_fn(out, y):
            return functional.gaussian_nll_loss(out, y, var, **options)

        step = mt.train_step(model, loss_fn, optimizer, cache=None)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = step(x, x) if ours else loss_fn(model(x), x)
            if not ours:
                loss.backward()
                optimizer.step()
            losses.append(loss.detach())
        return [*losses, *model.parameters()]

    assert all(map(torch.equal, trained(ours=True), trained(ours=False)))


def test_a_negative_variance_raises_and_changes_nothing():
    model, x = nn.Linear(4, 4), torch.rand(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss_fn = nn.GaussianNLLLoss()
    step = mt.train_step(model, lambda out, y, v: loss_fn(out, y, v), optimizer)
    step(x, x, torch.ones(4, 4))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="negative"):
        step(x, x, -torch.ones(4, 4))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    with pytest.raises(ValueError, match="incorrect size"):
        step(x, x, torch.ones(3, 4))


def test_a_check_of_ones_own():
    class Checked(nn.Linear):
        def forward(self, x):
            torch._assert_async(torch.isfinite(x).all(), "not finite")
            return super().forward(x)

    model = Checked(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = mt.train_step(model, lambda out: out.sum(), optimizer, cache=None)
    step(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="not finite"):
        step(torch.full((2, 4), float("inf")))


def test_distributions_check_their_arguments_in_the_step():
    class Mixed(nn.Linear):
        """Draws how much of a batch is mixed, and noise of a scale that is given."""

        def forward(self, x, scale):
            share = torch.distributions.Beta(0.5, 0.5).sample()
            mixed = share * x + (1 - share) * x.flip(0)
            noisy = torch.distributions.Normal(
                super().forward(mixed), scale, validate_args=True
            )  # Dynamo may have turned off that they do so by themselves
            return noisy.rsample()

    def trained(ours):
        torch.manual_seed(0)
        model, x = Mixed(4, 4), torch.rand(2, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step = mt.train_step(model, functional.mse_loss, optimizer, cache=None)
        for _ in range(2):
            if ours:
                step((x, torch.ones(4)), x)
                continue
            optimizer.zero_grad()
            functional.mse_loss(model(x, torch.ones(4)), x).backward()
            optimizer.step()
        if ours:
            with pytest.raises(RuntimeError, match="distribution"):
                step((x, -torch.ones(4)), x)
        return list(model.parameters())

    assert all(map(torch.equal, trained(ours=True), trained(ours=False)))
