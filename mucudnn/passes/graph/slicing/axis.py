"""What can be cut along an axis of a step's data: its batch, or the images' height.

Along the batch, rows of a tensor are bytes in a row, and a slice of a node reads the
same samples of all that it reads. Along the height rows of a tensor lie apart, and a
strip of a node reads some rows more where its windows reach over. Which of both is a
value that the pass is given; all else is the same.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mucudnn.arguments import an_integer
from mucudnn.ir.graph import Graph, Node, Role, TensorSpec
from mucudnn.ir.strips import HEIGHT
from mucudnn.ir.tensor import INTEGERS, ITEMSIZE
from mucudnn.ir.traits import Batch

__all__ = [
    "SAMPLES",
    "Along",
    "along_batch",
    "along_height",
    "batch_of",
    "cut_as",
    "cuttable",
]

SAMPLES = 0
"""The axis of the batch."""


@dataclass(frozen=True, slots=True)
class Along:
    """An axis that a step is cut along.

    Attributes:
        axis: `SAMPLES`, or `HEIGHT`: the first axis of images.
        size: Samples; or rows of the smallest images that can be cut.
        unit: Of the height: in how many equal parts all images can be cut, so that rows
            of one lie over whole rows of another. Samples, of the batch.
    """

    axis: int
    size: int
    unit: int

    def of(self, node: Node) -> Batch | None:
        """How a node says it is cut along it."""
        return node.traits.batch if self.axis == SAMPLES else node.traits.strips

    def carries(self, spec: TensorSpec) -> bool:
        """Whether a tensor that is fed to a step has rows along it."""
        if self.axis == SAMPLES:
            return spec.shape[:1] == (self.size,)
        return len(spec.shape) > HEIGHT

    def cuts(self, spec: TensorSpec) -> bool:
        """Whether a tensor that a node works on by rows is one of those."""
        if self.axis == SAMPLES:
            return bool(spec.shape) and spec.shape[0] % self.size == 0
        return len(spec.shape) > HEIGHT


def along_batch(graph: Graph, batch: int | None = None) -> Along:
    """The batch of a graph, of so many samples if that is known."""
    size = batch_of(graph) if batch is None else an_integer("batch", batch, least=1)
    return Along(SAMPLES, size, size)


def along_height(graph: Graph) -> Along:
    """The height of a graph's images, or the depth of its volumes.

    Raises:
        ValueError: Nothing in it can be cut along that, or images are channels last.
    """
    if any(spec.layout != "NCHW" for spec in graph.tensors.values()):
        raise ValueError(
            "images are cut along their height where channels come first; this step "
            "has channels last: give it the layout NCHW"
        )
    any_size = Along(HEIGHT, 1, 1)
    able = cuttable(graph, any_size)
    heights = set()
    for node in graph.nodes:
        how = cut_as(graph.tensors, node, any_size) if node.name in able else None
        axes = (
            zip(node.tensors, (*how.inputs, *how.outputs), strict=True) if how else ()
        )
        heights |= {
            graph.tensors[t].shape[axis] for t, axis in axes if axis is not None
        }
    if not heights:
        raise ValueError(
            "the graph has no images, (N, C, *spatial), that can be cut into strips; "
            "ask for a number of parts of its batch"
        )
    return Along(HEIGHT, max(heights), math.gcd(*heights))


def batch_of(graph: Graph) -> int:
    """Samples of a graph: the first axis of its first input that has one.

    Raises:
        ValueError: No input has an axis.
    """
    for spec in graph.with_role(Role.INPUT):
        if spec.shape:
            return spec.shape[0]
    raise ValueError("no input of the graph has a batch; say how many samples it has")


def cuttable(graph: Graph, along: Along) -> frozenset[str]:
    """Nodes that can be cut, as they are or in pieces, and read something of the data.

    What follows from weights alone has rows as well, but none for each sample.
    """
    fed_to_steps = graph.with_role(Role.INPUT, Role.BORROWED)
    carrying = {spec.name for spec in fed_to_steps if along.carries(spec)}
    found = set()
    for node in graph.nodes:
        fed = [name for name in node.inputs if name in carrying]
        if not fed:
            continue
        how = cut_as(graph.tensors, node, along)
        if how is not None:
            axes = zip(node.inputs, how.inputs, strict=True)
            if any(axis is not None and name in carrying for name, axis in axes):
                found.add(node.name)
        elif node.traits.pieces is not None:
            found.add(node.name)
        carrying.update(_carried(graph, node, fed, how, along))
    return frozenset(found)


def _carried(
    graph: Graph, node: Node, fed: list[str], how: Batch | None, along: Along
) -> set[str]:
    """Results that have rows of the data as well."""
    tensors = graph.tensors
    if along.axis == SAMPLES:
        lengths = {tensors[name].shape[:1] for name in fed}
        return {name for name in node.outputs if tensors[name].shape[:1] in lengths}
    if how is not None:
        axes = zip(node.outputs, how.outputs, strict=True)
        return {name for name, axis in axes if axis is not None}
    samples = {tensors[name].shape[:1] for name in fed}
    return {
        name
        for name in node.outputs
        if along.cuts(tensors[name]) and tensors[name].shape[:1] in samples
    }


def cut_as(tensors: Mapping[str, TensorSpec], node: Node, along: Along) -> Batch | None:
    """How a node is cut; None if it stays whole.

    Of the batch rows must be bytes in a row: it is the slowest axis of dense tensors.
    Strips of a node that reads the same rows of all it reads have as many of each.
    """
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
    if along.axis == SAMPLES:
        rows = all(axis == SAMPLES and along.cuts(spec) for spec, axis in cut)
        return how if rows else None
    heights = {spec.shape[axis] for spec, axis in cut}
    return how if how.reach is not None or len(heights) == 1 else None


def _dense(spec: TensorSpec) -> bool:
    known = spec.dtype in ITEMSIZE or spec.dtype in INTEGERS
    return known and replace(spec, storage_bytes=None).nbytes == spec.nbytes
