"""Nodes that can be split along an axis of the data: the batch or the images' height.

Along the batch, rows of a tensor are contiguous, and a slice of a node reads the same
samples of all its inputs. Along the height, rows are strided, and a spatial tile reads
a halo of further rows where its windows overlap.
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
"""Batch axis."""


@dataclass(frozen=True, slots=True)
class Along:
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


def along_batch(graph: Graph, batch: int | None = None) -> Along:
    """Return the batch axis of a graph, with `batch` samples if given."""
    size = batch_of(graph) if batch is None else an_integer("batch", batch, least=1)
    return Along(SAMPLES, size, size)


def along_height(graph: Graph) -> Along:
    """Return the height axis of a graph's images, or the depth of its volumes.

    Raises:
        ValueError: No image can be split, or images have channels last.
    """
    if any(spec.layout != "NCHW" for spec in graph.tensors.values()):
        raise ValueError(
            "images are cut along their height where channels come first; this step "
            "has channels last: give it the layout NCHW"
        )
    any_size = Along(HEIGHT, 1, 1)
    splittable = cuttable(graph, any_size)
    heights = set()
    for node in graph.nodes:
        how = cut_as(graph.tensors, node, any_size) if node.name in splittable else None
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
    """Return a graph's batch size: the first axis of its first non-scalar input."""
    for spec in graph.with_role(Role.INPUT):
        if spec.shape:
            return spec.shape[0]
    raise ValueError("no input of the graph has a batch; say how many samples it has")


def cuttable(graph: Graph, along: Along) -> frozenset[str]:
    """Return the nodes that can be split, whole or decomposed, and depend on the data.

    Tensors derived from weights alone may have as many rows, but not one per sample.
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
    """Return the results that have rows of the data."""
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
    """Return the rule by which a node is split; None if it stays whole.

    Rows of the batch must be contiguous, so the batch is the first axis of dense
    tensors. Images of a node without halo must all have the same height.
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
