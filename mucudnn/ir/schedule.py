"""Schedules: the flat instruction list, residencies and placements of a step.

Instructions name storages (see `Graph.storages`): views and in-place results have no
memory of their own. Offloading is a `SwapOut` and, later, a `SwapIn`. Recomputation
needs no instruction: it is a second node that computes the same values.

A schedule is cyclic: its program runs for every step. Tensors that are resident at its
end, and copies in flight then, carry over to the next step.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from mucudnn.ir.graph import PERSISTENT, Graph


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
    """Start copying a tensor back into its allocated device memory."""

    tensor: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Block the compute queue until a tensor's last copy is complete."""

    tensor: str


Instruction = Alloc | Free | Compute | SwapOut | SwapIn | Wait


@dataclass(frozen=True)
class Schedule:
    """A graph with its execution order and memory instructions.

    Attributes:
        workspaces: Node -> bytes of scratch memory while it runs.
        peak_bytes: Peak device memory, workspaces included.
        hosted: Parameters and state that are host-resident, and on the device only
            between their instructions. All others are always resident on the device.
        live_across: Hosted tensors that are live across iterations: on the device as
            one step ends and the next begins.
    """

    graph: Graph
    instructions: tuple[Instruction, ...]
    workspaces: Mapping[str, int]
    peak_bytes: int
    hosted: tuple[str, ...] = ()
    live_across: tuple[str, ...] = ()

    @cached_property
    def resident(self) -> tuple[str, ...]:
        """Parameters and state that are always on the device."""
        hosted = set(self.hosted)
        persistent = (spec.name for spec in self.graph.with_role(*PERSISTENT))
        return tuple(name for name in persistent if name not in hosted)


class Residency(enum.Enum):
    """Residency of a tensor between its uses."""

    KEEP = "keep"
    OFFLOAD = "offload"
    """Offload before the backward uses; parameters and state in their longest gap."""
    RECOMPUTE = "recompute"
    """Recompute once and keep until the last use (speed-centric)."""
    RECOMPUTE_EACH = "recompute_each"
    """Recompute for every backward use (memory-centric)."""
    PAGE = "page"
    """Offload whenever the running node does not use it."""
    RECOMPUTE_ALWAYS = "recompute_always"
    """Recompute for every use; slices also within the forward pass, except for the
    first use."""

    # An enumeration's own hash is that of the name, in Python; searches hash millions.
    __hash__ = object.__hash__


RECOMPUTED_BACKWARD = (Residency.RECOMPUTE, Residency.RECOMPUTE_EACH)
"""Residencies that rerun a tensor's producers for the backward pass only."""

RECOMPUTED = (*RECOMPUTED_BACKWARD, Residency.RECOMPUTE_ALWAYS)
"""Residencies that rerun a tensor's producers."""

STATIC, VIRTUAL = "static", "virtual"

PLACEMENTS = (STATIC, VIRTUAL)
"""Contiguous tensors only; or also tensors mapped page by page to consecutive virtual
addresses, if that needs less memory or is faster."""
