"""What a residency policy is: a function, its input and the names it may use.

A policy is a function of a training graph and its profile; it says for some tensors
that they are offloaded or computed again. What it does not name is kept. Whether that
fits a budget is the scheduler's business.

Activations are saved for the backward pass, and the gap before it is theirs. Parameters
and optimizer state outlive the step: their gaps are cyclic, from the last use in one
step to the first in the next.
"""

from collections.abc import Mapping
from typing import Protocol

from mucudnn.ir.graph import Graph
from mucudnn.ir.profile import Profile
from mucudnn.ir.residency import Residency

__all__ = ["EVERYTHING", "PERSISTENTS", "SMALL", "PolicyInput", "ResidencyPolicy"]


EVERYTHING = "*"
"""Stands for every storage that a policy does not name and that a step makes."""

PERSISTENTS = "*persistent"
"""Stands for parameters and state that a policy does not name, but for those that are
`SMALL`. Their copies would be many, and what they free next to nothing."""

SMALL = 64 << 10
"""Bytes; in a small model, less than a 1/1024 of all parameters and state."""


class PolicyInput(Protocol):
    """What a policy may look at: a `StepRequest`, or anything that has these."""

    @property
    def graph(self) -> Graph:
        """A training graph that nothing has made in-place yet."""
        ...

    @property
    def profile(self) -> Profile:
        """Its costs."""
        ...

    @property
    def budget(self) -> float:
        """Bytes for everything; infinity if there is no limit."""
        ...

    @property
    def hosted(self) -> frozenset[str] | None:
        """Parameters and state that are host-resident, if that is decided."""
        ...


class ResidencyPolicy(Protocol):
    """A way to choose residencies."""

    def __call__(self, step: PolicyInput) -> Mapping[str, Residency]:
        """Residencies of tensors; those left out are kept."""
        ...
