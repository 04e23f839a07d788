"""Batch normalisation over all ranks: the statistics of the whole mini-batch.

The pieces of a normalisation leave room for the other ranks twice. Forward, each has
the count, mean and sum of squares of its own rows: all get those of all and merge them
in the order of the ranks, so that all have the same bits. Backward, each has its share
of the gradients of gamma and beta, which the input's gradient needs whole.

A rank's loss is the mean over its own n_i of N samples, so its gradients are N / n_i
times those of the batch's mean. Sums that are weighted by n_i / N are those of that
mean, and the input's gradient divides them by the rank's own count: the factor N / n_i
of the rank's gradients is then in them as well, and the weighted sum over the ranks
of what is now the same everywhere changes nothing.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from mucudnn.backends.cpu.kernels.split_batch_norm import merged_moments
from mucudnn.ir.graph import Graph
from mucudnn.runtime.distributed.collectives import Collectives
from mucudnn.runtime.executor.tasks import Around, Call

__all__ = ["joint_statistics"]


def joint_statistics(
    graph: Graph, array: Callable[[str], Any], together: Collectives, share: float
) -> Around:
    """What is called around the nodes of a step whose normalisations are in pieces.

    Args:
        graph: Of the step; the same nodes on all ranks.
        array: Tensor -> its array, in host memory.
        together: What the ranks do.
        share: n_i / N, of this rank.
    """
    after: dict[str, tuple[Call, ...]] = {}
    for node in graph.nodes:
        arrays = [array(name) for name in node.outputs]
        if node.op == "batch_norm_sums":
            after[node.name] = (partial(_merge, together, *arrays),)
        elif node.op == "batch_norm_grad_sums":
            after[node.name] = (partial(_weigh, together, share, arrays),)
    return Around({}, after)


def _merge(together: Collectives, stats: Any) -> None:
    """The statistics of one rank become those of all."""
    of_all = np.zeros((together.size, *stats.shape), stats.dtype)
    of_all[together.rank] = stats
    together.all_reduce(of_all).wait()
    found = tuple(of_all[0])
    for other in of_all[1:]:
        found = merged_moments(found, tuple(other))
    for row, values in enumerate(found):
        stats[row] = values


def _weigh(together: Collectives, share: float, sums: list[Any]) -> None:
    """Sums over the rows of one rank become those over all, each by its share."""
    of_all = np.stack([share * one.astype(np.float64) for one in sums])
    together.all_reduce(of_all).wait()
    for one, values in zip(sums, of_all, strict=True):
        one[...] = values
