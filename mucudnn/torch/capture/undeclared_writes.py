"""Operators of PyTorch that write operands which their schema does not declare.

A planner may run a recorded operation again, or later. Both are wrong for one that
writes an operand unseen: a batch norm that is recomputed would move its running
statistics twice. On a CPU all such operators but one decompose before they are
recorded; on CUDA they do not.

While a step is captured, `recorded_call` replaces such a call by an operator of our own
that runs the same kernel on copies of the written operands and returns the copies. The
capture then stores these like any other new value. A copy is a few bytes for each
channel, and its bytes are counted. `writes_of` is the table that the capture and the
lowering share; the lowering refuses what is left.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from mucudnn.errors import UnsupportedError


@dataclass(frozen=True)
class UndeclaredWrites:
    """The operands that an operator writes without declaring it.

    Attributes:
        operands: Names of the written arguments.
        training: Argument that has to be true for a write; empty if it always writes.
        returned: Whether later steps read the written values.
        refusal: What to do instead, if the operator cannot be captured.
    """

    operands: tuple[str, ...]
    training: str = ""
    returned: bool = True
    refusal: str = ""


_RUNNING = "running_mean", "running_var"

_SYNCHRONIZED = (
    "torch.nn.SyncBatchNorm gathers statistics of all ranks inside of the model; use "
    "mt.distribute, which does so for plain batch norms"
)

_NATIVE_RNN = (
    "its dropout keeps a random state of cuDNN's own; use dropout=0 and nn.Dropout "
    "between single layers, or torch.backends.cudnn.flags(enabled=False)"
)

UNDECLARED_WRITES: Mapping[str, UndeclaredWrites] = MappingProxyType(
    {
        "aten::cudnn_batch_norm": UndeclaredWrites(_RUNNING, "training"),
        "aten::miopen_batch_norm": UndeclaredWrites(_RUNNING, "training"),
        "aten::native_batch_norm": UndeclaredWrites(_RUNNING, "training"),
        "aten::batch_norm_update_stats": UndeclaredWrites(_RUNNING),
        "aten::batch_norm_gather_stats": UndeclaredWrites(
            _RUNNING, refusal=_SYNCHRONIZED
        ),
        "aten::batch_norm_gather_stats_with_counts": UndeclaredWrites(
            _RUNNING, refusal=_SYNCHRONIZED
        ),
        "aten::_cudnn_rnn": UndeclaredWrites(
            ("dropout_state",), "train", refusal=_NATIVE_RNN
        ),
        "aten::miopen_rnn": UndeclaredWrites(
            ("dropout_state",), "train", refusal=_NATIVE_RNN
        ),
        # The kernel computes the gradient of the data in the reserve space, which the
        # gradient of the weights then reads; nothing reads it afterwards.
        "aten::_cudnn_rnn_backward": UndeclaredWrites(("reserve",), returned=False),
        "aten::miopen_rnn_backward": UndeclaredWrites(("reserve",), returned=False),
    }
)
"""Operator -> what it writes. `tests/test_fakecuda.py` checks all others by bytes."""


SPOILS_AN_OPERAND = frozenset(
    {
        "aten.mkldnn_rnn_layer_backward.default",
        "torch.ops.aten.mkldnn_rnn_layer_backward.default",  # as Inductor calls it
    }
)
"""Operations that compute in an operand that nothing reads afterwards: they run once.

oneDNN's backward kernel of an LSTM on the CPU does so in the forward pass's workspace.
"""


def writes_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call writes operands that its schema does not declare."""
    schema: Any = getattr(function, "_schema", None)
    found = None if schema is None else UNDECLARED_WRITES.get(schema.name)
    if found is None:
        return False
    given = arguments_by_name(function, args, kwargs)
    if found.training and not given.get(found.training):
        return False
    return any(given.get(name) is not None for name in found.operands)


def recorded_call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call the functional form of an operator, and store what it has written.

    Raises:
        UnsupportedError: The operator has none.
    """
    writes = UNDECLARED_WRITES[function._schema.name]
    if writes.refusal:
        raise UnsupportedError(
            f"{function} writes to {', '.join(writes.operands)}, which its schema "
            f"does not declare as mutated: {writes.refusal}"
        )
    pure = functional_variant(function)
    results = list(pure(*args, **kwargs))
    if writes.returned:
        given = arguments_by_name(function, args, kwargs)
        for name in reversed([n for n in writes.operands if given.get(n) is not None]):
            given[name].copy_(results.pop())
    return results[0] if len(function._schema.returns) == 1 else tuple(results)


@functools.cache
def functional_variant(function: Any) -> Any:
    """Define the functional form of an operator in namespace `mucudnn`.

    Its results are those of the operator and then the written operands, if these are
    read afterwards. Its operands must not be None where they would be written.
    """
    schema = function._schema
    writes = UNDECLARED_WRITES[schema.name]
    name = f"{schema.name.replace('aten::', '')}_functional"
    given, results = str(schema).removeprefix(schema.name).split(" -> ")
    made = results.strip("()").split(", ")
    made += ["Tensor"] * (len(writes.operands) if writes.returned else 0)
    LIBRARY.define(f"{name}{given} -> ({', '.join(made)})")
    kernel = kernel_of(function)
    for key in ("CompositeExplicitAutograd", "Meta"):
        LIBRARY.impl(name, kernel, key)
    found = getattr(torch.ops.mucudnn, name).default
    _KERNELS[found] = kernel
    return found


def rounds_in_place(function: Any, args: Sequence[Any]) -> Any:
    """Return the overload of a call that PyTorch rounds in its own way in place."""
    products = "aten::mul_", "aten::div_", "aten::addcmul_"
    if function._schema.name not in products or not args[0].is_complex():
        return None
    is_number = not isinstance(args[1], torch.Tensor)
    return function.overloadpacket.Scalar if is_number else function


@functools.cache
def in_place_on_copy(function: Any) -> Any:
    """Define an operator that returns what an in-place one makes of a copy."""

    def kernel(given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return function(given.clone(), *args, **kwargs)

    kernel.__qualname__ = f"copied({function})"  # plans are stored by name
    schema = str(function._schema).removeprefix("aten::").replace("(a!)", "")
    name = "copied_" + schema.partition("(")[0].replace(".", "_")
    tags = {torch.Tag.nondeterministic_seeded}.intersection(function.tags)
    LIBRARY.define(f"{name}({schema.partition('(')[2]}", tags=tuple(tags))
    for key in ("CompositeExplicitAutograd", "Meta"):
        LIBRARY.impl(name, kernel, key)
    return getattr(torch.ops.mucudnn, name).default


LIBRARY = torch.library.Library("mucudnn", "FRAGMENT")
"""Operators of our own, whose definitions end with this object."""

_KERNELS: dict[Any, Callable[..., Any]] = {}


def direct_kernel(function: Any) -> Callable[..., Any] | None:
    """Return the function behind a functional form, without PyTorch's dispatcher."""
    return _KERNELS.get(function)


@functools.cache
def kernel_of(function: Any) -> Callable[..., Any]:
    """Return a function that runs an operator on copies of what it writes."""
    writes = UNDECLARED_WRITES[function._schema.name]
    places = [_names(function).index(name) for name in writes.operands]

    def functional(*args: Any) -> Any:
        given = list(args)
        for place in places:
            given[place] = given[place].clone()
        found = function(*given)
        results = found if isinstance(found, tuple) else (found,)
        written = [given[place] for place in places] if writes.returned else []
        return *results, *written

    functional.__qualname__ = f"functional({function})"  # plans are stored by name
    return functional


def arguments_by_name(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    return {**dict(zip(_names(function), args, strict=False)), **kwargs}


def _names(function: Any) -> list[str]:
    return [argument.name for argument in function._schema.arguments]
