"""Programs whose objects change between steps: attributes and containers."""

import collections
import dataclasses
import enum
import fractions
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.torch_programs import Programs, Reading, Training, perceptron, trained

PROGRAMS = Programs()


def changing(
    name: str,
    read: Callable[[Any, torch.Tensor], torch.Tensor],
    change: Callable[[Any], Any],
    make: Callable[[], dict[str, Any]] = dict,
    **others: bool,
) -> None:
    """Add a program.

    Args:
        name: Its name.
        read: What the module does with its network's output.
        change: What is done with the module before the third step.
        make: Gives the module's attributes.
        others: What else is known of it.
    """

    def build() -> Training:
        model = Reading(read, **make())
        return trained(model, change=lambda: change(model))

    PROGRAMS(build, name=name, **others)


def replaced(
    name: str,
    read: Callable[[Any, torch.Tensor], torch.Tensor],
    before: Any,
    after: Any,
    **others: bool,
) -> None:
    """Add a program whose attribute `a` gets another value."""
    changing(
        name, read, lambda m: setattr(m, "a", after), lambda: {"a": before}, **others
    )


def times(s: Any, out: torch.Tensor) -> torch.Tensor:
    return out * s.a


def of_type(s: Any, out: torch.Tensor) -> torch.Tensor:
    return out * (1.0 if type(s.a) is int else 2.0)


def default(s: Any, out: torch.Tensor) -> torch.Tensor:
    return out * getattr(s, "a", 1.0)


# --- one value for another

replaced("public_number", times, 1.0, 3.0, is_planned=True)
replaced("int_becomes_equal_float", of_type, 1, 1.0)
replaced("int_becomes_equal_bool", of_type, 1, True)
replaced(
    "zero_becomes_negative_zero",
    lambda s, out: out * (1.0 if str(s.a) == "0.0" else 3.0),
    0.0,
    -0.0,
)
replaced("none_becomes_number", lambda s, out: out * (s.a or 1.0), None, 3.0)
replaced("number_becomes_none", lambda s, out: out * (s.a or 1.0), 3.0, None)
replaced("flag_turned", lambda s, out: out.tanh() if s.a else out, False, True)
replaced("text_replaced", lambda s, out: out * len(s.a), "a", "abc")
replaced("bytes_replaced", lambda s, out: out * s.a[0], b"\1", b"\3")
replaced("complex_number", lambda s, out: out * s.a.real, 1 + 1j, 3 + 1j)
replaced(
    "fraction",
    lambda s, out: out * float(s.a),
    fractions.Fraction(1, 2),
    fractions.Fraction(1, 3),
)
replaced("tuple_replaced", lambda s, out: out * s.a[1], (1.0, 2.0), (1.0, 3.0))
replaced("slice_replaced", lambda s, out: out * s.a.stop, slice(0, 2), slice(0, 4))
replaced("range_replaced", lambda s, out: out * len(s.a), range(2), range(4))
replaced("frozenset", lambda s, out: out * len(s.a), frozenset("a"), frozenset("ab"))
replaced(
    "dtype_replaced", lambda s, out: out.to(s.a).float(), torch.float32, torch.bfloat16
)
replaced("numpy_scalar", lambda s, out: out * float(s.a), np.float32(1), np.float32(3))
replaced("numpy_flag", lambda s, out: out * 2 if s.a else out, np.bool_(0), np.bool_(1))
replaced(
    "numpy_array_replaced",
    lambda s, out: out * float(s.a.sum()),
    np.ones(2),
    np.ones(3),
)
replaced("tensor_replaced", times, torch.tensor(1.0), torch.tensor(3.0))
replaced(
    "tensor_asked_replaced",
    lambda s, out: out * s.a.item(),
    torch.tensor(1.0),
    torch.tensor(3.0),
)
replaced("function_replaced", lambda s, out: s.a(out), torch.relu, torch.tanh)
replaced("class_replaced", lambda s, out: s.a()(out), nn.Identity, nn.Tanh)
replaced("same_value_set_again", times, 1000.5, float("1000.5"), keeps_plan=True)
replaced(
    "nan_set_again",
    lambda s, out: out * (2.0 if s.a != s.a else 1.0),
    float("nan"),
    float("nan"),
)
replaced("unread_attribute", lambda s, out: out.sin(), 1, 2, keeps_plan=True)

# --- attributes that come and go

changing("attribute_appears", default, lambda m: setattr(m, "a", 3.0))
changing(
    "attribute_appears_hasattr",
    lambda s, out: out * (3.0 if hasattr(s, "a") else 1.0),
    lambda m: setattr(m, "a", None),
)
changing("attribute_disappears", default, lambda m: delattr(m, "a"), lambda: {"a": 3.0})
changing(
    "private_number",
    lambda s, out: out * s._a,
    lambda m: setattr(m, "_a", 3.0),
    lambda: {"_a": 1.0},
)
changing("set_through_vars", times, lambda m: vars(m).update(a=3.0), lambda: {"a": 1.0})
changing(
    "training_flag_set_by_hand",
    lambda s, out: out * 2 if s.net[1].training else out,
    lambda m: setattr(m.net[1], "training", False),
)
changing(
    "counted_outside_for_a_log",
    lambda s, out: out.sin(),
    lambda m: setattr(m, "steps", m.steps + 1),
    lambda: {"steps": 0},
    keeps_plan=True,
)

# --- containers


def inside(
    name: str,
    make: Callable[[], Any],
    read: Callable[[Any], float],
    change: Callable[[Any], Any],
    **others: bool,
) -> None:
    """Add a program that reads a number from an object `a`, which is changed inside."""
    changing(
        name,
        lambda s, out: out * read(s.a),
        lambda m: change(m.a),
        lambda: {"a": make()},
        **others,
    )


def first(held: Any) -> float:
    return float(held[0])


inside("list_item", lambda: [1.0, 2.0], first, lambda a: a.__setitem__(0, 3.0))
inside("list_grows", lambda: [1.0], len, lambda a: a.append(0.0))
inside("list_order", lambda: [1.0, 2.0], first, list.reverse)
inside("list_sliced", lambda: [1.0, 2.0, 3.0], lambda a: sum(a[1:]), lambda a: a.pop())
inside(
    "nested_containers",
    lambda: [{"a": {"b": 1.0}}],
    lambda a: a[0]["a"]["b"],
    lambda a: a[0]["a"].update(b=3.0),
)
inside("dict_value", lambda: {"w": 1.0}, lambda a: a["w"], lambda a: a.update(w=3.0))
inside("dict_key_appears", dict, lambda a: a.get("w", 1.0), lambda a: a.update(w=3.0))
inside(
    "dict_order",
    lambda: {"a": 1.0, "b": 2.0},
    lambda a: next(iter(a.values())),
    lambda a: a.update(a=a.pop("a")),
)
inside(
    "dict_keys_joined",
    lambda: {"a": 0},
    lambda a: len("".join(a)),
    lambda a: a.update(bcd=0),
)
inside("membership", set, lambda a: 3.0 if "x" in a else 1.0, lambda a: a.add("x"))
inside("set_grows", lambda: {1}, len, lambda a: a.add(2))
inside(
    "defaultdict_key",
    lambda: collections.defaultdict(lambda: 1.0, other=1.0),
    lambda a: a["other"],
    lambda a: a.update(other=3.0),
)
inside(
    "defaultdict_factory",
    lambda: collections.defaultdict(lambda: 1.0),
    lambda a: a["w"],
    lambda a: (a.clear(), setattr(a, "default_factory", lambda: 3.0)),
)
inside(
    "ordered_dict_moved",
    lambda: collections.OrderedDict(a=1.0, b=2.0),
    lambda a: next(iter(a.values())),
    lambda a: a.move_to_end("a"),
)
inside(
    "counter_updated",
    lambda: collections.Counter("ab"),
    lambda a: a.total(),
    lambda a: a.update("abc"),
)
inside(
    "chain_map",
    lambda: collections.ChainMap({}, {"w": 1.0}),
    lambda a: a["w"],
    lambda a: a.maps[1].update(w=3.0),
)
inside(
    "deque_rotated", lambda: collections.deque([1.0, 3.0]), first, lambda a: a.rotate()
)
inside(
    "list_that_holds_itself",
    lambda: (lambda a: (a.append(a), a)[1])([1.0]),
    lambda a: a[1][1][0],
    lambda a: a.__setitem__(0, 3.0),
)
inside(
    "numpy_array_in_place", lambda: np.ones(3), first, lambda a: a.__setitem__(0, 3.0)
)
inside(
    "tensor_asked_in_place",
    lambda: torch.tensor([1.0, 2.0]),
    lambda a: a[0].item(),
    lambda a: a.fill_(3.0),
)
inside(
    "tensor_in_a_list_replaced",
    lambda: [torch.tensor(1.0)],
    lambda a: a[0],
    lambda a: a.__setitem__(0, torch.tensor(3.0)),
)
inside(
    "tensor_in_a_list_in_place",
    lambda: [torch.tensor(1.0)],
    lambda a: a[0],
    lambda a: a[0].fill_(3.0),
)
inside(
    "tensor_in_place", lambda: torch.tensor(1.0), lambda a: a, lambda a: a.fill_(3.0)
)
inside("unread_list_item", lambda: [1.0, 2.0], first, lambda a: None, keeps_plan=True)


# --- objects


@dataclasses.dataclass
class Settings:
    scale: float = 1.0
    unused: int = 0


@dataclasses.dataclass(frozen=True)
class FrozenSettings:
    scale: float = 1.0


class Slotted:
    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 1.0


class Stored:
    """Answers for attributes by a dict."""

    def __init__(self):
        object.__setattr__(self, "held", {"scale": 1.0})

    def __getattr__(self, name):
        try:
            return self.__dict__["held"][name]
        except KeyError:
            raise AttributeError(name) from None


class AlwaysEqual(Slotted):
    __slots__ = ()

    def __eq__(self, other):
        return True

    __hash__ = object.__hash__


class Described:
    """A number behind a descriptor, a property and a cached property."""

    class Doubled:
        def __get__(self, holder, kind):
            return holder._scale * 2

    doubled = Doubled()

    def __init__(self):
        self._scale = 1.0

    @property
    def scale(self):
        return self._scale

    @functools.cached_property
    def cached(self):
        return self._scale


class Sized:
    """Asked by operators only."""

    def __init__(self):
        self.held = [1.0]

    def __len__(self):
        return len(self.held)

    def __bool__(self):
        return len(self.held) > 1

    def __getitem__(self, index):
        return self.held[index]

    def __contains__(self, item):
        return item in self.held

    def __iter__(self):
        return iter(self.held)

    def __float__(self):
        return sum(self.held)

    def __call__(self):
        return self.held[-1]

    def __rmul__(self, other):
        return other * self.held[-1]


class Mode(enum.Enum):
    PLAIN = 1.0
    SCALED = 3.0


def scale_of(held: Any) -> float:
    return held.scale


def triple(held: Any) -> None:
    held.scale = 3.0


inside("dataclass_field", Settings, scale_of, triple)
inside(
    "unread_dataclass_field",
    Settings,
    scale_of,
    lambda a: setattr(a, "unused", 1),
    keeps_plan=True,
)
inside("slots", Slotted, scale_of, triple)
inside("simple_namespace", lambda: types.SimpleNamespace(scale=1.0), scale_of, triple)
inside("getattr_over_a_dict", Stored, scale_of, lambda a: a.held.update(scale=3.0))
inside("property", Described, scale_of, lambda a: setattr(a, "_scale", 3.0))
inside(
    "descriptor", Described, lambda a: a.doubled, lambda a: setattr(a, "_scale", 3.0)
)
inside(
    "cached_property_forgotten",
    Described,
    lambda a: a.cached,
    lambda a: (vars(a).pop("cached", None), setattr(a, "_scale", 3.0)),
)
inside("length", Sized, len, lambda a: a.held.append(3.0))
inside("truth", Sized, lambda a: 3.0 if a else 1.0, lambda a: a.held.append(3.0))
inside("item", Sized, lambda a: a[-1], lambda a: a.held.append(3.0))
inside("contains", Sized, lambda a: 2.0 + (3.0 in a), lambda a: a.held.append(3.0))
inside("iterated", Sized, sum, lambda a: a.held.append(3.0))
inside("as_float", Sized, float, lambda a: a.held.append(3.0))
inside("called", Sized, lambda a: a(), lambda a: a.held.append(3.0))
inside("reflected_operator", Sized, lambda a: 1.0 * a, lambda a: a.held.append(3.0))
inside(
    "object_in_a_dict_in_an_object",
    lambda: types.SimpleNamespace(held={"s": Settings()}),
    lambda a: a.held["s"].scale,
    lambda a: triple(a.held["s"]),
)
inside(
    "weak_reference",
    lambda: types.SimpleNamespace(strong=(held := Settings()), weak=weakref.ref(held)),
    lambda a: a.weak().scale,
    lambda a: triple(a.strong),
)
inside(
    "weak_reference_dies",
    lambda: types.SimpleNamespace(strong=(held := Settings()), weak=weakref.ref(held)),
    lambda a: 3.0 if a.weak() is None else 1.0,
    lambda a: vars(a).pop("strong") and None,
)
inside(
    "weak_key_dictionary",
    lambda: weakref.WeakKeyDictionary({Mode.PLAIN: 1.0}),
    lambda a: a[Mode.PLAIN],
    lambda a: a.update({Mode.PLAIN: 3.0}),
)
replaced(
    "frozen_dataclass",
    lambda s, out: out * s.a.scale,
    FrozenSettings(),
    FrozenSettings(3.0),
)
replaced("enumeration", lambda s, out: out * s.a.value, Mode.PLAIN, Mode.SCALED)


@PROGRAMS
def object_that_equals_everything() -> Training:
    model = Reading(lambda s, out: out * s.a.scale, a=AlwaysEqual())

    def change() -> None:
        model.a = AlwaysEqual()
        model.a.scale = 3.0

    return trained(model, change=change)


@PROGRAMS
def plain_object_holds_a_module() -> Training:
    hidden = nn.Dropout(0.5)
    model = Reading(lambda s, out: s.held[0](out), held=[hidden])
    return trained(model, change=lambda: setattr(hidden, "p", 0.1))


@PROGRAMS
def module_in_a_list_to_eval() -> Training:
    hidden = nn.Dropout(0.5)
    model = Reading(lambda s, out: s.held[0](out), held=[hidden])
    return trained(model, change=hidden.eval)


# --- classes and methods


def with_class(**attributes: Any) -> type[Reading]:
    """Return a new class of modules with attributes of its own."""
    return type("Special", (Reading,), attributes)


def of_class(
    name: str,
    attributes: Callable[[], dict[str, Any]],
    read: Callable[[Any, torch.Tensor], torch.Tensor],
    change: Callable[[Any], Any],
) -> None:
    """Add a program whose module's class has attributes, and is changed."""

    def build() -> Training:
        model = with_class(**attributes())(read)
        return trained(model, change=lambda: change(type(model)))

    PROGRAMS(build, name=name)


of_class(
    "class_attribute",
    lambda: {"gain": 1.0},
    lambda s, out: out * s.gain,
    lambda kind: setattr(kind, "gain", 3.0),
)
of_class(
    "class_attribute_appears",
    dict,
    lambda s, out: out * getattr(s, "gain", 1.0),
    lambda kind: setattr(kind, "gain", 3.0),
)
of_class(
    "method_replaced_on_the_class",
    lambda: {"post": lambda self, x: x},
    lambda s, out: s.post(out),
    lambda kind: setattr(kind, "post", lambda self, x: x * 3),
)
of_class(
    "static_method_replaced",
    lambda: {"post": staticmethod(lambda x: x)},
    lambda s, out: s.post(out),
    lambda kind: setattr(kind, "post", staticmethod(lambda x: x * 3)),
)
of_class(
    "class_method_reads_the_class",
    lambda: {"gain": 1.0, "now": classmethod(lambda kind: kind.gain)},
    lambda s, out: out * s.now(),
    lambda kind: setattr(kind, "gain", 3.0),
)
of_class(
    "class_attribute_list",
    lambda: {"gains": [1.0]},
    lambda s, out: out * s.gains[0],
    lambda kind: kind.gains.__setitem__(0, 3.0),
)
of_class(
    "property_replaced_on_the_class",
    lambda: {"gain": property(lambda self: 1.0)},
    lambda s, out: out * s.gain,
    lambda kind: setattr(kind, "gain", property(lambda self: 3.0)),
)
of_class(
    "attribute_of_a_base_class",
    lambda: {"gain": 1.0},
    lambda s, out: out * s.gain,
    lambda kind: setattr(kind, "gain", 3.0),
)
of_class(
    "forward_replaced_on_the_class",
    dict,
    lambda s, out: out,
    lambda kind: setattr(kind, "forward", lambda self, x: self.net(x) * 3),
)
of_class(
    "call_replaced_on_the_class",
    dict,
    lambda s, out: out,
    lambda kind: setattr(kind, "__call__", lambda self, x: self.forward(x) * 3),
)


@PROGRAMS
def metaclass_attribute() -> Training:
    meta = type("Meta", (type,), {"gain": 1.0})
    space = meta("Space", (), {})
    model = Reading(lambda s, out: out * s.space.gain, space=space)
    return trained(model, change=lambda: setattr(meta, "gain", 3.0))


@PROGRAMS
def subclass_attribute_hides_the_base() -> Training:
    base = with_class(gain=1.0)
    model = type("Derived", (base,), {})(lambda s, out: out * s.gain)
    return trained(model, change=lambda: setattr(type(model), "gain", 3.0))


@PROGRAMS
def class_assigned() -> Training:
    class Negated(nn.ReLU):
        def forward(self, x):
            return -x

    model = perceptron()
    return trained(model, change=lambda: setattr(model[1], "__class__", Negated))


@PROGRAMS
def forward_replaced_on_the_instance() -> Training:
    model = perceptron()
    shorter = lambda x: model[2](model[0](x))  # noqa: E731
    return trained(model, change=lambda: setattr(model, "forward", shorter))


@PROGRAMS
def method_replaced_on_the_instance() -> Training:
    model = with_class(post=lambda self, x: x)(lambda s, out: s.post(out))
    return trained(model, change=lambda: setattr(model, "post", lambda x: x * 3))


@PROGRAMS
def method_of_a_layer_replaced() -> Training:
    model = perceptron()
    return trained(model, change=lambda: setattr(model[1], "forward", torch.tanh))


@PROGRAMS
def getattr_of_a_module() -> Training:
    class Answering(Reading):
        def __getattr__(self, name):
            if name == "gain":
                return self.gains["now"]
            return super().__getattr__(name)

    model = Answering(lambda s, out: out * s.gain, gains={"now": 1.0})
    return trained(model, change=lambda: model.gains.update(now=3.0))


@PROGRAMS
def getattribute_of_a_module() -> Training:
    class Answering(Reading):
        def __getattribute__(self, name):
            if name == "gain":
                return object.__getattribute__(self, "gains")[0]
            return super().__getattribute__(name)

    model = Answering(lambda s, out: out * s.gain, gains=[1.0])
    return trained(model, change=lambda: model.gains.__setitem__(0, 3.0))


# --- children of modules


@PROGRAMS
def module_list_reversed() -> Training:
    model = Reading(
        lambda s, out: functools.reduce(lambda y, layer: layer(y), s.layers, out),
        layers=nn.ModuleList([nn.Linear(4, 4), nn.Tanh()]),
    )

    def change() -> None:
        model.layers = nn.ModuleList(list(model.layers)[::-1])

    return trained(model, change=change)


@PROGRAMS
def module_dict_order() -> Training:
    model = Reading(
        lambda s, out: functools.reduce(lambda y, k: s.layers[k](y), s.layers, out),
        layers=nn.ModuleDict({"tanh": nn.Tanh(), "linear": nn.Linear(4, 4)}),
    )

    def change() -> None:
        model.layers["tanh"] = model.layers.pop("tanh")

    return trained(model, change=change)


@PROGRAMS
def children_reordered_in_place() -> Training:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))

    def change() -> None:
        layers = list(model._modules.values())
        for key, layer in zip(
            model._modules, (layers[1], layers[0], layers[2]), strict=True
        ):
            model._modules[key] = layer

    return trained(model, change=change)


@PROGRAMS
def names_of_children_are_read() -> Training:
    model = Reading(lambda s, out: out * len(dict(s.named_modules())))
    return trained(model, change=lambda: model.net.append(nn.Identity()))


@PROGRAMS
def names_of_parameters_are_read() -> Training:
    def read(s, out):
        return out * (
            1.0 if any(n == "extra" for n, _ in s.named_parameters()) else 2.0
        )

    model = Reading(read)

    def change() -> None:
        model.extra = nn.Parameter(torch.zeros(1))

    return trained(model, change=change)
