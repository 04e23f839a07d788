"""Synchronized batch normalization: statistics of the whole mini-batch on all ranks.

The decomposed normalization exchanges data with the other ranks twice. Forward, each
rank has count, mean and sum of squares of its own rows, or of slices of them. Before
they are merged, all ranks gather those of all and merge them in rank order, so that all
get the same bits. Backward, each rank has its part of the gradients of gamma and beta,
of which the input's gradient needs the total: they are summed as soon as they are
final.

A rank's loss is the mean over its own n_i of N samples, so its gradients are N / n_i
times those of the batch's mean. Sums weighted by n_i / N are those of that mean, and
the input's gradient divides them by the rank's own count, so that the factor N / n_i of
the rank's gradients reappears. The weighted sum over the ranks of the (now equal) gamma
and beta gradients changes nothing.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.split_batch_norm import all_moments, merged_moments
from mucudnn.ir.graph import Graph
from mucudnn.passes.graph.dependencies import writes_before
from mucudnn.runtime.distributed.collectives import Collectives
from mucudnn.runtime.executor.tasks import Call, NodeHooks, TensorLookup

__all__ = ["Meeting", "joint_statistics", "meetings_of"]

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
    """Return calls around nodes that make batch statistics those of all ranks.

    For the arguments see `summed_gradients`.

    Raises:
        ValueError: The ranks would meet in different orders.
    """
    meetings = meetings_of(graph)
    _check_order(graph, meetings, together)
    before: dict[str, tuple[Call, ...]] = {}
    after: dict[str, tuple[Call, ...]] = {}
    for meeting in meetings:
        name = graph.nodes[meeting.position].name
        arrays = [array(name, tensor) for tensor in meeting.tensors]
        if meeting.merges:
            before[name] = (partial(_merge, together, arrays),)
        else:
            (sums,) = arrays
            weigh = partial(_weigh, together, share, sums)
            after[name] = (*after.get(name, ()), weigh)
    return NodeHooks(before, after)


def _check_order(
    graph: Graph, meetings: tuple[Meeting, ...], together: Collectives
) -> None:
    """Check that all ranks meet in one order.

    The names of slices may differ between ranks, those of merging nodes may not.
    """
    merging = {m.position: graph.nodes[m.position].name for m in meetings if m.merges}
    own = [merging.get(m.position, m.tensors[0]) for m in meetings]
    if any(order != own for order in together.all_gather(own)):
        raise ValueError(
            "the ranks run their steps in different orders, so that their statistics "
            "would not meet; give all of them the same order and split"
        )


def _merge(together: Collectives, slices: list[Any]) -> None:
    """Replace one rank's moments by those of all ranks, in its first slice."""
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
