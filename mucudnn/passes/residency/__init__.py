"""Residency policies: which tensors are kept, offloaded or recomputed."""

from mucudnn.ir.graph import Saved
from mucudnn.ir.schedule import RECOMPUTED, RECOMPUTED_BACKWARD, Residency
from mucudnn.passes.graph.rematerialize import saved_tensors
from mucudnn.passes.residency.policies import (
    EVERYTHING,
    PERSISTENTS,
    PLANNED,
    POLICIES,
    SMALL,
    VDNN_DYN,
    PolicyInput,
    ResidencyPolicy,
    check_policy,
    check_residencies,
    decide,
    policy_names,
)

__all__ = [
    "EVERYTHING",
    "PERSISTENTS",
    "PLANNED",
    "POLICIES",
    "RECOMPUTED",
    "RECOMPUTED_BACKWARD",
    "SMALL",
    "VDNN_DYN",
    "PolicyInput",
    "Residency",
    "ResidencyPolicy",
    "Saved",
    "check_policy",
    "check_residencies",
    "decide",
    "policy_names",
    "saved_tensors",
]
