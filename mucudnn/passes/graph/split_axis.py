"""Find where a graph can be cut along the batch or height, and into how many parts."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mucudnn.arguments import check_integer, check_number
from mucudnn.ir.graph import Graph, Node
from mucudnn.ir.strips import HEIGHT
from mucudnn.ir.tensor import INTEGERS, ITEMSIZE, Role, TensorSpec
from mucudnn.ir.traits import Batch, Operands


def pieces_of(
    tensors: Mapping[str, TensorSpec], node: Node
) -> tuple[tuple[TensorSpec, ...], tuple[Node, ...]]:
    """Return a node's intermediate tensors and pieces; both empty if it has none."""
    make = node.traits.decomposition
    if make is None:
        return (), ()
    inputs = tuple(tensors[name] for name in node.inputs)
    outputs = tuple(tensors[name] for name in node.outputs)
    between, pieces = make(Operands(node.name, inputs, outputs, node.attrs))
    return between, tuple(
        replace(piece, name=f"{node.name}:{piece.name}", phase=node.phase)
        for piece in pieces
    )


# Nodes that can be split along an axis of the data: the batch or the images' height.
#
# Along the batch, rows of a tensor are contiguous, and a slice of a node reads the same
# samples of all its inputs. Along the height, rows are strided, and a spatial tile
# reads a halo of further rows where its windows overlap.


SAMPLES = 0
"""Batch axis."""


@dataclass(frozen=True, slots=True)
class SplitAxis:
    """Axis that a step is split along.

    Attributes:
        axis: `SAMPLES`, or `HEIGHT`, the first axis of images.
        size: Number of samples, or rows of the largest image that can be split.
        unit: Number of samples, or the number of equal parts that all images can be
            split into, so that rows of one correspond to whole rows of another.
    """

    axis: int
    size: int
    unit: int

    def of(self, node: Node) -> Batch | None:
        """Return a node's own rule for this axis."""
        return node.traits.batch if self.axis == SAMPLES else node.traits.strips

    def carries(self, spec: TensorSpec) -> bool:
        """Return whether a tensor that is fed to a step has rows along the axis."""
        if self.axis == SAMPLES:
            return spec.shape[:1] == (self.size,)
        return len(spec.shape) > HEIGHT

    def cuts(self, spec: TensorSpec) -> bool:
        """Return whether a tensor inside a step can have rows along the axis."""
        if self.axis == SAMPLES:
            return bool(spec.shape) and spec.shape[0] % self.size == 0
        return len(spec.shape) > HEIGHT


def along_batch(graph: Graph, batch: int | None = None) -> SplitAxis:
    """Return the batch axis of a graph, with `batch` samples if given."""
    size = batch_of(graph) if batch is None else check_integer("batch", batch, least=1)
    return SplitAxis(SAMPLES, size, size)


def along_height(graph: Graph) -> SplitAxis:
    """Return the height axis of a graph's images, or the depth of its volumes.

    Raises:
        ValueError: No image can be split, or images have channels last.
    """
    if any(spec.layout != "NCHW" for spec in graph.tensors.values()):
        raise ValueError(
            "spatial tiles need channels-first images, and this step has channels "
            "last; use the layout NCHW"
        )
    any_size = SplitAxis(HEIGHT, 1, 1)
    heights = set()
    for name in cuttable(graph, any_size):
        node = graph.by_name[name]
        if (how := split_rule(graph.tensors, node, any_size)) is not None:
            axes = zip(node.tensors, (*how.inputs, *how.outputs), strict=True)
            cut = ((t, axis) for t, axis in axes if axis is not None)
            heights |= {graph.tensors[t].shape[axis] for t, axis in cut}
    if not heights:
        raise ValueError(
            "the graph has no images, (N, C, *spatial), that can be divided into "
            "spatial tiles; pass a number of micro-batches"
        )
    return SplitAxis(HEIGHT, max(heights), math.gcd(*heights))


def batch_of(graph: Graph) -> int:
    """Return a graph's batch size: the first axis of its first non-scalar input."""
    for spec in graph.with_role(Role.INPUT):
        if spec.shape:
            return spec.shape[0]
    raise ValueError(
        "no input of the graph has a batch axis; pass the number of samples"
    )


def cuttable(graph: Graph, along: SplitAxis) -> frozenset[str]:
    """Return the nodes that depend on the data and can be split, perhaps decomposed."""
    tensors = graph.tensors
    fed_to_steps = graph.with_role(Role.INPUT, Role.BORROWED)
    carrying = {spec.name for spec in fed_to_steps if along.carries(spec)}
    found = set()
    for node in graph.nodes:
        # Tensors derived from weights alone may have as many rows, but not one per
        # sample.
        fed = [name for name in node.inputs if name in carrying]
        if not fed:
            continue
        how = split_rule(tensors, node, along)
        if how is not None:
            axes = zip(node.inputs, how.inputs, strict=True)
            if any(axis is not None and name in carrying for name, axis in axes):
                found.add(node.name)
        elif node.traits.decomposition is not None:
            found.add(node.name)
        # Which results have rows of the data, too?
        if along.axis != SAMPLES and how is not None:
            axes = zip(node.outputs, how.outputs, strict=True)
            carrying.update(name for name, axis in axes if axis is not None)
            continue
        samples = {tensors[name].shape[:1] for name in fed}
        made = [name for name in node.outputs if tensors[name].shape[:1] in samples]
        if along.axis != SAMPLES:
            made = [name for name in made if along.cuts(tensors[name])]
        carrying.update(made)
    return frozenset(found)


def split_rule(
    tensors: Mapping[str, TensorSpec], node: Node, along: SplitAxis
) -> Batch | None:
    """Return the rule by which a node is split; None if it stays whole."""
    how = along.of(node)
    if how is None or (how.averaged and how.sliced is None):
        return None
    axes = (*how.inputs, *how.outputs)
    cut = [
        (tensors[name], axis)
        for name, axis in zip(node.tensors, axes, strict=True)
        if axis is not None
    ]
    if not cut or not all(_dense(spec) for spec, _ in cut):
        return None
    # Samples must be contiguous: the batch is the first axis of dense tensors. Images
    # of a node without halo must all have the same height.
    if along.axis == SAMPLES:
        rows = all(axis == SAMPLES and along.cuts(spec) for spec, axis in cut)
        return how if rows else None
    heights = {spec.shape[axis] for spec, axis in cut}
    return how if how.reach is not None or len(heights) == 1 else None


def _dense(spec: TensorSpec) -> bool:
    known = spec.dtype in ITEMSIZE or spec.dtype in INTEGERS
    return known and replace(spec, storage_bytes=None).nbytes == spec.nbytes


# Order the slices of a chain of nodes such that few rows are alive at once.
#
# Slices run as in a line buffer: for each further slice of the last node, the nodes
# before it compute exactly the rows still missing, and no row twice. A node without
# halo needs the same slice of its producer; a node with overlapping windows also needs
# rows of the next slice, which is computed first, and so on backwards.


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
        # Every node does one slice more, and all that later nodes need for theirs.
        goals = [max(index + 1, already) for already in done]
        # Readers come behind makers, so that one pass backwards sets all goals.
        for position in reversed(range(len(reads))):
            if goals[position] == done[position]:
                continue
            for name, stop in reads[position][goals[position] - 1].items():
                if name in ends:
                    maker, stops = ends[name]
                    enough = (n for n, end in enumerate(stops, 1) if end >= stop)
                    goals[maker] = max(goals[maker], next(enough, len(stops)))
        for position, goal in enumerate(goals):
            yield from ((position, number) for number in range(done[position], goal))
        done = goals


# Number of parts of each node such that slices stay below a limit in bytes.
#
# Early layers of a network are large and late ones small, so each node gets the
# smallest power of two that keeps its tensors below the limit. Short stretches of
# smaller nodes are split like their neighbours, as joining and splitting rows again
# costs copies.


Parts = Mapping[str, int] | Callable[[Node], int] | int
"""Number of parts: by node name, by a function of the node, or the same for all."""

_WINDOW = 10
"""Shorter stretches of nodes with fewer parts are split like their neighbours."""

_WINDOW_OF_STRIPS = 3
"""The same for spatial tiles: fewer parts also mean fewer halo rows read twice."""

_OF_STEP = (Role.ACTIVATION, Role.GRADIENT, Role.INPUT)


def parts_by_bytes(
    graph: Graph,
    limit: float,
    *,
    most: int | None = None,
    along: SplitAxis | None = None,
) -> Mapping[str, int]:
    """Return the number of parts of each node that keeps slices below a limit in bytes.

    There are at most `most` parts, by default the number of samples.

    Raises:
        ValueError: The limit is not positive.
    """
    check_number("the limit of a slice's bytes", limit, 0, above=True, finite=False)
    along = along_batch(graph) if along is None else along
    window = _WINDOW if along.axis == SAMPLES else _WINDOW_OF_STRIPS
    size = along.size
    most = size if most is None else min(size, check_integer("most", most, least=1))
    splittable = cuttable(graph, along)
    sizes = _rows_bytes(graph, splittable, along)
    needed = [1] * len(graph.nodes)
    for i, node in enumerate(graph.nodes):
        while node.name in splittable and needed[i] < most:
            if sizes[i] / needed[i] <= limit:
                break
            needed[i] = min(2 * needed[i], most)

    def windows(values: Sequence[int]) -> Iterator[Sequence[int]]:
        for i in range(len(values)):
            yield values[max(0, i - window) : i + window + 1]

    # The greatest and then the least of each window close gaps, and widen nothing.
    closed = list(map(min, windows(list(map(max, windows(needed))))))
    return {
        node.name: max(needed[i], closed[i])
        for i, node in enumerate(graph.nodes)
        if node.name in splittable
    }


def asked_of(parts: Parts) -> Callable[[Node], int]:
    """Return a function from a node to its requested number of parts.

    Raises:
        ValueError: A number is below 1; for a function, raised when it is called.
        TypeError: A number is not an integer.
    """
    if isinstance(parts, Mapping):
        for number in parts.values():
            check_integer("parts", number, least=1)
        return lambda node: parts.get(node.name, 1)
    if callable(parts):
        return lambda node: check_integer("parts", parts(node), least=1)
    number = check_integer("parts", parts, least=1)
    return lambda node: number


def largest_rows(graph: Graph, along: SplitAxis | None = None) -> int:
    """Return the bytes of the largest tensor that a node that can be split touches."""
    along = along_batch(graph) if along is None else along
    return max(_rows_bytes(graph, cuttable(graph, along), along), default=0)


def _rows_bytes(
    graph: Graph, splittable: frozenset[str], along: SplitAxis
) -> list[int]:
    """Return the bytes of each node's largest tensor with rows; 0 for other nodes."""
    tensors = graph.tensors

    def rows(node: Node) -> Iterator[TensorSpec]:
        how = split_rule(tensors, node, along)
        if how is None:  # the node is decomposed
            yield from filter(along.cuts, (tensors[name] for name in node.tensors))
            return
        for name, axis in zip(node.tensors, (*how.inputs, *how.outputs), strict=True):
            if axis is not None:
                yield tensors[name]

    return [
        max((s.nbytes for s in rows(node) if s.role in _OF_STEP), default=0)
        if node.name in splittable
        else 0
        for node in graph.nodes
    ]
