"""The graphs that a model falls into where Dynamo breaks it share one budget."""

import random
import re

import pytest
import torch
from torch import nn

import mucudnn.torch as mt
from mucudnn.errors import PlanningError
from mucudnn.torch.compile_backend import GraphSource, SharedBudget
from tests.torch_backends import differing, observed, one_backward
from tests.torch_marks import COMPILED
from tests.torch_steps import real_peak

pytestmark = COMPILED


class Broken(nn.Module):
    """Three graphs: Python looks at values between them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        first, second, third = self.layers
        x = self.drop(torch.relu(first(x)))
        torch._dynamo.graph_break()
        x = self.drop(torch.relu(second(x)))
        torch._dynamo.graph_break()
        return third(x).square().mean()


def broken(budget):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, batch = Broken(), (torch.randn(128, 64),)
    backend = mt.backend(budget=budget, cache=None)
    return model, batch, backend, torch.compile(model, backend=backend)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's own look at it
def test_graphs_of_one_model_share_the_budget():
    model, batch, _, _ = broken(None)
    wanted = observed(model, one_backward, model, batch)
    model, batch, backend, call = broken(None)
    assert not differing(observed(model, one_backward, call, batch), wanted)
    first, second, third = (plan.peak_bytes for plan in backend.plans)
    assert backend.peak_bytes == first + second + third
    words = r"graph \d/0.* share the budget .*breaks at .*budget.py:\d+.*fullgraph"
    said = []
    budget = second
    while True:  # every graph that does not fit names a budget for those so far
        model, batch, backend, call = broken(budget)
        try:
            found = observed(model, one_backward, call, batch)
        except PlanningError as e:
            said.append(str(e))
            budget = e.least_bytes
        else:
            break
    assert 1 <= len(said) <= 3
    assert re.search(words, said[-1], re.S)
    assert budget < first + second + third
    assert not differing(found, wanted)
    assert not differing(observed(model, one_backward, call, batch), wanted)
    assert len(backend.plans) == len({plan.name for plan in backend.plans}) == 3
    assert backend.peak_bytes <= budget
    model.zero_grad()
    resident = sum(t.untyped_storage().nbytes() for t in model.parameters())
    assert real_peak(lambda: one_backward(call, *batch)) + resident <= budget


def test_models_with_a_backend_in_common_keep_the_budget_each_and_say_so():
    torch._dynamo.reset()
    backend = mt.backend(budget="600KiB", cache=None)
    layers = [nn.Linear(256, 256) for _ in range(2)]

    def one(x):
        return layers[0](x).square().mean()

    def other(x):
        return layers[1](x).relu().mean()

    torch.compile(one, backend=backend)(torch.randn(4, 256)).backward()
    with pytest.warns(UserWarning, match=r"several models.*budget of 600.0 KiB"):
        torch.compile(other, backend=backend)(torch.randn(4, 256)).backward()
    assert len(backend.plans) == 2


def part(name, function, ends=None, resumes=False):
    return GraphSource(name, function, ends, resumes)


def test_what_a_budget_is_said_to_be_enough_is_enough():
    """Whatever the graphs need, down to their least."""

    def planned(least, most):
        def plan(budget):
            if budget < least:
                raise PlanningError("too small", least_bytes=least)
            return min(int(budget), most)

        return plan

    draws = random.Random(0)
    for _ in range(300):
        count = draws.randint(2, 6)
        sizes = [draws.randint(1, 1000) for _ in range(count)]
        graphs = [(least, least + draws.randint(0, 3000)) for least in sizes]
        budget, tries = sum(sizes) // 2, 0
        while True:
            shared = SharedBudget(budget)
            try:
                for i, (least, most) in enumerate(graphs):
                    ends = f"line {i}" if i + 1 < count else None
                    source = part(f"graph {i}", f"{i}", ends, i > 0)
                    shared.note(source, shared.plan(source, planned(least, most)))
            except PlanningError as e:
                budget, tries = e.least_bytes, tries + 1
            else:
                break
        assert tries <= count
        assert sum(sizes) <= shared.peak_bytes <= budget
