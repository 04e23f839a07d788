"""Sum gradients and statistics of all ranks while the backward pass runs.

A gradient is final after the last node that writes it; then an update reads it. As soon
as it is final, it is weighted and copied into a bucket in host memory. A full bucket is
summed over the ranks while the backward pass continues. The sum is written where each
node that reads the gradient finds it: within a budget, the gradient may have been
offloaded and fetched to another offset in between.

Ranks with different plans compute their gradients in different orders. All of them fill
buckets in the order of rank 0 and start the buckets in one order, at the same position
among the sums of batch statistics, because engines match collectives by their order.

A rank's loss is the mean over its n_i samples. Weighted by n_i / N, the sum over all
ranks is the gradient of the mean over all N samples. A gradient that is not finite on
one rank makes the sum so everywhere, so all ranks detect an overflow of the loss scale.
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

from mucudnn.backends.cpu.kernels.batch_norm import all_moments, merged_moments
from mucudnn.ir.graph import Graph, Phase
from mucudnn.passes.graph.updates import updated_by
from mucudnn.passes.liveness import writes_before, written
from mucudnn.runtime.distributed.collectives import Collectives, Pending
from mucudnn.runtime.executor.tasks import Call, NodeHooks, TensorLookup

BUCKET_BYTES = 4 << 20
"""Size of a bucket: large enough for full bandwidth, small enough to start early."""

_NARROW = ("float16", "bfloat16")

_WIDE = "float32"
"""Type in which narrow gradients are summed, as engines do not add narrow types."""


@dataclass(frozen=True, slots=True)
class _Final:
    """A gradient that updates read.

    Attributes:
        at: Position of the last node that writes it before the updates.
        readers: Positions of the updates that read it.
    """

    name: str
    at: int
    readers: tuple[int, ...]


_Described = tuple[str, str, int]
"""What ranks must agree about: gradient, type of the sum, number of elements."""


@dataclass(slots=True)
class _Bucket:
    """Gradients that are summed together, concatenated in host memory."""

    together: Collectives
    arrays: Sequence[Any]
    dtype: str
    share: float
    values: Any = field(init=False)
    pending: Pending | None = None

    def __post_init__(self) -> None:
        self.values = np.empty(sum(a.size for a in self.arrays), self.dtype)

    def fill(self, place: int) -> None:
        """Weight a final gradient and copy it into the bucket."""
        array = self.arrays[place].reshape(-1)
        part = self._part(place)
        np.multiply(array, self.share, out=part, dtype=part.dtype, casting="unsafe")

    def begin(self) -> None:
        self.pending = self.together.all_reduce(self.values)

    def hand_out(self, place: int, array: Any) -> None:
        """Wait for the sum; write a gradient into the array that an update reads."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        array[...] = self._part(place).reshape(array.shape)

    def _part(self, place: int) -> Any:
        start = sum(array.size for array in self.arrays[:place])
        return self.values[start : start + self.arrays[place].size]


def summed_gradients(
    graph: Graph,
    array: TensorLookup,
    together: Collectives,
    share: float,
    *,
    meetings: Sequence[int] = (),
    bucket_bytes: int = BUCKET_BYTES,
) -> NodeHooks:
    """Return calls around the nodes of a step that sum gradients over all ranks.

    Args:
        graph: Graph of the step, its updates behind the backward pass.
        array: Looks up the host array of a tensor at a node.
        together: Collective operations of the ranks.
        share: n_i / N of this rank.
        meetings: Ascending positions of other nodes at which the ranks wait for each
            other; the same number on every rank.
        bucket_bytes: Bytes at which a bucket is full.
    """
    found = {final.name: final for final in _finals(graph)}
    # All ranks have to fill the same buckets in the same order.
    groups = _groups(_in_common_order(graph, list(found), together), bucket_bytes)
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
                if reader <= begin:
                    raise ValueError(
                        f"update {names[reader]!r} comes before all gradients that "
                        "are summed with its own; use order='builder', which has "
                        "updates after the backward pass"
                    )
                target = array(names[reader], each.name)
                before[names[reader]] += (partial(bucket.hand_out, place, target),)
        after[names[begin]] += (bucket.begin,)
    return NodeHooks(before, after)


def _finals(graph: Graph) -> Iterator[_Final]:
    """Yield the gradients that updates read, in the order they become final."""
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


def _in_common_order(
    graph: Graph, names: Sequence[str], together: Collectives
) -> Sequence[_Described]:
    """Return the gradients in the order of rank 0, which all ranks use."""
    own = []
    for name in names:
        spec = graph.tensors[name]
        dtype = _WIDE if spec.dtype in _NARROW else spec.dtype
        own.append((name, dtype, math.prod(spec.shape)))
    found = together.all_gather(own)
    if any(sorted(other) != sorted(own) for other in found):
        raise ValueError(
            "the ranks train different networks: their gradients differ; build the "
            "same network on all of them"
        )
    return found[0]


def _groups(order: Sequence[_Described], nbytes: int) -> list[list[_Described]]:
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
    groups: Sequence[Sequence[_Final]], meetings: Sequence[int], together: Collectives
) -> list[int]:
    """Return the node after which each bucket is started.

    A bucket is started when it and all earlier ones are full, and behind as many
    meetings as on the rank where most meetings precede it.
    """
    ready = list(accumulate((max(each.at for each in group) for group in groups), max))
    met = together.all_gather([bisect_right(meetings, at) for at in ready])
    agreed = map(max, zip(*met, strict=True))
    return [
        max(at, meetings[count - 1]) if count else at
        for at, count in zip(ready, agreed, strict=True)
    ]


# Synchronized batch normalization: statistics of the whole mini-batch on all ranks.
#
# The decomposed normalization exchanges data with the other ranks twice. Forward, each
# rank has count, mean and sum of squares of its own rows, or of slices of them. Before
# they are merged, all ranks gather those of all and merge them in rank order, so that
# all get the same bits. Backward, each rank has its part of the gradients of gamma and
# beta, of which the input's gradient needs the total: they are summed as soon as they
# are final.
#
# A rank's loss is the mean over its own n_i of N samples, so its gradients are N / n_i
# times those of the batch's mean. Sums weighted by n_i / N are those of that mean, and
# the input's gradient divides them by the rank's own count, so that the factor N / n_i
# of the rank's gradients reappears. The weighted sum over the ranks of the (now equal)
# gamma and beta gradients changes nothing.


_MOMENTS = slice(None, -2)
"""The moments among a merge's inputs; the running statistics follow them."""

_SUMS = slice(-2, None)
"""The gradients of gamma and beta among the inputs of the input's gradient."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """A point of a step at which all ranks exchange data.

    Attributes:
        tensors: Tensors to exchange: moments of slices, before the node merges them, or
            one sum, after the node that writes it last.
        merges: Whether the node merges moments.
    """

    position: int
    tensors: tuple[str, ...]
    merges: bool


def meetings_of(graph: Graph) -> tuple[Meeting, ...]:
    """Return the meetings of a step with decomposed normalizations, in order."""
    found: list[Meeting] = []
    sums: dict[str, tuple[str, int]] = {}
    for position, node in enumerate(graph.nodes):
        if node.op == "batch_norm_merge":
            found.append(Meeting(position, node.inputs[_MOMENTS], True))
        elif node.op == "batch_norm_grad_apply":
            for name in node.inputs[_SUMS]:
                sums.setdefault(graph.storages[name], (name, position))
    final = writes_before(graph, {s: position for s, (_, position) in sums.items()})
    found += [Meeting(final[s], (name,), False) for s, (name, _) in sums.items()]
    return tuple(sorted(found, key=lambda meeting: meeting.position))


def joint_statistics(
    graph: Graph, array: TensorLookup, together: Collectives, share: float
) -> NodeHooks:
    """Return calls around nodes that merge batch statistics over all ranks.

    For the arguments see `summed_gradients`.
    """
    meetings = meetings_of(graph)
    # All ranks have to meet in one order.
    merging = {m.position: graph.nodes[m.position].name for m in meetings if m.merges}
    # Slices may have other names on other ranks; merging nodes have the same
    # everywhere.
    own = [merging.get(m.position, m.tensors[0]) for m in meetings]
    if any(order != own for order in together.all_gather(own)):
        raise ValueError(
            "the ranks run their steps in different orders, so their statistics "
            "cannot be exchanged; use the same order and split on all ranks"
        )
    before: dict[str, tuple[Call, ...]] = {}
    after: dict[str, tuple[Call, ...]] = {}
    for meeting in meetings:
        name = graph.nodes[meeting.position].name
        arrays = [array(name, tensor) for tensor in meeting.tensors]
        if meeting.merges:
            before[name] = (partial(_merge, together, arrays),)
        else:
            weigh = partial(_weigh, together, share, *arrays)
            after[name] = (*after.get(name, ()), weigh)
    return NodeHooks(before, after)


def _merge(together: Collectives, slices: list[Any]) -> None:
    """Merge the moments of all ranks into the first slice of each rank."""
    own, *others = slices
    of_all = np.zeros((together.size, *own.shape), own.dtype)
    of_all[together.rank] = all_moments(slices)
    together.all_reduce(of_all).wait()
    found = tuple(of_all[0])
    for other in of_all[1:]:
        found = merged_moments(found, tuple(other))
    for row, values in enumerate(found):
        own[row] = values
    for other in others:
        other[...] = 0  # moments of no numbers


def _weigh(together: Collectives, share: float, sums: Any) -> None:
    """Replace a sum over one rank's rows by the weighted sum over all ranks."""
    of_all = share * sums.astype(np.float64)
    together.all_reduce(of_all).wait()
    sums[...] = of_all
