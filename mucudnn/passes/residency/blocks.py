"""Residencies of many tensors at once: by blocks, and of all that are alike.

Networks repeat themselves: what is right for a tensor of one block is mostly right for
that of the next, and only all of them together free enough to be worth a try. A block
ends where branches join; without joints, at every checkpoint.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

from mucudnn.ir.graph import Graph
from mucudnn.passes.graph.slicing.rows import of_whole
from mucudnn.passes.residency import Residency
from mucudnn.passes.residency.candidates import Candidate, Change

__all__ = [
    "alike_changes",
    "blockwise",
    "group_changes",
    "slices_of",
    "total_bytes",
]

_FAR = (Residency.KEEP, Residency.OFFLOAD, Residency.PAGE)
_NEAR = (Residency.RECOMPUTE, Residency.RECOMPUTE_EACH, Residency.OFFLOAD)
_CHEAP = (Residency.RECOMPUTE, Residency.RECOMPUTE_EACH)
_APART = (1, 2)
"""Of so many ends of blocks one is not computed again."""

_CHOICES = (
    Residency.RECOMPUTE_EACH,
    Residency.RECOMPUTE,
    Residency.OFFLOAD,
    Residency.KEEP,
    Residency.PAGE,
)


_LESS = (
    Residency.RECOMPUTE_EACH,
    Residency.RECOMPUTE,
    Residency.RECOMPUTE_ALWAYS,
    Residency.PAGE,
)
_BLOCK = re.compile(r"^(.*[A-Za-z_])\d+/")
"""A name up to the number of its block, which numbers of layers follow a dot in."""


def blockwise(
    graph: Graph, candidates: Sequence[Candidate]
) -> Iterator[dict[str, Residency]]:
    """Where a search may begin: one rule for all blocks.

    The ends of blocks are kept or leave; checkpoints within blocks are computed again,
    also for each use, where a copy would take longer; and so is all that is cheap.

    Args:
        graph: Whose saved tensors they are.
        candidates: In order of production.
    """
    ends = _ends(graph, candidates)
    for every, near, cheap, far in itertools.product(_APART, _NEAR, _CHEAP, _FAR):
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
    """Every residency for every group, those of most bytes first.

    Groups are the slices of a tensor, the rest of a block, its checkpoints, and what is
    of one operation and size.
    """
    found: dict[tuple[object, ...], list[Candidate]] = {}
    ends = frozenset(_ends(graph, candidates))
    block = 0
    for candidate in candidates:
        saved = candidate.saved
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
    members = dict.fromkeys(
        tuple(c.saved.name for c in group)
        for group in sorted(found.values(), key=total_bytes, reverse=True)
        if len(group) > 1
    )
    for names, choice in itertools.product(members, _CHOICES):
        yield [(name, choice) for name in names]


def alike_changes(candidates: Iterable[Candidate], most: int) -> Iterator[Change]:
    """Every way to keep less of what is alike in all blocks, most bytes first.

    Alike are tensors whose names differ in nothing but the number of their block.

    Args:
        candidates: In any order.
        most: How many groups.
    """
    found: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        role = _BLOCK.sub(r"\1/", of_whole(candidate.saved.name))
        found.setdefault(role, []).append(candidate)
    groups = sorted(found.values(), key=total_bytes, reverse=True)[:most]
    for group, choice in itertools.product(groups, _LESS):
        yield [(c.saved.name, choice) for c in group]


def slices_of(candidates: Iterable[Candidate]) -> dict[str, list[Candidate]]:
    """Tensor of the whole step -> its slices; the tensor itself where it is whole."""
    found: dict[str, list[Candidate]] = {}
    for candidate in candidates:
        found.setdefault(of_whole(candidate.saved.name), []).append(candidate)
    return found


def total_bytes(group: Iterable[Candidate]) -> int:
    """Of tensors together."""
    return sum(candidate.saved.nbytes for candidate in group)


def _ends(graph: Graph, candidates: Sequence[Candidate]) -> list[str]:
    """The last tensor of every block, in order."""
    joints = [c.saved.name for c in candidates if _joins(graph, c.saved.name)]
    return joints or [c.saved.name for c in candidates if c.checkpoint]


def _joins(graph: Graph, tensor: str) -> bool:
    """Whether a tensor is of a joint, or what follows it in its place."""
    node = graph.producers[tensor]
    while not node.traits.joint:
        if not node.traits.overwrites or node.traits.expensive:
            return False
        source = node.inputs[node.traits.overwrites[0]]
        if source not in graph.producers:
            return False
        node = graph.producers[source]
    return True
