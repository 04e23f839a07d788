"""A memory-annotated program: the flat list of instructions that an executor runs.

Instructions name storages (see `Graph.storage`): views and results in place have no
memory of their own. Offloading is a `SwapOut` and, later, a `SwapIn`. Recomputation
needs no instruction: it is a second node that computes the same values.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mucudnn.ir.graph import Graph

__all__ = [
    "Alloc",
    "Compute",
    "Free",
    "Instruction",
    "Schedule",
    "SwapIn",
    "SwapOut",
    "Wait",
]


@dataclass(frozen=True, slots=True)
class Alloc:
    """Reserve device memory for a tensor."""

    tensor: str


@dataclass(frozen=True, slots=True)
class Free:
    """Release a tensor's device memory."""

    tensor: str


@dataclass(frozen=True, slots=True)
class Compute:
    """Launch a node."""

    node: str


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Start copying a tensor to the host."""

    tensor: str


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Start copying a tensor back into its (already allocated) device memory."""

    tensor: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Block the compute queue until a tensor's last copy is done."""

    tensor: str


Instruction = Alloc | Free | Compute | SwapOut | SwapIn | Wait


@dataclass(frozen=True, slots=True)
class Schedule:
    """A graph, the order to run it in, and where every tensor is meanwhile.

    Attributes:
        graph: What is run.
        instructions: In program order.
        workspaces: Node -> bytes of scratch memory while it runs.
        peak_bytes: The most device memory in use at once, workspaces included.
    """

    graph: Graph
    instructions: tuple[Instruction, ...]
    workspaces: Mapping[str, int]
    peak_bytes: int
