"""What leaves in one half of a program is not taken for what leaves in the other."""

from functools import partial

import pytest
import torch
from torch import nn

from mucudnn.ir.devices import get_device
from mucudnn.torch import CompileBackend
from mucudnn.torch.costs.measure import estimated
from mucudnn.torch.plan_program import PlanOptions
from tests.torch_steps import least_bytes

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*profiling.*"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    # PyTorch's Dynamo hides it, unless warnings are errors.
    pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning"),
]


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


def gradients(budget=None):
    """Gradients within a budget, planned by published figures; eager ones without."""
    model = Laplacian()
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    torch._dynamo.reset()
    backend = (
        CompileBackend(
            budget, PlanOptions(partial(estimated, device=get_device("h200")))
        )
        if budget
        else None
    )
    run = torch.compile(model, backend=backend) if backend else model
    second, first = run(x)
    (second.square().mean() + first.square().mean()).backward()
    return [p.grad for p in model.parameters()]


def test_copies_of_both_halves_have_names_of_their_own():
    wanted = gradients()
    found = gradients(least_bytes(gradients, 1))
    assert all(map(torch.equal, wanted, found))
