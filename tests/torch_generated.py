"""Training programs put together by chance, whose state changes between steps.

A `Recipe` says in plain words what a program is: blocks of a model, a loss, an
optimizer, a schedule, options of `train_step` and what changes before which step. What
eager mode gives is what planned steps have to give.
"""

# ruff: noqa: F401  (rows of tables use what is imported)

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
    rows_of,
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


def in_cell() -> dict[str, Any]:
    """Return two functions that share a free variable: one sets it, one returns it."""
    now = 1.0

    def setter(factor):
        nonlocal now
        now = factor

    return {"setter": setter, "getter": lambda: now}


SCALES = {"now": 1.0}

READER = """
def build():
    class Holding(Reader):
        def __init__(self):
            nn.Module.__init__(self)
            for name, value in dict({attributes}).items():
                setattr(self, name, value)
            self.change(1.0)
        def factor(s):
            {factor}
        def change(s, factor):
            {change}
    return Holding
"""
"""Of a class of readers: its attributes, what it multiplies by, how that changes."""

READERS: dict[str, type[Reader]] = {
    name: build()
    for name, build, _ in rows_of(
        """
attribute | scale=1.0 | s.scale | s.scale = factor
private_attribute | _scale=1.0 | s._scale | s._scale = factor
attribute_that_appears
    | | getattr(s, "scale", 1.0) | if factor != 1.0: s.scale = factor
list | scales=[1.0] | s.scales[0] | s.scales[0] = factor
nested_object
    | config={"scales": types.SimpleNamespace(now=1.0)} | s.config["scales"].now
    | s.config["scales"].now = factor
closure | | s.function() | s.function = lambda: factor
shared_cell | **in_cell() | s.getter() | s.setter(factor)
global | | SCALES["now"] | SCALES["now"] = factor
class | | s.scale | type(s).scale = factor
partial | | s.function(0.0) | s.function = functools.partial(max, factor)
plain_tensor | | s.held[0] | s.held = [torch.tensor(factor)]
tensor_in_place | held=[torch.tensor(1.0)] | s.held[0] | s.held[0].fill_(factor)
tensors_number | held=[torch.tensor(1.0)] | s.held[0].item() | s.held[0].fill_(factor)
""",
        globals(),
        READER,
        "attributes factor change",
    )
}


class Buffered(Reader):
    def __init__(self):
        nn.Module.__init__(self)
        self.register_buffer("scale", torch.ones(()))

    def change(self, factor):
        self.scale.fill_(factor)

    def factor(self):
        return self.scale


class ByProperty(Reader):
    def __init__(self):
        nn.Module.__init__(self)
        self.change(1.0)

    @property
    def scale(self):
        return self._scale

    def change(self, factor):
        self._scale = factor

    def factor(self):
        return self.scale


READERS |= {"buffer": Buffered, "property": ByProperty}


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

    def set_numbers(self, **values: Any) -> None:
        """Change the optimizer's groups that have these entries."""
        for group in self.groups:
            group.update({k: v for k, v in values.items() if k in group})

    def change_batches(self, change: Callable[[Any, Any], tuple[Any, Any]]) -> None:
        self.training.batches = [change(*batch) for batch in self.training.batches]


Change = Callable[[World], Any]


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


def layer_with_a_group_added(world: World) -> None:
    if world.network.inputs != "images":
        layer = nn.Linear(WIDTH, WIDTH, bias=False)
        world.network.blocks.append(layer)
        world.training.optimizer.add_param_group({"params": [layer.weight]})


CHANGE = """
def build():
    def change(w):
        n, o = w.network, w.training.optimizer
        {change}
    return change
"""
"""Of a world `w`, its network and its optimizer."""

CHANGES: dict[str, Change] = {
    name: build()
    for name, build, _ in rows_of(
        """
nothing |
readers | for reader in w.find(Reader): reader.change(w.next_factor())
last_reader | for reader in w.find(Reader)[-1:]: reader.change(w.next_factor())
same_value_again
    | for reader in w.find(READERS["attribute"]):
    reader.scale = float(str(reader.scale))
unread_attribute | n._for_a_log = w.next_factor()
skips | for block in w.find(Skipping): block.active = not block.active
causal | for block in w.find(Attending): block.causal = not block.causal
dropout | for block in w.find(nn.Dropout): block.p = 0.7
norms | norms(w)
norms_to_eval | for norm in w.find(nn.BatchNorm1d, nn.BatchNorm2d): norm.eval()
norms_without_statistics | norms_without_statistics(w)
evaluating | n.eval()
training_again | n.train()
loss_changes | loss_changes(w)
forward_hook
    | factors = w.factors; scale = lambda module, inputs, out: out * (1.0 + factors[0])
    ; w.handles.append(n.first.register_forward_hook(scale))
forward_pre_hook
    | halve = lambda module, inputs: (inputs[0] * 0.5,)
    ; w.handles.append(n.last.register_forward_pre_hook(halve))
backward_hook
    | halve = lambda _, given, __: tuple(None if g is None else g * 0.5 for g in given)
    ; w.handles.append(n.last.register_full_backward_hook(halve))
parameter_hook | parameter_hook(w)
post_accumulate_hook | post_accumulate_hook(w)
optimizer_hook | optimizer_hook(w)
hooks_read_another_number | w.next_factor()
hooks_removed | while w.handles: w.handles.pop().remove()
first_layer_frozen | n.first.requires_grad_(False)
everything_thawed | n.requires_grad_(True)
weights_clamped
    | with torch.no_grad(): [p.clamp_(-0.2, 0.2) for p in n.parameters()]
weights_in_other_memory | for p in n.parameters(): p.data = p.data.clone()
weight_transposed_in_memory
    | n.last.weight.data = n.last.weight.data.t().contiguous().t()
channels_last | if n.inputs == "images": n.to(memory_format=torch.channels_last)
weights_share_memory | weights_share_memory(n)
state_loaded | state_loaded(n)
state_assigned
    | state = {k: v.clone() for k, v in n.state_dict().items()}
    ; n.load_state_dict(state, assign=True)
block_replaced | if len(n.blocks): n.blocks[-1] = nn.Tanh()
block_added
    | n.blocks.append(READERS["list"]()); n.blocks[-1].change(w.next_factor())
block_removed | del n.blocks[:1]
layer_with_a_group_added | layer_with_a_group_added(w)
parametrization_added
    | if not parametrize.is_parametrized(n.last, "weight"):
    parametrize.register_parametrization(n.last, "weight", nn.Tanh())
forward_replaced | if len(n.blocks): n.blocks[0].forward = torch.tanh
rate | for group in w.groups: group["lr"] *= 0.5
weight_decay | w.set_numbers(weight_decay=0.2)
momentum | w.set_numbers(momentum=0.3, betas=(0.5, 0.7))
state_cleared | o.state.clear()
state_of_the_optimizer_loaded | o.load_state_dict(o.state_dict())
gradients_are_there | for p in n.parameters(): p.grad = torch.ones_like(p)
smaller_batches | w.change_batches(lambda x, y: (x[:6], y[:6]))
strided_batches
    | w.change_batches(
    lambda x, y: (x.transpose(0, -1).contiguous().transpose(0, -1), y))
one_tensor_twice | w.training.batches = w.training.batches[:1]
seeded | torch.manual_seed(5)
deterministic | torch.use_deterministic_algorithms(True)
autocast | w.training.around = lambda _: torch.autocast("cpu", torch.bfloat16)
autocast_off | w.training.around = lambda _: torch.autocast("cpu", enabled=False)
anomaly_detection | torch.set_anomaly_enabled(True)
""",
        globals(),
        CHANGE,
        "change",
    )
}


def training_of(recipe: Recipe) -> Training:
    """Return the training that a recipe describes."""
    SCALES["now"] = READERS["class"].scale = 1.0  # type: ignore[attr-defined]
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
