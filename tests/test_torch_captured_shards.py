"""Steps of sharded models, captured without the other ranks."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch import nn  # noqa: E402

from mucudnn.torch.capture.fake_tensors import DatalessStep  # noqa: E402
from mucudnn.torch.capture.step import capture_step  # noqa: E402
from mucudnn.torch.capture.step_tensors import StepParts, StepSettings  # noqa: E402
from mucudnn.torch.distributed.sharding import (  # noqa: E402
    Part,
    Sharding,
    Unit,
    is_collective,
)
from mucudnn.torch.plan_program import LoweredStep  # noqa: E402

pytestmark = pytest.mark.torch

RANKS, WIDTH, LAYERS = 4, 512, 6


def test_parameters_are_gathered_layer_by_layer():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, False) for _ in range(LAYERS)))
        x = torch.empty(8, WIDTH)
        units, parts = [], {}
        for number, layer in enumerate(model):
            name = f"model.{number}.weight"
            units.append(Unit((name,)))
            parts[name] = Part((WIDTH, WIDTH), WIDTH // RANKS, torch.float32)
            layer.weight = nn.Parameter(torch.empty(WIDTH // RANKS, WIDTH))
    step = DatalessStep.of(
        *(model, lambda y: y.square().mean(), (x,)),
        torch.optim.SGD(model.parameters(), 0.1),
    )
    sharding = Sharding("fsdp", "0", RANKS, tuple(units), parts)
    captured = capture_step(
        *(step.model, step.loss_fn, step.optimizer, step.example), sharding=sharding
    )
    parts_of_step = StepParts.of(
        step.model, step.optimizer, step.loss_fn, StepSettings()
    )
    graph = LoweredStep.of_captured(captured, parts_of_step).lowered.graph
    kinds = [
        "gather" if is_collective(node.op) else "product"
        for node in graph.nodes
        if node.phase.value == "forward"
        and (is_collective(node.op) or node.traits.expensive)
    ]
    assert kinds == ["gather", "product"] * LAYERS
