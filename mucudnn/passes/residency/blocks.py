"""Residencies of many tensors at once: by blocks, and of equivalent tensors.

Networks repeat blocks: what is right for a tensor of one block is mostly right for the
same tensor of the next, and only all of them together free enough memory. A block ends
where branches join; in networks without joins, at every checkpoint.
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

_END_CHOICES = (Residency.KEEP, Residency.OFFLOAD, Residency.PAGE)
_CHECKPOINT_CHOICES = (Residency.RECOMPUTE, Residency.RECOMPUTE_EACH, Residency.OFFLOAD)
_CHEAP_CHOICES = (Residency.RECOMPUTE, Residency.RECOMPUTE_EACH)
_STRIDES = (1, 2)
"""Every how many block ends one is not recomputed."""

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
        _STRIDES, _CHECKPOINT_CHOICES, _CHEAP_CHOICES, _END_CHOICES
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
    """Yield every residency for every group, the largest groups first.

    Groups are the slices of a tensor, a block without its end, the checkpoints of a
    block, and tensors of the same operation and size.
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
    joints = [c.saved.name for c in candidates if _joins(graph, c.saved.name)]
    return joints or [c.saved.name for c in candidates if c.checkpoint]


def _joins(graph: Graph, tensor: str) -> bool:
    """Return whether a tensor is the join of branches, or overwrites it in place."""
    node = graph.producers[tensor]
    while not node.traits.joint:
        if not node.traits.overwrites or node.traits.expensive:
            return False
        source = node.inputs[node.traits.overwrites[0]]
        if source not in graph.producers:
            return False
        node = graph.producers[source]
    return True
