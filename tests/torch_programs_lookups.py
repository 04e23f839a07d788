"""Programs whose state is found by other ways than an attribute of an object.

Classes and their bases (`super()`), values with attributes, modules that a step imports
when it runs, files, objects of PyTorch's own, and tensors that only an optimizer has.
"""

# ruff: noqa: F401  (rows of tables use what is imported)

import abc
import configparser
import contextlib
import datetime
import decimal
import enum
import functools
import gc
import glob
import importlib
import logging
import os
import pathlib
import random
import sqlite3
import subprocess
import sys
import tempfile
import threading
import types
import weakref
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize

from tests.torch_programs import Programs, Reading, Training, perceptron, sgd, trained

PROGRAMS = Programs()
SCALES = types.ModuleType("tests_scales")
SCALES.__file__ = str(pathlib.Path(__file__).with_name("tests_scales.py"))
SCALES.now = 1.0  # type: ignore[attr-defined]
FOLDER = pathlib.Path(tempfile.mkdtemp())
LOG = logging.getLogger("tests.lookups")


READS = """
def build():
    SCALE[0] = 1.0
    {made}
    def read(s, out):
        {result}
    def change():
        {change}
    return trained(Reading(read), change=change)
"""
"""Of what is made, what a module does with its network's output, and a change."""

reads = PROGRAMS.table(globals(), READS, "made result change")

SCALE = [1.0]
"""What functions read that are reached in odd ways."""


# --- classes


def family() -> tuple[type, Any]:
    class Parent:
        def scale(self, y: torch.Tensor) -> torch.Tensor:
            return y

        @property
        def factor(self) -> float:
            return 1.0

    class Child(Parent):
        def scale(self, y: torch.Tensor) -> torch.Tensor:
            return super().scale(y) * 2

        @property
        def factor(self) -> float:
            return super().factor * 2

    return Parent, Child()


def tripled(_: Any, y: torch.Tensor) -> torch.Tensor:
    return y * 3


def namespace() -> Any:
    class Namespace:
        @staticmethod
        def static(y: torch.Tensor) -> torch.Tensor:
            return y

        @classmethod
        def of_class(cls, y: torch.Tensor) -> torch.Tensor:
            return y

        def plain(y: torch.Tensor) -> torch.Tensor:  # noqa: N805
            return y

    return Namespace


def constructed() -> Any:
    class Made:
        def __init__(self) -> None:
            self.zoom = 1.0

    return Made


def abstract() -> Any:
    class Wanted(abc.ABC):  # noqa: B024
        pass

    return Wanted


def larger(self: Any) -> None:
    self.zoom = 3.0


class Plain:
    zoom = 1.0


class Fixed(type):
    def __setattr__(cls, name: str, value: Any) -> None:
        raise AttributeError(name)


class FixedClass(metaclass=Fixed):
    def __init__(self) -> None:
        self.zoom = 1.0


class Scaling(type):
    def __call__(cls) -> Any:
        made = super().__call__()
        made.zoom = SCALE[0]
        return made


class ScaledClass(metaclass=Scaling):
    pass


reads("""
method_of_super_replaced
    | parent, child = family() | child.scale(out) | parent.scale = tripled
property_of_super_replaced
    | parent, child = family() | out * child.factor
    | parent.factor = property(lambda _: 3.0)
static_method_by_the_class_replaced
    | held = namespace() | held.static(out)
    | held.static = staticmethod(lambda y: y * 3)
class_method_by_the_class_replaced
    | held = namespace() | held.of_class(out) | held.of_class = classmethod(tripled)
function_in_a_class_replaced
    | held = namespace() | held.plain(out) | held.plain = lambda y: y * 3
attribute_of_a_class_appears
    | held = namespace() | out * getattr(held, "zoom", 1.0) | held.zoom = 3.0
attribute_of_ones_own_class_appears
    | held = namespace(); one = held()
    | out * (3.0 if hasattr(type(one), "zoom") else 1.0) | held.zoom = 3.0
attributes_of_a_class_are_counted
    | held = namespace() | out * len(vars(held)) | held.zoom = 3.0
constructor_replaced
    | made = constructed() | out * made().zoom | made.__init__ = larger
bases_replaced
    | parent, child = family(); kind = type(child)
    | out * child.factor
    | kind.__bases__ = (type("Other", (), {"factor": 3.0}),)
class_made_by_a_function_of_python
    | held = types.new_class("Held", (), {}, lambda names: names.update(zoom=1.0))
    | out * held.zoom | held.zoom = 3.0
class_made_by_a_metaclass
    | held = abc.ABCMeta("Held", (), {"zoom": 1.0}) | out * held().zoom
    | held.zoom = 3.0
class_registered_as_another
    | wanted = abstract(); one = Plain()
    | out * (3 if isinstance(one, wanted) else 1) | wanted.register(Plain)
class_gets_a_subclass
    | parent, child = family()
    | out * len(parent.__subclasses__()) * child.factor
    | globals().update(_SUBCLASS=type("Other", (parent,), {}))
metaclass_that_forbids_to_set | held = FixedClass() | out * held.zoom | held.zoom = 3.0
metaclass_that_is_called | | out * ScaledClass().zoom | SCALE[0] = 3.0
""")


@PROGRAMS
def attribute_of_a_class_is_made_by_the_step() -> Training:
    class Cache:
        pass

    def read(_: Any, y: torch.Tensor) -> torch.Tensor:
        if not hasattr(Cache, "ones"):
            Cache.ones = torch.ones(4) * 2  # type: ignore[attr-defined]
        return y * Cache.ones  # type: ignore[attr-defined]

    training = trained(Reading(read))
    x = torch.randn(2, 6)
    training.watched = lambda: training.model(x)
    return training


# --- values that have attributes or methods of their own


class Speed(enum.Enum):
    FAST = 1

    def __init__(self, _: int) -> None:
        self.zoom = 1.0


class Rate(enum.Enum):
    ONE = 1

    def now(self) -> float:
        return SCALE[0]


class Temperature(float):
    zoom = 1.0

    def now(self) -> float:
        return self * SCALE[0]


class Name(str):
    __slots__ = ("zoom",)


reads("""
attribute_of_a_member
    | Speed.FAST.zoom = 1.0 | out * Speed.FAST.zoom | Speed.FAST.zoom = 3.0
attribute_of_a_member_by_its_value
    | Speed.FAST.zoom = 1.0 | out * Speed(1).zoom | Speed.FAST.zoom = 3.0
method_of_a_member | rates = [Rate.ONE] | out * rates[0].now() | SCALE[0] = 3.0
attribute_of_a_number | warm = Temperature(2.0) | out * warm.zoom | warm.zoom = 3.0
method_of_a_number | warm = [Temperature(2.0)] | out * warm[0].now() | SCALE[0] = 3.0
event_is_set
    | held = threading.Event() | out * 3 if held.is_set() else out | held.set()
attribute_of_a_text
    | name = Name("a"); name.zoom = 1.0 | out * name.zoom | name.zoom = 3.0
object_behind_a_proxy
    | kept = Plain(); proxies = [weakref.proxy(kept)] | out * proxies[0].zoom
    | kept.zoom = 3.0
""")


# --- objects of libraries


def logs(level: int, *handlers: logging.Handler) -> None:
    LOG.setLevel(level)
    LOG.parent.setLevel(logging.WARNING)  # type: ignore[union-attr]
    LOG.handlers[:] = handlers


reads("""
polynomial_of_numpy
    | held = np.poly1d([1.0, 2.0]) | out * float(held(2.0)) | held.coeffs[0] = 3.0
function_made_by_numpy
    | held = np.vectorize(lambda v: v * 2) | out * float(held(1.0))
    | held.pyfunc = lambda v: v * 5
iterator_of_numpy
    | held = np.nditer(np.arange(1.0, 9.0)) | out * float(next(held)) |
    | changes_in_step
semaphore | held = threading.Semaphore(2) | out * held._value | held.acquire()
lock | held = threading.Lock() | out * (3 if held.locked() else 1) | held.acquire()
state_of_a_partial_function
    | held = functools.partial(max, 1.0) | out * held(0.5)
    | held.__setstate__((max, (4.0,), {}, None))
pytorchs_generator_by_name
    | | out + torch.rand(4, generator=torch.default_generator) | | is_planned
seed_of_a_generator
    | held = torch.Generator().manual_seed(1) | out * held.initial_seed()
    | held.manual_seed(3)
name_of_the_thread
    | | out * float(len(threading.current_thread().name))
    | threading.current_thread().name = "abc"
garbage_is_collected_by_itself
    | gc.enable() | out * 3 if gc.isenabled() else out | gc.disable()
decimal_numbers_have_been_rounded
    | decimal.getcontext().clear_flags()
    | out * (3 if decimal.getcontext().flags[decimal.Inexact] else 1)
    | decimal.Decimal(1) / decimal.Decimal(3)
level_of_a_logger
    | logs(30) | LOG.debug(""); out * (3 if LOG.isEnabledFor(10) else 1)
    | LOG.setLevel(10) | is_planned
level_of_a_logger_above
    | logs(0); LOG.parent.setLevel(40) | out * LOG.getEffectiveLevel()
    | LOG.parent.setLevel(30)
level_of_a_logger_asked_for
    | logs(30) | out * logging.getLogger("tests.lookups").level | LOG.setLevel(10)
level_of_all_loggers
    | logs(0); level = logging.root.level | out * logging.getLogger().level
    | logging.root.setLevel(level + 1)
handlers_of_a_logger
    | logs(0); held = logging.NullHandler() | out * (3 if held in LOG.handlers else 1)
    | logs(0, held)
""")


# --- numbers and tensors that a capture has others for

reads("""
number_of_a_tensor_is_a_float
    | | value = out.mean().item(); out * (2 if isinstance(value, float) else 3)
    | | is_planned
numbers_of_a_tensor_are_floats
    | | values = out.mean(1).tolist()
    ; out * (2 if all(isinstance(value, float) for value in values) else 3)
    | | is_planned
class_of_a_tensor | | out * (1 if type(out) is torch.Tensor else 3)
text_of_a_tensor | held = [] | held.append(f"{out}"); out * len(held[-1])
text_of_a_plain_tensor
    | held = torch.ones(2) | out * len(str(held)) | held.fill_(0.5)
class_of_a_parameter
    | | out * (3 if s.net[0].weight.__class__ == nn.Parameter else 1)
class_of_all_parameters
    | | out * (3 if all(type(p) is nn.Parameter for p in s.parameters()) else 1)
class_of_tensors_that_are_not_there
    | held = []
    | out * (3 if held and all(type(t) is torch.Tensor for t in held) else 1)
    | | is_planned
class_of_a_tensor_by_isinstance
    | held = [1.0] | found = isinstance(out, torch.Tensor) and type(held) is list
    ; out * (3 if found else 1)
    | | is_planned
type_of_a_number_of_a_tensor
    | | value = out.mean().item(); out * (2 if type(value) is float else 3)
""")


@PROGRAMS
def parametrization_that_is_cached_in_one_step() -> Training:
    class Noisy(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight + torch.rand(())

    model = perceptron()
    parametrize.register_parametrization(model[0], "weight", Noisy())
    return trained(
        model,
        loss_fn=lambda y, t: functional.cross_entropy(y, t) * model[0].weight.sum(),
        around=lambda n: parametrize.cached() if n == 2 else contextlib.nullcontext(),
    )


TARGETS = """
def build():
    training = trained(perceptron())
    (_, first), (_, second) = training.batches
    table = {table}
    training.loss_fn = lambda y, t: functional.cross_entropy(y, t) * {rate}
    return training
"""

PROGRAMS.table(globals(), TARGETS, "table rate")("""
identity_of_the_batch | {id(second): 3.0} | table.get(id(t), 1.0)
table_by_the_batch | {second: 3.0} | (3.0 if t in table else 1.0)
table_by_a_number_of_the_batch
    | dict(enumerate([1.0, 3.0, 5.0, 7.0])) | table[t[0].item()] | is_planned
""")


# --- descriptors


def dispatched() -> Any:
    class Held:
        @functools.singledispatchmethod
        def zoom(self, _: Any) -> float:
            return SCALE[0]

    return Held()


class PartlyCalled:
    def twice(self, factor: float) -> float:
        return factor * SCALE[0]

    zoom = functools.partialmethod(twice, 2.0)


class Setting:
    kept: Any = None

    @property
    def out(self) -> Any:
        return self.kept

    @out.setter
    def out(self, value: Any) -> None:
        self.kept = value * SCALE[0]


class ComputedOnce:
    @functools.cached_property
    def zoom(self) -> float:
        return SCALE[0]


reads("""
method_dispatched_by_type | held = dispatched() | out * held.zoom(1) | SCALE[0] = 3.0
method_dispatched_by_a_new_type
    | held = dispatched(); register = vars(type(held))["zoom"].register
    | out * held.zoom(1) | register(int, lambda *_: 3.0)
method_with_arguments_given
    | held = PartlyCalled() | out * held.zoom() | SCALE[0] = 3.0
property_that_is_set | held = Setting() | held.out = out; held.kept | SCALE[0] = 3.0
property_that_is_computed_once | | out * ComputedOnce().zoom | SCALE[0] = 3.0
""")


# --- modules, files and libraries


def imported() -> None:
    SCALES.now = 1.0  # type: ignore[attr-defined]
    sys.modules["tests_scales"] = SCALES


def scale_of(name: str) -> float:
    if name != "later":
        raise AttributeError(name)
    return SCALE[0]


def flag_file() -> pathlib.Path:
    flag = FOLDER / "flag"
    flag.unlink(missing_ok=True)
    return flag


def save_tensor(value: float) -> str:
    path = str(FOLDER / "values.pt")
    torch.save(torch.full((4,), value), path)
    return path


def save_array(value: float) -> str:
    path = str(FOLDER / "values.npy")
    np.save(path, np.full(4, value, np.float32))
    return path


def saved_row(value: float) -> str:
    path = str(FOLDER / "rows.db")
    pathlib.Path(path).unlink(missing_ok=True)
    with contextlib.closing(sqlite3.connect(path)) as rows:
        rows.execute("create table scales (scale)")
        rows.execute("insert into scales values (?)", (value,))
        rows.commit()
    return path


def row_of(path: str) -> float:
    with contextlib.closing(sqlite3.connect(path)) as rows:
        (found,) = rows.execute("select scale from scales").fetchone()
    return float(found)


def archived(text: str) -> str:
    path = str(FOLDER / "texts.zip")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("scale", text)
    return path


def configured() -> configparser.ConfigParser:
    held = configparser.ConfigParser()
    held.read_string("[model]\nscale = 1.0")
    return held


reads("""
imported_by_import_from
    | imported() | from tests_scales import now; out * now | SCALES.now = 3.0
imported_by_import
    | imported() | import tests_scales; out * tests_scales.now | SCALES.now = 3.0
imported_name_that_a_function_gives
    | imported(); vars(SCALES)["__getattr__"] = scale_of
    | import tests_scales; out * tests_scales.later | SCALE[0] = 3.0 | is_planned
imported_by_name
    | imported() | out * importlib.import_module("tests_scales").now | SCALES.now = 3.0
imported_by_table
    | imported() | out * sys.modules["tests_scales"].now | SCALES.now = 3.0
file_appears | flag = flag_file() | out * (3 if flag.exists() else 1) | flag.touch()
file_appears_by_os
    | flag = flag_file() | out * (3 if os.path.exists(flag) else 1) | flag.touch()
file_appears_in_a_list
    | flag = flag_file() | out * (3 if "flag" in os.listdir(flag.parent) else 1)
    | flag.touch()
file_appears_by_a_function_of_another_name
    | flag = flag_file(); there = os.path.exists | out * (3 if there(flag) else 1)
    | flag.touch()
file_opened_by_a_function_in_a_table
    | flag = flag_file(); flag.write_text("1.0"); table = {"read": open}
    | out * float(table["read"](flag).read()) | flag.write_text("3.0")
file_read_by_a_path_of_the_step
    | flag = flag_file(); flag.write_text("1.0")
    | out * float(pathlib.Path(flag).open().read()) | flag.write_text("3.0")
files_found_by_a_pattern
    | flag = flag_file() | out * (1 + len(glob.glob(str(flag)))) | flag.touch()
home_is_asked
    | os.environ["HOME"] = "/a" | out * float(len(os.path.expanduser("~")))
    | os.environ["HOME"] = "/abc"
home_is_asked_by_a_path
    | os.environ["HOME"] = "/a" | out * float(len(str(pathlib.Path.home())))
    | os.environ["HOME"] = "/abc"
environment_asked_by_a_function_of_another_name
    | os.environ["TESTS_SCALE"] = "1.0"; asked = os.getenv
    | out * float(asked("TESTS_SCALE")) | os.environ["TESTS_SCALE"] = "3.0"
file_read
    | flag = flag_file(); flag.write_text("1.0") | out * float(flag.read_text())
    | flag.write_text("3.0")
file_read_in_an_archive
    | path = archived("1.0")
    | out * float(zipfile.ZipFile(path).read("scale")) | archived("3.0")
row_read_from_a_data_base
    | path = saved_row(1.0) | out * row_of(path) | saved_row(3.0)
file_read_by_numpy
    | flag = flag_file(); np.ones(4, "f").tofile(flag)
    | out * torch.from_numpy(np.fromfile(flag, "f")) | np.zeros(4, "f").tofile(flag)
file_mapped_by_numpy
    | path = save_array(1.0)
    | out * torch.tensor(np.array(np.memmap(path, "f", "r", 128))) | save_array(3.0)
program_run_by_the_step
    | flag = flag_file() | out * len(subprocess.check_output(["ls", FOLDER]))
    | flag.touch()
tensor_loaded
    | path = save_tensor(1.0) | out * torch.load(path) | save_tensor(3.0)
array_loaded
    | path = save_array(1.0) | out * torch.from_numpy(np.load(path)) | save_array(3.0)
generator_of_numpys_bits
    | bits = np.random.PCG64(0) | out * (1 + bits.random_raw() % 7) | | changes_in_step
generator_of_the_system
    | draws = random.SystemRandom() | out * (1 + 0 * draws.random())
today_is_asked
    | start = datetime.datetime.now() - datetime.timedelta(1)
    ; later = lambda: datetime.datetime.now() > start
    | out * (3 if later() else 1)
configuration_read_by_a_parser
    | held = configured() | out * held.getfloat("model", "scale")
    | held.set("model", "scale", "3.0")
data_set_replaced
    | held = torch.utils.data.TensorDataset(torch.ones(4)) | out * held.tensors[0]
    | held.tensors = (torch.ones(4) * 3,)
scaler_of_gradients
    | held = torch.cuda.amp.GradScaler(enabled=False)
    | out * (3 if held.is_enabled() else 1) | held._enabled = True
distributions_scale
    | normal = torch.distributions.Normal(torch.zeros(4), torch.ones(4))
    | out - normal.log_prob(out) | normal.scale = torch.ones(4) * 3
""")


@PROGRAMS(changes_in_step=True)
def generator_made_by_the_step() -> Training:
    drawn: list[float] = []

    def read(_: Any, y: torch.Tensor) -> torch.Tensor:
        drawn.append(float(np.random.default_rng().random()))
        return y

    return trained(Reading(read), watched=lambda: len(drawn))


def replacing(model: nn.Module, holder: Any, name: str, new: Any) -> Training:
    """Return a training in which a function is replaced."""
    old = getattr(holder, name)
    put = functools.partial(setattr, holder, name)
    return trained(model, change=lambda: put(new), undo=lambda: put(old))


_LINEAR, _CALL = functional.linear, nn.Module.__call__


@PROGRAMS
def function_beneath_a_layer_replaced() -> Training:
    return replacing(perceptron(), functional, "linear", lambda *a: _LINEAR(*a) * 2)


@PROGRAMS
def torch_function_replaced() -> Training:
    model = Reading(lambda s, out: functional.softsign(out))
    return replacing(model, functional, "softsign", lambda x: x / 3)


@PROGRAMS(is_planned=True)
def call_of_all_modules_replaced() -> Training:
    doubled = lambda module, x: _CALL(module, x) * 2  # noqa: E731
    return replacing(perceptron(), nn.Module, "__call__", doubled)


@PROGRAMS
def layers_own_forward_beneath_super_replaced() -> Training:
    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    tripled = lambda layer, x: _LINEAR(x, layer.weight) * 3  # noqa: E731
    return replacing(Own(6, 4), nn.Linear, "forward", tripled)


# --- objects of PyTorch's own


def scheduled(
    name: str, weight: Callable[[Any], float], factor: float, **options: Any
) -> None:
    """Add a program whose loss reads a scheduler, which is stepped after each step."""

    def program() -> Training:
        training = trained(perceptron())
        scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 1, factor)
        training.loss_fn = lambda y, t: (
            functional.cross_entropy(y, t) * weight(scheduler)
        )
        training.after = lambda *_: scheduler.step()
        return training

    PROGRAMS(program, name=name, **options)


scheduled("rate_of_a_scheduler_in_the_loss", lambda s: s.get_last_lr()[0], 0.5)
scheduled("epoch_of_a_scheduler_in_the_loss", lambda s: 1.0 + s.last_epoch, 1.0)


@PROGRAMS
def rate_of_a_group_in_the_loss() -> Training:
    training = trained(perceptron())
    (group,) = training.optimizer.param_groups
    optimizer = training.optimizer
    training.loss_fn = lambda y, t: (
        functional.cross_entropy(y, t) * optimizer.param_groups[0]["lr"]
    )
    training.before = lambda number: group.update(lr=0.1 + 0.1 * number)
    return training


@PROGRAMS
def state_of_the_optimizer_in_the_loss() -> Training:
    model = perceptron()
    optimizer = sgd(model)

    def loss_fn(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        kept = optimizer.state[model[0].weight].get("momentum_buffer")
        more = 0.0 if kept is None else kept.detach().sum() * y.sum()
        return functional.cross_entropy(y, t) + more

    return trained(model, optimizer=optimizer, loss_fn=loss_fn)


_BACKWARD = [1.0]


@torch.library.custom_op("mucudnn_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda _, gradient: gradient * 2 * _BACKWARD[0])


reads("""
gradient_of_an_operation_called_by_itself
    | _BACKWARD[0] = 1.0 | twice(out) | _BACKWARD[0] = 3.0
gradient_of_an_operation_called_by_name
    | _BACKWARD[0] = 1.0 | torch.ops.mucudnn_tests.twice(out) | _BACKWARD[0] = 3.0
""")


# --- tensors


reads("""
data_replaced_in_the_forward_pass
    | | kept = s.net[0].weight; kept.data = kept.data / kept.data.norm(); out
""")


@PROGRAMS
def trained_module_that_is_only_a_global() -> Training:
    other, own = nn.Linear(6, 4), nn.Linear(6, 4)

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = own

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.own(x) + other(x)

    tensors = [*own.parameters(), *other.parameters()]
    return trained(
        Both(),
        optimizer=torch.optim.SGD(tensors, 0.1),
        watched=lambda: list(other.parameters()),
    )


@PROGRAMS
def trained_tensor_of_the_loss() -> Training:
    model, scale = nn.Linear(6, 4), torch.ones(1, requires_grad=True)
    return trained(
        model,
        optimizer=torch.optim.SGD([*model.parameters(), scale], 0.1),
        loss_fn=lambda y, t: functional.cross_entropy(y * scale, t),
        watched=lambda: scale,
    )


@PROGRAMS
def trained_buffer() -> Training:
    model = Reading(lambda s, y: y * s.scale)
    model.register_buffer("scale", torch.ones(4, requires_grad=True))
    tensors = [*model.parameters(), model.scale]
    return trained(model, optimizer=torch.optim.SGD(tensors, 0.1))


@PROGRAMS
def lazy_layers() -> Training:
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(4))
    return trained(model, optimizer=torch.optim.SGD(model.parameters(), 0.1))


@PROGRAMS
def method_added_to_tensors() -> Training:
    return trained(
        Reading(lambda s, out: out.tanh()),
        change=functools.partial(setattr, torch.Tensor, "tanh", torch.sin),
        undo=functools.partial(delattr, torch.Tensor, "tanh"),
    )


@PROGRAMS
def input_has_a_hook() -> Training:
    seen: list[int] = []
    x = torch.randn(8, 6, requires_grad=True)
    x.register_hook(lambda _: seen.append(1))
    batch = x, torch.randint(0, 4, (8,))
    return trained(nn.Linear(6, 4), batches=[batch], watched=lambda: len(seen))


_FACTOR = [1.0]


class Multiplied(torch.Tensor):
    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = super().__torch_function__(func, types, args, kwargs or {})
        return found * _FACTOR[0] if func is functional.linear else found


@PROGRAMS
def input_computes_in_its_own_way() -> Training:
    batch = torch.randn(8, 6).as_subclass(Multiplied), torch.randint(0, 4, (8,))
    return trained(
        nn.Linear(6, 4),
        batches=[batch],
        change=lambda: _FACTOR.__setitem__(0, 3.0),
        undo=lambda: _FACTOR.__setitem__(0, 1.0),
    )


@PROGRAMS(changes_in_step=True)
def file_written_by_the_step() -> Training:
    flag = flag_file()
    flag.touch()

    def read(s: Any, out: torch.Tensor) -> torch.Tensor:
        with flag.open("a") as file:
            file.write("x")
        return out

    return trained(Reading(read), watched=lambda: flag.stat().st_size)


@PROGRAMS(changes_in_step=True)
def folders_made_by_the_step() -> Training:
    folder = pathlib.Path(tempfile.mkdtemp(dir=FOLDER))

    def read(s: Any, out: torch.Tensor) -> torch.Tensor:
        tempfile.mkdtemp(dir=folder)
        return out

    return trained(Reading(read), watched=lambda: len(list(folder.iterdir())))


@PROGRAMS(is_planned=True)
def functions_that_open_files_and_are_not_called() -> Training:
    held = {"open": open, "run": subprocess.run, "load": np.load}
    return trained(Reading(lambda s, out: out * len(held)))
