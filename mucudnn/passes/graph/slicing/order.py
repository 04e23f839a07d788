"""Which slice of which node runs when: of each node as far ahead as others reach.

A node that reads the same rows of its input as it computes runs behind the one that
makes them, slice for slice. One whose windows reach over reads rows of the next slice:
that has to be there first, and what it reads in turn. So slices run like lines through
a buffer: when the last node has computed one more, all before it have computed no more
than the rows that it needs, and nothing twice.
"""

from collections.abc import Iterator, Mapping, Sequence

__all__ = ["line_by_line"]


def line_by_line(
    reads: Sequence[Sequence[Mapping[str, int]]],
    makes: Sequence[Mapping[str, Sequence[int]]],
) -> Iterator[tuple[int, int]]:
    """Every slice of every node, as (position of the node, index of the slice).

    Args:
        reads: Of each slice of each node: tensor -> the row before which it reads.
            Nodes stand behind those that make what they read; all have as many slices.
        makes: Of each node: tensor -> the row before which each slice of it ends.
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
    """How many slices make all rows before one, or before the tensor's end."""
    enough = (number for number, end in enumerate(stops, 1) if end >= stop)
    return next(enough, len(stops))
