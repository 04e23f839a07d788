"""PyTorch's ways to save memory beside ours, really run."""

import pytest
import torch
from torch import nn

from mucudnn.errors import UnsupportedError
from mucudnn.torch import comparison
from mucudnn.torch.comparison import EAGER, compare_step

pytestmark = pytest.mark.torch


def case(device=None):
    with torch.device(device or "cpu"):
        layers = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)]
        model = nn.Sequential(*layers, nn.Linear(32, 5))
        batch = torch.randn(256, 32), torch.zeros(256, dtype=torch.long)
    optimizer = torch.optim.Adam(model.parameters())
    return model, nn.functional.cross_entropy, batch, optimizer


def test_every_way_is_beside_ours(monkeypatch):
    def refuses(*_):
        raise ValueError("not this model\nand more")

    ways = {k: v for k, v in comparison._WAYS.items() if "compile" not in k}
    monkeypatch.setattr(comparison, "_WAYS", {**ways, "refuses": refuses})
    model, *others = case()
    before = [p.clone() for p in model.parameters()]
    found = {way.way: way for way in compare_step(model, *others)}
    assert all(map(torch.equal, before, model.parameters()))
    assert not others[-1].state
    assert found.pop("refuses").error == "ValueError: not this model"
    eager = found[EAGER]
    assert eager.slowdown
    for name, way in found.items():
        assert way.slowdown > 0 < way.ours_slowdown
        assert way.peak_bytes <= eager.peak_bytes
        assert way.ours_bytes <= way.peak_bytes or name == EAGER
    least = 4 * sum(p.numel() for p in model.parameters()) * 4  # state and gradients
    assert eager.peak_bytes > least + 256 * 32 * 4 * 4


def test_a_model_without_data_is_refused():
    with pytest.raises(UnsupportedError, match="has no data"):
        compare_step(*case("meta"))
