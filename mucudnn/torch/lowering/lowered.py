"""A PyTorch graph as a graph of ours, with what is needed to run it: plain values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from mucudnn.ir.graph import Graph


@dataclass(frozen=True, slots=True)
class Operand:
    """An input of a node, by its place."""

    index: int


@dataclass(frozen=True, slots=True)
class Number:
    """A number that follows from operands, computed where it is used."""

    function: Callable[..., Any]
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies in its storage; strides and offset count elements.

    A view may be of the conjugates, or the negatives, of what is stored: PyTorch notes
    it and computes neither before it must.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    device: torch.device
    conjugate: bool = False
    negative: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Layout":
        """The layout of a tensor."""
        return cls(
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.dtype,
            int(tensor.storage_offset()),
            tensor.device,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that lies so, read as this says."""
        if self.conjugate:
            tensor = torch._conj(tensor)
        return torch._neg_view(tensor) if self.negative else tensor


@dataclass(frozen=True, slots=True)
class Call:
    """How a node is run on tensors.

    Attributes:
        function: What is called.
        args: With operands, numbers and constants, nested as the function has them.
        kwargs: The same by name.
        results: Where its outputs are in what it returns; None for all of it.
        random: Whether it draws random numbers.
        into: The same function with its result given as `out`, or overwriting its first
            argument if `first`.
        first: Which of the two.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[int | None, ...]
    random: bool = False
    into: Callable[..., Any] | None = None
    first: bool = False


def _nothing() -> None:
    """Compute nothing."""


NOTHING = Call(_nothing, (), MappingProxyType({}), ())
"""How a node is run that only tells the planner something."""


@dataclass(frozen=True)
class Lowered:
    """A graph of ours with what is needed to run it.

    Attributes:
        graph: Every input of it is state: PyTorch owns it, and it stays.
        calls: Node -> how it is run.
        layouts: Tensor -> how it lies.
        inputs: The tensor of each placeholder; None where it has none.
        results: The tensor, or the constant, of each result.
        constants: Tensors that are part of the graph.
        planned: Node of a schedule -> how a plan runs it, instead of its call.
    """

    graph: Graph
    calls: Mapping[str, Call]
    layouts: Mapping[str, Layout]
    inputs: tuple[str | None, ...]
    results: tuple[Any, ...]
    constants: Mapping[str, torch.Tensor]
    planned: Mapping[str, Call] = field(default_factory=dict)
