"""Programs whose objects change between steps: attributes and containers."""

# ruff: noqa: F401  (rows of tables use what is imported)

import dataclasses
import enum
import functools
import weakref
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.torch_programs import (
    MODULES,
    Programs,
    Reading,
    Training,
    perceptron,
    trained,
)

PROGRAMS = Programs()


READS = MODULES.replace("{optimizer}", "")

COLUMNS = "attributes result change"
reads = PROGRAMS.table(globals(), READS, COLUMNS)


NUMBERS = """
def build():
    def read(s, out):
        {result}
    m = Reading(read, a=0.5)
    numbers = 0.5, 0.1, 0.7, 0.3
    return trained(m, before=lambda number: setattr(m, "a", numbers[number]))
"""
"""Of a number that changes with every step, and is an input of the graph at last."""

PROGRAMS.table(globals(), NUMBERS, "result")("""
changing_number_is_a_float | out * (2 if isinstance(s.a, float) else 3)
type_of_a_changing_number | out * (2 if type(s.a) is float else 3)
text_of_a_changing_number | out * (2 if f"{s.a}" == "0.7" else 3)
rest_of_a_changing_number | nn.functional.dropout(out, s.a % 1.0)
branch_by_the_rest_of_a_changing_number | out * 2 if s.a % 1.0 < 0.4 else out
""")


# --- one value for another

reads("""
public_number | a=1.0 | out * s.a | m.a = 3.0 | is_planned
int_becomes_equal_float | a=1 | out * (1.0 if type(s.a) is int else 2.0) | m.a = 1.0
int_becomes_equal_bool | a=1 | out * (1.0 if type(s.a) is int else 2.0) | m.a = True
zero_becomes_negative_zero
    | a=0.0 | out * (1.0 if str(s.a) == "0.0" else 3.0) | m.a = -0.0
none_becomes_number | a=None | out * (s.a or 1.0) | m.a = 3.0
number_becomes_none | a=3.0 | out * (s.a or 1.0) | m.a = None
flag_turned | a=False | out.tanh() if s.a else out | m.a = True
text_replaced | a="a" | out * len(s.a) | m.a = "abc"
bytes_replaced | a=b"\\1" | out * s.a[0] | m.a = b"\\3"
complex_number | a=1 + 1j | out * s.a.real | m.a = 3 + 1j
fraction | a=Fraction(1, 2) | out * float(s.a) | m.a = Fraction(1, 3)
tuple_replaced | a=(1.0, 2.0) | out * s.a[1] | m.a = (1.0, 3.0)
slice_replaced | a=slice(0, 2) | out * s.a.stop | m.a = slice(0, 4)
range_replaced | a=range(2) | out * len(s.a) | m.a = range(4)
frozenset | a=frozenset("a") | out * len(s.a) | m.a = frozenset("ab")
dtype_replaced | a=torch.float32 | out.to(s.a).float() | m.a = torch.bfloat16
numpy_scalar | a=np.float32(1) | out * float(s.a) | m.a = np.float32(3)
numpy_flag | a=np.bool_(0) | out * 2 if s.a else out | m.a = np.bool_(1)
numpy_array_replaced | a=np.ones(2) | out * float(s.a.sum()) | m.a = np.ones(3)
tensor_replaced | a=torch.tensor(1.0) | out * s.a | m.a = torch.tensor(3.0)
tensor_asked_replaced | a=torch.tensor(1.0) | out * s.a.item() | m.a = torch.tensor(3.0)
function_replaced | a=torch.relu | s.a(out) | m.a = torch.tanh
class_replaced | a=nn.Identity | s.a()(out) | m.a = nn.Tanh
same_value_set_again | a=1000.5 | out * s.a | m.a = float("1000.5") | keeps_plan
nan_set_again
    | a=float("nan") | out * (2.0 if s.a != s.a else 1.0) | m.a = float("nan")
written_before_it_is_read | a=0.0 | s.a = 2.0; out * s.a | | keeps_plan
unread_attribute | a=1 | out.sin() | m.a = 2 | keeps_plan
""")

# --- attributes that come and go

reads("""
attribute_appears | | out * getattr(s, "a", 1.0) | m.a = 3.0
attribute_appears_hasattr | | out * (3.0 if hasattr(s, "a") else 1.0) | m.a = None
attribute_disappears | a=3.0 | out * getattr(s, "a", 1.0) | del m.a
private_number | _a=1.0 | out * s._a | m._a = 3.0
set_through_vars | a=1.0 | out * s.a | vars(m).update(a=3.0)
training_flag_set_by_hand
    | | out * 2 if s.net[1].training else out | m.net[1].training = False
counted_outside_for_a_log | steps=0 | out.sin() | m.steps += 1 | keeps_plan
""")

# --- containers

reads("""
list_item | a=[1.0, 2.0] | out * s.a[0] | m.a[0] = 3.0
list_grows | a=[1.0] | out * len(s.a) | m.a.append(0.0)
list_order | a=[1.0, 2.0] | out * s.a[0] | m.a.reverse()
list_sliced | a=[1.0, 2.0, 3.0] | out * sum(s.a[1:]) | m.a.pop()
nested_containers
    | a=[{"a": {"b": 1.0}}] | out * s.a[0]["a"]["b"] | m.a[0]["a"]["b"] = 3.0
dict_value | a={"w": 1.0} | out * s.a["w"] | m.a["w"] = 3.0
dict_key_appears | a={} | out * s.a.get("w", 1.0) | m.a["w"] = 3.0
dict_order
    | a={"a": 1.0, "b": 2.0} | out * next(iter(s.a.values())) | m.a["a"] = m.a.pop("a")
dict_keys_joined | a={"a": 0} | out * len("".join(s.a)) | m.a["bcd"] = 0
membership | a=set() | out * (3.0 if "x" in s.a else 1.0) | m.a.add("x")
set_grows | a={1} | out * len(s.a) | m.a.add(2)
defaultdict_key
    | a=defaultdict(lambda: 1.0, other=1.0) | out * s.a["other"] | m.a["other"] = 3.0
defaultdict_factory
    | a=defaultdict(lambda: 1.0) | out * s.a["w"]
    | m.a.clear(); m.a.default_factory = lambda: 3.0
ordered_dict_moved
    | a=OrderedDict(a=1.0, b=2.0) | out * next(iter(s.a.values()))
    | m.a.move_to_end("a")
counter_updated | a=Counter("ab") | out * s.a.total() | m.a.update("abc")
chain_map | a=ChainMap({}, {"w": 1.0}) | out * s.a["w"] | m.a.maps[1]["w"] = 3.0
deque_rotated | a=deque([1.0, 3.0]) | out * s.a[0] | m.a.rotate()
list_that_holds_itself | a=endless_list() | out * s.a[1][1][0] | m.a[0] = 3.0
numpy_array_of_another_shape
    | a=np.ones(4, "f") | out * torch.from_numpy(s.a).mean(0).sum()
    | m.a = np.ones((2, 2), "f") | is_planned
numpy_array_in_another_order
    | a=np.ones((2, 2)) | out * (1.0 + s.a.flags.c_contiguous)
    | m.a = np.asfortranarray(m.a) | is_planned
numpy_array_in_place | a=np.ones(3) | out * float(s.a[0]) | m.a[0] = 3.0
tensor_asked_in_place | a=torch.ones(2) | out * s.a[0].item() | m.a.fill_(3.0)
tensor_gets_an_attribute
    | a=torch.ones(4) | out * getattr(s.a, "gain", 1.0) | m.a.gain = 3.0 | is_planned
tensor_asked_for_a_complex_number
    | a=torch.ones(()) | out * complex(s.a).real | m.a.fill_(3.0) | is_planned
tensor_in_a_list_replaced
    | a=[torch.tensor(1.0)] | out * s.a[0] | m.a[0] = torch.tensor(3.0)
tensor_in_a_list_in_place | a=[torch.tensor(1.0)] | out * s.a[0] | m.a[0].fill_(3.0)
tensor_in_place | a=torch.tensor(1.0) | out * s.a | m.a.fill_(3.0)
unread_list_item | a=[1.0, 2.0] | out * s.a[0] | | keeps_plan
""")


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


def endless_list() -> list[Any]:
    """Return a list that holds a number and itself."""
    found: list[Any] = [1.0]
    found.append(found)
    return found


def referred() -> SimpleNamespace:
    """Return an object, and a weak reference to it."""
    held = Settings()
    return SimpleNamespace(strong=held, weak=weakref.ref(held))


reads("""
dataclass_field | a=Settings() | out * s.a.scale | m.a.scale = 3.0
unread_dataclass_field | a=Settings() | out * s.a.scale | m.a.unused = 1 | keeps_plan
slots | a=Slotted() | out * s.a.scale | m.a.scale = 3.0
simple_namespace | a=SimpleNamespace(scale=1.0) | out * s.a.scale | m.a.scale = 3.0
getattr_over_a_dict | a=Stored() | out * s.a.scale | m.a.held["scale"] = 3.0
property | a=Described() | out * s.a.scale | m.a._scale = 3.0
descriptor | a=Described() | out * s.a.doubled | m.a._scale = 3.0
cached_property_forgotten
    | a=Described() | out * s.a.cached | vars(m.a).pop("cached", None); m.a._scale = 3.0
length | a=Sized() | out * len(s.a) | m.a.held.append(3.0)
truth | a=Sized() | out * (3.0 if s.a else 1.0) | m.a.held.append(3.0)
item | a=Sized() | out * s.a[-1] | m.a.held.append(3.0)
contains | a=Sized() | out * (2.0 + (3.0 in s.a)) | m.a.held.append(3.0)
iterated | a=Sized() | out * sum(s.a) | m.a.held.append(3.0)
as_float | a=Sized() | out * float(s.a) | m.a.held.append(3.0)
called | a=Sized() | out * s.a() | m.a.held.append(3.0)
reflected_operator | a=Sized() | out * (1.0 * s.a) | m.a.held.append(3.0)
object_in_a_dict_in_an_object
    | a=SimpleNamespace(held={"s": Settings()}) | out * s.a.held["s"].scale
    | m.a.held["s"].scale = 3.0
weak_reference | a=referred() | out * s.a.weak().scale | m.a.strong.scale = 3.0
weak_reference_dies
    | a=referred() | out * (3.0 if s.a.weak() is None else 1.0) | del m.a.strong
weak_key_dictionary
    | a=weakref.WeakKeyDictionary({Mode.PLAIN: 1.0}) | out * s.a[Mode.PLAIN]
    | m.a[Mode.PLAIN] = 3.0
frozen_dataclass | a=FrozenSettings() | out * s.a.scale | m.a = FrozenSettings(3.0)
enumeration | a=Mode.PLAIN | out * s.a.value | m.a = Mode.SCALED
object_that_equals_everything
    | a=AlwaysEqual() | out * s.a.scale | m.a = AlwaysEqual(); m.a.scale = 3.0
plain_object_holds_a_module
    | held=[nn.Dropout(0.5)] | s.held[0](out) | m.held[0].p = 0.1
module_in_a_list_to_eval | held=[nn.Dropout(0.5)] | s.held[0](out) | m.held[0].eval()
""")


# --- classes and methods


def with_class(**attributes: Any) -> type[Reading]:
    """Return a new class of modules with attributes of its own."""
    return type("Special", (Reading,), attributes)


def derived(**attributes: Any) -> type[Reading]:
    """Return a new class of modules, whose base has attributes of its own."""
    return type("Derived", (with_class(**attributes),), {})


def of_class(maker: str) -> Any:
    """Return a table whose rows have attributes of the module's own class."""
    template = READS.replace("Reading(read, ", f"{maker}(").replace("s})", "s})(read)")
    return PROGRAMS.table(globals(), template, COLUMNS)


classes, derived_classes = of_class("with_class"), of_class("derived")

classes("""
class_attribute | gain=1.0 | out * s.gain | type(m).gain = 3.0
class_attribute_appears | | out * getattr(s, "gain", 1.0) | type(m).gain = 3.0
method_replaced_on_the_class
    | post=lambda self, x: x | s.post(out) | type(m).post = lambda self, x: x * 3
static_method_replaced
    | post=staticmethod(lambda x: x) | s.post(out)
    | type(m).post = staticmethod(lambda x: x * 3)
class_method_reads_the_class
    | gain=1.0, now=classmethod(lambda kind: kind.gain) | out * s.now()
    | type(m).gain = 3.0
class_attribute_list | gains=[1.0] | out * s.gains[0] | m.gains[0] = 3.0
property_replaced_on_the_class
    | gain=property(lambda self: 1.0) | out * s.gain
    | type(m).gain = property(lambda self: 3.0)
forward_replaced_on_the_class
    | | out | type(m).forward = lambda self, x: self.net(x) * 3
call_replaced_on_the_class
    | | out | type(m).__call__ = lambda self, x: self.forward(x) * 3
method_replaced_on_the_instance
    | post=lambda self, x: x | s.post(out) | m.post = lambda x: x * 3
""")

derived_classes("""
attribute_of_a_base_class | gain=1.0 | out * s.gain | type(m).__base__.gain = 3.0
subclass_attribute_hides_the_base | gain=1.0 | out * s.gain | type(m).gain = 3.0
""")


@PROGRAMS(is_planned=True)
def getattr_of_a_module() -> Training:
    class Answering(Reading):
        def __call__(self, x):
            return super().__call__(x)

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


reads("""
module_list_reversed
    | layers=nn.ModuleList([nn.Linear(4, 4), nn.Tanh()])
    | functools.reduce(lambda y, layer: layer(y), s.layers, out)
    | m.layers = nn.ModuleList(list(m.layers)[::-1])
module_dict_order
    | layers=nn.ModuleDict({"tanh": nn.Tanh(), "linear": nn.Linear(4, 4)})
    | functools.reduce(lambda y, k: s.layers[k](y), s.layers, out)
    | m.layers["tanh"] = m.layers.pop("tanh")
metaclass_attribute
    | space=type("Meta", (type,), {"gain": 1.0})("Space", (), {})
    | out * s.space.gain | type(m.space).gain = 3.0
names_of_children_are_read
    | | out * len(dict(s.named_modules())) | m.net.append(nn.Identity())
names_of_parameters_are_read
    | | out * (1.0 if any(n == "extra" for n, _ in s.named_parameters()) else 2.0)
    | m.extra = nn.Parameter(torch.zeros(1))
""")


@PROGRAMS
def children_reordered_in_place() -> Training:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))

    def change() -> None:
        first, second, third = model._modules.values()
        model._modules.update(zip("012", (second, first, third), strict=True))

    return trained(model, change=change)
