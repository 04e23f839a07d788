"""Programs whose functions change: losses, closures, globals, caches."""

# ruff: noqa: F401  (rows of tables use what is imported)

import builtins
import contextlib
import contextvars
import copy
import functools
import gc
import itertools
import math
import operator
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from tests.torch_programs import Programs, Reading, Training, trained

PROGRAMS = Programs()

RATE = 1.0
RATES = {"w": 1.0}
STACK = [1.0]
SPACE = ModuleType("space")
CONTEXT = contextvars.ContextVar("CONTEXT", default=1.0)
LOCAL = threading.local()


class Namespace:
    rate = 1.0


def entropy(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(out, y)


def of_loss(
    make: Callable[[], tuple[Callable[..., Any], Callable[[], Any]]], **others: Any
) -> Callable[[], Any]:
    """Add a program from a function that makes a loss and what changes it."""

    def build() -> Training:
        loss_fn, change = make()
        return trained(nn.Linear(6, 4), loss_fn=loss_fn, change=change)

    PROGRAMS(build, name=make.__name__, **others)
    return make


same_plan = functools.partial(of_loss, keeps_plan=True)
planned = functools.partial(of_loss, is_planned=True)

LOSSES = """
def build():
    {made}
    def loss(out, y):
        {result}
    def change():
        {change}
    return trained(nn.Linear(6, 4), loss_fn=loss, change=change)
"""
"""Of a loss: what it has, what it computes, and how what it has changes."""

losses = PROGRAMS.table(globals(), LOSSES, "made result change")


def never() -> None:
    pass


def set_global(name: str, value: Any) -> None:
    globals()[name] = value


def helper(value):
    return value * top_of_stack()


def top_of_stack():
    return STACK[-1]


def plain(value):
    return value


def weighed(rates, out, y):
    return entropy(out, y) * rates[0]


# --- what a loss reads

losses("""
closure_number | rate = 1.0 | entropy(out, y) * rate | rate = 3.0 | is_planned
closure_function
    | scaled = lambda x: x | scaled(entropy(out, y)) | scaled = lambda x: x * 3
closure_tensor
    | rate = torch.tensor(1.0) | entropy(out, y) * rate | rate = torch.tensor(3.0)
    | is_planned
closure_list | rates = [1.0] | entropy(out, y) * rates[0] | rates[0] = 3.0
closure_of_a_closure
    | rates = [1.0]; inner = (lambda: lambda value: value * rates[0])()
    | inner(entropy(out, y)) | rates[0] = 3.0
global_number
    | set_global("RATE", 1.0) | entropy(out, y) * RATE | set_global("RATE", 3.0)
    | is_planned
global_dict | RATES["w"] = 1.0 | entropy(out, y) * RATES["w"] | RATES["w"] = 3.0
helper_of_a_helper_reads_a_global
    | STACK[:] = [1.0] | helper(entropy(out, y)) | STACK.append(3.0) | is_planned
global_function_replaced
    | set_global("plain", lambda value: value) | plain(entropy(out, y))
    | set_global("plain", lambda value: value * 3)
function_in_a_dict
    | table = {"f": lambda value: value} | table["f"](entropy(out, y))
    | table["f"] = lambda value: value * 3
generator_expression
    | rates = [1.0, 1.0] | entropy(out, y) * sum(rate for rate in rates)
    | rates.append(1.0)
mapped_and_sorted
    | rates = [1.0, 2.0] | entropy(out, y) * -sorted(map(operator.neg, rates))[0]
    | rates.append(3.0)
attribute_getter
    | held = SimpleNamespace(rate=1.0); rate_of = operator.attrgetter("rate")
    | entropy(out, y) * rate_of(held) | held.rate = 3.0
item_getter
    | rates = {"w": 1.0}; rate_of = operator.itemgetter("w")
    | entropy(out, y) * rate_of(rates) | rates["w"] = 3.0
single_dispatch
    | rate_of = functools.singledispatch(lambda value: 1.0)
    | entropy(out, y) * rate_of(0) | rate_of.register(int, lambda value: 3.0)
module_namespace | SPACE.rate = 1.0 | entropy(out, y) * SPACE.rate | SPACE.rate = 3.0
module_namespace_by_a_name_put_together
    | SPACE.rate = 1.0 | entropy(out, y) * getattr(SPACE, "".join(("ra", "te")))
    | SPACE.rate = 3.0
class_as_a_namespace
    | Namespace.rate = 1.0 | entropy(out, y) * Namespace.rate | Namespace.rate = 3.0
globals_asked
    | set_global("RATE", 1.0) | entropy(out, y) * globals()["RA" + "TE"]
    | set_global("RATE", 3.0)
evaluated_text
    | set_global("RATE", 1.0) | entropy(out, y) * eval("RATE") | set_global("RATE", 3.0)
context_variable | CONTEXT.set(1.0) | entropy(out, y) * CONTEXT.get() | CONTEXT.set(3.0)
thread_local | LOCAL.rate = 1.0 | entropy(out, y) * LOCAL.rate | LOCAL.rate = 3.0
environment_variable
    | os.environ["MUCUDNN_TEST_RATE"] = "1"
    | entropy(out, y) * float(os.environ["MUCUDNN_TEST_RATE"])
    | os.environ["MUCUDNN_TEST_RATE"] = "3"
environment_variable_appears
    | | entropy(out, y) * float(os.getenv("MUCUDNN_TEST_RATE", "1"))
    | os.environ["MUCUDNN_TEST_RATE"] = "3"
library_function_replaced
    | SPACE.squash = torch.tanh | entropy(SPACE.squash(out), y)
    | SPACE.squash = torch.sin
deadline_passes
    | deadline = time.monotonic() + 1e9
    | entropy(out, y) * (1.0 if time.monotonic() < deadline else 3.0) | deadline = 0.0
clock_replaced
    | now = [1.0]; clock = SimpleNamespace(time=lambda: now[0])
    | entropy(out, y) * clock.time() | now[0] = 3.0
cache_cleared
    | rates = [1.0]; rate = functools.cache(lambda: rates[0]); rate(); rates[0] = 3.0
    | entropy(out, y) * rate() | rate.cache_clear()
cache_by_argument
    | rates = [1.0]; rate = functools.lru_cache(2)(lambda name: rates[0])
    | entropy(out, y) * rate("w") | rates[0] = 3.0; rate("a"); rate("b")
mode_by_text_of_a_function
    | text = lambda: None; text.__doc__ = "a" | entropy(out, y) * len(text.__doc__)
    | text.__doc__ = "abc"
equal_list_replaced
    | rates = [1.0, 2.0] | entropy(out, y) * rates[1] | rates = [1.0, 2.0] | keeps_plan
nothing_changes | | entropy(out, y) | | keeps_plan
unrelated_global_written
    | | entropy(out, y) | set_global("UNRELATED", time.time()) | keeps_plan
""")


# --- what a loss is

OBJECTS = """
def build():
    {made}
    def change():
        {change}
    return trained(nn.Linear(6, 4), loss_fn={loss}, change=change)
"""
"""Of objects that are called: what is made, the loss, and how it changes."""

objects = PROGRAMS.table(globals(), OBJECTS, "made loss change")


class Rated:
    """A loss with a number and with a list, as an object and as a method."""

    rate = 1.0

    def __init__(self) -> None:
        self.held = SimpleNamespace(rates=[1.0])

    def __call__(self, out, y):
        return entropy(out, y) * self.rate * self.held.rates[0]

    def loss(self, out, y):
        return entropy(out, y) * self.rate


class Teacher(nn.Linear):
    rate = 1.0

    def loss(self, out, y):
        return entropy(self(out), y) * self.rate


class NamedLoss:
    def __call__(self, out, y):
        return entropy(out, y) * len(type(self).__name__)


def with_defaults():
    """Return a function with defaults of its own."""

    def loss(out, y, rates=[1.0], *, rate=1.0):  # noqa: B006
        return entropy(out, y) * rates[0] * rate

    return loss


def with_an_attribute():
    def loss(out, y):
        return entropy(out, y) * loss.rate

    loss.rate = 1.0
    return loss


def decorated(function, rates):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args) * rates[0]

    return wrapper


def within_a_context(rates):
    @contextlib.contextmanager
    def scale():
        yield rates[0]

    def loss(out, y):
        with scale() as rate:
            return entropy(out, y) * rate

    return loss


objects("""
callable_objects_attribute | loss = Rated() | loss | loss.rate = 3.0 | is_planned
callable_objects_objects_list | loss = Rated() | loss | loss.held.rates[0] = 3.0
bound_method | held = Rated() | held.loss | held.rate = 3.0
bound_method_of_another_module
    | teacher = Teacher(4, 4) | teacher.loss | teacher.rate = 3.0
partial_with_a_list | rates = [1.0] | partial(weighed, rates) | rates[0] = 3.0
partial_by_keyword
    | loss = partial(lambda out, y, rate: entropy(out, y) * rate, rate=1.0) | loss
    | loss.keywords["rate"] = 3.0
partial_of_a_bound_method_of_a_partial
    | rates = [1.0] | partial(partial(weighed, rates).__call__) | rates[0] = 3.0
    | is_planned
default_argument_changed_inside
    | loss = with_defaults() | loss | loss.__defaults__[0][0] = 3.0
defaults_replaced | loss = with_defaults() | loss | loss.__defaults__ = ([3.0],)
keyword_defaults_changed
    | loss = with_defaults() | loss | loss.__kwdefaults__["rate"] = 3.0
code_replaced
    | loss = lambda out, y: entropy(out, y) | loss
    | loss.__code__ = (lambda out, y: entropy(out, y) * 3).__code__
function_attribute | loss = with_an_attribute() | loss | loss.rate = 3.0
decorated | rates = [1.0] | decorated(entropy, rates) | rates[0] = 3.0
context_manager_around | rates = [1.0] | within_a_context(rates) | rates[0] = 3.0
name_of_a_class
    | kind = type("Loss", (NamedLoss,), {}) | kind() | kind.__name__ = "LongerLoss"
loss_modules_number
    | loss = nn.CrossEntropyLoss() | loss | loss.label_smoothing = 0.3
loss_modules_reduction | loss = nn.CrossEntropyLoss() | loss | loss.reduction = "sum"
loss_modules_buffer_in_place
    | loss = nn.CrossEntropyLoss(torch.ones(4)) | loss
    | loss.weight.copy_(torch.arange(1.0, 5.0))
loss_modules_buffer_replaced
    | loss = nn.CrossEntropyLoss(torch.ones(4)) | loss
    | loss.weight = torch.arange(1.0, 5.0)
loss_modules_buffer_to_none
    | loss = nn.CrossEntropyLoss(torch.arange(1.0, 5.0)) | loss | loss.weight = None
""")


# --- what changes nothing that counts


@PROGRAMS(keeps_plan=True)
def attribute_filled_by_the_first_step() -> Training:
    def read(s, out):
        if s.n is None:
            s.n = out.shape[1] ** 0.5
        return out / s.n

    return trained(Reading(read, n=None))


@PROGRAMS(keeps_plan=True)
def result_kept_for_the_loss() -> Training:
    def read(s, out):
        s.kept = out * 2
        return out

    model = Reading(read)

    def loss(out, y):
        return entropy(out + model.kept, y)

    return trained(model, loss_fn=loss)


# --- generators of random numbers


@PROGRAMS
def random_state_put_back_between() -> Training:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    kept = torch.get_rng_state()
    return trained(model, change=lambda: torch.set_rng_state(kept))


# --- functions that a trace of PyTorch would replace


@torch.fx.wrap
def scaled(out: torch.Tensor) -> torch.Tensor:
    return out * RATE


# -- functions that a step reaches and does not run: what they read decides nothing

FLAGS = {"counts": False}
COUNTER = itertools.count(2)


def next_count():
    return float(next(COUNTER))


def counted(value):
    return value * next_count() if FLAGS["counts"] else value


def not_counting() -> None:
    FLAGS["counts"] = False
    STACK[:] = [1.0]
    set_global("COUNTER", itertools.count(2))


losses("""
a_function_begins_to_run_that_counts
    | not_counting() | counted(entropy(out, y)) | FLAGS["counts"] = True
a_function_that_counts_does_not_run
    | not_counting() | counted(entropy(out, y)) | | is_planned keeps_plan
a_function_runs_beside_one_that_counts
    | not_counting() | counted(helper(entropy(out, y))) | STACK.append(3.0)
    | is_planned
a_thread_runs_a_function_that_counts
    | not_counting(); threads = ThreadPoolExecutor(1)
    | entropy(out, y) * threads.submit(next_count).result()
a_key_function_reads_a_global_beside_one_that_counts
    | not_counting()
    | first, _ = sorted((1.0, 2.0), key=lambda rate: rate * top_of_stack())
    ; counted(entropy(out, y) * first)
    | STACK.append(-1.0) | is_planned
""")


def told_of_collections(phase: str, info: dict[str, int]) -> None:
    CONTEXT.set(time.perf_counter())


@functools.partial(PROGRAMS, is_planned=True)
def a_collector_with_a_callback_runs_at_any_time() -> Training:
    FLAGS["counts"] = False
    thresholds = gc.get_threshold()
    gc.callbacks.append(told_of_collections)
    gc.set_threshold(20)

    def undo() -> None:
        gc.callbacks.remove(told_of_collections)
        gc.set_threshold(*thresholds)

    return trained(
        nn.Linear(6, 4), loss_fn=lambda out, y: counted(entropy(out, y)), undo=undo
    )


class Point(NamedTuple):
    rate: float = 1.0


class Slots:
    __slots__ = ("rate",)

    def __init__(self):
        self.rate = 1.0


losses("""
a_named_tuple
    | points = [Point()] | entropy(out, y) * points[0].rate | points[0] = Point(3.0)
    | is_planned
a_copy_is_changed_in_the_step
    | space = Namespace(); space.rate = 1.0
    | own = copy.deepcopy(space); own.rate = 2 * own.rate; entropy(out, y) * own.rate
    | space.rate = 3.0 | is_planned
a_copy_with_slots_is_read_in_the_step
    | space = Slots() | entropy(out, y) * copy.copy(space).rate | space.rate = 3.0
    | is_planned
a_context_variable
    | CONTEXT.set(1.0)
    | token = CONTEXT.set(2 * CONTEXT.get()); found = entropy(out, y) * CONTEXT.get()
    ; CONTEXT.reset(token); found
    | CONTEXT.set(3.0) | is_planned
constant_of_a_library_replaced
    | SPACE.pi = math.pi | entropy(out * SPACE.pi, y) | SPACE.pi = 3.0
global_disappears
    | set_global("abs", lambda value: value * 3) | abs(entropy(out, y))
    | globals().pop("abs")
builtin_appears
    | vars(builtins).pop("tests_rate", None)
    | entropy(out, y) * getattr(builtins, "tests_rate", 1.0)
    | builtins.tests_rate = 3.0
function_marked_for_traces | | entropy(scaled(out), y) | | is_planned
raises_from_now_on | right = [1] | right[0]; entropy(out, y) | right.clear()
cache_filled_with_a_tensor
    | places = functools.lru_cache(lambda count, *, scale=0.1: torch.arange(count)
    * scale if count < 4 else places(2).repeat(2))
    | entropy(out + places(4), y) | | keeps_plan
cache_filled_anew
    | rates = [1.0]; rate = functools.cache(lambda: torch.tensor(rates[0]))
    | entropy(out, y) * rate() | rates[0] = 3.0; rate.cache_clear(); rate()
cache_filled_with_random_numbers
    | noise = functools.cache(lambda count: torch.rand(count))
    | entropy(out + noise(4), y)
cache_filled_with_a_result
    | results = []; first = functools.cache(lambda _: results[-1].detach().clone())
    | results[:] = [out]; entropy(out + first(0), y)
cache_of_a_function_of_c
    | places = functools.cache(torch.arange) | entropy(out + places(4), y)
cached_list_changes
    | rates = functools.lru_cache(lambda: [1.0]) | entropy(out, y) * rates()[0]
    | rates().insert(0, 3.0) | is_planned
dict_cache_filled_by_the_first_step
    | known = {}
    | known.update({} if out.shape in known else {out.shape: 1.0 / out.shape[1]})
    ; entropy(out, y) * known[out.shape]
    | | keeps_plan
""")


@planned
def a_module_that_is_imported_later():
    """The step imports it only once another one has done so."""
    sys.modules.pop("tests_later", None)

    def loss_fn(out, y):
        if "tests_later" in sys.modules:
            import tests_later

            return entropy(out, y) * tests_later.rate
        return entropy(out, y)

    def change():
        module = sys.modules["tests_later"] = ModuleType("tests_later")
        module.rate = 3.0

    return loss_fn, change
