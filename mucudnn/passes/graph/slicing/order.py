"""Order the slices of a chain of nodes such that few rows are alive at once.

Slices run as in a line buffer: for each further slice of the last node, the nodes
before it compute exactly the rows still missing, and no row twice. A node without halo
needs the same slice of its producer; a node with overlapping windows also needs rows of
the next slice, which is computed first, and so on backwards.
"""

from collections.abc import Iterator, Mapping, Sequence

__all__ = ["interleave_slices"]


def interleave_slices(
    reads: Sequence[Sequence[Mapping[str, int]]],
    makes: Sequence[Mapping[str, Sequence[int]]],
) -> Iterator[tuple[int, int]]:
    """Yield every slice of every node as (position of the node, index of the slice).

    Args:
        reads: For each slice of each node, the last row (exclusive) it reads of each
            tensor. Nodes are in topological order and have equally many slices.
        makes: For each node, the last row (exclusive) of each slice of each result.
    """
    ends = {
        name: (position, stops)
        for position, made in enumerate(makes)
        for name, stops in made.items()
    }
    done = [0] * len(reads)
    for index in range(len(reads[0]) if reads else 0):
        goals = [max(index + 1, already) for already in done]
        for position in reversed(range(len(reads))):
            if goals[position] == done[position]:
                continue
            for name, stop in reads[position][goals[position] - 1].items():
                if name in ends:
                    maker, stops = ends[name]
                    goals[maker] = max(goals[maker], _slices_until(stops, stop))
        for position, goal in enumerate(goals):
            yield from ((position, number) for number in range(done[position], goal))
        done = goals


def _slices_until(stops: Sequence[int], stop: int) -> int:
    """Return how many slices cover all rows before `stop`."""
    enough = (number for number, end in enumerate(stops, 1) if end >= stop)
    return next(enough, len(stops))
