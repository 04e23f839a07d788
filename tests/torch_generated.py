"""Training programs put together by chance, whose state changes between steps.

A `Recipe` says in plain words what a program is: blocks of a model, a loss, an
optimizer, a schedule, options of `train_step` and what changes before which step. What
eager mode gives is what planned steps have to give.
"""

import functools
import random
import types
from collections.abc import Callable, Iterable, Sequence
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

    def change(self, factor: float) -> None:
        raise NotImplementedError

    def factor(self) -> Any:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor()


def reader(
    factor: Callable[[Any], Any],
    change: Callable[[Any, float], Any],
    make: Callable[[], dict[str, Any]] = dict,
    **others: Any,
) -> type[Reader]:
    """Return a class of readers.

    Args:
        factor: Returns the factor that a reader holds.
        change: Gives a reader another factor.
        make: Gives the attributes that a reader has from the beginning.
        others: Attributes of the class.
    """

    class Holding(Reader):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            for name, value in make().items():
                setattr(self, name, value)
            self.change(1.0)

    for name, value in {"factor": factor, "change": change, **others}.items():
        setattr(Holding, name, value)
    return Holding


def in_cell() -> dict[str, Any]:
    """Return two functions that share a free variable: one sets it, one returns it."""
    now = 1.0

    def setter(factor):
        nonlocal now
        now = factor

    return {"setter": setter, "getter": lambda: now}


class Buffered(Reader):
    def __init__(self):
        nn.Module.__init__(self)
        self.register_buffer("scale", torch.ones(()))

    def change(self, factor):
        self.scale.fill_(factor)

    def factor(self):
        return self.scale


SCALES = {"now": 1.0}


def sets(name: str) -> Callable[[Any, Any], None]:
    return lambda s, factor: setattr(s, name, factor)


def in_tensor() -> dict[str, Any]:
    return {"held": [torch.tensor(1.0)]}


OfAttribute = reader(lambda s: s.scale, sets("scale"))
OfList = reader(
    lambda s: s.scales[0],
    lambda s, factor: s.scales.__setitem__(0, factor),
    lambda: {"scales": [1.0]},
)
OfClass = reader(
    lambda s: s.scale, lambda s, factor: setattr(type(s), "scale", factor), scale=1.0
)
READERS: dict[str, type[Reader]] = {
    "attribute": OfAttribute,
    "private_attribute": reader(lambda s: s._scale, sets("_scale")),
    "attribute_that_appears": reader(
        lambda s: getattr(s, "scale", 1.0),
        lambda s, factor: factor != 1.0 and setattr(s, "scale", factor),
    ),
    "list": OfList,
    "nested_object": reader(
        lambda s: s.config["scales"].now,
        lambda s, factor: setattr(s.config["scales"], "now", factor),
        lambda: {"config": {"scales": types.SimpleNamespace(now=1.0)}},
    ),
    "closure": reader(
        lambda s: s.function(), lambda s, factor: setattr(s, "function", lambda: factor)
    ),
    "shared_cell": reader(
        lambda s: s.getter(), lambda s, factor: s.setter(factor), in_cell
    ),
    "global": reader(
        lambda s: SCALES["now"], lambda s, factor: SCALES.update(now=factor)
    ),
    "class": OfClass,
    "property": reader(
        lambda s: s.scale, sets("_scale"), scale=property(lambda s: s._scale)
    ),
    "partial": reader(
        lambda s: s.function(0.0),
        lambda s, factor: setattr(s, "function", functools.partial(max, factor)),
    ),
    "plain_tensor": reader(
        lambda s: s.held[0],
        lambda s, factor: setattr(s, "held", [torch.tensor(factor)]),
    ),
    "tensor_in_place": reader(
        lambda s: s.held[0], lambda s, factor: s.held[0].fill_(factor), in_tensor
    ),
    "tensors_number": reader(
        lambda s: s.held[0].item(), lambda s, factor: s.held[0].fill_(factor), in_tensor
    ),
    "buffer": Buffered,
}


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
    **{name: (EVERY, kind) for name, kind in READERS.items()},
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


Change = Callable[[World], Any]


def on_all(
    *kinds: type, act: Callable[[Any], Any] | None = None, **values: Any
) -> Change:
    """Return a change of all modules of some kinds: a call of each, or attributes."""

    def change(world: World) -> None:
        for module in world.find(*kinds):
            if act is not None:
                act(module)
            for name, value in values.items():
                setattr(module, name, value)

    return change


def on_groups(**values: Any) -> Change:
    """Return a change of the optimizer's groups that have these entries."""

    def change(world: World) -> None:
        for group in world.groups:
            group.update({k: v for k, v in values.items() if k in group})

    return change


def toggles(name: str) -> Callable[[Any], None]:
    return lambda module: setattr(module, name, not getattr(module, name))


def on_network(act: Callable[[Any], Any]) -> Change:
    return lambda world: act(world.network)


def hooked(register: Callable[[World], Any]) -> Change:
    """Return a change that registers a hook, whose handle the world keeps."""
    return lambda world: world.handles.append(register(world))


def norms(world: World) -> None:
    for norm in world.find(nn.BatchNorm1d, nn.BatchNorm2d):
        norm.momentum = 0.5 if norm.momentum is None else None
    for norm in world.find(nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm):
        norm.eps = 0.1


def norms_without_statistics(world: World) -> None:
    for norm in world.find(nn.BatchNorm1d, nn.BatchNorm2d)[:1]:
        norm.running_mean = norm.running_var = None
        norm.track_running_stats = False


def loss_changes(world: World) -> None:
    loss = world.training.loss_fn
    if isinstance(loss, Smoothed):
        loss.smoothing, loss.weights[0] = 0.3, world.next_factor()
    elif isinstance(loss, functools.partial):
        loss.keywords["label_smoothing"] = 0.3
    elif isinstance(loss, nn.CrossEntropyLoss):
        loss.label_smoothing = 0.2
        loss.weight = torch.ones(4)


def forward_hook(world: World) -> None:
    factor = world.factors

    def scale(module, inputs, out):
        return out * (1.0 + factor[0])

    world.handles.append(world.network.first.register_forward_hook(scale))


def parameter_hook(world: World) -> None:
    weight = world.network.last.weight
    if weight.requires_grad:
        world.handles.append(weight.register_hook(lambda g: g * 0.5))


def post_accumulate_hook(world: World) -> None:
    weight = world.network.last.weight
    if weight.requires_grad and weight.is_leaf:
        halve = lambda p: p.grad.mul_(0.5)  # noqa: E731
        world.handles.append(weight.register_post_accumulate_grad_hook(halve))


def optimizer_hook(world: World) -> None:
    def clamp(optimizer, arguments, keywords):
        with torch.no_grad():
            world.network.last.weight.clamp_(-0.2, 0.2)

    optimizer = world.training.optimizer
    world.handles.append(optimizer.register_step_post_hook(clamp))


def hooks_removed(world: World) -> None:
    while world.handles:
        world.handles.pop().remove()


def weights_in_other_memory(network: Any) -> None:
    for parameter in network.parameters():
        parameter.data = parameter.data.clone()


def weight_transposed_in_memory(network: Any) -> None:
    weight = network.last.weight
    weight.data = weight.data.t().contiguous().t()


def channels_last(network: Any) -> None:
    if network.inputs == "images":
        network.to(memory_format=torch.channels_last)


def weights_share_memory(network: Any) -> None:
    shape = network.first.weight.shape
    alike = [p for p in network.parameters() if p.shape == shape]
    alike[-1].data = alike[0].data


def state_loaded(network: Any) -> None:
    network.load_state_dict(
        {
            k: v * 0.5 if v.is_floating_point() else v
            for k, v in network.state_dict().items()
        }
    )


def state_assigned(network: Any) -> None:
    state = {k: v.clone() for k, v in network.state_dict().items()}
    network.load_state_dict(state, assign=True)


def block_replaced(network: Any) -> None:
    if len(network.blocks):
        network.blocks[-1] = nn.Tanh()


def block_added(world: World) -> None:
    scale = OfList()
    world.network.blocks.append(scale)
    scale.change(world.next_factor())


def layer_with_a_group_added(world: World) -> None:
    if world.network.inputs != "images":
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
        world.network.blocks.append(layer)
        world.training.optimizer.add_param_group({"params": [layer.weight]})


def parametrization_added(network: Any) -> None:
    if not parametrize.is_parametrized(network.last, "weight"):
        parametrize.register_parametrization(network.last, "weight", nn.Tanh())


def forward_replaced(network: Any) -> None:
    if len(network.blocks):
        network.blocks[0].forward = torch.tanh


def state_of_the_optimizer_loaded(world: World) -> None:
    optimizer = world.training.optimizer
    optimizer.load_state_dict(optimizer.state_dict())


def gradients_are_there(network: Any) -> None:
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)


def on_batches(act: Callable[[list[Any]], list[Any]]) -> Change:
    return lambda world: setattr(world.training, "batches", act(world.training.batches))


def under_autocast(**options: Any) -> Change:
    return lambda world: setattr(
        world.training, "around", lambda number: torch.autocast("cpu", **options)
    )


CHANGES: dict[str, Change] = {
    "nothing": lambda world: None,
    "readers": lambda w: [r.change(w.next_factor()) for r in w.find(Reader)],
    "last_reader": lambda w: [r.change(w.next_factor()) for r in w.find(Reader)[-1:]],
    "same_value_again": on_all(
        OfAttribute, act=lambda r: setattr(r, "scale", float(str(r.scale)))
    ),
    "unread_attribute": lambda w: setattr(w.network, "_for_a_log", w.next_factor()),
    "skips": on_all(Skipping, act=toggles("active")),
    "causal": on_all(Attending, act=toggles("causal")),
    "dropout": on_all(nn.Dropout, p=0.7),
    "norms": norms,
    "norms_to_eval": on_all(
        nn.BatchNorm1d, nn.BatchNorm2d, act=lambda norm: norm.eval()
    ),
    "norms_without_statistics": norms_without_statistics,
    "evaluating": on_network(lambda n: n.eval()),
    "training_again": on_network(lambda n: n.train()),
    "loss_changes": loss_changes,
    "forward_hook": forward_hook,
    "forward_pre_hook": hooked(
        lambda w: w.network.last.register_forward_pre_hook(
            lambda module, inputs: (inputs[0] * 0.5,)
        )
    ),
    "backward_hook": hooked(
        lambda w: w.network.last.register_full_backward_hook(
            lambda module, inputs, outputs: tuple(
                None if g is None else g * 0.5 for g in inputs
            )
        )
    ),
    "parameter_hook": parameter_hook,
    "post_accumulate_hook": post_accumulate_hook,
    "optimizer_hook": optimizer_hook,
    "hooks_read_another_number": World.next_factor,
    "hooks_removed": hooks_removed,
    "first_layer_frozen": on_network(lambda n: n.first.requires_grad_(False)),
    "everything_thawed": on_network(lambda n: n.requires_grad_(True)),
    "weights_clamped": torch.no_grad()(
        lambda w: [p.clamp_(-0.2, 0.2) for p in w.network.parameters()]
    ),
    "weights_in_other_memory": on_network(weights_in_other_memory),
    "weight_transposed_in_memory": on_network(weight_transposed_in_memory),
    "channels_last": on_network(channels_last),
    "weights_share_memory": on_network(weights_share_memory),
    "state_loaded": on_network(state_loaded),
    "state_assigned": on_network(state_assigned),
    "block_replaced": on_network(block_replaced),
    "block_added": block_added,
    "block_removed": on_network(lambda n: n.blocks.__delitem__(slice(0, 1))),
    "layer_with_a_group_added": layer_with_a_group_added,
    "parametrization_added": on_network(parametrization_added),
    "forward_replaced": on_network(forward_replaced),
    "rate": lambda w: [group.update(lr=group["lr"] * 0.5) for group in w.groups],
    "weight_decay": on_groups(weight_decay=0.2),
    "momentum": on_groups(momentum=0.3, betas=(0.5, 0.7)),
    "state_cleared": lambda w: w.training.optimizer.state.clear(),
    "state_of_the_optimizer_loaded": state_of_the_optimizer_loaded,
    "gradients_are_there": on_network(gradients_are_there),
    "smaller_batches": on_batches(lambda b: [(x[:6], y[:6]) for x, y in b]),
    "strided_batches": on_batches(
        lambda b: [(x.transpose(0, -1).contiguous().transpose(0, -1), y) for x, y in b]
    ),
    "one_tensor_twice": on_batches(lambda b: b[:1]),
    "seeded": lambda w: torch.manual_seed(5),
    "deterministic": lambda w: torch.use_deterministic_algorithms(True),
    "autocast": under_autocast(dtype=torch.bfloat16),
    "autocast_off": under_autocast(enabled=False),
    "anomaly_detection": lambda w: torch.set_anomaly_enabled(True),
}


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
    if recipe.falls_back:
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
