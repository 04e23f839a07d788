"""Residencies worth a trial: the starts and the changes of a search.

Between "offload everything" and "recompute everything" there is a family with one
parameter: the number of tensors, the cheapest per byte first, that are recomputed.
"""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mucudnn.passes.graph.recompute_chains import (
    is_checkpoint,
    recompute_chain,
    recompute_ms,
)
from mucudnn.passes.residency import (
    EVERYTHING,
    PERSISTENTS,
    POLICIES,
    RECOMPUTED_BACKWARD,
    PolicyInput,
    Residency,
    Saved,
    decide,
    saved_tensors,
)

__all__ = [
    "Candidate",
    "Change",
    "by_cost",
    "candidates_of",
    "decided",
    "mixed",
    "pairs",
    "same_changes",
    "seeds",
    "single_changes",
]

Change = Sequence[tuple[str, Residency]]
"""New residencies of some tensors."""

_OF_GROUPS = {
    EVERYTHING: (Residency.KEEP, Residency.PAGE),
    PERSISTENTS: (Residency.KEEP, Residency.OFFLOAD, Residency.PAGE),
}
"""Residencies of groups of tensors that cannot be recomputed."""

_WINNING = (
    Residency.RECOMPUTE,
    Residency.RECOMPUTE_EACH,
    Residency.KEEP,
    Residency.OFFLOAD,
    Residency.PAGE,
)
"""Residencies, those first to which changes help most often."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A saved tensor and the cost of recomputing it.

    Attributes:
        saved: The tensor.
        again_ms: Time of its recompute chain.
        parents: Names of saved tensors that the chain reads, ascending.
        checkpoint: Whether recomputation is expensive; see `is_checkpoint`.
    """

    saved: Saved
    again_ms: float
    parents: tuple[str, ...]
    checkpoint: bool


def candidates_of(step: PolicyInput) -> list[Candidate]:
    """Return the saved tensors worth a decision, in order of production.

    Tensors that a recomputable producer cannot restore, such as a normalisation's
    statistics, are not included.
    """
    tensors = saved_tensors(step.graph)
    names = {saved.name for saved in tensors}
    found = []
    for saved in tensors:
        if saved.producer.recomputable and not saved.producer.remakes(saved.name):
            continue
        again = recompute_ms(step.graph, step.profile, saved.name, names.__contains__)
        nodes = recompute_chain(step.graph, saved.name, names.__contains__)
        read = {step.graph.storages[t] for node in nodes for t in node.inputs}
        parents = tuple(sorted((read & names) - {saved.name}))
        checkpoint = is_checkpoint(step.graph, saved.name, names.__contains__)
        found.append(Candidate(saved, again, parents, checkpoint))
    return found


def by_cost(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Sort candidates by recompute time per byte."""
    return sorted(candidates, key=lambda c: c.again_ms / max(1, c.saved.nbytes))


def seeds(
    step: PolicyInput, candidates: Sequence[Candidate]
) -> list[Mapping[str, Residency]]:
    """Return the starts of a search: all policies, and those that need the least."""
    found = list(decided(step))
    for mode in RECOMPUTED_BACKWARD:
        for count in (len(candidates) // 2, len(candidates)):
            found.append(mixed(candidates, count, mode))
        found.append(mixed(candidates, len(candidates), mode, Residency.PAGE))
    return found


def decided(step: PolicyInput) -> Iterator[Mapping[str, Residency]]:
    """Yield the residencies of every registered policy."""
    return (decide(name, step) for name in POLICIES.table)


def mixed(
    candidates: Sequence[Candidate],
    count: int,
    mode: Residency,
    others: Residency = Residency.KEEP,
) -> dict[str, Residency]:
    """Recompute the first `count` candidates and offload all others.

    Checkpoints are never recomputed for every use: chains of them take quadratic time.
    """

    def choice(index: int, candidate: Candidate) -> Residency:
        each = mode is Residency.RECOMPUTE_EACH
        impossible = candidate.again_ms == math.inf
        if index >= count or impossible or (each and candidate.checkpoint):
            return Residency.OFFLOAD
        return mode

    return {EVERYTHING: others} | {
        c.saved.name: choice(i, c) for i, c in enumerate(candidates)
    }


def single_changes(names: Sequence[str]) -> Iterator[Change]:
    """Yield every residency for every name; see `same_changes`."""
    return same_changes([name] for name in names)


def same_changes(
    groups: Iterable[Sequence[str]], choices: Collection[Residency] = tuple(Residency)
) -> Iterator[Change]:
    """Yield every residency for every group of names, the same for a whole group.

    One residency goes through all groups before the next: recomputation instead of
    copies helps most, and most often.
    """
    known = list(groups)
    for choice in (choice for choice in _WINNING if choice in choices):
        for names in known:
            if choice in _OF_GROUPS.get(names[0], _WINNING):
                yield [(name, choice) for name in names]


def pairs(names: Sequence[str]) -> Iterator[Change]:
    """Yield every pair of residencies for every pair of names."""
    for one, other in itertools.combinations(names, 2):
        for first in _OF_GROUPS.get(one, _WINNING):
            for second in _OF_GROUPS.get(other, _WINNING):
                yield [(one, first), (other, second)]
