"""A kernel: one operation of a training step, but for convolutions."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mucudnn.backends.device import Array, Buffer
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.tensor import TensorSpec

__all__ = ["Kernel", "KernelArguments", "LibraryKernels", "no_workspace"]

KernelArguments = tuple[
    Sequence[Array], Sequence[Array], Mapping[str, Any], Buffer | None
]
"""Inputs, outputs, attributes and workspace of one call."""


def no_workspace(
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    attrs: Mapping[str, Any],
) -> int:
    """What a kernel needs that brings its own few tiles: nothing."""
    return 0


@dataclass(frozen=True)
class Kernel:
    """One operation of a training step; convolutions have plans instead.

    Attributes:
        run: (inputs, outputs, attributes, workspace) -> nothing. Launches it: writes
            into the outputs, and into inputs that are state. Arrays are dense.
        workspace: (inputs, outputs, attributes) -> bytes that `run` must be given.
        ready: Makes a call without arguments of what `run` is given, for arrays that
            stay where they are and are used over and over; it is called on the
            device's queue (`Device.queue`). None: `run` itself is called.
        together: Makes one such call of several, each as `run` would be given it, that
            follow one another and touch no tensor that another writes, but flags.
            None: they are called one after the other.
        flags: Positions of inputs that are state and that all who write them write
            alike, whatever was there.
    """

    run: Callable[
        [Sequence[Array], Sequence[Array], Mapping[str, Any], Buffer | None], None
    ]
    workspace: Callable[
        [Sequence[TensorSpec], Sequence[TensorSpec], Mapping[str, Any]], int
    ] = no_workspace
    ready: (
        Callable[
            [Sequence[Array], Sequence[Array], Mapping[str, Any], Buffer | None],
            Callable[[], None],
        ]
        | None
    ) = None
    together: Callable[[Sequence[KernelArguments]], Callable[[], None]] | None = None
    flags: tuple[int, ...] = ()

    def call(
        self,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        attrs: Mapping[str, Any],
        workspace: Buffer | None,
    ) -> Callable[[], None]:
        """What runs it on these arrays, which stay where they are; see `ready`."""
        if self.ready is not None:
            return self.ready(inputs, outputs, attrs, workspace)
        return functools.partial(self.run, inputs, outputs, attrs, workspace)


class LibraryKernels(Protocol):
    """Kernels of a library for operations that a backend has kernels of its own for.

    A node whose attribute `LIBRARY` is its name is computed by it, through the
    backend's own kernel table, and by the backend's own kernel where it refuses.

    Attributes:
        times_ms: What our kernels and its own took in this process so far, by what
            was timed. All its steps choose alike by it, whatever their caches are.
    """

    times_ms: dict[str, tuple[float, float]]

    @property
    def name(self) -> str:
        """What nodes call it."""
        ...

    def offers(self, graph: Graph, node: Node) -> bool:
        """Whether it computes the same function, and has not refused this one yet."""
        ...
