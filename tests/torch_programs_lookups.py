"""Programs whose state is found by other ways than an attribute of an object.

Classes and their bases (`super()`), values with attributes, modules that a step imports
when it runs, files, objects of PyTorch's own, and tensors that only an optimizer has.
"""

import abc
import configparser
import datetime
import enum
import functools
import importlib
import os
import pathlib
import random
import sys
import tempfile
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from tests.torch_programs import Programs, Reading, Training, perceptron, sgd, trained

PROGRAMS = Programs()
SCALES = types.ModuleType("tests_scales")
SCALES.__file__ = str(pathlib.Path(__file__).with_name("tests_scales.py"))
SCALES.now = 1.0  # type: ignore[attr-defined]
FOLDER = pathlib.Path(tempfile.mkdtemp())


def changing(
    name: str,
    build: Callable[[], tuple[Callable[..., Any], Callable[[], Any]]],
    undo: Callable[[], Any] = lambda: None,
) -> None:
    """Add a program.

    Args:
        name: Its name.
        build: Gives what the module does with its network's output, and the change that
            is made before the third step.
        undo: Called at the end.
    """

    def program() -> Training:
        read, change = build()
        return trained(Reading(read), change=change, undo=undo)

    PROGRAMS(program, name=name)


def scaled(
    name: str, build: Callable[[Callable[[], float]], Callable[..., Any]]
) -> None:
    """Add a program in which a function that is reached oddly reads a free variable."""

    def parts() -> tuple[Callable[..., Any], Callable[[], Any]]:
        scale = [1.0]
        read = build(lambda: scale[0])
        return read, lambda: scale.__setitem__(0, 3.0)

    changing(name, parts)


def assigned(name: str, build: Callable[[], tuple[Any, str, Any, Any]]) -> None:
    """Add a program in which an attribute of something is set.

    Args:
        name: Its name.
        build: Gives the thing, the attribute, its new value, and what the module does
            with its network's output.
    """

    def parts() -> tuple[Callable[..., Any], Callable[[], Any]]:
        thing, attribute, value, read = build()
        return read, lambda: setattr(thing, attribute, value)

    changing(name, parts)


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


@functools.partial(assigned, "method_of_super_replaced")
def _() -> Any:
    parent, child = family()
    return parent, "scale", tripled, lambda _, y: child.scale(y)


@functools.partial(assigned, "property_of_super_replaced")
def _() -> Any:
    parent, child = family()
    return parent, "factor", property(lambda _: 3.0), lambda _, y: y * child.factor


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


@functools.partial(assigned, "static_method_by_the_class_replaced")
def _() -> Any:
    held = namespace()
    return held, "static", staticmethod(lambda y: y * 3), lambda _, y: held.static(y)


@functools.partial(assigned, "class_method_by_the_class_replaced")
def _() -> Any:
    held = namespace()
    return held, "of_class", classmethod(tripled), lambda _, y: held.of_class(y)


@functools.partial(assigned, "function_in_a_class_replaced")
def _() -> Any:
    held = namespace()
    return held, "plain", lambda y: y * 3, lambda _, y: held.plain(y)


@functools.partial(assigned, "attribute_of_a_class_appears")
def _() -> Any:
    held = namespace()
    return held, "zoom", 3.0, lambda _, y: y * getattr(held, "zoom", 1.0)


@functools.partial(assigned, "attribute_of_ones_own_class_appears")
def _() -> Any:
    held = namespace()
    one = held()
    read = lambda _, y: y * (3.0 if hasattr(type(one), "zoom") else 1.0)  # noqa: E731
    return held, "zoom", 3.0, read


@functools.partial(assigned, "attributes_of_a_class_are_counted")
def _() -> Any:
    held = namespace()
    return held, "zoom", 3.0, lambda _, y: y * len(vars(held))


@functools.partial(assigned, "constructor_replaced")
def _() -> Any:
    class Made:
        def __init__(self) -> None:
            self.zoom = 1.0

    def larger(self: Any) -> None:
        self.zoom = 3.0

    return Made, "__init__", larger, lambda _, y: y * Made().zoom


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


@functools.partial(changing, "class_registered_as_another")
def _() -> Any:
    class Wanted(abc.ABC):  # noqa: B024
        pass

    class Thing:
        pass

    thing = Thing()
    read = lambda _, y: y * (3 if isinstance(thing, Wanted) else 1)  # noqa: E731
    return read, lambda: Wanted.register(Thing)


@functools.partial(changing, "metaclass_that_forbids_to_set")
def _() -> Any:
    class Fixed(type):
        def __setattr__(cls, name: str, value: Any) -> None:
            raise AttributeError(name)

    class Held(metaclass=Fixed):
        def __init__(self) -> None:
            self.zoom = 1.0

    held = Held()
    return lambda _, y: y * held.zoom, lambda: setattr(held, "zoom", 3.0)


@functools.partial(scaled, "metaclass_that_is_called")
def _(scale: Callable[[], float]) -> Any:
    class Meta(type):
        def __call__(cls) -> Any:
            made = super().__call__()
            made.zoom = scale()
            return made

    class Held(metaclass=Meta):
        pass

    return lambda _, y: y * Held().zoom


# --- values that have attributes or methods of their own


class Speed(enum.Enum):
    FAST = 1

    def __init__(self, _: int) -> None:
        self.zoom = 1.0


changing(
    "attribute_of_a_member",
    lambda: (
        lambda _, y: y * Speed.FAST.zoom,
        lambda: setattr(Speed.FAST, "zoom", 3.0),
    ),
    lambda: setattr(Speed.FAST, "zoom", 1.0),
)
changing(
    "attribute_of_a_member_by_its_value",
    lambda: (lambda _, y: y * Speed(1).zoom, lambda: setattr(Speed.FAST, "zoom", 3.0)),
    lambda: setattr(Speed.FAST, "zoom", 1.0),
)


@functools.partial(scaled, "method_of_a_member")
def _(scale: Callable[[], float]) -> Any:
    class Rate(enum.Enum):
        ONE = 1

        def now(self) -> float:
            return scale()

    rates = [Rate.ONE]
    return lambda _, y: y * rates[0].now()


@functools.partial(assigned, "attribute_of_a_number")
def _() -> Any:
    class Temperature(float):
        zoom = 1.0

    warm = Temperature(2.0)
    return warm, "zoom", 3.0, lambda _, y: y * warm.zoom


@functools.partial(scaled, "method_of_a_number")
def _(scale: Callable[[], float]) -> Any:
    class Temperature(float):
        def now(self) -> float:
            return self * scale()

    warm = [Temperature(2.0)]
    return lambda _, y: y * warm[0].now()


@functools.partial(assigned, "attribute_of_a_text")
def _() -> Any:
    class Name(str):
        __slots__ = ("zoom",)

    name = Name("a")
    name.zoom = 1.0  # type: ignore[misc]
    return name, "zoom", 3.0, lambda _, y: y * name.zoom


@functools.partial(assigned, "object_behind_a_proxy")
def _() -> Any:
    class Held:
        zoom = 1.0

    kept = Held()
    proxies = [weakref.proxy(kept)]
    return kept, "zoom", 3.0, lambda _, y: y * proxies[0].zoom


# --- descriptors


@functools.partial(scaled, "method_dispatched_by_type")
def _(scale: Callable[[], float]) -> Any:
    class Held:
        @functools.singledispatchmethod
        def zoom(self, _: Any) -> float:
            return scale()

    held = Held()
    return lambda _, y: y * held.zoom(1)


@functools.partial(changing, "method_dispatched_by_a_new_type")
def _() -> Any:
    class Held:
        @functools.singledispatchmethod
        def zoom(self, _: Any) -> float:
            return 1.0

    held = Held()
    register = vars(Held)["zoom"].register
    return lambda _, y: y * held.zoom(1), lambda: register(int, lambda *_: 3.0)


@functools.partial(scaled, "method_with_arguments_given")
def _(scale: Callable[[], float]) -> Any:
    class Held:
        def twice(self, factor: float) -> float:
            return factor * scale()

        zoom = functools.partialmethod(twice, 2.0)

    held = Held()
    return lambda _, y: y * held.zoom()


@functools.partial(scaled, "property_that_is_set")
def _(scale: Callable[[], float]) -> Any:
    class Held:
        kept: Any = None

        @property
        def out(self) -> Any:
            return self.kept

        @out.setter
        def out(self, value: Any) -> None:
            self.kept = value * scale()

    held = Held()

    def read(_: Any, y: torch.Tensor) -> torch.Tensor:
        held.out = y
        return held.kept  # type: ignore[no-any-return]

    return read


@functools.partial(scaled, "property_that_is_computed_once")
def _(scale: Callable[[], float]) -> Any:
    class Held:
        @functools.cached_property
        def zoom(self) -> float:
            return scale()

    return lambda _, y: y * Held().zoom


# --- modules, files and libraries


def by_import_from(_: Any, y: torch.Tensor) -> torch.Tensor:
    from tests_scales import now

    return y * now


def by_import(_: Any, y: torch.Tensor) -> torch.Tensor:
    import tests_scales

    return y * tests_scales.now


def by_name(_: Any, y: torch.Tensor) -> torch.Tensor:
    return y * importlib.import_module("tests_scales").now


def by_table(_: Any, y: torch.Tensor) -> torch.Tensor:
    return y * sys.modules["tests_scales"].now


def imported(read: Callable[..., Any]) -> Callable[[], Any]:
    def parts() -> Any:
        sys.modules["tests_scales"] = SCALES
        return read, lambda: setattr(SCALES, "now", 3.0)

    return parts


def forget_import() -> None:
    SCALES.now = 1.0  # type: ignore[attr-defined]
    sys.modules.pop("tests_scales", None)


for function in (by_import_from, by_import, by_name, by_table):
    changing(f"imported_{function.__name__}", imported(function), forget_import)


def flagged(read: Callable[[pathlib.Path], bool]) -> Callable[[], Any]:
    def parts() -> Any:
        flag = FOLDER / "flag"
        flag.unlink(missing_ok=True)
        return lambda _, y: y * (3 if read(flag) else 1), flag.touch

    return parts


def remove_flag() -> None:
    (FOLDER / "flag").unlink(missing_ok=True)


changing("file_appears", flagged(lambda flag: flag.exists()), remove_flag)
changing("file_appears_by_os", flagged(lambda flag: os.path.exists(flag)), remove_flag)  # noqa: PTH110
changing(
    "file_appears_in_a_list",
    flagged(lambda flag: "flag" in os.listdir(flag.parent)),  # noqa: PTH208
    remove_flag,
)


def stored(load: Callable[[str], Any], save: Callable[[str, float], Any]) -> Any:
    def parts() -> Any:
        path = str(FOLDER / "values.npy")
        save(path, 1.0)
        return lambda _, y: y * load(path), lambda: save(path, 3.0)

    return parts


def load_tensor(path: str) -> Any:
    return torch.load(path)


def load_array(path: str) -> Any:
    return torch.from_numpy(np.load(path))


changing(
    "tensor_loaded",
    stored(load_tensor, lambda path, value: torch.save(torch.full((4,), value), path)),
)
changing(
    "array_loaded",
    stored(load_array, lambda p, value: np.save(p, np.full(4, value, np.float32))),
)


@PROGRAMS(changes_in_step=True)
def generator_of_numpys_bits() -> Training:
    bits = np.random.PCG64(0)
    return trained(Reading(lambda _, y: y * (1 + bits.random_raw() % 7)))


@PROGRAMS(changes_in_step=True)
def generator_made_by_the_step() -> Training:
    drawn: list[float] = []

    def read(_: Any, y: torch.Tensor) -> torch.Tensor:
        drawn.append(float(np.random.default_rng().random()))
        return y

    return trained(Reading(read), watched=lambda: len(drawn))


@PROGRAMS
def generator_of_the_system() -> Training:
    draws = random.SystemRandom()
    return trained(Reading(lambda _, y: y * (1 + 0 * draws.random())))


@PROGRAMS
def today_is_asked() -> Training:
    start = datetime.datetime.now() - datetime.timedelta(1)
    later = lambda: datetime.datetime.now() > start  # noqa: E731
    return trained(Reading(lambda _, y: y * (3 if later() else 1)))


@functools.partial(changing, "configuration_read_by_a_parser")
def _() -> Any:
    held = configparser.ConfigParser()
    held.read_string("[model]\nscale = 1.0")
    read = lambda _, y: y * held.getfloat("model", "scale")  # noqa: E731
    return read, lambda: held.set("model", "scale", "3.0")


_LINEAR, _FORWARD = functional.linear, nn.Linear.forward


@PROGRAMS
def function_beneath_a_layer_replaced() -> Training:
    def replaced(*args: Any) -> torch.Tensor:
        return _LINEAR(*args) * 2

    return trained(
        perceptron(),
        change=lambda: setattr(functional, "linear", replaced),
        undo=lambda: setattr(functional, "linear", _LINEAR),
    )


@PROGRAMS
def layers_own_forward_beneath_super_replaced() -> Training:
    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    def replaced(self: Any, x: torch.Tensor) -> torch.Tensor:
        return _LINEAR(x, self.weight) * 3

    return trained(
        Own(6, 4),
        change=lambda: setattr(nn.Linear, "forward", replaced),
        undo=lambda: setattr(nn.Linear, "forward", _FORWARD),
    )


# --- objects of PyTorch's own


@functools.partial(assigned, "distributions_scale")
def _() -> Any:
    normal = torch.distributions.Normal(torch.zeros(4), torch.ones(4))
    return normal, "scale", torch.ones(4) * 3, lambda _, y: y - normal.log_prob(y)


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


for called_by, read in {
    "itself": lambda _, y: twice(y),
    "name": lambda _, y: torch.ops.mucudnn_tests.twice(y),
}.items():
    changing(
        f"gradient_of_an_operation_called_by_{called_by}",
        lambda read=read: (read, lambda: _BACKWARD.__setitem__(0, 3.0)),  # type: ignore[misc]
        lambda: _BACKWARD.__setitem__(0, 1.0),
    )


# --- tensors


@PROGRAMS
def data_replaced_in_the_forward_pass() -> Training:
    def read(module: Any, y: torch.Tensor) -> torch.Tensor:
        weight = module.net[0].weight
        weight.data = weight.data / weight.data.norm()
        return y

    return trained(Reading(read))


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


class AttributeOfInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Any) -> torch.Tensor:
        return self.layer(x) * x.zoom  # type: ignore[no-any-return]


@PROGRAMS
def input_has_an_attribute() -> Training:
    x: Any = torch.randn(8, 6)
    x.zoom = 1.0
    batch = x, torch.randint(0, 4, (8,))
    change = functools.partial(setattr, x, "zoom", 3.0)
    return trained(AttributeOfInput(), batches=[batch], change=change)


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
