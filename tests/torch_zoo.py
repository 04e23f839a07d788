"""Steps of networks, eager and planned, and what each leaves behind."""

from importlib import import_module

import torch
from torch.nn import functional

from bench.torch.vision import timm_model, torchvision_model
from bench.torch.zoo import Case, GPTConfig, build as build_case, gpt, unet
from mucudnn.torch import TrainStep
from mucudnn.torch.costs.measure import measured
from mucudnn.torch.plan_program import PlanOptions
from tests.torch_steps import least_bytes

SMALL = {
    "small gpt": lambda: gpt(4, GPTConfig(layers=1, width=32, heads=2, length=16)),
    "small unet": lambda: unet(2, 16, 4, levels=2),
}


def _images(model, batch, size):
    x, y = torch.randn(batch, 3, size, size), torch.randint(10, (batch,))
    return Case(model, functional.cross_entropy, (x, y))


def _family(name):
    """A module of torchvision's, from whose classes networks of any depth are made."""
    torchvision_model("alexnet", num_classes=2)  # imports torchvision beside any build
    return import_module(f"torchvision.models.{name}")


def _resnet(block):
    family = _family("resnet")
    return family.ResNet(getattr(family, block), [2, 1, 1, 1], num_classes=10)


def _mobilenet_v3():
    family = _family("mobilenetv3")
    blocks = [
        (16, 3, 16, 16, True, "RE", 2),
        (16, 3, 72, 24, False, "RE", 2),
        (24, 3, 88, 24, False, "RE", 1),
        (24, 5, 96, 40, True, "HS", 2),
        (40, 5, 240, 40, True, "HS", 1),
    ]
    found = [family.InvertedResidualConfig(*block, 1, 1.0) for block in blocks]
    return family.MobileNetV3(found, 256, num_classes=10)


def _efficientnet():
    family = _family("efficientnet")
    blocks = [(1, 3, 1, 32, 16, 1), (6, 3, 2, 16, 24, 2), (6, 5, 2, 24, 40, 2)]
    found = [family.MBConvConfig(*block) for block in blocks]
    return family.EfficientNet(found, 0.2, num_classes=10, last_channel=320)


SHORT = {
    "short resnet18": lambda: _images(_resnet("BasicBlock"), 8, 32),
    "short resnet50": lambda: _images(_resnet("Bottleneck"), 4, 32),
    "short densenet121": lambda: _images(
        _family("densenet").DenseNet(32, (2, 3, 2, 2), 64, num_classes=10), 2, 32
    ),
    "short mobilenet_v3_small": lambda: _images(_mobilenet_v3(), 8, 64),
    "short efficientnet_b0": lambda: _images(_efficientnet(), 4, 64),
    "short convnext_atto": lambda: _images(
        timm_model(
            "convnext_atto", num_classes=10, drop_path_rate=0.1, depths=(1, 1, 2, 1)
        ),
        *(4, 64),
    ),
}
"""Every kind of block of the zoo's deep networks, in as few blocks as it takes."""


def build(name) -> Case:
    """A case of the benchmarks', or one with fewer layers; always the same."""
    own = SMALL | SHORT
    if name not in own:
        return build_case(name)
    torch.manual_seed(0)
    return own[name]()


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


def eager(name, optimizer_of, steps, compiled=False):
    """What steps of PyTorch's own come to; with both passes compiled, if asked."""
    case = build(name)
    optimizer = optimizer_of(case.model)

    def loss_of(x, *targets):
        return case.loss_fn(case.model(x), *targets)

    if compiled:
        loss_of = torch.compile(loss_of, fullgraph=True)
    losses = []
    torch.manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(*case.batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return outcome(losses, case, optimizer)


class Steps:
    """Planned steps of one network under several budgets, measured once."""

    def __init__(self, name, optimizer_of, **options):
        self._name, self._optimizer_of = name, optimizer_of
        self._profile, self._options = None, options

    def _costs(self, lowered):
        if self._profile is None:
            self._profile = measured(lowered)
        return self._profile

    def step(self, budget):
        """A step under a budget that is planned; its case and its optimizer."""
        case = build(self._name)
        optimizer = self._optimizer_of(case.model)
        options = PlanOptions(self._costs, **self._options)
        step = TrainStep(case.model, case.loss_fn, optimizer, budget, options)
        step.prepare(*case.batch)
        return step, case, optimizer

    def least_budget(self):
        return least_bytes(self.step, 0)

    def trained(self, budget, steps):
        """What planned steps come to; the step, and a batch."""
        step, case, optimizer = self.step(budget)
        torch.manual_seed(1)
        losses = [step(*case.batch) for _ in range(steps)]
        return outcome(losses, case, optimizer), step, case.batch
