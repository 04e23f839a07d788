"""Programs whose steps change what they read: counters, iterators, chance, clocks."""

import collections
import contextvars
import copy
import functools
import itertools
import os
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from tests.torch_programs import (
    Programs,
    Reading,
    Training,
    nothing,
    sgd,
    trained,
    vectors,
)

PROGRAMS = Programs()

CONTEXT = contextvars.ContextVar("CONTEXT", default=1.0)
COUNT = 0

entropy = functional.cross_entropy


def counting(make: Callable[[], Callable[..., Any]]) -> Callable[[], Any]:
    """Add a program whose loss changes with its calls."""

    def build() -> Training:
        model = nn.Linear(6, 4)
        return trained(model, loss_fn=make(), optimizer=sgd(model))

    PROGRAMS(build, name=make.__name__, changes_in_step=True)
    return make


def late(count: float) -> float:
    """A factor that changes with the third step."""
    return 1.0 if count <= 2 else 3.0


@counting
def closure_counter():
    count = 0

    def loss(out, y):
        nonlocal count
        count += 1
        return entropy(out, y) * late(count)

    return loss


@counting
def list_counter():
    count = [0]

    def loss(out, y):
        count[0] += 1
        return entropy(out, y) * late(count[0])

    return loss


@counting
def global_counter():
    globals()["COUNT"] = 0

    def loss(out, y):
        globals()["COUNT"] += 1
        return entropy(out, y) * late(COUNT)

    return loss


@counting
def global_counter_by_a_statement():
    global COUNT
    COUNT = 0

    def loss(out, y):
        global COUNT
        COUNT += 1
        return entropy(out, y) * late(COUNT)

    return loss


@counting
def raises_at_its_third_call():
    count = [0]

    def loss(out, y):
        count[0] += 1
        if count[0] == 3:
            raise RuntimeError("the third call")
        return entropy(out, y)

    return loss


@counting
def object_counter():
    class Loss:
        count = 0

        def __call__(self, out, y):
            self.count += 1
            return entropy(out, y) * late(self.count)

    return Loss()


@counting
def class_counter():
    class Loss:
        count = 0

        def __call__(self, out, y):
            type(self).count += 1
            return entropy(out, y) * late(Loss.count)

    return Loss()


@counting
def function_attribute_counter():
    def loss(out, y):
        loss.count += 1
        return entropy(out, y) * late(loss.count)

    loss.count = 0
    return loss


@counting
def loss_that_is_annealed_by_itself():
    rates = {"w": 1.0}

    def loss(out, y):
        rates["w"] *= 0.5
        return entropy(out, y) * rates["w"]

    return loss


@counting
def iterator_counter():
    count = itertools.count(1)
    return lambda out, y: entropy(out, y) * late(next(count))


@counting
def cycle():
    rates = itertools.cycle([1.0, 2.0, 3.0])
    return lambda out, y: entropy(out, y) * next(rates)


@counting
def list_iterator():
    rates = iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    return lambda out, y: entropy(out, y) * next(rates)


@counting
def generator():
    def rates():
        yield from (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)

    made = rates()
    return lambda out, y: entropy(out, y) * next(made)


@counting
def range_iterator():
    numbers = iter(range(1, 10))
    return lambda out, y: entropy(out, y) * late(next(numbers))


@counting
def deque_window():
    window = collections.deque([1.0], maxlen=3)

    def loss(out, y):
        window.append(2.0)
        return entropy(out, y) * sum(window)

    return loss


@counting
def list_that_is_emptied():
    rates = [4.0, 3.0, 2.0, 1.0]
    return lambda out, y: entropy(out, y) * rates.pop()


@counting
def set_that_grows():
    seen = set()

    def loss(out, y):
        seen.add(len(seen))
        return entropy(out, y) * len(seen)

    return loss


@counting
def defaultdict_counter():
    counts = collections.defaultdict(int)

    def loss(out, y):
        counts["calls"] += 1
        return entropy(out, y) * late(counts["calls"])

    return loss


@counting
def cache_that_counts():
    @functools.cache
    def made(number):
        return number * 2.0

    def loss(out, y):
        return entropy(out, y) * made(made.cache_info().currsize)

    return loss


@counting
def context_variable_counter():
    CONTEXT.set(1.0)

    def loss(out, y):
        CONTEXT.set(CONTEXT.get() + 1.0)
        return entropy(out, y) * CONTEXT.get()

    return loss


@counting
def environment_counter():
    os.environ["MUCUDNN_TEST_RATE"] = "1"

    def loss(out, y):
        os.environ["MUCUDNN_TEST_RATE"] += "1"
        return entropy(out, y) * len(os.environ["MUCUDNN_TEST_RATE"])

    return loss


@counting
def mean_of_losses_as_a_number():
    mean = [1.0]

    def loss(out, y):
        value = entropy(out, y)
        mean[0] = 0.9 * mean[0] + 0.1 * value.item()
        return value / mean[0]

    return loss


@counting
def mean_of_losses_as_a_tensor():
    mean = torch.tensor(1.0)

    def loss(out, y):
        nonlocal mean
        value = entropy(out, y)
        mean = 0.9 * mean + 0.1 * value.detach()
        return value / mean

    return loss


@counting
def last_result_in_a_closure():
    last = None

    def loss(out, y):
        nonlocal last
        before, last = last, out.detach()
        value = entropy(out, y)
        return value if before is None else value + (out - before).square().mean()

    return loss


@PROGRAMS(changes_in_step=True)
def log_of_losses() -> Training:
    log: list[Any] = []

    def loss(out, y):
        value = entropy(out, y)
        log.append(value.detach())
        return value

    return trained(nn.Linear(6, 4), loss_fn=loss, watched=lambda: list(log))


@PROGRAMS(changes_in_step=True)
def calls_are_counted_for_a_log() -> Training:
    calls = [0]

    def loss(out, y):
        calls[0] += 1
        return entropy(out, y)

    return trained(nn.Linear(6, 4), loss_fn=loss, watched=lambda: calls[0])


def reading_in_step(
    name: str, read: Callable[[Any, torch.Tensor], torch.Tensor], **attributes: Any
) -> None:
    """Add a program whose module changes what it reads in every step."""

    def build() -> Training:
        return trained(Reading(read, **{k: v() for k, v in attributes.items()}))

    PROGRAMS(build, name=name, changes_in_step=True)


def counts_in_forward(s, out):
    s.count += 1
    return out * late(s.count)


def counts_privately(s, out):
    s._count = getattr(s, "_count", 0) + 1
    return out * late(s._count)


def anneals(s, out):
    s.heat *= 0.5
    return out / s.heat


def keeps_the_last(s, out):
    before, s.last = s.last, out.detach()
    return out if before is None else out + 0.1 * before


def collects(s, out):
    s.held.append(out.detach())
    return out + sum(s.held) / len(s.held)


def pushes_and_pops(s, out):
    s.held.append(3.0)
    return out * s.held.pop()


def makes_its_buffer(s, out):
    if s.mask is None:
        s.mask = torch.ones(4)
    return out * s.mask


def buffer_by_number(s, out):
    s.gain.add_(1)
    return out * s.gain.item()


reading_in_step("module_counter", counts_in_forward, count=int)
reading_in_step("private_module_counter", counts_privately)
reading_in_step("annealed_in_forward", anneals, heat=lambda: 2.0)
reading_in_step("last_result_in_an_attribute", keeps_the_last, last=lambda: None)
reading_in_step("results_collected", collects, held=list)
reading_in_step("pushes_and_pops", pushes_and_pops, held=list)
reading_in_step(
    "iterator_in_an_attribute",
    lambda s, out: out * next(s.numbers),
    numbers=lambda: iter(range(1, 9)),
)
reading_in_step(
    "tensor_counted_and_asked", buffer_by_number, gain=lambda: torch.ones(())
)


@PROGRAMS(changes_in_step=True)
def buffer_made_by_the_first_step() -> Training:
    model = Reading(makes_its_buffer)
    model.register_buffer("mask", None)
    return trained(model)


# --- what a step stores has several names


def stored(
    name: str,
    step: Callable[[Any, torch.Tensor], torch.Tensor],
    touch: Callable[[Any], Any],
    shown: Callable[[Any], Any],
    **attributes: Any,
) -> None:
    """Add a program that stores something, and changes it by another name later."""

    def build() -> Training:
        model = Reading(step, **{k: v() for k, v in attributes.items()})
        after = lambda *_: touch(model)  # noqa: E731
        return trained(model, after=after, watched=lambda: shown(model))

    PROGRAMS(build, name=f"stored_{name}", changes_in_step=True)


def storing(**values: Callable[[Any, torch.Tensor], Any]):
    """Return what a module does that sets attributes, one after the other."""

    def step(s, out):
        for name, value in values.items():
            setattr(s, name, value(s, out))
        return out * s.pool[0][0] if hasattr(s, "pool") else out

    return step


def zeros() -> torch.Tensor:
    return torch.zeros(4)


PAIR = {"a": zeros, "b": zeros}


def pool() -> list[list[float]]:
    return [[1.0, 2.0], [3.0]]


def queue(s, out):
    s.held.append(out.detach())
    s.held = s.held[-2:]
    return out + sum(s.held)


def queue_in_a_tuple(s, out):
    s.held[0].append(out.detach())
    s.held = (s.held[0][-2:],)
    return out + s.held[0][0]


def logged(s, out):
    s.last = {"out": out.detach()}
    s.log.append(s.last)
    return out


def swapped(s, out):
    s.a, s.b = s.b, s.a
    return out * s.a[0]


def same_shape(s, out):
    found = list(out.shape) == s.shape
    s.shape = list(out.shape)
    return out * (1.0 + found)


def buffer_updated(s, out):
    mean = s.layer.running_mean
    s.seen = mean
    result = out + mean
    mean.add_(out.detach().mean(0))
    return result


def pool_replaced(s):
    s.pool = copy.deepcopy(s.pool)
    s.current[0] += 1


def set_first(values: Any, value: Any) -> None:
    values[0] = value


stored("queue", queue, nothing, lambda s: len(s.held), held=list)
stored("queue_in_a_tuple", queue_in_a_tuple, nothing, nothing, held=lambda: ([],))
stored(
    "new_list_twice",
    storing(a=lambda _, out: [out.detach()], b=lambda s, _: s.a),
    lambda s: s.a.append(1),
    lambda s: len(s.b),
    a=list,
    b=list,
)
stored(
    "result_twice",
    storing(a=lambda _, out: out.detach(), b=lambda s, _: s.a),
    lambda s: s.a.zero_(),
    lambda s: (s.b.sum(), s.a is s.b),
    **PAIR,
)
stored(
    "result_and_a_part",
    storing(a=lambda _, out: out.detach(), b=lambda s, _: s.a[0]),
    lambda s: s.a.zero_(),
    lambda s: s.b.sum(),
    **PAIR,
)
stored(
    "list_from_before",
    storing(current=lambda s, _: s.pool[0]),
    lambda s: set_first(s.current, s.current[0] + 1),
    lambda s: s.pool,
    pool=pool,
    current=nothing,
)
stored(
    "list_that_is_replaced_by_an_equal_one",
    storing(current=lambda s, _: s.pool[0]),
    pool_replaced,
    lambda s: (s.pool, s.current),
    pool=pool,
    current=nothing,
)
stored(
    "dict_twice", logged, lambda s: s.last.clear(), lambda s: s.log, log=list,
    last=nothing,
)  # fmt: skip
stored(
    "lists_that_change_places",
    swapped,
    lambda s: set_first(s.a, s.a[0] + 1),
    lambda s: (s.a, s.b),
    a=lambda: [1.0],
    b=lambda: [1.0],
)
stored(
    "equal_list",
    same_shape,
    lambda s: set_first(s.old, 7),
    lambda s: s.shape,
    old=lambda: [1],
    shape=list,
)
stored(
    "buffer",
    buffer_updated,
    lambda s: s.seen.mul_(0.5),
    lambda s: s.seen is s.layer.running_mean,
    layer=lambda: nn.BatchNorm1d(4),
    seen=zeros,
)
stored(
    "weight",
    storing(a=lambda s, _: [s.layer.weight], b=lambda s, _: s.layer.weight.detach()),
    lambda s: s.b.mul_(0.5),
    lambda s: (s.a[0] is s.layer.weight, s.b.sum(), s.b.requires_grad),
    layer=lambda: nn.Linear(2, 2),
    a=lambda: [None],
    b=zeros,
)
stored(
    "weight_by_another_name",
    storing(a=lambda s, _: s.layer.weight),
    nothing,
    lambda s: sorted(s.state_dict()),
    layer=lambda: nn.Linear(2, 2),
    a=nothing,
)


def gradient_kept(s, out):
    out.retain_grad()
    s.kept = out
    return out * 2


stored(
    "result_for_its_gradient", gradient_kept, nothing, lambda s: s.kept.grad, kept=zeros
)


# --- what a step does to its batch


def of_pairs(
    name: str,
    step: Callable[..., Any],
    second: Callable[[], Any],
    shown: Callable[[torch.Tensor, Any], Any] = nothing,
) -> None:
    """Add a program whose model is called with a tensor and something else."""

    class Called(Reading):
        def forward(self, x, other):
            return step(self.net(x), x, other)

    def build() -> Training:
        model = Called(nothing)
        x, y = vectors()
        # The same one in all steps, so that it goes on changing.
        pair = x, second()
        return Training(model, sgd(model), [(pair, y)], watched=lambda: shown(*pair))

    PROGRAMS(build, name=f"batch_{name}", changes_in_step=True)


def appends(out, _, other):
    other.append(out.detach())
    return out


def adds_a_key(out, _, other):
    other["found"] = out.detach()
    return out


def swaps(out, x, other):
    other[0], other[1] = other[1], other[0]
    return out * other[0].sum() + x.sum()


def tags(out, x, other):
    x.seen = getattr(x, "seen", 0) + 1
    return out * other


of_pairs("list_grows", appends, list)
of_pairs("dict_grows", adds_a_key, lambda: {"scale": torch.ones(4)})
of_pairs("list_is_sorted_anew", swaps, lambda: [torch.ones(4), torch.zeros(4)])
of_pairs(
    "tensor_gets_an_attribute",
    tags,
    lambda: torch.ones(4),
    lambda x, _: getattr(x, "seen", 0),
)


class Queue(nn.Module):
    """Its pointer says which part of a queue the next batch replaces (MoCo)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 4)
        self.register_buffer("queue", torch.randn(16, 4))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.net(x)
        result = out + self.queue.mean(0)
        at = int(self.pointer)
        self.queue[at : at + len(x)] = out.detach()
        self.pointer[0] = (at + len(x)) % len(self.queue)
        return result


@PROGRAMS(is_planned=True)
def queue_with_a_pointer() -> Training:
    return trained(Queue())


# --- chance and time


def by_chance(name: str, draw: Callable[[Any], Callable[[], float]]) -> None:
    """Add a program whose result is scaled by a number that is drawn in every step."""

    def build() -> Training:
        drawn = draw(np.random.RandomState(0))
        return trained(Reading(lambda s, out: out * (1.0 + drawn())))

    PROGRAMS(build, name=name, changes_in_step=True)


def forked() -> torch.Tensor:
    with torch.random.fork_rng():
        return torch.rand(())


by_chance("python_random", lambda _: random.random)
by_chance("python_random_named_inside", lambda _: lambda: random.random())
by_chance("python_random_object", lambda _: random.Random(0).random)
by_chance("numpy_random", lambda _: lambda: np.random.rand())  # noqa: NPY002
by_chance("numpy_random_state", lambda state: state.rand)
by_chance("numpy_generator", lambda _: np.random.default_rng(0).random)
by_chance("numpy_shuffle", lambda state: lambda: float(state.permutation(8)[0]))
by_chance("shuffled_list", lambda _: lambda: random.sample(range(8), 8)[0])
by_chance("torch_number_drawn", lambda _: lambda: torch.rand(()).item())
by_chance(
    "torch_generator_object",
    lambda _: functools.partial(
        lambda g: torch.rand((), generator=g), torch.Generator().manual_seed(1)
    ),
)
by_chance("torch_tensor_drawn", lambda _: lambda: torch.rand(()))
by_chance("seeded_inside", lambda _: lambda: (torch.manual_seed(3), torch.rand(()))[1])
by_chance("forked_inside", lambda _: forked)
by_chance("initial_seed", lambda _: lambda: torch.initial_seed() % 7)


@PROGRAMS(changes_in_step=True)
def stochastic_depth() -> Training:
    hidden = nn.Linear(4, 4)
    model = Reading(
        lambda s, out: out + s.hidden(out) if random.random() < 0.5 else out,
        hidden=hidden,
    )
    return trained(model)


@PROGRAMS(changes_in_step=True)
def clock_that_ticks() -> Training:
    """A clock that a test has replaced, and that goes on with every question."""
    ticks = itertools.count()
    clock = types.SimpleNamespace(time=lambda: float(next(ticks)))
    return trained(Reading(lambda s, out: out * (1.0 + clock.time())))
