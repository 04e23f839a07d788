"""What a capture leaves behind in Python: put back, and refused where it would count.

A captured step runs no Python again. So a module that counts in an attribute, or draws
from Python's generators, would do something else in its second step: that is seen here.
What changes inside of other objects is not.
"""

import random
import sys
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mucudnn.errors import UnsupportedError

__all__ = ["AttributesChangedError", "put_back", "same", "watched"]

_TENSORS = ("_buffers", "_parameters")


class AttributesChangedError(UnsupportedError):
    """Modules keep tensors of one step in attributes.

    Attributes:
        places: Module and name of each of them.
    """

    def __init__(
        self, message: str, places: Sequence[tuple[torch.nn.Module, str]]
    ) -> None:
        super().__init__(message)
        self.places = places


class _Gone:
    """Stands for what an attribute had in an earlier step; it must not be used."""

    def __getattr__(self, name: str) -> Any:
        raise _EarlierUsedError

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise _EarlierUsedError

    def __bool__(self) -> bool:
        raise _EarlierUsedError


class _EarlierUsedError(Exception):
    """A step uses what an earlier one has left in an attribute."""


@contextmanager
def watched(
    root: torch.nn.Module, written: AttributesChangedError | None = None
) -> Iterator[None]:
    """Put back what the modules' attributes were.

    Args:
        root: With all modules.
        written: Attributes that may change, if what they had is not used before: the
            error of an earlier watch.

    Raises:
        UnsupportedError: Another attribute has changed, or a generator of Python's or
            of NumPy's has been drawn from.
    """
    before = [(name, m, _attributes(m)) for name, m in root.named_modules()]
    places = [] if written is None else [(id(m), k) for m, k in written.places]
    for module, key in () if written is None else written.places:
        vars(module)[key] = _Gone()
    drawn = _generators()
    try:
        yield
        for name, module, attributes in before:
            free = {key for at, key in places if at == id(module)}
            _check(name, module, attributes, free)
        for name, state in _generators().items():
            if state != drawn.get(name, state):
                raise UnsupportedError(
                    f"the step draws from the generator of {name}, which runs only "
                    "when it is captured; draw from PyTorch's (torch.rand)"
                )
    except (_EarlierUsedError, AttributeError, TypeError):
        if written is None:
            raise
        raise written from None
    finally:
        for _, module, attributes in before:
            put_back(module, attributes)
        _put_back_generators(drawn)


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    """The attributes, containers copied."""
    return {key: _copied(value) for key, value in vars(module).items()}


def _copied(value: Any) -> Any:
    return value.copy() if type(value) in (dict, list, set) else value


def put_back(holder: object, attributes: Mapping[str, Any]) -> None:
    """Give an object the attributes that it had, containers in place."""
    now: dict[str, Any] = vars(holder)
    for key in [key for key in now if key not in attributes]:
        del now[key]
    for key, value in attributes.items():
        held: Any = now.get(key)
        if type(held) in (dict, set) and type(held) is type(value):
            if not same(held, value):
                held.clear()
                held.update(value)
        elif type(held) is list and type(value) is list:
            held[:] = value
        else:
            now[key] = value


def _check(
    name: str,
    module: torch.nn.Module,
    before: Mapping[str, Any],
    free: Collection[str],
) -> None:
    label = name.partition(".")[2] or "the model"
    changed = [
        key
        for key, value in _attributes(module).items()
        if key not in free
        and not (key in before and (same(before[key], value) or _lists(before[key])))
    ]
    for key in changed:
        value = vars(module)[key]
        if key in _TENSORS:
            new = [k for k, v in value.items() if before[key].get(k) is not v]
            raise UnsupportedError(
                f"{label} makes {new[0]!r} in a step; make it before the first one"
            )
        was = (
            f"was a {type(before[key]).__name__}" if key in before else "was not there"
        )
        tensors = [k for k in changed if isinstance(vars(module)[k], torch.Tensor)]
        raise AttributesChangedError(
            f"the step changes attribute {key!r} of {label}, which {was}: Python is "
            "not run again in the steps that follow; keep what changes in a buffer "
            "(register_buffer), and what is only looked at out of the step",
            [(module, k) for k in tensors] if tensors == changed else [],
        )


def _lists(value: Any) -> bool:
    """Whether it is a list of parameters: where others are lent, it has those."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(v() if isinstance(v, weakref.ref) else v, torch.nn.Parameter)
            for v in value
        )
    )


def same(one: Any, other: Any) -> bool:
    """Whether two values are one object, or equal plain values nested alike."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            same(v, other[k]) for k, v in one.items()
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, weakref.ref):
        return one() is other()
    if isinstance(one, int | float | complex | str | bytes | set | frozenset):
        return bool(one == other)
    return isinstance(one, torch.Size) and one == other


def _generators() -> dict[str, Any]:
    found: dict[str, Any] = {"random": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        state = numpy.random.get_state()
        found["numpy.random"] = (state[0], state[1].tobytes(), *state[2:])
    return found


def _put_back_generators(before: Mapping[str, Any]) -> None:
    """Have Python and NumPy draw what they would have drawn."""
    now = _generators()
    if now["random"] != before["random"]:
        random.setstate(before["random"])
    state = before.get("numpy.random")
    if state is not None and state != now["numpy.random"]:
        numpy = sys.modules["numpy"]
        keys = numpy.frombuffer(state[1], numpy.uint32)
        numpy.random.set_state((state[0], keys, *state[2:]))
