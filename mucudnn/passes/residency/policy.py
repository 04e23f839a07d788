"""Interface of residency policies.

A policy is a function of a training graph and its profile that chooses tensors to
offload or recompute; all other tensors are kept. Whether that fits a budget is decided
by the scheduler.

Activations are offloaded between their last forward and first backward use. Parameters
and optimizer state outlive the step, so their gaps are cyclic, from the last use in one
step to the first use in the next.
"""

from collections.abc import Mapping
from typing import Protocol

from mucudnn.ir.graph import Graph
from mucudnn.ir.profile import Profile
from mucudnn.ir.residency import Residency

__all__ = ["EVERYTHING", "PERSISTENTS", "SMALL", "PolicyInput", "ResidencyPolicy"]


EVERYTHING = "*"
"""Key for all storages made by a step that a policy does not name."""

PERSISTENTS = "*persistent"
"""Key for all parameters and state that a policy does not name, except `SMALL` ones,
whose copies would be many and free next to nothing."""

SMALL = 64 << 10
"""Size in bytes; in a small model, 1/1024 of all parameters and state."""


class PolicyInput(Protocol):
    """Input of a policy: a `StepRequest`, or any object with these properties."""

    @property
    def graph(self) -> Graph:
        """A training graph before in-place rewriting."""
        ...

    @property
    def profile(self) -> Profile:
        """Costs of the graph."""
        ...

    @property
    def budget(self) -> float:
        """Budget for everything in bytes; infinity without a limit."""
        ...

    @property
    def hosted(self) -> frozenset[str] | None:
        """Parameters and state that are host-resident, if decided."""
        ...


class ResidencyPolicy(Protocol):
    """A function that chooses residencies."""

    def __call__(self, step: PolicyInput) -> Mapping[str, Residency]:
        """Return residencies of tensors; missing tensors are kept."""
        ...
