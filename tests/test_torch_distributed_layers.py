"""Equal layers under one budget, in one process: what is planned and refused."""

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("needs PyTorch with torch.distributed", allow_module_level=True)

import mucudnn.torch as mt
from bench.torch.peak import real_peak
from mucudnn.errors import PlanningError
from mucudnn.torch.costs.meters import CpuMeter, Links

nn = torch.nn

pytestmark = [
    pytest.mark.torch,
    # Dynamo asks a layer's input for its gradient, and silences what PyTorch says then
    # everywhere but where warnings are errors.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


class Block(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


def blocks(count, wide=256):
    torch._dynamo.reset()
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            Block(nn.Linear(64, wide), nn.GELU(), nn.Linear(wide, 64))
            for _ in range(count)
        )
    )


def trained(model):
    """Gradients, and the real peak of both passes with parameters and gradients.

    The batch and the gradient that comes in are the caller's, made before.
    """
    random = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(512, 64, generator=random) for _ in range(2))
    for _ in range(2):
        model.zero_grad()
        peak = real_peak(lambda: model(x).backward(dy))
    own = sum(p.nbytes for p in model.parameters())
    return [p.grad for p in model.parameters()], peak + own


def test_every_layer_counts_and_a_refusal_names_a_budget_that_works(monkeypatch):
    # Recompute instead: PyTorch's profiler does not see what a copying thread frees.
    monkeypatch.setattr(CpuMeter, "links", lambda meter, step: Links(1.0, 1.0))
    expected, most = trained(blocks(3))
    model = blocks(3)
    mt.compile_layers(model, budget="1KiB", cache=None)
    with pytest.raises(PlanningError, match="3 layers do not fit into 1") as e:
        trained(model)
    model = blocks(3)
    planned = mt.compile_layers(model, budget=e.value.least_bytes, cache=None)
    found, real = trained(model)
    assert all(map(torch.equal, found, expected))
    assert real <= planned.peak_bytes <= e.value.least_bytes < most


def test_one_graph_of_several_layers_is_told_of():
    model = blocks(2)
    planned = mt.backend(budget="64MiB", cache=None)
    for block in model:
        block.compile(backend=planned)
    with pytest.warns(UserWarning, match="mt.compile_layers"):
        trained(model)


def test_layers_of_two_kinds_are_refused():
    model = nn.Sequential(*blocks(2), *blocks(1, wide=128))
    with pytest.raises(ValueError, match="there are 2 kinds"):
        mt.compile_layers(model, budget="1GiB")
    with pytest.raises(ValueError, match="layers is empty"):
        mt.compile_layers([], budget="1GiB")
    with pytest.raises(TypeError, match="layers"):
        mt.compile_layers([1], budget="1GiB")
