"""Pieces of Python state that a training step may read: where each is, and its value.

`reads.py` notes them while a step is captured, `guards.py` compares them before every
later step, and a planned step writes what it changes through them.
"""

import collections
import enum
import gc
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree


class Missing:
    """Stands for an attribute, global or variable that does not exist."""

    def __repr__(self) -> str:
        return "<missing>"


MISSING: Any = Missing()


class Kind(enum.Enum):
    """Kind of Python state: attribute, cell, container, class, generator and others."""

    ENTRY = "an entry of a dict: an attribute, a global"
    CLASS = "an attribute of a class"
    SLOT = "an attribute that is in no dict"
    CELL = "a free variable of a function"
    CONTENTS = "everything in a container"
    ARRAY = "the layout and the bytes of a NumPy array"
    TYPE = "the class of an object"
    GENERATOR = "the state of a generator of random numbers"
    CONTEXT = "the value of a context variable"
    CACHE = "what a function with a cache has computed"
    ASKED = "the value of a tensor that is no input of the step"
    SIZE = "how many entries a container has"


@dataclass(frozen=True, eq=False, slots=True)
class Read:
    """One piece of Python state, and its value before the step.

    Attributes:
        kind: What `holder` and `key` mean.
        holder: A dict, class, object, cell, container, array, generator or function.
        key: The name within the holder, where it has several.
        value: As it was; of a container or array, a copy.
        label: What a user calls it.
        is_exact: Whether an equal container in its place is not the same to the step.
    """

    kind: Kind
    holder: Any
    key: Any
    value: Any
    label: str
    is_exact: bool = False

    @classmethod
    def of(cls, kind: Kind, holder: Any, key: Any, label: str) -> "Read":
        """Return a piece of state with its present value."""
        return cls(kind, holder, key, _NOW[kind](holder, key), label)

    @property
    def elements(self) -> tuple[Any, ...]:
        """What the container held, of which this is the contents."""
        return self.value if self.kind is Kind.CONTENTS else ()

    def holds(self, now: Any) -> bool:
        """Return whether a step that has read this state may read `now` instead."""
        if self.is_exact and self.kind is Kind.CONTENTS:
            return len(now) == len(self.value) and all(map(is_, now, self.value))
        return now is self.value if self.is_exact else is_alike(now, self.value)

    def now(self) -> Any:
        """Return the present value."""
        return _NOW[self.kind](self.holder, self.key)

    def put(self, value: Any) -> None:
        """Set the state to a value that `now` has returned."""
        holder, key = self.holder, self.key
        match self.kind:
            case Kind.ENTRY if value is MISSING:
                holder.pop(key, None)
            case Kind.ENTRY:
                holder[key] = value
            case Kind.CLASS | Kind.SLOT if value is MISSING:
                delattr(holder, key)
            case Kind.CLASS | Kind.SLOT:
                setattr(holder, key, value)
            case Kind.CELL if value is MISSING:
                del holder.cell_contents
            case Kind.CELL:
                holder.cell_contents = value
            case Kind.CONTENTS:
                _refill(holder, value)
            case Kind.ARRAY:
                *_, data = value
                holder[...] = np.frombuffer(data, holder.dtype).reshape(holder.shape)
            case Kind.TYPE:
                holder.__class__ = value
            case Kind.GENERATOR:
                key(holder, value)
            case Kind.CONTEXT if value is not MISSING:  # nothing can unset one
                holder.set(value)
            case Kind.ASKED | Kind.SIZE | Kind.CONTEXT | Kind.CACHE:
                pass  # what these are about is put back by other places


def contents_of(container: Any, _: Any = None) -> tuple[Any, ...]:
    """Return everything in a container, in order; of a dict, keys and then values."""
    if isinstance(container, types.MappingProxyType):
        return (*container.keys(), *container.values())
    if isinstance(container, collections.OrderedDict):  # with an order of its own
        ordered = collections.OrderedDict
        return (*ordered.keys(container), *ordered.values(container))
    if isinstance(container, dict):  # not what a subclass makes of these methods
        return (*dict.keys(container), *dict.values(container))
    base: Any = next(b for b in CONTAINERS if isinstance(container, b))
    return tuple(base.__iter__(container))


def containers_in(nested: Any) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield all lists, dicts and others that may change, and what is in each."""
    inner, form = pytree.tree_flatten(nested, is_leaf=lambda v: v is not nested)
    if form.is_leaf():
        return
    if isinstance(nested, CONTAINERS) and not isinstance(nested, tuple):
        yield nested, contents_of(nested)
    for part in inner:
        yield from containers_in(part)


def dict_of_class(cls: type) -> dict[str, Any]:
    """Return the dict of a class itself, of which Python shows a view only."""
    (held,) = gc.get_referents(vars(cls))
    return held  # type: ignore[no-any-return]


def _refill(container: Any, contents: Sequence[Any]) -> None:
    if isinstance(container, types.MappingProxyType):
        return  # nobody can write through it
    if isinstance(container, dict):
        half, ordered = len(contents) // 2, collections.OrderedDict
        (ordered if isinstance(container, ordered) else dict).clear(container)
        for key, value in zip(contents[:half], contents[half:], strict=True):
            if isinstance(container, ordered):
                ordered.__setitem__(container, key, value)
            else:
                dict.__setitem__(container, key, value)
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, contents)
    else:
        container.clear()
        container.extend(contents)


def _layout_of(array: Any) -> tuple[Any, ...]:
    return array.dtype, array.shape, array.strides


def _content(cell: types.CellType, _: Any = None) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def cached_in(function: Any) -> list[Any]:
    """Return the keys and results that a function with a cache holds."""
    found = []
    for held in gc.get_referents(function):
        if type(held) is dict and held is not vars(function):
            # A cache of limited size has links here, and results beside the dict.
            found += [v for v in held.values() if type(v).__name__ != "_lru_list_elem"]
        elif held is not function.__wrapped__ and not isinstance(held, type | dict):
            found.append(held)
    return found


def _cache_state(function: Any, _: Any = None) -> Any:
    info = function.cache_info()
    return info.misses, info.currsize, tuple(sorted(map(id, cached_in(function))))


def _random_state(holder: Any, _: Any = None) -> Any:
    if isinstance(holder, np.random.BitGenerator):
        return holder.state
    if isinstance(holder, np.random.Generator):
        return holder.bit_generator.state
    if holder is np.random or isinstance(holder, np.random.RandomState):
        state: Any = holder.get_state()
        return (state[0], state[1].tobytes(), *state[2:])
    return holder.getstate()


def set_random_state(holder: Any, state: Any) -> None:
    """Set a generator of random numbers to a state that `Read.now` has returned."""
    if isinstance(holder, np.random.BitGenerator):
        holder.state = state
        return
    if isinstance(holder, np.random.Generator):
        holder.bit_generator.state = state
    elif holder is np.random or isinstance(holder, np.random.RandomState):
        keys = np.frombuffer(state[1], np.uint32)
        holder.set_state((state[0], keys, *state[2:]))
    else:
        holder.setstate(state)


_NOW: Mapping[Kind, Callable[[Any, Any], Any]] = {
    Kind.ENTRY: lambda holder, key: holder.get(key, MISSING),
    Kind.CLASS: lambda holder, key: holder.__dict__.get(key, MISSING),
    Kind.SLOT: lambda holder, key: getattr(holder, key, MISSING),
    Kind.CELL: _content,
    Kind.CONTENTS: contents_of,
    Kind.ARRAY: lambda holder, _: (*_layout_of(holder), holder.tobytes()),
    Kind.TYPE: lambda holder, _: type(holder),
    Kind.GENERATOR: _random_state,
    Kind.CONTEXT: lambda holder, _: holder.get(MISSING),
    Kind.CACHE: _cache_state,
    Kind.ASKED: lambda holder, key: key(holder),
    Kind.SIZE: lambda holder, _: len(holder),
}


def is_alike(one: Any, other: Any) -> bool:
    """Return whether no program can tell two values apart."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return bool(one.hex() == other.hex())  # 0.0 is not -0.0, and NaN is NaN
    if isinstance(one, _COMPARED):
        return bool(one == other)
    if isinstance(one, np.generic | np.ndarray):
        same = _layout_of(one) == _layout_of(other)
        return bool(same and one.tobytes() == other.tobytes())
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(is_alike, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(
            map(is_alike, one.values(), other.values())
        )
    if isinstance(one, types.MethodType):
        return one.__func__ is other.__func__ and one.__self__ is other.__self__
    if isinstance(one, weakref.ref):
        return one() is other()
    return False


def is_same(one: Any, other: Any) -> bool:
    """Return whether two values are alike, and their lists and dicts the same."""
    if type(one) is tuple and type(other) is tuple:
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, list | dict):
        return one is other
    return is_alike(one, other)


_COMPARED = (
    int, str, bytes, complex, slice, range, set, frozenset, np.dtype, torch.dtype,
    torch.device, torch.Size,
)  # fmt: skip
"""Types whose values are told apart by `==`, given the same type."""

CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)


def shown(value: Any) -> str:
    """Return a value as a message shows it, in few characters."""
    try:
        if isinstance(value, torch.Tensor):
            return f"a tensor of shape {tuple(value.shape)}"
        if any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value)):
            return f"a {type(value).__name__} with tensors"
        text = repr(value)
        return text if len(text) < 40 else f"{text[:37]}..."
    except RecursionError:
        return f"a {type(value).__name__}"
