"""What Dynamo leaves to eager mode is said where plans are looked for."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import mucudnn.torch as mt

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        sizes = torch.tensor([5, 3, 2])
        packed = pack_padded_sequence(x, sizes, batch_first=True)
        return pad_packed_sequence(self.cells(packed)[0], batch_first=True)[0]


class Disabled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    @torch.compiler.disable
    def forward(self, x):
        return self.layer(x)


class Broken(Disabled):
    @torch.compiler.disable
    def between(self, x):
        return x.relu()

    def forward(self, x):
        return self.layer(self.between(self.layer(x)))


def hooked():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    model[0].register_full_backward_hook(lambda *_: None)
    return model


def compiled(model):
    torch._dynamo.reset()
    backend = mt.backend(budget="1MiB", cache=None)
    run = torch.compile(model, backend=backend)
    run(torch.randn(3, 5, 8)).sum().backward()
    return backend


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (hooked, "backwards? hooks"),
        (Packed, "pack_padded_sequence|skipped"),
        (Disabled, "disable"),
    ],
)
def test_a_model_that_runs_without_a_plan_is_told(build, why):
    backend = compiled(build())
    with pytest.warns(UserWarning, match=f"no budget is kept.*({why}).*fullgraph"):
        assert not backend.plans
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backend.peak_bytes == 0  # it is said once
    assert backend.left_eager
    with pytest.warns(UserWarning, match="nothing was planned"):
        assert compiled(build()).peak_bytes == 0


def test_a_model_that_is_planned_is_not():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend = mt.backend(budget="1MiB")
        assert not backend.plans  # nor before the first call
        backend = compiled(nn.Linear(8, 8))
        assert len(backend.plans) == 1
        assert backend.left_eager == ()


def test_what_runs_between_graphs_is_named():
    backend = compiled(Broken())
    assert len(backend.plans) == 2
    (why,) = backend.left_eager
    assert "disable" in why
