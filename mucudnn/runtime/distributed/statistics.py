"""Batch normalisation over all ranks: the statistics of the whole mini-batch.

The pieces of a normalisation leave room for the other ranks twice. Forward, each has
the count, mean and sum of squares of its own rows, or of slices of them: before they
are merged, which no rank ever does twice, all get those of all and merge them in the
order of the ranks, so that all have the same bits. Backward, each has its share of the
gradients of gamma and beta, which the input's gradient needs whole: they are summed as
soon as they are final.

A rank's loss is the mean over its own n_i of N samples, so its gradients are N / n_i
times those of the batch's mean. Sums that are weighted by n_i / N are those of that
mean, and the input's gradient divides them by the rank's own count: the factor N / n_i
of the rank's gradients is then in them as well, and the weighted sum over the ranks
of what is now the same everywhere changes nothing.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.split_batch_norm import all_moments, merged_moments
from mucudnn.ir.graph import Graph
from mucudnn.passes.graph.dependencies import writes_before
from mucudnn.runtime.distributed.collectives import Collectives
from mucudnn.runtime.executor.tasks import Around, Call, WhileRunning

__all__ = ["Meeting", "joint_statistics", "meetings_of"]

_MOMENTS = slice(None, -2)
"""Of what a merge reads: behind them are the running statistics."""

_SUMS = slice(-2, None)
"""Of what the input's gradient reads: those of gamma and beta."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where all ranks wait for each other in a step.

    Attributes:
        position: Of the node.
        tensors: What they bring: moments of slices, before the node merges them, or one
            sum, behind the node that writes it last.
        merges: Whether the node merges.
    """

    position: int
    tensors: tuple[str, ...]
    merges: bool


def meetings_of(graph: Graph) -> tuple[Meeting, ...]:
    """The meetings of a step whose normalisations are in pieces, in order."""
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
    graph: Graph, array: WhileRunning, together: Collectives, share: float
) -> Around:
    """What is called around the nodes of a step whose normalisations are in pieces.

    Args:
        graph: Of the step.
        array: Where tensors are, in host memory.
        together: What the ranks do.
        share: n_i / N, of this rank.

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
    return Around(before, after)


def _check_order(
    graph: Graph, meetings: tuple[Meeting, ...], together: Collectives
) -> None:
    """Slices have names of their own; what they are slices of is the same on all."""
    merging = {m.position: graph.nodes[m.position].name for m in meetings if m.merges}
    own = [merging.get(m.position, m.tensors[0]) for m in meetings]
    if any(order != own for order in together.all_gather(own)):
        raise ValueError(
            "the ranks run their steps in different orders, so that their statistics "
            "would not meet; the same order and split on all of them do"
        )


def _merge(together: Collectives, slices: list[Any]) -> None:
    """The statistics of one rank become those of all, in its first slice."""
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
    """A sum over the rows of one rank becomes that over all, each by its share."""
    of_all = share * sums.astype(np.float64)
    together.all_reduce(of_all).wait()
    sums[...] = of_all
