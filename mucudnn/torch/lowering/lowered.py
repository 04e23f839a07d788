"""A lowered PyTorch graph: a `Graph` with the call of each node, as plain values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mucudnn.errors import UnsupportedError
from mucudnn.ir.graph import Graph


class NotCompiledError(UnsupportedError):
    """Inductor cannot compile a step, or a line of its code is not known."""


@dataclass(frozen=True, slots=True)
class Operand:
    """An input of a node, by its position."""

    index: int


@dataclass(frozen=True, slots=True)
class Number:
    """A number that is computed from operands where it is used."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor among the arguments of a call, by its name."""

    name: str


def mapped(argument: Any, leaf: Callable[[Any], Any]) -> Any:
    """Return an argument with what `leaf` returns of each operand and constant in it.

    What a number is computed from counts, too.
    """
    match argument:
        case Number(function, args):
            return Number(function, mapped(args, leaf))
        case list() | tuple():
            return type(argument)([mapped(item, leaf) for item in argument])
        case dict():
            return {key: mapped(item, leaf) for key, item in argument.items()}
        case _:
            return leaf(argument)


_LEAVES = torch.Tensor, int, float, str, torch.dtype, type(None)


def leaves_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the leaves of a call's arguments, as PyTorch's pytrees have them.

    Arguments are mostly leaves themselves, of which pytrees are slow to find out.
    """
    found: list[Any] = []
    for value in (*args, *kwargs.values()):
        found += [value] if isinstance(value, _LEAVES) else pytree.tree_leaves(value)
    return found


def bound(argument: Any, inputs: dict[str, int]) -> Any:
    """Return an argument with tensors as operands; `inputs` has or gets places."""

    def operand(leaf: Any) -> Any:
        if not isinstance(leaf, Named):
            return leaf
        return Operand(inputs.setdefault(leaf.name, len(inputs)))

    return mapped(argument, operand)


def named(argument: Any, inputs: Sequence[str]) -> Any:
    """Return an argument with tensors by name; the inverse of `bound`."""
    return mapped(
        argument, lambda v: Named(inputs[v.index]) if isinstance(v, Operand) else v
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a tensor in its storage; strides and offset count elements.

    A view may be conjugate or negative: PyTorch sets a flag and computes neither before
    it has to. What kernels were seen to return has the bytes of its storage, too.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    device: torch.device
    conjugate: bool = False
    negative: bool = False
    nbytes: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Layout":
        """Return the layout of a tensor."""
        return cls(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            int(tensor.storage_offset()),
            tensor.device,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    @property
    def extent(self) -> int:
        """Number of elements from the first of a storage to the last of the tensor."""
        sizes = zip(self.shape, self.stride, strict=True)
        last = sum((n - 1) * step for n, step in sizes)
        return 0 if 0 in self.shape else 1 + self.offset + last

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of a tensor with the conjugate and negative flags."""
        if self.conjugate:
            tensor = torch._conj(tensor)
        return torch._neg_view(tensor) if self.negative else tensor

    def view_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a tensor of this layout whose storage is that of `whole`."""
        tensor = torch.empty(0, dtype=self.dtype, device=whole.device).set_(
            whole.untyped_storage(), self.offset, self.shape, self.stride
        )
        return self.read(tensor)

    def empty(self) -> torch.Tensor:
        """Return an uninitialized tensor of this shape and these strides."""
        kind, device = self.dtype, self.device
        if not self.nbytes:
            return torch.empty_strided(
                self.shape, self.stride, dtype=kind, device=device
            )
        whole = torch.empty(self.nbytes // kind.itemsize, dtype=kind, device=device)
        return whole.as_strided(self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class Sample:
    """A tensor to try a kernel on: drawn at random, or another kernel's result.

    Places of maxima and pivots have to be computed: others may be out of bounds.

    Attributes:
        layout: Its layout.
        function: The kernel that returns it; None if it is drawn.
        given: What that kernel reads.
        place: Its place among the results of that kernel.
    """

    layout: Layout
    function: Callable[..., Any] | None = None
    given: tuple["Sample", ...] = ()
    place: int = 0

    def tensor(self, generator: torch.Generator, least: int = -1) -> torch.Tensor:
        """Return the tensor; numbers are drawn from `least` to 1, integers are 0."""
        if self.function is not None:
            found = self.function(*(each.tensor(generator, 0) for each in self.given))
            one: torch.Tensor = found[self.place] if isinstance(found, tuple) else found
            return one
        layout = self.layout
        flat = torch.zeros(layout.extent, dtype=layout.dtype, device=layout.device)
        if layout.dtype.is_floating_point:
            drawn = torch.rand(flat.shape, generator=generator)
            flat.copy_(drawn.mul_(1 - least).add_(least))
        elif layout.dtype is torch.bool:
            flat.copy_(torch.randint(2, flat.shape, generator=generator))
        return flat.as_strided(layout.shape, layout.stride)


@dataclass(frozen=True, slots=True)
class Call:
    """The call that runs a node on tensors.

    Attributes:
        function: The function.
        args: Operands, numbers and constants, nested as in the function's signature.
        kwargs: Keyword arguments, of the same kinds.
        results: Position of each output in the returned value; None for all of it.
        random: Whether it draws random numbers.
        into: Variant of the function that writes its result to the argument `out`, or
            to its first argument if `first`; None if there is none.
        first: Whether `into` writes to its first argument.
        stores: Operands that the first results are new values of, which `into` writes
            in their place.
        samples: What to measure it on, by operand, where not all values are valid.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[int | None, ...]
    random: bool = False
    into: Callable[..., Any] | None = None
    first: bool = False
    samples: Mapping[int, Sample] = field(default_factory=dict)
    stores: tuple[int, ...] = ()


def _nothing() -> None:
    """Compute nothing."""


NOTHING = Call(_nothing, (), MappingProxyType({}), ())
"""Call of a node that computes nothing and only informs the planner."""


@dataclass(frozen=True)
class Lowered:
    """A graph with what is needed to run it.

    Attributes:
        graph: The graph. All its inputs are state: PyTorch owns them.
        calls: Call of each node.
        layouts: Layout of each tensor.
        inputs: The tensor of each placeholder; None if it is not a tensor.
        results: The tensor, or the constant, of each result.
        constants: Tensors that are part of the graph.
        planned: Calls by which a plan replaces those of some nodes of its schedule.
    """

    graph: Graph
    calls: Mapping[str, Call]
    layouts: Mapping[str, Layout]
    inputs: tuple[str | None, ...]
    results: tuple[Any, ...]
    constants: Mapping[str, torch.Tensor]
    planned: Mapping[str, Call] = field(default_factory=dict)
