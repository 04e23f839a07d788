"""Residencies: what a policy decides about, and every policy that ships."""

from mucudnn.passes.residency.choice import (
    EVERYTHING,
    PERSISTENTS,
    POLICIES,
    RECOMPUTED,
    SMALL,
    Residency,
    ResidencyPolicy,
    Saved,
    Step,
    saved_tensors,
)

__all__ = [
    "EVERYTHING",
    "PERSISTENTS",
    "POLICIES",
    "RECOMPUTED",
    "SMALL",
    "Residency",
    "ResidencyPolicy",
    "Saved",
    "Step",
    "saved_tensors",
]
