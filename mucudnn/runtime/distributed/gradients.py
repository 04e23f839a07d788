"""Gradients of all ranks summed while the backward pass still runs.

A gradient is final after the last node that writes it, and is read by an update. In
between it is weighted, gathered with its neighbours into a bucket, and the bucket is
summed over the ranks as soon as it is full: the rest of the backward pass runs
meanwhile. Updates wait for the bucket that they read.

A rank's loss is the mean over its n_i samples: weighted by n_i / N, the sum over ranks
is the gradient of the mean over all N.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from mucudnn.ir.graph import Graph, Phase
from mucudnn.passes.graph.dependencies import last_writes
from mucudnn.runtime.distributed.collectives import Collectives, Pending
from mucudnn.runtime.executor.tasks import Around, Call

__all__ = ["BUCKET_BYTES", "summed_gradients"]

BUCKET_BYTES = 4 << 20
"""Of a bucket: large enough for bandwidth to count, small enough to begin early."""


@dataclass(slots=True)
class _Bucket:
    """Gradients that are summed together, one behind the other."""

    together: Collectives
    arrays: Sequence[Any]
    share: float
    values: Any = field(init=False)
    pending: Pending | None = None

    def __post_init__(self) -> None:
        count = sum(array.size for array in self.arrays)
        self.values = np.empty(count, self.arrays[0].dtype)

    def begin(self) -> None:
        """All gradients are final: weigh them and begin to sum."""
        for array, part in self._parts():
            np.multiply(array.reshape(-1), self.share, out=part, casting="unsafe")
        self.pending = self.together.all_reduce(self.values)

    def finish(self) -> None:
        """Wait for the sum and hand it out, once a step."""
        if self.pending is None:
            return
        self.pending.wait()
        self.pending = None
        for array, part in self._parts():
            array[...] = part.reshape(array.shape)

    def _parts(self) -> Sequence[tuple[Any, Any]]:
        ends = np.cumsum([0, *(array.size for array in self.arrays)])
        spans = pairwise(ends.tolist())
        return [
            (array, self.values[start:stop])
            for array, (start, stop) in zip(self.arrays, spans, strict=True)
        ]


def summed_gradients(
    graph: Graph,
    array: Callable[[str], Any],
    together: Collectives,
    share: float,
    bucket_bytes: int = BUCKET_BYTES,
) -> Around:
    """What is called around the nodes of a step so that all ranks update alike.

    Args:
        graph: Of the step, its updates behind the backward pass.
        array: Gradient -> its array, in host memory.
        together: What the ranks do.
        share: n_i / N, of this rank.
        bucket_bytes: A bucket is full with so many.
    """
    written = last_writes(graph)
    final = {g: written[graph.storages[g]] for g in graph.gradients.values()}
    order = sorted(final, key=lambda gradient: final[gradient])
    names = [node.name for node in graph.nodes]
    readers = _readers(graph, set(final))
    before: dict[str, tuple[Call, ...]] = {}
    after: dict[str, tuple[Call, ...]] = {}
    for group in _groups(graph, order, bucket_bytes):
        bucket = _Bucket(together, [array(name) for name in group], share)
        after[names[final[group[-1]]]] = (
            *after.get(names[final[group[-1]]], ()),
            bucket.begin,
        )
        for name in group:
            for reader in readers[name]:
                before[reader] = (*before.get(reader, ()), bucket.finish)
    return Around(before, after)


def _groups(graph: Graph, order: Sequence[str], nbytes: int) -> list[list[str]]:
    """Gradients of one type in the order that they become final, in buckets."""
    groups: list[list[str]] = []
    size = 0
    for name in order:
        spec = graph.tensors[name]
        same = bool(groups) and graph.tensors[groups[-1][0]].dtype == spec.dtype
        if not same or size >= nbytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += spec.nbytes
    return groups


def _readers(graph: Graph, gradients: set[str]) -> dict[str, list[str]]:
    """Gradient -> the updates that read it."""
    storages = {graph.storages[name]: name for name in gradients}
    found: dict[str, list[str]] = {name: [] for name in gradients}
    for node in graph.nodes:
        if node.phase is Phase.UPDATE:
            for tensor in node.inputs:
                if graph.storages[tensor] in storages:
                    found[storages[graph.storages[tensor]]].append(node.name)
    return found
