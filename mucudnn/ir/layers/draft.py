"""What a layer needs of the graph that it is put into.

A layer is a function of a draft and of the tensors it reads. It checks their shapes,
declares its parameters, appends nodes, and returns the name of its result. Layers of
one's own are written the same way, over a `GraphBuilder`.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from mucudnn.ir.graph import Node
from mucudnn.ir.initializers import Initializer
from mucudnn.ir.tensor import TensorSpec

__all__ = ["Draft", "Saved"]


Saved = tuple[str, tuple[int, ...], str]
"""Label, shape and data type of what a node leaves for its gradient."""


class Draft(Protocol):
    """A graph under construction, as its layers see it."""

    @property
    def training(self) -> bool:
        """Whether it is for training."""
        ...

    @property
    def seed(self) -> int:
        """Of random masks."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorSpec]:
        """What is declared so far, by name."""
        ...

    @property
    def nodes(self) -> Sequence[Node]:
        """What is appended so far."""
        ...

    def spec(self, tensor: str) -> TensorSpec:
        """A tensor by its name; ValueError if there is none."""
        ...

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Its shape; ValueError if there is none of that name."""
        ...

    def scope(self, name: str) -> AbstractContextManager[None]:
        """Within it, names begin with `name/`."""
        ...

    def input(self, name: str, shape: Sequence[int], dtype: str | None = None) -> str:
        """Declare a tensor that every step is fed."""
        ...

    def parameter(
        self, name: str, shape: Sequence[int], initializer: Initializer
    ) -> str:
        """Declare a trainable tensor."""
        ...

    def state(self, name: str, shape: Sequence[int], initializer: Initializer) -> str:
        """Declare a tensor that steps change but no gradient reaches."""
        ...

    def append(
        self,
        op: str,
        inputs: tuple[str, ...],
        shape: tuple[int, ...],
        saved: Sequence[Saved] = (),
        *,
        dtype: str | None = None,
        alias: str | None = None,
        mutates: tuple[str, ...] = (),
        **attrs: Any,
    ) -> str:
        """Append a node; returns the name of its result."""
        ...
