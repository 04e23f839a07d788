"""Programs whose steps change what they read: counters, iterators, chance, clocks."""

# ruff: noqa: F401  (rows of tables use what is imported)

import contextvars
import copy
import functools
import itertools
import os
import random
import types
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from tests.torch_programs import Programs, Reading, Training, sgd, trained, vectors

PROGRAMS = Programs()

CONTEXT = contextvars.ContextVar("CONTEXT", default=1.0)
COUNT = 0

entropy = functional.cross_entropy


def late(count: float) -> float:
    """A factor that changes with the third step."""
    return 1.0 if count <= 2 else 3.0


def set_global(name: str, value: Any) -> None:
    globals()[name] = value


def raise_at(number: int, count: int) -> None:
    if number == count:
        raise RuntimeError("an error of the loss")


LOSSES = """
def build():
    {made}
    def loss(out, y):
        {result}
    def watched():
        {watched}
    model = nn.Linear(6, 4)
    return trained(model, loss_fn=loss, optimizer=sgd(model), watched=watched)
"""
"""Of losses that change what they have: what is made, what a loss does and returns."""

losses = PROGRAMS.table(globals(), LOSSES, "made result watched", changes_in_step=True)

losses("""
closure_counter | count = 0 | count += 1; entropy(out, y) * late(count)
list_counter | count = [0] | count[0] += 1; entropy(out, y) * late(count[0])
global_counter
    | set_global("COUNT", 0) | globals()["COUNT"] += 1; entropy(out, y) * late(COUNT)
global_counter_by_a_statement
    | set_global("COUNT", 0) | global COUNT; COUNT += 1; entropy(out, y) * late(COUNT)
raises_at_its_third_call
    | count = [0] | count[0] += 1; raise_at(3, count[0]); entropy(out, y)
function_attribute_counter
    | held = lambda: None; held.count = 0
    | held.count += 1; entropy(out, y) * late(held.count)
object_counter
    | held = type("Held", (), {"count": 0})()
    | held.count += 1; entropy(out, y) * late(held.count)
class_counter
    | held = type("Held", (), {"count": 0})
    | held.count += 1; entropy(out, y) * late(held.count)
loss_that_is_annealed_by_itself
    | rates = {"w": 1.0} | rates["w"] *= 0.5; entropy(out, y) * rates["w"]
iterator_counter | count = itertools.count(1) | entropy(out, y) * late(next(count))
cycle | rates = itertools.cycle([1.0, 2.0, 3.0]) | entropy(out, y) * next(rates)
list_iterator | rates = iter([1.0, 2.0, 3.0, 4.0, 5.0]) | entropy(out, y) * next(rates)
generator | rates = (float(i) for i in range(1, 7)) | entropy(out, y) * next(rates)
range_iterator | numbers = iter(range(1, 10)) | entropy(out, y) * late(next(numbers))
deque_window
    | window = deque([1.0], maxlen=3)
    | window.append(2.0); entropy(out, y) * sum(window)
list_that_is_emptied | rates = [4.0, 3.0, 2.0, 1.0] | entropy(out, y) * rates.pop()
set_that_grows | seen = set() | seen.add(len(seen)); entropy(out, y) * len(seen)
defaultdict_counter
    | counts = defaultdict(int)
    | counts["calls"] += 1; entropy(out, y) * late(counts["calls"])
cache_that_counts
    | doubled = functools.cache(lambda number: number * 2.0)
    | entropy(out, y) * doubled(doubled.cache_info().currsize)
context_variable_counter
    | CONTEXT.set(1.0)
    | CONTEXT.set(CONTEXT.get() + 1.0); entropy(out, y) * CONTEXT.get()
environment_counter
    | os.environ["MUCUDNN_TEST_RATE"] = "1"
    | os.environ["MUCUDNN_TEST_RATE"] += "1"
    ; entropy(out, y) * len(os.environ["MUCUDNN_TEST_RATE"])
mean_of_losses_as_a_number
    | mean = [1.0]
    | value = entropy(out, y); mean[0] = 0.9 * mean[0] + 0.1 * value.item()
    ; value / mean[0]
mean_of_losses_as_a_tensor
    | mean = torch.tensor(1.0)
    | value = entropy(out, y); mean = 0.9 * mean + 0.1 * value.detach(); value / mean
last_result_in_a_closure
    | last = None
    | before, last = last, out.detach(); value = entropy(out, y)
    ; value if before is None else value + (out - before).square().mean()
log_of_losses
    | log = [] | value = entropy(out, y); log.append(value.detach()); value | list(log)
clock_that_ticks
    | ticks = itertools.count(); clock = types.SimpleNamespace(time=ticks.__next__)
    | entropy(out, y) * (1.0 + clock.time())
calls_are_counted_for_a_log
    | calls = [0] | calls[0] += 1; entropy(out, y) | calls[0]
""")

counts = functools.partial(PROGRAMS, changes_in_step=True)

READS = """
def build():
    def read(s, out):
        {result}
    return trained(Reading(read, {attributes}))
"""
"""Of modules that change their attributes, which a row begins with."""

reads = PROGRAMS.table(globals(), READS, "attributes result", changes_in_step=True)

reads("""
module_counter | count=0 | s.count += 1; out * late(s.count)
private_module_counter
    | | s._count = getattr(s, "_count", 0) + 1; out * late(s._count)
annealed_in_forward | heat=2.0 | s.heat *= 0.5; out / s.heat
last_result_in_an_attribute
    | last=None
    | before, s.last = s.last, out.detach()
    ; out if before is None else out + 0.1 * before
results_collected
    | held=[] | s.held.append(out.detach()); out + sum(s.held) / len(s.held)
pushes_and_pops | held=[] | s.held.append(3.0); out * s.held.pop()
iterator_in_an_attribute | numbers=iter(range(1, 9)) | out * next(s.numbers)
tensor_counted_and_asked | gain=torch.ones(()) | s.gain.add_(1); out * s.gain.item()
""")


def makes_its_buffer(s, out):
    if s.mask is None:
        s.mask = torch.ones(4)
    return out * s.mask


@counts
def buffer_made_by_the_first_step() -> Training:
    model = Reading(makes_its_buffer)
    model.register_buffer("mask", None)
    return trained(model)


# --- what a step stores has several names

STORES = """
def build():
    def read(s, out):
        {step}
    m = Reading(read, {attributes})
    def touch(*_):
        {touch}
    def shown():
        {shown}
    return trained(m, after=touch, watched=shown)
"""
"""Of modules that store something, which is changed by another name after a step."""

PAIR = {"a": torch.zeros(4), "b": torch.zeros(4)}

stores = PROGRAMS.table(
    globals(), STORES, "attributes step touch shown", changes_in_step=True
)

stores("""
stored_queue
    | held=[] | s.held.append(out.detach()); s.held = s.held[-2:]; out + sum(s.held)
    | | len(m.held)
stored_queue_in_a_tuple
    | held=([],)
    | s.held[0].append(out.detach()); s.held = (s.held[0][-2:],); out + s.held[0][0]
stored_new_list_twice
    | a=[], b=[] | s.a = [out.detach()]; s.b = s.a; out | m.a.append(1) | len(m.b)
stored_result_twice
    | **PAIR | s.a = out.detach(); s.b = s.a; out | m.a.zero_() | m.b.sum(), m.a is m.b
stored_result_and_a_part
    | **PAIR | s.a = out.detach(); s.b = s.a[0]; out | m.a.zero_() | m.b.sum()
stored_list_from_before
    | pool=[[1.0, 2.0], [3.0]], current=None
    | s.current = s.pool[0]; out * s.pool[0][0] | m.current[0] += 1 | m.pool
stored_list_that_is_replaced_by_an_equal_one
    | pool=[[1.0, 2.0], [3.0]], current=None
    | s.current = s.pool[0]; out * s.pool[0][0]
    | m.pool = copy.deepcopy(m.pool); m.current[0] += 1 | m.pool, m.current
stored_dict_twice
    | log=[], last=None | s.last = {"out": out.detach()}; s.log.append(s.last); out
    | m.last.clear() | m.log
stored_lists_that_change_places
    | a=[1.0], b=[1.0] | s.a, s.b = s.b, s.a; out * s.a[0] | m.a[0] += 1 | m.a, m.b
stored_equal_list
    | old=[1], shape=[]
    | found = list(out.shape) == s.shape; s.shape = list(out.shape); out * (1.0 + found)
    | m.old[0] = 7 | m.shape
stored_buffer
    | layer=nn.BatchNorm1d(4), seen=torch.zeros(4)
    | mean = s.layer.running_mean; s.seen = mean; found = out + mean
    ; mean.add_(out.detach().mean(0)); found
    | m.seen.mul_(0.5) | m.seen is m.layer.running_mean
stored_weight
    | layer=nn.Linear(2, 2), a=[None], b=torch.zeros(4)
    | s.a = [s.layer.weight]; s.b = s.layer.weight.detach(); out | m.b.mul_(0.5)
    | m.a[0] is m.layer.weight, m.b.sum(), m.b.requires_grad
stored_weight_by_another_name
    | layer=nn.Linear(2, 2), a=None | s.a = s.layer.weight; out |
    | sorted(m.state_dict())
stored_weight_in_a_buffer
    | layer=nn.Linear(4, 4), b=nn.Buffer(torch.zeros(4))
    | s.b = s.layer.weight.detach()[0]; s.layer(out)
stored_buffer_in_a_buffer
    | a=nn.Buffer(torch.zeros(4)), b=nn.Buffer(torch.ones(4))
    | s.a.add_(1); out = out * s.b; s.b = s.a; out
stored_constant_in_a_buffer
    | a=torch.zeros(4), b=nn.Buffer(torch.ones(4)) | s.b = s.a; out | m.b.add_(1) | m.a
stored_result_in_two_buffers
    | a=nn.Buffer(torch.zeros(4)), b=nn.Buffer(torch.ones(4))
    | s.a = out.detach().mean(0); s.b = s.a; out | m.a.zero_()
stored_result_in_a_buffer_of_two_names
    | **dict.fromkeys("ab", nn.Buffer(torch.zeros(4)))
    | s.b = out.detach().mean(0); out | | m.a.sum(), m.b.sum()
stored_none | layer=nn.Linear(4, 4) | s.layer.bias = None; s.layer(out)
stored_nothing | layer=nn.Linear(4, 4) | out = s.layer(out); del s.layer.bias; out
stored_new_parameter
    | layer=nn.Linear(4, 4)
    | out = s.layer(out); s.layer.weight = nn.Parameter(s.layer.weight * 2); out
stored_result_for_its_gradient
    | kept=torch.zeros(4) | out.retain_grad(); s.kept = out; out * 2 | | m.kept.grad
""")


# --- what a step does to its batch


class Called(Reading):
    """A module of a tensor and of something else, which all steps share."""

    def forward(self, x, other):
        return self.read(self.net(x), x, other)


PAIRS = """
def build():
    def step(out, x, other):
        {result}
    model, (x, y) = Called(step), vectors()
    other = {other}
    def shown():
        {shown}
    return Training(model, sgd(model), [((x, other), y)], watched=shown)
"""

pairs = PROGRAMS.table(globals(), PAIRS, "other result shown", changes_in_step=True)

pairs("""
batch_list_grows | [] | other.append(out.detach()); out
batch_dict_grows | {"scale": torch.ones(4)} | other["found"] = out.detach(); out
batch_list_is_sorted_anew
    | [torch.ones(4), torch.zeros(4)]
    | other[0], other[1] = other[1], other[0]; out * other[0].sum() + x.sum()
batch_tensor_gets_an_attribute
    | torch.ones(4) | x.seen = getattr(x, "seen", 0) + 1; out * other
    | getattr(x, "seen", 0)
""")


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


PROGRAMS(lambda: trained(Queue()), name="queue_with_a_pointer", is_planned=True)


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


reads("""
stochastic_depth
    | hidden=nn.Linear(4, 4) | out + s.hidden(out) if random.random() < 0.5 else out
""")
