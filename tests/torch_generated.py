"""Training programs put together by chance, whose state changes between steps.

    python -m tests.torch_generated --programs 2000 --seed 0 --jobs 2

A `Recipe` says in plain words what a program is: blocks of a model, a loss, an
optimizer, a schedule, options of `train_step` and what changes before which step. It is
drawn by any function that picks one of several options: Hypothesis's or a seeded
generator's. What eager mode gives is what planned steps have to give.
"""

import argparse
import collections
import functools
import random
import re
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn, optim
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.optim import lr_scheduler

from mucudnn.errors import PlanningError
from tests.torch_own_updates import CountingInAttribute, OfValues
from tests.torch_programs import (
    HAS_FALLBACK,
    Program,
    Report,
    Training,
    built,
    compare,
    free_costs,
    new_step,
)

WIDTH = 8
Pick = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Recipe:
    """A program in words.

    Attributes:
        inputs: Kind of the model's input: "vectors", "images" or "words".
        blocks: What the model is made of, by names in `BLOCKS`.
        loss: A name in `LOSSES`.
        optimizer: A name in `OPTIMIZERS`.
        schedule: A name in `SCHEDULES`.
        changes: Steps and what changes before each of them, by names in `CHANGES`.
        budget: Share of what lies between the least budget and the peak without one;
            None for no budget.
        accumulate: As `train_step` has it.
        clip: "", "clip_norm" or "clip_value".
        falls_back: Whether steps that cannot be captured may run in eager mode.
        steps: How many.
    """

    inputs: str
    blocks: tuple[str, ...]
    loss: str = "entropy"
    optimizer: str = "sgd"
    schedule: str = "none"
    changes: tuple[tuple[int, str], ...] = ()
    budget: float | None = None
    accumulate: int = 1
    clip: str = ""
    falls_back: bool = False
    steps: int = 4


def recipe_of(pick: Pick) -> Recipe:
    """Return a recipe; of all options the first is the simplest."""
    inputs = pick(["vectors", "images", "words"])
    options = [name for name, (kinds, _) in BLOCKS.items() if inputs in kinds]
    steps = pick([3, 4, 5])
    budget = pick([None, None, 0.0, 0.3, 0.8])
    return Recipe(
        inputs,
        tuple(pick(options) for _ in range(pick([1, 2, 3, 4]))),
        pick([*LOSSES, "entropy", "module", "object", "partial"]),
        pick(list(OPTIMIZERS)),
        pick(list(SCHEDULES)),
        tuple(
            (pick(range(1, steps)), pick(list(CHANGES)))
            for _ in range(pick([0, 1, 2, 3]))
        ),
        budget,
        pick([1, 1, 2]),
        pick(["", "", "clip_norm", "clip_value"]),
        pick([False, True]),
        steps,
    )


# --- what a model is made of


class Reader(nn.Module):
    """A module that multiplies by a factor, which Python keeps somewhere."""

    holder: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.change(1.0)

    def change(self, factor: float) -> None:
        raise NotImplementedError

    def factor(self) -> Any:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor()


class OfAttribute(Reader):
    def change(self, factor):
        self.scale = factor

    def factor(self):
        return self.scale


class OfPrivateAttribute(Reader):
    def change(self, factor):
        self._scale = factor

    def factor(self):
        return self._scale


class OfAttributeThatAppears(Reader):
    def change(self, factor):
        if factor != 1.0:
            self.scale = factor

    def factor(self):
        return getattr(self, "scale", 1.0)


class OfList(Reader):
    def __init__(self):
        self.scales = [1.0]
        super().__init__()

    def change(self, factor):
        self.scales[0] = factor

    def factor(self):
        return self.scales[0]


class OfNestedObject(Reader):
    def __init__(self):
        self.config = {"scales": types.SimpleNamespace(now=1.0)}
        super().__init__()

    def change(self, factor):
        self.config["scales"].now = factor

    def factor(self):
        return self.config["scales"].now


class OfClosure(Reader):
    def change(self, factor):
        self.function = lambda: factor

    def factor(self):
        return self.function()


class OfSharedCell(Reader):
    def __init__(self):
        now = 1.0

        def change(factor):
            nonlocal now
            now = factor

        self.setter, self.getter = change, lambda: now
        super().__init__()

    def change(self, factor):
        self.setter(factor)

    def factor(self):
        return self.getter()


SCALES = {"now": 1.0}


class OfGlobal(Reader):
    def change(self, factor):
        SCALES["now"] = factor

    def factor(self):
        return SCALES["now"]


class OfClass(Reader):
    def change(self, factor):
        OfClass.scale = factor

    def factor(self):
        return OfClass.scale


class OfProperty(OfPrivateAttribute):
    @property
    def scale(self):
        return self._scale

    def factor(self):
        return self.scale


class OfPartial(Reader):
    def change(self, factor):
        self.function = functools.partial(max, factor)

    def factor(self):
        return self.function(0.0)


class OfPlainTensor(Reader):
    def change(self, factor):
        self.held = [torch.tensor(factor)]

    def factor(self):
        return self.held[0]


class OfTensorInPlace(Reader):
    def __init__(self):
        nn.Module.__init__(self)
        self.held = [torch.tensor(1.0)]

    def change(self, factor):
        self.held[0].fill_(factor)

    def factor(self):
        return self.held[0]


class OfTensorsNumber(OfTensorInPlace):
    def factor(self):
        return self.held[0].item()


class OfBuffer(Reader):
    def __init__(self):
        nn.Module.__init__(self)
        self.register_buffer("scale", torch.ones(()))

    def change(self, factor):
        self.scale.fill_(factor)

    def factor(self):
        return self.scale


class Averaging(nn.Module):
    """Subtracts a running mean, a buffer that it updates."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
        return x - self.mean


class Counting(nn.Module):
    """Counts its calls, and doubles from the third on."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, x):
        self.count += 1
        return x * 2 if self.count > 2 else x


class CountingInList(Counting):
    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, x):
        self.calls.append(0)
        return x * (1.0 + 0.1 * len(self.calls))


class Drawing(nn.Module):
    """Scales by a number of Python's own generator."""

    def forward(self, x):
        return x * (0.5 + random.random())


class Skipping(nn.Module):
    """Skips its layer or not, as a flag says."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.active = True

    def forward(self, x):
        return self.layer(x) if self.active else x


class Residual(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return x + self.layers(x)


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).tanh())


class Recurrent(nn.Module):
    """Of a width whose sigmoids round alike in any memory."""

    def __init__(self, kind):
        super().__init__()
        self.cell = kind(WIDTH, 32, batch_first=True)
        self.last = nn.Linear(32, WIDTH)

    def forward(self, x):
        return self.last(self.cell(x)[0])


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.last = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.causal = False

    def forward(self, x):
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return x + self.last(found.squeeze(1))


EVERY = ("vectors", "images", "words")
ROWS = ("vectors", "words")
BLOCKS: dict[str, tuple[tuple[str, ...], Callable[[], nn.Module]]] = {
    "linear": (ROWS, lambda: nn.Linear(WIDTH, WIDTH)),
    "convolution": (("images",), lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1)),
    "relu": (EVERY, nn.ReLU),
    "relu_in_place": (EVERY, lambda: Residual(nn.Tanh(), nn.ReLU(inplace=True))),
    "tanh": (EVERY, nn.Tanh),
    "gelu": (EVERY, nn.GELU),
    "dropout": (EVERY, lambda: nn.Dropout(0.3)),
    "attribute": (EVERY, OfAttribute),
    "private_attribute": (EVERY, OfPrivateAttribute),
    "attribute_that_appears": (EVERY, OfAttributeThatAppears),
    "list": (EVERY, OfList),
    "nested_object": (EVERY, OfNestedObject),
    "closure": (EVERY, OfClosure),
    "shared_cell": (EVERY, OfSharedCell),
    "global": (EVERY, OfGlobal),
    "class": (EVERY, OfClass),
    "property": (EVERY, OfProperty),
    "partial": (EVERY, OfPartial),
    "plain_tensor": (EVERY, OfPlainTensor),
    "tensor_in_place": (EVERY, OfTensorInPlace),
    "tensors_number": (EVERY, OfTensorsNumber),
    "buffer": (EVERY, OfBuffer),
    "averaging": (EVERY, Averaging),
    "counting": (EVERY, Counting),
    "counting_in_a_list": (EVERY, CountingInList),
    "drawing": (EVERY, Drawing),
    "layer_norm": (ROWS, lambda: nn.LayerNorm(WIDTH)),
    "batch_norm": (("vectors",), lambda: nn.BatchNorm1d(WIDTH)),
    "batch_norm_2d": (("images",), lambda: nn.BatchNorm2d(WIDTH)),
    "counting_norm": (("images",), lambda: nn.BatchNorm2d(WIDTH, momentum=None)),
    "group_norm": (("images",), lambda: nn.GroupNorm(2, WIDTH)),
    "pool": (("images",), lambda: nn.MaxPool2d(3, 1, 1)),
    "depthwise": (
        ("images",),
        lambda: nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH),
    ),
    "residual": (ROWS, lambda: Residual(nn.Linear(WIDTH, WIDTH), nn.GELU())),
    "residual_convolution": (
        ("images",),
        lambda: Residual(nn.Conv2d(WIDTH, WIDTH, 1), nn.BatchNorm2d(WIDTH)),
    ),
    "skipping": (ROWS, lambda: Skipping(nn.Linear(WIDTH, WIDTH))),
    "tied": (ROWS, Tied),
    "weight_norm": (
        ROWS,
        lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    ),
    "spectral_norm": (
        ROWS,
        lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    ),
    "gru": (("words",), lambda: Recurrent(nn.GRU)),
    "lstm": (("words",), lambda: Recurrent(nn.LSTM)),
    "attention": (("words",), Attending),
}


class Network(nn.Module):
    """Blocks between a first layer and a last one."""

    def __init__(self, inputs: str, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.inputs = inputs
        self.first: nn.Module = {
            "vectors": lambda: nn.Linear(6, WIDTH),
            "images": lambda: nn.Conv2d(3, WIDTH, 3, padding=1),
            "words": lambda: nn.Embedding(10, WIDTH),
        }[inputs]()
        self.blocks = nn.ModuleList(blocks)
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        if self.inputs == "images":
            x = x.mean((2, 3))
        return self.last(x.mean(1) if self.inputs == "words" else x)


def batch_of(inputs: str) -> tuple[torch.Tensor, torch.Tensor]:
    x = {
        "vectors": lambda: torch.randn(8, 6),
        "images": lambda: torch.randn(8, 3, 5, 5),
        "words": lambda: torch.randint(0, 10, (8, 4)),
    }[inputs]()
    return x, torch.randint(0, 4, (8,))


class Smoothed:
    """A loss with a number and a list of them."""

    def __init__(self):
        self.smoothing, self.weights = 0.1, [1.0]

    def __call__(self, out, y):
        loss = functional.cross_entropy(out, y, label_smoothing=self.smoothing)
        return loss * self.weights[0]


class Remembering(Smoothed):
    """Counts its calls."""

    calls = 0

    def __call__(self, out, y):
        self.calls += 1
        return super().__call__(out, y) / self.calls


def by_partial() -> Callable[..., Any]:
    return functools.partial(functional.cross_entropy, label_smoothing=0.1)


LOSSES: dict[str, Callable[[], Any]] = {
    "entropy": lambda: functional.cross_entropy,
    "module": lambda: nn.CrossEntropyLoss(torch.rand(4) + 0.5),
    "object": Smoothed,
    "partial": by_partial,
    "counting": Remembering,
}

OPTIMIZERS: dict[str, Callable[[list[Any]], Any]] = {
    "sgd": lambda p: optim.SGD(p, 0.05),
    "momentum": lambda p: optim.SGD(p, 0.05, 0.9),
    "nesterov": lambda p: optim.SGD(p, 0.05, 0.9, nesterov=True, weight_decay=0.1),
    "dampened": lambda p: optim.SGD(p, 0.05, 0.9, dampening=0.5),
    "adam": lambda p: optim.Adam(p, 0.01),
    "adamw": lambda p: optim.AdamW(p, 0.01, amsgrad=True),
    "rmsprop": lambda p: optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: optim.Adagrad(p, 0.01, lr_decay=0.1),
    "adadelta": lambda p: optim.Adadelta(p, weight_decay=0.1),
    "adamax": lambda p: optim.Adamax(p, 0.01),
    "nadam": lambda p: optim.NAdam(p, 0.01),
    "radam": lambda p: optim.RAdam(p, 0.01),
    "asgd": lambda p: optim.ASGD(p, 0.01, t0=2),
    "rprop": lambda p: optim.Rprop(p, 0.01),
    "muon": lambda p: optim.Muon([one for one in p if one.ndim == 2], 0.01),
    "adafactor": lambda p: optim.Adafactor(p, 0.01),
    "by_values": OfValues,
    "counting": CountingInAttribute,
    "two_groups": lambda p: optim.SGD(
        [{"params": p[:1], "lr": 0.01}, {"params": p[1:]}], 0.05, 0.9
    ),
}

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "none": lambda o: None,
    "steps": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.7),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "function": lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (1 + n)),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(
        o, 0.05, total_steps=8, cycle_momentum="momentum" in o.defaults
    ),
}


# --- what changes


@dataclass
class World:
    """A training and what its changes remember."""

    training: Training
    handles: list[Any]
    factors: list[float]

    @property
    def network(self) -> Any:
        return self.training.model

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.training.optimizer.param_groups

    def find(self, *kinds: type) -> list[Any]:
        return [m for m in self.network.modules() if isinstance(m, kinds)]

    def next_factor(self) -> float:
        self.factors[0] *= 0.5
        return self.factors[0]


CHANGES: dict[str, Callable[[World], Any]] = {}


def change(make: Callable[[World], Any]) -> Callable[[World], Any]:
    CHANGES[make.__name__] = make
    return make


@change
def nothing(world):
    pass


@change
def readers(world):
    for reader in world.find(Reader):
        reader.change(world.next_factor())


@change
def last_reader(world):
    for reader in world.find(Reader)[-1:]:
        reader.change(world.next_factor())


@change
def same_value_again(world):
    for reader in world.find(OfAttribute):
        reader.scale = float(str(reader.scale))


@change
def unread_attribute(world):
    world.network._for_a_log = world.next_factor()


@change
def skips(world):
    for block in world.find(Skipping):
        block.active = not block.active


@change
def causal(world):
    for block in world.find(Attending):
        block.causal = not block.causal


@change
def dropout(world):
    for layer in world.find(nn.Dropout):
        layer.p = 0.7


@change
def norms(world):
    for norm in world.find(nn.BatchNorm1d, nn.BatchNorm2d):
        norm.momentum = 0.5 if norm.momentum is None else None
    for norm in world.find(nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm):
        norm.eps = 0.1


@change
def norms_to_eval(world):
    for norm in world.find(nn.BatchNorm1d, nn.BatchNorm2d):
        norm.eval()


@change
def norms_without_statistics(world):
    for norm in world.find(nn.BatchNorm1d, nn.BatchNorm2d)[:1]:
        norm.running_mean = norm.running_var = None
        norm.track_running_stats = False


@change
def evaluating(world):
    world.network.eval()


@change
def training_again(world):
    world.network.train()


@change
def loss_changes(world):
    loss = world.training.loss_fn
    if isinstance(loss, Smoothed):
        loss.smoothing, loss.weights[0] = 0.3, world.next_factor()
    elif isinstance(loss, functools.partial):
        loss.keywords["label_smoothing"] = 0.3
    elif isinstance(loss, nn.CrossEntropyLoss):
        loss.label_smoothing = 0.2
        loss.weight = torch.ones(4)


@change
def forward_hook(world):
    factor = world.factors

    def scale(module, inputs, out):
        return out * (1.0 + factor[0])

    world.handles.append(world.network.first.register_forward_hook(scale))


@change
def forward_pre_hook(world):
    hook = lambda module, inputs: (inputs[0] * 0.5,)  # noqa: E731
    world.handles.append(world.network.last.register_forward_pre_hook(hook))


@change
def backward_hook(world):
    def scale(module, inputs, outputs):
        return tuple(None if g is None else g * 0.5 for g in inputs)

    world.handles.append(world.network.last.register_full_backward_hook(scale))


@change
def parameter_hook(world):
    weight = world.network.last.weight
    if weight.requires_grad:
        world.handles.append(weight.register_hook(lambda g: g * 0.5))


@change
def post_accumulate_hook(world):
    def scale(parameter):
        parameter.grad.mul_(0.5)

    weight = world.network.last.weight
    if weight.requires_grad and weight.is_leaf:
        world.handles.append(weight.register_post_accumulate_grad_hook(scale))


@change
def optimizer_hook(world):
    def clamp(optimizer, arguments, keywords):
        with torch.no_grad():
            world.network.last.weight.clamp_(-0.2, 0.2)

    optimizer = world.training.optimizer
    world.handles.append(optimizer.register_step_post_hook(clamp))


@change
def hooks_read_another_number(world):
    world.next_factor()


@change
def hooks_removed(world):
    while world.handles:
        world.handles.pop().remove()


@change
def first_layer_frozen(world):
    world.network.first.requires_grad_(False)


@change
def everything_thawed(world):
    world.network.requires_grad_(True)


@change
def weights_clamped(world):
    with torch.no_grad():
        for parameter in world.network.parameters():
            parameter.clamp_(-0.2, 0.2)


@change
def weights_in_other_memory(world):
    for parameter in world.network.parameters():
        parameter.data = parameter.data.clone()


@change
def weight_transposed_in_memory(world):
    weight = world.network.last.weight
    weight.data = weight.data.t().contiguous().t()


@change
def channels_last(world):
    if world.network.inputs == "images":
        world.network.to(memory_format=torch.channels_last)


@change
def weights_share_memory(world):
    alike = [
        p
        for p in world.network.parameters()
        if p.shape == world.network.first.weight.shape
    ]
    alike[-1].data = alike[0].data


@change
def state_loaded(world):
    state = world.network.state_dict()
    world.network.load_state_dict(
        {k: v * 0.5 if v.is_floating_point() else v for k, v in state.items()}
    )


@change
def state_assigned(world):
    state = {k: v.clone() for k, v in world.network.state_dict().items()}
    world.network.load_state_dict(state, assign=True)


@change
def block_replaced(world):
    if len(world.network.blocks):
        world.network.blocks[-1] = nn.Tanh()


@change
def block_added(world):
    scale = OfList()
    world.network.blocks.append(scale)
    scale.change(world.next_factor())


@change
def block_removed(world):
    if len(world.network.blocks):
        del world.network.blocks[0]


@change
def layer_with_a_group_added(world):
    if world.network.inputs != "images":
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
        world.network.blocks.append(layer)
        world.training.optimizer.add_param_group({"params": [layer.weight]})


@change
def parametrization_added(world):
    if not parametrize.is_parametrized(world.network.last, "weight"):
        parametrize.register_parametrization(world.network.last, "weight", nn.Tanh())


@change
def forward_replaced(world):
    if len(world.network.blocks):
        world.network.blocks[0].forward = torch.tanh


@change
def rate(world):
    for group in world.groups:
        group["lr"] = group["lr"] * 0.5


@change
def weight_decay(world):
    for group in world.groups:
        if "weight_decay" in group:
            group["weight_decay"] = 0.2


@change
def momentum(world):
    for group in world.groups:
        if "momentum" in group:
            group["momentum"] = 0.3
        if "betas" in group:
            group["betas"] = (0.5, 0.7)


@change
def state_cleared(world):
    world.training.optimizer.state.clear()


@change
def state_of_the_optimizer_loaded(world):
    optimizer = world.training.optimizer
    optimizer.load_state_dict(optimizer.state_dict())


@change
def gradients_are_there(world):
    for parameter in world.network.parameters():
        parameter.grad = torch.ones_like(parameter)


@change
def smaller_batches(world):
    world.training.batches = [(x[:6], y[:6]) for x, y in world.training.batches]


@change
def strided_batches(world):
    world.training.batches = [
        (x.transpose(0, -1).contiguous().transpose(0, -1), y)
        for x, y in world.training.batches
    ]


@change
def one_tensor_twice(world):
    world.training.batches = world.training.batches[:1]


@change
def seeded(world):
    torch.manual_seed(5)


@change
def deterministic(world):
    torch.use_deterministic_algorithms(True)


@change
def autocast(world):
    kind = torch.bfloat16
    world.training.around = lambda number: torch.autocast("cpu", kind)


@change
def autocast_off(world):
    world.training.around = lambda number: torch.autocast("cpu", enabled=False)


@change
def anomaly_detection(world):
    torch.set_anomaly_enabled(True)


def training_of(recipe: Recipe) -> Training:
    """Return the training that a recipe describes."""
    SCALES["now"], OfClass.scale = 1.0, 1.0
    blocks = [BLOCKS[name][1]() for name in recipe.blocks]
    network = Network(recipe.inputs, blocks)
    optimizer = OPTIMIZERS[recipe.optimizer](list(network.parameters()))
    scheduler = SCHEDULES[recipe.schedule](optimizer)
    options: dict[str, Any] = {}
    if recipe.accumulate > 1:
        options["accumulate"] = recipe.accumulate
    if recipe.clip:
        options[recipe.clip] = 0.1
    training = Training(
        network,
        optimizer,
        [batch_of(recipe.inputs) for _ in range(2)],
        LOSSES[recipe.loss](),
        options=options,
        steps=recipe.steps,
    )
    world = World(training, [], [1.0])

    def before(number: int) -> None:
        for when, name in recipe.changes:
            if when == number:
                CHANGES[name](world)

    def after(number: int, loss: torch.Tensor) -> None:
        if scheduler is not None and len(scheduler.base_lrs) == len(world.groups):
            scheduler.step()

    training.before, training.after = before, after
    return training


def compared(recipe: Recipe) -> Report:
    """Return how planned steps of a recipe compare with eager mode."""
    program = Program(functools.partial(training_of, recipe))
    options: dict[str, Any] = {}
    if HAS_FALLBACK and recipe.falls_back:
        options["fallback"] = "eager"
    with free_costs():
        budget = budget_of(program, recipe)
        if budget is not None:
            options["budget"] = budget
        return compare(program, **options)


def budget_of(program: Program, recipe: Recipe) -> int | None:
    """Return the budget of a recipe in bytes; None where nothing can be planned."""
    if recipe.budget is None:
        return None
    with built(program, 0) as training:
        try:
            most = new_step(training, {}).prepare(*training.batches[0]).peak_bytes
            new_step(training, {"budget": 1024}).prepare(*training.batches[0])
        except PlanningError as e:
            least = e.least_bytes
        except Exception:  # the comparison itself finds out what is wrong
            return None
        else:
            return None
    return None if least is None else int(least + recipe.budget * max(0, most - least))


# --- the command line


def kind_of(error: Exception) -> str:
    """Return an error's type and first words, without names and numbers."""
    words = re.sub(r"'[^']*'|[\d.]+", "…", str(error)).split()
    return f"{type(error).__name__}: {' '.join(words[:8])}"


def figures_of(seed: int) -> dict[str, Any]:
    """Return what the program of a seed gave, in plain values."""
    torch.set_num_threads(1)
    recipe = recipe_of(random.Random(seed).choice)
    try:
        report = compared(recipe)
    except Exception as e:
        return {"seed": seed, "recipe": recipe, "broken": repr(e)}
    return {
        "seed": seed,
        "recipe": recipe,
        "steps": report.steps,
        "plans": report.plan_count(),
        "eager": report.ran_eagerly,
        "refusals": [kind_of(e) for e in report.refusals],
        "differences": report.differences,
    }


_PROGRESS_EVERY = 20
"""Programs between two lines of progress."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.torch_generated")
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args(arguments)
    seeds = range(given.seed, given.seed + given.programs)
    totals: collections.Counter[str] = collections.Counter()
    refusals: collections.Counter[str] = collections.Counter()
    write = sys.stdout.write
    with ProcessPoolExecutor(given.jobs) as pool:
        for found in pool.map(figures_of, seeds, chunksize=4):
            totals["programs"] += 1
            if totals["programs"] % _PROGRESS_EVERY == 0:
                write(f"... {totals['programs']} programs\n")
                sys.stdout.flush()
            if "broken" in found:
                totals["broken"] += 1
                write(f"seed {found['seed']}: {found['broken']}\n  {found['recipe']}\n")
                continue
            totals["steps"] += found["steps"]
            totals["plans"] += found["plans"]
            totals["eager steps"] += found["eager"]
            totals["refusals"] += len(found["refusals"])
            refusals.update(found["refusals"])
            if found["differences"]:
                totals["programs that differ"] += 1
                write(f"seed {found['seed']}: {found['differences'][0][:200]}\n")
                write(f"  {found['recipe']}\n")
    write(", ".join(f"{count} {name}" for name, count in totals.items()) + "\n")
    for kind, count in refusals.most_common():
        write(f"{count:6d} {kind}\n")
    return int(bool(totals["programs that differ"] or totals["broken"]))


if __name__ == "__main__":
    sys.exit(main())
