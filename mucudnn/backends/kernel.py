"""The interface of a kernel: one operation of a training step, but for convolutions."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mucudnn.backends.device import Array, Buffer
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.tensor import TensorSpec

__all__ = ["Kernel", "KernelArguments", "LibraryKernels", "no_workspace"]

_Arrays = Sequence[Array]
_Specs = Sequence[TensorSpec]
_Attrs = Mapping[str, Any]
_Call = Callable[[], None]
KernelArguments = tuple[_Arrays, _Arrays, _Attrs, Buffer | None]
"""Inputs, outputs, attributes and workspace of one call."""


def no_workspace(inputs: _Specs, outputs: _Specs, attrs: _Attrs) -> int:
    """Return 0, for kernels that need no workspace."""
    return 0


@dataclass(frozen=True)
class Kernel:
    """An operation of a training step; convolutions have plans instead.

    Attributes: run: (inputs, outputs, attributes, workspace) -> None. Launches the
        kernel, which writes into the outputs, and into inputs that are state. Arrays
        are dense.
        workspace: (inputs, outputs, attributes) -> bytes that `run` must be given.
        ready: Binds the arguments of `run` for repeated calls on arrays that stay in
            place; called on the device's queue (`Device.queue`). None: `run` is called.
        together: Binds several consecutive calls as one. They write no tensor that
            another of them reads or writes, except flags. None: one after the other.
        flags: Positions of state inputs to which all writers write the same value,
            whatever the previous value.
    """

    run: Callable[[_Arrays, _Arrays, _Attrs, Buffer | None], None]
    workspace: Callable[[_Specs, _Specs, _Attrs], int] = no_workspace
    ready: Callable[[_Arrays, _Arrays, _Attrs, Buffer | None], _Call] | None = None
    together: Callable[[Sequence[KernelArguments]], _Call] | None = None
    flags: tuple[int, ...] = ()

    def call(
        self, inputs: _Arrays, outputs: _Arrays, attrs: _Attrs, workspace: Buffer | None
    ) -> _Call:
        """Return a call on these arrays, which stay in place; see `ready`."""
        if self.ready is not None:
            return self.ready(inputs, outputs, attrs, workspace)
        return functools.partial(self.run, inputs, outputs, attrs, workspace)


class LibraryKernels(Protocol):
    """Vendor library kernels for operations that the backend has own kernels for.

    A node whose attribute `LIBRARY` is the library's name is computed by it, through
    the backend's kernel table; if the library refuses, the backend's own kernel runs.

    Attributes:
        times_ms: Times of our kernel and the library's in this process, by timed case.
            All steps use the same choice, whatever their caches contain.
    """

    times_ms: dict[str, tuple[float, float]]

    @property
    def name(self) -> str:
        """Name of the library in nodes."""

    def offers(self, graph: Graph, node: Node) -> bool:
        """Return whether the library computes this node and has not refused it."""
