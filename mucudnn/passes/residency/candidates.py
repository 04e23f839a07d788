"""Candidate residencies of a search: single tensors and blocks of tensors."""

import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mucudnn.ir.graph import Graph
from mucudnn.passes.graph.rematerialize import (
    RecomputeChains,
    is_checkpoint,
    recompute_ms,
)
from mucudnn.passes.graph.split import of_whole
from mucudnn.passes.residency import (
    EVERYTHING,
    PERSISTENTS,
    RECOMPUTED_BACKWARD,
    PolicyInput,
    Residency,
    Saved,
)
from mucudnn.passes.residency.policies import (
    POLICIES,
    decide,
    joins_branches,
    passing_block_ends,
)

Change = Sequence[tuple[str, Residency]]
"""New residencies of some tensors."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A saved tensor and the cost of recomputing it.

    Attributes:
        saved: The tensor.
        recompute_ms: Time of its recompute chain.
        copy_ms: Time of copying it to the host and back.
        checkpoint: Whether recomputation is expensive; see `is_checkpoint`.
    """

    saved: Saved
    recompute_ms: float
    copy_ms: float
    checkpoint: bool


# Residencies of many tensors at once: by blocks, and of equivalent tensors.
#
# Networks repeat blocks: what is right for a tensor of one block is mostly right for
# the same tensor of the next, and only all of them together free enough memory. A block
# ends where branches join; in networks without joins, at every checkpoint.


_END_CHOICES = (Residency.KEEP, Residency.OFFLOAD, Residency.PAGE)

_CHECKPOINT_CHOICES = (*RECOMPUTED_BACKWARD, Residency.OFFLOAD)

_STRIDES = (1, 2)
"""Every how many block ends one is not recomputed."""

_CHOICES = (
    Residency.RECOMPUTE_EACH,
    Residency.RECOMPUTE,
    Residency.OFFLOAD,
    Residency.KEEP,
)
"""Residencies of changes. Paging is for starts: as a change it hardly ever helps."""

_STAYS = (Residency.OFFLOAD, Residency.KEEP)
"""Residencies of narrow results from which others are recomputed."""

_LESS = (
    Residency.RECOMPUTE_EACH,
    Residency.RECOMPUTE,
    Residency.RECOMPUTE_ALWAYS,
    Residency.PAGE,
)

_BLOCK = re.compile(r"^(.*[A-Za-z_])\d+/")
"""Matches a name up to the number of its block."""


def blockwise(
    graph: Graph, candidates: Sequence[Candidate]
) -> Iterator[dict[str, Residency]]:
    """Yield starts of a search: one rule for all blocks.

    The ends of blocks are kept or offloaded, checkpoints inside of blocks are
    recomputed or offloaded, and all other tensors are recomputed.
    """
    ends = _ends(graph, candidates)
    for every, near, cheap, far in itertools.product(
        _STRIDES, _CHECKPOINT_CHOICES, RECOMPUTED_BACKWARD, _END_CHOICES
    ):
        stay = frozenset(ends[::every])
        yield {
            c.saved.name: far
            if c.saved.name in stay
            else near
            if c.checkpoint or c.saved.name in ends
            else cheap
            for c in candidates
        }


def group_changes(graph: Graph, candidates: Sequence[Candidate]) -> Iterator[Change]:
    """Yield all residencies but paging for every group, the largest groups first.

    Groups are the slices of a tensor, a block without its end, the checkpoints of a
    block, and tensors of the same operation and size.
    """
    found: dict[tuple[object, ...], list[Candidate]] = {}
    ends = frozenset(_ends(graph, candidates))
    block = 0
    for candidate in candidates:
        saved = candidate.saved
        # Each key is a reason to change tensors together.
        keys: list[tuple[object, ...]] = [
            ("slices", of_whole(saved.name)),
            ("alike", saved.producer.op, saved.nbytes, saved.name in ends),
        ]
        if saved.name in ends:
            block += 1
        else:
            keys += [("block", block), ("rest", block, candidate.checkpoint)]
        for key in keys:
            found.setdefault(key, []).append(candidate)
    # Groups of different keys may have the same members.
    members = dict.fromkeys(
        tuple(c.saved.name for c in group)
        for group in sorted(found.values(), key=total_bytes, reverse=True)
        if len(group) > 1
    )
    for names, choice in itertools.product(members, _CHOICES):
        yield [(name, choice) for name in names]


def narrow_changes(graph: Graph, chains: RecomputeChains) -> Iterator[Change]:
    """Yield residencies of narrow results, and of the tensors recomputed from them.

    Those of one operation change together before each of them does, largest first.
    """
    order = sorted(chains.narrow, key=lambda name: -graph.tensors[name].nbytes)
    groups: dict[str, list[str]] = {}
    for name in order:
        groups.setdefault(graph.producers[name].op, []).append(name)
    singles = [[name] for name in order]
    for names in [*(g for g in groups.values() if len(g) > 1), *singles]:
        wide = sorted(frozenset().union(*(chains.wide[name] for name in names)))
        for stays, runs in itertools.product(_STAYS, RECOMPUTED_BACKWARD):
            yield [*((n, stays) for n in names), *((w, runs) for w in wide)]
        yield [(name, Residency.RECOMPUTE) for name in names]


def alike_changes(candidates: Iterable[Candidate], most: int) -> Iterator[Change]:
    """Yield residencies that keep less of equivalent tensors, most bytes first.

    Tensors are equivalent if their names differ only in the number of the block.
    """
    found: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        role = _BLOCK.sub(r"\1/", of_whole(candidate.saved.name))
        found.setdefault(role, []).append(candidate)
    groups = sorted(found.values(), key=total_bytes, reverse=True)[:most]
    for group, choice in itertools.product(groups, _LESS):
        yield [(c.saved.name, choice) for c in group]


def slices_of(candidates: Iterable[Candidate]) -> dict[str, list[Candidate]]:
    """Return the slices of each tensor of the whole step."""
    found: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        found.setdefault(of_whole(candidate.saved.name), []).append(candidate)
    return found


def total_bytes(group: Iterable[Candidate]) -> int:
    """Return the total size of tensors in bytes."""
    return sum(candidate.saved.nbytes for candidate in group)


def _ends(graph: Graph, candidates: Sequence[Candidate]) -> list[str]:
    joints = [c.saved.name for c in candidates if joins_branches(graph, c.saved.name)]
    return joints or [c.saved.name for c in candidates if c.checkpoint]


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


def candidates_of(step: PolicyInput) -> list[Candidate]:
    """Return the saved tensors worth a decision, in order of production.

    Tensors that a recomputable producer cannot restore, such as a normalisation's
    statistics, are not included.
    """
    tensors = step.graph.saved
    names = {saved.name for saved in tensors}
    found = []
    for saved in tensors:
        if saved.producer.recomputable and not saved.producer.remakes(saved.name):
            continue
        again = recompute_ms(step.graph, step.profile, saved.name, names.__contains__)
        copy_ms = saved.nbytes * step.profile.round_trip_ms
        checkpoint = is_checkpoint(step.graph, saved.name, names.__contains__)
        found.append(Candidate(saved, again, copy_ms, checkpoint))
    return found


def by_cost(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Sort candidates by recompute time per byte."""
    return sorted(candidates, key=lambda c: c.recompute_ms / max(1, c.saved.nbytes))


def initial_residencies(
    step: PolicyInput, candidates: Sequence[Candidate]
) -> list[Mapping[str, Residency]]:
    """Return the starts of a search: all policies, and those that need the least.

    Results of blocks that only the forward pass reads are offloaded where others are
    recomputed for every use: chains through all blocks take quadratic time.
    """
    found = list(policy_residencies(step))
    offloaded = dict.fromkeys(passing_block_ends(step.graph), Residency.OFFLOAD)
    for mode in RECOMPUTED_BACKWARD:
        first = offloaded if mode is Residency.RECOMPUTE_EACH else {}
        for count in (len(candidates) // 2, len(candidates)):
            found.append(first | recompute_first(candidates, count, mode))
        every = recompute_first(candidates, len(candidates), mode, Residency.PAGE)
        found.append(first | every)
    return found


def policy_residencies(step: PolicyInput) -> Iterator[Mapping[str, Residency]]:
    """Yield the residencies of every registered policy."""
    return (decide(name, step) for name in POLICIES.table)


def recompute_first(
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
        impossible = candidate.recompute_ms == math.inf
        if index >= count or impossible or (each and candidate.checkpoint):
            return Residency.OFFLOAD
        return mode

    return {EVERYTHING: others} | {
        c.saved.name: choice(i, c) for i, c in enumerate(candidates)
    }


def paged_family(candidates: Sequence[Candidate]) -> list[Mapping[str, Residency]]:
    """Return residencies that page all but the first candidates, which are recomputed.

    They need little memory at every node, so convolutions get fast algorithms early in
    a search.

    Args:
        candidates: The saved tensors, those first to be recomputed first.
    """
    return [
        {EVERYTHING: Residency.PAGE, PERSISTENTS: Residency.PAGE}
        | {c.saved.name: Residency.PAGE for c in candidates}
        | {c.saved.name: mode for c in candidates[: int(share * len(candidates))]}
        for share, mode in _PAGED_SHARES
    ]


_PAGED_SHARES = (
    (0.25, Residency.RECOMPUTE_EACH),
    (0.25, Residency.RECOMPUTE),
    (0.125, Residency.RECOMPUTE_EACH),
    (0.5, Residency.RECOMPUTE_EACH),
)
"""Shares of the candidates that starts with much paging recompute, and how."""


def single_changes(names: Sequence[str]) -> Iterator[Change]:
    """Yield all residencies but paging for every name; see `same_changes`."""
    return same_changes([name] for name in names)


def same_changes(
    groups: Iterable[Sequence[str]], choices: Collection[Residency] = tuple(Residency)
) -> Iterator[Change]:
    """Yield all residencies but paging for every group, the same for a whole group.

    One residency goes through all groups before the next: recomputation instead of
    copies helps most, and most often. `EVERYTHING` and `PERSISTENTS` are paged as well.
    """
    known = list(groups)
    for choice in (choice for choice in _WINNING if choice in choices):
        for names in known:
            if choice in _OF_GROUPS.get(names[0], _CHOICES):
                yield [(name, choice) for name in names]
