"""Models under `torch.compile` train within a budget; the loop stays as it is."""

import importlib
import tomllib
from pathlib import Path

import pytest
import torch

import mucudnn.torch as mt
from mucudnn.errors import PlanningError
from tests.torch_backends import WithLoss, check_against_eager
from tests.torch_marks import COMPILED
from tests.torch_steps import build, real_peak

pytestmark = COMPILED


def compiled(name, budget):
    """A model with its loss inside, compiled; its backend; a batch."""
    model, loss_fn, batch = build(name)
    torch._dynamo.reset()
    backend = mt.backend(budget=budget)
    both = WithLoss(model, loss_fn)
    return torch.compile(both, backend=backend, fullgraph=True), backend, batch, model


def step(call, batch, model):
    torch.manual_seed(1)
    model.zero_grad()
    loss = call(*batch)
    loss.backward()
    return loss.item()


def outcome(model):
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return gradients | {name: b.clone() for name, b in model.named_buffers()}


@pytest.mark.usefixtures("short_search")
@pytest.mark.parametrize("name", ["mlp", "cnn", "gpt"])
def test_gradients_and_buffers_are_eager_ones_within_a_budget(name):
    def make():
        model, loss_fn, batch = build(name)
        return WithLoss(model, loss_fn), batch

    whole, least = check_against_eager(make)
    assert least.peak_bytes < whole.peak_bytes
    assert least.recomputed or least.leaving


@pytest.mark.filterwarnings("ignore:saved tensors of")
@pytest.mark.usefixtures("free_copies")
def test_steps_do_not_get_into_each_others_way():
    call, backend, batch, model = compiled("gpt", None)
    loss = step(call, batch, model)
    wanted = outcome(model)
    call, backend, batch, model = compiled("gpt", backend.plans[0].peak_bytes - 100_000)
    assert step(call, batch, model) == loss
    assert backend.plans[0].leaving
    model.zero_grad()
    with torch.no_grad():
        assert not call(*batch).requires_grad
    torch.manual_seed(1)
    first = call(*batch)
    torch.manual_seed(1)
    second = call(*batch)
    for pending in (second, first):
        model.zero_grad()
        pending.backward()
        for key, value in outcome(model).items():
            assert torch.equal(value, wanted[key]), key

    def forward_only():
        for _ in range(50):
            call(*batch)

    model.zero_grad()
    assert real_peak(forward_only) <= real_peak(lambda: call(*batch)) * 2


def test_a_change_between_the_halves_is_refused():
    call, _, batch, model = compiled("mlp", None)
    loss = call(*batch)
    with torch.no_grad():
        model[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_model_whose_loss_is_outside():
    model, loss_fn, (x, y) = build("cnn")
    loss_fn(model(x), y).backward()
    wanted = outcome(model)
    model, loss_fn, (x, y) = build("cnn")
    call = torch.compile(model, backend=mt.backend(budget="2MiB"))
    loss_fn(call(x), y).backward()
    for key, value in outcome(model).items():
        assert torch.equal(value, wanted[key]), key


def test_options_of_the_name():
    project = Path(__file__).parent.parent / "pyproject.toml"
    points = tomllib.loads(project.read_text())["project"]["entry-points"]
    home, _, name = points["torch_dynamo_backends"]["mucudnn"].partition(":")
    compile_graph = getattr(importlib.import_module(home), name)
    if "mucudnn" not in torch._dynamo.list_backends():  # this is not installed
        torch._dynamo.register_backend(compile_graph, "mucudnn")
    model, loss_fn, batch = build("mlp")
    both = WithLoss(model, loss_fn)
    call = torch.compile(both, backend="mucudnn", options={"budget": "2MiB"})
    step(call, batch, model)
    for options, error, words in (
        ({"budget": 1024}, PlanningError, "least budget"),
        (
            {"bugdet": 1},
            ValueError,
            "unknown option 'bugdet'; choose one of: 'budget',",
        ),
        ({"budget": "much"}, ValueError, "not a size"),
        ({"budget": []}, TypeError, r"budget must be bytes, .*, got \[\]"),
    ):
        torch._dynamo.reset()
        call = torch.compile(both, backend="mucudnn", options=options)
        for _ in range(2):
            with pytest.raises(error, match=words):
                call(*batch)
    with pytest.raises(ValueError, match="not a size"):
        mt.backend(budget="much")
