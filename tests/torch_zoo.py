"""Steps of whole networks, eager and planned, and what each leaves behind."""

import torch

from bench.torch.zoo import Case, GPTConfig, build as build_case, gpt, unet
from mucudnn.errors import PlanningError
from mucudnn.torch import TrainStep
from mucudnn.torch.costs.measure import measured
from mucudnn.torch.plan_program import PlanOptions

SMALL = {
    "small gpt": lambda: gpt(4, GPTConfig(layers=1, width=32, heads=2, length=16)),
    "small unet": lambda: unet(2, 16, 4, levels=2),
}


def build(name) -> Case:
    """A case of the benchmarks', or a smaller one; always the same."""
    if name not in SMALL:
        return build_case(name)
    torch.manual_seed(0)
    return SMALL[name]()


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), 1e-3)


def outcome(losses, case, optimizer):
    """All that training has changed, by name."""
    state = optimizer.state_dict()["state"]
    found = {f"loss {i}": loss for i, loss in enumerate(losses)}
    found |= case.model.state_dict()
    found |= {f"{i}.{key}": v for i, of in state.items() for key, v in of.items()}
    return found


def different(found, wanted):
    """Names of what is not the same to the bit."""
    assert found.keys() == wanted.keys()
    return [key for key, value in wanted.items() if not torch.equal(found[key], value)]


def eager(name, optimizer_of, steps):
    """What steps of PyTorch's own come to."""
    case = build(name)
    optimizer = optimizer_of(case.model)
    losses = []
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        x, *targets = case.batch
        loss = case.loss_fn(case.model(x), *targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return outcome(losses, case, optimizer)


class Steps:
    """Planned steps of one network under several budgets, measured once."""

    def __init__(self, name, optimizer_of):
        self._name, self._optimizer_of = name, optimizer_of
        self._profile = None

    def _costs(self, lowered):
        if self._profile is None:
            self._profile = measured(lowered)
        return self._profile

    def step(self, budget):
        """A step under a budget that is planned; its case and its optimizer."""
        case = build(self._name)
        optimizer = self._optimizer_of(case.model)
        step = TrainStep(
            case.model, case.loss_fn, optimizer, budget, PlanOptions(self._costs)
        )
        step.prepare(*case.batch)
        return step, case, optimizer

    def least_budget(self):
        try:
            self.step(0)
        except PlanningError as e:
            return e.least_bytes
        raise AssertionError("a step fits into no bytes at all")

    def trained(self, budget, steps):
        """What planned steps come to; the step, and a batch."""
        step, case, optimizer = self.step(budget)
        torch.manual_seed(1)
        losses = [step(*case.batch) for _ in range(steps)]
        return outcome(losses, case, optimizer), step, case.batch
