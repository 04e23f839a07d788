"""Gradients of all ranks summed while the backward pass still runs.

A gradient is final after the last node that writes it, and is read by an update. As
soon as it is final it is weighted and copied into a bucket in host memory, and the
bucket is summed over the ranks when it is full: the rest of the backward pass runs
meanwhile. Every node that reads a gradient afterwards finds the sum, which is put where
the gradient then is: within a budget it may have left the device in between, and have
come back to another place.

Ranks whose steps are planned apart compute their gradients in orders of their own. They
gather them alike all the same, as rank 0 does, and begin buckets in one order, each
between the same two sums of statistics: engines match collectives by their order.

A rank's loss is the mean over its n_i samples: weighted by n_i / N, the sum over ranks
is the gradient of the mean over all N. A gradient of one rank that is infinite or no
number makes the sum so on all of them, and all find the overflow of a loss scale.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from mucudnn.ir.graph import Graph, Phase
from mucudnn.passes.graph.dependencies import writes_before, written
from mucudnn.passes.graph.gradient_accumulation import updated_by
from mucudnn.runtime.distributed.collectives import Collectives, Pending
from mucudnn.runtime.executor.tasks import Around, Call, WhileRunning

__all__ = ["BUCKET_BYTES", "summed_gradients"]

BUCKET_BYTES = 4 << 20
"""Of a bucket: large enough for bandwidth to count, small enough to begin early."""

_NARROW = ("float16", "bfloat16")
_WIDE = "float32"
"""What narrow gradients are summed in: engines add no narrower types."""


@dataclass(frozen=True, slots=True)
class _Final:
    """A gradient that updates read.

    Attributes:
        name: Of its tensor.
        at: The position of the last node that writes it before.
        readers: The positions of those that read it then.
    """

    name: str
    at: int
    readers: tuple[int, ...]


_Described = tuple[str, str, int]
"""What ranks must agree about: a gradient, the type it is summed in, its elements."""


@dataclass(slots=True)
class _Bucket:
    """Gradients that are summed together, one behind the other, in host memory."""

    together: Collectives
    arrays: Sequence[Any]
    dtype: str
    share: float
    values: Any = field(init=False)
    pending: Pending | None = None

    def __post_init__(self) -> None:
        self.values = np.empty(sum(a.size for a in self.arrays), self.dtype)

    def fill(self, place: int) -> None:
        """A gradient is final: weigh it."""
        array = self.arrays[place].reshape(-1)
        part = self._part(place)
        np.multiply(array, self.share, out=part, dtype=part.dtype, casting="unsafe")

    def begin(self) -> None:
        """All gradients are final: begin to sum."""
        self.pending = self.together.all_reduce(self.values)

    def hand_out(self, place: int, array: Any) -> None:
        """Put a sum where an update reads it, once it is there."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        array[...] = self._part(place).reshape(array.shape)

    def _part(self, place: int) -> Any:
        start = sum(array.size for array in self.arrays[:place])
        return self.values[start : start + self.arrays[place].size]


def summed_gradients(
    graph: Graph,
    array: WhileRunning,
    together: Collectives,
    share: float,
    *,
    meetings: Sequence[int] = (),
    bucket_bytes: int = BUCKET_BYTES,
) -> Around:
    """What is called around the nodes of a step so that all ranks update alike.

    Args:
        graph: Of the step, its updates behind the backward pass.
        array: Where tensors are, in host memory.
        together: What the ranks do.
        share: n_i / N, of this rank.
        meetings: Positions of nodes at which the ranks wait for each other besides,
            ascending; as many on every rank.
        bucket_bytes: A bucket is full with so many.

    Raises:
        ValueError: The ranks have other gradients, or updates come too early.
    """
    found = {final.name: final for final in _finals(graph)}
    groups = _groups(_agreed(graph, list(found), together), bucket_bytes)
    finals = [[found[name] for name, _, _ in group] for group in groups]
    begins = _begins(finals, meetings, together)
    names = [node.name for node in graph.nodes]
    before: defaultdict[str, tuple[Call, ...]] = defaultdict(tuple)
    after: defaultdict[str, tuple[Call, ...]] = defaultdict(tuple)
    for group, members, begin in zip(groups, finals, begins, strict=True):
        arrays = [array(names[each.at], each.name) for each in members]
        bucket = _Bucket(together, arrays, group[0][1], share)
        for place, each in enumerate(members):
            after[names[each.at]] += (partial(bucket.fill, place),)
            for reader in each.readers:
                _check_late(names[reader], reader, begin)
                target = array(names[reader], each.name)
                before[names[reader]] += (partial(bucket.hand_out, place, target),)
        after[names[begin]] += (bucket.begin,)
    return Around(before, after)


def _check_late(name: str, reader: int, begin: int) -> None:
    if reader <= begin:
        raise ValueError(
            f"update {name!r} comes before all gradients that are summed with its own; "
            "order='builder' has updates behind the backward pass"
        )


def _finals(graph: Graph) -> Iterator[_Final]:
    """The gradients that updates read, in the order that they become final."""
    storages = graph.storages
    wanted = {storages[tensor]: tensor for tensor in updated_by(graph)}
    readers: defaultdict[str, list[int]] = defaultdict(list)
    for position, node in enumerate(graph.nodes):
        if node.phase is Phase.UPDATE:
            read = {storages[tensor] for tensor in node.inputs} & wanted.keys()
            for storage in read.difference(written(graph, node)):
                readers[storage].append(position)
    final = writes_before(graph, {s: found[0] for s, found in readers.items()})
    for storage in sorted(final, key=final.__getitem__):
        yield _Final(wanted[storage], final[storage], tuple(readers[storage]))


def _agreed(
    graph: Graph, names: Sequence[str], together: Collectives
) -> Sequence[_Described]:
    """The gradients in the order of rank 0."""
    own = []
    for name in names:
        spec = graph.tensors[name]
        dtype = _WIDE if spec.dtype in _NARROW else spec.dtype
        own.append((name, dtype, math.prod(spec.shape)))
    found = together.all_gather(own)
    if any(sorted(other) != sorted(own) for other in found):
        raise ValueError("the ranks train different networks: their gradients differ")
    return found[0]


def _groups(order: Sequence[_Described], nbytes: int) -> list[list[_Described]]:
    """Gradients of one type behind each other, in buckets."""
    groups: list[list[_Described]] = []
    held = 0
    for each in order:
        _, dtype, size = each
        if not groups or groups[-1][0][1] != dtype or held >= nbytes:
            groups.append([])
            held = 0
        groups[-1].append(each)
        held += size * np.dtype(dtype).itemsize
    return groups


def _begins(
    groups: Sequence[Sequence[_Final]],
    meetings: Sequence[int],
    together: Collectives,
) -> list[int]:
    """Behind which node each bucket is begun.

    A bucket is begun when it and those before it are full, and as many meetings are
    behind as on the rank that is the furthest by then.
    """
    full = accumulate((max(each.at for each in group) for group in groups), max)
    ready = list(full)
    met = together.all_gather([bisect_right(meetings, at) for at in ready])
    agreed = map(max, zip(*met, strict=True))
    return [
        max(at, meetings[count - 1]) if count else at
        for at, count in zip(ready, agreed, strict=True)
    ]
