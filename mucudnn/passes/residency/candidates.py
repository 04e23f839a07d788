"""Residencies that are worth a trial: where a search begins, and what it goes through.

Between "offload everything" and "compute everything again" lies a family with one
parameter: how many of the tensors that are cheapest to compute, per byte, are computed
again.
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
"""Residencies that replace others."""

_OF_GROUPS = {
    EVERYTHING: (Residency.KEEP, Residency.PAGE),
    PERSISTENTS: (Residency.KEEP, Residency.OFFLOAD, Residency.PAGE),
}
"""What may become of tensors that nothing can compute again."""

_WINNING = (
    Residency.RECOMPUTE,
    Residency.RECOMPUTE_EACH,
    Residency.KEEP,
    Residency.OFFLOAD,
    Residency.PAGE,
)
"""Residencies, those first to which a change most often helps."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A saved tensor, and what it takes to compute it again.

    Attributes:
        saved: The tensor.
        again_ms: What its recompute chain takes.
        parents: Names of saved tensors that the chain reads, ascending.
        checkpoint: Whether that is much: see `is_checkpoint`.
    """

    saved: Saved
    again_ms: float
    parents: tuple[str, ...]
    checkpoint: bool


def candidates_of(step: PolicyInput) -> list[Candidate]:
    """Saved tensors worth a decision, in order of production.

    Not among them is what others are made again from and nothing makes again, such as
    a normalisation's statistics.
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
    """The cheapest to compute again per byte first."""
    return sorted(candidates, key=lambda c: c.again_ms / max(1, c.saved.nbytes))


def seeds(
    step: PolicyInput, candidates: Sequence[Candidate]
) -> list[Mapping[str, Residency]]:
    """What every policy decides, and what is least of all: where a search begins."""
    found = list(decided(step))
    for mode in RECOMPUTED_BACKWARD:
        for count in (len(candidates) // 2, len(candidates)):
            found.append(mixed(candidates, count, mode))
        found.append(mixed(candidates, len(candidates), mode, Residency.PAGE))
    return found


def decided(step: PolicyInput) -> Iterator[Mapping[str, Residency]]:
    """What every policy decides."""
    return (decide(name, step) for name in POLICIES.table)


def mixed(
    candidates: Sequence[Candidate],
    count: int,
    mode: Residency,
    others: Residency = Residency.KEEP,
) -> dict[str, Residency]:
    """The first `count` candidates computed again, all others offloaded.

    Checkpoints are never computed for every use: chains of them take quadratic time.

    Args:
        candidates: By cost.
        count: A member of the family.
        mode: In which way they are computed again.
        others: What becomes of tensors that are no candidates.
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
    """Every residency for every name: see `same_changes`."""
    return same_changes([name] for name in names)


def same_changes(
    groups: Iterable[Sequence[str]], choices: Collection[Residency] = tuple(Residency)
) -> Iterator[Change]:
    """Every residency for every group of names, the same for all of a group.

    One kind of change goes through all groups before the next: what is computed again
    instead of copied wins most, and most often.

    Args:
        groups: Such as the slices of a tensor.
        choices: The residencies; all of them if none are given.
    """
    known = list(groups)
    for choice in (choice for choice in _WINNING if choice in choices):
        for names in known:
            if choice in _OF_GROUPS.get(names[0], _WINNING):
                yield [(name, choice) for name in names]


def pairs(names: Sequence[str]) -> Iterator[Change]:
    """Every two residencies for every two names."""
    for one, other in itertools.combinations(names, 2):
        for first in _OF_GROUPS.get(one, _WINNING):
            for second in _OF_GROUPS.get(other, _WINNING):
                yield [(one, first), (other, second)]
