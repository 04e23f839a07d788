"""Programs whose functions change: losses, closures, globals, caches."""

import builtins
import contextlib
import contextvars
import copy
import functools
import itertools
import math
import operator
import os
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from tests.torch_programs import Programs, Reading, Training, trained

PROGRAMS = Programs()

RATE = 1.0
RATES = {"w": 1.0}
STACK = [1.0]
SPACE = types.ModuleType("space")
CONTEXT = contextvars.ContextVar("CONTEXT", default=1.0)
LOCAL = threading.local()
COUNT = 0


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


def never() -> None:
    pass


# --- what a loss reads


@planned
def closure_number():
    rate = 1.0

    def change():
        nonlocal rate
        rate = 3.0

    return lambda out, y: entropy(out, y) * rate, change


@of_loss
def closure_function():
    scaled = lambda x: x  # noqa: E731

    def change():
        nonlocal scaled
        scaled = lambda x: x * 3  # noqa: E731

    return lambda out, y: scaled(entropy(out, y)), change


@planned
def closure_tensor():
    rate = torch.tensor(1.0)

    def change():
        nonlocal rate
        rate = torch.tensor(3.0)

    return lambda out, y: entropy(out, y) * rate, change


@of_loss
def closure_list():
    rates = [1.0]
    return lambda out, y: entropy(out, y) * rates[0], lambda: rates.__setitem__(0, 3.0)


@of_loss
def closure_of_a_closure():
    rates = [1.0]

    def outer():
        def inner(value):
            return value * rates[0]

        return inner

    inner = outer()
    return lambda out, y: inner(entropy(out, y)), lambda: rates.__setitem__(0, 3.0)


@planned
def global_number():
    globals()["RATE"] = 1.0
    change = functools.partial(globals().__setitem__, "RATE", 3.0)
    return lambda out, y: entropy(out, y) * RATE, change


@of_loss
def global_dict():
    RATES["w"] = 1.0
    return lambda out, y: entropy(out, y) * RATES["w"], lambda: RATES.update(w=3.0)


def helper(value):
    return value * top_of_stack()


def top_of_stack():
    return STACK[-1]


@planned
def helper_of_a_helper_reads_a_global():
    STACK[:] = [1.0]
    return lambda out, y: helper(entropy(out, y)), lambda: STACK.append(3.0)


def plain(value):
    return value


@of_loss
def global_function_replaced():
    globals()["plain"] = lambda value: value
    change = functools.partial(globals().__setitem__, "plain", lambda value: value * 3)
    return lambda out, y: plain(entropy(out, y)), change


@of_loss
def global_disappears():
    """A name of a builtin that a global hides."""
    globals()["abs"] = lambda value: value * 3
    change = functools.partial(globals().pop, "abs")
    return lambda out, y: abs(entropy(out, y)), change


@of_loss
def function_in_a_dict():
    table = {"f": lambda value: value}
    change = functools.partial(table.update, f=lambda value: value * 3)
    return lambda out, y: table["f"](entropy(out, y)), change


@planned
def callable_objects_attribute():
    class Loss:
        rate = 1.0

        def __call__(self, out, y):
            return entropy(out, y) * self.rate

    loss = Loss()
    return loss, lambda: setattr(loss, "rate", 3.0)


@of_loss
def callable_objects_objects_list():
    class Loss:
        held = types.SimpleNamespace(rates=[1.0])

        def __call__(self, out, y):
            return entropy(out, y) * self.held.rates[0]

    loss = Loss()
    return loss, lambda: loss.held.rates.__setitem__(0, 3.0)


@of_loss
def bound_method():
    class Losses:
        rate = 1.0

        def loss(self, out, y):
            return entropy(out, y) * self.rate

    held = Losses()
    return held.loss, lambda: setattr(held, "rate", 3.0)


@of_loss
def bound_method_of_another_module():
    class Teacher(nn.Linear):
        rate = 1.0

        def loss(self, out, y):
            return entropy(self(out), y) * self.rate

    teacher = Teacher(4, 4)
    return teacher.loss, lambda: setattr(teacher, "rate", 3.0)


def weighed(rates, out, y):
    return entropy(out, y) * rates[0]


@of_loss
def partial_with_a_list():
    rates = [1.0]
    return functools.partial(weighed, rates), lambda: rates.__setitem__(0, 3.0)


@of_loss
def partial_by_keyword():
    loss = functools.partial(lambda out, y, rate: entropy(out, y) * rate, rate=1.0)
    return loss, lambda: loss.keywords.update(rate=3.0)


@planned
def partial_of_a_bound_method_of_a_partial():
    rates = [1.0]
    inner = functools.partial(weighed, rates)
    return functools.partial(inner.__call__), lambda: rates.__setitem__(0, 3.0)


@of_loss
def default_argument_changed_inside():
    def loss(out, y, rates=[1.0]):  # noqa: B006
        return entropy(out, y) * rates[0]

    return loss, lambda: loss.__defaults__[0].__setitem__(0, 3.0)


@of_loss
def defaults_replaced():
    def loss(out, y, rate=1.0):
        return entropy(out, y) * rate

    return loss, lambda: setattr(loss, "__defaults__", (3.0,))


@of_loss
def keyword_defaults_changed():
    def loss(out, y, *, rate=1.0):
        return entropy(out, y) * rate

    return loss, lambda: loss.__kwdefaults__.update(rate=3.0)


@of_loss
def code_replaced():
    def loss(out, y):
        return entropy(out, y)

    other = lambda out, y: entropy(out, y) * 3  # noqa: E731
    return loss, lambda: setattr(loss, "__code__", other.__code__)


@of_loss
def function_attribute():
    def loss(out, y):
        return entropy(out, y) * loss.rate

    loss.rate = 1.0
    return loss, lambda: setattr(loss, "rate", 3.0)


@of_loss
def decorated():
    rates = [1.0]

    def scaled(function):
        @functools.wraps(function)
        def wrapper(*args):
            return function(*args) * rates[0]

        return wrapper

    return scaled(entropy), lambda: rates.__setitem__(0, 3.0)


@of_loss
def context_manager_around():
    rates = [1.0]

    @contextlib.contextmanager
    def scale():
        yield rates[0]

    def loss(out, y):
        with scale() as rate:
            return entropy(out, y) * rate

    return loss, lambda: rates.__setitem__(0, 3.0)


@of_loss
def generator_expression():
    rates = [1.0, 1.0]
    return (
        lambda out, y: entropy(out, y) * sum(rate for rate in rates),
        lambda: rates.append(1.0),
    )


@of_loss
def mapped_and_sorted():
    rates = [1.0, 2.0]
    largest = lambda: sorted(map(operator.neg, rates))[0]  # noqa: E731
    return lambda out, y: entropy(out, y) * -largest(), lambda: rates.append(3.0)


@of_loss
def attribute_getter():
    held = types.SimpleNamespace(rate=1.0)
    rate_of = operator.attrgetter("rate")
    return (
        lambda out, y: entropy(out, y) * rate_of(held),
        lambda: setattr(held, "rate", 3.0),
    )


@of_loss
def item_getter():
    rates = {"w": 1.0}
    rate_of = operator.itemgetter("w")
    return lambda out, y: entropy(out, y) * rate_of(rates), lambda: rates.update(w=3.0)


@of_loss
def single_dispatch():
    @functools.singledispatch
    def rate_of(value):
        return 1.0

    return (
        lambda out, y: entropy(out, y) * rate_of(0),
        lambda: rate_of.register(int, lambda value: 3.0),
    )


@of_loss
def module_namespace():
    SPACE.rate = 1.0
    return lambda out, y: entropy(out, y) * SPACE.rate, lambda: setattr(
        SPACE, "rate", 3.0
    )


@of_loss
def module_namespace_by_a_name_put_together():
    SPACE.rate = 1.0
    return (
        lambda out, y: entropy(out, y) * getattr(SPACE, "".join(("ra", "te"))),
        lambda: setattr(SPACE, "rate", 3.0),
    )


@of_loss
def class_as_a_namespace():
    Namespace.rate = 1.0
    return (
        lambda out, y: entropy(out, y) * Namespace.rate,
        lambda: setattr(Namespace, "rate", 3.0),
    )


@of_loss
def globals_asked():
    globals()["RATE"] = 1.0
    change = functools.partial(globals().__setitem__, "RATE", 3.0)
    return lambda out, y: entropy(out, y) * globals()["RA" + "TE"], change


@of_loss
def evaluated_text():
    globals()["RATE"] = 1.0
    change = functools.partial(globals().__setitem__, "RATE", 3.0)
    return lambda out, y: entropy(out, y) * eval("RATE"), change


@of_loss
def context_variable():
    CONTEXT.set(1.0)
    return lambda out, y: entropy(out, y) * CONTEXT.get(), lambda: CONTEXT.set(3.0)


@of_loss
def thread_local():
    LOCAL.rate = 1.0
    return lambda out, y: entropy(out, y) * LOCAL.rate, lambda: setattr(
        LOCAL, "rate", 3.0
    )


@of_loss
def environment_variable():
    os.environ["MUCUDNN_TEST_RATE"] = "1"
    return (
        lambda out, y: entropy(out, y) * float(os.environ["MUCUDNN_TEST_RATE"]),
        lambda: os.environ.update(MUCUDNN_TEST_RATE="3"),
    )


@of_loss
def environment_variable_appears():
    return (
        lambda out, y: entropy(out, y) * float(os.getenv("MUCUDNN_TEST_RATE", "1")),
        lambda: os.environ.update(MUCUDNN_TEST_RATE="3"),
    )


@PROGRAMS
def file_read() -> Training:
    with tempfile.NamedTemporaryFile("w", delete=False) as file:
        file.write("1.0")
    path = Path(file.name)
    return trained(
        nn.Linear(6, 4),
        loss_fn=lambda out, y: entropy(out, y) * float(path.read_text()),
        change=lambda: path.write_text("3.0"),
        undo=path.unlink,
    )


@of_loss
def library_function_replaced():
    SPACE.squash = torch.tanh
    change = lambda: setattr(SPACE, "squash", torch.sin)  # noqa: E731
    return lambda out, y: entropy(SPACE.squash(out), y), change


SOFTSIGN = functional.softsign


@PROGRAMS
def torch_function_replaced() -> Training:
    return trained(
        nn.Linear(6, 4),
        loss_fn=lambda out, y: entropy(functional.softsign(out), y),
        change=lambda: setattr(functional, "softsign", lambda x: x / 3),
        undo=lambda: setattr(functional, "softsign", SOFTSIGN),
    )


@PROGRAMS
def builtin_appears() -> Training:
    return trained(
        nn.Linear(6, 4),
        loss_fn=lambda out, y: entropy(out, y) * getattr(builtins, "tests_rate", 1.0),
        change=lambda: setattr(builtins, "tests_rate", 3.0),
        undo=lambda: vars(builtins).pop("tests_rate", None),
    )


@of_loss
def raises_from_now_on():
    wrong = []

    def loss(out, y):
        if wrong:
            raise RuntimeError("the loss is wrong")
        return entropy(out, y)

    return loss, lambda: wrong.append(1)


@of_loss
def deadline_passes():
    deadline = time.monotonic() + 1e9

    def change():
        nonlocal deadline
        deadline = 0.0

    return (
        lambda out, y: entropy(out, y) * (1.0 if time.monotonic() < deadline else 3.0),
        change,
    )


@of_loss
def clock_replaced():
    now = [1.0]
    clock = types.SimpleNamespace(time=lambda: now[0])
    return lambda out, y: entropy(out, y) * clock.time(), lambda: now.__setitem__(
        0, 3.0
    )


@of_loss
def cache_cleared():
    rates = [1.0]

    @functools.cache
    def rate():
        return rates[0]

    rate()
    rates[0] = 3.0
    return lambda out, y: entropy(out, y) * rate(), rate.cache_clear


@of_loss
def cache_by_argument():
    rates = [1.0]

    @functools.lru_cache(maxsize=2)
    def rate(name):
        return rates[0]

    def change():
        rates[0] = 3.0
        rate("a"), rate("b")  # what was asked before is forgotten

    return lambda out, y: entropy(out, y) * rate("w"), change


@same_plan
def cache_filled_with_a_tensor():
    @functools.lru_cache
    def places(count, *, scale=0.1):
        return torch.arange(count) * scale if count < 4 else places(2).repeat(2)

    return lambda out, y: entropy(out + places(4), y), never


@of_loss
def cache_filled_anew():
    rates = [1.0]

    @functools.cache
    def rate():
        return torch.tensor(rates[0])

    def change():
        rates[0] = 3.0
        rate.cache_clear()
        rate()

    return lambda out, y: entropy(out, y) * rate(), change


@of_loss
def cache_filled_with_random_numbers():
    @functools.cache
    def noise(count):
        return torch.rand(count)

    return lambda out, y: entropy(out + noise(4), y), never


@of_loss
def cache_filled_with_a_result():
    @functools.cache
    def first(_):
        return results[-1].detach().clone()

    results = []

    def loss(out, y):
        results[:] = [out]
        return entropy(out + first(0), y)

    return loss, never


@of_loss
def cache_of_a_function_of_c():
    places = functools.cache(torch.arange)
    return lambda out, y: entropy(out + places(4), y), never


@planned
def cached_list_changes():
    @functools.lru_cache
    def rates():
        return [1.0]

    return lambda out, y: entropy(out, y) * rates()[0], lambda: rates().insert(0, 3.0)


@of_loss
def mode_by_text_of_a_function():
    def loss(out, y):
        return entropy(out, y) * len(loss.__doc__)

    loss.__doc__ = "a"
    return loss, lambda: setattr(loss, "__doc__", "abc")


@of_loss
def name_of_a_class():
    class Loss:
        def __call__(self, out, y):
            return entropy(out, y) * len(type(self).__name__)

    loss = Loss()
    return loss, lambda: setattr(Loss, "__name__", "LongerLoss")


# --- losses that are modules


def of_loss_module(
    name: str, make: Callable[[], nn.Module], change: Callable[[Any], Any]
) -> None:
    """Add a program whose loss is a module, and is changed."""

    def build() -> Training:
        loss_fn = make()
        return trained(nn.Linear(6, 4), loss_fn=loss_fn, change=lambda: change(loss_fn))

    PROGRAMS(build, name=name)


of_loss_module(
    "loss_modules_number",
    nn.CrossEntropyLoss,
    lambda loss: setattr(loss, "label_smoothing", 0.3),
)
of_loss_module(
    "loss_modules_reduction",
    nn.CrossEntropyLoss,
    lambda loss: setattr(loss, "reduction", "sum"),
)
of_loss_module(
    "loss_modules_buffer_in_place",
    lambda: nn.CrossEntropyLoss(torch.ones(4)),
    lambda loss: loss.weight.copy_(torch.arange(1.0, 5.0)),
)
of_loss_module(
    "loss_modules_buffer_replaced",
    lambda: nn.CrossEntropyLoss(torch.ones(4)),
    lambda loss: setattr(loss, "weight", torch.arange(1.0, 5.0)),
)
of_loss_module(
    "loss_modules_buffer_to_none",
    lambda: nn.CrossEntropyLoss(torch.arange(1.0, 5.0)),
    lambda loss: setattr(loss, "weight", None),
)


# --- what changes nothing that counts


@same_plan
def nothing_changes():
    return entropy, never


@same_plan
def unrelated_global_written():
    return entropy, lambda: globals().update(UNRELATED=time.time())


@same_plan
def dict_cache_filled_by_the_first_step():
    known = {}

    def loss(out, y):
        if out.shape not in known:
            known[out.shape] = 1.0 / out.shape[1]
        return entropy(out, y) * known[out.shape]

    return loss, never


@same_plan
def equal_list_replaced():
    rates = [1.0, 2.0]

    def change():
        nonlocal rates
        rates = [1.0, 2.0]

    return lambda out, y: entropy(out, y) * rates[1], change


@PROGRAMS(keeps_plan=True)
def attribute_filled_by_the_first_step() -> Training:
    def read(s, out):
        if s.n is None:
            s.n = out.shape[1] ** 0.5
        return out / s.n

    return trained(Reading(read, n=None))


@PROGRAMS(keeps_plan=True)
def written_before_it_is_read() -> Training:
    def read(s, out):
        s.now = 2.0
        return out * s.now

    return trained(Reading(read, now=0.0))


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
def seeded_between() -> Training:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    return trained(model, change=lambda: torch.manual_seed(7))


@PROGRAMS
def random_state_put_back_between() -> Training:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))
    kept = torch.get_rng_state()
    return trained(model, change=lambda: torch.set_rng_state(kept))


@PROGRAMS
def constant_of_a_library_replaced() -> Training:
    SPACE.pi = math.pi
    model = Reading(lambda s, out: out * SPACE.pi)
    return trained(model, change=lambda: setattr(SPACE, "pi", 3.0))


# --- functions that a trace of PyTorch would replace


@torch.fx.wrap
def scaled(out: torch.Tensor) -> torch.Tensor:
    return out * RATE


@planned
def function_marked_for_traces():
    def loss(out, y):
        return entropy(scaled(out), y)

    return loss, never


# -- functions that a step reaches and does not run: what they read decides nothing

FLAGS = {"counts": False}
COUNTER = itertools.count(2)


def next_count():
    return float(next(COUNTER))


def counted(value):
    return value * next_count() if FLAGS["counts"] else value


def counted_later(change):
    FLAGS["counts"] = False
    globals()["COUNTER"] = itertools.count(2)
    return lambda out, y: counted(entropy(out, y)), change


@of_loss
def a_function_begins_to_run_that_counts():
    return counted_later(lambda: FLAGS.update(counts=True))


@functools.partial(of_loss, is_planned=True, keeps_plan=True)
def a_function_that_counts_does_not_run():
    return counted_later(never)


@of_loss
def a_thread_runs_a_function_that_counts():
    globals()["COUNTER"] = itertools.count(2)
    with_threads = ThreadPoolExecutor(1)

    def loss_fn(out, y):
        return entropy(out, y) * with_threads.submit(next_count).result()

    return loss_fn, never


@planned
def a_function_runs_beside_one_that_counts():
    FLAGS["counts"] = False
    STACK[:] = [1.0]

    def loss_fn(out, y):
        return counted(helper(entropy(out, y)))

    return loss_fn, lambda: STACK.append(3.0)


@planned
def a_key_function_reads_a_global_beside_one_that_counts():
    FLAGS["counts"] = False
    STACK[:] = [1.0]

    def loss_fn(out, y):
        first, _ = sorted((1.0, 2.0), key=lambda rate: rate * top_of_stack())
        return counted(entropy(out, y) * first)

    return loss_fn, lambda: STACK.append(-1.0)


@planned
def a_context_variable():
    CONTEXT.set(1.0)

    def loss_fn(out, y):
        token = CONTEXT.set(2 * CONTEXT.get())
        try:
            return entropy(out, y) * CONTEXT.get()
        finally:
            CONTEXT.reset(token)

    return loss_fn, lambda: CONTEXT.set(3.0)


class Point(NamedTuple):
    rate: float = 1.0


@planned
def a_named_tuple():
    points = [Point()]

    def loss_fn(out, y):
        return entropy(out, y) * points[0].rate

    return loss_fn, lambda: points.__setitem__(0, Point(3.0))


@planned
def a_copy_is_changed_in_the_step():
    space = Namespace()
    space.rate = 1.0

    def loss_fn(out, y):
        own = copy.deepcopy(space)
        own.rate = 2 * own.rate
        return entropy(out, y) * own.rate

    return loss_fn, lambda: setattr(space, "rate", 3.0)


@planned
def a_copy_with_slots_is_read_in_the_step():
    class Slots:
        __slots__ = ("rate",)

    space = Slots()
    space.rate = 1.0

    def loss_fn(out, y):
        return entropy(out, y) * copy.copy(space).rate

    return loss_fn, lambda: setattr(space, "rate", 3.0)


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
        module = sys.modules["tests_later"] = types.ModuleType("tests_later")
        module.rate = 3.0

    return loss_fn, change
